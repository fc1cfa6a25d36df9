# SPDX-License-Identifier: Apache-2.0
"""Peers of single kernels: PyTorch's libraries, torch.compile, CUB, QuACK and Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_fusion.errors import EngineError

from ..cupy_cub import CupyCub
from ..engine import Engine, Launcher, Sets, check_torch, module
from .kernel_cases import KernelCase

LATER = ("torch.compile", "QuACK", "Triton")
"""Titles of the peers that compile a case first, which takes seconds."""
LIBRARIES = {"product": "cuBLAS", "attention": "SDPA", "convolution": "cuDNN NCHW"}
"""Libraries that PyTorch calls for the cases of a group."""
_ROW_BYTES = 1 << 16  # Bytes of the longest row that our Triton kernels hold in registers.


def peers_of(case: KernelCase) -> list[Engine]:
    """The peers that can run a case, whether they are present or not."""
    inside = " float16" if case.parameters else ""
    peers: list[Engine] = [ByExpression(LIBRARIES.get(case.group, "PyTorch") + inside)]
    if case.group == "convolution":
        peers.append(ByExpression(f"cuDNN NHWC{inside}", last=True))
    peers.append(ByExpression("torch.compile", compiled=True))
    if case.reduction is not None:
        peers.append(CubOfReduction())
    if {node[0] for node in case.nodes} <= {"Softmax", "LayerNormalization"}:
        peers += [QuACK(), TritonRows()]
    return peers


class ByExpression(Engine):
    """The expression of a case, eager or compiled.

    Parameters
    ----------
    title : str
        Its name in tables.
    last : bool
        Whether images and filters have their channels last.
    compiled : bool
        Whether to use torch.compile, with fixed shapes, as one graph.
    """

    package = "torch"

    def __init__(self, title: str, last: bool = False, compiled: bool = False) -> None:
        self.title, self.last, self.compiled = title, last, compiled

    def check(self) -> None:
        """Look for PyTorch, and for Triton where it is needed."""
        check_torch(self.compiled)

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Place the weights, and turn images where asked to."""
        torch = module("torch")
        torch.backends.cudnn.benchmark = True
        is_tf32 = case.options.get("precision") == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_tf32
        weights = on_device(case, torch, sets[0][0].device)
        if self.last:
            weights = {name: self._turned(torch, each) for name, each in weights.items()}
            sets = [[self._turned(torch, tensor) for tensor in tensors] for tensors in sets]

        def graph(*inputs: Any) -> tuple[Any, ...]:
            return case.run(torch, inputs, weights)

        run: Callable[..., tuple[Any, ...]] = graph
        if self.compiled:
            run = torch.compile(graph, dynamic=False, fullgraph=True)

        def launch(number: int) -> tuple[Any, ...]:
            with torch.no_grad():
                return run(*sets[number])

        return Launcher(launch)

    @staticmethod
    def _turned(torch: Any, tensor: Any) -> Any:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor

    def release(self) -> None:
        """Forget compiled cases: PyTorch keeps only a few of one function."""
        if self.compiled:
            module("torch").compiler.reset()


class CubOfReduction(CupyCub):
    """CuPy's CUB on the reduction of a case."""

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Bind the reduction."""
        return super().prepare(case.reduction, sets)


class QuACK(Engine):
    """Kernels in CuTe for softmax and layer norm."""

    title, package = "QuACK", "quack"

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Bind a case."""
        weights = on_device(case, module("torch"), sets[0][0].device)
        if not weights:
            softmax = module("quack").softmax
            return Launcher(lambda number: (softmax(sets[number][0]),))
        norm = module("quack.rmsnorm").layernorm_fwd
        gain, bias = weights["gain"].float(), weights["bias"].float()  # the only type that it takes
        return Launcher(lambda number: (norm(sets[number][0], gain, bias, eps=1e-5),))


class TritonRows(Engine):
    """Softmax and layer norm as Triton's tutorials have them: a row in the registers of a block."""

    title, package = "Triton", "triton"

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Compile a kernel for the length of the rows.

        Raises
        ------
        EngineError
            If a row does not fit in the registers of a block.
        """
        torch, triton = module("torch"), module("triton")
        kernels = module("examples.benchmarks.gpu.offline.triton_rows")
        rows, columns = sets[0][0].shape
        width = triton.next_power_of_2(columns)
        if 4 * width > _ROW_BYTES:
            raise EngineError(f"a row of {columns} numbers does not fit in the registers")
        weights = on_device(case, torch, sets[0][0].device)
        outputs = [torch.empty_like(tensors[0]) for tensors in sets]
        warps = min(16, max(4, width // 512))

        def launch(number: int) -> tuple[Any, ...]:
            given = (sets[number][0], *weights.values(), outputs[number], columns)
            kernel = kernels.layer_norm if weights else kernels.softmax
            kernel[(rows,)](*given, width=width, num_warps=warps)
            return (outputs[number],)

        return Launcher(launch)


def on_device(case: KernelCase, torch: Any, device: Any) -> dict[str, Any]:
    """The weights of the expression as PyTorch's tensors."""
    arrays = (case.parameters or case.weights)()
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
