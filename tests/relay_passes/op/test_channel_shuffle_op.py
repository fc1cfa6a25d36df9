# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.channel_shuffle``: types, errors, TVMScript, numbers in both layouts."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from op_calls import module_of, tensor
from tvm import relax

from relay_passes.op import channel_shuffle, pack, unpack
from schedules.errors import OpError
from tests.selection import in_turns


def shuffled(data: np.ndarray, groups: int) -> np.ndarray:
    batch, channels, height, width = data.shape
    grouped = data.reshape(batch, groups, channels // groups, height, width)
    return grouped.swapaxes(1, 2).reshape(data.shape)


@pytest.mark.parametrize("shape", [(2, 12, 3, 4), (2, 2, 3, 4, 8)])
def test_type_is_that_of_the_input(shape):
    x = tensor("x", *shape)
    call = relax.BlockBuilder().normalize(channel_shuffle(x, 12, 3))
    tvm.ir.assert_structural_equal(call.ty, x.ty)


@pytest.mark.parametrize(
    ("shape", "channels", "groups", "message"),
    [
        ((1, 12, 3, 3), 12, 5, "12 channels in 5 groups; expected a number of groups that divides"),
        ((1, 12, 3, 3), 12, 0, "12 channels in 0 groups"),
        ((1, 12, 3), 12, 2, "expected an NCHW or NCHW"),
        ((1, 12, 3, 3), 14, 2, "expected an extent of 14 in axis 1 for 14 channels"),
        ((1, 2, 3, 3, 8), 18, 2, "expected an extent of 3 in axis 1 for 18 channels"),
        ((1, tvm.tirx.Var("c", "int64"), 3, 3), 12, 2, "expected an extent of 12"),
    ],
)
def test_wrong_calls_are_refused(shape, channels, groups, message):
    with pytest.raises(OpError, match=message):
        channel_shuffle(tensor("x", *shape), channels, groups)


def test_script_reads_what_it_prints():
    x = tensor("x", 1, 12, 3, 3)
    mod = module_of(channel_shuffle(x, 12, 2), [x])
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


def test_legalization_has_the_name_of_the_op():
    x = tensor("x", 1, 12, 3, 3)
    legalized = relax.transform.LegalizeOps()(module_of(channel_shuffle(x, 12, 2), [x]))
    assert sorted(var.name_hint for var in legalized.functions) == ["channel_shuffle", "main"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("case", "block"), in_turns([(16, 2), (12, 3), (58, 2), (5, 5), (7, 1)], [None, 4, 8])
)
def test_numbers(run_module, case, block):
    channels, groups = case
    x = tensor("x", 2, channels, 3, 5)
    data = np.random.default_rng(channels).standard_normal((2, channels, 3, 5)).astype("float32")
    call = channel_shuffle(x if block is None else pack(x, block), channels, groups)
    result = run_module(module_of(call if block is None else unpack(call, channels), [x]), data)
    np.testing.assert_array_equal(result, shuffled(data, groups))


def test_lanes_past_the_last_channel_are_zero(run_module):
    x = tensor("x", 1, 2, 3, 3, 8)
    result = run_module(module_of(channel_shuffle(x, 10, 2), [x]), np.ones((1, 2, 3, 3, 8), "f4"))
    assert (result[:, 0] == 1).all()
    assert (result[:, 1, ..., :2] == 1).all() and (result[:, 1, ..., 2:] == 0).all()
