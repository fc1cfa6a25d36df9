# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.round_clip``: types, errors, TVMScript, and numbers of its legalization."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion.pipeline  # noqa: F401  registers it
from relay_passes.op import round_clip
from relay_passes.op.elementwise import bounds_of
from schedules.errors import OpError
from tests.targets import compile_unchecked


@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
        with R.dataflow():
            gv = R.tvm_fusion.round_clip(x, low=-3.0, high=4.0)
            R.output(gv)
        return gv


def test_type_is_that_of_the_input():
    x = relax.Var("x", relax.TensorType((2, 3, 4), "float16"))
    call = relax.BlockBuilder().normalize(round_clip(x, -128, 127))
    tvm.ir.assert_structural_equal(call.ty, x.ty)
    assert bounds_of(call) == (-128.0, 127.0)


@pytest.mark.parametrize(
    ("data", "bounds", "text"),
    [
        (relax.TensorType((2,), "int8"), (0, 1), r"round_clip: data has dtype int8; expected a"),
        (relax.TupleType([]), (0, 1), r"round_clip: data is .*; expected a tensor"),
        (relax.TensorType((2,), "float32"), (2, 1), r"round_clip has bounds \(2.*, 1.*\)"),
    ],
)
def test_what_is_refused(data, bounds, text):
    with pytest.raises(OpError, match=text):
        round_clip(relax.Var("x", data), *bounds)


def test_script_reads_what_it_prints():
    tvm.ir.assert_structural_equal(tvm.script.from_source(Module.script()), Module)


def test_halves_go_to_even_and_nan_stays():
    x = np.array([-9, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.6, np.inf, np.nan], "float32")
    pipeline = relax.get_pipeline("tvm_fusion")
    machine = relax.VirtualMachine(compile_unchecked(Module, relax_pipeline=pipeline), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(found, np.clip(np.rint(x), -3, 4))
