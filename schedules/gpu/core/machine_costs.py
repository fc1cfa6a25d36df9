# SPDX-License-Identifier: Apache-2.0
"""Figures that kernels and cost models assume of a GPU: one table a machine.

So far there is one table, :data:`COSTS`, for all GPUs. Those of the first group are from NVIDIA's
*CUDA C++ Programming Guide* (compute capabilities); where generations differ it is the figure of
sm_80 to sm_90. All others are estimates from published figures, measured on no GPU;
``make bench-gpu`` shows the kernels that they choose.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MachineCosts:
    """Figures of one GPU.

    Parameters
    ----------
    warp : int
        Lanes of a warp (data sheet, as all down to ``shared_bytes``).
    widest_load : int
        Bytes of one load or store of a lane.
    sector, line : int
        Bytes that memory delivers at least, and bytes of a line of the caches.
    register_file : int
        Registers of 32 bits of a multiprocessor.
    thread_registers : int
        Most registers of a thread.
    multiprocessor_threads : int
        Threads that a multiprocessor runs at once.
    shared_bytes : int
        Shared memory of a multiprocessor that blocks divide among them.
    opt_in_shared_bytes : int
        Shared memory of a block of sm_90 that asks for it at the launch.
    warpgroup_products : float
        Products of 16 bits that the tensor cores of a multiprocessor of sm_90 add in a cycle.
    issue : float
        Warps that issue in a cycle.
    block_threads : int
        Largest block.
    launch : float
        Cycles from the end of a kernel to the start of the next, over a microsecond (estimate, as
        all that follow).
    block_latency : float
        Cycles of a block outside of its main loop.
    step_latency : float
        Cycles from a load's issue to the barrier after its store into shared memory.
    copied_line : float
        Cycles of each run of neighbours, up to 128 bytes long, that is copied by a tensor map.
    epilogue : float
        Cycles between the last product of a tile and the first of the next in the same block.
    warp_products : float
        Products of 16 bits of a multiprocessor in a cycle where warps load them from shared memory,
        as counted instructions of the main loop allow.
    warp_cycles : float
        Cycles between two instructions of a warp.
    read_cycles : float
        Cycles of a read of shared memory, 16 bytes a lane where neighbours read the same.
    l2_bytes, memory_bytes : float
        Bytes that a multiprocessor gets in a cycle from the second-level cache and from memory.
    l2_capacity : int
        Bytes that stay in the second-level cache from one kernel to the next.
    hiding_threads : int
        Threads of a multiprocessor that hide the latency of memory.
    conv_registers, fused_registers : int
        Registers of a thread of one convolution and of a pair, estimated, so that the estimate may
        err by a quarter.
    loads_in_flight : int
        Vectors that a thread of a reduction loads before it combines them.
    loads_of_a_lane : int
        Loads of a lane of a reduced row above which the row gets more lanes.
    resident_blocks : int
        Blocks of a reduction that run at once on a multiprocessor, if their registers allow it.
    least_values : int
        Elements that a thread of a split reduction combines at least.
    most_partials : int
        Partial results that the last block of a tile reads back, 32 by each thread.
    atomic_splits, few_outputs : int
        Blocks that contend for one address of an atomic update where outputs are more than the
        second figure.
    spared_splits : int
        Number of blocks of which one is given up if the others then have equal shares.
    short_reduction : int
        Elements of an output, its neighbours beside it, that one thread combines alone.
    full_waves : int
        Waves of blocks above which those of the last one matter little.
    cluster_rounds : int
        Rounds of loads in flight for which a cluster beats blocks that meet in memory: a round
        takes about 0.7 us, tickets and partial results in memory 2 to 3 us, a barrier of a cluster
        and reading its other blocks' memory less than 1 us.
    cluster_bytes : int
        Bytes of the input above which too few clusters leave bandwidth unused.
    cluster_blocks : int
        Blocks of clusters on a multiprocessor; for more the compiler spills.
    state_registers : int
        Registers of a thread for states and loads in flight, where there are several of them.
    input_registers, output_registers, wide_registers, own_registers : int
        Further registers of a thread, as the compiler uses them: for each input, for each tensor of
        elements that is stored on the way, for 64-bit elements and states, and in general.
    byte_position_registers : int
        The same for each byte of a vector along a row, where positions of extremes are kept.
    reread_threads : int
        Threads of a block that reads its row again for each stage, so that two run at once.
    large_block : int
        Threads above which the compiler would spill to fit two blocks at once.
    kept_words, block_words : int
        Registers in which a thread keeps its elements at most, and above which a row with several
        warps gets more of them.
    short_row : int
        Bytes that a block reads as fast as a kernel is launched, however few rows there are: four
        in each register in which 1024 threads keep a row.
    cluster_share : int
        Bytes that each block of a cluster reads during the launches of two more kernels: four in
        each of 32 registers of 1024 threads, which leave room for a value computed from each.
    segment : int
        Neighbouring bytes that a block reads of each row where outputs are neighbours.
    """

    warp: int = 32
    widest_load: int = 16
    sector: int = 32
    line: int = 128
    register_file: int = 65536
    thread_registers: int = 255
    multiprocessor_threads: int = 2048
    shared_bytes: int = 100 * 1024
    opt_in_shared_bytes: int = 227 * 1024
    warpgroup_products: float = 2048.0
    issue: float = 4.0
    block_threads: int = 1024
    launch: float = 2000.0
    block_latency: float = 1500.0
    step_latency: float = 400.0
    copied_line: float = 1.0
    epilogue: float = 1500.0
    warp_products: float = 650.0
    warp_cycles: float = 2.0
    read_cycles: float = 2.0
    l2_bytes: float = 30.0
    memory_bytes: float = 14.0
    l2_capacity: int = 24 << 20
    hiding_threads: int = 512
    conv_registers: int = 200
    fused_registers: int = 210
    loads_in_flight: int = 4
    loads_of_a_lane: int = 8
    resident_blocks: int = 4
    least_values: int = 16
    most_partials: int = 8192
    atomic_splits: int = 16
    few_outputs: int = 32
    spared_splits: int = 16
    short_reduction: int = 32
    full_waves: int = 4
    cluster_rounds: int = 2
    cluster_bytes: int = 1 << 20
    cluster_blocks: int = 2
    state_registers: int = 96
    input_registers: int = 6
    output_registers: int = 3
    wide_registers: int = 24
    own_registers: int = 20
    byte_position_registers: int = 4
    reread_threads: int = 512
    large_block: int = 512
    kept_words: int = 64
    block_words: int = 32
    short_row: int = 1 << 16
    cluster_share: int = 1 << 17
    segment: int = 64


COSTS = MachineCosts()
