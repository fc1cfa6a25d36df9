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
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Rows and columns of the output, how often a stencil is applied in a run, and its pixels."""

    rows: int
    cols: int
    steps: int
    dtype: str = "float32"


MODULES = {
    "numba": ("numba", "mpi4py"),
    "jax": ("jax",),
    "devito": ("devito", "mpi4py"),
    "halide": ("halide",),
}
RANKS = {"numba": 2, "jax": 1, "devito": 2, "halide": 1}
"""Processes of each engine."""

HALO = {
    **{"blur": 2, "convolution": 2, "cvt_color": 0, "gaussian": 4, "pipeline": 0, "sobel": 2},
    **{"heat2d": 0, "heat3d": 0},
}
"""Rows, and columns, of the input beyond those of the output."""

CHANNELS = {"convolution": 3, "cvt_color": 3, "gaussian": 3, "pipeline": 3}
"""Interleaved channels of an input that has more than one."""

HEAT = ("heat2d", "heat3d")
f32 = np.float32
Pixel = Callable[[np.float32], Any]
"""Makes a pixel of a level."""

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


GREY = np.array([0.299, 0.587, 0.114], np.float32)
TAPS = np.array([1, 4, 6, 4, 1], np.float32) / 16


def cvt_color(xp: Any, a: Any) -> Any:
    """Conversion of RGB to grey."""
    return GREY[0] * a[..., 0] + GREY[1] * a[..., 1] + GREY[2] * a[..., 2]


def gaussian(xp: Any, a: Any) -> Any:
    """Separable filter of 5x5 pixels of three interleaved channels."""
    rows, cols = a.shape[0] - 4, a.shape[1] - 4
    across = sum(TAPS[k] * a[:, k : k + cols] for k in range(5))
    return sum(TAPS[k] * across[k : k + rows] for k in range(5))


def pipeline(xp: Any, a: Any) -> Any:
    """Brightening, then the negative."""
    return 255 - xp.minimum(a * 1.5, 255)


def sobel(xp: Any, a: Any) -> Any:
    """Magnitude of the gradient."""
    across = a[:, 2:] - a[:, :-2]
    gx = across[:-2] + 2 * across[1:-1] + across[2:]
    down = a[2:] - a[:-2]
    gy = down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]
    return xp.sqrt(gx * gx + gy * gy)


def heat_inside(a: Any) -> Any:
    """A step of the heat equation, without the border."""
    inner = (slice(1, -1),) * a.ndim
    places = [
        (*inner[:axis], part, *inner[axis + 1 :])
        for axis in range(a.ndim)
        for part in (slice(None, -2), slice(2, None))
    ]
    return a[inner] + _DIFFUSION * (sum(a[place] for place in places) - 2 * a.ndim * a[inner])


ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    "blur": blur,
    "convolution": convolution,
    "cvt_color": cvt_color,
    "gaussian": gaussian,
    "pipeline": pipeline,
    "sobel": sobel,
}


def levels(stencil: str, xp: Any, a: Any) -> Any:
    """A stencil in array notation; of 8 bits, its levels before they are rounded."""
    return ARRAYS[stencil](xp, a if a.dtype != np.uint8 else a.astype(np.float32))


def applied(stencil: str, xp: Any, a: Any) -> Any:
    """A stencil in array notation, with pixels of the input's type."""
    found = levels(stencil, xp, a)
    if a.dtype != np.uint8:
        return found
    return xp.clip(found + np.float32(0.5), 0, 255).astype(np.uint8)


def random_input(stencil: str, sizes: Sizes) -> np.ndarray:
    """The whole input, the same in every process."""
    halo = HALO[stencil]
    shape = [sizes.rows + halo, sizes.cols + halo]
    if stencil in CHANNELS:
        shape.append(CHANNELS[stencil])
    if stencil == "heat3d":
        shape.append(sizes.cols)
    found = np.random.default_rng(0).random(shape, np.float32)
    return found if sizes.dtype == "float32" else (256 * found).astype(sizes.dtype)


def row_shape(stencil: str, a: np.ndarray) -> tuple[int, ...]:
    """Shape of a row of the output for an input."""
    return levels(stencil, np, a[: HALO[stencil] + 1]).shape[1:]


def check(stencil: str, sizes: Sizes, a: np.ndarray, first: int, result: np.ndarray) -> None:
    """Compare the first and last rows of a part of the output with numpy."""
    if stencil in HEAT:
        reach = sizes.steps
        for rows in (slice(0, _CHECKED), slice(len(result) - _CHECKED, len(result))):
            begin, end = first + rows.start, first + rows.stop
            low, high = max(0, begin - reach), min(sizes.rows, end + reach)
            exact = a[low:high].astype(np.float64)
            for _ in range(sizes.steps):
                exact[(slice(1, -1),) * a.ndim] = heat_inside(exact)
            np.testing.assert_allclose(result[rows], exact[begin - low : end - low], atol=1e-4)
        return
    for begin in (0, len(result) - _CHECKED):
        window = a[first + begin : first + begin + _CHECKED + HALO[stencil]].astype(np.float64)
        expected, tolerance = levels(stencil, np, window), 1e-4
        if sizes.dtype == "uint8":  # rounded by half a level
            expected, tolerance = np.clip(expected, 0, 255), 0.5 + 1e-3
        found = result[begin : begin + _CHECKED]
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=tolerance)


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


def _blur_rows(a: np.ndarray, out: np.ndarray, ring: np.ndarray, pixel: Pixel) -> None:
    """Means of nine pixels, by columns and then by rows."""
    rows, cols = out.shape
    for i in range(rows + 2):
        line = ring[i % 3]
        for j in range(cols):
            line[j] = (a[i, j] + a[i, j + 1] + a[i, j + 2]) * f32(1 / 3)
        if i >= 2:
            for j in range(cols):
                out[i - 2, j] = pixel((ring[0, j] + ring[1, j] + ring[2, j]) * f32(1 / 3))


def _sobel_rows(a: np.ndarray, out: np.ndarray, _: np.ndarray, pixel: Pixel) -> None:
    """Magnitudes of the gradient."""
    rows, cols = out.shape
    two = f32(2)
    for i in range(rows):
        for j in range(cols):
            corner, opposite = f32(a[i, j]), f32(a[i + 2, j + 2])
            right, below = f32(a[i, j + 2]), f32(a[i + 2, j])
            gx = right - corner + two * (f32(a[i + 1, j + 2]) - f32(a[i + 1, j]))
            gx += opposite - below
            gy = below - corner + two * (f32(a[i + 2, j + 1]) - f32(a[i, j + 1]))
            gy += opposite - right
            out[i, j] = pixel(np.sqrt(gx * gx + gy * gy))


def _convolution_rows(a: np.ndarray, out: np.ndarray, w: np.ndarray, pixel: Pixel) -> None:
    """Weighted sums of nine pixels, a channel each."""
    rows, wide = out.shape
    for i in range(rows):
        for j in range(wide):  # columns and channels are one axis
            value = w[0, 0] * f32(a[i, j])
            value += w[0, 1] * f32(a[i, j + 3]) + w[0, 2] * f32(a[i, j + 6])
            value += w[1, 0] * f32(a[i + 1, j]) + w[1, 1] * f32(a[i + 1, j + 3])
            value += w[1, 2] * f32(a[i + 1, j + 6]) + w[2, 0] * f32(a[i + 2, j])
            value += w[2, 1] * f32(a[i + 2, j + 3]) + w[2, 2] * f32(a[i + 2, j + 6])
            out[i, j] = pixel(value)


def _grey_rows(a: np.ndarray, out: np.ndarray, w: np.ndarray, pixel: Pixel) -> None:
    """Weighted sums of three channels."""
    rows, cols = out.shape
    for i in range(rows):
        for j in range(cols):
            value = w[0] * f32(a[i, 3 * j]) + w[1] * f32(a[i, 3 * j + 1])
            out[i, j] = pixel(value + w[2] * f32(a[i, 3 * j + 2]))


def _gaussian_rows(a: np.ndarray, out: np.ndarray, w: np.ndarray, pixel: Pixel) -> None:
    """Weighted sums of five pixels, by columns and then by rows, a channel each."""
    rows, wide = out.shape
    ring = np.empty((5, wide), np.float32)
    for i in range(rows + 4):
        line = ring[i % 5]
        for j in range(wide):
            value = w[0] * f32(a[i, j]) + w[1] * f32(a[i, j + 3]) + w[2] * f32(a[i, j + 6])
            line[j] = value + w[3] * f32(a[i, j + 9]) + w[4] * f32(a[i, j + 12])
        if i >= 4:
            r0, r1, r2, r3, r4 = (i - 4) % 5, (i - 3) % 5, (i - 2) % 5, (i - 1) % 5, i % 5
            for j in range(wide):
                value = w[0] * ring[r0, j] + w[1] * ring[r1, j] + w[2] * ring[r2, j]
                out[i - 4, j] = pixel(value + w[3] * ring[r3, j] + w[4] * ring[r4, j])


def _pipeline_rows(a: np.ndarray, out: np.ndarray, _: np.ndarray, pixel: Pixel) -> None:
    """Brightening, then the negative."""
    rows, wide = out.shape
    for i in range(rows):
        for j in range(wide):
            out[i, j] = pixel(f32(255) - min(f32(a[i, j]) * f32(1.5), f32(255)))


def _level(value: np.float32) -> np.float32:
    """A pixel in floats."""
    return value


def _rounded(value: np.float32) -> np.uint8:
    """A pixel of 8 bits."""
    return np.uint8(max(min(value + f32(0.5), f32(255)), f32(0)))


KERNELS = {
    "blur": _blur_rows,
    "convolution": _convolution_rows,
    "cvt_color": _grey_rows,
    "gaussian": _gaussian_rows,
    "pipeline": _pipeline_rows,
    "sobel": _sobel_rows,
}
CONSTANTS = {"convolution": WEIGHTS, "cvt_color": GREY, "gaussian": TAPS}


def _heat_rows(a: np.ndarray, out: np.ndarray, low: int, high: int) -> None:
    """A step of diffusion in some rows."""
    cols = a.shape[1]
    for i in range(low, high):
        out[i, 0], out[i, cols - 1] = a[i, 0], a[i, cols - 1]
        for j in range(1, cols - 1):
            around = a[i - 1, j] + a[i + 1, j] + a[i, j - 1] + a[i, j + 1]
            out[i, j] = a[i, j] + np.float32(_DIFFUSION) * (around - np.float32(4) * a[i, j])


def _heat_planes(a: np.ndarray, out: np.ndarray, low: int, high: int) -> None:
    """A step of diffusion in some planes."""
    _, rows, cols = a.shape
    for i in range(low, high):
        out[i, 0], out[i, rows - 1] = a[i, 0], a[i, rows - 1]
        for j in range(1, rows - 1):
            out[i, j, 0], out[i, j, cols - 1] = a[i, j, 0], a[i, j, cols - 1]
            for k in range(1, cols - 1):
                around = a[i - 1, j, k] + a[i + 1, j, k] + a[i, j - 1, k] + a[i, j + 1, k]
                around += a[i, j, k - 1] + a[i, j, k + 1]
                change = around - np.float32(6) * a[i, j, k]
                out[i, j, k] = a[i, j, k] + np.float32(_DIFFUSION) * change


def numba_ranks(stencil: str, sizes: Sizes) -> float | None:
    """Loops by hand on two ranks, whose halos mpi4py exchanges."""
    import numba
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size, halo = comm.rank, comm.size, HALO[stencil]
    whole = random_input(stencil, sizes)
    begin, end = sizes.rows * rank // size, sizes.rows * (rank + 1) // size

    if stencil in HEAT:
        written = _heat_rows if stencil == "heat2d" else _heat_planes
        heat_rows = numba.njit(fastmath=True)(written)
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
        shape = row_shape(stencil, whole)
        wide = math.prod(shape)
        out = np.empty((end - begin, wide), sizes.dtype)
        kernel = numba.njit(fastmath=True)(KERNELS[stencil])
        pixel = numba.njit(fastmath=True)(_level if sizes.dtype == "float32" else _rounded)
        extra = CONSTANTS.get(stencil, np.empty((3, wide), np.float32))

        def run() -> None:
            # What the first rank lacks are the first rows of the next one.
            if halo and rank > 0:
                comm.Send(local[:halo], rank - 1)
            if halo and rank + 1 < size:
                comm.Recv(local[end - begin :], rank + 1)
            kernel(flat, out, extra, pixel)

        def result() -> np.ndarray:
            return out.reshape(end - begin, *shape)

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
        if not halo:
            return applied(stencil, jnp, mine)
        after = jax.lax.ppermute(mine[:halo], "ranks", [(1, 0)])
        last = jax.lax.axis_index("ranks") == 1
        return applied(stencil, jnp, jnp.concatenate([mine, jnp.where(last, tail, after)]))

    def steps(mine: Any, tail: Any) -> Any:
        rank = jax.lax.axis_index("ranks")
        inside = (slice(None), *(slice(1, -1),) * (mine.ndim - 1))

        def step(_: int, field: Any) -> Any:
            before = jax.lax.ppermute(field[-1:], "ranks", [(0, 1)])
            after = jax.lax.ppermute(field[:1], "ranks", [(1, 0)])
            new = heat_inside(jnp.concatenate([before, field, after]))
            own = jnp.arange(len(field)).reshape(-1, *(1,) * (field.ndim - 1))
            row = own + rank * len(field)
            fixed = (row == 0) | (row == sizes.rows - 1)
            return field.at[inside].set(jnp.where(fixed, field[inside], new))

        return jax.lax.fori_loop(0, sizes.steps, step, mine)

    function = jax.jit(
        jax.shard_map(
            steps if stencil in HEAT else one_step,
            mesh=mesh,
            in_specs=(rows_of, everywhere),
            out_specs=rows_of,
        )
    )
    check(stencil, sizes, whole, 0, np.asarray(function(a, tail)))
    return alone(lambda: function(a, tail).block_until_ready())


def devito_ranks(stencil: str, sizes: Sizes) -> float | None:
    """The heat equation on two ranks; Devito chooses blocks and the mode of its exchanges."""
    if stencil not in HEAT:
        return None
    os.environ |= {"DEVITO_MPI": "1", "DEVITO_LANGUAGE": "C", "DEVITO_LOGGING": "ERROR"}
    from devito import Eq, Grid, Operator, SubDomain, TimeFunction
    from mpi4py import MPI

    class Inside(SubDomain):
        name = "inside"

        def define(self, dimensions: Any) -> Any:
            return {each: ("middle", 1, 1) for each in dimensions}

    whole = random_input(stencil, sizes)
    grid = Grid(whole.shape, subdomains=(inside := Inside(),))
    field = TimeFunction(name="u", grid=grid, space_order=2, dtype=np.float32)
    around = sum(field.subs(x, x + step) for x in grid.dimensions for step in (-1, 1))
    change = field + _DIFFUSION * (around - 2 * whole.ndim * field)
    update = Eq(field.forward, change, subdomain=grid.subdomains["inside"])
    del inside
    operator = Operator([update])
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
    if stencil in HEAT:
        return None
    os.environ["HL_NUM_THREADS"] = "2"
    import halide as hl

    whole = random_input(stencil, sizes)
    pixels = hl.Buffer(whole.reshape(len(whole), -1))  # dimension 0 is the last of numpy's
    x, y, yo, yi = (hl.Var(name) for name in ("x", "y", "yo", "yi"))
    out = hl.Func("out")
    lanes = hl.get_host_target().natural_vector_size(hl.Float(32))
    image, value = hl.Func("level"), hl.Func("value")
    image[x, y] = hl.f32(pixels[x, y])
    first = _halide_stages(hl, stencil, image, value, x, y)
    rounded = hl.u8(hl.clamp(value[x, y] + hl.f32(0.5), hl.f32(0), hl.f32(255)))
    out[x, y] = value[x, y] if sizes.dtype == "float32" else rounded
    out.split(y, yo, yi, 32).parallel(yo).vectorize(x, lanes)
    if first is not None:
        first.store_at(out, yo).compute_at(out, yi).vectorize(x, lanes)
    shape = row_shape(stencil, whole)
    result = np.empty((sizes.rows, math.prod(shape)), sizes.dtype)
    buffer = hl.Buffer(result)
    out.compile_jit()

    def run() -> None:
        out.realize(buffer)

    run()
    check(stencil, sizes, whole, 0, result.reshape(sizes.rows, *shape))
    return alone(run)


def _halide_stages(hl: Any, stencil: str, image: Any, out: Any, x: Any, y: Any) -> Any:
    """Define the output, and return the stage before it, if there is one.

    Columns and channels are one dimension.
    """

    def total(terms: Any) -> Any:
        return sum(terms, hl.f32(0))

    if stencil == "blur":
        before = hl.Func("bx")
        before[x, y] = (image[x, y] + image[x + 1, y] + image[x + 2, y]) / 3.0
        out[x, y] = (before[x, y] + before[x, y + 1] + before[x, y + 2]) / 3.0
        return before
    if stencil == "gaussian":
        before = hl.Func("gx")
        taps = [hl.f32(float(tap)) for tap in TAPS]
        before[x, y] = total(image[x + 3 * k, y] * tap for k, tap in enumerate(taps))
        out[x, y] = total(before[x, y + k] * tap for k, tap in enumerate(taps))
        return before
    if stencil == "convolution":
        window = [(dy, dx) for dy in range(3) for dx in range(3)]
        weight = {at: hl.f32(float(WEIGHTS[at])) for at in window}
        out[x, y] = total(image[x + 3 * dx, y + dy] * weight[dy, dx] for dy, dx in window)
    elif stencil == "cvt_color":
        out[x, y] = total(image[3 * x + c, y] * hl.f32(float(GREY[c])) for c in range(3))
    elif stencil == "pipeline":
        out[x, y] = hl.f32(255) - hl.min(image[x, y] * hl.f32(1.5), hl.f32(255))
    else:
        gx, gy = hl.f32(0), hl.f32(0)
        for k, factor in ((0, 1.0), (1, 2.0), (2, 1.0)):
            gx += (image[x + 2, y + k] - image[x, y + k]) * hl.f32(factor)
            gy += (image[x + k, y + 2] - image[x + k, y]) * hl.f32(factor)
        out[x, y] = hl.sqrt(gx * gx + gy * gy)
    return None


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
    options.add_argument("--dtype", choices=["float32", "uint8"], default="float32")
    given = options.parse_args()
    if given.list:
        print(json.dumps(engines()))
        return 0
    rows, cols, steps = given.sizes
    found = ENGINES[given.engine](given.stencil, Sizes(rows, cols, steps, given.dtype))
    sys.stdout.write(json.dumps({"run_ms": found}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
