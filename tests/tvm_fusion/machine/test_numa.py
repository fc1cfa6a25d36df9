# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes of described machines, and the pages of this one."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tvm_fusion.errors import TargetError
from tvm_fusion.machine import numa
from tvm_fusion.machine.numa import UNTOUCHED, NumaNode, bind_memory, bytes_on_nodes, numa_nodes

NODES = numa_nodes()
needs_nodes = pytest.mark.skipif(not NODES, reason="the system does not tell its NUMA nodes")


def described(folder: Path, lists: dict[int, str], memory: str) -> Path:
    for node, processors in lists.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(processors + "\n")
    (folder / "has_memory").write_text(memory + "\n")
    return folder


def test_nodes(tmp_path: Path) -> None:
    """Node 1 has no memory, node 3 no processors."""
    lists = {0: "0-2,8", 1: "3", 2: "4-5", 3: ""}
    found = numa_nodes(described(tmp_path, lists, "0,2-3"))
    assert found == [NumaNode(0, frozenset({0, 1, 2, 8})), NumaNode(2, frozenset({4, 5}))]
    assert numa_nodes(tmp_path / "none") == []


def fresh(pages: int) -> np.ndarray:
    """Pages that nothing was written to."""
    return np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), np.uint8)


@needs_nodes
def test_pages_lie_where_memory_is_bound() -> None:
    node = NODES[-1].number
    array = fresh(6)
    bind_memory(node)
    try:
        array[: 2 * mmap.PAGESIZE] = 1
    finally:
        bind_memory(None)
    page = mmap.PAGESIZE
    found = bytes_on_nodes(array)
    assert found == {UNTOUCHED: 4 * page, node: 2 * page}
    assert bytes_on_nodes(array[page // 2 : 2 * page + 100]) == {
        UNTOUCHED: 100,
        node: 3 * page // 2,
    }
    numa.touch(array)
    assert sum(bytes_on_nodes(array).values()) == 6 * page
    assert UNTOUCHED not in bytes_on_nodes(array)
    assert bytes_on_nodes(array[:0]) == {}


@needs_nodes
def test_all_pages_are_touched_of_an_array_within_them() -> None:
    page = mmap.PAGESIZE
    array = fresh(6)[page // 2 : 4 * page + page // 4]
    numa.touch(array)
    assert UNTOUCHED not in bytes_on_nodes(array)


@needs_nodes
def test_a_node_that_is_not_there() -> None:
    with pytest.raises(TargetError, match="the system refuses set_mempolicy: .*leave numa= out"):
        bind_memory(NODES[-1].number + 200)
    bind_memory(None)


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(TargetError, match="set_mempolicy is not known on Darwin"):
        bind_memory(0)
