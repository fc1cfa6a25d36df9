# SPDX-License-Identifier: Apache-2.0
"""Configurations of a GPU kernel of a chain of reductions: one block a row, or a tile of columns.

A thread keeps its elements in registers if they are few. So a row gets one warp if that is enough,
then more warps up to the largest block, then, where there are clusters, two, four or eight blocks.
Longer rows are read again for each stage; with clusters an eighth as many of them share the cache
at a time. The thresholds are estimates; they have not been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.tir.extents import constant
from schedules.tir.index_math import ceil_power_of_two
from schedules.workload.reduce import CanonicalLoops

from .config import MIN_THREADS, THREADS, Finish, ReduceConfig, vector_width
from .group_workload import GroupWorkload
from .sister_space import fits_shared_memory, is_block, is_busy, powers, read_terms


def chain_fits(
    # ``outputs``, ``reduced``: ``M`` and ``N``; None where symbolic, taken as many rows, and long
    # ones.
    outputs: int | None,
    reduced: int | None,
    # Bytes of an element of the input; of the sum of all inputs of ``M x N`` elements, if there are
    # several.
    itemsize: int,
    gpu: GPUInfo,
    # ``all``, ``x`` or ``y``, of which the last has several neighbouring outputs in a block.
    form: str = "x",
) -> bool:
    """Return whether a chain of reductions, each using the previous one, should be one kernel.

    One block then keeps a row of ``reduced`` elements to the end, in its registers or, if there are
    too many, in the cache; on devices with clusters several blocks share it. A short row takes less
    time than the saved launches; long rows must be enough to keep the device busy. The limits are
    estimates, not measured on a GPU.

    Returns whether it pays off; the rule writes a kernel for a chain of any size.
    """
    columns = max(1, COSTS.segment // itemsize) if form == "y" else 1
    short = COSTS.short_row
    if gpu.max_cluster > 1:
        short = gpu.max_cluster * (COSTS.short_row if form == "y" else COSTS.cluster_share)
    if reduced is not None and reduced * columns * itemsize <= short:
        return True
    return outputs is None or 2 * outputs >= columns * gpu.multiprocessors


COLUMNS = 4  # neighbouring outputs of a thread, each with its own states and results
HALF_TYPES = ("float16", "bfloat16")  # arithmetic in these types converts, and keeps both values


def choose_chain(group: GroupWorkload, gpu: GPUInfo) -> ReduceConfig:
    """Choose the configuration of a chain.

    It has the finish ``one_block``, or ``cluster``.
    """
    loops = group.reductions[0].loops
    vector = chain_vector(group, gpu, gpu.block_threads(THREADS))
    shape = _columns if loops.form == "y" else _rows
    config = shape(group, loops, vector, gpu)
    reduced, outputs = constant(group.reduced), constant(group.outputs)
    if reduced is not None:
        config, kept = _spread(group, config, reduced, gpu)
        if kept_words(group, config, kept) <= COSTS.kept_words:
            if config.form == "y" or reduced % vector == 0:
                return replace(config, kept=kept)
    if outputs is not None and outputs * config.splits < 2 * gpu.multiprocessors:
        return config
    smaller = replace(config, lanes=min(config.lanes, COSTS.reread_threads))
    return config if joins_loop_and_tail(group, smaller) else smaller


def joins_loop_and_tail(group: GroupWorkload, config: ReduceConfig) -> bool:
    """Return whether a row of float16 is one turn of the unrolled loop and part of another.

    The compiler then keeps both in registers at once, and spills.
    """
    reduced, turn = constant(group.reduced), config.stride * config.unroll
    is_half = any(reduction.workload.dtype == "float16" for reduction in group.reductions)
    return is_half and config.form == "x" and reduced is not None and turn < reduced < 2 * turn


def _spread(
    group: GroupWorkload, config: ReduceConfig, reduced: int, gpu: GPUInfo
) -> tuple[ReduceConfig, int]:
    """The smallest cluster that can keep a row, else the largest, and the vectors of a thread."""
    size, kept = 1, -(-reduced // config.stride)
    most = 1 if group.columns else gpu.max_cluster
    while kept_words(group, config, kept) > COSTS.kept_words and size < most:
        if _is_half(group) and config.form == "x":  # 1024 threads have too few registers for both
            config = replace(config, lanes=min(config.lanes, COSTS.reread_threads))
        size *= 2
        kept = -(-reduced // (config.stride * size))
    return (replace(config, splits=size, finish="cluster") if size > 1 else config), kept


def _rows(group: GroupWorkload, loops: CanonicalLoops, vector: int, gpu: GPUInfo) -> ReduceConfig:
    """Lanes along a row, and several short rows in a block."""
    reduced, outputs = constant(group.reduced), constant(group.outputs)
    most = gpu.block_threads(COSTS.block_threads)
    lanes = (
        min(COSTS.warp, most, ceil_power_of_two(-(-reduced // vector)))
        if reduced is not None
        else COSTS.warp
    )
    config = ReduceConfig(loops.form, lanes, 1, vector, chain_unroll(group), 1, "one_block")
    config = replace(config, turns=group.turns)
    while config.lanes < most and (reduced is None or config.stride < reduced):
        kept = most if reduced is None else -(-reduced // config.stride)
        limit = COSTS.kept_words if config.lanes <= COSTS.warp else COSTS.block_words
        if kept_words(group, config, kept) <= limit:
            break
        config = replace(config, lanes=2 * config.lanes)
    config = replace(config, rows=max(1, gpu.block_threads(THREADS) // config.lanes))
    while config.rows > 1 and config.threads > MIN_THREADS and outputs is not None:
        if outputs // config.tile_outputs >= 2 * gpu.multiprocessors:
            break
        config = replace(config, rows=config.rows // 2)
    return config


def _columns(
    group: GroupWorkload, loops: CanonicalLoops, vector: int, gpu: GPUInfo
) -> ReduceConfig:
    """Lanes along neighbouring outputs, and rows that share the reduced loop."""
    reduced, outputs = constant(group.reduced), constant(group.outputs)
    lanes = (
        COSTS.warp if outputs is None else min(COSTS.warp, ceil_power_of_two(-(-outputs // vector)))
    )
    least = max(1, COSTS.segment // (vector * max(group.row_inputs, default=1)))
    while lanes > least and outputs is not None:
        if outputs >= lanes * vector * gpu.multiprocessors:
            break
        lanes //= 2
    config = ReduceConfig("y", lanes, 1, vector, chain_unroll(group), 1, "one_block")
    most = gpu.block_threads(THREADS)
    while config.threads < most:
        kept = most if reduced is None else -(-reduced // config.rows)
        if config.threads >= COSTS.warp and kept_words(group, config, kept) <= COSTS.block_words:
            break
        config = replace(config, rows=2 * config.rows)
    return config


def chain_vector(group: GroupWorkload, gpu: GPUInfo, threads: int) -> int:
    """Elements of a 16-byte load of the widest tensor, or of as much as ``threads`` can share."""
    width = COSTS.widest_load // max(group.row_inputs, default=1)
    width = min(width, COLUMNS) if group.form == "y" else width
    return min(
        vector_width(width, stage.workloads, reduction.loops, gpu, threads)
        for stage in group.stages
        for reduction in stage.reductions
    )


def chain_unroll(group: GroupWorkload) -> int:
    """Vectors that a thread loads at once of a row that is read again."""
    if any(reduction.workload.is_arg for reduction in group.reductions):
        return 1
    return max(1, COSTS.loads_in_flight // max(1, len(group.row_inputs)))


def _is_half(group: GroupWorkload) -> bool:
    return any(reduction.workload.dtype in HALF_TYPES for reduction in group.reductions)


def kept_words(group: GroupWorkload, config: ReduceConfig, kept: int) -> int:
    """Registers for a thread's elements, a value computed from each after each stage, and sums."""
    computed = (16 if _is_half(group) else 4) * max(1, len(group.stages) - 1) + 4 * group.columns
    return kept * config.vector * (computed + sum(group.row_inputs)) // 4


_THREADS = (32, 64, 128, 256, 512, 1024)
_UNROLL = (1, 2, 4, 8)
_OWN_REGISTERS = 32  # Registers of a thread beside those of its elements.


def chain_settings(
    group: GroupWorkload,  # A chain of known extents.
    gpu: GPUInfo,
) -> Iterator[ReduceConfig]:
    """Yield the legal configurations of a chain.

    A block, or a cluster where the device has them, keeps its rows in registers if they fit, or
    reads them again for each stage.
    """
    for threads, size in product(_THREADS, powers(_most_blocks(group, gpu))):
        if threads > gpu.max_threads:
            continue
        vector = chain_vector(group, gpu, threads)
        finish: Finish = "one_block" if size == 1 else "cluster"
        while vector:
            for lanes in powers(threads):
                rows = threads // lanes
                block = ReduceConfig(group.form, lanes, rows, vector, 1, size, finish)
                block = replace(block, turns=group.turns)
                if is_busy(group, block) and _fits(group, block, gpu):
                    yield from _kept_or_read_again(group, block)
            vector //= 2


def is_chain_setting(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> bool:
    """Return whether a configuration is one of :func:`chain_settings`, without listing them."""
    finish = "one_block" if config.splits == 1 else "cluster"
    unrolls = (*_UNROLL, chain_unroll(group))
    if not is_block(config, group, gpu, _THREADS, unrolls) or config.is_online:
        return False
    if config.splits not in powers(_most_blocks(group, gpu)) or config.finish != finish:
        return False
    if config.turns != group.turns:
        return False
    block = replace(config, unroll=1, kept=0)
    widest = chain_vector(group, gpu, config.threads)
    fits = config.vector <= widest and is_busy(group, block) and _fits(group, block, gpu)
    return fits and config in _kept_or_read_again(group, block)


def _most_blocks(group: GroupWorkload, gpu: GPUInfo) -> int:
    """Blocks that may share a row; sums of columns are kept by the threads of one."""
    return 1 if group.columns else gpu.max_cluster


def _kept_or_read_again(group: GroupWorkload, block: ReduceConfig) -> Iterator[ReduceConfig]:
    """Configurations of a block: with the row in registers, and with loads in flight."""
    reduced = int(group.reduced)
    kept = -(-reduced // (block.stride * block.splits))
    room = min(COSTS.kept_words, COSTS.register_file // block.threads - _OWN_REGISTERS)
    whole = block.form == "y" or reduced % block.vector == 0
    if whole and kept_words(group, block, kept) <= room:
        yield replace(block, unroll=chain_unroll(group), kept=kept)
    if group.columns:
        return
    has_positions = any(one.workload.is_arg for one in group.reductions)
    for unroll in _UNROLL[:1] if has_positions else _UNROLL:
        config = replace(block, unroll=unroll)
        in_flight = kept_words(group, config, unroll)
        if in_flight <= room and unroll <= kept and not joins_loop_and_tail(group, config):
            yield config


def _fits(group: GroupWorkload, block: ReduceConfig, gpu: GPUInfo) -> bool:
    """Return whether a block has memory and registers, and every block of a cluster has work."""
    is_half = any(one.workload.dtype in HALF_TYPES for one in group.reductions)
    if is_half and block.cluster > 1 and block.threads > COSTS.reread_threads:
        return False  # too few registers for the values and what is computed from them
    steps = -(-int(group.reduced) // block.stride)
    blocks = -(-int(group.outputs) // block.tile_outputs) * block.splits
    return block.splits <= steps and blocks < 1 << 31 and fits_shared_memory(group, block, gpu)


def chain_terms(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> dict[str, float]:
    """Return the cycles of reading, of combining, of beginning blocks, and of clusters."""
    words = kept_words(group, config, config.kept or config.unroll)
    blocks = -(-int(group.outputs) // config.tile_outputs) * config.splits
    passes = 1 if config.kept else len(group.stages) + bool(group.late_outputs)
    terms = read_terms(group, config, gpu, blocks, _OWN_REGISTERS + words, passes)
    meeting = len(group.stages) * COSTS.block_latency / 2 if config.cluster > 1 else 0.0
    return terms | {"finish_cycles": meeting, "kept_words": float(words if config.kept else 0)}
