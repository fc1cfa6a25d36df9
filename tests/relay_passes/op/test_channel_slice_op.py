# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.channel_slice``: types, errors, TVMScript, numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from op_calls import module_of, tensor
from tvm import relax

from relay_passes.op import channel_slice, pack
from schedules.errors import OpError


def test_type_has_the_blocks_of_its_channels():
    call = channel_slice(tensor("x", tvm.tirx.Var("n", "int64"), 4, 3, 5, 8), 9, 17)
    found = relax.BlockBuilder().normalize(call).ty
    assert [int(extent) for extent in found.shape.values[1:]] == [3, 3, 5, 8]
    assert str(found.dtype) == "float32"


@pytest.mark.parametrize(
    ("shape", "begin", "channels", "message"),
    [
        ((1, 12, 3, 3), 0, 4, "expected an NCHW.x.c tensor with known extents: pack it first"),
        ((1, 2, 3, 3, 8), 9, 8, "channels 9 to 17 of data, which is .*; expected a range"),
        ((1, 2, 3, 3, 8), -1, 8, "channels -1 to 7"),
        ((1, 2, 3, 3, 8), 1, 0, "channels 1 to 1"),
        ((1, tvm.tirx.Var("b", "int64"), 3, 3, 8), 0, 4, "a range within constant extents"),
    ],
)
def test_wrong_calls_are_refused(shape, begin, channels, message):
    with pytest.raises(OpError, match=message):
        channel_slice(tensor("x", *shape), begin, channels)


def test_script_reads_what_it_prints():
    x = tensor("x", 1, 4, 3, 3, 8)
    mod = module_of(channel_slice(x, 5, 12), [x])
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


def test_legalization_has_the_name_of_the_op():
    x = tensor("x", 1, 4, 3, 3, 8)
    legalized = relax.transform.LegalizeOps()(module_of(channel_slice(x, 5, 12), [x]))
    assert sorted(var.name_hint for var in legalized.functions) == ["channel_slice", "main"]


@pytest.mark.parametrize(("begin", "channels"), [(0, 29), (29, 29), (8, 16), (3, 1), (57, 1)])
@pytest.mark.parametrize("block", [4, 8])
def test_numbers(run_module, begin, channels, block):
    x = tensor("x", 2, 58, 3, 5)
    data = np.random.default_rng(begin).standard_normal((2, 58, 3, 5)).astype("float32")
    result = run_module(module_of(channel_slice(pack(x, block), begin, channels), [x]), data)
    part = np.pad(
        data[:, begin : begin + channels], ((0, 0), (0, -channels % block), *[(0, 0)] * 2)
    )
    expected = part.reshape(2, -1, block, 3, 5).transpose(0, 1, 3, 4, 2)
    np.testing.assert_array_equal(result, expected)
