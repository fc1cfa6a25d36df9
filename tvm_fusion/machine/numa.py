# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes of this machine: binding of memory to one, and where the pages of an array lie.

Linux alone; by its system calls (set_mempolicy(2), move_pages(2)), so that libnuma is not needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import TargetError
from .host import canonical_arch

SYSFS = Path("/sys/devices/system/node")
UNTOUCHED = -1
"""Stands in the place of a node for pages that nothing has been written to: they lie nowhere
yet."""

_CALLS = {
    "x86_64": {"set_mempolicy": 238, "move_pages": 279},
    "aarch64": {"set_mempolicy": 237, "move_pages": 239},
}
_DEFAULT, _BIND = 0, 2  # policies of linux/mempolicy.h
_WORD = 64


@dataclass(frozen=True)
class NumaNode:
    """Processors and the memory that is next to them, such as those of a socket."""

    number: int  # Number that the system gives the node.
    processors: frozenset[int]  # Its processors.


def numa_nodes(folder: Path = SYSFS) -> list[NumaNode]:
    """The nodes with processors and memory; none where the system does not tell.

    ``folder``: where the system describes them.
    """
    found = []
    for number in _numbers(folder / "has_memory"):
        processors = _numbers(folder / f"node{number}" / "cpulist")
        if processors:
            found.append(NumaNode(number, frozenset(processors)))
    return found


def _numbers(file: Path) -> list[int]:
    """Numbers of a list such as ``0-3,8``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    found: list[int] = []
    for ends in filter(None, text.split(",")):
        first, _, last = ends.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def bind_memory(node: int | None) -> None:
    """Let pages that this thread, and threads that it starts, touch from now on lie on one node.

    ``node``: the node; None for the system's own choice, that of the processor which touches a
    page. Raises TargetError if the system refuses, or is none that is known here.
    """
    words = (ctypes.c_ulong * (1 if node is None else node // _WORD + 1))()
    if node is not None:
        words[node // _WORD] = 1 << node % _WORD
    # The kernel takes one bit less than it is told.
    bits = ctypes.c_ulong(len(words) * _WORD + 1)
    if node is None:
        _call("set_mempolicy", ctypes.c_int(_DEFAULT), None, ctypes.c_ulong(0))
    else:
        _call("set_mempolicy", ctypes.c_int(_BIND), words, bits)


def bytes_on_nodes(array: np.ndarray) -> dict[int, int]:
    """Bytes of a contiguous array on each node, of untouched pages under ``UNTOUCHED``.

    Raises TargetError if the system does not tell.
    """
    if not array.nbytes:
        return {}
    page = mmap.PAGESIZE
    begin = array.ctypes.data
    end = begin + array.nbytes
    firsts = np.arange(begin - begin % page, end, page, dtype=np.uintp)
    nodes = np.empty(firsts.size, np.int32)
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (firsts, nodes)]
    _call(
        "move_pages",
        ctypes.c_int(0),
        ctypes.c_ulong(firsts.size),
        pointers[0],
        None,
        pointers[1],
        0,
    )
    inside = np.minimum(firsts + page, end) - np.maximum(firsts, begin)
    found: Counter[int] = Counter()
    for node in np.unique(nodes).tolist():  # numbers below 0 are reasons why a page is nowhere
        found[node if node >= 0 else UNTOUCHED] += int(inside[nodes == node].sum())
    return dict(sorted(found.items()))


def touch(array: np.ndarray) -> None:
    """Write to each page of a new contiguous array, so that it lies where memory is bound."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:: mmap.PAGESIZE] = 0
    flat[-1:] = 0  # The array may begin within a page.


def _call(name: str, *arguments: object) -> None:
    """Make a system call that libc has no function for."""
    number = _CALLS.get(canonical_arch(platform.machine()), {}).get(name)
    if number is None or platform.system() != "Linux":
        raise TargetError(
            f"{name} is not known on {platform.system()} {platform.machine()}; leave numa= out"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        reason = os.strerror(ctypes.get_errno())
        raise TargetError(f"the system refuses {name}: {reason}; leave numa= out")
