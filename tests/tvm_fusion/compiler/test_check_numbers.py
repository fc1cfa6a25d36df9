# SPDX-License-Identifier: Apache-2.0
"""``check=True``: compiled models against ONNX Runtime and PyTorch's eager mode."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
import pytest

import tvm_fusion
from tvm_fusion.compiler.reference import Reference, check_numbers, onnx_reference
from tvm_fusion.errors import CompilationError, EngineError, InvalidInputError

MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 18]> g (float[n,3] x, int64[2] i) => (float[2,3] y, '
    "int64[2] best) { y = Gather<axis=0>(x, i)  best = ArgMax<axis=1, keepdims=0>(y) }"
)


def test_right_models_pass() -> None:
    pytest.importorskip("onnxruntime")
    model = tvm_fusion.compile(MODEL, shapes={"n": 5}, threads=1, check=True)
    y, best = model(np.eye(5, 3, dtype=np.float32), np.array([1, 2]))
    assert best.tolist() == [1, 2] and y.shape == (2, 3)


class Changed:
    """A compiled model whose outputs are changed."""

    def __init__(self, model: Any, change: Any) -> None:
        self.inputs, self.outputs = model.inputs, model.outputs
        self.model, self.change = model, change

    def __call__(self, *inputs: Any) -> Any:
        return self.change(*self.model(*inputs))


def check(source: onnx.ModelProto, model: Any, coarsest: str | None) -> None:
    check_numbers(onnx_reference(source, model, 0), model, coarsest)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda y, best: (y * 1.1, best), r"'y: float32.*error is 0.1 of .* is 0.001\."),
        (lambda y, best: (y * np.nan, best), "'y: .* a NaN or an infinity is in another place"),
        (lambda y, best: (y[:1], best), r"'y: .* the shape is \(1, 3\) instead of \(2, 3\)"),
        (lambda y, best: (y, best + 1), "'best: .* 100.0% of the elements differ; .* is 1%"),
    ],
)
def test_wrong_outputs_are_named(change: Any, text: str) -> None:
    pytest.importorskip("onnxruntime")
    model = tvm_fusion.compile(MODEL, shapes={"n": 5}, threads=1)
    with pytest.raises(CompilationError, match=f"check=True: output {text}"):
        check(MODEL, Changed(model, change), None)
    check(MODEL, Changed(model, lambda y, best: (y * 1.01, best)), "float16")


def test_what_cannot_be_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="check=True has no effect with ranks"):
        tvm_fusion.compile(MODEL, shapes={"n": 5}, ranks=2, check=True)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match="ONNX Runtime, which is not installed"):
        tvm_fusion.compile(MODEL, shapes={"n": 5}, threads=1, check=True)


def test_models_that_onnx_runtime_refuses() -> None:
    pytest.importorskip("onnxruntime")
    model = tvm_fusion.compile(MODEL, shapes={"n": 5}, threads=1)
    other = onnx.ModelProto.FromString(MODEL.SerializeToString())
    other.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(EngineError, match="ONNX Runtime does not run the model"):
        check(other, model, None)


class TestPrograms:
    """Programs of torch.export."""

    def test_examples_and_random_floats(self) -> None:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")
        from tvm_fusion.torch.front_end import reference

        class Looked(torch.nn.Module):
            def forward(self, x: Any, at: Any, *, scale: float = 2) -> dict[str, Any]:
                return {"y": x[at] * scale, "best": x.argmax(-1)}

        given = (torch.randn(4, 3), torch.tensor([3, 1]))
        program = torch.export.export(Looked(), given, {"scale": 3})
        model = tvm_fusion.compile(program, threads=1, check=True)
        found: Reference = reference(program, model, 0)
        trials = list(found.trials)
        assert found.dtypes >= {"float32", "int64"} and len(trials) == 2
        np.testing.assert_array_equal(trials[0][1][0], 3 * given[0][given[1]].numpy())
        assert (trials[1][0][0] != given[0].numpy()).all()
        np.testing.assert_array_equal(trials[1][0][1], given[1].numpy())
        wrong = Changed(model, lambda y, best: (y + 1, best))
        with pytest.raises(CompilationError, match="differs from that of PyTorch's eager mode"):
            check_numbers(reference(program, model, 0), wrong, None)  # type: ignore[arg-type]
        program.example_inputs = None
        assert len(list(reference(program, model, 0).trials)) == 1
