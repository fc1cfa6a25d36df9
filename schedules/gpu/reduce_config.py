# SPDX-License-Identifier: Apache-2.0
"""Shape of a GPU reduction kernel: threads, vectors, unrolling, split and finish.

A block of 256 threads is ``rows x lanes``. In forms *all* and *x* a row of lanes shares one output
and lanes walk the reduced loop; in form *y* lanes hold neighbouring outputs and rows share the
reduced loop. The reduced loop is split over blocks only where outputs alone leave multiprocessors
idle. The thresholds are estimates from what is published (16-byte loads, 32 KiB in flight on each
multiprocessor); they have not been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import DataType
from tvm.target import Target

from ..errors import OpError
from ..reduce_operator import field_dtypes
from ..reduce_workload import CanonicalLoops, ReduceWorkload, constant
from .device import KINDS, GPUInfo

THREADS = 256
MIN_THREADS = 64  # where rows are too few to fill the device with blocks of 256
VECTOR_BYTES = 16
LOADS_IN_FLIGHT = 4
LOADS_OF_A_LANE = 8  # beyond which a row gets more lanes
BLOCKS_PER_MULTIPROCESSOR = 4
MIN_VALUES_PER_THREAD = 16
MAX_SPLITS = 64  # partial results that one block of a y tile reads back
MAX_ATOMIC_SPLITS = 16  # blocks that contend for one address where outputs are many
_BYTES = ("int8", "uint8")  # updates by words would touch the neighbours of the output
LARGE = 1 << 24  # elements that a symbolic extent stands for when work is shared out


@dataclass(frozen=True)
class ReduceConfig:
    """The decisions of one kernel.

    Parameters
    ----------
    form : str
        ``all``, ``x`` or ``y``.
    lanes, rows : int
        Threads along addresses and across them; powers of two.
    vector : int
        Neighbouring elements that a thread loads at once, a power of two.
    unroll : int
        Vectors that a thread loads before it combines them.
    splits : int
        Blocks that share one output.
    finish : str
        ``one_block``, ``atomic`` or ``last_block``.
    """

    form: str
    lanes: int
    rows: int
    vector: int
    unroll: int
    splits: int
    finish: str

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    @property
    def tile_outputs(self) -> int:
        """Outputs of a block."""
        return self.lanes * self.vector if self.form == "y" else self.rows

    @property
    def stride(self) -> int:
        """Steps of the reduced loop that a block takes at once, one vector a thread."""
        return self.rows if self.form == "y" else self.lanes * self.vector


def choose(
    workload: ReduceWorkload,
    loops: CanonicalLoops,
    gpu: GPUInfo,
    scratch_bytes: int | None = None,
    itemsize: int | None = None,
) -> ReduceConfig:
    """Decide how a reduction runs.

    Parameters
    ----------
    workload : ReduceWorkload
        Operator, types and the finish that was asked for.
    loops : CanonicalLoops
        Extents.
    gpu : GPUInfo
        The device.
    scratch_bytes : int | None
        Memory for partial results that the kernel has got; None stands for as much as it needs.
    itemsize : int | None
        Bytes of the narrowest element that is read; None stands for those of the workload's type.
        Only forms *all* and *x* look at it: in form *y* the scratch depends on the vector.

    Returns
    -------
    ReduceConfig
        The same for the same arguments.

    Raises
    ------
    OpError
        If the finish ``atomic`` was asked for where there is none.
    """
    form = loops.form
    own = max(1, DataType(workload.dtype).bits // 8)
    vector = _vector(workload, loops, gpu, own if form == "y" else itemsize or own)
    lanes, rows = _block(form, loops, vector, _threads(gpu))
    unroll = 1 if workload.is_arg else LOADS_IN_FLIGHT  # comparing hides the loads
    whole = ReduceConfig(form, lanes, rows, vector, unroll, 1, "one_block")
    while form == "x" and whole.rows > 1 and whole.threads > MIN_THREADS:
        if _most_blocks(whole, loops) >= 2 * gpu.multiprocessors:
            break
        whole = replace(whole, rows=whole.rows // 2)
    finish = _finish(workload, gpu, scratch_bytes)
    splits = _splits(whole, loops, gpu, finish)
    if splits == 1:
        return whole
    split = replace(whole, splits=splits, finish=finish)
    if finish == "last_block" and scratch_bytes is not None:
        if _scratch_words(split, workload, loops) * 4 > scratch_bytes:
            return whole
    return split


def scratch_words(workload: ReduceWorkload, loops: CanonicalLoops, target: Target | None) -> int:
    """Zeroed 32-bit words that the kernel for ``target`` needs: tickets and partial results."""
    if target is None or target.kind.name not in KINDS:
        return 0
    config = choose(workload, loops, GPUInfo.from_target(target))
    return _scratch_words(config, workload, loops) if config.finish == "last_block" else 0


def tiles(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """Blocks along the outputs; they must be known."""
    outputs = constant(loops.outputs)
    assert outputs is not None, "a symbolic number of outputs is not split"
    return -(-outputs // config.tile_outputs)


def ticket_words(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """Words before the partial results: a ticket for each tile, to a multiple of 16 bytes."""
    return -(-tiles(config, loops) // 4) * 4


def partials(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """States that all blocks write."""
    return tiles(config, loops) * config.splits * config.tile_outputs


def _scratch_words(config: ReduceConfig, workload: ReduceWorkload, loops: CanonicalLoops) -> int:
    words = sum(max(4, DataType(dtype).bits // 8) // 4 for dtype in field_dtypes(workload))
    # Fields begin at multiples of 8 bytes.
    padded = -(-partials(config, loops) // 2) * 2
    return ticket_words(config, loops) + words * padded


def _threads(gpu: GPUInfo) -> int:
    """Threads of a whole block, a power of two."""
    return 1 << (min(THREADS, gpu.max_threads).bit_length() - 1)


def _vector(workload: ReduceWorkload, loops: CanonicalLoops, gpu: GPUInfo, itemsize: int) -> int:
    """Elements of a 16-byte load, less where the innermost loop is short or odd."""
    width = VECTOR_BYTES // itemsize
    runs = loops.runs
    inner = constant(runs[-1][1]) if runs else 1
    if inner is None:
        return 1
    if loops.form == "all":
        return width if inner >= width else 1  # one row: the tail is apart
    if loops.form == "y":  # each thread puts its vector of states into shared memory
        states = THREADS * sum(DataType(dtype).bits // 8 for dtype in field_dtypes(workload))
        while width > 1 and 2 * width * states > gpu.shared_bytes:
            width //= 2
    while inner % width:
        width //= 2
    return width


def _block(form: str, loops: CanonicalLoops, vector: int, threads: int) -> tuple[int, int]:
    """Lanes and rows of a block."""
    if form == "all":
        return threads, 1
    extent = constant(loops.outputs if form == "y" else loops.reduced)
    steps = LARGE if extent is None else -(-extent // vector)
    lanes = min(32, power_of_two(steps))
    if form == "x":
        while lanes < threads and steps > lanes * LOADS_OF_A_LANE:
            lanes *= 2
    return lanes, threads // lanes


def _finish(workload: ReduceWorkload, gpu: GPUInfo, scratch_bytes: int | None) -> str:
    """How partial results meet if the reduction is split."""
    if workload.finish == "atomic":
        _check_atomic(workload, gpu)
    if workload.finish in ("one_block", "atomic"):
        return workload.finish
    if workload.finish == "auto" and is_exact(workload):
        return "atomic"
    return "one_block" if scratch_bytes == 0 else "last_block"


def _check_atomic(workload: ReduceWorkload, gpu: GPUInfo) -> None:
    narrow = DataType(workload.out_dtype).bits < 32 and workload.out_dtype != "bool"
    if workload.is_arg or (narrow and gpu.kind == "opencl") or workload.out_dtype in _BYTES:
        raise OpError(
            f"finish 'atomic' for {workload.operator} of {workload.dtype} on {gpu.kind}; expected "
            "another one: there is no such atomic update, use 'last_block' or 'auto'"
        )


def is_exact(workload: ReduceWorkload) -> bool:
    """Whether atomic updates have an instruction, and their order cannot be seen in the result."""
    return workload.dtype in ("int32", "int64", "bool") and not workload.is_arg


def _splits(config: ReduceConfig, loops: CanonicalLoops, gpu: GPUInfo, finish: str) -> int:
    """Blocks that share one output."""
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    if finish == "one_block" or outputs is None:
        return 1
    reduced = LARGE if reduced is None else reduced
    count = -(-outputs // config.tile_outputs)
    if count >= 2 * gpu.multiprocessors:
        return 1
    enough = -(-2 * gpu.multiprocessors // count)
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * gpu.multiprocessors // count)
    vectors = reduced // config.stride  # of a thread, over all splits
    worth = min(wanted, vectors * _values(config) // MIN_VALUES_PER_THREAD)
    if config.tile_outputs > 1:
        worth = min(worth, MAX_ATOMIC_SPLITS if finish == "atomic" and outputs > 32 else MAX_SPLITS)
    return max(1, worth, min(enough, vectors))


def _most_blocks(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """Blocks if each thread had one vector only."""
    outputs, reduced = constant(loops.outputs), constant(loops.reduced)
    if outputs is None:
        return LARGE
    vectors = (LARGE if reduced is None else reduced) // config.stride
    return -(-outputs // config.tile_outputs) * max(1, vectors)


def _values(config: ReduceConfig) -> int:
    """Elements of one output that a thread sees at one step."""
    return 1 if config.form == "y" else config.vector


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()
