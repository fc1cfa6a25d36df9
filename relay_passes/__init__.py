# SPDX-License-Identifier: Apache-2.0
"""Passes and ops on the graph; the IR is Relax, TVM's successor of Relay.

Families: ``core`` and ``op``; above them ``simplify``, ``decompose``, ``attention``, ``conv2d``,
``layout``, ``matmul``, ``norm``, ``reduction``, ``distribute`` and ``program``, independent of each
other. Imports ``schedules`` and TVM. ``tvm_fusion`` may import what stands here, ``core`` and
``op``, and no other module of the families. Start with ``fuse_conv2d.py`` in ``conv2d``.
"""

import tvm_ffi

from schedules import errors

from . import op
from .attention.attention_in_tiles import AttentionInTiles
from .attention.fuse_attention import FuseAttention
from .conv2d.choose_winograd import ChooseWinograd
from .conv2d.choose_winograd import can_choose as can_choose
from .conv2d.fuse_conv2d import FuseConv2D
from .conv2d.fuse_epilogue import FuseEpilogue
from .conv2d.fusion_decision import Decision, decide
from .conv2d.fusion_report import read_fusion_report as read_fusion_report
from .conv2d.fusion_report import recorded_forms as recorded_forms
from .conv2d.multiply_bfloat16 import MultiplyBfloat16
from .conv2d.pair_in_tiles import PairInTiles
from .conv2d.quantized.keep_bytes import KeepBytes
from .conv2d.quantized.multiply_bytes import MultiplyBytes
from .conv2d.winograd_decision import decide_winograd as decide_winograd
from .decompose.decompose_normalization import DecomposeNormalization
from .distribute.distribute_rows import DistributeRows, SeparatePairs
from .distribute.exchanges import CompileExchanges, ExchangeInPlace
from .distribute.row_stages import read_row_stages as read_row_stages
from .layout.fuse_pack import FusePack
from .layout.pack_layout import PackLayout
from .layout.pad_columns import PadColumns
from .matmul.multiply_narrow import MultiplyNarrow
from .matmul.narrow_weights import NarrowWeights
from .norm.fuse_layer_norm import FuseLayerNorm
from .program.buffers import CheckAlignment, LiftOutputs, LiftScratch
from .program.buffers import sole_kernel as sole_kernel
from .program.lowering import (
    AllowTF32,
    AnnotateGathers,
    ApplyRules,
    DropPragmaScopes,
    HalfPrecision,
    LegalizeCalls,
    MarkConstants,
)
from .program.name_sizes import NameSizes
from .program.share_kernels import ShareKernels, ShortenNames
from .program.weights import CaptureGraphs, LiftWeights, PackWeights
from .program.widen_sums import WidenSums
from .reduction.coalesce_reduction import CoalesceReduction
from .reduction.coalesce_reduction import read_reduction_report as read_reduction_report
from .reduction.configure_reductions import ConfigureReductions
from .reduction.fuse_reduction_producers import FuseReductionProducers
from .reduction.fuse_reductions import FuseReductions
from .simplify.simplify_inference import SimplifyInference

__all__ = [
    "AllowTF32",
    "AnnotateGathers",
    "ApplyRules",
    "AttentionInTiles",
    "CaptureGraphs",
    "CheckAlignment",
    "ChooseWinograd",
    "CoalesceReduction",
    "CompileExchanges",
    "ConfigureReductions",
    "Decision",
    "DecomposeNormalization",
    "DistributeRows",
    "DropPragmaScopes",
    "ExchangeInPlace",
    "FuseAttention",
    "FuseConv2D",
    "FuseEpilogue",
    "FuseLayerNorm",
    "FusePack",
    "FuseReductionProducers",
    "FuseReductions",
    "HalfPrecision",
    "KeepBytes",
    "LegalizeCalls",
    "LiftOutputs",
    "LiftScratch",
    "LiftWeights",
    "MarkConstants",
    "MultiplyBfloat16",
    "MultiplyBytes",
    "MultiplyNarrow",
    "NameSizes",
    "NarrowWeights",
    "PackLayout",
    "PackWeights",
    "PadColumns",
    "PairInTiles",
    "SeparatePairs",
    "ShareKernels",
    "ShortenNames",
    "SimplifyInference",
    "WidenSums",
    "decide",
    "op",
]

# TVM calls passes and type inference from C++; registered, these classes keep their identity.
_errors: list[type] = [errors.TVMFusionError, *errors.TVMFusionError.__subclasses__()]
for _error in _errors:
    tvm_ffi.register_error(_error.__name__, _error)
