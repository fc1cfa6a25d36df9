# SPDX-License-Identifier: Apache-2.0
"""Machine code of whole networks, at full size, for the oldest and the newest architectures."""

from __future__ import annotations

from typing import Any

import pytest

from examples.zoo import ZOO
from tvm_fusion.compiler.explain.explain_gpu import explain_kernels

SIZES: dict[str, dict[str, Any]] = {
    "bert_base": {"layers": 1},
    "gpt2": {"layers": 1},
    "mobilenet_v2": {},
    "mobilenet_v3_large": {},
    "resnet_18": {},
    "wide_and_deep": {},
}
STATIC_SHARED_BYTES = 48 << 10
# A few words of the prologue of some convolutions; nvdisasm shows none in a loop.
MOST_SPILLED_BYTES = 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", SIZES)
def test_next_to_nothing_spills(name: str, arch: str) -> None:
    report = explain_kernels(ZOO[name](**SIZES[name]), f"cuda -arch={arch}", resources=True)
    for use in report["functions"]:
        assert use["kernels"] or not use["launches"], use["name"]
        for kernel, used in use["kernels"].items():
            assert used["shared"] <= STATIC_SHARED_BYTES, kernel
            most = MOST_SPILLED_BYTES if "Conv2D" in use["rule"] else 0
            assert used["spill_stores"] <= most, kernel
