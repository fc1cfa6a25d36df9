# SPDX-License-Identifier: Apache-2.0
"""Models compiled for several ranks: running, saving and loading, without TVM's compiler."""

from __future__ import annotations

import ctypes
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tvm_ffi

from schedules.distribute.exchange import Exchange, LocalBuffer, Message, Region, intersection
from schedules.distribute.rows.exchange_table import table_width
from schedules.distribute.rows.row_plan import (
    EXCHANGE,
    EXCHANGE_WAIT,
    Range,
    RankPlan,
    RowExchange,
    Segment,
)
from tvm_fusion.errors import ArtifactError
from tvm_fusion.runtime.arguments import (
    InputBuffers,
    bind,
    call_error,
    check,
    empty,
    numpy_dtype,
    results,
)
from tvm_fusion.runtime.artifact import Description, read_artifact, read_artifact_weights
from tvm_fusion.runtime.compiled_model import Latency, load_library
from tvm_fusion.runtime.described_model import DescribedModel
from tvm_fusion.runtime.thread_pool import Crew
from tvm_fusion.runtime.tvm_runtime import start_machine

from .local_program import Ranks, check_ranks

if TYPE_CHECKING:
    from .world.parcel import SlotRoute


_AXIS = 2  # rows
_MOST_PLACES = 16  # addresses of an exchange's tensors that are remembered

_running = threading.local()


@tvm_ffi.register_global_func(EXCHANGE, override=True)
def _exchange_rows(number: int, *places: Any) -> None:
    """Called by the program of the rank that runs in this thread."""
    _running.model.exchange(int(number), places)


@tvm_ffi.register_global_func(EXCHANGE_WAIT, override=True)
def _exchange_wait(number: int, message: int) -> None:
    """Called by a kernel of the program, for which a slot is late."""
    _running.model.wait(int(number), int(message))


class RankModel:
    """A distributed model on one rank; :meth:`.DistributedModel.on` makes it.

    Parameters
    ----------
    about : Description
        The model, with its plan.
    library : tvm_ffi.Module
        Its code.
    weights : Sequence
        Its weights.
    world : Ranks
        All ranks.

    Attributes
    ----------
    inputs, outputs : tuple[TensorSpec, ...]
        Inputs and outputs of the whole model.
    """

    def __init__(
        self, about: Description, library: tvm_ffi.Module, weights: Sequence[Any], world: Ranks
    ) -> None:
        assert about.ranks is not None, "only distributed models have ranks"
        self.world = world
        self.inputs, self.outputs = about.inputs, about.outputs
        self._weights = weights
        self._part = about.ranks.parts[world.rank]
        self._exchanges = [
            _LocalExchange(number, each, world.rank, number in self._part.in_place)
            for number, each in enumerate(about.ranks.exchanges)
        ]
        taken = zip(about.inputs, self._part.inputs, strict=True)
        own = [spec for spec, rows in taken if rows is not None]
        self._buffers = InputBuffers(own, about.alignment, world.threads)
        self._table = [self._fill_table()] if about.ranks.takes_table else []
        self._machine = start_machine(library)
        self._crew = Crew(world.threads, library)
        self._error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...] | None:
        """Compute the outputs; called by all ranks together, with the whole inputs on each.

        A rank reads its own rows of the inputs only, so that the others may be anything.

        Parameters
        ----------
        *args, **kwargs : array
            Inputs as for :class:`tvm_fusion.CompiledModel`.

        Returns
        -------
        numpy.ndarray, tuple of numpy.ndarray or None
            The outputs on the first rank, None on others.

        Raises
        ------
        InvalidInputError
            If an input is missing, unknown, or of the wrong type or shape, or an index in it out
            of bounds.
        DistributedError
            If a rank does not answer in time.
        """
        arrays = check(self.inputs, bind(self.inputs, args, kwargs))
        mine = [
            _rows_of(array, rows)
            for array, rows in zip(arrays, self._part.inputs, strict=True)
            if rows is not None
        ]
        if not self._part.function:
            return None
        outputs = self._crew.run(self._run, mine)
        if self.world.rank:
            return None
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def benchmark(self, repeat: int = 50, warmup: int = 10, inputs: Any = None) -> Latency:
        """Time whole calls, from all ranks being ready until this one is done.

        Called by all ranks together; that of the first rank is the time until the outputs are
        there.

        Parameters
        ----------
        repeat, warmup : int
            Numbers of timed calls, and of those before them.
        inputs : mapping
            Inputs by name.
        """
        seconds = []
        for number in range(warmup + repeat):
            self.world.barrier()
            begin = time.perf_counter()
            self(inputs)
            if number >= warmup:
                seconds.append(time.perf_counter() - begin)
        return Latency.of(seconds, self.world.threads)

    def exchange(self, number: int, places: Sequence[Any]) -> None:
        """Exchange rows with other ranks: of tensors, or of memory at two addresses.

        Files of formats up to 9 pass tensors.
        """
        with self._keeping_errors():
            own, held = places[0], places[-1]
            if not isinstance(own, int):
                in_place = held.ndim == 1
                own = int(own.data_ptr())
                held = own if in_place else int(held.data_ptr())
            self._exchanges[number](self.world, own, held)

    def wait(self, number: int, message: int) -> None:
        """Wait for the slot of a message."""
        with self._keeping_errors():
            self._exchanges[number].wait(self.world, message)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # TVM keeps its text only
            self._error = error
            raise

    def _fill_table(self) -> Any:
        """The table that kernels read."""
        shape = max(1, len(self._exchanges)), table_width(self.world.size)
        tensor = empty(shape, "int64", tvm_ffi.device("cpu", 0))
        rows = np.from_dlpack(tensor)
        rows[...] = 0
        for row, exchange in zip(rows, self._exchanges, strict=False):
            exchange.prepare(self.world, row)
        return tensor

    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors, memory = self._buffers.tensors(arrays)
        _running.model = self
        try:
            returned = self._machine[self._part.function](*tensors, *self._table, *self._weights)
        except Exception as failure:
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise call_error(failure) from failure
        finally:
            _running.model = None
        if self.world.rank:
            return []
        found = returned[0]
        outputs = [found] if isinstance(found, tvm_ffi.Tensor) else list(found)
        return results(outputs, [False] * len(outputs), memory)


def _rows_of(array: np.ndarray, rows: Range) -> np.ndarray:
    return array[:, :, slice(*rows)] if array.ndim in (4, 5) else array


class _LocalExchange:
    """An exchange as one rank takes part in it."""

    def __init__(self, number: int, exchange: RowExchange, rank: int, in_place: bool) -> None:
        self._dtype = numpy_dtype(exchange.dtype)
        self._own, self._held = exchange.own_region(rank), exchange.held_region(rank)
        messages = []
        for source, dest, *_ in sorted(exchange.transfers().tolist()):
            if rank in (source, dest):
                # This rank sends rows of one tensor and receives into another.
                buffer = "own" if source == rank else "held"
                region = intersection(exchange.own_region(source), exchange.held_region(dest))
                messages.append(Message(source, dest, buffer, region))
        self.exchange = Exchange(number, tuple(messages), in_turn=True)
        self._route: SlotRoute | None = None
        self._receives = any(message.dest == rank for message in messages)
        self._windows = self._held if in_place and self._receives else self._own, self._held
        self._views: dict[tuple[int, int], _Views] = {}

    def prepare(self, world: Ranks, row: np.ndarray) -> None:
        """Let the kernel make the exchange, where it can, by a row of the table."""
        self._route = world.route(self.exchange, self._dtype.itemsize, row, *self._windows)

    def wait(self, world: Ranks, message: int) -> None:
        """Wait for the slot of a message, in the kernel's place."""
        assert self._route is not None, "only a kernel with a route waits"
        world.wait(self._route, message)

    def __call__(self, world: Ranks, own: int, held: int) -> None:
        place = own, held
        if place not in self._views:
            if len(self._views) >= _MOST_PLACES:
                self._views.clear()
            in_place = self._receives and own == held
            self._views[place] = self._in_place(own) if in_place else self._view(*place)
        views = self._views[place]
        world.start(self.exchange, views.buffers)
        if views.kept is not None:
            np.copyto(*views.kept)  # while messages travel
        world.finish(self.exchange)

    def _in_place(self, address: int) -> _Views:
        """A tensor that holds what the rank needs, in which its own rows are already."""
        window = self._window(address, self._held)
        return _Views({"own": window, "held": window}, None)

    def _view(self, first: int, last: int) -> _Views:
        buffers = {}
        if _is_some(self._own):
            buffers["own"] = self._window(first, self._own)
        if self._receives:
            buffers["held"] = self._window(last, self._held)
        shared = intersection(self._own, self._held)
        if len(buffers) < 2 or not _is_some(shared):
            return _Views(buffers, None)
        return _Views(buffers, (buffers["held"].view(shared), buffers["own"].view(shared)))

    def _window(self, address: int, region: Region) -> LocalBuffer:
        """A tensor's memory as an array, which does not keep the tensor: its memory is reused."""
        shape = [end - begin for begin, end in region]
        size = math.prod(shape) * self._dtype.itemsize
        memory = (ctypes.c_char * size).from_address(address)
        array = np.frombuffer(memoryview(memory), self._dtype).reshape(shape)
        return LocalBuffer(array, tuple(begin for begin, _ in region))


class _Views(NamedTuple):
    """Windows of the messages, and the rank's own rows, to be copied from one to the other."""

    buffers: dict[str, LocalBuffer]
    kept: tuple[np.ndarray, np.ndarray] | None


def _is_some(region: Region) -> bool:
    return all(begin < end for begin, end in region)


_MOST_RANKS = 8  # whose rows are shown


def segments_table(segments: Sequence[Segment]) -> str:
    """Return a table with a line for each segment; times are predicted."""
    lines = [
        f"rows over {len(segments[0].rows)} ranks; {sum(s.bytes for s in segments)} bytes in "
        f"{sum(s.messages for s in segments)} messages a run; times are predicted",
        f"{'stages':<24}{'recomputed':>11}{'compute':>11}  {'then':<9}{'halo':>5}{'messages':>9}"
        f"{'bytes':>10}{'exchange':>11}  rows or blocks of channels",
    ]
    lines += [_line(segment) for segment in segments]
    compute = sum(segment.compute for segment in segments)
    exchange = sum(segment.exchange for segment in segments)
    lines.append(f"{'all':<24}{'':>11}{_time(compute):>11}{'':>35}{_time(exchange):>11}")
    return "\n".join(lines)


def _line(segment: Segment) -> str:
    stages = f"{segment.first} to {segment.last}, {segment.stages}"
    return (
        f"{stages:<24}{100 * segment.recomputed:>9.1f} %{_time(segment.compute):>11}  "
        f"{segment.end:<9}{segment.halo:>5}{segment.messages:>9}{segment.bytes:>10}"
        f"{_time(segment.exchange):>11}  {_rows(segment)}"
    )


def _rows(segment: Segment) -> str:
    busy = [(rank, rows) for rank, rows in enumerate(segment.rows) if rows[0] < rows[1]]
    shown = ", ".join(f"{rank}: {begin}:{end}" for rank, (begin, end) in busy[:_MOST_RANKS])
    shown = f"channels {shown}" if segment.split == "channels" else shown
    return shown + (f" and {len(busy) - _MOST_RANKS} more" if len(busy) > _MOST_RANKS else "")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


class DistributedModel(DescribedModel):
    """A model for several ranks; :func:`.compile_network` or :func:`load` makes it.

    ``model.on(world)`` is one rank's share::

        with distributed.session(model.ranks) as world:
            y = model.on(world)(x)       # None on all ranks but the first
    """

    def __init__(
        self,
        executable: Any,
        about: Description,
        weights: Sequence[Any],
        origin: Path | None = None,
    ) -> None:
        assert about.ranks is not None, "only distributed models have ranks"
        self.plan: RankPlan = about.ranks
        self._about, self._weights, self._origin = about, list(weights), origin
        self._executable = executable

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.plan.ranks

    def __repr__(self) -> str:
        """Inputs, outputs, CPU and ranks."""
        return f"DistributedModel({self._signature()}, {self._about.cpu}, {self.ranks} ranks)"

    def explain(self) -> str:
        """Return a table of rows, halos, messages, bytes and predicted times of each segment."""
        return segments_table(self.plan.segments)

    def on(self, world: Ranks) -> RankModel:
        """Share of one rank; called by all ranks together.

        Parameters
        ----------
        world : World
            The ranks: of MPI (``distributed.session()``), or of one process
            (:mod:`.local_world`).

        Raises
        ------
        InvalidInputError
            If there are more or fewer ranks than the model was compiled for.
        DistributedError
            If ranks have different models.
        TargetError
            If this machine lacks what the code needs.
        """
        check_ranks(world, self.ranks, "model")
        self._about.check_machine()
        world.agree(json.dumps(asdict(self._about)), "models")
        return RankModel(self._about, self._library(), self._weights, world)

    def _library(self) -> tvm_ffi.Module:
        module = self._executable
        if not isinstance(module, tvm_ffi.Module):
            module = module.jit(fcompile=self._about.linker(module))
        return module


def load(path: str | os.PathLike[str]) -> DistributedModel:
    """Load a model that :meth:`DistributedModel.save` wrote; it runs code of the file.

    Parameters
    ----------
    path : path
        The file.

    Raises
    ------
    ArtifactError
        If the file cannot be read, is damaged, of another version, or is not for several ranks.
    TargetError
        If this machine cannot run its code.
    """
    about = read_artifact(path)
    if about.ranks is None:
        raise ArtifactError(
            f"{os.fspath(path)!r} is not compiled for ranks; compile it with ranks=, or "
            "tvm-fusion compile --ranks, or run it without --distributed"
        )
    weights = read_artifact_weights(Path(path), about)
    origin = Path(path).resolve()
    return DistributedModel(load_library(origin), about, weights, origin)
