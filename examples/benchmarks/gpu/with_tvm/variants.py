# SPDX-License-Identifier: Apache-2.0
"""Our kernels with forced configurations, to set the thresholds of ``schedules.gpu``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tvm import te

from examples.benchmarks.reduction_cases import Case, Reduction
from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan import config as reduce_config
from schedules.gpu.reduce.plan.config import ReduceConfig
from schedules.gpu.reduce.plan.configure import read_group
from schedules.gpu.reduce.plan.group_workload import GroupWorkload
from tvm_fusion.errors import EngineError

from ..engine import Launcher, Sets
from .ours import Ours
from .relax_build import cuda_target

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 264, 528)
MOST_BLOCKS = 2112
"""Sixteen for each of 132 multiprocessors; more splits are not tried."""


@dataclass(frozen=True)
class Variant:
    """Forced configuration; None leaves a choice to the rule.

    Parameters
    ----------
    finish : str
        Finish of partial results.
    splits : int | None
        Blocks that share an output.
    unroll : int | None
        Loads of a thread before it combines.
    threads : int | None
        Threads of a block.
    cluster : int | None
        Blocks of a cluster, a power of two; 1 forbids clusters.
    """

    finish: str = "auto"
    splits: int | None = None
    unroll: int | None = None
    threads: int | None = None
    cluster: int | None = None

    @property
    def title(self) -> str:
        """The forced choices, in short."""
        parts = [self.finish]
        parts += [f"splits {self.splits}"] if self.splits else []
        parts += [f"unroll {self.unroll}"] if self.unroll else []
        parts += [f"threads {self.threads}"] if self.threads else []
        parts += [f"cluster {self.cluster}"] if self.cluster else []
        return " ".join(parts)


class Forced(Ours):
    """Our rules with a forced configuration.

    Parameters
    ----------
    arch : str
        Such as ``sm_90``.
    variant : Variant
        The forced configuration.
    """

    def __init__(self, arch: str, variant: Variant) -> None:
        super().__init__(arch, variant.finish)
        self.variant = variant
        self.title = variant.title

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile with the forced configuration, and record all of it."""
        with forced(self.variant):
            config = chosen(case, self.variant.finish, self.arch)
            for name in ("splits", "cluster"):
                wanted, got = getattr(self.variant, name), getattr(config, name)
                if wanted not in (None, got):
                    raise EngineError(f"{name} {got}; {wanted} is impossible")
            launcher = super().prepare(case, sets)
        launcher.details |= {"splits": config.splits, "finish": config.finish}
        return launcher


@contextlib.contextmanager
def forced(variant: Variant) -> Iterator[None]:
    """Make ``reduce_config.choose_sisters`` follow the variant while the block runs."""
    replaced: dict[str, Any] = {}
    if variant.unroll is not None:
        replaced["COSTS"] = replace(reduce_config.COSTS, loads_in_flight=variant.unroll)
    if variant.threads is not None:
        replaced["THREADS"] = variant.threads
    splits, cluster = variant.splits, variant.cluster
    if splits is not None:
        replaced["_splits"] = lambda *_: int(splits)
    if cluster is not None:
        size = int(cluster) if cluster > 1 else None
        replaced["_cluster"] = lambda *_: size
    with mock.patch.multiple(reduce_config, **replaced) if replaced else contextlib.nullcontext():
        yield


def chosen(case: Case, finish: str, arch: str) -> ReduceConfig:
    """The configuration of a case's first reduction."""
    reduction = case.workload(case.reductions[0], finish)
    data = te.placeholder(case.loops(case.reductions[0]).shape, reduction.dtype)
    group = read_group(te.create_prim_func([data, coalesced_reduce(data, reduction)]))
    assert group is not None, "one reduction is a group"
    workload = GroupWorkload.of(group)
    return reduce_config.choose_sisters(workload, GPUInfo.from_target(cuda_target(arch)))


def variants(case: Case, arch: str) -> list[Variant]:
    """Variants for a case of :func:`threshold_cases`; the rule's own choice comes first."""
    if case.group == "reads":
        return [
            Variant(),
            *(Variant(unroll=u, threads=t) for t in (128, 256, 512) for u in (1, 2, 4, 8)),
        ]
    forms = [Variant(), Variant("one_block", 1, cluster=1)]
    config = chosen(case, "last_block", arch)
    loops = case.loops(case.reductions[0])
    tiles = reduce_config.tiles(config, loops)
    steps = int(loops.reduced) // config.stride
    most = min(GPUInfo.from_target(cuda_target(arch)).max_cluster, steps)
    forms += [Variant("one_block", cluster=size) for size in (2, 4, 8) if size <= most]
    for splits in SPLITS[1:]:
        if splits <= steps and tiles * splits <= MOST_BLOCKS:
            forms += [Variant("last_block", splits), Variant("atomic", splits)]
    return forms


def threshold_cases() -> list[Case]:
    """Float32 sums around the sizes at which the rule's choice changes."""
    cases = [_sum("finish", (1 << power,), 0) for power in range(12, 26)]
    for outputs in (1, 8, 32, 64, 128, 264):
        cases += [_sum("split", (outputs, 1 << power), 1) for power in (12, 14, 16, 18, 20, 22)]
    for columns in (32, 256, 1024, 4096, 16384):
        cases += [_sum("tile", (1 << power, columns), 0) for power in (8, 10, 12, 14, 16)]
    reads = [_sum("reads", (1 << 28,), 0), _sum("reads", (1 << 16, 1 << 12), 0)]
    return (
        cases
        + reads
        + [replace(case, name=f"{case.name} bf16", dtype="bfloat16") for case in reads]
    )


def gain(seconds: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The fastest variant, and the time of the first one, the rule's own, relative to it."""
    best, least = min(seconds, key=lambda pair: pair[1])
    return best, seconds[0][1] / least


def _sum(group: str, shape: tuple[int, ...], axis: int) -> Case:
    name = f"{group}/{'x'.join(map(str, shape))}"
    return Case(name, shape, "float32", (Reduction("sum", (axis,)),))
