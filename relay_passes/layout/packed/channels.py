# SPDX-License-Identifier: Apache-2.0
"""Packed forms of concatenation, splitting, shuffling and layer norms of channels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tvm import relax, tirx
from tvm.ir import GenericConst

from schedules.workload.conv2d import ChannelBlocks

from ...op.channels import channel_norm, channel_shuffle, channel_slice, pack
from .packing_state import Packed, Rule, Scope, channels_of


def pack_concat(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Concatenate packed tensors.

    Over channels, all but the last must fill their blocks; else one kernel unpacks, joins and packs
    them.
    """
    call = binding.value
    fields = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
    channels = _known_channels(fields)
    if not channels or call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % 4
    keeps_blocks = _keeps_blocks(channels, axis, scope.blocks)
    sources = [scope.lookup(tensor) for tensor in fields]
    if not any(sources) or not scope.is_worth_packing(binding):
        return None
    if not keeps_blocks:
        return _regroup(scope, binding, sum(channels)) if axis == 1 else None
    # Packing one input costs a pass over it, which a following convolution pays back.
    if binding.var not in scope.uses.wanted and not all(
        tensor is not None or isinstance(source, GenericConst)
        for tensor, source in zip(sources, fields, strict=True)
    ):
        return None
    packed = [scope.pack(tensor) for tensor in fields]
    joined = relax.op.concat([tensor.expr for tensor in packed], axis)
    bound = max(tensor.bound for tensor in packed)
    return scope.result(joined, sum(channels) if axis == 1 else channels[0], bound)


def _regroup(scope: Scope, binding: relax.VarBinding, channels: int) -> Packed | None:
    """The NCHW concatenation packed at once: readers in NCHW would need both forms."""
    if binding.var not in scope.uses.wanted or binding.var in scope.uses.plain:
        return None
    joined = scope.emit(scope.visit(binding.value))
    return Packed(scope.emit(pack(joined, scope.blocks.of(channels))), channels)


def pack_split(scope: Scope, binding: relax.VarBinding) -> tuple[Packed, ...] | None:
    """Split a packed tensor; parts that do not begin with a block are moved to new lanes.

    Such parts are moved only if a convolution reads one of them.
    """
    call = binding.value
    data = scope.lookup(call.args[0])
    if data is None or not isinstance(binding.var.ty, relax.TupleType):
        return None
    parts = _known_channels([relax.Var("part", ty) for ty in binding.var.ty.fields])
    axis = int(call.attrs.axis) % 4
    if not parts or not scope.blocks.are_equal:
        return None
    if not _keeps_blocks(parts, axis, scope.blocks):
        return _slices(scope, data, parts) if binding.var in scope.uses.wanted else None
    if axis == 1:
        sections: int | list[int] = [end // scope.blocks.most for end in accumulate(parts[:-1])]
    elif isinstance(call.attrs.indices_or_sections, tirx.IntImm):
        sections = int(call.attrs.indices_or_sections)
    else:
        sections = [int(index) for index in call.attrs.indices_or_sections]
    pieces = scope.emit(relax.op.split(data.expr, sections, axis))
    return tuple(
        Packed(scope.emit(relax.TupleGetItem(pieces, index)), channels, data.bound)
        for index, channels in enumerate(parts)
    )


def _slices(scope: Scope, data: Packed, parts: Sequence[int]) -> tuple[Packed, ...]:
    begins = [0, *accumulate(parts[:-1])]
    return tuple(
        Packed(scope.emit(channel_slice(data.expr, begin, count)), count)
        for begin, count in zip(begins, parts, strict=True)
    )


def pack_shuffle(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Shuffle the channels of a packed tensor; lanes past the last one become zero."""
    call = binding.value
    data = scope.lookup(call.args[0])
    if data is None or channels_of(call.args[0]) is None or not scope.is_worth_packing(binding):
        return None
    shuffled = channel_shuffle(data.expr, data.channels, int(call.attrs["groups"]))
    return Packed(shuffled, data.channels)


def _known_channels(tensors: Sequence[relax.Expr]) -> list[int]:
    """The channels of NCHW tensors; empty if those of one are unknown."""
    counts = [channels_of(tensor) for tensor in tensors]
    known = [count for count in counts if count is not None]
    return known if len(known) == len(counts) else []


def _keeps_blocks(channels: Sequence[int], axis: int, blocks: ChannelBlocks) -> bool:
    """Return whether parts of these channel counts meet at block borders along an NCHW ``axis``."""
    if axis != 1:
        return len(set(channels)) == 1
    return blocks.are_equal and all(count % blocks.most == 0 for count in channels[:-1])


def pack_layer_norm(scope: Scope, binding: relax.VarBinding) -> Packed | None:
    """Normalise a packed tensor over axis 1; other axes stay in NCHW."""
    call = binding.value
    data, attrs = scope.lookup(call.args[0]), call.attrs
    if data is None or channels_of(call.args[0]) is None or not attrs.center or not attrs.scale:
        return None
    if [int(axis) % 4 for axis in attrs.axes] != [1] or str(binding.var.ty.dtype) != "float32":
        return None
    # The lanes past the last channel are multiplied by zero.
    if not scope.is_safe(data.channels, data.bound) or not scope.is_worth_packing(binding):
        return None
    gamma, beta = (scope.parameter(vector, "bias") for vector in call.args[1:])
    return Packed(
        channel_norm(data.expr, gamma, beta, data.channels, float(attrs.epsilon)), data.channels
    )


CHANNEL_RULES: dict[str, Rule] = {
    "relax.nn.layer_norm": pack_layer_norm,
    "relax.concat": pack_concat,
    "relax.split": pack_split,
    "relax.tvm_fusion.channel_shuffle": pack_shuffle,
}
