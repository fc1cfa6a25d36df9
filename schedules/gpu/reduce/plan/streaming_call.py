# SPDX-License-Identifier: Apache-2.0
"""Kernel of sister reductions as its cost model sees it, estimated from the configuration.

Cycles, round trips and registers were chosen to agree with machine code of sm_75 to sm_90
(``examples/benchmarks/predict_gpu.py``), as were the compiler's own unrolling and its limits of
registers. Nothing has been measured on a GPU.
"""

from __future__ import annotations

import math

from tvm import DataType

from schedules.cost.kernel_call import KernelCall
from schedules.cost.kernels.gpu_kernels import REDUCE
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.core.tagged_words import word_count
from schedules.tir.index_math import ceil_power_of_two

from .config import ReduceConfig, blocks_at_once, fields_of, thread_registers
from .group_workload import GroupWorkload

_UNROLLED = 4  # turns that the compiler makes one
_WHOLE_TURNS = 8  # loops of no more have no end test
_OWN_REGISTERS = 24  # that no load in flight may use
_SLOT = (100.0, 4.0)  # cycles and round trips of claiming a slot of the workspace, and the ticket
_WORD_TRIPS = 2.5  # results of others, slot
_CLUSTER_CYCLES = 1340.0  # two barriers, and reading the memory of other blocks
_TURN_OVERHEAD = 7  # instructions
_ISSUE = 2.1  # cycles of an instruction of a warp that runs alone


def streaming_call(group: GroupWorkload, config: ReduceConfig, name: str = "") -> KernelCall:
    """Describe the kernel of a group.

    Parameters
    ----------
    group : GroupWorkload
        Of one stage and of known extents.
    config : ReduceConfig
        Its configuration.
    name : str
        What a report calls it.

    Returns
    -------
    KernelCall
        ``gpu.reduce``, with the sizes that :mod:`schedules.cost.kernels.gpu_kernels` reads.
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
    found = {"head_cycles": 0.0, "head_trips": 0.0, "finish_cycles": combine, "finish_trips": 0.0}
    if config.finish == "cluster":
        found["finish_cycles"] += _CLUSTER_CYCLES
    elif config.finish == "atomic":
        found["finish_trips"] = 1.0
    elif config.finish == "last_block":
        width = min(config.tile_outputs, config.threads)
        groups = min(config.threads // width, ceil_power_of_two(config.splits))
        reads = -(-config.splits // groups) * -(-config.tile_outputs // width)
        found["finish_cycles"] += combine
        found["finish_trips"] = _WORD_TRIPS + (reads - 1) / _UNROLLED
        cycles, trips = _SLOT
        part = "head" if overlaps else "finish"
        found[f"{part}_cycles"] += cycles
        found[f"{part}_trips"] += trips
    return found


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
