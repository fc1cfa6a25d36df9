# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion with ONNX Runtime on models that ONNX Runtime's quantiser made.

    python examples/benchmarks/quantized.py [--quick] [--only resnet_18_qdq] [--resume]

Networks of images have weights of int8 with a scale for each channel and activations of uint8,
either as pairs of QuantizeLinear and DequantizeLinear (``qdq``) or as operators on integers
(``operators``); BERT-base quantises its activations at run time (``dynamic``). OpenVINO takes the
first form only, and races in turns of its own. Prints two tables, and writes
results/CPU/quantized.json and results/CPU/quantized_openvino.json.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

from tvm_fusion.bench.race import EngineSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import finish, parser, peer_table, run_races  # noqa: E402
from examples.zoo import ZOO  # noqa: E402

PLAN = Plan(rounds=15, runs=10, turn_seconds=0.25, budget_seconds=8.0)
NETWORKS = ("mobilenet_v2", "resnet_18", "resnet_50")
TOLERANCE = 0.1
"""Numbers near a half are rounded up or down, in each layer: ONNX Runtime with and without
optimisations differs from itself by 0.03 in BERT."""


def quantized(name: str) -> onnx.ModelProto:
    """The model ``NETWORK_qdq``, ``NETWORK_operators`` or ``NETWORK_dynamic``."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    network, form = name.rsplit("_", 1)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.onnx", Path(folder) / "made.onnx"
        onnx.save(ZOO[network](), given)
        if form == "dynamic":
            quantization.quantize_dynamic(given, made, weight_type=quantization.QuantType.QInt8)
            return onnx.load(made)
        quant_pre_process(given, given)
        forms = {"qdq": "QDQ", "operators": "QOperator"}
        quantization.quantize_static(
            given,
            made,
            _Images(),
            quant_format=quantization.QuantFormat[forms[form]],
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
        )
        return onnx.load(made)


class _Images:
    """Three random images, from which the quantiser takes its ranges."""

    def __init__(self) -> None:
        self._seeds = [1, 2, 3]

    def get_next(self) -> dict[str, np.ndarray] | None:
        if not self._seeds:
            return None
        generator = np.random.default_rng(self._seeds.pop())
        return {"input": generator.standard_normal((1, 3, 224, 224), np.float32)}


MODELS = {
    **{
        name: functools.partial(quantized, name)
        for network in NETWORKS
        for name in (f"{network}_qdq", f"{network}_operators")
    },
    "bert_base_dynamic": functools.partial(quantized, "bert_base_dynamic"),
}


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    options = parser("Race tvm-fusion on quantised models.", list(MODELS), "quantized.json")
    arguments = options.parse_args()
    codes = []
    for peer, title, suffix in (("onnxruntime", "", ""), ("openvino", ", OpenVINO", "_openvino")):
        models = {name: MODELS[name] for name in arguments.only if peer in _peers(name)}
        if not models:
            continue
        here = argparse.Namespace(**vars(arguments))
        here.output = arguments.output.with_stem(arguments.output.stem + suffix)
        engines = [EngineSpec(name) for name in ("tvm-fusion", peer)]
        results = run_races(models, engines, PLAN, here, fresh=True)
        table = peer_table(results, f"Quantised models{title}", "model")
        codes.append(finish(table, results, here, TOLERANCE))
    return max(codes)


def _peers(model: str) -> tuple[str, ...]:
    return ("onnxruntime", "openvino") if model.endswith("_qdq") else ("onnxruntime",)


if __name__ == "__main__":
    raise SystemExit(main())
