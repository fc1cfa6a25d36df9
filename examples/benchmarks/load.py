# SPDX-License-Identifier: Apache-2.0
"""Race of tvm-fusion with ONNX Runtime and OpenVINO beside processes that keep the cores busy.

    python examples/benchmarks/load.py [--quick] [--only mobilenet_v2] [--beside 0 4] [--json]

While the engines take turns, 0, 1, 2, 4 and 12 processes compute without end. Each engine runs in
its own process, and is stopped while another one has its turn; models are compiled without load.
Prints the percentiles of the latency, and writes results/CPU/load.json, which has a section for
each number of processes. An engine that is not installed takes no part.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

from tvm_fusion.bench.race import EngineSpec, Plan, available_peers
from tvm_fusion.cli.output import FILE_WIDTH, json_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.campaign import (  # noqa: E402
    TOLERANCE,
    Results,
    largest_error,
    parser,
    run_races,
)
from examples.mobilenet_v3 import mobilenet_v3_large  # noqa: E402
from examples.models import mobilenet_v2  # noqa: E402
from examples.transformers import bert_base  # noqa: E402

PLAN = Plan(rounds=20, runs=25, turn_seconds=1.0, budget_seconds=30.0)
BESIDE = (0, 1, 2, 4, 12)
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mobilenet_v2": mobilenet_v2,
    "mobilenet_v3_large": mobilenet_v3_large,
    "bert_small": functools.partial(bert_base, layers=4, width=512, heads=8),
}
SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
"""Program of a process that computes as long as the benchmark runs."""


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Processes that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def table(sections: dict[int, Results]) -> Table:
    """One row for each model, number of processes and engine."""
    latencies = Table(title="Latency beside processes that compute, ms")
    for heading in ("model", "beside", "engine"):
        latencies.add_column(heading)
    for heading in ("p50", "p90", "p99", "ratio"):
        latencies.add_column(heading, justify="right")
    for beside, results in sections.items():
        for name, result in results.items():
            for engine in result["engines"]:
                times = (engine[key] for key in ("median_ms", "p90_ms", "p99_ms"))
                latencies.add_row(
                    name,
                    str(beside),
                    engine["title"],
                    *(f"{time:.2f}" for time in times),
                    f"{engine['ratio']:.2f}x",
                )
        latencies.add_section()
    return latencies


def main() -> int:
    """Run the benchmark; the exit code is 1 if any output is wrong."""
    description = "Race engines beside processes that keep the cores busy."
    options = parser(description, [*MODELS], "load.json")
    options.add_argument("--beside", type=int, nargs="+", default=BESIDE, metavar="N")
    options.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = options.parse_args()
    peers = [peer for peer in ("onnxruntime", "openvino") if peer in available_peers()]
    engines = [EngineSpec(name) for name in ("tvm-fusion", *peers)]
    sections: dict[int, Results] = {}
    for count in chosen.beside:
        beside = functools.partial(spinning, count)
        section = f"beside {count}"
        sections[count] = run_races(MODELS, engines, PLAN, chosen, section=section, beside=beside)
    if chosen.json:
        print(json_text({str(count): results for count, results in sections.items()}))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=FILE_WIDTH)
        console.print(table(sections))
        console.print(f"Written to {chosen.output}")
    return 0 if max(map(largest_error, sections.values())) <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
