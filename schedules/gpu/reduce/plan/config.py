# SPDX-License-Identifier: Apache-2.0
"""Configuration of a GPU kernel of sister reductions: threads, vectors, unrolling, split, finish.

A block of 256 threads is ``rows x lanes``. In forms *all* and *x* a row of lanes shares one output
and lanes run along the reduced loop; in form *y* lanes hold neighbouring outputs and rows share the
reduced loop. The reduced loop is split over blocks only where outputs alone leave multiprocessors
idle: over those of one cluster where the device has clusters and one is enough. The thresholds are
estimates from published figures (16-byte loads, 32 KiB in flight on each multiprocessor, latencies
of memory and barriers); they have not been measured on a GPU.

The workspace of a kernel whose last block combines the partial results of all begins with slots and
tickets (:mod:`schedules.gpu.core.workspace_slot`). The partial results of a block follow those of
the block before: the first word of each of its outputs, then the second one of each, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from tvm import DataType

from schedules.errors import OpError
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.core.subword_atomics import consists_of_words
from schedules.gpu.core.tagged_words import word_count
from schedules.tir.extents import constant
from schedules.tir.index_math import ceil_power_of_two
from schedules.workload.reduce import FLOATS, CanonicalLoops, Form, ReduceWorkload
from schedules.workload.reduce_operator import field_dtypes
from schedules.workload.workspace_layout import PLACES, first_word

from .group_workload import GroupWorkload

THREADS = 256
MIN_THREADS = 64  # where rows are too few to fill the device with blocks of 256
LARGE = 1 << 24  # assumed for a symbolic extent when work is divided

Finish = Literal["one_block", "atomic", "last_block", "cluster"]


@dataclass(frozen=True)
class ReduceConfig:
    """The decisions of one kernel."""

    form: Literal["all", "x", "y"]
    lanes: int
    rows: int
    """``lanes`` and ``rows``: threads along addresses and across them; powers of two."""
    vector: int  # Neighbouring elements that a thread loads at once, a power of two.
    unroll: int  # Vectors that a thread loads before it combines them.
    splits: int  # Blocks that share one output.
    finish: Literal["one_block", "atomic", "last_block", "cluster"]
    """``one_block``, ``atomic``, ``last_block`` or ``cluster``, whose blocks are the splits."""
    kept: int = 0
    """Vectors of each input that a thread of a chain keeps in registers; 0 if it reads its row
    again for each stage."""
    is_online: bool = False  # Whether a chain is computed in one stage (:mod:`.group`).
    turns: int = 1  # Outputs that a row of threads computes one after another.

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.splits if self.finish == "cluster" else 1

    @property
    def tile_outputs(self) -> int:
        """Outputs of a block."""
        return self.lanes * self.vector if self.form == "y" else self.rows * self.turns

    @property
    def stride(self) -> int:
        """Steps of the reduced loop that a block takes at once, one vector a thread."""
        return self.rows if self.form == "y" else self.lanes * self.vector


def choose_sisters(
    group: GroupWorkload,  # Group of one stage.
    gpu: GPUInfo,
    # Whether there may be a workspace, without which no block combines the results of others.
    has_workspace: bool = True,
) -> ReduceConfig:
    """Choose the configuration of reductions that share one pass over their data.

    Returns the same for the same arguments. Raises ``OpError`` if the finish ``atomic`` is
    requested for ``argmin`` or ``argmax``.
    """
    [stage] = group.stages
    workloads, loops = stage.workloads, stage.reductions[0].loops
    whole = _whole_block(group, gpu)
    finish = finish_of(group, gpu, has_workspace)
    row_inputs, row_outputs = group.row_inputs, group.row_outputs
    at_once = gpu.multiprocessors * blocks_at_once(whole, workloads, row_inputs, row_outputs)
    whole = _smaller_tiles(whole, loops, gpu, finish, at_once, min(map(_item_bytes, workloads)))
    cluster = _cluster(whole, loops, gpu, workloads, finish, at_once)
    if cluster is not None:
        return replace(whole, splits=cluster, finish="cluster" if cluster > 1 else "one_block")
    splits = _splits(whole, loops, gpu, finish, at_once)
    return whole if splits == 1 else replace(whole, splits=splits, finish=finish)


def _whole_block(group: GroupWorkload, gpu: GPUInfo) -> ReduceConfig:
    """The configuration without a split."""
    [stage] = group.stages
    workloads, loops, row_inputs = stage.workloads, stage.reductions[0].loops, group.row_inputs
    form, outputs = group.form, len(group.row_outputs)
    vector = widest_vector(group, gpu)
    unroll = COSTS.loads_in_flight
    if len(row_inputs) + outputs > 1 or len(workloads) > 1 or workloads[0].is_arg:
        # Stores take a share of the bandwidth, for which no loads have to be in flight.
        unroll = max(1, unroll // max(1, len(row_inputs) + outputs))
        while (
            _registers(workloads, row_inputs, vector, unroll) > COSTS.state_registers and vector > 1
        ):
            unroll, vector = (unroll // 2, vector) if unroll > 1 else (1, vector // 2)
    lanes, rows = _block(form, loops, vector, gpu.block_threads(THREADS), gpu)
    whole = ReduceConfig(form, lanes, rows, vector, unroll, 1, "one_block")
    while form == "x" and whole.rows > 1 and whole.threads > MIN_THREADS:
        if _most_blocks(whole, loops) >= 2 * gpu.multiprocessors:
            break
        whole = replace(whole, rows=whole.rows // 2)
    return whole


def widest_vector(group: GroupWorkload, gpu: GPUInfo, threads: int = THREADS) -> int:
    """Most neighbouring elements that a thread of sisters may load at once, a power of two."""
    [stage] = group.stages
    narrowest = map(_item_bytes, stage.workloads) if group.form == "y" else group.itemsizes
    width = COSTS.widest_load // min(narrowest)
    loops = (reduction.loops for reduction in stage.reductions)
    return min(vector_width(width, stage.workloads, each, gpu, threads) for each in loops)


def _registers(
    workloads: Sequence[ReduceWorkload], row_inputs: Sequence[int], vector: int, unroll: int
) -> int:
    """Registers for the states and loads of a thread."""
    states = sum(map(word_count, fields_of(workloads)))
    return vector * states + unroll * vector * sum(row_inputs) // 4


def blocks_at_once(
    config: ReduceConfig,
    workloads: Sequence[ReduceWorkload],
    row_inputs: Sequence[int],
    row_outputs: Sequence[int] = (),
) -> int:
    """Blocks of a reduction that share a multiprocessor, with registers for each.

    No more than a grid has, and only as many as spill nothing; a thread gets eight registers at a
    time.
    """
    registers = -(-thread_registers(config, workloads, row_inputs, row_outputs) // 8) * 8
    most = COSTS.cluster_blocks if config.cluster > 1 else COSTS.resident_blocks
    # A multiprocessor holds fewer of larger blocks.
    most = max(1, most * THREADS // max(THREADS, config.threads))
    return min(most, max(1, COSTS.register_file // (registers * config.threads)))


def thread_registers(
    config: ReduceConfig,
    workloads: Sequence[ReduceWorkload],
    row_inputs: Sequence[int],
    row_outputs: Sequence[int] = (),
) -> int:
    """Registers of a thread of sister reductions, as the compiler uses them."""
    overhead = COSTS.own_registers + COSTS.input_registers * len(row_inputs)
    overhead += COSTS.output_registers * len(row_outputs)
    overhead += config.vector * -(-max(row_outputs, default=0) // 4)  # one vector is held at a time
    has_positions = bool(row_outputs) and any(workload.is_arg for workload in workloads)
    if 8 in row_inputs or "float64" in fields_of(workloads) or has_positions:
        overhead += COSTS.wide_registers
    if 1 in row_inputs and any(workload.is_arg for workload in workloads):
        # Bytes are compared as words; positions are words, too.
        in_row = COSTS.byte_position_registers * config.vector
        overhead += in_row if config.form == "x" else COSTS.wide_registers
    return overhead + _registers(workloads, row_inputs, config.vector, config.unroll)


def fields_of(workloads: Sequence[ReduceWorkload]) -> list[str]:
    """The types of all fields of the states of sisters."""
    return [dtype for workload in workloads for dtype in field_dtypes(workload)]


def tiles(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """Blocks along the outputs; they must be known."""
    outputs = constant(loops.outputs)
    assert outputs is not None, "a reduction with a symbolic number of outputs is not split"
    return -(-outputs // config.tile_outputs)


def vector_width(
    width: int,
    workloads: Sequence[ReduceWorkload],
    loops: CanonicalLoops,
    gpu: GPUInfo,
    threads: int = THREADS,
) -> int:
    """``width`` elements, or fewer where the innermost loop is short or odd, or states are many."""
    runs = loops.runs
    inner = constant(runs[-1][1]) if runs else 1
    if inner is None:
        return 1
    if loops.form == "all":
        return width if inner >= width else 1  # one row: the tail is separate
    if loops.form == "y":  # each thread puts its vector of states into shared memory
        states = threads * sum(DataType(dtype).bits // 8 for dtype in fields_of(workloads))
        while width > 1 and 2 * width * states > gpu.shared_bytes:
            width //= 2
    while inner % width:
        width //= 2
    return width


def _block(
    form: Form, loops: CanonicalLoops, vector: int, threads: int, gpu: GPUInfo
) -> tuple[int, int]:
    """Lanes and rows of a block."""
    if form == "all":
        return threads, 1
    reduced = constant(loops.reduced)
    if _is_short(loops, vector, gpu):
        return threads, 1
    extent = constant(loops.outputs) if form == "y" else reduced
    steps = LARGE if extent is None else -(-extent // vector)
    lanes = min(32, ceil_power_of_two(steps))
    if form == "x":
        while lanes < threads and steps > lanes * COSTS.loads_of_a_lane:
            lanes *= 2
    return lanes, threads // lanes


def _is_short(loops: CanonicalLoops, vector: int, gpu: GPUInfo) -> bool:
    """Return whether each output is left to one thread: few elements, and enough outputs."""
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    if loops.form != "y" or reduced is None or reduced > COSTS.short_reduction:
        return False
    return outputs is None or outputs >= 2 * gpu.multiprocessors * MIN_THREADS * vector


def finish_of(group: GroupWorkload, gpu: GPUInfo, has_workspace: bool = True) -> Finish:
    """Finish of the partial results if the reductions are split; ``one_block`` forbids that.

    Raises ``OpError`` if the finish ``atomic`` is requested for ``argmin`` or ``argmax``.
    """
    wishes = {_wish(reduction.workload, reduction.loops, gpu) for reduction in group.reductions}
    if "one_block" in wishes:
        return "one_block"
    if wishes == {"atomic"} and not group.has_epilogues:
        return "atomic"
    return "last_block" if has_workspace else "one_block"


def _wish(workload: ReduceWorkload, loops: CanonicalLoops, gpu: GPUInfo) -> Finish:
    """Preferred finish of one reduction by itself."""
    if workload.finish == "auto":
        return "last_block"  # one kernel; with atomic updates another one initialises the output
    if workload.finish != "atomic":
        return cast(Finish, workload.finish)
    if workload.is_arg:
        raise OpError(
            f"finish 'atomic' for {workload.operator} of {workload.dtype}; expected another one: "
            "there is no such atomic update of a value with its position, use 'last_block' or "
            "'auto'"
        )
    if gpu.device is not None and workload.dtype in FLOATS:
        return "last_block"  # the order of atomic updates is that in which blocks end
    is_safe = workload.out_dtype == "bool" or consists_of_words(
        workload.out_dtype, loops.outputs, gpu
    )
    return "atomic" if is_safe else "last_block"


def _cluster(
    config: ReduceConfig,
    loops: CanonicalLoops,
    gpu: GPUInfo,
    workloads: Sequence[ReduceWorkload],
    finish: str,
    at_once: int,
) -> int | None:
    """Blocks of the cluster of an output, possibly one; None if no cluster is sufficient.

    A cluster has as many blocks as fill the device, or, for small inputs, as load a row in one
    round. There is no cluster, unless it is asked for, where some would run nearly alone after all
    others.
    """
    if gpu.max_cluster == 1 or any(w.finish in ("atomic", "last_block") for w in workloads):
        return None
    splits = _splits(config, loops, gpu, "last_block", at_once)
    reduced = constant(loops.reduced)
    vectors = -(-(LARGE if reduced is None else reduced) // config.stride)
    size = 1
    while size < min(splits, gpu.max_cluster) and size * config.unroll < vectors:
        size *= 2
    if finish == "one_block":
        return size
    is_small = _input_bytes(workloads[0], loops) < COSTS.cluster_bytes
    fits = vectors <= size * config.unroll * COSTS.cluster_rounds
    if not (size >= splits or (is_small and fits)):
        return None
    room = gpu.multiprocessors * min(COSTS.cluster_blocks, at_once // gpu.multiprocessors)
    if size == 1 or constant(loops.outputs) is None:
        return size
    return None if _is_uneven(size * tiles(config, loops), room) else size


def _input_bytes(workload: ReduceWorkload, loops: CanonicalLoops) -> int:
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    elements = LARGE if outputs is None or reduced is None else outputs * reduced
    return elements * _item_bytes(workload)


def _item_bytes(workload: ReduceWorkload) -> int:
    return max(1, DataType(workload.dtype).bits // 8)


def _splits(
    config: ReduceConfig, loops: CanonicalLoops, gpu: GPUInfo, finish: str, at_once: int
) -> int:
    """Blocks that share one output: no more than run at once, or so many that waves are even."""
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    if finish == "one_block" or outputs is None:
        return 1
    reduced = LARGE if reduced is None else reduced
    count = tiles(config, loops)
    vectors = reduced // config.stride  # Vectors of a thread, over all splits.
    if count >= 2 * gpu.multiprocessors:
        more = -(-COSTS.full_waves * at_once // count)
        is_long = config.rows == 1 and vectors >= 2 * more * config.unroll
        return more if config.form == "x" and is_long and _is_uneven(count, at_once) else 1
    enough = -(-2 * gpu.multiprocessors // count)
    worth = max(vectors * _values(config) // COSTS.least_values, min(enough, vectors))
    most = max(1, min(worth, at_once // count, most_splits(config, outputs, finish)))
    return _even_splits(config, reduced, most, enough)


def _even_splits(config: ReduceConfig, reduced: int, most: int, enough: int) -> int:
    """The most splits with equal shares of whole turns, if few fewer than ``most`` have them."""
    turns, rest = divmod(reduced, config.stride * config.unroll)
    least = max(most - most // COSTS.spared_splits, min(most, enough))
    return next((n for n in range(most, least - 1, -1) if not rest and turns % n == 0), most)


def most_splits(config: ReduceConfig, outputs: int, finish: str) -> int:
    """Blocks that one output may have, so that combining their results takes little time."""
    if finish == "atomic" and outputs > COSTS.few_outputs:
        return COSTS.atomic_splits
    return max(1, COSTS.most_partials // config.tile_outputs)


def _smaller_tiles(
    config: ReduceConfig,
    loops: CanonicalLoops,
    gpu: GPUInfo,
    finish: str,
    at_once: int,
    itemsize: int,
) -> ReduceConfig:
    """Fewer outputs in a tile where it has too few splits to fill the device, or waves are few."""
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    if outputs is None:
        return config
    is_short = _is_short(loops, config.vector, gpu)
    while is_short and config.threads > MIN_THREADS:
        count = tiles(config, loops)
        if count >= 2 * gpu.multiprocessors and not _is_uneven(count, at_once):
            break
        config = replace(config, lanes=config.lanes // 2)
    while (
        config.form == "y"
        and not is_short
        and config.lanes * config.vector * itemsize > COSTS.sector
    ):
        count, most = tiles(config, loops), most_splits(config, outputs, finish)
        is_small = reduced is not None and reduced // config.stride <= most
        is_wide = config.lanes * config.vector * itemsize > COSTS.line
        lacks_splits = count * most < 2 * gpu.multiprocessors and not is_small
        if config.lanes == 1 or not (
            (lacks_splits and finish != "one_block") or (is_wide and _is_uneven(count, at_once))
        ):
            break
        config = replace(config, lanes=config.lanes // 2, rows=config.rows * 2)
    while config.form == "x" and config.rows > 1 and config.threads > MIN_THREADS:
        if not _is_uneven(tiles(config, loops), at_once):
            break
        config = replace(config, rows=config.rows // 2)
    return config


def _is_uneven(blocks: int, at_once: int) -> bool:
    """Return whether the last of few waves may have too few blocks for the device."""
    return at_once < blocks < COSTS.full_waves * at_once


def _most_blocks(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """Blocks if each thread had one vector only."""
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    if outputs is None:
        return LARGE
    vectors = (LARGE if reduced is None else reduced) // config.stride
    return -(-outputs // config.tile_outputs) * max(1, vectors)


def _values(config: ReduceConfig) -> int:
    """Elements of one output that a thread combines in one step."""
    return 1 if config.form == "y" else config.vector


def workspace_words(
    config: ReduceConfig, loops: CanonicalLoops, workloads: Sequence[ReduceWorkload]
) -> int:
    """32-bit words of all, a multiple of two."""
    blocks = PLACES * tiles(config, loops) * config.splits
    tagged = blocks * config.tile_outputs * state_words(workloads)
    return first_word(tiles(config, loops)) + 2 * tagged


def state_words(workloads: Sequence[ReduceWorkload]) -> int:
    """Words of the states of an output."""
    return sum(map(word_count, fields_of(workloads)))
