# SPDX-License-Identifier: Apache-2.0
"""Chart of the recorded races of networks: our speed beside that of the faster peer, for each CPU.

python examples/benchmarks/speedups.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from campaign import FOLDER

from tvm_fusion.paths import written_aside

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

CPUS = {
    "znver3": "Zen 3 (AVX2)",
    "znver4": "Zen 4 (AVX-512)",
    "znver5": "Zen 5 (AVX-512)",
    "emeraldrapids-without-tiles": "Emerald Rapids without AMX (AVX-512)",
    "emeraldrapids": "Emerald Rapids (AVX-512, AMX)",
}
COLOURS = ("#3b7dd8", "#e08a2e", "#4f9d69", "#8c6bb1", "#7f7f7f")
PEERS = {"ONNX Runtime", "OpenVINO"}


def speedups(path: Path) -> dict[str, float]:
    """Time of the faster peer in parts of ours, for each network of a file of results."""
    races = json.loads(path.read_text())["results"]
    return {
        name: min(engine["ratio"] for engine in race["engines"] if engine["title"] in PEERS)
        for name, race in races.items()
    }


def draw(ratios: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw a bar for each network and CPU; ``ratios`` is by title of the CPU and network."""
    names = list(dict.fromkeys(name for by_network in ratios.values() for name in by_network))
    height = 0.8 / len(ratios)
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(names) * len(ratios) / 1.5 + 1))
    for index, (cpu, by_network) in enumerate(ratios.items()):
        places = [
            names.index(name) + (index - (len(ratios) - 1) / 2) * height for name in by_network
        ]
        colour = COLOURS[index % len(COLOURS)]
        bars = axes.barh(places, list(by_network.values()), height * 0.9, label=cpu, color=colour)
        axes.bar_label(bars, fmt="%.2fx", padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("speed of tvm-fusion over the faster of ONNX Runtime and OpenVINO")
    axes.margins(x=0.1)
    axes.legend(frameon=False, fontsize=8, ncol=3, loc="lower center", bbox_to_anchor=(0.4, 1))
    figure.tight_layout()
    with written_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=120)


if __name__ == "__main__":
    files = {family: FOLDER / family / "networks.json" for family in CPUS}
    recorded = {CPUS[name]: speedups(path) for name, path in files.items() if path.exists()}
    draw(recorded, FOLDER / "speedups.png")
