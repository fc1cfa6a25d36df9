# SPDX-License-Identifier: Apache-2.0
"""Networks of ONNX Runtime's quantiser: its numbers, and rounding within the convolutions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from cpu.quantized_cases import portable_products, product_of_blocks
from onnx_reference import run_onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from relax_on_opencl import RelaxOnOpenCL
from small_onnx import dense_model, small_model
from tensor_core_emulation import emulate_tensor_cores
from tvm.target import Target

import tvm_fusion
from relay_passes import FuseEpilogue, MultiplyBytes, SimplifyInference
from schedules.cpu.core import micro_kernel
from schedules.cpu.core.machine import CPUInfo, described
from schedules.workload.conv2d import from_json
from tvm_fusion.codegen.library_bin import cuda_texts
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TargetError
from tvm_fusion.machine import host
from tvm_fusion.machine.host import TILE_FEATURES
from tvm_fusion.onnx.frontend import import_onnx

VNNI, AVX2 = (
    Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 1})
    for cpu in ("znver4", "znver3")
)


class Images(CalibrationDataReader):
    """Two random inputs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        (value,) = model.graph.input
        shape = [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]
        rng = np.random.default_rng(3)
        self._left = [{value.name: rng.standard_normal(shape, np.float32)} for _ in range(2)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


def quantized(
    model: onnx.ModelProto, folder, form: QuantFormat, kind: QuantType, per_channel: bool = True
):
    given, made = folder / "model.onnx", folder / "quantized.onnx"
    onnx.save(model, given)
    # Weights of 7 bits: without VNNI, sums of two products saturate in ONNX Runtime.
    quantize_static(
        given, made, Images(model), form, activation_type=kind, weight_type=QuantType.QInt8,
        per_channel=per_channel, reduce_range=True,
        extra_options={"ActivationSymmetric": kind == QuantType.QInt8},
    )  # fmt: skip
    return onnx.load(made)


def workloads(mod: tvm.IRModule) -> list[str]:
    """The convolutions of a compiled module, as JSON."""
    name, functions = "tvm_fusion.workload", mod.functions.values()
    return [str(func.attrs[name]) for func in functions if func.attrs and name in func.attrs]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8], ids=str)
@pytest.mark.parametrize("form", list(QuantFormat), ids=str)
@pytest.mark.parametrize("make", [small_model, dense_model])
def test_numbers_and_kernels(make, form, kind, tmp_path):
    model = quantized(make(), tmp_path, form, kind)
    x = next(iter(Images(make()).get_next().values()))
    (wanted,) = run_onnx(model, {model.graph.input[0].name: x})
    compiled = tvm_fusion.compile(model, threads=1, records="none")
    found = compiled(x)
    steps = np.unique(np.diff(np.unique(wanted)))
    step = steps[steps > 1e-6].min()
    assert np.abs(found - wanted).max() < 1.01 * step
    assert (np.abs(found - wanted) > 0.5 * step).mean() < 0.01
    text = str(FuseEpilogue()(SimplifyInference()(import_onnx(model).mod)))
    assert "quantize" not in text
    assert text.count('activation="round_clip"') == text.count("tvm_fusion.conv2d")
    bytes_ = str(FuseEpilogue()(MultiplyBytes(VNNI)(SimplifyInference()(import_onnx(model).mod))))
    assert "tvm_fusion.quantized_conv2d" in bytes_ and "nn.matmul" not in bytes_
    assert ("rounding=" in bytes_) == (make is small_model)


@pytest.mark.quick_cases("int8-QDQ-True", "uint8-QOperator-False")
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("form", list(QuantFormat), ids=lambda form: form.name)
@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_convolutions_have_the_bits_of_onnx_runtime(kind, form, per_channel, tmp_path):
    """First, pointwise and depthwise ones, on images and with weights that nobody saw before."""
    rng, block = np.random.default_rng(), inverted_residual(residual=False)
    for tensor in block.graph.initializer:
        values = rng.standard_normal(tuple(tensor.dims), np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    types = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    model = quantized(block, tmp_path, form, types[kind], per_channel)
    compiled = tvm_fusion.compile(model, threads=2, records="none")
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for _ in range(20):
        x = rng.standard_normal((1, 3, 18, 22), np.float32)
        np.testing.assert_array_equal(compiled(x), session.run(None, {"x": x})[0])


@pytest.mark.parametrize(
    ("left", "right", "total"),
    [
        ((0.011448707431554794, 130), (0.027524590492248535, 132), (0.01478542573750019, 0)),
        ((0.020793022587895393, 155), (0.042907241731882095, 128), (0.023708567023277283, 0)),
    ],
)
def test_sums_of_all_pairs_of_bytes(left, right, total):
    """The nearest whole numbers, where ONNX Runtime has another one for one of 65,536 pairs."""
    node, constants = onnx.helper.make_node, {}
    for name, (scale, zero) in zip("abc", (left, right, total), strict=True):
        constants |= {f"s{name}": np.float32(scale), f"z{name}": np.uint8(zero)}
    nodes = [node("DequantizeLinear", [n, f"s{n}", f"z{n}"], [f"f{n}"]) for n in "ab"]
    nodes += [node("Add", ["fa", "fb"], ["f"]), node("QuantizeLinear", ["f", "sc", "zc"], ["c"])]
    nodes += [node("DequantizeLinear", ["c", "sc", "zc"], ["y"])]
    weights = [onnx.numpy_helper.from_array(np.array(v), name) for name, v in constants.items()]
    types = {"a": 2, "b": 2, "y": 1}
    ends = [onnx.helper.make_tensor_value_info(n, kind, [256, 256]) for n, kind in types.items()]
    graph = onnx.helper.make_graph(nodes, "sums", ends[:2], ends[2:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    feeds = dict(zip("ab", np.indices((256, 256)).astype("uint8"), strict=True))
    scales = [Fraction(float(constants[f"s{name}"])) for name in "abc"]
    rows, columns = (
        [(i - zero) * scale for i in range(256)]
        for scale, (_, zero) in zip(scales[:2], (left, right), strict=True)
    )
    exact = np.array([[round((a + b) / scales[2]) for b in columns] for a in rows])
    wanted = np.clip(exact, -total[1], 255 - total[1]).astype("float32") * np.float32(total[0])
    np.testing.assert_array_equal(tvm_fusion.compile(model, threads=1)(feeds), wanted)
    assert np.count_nonzero(run_onnx(model, feeds)[0] != wanted) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "groups", "kind"), [(24, 2, QuantType.QUInt8), (32, 4, QuantType.QInt8)], ids=str
)
def test_layers_with_groups_multiply_bytes(width, groups, kind, tmp_path):
    """A block with groups of 12 or 8 channels, and a residual."""
    block = dense_block(batch=1, size=9, width=width, groups=groups)
    model = quantized(block, tmp_path, QuantFormat.QDQ, kind)
    x = next(iter(Images(model).get_next().values()))
    (wanted,) = run_onnx(model, {model.graph.input[0].name: x})
    found = tvm_fusion.compile(model, threads=2, records="none")(x)
    step = np.diff(np.unique(wanted)).min()
    assert np.abs(found - wanted).max() < 1.01 * step
    assert (np.abs(found - wanted) > 0.5 * step).mean() < 0.01
    for target in (VNNI, AVX2):
        mod = pipeline.optimize(import_onnx(model).mod, target, Options())
        assert "nn.conv2d" not in str(mod["main"])
        found = workloads(mod)
        assert len(found) == 3 and all('"uint8"' in each for each in found)


@pytest.mark.slow
def test_winograds_algorithm_gives_the_same_bits(tmp_path):
    model = quantized(dense_block(1, 15, 32), tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    found = [
        tvm_fusion.compile(model, threads=2, records="none", winograd=winograd)(x)
        for winograd in ("always", "never")
    ]
    np.testing.assert_array_equal(*found)
    for target, is_taken in ((VNNI, False), (AVX2, True)):
        mod = pipeline.optimize(import_onnx(model).mod, target, Options(winograd="always"))
        assert any('"winograd": 2' in each for each in workloads(mod)) == is_taken


@pytest.mark.quick_cases("dynamic-3", "QDQ-rows")
@pytest.mark.parametrize("rows", [3, "rows"])
@pytest.mark.parametrize("form", [*QuantFormat, "dynamic"], ids=lambda form: str(form))
def test_products_with_weights_multiply_bytes_on_tensor_cores(form, rows, tmp_path, monkeypatch):
    """By emulation, also of matrices whose rows end within a block of channels."""
    rng, node = np.random.default_rng(0), onnx.helper.make_node
    shapes = {"w": (40, 24), "b": (24,)}
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["y"])]
    ends = [("x", [2, rows, 40]), ("y", [2, rows, 24])]
    ends = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in ends]
    graph = onnx.helper.make_graph(nodes, "product", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    x = rng.standard_normal((2, 3, 40), np.float32)
    if form == "dynamic":
        onnx.save(model, tmp_path / "m")
        quantize_dynamic(tmp_path / "m", tmp_path / "q", weight_type=QuantType.QInt8)
        model = onnx.load(tmp_path / "q")
    else:
        model = quantized(model, tmp_path, form, QuantType.QUInt8)
    emulate_tensor_cores(monkeypatch)
    target = resolve("opencl")
    shapes = {"rows": "rows"} if rows == "rows" else None
    mod = pipeline.optimize(import_onnx(model, shapes).mod, target, Options())
    assert [from_json(text).dtype for text in workloads(mod)] == ["uint8"]
    (found,) = RelaxOnOpenCL(mod, target)(x)
    same = tvm_fusion.compile(model, threads=1, records="none", shapes=shapes)(x)
    np.testing.assert_array_equal(found, same)
    np.testing.assert_allclose(found, run_onnx(model, {"x": x})[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.027708437, 3.2300844, 1 / 3])
def test_numbers_halfway_between_bytes_on_a_gpu(scale):
    """The standard says how they are rounded; scales have more digits than TVM writes."""
    node = onnx.helper.make_node
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    nodes += [node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    constants = {"s": np.float32(scale), "z": np.uint8(141)}
    weights = [onnx.numpy_helper.from_array(np.array(v), name) for name, v in constants.items()]
    halves = (np.arange(-300, 300, dtype="float32") / 2) * np.float32(scale)
    x = np.stack([np.nextafter(halves, np.float32(np.inf)), halves]).astype("float32")
    ends = [onnx.helper.make_tensor_value_info(name, 1, x.shape) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "halves", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    target = resolve("opencl")
    mod = pipeline.optimize(import_onnx(model).mod, target, Options())
    (found,) = RelaxOnOpenCL(mod, target)(x)
    np.testing.assert_array_equal(found, run_onnx(model, {"x": x})[0])
    (text,) = cuda_texts(tvm_fusion.compile(model, "cuda -arch=sm_80")._executable)
    assert "__fdiv_rn(" in text and " / 0x" not in text


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["all", "none"])
def test_dense_convolutions_of_bytes_on_tensor_cores(fuse, tmp_path, monkeypatch):
    """By emulation."""
    emulate_tensor_cores(monkeypatch)
    block = dense_block(batch=1, size=6, width=24)
    model = quantized(block, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    (wanted,) = run_onnx(model, {model.graph.input[0].name: x})
    target = resolve("opencl")
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse=fuse))
    rules = [use.rule for use in kernel_uses(mod)]
    products = [rules.count("FusedConv2D"), rules.count("AnyConv2D")]
    assert products == ([1, 1] if fuse == "all" else [0, 3])
    assert "NCHW16c" in str(workloads(mod)), "no layer has its channels in blocks"
    if fuse == "none":  # the input is rounded and packed; the output gets floats, if it has bytes
        assert len(rules) <= 5, rules
    (found,) = RelaxOnOpenCL(mod, target)(x)
    np.testing.assert_array_equal(found, tvm_fusion.compile(model, threads=1, records="none")(x))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_layer_that_adds_its_input_is_no_pair_on_tensor_cores(tmp_path, monkeypatch):
    """By emulation: the bytes between the layers are read twice by the second one."""
    emulate_tensor_cores(monkeypatch)
    rng, node = np.random.default_rng(4), onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w2"], ["c"], kernel_shape=[1, 1]),
        node("Add", ["c", "b"], ["y"]),
    ]
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in (("w1", (24, 24, 3, 3)), ("w2", (24, 24, 1, 1)))
    ]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1, 24, 5, 6]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "block", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    model = quantized(model, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    target = resolve("opencl")
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse="all"))
    kernels = [from_json(text) for text in workloads(mod)]
    assert [(len(each.layers), each.residual) for each in kernels] == [(1, False), (1, True)]
    (found,) = RelaxOnOpenCL(mod, target)(x)
    np.testing.assert_array_equal(found, run_onnx(model, {"x": x})[0])


@pytest.mark.slow
@pytest.mark.parametrize("own", [1, 8])
def test_networks_with_groups_are_in_blocks_on_tensor_cores(own, tmp_path, monkeypatch):
    """By emulation: one pack and one unpack; no layer is computed in NCHW."""
    emulate_tensor_cores(monkeypatch)
    block = grouped_block(own, 48, (5, 6))
    model = quantized(block, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    (wanted,) = run_onnx(model, {"x": x})
    target = resolve("opencl")
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse="none"))
    kernels = [from_json(text) for text in workloads(mod)]
    assert len(kernels) == 3
    for kernel in kernels:
        assert (kernel.data_layout, kernel.out_layout) == ("NCHW16c", "NCHW16c")
        assert "uint8" in (kernel.dtype, kernel.data_dtype)
    assert len(kernel_uses(mod)) <= 5, "something is computed between the layers"
    (found,) = RelaxOnOpenCL(mod, target)(x)
    np.testing.assert_array_equal(found, tvm_fusion.compile(model, threads=1, records="none")(x))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_quantised_pair_is_one_kernel_on_tensor_cores(tmp_path):
    block = dense_block(batch=8, size=28, width=64, residual=False)
    model = quantized(block, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    compiled = tvm_fusion.compile(model, "cuda -arch=sm_80", fuse="all")
    (text,) = cuda_texts(compiled._executable)
    kernels = [part for part in text.split('extern "C" __global__') if ") {" in part][1:]
    products = [kernel for kernel in kernels if "row_col_s32_u8_s8_s32" in kernel]
    pairs = [kernel for kernel in products if "fused_quantized_conv2d" in kernel.split("{")[0]]
    assert (len(products), len(pairs)) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", list(QuantFormat), ids=str)
def test_numbers_by_loops_in_place_of_tile_registers(form, tmp_path):
    """Channels lie in blocks of 64 bytes, in which the whole network is computed."""
    model = quantized(dense_block(1, 9, 64), tmp_path, form, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    (wanted,) = run_onnx(model, {"x": x})
    target = resolve("native", 1)
    tiles = {"tiles": ("uint8",), "emulates_tiles": True, "word_channels": 4}
    with described(target, replace(CPUInfo.from_target(target), **tiles)):
        mod = pipeline.optimize(import_onnx(model).mod, target, Options())
        found = tvm_fusion.compile(model, target, records="none")(x)
    kernels = [f for f in mod.functions.values() if "tvm_fusion.workload" in (f.attrs or {})]
    assert [str(kernel.attrs["tvm_fusion.rule"]) for kernel in kernels] == ["TileConv2D"] * 3
    assert all("NCHW64c" in str(kernel.attrs["tvm_fusion.workload"]) for kernel in kernels)
    step = np.diff(np.unique(wanted)).min()
    assert np.abs(found - wanted).max() < 1.01 * step
    assert (np.abs(found - wanted) > 0.5 * step).mean() < 0.01


def inverted_residual(residual: bool = True) -> onnx.ModelProto:
    """Two layers around a depthwise one, with 24, 144 and 24 channels; maybe a residual."""
    rng, node = np.random.default_rng(4), onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w0"], ["s"], kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2]),
        node("Conv", ["s", "w1"], ["a"], kernel_shape=[1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w2"], ["c"], kernel_shape=[3, 3], pads=[1] * 4, group=144),
        node("Relu", ["c"], ["d"]),
        node("Conv", ["d", "w3", "b3"], ["e" if residual else "y"], kernel_shape=[1, 1]),
        *([node("Add", ["e", "s"], ["y"])] if residual else []),
    ]
    shapes = {"w0": (24, 3, 3, 3), "w1": (144, 24, 1, 1)}
    shapes |= {"w2": (144, 1, 3, 3), "w3": (24, 144, 1, 1), "b3": (24,)}
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    ends = {"x": [1, 3, 18, 22], "y": [1, 24, 9, 11]}
    ends = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in ends.items()]
    graph = onnx.helper.make_graph(nodes, "block", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


def grouped_block(own: int, width: int = 128, size: tuple[int, int] = (9, 11)) -> onnx.ModelProto:
    """A bottleneck of channels with groups, and a residual."""
    rng, node = np.random.default_rng(4), onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w0"], ["a"], kernel_shape=[1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w1"], ["c"], kernel_shape=[3, 3], pads=[1] * 4, group=width // own),
        node("Relu", ["c"], ["d"]),
        node("Conv", ["d", "w2"], ["e"], kernel_shape=[1, 1]),
        node("Add", ["e", "x"], ["y"]),
    ]
    outer = width // 2
    shapes = {"w0": (width, outer, 1, 1), "w1": (width, own, 3, 3), "w2": (outer, width, 1, 1)}
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1, outer, *size]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "block", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.slow
def test_tensors_around_a_depthwise_layer_have_blocks_of_their_own(tmp_path):
    """By loops in place of tile registers: 24 channels in one block, 144 in three of 48."""
    model = quantized(inverted_residual(), tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    (wanted,) = run_onnx(model, {"x": x})
    target = resolve("native", 1)
    tiles = {"tiles": ("uint8",), "emulates_tiles": True, "word_channels": 4}
    with described(target, replace(CPUInfo.from_target(target), **tiles)):
        mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse="none"))
        found = tvm_fusion.compile(model, target, records="none", fuse="none")(x)
        paired = pipeline.optimize(import_onnx(model).mod, target, Options(fuse="all"))
        same = tvm_fusion.compile(model, target, records="none", fuse="all")(x)
    assert [use.rule for use in kernel_uses(paired)].count("TilePair") == 1
    np.testing.assert_array_equal(same, found)
    kernels = [f.attrs for f in mod.functions.values() if "tvm_fusion.workload" in (f.attrs or {})]
    rules = [str(attrs["tvm_fusion.rule"]) for attrs in kernels]
    assert sorted(rules) == ["Conv2D", "TileConv2D", "TileConv2D", "TileConv2D"]
    layouts = [from_json(str(attrs["tvm_fusion.workload"])).out_layout for attrs in kernels]
    assert sorted(layouts) == ["NCHW32c", "NCHW32c", "NCHW48c", "NCHW48c"]
    step = np.diff(np.unique(wanted)).min()
    assert np.abs(found - wanted).max() < 1.01 * step
    assert (np.abs(found - wanted) > 0.5 * step).mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("own", [4, 16, 32])
def test_groups_by_loops_in_place_of_tile_registers(own, tmp_path):
    """Bit for bit those of vectors: groups of 4 channels are computed as groups of 16."""
    block = grouped_block(own)
    model = quantized(block, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    x = next(iter(Images(model).get_next().values()))
    (wanted,) = run_onnx(model, {"x": x})
    target = resolve("native", 1)
    tiles = {"tiles": ("uint8",), "emulates_tiles": True, "word_channels": 4}
    with described(target, replace(CPUInfo.from_target(target), **tiles)):
        mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse="none"))
        found = tvm_fusion.compile(model, target, records="none", fuse="none")(x)
        if own == 32:
            same = tvm_fusion.compile(model, target, records="none", fuse="all")(x)
            np.testing.assert_array_equal(same, found)
    kernels = [f.attrs for f in mod.functions.values() if "tvm_fusion.workload" in (f.attrs or {})]
    assert [str(attrs["tvm_fusion.rule"]) for attrs in kernels] == ["TileConv2D"] * 3
    groups = {from_json(str(attrs["tvm_fusion.workload"])).layers[0].groups for attrs in kernels}
    assert groups == {1, 128 // max(own, 16)}
    step = np.diff(np.unique(wanted)).min()
    assert np.abs(found - wanted).max() < 1.01 * step
    assert (np.abs(found - wanted) > 0.5 * step).mean() < 0.01


@pytest.mark.quick_cases("groups-sdot")
@pytest.mark.parametrize("dots", ["sdot", "usdot"])
@pytest.mark.parametrize("block", ["depthwise", "groups"])
def test_numbers_by_loops_in_place_of_the_dot_products_of_aarch64(
    block, dots, tmp_path, monkeypatch
):
    """Dense, first and grouped layers, and a residual; unsigned bytes are multiplied signed."""
    model = inverted_residual() if block == "depthwise" else grouped_block(4)
    model = quantized(model, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    target = resolve("native", 1)
    monkeypatch.setattr(micro_kernel, "add_word_products", portable_products)
    monkeypatch.setattr(micro_kernel, "add_block_products", product_of_blocks)
    neon = {"vector_bits": 128, "num_vector_registers": 32, "word_channels": 4, "byte_dots": dots}
    with described(target, replace(CPUInfo.from_target(target), **neon)):
        x = next(iter(Images(model).get_next().values()))
        (wanted,) = run_onnx(model, {"x": x})
        found = tvm_fusion.compile(model, target, records="none")(x)
        mod = pipeline.optimize(import_onnx(model).mod, target, Options())
    step = np.diff(np.unique(wanted)).min()
    assert np.abs(found - wanted).max() < 1.01 * step
    assert (np.abs(found - wanted) > 0.5 * step).mean() < 0.01
    kernels = [f.attrs for f in mod.functions.values() if "tvm_fusion.workload" in (f.attrs or {})]
    assert block == "depthwise" or (
        [str(attrs["tvm_fusion.rule"]) for attrs in kernels] == ["Conv2D"] * 3
        and {from_json(str(attrs["tvm_fusion.workload"])).shifted for attrs in kernels}
        == {dots == "sdot"}
    )
    in_twos = [text for text in workloads(mod) if from_json(text).has_mmla]
    assert len(in_twos) == 2 * (dots == "usdot")


@pytest.mark.slow
def test_models_for_tile_registers_start_on_no_other_cpu(tmp_path, monkeypatch):
    """Only those that use the registers say that they need them."""
    block = dense_block(1, 6, 16)
    model = quantized(block, tmp_path, QuantFormat.QDQ, QuantType.QUInt8)
    target = "sapphirerapids"
    floats, bytes_ = (tvm_fusion.compile(one, target, threads=1) for one in (block, model))
    assert not TILE_FEATURES.intersection(floats._about.features)
    assert TILE_FEATURES.intersection(bytes_._about.features) == {"amx-tile", "amx-int8"}
    bytes_.save(tmp_path / "bytes.so")
    there = frozenset(floats._about.features)
    monkeypatch.setattr(host, "flagged_features", lambda: there)
    monkeypatch.setattr(host, "host_features", lambda: there)
    with pytest.raises(TargetError, match="no amx-int8, amx-tile, .*target='x86-64-v4'"):
        tvm_fusion.load(tmp_path / "bytes.so")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", list(QuantFormat), ids=str)
@pytest.mark.parametrize("target", [VNNI, AVX2], ids=["vnni", "avx2"])
def test_residuals_are_added_within_convolutions(form, target, tmp_path):
    model = quantized(dense_block(1, 6, 16), tmp_path, form, QuantType.QUInt8)
    mod = pipeline.optimize(import_onnx(model).mod, target, Options())
    rules = [use.rule for use in kernel_uses(mod)]
    assert rules.count("Conv2D") == 3
    assert len(rules) <= 5, rules  # the input is rounded and packed; the output may get floats


def dense_block(
    batch: int, size: int, width: int, groups: int = 1, residual: bool = True
) -> onnx.ModelProto:
    """A block of ResNet-50, with or without its residual."""
    rng, node = np.random.default_rng(4), onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["a"], kernel_shape=[1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w2"], ["c"], kernel_shape=[3, 3], pads=[1] * 4, group=groups),
        node("Relu", ["c"], ["d"]),
        node("Conv", ["d", "w3"], ["e"], kernel_shape=[1, 1]),
        *([node("Add", ["e", "x"], ["f"])] if residual else []),
        node("Relu", ["f" if residual else "e"], ["y"]),
    ]
    outer = 2 * width
    shapes = {
        "w1": (width, outer, 1, 1),
        "w2": (width, width // groups, 3, 3),
        "w3": (outer, width, 1, 1),
    }
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    shape = [batch, outer, size, size]
    ends = [onnx.helper.make_tensor_value_info(name, 1, shape) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "block", ends[:1], ends[1:], weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.slow
def test_products_quantised_at_run_time(tmp_path):
    rng = np.random.default_rng(0)
    weight = onnx.numpy_helper.from_array(rng.standard_normal((300, 24), np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "dense",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [5, 300])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [5, 24])],
        [weight],
    )
    opsets = [onnx.helper.make_operatorsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m")
    quantize_dynamic(tmp_path / "m", tmp_path / "q", weight_type=QuantType.QInt8)
    model = onnx.load(tmp_path / "q")
    assert any(node.op_type == "MatMulInteger" for node in model.graph.node)
    x = rng.standard_normal((5, 300), np.float32)
    (wanted,) = run_onnx(model, {"x": x})
    np.testing.assert_allclose(
        tvm_fusion.compile(model, threads=1)(x), wanted, rtol=1e-4, atol=1e-3
    )
    mod = import_onnx(model).mod
    assert "int32" not in str(mod)
    assert "tvm_fusion.quantized_conv2d" in str(MultiplyBytes(VNNI)(SimplifyInference()(mod)))
