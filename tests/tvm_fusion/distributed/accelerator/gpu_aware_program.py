# SPDX-License-Identifier: Apache-2.0
"""Program of every rank in the test of ranks with GPUs: steps of rows that stay there.

The driver is that of Python, so that MPI can be given its memory; numpy computes the steps.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from fake_cuda import FakeCUDA
from tvm import te, tirx

from tvm_fusion import distributed
from tvm_fusion.distributed.accelerator import cuda_driver
from tvm_fusion.errors import DistributedError

ROWS, COLS, STEPS = 6, 12, 4
AXIS = int(sys.argv[1])


def shift(a, index, axis):
    """The next element along an axis; the last one stays."""
    at = list(index)
    at[axis] = tirx.min(at[axis] + 1, (ROWS, COLS)[axis] - 1)
    return a[tuple(at)]


def step(whole):
    """The same in numpy, on an array or a window that ends at the halo."""
    last = np.take(whole, [-1], AXIS)
    moved = np.concatenate([np.delete(whole, 0, AXIS), last], AXIS)
    return moved * np.float32(2) + np.float32(1)


def kernel_of(library, made):
    def kernel(values):
        source, dest, *_ = values
        other = ROWS * COLS // (ROWS, COLS)[AXIS]
        size = library.memory[source].size // 4
        shape = (size // other, other) if AXIS == 0 else (other, size // other)
        window, result = (
            np.ctypeslib.as_array((ctypes.c_float * size).from_address(address)).reshape(shape)
            for address in (source, dest)
        )
        rows = tuple(slice(0, made) if axis == AXIS else slice(None) for axis in (0, 1))
        result[rows] = step(window)[rows]

    return kernel


def results(world, program, gpu_aware):
    """Bytes that are copied from and to the device, and this rank's part."""
    library = FakeCUDA()
    cuda_driver.load_library = lambda: library
    begin, end = program.distribution.parts[world.rank].rows[0]
    library.kernel = kernel_of(library, end - begin)
    local = program.on(world, gpu_aware)
    held = local.input("A")
    held.window.array[...] = np.nan
    held.owned[...] = WHOLE[tuple(slice(*ends) for ends in held.region)]
    found = local(STEPS).copy()
    assert library.launches == STEPS
    return library.copied, found


a = te.placeholder((ROWS, COLS), name="A")
out = te.compute(a.shape, lambda *at: shift(a, at, AXIS) * 2.0 + 1.0, "out")
func = te.create_prim_func([a, out], index_dtype_override="int64")
WHOLE = np.random.default_rng(0).random((ROWS, COLS), np.float32)

with distributed.session(timeout=30) as world:
    extent = (ROWS, COLS)[AXIS] // world.size
    program = distributed.compile(
        func,
        world.size,
        loop=AXIS,
        repeat="A",
        devices=["cuda -arch=sm_90"],
        split=[0, extent],
    )
    staged, expected = results(world, program, gpu_aware=False)
    if not world.takes_device_memory:  # MPI from pip
        try:
            program.on(world, gpu_aware=True)
        except DistributedError as error:
            assert "this MPI takes no memory of GPUs" in str(error)
        else:
            raise AssertionError("not refused")
    type(world).takes_device_memory = True
    copied, found = results(world, program, gpu_aware=True)
    np.testing.assert_array_equal(found, expected)
    halo = 4 * WHOLE.size // (ROWS, COLS)[AXIS]
    neighbours = (world.rank > 0) + (world.rank < world.size - 1)
    assert staged - copied == (STEPS - 1) * halo * neighbours, (staged, copied)
    whole = WHOLE
    for _ in range(STEPS):
        whole = step(whole)
    begin, end = program.distribution.parts[world.rank].rows[0]
    np.testing.assert_allclose(found, np.take(whole, range(begin, end), AXIS), rtol=1e-6)
    print("all checked", flush=True)
