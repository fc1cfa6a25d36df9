# SPDX-License-Identifier: Apache-2.0
"""Settings of kernels of chains of reductions, and the cycles that they are predicted to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS

from .chain_config import (
    HALF_TYPES,
    chain_unroll,
    chain_vector,
    joins_loop_and_tail,
    kept_words,
)
from .config import Finish, ReduceConfig
from .group_workload import GroupWorkload
from .sister_space import fits_shared_memory, is_block, is_busy, powers, read_terms

_THREADS = (32, 64, 128, 256, 512, 1024)
_UNROLL = (1, 2, 4, 8)
_OWN_REGISTERS = 32  # of a thread beside those of its elements


def chain_settings(group: GroupWorkload, gpu: GPUInfo) -> Iterator[ReduceConfig]:
    """Yield the legal configurations of a chain.

    A block, or a cluster where the device has them, keeps its rows in registers if they fit, or
    reads them again for each stage.

    Parameters
    ----------
    group : GroupWorkload
        A chain of known extents.
    gpu : GPUInfo
        The device.
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
