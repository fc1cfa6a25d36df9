# SPDX-License-Identifier: Apache-2.0
"""Loop nests over images, as TensorIR: what the thesis on distributed Tiramisu measures, and heat.

R. Denniston's thesis (distributed, heterogeneous and cooperative code generation in Tiramisu),
chapter 5: box blur, convolution, conversion to grey, Gaussian blur, pipeline, Sobel operator.
Images of three channels are interleaved (rows, columns, channels). Pixels are float32; those of
three channels and of the Sobel operator also uint8, for which results in float32 are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tvm import te, tirx

GREY = (0.299, 0.587, 0.114)
TAPS = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)
CHANNELS = 3
DIFFUSION = 0.1


def image(*shape: int, name: str = "A", dtype: str = "float32") -> te.Tensor:
    """An input whose extents are counted in 64 bits, as those of large images need."""
    return te.placeholder([tirx.IntImm("int64", n) for n in shape], dtype, name)


def function(*tensors: te.Tensor) -> tirx.PrimFunc:
    """The function of inputs and an output."""
    return te.create_prim_func(list(tensors), index_dtype_override="int64")


def level(a: te.Tensor, *at: tirx.Expr) -> tirx.Expr:
    """A pixel as float32."""
    return a[at] if str(a.dtype) == "float32" else a[at].astype("float32")


def pixel(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """A level as a pixel: as it is, or rounded to 0 to 255."""
    if dtype == "float32":
        return value
    return te.max(te.min(value + 0.5, 255.0), 0.0).astype(dtype)


def blur(rows: int, cols: int) -> tirx.PrimFunc:
    """Box blur of 3x3 pixels: along the columns, then along the rows."""
    a = image(rows + 2, cols + 2)
    bx = te.compute(
        (rows + 2, cols), lambda i, j: (a[i, j] + a[i, j + 1] + a[i, j + 2]) / 3.0, "bx"
    )
    by = te.compute((rows, cols), lambda i, j: (bx[i, j] + bx[i + 1, j] + bx[i + 2, j]) / 3.0, "by")
    return function(a, by)


def convolution(rows: int, cols: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Filter of 3x3 pixels, whose weights are an input, of each channel."""
    a, w = image(rows + 2, cols + 2, CHANNELS, dtype=dtype), image(3, 3, name="W")
    window = [(y, x) for y in range(3) for x in range(3)]
    return function(
        a,
        w,
        te.compute(
            (rows, cols, CHANNELS),
            lambda i, j, c: pixel(
                total(level(a, i + y, j + x, c) * w[y, x] for y, x in window), dtype
            ),
            "C",
        ),
    )


def cvt_color(rows: int, cols: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Conversion of RGB to grey."""
    a = image(rows, cols, CHANNELS, dtype=dtype)
    return function(
        a,
        te.compute(
            (rows, cols),
            lambda i, j: pixel(
                total(level(a, i, j, c) * weight for c, weight in enumerate(GREY)), dtype
            ),
            "C",
        ),
    )


def gaussian(rows: int, cols: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Separable filter of 5x5 pixels of each channel."""
    a = image(rows + 4, cols + 4, CHANNELS, dtype=dtype)
    gx = te.compute(
        (rows + 4, cols, CHANNELS),
        lambda i, j, c: total(level(a, i, j + k, c) * tap for k, tap in enumerate(TAPS)),
        "gx",
    )
    gy = te.compute(
        (rows, cols, CHANNELS),
        lambda i, j, c: pixel(total(gx[i + k, j, c] * tap for k, tap in enumerate(TAPS)), dtype),
        "gy",
    )
    return function(a, gy)


def pipeline(rows: int, cols: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Brightening, then the negative, of each channel."""
    a = image(rows, cols, CHANNELS, dtype=dtype)
    bright = te.compute(a.shape, lambda i, j, c: te.min(level(a, i, j, c) * 1.5, 255.0), "bright")
    out = te.compute(a.shape, lambda i, j, c: pixel(255.0 - bright[i, j, c], dtype), "negative")
    return function(a, out)


def sobel(rows: int, cols: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Both gradients of a grey image, and their magnitude."""
    a = image(rows + 2, cols + 2, dtype=dtype)
    weights = ((0, 1.0), (1, 2.0), (2, 1.0))

    def change(here: Iterable[tirx.Expr], there: Iterable[tirx.Expr]) -> tirx.Expr:
        return level(a, *there) - level(a, *here)

    gx = te.compute(
        (rows, cols),
        lambda i, j: total(change((i + k, j), (i + k, j + 2)) * w for k, w in weights),
        "gx",
    )
    gy = te.compute(
        (rows, cols),
        lambda i, j: total(change((i, j + k), (i + 2, j + k)) * w for k, w in weights),
        "gy",
    )
    magnitude = te.compute(
        (rows, cols),
        lambda i, j: pixel(te.sqrt(gx[i, j] * gx[i, j] + gy[i, j] * gy[i, j]), dtype),
        "S",
    )
    return function(a, magnitude)


def heat2d(rows: int, cols: int) -> tirx.PrimFunc:
    """A step of the heat equation on a plane; the border keeps its temperature."""
    a = image(rows, cols)
    return function(a, te.compute(a.shape, lambda i, j: _heat(a, (i, j)), "next"))


def heat3d(rows: int, cols: int) -> tirx.PrimFunc:
    """A step of the heat equation in a cuboid of ``rows`` planes of ``cols`` x ``cols`` cells."""
    a = image(rows, cols, cols)
    return function(a, te.compute(a.shape, lambda i, j, k: _heat(a, (i, j, k)), "next"))


def wave2d(rows: int, cols: int) -> tirx.PrimFunc:
    """A step of the wave equation on a plane with a fixed border: two fields, two outputs.

    The velocity ``V`` takes the force at ``A``, the displacement; that takes the new velocity.
    """
    a, v = image(rows, cols), image(rows, cols, name="V")
    speed = te.compute(a.shape, lambda i, j: v[i, j] + _heat(a, (i, j)) - a[i, j], "speed")
    return function(a, v, te.compute(a.shape, lambda i, j: a[i, j] + speed[i, j], "next"), speed)


def _heat(a: te.Tensor, indices: tuple[tirx.Var, ...]) -> tirx.Expr:
    inside = [0 < index for index in indices]
    inside += [index < int(extent) - 1 for index, extent in zip(indices, a.shape, strict=True)]
    places = [
        (*indices[:axis], indices[axis] + step, *indices[axis + 1 :])
        for axis in range(len(indices))
        for step in (-1, 1)
    ]
    neighbours = [a[place] for place in places]
    change = DIFFUSION * (total(neighbours) - float(len(neighbours)) * a[indices])
    return tirx.if_then_else(tirx.all(*inside), a[indices] + change, a[indices])


def total(terms: Iterable[tirx.Expr]) -> tirx.Expr:
    """Sum of some terms, from left to right."""
    first, *others = terms
    for term in others:
        first = first + term
    return first


STENCILS: dict[str, Callable[..., tirx.PrimFunc]] = {
    case.__name__: case
    for case in (blur, convolution, cvt_color, gaussian, pipeline, sobel, heat2d, heat3d, wave2d)
}
"""All of them, by name; each takes the rows and columns of its output, and some its ``dtype``."""
