# SPDX-License-Identifier: Apache-2.0
"""Tensor cores of NVIDIA GPUs from sm_80 on, by TVM's PTX builtins.

One product is ``m16n8k16``: 16 rows, 8 columns and 16 steps of the sums, of float16 or bfloat16,
summed in float32. Its operands come from shared memory as 8x8 matrices of 16-bit elements. The
layouts of the fragments are those of the PTX manual, sections ``mma.m16n8k16`` and ``ldmatrix``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .intrinsics import shuffle_xor

CHUNK = 16
"""Bytes of a copy, and of a row of an 8x8 matrix."""
_NAMES = {"float16": "f16", "bfloat16": "bf16"}
_ADDRESS = "uint32"
_PACK = """
__forceinline__ __device__ unsigned int tvm_fusion_pack_{dtype}(float low, float high) {{
  unsigned int both;
  asm("cvt.rn.{name}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}}
"""


class TensorCore:
    """Emitter of the instructions of one kernel.

    Parameters
    ----------
    dtype : str
        Of the factors.
    shared_bytes : int
        Shared memory for them.
    """

    def __init__(self, dtype: str, shared_bytes: int):
        self.dtype = dtype
        self.shared = T.alloc_buffer((shared_bytes // 2,), dtype, scope="shared")
        # As a number: TVM would put barriers between accesses of the buffer.
        self._base = T.bind(T.cuda.cvta_generic_to_shared(self.shared.data))

    def copy(
        self, place: tirx.Expr, source: tirx.Buffer, index: tirx.Expr, exists: tirx.Expr | None
    ) -> None:
        """Begin to copy 16 bytes to a byte of shared memory; zeros where they do not exist."""
        size = [] if exists is None else [tirx.Select(exists, _address(CHUNK), _address(0))]
        copy = T.ptx["cp.async.cg.shared.global"]
        T.evaluate(copy(self._at(place), T.address_of(source[index]), CHUNK, *size))

    def store(self, place: tirx.Expr, registers: tirx.Buffer, first: int) -> None:
        """Store 16 bytes of registers to a byte of shared memory."""
        store_vector_at(self.shared, T.bind(place // 2), registers, first)

    def commit(self) -> None:
        """End a group of copies."""
        T.evaluate(T.ptx["cp.async.commit_group"]())

    def wait(self, groups: int) -> None:
        """Wait until only this number of the thread's last groups is still being copied."""
        T.evaluate(T.ptx["cp.async.wait_group"](groups))

    def load(
        self, fragment: tirx.Buffer, first: int, place: tirx.Expr, is_transposed: bool
    ) -> None:
        """Load four 8x8 matrices to registers, of which lanes ``8 i`` and on give the rows of i."""
        name = "x4.trans" if is_transposed else "x4"
        load = T.ptx[f"ldmatrix.sync.aligned.m8n8.{name}.shared.b16"]
        T.evaluate(load(*(fragment[first + k] for k in range(4)), self._at(place)))

    def multiply(
        self, sums: tirx.Buffer, first: int, left: list[tirx.Expr], right: list[tirx.Expr]
    ) -> None:
        """Add the product of four registers of rows and two of columns to four sums."""
        name = _NAMES[self.dtype]
        multiply = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"]
        own = [sums[first + k] for k in range(4)]
        T.evaluate(multiply(*own, *left, *right, *own))

    def pack(self, low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        """Two floats in the type of the factors, as one register of a fragment."""
        return T.cuda.func_call(
            f"tvm_fusion_pack_{self.dtype}",
            low,
            high,
            source_code=_PACK.format(dtype=self.dtype, name=_NAMES[self.dtype]),
            return_type="uint32",
        )

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        """The value of the lane whose number differs by ``mask``."""
        return shuffle_xor(value, mask, 32)

    def _at(self, place: tirx.Expr) -> tirx.Expr:
        return self._base + place.astype(_ADDRESS)


def store_vector_at(
    shared: tirx.Buffer, place: tirx.Expr, registers: tirx.Buffer, first: int
) -> None:
    """Emit one store of eight elements."""
    with T.vectorized(0, CHUNK // 2) as k:
        T.buffer_store(shared, registers[first + k], [place + k])


def _address(value: int) -> tirx.Expr:
    return tirx.const(value, _ADDRESS)
