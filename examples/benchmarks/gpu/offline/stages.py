# SPDX-License-Identifier: Apache-2.0
"""Stages of a run on a GPU without TVM, each a process of its own.

    python -m examples.benchmarks.gpu.offline.stages PACKED LOG STAGE SECONDS [CASE...]

Every result is one flushed line of JSON in LOG, so a crash or the end of the time costs what is
under way only: a stage that is started again goes on behind the case that it had begun.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvm_fusion
from tvm_fusion.errors import TVMFusionError

from .. import machine
from ..clock import Clock, CudaClock
from ..compare import Trial, clear, race
from ..engine import Engine, module
from ..protocol import Plan, Rotation, Verdict, reason, rotation
from ..reference import as_torch, deviation
from .kernel_cases import KernelCase, small_cases, timed_cases
from .loaded import Loaded
from .model_cases import GROUP, MODELS, PackedModel, TorchModel
from .peers import LATER, on_device, peers_of

PLAN = Plan(samples=20, warmup_seconds=0.01, repeats=5)
MODEL_SETS = 4
GROUPS = ("reduction", "norm", "product", "attention", "convolution")
NO_GPU = 2
"""Exit code where PyTorch sees no GPU."""
_PEAK_EXTENT = 8192


class Log:
    """Lines of a stage, appended to a file that all stages share.

    Parameters
    ----------
    path : Path
        The file.
    stage : str
        Name of the stage.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self.path, self.stage = path, stage
        lines = read_log(path)
        self.begun = {line["case"] for line in lines if line["stage"] == stage and "begun" in line}

    def put(self, case: str, **fields: Any) -> None:
        """Append a line; numbers that JSON does not have are left out."""
        kept = {
            name: value
            for name, value in fields.items()
            if not (isinstance(value, float) and not math.isfinite(value))
        }
        with self.path.open("a") as file:
            file.write(json.dumps({"stage": self.stage, "case": case, **kept}) + "\n")

    def each(self, cases: Sequence[Any], until: float, work: Callable[[Any], None]) -> None:
        """Do the work for the cases that were not begun; a failure is a line of its case."""
        for case in cases:
            if case.name in self.begun:
                continue
            if time.monotonic() > until:
                self.put(case.name, engine="tvm-fusion", problem="no time was left")
                continue
            self.put(case.name, begun=True)
            try:
                work(case)
            except Exception as error:  # one case must not end the others
                self.put(case.name, engine="tvm-fusion", problem=reason(error))


def packed(folder: Path, cases: Sequence[Any]) -> list[Any]:
    """Those of the cases that were packed."""
    return [case for case in cases if (folder / case.file).exists()]


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log; a process that was killed may have left half a line."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def judge_kernel(
    case: KernelCase, inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[float, float]:
    """Error in units of the tolerance, against the expression in float64, and the tolerance."""
    if case.reduction is not None:
        return deviation(case.reduction, inputs, outputs)
    torch = module("torch")
    weights = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in on_device(case, torch, inputs[0].device).items()
    }
    expected = case.run(torch, [tensor.double() for tensor in inputs], weights)
    return largest_error(outputs, expected) / case.tolerance, case.tolerance


def largest_error(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest error relative to the largest magnitude; infinite where one is not finite."""
    worst = 0.0
    for found, wanted in zip(map(as_torch, outputs), expected, strict=True):
        difference = (found.double() - wanted.double()).abs().max()
        scale = float(wanted.double().abs().max()) or 1.0
        error = float(difference) / scale
        worst = max(worst, error) if math.isfinite(error) else math.inf
    return worst


def check(folder: Path, log: Log, until: float) -> None:
    """Run the small kernels on arrays of the host, and compare with float64 there."""
    torch = module("torch")

    def work(case: KernelCase) -> None:
        inputs = random_arrays(case)
        outputs, again = run_twice(folder, case, inputs)
        error, bound = judge_kernel(case, [torch.from_numpy(each) for each in inputs], outputs)
        log.put(case.name, engine="tvm-fusion", error=error, bound=bound, repeatable=again)
        if not error <= 1:
            log.put(case.name, engine="tvm-fusion", problem=f"wrong: {error:.3g} times the bound")

    log.each(packed(folder, small_cases()), until, work)


def launch(folder: Path, log: Log, names: Sequence[str]) -> None:
    """Run cases on arrays of the host, without PyTorch: for ncu and compute-sanitizer."""
    for case in packed(folder, [*small_cases(), *timed_cases()]):
        if case.name in names:
            try:
                outputs, again = run_twice(folder, case, random_arrays(case))
                finite = all(bool(np.isfinite(each.astype("float32")).all()) for each in outputs)
                log.put(case.name, engine="tvm-fusion", finite=finite, repeatable=again)
            except TVMFusionError as error:
                log.put(case.name, engine="tvm-fusion", problem=reason(error))


def random_arrays(case: KernelCase) -> list[np.ndarray]:
    """Standard normal numbers, or any bytes, other ones at every run."""
    generator = np.random.default_rng()
    return [
        generator.integers(0, 256, shape, "uint8")
        if dtype == "uint8"
        else generator.standard_normal(shape, dtype="float32").astype(dtype)
        for dtype, shape in case.inputs.values()
    ]


def run_twice(
    folder: Path, case: KernelCase, inputs: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], bool]:
    """Outputs of a packed case, and whether a second call gives the same bits."""
    model = tvm_fusion.load(folder / case.file)
    calls = [model(*inputs) for _ in range(2)]
    first, second = ([each] if isinstance(each, np.ndarray) else [*each] for each in calls)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
    return first, same


def device(log: Log) -> None:
    """Facts about the machine, its bandwidth, and its fastest product of float16."""
    torch, clock = module("torch"), CudaClock()
    about = machine.describe()
    log.put("device", **{name: about[name] for name in about if name != "host"})
    limits = machine.measure_limits(clock)
    log.put("device", copy=limits.copy, read=limits.read)
    matrix = torch.randn(_PEAK_EXTENT, _PEAK_EXTENT, device=clock.device).half()
    for _ in range(3):
        matrix @ matrix
    seconds = min(clock.seconds(lambda: matrix @ matrix) for _ in range(10))
    log.put("device", peak_float16=2 * _PEAK_EXTENT**3 / seconds)


def race_kernels(folder: Path, log: Log, group: str, until: float, clock: Clock) -> None:
    """Race the cases of a group: first with the peers that need no compilation, then with all."""
    loaded = Loaded(folder)

    def work(case: KernelCase) -> None:
        turns = rotation(case.input_bytes, clock.cache_bytes, clock.memory_bytes)
        sets = [random_tensors(case, number, clock.device) for number in range(turns.sets)]
        trial = Trial(case, sets, lambda outputs: judge_kernel(case, sets[0], outputs), turns)
        peers = peers_of(case)
        for is_later in (False, True):
            engines = [loaded, *(one for one in peers if (one.title in LATER) == is_later)]
            if is_later and time.monotonic() > until:
                return
            clear(engines, clock)
            put_verdicts(log, case, race(trial, engines, clock, PLAN), case.bytes, case.flops)

    cases = [case for case in timed_cases() if case.group == group]
    log.each(packed(folder, cases), until, work)


def random_tensors(case: KernelCase, seed: int, device: str) -> list[Any]:
    """One set of inputs of a case, standard normal numbers or any bytes."""
    torch = module("torch")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    where = {"generator": generator, "device": device}
    return [
        torch.randint(256, shape, dtype=torch.uint8, **where)
        if dtype == "uint8"
        else torch.randn(shape, **where).to(getattr(torch, dtype))
        for dtype, shape in case.inputs.values()
    ]


def race_models(folder: Path, log: Log, until: float, clock: Clock) -> None:
    """Time whole models, and PyTorch's of the same size."""
    torch = module("torch")

    def work(case: PackedModel) -> None:
        inputs, expected = case.arrays(folder)
        references = [torch.from_numpy(array).to(clock.device) for array in expected]
        first = [torch.from_numpy(array).to(clock.device) for array in inputs]
        sets = [[_turned(tensor, turn) for tensor in first] for turn in range(MODEL_SETS)]
        turns = Rotation(MODEL_SETS, MODEL_SETS, flush=True)

        def judge(outputs: Sequence[Any]) -> tuple[float, float]:
            return largest_error(outputs, references) / case.tolerance, case.tolerance

        ours = Trial(case, sets, judge, turns, graphs=True)
        theirs = Trial(case, sets, lambda outputs: (0.0, math.nan), turns, graphs=True)
        engines: list[tuple[Trial, Engine]] = [(ours, Loaded(folder))]
        engines += [(theirs, TorchModel("PyTorch")), (theirs, TorchModel("torch.compile", True))]
        for trial, engine in engines:
            if time.monotonic() < until:
                clear([engine], clock)
                put_verdicts(log, case, race(trial, [engine], clock, PLAN))

    log.each(packed(folder, MODELS), until, work)


def _turned(tensor: Any, by: int) -> Any:
    """Other data of the same kind; indices stay in their columns, which may differ in range."""
    return tensor.roll(by, -1 if tensor.is_floating_point() else 0)


def put_verdicts(
    log: Log,
    case: KernelCase | PackedModel,
    verdicts: Sequence[Verdict],
    moved: int = 0,
    flops: float = 0.0,
) -> None:
    """A line for each engine, with the ratio of its time to ours in the same race."""
    ours = next((one.device for one in verdicts if one.engine == Loaded.title), None)
    for verdict in verdicts:
        times: dict[str, Any] = {}
        if verdict.device is not None:
            found = verdict.device
            times = {"us": found.median * 1e6, "p20": found.p20 * 1e6, "p80": found.p80 * 1e6}
            times["ratio"] = found.median / ours.median if ours else math.nan
        if verdict.stream is not None:
            times["stream_us"] = verdict.stream.median * 1e6
        if verdict.host is not None:
            times["host_us"] = verdict.host.median * 1e6
        checked = {"error": verdict.error, "bound": verdict.bound}
        told = {
            name: value
            for name, value in vars(verdict).items()
            if name in _TOLD and value not in _UNKNOWN
        }
        log.put(case.name, bytes=moved, flops=flops, **checked, **times, **told)


_TOLD = ("engine", "how", "problem", "repeatable", "details")
_UNKNOWN: tuple[Any, ...] = ("", None, {})


def main(arguments: Sequence[str]) -> int:
    """Run a stage; 2 if there is no GPU that PyTorch sees."""
    cases, path, stage, seconds, *names = arguments
    until = time.monotonic() + float(seconds)
    folder, log = Path(cases), Log(Path(path), stage)
    if stage == "check":
        check(folder, log, until)
        return 0
    if stage not in ("device", GROUP, *GROUPS):
        launch(folder, log, names)
        return 0
    missing = machine.find_gpu()
    if missing:
        log.put(stage, engine="PyTorch", problem=missing)
        return NO_GPU
    if stage == "device":
        device(log)
    elif stage == GROUP:
        race_models(folder, log, until, CudaClock())
    else:
        race_kernels(folder, log, stage, until, CudaClock())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
