# SPDX-License-Identifier: Apache-2.0
"""Pass SimplifyInference: bring an imported network into the normal form of the later passes."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.target import Target

from schedules.gpu.core.machine import KINDS
from schedules.workload.reduce import DTYPES

from ..core.expressions import ELEMENTWISE, TUPLE_GET_ITEM, Value, op_name
from ..core.graph import Graph, Rule, function_graphs
from ..op.elementwise import RANGE, sort_key
from .conv_as_conv2d import (
    BINARY,
    POINTWISE,
    flatten_conv3d,
    sink_image,
    split_conv_transpose,
    widen_conv1d,
)
from .conv_as_conv2d import OPS as TRANSPOSED
from .elementwise import (
    canonicalize_activation,
    canonicalize_clip,
    fold_quantization,
    pool_integers,
    remove_broadcast,
    remove_identity,
)
from .fold_constant import FOLDED, SHAPES, fold_constant, needs_kernel
from .fold_into_conv2d import (
    canonicalize_bias,
    fold_batch_norm,
    fold_input_affine,
    fold_pad,
    fold_scale,
)
from .shapes import (
    canonicalize_shuffle,
    channels_first,
    quantize_unmoved,
    reshape_rms_norm,
    unflatten_any_matmul,
    unflatten_matmul,
    unstack_reduction,
)

SORTS = ("relax.argsort", "relax.sort", "relax.topk")
PLACES = {"relax.argmax": relax.op.argmax, "relax.argmin": relax.op.argmin}


def sort_by_keys(graph: Graph, call: relax.Call) -> Value:
    """Sorting of other types than int32 and int64 by keys of these.

    ::

        argsort(x)   ->   argsort(sort_key(x))
        sort(x)      ->   gather_elements(x, argsort(sort_key(x)))
        topk(x, k)   ->   places = topk(sort_key(x), k);  gather_elements(x, places), places
        argmax(x)    ->   argmax(sort_key(x))    of integers that no reduction of ours takes

    TVM's kernels lose elements beside NaN, do not know all types, and find no place of the least
    number of those without sign.
    """
    data, attrs = call.args[0], call.attrs
    ty, name = data.ty, op_name(call)
    if name in PLACES:
        if str(ty.dtype) in DTYPES:
            return None
        return PLACES[name](graph.emit(sort_key(data)), attrs.axis, bool(attrs.keepdims))
    if str(ty.dtype) in ("int32", "int64") or ty.shape is None or ty.ndim == 0:
        return None
    keys = graph.emit(sort_key(data))
    axis = int(attrs.axis)
    if name == "relax.argsort":
        return relax.op.argsort(keys, axis, bool(attrs.descending), attrs.dtype)
    if name == "relax.sort":
        order = graph.emit(relax.op.argsort(keys, axis, bool(attrs.descending), "int64"))
        return relax.op.gather_elements(data, order, axis % ty.ndim)
    kind, dtype = str(attrs.ret_type), attrs.dtype
    places = graph.emit(
        relax.op.topk(keys, int(attrs.k), axis, "indices", bool(attrs.largest), dtype)
    )
    if kind == "indices":
        return places
    values = relax.op.gather_elements(data, places, axis % ty.ndim)
    return values if kind == "values" else relax.Tuple([graph.emit(values), places])


CLIPS = ("relax.nn.relu", "relax.clip", "relax.maximum", "relax.minimum", "relax.call_tir")
IDENTITIES = (
    *(TUPLE_GET_ITEM, "relax.reshape", "relax.broadcast_to", "relax.astype", "relax.permute_dims"),
    *("relax.concat", "relax.nn.pad", "relax.call_tir", "relax.add", "relax.subtract"),
    *("relax.multiply", "relax.divide"),
)

RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (fold_constant, (*FOLDED, *SHAPES)),
    (remove_identity, IDENTITIES),
    (remove_broadcast, ELEMENTWISE),
    (unstack_reduction, ("relax.sum", "relax.max", "relax.min")),
    (sort_by_keys, (*SORTS, *PLACES)),
    (fold_batch_norm, (TUPLE_GET_ITEM,)),
    (reshape_rms_norm, ("relax.nn.rms_norm",)),
    (quantize_unmoved, (RANGE,)),
    (canonicalize_shuffle, ("relax.reshape",)),
    (unflatten_matmul, ("relax.reshape",)),
    (channels_first, ("relax.permute_dims",)),
    (fold_quantization, ("relax.dequantize",)),
    (pool_integers, ("relax.nn.max_pool2d",)),
    (canonicalize_clip, CLIPS),
    (canonicalize_activation, ("relax.multiply", "relax.divide")),
    (fold_scale, ("relax.multiply", "relax.divide")),
    (canonicalize_bias, ("relax.add", "relax.subtract")),
    (fold_pad, ("relax.nn.conv2d",)),
    (fold_input_affine, ("relax.nn.conv2d",)),
    (split_conv_transpose, tuple(TRANSPOSED)),
    (widen_conv1d, ("relax.nn.conv1d",)),
    (flatten_conv3d, ("relax.nn.conv3d",)),
    (sink_image, (*BINARY, *POINTWISE)),
)
"""Every rule with the ops that it rewrites; at one op, earlier rules are tried first."""

GPU_RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = tuple(
    (unflatten_any_matmul if rule is unflatten_matmul else rule, names) for rule, names in RULES
)
"""The rules for GPUs."""

BOUNDS: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (fold_constant, ("relax.isnan", "relax.where")),
    (canonicalize_clip, CLIPS),
)
"""The rules that bring the bounds of elements into one form."""


@tvm.transform.module_pass(opt_level=0, name="SimplifyInference")
class SimplifyInference:
    """Fold training-time ops, and bring convolutions with their epilogues into one form.

    ::

        lv  = R.call_tir(pad, (x,))                                    # one pixel of zeros around
        lv1 = R.nn.conv2d(lv, w, padding=[0, 0, 0, 0])
        lv2 = R.nn.batch_norm(lv1, gamma, beta, mean, var)
        lv3 = lv2[0]
        lv4 = R.call_tir(maximum, (lv3,)); lv5 = R.call_tir(minimum, (lv4,))      # 0 and 6

        lv  = R.nn.conv2d(x, w', padding=[1, 1, 1, 1])
        lv1 = R.add(lv, b')                                            # b' is [1, C, 1, 1]
        lv2 = R.clip(lv1, 0, 6)                                        # relax.op.nn.relu6

    A convolution becomes ``conv2d``, then at most one ``add`` of a constant [1, C, 1, 1], then
    residual additions with the convolution's side first, then ``nn.relu``, ``clip``, ``nn.silu``,
    ``nn.gelu`` or ``tvm_fusion.hardswish``. Batch normalisations without a convolution become one
    multiply and one add, reshapes and transposes that shuffle channels become
    ``tvm_fusion.channel_shuffle``, matrix products lose the reshapes around them, and those on the
    channels of an image become convolutions, without the transposes around them. Convolutions of
    sequences become those of images of one row, those of volumes those of frames, transposed ones
    those of their phases. RMS norms over all axes get one axis more. Dropout and other identities,
    stacks that are summed, and dead bindings are removed, and constants are folded. Floats are
    sorted by integers.

    Left alone: ops that the rules in ``relay_passes.simplify`` do not know, batch normalisations
    with ``training=True`` (the op's default), values in between with other readers, other layouts
    than NCHW, other types than floats, functions that another pass has marked as primitive,
    branches, and local functions. Every rule computes in float64. The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        What the module is compiled for. Without, it is the current target, if any, else a CPU.
        Only for GPUs do products of few rows in many groups lose their reshapes.
    bounds : bool
        Whether to rewrite nothing but bounds of elements, before ``WidenSums`` reads them.
    """

    def __init__(self, target: Target | None = None, *, bounds: bool = False) -> None:
        self.target, self.bounds = target, bounds

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """Simplify every Relax function of ``mod``."""
        if self.bounds:
            return simplify(relax.transform.Normalize()(mod), BOUNDS)
        tidy = tvm.transform.Sequential(
            [
                relax.transform.CanonicalizeBindings(),
                relax.transform.DeadCodeElimination(),  # dead bindings must not count as readers
            ]
        )
        target = self.target or Target.current(allow_none=True)
        rules = GPU_RULES if target is not None and target.kind.name in KINDS else RULES
        mod = simplify(tidy(relax.transform.Normalize()(mod)), rules)
        if _has_constant_kernels(mod):
            mod = simplify(tidy(relax.transform.FoldConstant()(mod)), rules)
        return tidy(mod)


def simplify(
    mod: tvm.IRModule, rules: Sequence[tuple[Rule, Sequence[str]]] = RULES
) -> tvm.IRModule:
    """Apply rules to every Relax function of a normalised module until none changes it."""
    table: dict[str, list[Rule]] = {}
    for rule, names in rules:
        for name in names:
            table.setdefault(name, []).append(rule)
    result = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    for global_var, graph in function_graphs(mod):
        if graph.settle(table):
            result.update_func(global_var, graph.to_function())
    return result


def _has_constant_kernels(mod: tvm.IRModule) -> bool:
    return any(needs_kernel(value) for _, graph in function_graphs(mod) for value in graph.values())
