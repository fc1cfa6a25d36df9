# SPDX-License-Identifier: Apache-2.0
"""Curves of NCCL's collectives on the GPUs of one node, fitted to measured times.

    PREDICT_DATA=DIR python examples/benchmarks/prediction/fit_links.py

Writes ``tvm_fusion/prediction/links/MACHINE.json``: lines between nine sizes on logarithmic scales,
smoothed, by least squares. The column of bytes of these data counts elements of two bytes: so read,
its all-reduces on two A100 take as long as those of vTrain, which counts bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from examples.benchmarks.prediction.data import (  # noqa: E402
    DYNAMO,
    MACHINES,
    data_folder,
    read_columns,
)
from tvm_fusion.prediction.collectives import LINKS, Collectives, Curve  # noqa: E402

KNOTS = 9
SMOOTHING = 0.05
ELEMENT_BYTES = 2


def knots(message: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and times between which a curve has straight lines on logarithmic scales."""
    x, y = np.log(message), np.log(seconds)
    at = np.linspace(x.min(), x.max(), KNOTS)
    hats = np.stack([np.interp(x, at, row) for row in np.eye(KNOTS)], axis=1)
    bends = SMOOTHING * np.diff(np.eye(KNOTS), 2, axis=0)
    target = np.concatenate([y, np.zeros(len(bends))])
    found = np.linalg.lstsq(np.vstack([hats, bends]), target, rcond=None)[0]
    return np.exp(at), np.exp(found)


def measured(folder: Path) -> dict[str, dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]]:
    """Bytes and seconds by machine, and by kind and number of ranks."""
    path = folder / "gpu_16bit" / "nccl_half.csv.gz"
    if not path.is_file():
        return {}
    table = read_columns(path)
    by_machine: dict[str, dict[tuple[str, int], Any]] = {}
    columns = (table[name] for name in ("device", "collective", "gpus"))
    for device, kind, ranks in sorted(set(zip(*(c.tolist() for c in columns), strict=True))):
        mine = (table["device"] == device) & (table["collective"] == kind)
        mine &= table["gpus"] == ranks
        order = np.argsort(table["bytes"][mine])
        curve = ELEMENT_BYTES * table["bytes"][mine][order], table["us"][mine][order] * 1e-6
        key = ("all_to_all" if kind == "alltoall" else kind, int(ranks))
        by_machine.setdefault(MACHINES.get(device, device), {})[key] = curve
    return by_machine


def left_out(message: np.ndarray, seconds: np.ndarray, fold: int) -> np.ndarray:
    """Relative errors of each fifth inner size, by a fit to the others."""
    index = np.arange(len(message))
    out = (index % 5 == fold) & (index > 0) & (index < len(message) - 1)
    at, times = knots(message[~out], seconds[~out])
    found = np.exp(np.interp(np.log(message[out]), np.log(at), np.log(times)))
    return found / seconds[out] - 1


def check(folder: Path) -> dict[str, float]:
    """MAPE of left-out sizes by machine, in per cent."""
    return {
        machine: round(
            100
            * float(
                np.mean(
                    np.abs(
                        np.concatenate(
                            [left_out(*each, fold) for each in curves.values() for fold in range(5)]
                        )
                    )
                )
            ),
            2,
        )
        for machine, curves in measured(folder).items()
    }


def main() -> None:
    """Write the curves of each machine."""
    folder = data_folder()
    if folder is None:
        raise SystemExit("PREDICT_DATA names no folder")
    for machine, curves in measured(folder).items():
        fitted = {}
        for (kind, ranks), points in curves.items():
            at, times = knots(*points)
            sizes = tuple(float(round(size)) for size in at)
            seconds = tuple(float(f"{value:.4g}") for value in times)
            fitted[kind, ranks] = Curve(kind, ranks, sizes, seconds, f"fitted: {DYNAMO}")
        Collectives(fitted).save(LINKS / f"{machine}.json")
    print("MAPE of sizes left out, in %:", check(folder))


if __name__ == "__main__":
    main()
