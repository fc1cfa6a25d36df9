# SPDX-License-Identifier: Apache-2.0
"""Opening a scheduled function with the signature of the function that it implements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.errors import OpError
from schedules.tir.extents import extent_of
from schedules.tir.parameter_windows import windows_of
from schedules.tir.vector_math import vectorize_math
from schedules.workload.conv2d import WORDS

from .micro_kernel import FeatureMap, Index

MAX_ELEMENTS = 2**31 - 1
"""Largest number of elements that a 32-bit integer counts."""
STACK_BYTES = 1023
"""Most bytes of a buffer that TVM 0.27 puts on the stack; it takes larger ones from the heap."""


class KernelBuilder:
    """Writes a function with the parameters and attributes of ``func``.

    Attributes
    ----------
    flat : list[tirx.Buffer]
        One-dimensional views of the tensors among the parameters, in order, valid inside
        :meth:`body`. Numbers among them stay parameters.
    """

    def __init__(self, func: tirx.PrimFunc):
        self.func = func
        self.buffers = buffers(func)
        self.flat: list[tirx.Buffer] = []
        self._windows = windows_of(func)
        self._seen: set[int] = set()  # positions whose windows are heeded
        self._result: tirx.PrimFunc | None = None

    @property
    def batch(self) -> Index:
        """Number of images, which the loop over them counts.

        It has 64 bits where it is symbolic, or where a parameter has too many elements for 32 bits;
        the offsets of the images then have 64 bits, too. Within an image they have 32 bits.

        Raises
        ------
        OpError
            If an image has more elements than 32 bits count.
        """
        batch = self.buffers[0].shape[0]
        sizes = [_elements(buffer, 1) for buffer in self.buffers]
        if max(sizes) > MAX_ELEMENTS:
            buffer = self.buffers[sizes.index(max(sizes))]
            raise OpError(
                f"{self.func.attrs.get(attributes.OP, 'kernel')}: an image of {buffer.name!r} of "
                f"shape {', '.join(map(_text, buffer.shape))} has {max(sizes)} elements; "
                f"at most {MAX_ELEMENTS} can be compiled: use smaller images"
            )
        if not isinstance(batch, tirx.IntImm):
            return batch
        wide = any(_elements(buffer, 0) > MAX_ELEMENTS for buffer in self.buffers)
        return tirx.IntImm("int64", int(batch)) if wide else int(batch)

    @contextmanager
    def body(self) -> Iterator[None]:
        """Open the function; what is built inside becomes its body."""
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name("main")
                for param in self.func.params:
                    T.arg(param.name, param)
                T.func_attr(dict(self.func.attrs))
                with T.sblock("root"):
                    T.reads()
                    T.writes()
                    self.flat = [self._flatten(buffer) for buffer in self.buffers]
                    yield
        written = builder.get()  # named by the builder; the module names it by its variable
        named = "global_symbol" in self.func.attrs
        self._result = written if named else written.without_attr("global_symbol")

    def schedule(self) -> s_tir.Schedule:
        """The finished function as a schedule, its elementary functions as vector code."""
        assert self._result is not None, "body() has not been closed"
        if self._windows.keys() - self._seen:
            raise OpError("this kernel cannot read or write a part of a larger tensor")
        return s_tir.Schedule(tvm.IRModule({"main": vectorize_math(self._result)}))

    @staticmethod
    def _flatten(buffer: tirx.Buffer) -> tirx.Buffer:
        size: tirx.Expr = tirx.IntImm("int64", 1)
        for extent in buffer.shape:
            size = size * extent
        return T.decl_buffer((size,), buffer.dtype, data=buffer.data)

    def words(self, position: int) -> tirx.Buffer:
        """The elements of a parameter as words of int32; valid inside :meth:`body`."""
        flat = self.flat[position]
        each = WORDS[str(flat.dtype)]
        return T.decl_buffer((flat.shape[0] // each,), "int32", data=flat.data)

    def bits(self, position: int) -> tirx.Buffer:
        """A parameter, those of bfloat16 as their bits in uint16; valid inside :meth:`body`."""
        flat = self.flat[position]
        if str(flat.dtype) != "bfloat16":
            return flat
        return T.decl_buffer((flat.shape[0],), "uint16", data=flat.data)

    def feature_map(self, position: int, image: Index) -> FeatureMap:
        """The parameter at ``position`` as the feature map of one image of the batch.

        Five-dimensional parameters are ``NCHW[x]c``, four-dimensional ones NCHW. Of one with a
        window it is that: some blocks of channels, or rows.
        """
        shape = [int(extent) for extent in self.buffers[position].shape[1:]]
        lanes = shape[3] if len(shape) == 4 else 1
        channels, height, width = shape[:3]
        plane = height * width * lanes
        offset = image * (channels * plane)
        number = position % len(self.buffers)
        if number in self._windows:
            self._seen.add(number)
            _, (block, _), (row, last), *_ = self._windows[number]
            offset, height = offset + (block * plane + row * width * lanes), last - row
        return FeatureMap(
            buffer=self.flat[position],
            offset=offset,
            block_stride=plane,
            row_stride=width * lanes,
            lanes=lanes,
            height=height,
            width=width,
        )


def buffers(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """Tensors among the parameters; a number stands for a dimension, as in a batch of ``2 * n``."""
    return [param for param in func.params if isinstance(param.ty, tirx.BufferType)]


def _text(extent: tirx.Expr) -> str:
    return str(extent_of(extent))


def _elements(buffer: tirx.Buffer, first: int) -> int:
    """Product of a buffer's known extents from the ``first`` on."""
    extents = buffer.shape[first:]
    return math.prod(int(extent) for extent in extents if isinstance(extent, tirx.IntImm))
