# SPDX-License-Identifier: Apache-2.0
"""Compiled exchange of a network's rows between ranks, through slots of shared memory.

The kernel packs what this rank sends into slots, and unpacks what it receives from slots, by a row
of the table of :mod:`.exchange_table`. TVM has no loads that see what another process stores:
functions in LLVM IR, which are linked and inlined, have. Where the row tells nothing, Python makes
the exchange, and where a slot is late, Python waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.tir.statements import store_fence

from .. import streamed_copy as streamed
from . import exchange_table as table
from .row_plan import EXCHANGE, EXCHANGE_WAIT

_TEXT = """
define i64 @tvm_fusion_address(ptr %memory) alwaysinline {{
  %address = ptrtoint ptr %memory to i64
  ret i64 %address
}}
define i32 @tvm_fusion_copy(i64 %to, i64 %from, i64 %size) alwaysinline {{
  %target = inttoptr i64 %to to ptr
  %source = inttoptr i64 %from to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %size, i1 false)
  ret i32 0
}}
define i32 @tvm_fusion_slot_is_late(i64 %slot, i32 %full, i64 %spins) {{
begin:
  %sent = inttoptr i64 %slot to ptr
  %taken = getelementptr i8, ptr %sent, i64 {taken}
  br label %test
test:
  %number = phi i64 [ 0, %begin ], [ %next, %again ]
  %a = load atomic i8, ptr %sent acquire, align 1
  %b = load atomic i8, ptr %taken acquire, align 1
  %differ = icmp ne i8 %a, %b
  %state = zext i1 %differ to i32
  %done = icmp eq i32 %state, %full
  br i1 %done, label %end, label %again
again:
  {pause}
  %next = add i64 %number, 1
  %late = icmp uge i64 %next, %spins
  br i1 %late, label %end, label %test
end:
  %result = phi i32 [ 0, %test ], [ 1, %again ]
  ret i32 %result
}}
define i32 @tvm_fusion_slot_send(i64 %slot, i64 %bytes) alwaysinline {{
  %sent = inttoptr i64 %slot to ptr
  %size = getelementptr i8, ptr %sent, i64 {size}
  %taken = getelementptr i8, ptr %sent, i64 {taken}
  store i64 %bytes, ptr %size, align 8
  %count = load atomic i8, ptr %taken acquire, align 1
  %next = add i8 %count, 1
  store atomic i8 %next, ptr %sent release, align 1
  ret i32 0
}}
define i32 @tvm_fusion_slot_take(i64 %slot) alwaysinline {{
  %sent = inttoptr i64 %slot to ptr
  %taken = getelementptr i8, ptr %sent, i64 {taken}
  %count = load atomic i8, ptr %sent acquire, align 1
  store atomic i8 %count, ptr %taken release, align 1
  ret i32 0
}}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
{declare}
"""
_COPY = "tvm_fusion_copy"
_PAUSE = "@llvm.x86.sse2.pause()"


def exchange_kernel(
    number: int,  # Number of the exchange.
    # Types of its operands but the table, of which it reads the first; may be empty.
    tensors: Sequence[ir.TensorType],
    result: ir.TensorType,  # What it returns; one byte if it writes the first operand, or nothing.
    shape: Sequence[int],  # Shape of the table, its last parameter but the result.
    # Whether the processor has an instruction for those that spin, and streaming stores.
    is_x86: bool,
) -> tirx.PrimFunc:
    """The kernel of an exchange."""
    pause = f"call void {_PAUSE}" if is_x86 else ""
    declare = f"declare void {_PAUSE}\n{streamed.TEXT}" if is_x86 else ""
    places = {"taken": table.SLOT_TAKEN, "size": table.SLOT_SIZE}
    text = _TEXT.format(pause=pause, declare=declare, **places)
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            operands = [_param(f"x{at}", each) for at, each in enumerate(tensors)]
            rows = T.arg("table", tirx.decl_buffer(shape, "int64", "table"))
            out = _param("out", result)
            T.func_attr({"tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                with T.attr(T.int32(0), "pragma_import_llvm", text):
                    own = T.bind(_call("address", (operands or [out])[0].data, dtype="int64"))
                    last = T.bind(_call("address", out.data, dtype="int64"))
                    _Writer(number, rows, is_x86).write(own, own if len(out.shape) == 1 else last)
    return builder.get().without_attr("global_symbol")


def _param(name: str, ty: ir.TensorType) -> tirx.Buffer:
    return T.arg(name, tirx.decl_buffer(list(ty.shape.values), str(ty.dtype), name))


def _call(name: str, *args: tirx.Expr, dtype: str = "int32") -> tirx.Expr:
    return T.call_extern(dtype, f"tvm_fusion_{name}", *args)


class _Writer:
    """Emits an exchange."""

    def __init__(self, number: int, rows: tirx.Buffer, is_x86: bool) -> None:
        self._number, self._rows, self._is_x86 = number, rows, is_x86

    def write(self, own: tirx.Expr, held: tirx.Expr) -> None:
        """Emit it; ``held`` is the address of what the rank needs."""
        with T.If(self._field(table.QUICK) == T.int64(0)):
            with T.Then():
                T.evaluate(T.call_packed(EXCHANGE, T.int64(self._number), own, held))
            with T.Else():
                self._say(table.INSIDE)
                sends, receives = self._field(table.SENDS), self._field(table.RECEIVES)
                with T.serial(T.int64(0), sends) as message:
                    slot, message_place = self._awaited(message, full=False)
                    self._pack(message_place, slot + T.int64(table.SLOT_HEADER), own)
                    T.evaluate(_call("slot_send", slot, self._field(table.BYTES, message_place)))
                with T.serial(T.int64(0), self._field(table.KEPT)):
                    self._copy(self._place(sends + receives), held, own)
                with T.serial(T.int64(0), receives) as message:
                    slot, message_place = self._awaited(sends + message, full=True)
                    self._copy(message_place, held, slot + T.int64(table.SLOT_HEADER))
                    T.evaluate(_call("slot_take", slot))
                self._say(table.AFTER)

    def _field(self, field: int, at: tirx.Expr | None = None) -> tirx.Expr:
        index = T.int64(field) if at is None else at + T.int64(field)
        return self._rows[T.int64(self._number), index]

    def _place(self, message: tirx.Expr) -> tirx.Expr:
        """Place of a message's first field."""
        return T.int64(table.HEADER) + message * T.int64(table.FIELDS)

    def _say(self, text: int) -> None:
        size = T.int64(table.TEXT_BYTES)
        T.evaluate(_call("copy", self._field(table.RECORD), self._field(text), size))

    def _awaited(self, message: tirx.Expr, full: bool) -> tuple[tirx.Expr, tirx.Expr]:
        """The slot of a message, after it has become full or empty, and the message's place."""
        at = T.bind(self._place(message))
        slot = T.bind(self._field(table.SLOT, at))
        late = _call("slot_is_late", slot, T.int32(full), self._field(table.SPINS))
        with T.If(late != T.int32(0)), T.Then():
            T.evaluate(T.call_packed(EXCHANGE_WAIT, T.int64(self._number), message))
        return slot, at

    def _pack(self, place: tirx.Expr, slot: tirx.Expr, own: tirx.Expr) -> None:
        """Emit the copy of a message into a slot, past the caches where that is faster."""
        if not self._is_x86:
            self._copy(place, slot, own)
            return
        size, length = self._field(table.BYTES, place), self._field(table.LENGTH, place)
        is_whole = tirx.truncmod(length, streamed.UNIT).equal(0)
        with T.If(tirx.all(size >= streamed.LEAST_BYTES, is_whole)):
            with T.Then():
                self._copy(place, slot, own, streamed.STREAM)
                T.add_to_parent(store_fence())
            with T.Else():
                self._copy(place, slot, own)

    def _copy(self, at: tirx.Expr, target: tirx.Expr, source: tirx.Expr, copy: str = _COPY) -> None:
        """Emit the copy of a message, or of the rank's own rows."""

        def place(base: tirx.Expr, offset: int, steps: tuple[int, int]) -> tirx.Expr:
            outer_step, inner_step = (self._field(step, at) for step in steps)
            return base + self._field(offset, at) + outer * outer_step + inner * inner_step

        with (
            T.serial(T.int64(0), self._field(table.OUTER, at)) as outer,
            T.serial(T.int64(0), self._field(table.INNER, at)) as inner,
        ):
            to = place(target, table.TARGET, (table.OUTER_TARGET, table.INNER_TARGET))
            by = place(source, table.SOURCE, (table.OUTER_SOURCE, table.INNER_SOURCE))
            T.evaluate(T.call_extern("int32", copy, to, by, self._field(table.LENGTH, at)))
