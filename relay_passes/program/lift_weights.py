# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftWeights``: turns the weights of a program into arguments."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from .sole_kernel import sole_kernel

WEIGHTS = "tvm_fusion.weights"
"""The module attribute with the tensors for the new parameters, in order."""

LEAST_BYTES = 4096
"""Bytes below which constants stay: as arguments they would cost more than they save."""

_TYPES = frozenset(
    ["float16", "float32", "float64"] + [f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)]
)


@tvm.transform.module_pass(opt_level=0, name="LiftWeights")
class LiftWeights:
    """Turn the large constants of ``main`` into additional parameters after its own.

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
    kernel, which may then be called with the weights; those of types that numpy lacks, and other
    functions than ``main``.
    """

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``main``."""
        main = mod["main"]
        lifter = _Lifter(mod, LEAST_BYTES if sole_kernel(main) is None else 0)
        seen = lifter.visit_expr(main)
        if not lifter.weights:
            return mod
        params = [*seen.params, *lifter.params]
        lifted = relax.Function(params, seen.body, seen.ret_ty, seen.is_pure, seen.attrs)
        mod = mod.clone()
        mod.update_func(mod.get_global_var("main"), lifted)
        before = list(mod.attrs[WEIGHTS]) if mod.attrs and WEIGHTS in mod.attrs else []
        return mod.with_attr(WEIGHTS, before + lifter.weights)


@mutator
class _Lifter(PyExprMutator):
    """Replaces constants by parameters and collects them."""

    def __init__(self, mod: IRModule, least_bytes: int) -> None:
        super().__init__(mod)
        self._least_bytes = least_bytes
        self.params: list[relax.Var] = []
        self.weights: list[tvm.runtime.Tensor] = []
        self._known: dict[tuple[int, str, tuple[int, ...]], relax.Var] = {}

    def visit_generic_const_(self, op: GenericConst) -> relax.Expr:
        """Use a parameter instead; one for all uses of a tensor."""
        tensor = op.value
        if not isinstance(tensor, tvm.runtime.Tensor):
            return op
        if str(tensor.dtype) not in _TYPES or _bytes(tensor) < self._least_bytes:
            return op
        place = (tensor.data_ptr(), str(tensor.dtype), tuple(int(size) for size in tensor.shape))
        if place in self._known:
            return self._known[place]
        param = relax.Var(f"weight{len(self.params)}", op.ty)
        self.params.append(param)
        self.weights.append(tensor)
        self._known[place] = param
        return param


def _bytes(tensor: tvm.runtime.Tensor) -> int:
    size = tvm.DataType(str(tensor.dtype)).bits // 8
    for extent in tensor.shape:
        size *= extent
    return size
