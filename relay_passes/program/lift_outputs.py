# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftOutputs``: a program writes its results where its caller wants them.

A program that is one kernel then needs no virtual machine, and :func:`sole_kernel` finds it.
"""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir import GlobalVar

from schedules import attributes
from schedules.tir.extents import constant

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


@tvm.transform.module_pass(opt_level=0, name="LiftOutputs")
class LiftOutputs:
    """Turn the tensors that ``main`` allocates for its results into parameters after its own.

    Before::

        def main(x: R.Tensor((1, 64), "float32")):
            y = R.builtin.alloc_tensor(R.shape([1, 64]), "float32", 0, "global")
            cls.relu(x, y)
            return y

    After, with the attribute ``tvm_fusion.lifted_outputs``::

        def main(x: R.Tensor((1, 64), "float32"), y: R.Tensor((1, 64), "float32")):
            cls.relu(x, y)
            return y

    It runs on calls in destination-passing style, after ``CallTIRRewrite``, and before memory is
    planned and weights become parameters. Left alone: results that the program does not allocate,
    such as inputs, constants and views; those of unknown sizes; and a tensor that is returned
    again.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``main``."""
        main = mod["main"]
        values = {
            binding.var: binding.value
            for block in main.body.blocks
            for binding in block.bindings
            if isinstance(binding, relax.VarBinding)
        }
        result = _source(main.body.body, values)
        result = values.get(result, result)
        fields = list(result.fields) if isinstance(result, relax.Tuple) else [main.body.body]
        sources = [_source(field, values) for field in fields]
        is_lifted = [
            _is_new_tensor(source, values) and source not in sources[:number]
            for number, source in enumerate(sources)
        ]
        lifted = [source for source, chosen in zip(sources, is_lifted, strict=True) if chosen]
        if not lifted:
            return mod
        blocks = [
            type(block)([binding for binding in block.bindings if binding.var not in lifted])
            for block in main.body.blocks
        ]
        body = relax.BlockBuilder(mod).normalize(relax.SeqExpr(blocks, main.body.body))
        func = relax.Function(
            [*main.params, *lifted], body, main.ret_ty, main.is_pure, main.attrs
        ).with_attr(attributes.LIFTED_OUTPUTS, is_lifted)
        mod = mod.clone()
        mod.update_func(mod.get_global_var("main"), func)
        return mod


def _source(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Follow a variable to the one that is bound to another thing than a variable."""
    while isinstance(values.get(value), relax.Var):
        value = values[value]
    return value


def _is_new_tensor(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> bool:
    """Return whether a variable is a tensor of known sizes that the program allocates."""
    call = values.get(value)
    if not isinstance(call, relax.Call) or _name(call.op) != "relax.builtin.alloc_tensor":
        return False
    shape = value.ty.shape
    return isinstance(shape, relax.ShapeExpr) and all(constant(size) for size in shape.values)


def sole_kernel(main: relax.Function) -> relax.Call | None:
    """Find the only kernel call of a program.

    Parameters
    ----------
    main : relax.Function
        Lowered to the virtual machine.

    Returns
    -------
    relax.Call | None
        The only call of a function of the module, whose last argument, a new tensor or one that the
        caller gives, the program returns. None if the program does more than check its arguments
        and allocate.
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
    if kernel is None or not kernel.args or not main.body.body.same_as(kernel.args[-1]):
        return None
    outputs = tensors or [param for param in main.params if param.same_as(kernel.args[-1])]
    return kernel if len(outputs) == 1 and outputs[0].same_as(kernel.args[-1]) else None


def _name(op: relax.Expr) -> str:
    return str(op.global_symbol if isinstance(op, relax.ExternFunc) else getattr(op, "name", ""))
