# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.channel_norm``: types, errors, TVMScript, legalization."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from op_calls import function_names, module_of, tensor
from tvm import relax

from relay_passes.op import channel_norm
from schedules.errors import OpError

N = tvm.tirx.Var("n", "int64")


def call(shape=(2, 3, 4, 5, 8), gamma=(3, 8), beta=(3, 8), channels=21):
    operands = [tensor("x", *shape), tensor("gamma", *gamma), tensor("beta", *beta)]
    return channel_norm(*operands, channels, 1e-3), operands


def test_type_is_that_of_the_data():
    normalized, (x, _, _) = call((N, 3, 4, 5, 8))
    tvm.ir.assert_structural_equal(relax.BlockBuilder().normalize(normalized).ty, x.ty)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": (1, 21, 4, 5)}, "channel_norm: data is .*; expected an NCHW.x.c tensor"),
        ({"shape": (1, N, 4, 5, 8)}, "channel_norm: data is .*; expected an NCHW.x.c tensor"),
        ({"channels": 25}, "25 channels in 3 blocks of 8 lanes; expected as many as fill all"),
        ({"channels": 0}, "0 channels in 3 blocks"),
        ({"gamma": (24,)}, r"gamma is .*; expected the extents \(3, 8\)"),
        ({"beta": (8, 3)}, r"beta is .*; expected the extents \(3, 8\)"),
    ],
)
def test_wrong_calls_are_refused(wrong, message):
    with pytest.raises(OpError, match=message):
        call(**wrong)


def test_script_reads_what_it_prints():
    mod = module_of(*call())
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)


def test_legalization_has_the_name_of_the_op():
    legalized = relax.transform.LegalizeOps()(module_of(*call()))
    assert function_names(legalized) == ["channel_norm"]


@pytest.mark.quick_cases("21")
@pytest.mark.parametrize("channels", [24, 21])
def test_numbers_of_the_compute(run_module, channels):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 8)).astype("float32") + 2
    exists = (np.arange(24) < channels).reshape(3, 8)
    gamma, beta = np.random.default_rng(1).standard_normal((2, 3, 8)).astype("float32") * exists
    found = run_module(module_of(*call(channels=channels)), x, gamma, beta)
    lanes = exists[None, :, None, None]
    exact = x.astype("float64")
    centred = exact - exact.mean((1, 4), keepdims=True, where=lanes)
    spread = np.sqrt((centred**2).mean((1, 4), keepdims=True, where=lanes) + 1e-3)
    expected = centred / spread * gamma[None, :, None, None] + beta[None, :, None, None]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
