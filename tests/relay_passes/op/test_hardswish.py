# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.hardswish``: types, errors, TVMScript, and numbers of its legalization."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes.op import hardswish
from schedules.errors import OpError
from tests.targets import compile_unchecked


@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32")) -> R.Tensor(("n", 3), "float32"):
        with R.dataflow():
            gv = R.tvm_fusion.hardswish(x)
            R.output(gv)
        return gv


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_type_is_that_of_the_input(dtype):
    x = relax.Var("x", relax.TensorType((2, 3, 4), dtype))
    call = relax.BlockBuilder().normalize(hardswish(x))
    tvm.ir.assert_structural_equal(call.ty, x.ty)


def test_unknown_shape_is_kept():
    x = relax.Var("x", relax.TensorType(None, "float32", ndim=4))
    tvm.ir.assert_structural_equal(relax.BlockBuilder().normalize(hardswish(x)).ty, x.ty)


def test_integers_are_refused():
    x = relax.Var("x", relax.TensorType((2, 3), "int32"))
    with pytest.raises(OpError, match=r"hardswish: data has dtype int32; expected a floating"):
        hardswish(x)


def test_tuples_are_refused():
    x = relax.Var("x", relax.TupleType([]))
    with pytest.raises(OpError, match=r"hardswish: data is .*; expected a tensor"):
        hardswish(x)


def test_script_reads_what_it_prints():
    read_back = tvm.script.from_source(Module.script())
    tvm.ir.assert_structural_equal(read_back, Module)
    assert "R.tvm_fusion.hardswish(x)" in Module.script()


def test_legalization_has_the_name_of_the_op():
    legalized = relax.transform.LegalizeOps()(Module)
    assert sorted(var.name_hint for var in legalized.functions) == ["hardswish", "main"]


@pytest.fixture(scope="module")
def compiled():
    return relax.VirtualMachine(compile_unchecked(Module), tvm.cpu())


@settings(max_examples=settings.default.max_examples // 2)
@given(rows=st.lists(st.tuples(*[st.floats(-1e4, 1e4, width=32)] * 3), min_size=1, max_size=9))
def test_numbers(compiled, rows):
    data = np.array(rows, "float32")
    exact = data.astype("float64")
    expected = exact * np.clip(exact + 3, 0, 6) / 6
    actual = compiled["main"](tvm.runtime.tensor(data)).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
