# SPDX-License-Identifier: Apache-2.0
"""Pass ``PackWeights``: constants get the layout in which kernels read them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.schedule_rule import LAID_OUT

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name


@tvm.transform.module_pass(opt_level=0, name="PackWeights")
class PackWeights:
    """Lay the constant matrices out that schedule rules have marked.

    Before::

        @T.prim_func
        def matmul(x: T.Buffer((64, 512)), w: T.Buffer((16, 512, 16)), y):
            T.func_attr({"tvm_fusion.laid_out": [1, 1, 16]})
            ...

        y = R.call_tir(cls.matmul, (x, w), ...)                         # w: [512, 256]

    After, without the attribute::

        y = R.call_tir(cls.matmul, (x, w'), ...)                        # w': [16, 512, 16]

    with ``w'[j, k, lane] = w[k, 16 * j + lane]``. The attribute holds the position of the argument,
    the axis that is cut, and the number of lanes. It runs after ``ApplyRules``. Left alone: all
    functions without the attribute. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite the calls of every marked function."""
        marked = {
            name.name_hint: [int(number) for number in func.attrs[LAID_OUT]]
            for name, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and func.attrs and LAID_OUT in func.attrs
        }
        if not marked:
            return mod
        others = {
            name: func for name, func in mod.functions_items() if name.name_hint not in marked
        }
        packer = _Packer(IRModule(others), marked)
        for name in marked:  # a name of a function has its type
            packer.add(name, mod[name].without_attr(LAID_OUT))
        for name, func in others.items():
            if isinstance(func, relax.Function):
                packer.builder_.update_func(name, packer.visit_expr(func))
        functions = dict(packer.builder_.get().functions_items())
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


@mutator
class _Packer(PyExprMutator):
    """Replaces the constants of calls."""

    def __init__(self, mod: IRModule, marked: dict[str, list[int]]) -> None:
        super().__init__(mod)
        self._marked = marked
        self._packed: dict[tuple[int, tuple[int, ...], int, int], relax.Expr] = {}
        self._added: dict[str, GlobalVar] = {}

    def add(self, name: str, func: tirx.PrimFunc) -> None:
        """Add a function in its new form."""
        self._added[name] = self.builder_.add_func(func, name)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Give a marked function its constant in the wanted layout."""
        name = call.args[0].name_hint if op_name(call) == "relax.call_tir" else ""
        if name not in self._marked:
            return super().visit_call_(call)
        place, axis, lanes = self._marked[name]
        fields = list(call.args[1].fields)
        fields[place] = self._pack(fields[place], axis, lanes)
        arguments = [self._added[name], relax.Tuple(fields), *call.args[2:]]
        return super().visit_call_(relax.Call(call.op, arguments, call.attrs, call.ty_args))

    def _pack(self, matrix: GenericConst, axis: int, lanes: int) -> relax.Expr:
        """A matrix in its new layout; the same one for all calls with these elements."""
        tensor = matrix.value
        key = (tensor.data_ptr(), tuple(map(int, tensor.shape)), axis, lanes)
        if key not in self._packed:
            values = np.moveaxis(array_of(matrix), axis, 1)
            depth, width = values.shape
            vectors = values.reshape(depth, width // lanes, lanes).transpose(1, 0, 2)
            self._packed[key] = tensor_constant(vectors, matrix.ty.dtype)
        return self._packed[key]
