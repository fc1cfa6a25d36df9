# SPDX-License-Identifier: Apache-2.0
"""Models for open shapes: a variant for the sizes of each call."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import parser

import tvm_fusion
from tvm_fusion.compiler import specialized_model
from tvm_fusion.compiler.specialized_model import SpecializedModel
from tvm_fusion.errors import ArtifactError, InvalidInputError, InvalidModelError
from tvm_fusion.runtime.compiled_model import CompiledModel

WEIGHTS = np.random.default_rng(7).standard_normal((64, 64), dtype=np.float32)


def attention() -> onnx.ModelProto:
    """Scores of tokens, with the last places of each row hidden by a mask."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[batch, sequence, 64] x, int64[batch, sequence] mask) => (float[b, s, t] y) {
            q = MatMul(x, w)
            k = Transpose<perm=[0, 2, 1]>(x)
            scores = MatMul(q, k)
            one = Constant<value: tensor = int64[1] {1}>()
            row = Unsqueeze(mask, one)
            hidden = Cast<to=9>(row)
            low = Constant<value: tensor = float[1] {-10000.0}>()
            kept = Where(hidden, scores, low)
            y = Softmax<axis=-1>(kept)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHTS, "w"))
    return model


def tokens(batch: int, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(batch * 100 + sequence)
    mask = np.ones((batch, sequence), np.int64)
    mask[:, sequence // 2 + 1 :] = 0
    return rng.standard_normal((batch, sequence, 64), dtype=np.float32), mask


def expected(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = x.astype(np.float64) @ WEIGHTS @ x.astype(np.float64).transpose(0, 2, 1)
    scores = np.where(mask[:, None], scores, -10000.0)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Shapes of all compilations."""
    shapes: list[dict] = []
    real = specialized_model.compile

    def count(*args: object, **kwargs: object) -> CompiledModel:
        shapes.append(kwargs["shapes"])  # type: ignore[arg-type]
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(specialized_model, "compile", count)
    return shapes


def test_sizes_are_compiled_when_they_come_and_the_last_ones_kept(compiled: list[dict]) -> None:
    model = tvm_fusion.specialize(attention(), threads=1, variants=2)
    assert model.dimensions == ("batch", "sequence")
    for batch, sequence in [(1, 4), (2, 5), (1, 4), (3, 1), (2, 5)]:
        x, mask = tokens(batch, sequence)
        np.testing.assert_allclose(model(x, mask=mask), expected(x, mask), rtol=1e-4, atol=1e-6)
    assert [shapes["mask"] for shapes in compiled] == [(1, 4), (2, 5), (3, 1), (2, 5)]
    assert model.variants == [{"batch": 3, "sequence": 1}, {"batch": 2, "sequence": 5}]
    assert "2 of 2 variants" in repr(model)


def test_variants_share_their_weights() -> None:
    model = tvm_fusion.specialize(attention(), threads=1)
    first = model.variant({"batch": 1, "sequence": 4})
    second = model.variant({"batch": 1, "sequence": 8})
    big = [w for w in first._weights if np.from_dlpack(w).size == WEIGHTS.size]
    assert big and all(any(w is other for other in second._weights) for w in big)


def test_threads_compile_a_variant_once(compiled: list[dict]) -> None:
    model = tvm_fusion.specialize(attention(), threads=1)
    start = threading.Barrier(3)
    x, mask = tokens(2, 3)

    def call(_: int) -> np.ndarray:
        start.wait()
        return model(x, mask)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(call, range(3)))
    assert len(compiled) == 1
    np.testing.assert_array_equal(results[1], results[0])


def test_a_failed_compilation_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tvm_fusion.specialize(attention(), threads=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(specialized_model, "compile", _interrupted)
        model(*tokens(1, 2))
    assert model.variants == []
    x, mask = tokens(1, 2)
    np.testing.assert_allclose(model(x, mask), expected(x, mask), rtol=1e-4, atol=1e-6)


def _interrupted(*_: object, **__: object) -> CompiledModel:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def limited() -> SpecializedModel:
    shapes = {"batch": 2, "sequence": range(4, 65, 4)}
    return tvm_fusion.specialize(attention(), threads=1, shapes=shapes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (tokens(2, 6), "dimension 'sequence' is 6; expected 4 to 64 in steps of 4"),
        (tokens(2, 68), "dimension 'sequence' is 68; expected 4 to 64"),
        ((tokens(2, 4)[0], tokens(2, 8)[1]), "'sequence' is 8 in input 'mask' and 4 in another"),
        ((tokens(2, 4)[0], [[1, 1]]), "input 'mask' is of list; expected an array of shape"),
        ((tokens(2, 4)[0][0], tokens(2, 4)[1]), r"input 'x' is of shape \(4, 64\)"),
        ((tokens(2, 4)[0],), "missing|mask"),
        (tokens(3, 4), r"x.*\(2, 4, 64\)|2"),
    ],
)
def test_calls_that_are_refused(limited: SpecializedModel, arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        limited(*arguments)


def test_variants_that_are_refused(limited: SpecializedModel) -> None:
    with pytest.raises(InvalidInputError, match="sizes of batch; expected those of sequence"):
        limited.variant({"batch": 1})
    with pytest.raises(InvalidInputError, match="'sequence' is 0"):
        limited.variant({"sequence": 0})
    with pytest.raises(ArtifactError, match="save its variants instead"):
        limited.save("model.so")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"length": 4}, "names 'length', which is neither an input nor an open dimension"),
        ({"length": range(4)}, "limits 'length'; the open dimensions are batch, sequence"),
        ([4], "expected a mapping"),
    ],
)
def test_shapes_that_are_refused(shapes: object, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        tvm_fusion.specialize(attention(), shapes=shapes)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="variants is 'x'; expected an integer"):
        tvm_fusion.specialize(attention(), variants="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="variants is 0"):
        tvm_fusion.specialize(attention(), variants=0)


def test_heights_and_widths_without_a_name() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[1, 3, ?, ?] x) => (float[n, c, h, w] y) {
            y = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(x)
        }"""
    )
    pooled = tvm_fusion.specialize(model, threads=1, shapes={"x_2": range(2, 100)})
    assert pooled.inputs[0].shape == (1, 3, "x_2", "x_3")
    for height, width in [(4, 6), (7, 3)]:
        x = np.random.default_rng(height).standard_normal((1, 3, height, width), dtype="float32")
        blocks = x[:, :, : height // 2 * 2, : width // 2 * 2]
        shape = (1, 3, height // 2, 2, width // 2, 2)
        np.testing.assert_array_equal(pooled(x), blocks.reshape(shape).max((3, 5)))
