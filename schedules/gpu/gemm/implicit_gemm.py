# SPDX-License-Identifier: Apache-2.0
"""A packed convolution as the product of two matrices: its extents and its places in memory.

The product has a row for each output channel, a column for each output pixel of the batch, and
sums over input channels and taps in *quads*: four input channels of one tap, which are 16 bytes
of data; of data in NCHW, four neighbours in the order channel, kernel row, kernel column. The
weights ``[blocks][taps of all inputs][4]`` of a block of four output channels are one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.workload.conv2d import Conv2DKernel, ConvLayer

LANES = 4
INT32_LIMIT = 1 << 31

Index: TypeAlias = "tirx.Expr | int"


@dataclass(frozen=True)
class ConvShape:
    """Extents of one convolution in ``NCHW4c``.

    Parameters
    ----------
    layer : ConvLayer
        Attributes; channel counts are the true ones.
    batch : tirx.Expr | int
        Number of images; an expression where it is symbolic.
    size : tuple[int, int]
        Height and width of the data.
    plain_data : bool
        Whether the data is NCHW.
    """

    layer: ConvLayer
    batch: Index
    size: tuple[int, int]
    plain_data: bool = False

    @classmethod
    def of(cls, kernel: Conv2DKernel, batch: Index) -> ConvShape:
        """The shape of a kernel with one layer, whose batch may be symbolic."""
        assert kernel.height is not None and kernel.width is not None
        size = (kernel.height, kernel.width)
        return cls(kernel.layers[0], batch, size, kernel.data_layout == "NCHW")

    @property
    def images(self) -> int:
        """The batch in estimates: a symbolic one counts as one image."""
        return self.batch if isinstance(self.batch, int) else 1

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.layer.output_size(*self.size)

    @property
    def out_pixels(self) -> int:
        """Pixels of one image of the output."""
        return self.out_size[0] * self.out_size[1]

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return self.layer.kernel[0] * self.layer.kernel[1]

    @property
    def groups(self) -> int:
        """Number of independent products; a depthwise layer, which is no product, has one."""
        return 1 if self.layer.is_depthwise else self.layer.groups

    @property
    def in_blocks(self) -> int:
        """Blocks of four input channels of one group."""
        return -(-self.layer.in_channels // self.groups // LANES)

    @property
    def out_blocks(self) -> int:
        """Blocks of four output channels of one group."""
        return -(-self.layer.out_channels // self.groups // LANES)

    @property
    def rows(self) -> int:
        """Length of the sums of one output, pad lanes included."""
        channels = self.layer.in_channels if self.plain_data else self.in_blocks * LANES
        return channels * self.taps

    @property
    def quads(self) -> int:
        """Length of the sums in steps of four."""
        return -(-self.rows // LANES)

    @property
    def planes(self) -> int:
        """Planes of an image of the data: blocks of four channels, or channels of NCHW."""
        return self.layer.in_channels if self.plain_data else self.groups * self.in_blocks

    @property
    def out_planes(self) -> int:
        """Blocks of four channels of an image of the output."""
        return self.groups * self.out_blocks

    @property
    def index_dtype(self) -> str:
        """Type of indices: int32 where all of them are known to fit."""
        if not isinstance(self.batch, int):
            return "int64"
        data = self.planes * self.size[0] * self.size[1]
        largest = LANES * self.batch * max(data, self.out_planes * self.out_pixels)
        return "int32" if largest < INT32_LIMIT else "int64"

    def const(self, value: Index) -> tirx.Expr:
        """A number, or an extent, in the type of indices."""
        if isinstance(value, int):
            return tirx.const(value, self.index_dtype)
        return value.astype(self.index_dtype)

    @property
    def pixels(self) -> Index:
        """Pixels of the output of all images."""
        return self.batch * self.out_pixels

    def split_pixel(self, pixel: tirx.Expr) -> tuple[Index, tirx.Expr]:
        """Image of a pixel of the batch, and its place in the image."""
        if isinstance(self.batch, int) and self.batch == 1:
            return 0, pixel
        return pixel // self.const(self.out_pixels), pixel % self.const(self.out_pixels)

    def out_place(self, block: tirx.Expr, pixel: tirx.Expr) -> tirx.Expr:
        """Place of a block of channels, counted over all groups, in the output; in fours."""
        image, place = self.split_pixel(pixel)
        return (image * self.out_planes + block) * self.out_pixels + place


@dataclass(frozen=True)
class Window:
    """First position of the window of one output pixel.

    Parameters
    ----------
    base : tirx.Expr | int
        Place of the image in the data, in pixels of planes.
    row, column : tirx.Expr
        Those of the first tap, negative in the padding.
    """

    base: Index
    row: tirx.Expr
    column: tirx.Expr


def window_of(shape: ConvShape, pixel: tirx.Expr) -> Window:
    """The window of a pixel of the batch, which must exist; its parts are bound to variables."""
    image, place = shape.split_pixel(pixel)
    width = shape.const(shape.out_size[1])
    top, left, _, _ = shape.layer.padding
    plane = shape.size[0] * shape.size[1]
    base = 0 if isinstance(image, int) else T.bind(image * (shape.planes * plane))
    row = T.bind(place // width * shape.layer.strides[0] - top)
    column = T.bind(place % width * shape.layer.strides[1] - left)
    return Window(base, row, column)


def inside(shape: ConvShape, row: Index, column: Index, anywhere: bool = False) -> list[tirx.Expr]:
    """Condition for a place to lie in the image.

    Parameters
    ----------
    shape : ConvShape
        The convolution.
    row, column : Index
        The place.
    anywhere : bool
        Whether it may be any place, and not only one that a window of an output reaches.
    """
    conditions = []
    for axis, place in enumerate((row, column)):
        if shape.layer.padding[axis] or anywhere:
            conditions.append(place >= 0)
        if _reaches_end(shape, axis) or anywhere:
            conditions.append(place < shape.size[axis])
    return conditions


def _reaches_end(shape: ConvShape, axis: int) -> bool:
    """Return whether the last window ends past the image."""
    layer = shape.layer
    start = (shape.out_size[axis] - 1) * layer.strides[axis] - layer.padding[axis]
    return start + (layer.kernel[axis] - 1) * layer.dilation[axis] >= shape.size[axis]
