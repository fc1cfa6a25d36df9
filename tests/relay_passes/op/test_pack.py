# SPDX-License-Identifier: Apache-2.0
"""Ops ``relax.tvm_fusion.pack`` and ``relax.tvm_fusion.unpack``."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, te, tirx
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes.op import pack, unpack
from schedules.compute import pack as compute
from schedules.errors import OpError
from tests.targets import compile_unchecked

CHANNELS = st.sampled_from([1, 3, 4, 8, 13, 24, 40])
BLOCKS = st.sampled_from([2, 4, 8, 16])
EXTENTS = st.sampled_from([1, 2, 3, 5])


def tensor(*shape, dtype="float32"):
    return relax.Var("data", relax.TensorType(shape, dtype))


@cache
def build_kernel(direction: str, channels: int, block: int):
    """One compiled layout change for any batch, height and width."""
    batch, height, width = te.var("n", "int64"), te.var("h", "int64"), te.var("w", "int64")
    if direction == "pack":
        data = te.placeholder((batch, channels, height, width), name="data")
        out = compute.pack(data, block)
    else:
        blocks = compute.channel_blocks(channels, block)
        data = te.placeholder((batch, blocks, height, width, block), name="data")
        out = compute.unpack(data, channels)
    return compile_unchecked(te.create_prim_func([data, out]))


def run_kernel(direction: str, data: np.ndarray, channels: int, block: int) -> np.ndarray:
    """Run a layout change into an output full of NaN."""
    batch, _, height, width = data.shape[:4]
    shape = (batch, channels, height, width)
    if direction == "pack":
        shape = (batch, compute.channel_blocks(channels, block), height, width, block)
    out = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    build_kernel(direction, channels, block)(tvm.runtime.tensor(data), out)
    return out.numpy()


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(CHANNELS, BLOCKS, EXTENTS, EXTENTS, EXTENTS)
def test_round_trip(channels, block, batch, height, width):
    rng = np.random.default_rng(channels)
    data = rng.standard_normal((batch, channels, height, width)).astype("float32")
    packed = run_kernel("pack", data, channels, block)
    lanes_last = data.transpose(0, 2, 3, 1)
    flat = packed.transpose(0, 2, 3, 1, 4).reshape(batch, height, width, -1)
    np.testing.assert_array_equal(flat[..., :channels], lanes_last)
    np.testing.assert_array_equal(flat[..., channels:], 0)
    np.testing.assert_array_equal(run_kernel("unpack", packed, channels, block), data)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
def test_unpack_drops_what_is_past_the_last_channel(garbage):
    data = np.ones((1, 13, 2, 3), "float32")
    packed = run_kernel("pack", data, 13, 8)
    packed[:, 1, :, :, 5:] = garbage
    np.testing.assert_array_equal(run_kernel("unpack", packed, 13, 8), data)


def test_kernels_have_fixed_names():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 13, 2, 2), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.pack(x, block=8)
                gv = R.tvm_fusion.unpack(lv, channels=13)
                R.output(gv)
            return gv

    legal = relax.transform.LegalizeOps()(Module)
    assert {name.name_hint for name in legal.get_global_vars()} == {"main", "pack", "unpack"}
    for name in ("pack", "unpack"):
        assert f'T.sblock("{name}")' in legal[name].script()


def test_types_with_symbolic_extents():
    n, h, w = (tirx.Var(name, "int64") for name in "nhw")
    builder = relax.BlockBuilder()
    packed = builder.normalize(pack(tensor(n, 13, h, w, dtype="float16"), 4))
    expected = relax.TensorType((n, 4, h, w, 4), "float16")
    tvm.ir.assert_structural_equal(packed.ty, expected)
    plain = builder.normalize(unpack(tensor(n, 4, h, w, 4), 13))
    tvm.ir.assert_structural_equal(plain.ty, relax.TensorType((n, 13, h, w), "float32"))


def test_nested_calls_are_typed_when_emitted():
    data = tensor(1, 13, 2, 2)
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        result = builder.emit(unpack(pack(relax.op.nn.relu(data), 8), 13))
        builder.emit_func_output(result)
    tvm.ir.assert_structural_equal(result.ty, data.ty)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pack(tensor(1, 8, 2, 2), 0), "pack: block is 0; expected a positive integer"),
        (lambda: pack(tensor(1, 8, 2, 2), True), "pack: block is True; expected a positive"),
        (lambda: pack(tensor(1, 8, 2, 2), 2.0), "pack: block is 2.0; expected a positive"),
        (lambda: pack(tensor(1, 8, 2), 4), r"pack: data is .*; expected an NCHW tensor with 4"),
        (
            lambda: pack(relax.Var("d", relax.TensorType(None, "float32", ndim=4)), 4),
            r"pack: data is .*; expected an NCHW tensor with 4 known extents",
        ),
        (
            lambda: pack(tensor(1, tirx.Var("c", "int64"), 2, 2), 4),
            "the channel extent of data is c; expected a constant",
        ),
        (lambda: unpack(tensor(1, 2, 2, 2), 4), r"unpack: data is .*; expected an NCHW\[x\]c"),
        (lambda: unpack(tensor(1, 2, 2, 2, 4), -1), "unpack: channels is -1; expected a positive"),
        (
            lambda: unpack(tensor(1, 2, 2, 2, 4), 9),
            "unpack: 9 channels need 3 blocks of 4 lanes; data has 2",
        ),
        (
            lambda: unpack(tensor(1, tirx.Var("b", "int64"), 2, 2, 4), 8),
            "the channel block extent of data is b; expected a constant",
        ),
        (
            lambda: unpack(tensor(1, 2, 2, 2, tirx.Var("x", "int64")), 8),
            "the lane extent of data is x; expected a constant",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(OpError, match=message):
        make()
