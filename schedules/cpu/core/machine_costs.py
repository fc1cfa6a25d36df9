# SPDX-License-Identifier: Apache-2.0
"""Constants of the cost models of CPU kernels: one table a CPU family.

The defaults of :class:`MachineCosts` are those of Zen 3. They were fitted to the times that
``examples/benchmarks/knobs.py`` recorded there, and the differing figures of the other families to
those recorded on them: ``examples/benchmarks/results`` has the times under the names of the CPUs,
and ``tests/schedules/cpu/cost/test_cost_model.py`` checks the tables against them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MachineCosts:
    """Constants in cycles, bytes a cycle and shares, of one core unless said otherwise.

    Parameters
    ----------
    fma_bits_per_cycle : int
        Bits of vectors whose multiply-adds start in a cycle, of two vectors at most.
    loads_per_cycle : float
        Loads of single elements.
    weight_loads : float
        A vector of weights, counted in loads of single elements.
    fma_latency : float
        Cycles; in a chain without slack every late load shows, too.
    bytes_per_cycle : tuple[float, float, float, float]
        Bandwidths from L1, L2, L3 and memory into registers.
    memory_cores : float
        Cores that saturate the memory; more share it.
    weight_bytes_per_cycle, weight_cores : float
        The same two for weights alone, which a core asks ahead: by a single core from memory, and
        the cores that saturate it.
    weight_cache_bytes_per_cycle : float
        Weights that the core has read before in the same kernel.
    cache_share : float
        Share of a cache that a kernel's own data may fill.
    leak : float
        Share of the smaller of arithmetic and traffic that the larger does not hide.
    body : float
        Loop control of one body of at most :data:`.micro_kernel.UNROLLED_STEPS` steps.
    drain : float
        An accumulator beyond those in flight: the next tile begins late ...
    window : float
        ... unless it has few instructions, and two operations stand before each store.
    partial : float
        A partial sum is stored and loaded.
    depthwise_tap : float
        A tap of a chain that is too long for the next tile to overlap with all of it.
    inside : float
        A tile of pixels writes to all channel planes, whose addresses map to the same cache sets.
    tight, spill : float
        A step of a tile that leaves the compiler no register; an accumulator without a register,
        stored and loaded in each step.
    widen : float
        A vector of weights of 8 bits, or of bfloat16, becomes floats, in each step of a tile.
    half_vector : float
        A vector of data of bfloat16 becomes floats in a copy, or one of sums is rounded to it, in
        ten instructions on whole numbers.
    start : float
        Bounds of a loop over pixels, and a mispredicted branch.
    store : float
        Traffic of a written byte: a line is read for ownership before it is written.
    miss : float
        A byte of weights that the core waits for.
    skip : float
        Share of the traffic of strides that skip pixels, which nothing hides.
    fork : float
        Waking the threads and waiting for the last one.
    kept : float
        Share of the L2 that a pair's data and intermediate may fill without loss.
    edge : float
        A line that another core is about to write.
    transpose_bytes_per_cycle : float
        Rate of transposes in registers within a kernel.
    layout_bytes_per_cycle : float
        Rate of a kernel that changes the layout, each byte counted once.
    winograd_data, winograd_inverse : tuple[float, float]
        Winograd's transforms of a vector into and out of tiles of 2x2 and of 4x4, a point.
    winograd_rounding : float
        Widening and rounding a vector of bfloat16, a point.
    winograd_efficiency : float
        Share of the peak that products of full register tiles reach.
    winograd_task : float
        Beginning a task.
    winograd_exposed : float
        Share of the weights' time that does not overlap with arithmetic.
    direct_efficiency : float
        Share of the peak that a direct convolution reaches with weights and data in L1.
    half_products : float
        Products of bfloat16 in the time of a multiply-add of float32, if pairs are multiplied
        (vdpbf16ps). It was measured on Intel's CPUs, where half as many make it of no use. On AMD's
        it is published: one instruction takes as long as the other.
    """

    fma_bits_per_cycle: int = 512
    loads_per_cycle: float = 1.77
    weight_loads: float = 1.37
    fma_latency: float = 4.08
    bytes_per_cycle: tuple[float, float, float, float] = (float("inf"), 36.0, 20.0, 3.8)
    memory_cores: float = 2.0
    weight_bytes_per_cycle: float = 6.5
    weight_cores: float = 1.65
    weight_cache_bytes_per_cycle: float = 27.0
    cache_share: float = 0.75
    leak: float = 0.05
    body: float = 1.1
    drain: float = 5.5
    window: float = 256.0
    partial: float = 1.0
    depthwise_tap: float = 1.07
    inside: float = 5.3
    tight: float = 0.38
    spill: float = 3.6
    widen: float = 0.25
    half_vector: float = 4.0
    start: float = 40.0
    store: float = 1.5
    miss: float = 0.008
    skip: float = 0.9
    fork: float = 6000.0
    kept: float = 0.6
    edge: float = 16.0
    transpose_bytes_per_cycle: float = 16.0
    layout_bytes_per_cycle: float = 6.0
    winograd_data: tuple[float, float] = (4.0, 7.5)
    winograd_inverse: tuple[float, float] = (3.0, 5.0)
    winograd_rounding: float = 2.0
    winograd_efficiency: float = 0.93
    winograd_task: float = 2000.0
    winograd_exposed: float = 0.15
    direct_efficiency: float = 0.95
    half_products: float = 0.5

    def fma_per_cycle(self, vector_bits: int) -> float:
        """Multiply-adds of whole vectors that start in a cycle."""
        return min(2.0, self.fma_bits_per_cycle / vector_bits)


ZEN_3 = MachineCosts()
# Vectors of 512 bits pass the units, and to and from the L1, in two halves.
# A chain of taps is hidden: each of its multiply-adds takes two cycles.
# ``half_products`` of Zen 4 and 5 are those of vfpbench (github.com/hiroog/vfpbench, ``log``), not
# ours: vdpbf16ps of 512 bits starts 5.05e9 times a second on a Ryzen 7 7840HS, vfmaddps 5.08e9; on
# a Ryzen AI Max+ 395, a Zen 5, 9.3e9 and 10.1e9 in twelve chains, as its latency is longer. LLVM's
# scheduling model of Zen 4 has 3 cycles for it at any width, and 2 for vpdpbusd, which the same log
# refutes. ``winograd_rounding`` was never measured: a vector takes vpmovzxwd, vpslld and
# vcvtneps2bf16, for which 4 cycles are assumed on Zen 4 and 2 on Zen 5.
ZEN_4 = MachineCosts(
    fma_bits_per_cycle=512,
    depthwise_tap=0.36,
    winograd_data=(8.0, 15.0),
    winograd_inverse=(6.0, 10.0),
    winograd_rounding=4.0,
    half_products=2.0,
)
# Two whole vectors of 512 bits a cycle, L1 and L2 deliver 64 bytes at a time.
ZEN_5 = MachineCosts(
    fma_bits_per_cycle=1024,
    loads_per_cycle=1.5,
    weight_loads=1.2,
    fma_latency=4.0,
    bytes_per_cycle=(float("inf"), 43.0, 20.0, 6.6),
    cache_share=0.94,
    leak=0.03,
    body=1.4,
    drain=2.8,
    window=320.0,
    partial=2.6,
    depthwise_tap=0.91,
    inside=5.2,
    start=54.0,
    miss=0.016,
    kept=0.96,
    edge=5.9,
    half_products=2.0,
)

# Like Zen 5, it starts two multiply-adds of 512 bits a cycle, but not those of pairs of bfloat16.
# With Zen 5's constants defaults lose 3 % in the median of 23 kernels measured there. What widens
# weights takes one of the same two ports.
EMERALD_RAPIDS = replace(ZEN_5, widen=0.5, half_products=MachineCosts.half_products)

FAMILIES = {
    **{"znver3": ZEN_3, "znver4": ZEN_4, "znver5": ZEN_5},
    "emeraldrapids": EMERALD_RAPIDS,
}
_LIKE_EMERALD_RAPIDS = ("sapphirerapids", "graniterapids", "graniterapids-d")


def known_family(family: str) -> str | None:
    """LLVM's name of the measured CPU that has the cores of one; None if none has."""
    if family in _LIKE_EMERALD_RAPIDS:
        return "emeraldrapids"
    return family if family in FAMILIES else None


def measured_family(family: str, vector_bits: int) -> str:
    """LLVM's name of the CPU whose measured figures hold for one: its own, or the most similar.

    Like Zen 5, Intel's servers start two multiply-adds of 512 bits a cycle.
    """
    return known_family(family) or ("znver5" if vector_bits == 512 else "znver3")


def costs_of(family: str, vector_bits: int) -> MachineCosts:
    """Table of a CPU by LLVM's name for it; of the most similar measured family, if unknown.

    Only AMD's own multiply pairs of bfloat16 faster than float32.
    """
    table = FAMILIES[measured_family(family, vector_bits)]
    known = family in FAMILIES
    return table if known else replace(table, half_products=MachineCosts.half_products)
