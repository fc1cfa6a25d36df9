# SPDX-License-Identifier: Apache-2.0
"""Program of every rank of a network whose exchanges are kernels; rank 1 may fail between runs."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from schedules.distribute.rows.exchange_table import QUICK
from tvm_fusion import distributed

mode, path, arrays = sys.argv[1:]
feed = dict(np.load(arrays))
expected = feed.pop("expected")

with distributed.session(timeout=30 if mode in ("run", "mixed") else 1) as world:
    model = distributed.load(path).on(world)
    [table] = map(np.from_dlpack, model._table)
    is_quick = world.rank == 1 if mode == "mixed" else world.size > 1
    assert table[:, QUICK].all() == is_quick, table[:, QUICK]
    before = world.doing
    for _ in range(30):
        result = model(**feed)
        if world.rank == 0:
            np.testing.assert_array_equal(result, expected)
    assert (world.doing != before) == (world.size > 1), world.doing
    if world.rank == 1 and mode == "hang":
        time.sleep(600)
    if world.rank == 1 and mode == "kill":
        os.kill(os.getpid(), 9)
    model(**feed)
assert not table[:, QUICK].any()  # the memory of the slots is gone
print("ended well", flush=True)
