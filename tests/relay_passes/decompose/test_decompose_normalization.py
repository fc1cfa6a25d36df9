# SPDX-License-Identifier: Apache-2.0
"""Pass ``DecomposeNormalization``: its example, what stays, and numbers against references."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from reduction_checks import module_of, numpy_dtype, run
from tvm import relax, tirx
from tvm.relax.frontend.onnx import from_onnx
from tvm.script import ir as I
from tvm.script import relax as R

import relay_passes
from relay_passes import CoalesceReduction, DecomposeNormalization
from tests.selection import in_turns
from tests.targets import compile_unchecked

REDUCTIONS = {"sum", "mean", "max"}
ELEMENTWISE = set(
    """abs add astype divide equal exp expand_dims flatten gather_elements isinf log multiply
    negative power reshape rsqrt sqrt squeeze subtract take where""".split()
)
PRECISION = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
HALF_EPSILON = {"float64": 0, "float32": 0, "float16": 2**-11, "bfloat16": 2**-8}


def decompose(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass; check that it leaves its input alone and changes nothing more next time."""
    functions = dict(mod.functions_items())
    once = DecomposeNormalization()(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(DecomposeNormalization()(once), once)
    for name, func in functions.items():
        tvm.ir.assert_structural_equal(once[name].ty, func.ty, map_free_vars=True)
    return once


def ops(mod: tvm.IRModule) -> list[str]:
    """Ops of ``main`` in order."""
    return [
        binding.value.op.name.removeprefix("relax.")
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


def tensor(*shape: object, dtype: str = "float32", name: str = "x") -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def values_of(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.normal(0.5, 1.5, shape).astype(numpy_dtype(dtype))


def compare(actual: np.ndarray, exact: np.ndarray, dtype: str) -> None:
    """Compare with float64 results; 16-bit results may be off by one rounding and a little."""
    assert actual.dtype == numpy_dtype(dtype)
    relative = (
        HALF_EPSILON[dtype] * 1.01 + PRECISION["float64" if dtype == "float64" else "float32"]
    )
    scale = np.abs(exact[np.isfinite(exact)]).max(initial=0)
    np.testing.assert_allclose(
        actual.astype("float64"), exact, rtol=relative, atol=relative * 0.01 * scale + 1e-7
    )


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        gamma: R.Tensor((3,), "float32"),
        beta: R.Tensor((3,), "float32"),
    ):
        with R.dataflow():
            lv = R.nn.softmax(x, axis=1)
            gv = R.nn.layer_norm(lv, gamma, beta, axes=[1], epsilon=1e-5)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        gamma: R.Tensor((3,), "float32"),
        beta: R.Tensor((3,), "float32"),
    ):
        with R.dataflow():
            lv1 = R.max(x, axis=[1], keepdims=True)
            lv2 = R.subtract(x, lv1)
            lv3 = R.exp(lv2)
            lv4 = R.sum(lv3, axis=[1], keepdims=True)
            lv = R.divide(lv3, lv4)
            lv5 = R.mean(lv, axis=[1], keepdims=True)
            lv6 = R.subtract(lv, lv5)
            lv7 = R.multiply(lv6, lv6)
            lv8 = R.mean(lv7, axis=[1], keepdims=True)
            lv9 = R.add(lv8, R.const(1e-5, "float32"))
            lv10 = R.rsqrt(lv9)
            lv11 = R.multiply(lv6, lv10)
            lv12 = R.multiply(lv11, gamma)
            gv = R.add(lv12, beta)
            R.output(gv)
        return gv


def test_the_example_of_the_docstring() -> None:
    tvm.ir.assert_structural_equal(decompose(Before), Expected)


def test_pass_has_the_name_of_its_file_and_is_exported() -> None:
    assert DecomposeNormalization().info.name == "DecomposeNormalization"
    assert relay_passes.DecomposeNormalization is DecomposeNormalization
    file = inspect.getmodule(DecomposeNormalization).__name__
    assert file == "relay_passes.decompose.decompose_normalization"


# One case an op: a call of parameters, and the same in numpy.


def _moments(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    variance = x.var(axis=axes, keepdims=True)
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(variance + epsilon)


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        return e / e.sum(axis=axis, keepdims=True)


def _group_norm(x: np.ndarray, groups: int) -> np.ndarray:
    split = x.reshape(len(x), groups, -1)
    return _moments(split, (2,), 1e-5).reshape(x.shape)


def check(
    make: Callable[..., relax.Expr],
    reference: Callable[..., np.ndarray | tuple],
    arrays: list[np.ndarray],
    dtype: str = "float32",
) -> tvm.IRModule:
    """Decompose and coalesce a call of arrays, compare with the reference; return the module."""
    params = [
        tensor(*a.shape, dtype=str(a.dtype), name=f"x{index}") for index, a in enumerate(arrays)
    ]
    mod = decompose(module_of(make(*params), *params))
    assert set(ops(mod)) <= REDUCTIONS | ELEMENTWISE
    coalesced = CoalesceReduction()(mod)
    assert not set(ops(coalesced)) & REDUCTIONS
    exact = reference(*(a.astype("float64") if a.dtype.kind not in "iu" else a for a in arrays))
    actual = run(coalesced, *arrays)
    if isinstance(exact, tuple):
        for one, other in zip(actual, exact, strict=True):
            compare(one, other, dtype)
    else:
        compare(actual, np.asarray(exact), dtype)
    return mod


shapes = st.lists(st.sampled_from([1, 2, 3, 5, 7]), min_size=1, max_size=4)
dtypes = st.sampled_from(["float64", "float32", "float16", "bfloat16"])
seeds = st.integers(0, 99)


@settings(max_examples=settings.default.max_examples // 4)
@given(shapes, dtypes, st.booleans(), seeds, st.data())
def test_softmax(shape: list[int], dtype: str, log: bool, seed: int, draw: st.DataObject) -> None:
    axis = draw.draw(st.integers(-len(shape), len(shape) - 1))
    op = relax.op.nn.log_softmax if log else relax.op.nn.softmax
    x = values_of(np.random.default_rng(seed), *shape, dtype=dtype)

    def reference(x: np.ndarray) -> np.ndarray:
        return np.log(_softmax(x, axis)) if log else _softmax(x, axis)

    check(lambda x: op(x, axis), reference, [x], dtype)


@settings(max_examples=settings.default.max_examples // 5)
@given(shapes, dtypes, st.booleans(), st.sampled_from([0.0, 1000.0]), seeds, st.data())
def test_layer_norm(
    shape: list[int], dtype: str, rms: bool, offset: float, seed: int, draw: st.DataObject
) -> None:
    count = draw.draw(st.integers(1, len(shape)))
    first = draw.draw(st.integers(0, len(shape) - count))
    axes = [*range(first, first + count)]
    rng = np.random.default_rng(seed)
    x = values_of(rng, *shape, dtype=dtype)
    if dtype == "float64":
        x += offset
    inner = [shape[axis] for axis in axes]
    gamma, beta = (values_of(rng, *inner, dtype=dtype) for _ in range(2))
    spread = [n if axis in axes else 1 for axis, n in enumerate(shape)]
    if rms:
        check(
            lambda x, g: relax.op.nn.rms_norm(x, g, axes, 1e-3),
            lambda x, g: (
                x
                / np.sqrt((x * x).mean(axis=tuple(axes), keepdims=True) + 1e-3)
                * g.reshape(spread)
            ),
            [x, gamma],
            dtype,
        )
    else:
        check(
            lambda x, g, b: relax.op.nn.layer_norm(x, g, b, axes, 1e-3),
            lambda x, g, b: _moments(x, tuple(axes), 1e-3) * g.reshape(spread) + b.reshape(spread),
            [x, gamma, beta],
            dtype,
        )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norms_by_channel(dtype: str) -> None:
    rng = np.random.default_rng(1)
    x = values_of(rng, 2, 6, 3, 5, dtype=dtype)
    gamma, beta, mean, variance = (values_of(rng, 6, dtype=dtype) for _ in range(4))
    wide = [1, 6, 1, 1]
    check(
        lambda x, g, b: relax.op.nn.group_norm(x, g, b, 3, 1, [2, 3], 1e-5),
        lambda x, g, b: _group_norm(x, 3) * g.reshape(wide) + b.reshape(wide),
        [x, gamma, beta],
        dtype,
    )
    check(
        lambda x, g, b: relax.op.nn.instance_norm(x, g, b, 1, [2, 3], 1e-5),
        lambda x, g, b: _moments(x, (2, 3), 1e-5) * g.reshape(wide) + b.reshape(wide),
        [x, gamma, beta],
        dtype,
    )
    check(
        lambda *p: relax.op.nn.batch_norm(*p, axis=1, momentum=0.25, training=True),
        lambda x, g, b, m, v: (
            _moments(x, (0, 2, 3), 1e-5) * g.reshape(wide) + b.reshape(wide),
            0.75 * m + 0.25 * x.mean(axis=(0, 2, 3)),
            0.75 * v + 0.25 * x.var(axis=(0, 2, 3)),
        ),
        [x, gamma, beta, mean, variance],
        dtype,
    )


def test_scale_and_shift_are_left_out_where_attributes_say_so() -> None:
    x, gamma, beta = tensor(2, 4), tensor(4, name="g"), tensor(4, name="b")
    call = relax.op.nn.layer_norm(x, gamma, beta, [1], center=False, scale=False)
    mod = decompose(module_of(call, x, gamma, beta))
    assert ops(mod) == ["mean", "subtract", "multiply", "mean", "add", "rsqrt", "multiply"]


@settings(max_examples=settings.default.max_examples // 7)
@given(shapes, dtypes, st.booleans(), st.booleans(), seeds, st.data())
def test_variance(
    shape: list[int], dtype: str, root: bool, keepdims: bool, seed: int, draw: st.DataObject
) -> None:
    axes = sorted(draw.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    op, fold = (relax.op.std, np.std) if root else (relax.op.variance, np.var)
    x = values_of(np.random.default_rng(seed), *shape, dtype=dtype)
    check(
        lambda x: op(x, axes, keepdims),
        lambda x: fold(x, axis=tuple(axes), keepdims=keepdims),
        [x],
        dtype,
    )


@pytest.mark.parametrize(("rank", "kind"), in_turns([1, 2, 3], ["avg", "max", "adaptive_avg"]))
def test_pools_of_whole_images(kind: str, rank: int) -> None:
    image = [5, 3, 4][:rank]
    axes = tuple(range(2, 2 + rank))
    pool = getattr(relax.op.nn, f"{kind}_pool{rank}d")
    argument = (1,) * rank if kind == "adaptive_avg" else tuple(image)
    fold = np.max if kind == "max" else np.mean
    mod = check(
        lambda x: pool(x, argument),
        lambda x: fold(x, axis=axes, keepdims=True),
        [values_of(np.random.default_rng(rank), 2, 3, *image)],
    )
    assert ops(mod) == ["max" if kind == "max" else "mean"]


def test_pools_of_other_layouts() -> None:
    x = values_of(np.random.default_rng(0), 2, 3, 4, 6)
    mod = check(
        lambda x: relax.op.nn.adaptive_avg_pool2d(x, 1, layout="NHWC"),
        lambda x: x.mean(axis=(1, 2), keepdims=True),
        [x],
    )
    assert ops(mod) == ["mean"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("shape", "dtype"), in_turns([(7,), (4, 7), (4, 5, 3)], ["float32", "float16"])
)
def test_cross_entropy(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(5)
    x, y = (values_of(rng, *shape, dtype=dtype) for _ in range(2))
    batch = shape[0] if len(shape) > 1 else 1
    check(relax.op.nn.cross_entropy_with_logits, lambda x, y: -(x * y).sum() / batch, [x, y], dtype)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("shape", "reduction", "weighted", "ignore"),
    in_turns([(6, 5), (2, 5, 3, 2)], ["none", "sum", "mean"], [False, True], [-100, 2]),
)
def test_nll_loss(shape: tuple[int, ...], reduction: str, weighted: bool, ignore: int) -> None:
    rng = np.random.default_rng(7)
    x = values_of(rng, *shape)
    x.flat[::7] = -np.inf  # The class is not asked for, or ignored.
    targets = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    targets.flat[1] = ignore
    asked = np.expand_dims(np.where(targets == ignore, 0, targets), 1)
    np.put_along_axis(x, asked, rng.normal(size=asked.shape).astype("float32"), 1)
    weights = values_of(rng, shape[1])

    def reference(x: np.ndarray, t: np.ndarray, *w: np.ndarray) -> np.ndarray:
        weight = np.where(t == ignore, 0, w[0][asked[:, 0]] if w else 1.0)
        picked = -np.take_along_axis(x, asked, 1)[:, 0] * weight
        sums = {"none": picked, "sum": picked.sum(), "mean": picked.sum() / weight.sum()}
        return np.asarray(sums[reduction])

    check(
        lambda x, t, *w: relax.op.nn.nll_loss(
            x, t, w[0] if w else None, reduction=reduction, ignore_index=ignore
        ),
        reference,
        [x, targets, *([weights] if weighted else [])],
    )


def test_rows_of_infinities() -> None:
    x = np.array([[-np.inf] * 3, [-np.inf, 1, 2], [np.inf, 1, 2], [np.nan, 1, 2]], "float32")
    check(lambda x: relax.op.nn.softmax(x, 1), lambda x: _softmax(x, 1), [x])


@pytest.mark.slow
def test_symbolic_batch() -> None:
    n = tirx.Var("n", "int64")
    x = tensor(n, 6, 5)
    gamma = tensor(6, name="gamma")
    both = relax.op.nn.group_norm(x, gamma, gamma, 2, 1, [2])
    mod = decompose(module_of(relax.op.nn.softmax(both, 2), x, gamma))
    assert set(ops(mod)) <= REDUCTIONS | ELEMENTWISE
    coalesced = CoalesceReduction()(mod)
    assert not set(ops(coalesced)) & REDUCTIONS
    rng = np.random.default_rng(3)
    for batch in (1, 3):
        values, weights = values_of(rng, batch, 6, 5), values_of(rng, 6)
        wide = weights.astype("float64").reshape(1, 6, 1)
        exact = _softmax(_group_norm(values.astype("float64"), 2) * wide + wide, 2)
        compare(run(coalesced, values, weights), exact, "float32")


@pytest.mark.parametrize(
    "make",
    [
        lambda: relax.op.nn.softmax(tensor(2, 0)),
        lambda: relax.op.nn.softmax(relax.Var("x", relax.TensorType(None, "float32", ndim=2))),
        lambda: relax.op.nn.adaptive_avg_pool2d(tensor(2, 3, 4, 4), 2),
        lambda: relax.op.nn.avg_pool2d(tensor(2, 3, 4, 4), (4, 4), padding=(1, 1), strides=(4, 4)),
        lambda: relax.op.nn.max_pool2d(tensor(2, 3, 4, 4), (3, 3), strides=(2, 2)),
        lambda: relax.op.nn.relu(tensor(2, 3)),
        lambda: relax.op.sum(tensor(2, 3)),
        lambda: relax.op.sqrt(relax.op.abs(tensor(2, 3))),
    ],
)
def test_what_stays(make: Callable[[], relax.Call]) -> None:
    call = make()
    free = relax.analysis.free_vars(call)
    mod = module_of(call, *free)
    tvm.ir.assert_structural_equal(decompose(mod), mod)


def test_more_that_stays() -> None:
    n = tirx.Var("n", "int64")
    x, y = tensor(n, 3), tensor(n, 3, name="y")
    mod = module_of(relax.op.nn.cross_entropy_with_logits(x, y), x, y)
    tvm.ir.assert_structural_equal(decompose(mod), mod)
    x, gamma = tensor(3, 4), tensor(4, 3, name="gamma")
    mod = module_of(relax.op.nn.rms_norm(x, gamma, [1, 0]), x, gamma)
    tvm.ir.assert_structural_equal(decompose(mod), mod)


def test_functions_of_other_passes_stay() -> None:
    @I.ir_module
    class Marked:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"Primitive": True})
            gv = R.nn.softmax(x)
            return gv

        @R.function
        def other(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"Codegen": "somewhere"})
            gv = R.nn.softmax(x)
            return gv

    tvm.ir.assert_structural_equal(decompose(Marked), Marked)


def test_constants_are_reshaped_and_rounded_at_once() -> None:
    x = tensor(2, 4, 3, dtype="float16")
    gamma = relax.const(np.arange(1, 5, dtype="float16"))
    mod = decompose(module_of(relax.op.nn.group_norm(x, gamma, gamma, 2, 1, [2]), x))
    assert ops(mod).count("reshape") == 2
    assert ops(mod).count("astype") == 2


def test_one_mean_serves_the_variance_too() -> None:
    @I.ir_module
    class Both:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                lv = R.mean(x, axis=[1], keepdims=True)
                lv1 = R.variance(x, axis=[-1], keepdims=True)
                gv = R.add(lv, lv1)
                R.output(gv)
            return gv

    assert ops(decompose(Both)) == ["mean", "subtract", "multiply", "mean", "add"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loss", ["softmax", "log_softmax", "cross_entropy", "nll_loss"])
def test_gradients_hold_only_reductions_that_are_coalesced(loss: str) -> None:
    n, k = 4, 5
    x = tensor(n, k)
    y = tensor(n, dtype="int64", name="y") if loss == "nll_loss" else tensor(n, k, name="y")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            if loss == "softmax":
                out = relax.op.multiply(builder.emit(relax.op.nn.softmax(x)), y)
                out = relax.op.sum(builder.emit(out))
            else:
                log = builder.emit(relax.op.nn.log_softmax(x))
                if loss == "log_softmax":
                    out = relax.op.sum(builder.emit(relax.op.multiply(log, y)))
                elif loss == "cross_entropy":
                    out = relax.op.nn.cross_entropy_with_logits(log, y)
                else:
                    out = relax.op.nn.nll_loss(log, y)
            result = builder.emit_output(builder.emit(out))
        builder.emit_func_output(result)
    mod = relax.transform.Gradient("main", require_grads=[x])(builder.get())
    mod = tvm.IRModule({"main": mod["main_adjoint"].with_attr("global_symbol", "main")})
    coalesced = CoalesceReduction()(decompose(relax.transform.DeadCodeElimination()(mod)))
    known = ELEMENTWISE | {"tvm_fusion.coalesced_reduce", "broadcast_to", "ones", "zeros"}
    assert set(ops(coalesced)) <= known
    rng = np.random.default_rng(2)
    values = values_of(rng, n, k)
    others = rng.integers(0, k, n) if loss == "nll_loss" else values_of(rng, n, k)
    value, (gradient,) = _nested(coalesced, values, others)
    step = rng.normal(size=(n, k))
    width = 1e-4
    ends = [_loss(loss, values + sign * width * step, others) for sign in (-1, 1)]
    assert value == pytest.approx(_loss(loss, values.astype("float64"), others), rel=1e-5)
    slope = (ends[1] - ends[0]) / (2 * width)
    assert (gradient * step).sum() == pytest.approx(slope, rel=1e-3, abs=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("reduction", "shape"), in_turns(["none", "sum", "mean"], [(6, 5), (2, 5, 3, 2)])
)
def test_gradient_of_nll_loss(shape: tuple[int, ...], reduction: str) -> None:
    rng = np.random.default_rng(9)
    x, weights = values_of(rng, *shape), values_of(rng, shape[1])
    targets = rng.integers(0, shape[1], (shape[0], *shape[2:])).astype("int32")
    targets.flat[2] = 3
    upstream = values_of(rng, *(targets.shape if reduction == "none" else ()))

    def reference(o: np.ndarray, x: np.ndarray, t: np.ndarray, w: np.ndarray) -> np.ndarray:
        weight = np.where(t == 3, 0, w[t])
        slope = -o * weight / (weight.sum() if reduction == "mean" else 1)
        result = np.zeros(x.shape)
        np.put_along_axis(result, np.expand_dims(t, 1), np.expand_dims(slope, 1), 1)
        return result

    check(
        lambda o, x, t, w: relax.op.grad.nll_loss_backward(o, x, t, w, reduction, ignore_index=3),
        reference,
        [upstream, x, targets, weights],
    )


def _nested(mod: tvm.IRModule, *inputs: np.ndarray) -> tuple:
    machine = relax.VirtualMachine(compile_unchecked(relax.transform.LegalizeOps()(mod)), tvm.cpu())
    value, gradients = machine["main"](*map(tvm.runtime.tensor, inputs))
    return value.numpy(), tuple(each.numpy() for each in gradients)


def _loss(loss: str, x: np.ndarray, y: np.ndarray) -> float:
    if loss == "softmax":
        return float((_softmax(x, 1) * y).sum())
    log = np.log(_softmax(x, 1))
    if loss == "log_softmax":
        return float((log * y).sum())
    if loss == "cross_entropy":
        return float(-(log * y).sum() / len(x))
    return float(-log[np.arange(len(x)), y].mean())


# ONNX: what the importer makes of a node, decomposed and coalesced, beside ONNX Runtime.


def _model(node: onnx.NodeProto, shape: tuple, weights: dict, dtype: str, opset: int) -> bytes:
    kind = TensorProto.FLOAT16 if dtype == "float16" else TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


AXES = {"axes": np.array([1, 3])}
CHANNEL = {name: np.array([0.5, -2, 3, 1.25], "float32") for name in ("scale", "bias")}
ROW = {name: np.array([0.5, -2, 3, 1.25, 7], "float32") for name in ("scale", "bias")}
ONNX_NODES = {
    "Softmax": ({"axis": 1}, {}),
    "LogSoftmax": ({"axis": -1}, {}),
    "LayerNormalization": ({"axis": -1}, ROW),
    "InstanceNormalization": ({}, CHANNEL),
    "GroupNormalization": ({"num_groups": 2}, CHANNEL),
    "ReduceL1": ({"keepdims": 0}, AXES),
    "ReduceL2": ({"keepdims": 1}, AXES),
    "ReduceLogSum": ({"keepdims": 0}, AXES),
    "ReduceLogSumExp": ({"keepdims": 0}, AXES),
    "ReduceSumSquare": ({"keepdims": 1}, AXES),
    "GlobalAveragePool": ({}, {}),
    "GlobalMaxPool": ({}, {}),
    "GlobalLpPool": ({"p": 3}, {}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("special", "name"), in_turns([False, True], ONNX_NODES))
def test_onnx_operators(name: str, special: bool) -> None:
    attributes, weights = ONNX_NODES[name]
    opset = 21 if name == "GroupNormalization" else 18
    node = helper.make_node(name, ["x", *weights], ["y"], **attributes)
    model = _model(node, (2, 4, 3, 5), weights, "float32", opset)
    values = values_of(np.random.default_rng(4), 2, 4, 3, 5)
    if name in ("ReduceLogSum", "GlobalLpPool"):
        values = np.abs(values)
    if special:
        if name.endswith(("Pool", "Normalization")):
            values[0, 1, 2, 3] = np.nan
        values[1, 2] = values[0, :, 1] = -np.inf
        values[1, 0, 0, 0] = np.inf
    mod = CoalesceReduction()(decompose(from_onnx(model, keep_params_in_input=False)))
    assert not set(ops(mod)) & REDUCTIONS
    assert not any(op.startswith("nn.") for op in ops(mod))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (expected,) = session.run(None, {"x": values})
    actual = run(mod, values)
    if name == "GlobalMaxPool" and special:  # ONNX Runtime's maximum forgets a NaN
        expected = values.max(axis=(2, 3), keepdims=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "GlobalLpPool"])
def test_norms_of_16_bits_do_not_overflow_on_the_way(name: str) -> None:
    attributes, weights = ONNX_NODES[name]
    node = helper.make_node(name, ["x", *weights], ["y"], **attributes)
    model = _model(node, (2, 40, 3, 5), weights, "float16", 18)
    values = np.abs(values_of(np.random.default_rng(4), 2, 40, 3, 5)) * 500
    values = (values / 20 if name == "GlobalLpPool" else values).astype("float16")
    exact = values.astype("float64")
    if name == "GlobalLpPool":
        power = float(np.float16(1 / 3))  # The importer rounds it so.
        expected = (exact**3).sum(axis=(2, 3), keepdims=True) ** power
    elif name == "ReduceL2":
        expected = np.sqrt((exact**2).sum(axis=(1, 3), keepdims=True))
    elif name == "ReduceLogSum":
        expected = np.log(exact.sum(axis=(1, 3)))
    else:
        expected = np.logaddexp.reduce(exact, axis=(1, 3))
    mod = CoalesceReduction()(decompose(from_onnx(model, keep_params_in_input=False)))
    compare(run(mod, values), expected, "float16")


def test_instance_normalization_of_16_bits_is_one_chain() -> None:
    weights = {name: value.astype("float16") for name, value in CHANNEL.items()}
    node = helper.make_node("InstanceNormalization", ["x", *weights], ["y"])
    model = _model(node, (2, 4, 3, 5), weights, "float16", 17)
    mod = decompose(from_onnx(model, keep_params_in_input=False))
    assert ops(mod).count("mean") == 2
    values = values_of(np.random.default_rng(8), 2, 4, 3, 5, dtype="float16")
    wide = [weights[name].astype("float64").reshape(1, 4, 1, 1) for name in ("scale", "bias")]
    exact = _moments(values.astype("float64"), (2, 3), 1e-5) * wide[0] + wide[1]
    actual = run(CoalesceReduction()(mod), values)
    assert math.isclose(np.abs(actual - exact).max(), 0, abs_tol=1e-2)
