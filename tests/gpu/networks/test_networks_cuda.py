# SPDX-License-Identifier: Apache-2.0
"""Machine code of whole networks, at full size, for the oldest and the newest architectures."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_text import count, opcodes, sass

from examples.zoo import ZOO
from tvm_fusion.codegen.library_bin import cuda_texts
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.explain import explain_kernels
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

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


# Kernels of twelve layers; TVM's own pipeline has 189 and 233.
MOST_KERNELS = {"bert_base": 75, "gpt2": 90}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_KERNELS)
def test_a_transformer_is_few_kernels(name: str) -> None:
    """Kernels of one layer and of two, at full width, give those of all layers."""
    target, counts = resolve("cuda -arch=sm_90"), []
    for layers in (1, 2):
        imported = import_onnx(ZOO[name](layers=layers, vocabulary=100)).mod
        optimised = pipeline.optimize(imported, target)
        counts.append(sum(use.launches for use in kernel_uses(optimised)))
    assert counts[0] + 11 * (counts[1] - counts[0]) <= MOST_KERNELS[name]


HALVES: dict[str, dict[str, Any]] = {
    "bert_base": {"layers": 1, "vocabulary": 100},
    "gpt2": {"layers": 1, "vocabulary": 100},
    "resnet_50": {},
}


def tensor_core_unit(names: list[str]) -> str | None:
    """The instruction by which a kernel multiplies matrices, if it does."""
    return next((each for each in ("HGMMA", "HMMA") if count(names, each)), None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("name", HALVES)
def test_products_and_convolutions_of_float16_run_on_tensor_cores(name: str, arch: str) -> None:
    """All but those of one row, the pooler of BERT and the classifier of ResNet-50."""
    target = resolve(f"cuda -arch={arch}")
    imported = import_onnx(ZOO[name](**HALVES[name])).mod
    mod = pipeline.optimize(imported, target, Options(precision="fp16"))
    rules = {use.name: use.rule.removesuffix(" (warpgroups)") for use in kernel_uses(mod)}
    kernels = ("Matmul", "AnyConv2D", "Conv2D")
    products = [each for each, rule in rules.items() if rule in kernels]
    executable = pipeline.build_apart(mod, target).executable
    code = {k: opcodes(v) for text in cuda_texts(executable) for k, v in sass(text, arch).items()}
    units = {each: tensor_core_unit(code[f"{each}_kernel"]) for each in products}
    ordinary = {each for each, unit in units.items() if unit is None}
    assert len(products) - len(ordinary) >= 4
    assert len(ordinary) == (0 if name == "gpt2" else 1)
    assert not any("conv" in each for each in ordinary)
    convolutions = [each for each in products if "conv" in each]
    assert bool(convolutions) is (name == "resnet_50")
    assert {units[each] for each in convolutions} <= {"HMMA", "HGMMA"}
    if arch == "sm_90a" and convolutions:
        by_warpgroups = [each for each in convolutions if units[each] == "HGMMA"]
        assert len(by_warpgroups) >= len(convolutions) // 4  # Convolutions of one image.
    # The image has three channels; all others are in blocks, and copied as they lie.
    names = [code[f"{each}_kernel"] for each in convolutions]
    assert sum(bool(count(each, "STS")) for each in names) == len(names[:1])
    assert not any("pack" in use.name and "mean" not in use.name for use in kernel_uses(mod))
