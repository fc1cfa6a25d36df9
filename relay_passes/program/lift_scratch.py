# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftScratch``: memory that functions allocate for the time of a call becomes a result."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, relax, s_tir, tirx
from tvm.ir import GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from relay_passes.core.expressions import op_name
from schedules.tir.extents import constant


@tvm.transform.module_pass(opt_level=0, name="LiftScratch")
class LiftScratch:
    """Make memory that functions of kernels allocate between their launches a result of theirs.

    Before::

        lv = R.call_tir(cls.decode, (q, k, v), out_ty=R.Tensor((8, 64), "float16"))

        def decode(q, k, v, out):
            parts = T.alloc_buffer((4096,))
            ...

    After::

        lv1 = R.call_tir(
            cls.decode,
            (q, k, v),
            out_ty=[R.Tensor((8, 64), "float16"), R.Tensor((4096,), "float32")],
        )
        lv = lv1[0]

        def decode(q, k, v, out, parts):
            ...

    A captured graph keeps the addresses of its first call. TVM allocates such memory from a pool of
    the calling thread, which frees it when that thread ends; results are planned, and live as long
    as the program. Left alone: functions that allocate memory of unknown size, which graphs leave
    alone, too, and those of the host. It runs on scheduled functions, before ``CallTIRRewrite``,
    where only ``call_tir`` calls them.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with longer lists of results."""
        functions, lifted = dict(mod.functions_items()), {}
        for var, func in mod.functions_items():
            scratch = _scratch(func) if isinstance(func, tirx.PrimFunc) else []
            if scratch:
                params, body = [*func.params, *scratch], _without(func.body, scratch)
                longer = tirx.PrimFunc(params, body, func.ret_type, func.attrs)
                del functions[var]
                new = relax.BlockBuilder().add_func(longer, var.name_hint)
                functions[new] = longer
                types = [relax.TensorType(buffer.shape, buffer.dtype) for buffer in scratch]
                lifted[var] = new, types
        if not lifted:
            return mod
        caller = _Caller(lifted)
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function):
                functions[var] = caller.visit_expr(func)
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _scratch(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """The buffers in device memory that a function allocates; none if a size is unknown."""
    if func.attrs and "tirx.is_host_func" in func.attrs:
        return []
    found: list[tirx.Buffer] = []
    tvm_ffi.structural_walk(
        func.body,
        [
            (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers)),
            (tirx.AllocBuffer, lambda stmt: found.append(stmt.buffer)),
        ],
    )
    found = [buffer for buffer in found if buffer.scope() == "global"]
    extents = [constant(extent) for buffer in found for extent in buffer.shape]
    return [] if None in extents else found


def _without(body: tirx.Stmt, scratch: list[tirx.Buffer]) -> tirx.Stmt:
    """The statement without the allocations."""

    def is_lifted(buffer: tirx.Buffer) -> bool:
        return any(buffer.same_as(each) for each in scratch)

    def shorter(block: s_tir.SBlock) -> s_tir.SBlock:
        kept = [buffer for buffer in block.alloc_buffers if not is_lifted(buffer)]
        if len(kept) == len(block.alloc_buffers):
            return block
        return s_tir.SBlock(
            *(block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init),
            *(kept, block.match_buffers, block.annotations),
        )

    return tvm_ffi.structural_map(
        body,
        [
            (s_tir.SBlock, shorter),
            (tirx.AllocBuffer, lambda s: tirx.Evaluate(0) if is_lifted(s.buffer) else s),
        ],
    )


@mutator
class _Caller(PyExprMutator):
    """Extends the calls of functions by their new results."""

    def __init__(self, lifted: dict[GlobalVar, tuple[GlobalVar, list[relax.TensorType]]]) -> None:
        super().__init__()
        self._lifted = lifted

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Return the results that the call had before."""
        call = super().visit_call_(call)
        if op_name(call) != "relax.call_tir" or call.args[0] not in self._lifted:
            return call
        new, types = self._lifted[call.args[0]]
        [before] = call.ty_args
        is_tuple = isinstance(before, relax.TupleType)
        own = list(before.fields) if is_tuple else [before]
        all_types = relax.TupleType([*own, *types])
        longer = relax.Call(call.op, [new, *call.args[1:]], call.attrs, [all_types])
        results = self.builder_.emit(longer)
        fields = [relax.TupleGetItem(results, index) for index in range(len(own))]
        return relax.Tuple(fields) if is_tuple else fields[0]
