# SPDX-License-Identifier: Apache-2.0
"""Programs that are one kernel and need no virtual machine."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GlobalVar

from .check_alignment import CHECK

_PREPARATIONS = frozenset(
    [
        "relax.null_value",
        "relax.vm.alloc_storage",
        "relax.vm.alloc_tensor",
        "relax.vm.kill_object",
        "vm.builtin.check_tensor_info",
        "vm.builtin.match_shape",
    ]
)


def sole_kernel(main: relax.Function) -> relax.Call | None:
    """Find the only kernel call of a program.

    Parameters
    ----------
    main : relax.Function
        Lowered to the virtual machine.

    Returns
    -------
    relax.Call | None
        The only call of a function of the module, whose last argument, a new tensor, the program
        returns. None if the program does more than check its arguments and allocate.
    """
    kernel: relax.Call | None = None
    tensors: list[relax.Var] = []
    for block in main.body.blocks if isinstance(main.body, relax.SeqExpr) else ():
        for binding in block.bindings:
            call = binding.value if isinstance(binding, relax.VarBinding) else None
            if not isinstance(call, relax.Call):
                return None
            if isinstance(call.op, GlobalVar) and call.op.name_hint.startswith(CHECK):
                continue
            if isinstance(call.op, GlobalVar) and kernel is None:
                kernel = call
            elif _name(call.op) not in _PREPARATIONS:
                return None
            elif _name(call.op) == "relax.vm.alloc_tensor":
                tensors.append(binding.var)
    if kernel is None or len(tensors) != 1 or not kernel.args:
        return None
    [output] = tensors
    return kernel if kernel.args[-1].same_as(output) and main.body.body.same_as(output) else None


def _name(op: relax.Expr) -> str:
    return str(op.global_symbol if isinstance(op, relax.ExternFunc) else getattr(op, "name", ""))
