# SPDX-License-Identifier: Apache-2.0
"""Float sums as a matrix times a vector of ones: cuBLAS as a reduction."""

from __future__ import annotations

from examples.benchmarks.reduction_cases import Case
from tvm_fusion.errors import EngineError

from .engine import Engine, Launcher, Sets, module, only_one


class TorchMV(Engine):
    """``torch.mv`` of the data, or of its transpose, and ones; TF32 is off for it by default."""

    title = "torch.mv"
    package = "torch"

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """View the data as a matrix of the kept and the reduced axes.

        Raises
        ------
        EngineError
            If the case is not a sum of floats along the rows or the columns of a matrix.
        """
        torch = module("torch")
        only_one(case, self.title)
        reduction = case.reductions[0]
        loops = case.loops(reduction)
        kinds = "".join(kind for kind, _ in loops.runs)
        if reduction.operator != "sum" or "float" not in case.dtype or kinds not in ("PR", "RP"):
            raise EngineError(f"{self.title} sums rows or columns of floats only")
        outputs, reduced = int(loops.outputs), int(loops.reduced)
        size = (outputs, reduced) if kinds == "PR" else (reduced, outputs)
        matrices = [tensors[0].view(size) for tensors in sets]
        if kinds == "RP":
            matrices = [matrix.t() for matrix in matrices]
        ones = torch.ones(reduced, dtype=matrices[0].dtype, device=matrices[0].device)
        shape = [size for axis, size in enumerate(case.shape) if axis not in reduction.axes]
        return Launcher(lambda number: (torch.mv(matrices[number], ones).view(shape),))
