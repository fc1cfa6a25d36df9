# SPDX-License-Identifier: Apache-2.0
"""Report on every candidate pair, and on layers whose form a record chose, as module attributes."""

from __future__ import annotations

import json
from typing import Any

from tvm import IRModule

from schedules import attributes
from schedules.workload.conv2d import FusedConv2DWorkload

Entry = dict[str, Any]


def read_fusion_report(mod: IRModule) -> list[Entry]:
    """The entries that earlier passes left in ``mod``; none if no pass did."""
    text = mod.attrs.get(attributes.FUSION_REPORT) if mod.attrs else None
    return [] if text is None else json.loads(str(text))


def write_report(mod: IRModule, entries: list[Entry]) -> IRModule:
    """A copy of ``mod`` that carries ``entries``."""
    return mod.with_attr(attributes.FUSION_REPORT, json.dumps(entries))


def recorded_forms(mod: IRModule) -> list[Entry]:
    """Records of forms that passes followed: ``function``, the layers, and the record's fields."""
    pairs = [
        {"function": f"{entry['layer1']} + {entry['layer2']}"} | entry["record"]
        for entry in read_fusion_report(mod)
        if "record" in entry
    ]
    text = mod.attrs.get(attributes.RECORDED_LAYERS) if mod.attrs else None
    return [*pairs, *([] if text is None else json.loads(str(text)))]


def cost_fields(workload: FusedConv2DWorkload | None) -> Entry:
    """Operations, bytes and arithmetic intensity; None for each where no output is known."""
    if workload is None or min(*workload.mid_size, *workload.out_size) < 1:
        names = ("flops", "bytes_unfused", "bytes_fused", "intensity_unfused", "intensity_fused")
        return dict.fromkeys(names)
    flops = workload.flops()
    unfused, fused = workload.bytes_unfused(), workload.bytes_fused()
    return {
        "flops": flops,
        "bytes_unfused": unfused,
        "bytes_fused": fused,
        "intensity_unfused": flops / unfused,
        "intensity_fused": flops / fused,
    }


def merge_reports(old: list[Entry], new: list[Entry]) -> list[Entry]:
    """Update ``old``: pairs found again are replaced, fused ones stay, others are appended.

    A fused pair is no longer a candidate, and neither are its rivals; their entries must survive a
    second run of the pass.
    """
    fresh = list(new)
    merged = []
    for entry in old:
        again = next((item for item in fresh if _key(item) == _key(entry)), None)
        if entry["fused"] or again is None:
            merged.append(entry)
        else:
            merged.append(again)
            fresh.remove(again)
    return merged + fresh


def _key(entry: Entry) -> tuple[Any, ...]:
    names = ("function", "first", "second", "input_shape", "layer1", "layer2")
    return tuple(json.dumps(entry[name]) for name in names)
