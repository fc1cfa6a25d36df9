# SPDX-License-Identifier: Apache-2.0
"""Race of engines on a model: each in its own process, taking turns, compared round by round.

    with Arena([EngineSpec("tvm-fusion"), EngineSpec("onnxruntime")], threads=2) as arena:
        result = arena.race("model.onnx")

One round gives every engine one turn of several runs, A B C A B C, while the others are stopped;
every round has new random inputs. The speedup of the first engine over another one is the median
over the rounds of the ratio of their median latencies in that round, so that a machine that slows
down for a while slows down both sides of the ratio.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ..errors import EngineError, InvalidModelError
from ..machine.host import host_info
from ..runtime.host_arrays import TensorSpec, refuse_open_shapes, relative_error
from .engines import ENGINES, EngineKind
from .worker import EngineSpec, EngineWorker

TOLERANCE = 1e-3
"""Relative error above which an engine does not compute the same as the reference."""


@dataclass(frozen=True)
class Plan:
    """Length of a race.

    Parameters
    ----------
    rounds : int
        Number of rounds.
    runs : int
        Timed runs of an engine's turn.
    turn_seconds : float
        A turn that has lasted this long ends early, after at least one run.
    budget_seconds : float
        An engine that has run this long skips the remaining rounds, after at least three.
    seed : int
        Seed of all inputs.
    """

    rounds: int = 20
    runs: int = 10
    turn_seconds: float = 0.5
    budget_seconds: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class EngineResult:
    """Result of one engine in a race.

    ``ratio`` is this engine's latency over the first engine's (above 1: the first one is faster),
    the median over the rounds, with the 10th and 90th percentile beside it. ``relative_error`` is
    the largest difference from the reference's outputs over their largest magnitude.
    """

    engine: str
    title: str
    version: str
    options: dict[str, Any]
    median_ms: float
    min_ms: float
    p90_ms: float
    p99_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    relative_error: float
    compile_seconds: float
    peak_mib: float
    rounds: int
    runs: int
    details: dict[str, Any]


@dataclass(frozen=True)
class RaceResult:
    """The results of all engines with the context to judge them; ``engines[0]`` is the base."""

    model: str
    inputs: list[tuple[str, tuple[int, ...], str]]
    threads: int
    date: str
    machine: dict[str, Any]
    plan: Plan
    reference: str
    engines: list[EngineResult]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain dictionaries and lists."""
        return asdict(self)


def race_table(result: RaceResult) -> Table:
    """Return the result as a table with one row an engine."""
    base = result.engines[0]
    table = Table(
        title=f"{result.model}, {result.threads} threads, {result.machine['cpu']}",
        caption=(
            f"Medians of {base.rounds} rounds in turns. {base.title} is as many times as fast as "
            f"the engine of the row; relative error against {result.reference}."
        ),
    )
    table.add_column("engine")
    headings = ("median ms", "min ms", "p90 ms", f"{base.title} is", "relative error")
    for heading in (*headings, "compile s", "peak MiB"):
        table.add_column(heading, justify="right")
    for engine in result.engines:
        table.add_row(
            title_of(engine),
            *(f"{time:.3f}" for time in (engine.median_ms, engine.min_ms, engine.p90_ms)),
            "" if engine is base else f"{engine.ratio:.2f}x",
            error_text(engine, result),
            f"{engine.compile_seconds:.1f}",
            f"{engine.peak_mib:.0f}",
        )
    return table


def title_of(engine: EngineResult) -> str:
    """Return an engine's name, with the element type that it chose where it may choose."""
    chose = engine.options.get("precision") == "default"
    return f"{engine.title}, {engine.details['precision']}" if chose else engine.title


def error_text(engine: EngineResult, result: RaceResult) -> str:
    """Return an engine's relative error for a table, in red where its outputs are wrong."""
    if engine.title == result.reference:
        return "reference"
    text = f"{engine.relative_error:.1e}"
    return text if engine.relative_error <= TOLERANCE else f"[red]{text}[/red]"


REFERENCE = "onnxruntime"
"""The reference engine for outputs where it takes part; elsewhere the last engine is."""

FEWEST_ROUNDS = 3
"""Rounds that even an engine over its budget takes part in."""

CHECK_SEED = 1 << 32
"""Seed of the inputs for comparing outputs; no round uses it."""

Progress = Callable[[str, int, int], None]


@dataclass
class _Racer:
    """An engine in one race: the latencies of its turns, by round."""

    worker: EngineWorker
    loaded: dict[str, Any]
    turns: list[list[float]] = field(default_factory=list)
    error: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.turns))


def available_peers() -> list[str]:
    """Return the engines of this package other than tvm-fusion that are installed."""
    own = [name for name, kind in ENGINES.items() if kind.program == EngineKind.program]
    return [name for name in own if name != "tvm-fusion" and _is_installed(name)]


def cpu_peers(names: Sequence[str]) -> list[EngineSpec]:
    """The engines of a race on CPUs; OpenVINO twice: in float32, and left to itself.

    Its default computes in bfloat16 on CPUs that multiply that faster.

    ``names``: engines, or none for those that are installed.
    """
    specs = []
    for name in names or available_peers():
        if name != "openvino":
            specs.append(EngineSpec(name))
            continue
        specs.append(EngineSpec(name, "OpenVINO, float32"))
        specs.append(EngineSpec(name, "OpenVINO, its default", {"precision": "default"}))
    return specs


def gpu_peers(names: Sequence[str], target: str) -> list[EngineSpec]:
    """The engines of a race on a GPU, each with its options for that GPU.

    ONNX Runtime uses its CPU provider, and its title says so, where it has none for CUDA.

    ``names``: engines, or none for those that are installed. ``target``: the GPU, as in a user's
    options. Raises EngineError if one of the engines supports no GPU.
    """
    if "openvino" in names:
        raise EngineError("OpenVINO takes part on CPUs only; expected onnxruntime or tvm")
    specs = []
    for name in names or [peer for peer in available_peers() if peer != "openvino"]:
        if name == "tvm":
            specs.append(EngineSpec(name, options={"target": target}))
            continue
        provider = "CUDA" if _has_cuda_provider() else "CPU"
        specs.append(EngineSpec(name, f"ONNX Runtime, {provider}", {"provider": provider}))
    return specs


class Arena:
    """Worker processes that stay alive for any number of races between the same engines.

    Parameters
    ----------
    engines : sequence of EngineSpec
        The first one is the base of all ratios.
    threads : int, optional
        Threads of each engine; all physical cores by default.
    """

    def __init__(self, engines: Sequence[EngineSpec], threads: int | None = None) -> None:
        if not engines:
            raise EngineError(f"a race without engines; expected some of {', '.join(ENGINES)}")
        for spec in engines:
            if not _is_installed(spec.engine):
                package = ENGINES[spec.engine].package
                raise EngineError(
                    f"{spec.title} is not installed; install it with: pip install {package}"
                )
        self._info = host_info()
        self.threads = threads or self._info["physical_cores"]
        self._stack = contextlib.ExitStack()
        self._engines = list(engines)
        self._compiler: EngineWorker | None = None

    def __enter__(self) -> Arena:
        """Start the processes."""
        with contextlib.ExitStack() as stack:
            workers = [EngineWorker(spec, self.threads) for spec in self._engines]
            self._workers = [stack.enter_context(worker) for worker in workers]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        """End the processes."""
        self._stack.close()

    def race(
        self,
        model: Any,
        name: str = "",
        shapes: Mapping[str, Sequence[int]] | None = None,
        plan: Plan | None = None,
        progress: Progress | None = None,
        beside: contextlib.AbstractContextManager[None] | None = None,
    ) -> RaceResult:
        """Load ``model`` into all engines, compare their outputs, and let them take turns.

        Parameters
        ----------
        model : path, bytes or onnx.ModelProto
            The model.
        name : str
            Its name in the result; by default the file's name.
        shapes : mapping, optional
            Shapes of inputs with symbolic dimensions.
        plan : Plan, optional
            Length of the race.
        progress : callable, optional
            Called as ``progress(text, done, total)``.
        beside : context manager, optional
            Entered while the engines take turns, for what runs beside them.
        """
        plan = plan or Plan()
        progress = progress or (lambda text, done, total: None)
        with model_file(model) as path:
            racers = self._load(path, dict(shapes or {}), progress)
        reference = self._compare(racers, plan)
        with beside or contextlib.nullcontext():
            self._take_turns(racers, plan, progress)
        progress("racing", plan.rounds, plan.rounds)
        return RaceResult(
            model=name or path.name,
            inputs=racers[0].loaded["inputs"],
            threads=self.threads,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            machine=self._info,
            plan=plan,
            reference=reference,
            engines=[_summary(racer, racers[0]) for racer in racers],
        )

    def _take_turns(self, racers: Sequence[_Racer], plan: Plan, progress: Progress) -> None:
        """All rounds."""
        for number in range(plan.rounds):
            progress("racing", number, plan.rounds)
            for racer in racers:
                if racer.seconds > plan.budget_seconds and len(racer.turns) >= FEWEST_ROUNDS:
                    continue
                worker = racer.worker
                request = {"runs": plan.runs, "seconds": plan.turn_seconds}
                request |= {"aligned": worker.spec.aligned}
                times = worker.call("turn", seed=[plan.seed, number], **request)
                racer.turns.append(times)

    def _load(self, path: Path, shapes: dict[str, Any], progress: Progress) -> list[_Racer]:
        racers: list[_Racer] = []
        for worker in self._workers:
            progress(f"compiling with {worker.spec.title}", len(racers), len(self._workers))
            loaded = self._load_one(worker, path, shapes)
            if not racers:
                shapes = _static_shapes(loaded["inputs"])
            racers.append(_Racer(worker, loaded))
        return racers

    def _load_one(self, worker: EngineWorker, path: Path, shapes: dict[str, Any]) -> dict[str, Any]:
        options = dict(worker.spec.options)
        request = {"path": str(path), "shapes": shapes, "threads": self.threads}
        if not ENGINES[worker.spec.engine].compiles_apart or "artifact" in options:
            return worker.call("load", options=options, **request)
        if self._compiler is None:
            spec = EngineSpec(worker.spec.engine)
            self._compiler = self._stack.enter_context(EngineWorker(spec, self.threads))
        with tempfile.TemporaryDirectory(prefix="tvm-fusion-") as folder:
            artifact = str(Path(folder, "model.so"))
            seconds = self._compiler.call("compile", options=options, output=artifact, **request)
            loaded = worker.call("load", options={"artifact": artifact}, **request)
        return loaded | {"seconds": seconds + loaded["seconds"]}

    def _compare(self, racers: list[_Racer], plan: Plan) -> str:
        """Set every racer's error, and return which engine was the reference."""
        by_name = {racer.worker.spec.engine: racer for racer in racers}
        reference = by_name.get(REFERENCE, racers[-1])
        seed = [plan.seed, CHECK_SEED]
        want = reference.worker.call("outputs", seed=seed)
        for racer in racers:
            if racer is not reference:
                racer.error = relative_error(racer.worker.call("outputs", seed=seed), want)
        return reference.worker.spec.title


def race(
    model: Any, engines: Sequence[EngineSpec], *, threads: int | None = None, **options: Any
) -> RaceResult:
    """Run one race in its own :class:`Arena`; ``options`` are those of :meth:`Arena.race`."""
    with Arena(engines, threads) as arena:
        return arena.race(model, **options)


@contextlib.contextmanager
def model_file(model: Any) -> Iterator[Path]:
    """Return the path of a model that is a path, the bytes of a file, or an ``onnx.ModelProto``."""
    if hasattr(model, "SerializeToString"):
        model = model.SerializeToString()
    if not isinstance(model, bytes):
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="tvm-fusion-") as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(model)
        yield path


def _has_cuda_provider() -> bool:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:  # the race will report it
        return False
    return "CUDAExecutionProvider" in runtime.get_available_providers()


def _is_installed(engine: str) -> bool:
    package = ENGINES[engine].package
    return not package or importlib.util.find_spec(package) is not None


def _static_shapes(inputs: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    specs = [TensorSpec(*entry) for entry in inputs]
    refuse_open_shapes(
        specs, InvalidModelError, "a race needs sizes: give them in shapes (--shape)"
    )
    return {name: shape for name, shape, _ in inputs}


def _summary(racer: _Racer, base: _Racer) -> EngineResult:
    times = np.array([time for turn in racer.turns for time in turn]) * 1e3
    mine, theirs = (list(map(statistics.median, one.turns)) for one in (racer, base))
    ratios = [a / b for a, b in zip(mine, theirs, strict=False)]  # up to the shorter race
    spec = racer.worker.spec
    return EngineResult(
        engine=spec.engine,
        title=spec.title,
        version=racer.loaded["version"],
        options=dict(spec.options),
        median_ms=float(np.median(times)),
        min_ms=float(times.min()),
        p90_ms=float(np.percentile(times, 90)),
        p99_ms=float(np.percentile(times, 99)),
        ratio=float(np.median(ratios)),
        ratio_p10=float(np.percentile(ratios, 10)),
        ratio_p90=float(np.percentile(ratios, 90)),
        relative_error=racer.error,
        compile_seconds=racer.loaded["seconds"],
        peak_mib=racer.worker.call("peak_bytes") / 2**20,
        rounds=len(racer.turns),
        runs=times.size,
        details=racer.loaded["details"],
    )
