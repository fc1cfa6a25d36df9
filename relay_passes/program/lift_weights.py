# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftWeights``: turns the weights of a program into arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.workload.workspace_layout import is_workspace

from .lift_outputs import sole_kernel

WEIGHTS = "tvm_fusion.weights"
"""The module attribute with the tensors for the new parameters, in order."""

LEAST_BYTES = 4096
"""Bytes below which constants stay: as arguments they would cost more than they save."""

_TYPES = frozenset(
    ["float16", "float32", "float64"] + [f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)]
)


@tvm.transform.module_pass(opt_level=0, name="LiftWeights")
class LiftWeights:
    """Turn the large constants of a program into additional parameters after its own.

    TVM's virtual machine reads constants from its program by copying them three times. A parameter
    can be read from a file once, into the memory where the kernels use it.

    Before::

        def main(x: R.Tensor((1, 64), "float32")):
            y = R.call_tir(cls.matmul, (x, metadata["relax.expr.Constant"][0]), ...)

    After, with the constant in the module's attribute ``tvm_fusion.weights``::

        def main(x: R.Tensor((1, 64), "float32"), weight0: R.Tensor((64, 64), "float32")):
            y = R.call_tir(cls.matmul, (x, weight0), ...)

    It runs last: in each call, the virtual machine checks the parameters that exist when
    ``VMShapeLower`` runs. Left alone: constants of less than 4096 bytes, unless the program is one
    kernel, which may then be called with the weights, or they have no element, since TVM cannot
    load those, or they are workspaces, which the host must reach; constants of types that numpy
    lacks, and other functions than those named.

    Parameters
    ----------
    functions : Sequence[str]
        The functions; each takes the weights of all of them, of which equal ones are one.
    """

    def __init__(self, functions: Sequence[str] = ("main",)) -> None:
        self.functions = tuple(functions)

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the functions."""
        weights: dict[_Place, GenericConst] = {}
        seen = {}
        for name in self.functions:
            alone = sole_kernel(mod[name]) is not None
            lifter = _Lifter(mod, 0 if alone else LEAST_BYTES, weights)
            seen[name] = lifter.visit_expr(mod[name]), lifter.params
        if not weights:
            return mod
        mod = mod.clone()
        for name, (func, params) in seen.items():
            lifted = [
                params[place] if place in params else relax.Var(f"weight{number}", constant.ty)
                for number, (place, constant) in enumerate(weights.items())
            ]
            taken = [*func.params, *lifted]
            func = relax.Function(taken, func.body, func.ret_ty, func.is_pure, func.attrs)
            mod.update_func(mod.get_global_var(name), func)
        before = list(mod.attrs[WEIGHTS]) if mod.attrs and WEIGHTS in mod.attrs else []
        return mod.with_attr(WEIGHTS, before + [constant.value for constant in weights.values()])


_Place = tuple[int, str, tuple[int, ...]]
"""Address, type and shape of a tensor."""


@mutator
class _Lifter(PyExprMutator):
    """Replaces constants by parameters and collects them in ``weights``."""

    def __init__(
        self, mod: IRModule, least_bytes: int, weights: dict[_Place, GenericConst]
    ) -> None:
        super().__init__(mod)
        self._least_bytes = least_bytes
        self._weights = weights
        self.params: dict[_Place, relax.Var] = {}

    def visit_generic_const_(self, op: GenericConst) -> relax.Expr:
        """Use a parameter instead; one for all uses of a tensor."""
        tensor = op.value
        if not isinstance(tensor, tvm.runtime.Tensor):
            return op
        if str(tensor.dtype) not in _TYPES:
            return op
        if 0 < _bytes(tensor) < self._least_bytes and not is_workspace(np.from_dlpack(tensor)):
            return op
        place = (tensor.data_ptr(), str(tensor.dtype), tuple(int(size) for size in tensor.shape))
        self._weights.setdefault(place, op)
        if place not in self.params:
            number = list(self._weights).index(place)
            self.params[place] = relax.Var(f"weight{number}", op.ty)
        return self.params[place]


def _bytes(tensor: tvm.runtime.Tensor) -> int:
    size = tvm.DataType(str(tensor.dtype)).bits // 8
    for extent in tensor.shape:
        size *= extent
    return size
