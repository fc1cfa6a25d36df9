# SPDX-License-Identifier: Apache-2.0
"""Passes and ops on the graph; the IR is Relax, TVM's successor of Relay."""

import tvm_ffi

from schedules import errors

from . import op
from .annotate_gathers import AnnotateGathers
from .choose_winograd import ChooseWinograd
from .coalesce_reduction import CoalesceReduction
from .decompose_normalization import DecomposeNormalization
from .fuse_conv2d import FuseConv2D
from .fuse_epilogue import FuseEpilogue
from .fuse_pack import FusePack
from .fuse_reduction_producers import FuseReductionProducers
from .fuse_reductions import FuseReductions
from .fusion_decision import Decision, decide
from .lift_weights import LiftWeights
from .pack_layout import PackLayout
from .shorten_names import ShortenNames
from .simplify_inference import SimplifyInference

__all__ = [
    "AnnotateGathers",
    "ChooseWinograd",
    "CoalesceReduction",
    "Decision",
    "DecomposeNormalization",
    "FuseConv2D",
    "FuseEpilogue",
    "FusePack",
    "FuseReductionProducers",
    "FuseReductions",
    "LiftWeights",
    "PackLayout",
    "ShortenNames",
    "SimplifyInference",
    "decide",
    "op",
]

# TVM calls passes and type inference from C++; registered, these classes come back as they are.
_errors: list[type] = [errors.TVMFusionError, *errors.TVMFusionError.__subclasses__()]
for _error in _errors:
    tvm_ffi.register_error(_error.__name__, _error)
