# SPDX-License-Identifier: Apache-2.0
"""Pass ``LegalizeCalls``: TVM's ``LegalizeOps``, which prints nothing where an op has no kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import tvm
from tvm import IRModule, relax
from tvm.ir import Op

from ..op.exact import exact_legalizations

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@tvm.transform.module_pass(opt_level=0, name="LegalizeCalls")
class LegalizeCalls:
    """Replace calls of ops by calls of functions of TensorIR.

    Before::

        y = R.add(x, x)

    After::

        y = R.call_tir(add, (x, x), out_ty=R.Tensor((2, 8), "float32"))

    The error of a call is raised once all others are replaced: TVM's pass, left in the midst of a
    function, prints a warning on standard error that no Python code can catch.

    Parameters
    ----------
    rules : Mapping[str, callable]
        Legalizations that take the place of those registered, and of those of ``op/exact.py``.

    Raises
    ------
    Exception
        What the first legalization that failed had raised.
    """

    def __init__(self, rules: Mapping[str, Legalize] | None = None) -> None:
        self.rules = rules or {}

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the legalized module."""
        errors: list[Exception] = []

        def rule(legalize: Legalize, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            try:
                return legalize(builder, call)
            except Exception as error:  # TVM raises anything from ValueError to tvm.error
                errors.append(error)
                return call

        guarded = {
            name: functools.partial(rule, legalize)
            for name, legalize in {**_registered(), **exact_legalizations(), **self.rules}.items()
        }
        mod = relax.transform.LegalizeOps(guarded)(mod)
        if errors:
            raise errors[0]
        return mod


def _registered() -> dict[str, Legalize]:
    """Legalizations of all ops that have one."""
    found = {name: Op.get(name).get_attr("FLegalize") for name in Op.list_op_names()}
    return {name: legalize for name, legalize in found.items() if legalize is not None}
