# SPDX-License-Identifier: Apache-2.0
"""Pass ``CheckAlignment``: programs on TVM's own virtual machine refuse misaligned arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from relay_passes import CheckAlignment
from relay_passes.program.buffers import CHECK
from tvm_fusion.compiler.pipeline import lower_to_vm

op = relax.op
CPU = Target({"kind": "llvm"})
CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
OPENCL = Target({"kind": "opencl"}, host="llvm")
N = tirx.Var("n", "int64")


def program(build: Callable[..., relax.Expr], **types: tvm.ir.Type) -> tvm.IRModule:
    """``main`` in destination-passing style, for the host."""
    params = [relax.Var(name, of) for name, of in types.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(*params))
        builder.emit_func_output(result)
    with CPU:
        return relax.transform.LegalizeOps()(builder.get())


def machine(mod: tvm.IRModule) -> Callable[..., tvm.runtime.Tensor]:
    built = tvm.compile(mod, CPU, relax_pipeline=lower_to_vm(CPU))
    return relax.VirtualMachine(built, tvm.cpu())["main"]


def tensor(*shape: int) -> relax.TensorType:
    return relax.TensorType(shape, "float32")


def numbers(size: int, offset: int = 0) -> tvm.runtime.Tensor:
    """0, 1, 2 ... in float32, beginning ``offset`` bytes behind a multiple of 64."""
    memory = np.zeros(4 * size + 128, "uint8")
    begin = -memory.ctypes.data % 64 + offset
    data = memory[begin : begin + 4 * size].view("float32")
    data[:] = np.arange(size)
    return tvm_ffi.from_dlpack(data)


def test_misaligned_data_is_refused_by_name() -> None:
    run = machine(program(op.add, left=tensor(64), right=tensor(64)))
    np.testing.assert_array_equal(run(numbers(64), numbers(64)).numpy(), 2 * np.arange(64))
    for offset in (4, 16, 32):
        with pytest.raises(ValueError, match="argument 'right' is misaligned: .* of 64 bytes"):
            run(numbers(64), numbers(64, offset))
        with pytest.raises(ValueError, match="argument 'left' is misaligned"):
            run(numbers(64, offset), numbers(64))


def test_little_data_needs_little() -> None:
    run = machine(program(op.add, x=tensor(5), y=tensor()))
    assert run(numbers(5, 16), tvm.runtime.tensor(np.float32(1))).numpy()[4] == 5
    with pytest.raises(ValueError, match="'x' is misaligned: .* of 16 bytes"):
        run(numbers(5, 8), tvm.runtime.tensor(np.float32(1)))


def test_empty_data_may_begin_anywhere() -> None:
    run = machine(program(op.exp, x=relax.TensorType((N, 4), "float32")))
    data = np.from_dlpack(numbers(8, 4)).reshape(2, 4)
    empty = tvm_ffi.from_dlpack(data[:0])
    assert empty.data_ptr() % 64 and run(empty).shape == (0, 4)
    with pytest.raises(ValueError, match="'x' is misaligned"):
        run(tvm_ffi.from_dlpack(data))


def test_tensors_in_tuples() -> None:
    pair = tvm.ir.TupleType([tensor(64), tvm.ir.TupleType([tensor(64)])])
    mod = program(lambda p, x: op.add(op.add(p[0], x), p[1][0]), pair=pair, x=tensor(64))
    run = machine(mod)
    good, bad = numbers(64), numbers(64, 4)
    np.testing.assert_array_equal(run((good, (good,)), good).numpy(), 3 * np.arange(64))
    with pytest.raises(ValueError, match=r"argument 'pair\[1\]\[0\]' is misaligned"):
        run((good, (bad,)), good)


def alignments(target: Target, shape: tuple[int, ...], dtype: str = "float32") -> list[int]:
    mod = program(op.negative, x=relax.TensorType(shape, dtype))
    text = "".join(
        func.script()
        for var, func in CheckAlignment(target)(mod).functions_items()
        if var.name_hint.startswith(CHECK)
    )
    return [int(part.split()[0]) for part in text.split("multiple of ")[1:]]


def test_what_each_target_needs() -> None:
    """CUDA needs as many bytes as one load reads; OpenCL's tensors have no address."""
    assert alignments(CPU, (64,)) == [64]
    assert alignments(CUDA, (64,)) == [16]
    assert alignments(CUDA, (3,), "float16") == [4]
    for target, shape in ((OPENCL, (64,)), (CUDA, (0, 3)), (CPU, ())):
        assert alignments(target, shape, "int8") == []
