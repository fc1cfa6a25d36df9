# SPDX-License-Identifier: Apache-2.0
"""Clusters without a GPU: a kernel for a cluster, rewritten so that one work-group is the cluster.

The kernels are those of the rules, for an OpenCL device that is said to have clusters. The work-
group has the threads of all blocks, in the order of their ranks; each block has a part of every
shared buffer, and reads those of the others; a barrier is one of the work-group. What this cannot
show, whether a barrier of the cluster stands everywhere where one is needed, is told by
:func:`check_protocol` from the CUDA text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer
from tvm.target import Target

from schedules.gpu.core import cluster_intrinsics
from schedules.gpu.core.machine import GPUInfo


@contextlib.contextmanager
def clusters(size: int = 8) -> Iterator[None]:
    """Let every GPU have clusters of up to ``size`` blocks while the block runs."""
    plain = GPUInfo.from_target

    def from_target(target: Target) -> GPUInfo:
        return replace(plain(target), max_cluster=size)

    with mock.patch.object(GPUInfo, "from_target", from_target):
        yield


def emulated(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with a work-group in place of each cluster; itself if it has none."""
    found: dict[str, tirx.AttrStmt] = {}

    def note(stmt: tirx.AttrStmt) -> None:
        if stmt.attr_key == "thread_extent":
            found[str(stmt.node.thread_tag)] = stmt

    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, note))
    if "clusterCtaIdx.x" not in found:
        return func
    assert len(found) == 3, "a kernel for clusters has one axis of blocks"
    grid, cluster, block = (
        found[f"{axis}.x"] for axis in ("blockIdx", "clusterCtaIdx", "threadIdx")
    )
    group = _work_group(grid, int(cluster.value), block)
    body = tvm_ffi.structural_map(
        func.body, (tirx.AttrStmt, lambda stmt: group if _tag(stmt) == "blockIdx.x" else stmt)
    )
    return func.with_body(body)


def _tag(stmt: tirx.AttrStmt) -> str:
    return str(stmt.node.thread_tag) if stmt.attr_key == "thread_extent" else ""


def _work_group(grid: tirx.AttrStmt, size: int, block: tirx.AttrStmt) -> tirx.AttrStmt:
    """The launch of a cluster a work-group."""
    threads = int(block.value)
    tile, thread = (tirx.Var(name, "int64") for name in ("tile", "thread"))
    rank = thread // threads
    body = _Memory(rank, size).rewrite(block.body)
    own = {grid.node.var: tile * size + rank, block.node.var: thread % threads}
    body = tvm_ffi.structural_map(body, (ir.Var, lambda var: own.get(var, var)))
    tiles = Analyzer().simplify(grid.value // size)
    return _launch(
        grid, tile, tiles, _launch(block, thread, tirx.const(threads * size, "int64"), body)
    )


def _launch(of: tirx.AttrStmt, var: tirx.Var, extent: tirx.Expr, body: tirx.Stmt) -> tirx.AttrStmt:
    zero = tirx.const(0, "int64")
    axis = tirx.IterVar((zero, extent), var, of.node.iter_type, of.node.thread_tag)
    return tirx.AttrStmt(axis, of.attr_key, extent, body)


class _Memory:
    """Shared memory with a part for each block of a cluster."""

    def __init__(self, rank: tirx.Expr, size: int) -> None:
        self._rank = rank
        self._size = size
        self._whole: dict[tirx.Buffer, tirx.Buffer] = {}

    def rewrite(self, body: tirx.Stmt) -> tirx.Stmt:
        """Children come before their parents."""

        def note(stmt: tirx.AllocBuffer) -> None:
            buffer = stmt.buffer
            if buffer.scope() == "shared":
                elements = self._size * int(buffer.shape[0])
                self._whole[buffer] = tirx.decl_buffer(
                    (elements,), buffer.dtype, buffer.name, scope="shared"
                )

        tvm_ffi.structural_walk(body, (tirx.AllocBuffer, note))
        return tvm_ffi.structural_map(
            body,
            (
                (tirx.AllocBuffer, self._allocate),
                (tirx.BufferStore, self._store),
                (ir.TensorLoad, self._load),
                (ir.Call, self._call),
            ),
        )

    def _allocate(self, stmt: tirx.AllocBuffer) -> tirx.AllocBuffer:
        whole = self._whole.get(stmt.buffer)
        return stmt if whole is None else tirx.AllocBuffer(whole, stmt.annotations)

    def _store(self, stmt: tirx.BufferStore) -> tirx.BufferStore:
        whole = self._whole.get(stmt.buffer)
        if whole is None:
            return stmt
        return tirx.BufferStore(whole, stmt.value, [self._place(stmt.buffer, stmt.indices[0])])

    def _load(self, load: ir.TensorLoad) -> tirx.Expr:
        whole = self._whole.get(load.source)
        return load if whole is None else whole[self._place(load.source, load.indices[0])]

    def _place(self, buffer: tirx.Buffer, index: tirx.Expr) -> tirx.Expr:
        return index.astype("int64") + self._rank * int(buffer.shape[0])

    def _call(self, call: ir.Call) -> tirx.Expr:
        if call.op.name != "tirx.cuda.func_call":
            return call
        name = str(call.args[0].value)
        if name.startswith(cluster_intrinsics.REMOTE):
            own = call.args[1].args[0]  # It is in the thread's own part by now.
            part = int(own.source.shape[0]) // self._size
            return own.source[own.indices[0] + (call.args[2].astype("int64") - self._rank) * part]
        if name == cluster_intrinsics.WAIT:
            return T.tvm_storage_sync("shared")
        assert name in (cluster_intrinsics.ARRIVE, cluster_intrinsics.KEEP), name
        return tirx.const(0, "int32")


def kernels(source: str) -> dict[str, str]:
    """The text of each kernel of a CUDA text."""
    parts = re.split(r'^extern "C" .* (\w+)\(.*\) \{$', source, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def check_protocol(kernel: str) -> int:
    """Count the barriers of a cluster in the text of a kernel.

    Raises
    ------
    AssertionError
        If memory is read by another block without a barrier after it was written, or written, or
        left at the end, without a barrier after it was read; or if not all threads come to one.
    """
    written: set[str] = set()
    lent: set[str] = set()
    before: tuple[set[str], set[str]] | None = None
    # `before`: what a thread has written and read when it arrives.
    barriers = depth = 0
    for line in kernel.splitlines():
        calls = re.findall(r"(\w+)\(", line)
        if cluster_intrinsics.ARRIVE in calls:
            assert before is None and depth == 0, line
            before = (set(written), set(lent))
        elif cluster_intrinsics.WAIT in calls:
            assert before is not None and depth == 0, line
            written, lent = written - before[0], lent - before[1]
            before, barriers = None, barriers + 1
        for name in re.findall(cluster_intrinsics.REMOTE + r"\w+\(\(&\((\w+)\[", line):
            assert name not in written and before is None, line
            lent.add(name)
        if stored := re.match(r"\s*(\w+)\[.*\] = ", line):
            assert stored[1] not in lent, line
            written.add(stored[1])
        depth += line.count("{") - line.count("}")
    assert not lent and before is None
    return barriers
