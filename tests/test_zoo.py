# SPDX-License-Identifier: Apache-2.0
"""Models beside the five networks: what their papers say, numbers fit for comparisons, compiled."""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_reference import assert_same, run_onnx
from reduction_checks import run

import tvm_fusion
from examples import zoo
from examples.models import MODELS
from examples.onnx_builder import random_inputs
from examples.zoo import ZOO
from relay_passes import CoalesceReduction, DecomposeNormalization, SimplifyInference
from tvm_fusion.onnx.frontend import import_onnx

NEW = [name for name in ZOO if name not in MODELS]

# Numbers of the published model, without the scalars and statistics that are no parameters.
PARAMETERS = {
    "resnext_50": 25_028_904,
    "regnet_y_400mf": 4_344_144,
    "vgg_16": 138_357_544,
    "unet": 34_513_410,
    "mobilenet_v3_large": 5_483_032,
    "convnext_tiny": 28_589_128,
    "inception_v3": 23_834_568,
    "bert_base": 109_482_240,
    "gpt2": 124_439_808,
}

TRANSFORMER = {"layers": 2, "sequence": 12, "width": 32, "heads": 4, "vocabulary": 99}
SMALL: dict[str, dict[str, Any]] = {
    "resnext_50": {"image_size": 32, "groups": 3},
    "regnet_y_400mf": {"image_size": 32, "layers": 5},
    "vgg_16": {"image_size": 32, "width": 8, "features": 24},
    "unet": {"image_size": 32, "width": 4},
    "mobilenet_v3_large": {"image_size": 32, "layers": 5},
    "convnext_tiny": {"image_size": 32, "width": 16, "depths": (1, 2, 1)},
    "inception_v3": {"image_size": 75, "unit": 1},
    "bert_base": TRANSFORMER,
    "gpt2": TRANSFORMER,
    "wide_and_deep": {"rows": 50, "embedding": 4, "layers": (24, 16), "crosses": 7},
}


def small(name: str, batch: int | str = 2, **sizes: Any) -> onnx.ModelProto:
    """A small version of a model, by the same builder."""
    return ZOO[name](batch, **{**SMALL[name], **sizes})


@functools.cache
def hollow(name: str) -> onnx.ModelProto:
    """A model of its full size without weights."""
    return ZOO[name](weights=False)


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def outputs(compiled: Any, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    result = compiled(**feed)
    return [result] if isinstance(result, np.ndarray) else list(result)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", NEW)
def test_full_size_is_valid_and_imports(name: str) -> None:
    model = hollow(name)
    onnx.checker.check_model(model, full_check=True)
    imported = import_onnx(model)
    assert [list(spec.shape) for spec in imported.outputs] == [dims(v) for v in model.graph.output]
    count = Counter(node.op_type for node in model.graph.node)
    expected = {
        "resnext_50": {"Conv": 53, "Relu": 49, "Add": 16, "MaxPool": 1},
        "regnet_y_400mf": {"Conv": 85, "Sigmoid": 16, "Add": 16, "Mul": 16},
        "vgg_16": {"Conv": 13, "Relu": 15, "MaxPool": 5, "Gemm": 3},
        "unet": {"Conv": 23, "Relu": 22, "MaxPool": 4, "Resize": 4, "Concat": 4},
        "mobilenet_v3_large": {"Conv": 62, "HardSwish": 21, "HardSigmoid": 8, "Add": 10},
        "convnext_tiny": {"Conv": 22, "LayerNormalization": 23, "MatMul": 36, "Erf": 18},
        "inception_v3": {"Conv": 94, "Relu": 94, "AveragePool": 9, "MaxPool": 4, "Concat": 15},
        "bert_base": {"LayerNormalization": 25, "Softmax": 12, "Erf": 12, "Gather": 4, "Tanh": 1},
        "gpt2": {"LayerNormalization": 25, "Softmax": 12, "Tanh": 12, "Gather": 2, "Where": 12},
        "wide_and_deep": {"Gather": 53, "ReduceSum": 1, "Gemm": 4, "Concat": 1, "Sigmoid": 1},
    }[name]
    assert {op_type: count[op_type] for op_type in expected} == expected


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters(name: str) -> None:
    model = hollow(name)
    inputs = [v for v in model.graph.input if v.name.endswith((".weight", ".bias"))]
    tables = [v for v in model.graph.input if v.name.startswith(("embeddings.", "wte", "wpe"))]
    sizes = {v.name: math.prod(map(int, dims(v))) for v in [*inputs, *tables]}
    affine = [t for t in model.graph.initializer if t.name.endswith((".gamma", ".beta"))]
    assert sum(sizes.values()) + sum(math.prod(t.dims) for t in affine) == PARAMETERS[name]


def test_tables_of_wide_and_deep_are_those_of_criteo() -> None:
    model = hollow("wide_and_deep")
    tables = [v for v in model.graph.input if v.name.startswith("embedding.")]
    assert len(tables) == 26
    assert max(dims(table) for table in tables) == [100_000, 32]
    assert [dims(v) for v in model.graph.input[:3]] == [[1, 13], [1, 26], [1, 40]]


# Their operators are those of the other small models, and of SqueezeNet: pools, concatenation;
# groups of channels are those of the tests of convolutions.
LIKE_OTHERS = ("vgg_16", "unet", "regnet_y_400mf", "inception_v3", "resnext_50")
COMPILED = [
    pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in NEW
]


@pytest.mark.quick_cases("bert_base")
@pytest.mark.parametrize("name", COMPILED)
def test_small_version_is_the_same_compiled_and_in_onnx_runtime(name: str) -> None:
    model = small(name)
    onnx.checker.check_model(model, full_check=True)
    compiled = tvm_fusion.compile(model)
    for seed in range(2):
        feed = random_inputs(model, seed)
        assert_same(outputs(compiled, feed), run_onnx(model, feed), limit=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("convnext_tiny", "gpt2") else pytest.param(name, marks=pytest.mark.slow)
        for name in NEW
    ],
)
def test_small_version_decomposed(name: str) -> None:
    """Norms, softmax and pools as coalesced reductions, and TVM's own kernels for the rest."""
    model = small(name, 1)
    mod = SimplifyInference()(import_onnx(model).mod)
    mod = CoalesceReduction()(DecomposeNormalization()(mod))
    text = str(mod)
    assert not any(f"R.nn.{op}" in text for op in ("softmax", "layer_norm"))
    windows = sum(node.op_type == "AveragePool" for node in model.graph.node)
    assert text.count("R.nn.avg_pool2d") == windows
    feed = random_inputs(model, 3)
    result = run(mod, *feed.values())
    results = [result] if isinstance(result, np.ndarray) else list(result)
    assert_same(results, run_onnx(model, feed), limit=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NEW if name != "unet"])  # Resize has none
def test_symbolic_batch(name: str) -> None:
    model = small(name, "rows")
    onnx.checker.check_model(model, full_check=True)
    assert import_onnx(model, {"rows": "rows"}).outputs[0].shape[0] == "rows"
    one, two = small(name, 1), small(name, 2)
    for fixed, count in ((one, 1), (two, 2)):
        feed = random_inputs(model, 5, rows=count)
        assert_same(run_onnx(model, feed), run_onnx(fixed, feed), limit=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "gpt2"])
def test_symbolic_batch_compiled_for_three(name: str) -> None:
    model = small(name, "rows")
    compiled = tvm_fusion.compile(model, shapes={"rows": 3})
    feed = random_inputs(model, 1, rows=3)
    assert_same(outputs(compiled, feed), run_onnx(model, feed), limit=1e-5)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", NEW)
def test_outputs_depend_on_the_input_and_keep_their_range(name: str) -> None:
    model = small(name, 4)
    for result in run_onnx(model, random_inputs(model, 7)):
        assert np.isfinite(result).all()
        assert 0.02 < result.std() < 20
        assert np.abs(result[0] - result[1]).max() > 0.02 * result.std()


def test_attention_of_gpt2_sees_no_later_tokens() -> None:
    model = small("gpt2", 1)
    feed = random_inputs(model, 0)
    (before,) = run_onnx(model, feed)
    feed["input_ids"][0, 7:] = (feed["input_ids"][0, 7:] + 1) % TRANSFORMER["vocabulary"]
    (after,) = run_onnx(model, feed)
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert np.abs(before[0, 7:] - after[0, 7:]).max(axis=1).min() > 1e-3


def test_attention_of_bert_sees_no_masked_tokens() -> None:
    model = small("bert_base", 1)
    feed = random_inputs(model, 0)
    feed["attention_mask"][:] = np.arange(12) < 7
    before = run_onnx(model, feed)[0]
    feed["input_ids"][0, 7:] = (feed["input_ids"][0, 7:] + 1) % TRANSFORMER["vocabulary"]
    after = run_onnx(model, feed)[0]
    np.testing.assert_array_equal(before[0, :7], after[0, :7])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_seed_decides_the_weights(name: str) -> None:
    assert small(name, seed=1).SerializeToString() == small(name, seed=1).SerializeToString()
    assert small(name, seed=1).SerializeToString() != small(name, seed=2).SerializeToString()


def test_weights_left_out_are_inputs_of_the_same_graph() -> None:
    whole, without = small("bert_base"), small("bert_base", weights=False)
    weights = {t.name: t for t in whole.graph.initializer if t.data_type == TensorProto.FLOAT}
    feed = random_inputs(whole)
    extra = [v.name for v in without.graph.input if v.name not in feed]
    feed.update({name: onnx.numpy_helper.to_array(weights[name]) for name in extra})
    assert_same(run_onnx(without, feed), run_onnx(whole, random_inputs(whole)), limit=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ZOO["vgg_16"](image_size=100), "image_size is 100; expected a multiple of 32"),
        (lambda: ZOO["unet"](image_size=100), "image_size is 100; expected a multiple of 16"),
        (
            lambda: ZOO["convnext_tiny"](image_size=48),
            "image_size is 48; expected a multiple of 32",
        ),
        (lambda: ZOO["inception_v3"](image_size=74), "image_size is 74; expected at least 75"),
        (lambda: ZOO["bert_base"](sequence=513), "sequence is 513; expected 1 to 512 tokens"),
        (lambda: ZOO["gpt2"](sequence=0), "sequence is 0; expected 1 to 1024 tokens"),
        (lambda: ZOO["gpt2"](heads=5), "width is 768; expected a multiple of the 5 heads"),
        (lambda: ZOO["mobilenet_v3_large"](layers=99), "layers is 99; expected 1 to 15 residual"),
        (lambda: ZOO["mobilenet_v3_large"](layers=-1), "layers is -1; expected 1 to 15 residual"),
        (lambda: zoo.read_sizes("gpt2", ["depth=2"]), "'depth=2' is no size of gpt2; expected NAM"),
        (lambda: zoo.read_sizes("gpt2", ["layers=n"]), "'layers=n' is no size of gpt2"),
        (lambda: zoo.read_sizes("gpt2", ["weights=0"]), "with a name of batch, sequence, seed, la"),
    ],
)
def test_refusals(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model.onnx"
    command = ["gpt2", "-o", str(output), "batch=n"]
    command += [f"{key}={value}" for key, value in TRANSFORMER.items()]
    monkeypatch.setattr(sys, "argv", ["zoo.py", *command])
    zoo.main()
    assert "model.onnx: " in capsys.readouterr().out
    assert dims(onnx.load(output).graph.input[0]) == ["n", 12]
    with pytest.raises(SystemExit):
        zoo.main(["gpt2", "width=wide"])
    assert "'width=wide' is no size of gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["gpt2", "layers=0"], "'layers=0' is no size of gpt2; expected NAME=NUMBER, above 0"),
        (["gpt2", "layers=²"], "'layers=²' is no size of gpt2"),
        (["vgg_16", "image_size=100"], "image_size is 100; expected a multiple of 32"),
        (["wide_and_deep", "rows=9", "seed=0", "-o", "no/such/folder.onnx"], "no/such/folder.onnx"),
    ],
)
def test_wrong_command_lines_end_with_a_message(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        zoo.main(command)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bert_base", {"layers": 2}),
        ("gpt2", {"layers": 2}),
        ("wide_and_deep", {"batch": 16}),
        ("mobilenet_v3_large", {}),
        ("vgg_16", {"image_size": 64}),
        ("convnext_tiny", {"image_size": 64}),
        ("inception_v3", {"image_size": 107}),
    ],
)
def test_full_width(name: str, sizes: dict[str, int]) -> None:
    model = ZOO[name](**sizes)
    compiled = tvm_fusion.compile(model)
    feed = random_inputs(model, 2)
    assert_same(outputs(compiled, feed), run_onnx(model, feed), limit=2e-5)
