# SPDX-License-Identifier: Apache-2.0
"""Results of a function that nothing else refers to."""

from __future__ import annotations

import tvm
from relax_models import Dense, Identity, Many
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.compiler.compile_model import fresh_outputs


def legalized(mod: tvm.IRModule) -> tvm.IRModule:
    return relax.transform.LegalizeOps()(mod)


@I.ir_module
class Views:
    """Results by way of other variables, tuples, and calls that are no kernels."""

    @R.function
    def main(x: R.Tensor((6,), "float32")):
        with R.dataflow():
            parts = R.split(x, 2)
            first = parts[0]
            pair = (first, x)
            again = pair[0]
            same = pair[1]
            view = R.call_pure_packed(
                "vm.builtin.reshape", x, R.shape([2, 3]), ty_args=R.Tensor((2, 3), "float32")
            )
            R.output(again, same, view)
        return (again, same, view)


@I.ir_module
class Branch:
    @R.function
    def main(c: R.Tensor((), "bool"), x: R.Tensor((6,), "float32")):
        if c:
            y = R.add(x, x)
        else:
            y = x
        return y


def test_results_of_kernels_are_new_and_inputs_and_constants_are_not() -> None:
    assert fresh_outputs(legalized(Dense)) == (True,)
    assert fresh_outputs(legalized(Identity)) == (False,)
    assert fresh_outputs(legalized(Many)) == (True, True, False, False, True, True)


def test_variables_and_tuples_are_followed_and_views_are_not_new() -> None:
    assert fresh_outputs(legalized(Views)) == (True, False, False)


def test_what_depends_on_a_condition_is_not_known_to_be_new() -> None:
    assert fresh_outputs(legalized(Branch)) == (False,)
