# SPDX-License-Identifier: Apache-2.0
"""Quantisation by a tensor's range: bits, edge values, refusals, and its form for GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes import DecomposeNormalization, SimplifyInference
from relay_passes.core.expressions import op_name
from relay_passes.op import dynamic_quantize
from relay_passes.op.elementwise import RANGE
from schedules.errors import OpError

AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 3})
PLAIN = Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 1})
SIZES = {"scalar": (), "few": (3, 5), "steps": (7, 64), "threads": (2, 101, 103)}
SPECIAL = {
    "zeros": [0.0, -0.0, 0.0],
    "positive": [2.0, 3.0, 4.0],
    "negative": [-2.0, -3.5, -4.0],
    "halves": [0.5, 1.5, 2.5, 255.0],
    "NaN": [1.0, np.nan, -2.0],  # TVM's own reductions lose it
    "infinite": [1.0, np.inf, -2.0],
    "without lower end": [1.0, -np.inf, 2.0],
    "subnormal": [1e-45 * 300, -1e-45 * 200, 0.0],
    "too small for a step": [1e-45 * 100, 0.0, 0.0],
    "large": [3e38, 1.0, 0.0],
}


def module(shape: tuple[int | tvm.tirx.Var, ...], dtype: str = "float32") -> tvm.IRModule:
    """A module of the op alone."""
    x = relax.Var("x", relax.TensorType(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(dynamic_quantize(x))
        builder.emit_func_output(result)
    return builder.get()


def compiled(mod: tvm.IRModule, target: Target = PLAIN):
    """The function on a CPU, of numpy's arrays."""
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    return lambda x: [each.numpy() for each in machine["main"](tvm.runtime.tensor(x))]


def expected(x: np.ndarray) -> list[np.ndarray]:
    """The definition, in float32."""
    with np.errstate(all="ignore"):
        high, low = np.maximum(x.max(), np.float32(0)), np.minimum(x.min(), np.float32(0))
        scale = (high - low) / np.float32(255)
        scale = np.float32(1) if scale == 0 else scale
        point = np.rint(-(low / scale))
        levels = np.rint(x / scale) + point
        whole = [np.nan_to_num(value.clip(0, 255)).astype("uint8") for value in (levels, point)]
    return [whole[0], scale, whole[1]]


def check(function, x: np.ndarray) -> None:
    """The same bits; NaN may have any."""
    for found, wanted in zip(function(x), expected(x), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("target", [AVX2, PLAIN], ids=["AVX2", "SSE"])
@pytest.mark.parametrize("name", SIZES)
def test_numbers(name: str, target: Target) -> None:
    random = np.random.default_rng()
    function = compiled(module(SIZES[name]), target)
    for low, high in ((-3, 5), (1, 2), (-2, -1)):
        x = random.uniform(low, high, SIZES[name]).astype("float32")
        check(function, x)
        if x.size > 1:
            x.flat[-1] = 9  # The place behind the last step.
            check(function, x)


def test_open_sizes() -> None:
    function = compiled(module((tvm.tirx.Var("n", "int64"), 65)), AVX2)
    for rows in (1, 2, 300):
        check(function, np.random.default_rng().standard_normal((rows, 65)).astype("float32"))


@pytest.mark.parametrize("form", ["kernel", "reductions"])
def test_edge_values(form: str) -> None:
    """The edge is in a vector of a step, or behind the last step; extremes may be reductions."""
    mod = module((67,))
    function = compiled(mod if form == "kernel" else DecomposeNormalization()(mod), AVX2)
    for values in (one for name, one in SPECIAL.items() if form == "kernel" or name != "NaN"):
        for first in (0, 64):
            x = np.full(67, values[-1], "float32")
            x[first : first + len(values)] = values[: 67 - first]
            check(function, x)


def test_reductions_find_the_range_for_gpus() -> None:
    mod = module((4, 5))
    written = DecomposeNormalization()(mod).script()
    assert "R.max" in written and "R.min" in written and "dynamic_quantize" not in written
    with Target({"kind": "opencl", "host": "llvm"}):
        legal = relax.transform.LegalizeOps()(mod)
    assert not any("R." + name in legal.script() for name in ("max(", "min(", "tvm_fusion"))


def test_elements_are_quantised_before_they_are_moved() -> None:
    """So bytes are moved; not those that something else reads as floats, too."""
    for readers in (1, 2):
        x = relax.Var("x", relax.TensorType((4, 6, 5), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                flat = builder.emit(relax.op.reshape(x, (24, 5)))
                moved = builder.emit(relax.op.permute_dims(flat))
                whole = builder.emit(dynamic_quantize(moved))
                fields = [builder.emit(relax.TupleGetItem(whole, field)) for field in range(3)]
                result = builder.emit_output(relax.Tuple([*fields, *[moved] * (readers - 1)]))
            builder.emit_func_output(result)
        with AVX2:
            found = SimplifyInference()(builder.get())
        values = [one.value for block in found["main"].body.blocks for one in block.bindings]
        (call,) = (value for value in values if op_name(value) == RANGE)
        assert call.args[0].same_as(found["main"].params[0]) == (readers == 1)
        data = np.random.default_rng().standard_normal((4, 6, 5)).astype("float32")
        wanted = expected(data.reshape(24, 5).T)
        for one, other in zip(compiled(found)(data), wanted, strict=False):
            np.testing.assert_array_equal(one, other)


def test_other_types_are_refused() -> None:
    with pytest.raises(OpError, match="data is .*float16.*; expected a tensor of float32"):
        module((3,), "float16")
