# SPDX-License-Identifier: Apache-2.0
"""Machine code of several CUDA texts."""

from __future__ import annotations

import threading

import pytest

from tvm_fusion.codegen import library_bin
from tvm_fusion.codegen.nvrtc import MachineCode
from tvm_fusion.errors import CompilationError


def test_texts_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)

    def compile_cuda(text: str, arch: str, fast_math: bool) -> MachineCode:
        both.wait()
        return MachineCode(b"", f"Compiling entry function '{text}' for '{arch}'\nUsed 8 registers")

    monkeypatch.setattr(library_bin, "cuda_texts", lambda _: ["first", "second"])
    monkeypatch.setattr(library_bin, "compile_cuda", compile_cuda)
    monkeypatch.setattr(library_bin, "physical_cores", lambda: 2)
    used = library_bin.compile_kernels(None, "sm_90")
    assert list(used) == ["first", "second"] and used["second"].registers == 8


def test_an_error_in_one_text_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_cuda(text: str, arch: str, fast_math: bool) -> MachineCode:
        if text == "second":
            raise CompilationError(f"refused {text}")
        return MachineCode(b"", "")

    monkeypatch.setattr(library_bin, "cuda_texts", lambda _: ["first", "second", "third"])
    monkeypatch.setattr(library_bin, "compile_cuda", compile_cuda)
    with pytest.raises(CompilationError, match="refused second"):
        library_bin.compile_kernels(None, "sm_90")
