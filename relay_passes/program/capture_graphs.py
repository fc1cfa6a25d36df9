# SPDX-License-Identifier: Apache-2.0
"""Pass ``CaptureGraphs``: the kernels of a program are launched as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import IRModule, relax
from tvm.ir.transform import PassContext

from .lift_weights import WEIGHTS

_OPTION = "relax.backend.use_cuda_graph"


@tvm.transform.module_pass(opt_level=0, name="CaptureGraphs")
class CaptureGraphs:
    """Make TVM capture the kernels whose tensors keep their addresses from call to call.

    That is TVM's own pass ``RewriteCUDAGraph``, with the weights as tensors that stay where they
    are, like the planned memory of intermediate results. Kernels that read an input or write an
    output of the program, and those of unknown sizes, are launched one by one as before.

    Before::

        def main(x, weight0):
            cls.first(x, weight0, a)
            cls.second(a, b)
            cls.third(b, c)
            cls.last(c, y)

    After; the function is captured in the first call, and replayed in all others::

        def main(x, weight0):
            cls.first(x, weight0, a)
            vm.builtin.cuda_graph.run_or_capture(cls.cuda_graph_capture, (a, b, c), 0)
            cls.last(c, y)

    It runs after ``StaticPlanBlockMemory`` and :class:`.LiftWeights`, and before tensors are
    allocated by the virtual machine. The caller passes the same weights in every call.

    Parameters
    ----------
    functions : Sequence[str]
        The programs of the module, each of which takes all weights.
    """

    def __init__(self, functions: Sequence[str] = ("main",)) -> None:
        self.functions = tuple(functions)

    def transform_module(self, mod: IRModule, ctx: PassContext) -> IRModule:
        """Return the module with captured functions."""
        weights = mod.attrs[WEIGHTS] if mod.attrs and WEIGHTS in mod.attrs else ()
        mod = mod.clone()
        for name in self.functions:
            func = mod[name]
            known = func.with_attr("num_input", len(func.params) - len(weights))
            mod.update_func(mod.get_global_var(name), known)
        with PassContext(opt_level=ctx.opt_level, config={**ctx.config, _OPTION: True}):
            return relax.transform.RewriteCUDAGraph()(mod)
