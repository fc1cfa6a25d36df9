# SPDX-License-Identifier: Apache-2.0
"""Paths, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_fusion.errors import ArtifactError, TuningError
from tvm_fusion.paths import as_path


class Bytes:
    """A path of bytes."""

    def __fspath__(self) -> bytes:
        return b"x"


def test_strings_and_objects_are_paths() -> None:
    assert as_path("a/b", ArtifactError) == as_path(Path("a/b"), ArtifactError) == Path("a/b")


@pytest.mark.parametrize("value", [None, 3, 2.5, b"x", [], object(), Bytes()])
def test_all_else_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(TuningError, match=f"is a {type(value).__name__}; expected a path"):
        as_path(value, TuningError)
