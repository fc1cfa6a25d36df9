# SPDX-License-Identifier: Apache-2.0
"""One PrimFunc of a function of Relax."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars


def lowered_function(builder: relax.BlockBuilder, name: str) -> tirx.PrimFunc | None:
    """The unscheduled PrimFunc that computes all of a function.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Holds the function, which has the attribute ``Primitive``; gets a caller of it.
    name : str
        Its name.

    Returns
    -------
    tirx.PrimFunc | None
        With the function's parameters, then its outputs. None where it has symbolic extents that
        do not follow from the shapes of its parameters.
    """
    var = builder.get().get_global_var(name)
    function = builder.get()[var]
    if relax.analysis.free_symbolic_vars(function):
        return None
    params = list(copy_with_new_vars(function).params)
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(var, params))
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(), relax.transform.FuseTIR()]
    lowered = tvm.transform.Sequential(passes)(builder.get())
    [binding] = lowered["main"].body.blocks[0].bindings
    return lowered[binding.value.args[0]]
