# SPDX-License-Identifier: Apache-2.0
"""Open shapes are refused, known ones are not."""

from __future__ import annotations

import pytest

from tvm_fusion.errors import InvalidInputError, InvalidModelError, TVMFusionError
from tvm_fusion.runtime.host_arrays import TensorSpec, refuse_open_shapes

FIXED = [TensorSpec("x", (1, 3), "float32"), TensorSpec("scalar", (), "int64")]


@pytest.mark.parametrize("error", [InvalidInputError, InvalidModelError])
def test_the_input_and_the_remedy_are_named(error: type[TVMFusionError]) -> None:
    specs = [*FIXED, TensorSpec("y", ("n", 3), "float32")]
    with pytest.raises(error, match=r"^input 'y' has the open shape \(n, 3\); do that$"):
        refuse_open_shapes(specs, error, "do that")


def test_known_shapes_pass() -> None:
    refuse_open_shapes(FIXED, InvalidInputError, "do that")
