# SPDX-License-Identifier: Apache-2.0
"""Time of single kernels, as they run inside a model.

Before each timed call all threads write the kernel's data, each its share, as the layer before
does; weights come from memory: copies of them take turns that together exceed the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.script import tirx as T
from tvm.target import Target

from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Machine
from schedules.cpu.core.machine import CPUInfo
from schedules.tuning.records import Records

from ...bench.machine_limits import ExchangeProbe, PeakProbe
from ...compiler import pipeline
from ...machine.host import may_use_tiles
from ...runtime.host_arrays import aligned_empty
from ...runtime.thread_pool import Crew
from ...tuning.measure import planes, writer
from ..model.compiled import describe_cpu_kernels
from .cases import Case
from .library_cases import LibraryCase, eager_overhead, time_library

RUNS = 25
SECONDS = 0.3
"""Most time of the calls of one kernel."""
COPIES = 2.0
"""Bytes of all copies of the weights, in last-level caches."""
MOST_COPIES = 64
EXCHANGES = 9
"""Measurements of what cores pass to each other, of which the median counts."""
_PAUSE = 0.25  # seconds between two of them, since a virtual machine's cores change their places
_CHAIN = 33

Timed = tuple[KernelCall, float]


class KernelTimer:
    """Compiles the kernels of cases, and times them on this machine."""

    def __init__(
        self,
        target: Target,  # This CPU.
        machine: Machine,  # Its limits, with which kernels are described.
    ) -> None:
        may_use_tiles()
        self._target, self._machine = target, machine
        self._crew = Crew(int(machine["multiprocessors"]))
        self._empty: float | None = None
        threads = self._crew.threads
        self._probe = PeakProbe(CPUInfo.from_target(target), target, threads)

    def peak(self) -> float:
        """Floating-point operations a second at this moment."""
        return self._crew.run(self._probe.flops, 0.0, 4)

    def exchange(self) -> float | None:
        """Typical seconds of a byte that another core has just written; None for a single thread.

        Takes some seconds.
        """
        if self._crew.threads == 1:
            return None
        probe = ExchangeProbe(self._target, self._crew.threads)
        found = [probe.seconds()]
        while len(found) < EXCHANGES:
            time.sleep(_PAUSE)
            found.append(probe.seconds())
        return statistics.median(found)

    def measure(self, case: Case | LibraryCase) -> list[Timed]:
        """Time all kernels of a case: each call as its model sees it, and its typical seconds."""
        if isinstance(case, LibraryCase):
            cold = int(COPIES * self._machine["capacity.L3"])
            return [(case.call, time_library(case, self._crew.threads, cold))]
        options = pipeline.Options(records=Records())
        plan = pipeline.phases(self._target, options)
        schedule = plan.pop("schedule")
        mod = pipeline.run_phases(case.build(), self._target, plan)
        cold = int(COPIES * self._machine["capacity.L3"])
        described = describe_cpu_kernels(
            mod, schedule, self._target, self._machine, options.records, cold
        )
        scheduled = pipeline.run_phases(mod, self._target, {"schedule": schedule})
        constants = _constants(mod)
        if self._empty is None:
            self._empty = self._crew.run(self._time_empty)
        calls = list({op.name: op.kernels[0].call for op in described}.values())
        library = self._compile({call.name: scheduled[call.name] for call in calls}, constants)
        found = []
        for call in calls:
            func, fixed = scheduled[call.name], constants[call.name]
            seconds = self._crew.run(self._time, library, call.name, func, fixed, cold)
            found.append((call, max(seconds - self._empty, 1e-8)))
        return found

    def _compile(
        self, functions: Mapping[str, tirx.PrimFunc], constants: Mapping[str, Sequence[bool]]
    ) -> Any:
        """A library of kernels, and of functions that write their data."""
        named = {}
        for name, func in functions.items():
            named[name] = func.with_attr("global_symbol", name)
            for position in _written(func, constants[name]):
                param = func.params[position]
                shape = planes([int(extent) for extent in param.shape])
                (write,) = writer(shape, str(param.dtype), self._crew.threads).functions.values()
                written = f"{name}_write{position}"
                named[written] = write.with_attr("global_symbol", written)
        with self._target:
            return tvm.compile(tvm.IRModule(named), self._target)

    def _time(
        self, library: Any, name: str, func: tirx.PrimFunc, fixed: Sequence[bool], cold: int
    ) -> float:
        arrays = [_array(param) for param in func.params]
        pairs = list(zip(arrays, fixed, strict=True))
        weights = sum(array.nbytes for array, is_fixed in pairs if is_fixed)
        copies = max(1, min(MOST_COPIES, cold // weights)) if weights else 1
        first = [tvm.runtime.from_dlpack(array) for array in arrays]
        turns = [first]
        for _ in range(copies - 1):
            copied = (tvm.runtime.tensor(array) if is_fixed else None for array, is_fixed in pairs)
            turns.append([one or same for one, same in zip(copied, first, strict=True)])
        before = []
        for position in _written(func, fixed):
            shaped = arrays[position].reshape(planes(arrays[position].shape))
            write = library[f"{name}_write{position}"]
            before.append((write, tvm.runtime.from_dlpack(shaped)))
        return _typical(library[name], turns, before)

    def _time_empty(self) -> float:
        """Seconds of calling a kernel that does nothing."""
        kernel = tvm.compile(_touch(1), self._target)["main"]
        return _typical(kernel, [[tvm.runtime.tensor(np.zeros(1, "float32"))]], [])

    def eager(self) -> float:
        """Seconds that PyTorch's modules add to an operator."""
        return eager_overhead(self._crew.threads)

    def overheads(self) -> dict[str, float]:
        """Seconds of waking the threads, of a kernel's call in a model, and of a model's call."""
        threads = self._crew.threads
        kernel = tvm.compile(_touch(threads), self._target)["main"]
        data = [[tvm.runtime.tensor(np.zeros(threads, "float32"))]]
        woken = self._crew.run(_typical, kernel, data, [])
        self._empty = self._crew.run(self._time_empty)
        one, many = (self._crew.run(self._time_chain, length) for length in (1, _CHAIN))
        call = max((many - one) / (_CHAIN - 1), 1e-8)
        return {
            "fork": max(woken - self._empty, 1e-8),
            "call": call,
            "run": max(one - call, 1e-8),
        }

    def _time_chain(self, length: int) -> float:
        """Seconds of a model of so many tiny kernels."""
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((1, 4), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                value: relax.Expr = x
                for _ in range(length):
                    value = builder.emit(relax.op.nn.softmax(value, axis=-1))
                out = builder.emit_output(value)
            builder.emit_func_output(out)
        mod = pipeline.optimize(builder.get(), self._target)
        main = relax.VirtualMachine(pipeline.build(mod, self._target), tvm.cpu())["main"]
        return _typical(main, [[tvm.runtime.tensor(np.zeros((1, 4), "float32"))]], [], runs=300)


def _typical(
    kernel: Any, turns: Sequence[Sequence[Any]], before: Sequence[tuple[Any, Any]], runs: int = RUNS
) -> float:
    """Lower quartile of the seconds of calls: other work of the machine only lengthens them."""
    clock, times = time.perf_counter, []
    until = clock() + SECONDS
    for number, arguments in enumerate(cycle(turns)):
        for write, data in before:
            write(data)
        begin = clock()
        kernel(*arguments)
        end = clock()
        if number >= 3:
            times.append(end - begin)
        if len(times) >= runs or (len(times) >= 3 and end > until):
            return statistics.quantiles(times, n=4)[0]
    raise AssertionError("there is at least one turn")


def _touch(threads: int) -> tirx.PrimFunc:
    """A function in which each thread writes one element; no loop is parallel for one."""
    if threads == 1:

        @T.prim_func
        def once(data: T.Buffer((1,), "float32")):  # type: ignore[valid-type]
            data[0] = T.float32(1)

        return once

    @T.prim_func
    def touch(data: T.Buffer((threads,), "float32")):  # type: ignore[valid-type]
        for share in T.parallel(threads):
            data[share] = T.float32(1)

    return touch


def _written(func: tirx.PrimFunc, fixed: Sequence[bool]) -> list[int]:
    """Positions of the inputs that the layer before writes."""
    return [
        position
        for position, param in enumerate(func.params[:-1])
        if not fixed[position] and str(param.dtype) == "float32" and len(param.shape) > 1
    ]


def _constants(mod: tvm.IRModule) -> dict[str, list[bool]]:
    """Parameters that are constants, of each function that ``main`` calls."""
    constants = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.args:
                name = getattr(call.args[0], "name_hint", None)
                if name is not None:
                    fixed = [isinstance(each, GenericConst) for each in call.args[1].fields]
                    missing = len(mod[name].params) - len(fixed)
                    constants[name] = fixed + [False] * missing
    return constants


def _array(param: Any) -> np.ndarray:
    shape = tuple(int(extent) for extent in param.shape)
    dtype = np.dtype(str(param.dtype))
    array = aligned_empty(shape, dtype)
    if dtype.kind == "f":
        scale = max(1.0, prod(shape) / max(1, shape[-1])) ** -0.5
        array[...] = np.random.default_rng(0).standard_normal(shape) * scale
    else:
        array[...] = 0
    return array
