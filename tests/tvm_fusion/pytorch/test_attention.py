# SPDX-License-Identifier: Apache-2.0
"""``scaled_dot_product_attention``: masks, also of whole rows, types, shapes and scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import tvm_fusion  # noqa: E402
from tvm_fusion.compiler.compile_model import import_model  # noqa: E402
from tvm_fusion.compiler.pipeline import Options, optimize  # noqa: E402
from tvm_fusion.errors import UnsupportedOperatorError  # noqa: E402
from tvm_fusion.torch.backend import tvm_fusion as backend  # noqa: E402


def masks() -> dict[str, torch.Tensor]:
    """Random masks whose second row, or first batch, has no key."""
    rows = torch.rand(5, 6) > 0.4
    rows[0], rows[1] = True, False
    keys = torch.rand(2, 1, 1, 6) > 0.3
    keys[0], keys[1, ..., 0] = False, True
    floats = torch.randn(2, 1, 5, 6).masked_fill(~rows, -torch.inf)
    return {"rows": rows, "keys": keys, "floats": floats}


class Attentions(nn.Module):
    """Attention by each kind of mask, and without one."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor,
        keys: torch.Tensor,
        floats: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(self.results(q, k, v, rows, keys, floats))

    def results(self, q: Any, k: Any, v: Any, rows: Any, keys: Any, floats: Any) -> Iterator[Any]:
        attend = F.scaled_dot_product_attention
        floats = floats.to(q.dtype)
        for mask in (None, rows, keys, keys & rows, floats):
            yield attend(q, k, v, attn_mask=mask)
        yield attend(q, k, v, attn_mask=rows, scale=-0.7)
        yield attend(q, k, v, scale=-0.7)
        yield attend(q, k, v, is_causal=True)
        yield attend(q, k[:, :, :3], v[:, :, :3], is_causal=True)  # more queries than keys
        yield attend(q, k[:, :1], v[:, :1], attn_mask=keys, enable_gqa=True)
        yield attend(q, k[:, :2], v[:, ::2], attn_mask=floats, enable_gqa=True)
        yield attend(q, k[:, :2], v[:, :2, :, :5], is_causal=True, enable_gqa=True)
        yield attend(q, k[:, :1], v[:, ::2], scale=0.2, enable_gqa=True)
        yield attend(q, k, v, enable_gqa=True)
        yield attend(q[0], k[0], v[0], attn_mask=rows, dropout_p=0.0)
        yield attend(q[0], k[0], v[0], attn_mask=floats[0])
        yield attend(q[0], k[0], v[0], is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_without_a_key_have_no_result(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, size, 8).to(dtype) for size in (5, 6, 6))
    given = (q, k, v, *masks().values())
    model = Attentions()
    wanted = model(*given)
    assert not wanted[1][:, :, 1].any() and not wanted[2][0].any()
    found = tvm_fusion.compile(torch.export.export(model, given), threads=1)(*given)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 5e-2)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            one.astype(np.float32), other.float().numpy(), rtol=tolerance, atol=tolerance
        )


@pytest.mark.slow
def test_programs_of_core_ops_and_torch_compile(kept_models: list[Any]) -> None:
    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    class Attend(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return attend(q, mask)

    q, mask = torch.randn(1, 2, 4, 8), torch.tensor([False, True, True, True])[:, None].repeat(1, 4)
    wanted = attend(q, mask)
    program = torch.export.export(Attend(), (q, mask)).run_decompositions()
    found = tvm_fusion.compile(program, threads=1)(q, mask)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)
    with torch.no_grad():
        fast = torch.compile(attend, backend=backend, options={"threads": 1})
        torch.testing.assert_close(fast(q, mask), wanted, atol=1e-5, rtol=1e-5)
    assert len(kept_models) == 1


@pytest.mark.slow
def test_random_dropout_is_refused() -> None:
    class Dropped(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    program = torch.export.export(Dropped(), (torch.randn(1, 2, 4, 8),))
    with pytest.raises(UnsupportedOperatorError, match="native_dropout.* in training mode|dropout"):
        tvm_fusion.compile(program, threads=1)


class Layer(nn.Module):
    """Attention of 4 heads of 32 to some of them as keys and values, with the moves around it."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 32)).transpose(1, 2)
        keys = heads[:, : self.groups]
        is_grouped = self.groups < 4
        result = F.scaled_dot_product_attention(heads, keys, keys, mask, enable_gqa=is_grouped)
        return result.transpose(1, 2).flatten(2)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "groups"), [(torch.bool, 4), (torch.float32, 4), (None, 2)])
def test_attention_is_one_kernel_of_a_gpu(dtype: torch.dtype | None, groups: int) -> None:
    mask = None if dtype is None else (torch.rand(2, 1, 64, 64) > 0.3).to(dtype)
    program = torch.export.export(Layer(groups), (torch.randn(2, 64, 128), mask))
    target = tvm_fusion.resolve_target("cuda -arch=sm_90")
    mod = optimize(import_model(program, None).mod, target, Options())
    functions = [variable.name_hint for variable in mod.functions]
    assert "attention" in functions and not any("matmul" in name for name in functions)
