# SPDX-License-Identifier: Apache-2.0
"""Learned kernel models: features by hand, the files of the package, and damaged ones."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from schedules.cost import learned
from schedules.cost.attention import ATTENTION, has_fused_attention
from schedules.cost.decisions import predict
from schedules.cost.elementwise import LAYER_NORM, SOFTMAX
from schedules.cost.embedding import RANGES
from schedules.cost.gemm import CONV2D, GEMM, JOINT
from schedules.cost.kernel_call import KernelCall, Prediction, element_bytes
from schedules.cost.learned import (
    APART,
    FOLDER,
    LearnedKernel,
    Limits,
    apart,
    divisibility,
    find_joint,
    find_model,
    limits,
    load_model,
    model_from_arrays,
    seconds,
    tile_features,
    waves,
)
from schedules.cost.machine import Figure, known_machines, load_machine
from schedules.errors import PredictionError
from tests.selection import one_test

TEN = Limits(*(np.float64(x) for x in (10, 1e12, 1e9, 1e6)))
MODELS = sorted(path.stem for path in FOLDER.glob("*-*-*.npz"))
JOINT_KERNELS = {kernel.name: kernel for kernel in (JOINT, ATTENTION)}
KERNELS = {kernel.name: kernel for kernel in (GEMM, CONV2D, SOFTMAX, LAYER_NORM)}
GPUS = [name for name in known_machines() if load_machine(name).kind == "gpu"]


def vector(*values):
    return np.array(values, float)


def test_waves_by_hand():
    # 25 blocks on 10 multiprocessors: 2.5 waves, three whole ones of 10 blocks at 1e12 FLOP/s.
    log, full, busy = waves(vector(25), vector(2e9), vector(0.03), TEN)
    assert log == pytest.approx(math.log(2.5))
    assert full == pytest.approx(2.5 / 3)
    assert busy == pytest.approx(math.log(3 * 10 * 2e9 / 1e12 / 0.03))


def test_tiles_by_hand():
    found = tile_features(vector(2), vector(40), vector(30), vector(16), vector(1.0), TEN)
    # 32 x 32: two rows of tiles, one column, two products.
    assert found[0] == pytest.approx(math.log(4 / 10))
    assert found[3] == pytest.approx(40 * 30 / (64 * 32))


def test_divisibility():
    assert divisibility(vector(1, 2, 12, 32, 96)).tolist() == [0, 1, 2, 5, 5]


def test_work_of_a_product():
    flops, moved = GEMM.work({n: vector(s) for n, s in zip("BMNK", (2, 3, 5, 7), strict=True)}, 4)
    assert flops == 2 * 2 * 3 * 5 * 7
    assert moved == 4 * 2 * (3 * 7 + 7 * 5 + 3 * 5)


def test_work_of_a_convolution():
    sizes = {"B": 2, "IC": 4, "OC": 6, "H": 5, "W": 7, "FH": 3, "FW": 1, "OH": 3, "OW": 7}
    flops, moved = CONV2D.work({n: vector(s) for n, s in (sizes | {"groups": 2}).items()}, 4)
    assert flops == 2 * 2 * 6 * 3 * 7 * (2 * 3)
    assert moved == 4 * (2 * (4 * 5 * 7 + 6 * 3 * 7) + 6 * 2 * 3)


def test_linear_layers_and_batched_products():
    groups = GEMM.group({"B": vector(1, 2, 1), "batched": vector(0, 0, 1)})
    assert groups.tolist() == [0, 1, 1]
    linear = predict(KernelCall("gemm", {"M": 64, "N": 64, "K": 64}), load_machine("v100"))
    batched = predict(KernelCall("bmm", {"B": 1, "M": 64, "N": 64, "K": 64}), load_machine("v100"))
    assert linear.harness > batched.harness


def arrays(**changes):
    found = {
        "sizes": np.array([1], np.int32),
        "split": np.array([255], np.uint8),
        "bin": np.zeros(0, np.uint8),
        "leaf": np.zeros(1, np.int8),
        "scale": np.ones(1, np.float32),
        "cuts": np.zeros(0, np.float32),
        "cut_counts": np.zeros(1, np.int32),
        "base": np.array([math.log(2)]),
        "harness": np.array([30e-6]),
        "latency": np.array([10e-6]),
        "low": np.array([10.0]),
        "high": np.array([20.0]),
        "edges": np.array([1e-3]),
        "below": np.array([0.5, 0.9]),
        "above": np.array([2.0, 1.2]),
    }
    return {name: value for name, value in (found | changes).items() if value is not None}


TOY = LearnedKernel(
    "toy",
    ("N",),
    lambda sizes, width: (0 * sizes["N"], 9e8 * sizes["N"]),
    lambda sizes, limits, roofline, width: sizes["N"][:, None],
    lambda sizes: np.zeros(len(sizes["N"]), int),
)


def test_a_model_by_hand(monkeypatch):
    model = model_from_arrays(arrays())
    time, base, roofline = seconds(TOY, model, {"N": vector(0, 1)}, TEN, 4)
    # The trees say twice the base; the second moves 0.9 GB at 1 GB/s.
    assert roofline.tolist() == pytest.approx([0, 0.9])
    assert base.tolist() == pytest.approx([30e-6, 0.9 + 10e-6])
    assert time.tolist() == pytest.approx([60e-6, 1.8 + 20e-6])
    monkeypatch.setattr(learned, "find_model", lambda *_: (model, "toy-model"))
    machine = load_machine("v100")
    inside = learned.predict_learned(TOY, KernelCall("toy", {"N": 10}), machine)
    assert inside.seconds == pytest.approx(2 * (10 * 9e8 / 9e11 + 10e-6))
    assert inside.low == pytest.approx(0.9 * inside.seconds)
    assert inside.high == pytest.approx(1.2 * inside.seconds)
    assert (inside.in_range, inside.model, inside.bound) == (True, "toy-model", "memory")
    outside = learned.predict_learned(TOY, KernelCall("toy", {"N": 21}), machine)
    assert not outside.in_range
    assert outside.low == pytest.approx(0.81 * outside.seconds)


DAMAGED = {
    "missing": (arrays(low=None), "no vector 'low'"),
    "negative": (arrays(low=-np.ones(1)), "'low' holds what is no positive"),
    "nan": (arrays(latency=np.full(1, np.nan)), "'latency' holds what"),
    "matrix": (arrays(below=np.ones((1, 2))), "no vector 'below'"),
    "text": (arrays(edges=np.array(["1"])), "no vector 'edges'"),
    "lengths": (arrays(edges=np.zeros(5)), "do not match in length"),
    "groups": (arrays(latency=np.zeros(3)), "do not match in length"),
    "order": (arrays(below=np.array([1.5, 1.0])), "do not enclose 1"),
    "zero": (arrays(below=np.array([0, 1.0])), "do not enclose 1"),
    "trees": (arrays(sizes=np.array([7])), "'sizes' does not add up"),
}


@pytest.mark.parametrize("damaged, message", DAMAGED.values(), ids=DAMAGED)
def test_damaged_models(damaged, message):
    with pytest.raises(PredictionError, match=message):
        model_from_arrays(damaged)


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(learned, "FOLDER", tmp_path)
    np.savez(tmp_path / "gemm-float32-damaged.npz", **arrays(scale=np.array([np.inf])))
    with pytest.raises(PredictionError, match="gemm-float32-damaged.npz: 'scale' holds what"):
        find_model("gemm", "float32", "damaged")
    assert find_model("gemm", "float32", "../x") is None


@one_test(MODELS)
def test_models_of_the_package(stem):
    kernel, dtype, kind = stem.split("-")
    model, name = find_model(kernel, dtype, kind)
    assert name == stem
    report = json.loads((FOLDER / f"{stem}.json").read_text())
    if kernel.startswith("lookup"):
        assert report["data"].startswith("measured: ") and len(model.low) == len(RANGES)
    else:
        assert "(MIT)" in report["data"]
        assert len(model.low) == len(KERNELS[kernel].sizes)
    assert report["held_out"]["count"] > 100


@one_test(
    GPUS,
    [
        ("gemm", {"M": 500, "N": 768, "K": 300}),
        ("gemm", {"B": 7, "M": 100, "N": 90, "K": 64}),
        ("bmm", {"B": 1, "M": 100, "N": 90, "K": 64}),
        ("softmax", {"B": 60000, "H": 1000}),
        ("layer_norm", {"B": 60000, "H": 1000}),
        (
            "conv2d",
            {"B": 8, "IC": 64, "OC": 64, "H": 28, "W": 28} | {"FH": 3, "FW": 3, "OH": 28, "OW": 28},
        ),
    ],
)
def test_every_gpu_has_models(machine, call):
    op, sizes = call
    found = predict(KernelCall(op, sizes), load_machine(machine))
    assert 0 < found.low <= found.seconds <= found.high < 0.1
    assert found.in_range == ("unseen" not in found.model)
    assert found.model.startswith(("gemm" if op == "bmm" else op) + "-float32-")
    assert found.device_seconds <= found.seconds
    assert found.roofline_share < 3


def test_half_precision():
    sizes = {"M": 2048, "N": 4096, "K": 4096}
    machine = load_machine("a100-80")
    half = predict(KernelCall("gemm", sizes, "float16"), machine)
    single = predict(KernelCall("gemm", sizes), machine)
    assert half.seconds < single.seconds / 4
    assert half.model == "gemm-float16-a100"
    assert not half.extrapolated
    brain = predict(KernelCall("gemm", sizes, "bfloat16"), machine)
    assert brain.seconds == pytest.approx(half.seconds, rel=0.15)
    assert (brain.model, brain.extrapolated) == ("gemm-joint", ("type",))
    batched = predict(KernelCall("bmm", {"B": 8, **sizes}, "float16"), machine)
    assert batched.extrapolated == ("size",)
    assert batched.seconds > half.seconds
    with pytest.raises(PredictionError, match="no figure 'peak_flops.bfloat16'"):
        predict(KernelCall("gemm", sizes, "bfloat16", flops=1.0), load_machine("v100"))


def test_joint_models_say_what_they_were_not_taught():
    sizes = {"M": 128, "N": 4096, "K": 4096}
    for name, beyond in (("h200", ()), ("l40s", ("machine",)), ("a40", ("type",))):
        found = predict(KernelCall("gemm", sizes, "bfloat16"), load_machine(name))
        assert (found.extrapolated, found.in_range) == (beyond, not beyond)
    known, new = (
        predict(KernelCall("gemm", sizes, "bfloat16"), load_machine(x)) for x in ("b200", "b300")
    )
    assert (new.high - new.low) / new.seconds > (known.high - known.low) / known.seconds
    far = predict(KernelCall("bmm", {"B": 100, **sizes}, "bfloat16"), load_machine("h200"))
    assert far.extrapolated == ("size",)
    alike = predict(KernelCall("gemm", sizes, "tfloat32"), load_machine("h100"))
    assert alike.extrapolated == ("type",)


def test_work_of_an_attention():
    sizes = dict(zip(ATTENTION.sizes, (2, 3, 5, 8, 4, 16), strict=True))
    flops, moved = ATTENTION.work({name: vector(size) for name, size in sizes.items()}, 2)
    # Queries 2, 3, 4 see 3, 4, 5 keys.
    assert flops == 4 * 2 * 8 * 16 * (3 + 4 + 5)
    assert moved == 2 * 2 * 16 * (2 * 5 * 4 + 2 * 3 * 8)


@pytest.mark.parametrize("name", ["a100-sxm-80", "h100", "b200", "b60"])
def test_a_step_of_a_decoder_reads_its_keys(name):
    machine, sizes = load_machine(name), {"B": 64, "H": 32, "KV": 8, "D": 128}
    near, far = (
        predict(KernelCall("attention", {**sizes, "S": keys}, "bfloat16"), machine)
        for keys in (1024, 8192)
    )
    assert 4 < far.seconds / near.seconds < 9
    assert far.bound == "memory" and not far.extrapolated
    prefill = predict(KernelCall("attention", {**sizes, "L": 64, "S": 64}, "bfloat16"), machine)
    assert not prefill.extrapolated and prefill.seconds < far.seconds


def test_an_attention_without_a_causal_mask_takes_longer():
    sizes = {"B": 8, "L": 2048, "S": 2048, "H": 32, "KV": 8, "D": 128}
    causal, full = (
        predict(KernelCall("attention", {**sizes, **more}, "bfloat16"), load_machine("h200"))
        for more in ({}, {"full": 1})
    )
    assert 1.6 < full.seconds / causal.seconds < 2.4
    assert full.extrapolated == ("mask",) and not full.in_range
    assert full.high / full.low > causal.high / causal.low


def test_gpus_with_a_kernel_for_attention():
    has = {
        name: [has_fused_attention(load_machine(name), dtype) for dtype in ("float16", "bfloat16")]
        for name in ("h200", "b60", "mi300x", "v100", "znver5")
    }
    assert has["h200"] == has["b60"] == has["mi300x"] == [True, True]
    assert has["v100"] == has["znver5"] == [False, False]
    assert not has_fused_attention(load_machine("h200"), "float32")


@pytest.mark.parametrize("kernel", JOINT_KERNELS)
def test_joint_models_of_the_package(kernel):
    joint = find_joint(kernel)
    assert len(joint.near.low) == len(JOINT_KERNELS[kernel].sizes)
    devices = {"a100-sxm-80", "h100", "h200", "b200", "gb200", "b60"}
    assert devices <= joint.machines and devices <= set(joint.taught["bfloat16"].machines)
    assert (joint.far.below < joint.near.below.max()).all()
    report = json.loads((FOLDER / f"{kernel}-joint.json").read_text())
    assert report["held_out"]["mape"] < 7
    assert set(report["left_out"]) >= {"sizes", "machines"}


def test_a_damaged_report_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(learned, "FOLDER", tmp_path)
    np.savez(tmp_path / "toy-joint.npz", **arrays())
    np.savez(tmp_path / "toy-far.npz", **arrays())
    (tmp_path / "toy-joint.json").write_text('{"taught": {"float16": 3}}')
    with pytest.raises(PredictionError, match="toy-joint.json: 'taught' is damaged"):
        find_joint("toy")
    assert find_joint("none") is None


def test_a_floor_of_the_machine_replaces_the_usual_one():
    model = model_from_arrays(arrays())
    usual, own = (model.base(vector(0, 1), np.zeros(2, int), floor) for floor in (0.0, 50e-6))
    assert usual.tolist() == pytest.approx([30e-6, 1 + 10e-6])
    assert own.tolist() == pytest.approx([50e-6, 1 + 25e-6])


def test_intervals_widen_with_the_distance_of_a_machine():
    """Twice as far as families are apart, an interval is twice as wide on a logarithmic scale."""
    call = KernelCall("gemm", {"M": 128, "N": 4096, "K": 4096}, "bfloat16")
    machine = load_machine("l40s")
    joint, bounds = find_joint("gemm"), limits(machine, "bfloat16")
    assert joint is not None
    near = predict(call, machine)
    peak = machine["peak_flops.bfloat16"] / 64
    slow = replace(
        machine, figures={**machine.figures, "peak_flops.bfloat16": Figure(peak, "a test")}
    )
    far = predict(call, slow)
    by = apart(limits(slow, "bfloat16"), joint.limits)
    assert by > 1.2 * APART > apart(bounds, joint.limits) > 0.5
    assert far.high / far.seconds > 1.1 * near.high / near.seconds
    assert apart(limits(load_machine("h200"), "bfloat16"), joint.limits) == 0


def test_trees_of_the_roofline_alone():
    """Trees that double the roofline leave harness and latency as they are."""
    inner = replace(TOY, is_inner=True)
    model = model_from_arrays(arrays())
    time, base, roofline = seconds(inner, model, {"N": vector(0, 2)}, TEN, 4)
    assert roofline.tolist() == pytest.approx([0, 1.8])
    assert base.tolist() == pytest.approx([30e-6, 1.8 + 10e-6])
    assert time.tolist() == pytest.approx([30e-6, 2 * 1.8 + 10e-6])


def test_new_machines_are_predicted_by_ratios():
    """A machine with twice the peak and bandwidth of another takes half the time."""
    sizes = {"M": 16384, "N": 8192, "K": 8192}
    slow = load_machine("l40s")
    names = ("peak_flops.bfloat16", "bandwidth.memory")
    twice = {name: Figure(2 * slow[name], "a test") for name in names}
    fast = replace(slow, figures={**slow.figures, **twice})
    call = KernelCall("gemm", sizes, "bfloat16")
    once, half = predict(call, slow), predict(call, fast)
    assert once.model == half.model == "gemm-far" and "machine" in half.extrapolated
    assert 0.45 < half.seconds / once.seconds < 0.55


def test_a_law_stands_for_the_roofline():
    lawful = replace(
        TOY, law=lambda sizes, limits, width, constants: constants[0] * sizes["N"] ** constants[1]
    )
    model = model_from_arrays(arrays(law=vector(3, 2)))
    time, base, roofline = seconds(lawful, model, {"N": vector(0, 2)}, TEN, 4)
    assert base.tolist() == pytest.approx([30e-6, 12 + 10e-6])
    assert time.tolist() == pytest.approx([60e-6, 24 + 20e-6])
    assert roofline.tolist() == pytest.approx([0, 1.8])
    # Without constants it is the roofline.
    plain = seconds(lawful, model_from_arrays(arrays()), {"N": vector(0, 2)}, TEN, 4)
    assert plain[1].tolist() == pytest.approx([30e-6, 1.8 + 10e-6])


@pytest.mark.parametrize("kernel", [SOFTMAX, LAYER_NORM, ATTENTION])
def test_more_work_takes_a_law_longer(kernel):
    """Twice as many sequences or rows, which may leave the cache, take 1 to 20 times as long."""
    name = f"{kernel.name}-{'far' if kernel is ATTENTION else 'float32-unseen'}"
    law = load_model(FOLDER / f"{name}.npz").law
    random = np.random.default_rng(0)
    sizes = {each: 2.0 ** random.integers(0, 9, 200) for each in kernel.sizes}
    if kernel is ATTENTION:
        sizes |= {"D": np.full(200, 128.0), "H": 4 * sizes["KV"], "S": sizes["L"]}
    bounds = limits(load_machine("h100"), "float32")
    once = kernel.unhindered(sizes, bounds, 4, law)
    twice = kernel.unhindered({**sizes, "B": 2 * sizes["B"]}, bounds, 4, law)
    assert (once > 0).all() and (twice >= once).all() and (twice < 20 * once).all()


def test_rows_in_half_precision_stream():
    call = KernelCall("softmax", {"B": 10**6, "H": 1024}, "float16")
    found = predict(call, load_machine("v100"))
    assert found.seconds == pytest.approx(2 * 2 * 1.024e9 / 0.82e12, rel=0.05)
    assert not found.in_range


def test_bytes_of_elements():
    names = ("float64", "float32", "bfloat16", "int8", "bool")
    assert [element_bytes(name) for name in names] == [8, 4, 2, 1, 1]


def test_cpus_have_the_roofline():
    machine = learned.Machine("toy", "cpu", "Toy", load_machine("v100").figures)
    sizes = dict.fromkeys("BMNK", 64)
    call = KernelCall("gemm", sizes, "float32", 2.0 * 64**4, 8.0 * 64**3, 4.0 * 64**3)
    assert predict(call, machine).model == "roofline"


def test_seconds_of_a_kernel_alone():
    shown = Prediction(100e-6, 0, 1, "memory", 50e-6, "x", True)
    assert shown.device_seconds == 100e-6
    timed = Prediction(100e-6, 0, 1, "memory", 50e-6, "x", True, 40e-6, 20e-6)
    assert timed.device_seconds == pytest.approx(80e-6)
    # 44 us: 4 * (44 / 40 - 1) = 0.4 of the way from hidden, 2 / 0.4 us, to seen, 24 us.
    near = Prediction(44e-6, 0, 1, "latency", 2e-6, "x", True, 40e-6, 20e-6)
    assert near.device_seconds == pytest.approx(0.4 * 24e-6 + 0.6 * 5e-6)
