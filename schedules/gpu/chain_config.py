# SPDX-License-Identifier: Apache-2.0
"""Shape of a GPU kernel of a chain of reductions: a row, or a tile of columns, has one block.

A thread keeps its elements in registers if they are few. So a row gets a warp as long as that is
enough, then more and more warps up to the largest block; longer rows are read again for each stage.
The thresholds are estimates; they have not been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from ..reduce_workload import CanonicalLoops, constant
from .device import GPUInfo
from .reduce_config import (
    LOADS_IN_FLIGHT,
    MIN_THREADS,
    THREADS,
    VECTOR_BYTES,
    ReduceConfig,
    power_of_two,
    vector_width,
)
from .reduce_group import ReduceGroup

WARP = 32
MAX_THREADS = 1024
WARP_WORDS = 64  # registers of elements that a thread keeps before a row gets a second warp
BLOCK_WORDS = 32  # before it gets a larger block
MOST_WORDS = 48  # with the largest block, whose threads have 64 registers


def choose_chain(group: ReduceGroup, gpu: GPUInfo) -> ReduceConfig:
    """Decide how a chain runs.

    Parameters
    ----------
    group : ReduceGroup
        A chain.
    gpu : GPUInfo
        The device.

    Returns
    -------
    ReduceConfig
        With one split, and the finish ``one_block``.
    """
    loops = group.reductions[0].loops
    vector = _vector(group, gpu)
    shape = _columns if loops.form == "y" else _rows
    config = shape(group, loops, vector, gpu)
    reduced = constant(group.reduced)
    if reduced is None:
        return config
    kept = -(-reduced // config.stride)
    fits = _words(group, config, kept) <= _most_words(config.threads)
    regular = config.form == "y" or reduced % vector == 0
    return replace(config, kept=kept) if fits and regular else config


def _rows(group: ReduceGroup, loops: CanonicalLoops, vector: int, gpu: GPUInfo) -> ReduceConfig:
    """Lanes along a row, and several short rows in a block."""
    reduced, outputs = constant(group.reduced), constant(group.outputs)
    most = _threads(gpu, MAX_THREADS)
    lanes = min(WARP, most, power_of_two(-(-reduced // vector))) if reduced is not None else WARP
    config = ReduceConfig(loops.form, lanes, 1, vector, LOADS_IN_FLIGHT, 1, "one_block")
    while config.lanes < most:
        kept = most if reduced is None else -(-reduced // config.stride)
        limit = WARP_WORDS if config.lanes <= WARP else BLOCK_WORDS
        if _words(group, config, kept) <= limit:
            break
        config = replace(config, lanes=2 * config.lanes)
    config = replace(config, rows=max(1, _threads(gpu, THREADS) // config.lanes))
    while config.rows > 1 and config.threads > MIN_THREADS and outputs is not None:
        if outputs // config.rows >= 2 * gpu.multiprocessors:
            break
        config = replace(config, rows=config.rows // 2)
    return config


def _columns(group: ReduceGroup, loops: CanonicalLoops, vector: int, gpu: GPUInfo) -> ReduceConfig:
    """Lanes along neighbouring outputs, and rows that share the reduced loop."""
    reduced, outputs = constant(group.reduced), constant(group.outputs)
    while vector > 1 and outputs is not None and outputs // (WARP * vector) < gpu.multiprocessors:
        vector //= 2
    lanes = WARP if outputs is None else min(WARP, power_of_two(-(-outputs // vector)))
    config = ReduceConfig("y", lanes, 1, vector, LOADS_IN_FLIGHT, 1, "one_block")
    most = _threads(gpu, THREADS)
    while config.threads < most:
        kept = most if reduced is None else -(-reduced // config.rows)
        if config.threads >= WARP and _words(group, config, kept) <= BLOCK_WORDS:
            break
        config = replace(config, rows=2 * config.rows)
    return config


def _vector(group: ReduceGroup, gpu: GPUInfo) -> int:
    """Elements of a 16-byte load of all but the narrowest tensors."""
    sizes = group.row_inputs() or [1]
    width = VECTOR_BYTES // max(min(sizes), max(sizes) // 2)
    threads = _threads(gpu, THREADS)
    return min(
        vector_width(width, stage.workloads, reduction.loops, gpu, threads)
        for stage in group.stages
        for reduction in stage.reductions
    )


def _words(group: ReduceGroup, config: ReduceConfig, kept: int) -> int:
    """Registers that a thread needs to keep its elements, and a value computed of each."""
    return kept * config.vector * (4 + sum(group.row_inputs())) // 4


def _most_words(threads: int) -> int:
    """Registers that the elements of a thread may take in a block of this size."""
    return MOST_WORDS if threads > 512 else WARP_WORDS


def _threads(gpu: GPUInfo, wanted: int) -> int:
    """Threads of a block, a power of two."""
    return 1 << (min(wanted, gpu.max_threads).bit_length() - 1)
