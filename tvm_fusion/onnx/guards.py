# SPDX-License-Identifier: Apache-2.0
"""Checks for nodes that TVM's importer would translate wrongly, or into out-of-bounds reads.

The importer ignores what it does not know: an attribute, an output, a mode. Every case here gave
wrong numbers or a crash; a clear error is better.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from .model.graph_edits import attribute, is_default_domain
from .model.tensor_facts import GraphFacts
from .operator_checks import refuse_nodes
from .rewrites.arithmetic.division import division_problem
from .rewrites.control_flow.loops import loop_problem
from .rewrites.control_flow.tensor_lists import LIST_OPERATORS, list_problem
from .rewrites.determinant import determinant_problem
from .rewrites.fourier import fourier_problem
from .rewrites.indexing.sequences import sequence_problem
from .rewrites.indexing.unique import unique_problem
from .rewrites.open_sizes import compress_problem, suppression_problem
from .rewrites.own_ops import bit_cast_problem
from .rewrites.quantized import blocks_problem
from .rewrites.recurrent import recurrent_problem
from .rewrites.windows.deform_conv import deform_conv_problem
from .rewrites.windows.max_places import max_pool_problem
from .rewrites.windows.p_norms import p_norm_problem
from .rewrites.windows.resize import resize_problem
from .rewrites.windows.roi_align import roi_align_problem
from .rewrites.windows.unfolded import unfolded_problem

SHAPE_INPUTS = {
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "Expand": (1,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
"""Inputs that decide a shape or a place in memory; they must not depend on data."""


SAMPLED = frozenset({"bicubic", "bilinear", "cubic", "linear", "nearest"})
"""Modes of GridSample, by the names of all versions."""


def check_translations(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Refuse a model with nodes that would be translated wrongly, naming every one of them."""
    from_data = _computed_from_data(model)
    problems = []
    for node in model.graph.node:
        if is_default_domain(node):
            reason = _mistranslation(node, facts, from_data)
            if reason is not None:
                problems.append((node, reason))
    refuse_nodes(model, problems)


def _mistranslation(node: onnx.NodeProto, facts: GraphFacts, from_data: set[str]) -> str | None:
    """Return the reason why the importer cannot translate a sound node, if any."""
    for index in SHAPE_INPUTS.get(node.op_type, ()):
        if index < len(node.input) and node.input[index] in from_data:
            return f"its input {node.input[index]!r} depends on data; expected a constant"
    if node.op_type.startswith("Reduce") and len(node.input) > 1 and node.input[1] in from_data:
        return (
            f"its axes {node.input[1]!r} depend on data, and the shape of its result is not known; "
            "expected constant axes, or a model that declares that shape"
        )
    check = _CHECKS.get(node.op_type)
    return None if check is None else check(node, facts)


def _training(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    mode = facts.constant(node.input[2]) if len(node.input) > 2 else None
    asked = len(node.input) > 2 and node.input[2] and (mode is None or mode.any())
    return "it is in training mode" if asked else None


def _normalized(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Such a node would have been written by others if its rank were known."""
    is_training = attribute(node, "training_mode", 0)
    return "it is in training mode, and its input's rank is not known" if is_training else None


def _sampled(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    mode, padding = attribute(node, "mode", "linear"), attribute(node, "padding_mode", "zeros")
    is_known = mode in SAMPLED and padding in ("zeros", "border", "reflection")
    return None if is_known else f"its mode is {mode!r} with padding_mode {padding!r}"


def _transposed(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    wanted = attribute(node, "output_shape")
    return None if wanted is None else f"no padding gives its output_shape {list(wanted)}"


def _scanned(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    dims = facts.dims(node.input[0])
    value = facts.constant(node.input[1]) if len(node.input) > 1 else None
    if value is not None and value.size != 1:
        return f"its axis is {value.tolist()}; expected one number"
    axis = attribute(node, "axis") if value is None else value.item()
    if axis is None or dims is None or -len(dims) <= axis < len(dims):
        return None
    return f"its axis is {axis}; expected one of {len(dims)} dimensions"


def _branch(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    return "its condition depends on data, and its branches return other shapes; expected the same"


_CHECKS: dict[str, Callable[[onnx.NodeProto, GraphFacts], str | None]] = {
    **dict.fromkeys(LIST_OPERATORS, list_problem),
    "BatchNormalization": _normalized,
    "BitCast": bit_cast_problem,
    "Compress": compress_problem,
    "Col2Im": unfolded_problem,
    "ConvTranspose": _transposed,
    "CumProd": _scanned,
    "CumSum": _scanned,
    "DFT": fourier_problem,
    "DeformConv": deform_conv_problem,
    "DequantizeLinear": blocks_problem,
    "Det": determinant_problem,
    "Div": division_problem,
    "Dropout": _training,
    "GRU": recurrent_problem,
    "GridSample": _sampled,
    "If": _branch,
    "LSTM": recurrent_problem,
    "Loop": loop_problem,
    "LpPool": p_norm_problem,
    "MaxPool": max_pool_problem,
    "MaxRoiPool": roi_align_problem,
    "MaxUnpool": unfolded_problem,
    "Mod": division_problem,
    "NonMaxSuppression": suppression_problem,
    "QuantizeLinear": blocks_problem,
    "RNN": recurrent_problem,
    "Resize": resize_problem,
    "ReverseSequence": sequence_problem,
    "RoiAlign": roi_align_problem,
    "STFT": fourier_problem,
    "Scan": loop_problem,
    "TensorScatter": sequence_problem,
    "Unique": unique_problem,
}


def _computed_from_data(model: onnx.ModelProto) -> set[str]:
    """Names of all tensors that depend on more than shapes and constants."""
    constants = {tensor.name for tensor in model.graph.initializer}
    from_data = {value.name for value in model.graph.input} - constants
    for node in model.graph.node:
        if node.op_type in ("Shape", "Size") and is_default_domain(node):
            continue
        if any(name in from_data for name in node.input):
            from_data.update(name for name in node.output if name)
    return from_data
