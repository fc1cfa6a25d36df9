# SPDX-License-Identifier: Apache-2.0
"""Engines that a benchmark can race, and the main loop of the process of each.

``worker.py`` runs this file by its path, so that the process of a peer holds only that peer: at its
top it imports what needs numpy and the standard library only, and each engine imports its own
package when it is made. A worker reads requests from a pipe whose handle is its one argument and
answers each with ``("ok", value)`` or ``("error", kind, message, traceback)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

# Absolute: each worker process runs this file as a program.
from tvm_fusion.runtime.host_arrays import random_inputs
from tvm_fusion.version import __version__

INPUT_SETS = 4
"""Number of different inputs that an engine cycles through within one turn."""

SETTLE_SECONDS = 0.01
"""Seconds, at least one run, that an engine runs untimed at the beginning of each turn."""

Shapes = Mapping[str, Sequence[int]]


class Input(NamedTuple):
    """Name, shape and element type of one input."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class Engine:
    """One way to run a model; a subclass imports its package in ``__init__``."""

    version = ""
    inputs: list[Input]

    def load(self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any]) -> None:
        """Compile the ONNX file for inputs of ``shapes`` and set :attr:`inputs`."""
        raise NotImplementedError

    def compile(
        self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any], output: str
    ) -> float:
        """Compile for another process; only some engines implement it."""
        raise NotImplementedError

    def feed(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Arrange arrays by name for :meth:`run`; this is not timed."""
        return dict(arrays)

    def run(self, feed: Any) -> Sequence[Any]:
        """Run once; every output can be read as a numpy array when it returns."""
        raise NotImplementedError

    def details(self) -> dict[str, Any]:
        """Further facts about the loaded model for a report."""
        return {}


class FusionEngine(Engine):
    """tvm-fusion: one process compiles a model and saves it, another one loads and runs it."""

    def __init__(self) -> None:
        from tvm_fusion.runtime.tvm_runtime import version

        self.version = f"{__version__} (TVM {version()})"

    def compile(
        self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any], output: str
    ) -> float:
        """Compile with ``target``, ``fuse``, ``winograd``; save; return the seconds taken."""
        # Only where it compiles: what loads a model needs no compiler.
        from tvm_fusion.compiler.compile import compile as compile_model

        begin = time.perf_counter()
        compile_model(path, shapes=shapes, threads=threads, **options).save(output)
        return time.perf_counter() - begin

    def load(self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any]) -> None:
        """Load the compiled model ``artifact`` of ``options``."""
        from tvm_fusion.runtime.compiled_model import load

        self._model = load(options["artifact"], threads=threads)
        self.inputs = [Input(s.name, tuple(s.shape), s.dtype) for s in self._model.inputs]

    def feed(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Arrays in the order of the model's inputs."""
        return [arrays[spec.name] for spec in self.inputs]

    def run(self, feed: list[np.ndarray]) -> Sequence[Any]:
        """Call the compiled model."""
        outputs = self._model(*feed)
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    def details(self) -> dict[str, Any]:
        """Numbers of candidate pairs and of fused pairs."""
        report = self._model.fused
        return {"pairs": len(report), "fused": sum(bool(entry["fused"]) for entry in report)}


class StockTVMEngine(Engine):
    """TVM alone, with its own pipeline for a CPU or a GPU; by default this machine's CPU."""

    def __init__(self) -> None:
        import tvm

        self.version = tvm.__version__
        self._tvm = tvm

    def load(self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any]) -> None:
        """Import as tvm-fusion does and build with Relax's default pipeline for the target."""
        from tvm import relax

        from tvm_fusion.codegen import nvrtc
        from tvm_fusion.compiler import targets
        from tvm_fusion.onnx import frontend

        imported = frontend.import_onnx(path, shapes)
        chosen = targets.resolve(options.get("target", "native"))
        kind = chosen.kind.name
        arch = str(chosen.attrs.get("arch", ""))
        with nvrtc.tvm_compiler(arch) if kind == "cuda" else contextlib.nullcontext():
            pipeline = relax.get_default_pipeline(chosen)
            executable = self._tvm.compile(imported.mod, chosen, relax_pipeline=pipeline)
        self._device = self._tvm.device(kind if targets.is_gpu(chosen) else "cpu", 0)
        self._main = relax.VirtualMachine(executable, self._device)["main"]
        self.inputs = [Input(s.name, tuple(s.shape), s.dtype) for s in imported.inputs]

    def feed(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Arrays in the order of the model's inputs."""
        return [arrays[spec.name] for spec in self.inputs]

    def run(self, feed: list[np.ndarray]) -> Sequence[Any]:
        """Copy the inputs into TVM's tensors and run."""
        outputs = self._main(*[self._tvm.runtime.tensor(array, self._device) for array in feed])
        single = isinstance(outputs, self._tvm.runtime.Tensor)
        return [tensor.numpy() for tensor in ([outputs] if single else outputs)]


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime with all graph optimisations, by its ``provider``, ``CPU`` or ``CUDA``."""

    def __init__(self) -> None:
        import onnxruntime

        self.version = onnxruntime.__version__
        self._package = onnxruntime

    def load(self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any]) -> None:
        """Open a session; it takes any shape, so ``shapes`` only completes the inputs."""
        settings = self._package.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.graph_optimization_level = self._package.GraphOptimizationLevel.ORT_ENABLE_ALL
        settings.log_severity_level = 3
        providers = [f"{options.get('provider', 'CPU')}ExecutionProvider"]
        self._session = self._package.InferenceSession(path, settings, providers=providers)
        numpy_names = {"float": "float32", "double": "float64"}
        self.inputs = []
        for spec in self._session.get_inputs():
            dtype = spec.type.removeprefix("tensor(").removesuffix(")")
            shape = tuple("?" if size is None else size for size in spec.shape)
            shape = tuple(shapes.get(spec.name, shape))
            self.inputs.append(Input(spec.name, shape, numpy_names.get(dtype, dtype)))

    def run(self, feed: Any) -> Sequence[Any]:
        """Run the session."""
        return self._session.run(None, feed)


class OpenVINOEngine(Engine):
    """OpenVINO's CPU device, latency hint, computing in float32 or as it chooses itself."""

    def __init__(self) -> None:
        import openvino

        self.version = openvino.__version__
        self._package = openvino
        self._core = openvino.Core()

    def load(self, path: str, shapes: Shapes, threads: int, options: Mapping[str, Any]) -> None:
        """Read, reshape to ``shapes``, and compile; ``precision`` is ``f32`` or ``default``."""
        model = self._core.read_model(path)
        if shapes:
            model.reshape({name: list(shape) for name, shape in shapes.items()})
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        if options.get("precision", "f32") == "f32":
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        compiled = self._core.compile_model(model, "CPU", settings)
        self._precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self._request = compiled.create_infer_request()
        self._outputs = [_openvino_type(port) for port in compiled.outputs]
        self.inputs = [
            Input(
                port.any_name,
                tuple(size.get_length() if size.is_static else "?" for size in shape),
                _openvino_type(port).name,
            )
            for port, shape in ((port, port.get_partial_shape()) for port in compiled.inputs)
        ]

    def feed(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Arrays by name; those of bfloat16 as tensors, which hold the same memory."""
        return {
            name: self._package.Tensor(array.view("float16"), array.shape, self._package.Type.bf16)
            if array.dtype.name == "bfloat16"
            else array
            for name, array in arrays.items()
        }

    def run(self, feed: Any) -> Sequence[Any]:
        """Infer in place, without copies of inputs and outputs."""
        self._request.infer(feed, share_inputs=True, share_outputs=True)
        return [
            self._request.get_output_tensor(index).data.view(dtype)
            for index, dtype in enumerate(self._outputs)
        ]

    def details(self) -> dict[str, Any]:
        """Element type that it computes in, as OpenVINO calls it."""
        return {"precision": self._precision}


def _openvino_type(port: Any) -> np.dtype[Any]:
    """Type of a model's input or output, for whose bfloat16 OpenVINO has numpy's float16."""
    element = port.get_element_type()
    if element.get_type_name() != "bf16":
        return np.dtype(element.to_dtype())
    import ml_dtypes  # only where a model needs it, as the process is the peer's

    return np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class EngineKind:
    """Facts about an engine before it is imported; an optional one needs ``package``.

    Its process runs ``program``, this file by default; another one adds the engine to
    :data:`ENGINES` and calls :func:`main`. One that ``compiles_apart`` loads only what its method
    ``compile`` wrote in another process, as a user's program does with a compiled model.
    """

    make: Callable[[], Engine]
    title: str
    package: str = ""
    compiles_apart: bool = False
    program: str = __file__


ENGINES = {
    "tvm-fusion": EngineKind(FusionEngine, "tvm-fusion", compiles_apart=True),
    "onnxruntime": EngineKind(OnnxRuntimeEngine, "ONNX Runtime", "onnxruntime"),
    "openvino": EngineKind(OpenVINOEngine, "OpenVINO", "openvino"),
    "tvm": EngineKind(StockTVMEngine, "stock TVM"),
}


class Service:
    """Handler of the requests to one worker; each public method is a request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self, path: str, shapes: Shapes, threads: int, options: dict) -> dict[str, Any]:
        """Load a model in place of the previous one."""
        begin = time.perf_counter()
        self._engine.load(path, shapes, threads, options)
        return {
            "seconds": time.perf_counter() - begin,
            "inputs": [tuple(spec) for spec in self._engine.inputs],
            "version": self._engine.version,
            "details": self._engine.details(),
        }

    def compile(self, path: str, shapes: Shapes, threads: int, options: dict, output: str) -> float:
        """Compile a model into the file ``output`` and return the seconds that it took."""
        return self._engine.compile(path, shapes, threads, options, output)

    def outputs(self, seed: Sequence[int]) -> list[np.ndarray]:
        """Return the model's outputs for the inputs of ``seed``."""
        feed = self._engine.feed(random_inputs(self._engine.inputs, seed))
        return [np.array(output) for output in self._engine.run(feed)]

    def turn(
        self, seed: Sequence[int], runs: int, seconds: float, aligned: bool = False
    ) -> list[float]:
        """Seconds of each of up to ``runs`` runs; after ``seconds`` no further one begins."""
        engine = self._engine
        feeds = [
            engine.feed(random_inputs(engine.inputs, [*seed, index], aligned=aligned))
            for index in range(min(runs, INPUT_SETS))
        ]
        clock = time.perf_counter
        gc.disable()
        settled = clock() + SETTLE_SECONDS
        engine.run(feeds[-1])
        while clock() < settled:
            engine.run(feeds[-1])
        times: list[float] = []
        end = clock() + seconds
        while len(times) < runs and (not times or clock() < end):
            feed = feeds[len(times) % len(feeds)]
            begin = clock()
            engine.run(feed)
            times.append(clock() - begin)
        gc.enable()
        return times

    def peak_bytes(self) -> int:
        """Return the peak memory of this process."""
        with contextlib.suppress(OSError), open("/proc/self/status") as status:
            for line in status:
                # Not getrusage's: that is at least the parent's memory when it started us.
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent: while stopped it sees no closed pipe."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def failure(error: Exception, kind: EngineKind) -> tuple[str, str, str, str]:
    """Return the reply that describes ``error``: our own errors keep their class and their text."""
    bases = [base.__name__ for base in type(error).__mro__]
    text = str(error)
    if "TVMFusionError" not in bases:
        lines = text.strip().splitlines() or [""]
        bases = ["EngineError"]
        text = f"{kind.title} failed: {type(error).__name__}: {lines[0]}"
    return "error", bases[0], text, traceback.format_exc()


def serve(name: str, requests: Connection) -> None:
    """Make the engine ``name`` and answer requests until the pipe closes."""
    kind = ENGINES[name]
    service = None
    while True:
        try:
            method, arguments = requests.recv()
        except EOFError:
            return
        try:
            service = service or Service(kind.make())
            requests.send(("ok", getattr(service, method)(**arguments)))
        except Exception as error:  # every exception of a peer goes to the parent, which decides
            requests.send(failure(error, kind))


def main() -> None:
    """Run a worker; the engine's name and the pipe's handle are its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent()
    os.dup2(2, 1)  # a library's messages must not reach the parent's standard output
    serve(sys.argv[1], Connection(int(sys.argv[2])))


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # TVM imports it where it finds it
    main()
