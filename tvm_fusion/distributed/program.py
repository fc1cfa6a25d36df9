# SPDX-License-Identifier: Apache-2.0
"""Compilation of a function whose loops are distributed over ranks.

No MPI is needed: each rank runs one of few kernels, since ranks with parts of the same extents
share them (:mod:`schedules.distribute.localize`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from schedules import attributes
from schedules.cost.machine import estimate_note
from schedules.cpu import RULES
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.machine_costs import measured_family
from schedules.distribute.cost import Network, Processor, overlap_gain_of
from schedules.distribute.distribute import Distribution, distribute
from schedules.distribute.exchange import Region, difference, region_size
from schedules.distribute.localize import localize, scalar_arguments
from schedules.distribute.split import MeasuredSplit
from schedules.distribute.time_skewing import (
    Skew,
    row_ends,
    seconds_of_steps,
    skew_of,
    skewed_steps,
)
from schedules.distribute.transfer import Transfer, check_transfers
from schedules.distribute.waits import with_waits
from schedules.schedule_rule import schedule_function

from ..codegen.linker import SharedLinker
from ..compiler.launches import launches
from ..compiler.targets import is_gpu, resolve
from ..errors import DistributedError, InvalidInputError, OpError, TargetError
from ..prediction.machines import NATIVE, calibrated, find_machine, native_name
from .accelerator.device import Device, ResolvedDevice, open_driver, resolve_devices
from .accelerator.device_run import DeviceRun
from .accelerator.measure_split import measured_split
from .accelerator.shares import Shares, Split, plan_shares
from .explain import describe, kernel_seconds
from .local_program import COMBINE, KernelPiece, LocalProgram, Ranks, check_ranks
from .network_figures import check_figures
from .world.local_world import LocalWorld, run_ranks

Schedule = Callable[[s_tir.Schedule], None]
Overlap = Literal["auto", "always", "never"]

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # steps between two exchanges that are compared
_CLOCK = 3.5e9  # Hz, where no measured figures are given


@dataclass(frozen=True)
class Program:
    """A compiled function whose loops are distributed over ranks."""

    distribution: Distribution  # Parts and messages of all ranks.
    pieces: tuple[tuple[KernelPiece, ...], ...]  # The kernel calls of each rank, in order.
    kernels: Mapping[str, tirx.PrimFunc]  # The scheduled kernels.
    library: Any  # Their code, if there are any.
    target: Target  # What they are compiled for.
    network: Network
    processor: Processor
    """``network`` and ``processor``: figures of the predictions."""
    overlap: Overlap  # Whether interiors are computed while messages travel, as it was asked for.
    shares: Shares  # Rows of each rank's CPU and devices.
    threads: int  # Threads of each rank's kernels.

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.distribution.ranks

    def explain(self) -> str:
        """Return a table of rows, halos, messages, kernels and predicted times of each rank."""
        return describe(
            self.distribution,
            self.pieces,
            self.network,
            self.processor,
            self.overlap,
            self.shares,
        )

    def cpu_seconds(self, rank: int) -> float:
        """Predicted time of the kernels of a rank's CPU, of a step."""
        plan = self.distribution
        return kernel_seconds(plan, rank, self.pieces[rank], self.processor) / plan.deep

    def on(
        self,
        # The ranks: of MPI (``distributed.session()``), or of one process (:mod:`.local_world`).
        world: Ranks,
        # Whether MPI is given the memory of devices between steps (``repeat``), where a device
        # computes all rows of its rank; by default halos pass through pinned memory of the host.
        gpu_aware: bool = False,
    ) -> LocalProgram:
        """Share of the program of one rank, with memory for its windows.

        Called by all ranks together.

        Raises ``InvalidInputError`` if there are more or fewer ranks than the program was compiled
        for, or if with ``gpu_aware`` some rows of a rank are not on one device, there are
        transfers, or ranks exchange an input that no step computes. Raises ``TargetError`` if the
        rank has not the devices that the program names. Raises ``DistributedError`` if ranks have
        different programs, a device has not the memory, or MPI takes no memory of devices.
        """
        check_ranks(world, self.ranks, "program")
        if gpu_aware:
            self._check_gpu_aware(world)
        shares = self.shares.devices[world.rank]
        drivers = {  # one that is not there is refused, though it may have no rows
            device.name: open_driver(device.kind, device.index)
            for device in self.shares.named[world.rank]
        }
        world.agree(f"{self._identity()} {gpu_aware}", "programs")
        pieces = self.pieces[world.rank]
        names = {piece.kernel for piece in pieces} | ({COMBINE} & self.kernels.keys())
        kernels = {name: self.library[name] for name in names}
        local = LocalProgram(self.distribution, world, pieces, kernels, self.library)
        local.devices = [
            DeviceRun(share, drivers[share.device.name], local.buffers) for share in shares
        ]
        if gpu_aware:
            local.gpu_aware = True
            for device in local.devices:
                device.exchanged(local.buffers)
        return local

    def alone(self) -> LocalProgram:
        """The program of one rank, in this process, without MPI.

        Raises ``InvalidInputError`` if the program was compiled for several ranks. Raises
        ``TargetError`` if this machine has not the devices that the program names.
        """

        def work(world: LocalWorld) -> LocalProgram:
            world.threads = self.threads
            return self.on(world)

        return run_ranks(1, work)[0]

    def _check_gpu_aware(self, world: Ranks) -> None:
        """Refuse what is not all on one device a rank, and an MPI without GPUs."""
        if self.distribution.before:
            raise InvalidInputError(
                "gpu_aware is for the inferred exchange, and the program has transfers of inputs; "
                "leave either out"
            )
        for part, cpu, devices in zip(
            self.distribution.parts, self.shares.cpu, self.shares.devices, strict=True
        ):
            alone = len(devices) == 1 and region_size(cpu) == 0
            if not part.is_empty and not (alone and devices[0].sequence.kept):
                raise InvalidInputError(
                    f"gpu_aware: the rows of rank {part.rank} do not stay on one device; compile "
                    "the program with repeat=, one device a rank without chunks= and with "
                    "in_place=False, and a split that gives it all rows"
                )
        moved = {message.buffer for message in self.distribution.exchange.messages}
        if constant := sorted(moved - self.distribution.repeat.keys()):
            raise InvalidInputError(
                f"gpu_aware: ranks exchange {', '.join(constant)}, which no step computes and the "
                "host keeps; leave gpu_aware out"
            )
        if not world.takes_device_memory:
            raise DistributedError(
                "this MPI takes no memory of GPUs; use one that is built with CUDA, or leave "
                "gpu_aware out"
            )

    def _identity(self) -> str:
        """Text of what must be the same on all ranks."""
        plan = self.distribution
        func = plan.nest.func.script()
        shares = [share.identity() for shares in self.shares.devices for share in shares]
        return (
            f"{plan.partition} {plan.transfers} {plan.exchange} {self.pieces} {plan.repeat} "
            f"{self.target} {shares} {func}"
        )


def compile(
    source: tirx.PrimFunc | s_tir.Schedule,
    ranks: int | None = None,
    target: str | Mapping[str, Any] | Target = "native",
    *,
    loop: str | int | LoopRV | Sequence[str | int | LoopRV] = 0,
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    grid: Sequence[int] | None = None,
    owned: Mapping[str, Sequence[int]] | None = None,
    transfers: Sequence[Transfer] = (),
    infer: bool = True,
    schedule: Schedule | Mapping[int, Schedule] | None = None,
    overlap: Overlap = "auto",
    repeat: str | Mapping[str, str] | None = None,
    exchange_every: int | Literal["auto"] = 1,
    threads: int = 1,
    network: Network | None = None,
    processor: Processor | None = None,
    devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]] = (),
    split: Split = "auto",
) -> Program:
    """Compile a function for a number of ranks, each of which computes a part of the output.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function, or a schedule of which it is the ``main``, before its loops are split.
    ranks : int, optional
        Number of ranks; not needed with ``sizes``, and by default 1 with ``devices``.
    target : str, mapping or tvm.target.Target
        The CPU of every rank, as in :func:`tvm_fusion.compile`.
    loop, sizes, grid, owned, transfers, infer
        The distributed loops, by default the outermost, and their parts: see
        :func:`schedules.distribute.distribute.distribute`.
    schedule : callable, or mapping from ranks to callables, optional
        Schedules the function of a part, in place; ranks without one, and by default all, have the
        rules of this package.
    overlap : str
        Whether a rank computes its interior while messages travel: ``"always"``, ``"never"``, or
        ``"auto"``, where it is predicted to gain from the figures of ``network``: latency,
        bandwidth, and how far messages travel while cores compute.
    repeat : str or Mapping[str, str], optional
        The input that takes the output in the next step, or several with an output each, for
        :meth:`.LocalProgram.__call__` with several steps; it has the output's shape and type, and
        ranks own the same of both.
    exchange_every : int or "auto"
        Steps between two exchanges, each of which brings halos for that many; ``"auto"`` takes the
        number for which a step is predicted to be fastest on CPUs that compute all rows. The steps
        pass over the memory together where they can (:mod:`schedules.distribute.time_skewing`).
        Devices with ``chunks`` or ``in_place`` exchange at every step, others copy halos as often
        as ranks do.
    threads : int
        Threads of each rank's kernels.
    network, processor : Network, Processor, optional
        Figures for predictions, by default estimates; of a CPU that ``tvm-fusion calibrate`` has
        measured, its figures.
    devices : Sequence or Mapping
        Devices that compute rows of every rank beside its CPU, or from ranks to theirs: names such
        as ``"cuda"``, ``"cuda:1"`` or ``"opencl"``, or :class:`.accelerator.device.Device`. Their
        rows are copied from the rank's memory and back, in chunks; with ``repeat`` they stay on the
        device from step to step instead, unless its chunks are given, and what others read and
        compute is copied. Messages of other ranks pass through the rank's memory, too.
    split : str, sequence, mapping or MeasuredSplit
        Iterations of the first distributed loop that the CPU and each device compute, in this
        order, of every rank or from ranks to theirs. ``"model"`` takes those that end first by the
        figures of ``processor`` and the devices, what
        :func:`measure_split` returns by measured times. ``"auto"``
        measures one rank whose devices are here, if no such figures are given, and else is
        ``"model"``.

    Returns
    -------
    Program
        The program.

    Raises
    ------
    OpError
        If the function cannot be distributed so, or a split does not fit.
    InvalidInputError
        If devices are none, or given for a rank that is none, threads are no positive number, or
        ``network`` or ``processor`` is no :class:`.Network` or :class:`.Processor`.
    TargetError
        If the target is unknown, or no CPU, or one of a device is no GPU.
    """
    if overlap not in ("auto", "always", "never"):
        raise OpError(f"overlap is {overlap!r}; expected 'auto', 'always' or 'never'")
    check_figures(network, processor, threads)
    resolved = resolve(target, threads)
    if is_gpu(resolved):
        raise TargetError(
            "the target of ranks is their CPU; name GPUs as devices=, and a CPU as the target"
        )
    check_transfers(transfers)
    if devices:
        ranks = 1 if ranks is None and sizes is None else ranks
        _check_devices(overlap, transfers)
        overlap = "never"
    planned = functools.partial(
        distribute,
        source,
        loop,
        ranks,
        sizes=sizes,
        grid=grid,
        owned=owned,
        transfers=transfers,
        infer=infer,
        repeat=repeat,
    )
    plans = _plans(planned, exchange_every, bool(repeat), devices)
    known = processor or default_processor(resolved)
    placed, known = _placed(devices, split, plans[0].ranks, resolved, known)
    skewing = _Skewing(CPUInfo.from_target(resolved), threads, not schedule)
    figures = _Figures(network or Network(), known, skewing)
    plan = figures.fastest(plans, overlap) if len(plans) > 1 else plans[0]
    if isinstance(split, str) and split == "auto" and plan.ranks == 1 and processor is None:
        options = {"loop": loop, "owned": owned, "infer": infer, "schedule": schedule}
        options |= {"repeat": repeat, "threads": threads, "target": target}
        options |= {"exchange_every": plan.deep}
        split = _measured(source, devices, placed[0], options)
    skews = [figures.skew(plan, part.rank, overlap, part.rows) for part in plan.parts]
    together = [skew.steps if skew is not None else 1 for skew in skews]
    shares = plan_shares(plan, placed, split, figures.processor, together)
    kernels = _Kernels(plan, resolved, schedule)
    pieces = tuple(
        kernels.pieces(
            rank,
            figures.overlaps(plan, rank, overlap),
            shares.cpu[rank],
            figures.skew(plan, rank, overlap, shares.cpu[rank]),
        )
        for rank in range(plan.ranks)
    )
    library = kernels.compiled()
    return Program(
        plan,
        pieces,
        kernels.functions,
        library,
        resolved,
        figures.network,
        figures.processor,
        overlap,
        shares,
        threads,
    )


def _plans(
    planned: Callable[..., Distribution],
    exchange_every: int | Literal["auto"],
    is_repeated: bool,
    devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]],
) -> list[Distribution]:
    """The plan with an exchange every so many steps, or those of which the model chooses one."""
    if exchange_every == "auto":
        depths = _DEPTHS if is_repeated and not _each_step(devices) else (1,)
    else:
        depths = (exchange_every,)
    plans = [planned(exchange_every=steps) for steps in depths]
    if devices:
        _check_outputs(plans[0])
        if exchange_every != "auto":
            _check_deep(plans[0], devices)
        elif plans[0].nest.may_trap:
            return plans[:1]
    return plans


def _placed(
    devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]],
    split: Split,
    ranks: int,
    target: Target,
    processor: Processor,
) -> tuple[tuple[tuple[ResolvedDevice, ...], ...], Processor]:
    """The devices of each rank, and its processor, beside all that computes in their memory."""
    placed = resolve_devices(devices, ranks, target, processor)
    busy = ranks * max(_sides(of_rank, split) for of_rank in placed)
    beside = tuple(tuple(device.beside(busy) for device in of_rank) for of_rank in placed)
    return beside, processor.beside(busy)


def _measured(
    source: tirx.PrimFunc | s_tir.Schedule,
    devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]],
    placed: Sequence[ResolvedDevice],
    options: Mapping[str, Any],
) -> Split:
    """Measured times of one rank whose devices are here, else that the model is to decide."""
    listed = devices.get(0, ()) if isinstance(devices, Mapping) else devices
    if not listed or any(isinstance(each, Device) and each.figures for each in listed):
        return "model"
    with suppress(TargetError, DistributedError, InvalidInputError):
        for device in placed:
            open_driver(device.kind, device.index)
        return measure_split(source, listed, **options)
    return "model"  # compiled elsewhere, or too large or too few rows for a measurement


def measure_split(
    source: tirx.PrimFunc | s_tir.Schedule, devices: Sequence[str | Device], **options: Any
) -> MeasuredSplit:
    """Measure the CPU and each device of this machine by themselves, then together.

    By themselves on half of the rows and all; together with as many rows as they compute in the
    same time then, and with more and fewer for the devices, since one may slow down the other.
    Where together they take longer than the faster one alone, the split gives it all rows.

    Parameters
    ----------
    source : tirx.PrimFunc or s_tir.Schedule
        The function.
    devices : Sequence[str or Device]
        Devices as in :func:`compile`.
    **options
        Others of that function, such as ``target``, ``loop``, ``schedule`` and ``threads``.

    Returns
    -------
    MeasuredSplit
        For ``compile(..., split=...)``, also with ranks, whose parts are shorter.

    Raises
    ------
    InvalidInputError
        If the function has too few rows to measure, there are no devices, or options are for
        several ranks or a given split.
    TargetError
        If a device is not there.
    """
    if not devices:
        raise InvalidInputError("no devices are given to be measured beside the CPU")
    if given := sorted({"ranks", "sizes", "split", "devices"} & set(options)):
        raise InvalidInputError(f"{given[0]}= is not for a measurement, which is of one rank")
    extent = distribute(source, options.get("loop", 0), 1).nest.extents[0]
    if extent < 2:
        raise InvalidInputError(f"a loop of {extent} rows cannot be measured; expected at least 2")

    def program(rows: Sequence[int]) -> LocalProgram:
        return compile(source, 1, devices=devices, split=rows, **options).alone()

    return measured_split(extent, len(devices), program)


def _check_devices(overlap: Overlap, transfers: Sequence[Transfer]) -> None:
    """Refuse what devices cannot do."""
    if overlap == "always":
        raise OpError(
            "overlap='always' is for ranks without devices: those read their halos after the "
            "exchange; leave overlap out"
        )
    if any(transfer.before for transfer in transfers):
        raise OpError("before= of a transfer is for ranks without devices; leave it out")


def _check_deep(
    plan: Distribution, devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]]
) -> None:
    """Refuse steps without an exchange between them that devices cannot compute."""
    if plan.deep == 1:
        return
    if _each_step(devices):
        raise OpError(
            f"exchange_every is {plan.deep}, and a device with chunks= or in_place=True shares its "
            "rows at every step; leave either out"
        )
    if plan.nest.may_trap:
        raise OpError(
            f"exchange_every is {plan.deep}, and the function divides or indexes by what it reads: "
            "devices compute rows that nobody has filled; leave either exchange_every= or devices= "
            "out"
        )


def _each_step(devices: Sequence[str | Device] | Mapping[int, Sequence[str | Device]]) -> bool:
    """True if a device is to copy rows in chunks, or to compute in the host's memory."""
    lists = devices.values() if isinstance(devices, Mapping) else [devices]
    given = [device for each in lists if isinstance(each, list | tuple) for device in each]
    return any(isinstance(one, Device) and bool(one.chunks or one.in_place) for one in given)


def _sides(devices: Sequence[ResolvedDevice], split: Split) -> int:
    """Processors that compute at once in a rank's memory: its CPU, and devices of its cores."""
    sides = [True, *(device.cpu is not None for device in devices)]
    if isinstance(split, list | tuple):
        sides = [side and rows != 0 for side, rows in zip(sides, split, strict=False)]
    return max(1, sum(sides))


def _check_outputs(plan: Distribution) -> None:
    """Refuse functions that devices cannot compute."""
    if plan.reduction is not None:
        raise OpError("devices compute parts of outputs, and not of a reduction; leave them out")
    for stage in plan.nest.stages:
        hidden = [each.name for each in stage.together if each not in plan.nest.outputs]
        if 0 < len(hidden) < len(stage.together):
            raise OpError(
                f"block {stage.name!r} computes {hidden[0]!r} beside an output, for which devices "
                "have no memory; make it an output, too, or leave out devices="
            )


def default_processor(target: Target) -> Processor:
    """Figures of this CPU as ``tvm-fusion calibrate`` has measured them, else estimates."""
    cpu = CPUInfo.from_target(target)
    if cpu.name != native_name() or not calibrated():
        return estimated_processor(target)
    machine = find_machine(NATIVE, cpu.num_cores)
    return Processor(machine.peak_flops("float32"), machine["bandwidth.memory"])


def estimated_processor(target: Target) -> Processor:
    """Figures of a CPU that has not been measured, from its cost tables or the most similar ones.

    The latter are told by its ``note``.
    """
    cpu = CPUInfo.from_target(target)
    known = measured_family(cpu.family, cpu.vector_bits)
    lanes = cpu.lanes("float32")
    return Processor(
        2 * lanes * cpu.fma_per_cycle * cpu.num_cores * _CLOCK,
        cpu.costs.bytes_per_cycle[-1] * min(cpu.num_cores, cpu.costs.memory_cores) * _CLOCK,
        cpu.costs.weight_bytes_per_cycle * min(cpu.num_cores, cpu.costs.weight_cores) * _CLOCK,
        note="" if known == cpu.family else estimate_note(cpu.family, known),
    )


@dataclass(frozen=True)
class _Skewing:
    """Whether the steps between two exchanges pass over the memory together."""

    cpu: CPUInfo
    threads: int
    is_wanted: bool

    def of(self, plan: Distribution, rank: int, rows: Region) -> Skew | None:
        """Blocks in which the steps of some rows of a rank pass over the memory, if they do."""
        if not self.is_wanted:
            return None
        return skew_of(plan, rank, rows, self.cpu.l2_bytes, self.threads)


@dataclass(frozen=True)
class _Figures:
    """Figures that the predictions are made of."""

    network: Network
    processor: Processor
    skewing: _Skewing

    def skew(self, plan: Distribution, rank: int, overlap: Overlap, rows: Region) -> Skew | None:
        """Blocks in which a rank's steps pass over the memory together; None if they overlap."""
        return None if self.overlaps(plan, rank, overlap) else self.skewing.of(plan, rank, rows)

    def fastest(self, plans: Sequence[Distribution], overlap: Overlap) -> Distribution:
        """The first of those for which a step is predicted to be fastest."""
        seconds = [self.step_seconds(plan, overlap) for plan in plans]
        least = min(seconds) * (1 + 1e-9)  # times of equal ones are rounded differently
        return next(plan for plan, one in zip(plans, seconds, strict=True) if one <= least)

    def step_seconds(self, plan: Distribution, overlap: Overlap) -> float:
        """Predicted time of a step on the slowest rank, with its share of an exchange."""
        seconds = []
        for part in plan.parts:
            is_skewed = self.skew(plan, part.rank, overlap, part.rows) is not None
            compute = seconds_of_steps(plan, part.rank, part.rows, self.processor, is_skewed)
            exchange = self.network.seconds(plan.exchange, part.rank, plan.itemsizes)
            if self.overlaps(plan, part.rank, overlap):
                exchange -= overlap_gain_of(plan, part.rank, self.network, self.processor) or 0.0
            seconds.append((compute + exchange) / len(part.steps))
        return max(seconds)

    def overlaps(self, plan: Distribution, rank: int, wish: Overlap) -> bool:
        """True if a rank computes its interior while messages travel."""
        if wish == "never" or (wish == "auto" and not self.network.progress):
            return False
        gain = overlap_gain_of(plan, rank, self.network, self.processor)
        return gain is not None and (wish == "always" or gain > self._skew_gain(plan, rank))

    def _skew_gain(self, plan: Distribution, rank: int) -> float:
        """Predicted seconds that a rank saves if its steps pass over the memory together."""
        rows = plan.parts[rank].rows
        if self.skewing.of(plan, rank, rows) is None:
            return 0.0
        apart, together = (
            seconds_of_steps(plan, rank, rows, self.processor, skewed) for skewed in (False, True)
        )
        return max(0.0, apart - together)


class _Kernels:
    """The kernels of a distribution; parts of one shape and schedule share one."""

    def __init__(
        self, plan: Distribution, target: Target, schedule: Schedule | Mapping[int, Schedule] | None
    ) -> None:
        self.plan = plan
        self.target = target
        self.functions: dict[str, tirx.PrimFunc] = {}
        self._names: dict[Hashable, str] = {}
        self._schedules = schedule if isinstance(schedule, Mapping) else {}
        self._schedule = None if isinstance(schedule, Mapping) else schedule
        strange = sorted(set(self._schedules) - set(range(plan.ranks)))
        if strange:
            raise OpError(
                f"a schedule is given for rank {strange[0]}; ranks are 0 to {plan.ranks - 1}"
            )
        for each in (self._schedule, *self._schedules.values()):
            if not (each is None or callable(each)):
                raise OpError(f"a schedule is {each!r:.60}; expected a function of a schedule")

    def pieces(
        self, rank: int, overlap: bool, cpu: Region, skew: Skew | None
    ) -> tuple[KernelPiece, ...]:
        """The kernel calls of a rank's CPU: its interior first if that is overlapped."""
        part = self.plan.parts[rank]
        if region_size(cpu) == 0:
            return ()
        if skew is not None:
            return (self._all_steps(rank, cpu, skew),)
        steps = self.plan.steps_of(rank, cpu)
        waits = tuple(t for t in self.plan.before if t.before and rank in (t.source, t.dest))
        if not overlap:
            return tuple(
                self._piece(rank, rows, step, waits)
                for step, rows in enumerate(steps)
                if region_size(rows)
            )
        interior = self.plan.interior(rank)
        borders = difference(part.steps[0], interior)
        return (
            self._piece(rank, interior, 0, is_interior=True),
            *(self._piece(rank, rows, 0, () if n else waits) for n, rows in enumerate(borders)),
            *(
                self._piece(rank, rows, step)
                for step, rows in enumerate(part.steps)
                if step and region_size(rows)
            ),
        )

    def compiled(self) -> Any:
        """The code of all kernels, and of the one that combines the parts of a selection."""
        reduction = self.plan.reduction
        if reduction is not None and reduction.combine is not None:
            combine = schedule_function(COMBINE, reduction.combine, self.target, RULES)
            self.functions[COMBINE] = combine.with_attr("global_symbol", COMBINE)
        with self.target:
            if not self.functions:
                return None
            module = tvm.IRModule(self.functions)
            linker = SharedLinker(str(self.target.attrs["mtriple"]))
            return tvm.compile(module, self.target).jit(fcompile=linker)

    def _piece(
        self,
        rank: int,
        rows: Region,
        step: int,
        waits: tuple[Transfer, ...] = (),
        is_interior: bool = False,
    ) -> KernelPiece:
        nest, windows = self.plan.nest_of(rank), self.plan.parts[rank].windows
        local = localize(nest, rows, windows)
        schedule = self._schedules.get(rank, self._schedule)
        reduced = tuple(int(axis.dom.extent) for stage in nest.stages for axis in stage.reduced)
        key = local.shape, reduced, schedule, waits
        if key not in self._names:
            name = self._names[key] = f"part_{len(self._names)}"
            func = self._scheduled(name, local.func, schedule)
            func = with_waits(func, waits) if waits else func
            self.functions[name] = func.with_attr("global_symbol", name)
        scalars = scalar_arguments(nest, rows, windows)
        return KernelPiece(rows, self._names[key], scalars, step, is_interior)

    def _all_steps(self, rank: int, rows: Region, skew: Skew) -> KernelPiece:
        """The kernel call of all steps between two exchanges."""
        nest, part = self.plan.nest_of(rank), self.plan.parts[rank]
        [(begin, _)] = rows
        local = [
            localize(nest, ((begin, begin + count),), part.windows) for count in (skew.block, 1)
        ]
        key = skew, *(step.shape for step in local)
        if key not in self._names:
            name = self._names[key] = f"steps_{len(self._names)}"
            target = Target({**self.target.export(), "num-cores": 1})  # each thread has its rows
            block, row = (
                schedule_function(name, step.func.with_attr(attributes.CACHED, True), target, RULES)
                for step in local
            )
            func = skewed_steps(block, row, self.plan.repeat, skew)
            self.functions[name] = func.with_attr("global_symbol", name)
        [_, *firsts] = scalar_arguments(nest, rows, part.windows)
        scalars = (*firsts, *row_ends(self.plan.steps_of(rank, rows)))
        return KernelPiece(rows, self._names[key], scalars, 0, steps=skew.steps)

    def _scheduled(
        self, name: str, func: tirx.PrimFunc, schedule: Schedule | None
    ) -> tirx.PrimFunc:
        if schedule is None:
            return schedule_function(name, func, self.target, RULES)
        own = s_tir.Schedule(func)
        schedule(own)
        scheduled = own.mod["main"]
        if launches(scheduled.body):
            raise OpError(
                f"the schedule of {name} binds loops to threads of a GPU, and this part is for a "
                "CPU; give it to a device: devices=[Device(..., schedule=...)]"
            )
        return scheduled.with_attr("tirx.is_scheduled", True)
