# SPDX-License-Identifier: Apache-2.0
"""Models of float32 with products of bfloat16 on CPUs: the numbers, what is rounded, the choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from cpu.conv2d.test_conv2d_bfloat16 import emulate_dots
from gpu_onnx import attention, bottlenecks
from onnx import TensorProto, helper, numpy_helper
from onnx_reference import random_feed, relative_error, run_onnx
from tvm.target import Target

import tvm_fusion
from examples.models import mobilenet_v2, resnet_18
from examples.transformers import bert_base
from schedules.cpu.core.machine import CPUInfo, described
from schedules.workload.conv2d import from_json
from tvm_fusion.cli.command_line import cli
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.options import chosen_precision, faster_precision
from tvm_fusion.compiler.pipeline import Options
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

INTEL, ZEN_4, ZEN_3, TILES = "icelake-server", "znver4", "znver3", "sapphirerapids"


def model_of(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype("float32"), name))
    onnx.checker.check_model(model)
    return model


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype("float32").astype(ml_dtypes.bfloat16).astype("float64")


def pooled(seed: int = 3) -> onnx.ModelProto:
    """The start of a network: a stem, a pool, a block with a projection, a concatenation."""
    random = np.random.default_rng(seed)
    shapes = {"a": (12, 3, 7, 7), "b": (16, 12, 1, 1), "c": (16, 12, 3, 3), "d": (10, 32)}
    weights = {
        name: random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        for name, shape in shapes.items()
    }
    return model_of(
        """g (float[1,3,29,31] x) => (float[1,10] y) {
            t = Conv<strides = [2, 2], pads = [3, 3, 3, 3]>(x, a)
            u = Relu(t)
            v = MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(u)
            left = Conv(v, b)
            right = Conv<pads = [1, 1, 1, 1]>(v, c)
            s = Add(left, right)
            r = Relu(s)
            e = Sigmoid(left)
            f = Concat<axis = 1>(r, e)
            m = GlobalAveragePool(f)
            n = Flatten(m)
            y = Gemm<transB = 1>(n, d)
        }""",
        **weights,
    )


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bottlenecks": bottlenecks,
    "pooled": pooled,
    "attention": lambda: attention(batch=2),
    "resnet-18": lambda: resnet_18(image_size=64),
    "mobilenet-v2": lambda: mobilenet_v2(image_size=64),
    "bert": lambda: bert_base(layers=2, width=128, heads=4, vocabulary=50, sequence=40),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_are_those_of_float32_up_to_rounding(name: str) -> None:
    model = NETWORKS[name]()
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    if "bert" in model.graph.name.lower() or any("ids" in name for name in feed):
        feed = {name: np.ones(array.shape, "int64") for name, array in feed.items()}
    expected = run_onnx(model, feed)
    found = tvm_fusion.compile(model, precision="bf16")(*feed.values())
    outputs = found if isinstance(found, tuple) else (found,)
    for actual, exact in zip(outputs, expected, strict=True):
        assert 1e-5 < relative_error(actual, exact) < 4e-2


def rows() -> onnx.ModelProto:
    """Three products of 58 rows, one with a bias and an activation, one with a residual."""
    random = np.random.default_rng(6)
    weights = {"a": (96, 160), "b": (160, 96), "c": (96, 70)}
    arrays = {name: random.standard_normal(shape) / 10 for name, shape in weights.items()}
    return model_of(
        """g (float[2,29,96] x) => (float[2,29,70] y) {
            t = MatMul(x, a)
            u = Add(t, d)
            v = Relu(u)
            w = MatMul(v, b)
            s = Add(w, x)
            y = MatMul(s, c)
        }""",
        **arrays,
        d=random.standard_normal(160),
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [pooled(), rows()], ids=["pooled", "rows"])
def test_numbers_by_loops_in_place_of_tile_registers(model: onnx.ModelProto) -> None:
    """All convolutions, the stem among them, and products of many rows."""
    target = resolve("native", 1)
    tiles = {"tiles": ("bfloat16",), "emulates_tiles": True}
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    with described(target, replace(CPUInfo.from_target(target), **tiles)):
        mod = pipeline.optimize(import_onnx(model).mod, target, Options(precision="bf16"))
        rules = [use.rule for use in kernel_uses(mod)]
        found = tvm_fusion.compile(model, target, precision="bf16")(*feed.values())
    assert rules.count("TileConv2D") >= 3 and "Conv2D" not in rules
    assert 1e-5 < relative_error(found, *run_onnx(model, feed)) < 4e-2


def test_numbers_by_loops_in_place_of_the_dot_products_of_aarch64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, model = resolve("native", 1), pooled()
    emulate_dots(monkeypatch)
    neon = {"vector_bits": 128, "num_vector_registers": 32, "half_dots": "bfdot"}
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    with described(target, replace(CPUInfo.from_target(target), **neon)):
        assert chosen_precision("auto", target) == "fp32"
        mod = pipeline.optimize(import_onnx(model).mod, target, Options(precision="bf16"))
        found = tvm_fusion.compile(model, target, precision="bf16")(*feed.values())
    assert mod.script().count("tvm_fusion_mmla_bfloat16") >= 3
    kernels = [f.attrs for f in mod.functions.values() if "tvm_fusion.workload" in (f.attrs or {})]
    assert any(from_json(str(attrs["tvm_fusion.workload"])).has_mmla for attrs in kernels)
    assert 1e-5 < relative_error(found, *run_onnx(model, feed)) < 4e-2


def test_numbers_of_winograd_by_loops_in_place_of_the_dot_products_of_zen_4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(9)
    weights = {name: random.standard_normal((32, 32, 3, 3)) / 17 for name in "abc"}
    model = model_of(
        """g (float[2,32,19,21] x) => (float[2,32,19,21] y) {
            t = Conv<pads = [1, 1, 1, 1]>(x, a)
            u = Relu(t)
            v = Conv<pads = [1, 1, 1, 1]>(u, b)
            w = Add(v, x)
            y = Conv<pads = [1, 1, 1, 1]>(w, c)
        }""",
        **weights,
    )
    target = resolve("native", 1)
    emulate_dots(monkeypatch)
    zen = {"family": "znver4", "vector_bits": 512, "num_vector_registers": 32}
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    found = {}
    with described(target, replace(CPUInfo.from_target(target), **zen, half_dots="vdpbf16ps")):
        for mode in ("never", "always"):
            options = Options(precision="bf16", winograd=mode)
            mod = pipeline.optimize(import_onnx(model).mod, target, options)
            assert mod.script().count("tvm_fusion_dot_bfloat16") >= 3
            rules = [use.rule for use in kernel_uses(mod)]
            assert rules.count("WinogradConv2D") == 3 * (mode == "always")
            compiled = tvm_fusion.compile(model, target, precision="bf16", winograd=mode)
            found[mode] = compiled(*feed.values())
    [expected] = run_onnx(model, feed)
    errors = [np.std(found[mode] - expected) for mode in ("never", "always")]
    assert 1.2 < errors[1] / errors[0] < 2.5
    assert 1e-5 < relative_error(found["always"], expected) < 4e-2


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4, 48], ids=["depthwise", "groups of four", "wide groups"])
def test_blocks_of_tensors_around_groups_by_loops_in_place_of_tile_registers(width: int) -> None:
    random = np.random.default_rng(8)
    shapes = {"a": (24, 3, 3, 3), "b": (144, 24, 1, 1), "d": (24, 144, 1, 1)}
    shapes["c"] = (144, width, 3, 3)
    weights = {
        name: random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        for name, shape in shapes.items()
    }
    model = model_of(
        f"""g (float[2,3,18,22] x) => (float[2,24,9,11] y) {{
            s = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, a)
            t = Conv(s, b)
            u = Relu(t)
            v = Conv<pads = [1, 1, 1, 1], group = {144 // width}>(u, c)
            w = Relu(v)
            z = Conv(w, d)
            y = Add(z, s)
        }}""",
        **weights,
    )
    target = resolve("native", 1)
    tiles = {"tiles": ("bfloat16",), "emulates_tiles": True}
    feed = random_feed(model, 5)
    with described(target, replace(CPUInfo.from_target(target), **tiles)):
        options = Options(precision="bf16", fuse="none")
        mod = pipeline.optimize(import_onnx(model).mod, target, options)
        found = tvm_fusion.compile(model, target, precision="bf16", fuse="none")(*feed.values())
        if width == 1:
            _check_pair(model, target, list(feed.values()), found)
    texts = [str(func.attrs.get("tvm_fusion.workload")) for func in mod.functions.values()]
    lanes = 16 if width == 48 else 32  # Groups of these are whole blocks.
    assert sum(f'"out_layout": "NCHW{lanes}c"' in text for text in texts) == 4
    rules = [use.rule for use in kernel_uses(mod)]
    in_vectors = {1: (1,), 4: (0, 1), 48: (0,)}[width]  # The cost model of this CPU says so.
    assert rules.count("Conv2D") in in_vectors
    assert rules.count("TileConv2D") == 4 - rules.count("Conv2D")
    assert 1e-5 < relative_error(found, *run_onnx(model, feed)) < 4e-2


def _check_pair(
    model: onnx.ModelProto, target: Target, inputs: list[np.ndarray], apart: np.ndarray
) -> None:
    """The depthwise layer and the one behind it as one kernel: the same bits."""
    options = Options(precision="bf16", fuse="all")
    rules = [
        use.rule for use in kernel_uses(pipeline.optimize(import_onnx(model).mod, target, options))
    ]
    assert rules.count("TilePair") == 1 and "Conv2D" not in rules
    found = tvm_fusion.compile(model, target, precision="bf16", fuse="all")(*inputs)
    np.testing.assert_array_equal(found, apart)


@pytest.mark.slow
def test_each_stored_tensor_is_rounded_once_and_sums_are_exact() -> None:
    """Sums of integers are exact in float32, so that only roundings to bfloat16 remain."""
    random = np.random.default_rng(7)
    a, c = (random.integers(-2, 3, (16, 16, 3, 3)).astype(float) for _ in range(2))
    d = random.integers(-3, 4, (16, 1, 3, 3)).astype(float)
    bias = random.integers(-500, 500, 16) + 0.25
    model = model_of(
        """g (float[1,16,6,5] x) => (float[1,16,6,5] y, float[1,16,6,5] z) {
            t = Conv<pads = [1, 1, 1, 1]>(x, a, bias)
            u = Relu(t)
            v = Conv<pads = [1, 1, 1, 1], group = 16>(u, d)
            w = Conv<pads = [1, 1, 1, 1]>(v, c)
            y = Add(w, u)
            z = Neg(v)
        }""",
        a=a, c=c, d=d, bias=bias,
    )  # fmt: skip
    x = random.integers(-40, 40, (1, 16, 6, 5)).astype("float32")

    def convolve(data: np.ndarray, weight: np.ndarray, depthwise: bool = False) -> np.ndarray:
        data, total = np.pad(data, [(0, 0), (0, 0), (1, 1), (1, 1)]), 0
        for kh, kw in np.ndindex(3, 3):
            seen = data[:, :, kh : kh + 6, kw : kw + 5]
            taps = weight[:, :, kh, kw]
            if depthwise:
                total = total + seen * taps[None, :, 0, None, None]
            else:
                total = total + np.einsum("nihw,oi->nohw", seen, taps)
        return total

    u = rounded(np.maximum(convolve(rounded(x), a) + bias[:, None, None], 0))
    v = rounded(convolve(u, d, depthwise=True))
    y, z = tvm_fusion.compile(model, precision="bf16")(x)
    np.testing.assert_array_equal(y, (convolve(v, c) + u).astype("float32"))
    np.testing.assert_array_equal(z, -v.astype("float32"))


@pytest.mark.slow
def test_products_of_matrices_round_both_factors() -> None:
    random = np.random.default_rng(5)
    a = random.integers(-300, 300, (64, 80)).astype(float)
    b = random.integers(-1000, 1000, 80) + 0.5
    c = random.integers(-300, 300, (70, 3)).astype(float)
    model = model_of(
        """g (float[2,17,64] x, float[80,70] s, float[3,64] few)
            => (float[2,17,80] y, float[2,17,70] z, float[3,80] w, float[2,17,3] v) {
            p = MatMul(x, a)
            q = Add(p, b)
            y = Relu(q)
            z = MatMul(y, s)
            v = MatMul(z, c)
            w = MatMul(few, a)
        }""",
        a=a, b=b, c=c,
    )  # fmt: skip
    x, few = (
        random.integers(-300, 300, shape).astype("float32") for shape in ((2, 17, 64), (3, 64))
    )
    s = random.integers(-9, 9, (80, 70)).astype("float32")
    y, z, w, v = tvm_fusion.compile(model, precision="bf16")(x, s, few)
    exact = np.maximum(rounded(x) @ rounded(a) + b, 0)
    np.testing.assert_allclose(y, exact, rtol=1e-6)
    np.testing.assert_allclose(z, rounded(y) @ rounded(s), rtol=1e-5, atol=1e-5 * np.abs(z).max())
    np.testing.assert_allclose(w, rounded(few) @ rounded(a), rtol=1e-6, atol=1e-1)
    np.testing.assert_allclose(v, rounded(z) @ rounded(c), rtol=1e-5, atol=1e-5 * np.abs(v).max())


def test_casts_to_bfloat16_round_within_a_kernel() -> None:
    model = model_of(
        """g (float[7,33] x) => (float[7,33] y) {
            a = Cast<to = 16>(x)
            b = Cast<to = 1>(a)
            c = Mul(b, b)
            d = Cast<to = 16>(c)
            e = Cast<to = 1>(d)
            y = Add(e, b)
        }"""
    )
    x = np.random.default_rng(2).standard_normal((7, 33)).astype("float32")
    x[0, :3] = np.inf, -np.inf, np.nan
    b = rounded(x)
    with np.errstate(invalid="ignore"):
        expected = (rounded(b * b) + b).astype("float32")
    np.testing.assert_array_equal(tvm_fusion.compile(model)(x), expected)


def test_what_stays_between_convolutions_has_half_the_bytes() -> None:
    mod = pipeline.optimize(
        import_onnx(bottlenecks()).mod, resolve("native", 2), Options(precision="bf16")
    )
    rules = [use.rule for use in kernel_uses(mod)]
    assert rules.count("Conv2D") == 5, rules
    types = [binding.var.ty for binding in mod["main"].body.blocks[0].bindings]
    blocked = [str(ty.dtype) for ty in types if getattr(ty, "ndim", 0) == 5]
    assert blocked.count("bfloat16") >= 5 and blocked.count("float32") <= 2, (
        blocked
    )  # the input as residual, the output


def test_infinities_and_nan_arrive() -> None:
    model = bottlenecks()
    compiled = tvm_fusion.compile(model, precision="bf16")
    feed = random_feed(model, 1)
    feed["x"][0, 3, 2, 2] = np.nan
    [expected] = run_onnx(model, feed)
    found = compiled(feed["x"])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.slow
def test_a_comparison_tells_the_errors_of_layers() -> None:
    found = tvm_fusion.compare(bottlenecks(), precision="bf16", layers=True, runs=2)
    assert len(found.layers) == 5
    assert all(1e-4 < layer.largest < 2e-2 for layer in found.layers), found.layers
    assert found.options == {"precision": "bf16"}


@pytest.mark.parametrize(
    ("name", "auto"), [(ZEN_3, "fp32"), (INTEL, "fp32"), ("cooperlake", "fp32"), (ZEN_4, "bf16"),
                       ("znver5", "bf16"), (TILES, "bf16"), ("graniterapids", "bf16")]
)  # fmt: skip
def test_auto_is_the_faster_one(name: str, auto: str) -> None:
    target = resolve(name, 2)
    assert chosen_precision("auto", target) == auto
    text = faster_precision("fp32", target)
    assert (text is not None) == (auto == "bf16")
    assert faster_precision("bf16", target) is faster_precision("auto", target) is None
    if text:
        assert f"{name} multiplies bfloat16 faster than float32" in text
    assert not CPUInfo.from_target(target).multiplies_pairs or "znver" in name


def test_auto_on_a_gpu_is_float32() -> None:
    assert chosen_precision("auto", resolve("cuda -arch=sm_90")) == "fp32"
    assert faster_precision("fp32", resolve("cuda -arch=sm_90")) is None


@pytest.mark.slow
def test_commands_say_when_another_precision_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(bottlenecks(), path)
    faster = {}
    for target in (TILES, ZEN_3):
        given = [str(path), "--target", target, "--json"]
        explained = CliRunner().invoke(cli, ["explain", *given])
        output = tmp_path / f"{target}.so"
        compiled = CliRunner().invoke(cli, ["compile", *given, "-o", str(output)])
        assert explained.exit_code == compiled.exit_code == 0, explained.output + compiled.output
        report = json.loads(explained.stdout)
        assert report["precision"] == "fp32"
        faster[target] = report["faster"], json.loads(compiled.stdout)["faster"]
    assert faster[ZEN_3] == (None, None)
    assert faster[TILES][0] == faster[TILES][1] == faster_precision("fp32", resolve(TILES))
    shown = CliRunner().invoke(
        cli, ["explain", str(path), "--target", TILES, "--precision", "auto"]
    )
    assert shown.exit_code == 0 and "bfloat16 faster" not in shown.output


def test_compile_tells_of_each_target_that_has_a_faster_precision(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model_of("g (float[3] x) => (float[3] y) { y = Relu(x) }"), path)
    command = ["compile", str(path), "-o", str(tmp_path / "model.so"), "--json", "--target"]
    shown = CliRunner().invoke(cli, [*command, f"{ZEN_3},{TILES},{ZEN_4}"])
    assert shown.exit_code == 0, shown.output
    lines = [faster_precision("fp32", resolve(name)) for name in (TILES, ZEN_4)]
    assert json.loads(shown.stdout)["faster"].splitlines() == lines


def stored_in(kind: int) -> onnx.ModelProto:
    """An inverted residual, a pool and a bounded convolution, stored in one type of floats."""
    random, dtype = np.random.default_rng(4), helper.tensor_dtype_to_np_dtype(kind)
    shapes = {"a": (24, 3, 3, 3), "b": (48, 24, 1, 1), "c": (48, 1, 3, 3), "d": (24, 48, 1, 1)}
    arrays = {
        name: random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        for name, shape in (shapes | {"e": (24, 24, 3, 3)}).items()
    }
    arrays |= {"zero": np.array(0.0), "six": np.array(6.0), "f": random.standard_normal(24)}
    type_name = TensorProto.DataType.Name(kind).lower()
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 22]>
        g ({type_name}[1,3,22,20] x) => ({type_name}[1,24] y) {{
            p = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, a, f)
            q = Relu(p)
            r = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(q)
            s = Conv(r, b)
            t = Clip(s, zero, six)
            u = Conv<pads = [1, 1, 1, 1], group = 48>(t, c)
            v = Clip(u, zero, six)
            w = Conv(v, d)
            z = Add(w, r)
            o = Conv<pads = [1, 1, 1, 1]>(z, e)
            m = GlobalAveragePool(o)
            y = Flatten(m)
        }}"""
    )
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(dtype), name))
    return model


@pytest.mark.slow
def test_stored_halves_are_packed_and_fused_as_float32() -> None:
    """The kernels of models in 16 bits are those of the same model in float32."""
    uses = {}
    for target in (ZEN_3, ZEN_4):
        for kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            mod = import_onnx(stored_in(kind)).mod
            mod = pipeline.optimize(mod, resolve(target, 2), Options(fuse="all"))
            found = [use for use in kernel_uses(mod) if "Conv" in use.rule]
            uses[target, kind] = [use.rule for use in found]
            types = [each.var.ty for each in mod["main"].body.blocks[0].bindings]
            blocked = {str(ty.dtype) for ty in types if getattr(ty, "ndim", 0) == 5}
            stays = (target, kind) == (ZEN_4, TensorProto.BFLOAT16)
            assert blocked == {"bfloat16" if stays else "float32"}, types
    wide = uses[ZEN_3, TensorProto.FLOAT]
    assert "FusedConv2D" in wide
    assert wide == uses[ZEN_3, TensorProto.FLOAT16] == uses[ZEN_3, TensorProto.BFLOAT16]
    assert uses[ZEN_4, TensorProto.FLOAT] == uses[ZEN_4, TensorProto.FLOAT16]
    assert uses[ZEN_4, TensorProto.BFLOAT16] == ["Conv2D"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_stored_halves_differ_from_float32_by_the_last_rounding(kind: int) -> None:
    """Only the result is rounded where no kernel multiplies in 16 bits."""
    model, wide = stored_in(kind), stored_in(TensorProto.FLOAT)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    for given, other in zip(model.graph.initializer, wide.graph.initializer, strict=True):
        array = numpy_helper.to_array(given).astype("float32")
        other.CopyFrom(numpy_helper.from_array(array, given.name))
    x = np.random.default_rng().standard_normal((1, 3, 22, 20)).astype(dtype)
    [expected] = run_onnx(wide, {"x": x.astype("float32")})
    found = np.asarray(tvm_fusion.compile(model, "x86-64-v3")(x))
    found = found.view(dtype) if found.dtype != dtype else found
    error = np.abs(found.astype("float64") - expected)
    half_a_unit = 2.0 ** (-11 if kind == TensorProto.FLOAT16 else -8) / 2
    assert (error <= 2.1 * half_a_unit * np.abs(expected) + 1e-5 * np.abs(expected).max()).all()
