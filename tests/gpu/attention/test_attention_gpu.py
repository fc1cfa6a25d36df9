# SPDX-License-Identifier: Apache-2.0
"""Attention as one kernel: numbers in OpenCL, structure of CUDA's machine code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from onnx import TensorProto, helper
from relax_on_opencl import RelaxOnOpenCL
from tensor_core_emulation import emulate_tensor_cores
from tvm import IRModule, relax, tirx, transform
from tvm.relax import op
from tvm.target import Target

from relay_passes import ApplyRules, FuseAttention
from schedules.gpu import RULES
from schedules.gpu.attention import tensor_core_attention, tiled_attention
from tests.selection import in_turns

F32 = "float32"
OPENCL = Target({"kind": "opencl", "max_shared_memory_per_block": 49152}, host="llvm")
SMALL = Target({"kind": "opencl"}, host="llvm")
CUDA = {arch: Target({"kind": "cuda", "arch": arch}, host="llvm") for arch in ("sm_80", "sm_90")}

Build = Callable[..., relax.Expr]


def module(build: Build, *inputs: tuple[tuple[int | tirx.Var, ...], str]) -> IRModule:
    """A graph of variables with some shapes and types."""
    builder = relax.BlockBuilder()
    variables = [relax.Var(f"x{k}", relax.TensorType(*each)) for k, each in enumerate(inputs)]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(build(*variables)))
        builder.emit_func_output(result)
    return builder.get()


def scheduled(mod: IRModule, target: Target) -> IRModule:
    """The module after the pass, with kernels."""
    passes = [FuseAttention(), relax.transform.LegalizeOps(), ApplyRules(*RULES)]
    with target:
        return transform.Sequential(passes)(mod)


def run(build: Build, *inputs: np.ndarray, target: Target = OPENCL) -> np.ndarray:
    """The result of a graph that is one attention."""
    types = [(array.shape, str(array.dtype)) for array in inputs]
    machine = RelaxOnOpenCL(scheduled(module(build, *types), target), target)
    [found] = machine(*inputs)
    assert [launch.kernel for launch in machine.launches] == ["attention_kernel"]
    return found


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, logits: Callable = lambda s: s
) -> np.ndarray:
    """Attention by its definition, in float64; the last two axes are tokens and features."""
    query, key, value = (array.astype("float64") for array in (query, key, value))
    scores = logits(query @ np.swapaxes(key, -1, -2))
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True) @ value


def heads(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(F32) for shape in shapes]


def of_logits(logits: Callable[..., relax.Expr]) -> Build:
    """A graph of queries, keys, values and whatever else ``logits`` takes behind the scores."""

    def build(query: relax.Expr, key: relax.Expr, value: relax.Expr, *rest: relax.Expr):
        block = relax.BlockBuilder.current()
        query, key = (e if isinstance(e, relax.Var) else block.emit(e) for e in (query, key))
        transposed = block.emit(
            op.permute_dims(key, [*range(key.ty.ndim - 2), key.ty.ndim - 1, key.ty.ndim - 2])
        )
        scores = block.emit(op.matmul(query, transposed))
        return op.matmul(op.nn.softmax(block.emit(logits(scores, *rest))), value)

    return build


plain = of_logits(lambda scores: op.multiply(scores, relax.const(0.125)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("m", "n", "depth", "columns"),
    [(37, 45, 20, 20), (130, 33, 64, 128), (16, 200, 128, 24), (33, 1, 5, 7)],
)
def test_numbers(m: int, n: int, depth: int, columns: int, rng: np.random.Generator) -> None:
    query, key, value = heads(rng, (2, 3, m, depth), (2, 3, n, depth), (2, 3, n, columns))
    exact = attend(query, key, value, lambda scores: scores * 0.125)
    np.testing.assert_allclose(run(plain, query, key, value), exact, 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", in_turns(tiled_attention._TILES), ids=str)
def test_numbers_of_each_tile(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(tiled_attention, "_TILES", (sizes,))
    query, key, value = heads(rng, (1, 70, 40), (1, 69, 40), (1, 69, 36))
    exact = attend(query, key, value, lambda scores: scores * 0.125)
    np.testing.assert_allclose(run(plain, query, key, value), exact, 1e-5, 1e-5)


@pytest.mark.slow
def test_numbers_with_little_shared_memory(rng: np.random.Generator) -> None:
    query, key, value = heads(rng, *[(1, 2, 30, 64)] * 3)
    exact = attend(query, key, value, lambda scores: scores * 0.125)
    found = run(plain, query, key, value, target=SMALL)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


@pytest.mark.slow
def test_numbers_of_large_logits(rng: np.random.Generator) -> None:
    """The largest logits come first, last, and in the middle; exponentials must not overflow."""
    query, key, value = heads(rng, (1, 20, 16), (1, 150, 16), (1, 150, 16))
    key[0, [0, 77, 149]] *= 60
    exact = attend(query, key, value, lambda scores: scores * 0.125)
    np.testing.assert_allclose(run(plain, query, key, value), exact, 1e-4, 1e-4)


@pytest.mark.slow
def test_a_mask_and_a_bias_of_each_head(rng: np.random.Generator) -> None:
    """Attention of T5 has a bias of positions, a mask of tokens, and no scale."""
    query, key, value = heads(rng, (2, 3, 21, 16), (2, 3, 27, 16), (2, 3, 27, 16))
    [bias] = heads(rng, (1, 3, 21, 27))
    mask = np.where(rng.random((2, 1, 1, 27)) < 0.3, np.finfo(F32).min, 0).astype(F32)
    build = of_logits(lambda scores, bias, mask: op.add(op.add(scores, bias), mask))
    exact = attend(query, key, value, lambda scores: scores + bias + mask)
    found = run(build, query, key, value, bias, mask)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


def causal(past: np.ndarray, least: float) -> Build:
    """A graph whose constant mask hides later keys."""
    return of_logits(lambda s: op.where(relax.const(past), s, relax.const(least, F32)))


@pytest.mark.slow
@pytest.mark.parametrize(("m", "least"), in_turns([70, 33], [-np.inf, np.finfo(F32).min, -3.0]))
def test_a_constant_causal_mask(m: int, least: float, rng: np.random.Generator) -> None:
    """Keys are skipped where their weight is zero, not where they are merely weighed less."""
    query, key, value = heads(rng, (2, m, 16), (2, 70, 16), (2, 70, 16))
    past = np.tri(m, 70, 70 - m, dtype=bool)[None]
    exact = attend(query, key, value, lambda scores: np.where(past, scores, least))
    found = run(causal(past, least), query, key, value)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("least", [np.finfo(F32).min, -3.0])
def test_hidden_keys_are_not_read(least: float) -> None:
    """NaN behind the last visible tile changes nothing, if the mask hides it for sure."""
    past = np.tri(128, 128, dtype=bool)[None]
    query, key, value = heads(np.random.default_rng(), *[(1, 128, 16)] * 3)
    key[:, 64:], value[:, 64:] = np.nan, np.nan
    found = run(causal(past, least), query, key, value)
    assert np.isnan(found[:, :64]).any() == (least > -1e30)


@pytest.mark.slow
def test_a_causal_mask_and_capped_scores(rng: np.random.Generator) -> None:
    query, key, value = heads(rng, *[(2, 50, 16)] * 3)
    past = np.tril(np.ones((1, 50, 50), bool))

    def logits(scores: relax.Expr, past: relax.Expr) -> relax.Expr:
        capped = op.multiply(op.tanh(op.divide(scores, relax.const(5.0))), relax.const(5.0))
        return op.where(past, capped, relax.const(np.finfo(F32).min, F32))

    exact = attend(
        query, key, value, lambda s: np.where(past, 5 * np.tanh(s / 5), np.finfo(F32).min)
    )
    found = run(of_logits(logits), query, key, value, past)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


def test_masked_rows_and_nan_are_as_in_onnx_runtime(rng: np.random.Generator) -> None:
    """Rows of -inf and of NaN become NaN; other rows may begin or end with -inf."""
    query, key, value = heads(rng, *[(1, 40, 8)] * 3)
    mask = np.zeros((1, 40, 40), F32)
    mask[0, 3], mask[0, 4, :33], mask[0, 5, 7:] = -np.inf, -np.inf, -np.inf
    mask[0, 6, 9], mask[0, 7, 11], mask[0, 8] = np.nan, np.inf, np.finfo(F32).min
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Add", ["s", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    feed = {"q": query, "k": key, "v": value, "mask": mask}
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in feed.items()]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "attention", infos, [result]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    [expected] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feed)
    found = run(of_logits(op.add), query, key, value, mask)
    assert np.isnan(expected[0, [3, 6, 7]]).all() and not np.isnan(expected[0, [4, 5, 8]]).any()
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


@pytest.mark.slow
def test_queries_of_several_heads_share_a_key(rng: np.random.Generator) -> None:
    """Grouped queries: keys and values are repeated for the heads of a group."""
    query, key, value = heads(rng, (2, 4, 19, 16), (2, 2, 23, 16), (2, 2, 23, 16))

    def repeat(x: relax.Expr) -> relax.Expr:
        each = op.broadcast_to(op.expand_dims(x, 2), (2, 2, 2, 23, 16))
        return relax.BlockBuilder.current().emit(op.reshape(each, (2, 4, 23, 16)))

    build = of_logits(lambda scores: scores)
    exact = attend(query, np.repeat(key, 2, 1), np.repeat(value, 2, 1))
    found = run(lambda q, k, v: build(q, repeat(k), repeat(v)), query, key, value)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


@pytest.mark.slow
def test_symbolic_lengths(rng: np.random.Generator) -> None:
    batch, m, n = (tirx.Var(name, "int64") for name in ("batch", "m", "n"))
    shapes = [(batch, m, 16), (batch, n, 16), (batch, n, 16)]
    mod = scheduled(module(plain, *((shape, F32) for shape in shapes)), OPENCL)
    machine = RelaxOnOpenCL(mod, OPENCL)
    for size, queries, keys in [(2, 17, 70), (1, 64, 5)]:
        query, key, value = heads(rng, (size, queries, 16), (size, keys, 16), (size, keys, 16))
        exact = attend(query, key, value, lambda scores: scores * 0.125)
        [found] = machine(query, key, value)
        np.testing.assert_allclose(found, exact, 1e-5, 1e-5)
    assert len(machine.launches) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "arch"),
    in_turns(
        [(1, 12, 128, 64), (8, 12, 512, 64), (4, 16, 1024, 128), (2, 8, 77, 40)], CUDA, every=4
    ),
    ids=str,
)
def test_machine_code(shape: tuple[int, ...], arch: str) -> None:
    """No spills, vectors between memory and registers, no division in the loop over keys."""
    mod = scheduled(module(plain, *[(shape, F32)] * 3), CUDA[arch])
    [func] = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    source = cuda_source(func.with_attr("global_symbol", "attention"), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "LDG.E") == count(names, "LDG.E.128") > 0
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0
    assert count(names, "FFMA") > 64 and not count(names, "I2F")
    assert count(names, "BAR") == 3


def in_half(query: relax.Expr, key: relax.Expr, value: relax.Expr, mask: relax.Expr) -> relax.Expr:
    """Attention as half precision has it: factors of 16 bits, scores and sums of 32."""
    block = relax.BlockBuilder.current()
    transposed = block.emit(op.permute_dims(key, [0, 2, 1]))
    scores = block.emit(op.matmul(query, transposed, out_dtype=F32))
    weights = block.emit(op.nn.softmax(block.emit(op.add(scores, mask))))
    narrow = block.emit(op.astype(weights, query.ty.dtype))
    return op.matmul(narrow, value, out_dtype=F32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        pytest.param((1, 70, 69, 16, 32), (4, 16), marks=pytest.mark.slow),
        ((2, 20, 37, 21, 19), (1, 16)),
        pytest.param((2, 17, 40, 80, 24), (1, 16), marks=pytest.mark.slow),
        pytest.param((1, 70, 37, 21, 19), (2, 32), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_on_tensor_cores(
    shape: tuple[int, ...],
    rows: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(tensor_core_attention, "_ROWS", (rows,))
    batch, m, n, depth, columns = shape
    sizes = [(batch, m, depth), (batch, n, depth), (batch, n, columns)]
    query, key, value = (array.astype("float16") for array in heads(rng, *sizes))
    query /= 4
    mask = np.where(rng.random((batch, 1, n)) < 0.3, -np.inf, 0).astype(F32)
    mask[..., n // 2] = 0
    exact = attend(query, key, value, lambda scores: scores + mask)
    found = run(in_half, query, key, value, mask)
    np.testing.assert_allclose(found, exact, 0, 2e-3)


def all_half(mask: np.ndarray | None, factor: float) -> Build:
    """A graph of float16 throughout, whose scores are divided, and hidden by a constant mask."""

    def build(query: relax.Expr, key: relax.Expr, value: relax.Expr) -> relax.Expr:
        block = relax.BlockBuilder.current()
        transposed = block.emit(op.permute_dims(key, [0, 2, 1]))
        scores = block.emit(op.matmul(query, transposed))
        scores = block.emit(op.divide(scores, relax.const(1 / factor, "float16")))
        if mask is not None:
            least = relax.const(np.finfo("float16").min, "float16")
            scores = block.emit(op.where(relax.const(mask), scores, least))
        return op.matmul(block.emit(op.nn.softmax(scores)), value)

    return build


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.125, 2.0])
def test_scores_of_half_precision_are_not_rounded(
    factor: float, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Two keys for each query, with large scores that float16 has no digits to tell apart."""
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(tensor_core_attention, "_ROWS", ((1, 32),))
    query = np.zeros((1, 32, 32), "float16")
    query[..., 0], query[..., 1] = 1024 / factor, rng.uniform(-1, 1, 32) / factor
    key, value = np.ones((1, 2, 32), "float16"), np.zeros((1, 2, 32), "float16")
    key[0, 1, 1], value[0, 1] = -1, rng.standard_normal(32)
    exact = attend(query, key, value, lambda scores: scores * factor)
    rounded = attend(query, key, value, lambda s: (s.astype("float16") * factor).astype("float16"))
    found = run(all_half(None, factor), query, key, value)
    assert np.abs(rounded - exact).max() > 0.05
    np.testing.assert_allclose(found, exact, 0, 3e-3)


@pytest.mark.slow
def test_a_causal_mask_of_half_precision(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Keys are hidden by the least float16, and those behind the last tile are not read."""
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(tensor_core_attention, "_ROWS", ((1, 32),))
    past = np.tri(70, 100, 30, dtype=bool)[None]
    sizes = (1, 70, 16), (1, 100, 16), (1, 100, 16)
    query, key, value = (array.astype("float16") for array in heads(rng, *sizes))
    exact = attend(query, key, value, lambda scores: np.where(past, scores * 0.125, -np.inf))
    build, types = all_half(past, 0.125), [(size, "float16") for size in sizes]
    machine = RelaxOnOpenCL(scheduled(module(build, *types), OPENCL), OPENCL)
    [found] = machine(query, key, value)
    np.testing.assert_allclose(found, exact, 0, 3e-3)
    key[0, 64:], value[0, 64:] = np.nan, np.nan
    [found] = machine(query, key, value)
    np.testing.assert_allclose(found[:, :32], exact[:, :32], 0, 3e-3)
    assert np.isnan(found[:, 32:]).all()


@pytest.mark.slow
def test_logits_of_each_form(rng: np.random.Generator) -> None:
    """Factors are taken out of the logits where they are positive, and of masks with them."""
    query, key, value = heads(rng, (1, 9, 8), (1, 11, 8), (1, 11, 8))
    past, least = np.tri(9, 11, 1, dtype=bool)[None], float(np.finfo(F32).min)
    hide = lambda s: op.where(relax.const(past), s, relax.const(least, F32))  # noqa: E731
    times = lambda s, c: op.multiply(s, relax.const(c, F32))  # noqa: E731
    forms: list[tuple[Callable[..., relax.Expr], Callable[[np.ndarray], np.ndarray]]] = [
        (lambda s: times(s, -0.5), lambda s: -0.5 * s),
        (lambda s: times(s, 0.0), lambda s: 0 * s),
        (lambda s: op.divide(relax.const(2.0), s), lambda s: 2 / s),
        (lambda s: times(op.divide(s, relax.const(3.0)), 0.5), lambda s: s / 6),
        (lambda s: times(hide(times(s, 0.25)), 4.0), lambda s: np.where(past, s, -np.inf)),
        (lambda s: hide(times(s, 1e-3)), lambda s: np.where(past, s * 1e-3, -np.inf)),
        (lambda s: op.add(times(s, 0.5), relax.const(1.0)), lambda s: s / 2 + 1),
    ]
    for graph, logits in forms:
        found = run(of_logits(_emitted(graph)), query, key, value)
        np.testing.assert_allclose(found, attend(query, key, value, logits), 2e-5, 2e-5)


def _emitted(graph: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    return lambda scores: relax.BlockBuilder.current().normalize(graph(scores))


MOST_INSTRUCTIONS = 7  # Bound for a warp and a product, in the loop over keys.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arch"),
    in_turns(
        [((12, 128, 64), "float16"), ((128, 512, 64), "bfloat16"), ((64, 512, 128), "float16")],
        CUDA,
        every=3,
    ),
    ids=str,
)
def test_machine_code_on_tensor_cores(kind: tuple[tuple[int, ...], str], arch: str) -> None:
    shape, dtype = kind
    mask = ((1, 1, shape[1]), F32)
    mod = scheduled(module(in_half, *[(shape, dtype)] * 3, mask), CUDA[arch])
    [func] = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    source = cuda_source(func.with_attr("global_symbol", "attention"), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "HMMA") and count(names, "LDSM") and count(names, "LDGSTS.E.BYPASS.128")
    assert not count(names, "HMMA.1688") and not count(names, "I2F")
    assert count(names, "BAR") == 2  # one for the queries
    [loop] = loops(code)
    assert count(loop, "BAR") == 1 and len(loop) <= MOST_INSTRUCTIONS * count(loop, "HMMA")
    # Sixteen queries take 64 products a tile of keys; a lane has half as many scores as keys.
    sixteens, depth = count(loop, "HMMA") // 64, shape[-1]
    keys = 64 if depth == 64 else 32
    assert count(loop, "MUFU") == count(loop, "MUFU.EX2") == sixteens * (keys // 2 + 2)
    # Keys and values are loaded 512 bytes at a time, queries are not; no score is rounded.
    assert count(loop, "LDSM") == 2 * 2 * keys * depth // 512
    assert count(loop, "F2FP") == sixteens * keys // 4 and not count(loop, "HADD2")
