# SPDX-License-Identifier: Apache-2.0
"""Outputs and arguments of ``torch.compile``'s graphs: views, strides, numbers, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402

from tvm_fusion.errors import EagerModeWarning  # noqa: E402
from tvm_fusion.torch.backend import tvm_fusion  # noqa: E402


@pytest.fixture(autouse=True)
def models(kept_models: list[Any]) -> Iterator[list[Any]]:
    """The models that are compiled; eager mode is an error, and no gradients are needed."""
    with torch.no_grad():
        yield kept_models


def accelerate(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=tvm_fusion, options={"threads": 1}, **options)


def check(fast: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> None:
    torch.testing.assert_close(fast(*inputs), function(*inputs), atol=1e-5, rtol=1e-5)


def test_views_of_results_and_inputs_share_their_memory(models: list[Any]) -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        first, second = y.chunk(2, 1)
        return y, y.t()[1:], first, second, x.view(-1)

    x = torch.randn(3, 4)
    results = accelerate(views)(x)
    for result, expected in zip(results, views(x), strict=True):
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
    assert len(models) == 1 and len(models[0].outputs) == 1
    results[0].zero_()
    assert not any(result.any() for result in results[1:4])
    results[4].zero_()
    assert not x.any()


@pytest.mark.slow
def test_a_view_that_is_changed_after_a_graph_break(models: list[Any]) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        torch._dynamo.graph_break()
        row.add_(1)
        return y + 1

    check(accelerate(change), change, torch.randn(3, 4))
    assert models


@pytest.mark.slow
def test_a_changed_input_is_returned_in_another_shape(models: list[Any]) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).view(-1)

    x = torch.randn(3, 4)
    expected = 2 * x.flatten()
    result = accelerate(double)(x)
    assert result.data_ptr() == x.data_ptr()
    torch.testing.assert_close(result, expected)


@pytest.mark.slow
def test_views_of_open_sizes_and_numbers(models: list[Any]) -> None:
    def sizes(x: torch.Tensor) -> tuple[Any, ...]:
        y = x.relu()
        return y, y.reshape(x.shape[0] * 2, 2), x.shape[0] * 3, x.numel()

    fast = accelerate(sizes, dynamic=True)
    for rows in (3, 5):
        check(fast, sizes, torch.randn(rows, 4))
    assert len(models) == 1


@pytest.mark.slow
def test_results_have_the_strides_of_eager_mode(models: list[Any]) -> None:
    model = nn.Conv2d(3, 4, 3).eval()
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    result = accelerate(model)(x)
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result, model(x), atol=1e-5, rtol=1e-5)
    assert models


@pytest.mark.slow
def test_integers_of_a_call(models: list[Any]) -> None:
    def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
        return x.repeat(times, 1) + 1

    fast = accelerate(repeated)
    for times in (1, 2, 3, 4):
        check(fast, repeated, torch.ones(2, 3), times)
    assert models


@pytest.mark.slow
def test_floats_of_a_call_are_inputs_of_one_model(models: list[Any]) -> None:
    def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).relu() + scale

    fast = accelerate(scaled)
    for step in range(5):
        check(fast, scaled, torch.randn(3), 0.3 * step)
        check(fast, scaled, torch.arange(3), 0.7 * step)
    assert len(models) <= 4  # Either type has one for the first float, and one for all others.


@pytest.mark.slow
def test_floats_that_no_tensor_can_replace(
    models: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3), nn.LeakyReLU(0.3))  # inputs where all is open
    fast = accelerate(model, dynamic=True)
    for rows in (3, 5):
        check(fast, model, torch.randn(rows, 4))
    assert len(models) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_arguments_in_one_memory_of_which_one_is_changed() -> None:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    mine, theirs = torch.zeros(6), torch.zeros(6)
    fast = accelerate(change)
    for start in (2, 3):
        result = fast(mine[:3], mine[start : start + 3])
        torch.testing.assert_close(result, change(theirs[:3], theirs[start : start + 3]))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_weights_in_new_memory_are_seen(models: list[Any]) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    fast = accelerate(model)
    check(fast, model, x)
    model.weight.data = torch.randn(4, 4)
    check(fast, model, x)
    assert len(models) == 2


@pytest.mark.slow
def test_types_that_the_tracer_asserts(models: list[Any]) -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float16).float() * 2

    check(accelerate(mixed), mixed, torch.randn(3))
    assert len(models) == 1


def test_what_runs_in_eager_mode_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (y**3).sum())(x)

    x = torch.randn(3)
    with pytest.warns(EagerModeWarning, match="it differentiates a function"):
        check(accelerate(slope), slope, x)

    def fail(*_: Any) -> None:
        raise KeyError("of a tracer")

    monkeypatch.setattr("tvm_fusion.torch.frozen_graph.lower", fail)
    with pytest.warns(EagerModeWarning, match="in eager mode: KeyError: 'of a tracer'"):
        check(accelerate(torch.sin), torch.sin, x)


def test_modes_of_inductor_are_refused() -> None:
    fast = torch.compile(nn.ReLU(), backend=tvm_fusion, mode="reduce-overhead")
    with pytest.raises(Exception, match="has no mode 'reduce-overhead'; leave it out"):
        fast(torch.zeros(2))


@pytest.mark.slow
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(x.split(2)).sum(0) + torch.arange(4)

    check(accelerate(parts), parts, torch.randn(4, 4))
    assert capfd.readouterr() == ("", "")
