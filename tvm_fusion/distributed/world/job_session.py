# SPDX-License-Identifier: Apache-2.0
"""Session: all ranks of a job, from the start of MPI to the end or the failure of one of them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedules.cost.machine import Machine, load_machine, machine_from_json

from ...errors import InvalidInputError, TargetError, TVMFusionError
from ...machine.host import time_limit
from ...machine.numa import numa_nodes
from ...runtime.thread_pool import choose_threads
from ...version import __version__
from . import failure
from .communicator import World, load_mpi, require_mpi
from .numa_placement import NUMA, Numa, Placement, memory_bound, part, placements
from .packing import packing_of
from .parcel import name_ranks
from .shared_slots import NodeSlots, shared_file
from .watch import NodeRecord, record_bytes

TIMEOUT = 60.0
"""Seconds for which a rank waits for another."""


@contextmanager
def session(
    ranks: int | None = None,
    *,
    timeout: float = TIMEOUT,
    threads: int | None = None,
    numa: Numa | None = None,
    bind: bool = True,
    network: str | os.PathLike[str] | None = None,
) -> Iterator[World]:
    """Session of all ranks of this job, which ``mpiexec -n N`` started.

    A failure of one rank within it ends the job on all ranks: with one line on standard error that
    says which rank, in which exchange, with which others, and an exit code that is not 0. All ranks
    wait for each other at the end.

    Parameters
    ----------
    ranks : int | None
        The number of ranks that the program needs; None for any.
    timeout : float
        Seconds for which a rank waits for another before it ends the job.
    threads : int | None
        Threads of each rank's kernels; by default its share of the node's processors, or of the
        processor time that the job's control group may use.
    numa : str | None
        Spreads the ranks of a machine over its NUMA nodes, for example one a socket, and binds the
        memory of each to the ``"same"`` node as its processors, to the next (``"other"``) one, or
        leaves it ``"unbound"``. None leaves memory to the operating system.
    bind : bool
        Whether ranks that may use the same processors of a machine, of which there are enough, each
        run on a share of their own. Else the operating system moves them.
    network : str or PathLike, optional
        File that ``tvm-fusion calibrate --network`` wrote, read by the first rank: exchanges take
        the routes that it has measured to be fastest. By default constants choose them.

    Yields
    ------
    World
        The ranks.

    Raises
    ------
    DistributedError
        If MPI is not installed, the job has another number of ranks, the ranks are of different
        versions, a machine has one NUMA node alone where ``numa`` is given, or a rank does not
        answer in time. What all ranks find wrong is raised on the
        first one alone; the others end with code 1.
    InvalidInputError
        If ``network`` is no such file.
    """
    if not isinstance(timeout, Real) or not timeout > 0:
        raise InvalidInputError(f"timeout is {timeout!r}; expected a positive number of seconds")
    if numa not in (None, *NUMA):
        raise InvalidInputError(f"numa is {numa!r}; expected one of {', '.join(NUMA)}, or None")
    with _opened(timeout) as (world, siblings):
        try:
            with failure.guarded_exit(lambda code: _exited(world, code)):
                _check(world, ranks)
                _choose_packing(world, network)
                place = world.placement = _place(world, siblings, numa)
                with _processors(world, siblings, threads, place, bind), memory_bound(place):
                    yield world
                world.wait_for_all()
        except failure.DisagreementError:
            if world.rank == 0:
                raise
            raise SystemExit(1) from None
        except BaseException as error:
            if failure.describe(error) is not None:
                world.abort(error)
            world.wait_for_all()
            raise


@contextmanager
def _opened(timeout: float) -> Iterator[tuple[World, list[_Sibling]]]:
    """All ranks, and those of this node, under the eyes of a watch from before MPI starts."""
    require_mpi()
    watch = failure.Watch(timeout)
    mpi = load_mpi()
    comm = mpi.COMM_WORLD.Dup()
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    mine = _Sibling(int(comm.rank), os.getpid(), tuple(sorted(os.sched_getaffinity(0))))
    siblings = [_Sibling(*fields) for fields in node.allgather(tuple(mine))]
    record = _open_record(node, siblings, int(comm.size), watch)
    neighbours = {sibling.rank: slot for slot, sibling in enumerate(siblings)}
    slots = _open_slots(node, neighbours, int(comm.rank))
    world = World(mpi, comm, record, neighbours, timeout, slots)
    record.enter()
    try:
        yield world, siblings
    finally:
        record.leave()
        watch.end()
        world.free()
        node.Free()
        record.close()


class _Sibling(NamedTuple):
    """A rank of this node, its process, and the processors that it may use."""

    rank: int
    pid: int
    processors: tuple[int, ...]


def _open_record(
    node: Any, siblings: Sequence[_Sibling], size: int, watch: failure.Watch
) -> NodeRecord:
    """The record of this node, made by its first rank, whose watch watches over all of them."""
    path = ""
    if node.rank == 0:
        with tempfile.NamedTemporaryFile(prefix="tvm_fusion-", delete=False) as file:
            file.write(record_bytes(len(siblings)))
        path = file.name
    path = node.bcast(path)
    record = NodeRecord(path, int(node.rank))
    node.Barrier()
    if node.rank == 0:
        pids, ranks = [s.pid for s in siblings], [s.rank for s in siblings]
        watch.begin(path, pids, ranks, size)
        os.unlink(path)
    else:
        watch.end()
    return record


def _open_slots(node: Any, places: Mapping[int, int], rank: int) -> NodeSlots | None:
    """The slots of this node, in a file that its first rank makes; None without shared memory."""
    with shared_file(len(places) if node.rank == 0 else 0) as mine:
        path = node.bcast(mine)
        if not path:
            return None
        slots = None
        with contextlib.suppress(OSError):  # ranks of a machine in containers of their own
            slots = NodeSlots(path, places, rank)
        all_have_them = all(node.allgather(slots is not None))
    return slots if all_have_them else None


def _check(world: World, ranks: int | None) -> None:
    """Refuse another number of ranks, and ranks of different versions; on all ranks alike."""
    wanted = world.all_gather(np.array([world.size if ranks is None else ranks]))[:, 0]
    wrong = np.flatnonzero(wanted != world.size).tolist()
    if wrong:
        whose = "" if len(wrong) == world.size else f" of {name_ranks(wrong)}"
        needed = int(wanted[wrong[0]])
        raise failure.DisagreementError(
            f"the program{whose} is for {needed} ranks, and this job has {world.size}; start it by "
            f"mpiexec -n {needed}, the one of the MPI that mpi4py uses"
        )
    packages = ("apache-tvm", "apache-tvm-ffi", "numpy")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    world.agree(", ".join([f"tvm-fusion {__version__}", *versions]), "versions")


def _choose_packing(world: World, network: str | os.PathLike[str] | None) -> None:
    """Let parcels travel as the first rank's file tells, on all ranks alike."""
    text = ""
    if network is not None and world.rank == 0:
        machine = _network_machine(network)  # refused before it is sent
        text = json.dumps(machine.to_json())
    size = int(world.broadcast(np.array([len(text.encode())]))[0])
    if size:
        sent = np.frombuffer(text.encode() or bytes(size), np.uint8)
        data = json.loads(world.broadcast(sent).tobytes())
        world.packing = packing_of(machine_from_json(data))


def _network_machine(network: str | os.PathLike[str]) -> Machine:
    """Read a calibrated network; machines that have names have none.

    Raises ``InvalidInputError`` if there is no such file, or it is one of something else.
    """
    if not isinstance(network, str | os.PathLike):
        raise InvalidInputError(f"network is {network!r:.60}; expected the path of a file")
    path, expected = Path(network), "mpiexec -n 2 tvm-fusion calibrate --network writes one"
    if not os.path.isfile(path):  # noqa: PTH113  false where pathlib raises: a name too long
        raise InvalidInputError(f"no file {str(path)!r}; {expected}")
    try:
        machine = load_machine(path)
        packing_of(machine)
    except TVMFusionError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise InvalidInputError(f"{path} is no file of a network: {reason}; {expected}") from error
    return machine


def _place(world: World, siblings: Sequence[_Sibling], numa: Numa | None) -> Placement | None:
    """The place of this rank on its machine's NUMA nodes; refused on all ranks alike."""
    if numa is None:
        return None
    reason, place = "", None
    try:
        places = placements(numa_nodes(), [sibling.processors for sibling in siblings], numa)
        place = places[[sibling.rank for sibling in siblings].index(world.rank)]
    except TargetError as error:
        reason = str(error)
    told = world.all_gather(np.frombuffer(reason.encode()[:512].ljust(512, b"\0"), np.uint8))
    reasons = [bytes(text).rstrip(b"\0").decode(errors="replace") for text in told]
    wrong = [rank for rank, text in enumerate(reasons) if text]
    if wrong:
        raise failure.DisagreementError(f"machine of rank {wrong[0]}: {reasons[wrong[0]]}")
    return place


@contextmanager
def _processors(
    world: World,
    siblings: Sequence[_Sibling],
    threads: int | None,
    place: Placement | None,
    bind: bool,
) -> Iterator[None]:
    """Share out the processors of the node, where several ranks may use the same ones.

    Ranks of one thread, too: while they wait for each other, Linux may let two of them take turns
    on one processor, and leave another one idle.
    """
    mine = siblings[[sibling.rank for sibling in siblings].index(world.rank)].processors
    same = [sibling.rank for sibling in siblings if sibling.processors == mine]
    share = place.processors if place else part(mine, same.index(world.rank), len(same))
    limit = time_limit()
    fair = len(share) if limit is None else min(len(share), limit // len(siblings))
    wanted = threads if threads is not None else max(1, fair)
    is_enough = len(same) <= len(mine) and wanted <= len(share) < len(mine)
    bind = place is not None or (bind and is_enough)
    if bind:
        os.sched_setaffinity(0, share)
    world.threads = choose_threads(wanted)
    usable = {processor for sibling in siblings for processor in sibling.processors}
    world.is_crowded = len(siblings) * world.threads > min(len(usable), limit or len(usable))
    try:
        yield
    finally:
        if bind:
            os.sched_setaffinity(0, mine)


def _exited(world: World, code: int) -> None:
    """End the job in the place of ``os._exit``."""
    world.abort(failure.ExitCallError(code), code)
