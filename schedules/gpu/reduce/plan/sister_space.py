# SPDX-License-Identifier: Apache-2.0
"""Settings of kernels of sister reductions, and the choice among them by predicted times.

Cycles, round trips and registers were chosen to agree with machine code of sm_75 to sm_90
(``examples/benchmarks/predict_gpu.py``), as were the compiler's own unrolling and its limits of
registers. Nothing has been measured on a GPU. Where a machine is in use, it chooses the split and
the finish; the block of the default stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from tvm import DataType

from schedules.cost.decisions import compare, machine_in_use, predict
from schedules.cost.gpu_kernels import REDUCE
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Machine
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.core.tagged_words import word_count
from schedules.tir.index_math import ceil_power_of_two
from schedules.workload.reduce import FLOATS

from .config import (
    Finish,
    ReduceConfig,
    blocks_at_once,
    fields_of,
    finish_of,
    most_splits,
    thread_registers,
    widest_vector,
)
from .group_workload import GroupWorkload

_THREADS = (64, 128, 256, 512, 1024)
_UNROLL = (1, 2, 4, 8)
_SPLITS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_WAVES = 4  # Waves of split reductions: more blocks have no more work to do at once.
_MOST_REGISTERS = 160  # estimated, so that the estimate may err by a half


def sister_settings(
    group: GroupWorkload,  # Group of one stage and of known extents.
    gpu: GPUInfo,
) -> Iterator[ReduceConfig]:
    """Yield the legal configurations of reductions that share one pass over their data.

    Those whose threads all have work, whose states fit the shared memory and the registers of a
    block, and that keep what the finish promises: of floats that nobody asked to be combined by
    atomic updates, the order.
    """
    for block in _blocks(group, gpu):
        yield from split_settings(group, block, gpu)


def split_settings(
    group: GroupWorkload, block: ReduceConfig, gpu: GPUInfo
) -> Iterator[ReduceConfig]:
    """Yield a configuration without a split, and those with its block that are split."""
    yield block
    for splits, finish in _finishes(group, gpu):
        config = replace(block, splits=splits, finish=finish)
        if _may_split(group, config, gpu):
            yield config


def is_sister_setting(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> bool:
    """Return whether a configuration is one of :func:`sister_settings`, without listing them."""
    block = replace(config, splits=1, finish="one_block")
    if not is_block(config, group, gpu, _THREADS, _UNROLL) or config.kept or config.is_online:
        return False
    widest = widest_vector(group, gpu, config.threads)
    if config.vector > widest or not (is_busy(group, block) and _fits(group, block, gpu)):
        return False
    split = config.splits, config.finish
    if split == (1, "one_block"):
        return True
    return split in _finishes(group, gpu) and _may_split(group, config, gpu)


def is_block(
    config: ReduceConfig,
    group: GroupWorkload,
    gpu: GPUInfo,
    threads: Sequence[int],
    unroll: Sequence[int],
) -> bool:
    """Return whether the extents of a block are numbers that a space has."""
    powers_of_two = (config.lanes, config.rows, config.vector)
    return (
        config.form == group.form
        and all(number > 0 and number & (number - 1) == 0 for number in powers_of_two)
        and config.threads in threads
        and config.threads <= gpu.max_threads
        and config.unroll in unroll
    )


def _blocks(group: GroupWorkload, gpu: GPUInfo) -> Iterator[ReduceConfig]:
    """Configurations without a split."""
    [stage] = group.stages
    for threads, unroll in product(_THREADS, _UNROLL):
        if threads > gpu.max_threads:
            continue
        vector = widest_vector(group, gpu, threads)
        while vector:
            for lanes in powers(threads):
                config = ReduceConfig(
                    group.form, lanes, threads // lanes, vector, unroll, 1, "one_block"
                )
                if is_busy(group, config) and _fits(group, config, gpu):
                    yield config
            vector //= 2


def powers(most: int) -> list[int]:
    """Powers of two up to ``most``."""
    return [1 << power for power in range(most.bit_length())]


def is_busy(group: GroupWorkload, config: ReduceConfig) -> bool:
    """Return whether a block has no more threads along a loop than that has vectors."""
    outputs, reduced = int(group.outputs), int(group.reduced)
    if config.form == "all":
        return config.rows == 1
    along, across = (outputs, reduced) if config.form == "y" else (reduced, outputs)
    lanes = ceil_power_of_two(-(-along // config.vector))
    return config.lanes <= lanes and config.rows <= ceil_power_of_two(across)


def state_bytes(group: GroupWorkload) -> int:
    """Bytes of the states of the largest stage."""
    return max(
        sum(DataType(dtype).bits // 8 for dtype in fields_of(stage.workloads))
        for stage in group.stages
    )


def fits_shared_memory(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> bool:
    """Return whether a block can exchange the states of all its threads."""
    states = config.vector if config.form == "y" else 1
    return 2 * config.threads * states * state_bytes(group) <= gpu.shared_bytes


def _fits(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> bool:
    registers = _registers(group, config)
    return (
        registers <= min(_MOST_REGISTERS, COSTS.register_file // config.threads)
        and -(-int(group.outputs) // config.tile_outputs) < 1 << 31
        and fits_shared_memory(group, config, gpu)
    )


def _registers(group: GroupWorkload, config: ReduceConfig) -> int:
    [stage] = group.stages
    return thread_registers(config, stage.workloads, group.row_inputs, group.row_outputs)


def _finishes(group: GroupWorkload, gpu: GPUInfo) -> list[tuple[int, Finish]]:
    """Numbers of splits with the finishes that keep the promise of the reductions."""
    wishes = {one.workload.finish for one in group.reductions}
    wished = finish_of(group, gpu)
    found: list[tuple[int, Finish]] = [(size, "cluster") for size in _clusters(wishes, gpu)]
    if wished != "one_block":
        found += [(splits, wished) for splits in _SPLITS]
    if wishes == {"auto"} and _is_exact(group) and finish_of(_with_atomics(group), gpu) == "atomic":
        found += [(splits, "atomic") for splits in _SPLITS]
    return found


def _clusters(wishes: set[str], gpu: GPUInfo) -> list[int]:
    return powers(gpu.max_cluster)[1:] if wishes <= {"auto", "one_block"} else []


def _is_exact(group: GroupWorkload) -> bool:
    """Return whether the results do not depend on the order in which elements are combined."""
    return not any(one.workload.is_arg or one.workload.dtype in FLOATS for one in group.reductions)


def _with_atomics(group: GroupWorkload) -> GroupWorkload:
    """The group as if atomic updates were asked for."""
    [stage] = group.stages
    asked = tuple(
        replace(one, workload=replace(one.workload, finish="atomic")) for one in stage.reductions
    )
    return replace(group, stages=(replace(stage, reductions=asked),))


def _may_split(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> bool:
    """Return whether every split has work, and combining their results takes little time."""
    tiles = -(-int(group.outputs) // config.tile_outputs)
    steps = -(-int(group.reduced) // config.stride)
    if config.splits > steps:
        return False
    if config.finish == "cluster":
        return tiles * config.splits < 1 << 31
    most = _MOST_WAVES * gpu.multiprocessors * COSTS.resident_blocks
    few = max(2, most_splits(config, int(group.outputs), config.finish))
    return tiles * config.splits <= most and config.splits <= few


def sister_terms(group: GroupWorkload, config: ReduceConfig, gpu: GPUInfo) -> dict[str, float]:
    """Return the cycles of reading, of combining, of beginning blocks, and of the finish."""
    registers = _registers(group, config)
    outputs, reduced = int(group.outputs), int(group.reduced)
    blocks = -(-outputs // config.tile_outputs) * config.splits
    terms = read_terms(group, config, gpu, blocks, registers, passes=1)
    words = sum(map(word_count, fields_of(group.stages[0].workloads)))
    partials = 4.0 * words * config.splits * config.tile_outputs
    finish = {
        "one_block": 0.0,
        "cluster": COSTS.block_latency / 2,
        "last_block": 2 * COSTS.block_latency + 2 * partials / COSTS.l2_bytes,
        "atomic": COSTS.launch + words * config.splits * 4.0,
    }[config.finish]
    steps = reduced / (config.stride * config.splits)
    used = math.ceil(steps / config.unroll) * config.unroll / steps if config.unroll > steps else 1
    return terms | {"finish_cycles": finish, "unused_loads": used}


def read_terms(
    group: GroupWorkload,
    config: ReduceConfig,
    gpu: GPUInfo,
    blocks: int,  # Blocks of the grid.
    registers: int,  # Registers of a thread.
    passes: int,  # How often a row is read, but for the first time from the second-level cache.
) -> dict[str, float]:
    """Cycles of reading the rows and of all else that blocks do.

    Returns ``reads``, ``blocks`` and ``combining`` in cycles; ``waves`` and ``in_flight`` bytes.
    """
    resident = min(
        COSTS.register_file // (registers * config.threads),
        COSTS.multiprocessor_threads // config.threads,
    )
    at_once = gpu.multiprocessors * max(1, resident)
    waves = blocks / at_once
    share = math.ceil(blocks / gpu.multiprocessors) * gpu.multiprocessors / blocks
    shared = min(max(1, resident), math.ceil(blocks / gpu.multiprocessors))
    loads = config.vector * max(1, config.kept or config.unroll) * sum(group.row_inputs)
    in_flight = float(shared * config.threads * loads)
    busy = min(1.0, in_flight / (COSTS.hiding_threads * COSTS.widest_load * COSTS.loads_in_flight))
    elements = float(int(group.outputs) * int(group.reduced)) / gpu.multiprocessors
    once = sum(group.row_inputs) + sum(group.row_outputs) + sum(group.late_outputs)
    moved = once / COSTS.memory_bytes + (passes - 1) * sum(group.row_inputs) / COSTS.l2_bytes
    neighbours = config.lanes * config.vector * min(group.itemsizes)
    moved *= max(1.0, COSTS.sector / neighbours)  # the rest of a sector is not used
    narrow = max(1.0, 4 / (config.vector * min(group.itemsizes)))
    issue = elements * (len(group.row_inputs) + 2 + 8 * group.functions) / COSTS.warp / COSTS.issue
    reads = max(elements * moved * min(narrow, 2.0) / busy, issue) * share
    members = config.rows if config.form == "y" else config.lanes
    combining = math.log2(2 * members) * 2 * COSTS.warp * len(group.stages)
    return {
        "reads": reads,
        "blocks": math.ceil(waves) * (COSTS.block_latency + combining),
        "combining": combining,
        "waves": waves,
        "in_flight": in_flight,
    }


_UNROLLED = 4  # turns that the compiler makes one
_WHOLE_TURNS = 8  # loops of no more have no end test
_OWN_REGISTERS = 24  # Registers that no load in flight may use.
_SLOT = (100.0, 4.0)  # cycles and round trips of claiming a slot of the workspace, and the ticket
_WORD_TRIPS = 2.5  # results of others, slot
_CLUSTER_CYCLES = 1340.0  # two barriers, and reading the memory of other blocks
_TURN_OVERHEAD = 7  # instructions
_ISSUE = 2.1  # cycles of an instruction of a warp that runs alone


def streaming_call(
    group: GroupWorkload,  # Group of one stage and of known extents.
    config: ReduceConfig,
    name: str = "",  # What a report calls it.
) -> KernelCall:
    """Describe the kernel of a group.

    Returns ``gpu.reduce``, with the sizes that :mod:`schedules.cost.gpu_kernels` reads.
    """
    [stage] = group.stages
    workloads = stage.workloads
    outputs, reduced = int(group.outputs), int(group.reduced)
    at_once = blocks_at_once(config, workloads, group.row_inputs, group.row_outputs)
    most = COSTS.register_file // (config.threads * at_once)
    turn, flight, instructions = _turn(group, config, most)
    estimated = thread_registers(config, workloads, group.row_inputs, group.row_outputs)
    turns = reduced / (config.stride * config.splits) / config.unroll
    sizes = {
        "blocks": -(-outputs // config.tile_outputs) * config.splits,
        "threads": config.threads,
        "registers": min(most, max(estimated, _OWN_REGISTERS + flight // 4)),
        "shared_bytes": _shared_bytes(group, config),
        "turn_bytes": turn,
        "flight_bytes": flight,
        "turn_instructions": instructions,
        "turn_cycles": _ISSUE * instructions,
        "contenders": config.splits if config.finish in ("atomic", "last_block") else 1,
        "launches": 1 if config.finish == "atomic" else 0,
        **_beside_loop(group, config, overlaps=turns > 1),
    }
    read = outputs * reduced * sum(group.row_inputs)
    written = outputs * reduced * sum(group.row_outputs)
    written += outputs * sum(_bytes(one.out_dtype) for one in workloads)
    return KernelCall(REDUCE, sizes, workloads[0].dtype, 0.0, read, written, name)


def _turn(group: GroupWorkload, config: ReduceConfig, registers: int) -> tuple[int, int, int]:
    """Bytes of a turn of a thread, those under way at once, and its instructions."""
    vectors = -(-int(group.reduced) // (config.stride * config.splits))
    rounds = -(-vectors // config.unroll)
    together = rounds if rounds <= _WHOLE_TURNS else _UNROLLED
    loads = min(vectors, config.unroll * together)
    turn = loads * config.vector * max(1, sum(group.row_inputs))
    states = sum(map(word_count, fields_of(group.stages[0].workloads)))
    states *= config.vector if config.form == "y" else 1
    room = 4 * max(4, registers - _OWN_REGISTERS - states)
    operations = len(group.reductions) + max(0, len(group.row_inputs) - 1) + 8 * group.functions
    elements = loads * config.vector
    instructions = loads * max(1, len(group.row_inputs)) + elements * operations + _TURN_OVERHEAD
    return turn, min(turn, room), instructions


def _beside_loop(group: GroupWorkload, config: ReduceConfig, overlaps: bool) -> dict[str, float]:
    """Cycles and round trips before the main loop and after it.

    The slot is claimed while the first loads are under way, if there are further ones.
    """
    states = sum(map(word_count, fields_of(group.stages[0].workloads)))
    combine = _combine_cycles(config) * (1 + (states - 1) / 4)
    figures = {"head_cycles": 0.0, "head_trips": 0.0, "finish_cycles": combine, "finish_trips": 0.0}
    if config.finish == "cluster":
        figures["finish_cycles"] += _CLUSTER_CYCLES
    elif config.finish == "atomic":
        figures["finish_trips"] = 1.0
    elif config.finish == "last_block":
        width = min(config.tile_outputs, config.threads)
        groups = min(config.threads // width, ceil_power_of_two(config.splits))
        reads = -(-config.splits // groups) * -(-config.tile_outputs // width)
        figures["finish_cycles"] += combine
        figures["finish_trips"] = _WORD_TRIPS + (reads - 1) / _UNROLLED
        cycles, trips = _SLOT
        part = "head" if overlaps else "finish"
        figures[f"{part}_cycles"] += cycles
        figures[f"{part}_trips"] += trips
    return figures


def _combine_cycles(config: ReduceConfig) -> float:
    """Cycles in which a block combines the states of its threads and writes the results."""
    if config.form == "y":
        return 300.0 + 20.0 * math.log2(config.rows)
    return 200.0 if config.lanes <= COSTS.warp else 310.0


def _shared_bytes(group: GroupWorkload, config: ReduceConfig) -> int:
    states = sum(_bytes(dtype) for dtype in fields_of(group.stages[0].workloads))
    if config.form == "y":
        return config.threads * config.vector * states
    return config.threads // COSTS.warp * states if config.lanes > COSTS.warp else 0


def _bytes(dtype: str) -> int:
    return max(1, DataType(dtype).bits // 8)


LEAST_GAIN = 0.1
"""Least value of (time of the default / time of another split) - 1 that another split needs.

Four of five estimates differ less from those by machine code.
"""


def decide_split(
    group: GroupWorkload,  # Group of one stage.
    default: ReduceConfig,  # The configuration without a machine.
    gpu: GPUInfo,
    has_workspace: bool = True,  # Flag of :func:`.config.choose_sisters`.
) -> ReduceConfig:
    """Choose among the splits of the default's block by the machine in use.

    Returns the default, if there is no machine, if an extent is unknown, or if nothing gains
    :data:`LEAST_GAIN`. Raises ``PredictionError`` if the machine lacks a figure.
    """
    machine = machine_in_use()
    if machine is None or not group.is_static:
        return default
    best = _best_of_each_finish(group, default, gpu, has_workspace, machine)
    if not best:
        return default
    named = {_name(config): config for config in [*best, default]}
    calls = {name: [streaming_call(group, config)] for name, config in named.items()}
    decision = "split" if best[0].finish == default.finish else "finish"
    found = compare(decision, group.title, calls, LEAST_GAIN)
    return named[found.chosen]


def _best_of_each_finish(
    group: GroupWorkload,
    default: ReduceConfig,
    gpu: GPUInfo,
    has_workspace: bool,
    machine: Machine,
) -> list[ReduceConfig]:
    """The fastest other split with each finish, the fastest of them first."""
    block = replace(default, splits=1, finish="one_block")
    seconds: dict[ReduceConfig, float] = {}
    for config in split_settings(group, block, gpu):
        if config != default and (has_workspace or config.finish != "last_block"):
            seconds[config] = predict(streaming_call(group, config), machine).seconds
    found: dict[str, ReduceConfig] = {}
    for config in sorted(seconds, key=seconds.__getitem__):
        found.setdefault(config.finish, config)
    return list(found.values())


def _name(config: ReduceConfig) -> str:
    if config.splits == 1:
        return "one block"
    return f"{config.finish.replace('_', ' ')}, {config.splits} splits"
