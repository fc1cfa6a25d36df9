# SPDX-License-Identifier: Apache-2.0
"""Loads of every second, third or fourth element, such as a channel of pixels.

TVM loads the elements of such a vector one by one. All vectors of a period are adjacent in memory;
here they are loaded together, and LLVM shuffles them::

    before: o[v] = a[3 * v] + a[3 * v + 1] + a[3 * v + 2]
    after:  tvm_fusion_planes_3_16_8(T.address_of(a[0]), T.address_of(planes[0, 0]))
            o[v] = planes[0, v] + planes[1, v] + planes[2, v]

Functions in LLVM IR, which a kernel brings with it, are linked and inlined; buffers through which
they take and give vectors stay in registers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from schedules import attributes
from schedules.tir.expression_walk import is_if_then_else, loads, nodes, substitute
from schedules.tir.extents import constant
from schedules.tir.index_math import factor_of, ravel

from .blocks import BlockFacts
from .tails import fresh

IMPORT = "pragma_import_llvm"
"""Attribute around what calls the functions: their text."""


def with_functions(
    func: tirx.PrimFunc, buffers: Sequence[ir.Var], text: str, end: tirx.Stmt | None = None
) -> tirx.PrimFunc:
    """The function with more buffers, imported functions, and a statement at its end."""
    root = func.body
    body = root.block.body if end is None else tirx.SeqStmt([root.block.body, end])
    block = s_tir.SBlock(
        root.block.iter_vars,
        root.block.reads,
        root.block.writes,
        root.block.name_hint,
        tirx.AttrStmt(tirx.IntImm("int32", 0), IMPORT, ir.StringImm(text), body),
        root.block.init,
        [*root.block.alloc_buffers, *buffers],
        root.block.match_buffers,
        root.block.annotations,
    )
    return func.with_body(s_tir.SBlockRealize([], root.predicate, block))


def axis_along(loop: tirx.For) -> tirx.IterVar:
    """A new iteration variable of a block for a loop."""
    zero = tirx.const(0, str(loop.loop_var.ty.dtype))
    return tirx.IterVar(ir.Range(zero, loop.extent), tirx.Var("at", loop.loop_var.ty), 0)


_MOST_PERIOD = 4
_NAME = re.compile(r"tvm_fusion_planes_(\d+)_(\d+)_(\d+)")
_TEXT = """
define i32 @{name}(ptr noalias %from, ptr noalias %to) {{
  %all = load <{total} x i{bits}>, ptr %from, align {size}
{planes}  ret i32 0
}}
"""
_PLANE = """\
  %plane{n} = shufflevector <{total} x i{bits}> %all, <{total} x i{bits}> poison, <{lanes} x i32> \
<{places}>
  %to{n} = getelementptr i8, ptr %to, i64 {offset}
  store <{lanes} x i{bits}> %plane{n}, ptr %to{n}, align {size}
"""
_OPENCL = """
int {name}(const __global void* from, __private void* to) {{
  const __global {dtype}* all = (const __global {dtype}*)from;
  for (int n = 0; n < {period}; ++n)
    for (int lane = 0; lane < {lanes}; ++lane)
      ((__private {dtype}*)to)[n * {lanes} + lane] = all[lane * {period} + n];
  return 0;
}}
"""
# OpenCL's types by their bits, which are those of whole bytes.
_TYPES = {"8": "uchar", "16": "ushort", "32": "uint", "64": "ulong"}


def is_interleaved(facts: BlockFacts, lane: int) -> bool:
    """Return whether elements that a block loads are few elements apart along a loop."""
    strides = [load.strides[lane] for load in facts.loads]
    return any(isinstance(each, int) and 1 < each <= _MOST_PERIOD for each in strides)


def load_interleaved(
    func: tirx.PrimFunc,  # A scheduled function for LLVM.
) -> tirx.PrimFunc:
    """Load the vectors of blocks with ``INTERLEAVED`` together.

    Returns the same function if no such block loads all elements of a period.
    """
    texts: dict[str, str] = {}
    buffers: list[ir.Var] = []

    def rewrite(loop: tirx.For) -> tirx.Stmt:
        if not _is_candidate(loop):
            return loop
        periods = _periods(loop)
        for period in periods:
            texts[period.name] = _text(period)
            buffers.append(period.planes)
        return _loaded(loop, periods) if periods else loop

    done = tvm_ffi.structural_map(func, (tirx.For, rewrite))
    return with_functions(done, buffers, "".join(texts.values())) if texts else func


def opencl_planes(name: str) -> str | None:
    """Return the text in OpenCL of one of the functions that load, by its name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    period, lanes, bits = found.groups()
    dtype = _TYPES[bits]
    return _OPENCL.format(name=name, period=period, lanes=lanes, dtype=dtype)


@dataclass(frozen=True)
class _Period:
    """Loads of a buffer whose elements take turns in memory."""

    load: ir.TensorLoad  # Load of the first place.
    place: ir.Expr
    planes: ir.Var  # Buffer of the vectors, one after another.
    name: str  # Name of the function that loads them.


def _is_candidate(loop: tirx.For) -> bool:
    """Return whether a loop has one vector of an annotated block, with no conditional load."""
    realize = loop.body
    if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(realize, s_tir.SBlockRealize):
        return False
    block = realize.block
    if attributes.INTERLEAVED not in block.annotations or not isinstance(
        block.body, tirx.BufferStore
    ):
        return False
    is_whole = isinstance(realize.predicate, tirx.IntImm) and constant(loop.extent) is not None
    return is_whole and not any(map(is_if_then_else, nodes(block.body.value, ir.Call)))


def _periods(loop: tirx.For) -> list[_Period]:
    """The buffers of which all elements of a period are loaded, so that none else is."""
    block, values = loop.body.block, loop.body.iter_values
    of_axes = {axis.var: value for axis, value in zip(block.iter_vars, values, strict=True)}
    by_buffer: dict[ir.Var, list[ir.TensorLoad]] = {}
    for load in loads(block.body.value):
        if len(load.indices):  # A single number has no indices.
            by_buffer.setdefault(load.source, []).append(load)
    analyzer, periods = sym.Analyzer(), []
    for buffer, several in by_buffer.items():
        dtype = tvm_ffi.dtype(str(buffer.dtype))
        if str(dtype.bits) not in _TYPES or dtype.lanes > 1 or str(dtype) == "bool":
            continue
        places = [_place(load) for load in several]
        period = factor_of(loop.loop_var, substitute(places[0], of_axes))
        distances = [constant(analyzer.simplify(place - places[0])) for place in places]
        aheads = [ahead for ahead in distances if ahead is not None]
        if len(aheads) < len(places) or period is None or not 1 < period <= _MOST_PERIOD:
            continue
        first = min(aheads)
        if {ahead - first for ahead in aheads} != set(range(period)):
            continue
        lanes = constant(loop.extent)
        planes = tirx.decl_buffer([period, lanes], str(dtype), "planes")
        name = f"tvm_fusion_planes_{period}_{lanes}_{dtype.bits}"
        at = aheads.index(first)
        periods.append(_Period(several[at], places[at], planes, name))
    return periods


def _loaded(loop: tirx.For, periods: Sequence[_Period]) -> tirx.Stmt:
    """The loop with ``periods`` from their planes, and the calls that fill these."""
    realize, block, lane = loop.body, loop.body.block, axis_along(loop)
    of_buffer = {period.load.source: period for period in periods}
    analyzer, calls = sym.Analyzer(), []

    def from_plane(load: ir.TensorLoad) -> ir.Expr:
        period = of_buffer.get(load.source)
        if period is None:
            return load
        return period.planes[analyzer.simplify(_place(load) - period.place), lane.var]

    zero = {loop.loop_var: tirx.const(0, str(loop.loop_var.ty.dtype))}
    values = [substitute(value, zero) for value in realize.iter_values]
    whole = [
        tirx.BufferRegion(
            period.planes, [ir.Range(tirx.const(0, "int64"), n) for n in period.planes.shape]
        )
        for period in periods
    ]
    for period, region in zip(periods, whole, strict=True):
        source, to = tirx.address_of(period.load), tirx.address_of(period.planes[0, 0])
        call = tirx.Evaluate(tirx.call_extern("int32", period.name, source, to))
        name = f"{block.name_hint}_planes"
        filling = s_tir.SBlock(block.iter_vars, block.reads, [region], name, call)
        calls.append(fresh(s_tir.SBlockRealize(values, realize.predicate, filling)))
    store, others = block.body, block.annotations.items()
    new = tvm_ffi.structural_map(store.value, (ir.TensorLoad, from_plane))
    computing = s_tir.SBlock(
        [*block.iter_vars, lane],
        [*block.reads, *whole],
        block.writes,
        block.name_hint,
        tirx.BufferStore(store.buffer, new, store.indices),
        annotations={key: value for key, value in others if key != attributes.INTERLEAVED},
    )
    body = s_tir.SBlockRealize([*realize.iter_values, loop.loop_var], realize.predicate, computing)
    vectors = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)
    return tirx.SeqStmt([*calls, vectors])


def _place(load: ir.TensorLoad) -> ir.Expr:
    return ravel(load.indices, load.source.shape, str(load.indices[-1].ty.dtype))


def _text(period: _Period) -> str:
    """LLVM IR of the function that loads a period."""
    count, lanes = map(int, period.planes.shape)
    bits = tvm_ffi.dtype(str(period.planes.dtype)).bits
    numbers = {"total": count * lanes, "lanes": lanes, "bits": bits, "size": bits // 8}
    planes = [
        _PLANE.format(
            n=n,
            places=", ".join(f"i32 {lane * count + n}" for lane in range(lanes)),
            offset=n * lanes * bits // 8,
            **numbers,
        )
        for n in range(count)
    ]
    return _TEXT.format(name=period.name, planes="".join(planes), **numbers)
