# SPDX-License-Identifier: Apache-2.0
"""The backend of ``torch.compile``: numbers of eager mode, recompilation, what stays eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402

from tests.tvm_fusion.pytorch.torch_modules import (  # noqa: E402
    TransformerBlock,
    convolutions,
    image,
)
from tvm_fusion.errors import EagerModeWarning  # noqa: E402
from tvm_fusion.torch.backend import tvm_fusion  # noqa: E402


@pytest.fixture(autouse=True)
def models(kept_models: list[Any]) -> list[Any]:
    """The models that are compiled; eager mode is an error."""
    return kept_models


def accelerate(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=tvm_fusion, options={"threads": 1}, **options)


class Encoder(nn.Module):
    """A layer with a mask of keys, then attention alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x, src_key_padding_mask=mask)
        return self.attention(y, y, y)


def own(caught: pytest.WarningsRecorder) -> int:
    """Number of our warnings; PyTorch has others, about itself."""
    return sum(warning.category is EagerModeWarning for warning in caught)


def check(fast: Callable[..., Any], model: Callable[..., Any], *inputs: torch.Tensor) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(fast(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


def test_entry_point_gives_the_backend(models: list[Any]) -> None:
    assert "tvm_fusion" in torch._dynamo.list_backends()
    model = convolutions()
    check(torch.compile(model, backend="tvm_fusion"), model, image())
    assert [m.threads for m in models] == [torch.get_num_threads()]


@pytest.mark.slow
def test_views_and_layouts_are_resolved(models: list[Any]) -> None:
    model = convolutions()
    check(accelerate(model), model, image().contiguous(memory_format=torch.channels_last))
    numbers = torch.randn(6, 8, dtype=torch.complex64)
    check(accelerate(torch.relu), torch.relu, numbers.conj().imag)
    check(accelerate(torch.relu), torch.relu, torch.randn(8, 6)[::2, 1::2])
    check(accelerate(torch.relu), torch.relu, torch.randn(8, 6).bfloat16())


@pytest.mark.slow
def test_marked_batch_is_compiled_once(models: list[Any]) -> None:
    model = convolutions()
    fast = accelerate(model)
    for batch in (2, 5, 9):
        x = image(batch)
        torch._dynamo.mark_dynamic(x, 0)
        check(fast, model, x)
    assert len(models) == 1
    assert isinstance(models[0].inputs[0].shape[0], str)


@pytest.mark.slow
def test_transformer_block_of_any_length(models: list[Any]) -> None:
    model = TransformerBlock().eval()
    fast = accelerate(model, dynamic=True)
    for batch, length in ((2, 9), (3, 11), (2, 9)):
        check(fast, model, torch.randn(batch, length, 32))
    assert len(models) == 1
    assert [isinstance(size, str) for size in models[0].inputs[0].shape] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_that_pytorch_computes_by_one_op(models: list[Any], norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=norm_first).eval()
    model = Encoder(layer).eval()
    mask = torch.zeros(2, 9)
    mask[0, 6:] = -torch.inf
    check(accelerate(model), model, torch.randn(2, 9, 32), mask)
    assert len(models) == 1


@pytest.mark.slow
def test_changed_weights_are_seen(models: list[Any]) -> None:
    model = convolutions()
    fast, x = accelerate(model), image()
    check(fast, model, x)
    with torch.no_grad():
        model.features[0].weight.mul_(2)
    check(fast, model, x)
    model.load_state_dict(convolutions().state_dict())
    check(fast, model, x)
    check(fast, model, x)
    assert len(models) == 3


@pytest.mark.slow
def test_weights_that_keep_changing_end_in_eager_mode(
    models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_fusion.torch.frozen_graph.MOST_VARIANTS", 1)
    model = nn.Linear(4, 4)
    fast, x = accelerate(model), torch.randn(2, 4)
    with pytest.warns(EagerModeWarning, match="its weights have changed 2 times") as caught:
        for _ in range(4):
            check(fast, model, x)
            with torch.no_grad():
                model.weight.add_(1)
    assert own(caught) == 1 and len(models) == 2


@pytest.mark.slow
def test_buffers_that_the_model_updates(models: list[Any]) -> None:
    model = convolutions().train()
    twin = copy.deepcopy(model)
    fast, x = accelerate(model), image(4)
    counts = []
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), twin(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
        counts.append(len(models))
    assert counts[0] > 0 and counts == counts[:1] * 3


@pytest.mark.slow
def test_inputs_that_are_changed_and_returned(models: list[Any]) -> None:
    def shift(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        x.add_(1)
        return y, y, x

    x = torch.randn(3, 4)
    expected = x + 1
    with torch.no_grad():
        y, same, changed = accelerate(shift)(x)
    assert changed is x and same is y and models
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(y, 2 * (expected - 1))


def test_marked_cache_of_inference_mode(models: list[Any]) -> None:
    def step(cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return cache.index_copy_(0, place, x).sum(0)

    fast = accelerate(step)
    with torch.inference_mode():
        cache, twin = torch.zeros(4, 3), torch.zeros(4, 3)
        torch._dynamo.mark_static_address(cache)
        for place in (2, 0):
            arguments = torch.tensor([place]), torch.randn(1, 3)
            torch.testing.assert_close(fast(cache, *arguments), step(twin, *arguments))
            torch.testing.assert_close(cache, twin)
    assert len(models) == 1


@pytest.mark.slow
def test_both_sides_of_a_graph_break(models: list[Any]) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.layers[0](x))
            torch._dynamo.graph_break()
            return self.layers[1](x) + x.shape[0]

    model = Broken()
    check(accelerate(model), model, torch.randn(3, 4))
    assert len(models) == 2


@pytest.mark.slow
def test_unsupported_op_runs_in_eager_mode_and_is_named_once(models: list[Any]) -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.layers[0](x)) + 4 * torch.eye(4)
            return self.layers[1](torch.linalg.inv(x))

    for _ in range(2):  # a second model of the same kind has a warning of its own
        models.clear()
        model = Inverse()
        fast = accelerate(model)
        with pytest.warns(EagerModeWarning, match="aten.linalg_inv_ex.default cannot be") as caught:
            check(fast, model, torch.randn(4, 4))
            check(fast, model, torch.randn(4, 4))
        (warning,) = (each for each in caught if each.category is EagerModeWarning)
        assert warning.filename == __file__
        assert [len(m.inputs) for m in models] == [1, 1]  # no weight is an input


def test_training_runs_in_eager_mode_with_one_warning(models: list[Any]) -> None:
    model = nn.Linear(4, 4)
    fast = accelerate(model)
    with pytest.warns(EagerModeWarning, match=r"torch.inference_mode\(\)") as caught:
        for rows in (2, 3):
            fast(torch.randn(rows, 4)).sum().backward()
    assert own(caught) == 1 and model.weight.grad is not None and not models
    check(fast, model, torch.randn(2, 4))
    assert len(models) == 1


def test_unknown_options_are_refused() -> None:
    fast = torch.compile(nn.ReLU(), backend=tvm_fusion, options={"thread": 1})
    with pytest.raises(Exception, match="got the option 'thread'; expected one of") as caught:
        fast(torch.zeros(2))
    assert "InvalidInputError" in str(caught.value)  # Dynamo wraps errors of backends


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("check", "no", "InvalidInputError: the option 'check' is 'no'; expected True or False"),
        ("fuse", "some", "OpError: FuseConv2D: fuse is 'some'; expected one of auto, all, none"),
        ("target", "z80", "TargetError: unknown target 'z80'"),
        ("target", ["native"], "TargetError: expected one target"),
        ("threads", 0, "InvalidInputError: threads is 0; expected a positive integer"),
        ("winograd", True, "OpError: FuseConv2D: winograd is True; expected one of auto, always"),
    ],
)
def test_values_that_options_cannot_have_are_refused(name: str, value: Any, message: str) -> None:
    fast = torch.compile(nn.ReLU(), backend=tvm_fusion, options={name: value})
    with torch.no_grad(), pytest.raises(Exception, match=message):
        fast(torch.zeros(2))
