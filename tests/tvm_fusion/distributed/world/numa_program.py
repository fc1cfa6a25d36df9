# SPDX-License-Identifier: Apache-2.0
"""Program of two ranks on a machine that is taken to have two NUMA nodes, of one processor each."""

from __future__ import annotations

import os
import sys

import numpy as np
from loop_nests import blur

from tvm_fusion import distributed
from tvm_fusion.distributed.world import job_session
from tvm_fusion.machine.numa import NumaNode, numa_nodes

numa = sys.argv[1]
processors = sorted(os.sched_getaffinity(0))
if len(sys.argv) > 2:
    node = numa_nodes()[0].number
    halves = processors[:1], processors[1:]
    job_session.numa_nodes = lambda: [NumaNode(node, frozenset(half)) for half in halves]

with distributed.session(2, numa=numa) as world:
    assert sorted(os.sched_getaffinity(0)) == [processors[:1], processors[1:]][world.rank]
    assert world.threads == len(os.sched_getaffinity(0))
    local = distributed.compile(blur(400, 500), 2).on(world)
    text = local.explain()
    assert text.startswith(f"rank {world.rank}: {world.placement}; this machine has"), text
    assert text.count(f": 100.0 % on node {node}") == 2, text
    local.input("A").owned[...] = 1
    np.testing.assert_allclose(local(), 1, rtol=1e-6)
assert sorted(os.sched_getaffinity(0)) == processors
print("all placed", flush=True)
