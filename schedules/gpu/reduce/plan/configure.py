# SPDX-License-Identifier: Apache-2.0
"""The choice of a configuration for a function, and the attribute that carries it to the rule."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from tvm import tirx

from schedules.gpu.core.machine import GPUInfo

from .chain_config import choose_chain
from .config import ReduceConfig, choose_sisters
from .group import ReduceGroup
from .online_softmax import avoid_chain, in_one_stage
from .read_group import read_group
from .workspace import workspace_layout

CONFIG = "tvm_fusion.reduce_config"
"""Attribute of a function with a group of reductions: the fields of its configuration, as JSON."""


def configure(func: tirx.PrimFunc, gpu: GPUInfo) -> tirx.PrimFunc:
    """Choose the configuration of a function, unless it has one.

    Parameters
    ----------
    func : tirx.PrimFunc
        Not scheduled.
    gpu : GPUInfo
        The device.

    Returns
    -------
    tirx.PrimFunc
        The function with the attribute :data:`CONFIG`, and before its other parameters, if the last
        block is to combine the results of all, a workspace ``int32[words]``, which must be zero at
        the first call but for the last word. ``func`` itself if it is no group of reductions.
    """
    group = None if CONFIG in func.attrs else read_group(func)
    if group is None:
        return func
    staged, config = choose_config(group, gpu)
    func = func.with_attr(CONFIG, json.dumps(asdict(config)))
    if config.finish != "last_block":
        return func
    [stage] = staged.stages
    _, words = workspace_layout(config, stage.reductions[0].loops, stage.workloads)
    workspace = tirx.decl_buffer((words,), "int32", "workspace")
    return tirx.PrimFunc([workspace, *func.params], func.body, func.ret_type, func.attrs)


def read_configured(func: tirx.PrimFunc, gpu: GPUInfo) -> tuple[ReduceGroup, ReduceConfig] | None:
    """Group of a function, in the stages that the kernel has, and its configuration.

    Without the attribute :data:`CONFIG` it is one that needs no workspace. None if the function is
    no group of reductions.
    """
    group = read_group(func)
    if group is None:
        return None
    if CONFIG not in func.attrs:
        return choose_config(group, gpu, has_workspace=False)
    config = ReduceConfig(**json.loads(str(func.attrs[CONFIG])))
    return (in_one_stage(group) or group) if config.is_online else group, config


def choose_config(
    group: ReduceGroup, gpu: GPUInfo, has_workspace: bool = True
) -> tuple[ReduceGroup, ReduceConfig]:
    """Choose the stages and the configuration of a group; nothing else does."""
    staged = avoid_chain(group, gpu)
    if staged.is_chain:
        return staged, choose_chain(staged, gpu)
    config = choose_sisters(staged, gpu, has_workspace)
    return staged, replace(config, is_online=group.is_chain)
