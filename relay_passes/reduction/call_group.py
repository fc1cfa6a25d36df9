# SPDX-License-Identifier: Apache-2.0
"""Calls of PrimFuncs that become one function."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.relax.utils import copy_with_new_vars

from .primfunc_calls import operands

_NAMES = 8  # functions whose names form the name of the fused one


class CallGroup:
    """A function of several calls, as ``FuseOps`` builds it.

    Parameters
    ----------
    calls : dict[relax.Var, relax.Call]
        In topological order.
    results : Sequence[relax.Var]
        Those that the function returns, in a tuple if they are several.

    Attributes
    ----------
    inputs : list[relax.Expr]
        The tensors passed to the function: variables and constants from outside.
    shape_arguments : list[relax.ShapeExpr]
        The symbolic extents that do not follow from these tensors, if there are any.
    function : relax.Function
        Private and with the attribute ``Primitive``.
    name : str
        After the functions that are called.
    """

    def __init__(self, calls: dict[relax.Var, relax.Call], results: Sequence[relax.Var]) -> None:
        self.calls, self.results = calls, list(results)
        self._local: dict[relax.Expr, relax.Var] = {}
        self.inputs = self._read_inputs()
        names = [str(call.args[0].name_hint) for call in calls.values()]
        self.name = f"fused_{'_'.join(names[-_NAMES:])}"
        params = [self._local[tensor] for tensor in self.inputs]
        function = self._function(params)
        unknown = relax.analysis.free_symbolic_vars(function)
        self.shape_arguments = [relax.ShapeExpr(unknown)] if unknown else []
        if unknown:
            params.append(relax.Var("tir_vars", relax.ShapeType(unknown)))
            function = relax.Function(params, function.body, function.ret_ty)
            function = function.with_attr("Primitive", True)
        self.function = copy_with_new_vars(function)

    @property
    def arguments(self) -> list[relax.Expr]:
        """Arguments of a call of the function."""
        return [*self.inputs, *self.shape_arguments]

    def prim_func(self, mod: tvm.IRModule) -> tirx.PrimFunc:
        """The PrimFunc that ``FuseTIR`` makes of the function; ``mod`` has its callees."""
        called = [call.args[0] for call in self.calls.values()]
        builder = relax.BlockBuilder(tvm.IRModule({name: mod[name] for name in called}))
        name = builder.add_func(self.function, self.name)
        params = list(copy_with_new_vars(self.function).params)
        with builder.function("main", params):
            with builder.dataflow():
                result = builder.emit_output(relax.Call(name, params))
            builder.emit_func_output(result)
        fused = relax.transform.FuseTIR()(builder.get())
        [binding] = fused["main"].body.blocks[0].bindings
        return fused[binding.value.args[0]]

    def _read_inputs(self) -> list[relax.Expr]:
        inputs: dict[relax.Expr, None] = {}
        for call in self.calls.values():
            inputs |= dict.fromkeys(e for e in operands(call) if e not in self.calls)
        for number, tensor in enumerate(inputs):
            name = f"param_{number}" if isinstance(tensor, GenericConst) else tensor.name
            self._local[tensor] = relax.Var(name, tensor.ty)
        return list(inputs)

    def _function(self, params: list[relax.Var]) -> relax.Function:
        bindings: list[relax.VarBinding] = []
        for var, call in self.calls.items():
            alone = self.results == [var]
            kind = relax.Var if alone else relax.DataflowVar
            self._local[var] = kind("gv" if alone else var.name, call.ty)
            bindings.append(relax.VarBinding(self._local[var], self._copy(call)))
        result = self._local[self.results[0]]
        if len(self.results) > 1:
            value = relax.Tuple([self._local[var] for var in self.results])
            result = relax.Var("gv", value.ty)
            bindings.append(relax.VarBinding(result, value))
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
        return relax.Function(params, body, result.ty).with_attr("Primitive", True)

    def _copy(self, call: relax.Call) -> relax.Call:
        function, arguments = call.args
        local = [self._local.get(argument, argument) for argument in arguments.fields]
        return relax.Call(call.op, [function, relax.Tuple(local)], call.attrs, call.ty_args)
