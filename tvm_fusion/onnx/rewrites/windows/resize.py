# SPDX-License-Identifier: Apache-2.0
"""Normal form of Resize for TVM's importer: the sizes of all dimensions."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper

from ...model.graph_edits import attribute, is_default_domain, replace_nodes, set_attributes
from ...model.tensor_facts import GraphFacts

METHODS = ("nearest", "linear", "cubic")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")


def normalize_resizes(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Give each Resize that :func:`resize_problem` accepts its sizes, and drop ``axes``."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        if not is_default_domain(node) or node.op_type != "Resize" or resize_problem(node, facts):
            continue
        single = _single_corners(node, facts)
        if single:
            nodes.append(_first_of_two(node, single, facts))
        sizes = np.array(facts.shape(node.output[0]), np.int64)
        region = node.input[1] if len(node.input) > 1 else ""
        inputs = [node.input[0], region, "", facts.add_constant(f"{node.output[0]}/sizes", sizes)]
        del node.input[:]
        node.input.extend(inputs)
        set_attributes(node, ("axes", "keep_aspect_ratio_policy"))
    replace_nodes(model.graph, nodes)


def _single_corners(node: onnx.NodeProto, facts: GraphFacts) -> list[int]:
    """Axes of one pixel with aligned corners: TVM divides by the corners' distance."""
    if attribute(node, "coordinate_transformation_mode") != "align_corners":
        return []
    sizes = facts.shape(node.output[0]) or ()
    return [axis for axis, size in enumerate(sizes) if axis >= 2 and size == 1]


def _first_of_two(node: onnx.NodeProto, axes: list[int], facts: GraphFacts) -> onnx.NodeProto:
    """Resize some axes to two pixels; return the node that takes the first."""
    result = node.output[0]
    shape = [2 if axis in axes else size for axis, size in enumerate(facts.shape(result) or ())]
    node.output[0] = facts.add_tensor(f"{result}/corners", facts.dtype(result), shape)
    ends = np.ones(len(axes), np.int64)
    places = [
        facts.add_constant(f"{result}/{name}", value)
        for name, value in (
            ("starts", 0 * ends),
            ("ends", ends),
            ("axes", np.array(axes, np.int64)),
        )
    ]
    return helper.make_node("Slice", [node.output[0], *places], [result], name=node.name)


def resize_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why the importer would translate a Resize wrongly, if any."""
    before, after = facts.shape(node.input[0]), facts.shape(node.output[0])
    if before is None or after is None:
        return "its sizes are only known at run time"
    if not 3 <= len(before) <= 5 or before[:2] != after[:2]:
        return f"it resizes {before} to {after}; only the last one to three dimensions can change"
    method, rounding = attribute(node, "mode", "nearest"), attribute(node, "nearest_mode")
    if method not in METHODS or rounding not in (None, *ROUNDINGS):
        return f"its mode is {method!r} with nearest_mode {rounding!r}"
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    if mode not in MODES:
        return f"its coordinate_transformation_mode is {mode!r}"
    if attribute(node, "antialias", 0):
        return "it uses antialias"
    axes = attribute(node, "axes")
    if mode == "tf_crop_and_resize" and axes is not None:
        return "it has axes and crops"
    scales = find_scales(node, facts, before, list(axes or range(len(before))))
    if scales is None:
        return "its scales are only known at run time"
    for size, scale, result in zip(before, scales, after, strict=True):
        if not math.isclose(size * scale, result, rel_tol=1e-5):
            return f"scale {scale:g} makes {size} pixels {size * scale:g}; expected a whole number"
    return None


def find_scales(
    node: onnx.NodeProto, facts: GraphFacts, before: tuple[int, ...], axes: list[int]
) -> list[float] | None:
    """Scale of each dimension, which sizes alone do not determine after rounding."""
    scales_name = node.input[2] if len(node.input) > 2 else ""
    given = facts.constant(scales_name or (node.input[3] if len(node.input) > 3 else ""))
    if given is None or len(given) != len(axes):
        return None
    if scales_name:
        factors = [float(value) for value in given]
    else:
        factors = [float(v) / before[axis] for v, axis in zip(given, axes, strict=True)]
        policy = attribute(node, "keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * len(factors)
    scales = [1.0] * len(before)
    for axis, factor in zip(axes, factors, strict=True):
        scales[axis] = factor
    return scales
