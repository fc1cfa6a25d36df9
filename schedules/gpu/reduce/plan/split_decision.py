# SPDX-License-Identifier: Apache-2.0
"""Split and finish of sister reductions by the predicted times of a machine.

The block of the default stays; its splits are those of the space of settings. The times are
estimates of :mod:`.streaming_call`, which have not been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from schedules.cost.decisions import compare, machine_in_use
from schedules.cost.machine import Machine
from schedules.cost.registry import predict
from schedules.gpu.core.machine import GPUInfo

from .config import ReduceConfig
from .group_workload import GroupWorkload
from .sister_space import split_settings
from .streaming_call import streaming_call

LEAST_GAIN = 0.1
"""Least value of (time of the default / time of another split) - 1 that another split needs.

Four of five estimates differ less from those by machine code.
"""


def decide_split(
    group: GroupWorkload, default: ReduceConfig, gpu: GPUInfo, has_workspace: bool = True
) -> ReduceConfig:
    """Choose among the splits of the default's block by the machine in use.

    Parameters
    ----------
    group : GroupWorkload
        Of one stage.
    default : ReduceConfig
        The configuration without a machine.
    gpu : GPUInfo
        The device.
    has_workspace : bool
        As for :func:`.config.choose_sisters`.

    Returns
    -------
    ReduceConfig
        The default, if there is no machine, if an extent is unknown, or if nothing gains
        :data:`LEAST_GAIN`.

    Raises
    ------
    PredictionError
        If the machine lacks a figure.
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
