# SPDX-License-Identifier: Apache-2.0
"""Pass ``DecomposeNormalization``: decomposition of ops that hide reductions."""

from __future__ import annotations

import tvm
from tvm import IRModule

from ..core.expressions import TUPLE_GET_ITEM
from ..core.graph import Rule, function_graphs
from ..op.elementwise import RANGE
from .losses import (
    cross_entropy,
    log_sum_exp,
    nll_loss,
    nll_loss_backward,
    quantized_by_range,
    softmax,
)
from .norms import (
    POOLS,
    batch_norm,
    global_pool,
    group_norm,
    instance_norm,
    layer_norm,
    p_norm,
    rms_norm,
    tuple_field,
    variance,
    written_out_norm,
)

PATTERNS: dict[str, list[Rule]] = {
    "relax.divide": [written_out_norm],
    "relax.add": [log_sum_exp],
    **dict.fromkeys(("relax.sqrt", "relax.log", "relax.power"), [p_norm]),
}
"""Several ops that together are a norm; matched before these are decomposed."""

OPS: dict[str, list[Rule]] = {
    **dict.fromkeys(("relax.nn.softmax", "relax.nn.log_softmax"), [softmax]),
    "relax.nn.layer_norm": [layer_norm],
    "relax.nn.group_norm": [group_norm],
    "relax.nn.instance_norm": [instance_norm],
    "relax.nn.batch_norm": [batch_norm],
    "relax.nn.rms_norm": [rms_norm],
    **dict.fromkeys(("relax.variance", "relax.std"), [variance]),
    **dict.fromkeys(POOLS, [global_pool]),
    "relax.nn.cross_entropy_with_logits": [cross_entropy],
    "relax.nn.nll_loss": [nll_loss],
    "relax.grad.nll_loss_backward": [nll_loss_backward],
    RANGE: [quantized_by_range],
    TUPLE_GET_ITEM: [tuple_field],
}


@tvm.transform.module_pass(opt_level=0, name="DecomposeNormalization")
class DecomposeNormalization:
    """Write normalisations, softmax, norms, global pooling and losses as reductions.

    Before::

        lv = R.nn.softmax(x, axis=1)
        gv = R.nn.layer_norm(lv, gamma, beta, axes=[1], epsilon=1e-5)

    After::

        lv1 = R.max(x, axis=[1], keepdims=True)
        lv2 = R.subtract(x, lv1)
        lv3 = R.exp(lv2)
        lv4 = R.sum(lv3, axis=[1], keepdims=True)
        lv = R.divide(lv3, lv4)
        lv5 = R.mean(lv, axis=[1], keepdims=True)
        lv6 = R.subtract(lv, lv5)
        lv7 = R.multiply(lv6, lv6)
        lv8 = R.mean(lv7, axis=[1], keepdims=True)
        lv9 = R.add(lv8, R.const(1e-5))
        lv10 = R.rsqrt(lv9)
        lv11 = R.multiply(lv6, lv10)
        lv12 = R.multiply(lv11, gamma)
        gv = R.add(lv12, beta)

    It runs before ``CoalesceReduction``, so that the passes that group reductions see all of them.
    It handles ``softmax`` and ``log_softmax``, ``layer_norm``, ``group_norm``, ``instance_norm``,
    ``rms_norm``, ``batch_norm`` in training, ``variance`` and ``std``, average and maximum pooling
    with one output a channel, ``cross_entropy_with_logits``, ``nll_loss`` and its gradient,
    ``dynamic_quantize``; and the ops that TVM's ONNX importer emits for InstanceNormalization,
    ReduceLogSumExp and p-norms. Data of 16 bits are computed in float32 and rounded once. NaN and
    infinities follow the definition: softmax of a row of -inf is NaN, its log-sum-exp is -inf.

    Left alone: data without known extents or with an empty axis, other types than floats, layer and
    rms norms over unordered axes, cross entropy of a symbolic batch, negative log likelihood
    without a batch, branches, local functions, and functions that another pass has claimed. Pools
    of 16 bits stay so: ``coalesced_reduce`` accumulates them in float32. Gradients must be taken
    before this pass. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        result = mod.clone()
        for global_var, graph in function_graphs(mod):
            if graph.settle(PATTERNS) | graph.settle(OPS):
                result.update_func(global_var, graph.to_function())
        return result
