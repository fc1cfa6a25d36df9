# SPDX-License-Identifier: Apache-2.0
"""Peers of the stencils over ranks, each in processes of its own that hold nothing of ours.

    python examples/benchmarks/distributed.py --peers [PYTHON]

runs this file by an interpreter that has some of Numba (with mpi4py), JAX, Devito and Halide. Each
uses two cores: two ranks of MPI (Numba, by hand; Devito), two devices (JAX), two threads (Halide).
Each result is compared with numpy in float64. The last line that is printed is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Rows and columns of the output, and how often a stencil is applied in a run."""

    rows: int
    cols: int
    steps: int


MODULES = {
    "numba": ("numba", "mpi4py"),
    "jax": ("jax",),
    "devito": ("devito", "mpi4py"),
    "halide": ("halide",),
}
RANKS = {"numba": 2, "jax": 1, "devito": 2, "halide": 1}
"""Processes of each engine."""

HALO = {"blur": 2, "convolution": 2, "sobel": 2, "heat2d": 0}
"""Rows, and columns, of the input beyond those of the output."""

TITLES = {
    "numba": "Numba + mpi4py",
    "jax": "JAX, 2 devices",
    "devito": "Devito, 2 ranks",
    "halide": "Halide, 2 threads",
}
_RUN_SECONDS = 1.0
_MOST_RUNS = 50
_CHECKED = 24  # rows at either end that are compared with numpy
_DIFFUSION = 0.1


def engines() -> list[str]:
    """Names of the engines that can be imported here."""
    return [
        name
        for name, modules in MODULES.items()
        if all(importlib.util.find_spec(module) for module in modules)
    ]


# The stencils in array notation, of numpy or jax.numpy: the last rows of the input are the halo.


def blur(xp: Any, a: Any) -> Any:
    """Box blur of 3x3 pixels."""
    bx = (a[:, :-2] + a[:, 1:-1] + a[:, 2:]) / 3
    return (bx[:-2] + bx[1:-1] + bx[2:]) / 3


WEIGHTS = np.arange(1, 10, dtype=np.float32).reshape(3, 3) / 45


def convolution(xp: Any, a: Any) -> Any:
    """Filter of 3x3 pixels of three interleaved channels."""
    rows, cols = a.shape[0] - 2, a.shape[1] - 2
    terms = [WEIGHTS[y, x] * a[y : y + rows, x : x + cols] for y in range(3) for x in range(3)]
    return sum(terms[1:], terms[0])


def sobel(xp: Any, a: Any) -> Any:
    """Magnitude of the gradient."""
    across = a[:, 2:] - a[:, :-2]
    gx = across[:-2] + 2 * across[1:-1] + across[2:]
    down = a[2:] - a[:-2]
    gy = down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]
    return xp.sqrt(gx * gx + gy * gy)


def heat_inside(a: Any) -> Any:
    """A step of the heat equation, without the border."""
    inside = a[1:-1, 1:-1]
    around = a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]
    return inside + _DIFFUSION * (around - 4 * inside)


ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    "blur": blur,
    "convolution": convolution,
    "sobel": sobel,
}


def random_input(stencil: str, sizes: Sizes) -> np.ndarray:
    """The whole input, the same in every process."""
    halo = HALO[stencil]
    shape = [sizes.rows + halo, sizes.cols + halo]
    if stencil == "convolution":
        shape.append(3)
    return np.random.default_rng(0).random(shape, np.float32)


def check(stencil: str, sizes: Sizes, a: np.ndarray, first: int, result: np.ndarray) -> None:
    """Compare the first and last rows of a part of the output with numpy."""
    if stencil == "heat2d":
        reach = sizes.steps
        for rows in (slice(0, _CHECKED), slice(len(result) - _CHECKED, len(result))):
            begin, end = first + rows.start, first + rows.stop
            low, high = max(0, begin - reach), min(sizes.rows, end + reach)
            exact = a[low:high].astype(np.float64)
            for _ in range(sizes.steps):
                exact[1:-1, 1:-1] = heat_inside(exact)
            np.testing.assert_allclose(result[rows], exact[begin - low : end - low], atol=1e-4)
        return
    for begin in (0, len(result) - _CHECKED):
        window = a[first + begin : first + begin + _CHECKED + HALO[stencil]].astype(np.float64)
        expected = ARRAYS[stencil](np, window)
        np.testing.assert_allclose(result[begin : begin + _CHECKED], expected, atol=1e-4)


def times(run: Callable[[], object], barrier: Callable[[], object], slowest: Callable) -> float:
    """Median milliseconds of runs that all ranks begin together."""
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _RUN_SECONDS and len(seconds) < _MOST_RUNS):
        barrier()
        begin = time.perf_counter()
        run()
        seconds.append(slowest(time.perf_counter() - begin))
    return statistics.median(seconds) * 1e3


def alone(run: Callable[[], object]) -> float:
    """The same for one process."""
    return times(run, lambda: None, lambda seconds: seconds)


def _blur_rows(a: np.ndarray, out: np.ndarray, ring: np.ndarray) -> None:
    """Means of nine pixels, by columns and then by rows."""
    rows, cols = out.shape
    for i in range(rows + 2):
        line = ring[i % 3]
        for j in range(cols):
            line[j] = (a[i, j] + a[i, j + 1] + a[i, j + 2]) * np.float32(1 / 3)
        if i >= 2:
            for j in range(cols):
                out[i - 2, j] = (ring[0, j] + ring[1, j] + ring[2, j]) * np.float32(1 / 3)


def _sobel_rows(a: np.ndarray, out: np.ndarray, ring: np.ndarray) -> None:
    """Magnitudes of the gradient."""
    rows, cols = out.shape
    two = np.float32(2)
    for i in range(rows):
        for j in range(cols):
            gx = a[i, j + 2] - a[i, j] + two * (a[i + 1, j + 2] - a[i + 1, j])
            gx += a[i + 2, j + 2] - a[i + 2, j]
            gy = a[i + 2, j] - a[i, j] + two * (a[i + 2, j + 1] - a[i, j + 1])
            gy += a[i + 2, j + 2] - a[i, j + 2]
            out[i, j] = np.sqrt(gx * gx + gy * gy)


def _convolution_rows(a: np.ndarray, out: np.ndarray, w: np.ndarray) -> None:
    """Weighted sums of nine pixels, a channel each."""
    rows, wide = out.shape
    for i in range(rows):
        for j in range(wide):  # columns and channels are one axis
            value = w[0, 0] * a[i, j] + w[0, 1] * a[i, j + 3] + w[0, 2] * a[i, j + 6]
            value += w[1, 0] * a[i + 1, j] + w[1, 1] * a[i + 1, j + 3] + w[1, 2] * a[i + 1, j + 6]
            value += w[2, 0] * a[i + 2, j] + w[2, 1] * a[i + 2, j + 3] + w[2, 2] * a[i + 2, j + 6]
            out[i, j] = value


def _heat_rows(a: np.ndarray, out: np.ndarray, low: int, high: int) -> None:
    """A step of diffusion in some rows."""
    cols = a.shape[1]
    for i in range(low, high):
        out[i, 0], out[i, cols - 1] = a[i, 0], a[i, cols - 1]
        for j in range(1, cols - 1):
            around = a[i - 1, j] + a[i + 1, j] + a[i, j - 1] + a[i, j + 1]
            out[i, j] = a[i, j] + np.float32(_DIFFUSION) * (around - np.float32(4) * a[i, j])


def numba_ranks(stencil: str, sizes: Sizes) -> float | None:
    """Loops by hand on two ranks, whose halos mpi4py exchanges."""
    import numba
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size, halo = comm.rank, comm.size, HALO[stencil]
    whole = random_input(stencil, sizes)
    begin, end = sizes.rows * rank // size, sizes.rows * (rank + 1) // size

    if stencil == "heat2d":
        heat_rows = numba.njit(fastmath=True)(_heat_rows)
        low, high = max(0, begin - 1), min(sizes.rows, end + 1)
        fields = [whole[low:high].copy(), whole[low:high].copy()]
        inside = max(begin, 1) - low, min(end, sizes.rows - 1) - low

        def run() -> None:
            for step in range(sizes.steps):
                a, out = fields[step % 2], fields[1 - step % 2]
                for peer, mine, theirs in (
                    (rank - 1, begin - low, 0),
                    (rank + 1, end - low - 1, len(a) - 1),
                ):
                    if 0 <= peer < size:
                        comm.Sendrecv(a[mine], peer, recvbuf=a[theirs], source=peer)
                heat_rows(a, out, *inside)

        def result() -> np.ndarray:
            return fields[sizes.steps % 2][begin - low : end - low]
    else:
        local = whole[begin : end + halo].copy()
        flat = local.reshape(len(local), -1)
        out = np.empty((end - begin, flat.shape[1] - halo * local[0, 0].size), np.float32)
        kernels = {"blur": _blur_rows, "sobel": _sobel_rows, "convolution": _convolution_rows}
        kernel = numba.njit(fastmath=True)(kernels[stencil])
        extra = WEIGHTS if stencil == "convolution" else np.empty((3, out.shape[1]), np.float32)

        def run() -> None:
            # What the first rank lacks are the first rows of the next one.
            if rank > 0:
                comm.Send(local[:halo], rank - 1)
            if rank + 1 < size:
                comm.Recv(local[end - begin :], rank + 1)
            kernel(flat, out, extra)

        def result() -> np.ndarray:
            return out.reshape(end - begin, sizes.cols, *whole.shape[2:])

    run()
    check(stencil, sizes, whole, begin, result())
    return times(run, comm.Barrier, lambda seconds: comm.allreduce(seconds, MPI.MAX))


def jax_devices(stencil: str, sizes: Sizes) -> float | None:
    """Array notation on two CPU devices, halos by collective permutation."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    rows_of, everywhere = PartitionSpec("ranks"), PartitionSpec()
    whole = random_input(stencil, sizes)
    a = jax.device_put(whole[: sizes.rows], NamedSharding(mesh, rows_of))
    tail = jax.device_put(whole[sizes.rows :], NamedSharding(mesh, everywhere))

    def one_step(mine: Any, tail: Any) -> Any:
        halo = HALO[stencil]
        after = jax.lax.ppermute(mine[:halo], "ranks", [(1, 0)])
        last = jax.lax.axis_index("ranks") == 1
        return ARRAYS[stencil](jnp, jnp.concatenate([mine, jnp.where(last, tail, after)]))

    def steps(mine: Any, tail: Any) -> Any:
        rank = jax.lax.axis_index("ranks")

        def step(_: int, field: Any) -> Any:
            before = jax.lax.ppermute(field[-1:], "ranks", [(0, 1)])
            after = jax.lax.ppermute(field[:1], "ranks", [(1, 0)])
            new = heat_inside(jnp.concatenate([before, field, after]))
            row = jnp.arange(len(field))[:, None] + rank * len(field)
            fixed = (row == 0) | (row == sizes.rows - 1)
            return field.at[:, 1:-1].set(jnp.where(fixed, field[:, 1:-1], new))

        return jax.lax.fori_loop(0, sizes.steps, step, mine)

    function = jax.jit(
        jax.shard_map(
            steps if stencil == "heat2d" else one_step,
            mesh=mesh,
            in_specs=(rows_of, everywhere),
            out_specs=rows_of,
        )
    )
    check(stencil, sizes, whole, 0, np.asarray(function(a, tail)))
    return alone(lambda: function(a, tail).block_until_ready())


def devito_ranks(stencil: str, sizes: Sizes) -> float | None:
    """The heat equation on two ranks; Devito chooses blocks and the mode of its exchanges."""
    if stencil != "heat2d":
        return None
    os.environ |= {"DEVITO_MPI": "1", "DEVITO_LANGUAGE": "C", "DEVITO_LOGGING": "ERROR"}
    from devito import Eq, Grid, Operator, SubDomain, TimeFunction
    from mpi4py import MPI

    class Inside(SubDomain):
        name = "inside"

        def define(self, dimensions: Any) -> Any:
            return {each: ("middle", 1, 1) for each in dimensions}

    grid = Grid((sizes.rows, sizes.cols), subdomains=(inside := Inside(),))
    field = TimeFunction(name="u", grid=grid, space_order=2, dtype=np.float32)
    x, y = grid.dimensions
    around = (
        field.subs(x, x - 1) + field.subs(x, x + 1) + field.subs(y, y - 1) + field.subs(y, y + 1)
    )
    change = field + _DIFFUSION * (around - 4 * field)
    update = Eq(field.forward, change, subdomain=grid.subdomains["inside"])
    del inside
    operator = Operator([update])
    whole = random_input(stencil, sizes)
    field.data[0] = whole
    field.data[1] = whole

    def run() -> None:
        operator.apply(time_m=0, time_M=sizes.steps - 1)

    run()
    comm = MPI.COMM_WORLD
    begin = sizes.rows * comm.rank // comm.size
    check(stencil, sizes, whole, begin, np.array(field.data_ro_domain[sizes.steps % 2]))
    return times(run, comm.Barrier, lambda seconds: comm.allreduce(seconds, MPI.MAX))


def halide_threads(stencil: str, sizes: Sizes) -> float | None:
    """A schedule by hand on two threads of one process: strips of rows, vectors of columns."""
    if stencil not in ("blur", "sobel"):
        return None
    os.environ["HL_NUM_THREADS"] = "2"
    import halide as hl

    whole = random_input(stencil, sizes)
    image = hl.Buffer(whole)  # dimension 0 is the last of numpy's
    x, y, yo, yi = (hl.Var(name) for name in ("x", "y", "yo", "yi"))
    out = hl.Func("out")
    lanes = hl.get_host_target().natural_vector_size(hl.Float(32))
    if stencil == "blur":
        bx = hl.Func("bx")
        bx[x, y] = (image[x, y] + image[x + 1, y] + image[x + 2, y]) / 3.0
        out[x, y] = (bx[x, y] + bx[x, y + 1] + bx[x, y + 2]) / 3.0
        out.split(y, yo, yi, 32).parallel(yo).vectorize(x, lanes)
        bx.store_at(out, yo).compute_at(out, yi).vectorize(x, lanes)
    else:
        pairs = ((0, 1.0), (1, 2.0), (2, 1.0))
        gx, gy = hl.f32(0), hl.f32(0)
        for k, weight in pairs:
            gx += (image[x + 2, y + k] - image[x, y + k]) * hl.f32(weight)
            gy += (image[x + k, y + 2] - image[x + k, y]) * hl.f32(weight)
        out[x, y] = hl.sqrt(gx * gx + gy * gy)
        out.split(y, yo, yi, 32).parallel(yo).vectorize(x, lanes)
    result = np.empty((sizes.rows, sizes.cols), np.float32)
    buffer = hl.Buffer(result)
    out.compile_jit()

    def run() -> None:
        out.realize(buffer)

    run()
    check(stencil, sizes, whole, 0, result)
    return alone(run)


ENGINES = {
    "numba": numba_ranks,
    "jax": jax_devices,
    "devito": devito_ranks,
    "halide": halide_threads,
}


def main() -> int:
    """Run one stencil by one engine, or name the engines."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--list", action="store_true", help="print the engines that are here")
    options.add_argument("--engine", choices=list(ENGINES))
    options.add_argument("--stencil", choices=list(HALO))
    options.add_argument("--sizes", type=int, nargs=3, help="rows, columns, steps")
    given = options.parse_args()
    if given.list:
        print(json.dumps(engines()))
        return 0
    found = ENGINES[given.engine](given.stencil, Sizes(*given.sizes))
    sys.stdout.write(json.dumps({"run_ms": found}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
