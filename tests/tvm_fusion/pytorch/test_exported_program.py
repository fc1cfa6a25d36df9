# SPDX-License-Identifier: Apache-2.0
"""Compilation of exported programs, and our pipeline on modules of TVM's own front ends."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

import tvm  # noqa: E402
from torch import nn  # noqa: E402
from torch.export import Dim, export  # noqa: E402
from tvm import relax  # noqa: E402
from tvm.relax.frontend.torch import from_exported_program, from_fx  # noqa: E402

import tvm_fusion  # noqa: E402
from tests.tvm_fusion.pytorch.torch_modules import (  # noqa: E402
    TransformerBlock,
    Words,
    convolutions,
    image,
)
from tvm_fusion.errors import InvalidInputError, UnsupportedOperatorError  # noqa: E402


def eager(model: nn.Module, *inputs: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(*inputs).numpy()


def test_program_has_names_and_an_open_batch_and_is_saved(tmp_path: Path) -> None:
    model = convolutions()
    program = export(model, (image(2),), dynamic_shapes={"image": {0: Dim("batch")}})
    compiled = tvm_fusion.compile(program, threads=1)
    assert [spec.name for spec in compiled.inputs] == ["image"]
    assert compiled.inputs[0].shape[1:] == (3, 12, 12)
    assert isinstance(compiled.inputs[0].shape[0], str)
    x = image(5)
    y = compiled(image=x)
    np.testing.assert_allclose(y, eager(model, x), atol=1e-5)
    compiled.save(tmp_path / "model.so")
    loaded = tvm_fusion.load(tmp_path / "model.so", threads=1)
    np.testing.assert_array_equal(loaded(x.numpy()), y)


@pytest.mark.slow
def test_shapes_bind_the_dimensions_of_a_program() -> None:
    program = export(convolutions(), (image(2),), dynamic_shapes={"image": {0: Dim("batch")}})
    compiled = tvm_fusion.compile(program, shapes={"image": (4, 3, 12, 12)}, threads=1)
    assert compiled.inputs[0].shape == (4, 3, 12, 12)


class Ahead(nn.Module):
    """Attention to what came before, by a mask that is computed from the sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        scores = (x @ x.mT).masked_fill(places[None] > places[:, None], -torch.inf)
        return scores.softmax(-1) @ x


@pytest.mark.slow
def test_open_sizes_have_a_variant_each() -> None:
    dims = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    program = export(Ahead(), (torch.randn(2, 5, 4),), dynamic_shapes=dims)
    model = tvm_fusion.specialize(program, variants=2, threads=1)
    for batch, length in ((2, 5), (3, 7), (1, 1), (2, 5)):
        x = torch.randn(batch, length, 4)
        np.testing.assert_allclose(model(x), eager(Ahead(), x), atol=1e-5)
    assert len(model.variants) == 2


def test_convolutions_are_fused_as_those_of_onnx() -> None:
    compiled = tvm_fusion.compile(export(convolutions(), (image(),)), fuse="all", threads=1)
    assert any(record["fused"] for record in compiled.fused)


@pytest.mark.slow
def test_transformer_block() -> None:
    model, x = TransformerBlock().eval(), torch.randn(2, 9, 32)
    compiled = tvm_fusion.compile(export(model, (x,)), threads=1)
    np.testing.assert_allclose(compiled(x), eager(model, x), atol=1e-5)


def test_weights_stay_in_the_memory_of_pytorch() -> None:
    model, tokens = Words().eval(), torch.randint(0, 100, (2, 7))
    compiled = tvm_fusion.compile(export(model, (tokens,)), threads=1)
    before = compiled(tokens)
    model.embedding.weight.data.zero_()
    after = compiled(tokens)
    assert np.abs(before - after).max() > 0.1
    np.testing.assert_allclose(after, eager(model, tokens), atol=1e-5)


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x) + 1


class Places(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(torch.relu(x))


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "model, text",
    [
        (Inverse(), r"PyTorch cannot export .* aten.linalg_inv_ex.default"),
        (Noise(), r"aten.rand_like.default: .*cannot be imported"),
        (Counter(), r"changes 'calls' in place; return the new values"),
    ],
)
def test_what_cannot_be_compiled_is_named(model: nn.Module, text: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=text):
        tvm_fusion.compile(export(model, (torch.eye(3),)), threads=1)


@pytest.mark.slow
def test_results_of_a_size_that_depends_on_data() -> None:
    compiled = tvm_fusion.compile(export(Places(), (torch.eye(3),)), threads=1)
    for x in (torch.randn(3, 3), torch.zeros(3, 3)):
        np.testing.assert_array_equal(compiled(x), eager(Places(), x))


@pytest.mark.slow
def test_lazy_views_and_meta_tensors_are_refused() -> None:
    compiled = tvm_fusion.compile(export(nn.ReLU(), (torch.zeros(3, 4),)), threads=1)
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    with pytest.raises(InvalidInputError, match=r"is a neg view.*resolve_neg\(\)"):
        compiled(numbers.conj().imag)
    with pytest.raises(InvalidInputError, match=r"is a conj view.*resolve_conj\(\)"):
        compiled(numbers.conj())
    with pytest.raises(InvalidInputError, match="is a meta or fake tensor"):
        compiled(torch.zeros(3, 4, device="meta"))
    strided = torch.randn(4, 3).T
    np.testing.assert_array_equal(compiled(strided), np.maximum(strided.numpy(), 0))


def run_pipeline(mod: tvm.IRModule, x: torch.Tensor) -> np.ndarray:
    target = tvm_fusion.resolve_target("native", cores=1)
    executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("tvm_fusion"))
    output = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x.numpy()))
    return (output if isinstance(output, tvm.runtime.Tensor) else output[0]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("unwrap", [False, True])
def test_pipeline_on_modules_of_tvms_front_end(unwrap: bool) -> None:
    model, x = convolutions(), image()
    mod = from_exported_program(export(model, (x,)), unwrap_unit_return_tuple=unwrap)
    np.testing.assert_allclose(run_pipeline(mod, x), eager(model, x), atol=1e-5)


@pytest.mark.slow
def test_pipeline_on_from_fx_computes_what_tvm_made_of_batch_norm() -> None:
    # TVM's from_fx imports a batch norm as in training mode, also of a model in evaluation mode.
    model, x = convolutions(), image(2)
    mod = from_fx(torch.fx.symbolic_trace(model), [((2, 3, 12, 12), "float32")])
    got = run_pipeline(mod, x)
    assert np.abs(got - eager(model, x)).max() > 1e-2
    model.train()
    np.testing.assert_allclose(got, eager(model, x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_pools_of_16_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)])
            self.pools = nn.ModuleList([nn.AvgPool2d(7), nn.AdaptiveAvgPool2d((3, 5))])

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows = x.flatten(1) / 16  # their norms are numbers of float16
            norm = torch.linalg.vector_norm(rows, dim=1)
            scan = torch.ones_like(rows).cumsum(1)
            normal = nn.functional.normalize(rows, dim=1)
            return *(op(x) for op in self.norms), *(op(x) for op in self.pools), norm, scan, normal

    x = (torch.randn(1, 4, 28, 28) * 300 + 2000).to(dtype)
    module = Sums().eval()
    wanted = module.double()(x.double())
    model = tvm_fusion.compile(torch.export.export(module.to(dtype), (x,)), threads=1)
    step = torch.finfo(dtype).eps
    kind = np.float16 if dtype == torch.float16 else ml_dtypes.bfloat16
    for one, other in zip(model(x.float().numpy().astype(kind)), wanted, strict=True):
        found = torch.as_tensor(np.asarray(one).astype(np.float64))
        torch.testing.assert_close(found, other, rtol=step, atol=step * 0.1)
