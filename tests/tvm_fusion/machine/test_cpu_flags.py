# SPDX-License-Identifier: Apache-2.0
"""CPU features that Linux lists, and that they are those which LLVM finds."""

from __future__ import annotations

from pathlib import Path

from tvm_fusion.compiler.targets import required_features, resolve
from tvm_fusion.machine import host
from tvm_fusion.machine.host import flagged_features


def test_flags_have_the_names_that_llvm_gives_them(tmp_path: Path) -> None:
    source = tmp_path / "x86"
    source.write_text("flags\t\t: fpu pni sse4_1 avx2 abm\n\nflags\t\t: pni sse4_1 avx2 fma abm\n")
    assert flagged_features(source) == {"sse3", "sse4.1", "avx2", "lzcnt"}
    source = tmp_path / "arm"
    source.write_text("Features\t: fp asimd crc32 atomics sve\nbugs : fma\n")
    assert flagged_features(source) == {"fp-armv8", "neon", "crc", "lse", "sve"}
    assert flagged_features(tmp_path / "nothing") == frozenset()


def test_flags_agree_with_what_llvm_finds() -> None:
    flags = flagged_features()
    assert {"x86_64": "sse4.2", "aarch64": "neon"}[host.host_arch()] in flags
    absent = {name for name, there in host.probe_features().items() if not there}
    assert not flags & absent


def test_all_that_code_for_this_machine_needs_is_listed() -> None:
    assert set(required_features(resolve("native"))) <= flagged_features()
