# SPDX-License-Identifier: Apache-2.0
"""Random sub-graphs with reductions: mostly one kernel, right numbers, each element stored once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from cuda_text import cuda_source, ptxas
from relax_on_opencl import OPENCL, RelaxOnOpenCL
from tvm import relax, tirx
from tvm.target import Target

from examples.benchmarks import reducing_graphs
from examples.benchmarks.reducing_graphs import KINDS, Count, build
from tvm_fusion.compiler.phases import gpu_phases

CUDA = Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024}, host="llvm")
SLOW = pytest.mark.slow
NAMES = [kind.__name__ for kind in KINDS]


def lower(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    with target:
        for passes in gpu_phases(target).values():
            mod = tvm.transform.Sequential(passes)(mod)
    return mod


@functools.cache
def counts() -> list[Count]:
    return [Count.of(build(seed), CUDA) for seed in range(len(KINDS))]


@pytest.mark.slow
def test_most_are_one_kernel_that_moves_little_more_than_it_must() -> None:
    share = np.mean([count.kernels == 1 for count in counts()])
    assert share >= 0.85
    assert sum(c.moved for c in counts()) <= 1.1 * sum(c.least for c in counts())
    assert min(c.moved / c.least for c in counts()) == 1


def test_reductions_of_other_extents_are_other_kernels() -> None:
    assert counts()[NAMES.index("strangers")].kernels == 2


def _reduced(function: Callable) -> Callable:
    def evaluate(x: np.ndarray, attrs: tvm.ir.Attrs) -> np.ndarray:
        axis = attrs.axis
        axes = None if axis is None else axis if isinstance(axis, int) else tuple(map(int, axis))
        return function(x, axis=axes, keepdims=bool(attrs.keepdims))

    return evaluate


BY_NUMPY: dict[str, Callable] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "less": np.less,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "abs": np.abs,
    "nn.relu": lambda x: np.maximum(x, 0),
    "clip": np.clip,
}
REDUCED = {name: _reduced(getattr(np, name)) for name in ("sum", "mean", "max", "min", "argmax")}


def by_numpy(mod: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The results in float64; casts to float16 and to integers round."""
    main = mod["main"]
    values = dict(zip(main.params, (x.astype("float64") for x in inputs), strict=True))

    def value(expr: relax.Expr) -> np.ndarray:
        if isinstance(expr, relax.Var):
            return values[expr]
        is_tensor = isinstance(expr, tvm.ir.GenericConst)
        return expr.value.numpy().astype("float64") if is_tensor else np.float64(expr.value)

    result: list[np.ndarray] = []
    for binding in main.body.blocks[0].bindings:
        call = binding.value
        if isinstance(call, relax.Tuple):
            result = [values[field] for field in call.fields]
            continue
        name = call.op.name.removeprefix("relax.")
        if name in REDUCED:
            values[binding.var] = REDUCED[name](value(call.args[0]), call.attrs)
        elif name == "astype":
            dtype = str(call.attrs.dtype)
            rounded = value(call.args[0])
            values[binding.var] = rounded.astype(dtype).astype("float64")
        else:
            values[binding.var] = BY_NUMPY[name](*map(value, call.args))
    return result


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "number",
    [pytest.param(k, id=n, marks=() if k % 4 == 0 else SLOW) for k, n in enumerate(NAMES)],
)
def test_numbers(number: int, rng: np.random.Generator) -> None:
    """Outputs are poisoned first; the second call meets what the first left in the workspace."""
    mod = build(number, small=True)
    inputs = [
        rng.uniform(0.5, 1.5, list(map(int, param.ty.shape))).astype(str(param.ty.dtype))
        for param in mod["main"].params
    ]
    run = RelaxOnOpenCL(lower(mod, OPENCL), OPENCL)
    for _ in range(2):
        results = run(*inputs)
    for actual, wanted in zip(results, by_numpy(mod, inputs), strict=True):
        rough = 4e-3 if actual.dtype == np.float16 or inputs[0].dtype == np.float16 else 2e-5
        scale = np.abs(wanted).max(initial=0)
        np.testing.assert_allclose(actual.astype("float64"), wanted, rtol=rough, atol=rough * scale)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=SLOW) for n in (1, 2, 3))])
def test_nothing_spills(start: int) -> None:
    functions: dict[str, tirx.PrimFunc] = {}
    for seed in range(start, len(KINDS), 4):
        for var, func in lower(build(seed), CUDA).functions_items():
            if isinstance(func, tirx.PrimFunc):
                name = f"{NAMES[seed]}_{var.name_hint}"
                functions[name] = func.with_attr("global_symbol", name)
    for name, used in ptxas(cuda_source(tvm.IRModule(functions))).items():
        assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0), name


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert reducing_graphs.main(["--graphs", "2", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert "2 sub-graphs" in text and "layer_norm" in text and "variance" not in text
