# SPDX-License-Identifier: Apache-2.0
"""Engines for whole models: ours, with and without the passes for reductions, and the peers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi

from tvm_fusion.compiler.phases import stock_phases
from tvm_fusion.compiler.pipeline import build
from tvm_fusion.errors import EngineError

from ..engine import Engine, Launcher, Sets, check_torch, module
from ..onnx_torch import TorchTwin
from .model_case import ModelCase, Phases, gpu_target, launches, optimize, our_phases
from .ours import check_tvm

PROVIDER = "CUDAExecutionProvider"


class ByTVM(Engine):
    """A pipeline of TVM's passes, and its virtual machine.

    Parameters
    ----------
    title : str
        Its name in tables.
    arch : str
        Such as ``sm_90``.
    plan : Phases
        The pipeline.
    """

    package = "tvm"

    def __init__(self, title: str, arch: str, plan: Phases) -> None:
        self.title = title
        self.arch = arch
        self.plan = plan

    def check(self) -> None:
        """Look for TVM's CUDA runtime."""
        check_tvm()

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Compile a model."""
        optimised = optimize(case, self.plan, self.arch)
        executable = build(optimised, gpu_target(self.arch))
        main = tvm.relax.VirtualMachine(executable, tvm.cuda(0))["main"]
        inputs = [[tvm.runtime.from_dlpack(tensor) for tensor in tensors] for tensors in sets]

        def launch(number: int) -> tuple[Any, ...]:
            outputs = main(*inputs[number])
            return (outputs,) if isinstance(outputs, tvm.runtime.Tensor) else tuple(outputs)

        return Launcher(launch, details={"kernels": launches(optimised)})

    def stream_scope(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Launch on this stream."""
        return tvm_ffi.use_raw_stream(tvm.cuda(0), stream)


class ByTorch(Engine):
    """The model's twin in PyTorch, eager or compiled; products in float32, without TF32.

    Parameters
    ----------
    compiled : bool
        Whether to use torch.compile, with fixed shapes, as one graph.
    """

    package = "torch"

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.title = "torch.compile" if compiled else "PyTorch"

    def check(self) -> None:
        """Look for PyTorch, and for Triton where it is needed."""
        check_torch(self.compiled)

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Make the twin."""
        torch = module("torch")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        twin: Any = TorchTwin(case.model, str(sets[0][0].device))
        if self.compiled:
            twin = torch.compile(twin, dynamic=False, fullgraph=True)

        def launch(number: int) -> tuple[Any, ...]:
            with torch.no_grad():
                return twin(*sets[number])

        return Launcher(launch)

    def release(self) -> None:
        """Forget compiled models."""
        module("torch").compiler.reset()


class ByOnnxRuntime(Engine):
    """ONNX Runtime with its CUDA provider, on its own stream; TF32 is off."""

    title = "ONNX Runtime CUDA"
    package = "onnxruntime"

    def check(self) -> None:
        """Look for the provider."""
        providers = module("onnxruntime").get_available_providers()
        if PROVIDER not in providers:
            raise EngineError(f"ONNX Runtime has no {PROVIDER}, only {', '.join(providers)}")

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Open a session, and bind its inputs and outputs to tensors on the device."""
        session = module("onnxruntime").InferenceSession(
            case.model.SerializeToString(), providers=[(PROVIDER, {"use_tf32": 0})]
        )
        bound = [self._bound(session, case, tensors) for tensors in sets]

        def launch(number: int) -> tuple[Any, ...]:
            binding, outputs = bound[number]
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            return outputs

        def all_sets() -> None:
            for binding, _ in bound:
                session.run_with_iobinding(binding)
            bound[-1][0].synchronize_outputs()

        return Launcher(launch, capturable=False, all_sets=all_sets)

    def _bound(
        self, session: Any, case: ModelCase, tensors: Sequence[Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """A binding, and its outputs, which stay on the device as those of other engines do."""
        torch, device = module("torch"), tensors[0].device
        binding = session.io_binding()
        for (name, (shape, dtype)), tensor in zip(case.inputs.items(), tensors, strict=True):
            binding.bind_input(name, device.type, 0, dtype, shape, tensor.data_ptr())
        outputs = []
        for name, (shape, dtype) in case.outputs.items():
            output = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            binding.bind_output(name, device.type, 0, dtype, shape, output.data_ptr())
            outputs.append(output)
        return binding, tuple(outputs)


def model_engines(arch: str) -> list[Engine]:
    """All of them; ours comes first."""
    return [
        ByTVM("tvm-fusion", arch, our_phases(arch)),
        ByTVM("without reduction passes", arch, our_phases(arch, reductions=False)),
        ByTVM("stock TVM", arch, stock_phases(gpu_target(arch))),
        ByTorch(compiled=False),
        ByTorch(compiled=True),
        ByOnnxRuntime(),
    ]
