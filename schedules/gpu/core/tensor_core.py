# SPDX-License-Identifier: Apache-2.0
"""Tensor cores of NVIDIA GPUs from sm_80 on, by TVM's PTX builtins.

One product has 16 rows, 8 columns and 32 bytes of the reduced axis: 16 elements of float16 or
bfloat16, 8 of float32 rounded to the 10 bits of TF32, all summed in float32, or 32 of int8 or
uint8, in any combination, summed in int32. Its operands come from shared memory as matrices of
eight rows of 16 bytes, whatever their elements are. The layouts of the fragments are those of the
PTX manual, sections ``mma.m16n8k8``, ``mma.m16n8k16``, ``mma.m16n8k32`` and ``ldmatrix``.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from .intrinsics import shuffle_xor

CHUNK = 16
"""Bytes of a copy, and of a row of a matrix."""


@dataclass(frozen=True)
class MatrixType:
    """Element types of the factors of a product.

    Parameters
    ----------
    dtype : str
        Type of the left factor in memory.
    right : str
        Type of the right one; other than ``dtype`` only if both are bytes.
    """

    dtype: str
    right: str

    @property
    def name(self) -> str:
        """Name of ``dtype`` in instructions."""
        return _NAMES[self.dtype]

    @property
    def sums(self) -> str:
        """Type of the sums."""
        return "int32" if self.itemsize == 1 else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DataType(self.dtype).bits // 8

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return CHUNK // self.itemsize

    @property
    def register(self) -> str:
        """Type of a sum in the instruction."""
        return "uint32" if self.sums == "int32" else self.sums

    def total(self, register: tirx.Expr) -> tirx.Expr:
        """The sum in a register."""
        return register if self.register == self.sums else T.reinterpret(self.sums, register)

    @property
    def step(self) -> int:
        """Elements of the reduced axis in one product."""
        return 2 * self.chunk

    @property
    def is_rounded(self) -> bool:
        """Return whether elements have more bits than their products take: float32, as TF32."""
        return self.itemsize == 4

    @property
    def transposes(self) -> bool:
        """Return whether ``ldmatrix`` can transpose its matrices, and ``wgmma`` its factors."""
        return self.itemsize == 2

    @property
    def exchanged(self) -> MatrixType:
        """The type of the product with its factors exchanged."""
        return MatrixType(self.right, self.dtype)

    @property
    def warpgroup_columns(self) -> int:
        """Most columns of a warpgroup's product: the PTX manual has none of 256 for bytes."""
        return 128 if self.itemsize == 1 else 256

    @property
    def warpgroup_suffix(self) -> str:
        """End of the name of a warpgroup's product, behind its columns."""
        return f"k{self.step}.{_SUMS[self.sums]}.{self.name}.{_NAMES[self.right]}"

    @property
    def instruction(self) -> str:
        """The product's instruction."""
        shape, total = f"m16n8k{self.step}.row.col", _SUMS[self.sums]
        return f"mma.sync.aligned.{shape}.{total}.{self.name}.{_NAMES[self.right]}.{total}"


_NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32", "int8": "s8", "uint8": "u8"}
_BYTES = ("int8", "uint8")
MATRIX_TYPES = {dtype: MatrixType(dtype, dtype) for dtype in _NAMES}


def product_type(left: str, right: str) -> MatrixType | None:
    """The type of a product of factors of two element types, if tensor cores have it."""
    if left != right and not (left in _BYTES and right in _BYTES):
        return None
    return MatrixType(left, right) if left in _NAMES else None


_SUMS = {"float32": "f32", "int32": "s32"}
_ADDRESS = "uint32"
_PACK = """
__forceinline__ __device__ unsigned int tvm_fusion_pack_{dtype}(float low, float high) {{
  unsigned int both;
  asm("cvt.rn.{name}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}}
"""
_ROUND = """
__forceinline__ __device__ unsigned int tvm_fusion_round_tf32(unsigned int bits) {
  unsigned int rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}
"""
# exp2f has two more instructions, by which its results may be denormal.
_EXP2 = """
__forceinline__ __device__ float tvm_fusion_exp2(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
"""


class RegisterOperations:
    """Emitter of what a thread computes and exchanges between products of a type."""

    type: MatrixType

    def pack(self, low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        """Two floats in the type of the factors, as one register of a fragment."""
        return T.cuda.func_call(
            f"tvm_fusion_pack_{self.type.dtype}",
            low,
            high,
            source_code=_PACK.format(dtype=self.type.dtype, name=self.type.name),
            return_type="uint32",
        )

    def exp2(self, value: tirx.Expr) -> tirx.Expr:
        """Two to the power of a float32, with a relative error of 2^-22; 0 instead of denormals."""
        return T.cuda.func_call("tvm_fusion_exp2", value, source_code=_EXP2, return_type="float32")

    def load_matrices(
        self,
        fragment: tirx.Buffer,
        first: int,
        address: tirx.Expr,
        is_transposed: bool = False,
        shifts: Sequence[tirx.Expr] | None = None,
    ) -> None:
        """Load four matrices to registers, of which lanes ``8 i`` and on give the rows of i.

        ``shifts``, for float32 only, are subtracted from the lane's row of the even and of the odd
        ones.
        """
        name = "x4.trans" if is_transposed else "x4"
        load = T.ptx[f"ldmatrix.sync.aligned.m8n8.{name}.shared.b16"]
        own = [fragment[first + k] for k in range(4)]
        T.evaluate(load(*own, address))
        if self.type.is_rounded:  # the product would drop the other bits
            for k, bits in enumerate(own):
                if shifts is not None:
                    shifted = T.reinterpret("float32", bits) - shifts[k % 2]
                    bits = T.reinterpret("uint32", shifted)
                rounded = T.cuda.func_call(
                    "tvm_fusion_round_tf32", bits, source_code=_ROUND, return_type="uint32"
                )
                T.buffer_store(fragment, rounded, [first + k])

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        """The value of the lane whose number differs by ``mask``."""
        return shuffle_xor(value, mask, 32)


class TensorCore(RegisterOperations):
    """Emitter of the instructions of one kernel.

    Parameters
    ----------
    kind : MatrixType
        Type of the factors.
    shared_bytes : int
        Shared memory for them.
    """

    def __init__(self, kind: MatrixType, shared_bytes: int):
        self.type = kind
        size = shared_bytes // self.type.itemsize
        self.shared = T.alloc_buffer((size,), kind.dtype, scope="shared")
        # The address is a number: TVM would put barriers between accesses of the buffer.
        self._base = T.bind(T.cuda.cvta_generic_to_shared(self.shared.data))

    def of_type(self, kind: MatrixType) -> TensorCore:
        """The instructions for factors of a type of the same size, in the same memory."""
        other = copy(self)
        other.type = kind
        return other

    def copy(
        self, place: tirx.Expr, source: tirx.Buffer, index: tirx.Expr, exists: tirx.Expr | None
    ) -> None:
        """Begin to copy 16 bytes to a byte of shared memory; zeros where they do not exist."""
        size = [] if exists is None else [tirx.Select(exists, _address(CHUNK), _address(0))]
        copy = T.ptx["cp.async.cg.shared.global"]
        T.evaluate(copy(self._at(place), T.address_of(source[index]), CHUNK, *size))

    def store(self, place: tirx.Expr, registers: tirx.Buffer, first: int) -> None:
        """Store 16 bytes of registers, or all if there are fewer, to a byte of shared memory."""
        if self.type.itemsize == 4:  # nvcc splits such a store unless it sees the alignment
            place = T.bind(place // CHUNK) * CHUNK
        shared = self.shared
        if registers.dtype != shared.dtype:  # bytes of the other factor
            shared = T.decl_buffer(shared.shape, registers.dtype, data=shared.data, scope="shared")
        store_vector_at(shared, T.bind(place // self.type.itemsize), registers, first)

    def commit(self) -> None:
        """End a group of copies."""
        T.evaluate(T.ptx["cp.async.commit_group"]())

    def wait(self, groups: int) -> None:
        """Wait until only this number of the thread's last groups is still being copied."""
        T.evaluate(T.ptx["cp.async.wait_group"](groups))

    def load(
        self,
        fragment: tirx.Buffer,
        first: int,
        place: tirx.Expr,
        is_transposed: bool,
        shifts: Sequence[tirx.Expr] | None = None,
    ) -> None:
        """Load four matrices at a byte of shared memory, as :meth:`load_matrices` does."""
        self.load_matrices(fragment, first, self._at(place), is_transposed, shifts)

    def multiply(
        self, sums: tirx.Buffer, first: int, left: list[tirx.Expr], right: list[tirx.Expr]
    ) -> None:
        """Add the product of four registers of rows and two of columns to four sums."""
        multiply = T.ptx[self.type.instruction]
        own = [sums[first + k] for k in range(4)]
        T.evaluate(multiply(*own, *left, *right, *own))

    def _at(self, place: tirx.Expr) -> tirx.Expr:
        return self._base + place.astype(_ADDRESS)


def store_vector_at(
    shared: tirx.Buffer, place: tirx.Expr, registers: tirx.Buffer, first: int
) -> None:
    """Emit one store of 16 bytes, or of all registers if there are fewer."""
    count = CHUNK // (DataType(str(shared.dtype)).bits // 8)
    with T.vectorized(0, min(count, int(registers.shape[0]))) as k:
        T.buffer_store(shared, registers[first + k], [place + k])


def _address(value: int) -> tirx.Expr:
    return tirx.const(value, _ADDRESS)
