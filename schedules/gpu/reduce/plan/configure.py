# SPDX-License-Identifier: Apache-2.0
"""The choice of a configuration for a function, and the attribute that carries it to the rule."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from tvm import tirx

from schedules import attributes
from schedules.gpu.core.machine import GPUInfo
from schedules.tir.extents import constant

from .chain_config import choose_chain
from .config import ReduceConfig, choose_sisters
from .group import ReduceGroup
from .group_workload import GroupWorkload
from .limits import chain_fits
from .online_softmax import in_one_stage
from .read_group import read_group
from .split_decision import decide_split
from .workspace import workspace_words


def configure(
    func: tirx.PrimFunc, gpu: GPUInfo, config: ReduceConfig | None = None
) -> tirx.PrimFunc:
    """Give a function its configuration, unless it has one.

    Parameters
    ----------
    func : tirx.PrimFunc
        Not scheduled.
    gpu : GPUInfo
        The device.
    config : ReduceConfig, optional
        The configuration; that of :func:`choose_config` by default.

    Returns
    -------
    tirx.PrimFunc
        The function with the attribute ``attributes.REDUCE_CONFIG``, and before its other
        parameters, if the last block is to combine the results of all, a workspace
        ``int32[words]``, which must be zero at the first call but for its last two words. ``func``
        itself if it is no group of reductions.
    """
    group = None if attributes.REDUCE_CONFIG in func.attrs else read_group(func)
    if group is None:
        return func
    config = config or choose_config(GroupWorkload.of(group), gpu)
    func = func.with_attr(attributes.REDUCE_CONFIG, json.dumps(asdict(config)))
    if config.finish != "last_block":
        return func
    [stage] = _staged(group, config).stages
    words = workspace_words(config, stage.reductions[0].loops, stage.workloads)
    workspace = tirx.decl_buffer((words,), "int32", "workspace")
    return tirx.PrimFunc([workspace, *func.params], func.body, func.ret_type, func.attrs)


def read_configured(func: tirx.PrimFunc, gpu: GPUInfo) -> tuple[ReduceGroup, ReduceConfig] | None:
    """Group of a function, in the stages that the kernel has, and its configuration.

    Without the attribute ``attributes.REDUCE_CONFIG`` it is one that needs no workspace. None if
    the function is no group of reductions, or sums columns of rows that no block can keep.
    """
    group = read_group(func)
    if group is None:
        return None
    if attributes.REDUCE_CONFIG in func.attrs:
        config = ReduceConfig(**json.loads(str(func.attrs[attributes.REDUCE_CONFIG])))
    else:
        config = choose_config(GroupWorkload.of(group), gpu, has_workspace=False)
    if group.columns and not config.kept:
        return None
    return _staged(group, config), config


def choose_config(group: GroupWorkload, gpu: GPUInfo, has_workspace: bool = True) -> ReduceConfig:
    """Choose the stages and the configuration of a group; without records, nothing else does.

    Where a machine is in use (:mod:`schedules.cost.decisions`), its figures choose the split of
    sisters and its finish; the stages, and the configuration of chains, do not depend on it.
    """
    if not group.is_chain:
        return _choose_sisters(group, gpu, has_workspace)
    if group.one_stage is None or prefers_chain(group, gpu):
        return choose_chain(group, gpu)
    return replace(_choose_sisters(group.one_stage, gpu, has_workspace), is_online=True)


def _choose_sisters(group: GroupWorkload, gpu: GPUInfo, has_workspace: bool) -> ReduceConfig:
    default = choose_sisters(group, gpu, has_workspace)
    return decide_split(group, default, gpu, has_workspace)


def prefers_chain(group: GroupWorkload, gpu: GPUInfo) -> bool:
    """Return whether a chain that can be one stage stays a chain.

    Its rows are short enough for a block, or many enough, and threads keep them in registers: else
    each stage would read them again.
    """
    outputs, reduced = constant(group.outputs), constant(group.reduced)
    fits = chain_fits(outputs, reduced, sum(group.row_inputs) or 1, gpu, group.form)
    return fits and (reduced is None or choose_chain(group, gpu).kept > 0)


def _staged(group: ReduceGroup, config: ReduceConfig) -> ReduceGroup:
    """The group in the stages of its kernel."""
    return (in_one_stage(group) or group) if config.is_online else group
