# SPDX-License-Identifier: Apache-2.0
"""GPU rule for convolutions of many channels a group that no other rule takes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.pointwise.elementwise import slid_tensor
from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import Stage, stages_of
from schedules.tir.expression_walk import loads
from schedules.tir.extents import extent_of, unravel
from schedules.tir.index_math import ceildiv, i64, volume
from schedules.tir.statements import when

from ..core.kernel_function import unless_empty, write_kernels
from ..core.machine import GPUInfo
from ..core.rule import GPURule
from ..pointwise.coalescing import classify
from ..pointwise.element_program import ElementProgram, Read
from ..pointwise.iteration_domain import IterationSpace, Store
from ..pointwise.point_kernel import PointWriter, Views

THREADS = 128


class GroupedConv2D(GPURule):
    """Computes each output of a convolution in its own thread, by a loop over its window.

    Takes weighted sums of windows that are too large for :class:`schedules.gpu.Pooling`: those of
    float16 with more than eight channels a group. Element-wise producers and consumers are part of
    the kernel. Returns None for everything else, such as sums over all channels.
    """

    def kernel(self, facts: KernelFacts, gpu: GPUInfo) -> tirx.PrimFunc | None:
        """Write the kernel, or return None if the rule does not take the function."""
        func = facts.func
        stages = facts.read(stages_of) or []
        sums = [stage for stage in stages if stage.reduced]
        outputs = [stage for stage in stages if any(stage.output.same_as(p) for p in func.params)]
        if len(sums) != 1 or len(outputs) != 1 or not _is_weighted_window(sums[0]):
            return None
        others = [stage for stage in stages if not stage.reduced]
        terms, epilogue = _Terms.of(sums[0], others), _Epilogue.of(outputs[0], sums[0], others)
        if epilogue is None:
            return None
        threads = gpu.block_threads(THREADS)

        def body() -> None:
            total = volume(outputs[0].output.shape)
            blocks = ceildiv(total, threads)
            with unless_empty(blocks), T.launch_thread("blockIdx.x", blocks) as block:
                with T.launch_thread("threadIdx.x", i64(threads)) as thread:
                    item = T.bind(block * i64(threads) + thread)
                    with when(item < total):
                        views = Views.declare(func, gpu)
                        place = [T.bind(at) for at in unravel(item, epilogue.space.extents)]
                        epilogue.write(views, place, terms.sum_up(views, place))

        return write_kernels(func, body)


def _is_weighted_window(stage: Stage) -> bool:
    read = {load.source for load in loads(stage.value) if not load.source.same_as(stage.output)}
    return len(read) > 1 and slid_tensor(stage) is not None


@dataclass(frozen=True)
class _Terms:
    """Terms of the sums.

    Parameters
    ----------
    space : IterationSpace
        Axes of the outputs and their windows.
    total, next, first : tirx.Var, tirx.Expr, tirx.Expr
        A sum, that with the next term, and what it begins with.
    """

    space: IterationSpace
    total: tirx.Var
    next: tirx.Expr
    first: tirx.Expr

    @classmethod
    def of(cls, conv: Stage, others: list[Stage]) -> _Terms:
        """Those of a convolution; ``others`` compute what it reads."""
        total = tirx.Var("total", conv.output.dtype)
        axes = [tirx.Var(f"i{k}", "int64") for k in range(len(conv.axes) + len(conv.reduced))]
        whole = Stage(conv.output, (*conv.axes, *conv.reduced), (), conv.value, None)
        program = ElementProgram(others, {conv.output: total})
        following = program.add(whole.at(axes))
        assert conv.init is not None, "a reduction begins somewhere"
        space = IterationSpace(tuple(axes), whole.shape, tuple(program.steps), ())
        return cls(space, total, following, conv.init)

    def sum_up(self, views: Views, place: list[tirx.Expr]) -> tirx.Expr:
        """Emit the loop over the window of an output; returns the sum."""
        sums = T.alloc_buffer((1,), self.total.ty.dtype, scope="local")
        T.buffer_store(sums, self.first, [0])
        with ExitStack() as loops:
            window = self.space.extents[len(place) :]
            steps = [loops.enter_context(T.serial(i64(0), i64(extent))) for extent in window]
            writer = PointWriter(classify(self.space, 1), views, [[*place, *steps]])
            writer.give(self.total, [sums[0]])
            writer.steps()
            T.buffer_store(sums, writer.value(self.next, 0), [0])
        return sums[0]


@dataclass(frozen=True)
class _Epilogue:
    """Store of each sum.

    Parameters
    ----------
    space : IterationSpace
        Axes of the outputs, loads and stores.
    total : tirx.Var
        Variable of the sum.
    """

    space: IterationSpace
    total: tirx.Var

    @classmethod
    def of(cls, output: Stage, conv: Stage, others: list[Stage]) -> _Epilogue | None:
        """Epilogue of a convolution; None if it does not read each sum just where it is stored."""
        program = ElementProgram(others)
        axes = tuple(tirx.Var(f"i{k}", "int64") for k in range(len(output.axes)))
        value = program.element(output.output, axes)
        reads = [step for step in program.steps if isinstance(step, Read)]
        sums = [read for read in reads if read.buffer.same_as(conv.output)]
        if len(sums) != 1 or not tvm_ffi.structural_equal(list(sums[0].indices), list(axes)):
            return None
        steps = [step for step in program.steps if step is not sums[0]]
        extents = tuple(map(extent_of, output.output.shape))
        store = Store(output.output, axes, value)
        return cls(IterationSpace(axes, extents, tuple(steps), (store,)), sums[0].var)

    def write(self, views: Views, place: list[tirx.Expr], total: tirx.Expr) -> None:
        """Emit the store of an output."""
        writer = PointWriter(classify(self.space, 1, [self.total]), views, [place])
        writer.give(self.total, [total])
        writer.write()
