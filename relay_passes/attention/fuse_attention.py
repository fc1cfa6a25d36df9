# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseAttention``: attention as one kernel."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.target import Target

from schedules.gpu.attention.attention import is_taken
from schedules.gpu.core.machine import GPUInfo, gpu_target

from ..core.expressions import Value
from ..core.graph import Graph, function_graphs
from .projections import combine
from .region import MOVES, prim_func, read_region

_LAST = (*MOVES, "relax.astype", "relax.matmul")
_OPAQUE = 8  # tvm::relax::OpPatternKind


@tvm.transform.module_pass(opt_level=0, name="FuseAttention")
class FuseAttention:
    """Make one function of the two products of an attention and all between and around them.

    Before::

        lv = R.add(R.matmul(x, wq), bq)                    # likewise lv1 of keys, lv2 of values
        lv3 = R.permute_dims(R.reshape(lv, [1, 128, 12, 64]), [0, 2, 1, 3])
        lv4 = R.permute_dims(R.reshape(lv1, [1, 128, 12, 64]), [0, 2, 3, 1])
        lv5 = R.permute_dims(R.reshape(lv2, [1, 128, 12, 64]), [0, 2, 1, 3])
        lv6 = R.add(R.divide(R.matmul(lv3, lv4), R.const(8)), mask)
        lv7 = R.matmul(R.nn.softmax(lv6), lv5)
        gv = R.reshape(R.permute_dims(lv7, [0, 2, 1, 3]), [1, 128, 768])

    After::

        lv = R.add(R.matmul(x, w), b)                      # all weights in one matrix
        gv = R.call_tir(attention, (lv, mask))

    Whatever is computed element by element between the product and the softmax becomes a part of
    the function, as do transpositions, reshapes and slices of its inputs and its output, and
    scalings of queries and keys. Products of one input with constant weights that only the function
    reads become one. The rule :class:`schedules.gpu.Attention` schedules the function.

    Left alone: what the rule does not take, softmax over another axis than the last, values between
    the products with other readers, functions that another pass has claimed, and all modules for
    other targets than ``cuda`` and ``opencl``. It runs before ``DecomposeNormalization``, which
    would take softmax apart. The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        Target of the module; the current target if None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = gpu_target(self.target)
        if target is None:
            return mod
        fusion = _Fusion(mod, target)
        rules = dict.fromkeys(_LAST, [fusion.rule])
        rewritten = {
            name: graph.to_function() for name, graph in function_graphs(mod) if graph.sweep(rules)
        }
        result = fusion.builder.get()
        result.update(rewritten)
        return result


class _Fusion:
    """The rule of the pass, and the functions that it has made."""

    def __init__(self, mod: IRModule, target: Target) -> None:
        self.builder = relax.BlockBuilder(mod)
        self.target, self.gpu = target, GPUInfo.from_target(target)
        self._taken: list[tuple[tirx.PrimFunc, bool]] = []

    def rule(self, graph: Graph, last: relax.Expr) -> Value:
        """Rewrite the last value of an attention."""
        region = read_region(graph, last)
        if region is None:
            return None
        slices = combine(graph, region.sources)
        with self.target:
            found = prim_func({**slices, **region.values})
        if found is None or not self._is_taken(found[0]):
            return None
        func, inputs = found
        name = self.builder.add_func(func.with_attr("op_pattern", _OPAQUE), "attention")
        return relax.call_tir(name, inputs, last.ty)

    def _is_taken(self, func: tirx.PrimFunc) -> bool:
        """True if the rule takes a function; layers of a network have equal ones."""
        for known, answer in self._taken:
            if tvm_ffi.structural_equal(known, func):
                return answer
        self._taken.append((func, is_taken(func, self.gpu)))
        return self._taken[-1][1]
