# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion with ONNX Runtime and OpenVINO on decoders, one token at a time.

    python examples/benchmarks/decoders.py [--quick] [--only llama_step_int4] [--resume]

The matrices of GPT-2 and of a Llama are float32, or of 8 or 4 bits in blocks of 32, the same
numbers for all engines; ``_rounded`` allows the other factor of 4 bits to be rounded to 8 bits, as
ONNX Runtime's quantiser recommends on CPUs. Prints tokens a second, and writes
results/CPU/decoders.json.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import onnx
from rich.table import Table

from tvm_fusion.bench.race import EngineSpec, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import Results, engines_table, finish, parser, run_races  # noqa: E402
from examples.decoders import STEPS, in_few_bits  # noqa: E402

PLAN = Plan(rounds=15, runs=10, turn_seconds=0.5)
TOLERANCE = 0.02
"""OpenVINO and ONNX Runtime choose themselves where they round to 8 bits."""

FORMS = {"": (0, 0), "_int8": (8, 0), "_int4": (4, 0), "_int4_rounded": (4, 4)}
"""Bits of matrices, and level of accuracy."""


def decoder(name: str, bits: int, level: int) -> onnx.ModelProto:
    """A model in one of the forms."""
    model = STEPS[name]()
    return in_few_bits(model, bits, level) if bits else model


MODELS = {
    name + form: functools.partial(decoder, name, *options)
    for name in STEPS
    for form, options in FORMS.items()
}


def tokens_table(results: Results) -> Table:
    """One row a form: tokens a second, ratios, and peaks of memory."""
    headings = ("peak MiB, each", "compile s", "relative error")
    table = engines_table(results, "Decoders, tokens a second, by medians", "model", *headings)
    for name, result in results.items():
        ours, *peers = result["engines"]
        table.add_row(
            name,
            *(f"{1000 / engine['median_ms']:.0f}" for engine in result["engines"]),
            *(f"{engine['ratio']:.2f}x" for engine in peers),
            ", ".join(f"{engine['peak_mib']:.0f}" for engine in result["engines"]),
            f"{ours['compile_seconds']:.1f}",
            f"{float(ours['relative_error']):.1e}",
        )
    return table


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    options = parser("Race tvm-fusion on decoders.", list(MODELS), "decoders.json")
    arguments = options.parse_args()
    engines = [EngineSpec(name) for name in ("tvm-fusion", "onnxruntime", "openvino")]
    results = run_races(MODELS, engines, PLAN, arguments, fresh=True)
    return finish(tokens_table(results), results, arguments, TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
