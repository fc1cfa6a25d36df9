# SPDX-License-Identifier: Apache-2.0
"""Stores that bypass the caches, and prefetches of what a nest reads from memory.

A core waits for few lines at a time that are on their way to its first cache, and for more that are
on their way to the second. Of the places that a filter reads, the last one in memory is new, and
the others have been read before::

    before: o[i, j * 16 + v] = a[i - 1, ...] + ...     after: prefetch(T.address_of(a[i + 1, ...]))
                 + a[i + 1, j * 16 + v]                       o[i, j * 16 + v] = ...

A core that writes a line of an output reads it first, and the line takes the place of another.
Where a function moves more than the caches hold, whole vectors are therefore written past them: a
third less traffic with one input and one output. TVM has no such stores; functions in LLVM IR,
which are linked and inlined, have::

    before: for v in T.vectorized(16):        after: for v in T.vectorized(16):
                o[i * 16 + v] = ...                      line[v] = ...
                                                     store(T.address_of(o[i * 16]), line)

``line`` becomes a register. Whether a vector is aligned is looked up at run time; one that is not
goes through the caches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from schedules import attributes
from schedules.tir.expression_walk import extern_name, loads, substitute, uses
from schedules.tir.extents import constant
from schedules.tir.index_math import factor_of, ravel
from schedules.tir.statements import STORE_FENCE, STORE_FENCE_LLVM, store_fence

from .blocks import BlockFacts, Kernel, item_bytes
from .tails import fresh
from .vector_loads import axis_along, with_functions

PREFETCH = "tvm_fusion_stream_prefetch"
"""Name of the function that prefetches a line into the second cache."""
PREFETCH_LLVM = f"""
define i32 @{PREFETCH}(ptr %at) {{
  call void @llvm.prefetch.p0(ptr %at, i32 0, i32 2, i32 1)
  ret i32 0
}}
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
PREFETCH_OPENCL = f"""
int {PREFETCH}(const __global void* at) {{
  __builtin_prefetch(at, 0, 2);
  return 0;
}}
"""

_LEAST_AHEAD = 2048  # bytes; measured on Zen 4: 1024 and 4096 are up to a tenth slower


@dataclass(frozen=True)
class Step:
    """Vectors and rows that a nest computes together."""

    lane: ir.Var  # The iteration variable of its block along a vector.
    row: ir.Var | None  # The one along its rows; None if there is only one.
    rows: int  # Number of its rows.
    most_ahead: int  # Bytes that the second cache may hold for later steps.


def prefetches(
    value: ir.Expr,  # An element, computed from loads.
    step: Step,  # What is computed together.
    axes: Sequence[tirx.IterVar],  # All iteration variables.
) -> list[tirx.Stmt]:
    """Make the prefetches of a vector of elements, of the next rows where the cache holds them.

    Returns one for each tensor of which adjacent elements are read, the distances between which are
    constant.
    """
    analyzer = sym.Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    fronts: dict[ir.Var, tuple[ir.Expr, ir.TensorLoad]] = {}
    others: set[ir.Var] = set()
    for load in loads(value):
        if not len(load.indices):  # It loads a single number.
            continue
        dtype = str(load.indices[-1].ty.dtype)
        place = analyzer.simplify(ravel(load.indices, load.source.shape, dtype))
        if factor_of(step.lane, place) != 1:
            others.add(load.source)
            continue
        front = fronts.setdefault(load.source, (place, load))
        ahead = constant(analyzer.simplify(place - front[0]))
        if ahead is None:
            others.add(load.source)
        elif ahead > 0:
            fronts[load.source] = (place, load)
    return [
        _prefetch(load, _elements_ahead(place, load, step))
        for buffer, (place, load) in fronts.items()
        if buffer not in others
    ]


def _elements_ahead(place: ir.Expr, load: ir.TensorLoad, step: Step) -> int:
    """Distance in elements from a load to its prefetch."""
    size = item_bytes(load.source)
    rows = (factor_of(step.row, place) or 0) * step.rows if step.row is not None else 0
    return rows if _LEAST_AHEAD <= rows * size <= step.most_ahead else _LEAST_AHEAD // size


def _prefetch(load: ir.TensorLoad, ahead: int) -> tirx.Stmt:
    *outer, last = load.indices
    at = tirx.address_of(load.source[[*outer, last + tirx.const(ahead, str(last.ty.dtype))]])
    return tirx.Evaluate(tirx.call_extern("int32", PREFETCH, at))


_LEAST_CACHES = 1  # times the last-level cache: of a smaller function it keeps what is read again
_MOST_VECTORS = 4

_STORE = """
define i32 @{name}(ptr noalias %to, ptr noalias %from) {{
  %address = ptrtoint ptr %to to i64
  %low = and i64 %address, {mask}
  %aligned = icmp eq i64 %low, 0
  br i1 %aligned, label %past, label %through
past:
{past}  ret i32 0
through:
{through}  ret i32 0
}}
"""
_VECTOR = """\
  %{part}{at}.from = getelementptr i8, ptr %from, i64 {at}
  %{part}{at} = load <{width} x i8>, ptr %{part}{at}.from, align {width}
  %{part}{at}.to = getelementptr i8, ptr %to, i64 {at}
  {store} <{width} x i8> %{part}{at}, ptr %{part}{at}.to, {how}
"""
_STORE_NAME = re.compile(r"tvm_fusion_stream_(\d+)_(\d+)")
_OPENCL = """
int {name}(__global void* to, const __private void* from) {{
  __global uint{lanes}* past = (__global uint{lanes}*)to;
  for (int i = 0; i < {count}; ++i) {{
    uint{lanes} vector = vload{lanes}(i, (const __private uint*)from);
    if ((ulong)to % {width} == 0)
      __builtin_nontemporal_store(vector, past + i);
    else
      vstore{lanes}(vector, i, (__global uint*)to);
  }}
  return 0;
}}
"""
_END = f"{STORE_FENCE_LLVM}!0 = !{{i32 1}}\n"


def worth_streaming(kernel: Kernel, facts: BlockFacts) -> bool:
    """Return whether a block moves so much that its results should bypass the caches."""
    if not kernel.cpu.has_streaming_stores or attributes.CACHED in kernel.sch.mod["main"].attrs:
        return False
    buffers = {access.buffer for access in facts.accesses}
    return sum(map(buffer_bytes, buffers)) >= _LEAST_CACHES * kernel.cpu.l3_bytes


def buffer_bytes(buffer: ir.Var) -> int:
    """Return the bytes of a buffer; 0 where an extent is not constant."""
    return math.prod(constant(n) or 0 for n in buffer.shape) * item_bytes(buffer)


def stream_stores(
    # A scheduled function for x86-64; each vector loop around such a block steps along adjacent
    # elements of the output.
    func: tirx.PrimFunc,
) -> tirx.PrimFunc:
    """Let vectors of the blocks that are annotated with ``STREAM`` be stored past the caches.

    Returns the same function if there are no whole vectors of such blocks.
    """
    texts: dict[str, str] = {}
    lines: list[ir.Var] = []

    def rewrite(nest: list[tirx.For]) -> tirx.Stmt:
        store, lane = _stored_vector(nest[-1]), nest[-1]
        if store is None:
            return nest[0]
        width = int(lane.body.block.annotations[attributes.STREAM][0])
        size = int(lane.extent) * item_bytes(store.buffer)
        if size % width or size > _MOST_VECTORS * width:
            return nest[0]
        shape = [loop.extent for loop in nest]
        lines.append(tirx.decl_buffer(shape, str(store.buffer.dtype), "line"))
        name = f"tvm_fusion_stream_{size}_{width}"
        texts[name] = _store_text(name, size, width)
        stored = _through_line(nest, lines[-1], name)
        ahead = _ahead(nest)
        if ahead is None:
            return stored
        texts[PREFETCH] = PREFETCH_LLVM
        return tirx.SeqStmt([ahead, stored])

    def rewrite_rows(loop: tirx.For) -> tirx.Stmt:
        is_nest = loop.kind == tirx.ForKind.UNROLLED and isinstance(loop.body, tirx.For)
        return rewrite([loop, loop.body]) if is_nest else loop

    # All rows of a step are stored after the last load: for LLVM they may overlap the input.
    done = tvm_ffi.structural_map(func, (tirx.For, rewrite_rows))
    done = tvm_ffi.structural_map(done, (tirx.For, lambda loop: rewrite([loop])))
    if not texts:
        return func
    # The fence is for the calling thread. The others of TVM's pool report that they are done by a
    # locked instruction, before which their stores are visible, too.
    return with_functions(done, lines, "".join(texts.values()) + _END, store_fence())


def is_fence(stmt: tirx.Stmt) -> bool:
    """Return whether a statement waits for the stores of its thread."""
    return isinstance(stmt, tirx.Evaluate) and extern_name(stmt.value) == STORE_FENCE


def opencl_store(name: str) -> str | None:
    """Return the text in OpenCL of one of the functions that store or prefetch, by its name."""
    if name == PREFETCH:
        return PREFETCH_OPENCL
    found = _STORE_NAME.fullmatch(name)
    if found is None:
        return None
    size, width = map(int, found.groups())
    return _OPENCL.format(name=name, lanes=width // 4, width=width, count=size // width)


def _stored_vector(loop: tirx.For) -> tirx.BufferStore | None:
    """Return the store of a vector loop around an annotated block, if it has no condition."""
    realize = loop.body
    if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(realize, s_tir.SBlockRealize):
        return None
    block = realize.block
    plain = isinstance(block.body, tirx.BufferStore) and isinstance(realize.predicate, tirx.IntImm)
    return block.body if attributes.STREAM in block.annotations and plain else None


def _store_text(name: str, size: int, width: int) -> str:
    """LLVM IR of a function that copies ``size`` bytes in vectors of ``width``."""

    def vectors(part: str, store: str, how: str) -> str:
        given = {"part": part, "width": width, "store": store, "how": how}
        return "".join(_VECTOR.format(at=at, **given) for at in range(0, size, width))

    past = vectors("p", "store", f"align {width}, !nontemporal !0")
    through = vectors("t", "store volatile", "align 1")  # else LLVM may merge both, into this one
    return _STORE.format(name=name, mask=width - 1, past=past, through=through)


def _through_line(nest: Sequence[tirx.For], line: ir.Var, name: str) -> tirx.Stmt:
    """The nest with ``line`` as its output, and the calls that store it."""
    lane = nest[-1]
    block = lane.body.block
    axes = [axis_along(loop) for loop in nest]
    whole = tirx.BufferRegion(line, [axis.dom for axis in axes])
    filled = s_tir.SBlock(
        [*block.iter_vars, *axes],
        block.reads,
        [whole],
        f"{block.name_hint}_line",
        tirx.BufferStore(line, block.body.value, [axis.var for axis in axes]),
        annotations={
            key: block.annotations[key] for key in block.annotations if key != attributes.STREAM
        },
    )
    first = [*(axis.var for axis in axes[:-1]), tirx.const(0, _type(lane))]
    target = tirx.address_of(block.body.buffer[list(block.body.indices)])
    call = tirx.call_extern("int32", name, target, tirx.address_of(line[first]))
    stored = s_tir.SBlock(
        [*block.iter_vars, *axes[:-1]],
        [whole],
        block.writes,
        block.name_hint,
        tirx.Evaluate(call),
    )
    places = [loop.loop_var for loop in nest]
    values = list(lane.body.iter_values)
    yes = lane.body.predicate
    filling = _nest(nest, s_tir.SBlockRealize([*values, *places], yes, filled))
    zero = {lane.loop_var: tirx.const(0, _type(lane))}
    values = [substitute(value, zero) for value in (*values, *places[:-1])]
    storing = _nest(nest[:-1], s_tir.SBlockRealize(values, yes, stored))
    return tirx.SeqStmt([filling, fresh(storing)])


def _ahead(nest: Sequence[tirx.For]) -> tirx.Stmt | None:
    """The nest with prefetches of what it reads; None if there is nothing to prefetch."""
    realize = nest[-1].body
    block, values = realize.block, list(realize.iter_values)
    lane = _axis(realize, nest[-1])
    if lane is None:
        return None
    row = _axis(realize, nest[0]) if nest[1:] else None
    step = Step(lane, row, int(nest[0].extent), int(block.annotations[attributes.STREAM][1]))
    found = prefetches(block.body.value, step, block.iter_vars)
    if not found:
        return None
    zero = {nest[-1].loop_var: tirx.const(0, _type(nest[-1]))}
    body = found[0] if len(found) == 1 else tirx.SeqStmt(found)
    ahead = s_tir.SBlock(block.iter_vars, block.reads, [], f"{block.name_hint}_ahead", body)
    values = [substitute(value, zero) for value in values]
    return fresh(_nest(nest[:-1], s_tir.SBlockRealize(values, realize.predicate, ahead)))


def _axis(realize: s_tir.SBlockRealize, loop: tirx.For) -> ir.Var | None:
    """The only iteration variable of a block that depends on a loop; None if there are several."""
    pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    found = [axis.var for axis, value in pairs if uses(value, loop.loop_var)]
    return found[0] if len(found) == 1 else None


def _type(loop: tirx.For) -> str:
    return str(loop.loop_var.ty.dtype)


def _nest(loops: Sequence[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
    for loop in reversed(loops):
        body = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)
    return body
