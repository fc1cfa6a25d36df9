# SPDX-License-Identifier: Apache-2.0
"""Compiled models: running, timing, saving and loading."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import ArtifactError, InvalidInputError, TargetError
from .arguments import bind, call_error, check_output_shape, check_outputs, empty
from .artifact import Description, Program, read_artifact, read_artifact_weights
from .described_model import DescribedModel
from .fast_call import FastCall, PreparedCall, has_fast_call, make_fast_call, no_fast_call
from .host_arrays import TensorSpec, random_inputs, refuse_open_shapes
from .memory import DeviceMemory, HostMemory, Memory, Workspaces, own_tensors
from .thread_pool import Crew, choose_threads
from .tvm_runtime import copied, device_of, get_function, start_machine
from .weights import digest, stored_bytes

_FILE_NAME = "model.so"


@dataclass(frozen=True)
class Latency:
    """Result of :meth:`CompiledModel.benchmark`, in milliseconds a call.

    Parameters
    ----------
    median_ms, min_ms, p90_ms, p99_ms, mean_ms : float
        Times of the calls.
    repeat : int
        Number of timed calls.
    threads : int
        Threads of the model.
    """

    median_ms: float
    min_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    repeat: int
    threads: int

    @classmethod
    def of(cls, seconds: Sequence[float], threads: int) -> Latency:
        """Summary of the times of some calls."""
        times = [1e3 * value for value in seconds]
        return cls(
            median_ms=float(np.median(times)),
            min_ms=min(times),
            p90_ms=float(np.percentile(times, 90)),
            p99_ms=float(np.percentile(times, 99)),
            mean_ms=float(np.mean(times)),
            repeat=len(times),
            threads=threads,
        )


class CompiledModel(DescribedModel):
    """A model compiled for a CPU or a GPU; made by ``tvm_fusion.compile`` or ``load``.

    It is called with its inputs as numpy arrays or anything else on the CPU that has DLPack
    (tensors of PyTorch, TVM, JAX), by position, by name, or all of them in one mapping::

        y = compiled(x)
        y = compiled(image=x)
        y = compiled({"input.1": x})

    It returns a numpy array, or a tuple of them if the model has several outputs. The arrays are
    the caller's: no later call changes them, and changing them changes nothing else. Results are
    written to the caller's own arrays with ``out=``::

        compiled(x, out=y)

    Types and shapes must fit: nothing is converted silently. A contiguous input is used in place,
    wherever it lies and whether it may be written to or not; any other one is copied first. Outputs
    are not copied, unless they are constants of the model, or share memory with an input.

    **GPUs.** A model for a GPU takes tensors of that GPU too, and uses them in place if they are
    contiguous and aligned; arrays of the CPU are copied there. The weights are copied there in the
    first call (by :func:`load` immediately). The results come back as numpy arrays; :meth:`tensors`
    leaves them on the GPU.

    **Threads.** A call runs on as many threads as the model was given, by default one a physical
    core (or ``TVM_NUM_THREADS``, if the environment has it); models with different numbers can
    share a process. The threads run on all processors of the process: they are not pinned. They
    wait for the next call for about a millisecond, or less if other work needs the processors, and
    then sleep.

    A model may be called from several threads of a program: its calls then wait for each other. To
    run calls at the same time, load the model several times with fewer threads each. It also works
    in a forked process.
    """

    def __init__(
        self,
        executable: Any,
        about: Description,
        threads: int,
        weights: Sequence[Any] = (),
        origin: Path | None = None,
        programs: Sequence[Program] = (),
    ) -> None:
        self._executable = executable
        self._programs = programs
        self._about = about
        self._weights = list(weights)
        self._placed: list[Any] | None = None
        self._workspaces = Workspaces()
        self._origin = origin
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._crew = Crew(threads)
        self._memory = _memory_of(about, threads)
        self._library: Any = None
        self._main: Any = None
        self._fast_call: FastCall = no_fast_call
        self._has_one_output = len(about.outputs) == 1
        self._names = [spec.name for spec in about.inputs]
        self._no_out = (None,) * len(about.outputs)

    @property
    def device(self) -> tvm_ffi.Device:
        """The device of the kernels, and of the results of :meth:`tensors`."""
        return self._memory.device

    @property
    def threads(self) -> int:
        """Number of threads of a call."""
        return self._crew.threads

    def __repr__(self) -> str:
        """Inputs, outputs, CPU or GPU, and threads."""
        place = self.needs or self._about.cpu
        return f"CompiledModel({self._signature()}, {place}, {self.threads} threads)"

    def __call__(
        self, /, *args: Any, out: Any = None, **kwargs: Any
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Compute the outputs.

        Parameters
        ----------
        *args : array
            Inputs in order, or one mapping from names to inputs.
        out : numpy.ndarray, sequence or mapping, optional
            Array for the output; of several outputs, one for each in order, or by name, where some
            may be missing or None. A contiguous one is written in place, unless it shares memory
            with an input. If an input of the model is called ``out``, this is that input.
        **kwargs : array
            Inputs by name.

        Returns
        -------
        numpy.ndarray or tuple of numpy.ndarray
            One array if the model has one output, else a tuple; those of ``out`` are among them.

        Raises
        ------
        InvalidInputError
            If an input is missing, unknown, or of the wrong type or shape, or an array of ``out``
            does not fit its output.
        TargetError
            If the model is compiled for another CPU or GPU than this machine has, or the GPU fails.
        """
        if out is not None and "out" in self._names:
            kwargs["out"], out = out, None
        outputs = self._fast_call(self._in_order(args, kwargs), out)
        if outputs is None:
            given = self._no_out if out is None else check_outputs(self.outputs, out)
            checked = self._memory.check(bind(self.inputs, args, kwargs))
            outputs = self._on_crew(self._run, checked, given)
        return self._unpacked(outputs)

    def tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs as :meth:`__call__` does, and leave them on the model's device.

        On a GPU the call returns when the kernels are launched, before they are done: work on the
        same stream, the default one, is ordered; others call :meth:`synchronize` first.

        Returns
        -------
        tvm_ffi.Tensor or tuple of tvm_ffi.Tensor
            They have DLPack (``torch.from_dlpack``), and are the caller's.
        """
        values = self._memory.check(bind(self.inputs, args, kwargs))
        return self._unpacked(self._on_crew(self._run_on_device, values))

    def synchronize(self) -> None:
        """Wait until the device has done all launched work.

        Raises
        ------
        TargetError
            If a kernel failed.
        """
        if self._main is not None:  # else nothing was launched
            self._memory.synchronize()
            if self._workspaces.are_suspect:
                self._crew.run(self._check)

    def reset(self) -> None:
        """Wait for the device, and give the kernels that keep something between calls a new start.

        Those are reductions that many blocks of a GPU share. A call whose blocks waited for each
        other in vain does it before it raises its error.

        Raises
        ------
        TargetError
            If a kernel failed, or the GPU fails.
        """
        if self._main is not None:
            self._crew.run(self._reset)

    def _reset(self) -> None:
        self._memory.synchronize()
        self._workspaces.reset()

    def _check(self) -> None:
        """Wait for the device, and raise an error if a kernel has given up waiting."""
        self._memory.synchronize()
        self._workspaces.check()

    def _run(self, values: Sequence[Any], out: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        tensors, memory = self._place(values)
        places, targets = self._memory.receive(out, memory)
        outputs = self._execute([*tensors, *targets])
        arrays = self._memory.arrays(outputs, self._about.fresh, memory, places)
        self._workspaces.check()
        return [
            array if target is None else _written(spec, array, target)
            for spec, array, target in zip(self.outputs, arrays, out, strict=True)
        ]

    def _run_on_device(self, values: Sequence[Any]) -> list[Any]:
        tensors, _ = self._place(values)
        lifted = itertools.compress(self.outputs, self._about.lifted)
        targets = [empty([int(n) for n in s.shape], s.dtype, self.device) for s in lifted]
        outputs = self._execute([*tensors, *targets])
        return own_tensors(outputs, self._about.fresh, tensors)

    def _in_order(self, args: tuple[Any, ...], named: dict[str, Any]) -> Sequence[Any]:
        """Inputs that are all given by position or all by name; else what no fast call takes."""
        if not named and len(args) == 1 and type(args[0]) is dict:
            named, args = args[0], ()
        if not named:
            return args
        if args or len(named) != len(self._names):
            return (None,)
        return [named.get(name) for name in self._names]

    def _unpacked(self, outputs: Sequence[Any]) -> Any:
        return outputs[0] if self._has_one_output else tuple(outputs)

    def _execute(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The program's results; ``tensors`` are its inputs, and the outputs that it takes."""
        # Such callers use the results on the device, and never wait here.
        if self._workspaces.are_suspect:
            self._check()
        weights = self._on_device()
        self._workspaces.launched()
        try:
            outputs = self._main(*tensors, *weights)
        except (RuntimeError, ValueError, TypeError) as error:
            # TVM checks what the specs cannot say, such as a dimension computed from others.
            if self.needs is not None and re.search("CUDA|OpenCL|CL_", str(error)):
                reason = str(error).strip().splitlines()[-1]
                raise TargetError(f"the GPU failed to run the model: {reason}") from error
            raise call_error(error) from error
        return [outputs] if isinstance(outputs, tvm_ffi.Tensor) else outputs

    def _place(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return self._memory.place(values)

    def _on_device(self) -> list[Any]:
        """The weights on the device, copied once."""
        if self._placed is None:
            try:
                self._placed = self._memory.upload(self._weights)
            except RuntimeError as error:
                size = stored_bytes(self._about.weights) / 2**20
                reason = str(error).strip().splitlines()[-1]
                raise TargetError(
                    f"{size:.1f} MiB of weights cannot be placed on {self.device}: {reason}"
                ) from error
            if self._about.device is not None:
                self._workspaces = Workspaces.among(self._weights, self._placed)
            if self._origin is not None:  # they will not be saved
                self._weights = self._placed
        return self._placed

    def _on_crew(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function on the model's threads, after its code is loaded."""
        if self._main is None:
            self._crew.start(self._start)
        return self._crew.run(function, *args)

    def _start(self) -> tvm_ffi.Module:
        """Load the code once, after checking that this machine can execute it."""
        if self._main is not None:
            return self._library
        self._about.for_this_machine()
        module = self._executable
        if not isinstance(module, tvm_ffi.Module):
            executable = module
            module = executable.jit(fcompile=self._about.linker(executable))
            if module.same_as(executable.mod):  # which will be saved
                module = copied(module)
        self._library = module
        self._machine = start_machine(module, self._memory.device)
        self._main = self._machine["main"]
        about, memory = self._about, self._memory
        if isinstance(memory, HostMemory) and has_fast_call(
            about.inputs, about.outputs, about.lifted
        ):
            pools = [pool for pool in memory.pools if pool is not None]
            program = self._program(module)
            self._fast_call = make_fast_call(program, self._crew, about.inputs, pools)
        return module

    def _program(self, library: tvm_ffi.Module) -> PreparedCall:
        """The program that writes all outputs where it is told."""
        about, weights, inputs = self._about, self._on_device(), len(self._about.inputs)
        if about.kernel is None:
            return PreparedCall.of_main(self._main, inputs, len(about.outputs), weights)
        try:
            kernel = library.get_function(about.kernel.name, query_imports=True)
        except AttributeError as error:
            raise ArtifactError(
                f"the model has no kernel {about.kernel.name!r}, which its description names; "
                "compile it again"
            ) from error
        return PreparedCall.of_kernel(kernel, about.kernel, inputs, weights)

    def share_weights(self, known: Mapping[bytes, Any]) -> dict[bytes, Any]:
        """Use other models' weights in place of those that are equal; before the first call.

        Parameters
        ----------
        known : Mapping[bytes, Any]
            Results of this method for other models.

        Returns
        -------
        dict[bytes, Any]
            Each weight of this model by its digest.
        """
        digests = [digest(weight) for weight in self._weights]
        self._weights = [known.get(d, w) for d, w in zip(digests, self._weights, strict=True)]
        return dict(zip(digests, self._weights, strict=True))

    def __reduce__(self) -> tuple[Callable[..., CompiledModel], tuple[bytes, int]]:
        """Pickle, copy and send to other processes the form that :meth:`save` writes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / _FILE_NAME
            self.save(path)
            return _unpickled, (path.read_bytes(), self.threads)

    def benchmark(
        self, repeat: int = 50, warmup: int = 10, inputs: Mapping[str, Any] | None = None
    ) -> Latency:
        """Time whole calls.

        On a GPU the inputs are copied before the clock starts, the results stay there, and a call
        ends when the device has finished.

        Parameters
        ----------
        repeat : int
            Number of timed calls.
        warmup : int
            Number of calls before them.
        inputs : mapping, optional
            Inputs by name; by default random ones, new at each call of this method: floats are
            standard normal, integers 0 or 1.

        Raises
        ------
        InvalidInputError
            If a number is invalid, or an input has dimensions of unknown size.
        TargetError
            As for a call.
        """
        numbers = all(isinstance(count, Integral) for count in (repeat, warmup))
        if not numbers or repeat < 1 or warmup < 0:
            raise InvalidInputError(
                f"repeat is {repeat!r} and warmup {warmup!r}; expected integers of at least 1 and 0"
            )
        if not isinstance(inputs, Mapping | None):
            raise InvalidInputError(
                f"inputs is a {type(inputs).__name__}; expected a mapping from names to arrays"
            )
        feed = self._random_feed() if inputs is None else inputs
        values = bind(self.inputs, (), feed)
        call: Callable[..., Any] = self
        if self._about.device is not None:
            values, _ = self._on_crew(self._place, self._memory.check(values))
            call = self._timed
        for _ in range(warmup):
            call(*values)
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            call(*values)
            times.append(time.perf_counter() - begin)
        return Latency.of(times, self.threads)

    def _timed(self, *values: Any) -> None:
        self.tensors(*values)
        self.synchronize()

    def _random_feed(self) -> dict[str, np.ndarray]:
        refuse_open_shapes(self.inputs, InvalidInputError, "pass inputs=...")
        return random_inputs(self.inputs, int.from_bytes(os.urandom(8), "little"), normal=True)


def load(path: str | os.PathLike[str], threads: int | None = None) -> CompiledModel:
    """Load a model that :meth:`CompiledModel.save` wrote.

    **Loading runs code of the file.** Before that it is checked that the file is complete and one
    of ours, that format and TVM version match, and that this machine has the architecture, the CPU
    features or the GPU. That protects from accidents, not from malice: load only files that you
    trust.

    Of a file for several CPUs, the code for the best one that this machine can run is taken. All
    that load the same file, in this process and in others, share the memory of its weights, which
    are pages of the file: replace a file that is in use, as :meth:`CompiledModel.save` does, and do
    not write into it.

    Parameters
    ----------
    path : path
        The file.
    threads : int, optional
        Threads of a call; by default one a physical core.

    Raises
    ------
    ArtifactError
        If the file cannot be read, was not written by tvm_fusion, is damaged, or is of another
        version.
    TargetError
        If it is compiled for another architecture, for CPU features or a GPU that this machine
        lacks.
    InvalidInputError
        If ``threads`` is invalid.
    """
    count = choose_threads(threads)
    about = read_artifact(path)
    if about.ranks is not None:
        raise ArtifactError(
            f"{str(path)!r} is compiled for {about.ranks.ranks} ranks; run it by mpiexec -n "
            f"{about.ranks.ranks} tvm-fusion run {path} --distributed, or load it by "
            "tvm_fusion.distributed.load"
        )
    weights = read_artifact_weights(Path(path), about)
    origin = Path(path).resolve()
    module = load_library(origin, about.library)
    model = CompiledModel(module, about, count, weights, origin)
    model._on_device()
    return model


_files: dict[Path, list[tuple[int, int]]] = {}
"""Files that were loaded from each path."""


_copies: dict[tuple[int, ...], tvm_ffi.Module] = {}
"""Libraries that were loaded from copies; like any other one, the system keeps them for ever."""


def _own_name(path: Path) -> str:
    """A name of a file that no other one had: the system gives each name one library for ever."""
    about = path.stat()
    known, own = _files.setdefault(path, []), (about.st_dev, about.st_ino)
    if own not in known:
        known.append(own)
    return f"{path.parent}/{'./' * known.index(own)}{path.name}"


def load_library(path: Path, place: tuple[int, int] = (0, 0)) -> tvm_ffi.Module:
    """Load the code of a saved model, which runs with all rights of the process.

    ``path``: the file. ``place``: where the library begins and ends. The system loads one at the
    beginning of the file from there, any other one from a copy in memory, which all models of the
    file in this process share. Raises ArtifactError if the system cannot load it.
    """
    begin, end = place
    try:
        if begin == 0:
            return get_function("ffi.Module.load_from_file.so")(_own_name(path), "so")
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            key = about.st_dev, about.st_ino, about.st_mtime_ns, begin
            if key not in _copies:
                file.seek(begin)
                _copies[key] = _loaded_from_memory(path.name, file.read(end - begin))
            return _copies[key]
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(f"cannot load {str(path)!r}: {reason}") from error


def _loaded_from_memory(name: str, library: bytes) -> tvm_ffi.Module:
    """Load a library from a file without a folder, which ends with this process."""
    with open(os.memfd_create(name), "wb") as file:
        file.write(library)
        file.flush()
        return load_library(Path(f"/proc/self/fd/{file.fileno()}"))


def _unpickled(data: bytes, threads: int) -> CompiledModel:
    """Load the bytes of a saved model from a file of its own, which lives as long as the model."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    path = Path(folder.name) / _FILE_NAME
    path.write_bytes(data)
    model = load(path, threads)
    model._folder = folder
    return model


def _written(spec: TensorSpec, array: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The array that a caller gives for an output, with the result in it."""
    if array is not target:
        check_output_shape(spec, target, array.shape)
        np.copyto(target, array)
    return target


def _memory_of(about: Description, threads: int) -> Memory:
    if about.device is None:
        return HostMemory(about.inputs, about.outputs, about.lifted, about.alignment, threads)
    return DeviceMemory(about.inputs, device_of(about.device.kind))
