# SPDX-License-Identifier: Apache-2.0
"""Simulated scaling: messages and bytes against programs that run, times against the formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loop_nests import blur

from schedules.distribute.cost import CALL_SECONDS, Network, Processor
from schedules.distribute.distribute import distribute
from schedules.distribute.exchange import LocalBuffer
from tvm_fusion.distributed.simulate import simulate
from tvm_fusion.distributed.world.local_world import LocalWorld, run_ranks
from tvm_fusion.errors import ArtifactError, InvalidInputError

PROCESSOR = Processor(rate=1e9, bandwidth=1e8)
NETWORK = Network(latency=1e-5, bandwidth=1e7)


def sent(ranks: int, **options) -> tuple[int, int]:
    """Messages and bytes of one run, counted where they are sent."""
    plan = distribute(blur(64, 5), options.pop("loop", 0), ranks, **options)

    def run(world: LocalWorld) -> list:
        windows = plan.parts[world.rank].windows.items()
        buffers = {
            name: LocalBuffer(
                np.zeros([e - b for b, e in window], "float32"), tuple(b for b, _ in window)
            )
            for name, window in windows
        }
        for exchange in plan.exchanges:
            world.start(exchange, buffers)
            world.finish(exchange)
        return [(world.rank, message.dest, size) for message, size in world.sent]

    found = [row for rows in run_ranks(ranks, run) for row in rows]
    return len({(source, dest) for source, dest, _ in found}), sum(size for *_, size in found)


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_messages_and_bytes_are_those_of_a_run(ranks: int) -> None:
    [point] = simulate(blur(64, 5), PROCESSOR, [ranks]).points
    assert (point.messages, point.bytes) == sent(ranks)


def test_a_grid_of_ranks() -> None:
    options = {"loop": [0, 1], "grid": [3, 2]}
    [point] = simulate(blur(64, 5), PROCESSOR, [6], **options).points
    assert (point.messages, point.bytes) == sent(6, **options)


def test_strong_scaling() -> None:
    scaling = simulate(blur(64, 5), PROCESSOR, [1, 2, 4], network=NETWORK)
    one, two, four = scaling.points
    read, written = 4 * 66 * 7, 4 * 64 * 5
    assert one.seconds == pytest.approx((read + written) / 1e8) and one.efficiency == 1
    half = (4 * 34 * 7 + 4 * 32 * 5) / 1e8
    exchange = 1e-5 + 4 * 7 * 2 / 1e7  # one rank sends a row, the other one two; both at once
    assert two.compute == pytest.approx(half) and two.exchange <= exchange * (1 + 1e-9)
    assert two.seconds == pytest.approx(two.compute + two.exchange)
    assert two.efficiency == pytest.approx(one.seconds / (2 * two.seconds))
    assert four.exchange > 2e-5  # an inner rank has two neighbours
    assert scaling.kind == "strong" and "predicted" in scaling.table()


def test_a_measured_run_corrects_the_parts() -> None:
    one, two = simulate(blur(64, 5), PROCESSOR, [1, 2], one_rank=1.0).points
    uncorrected = simulate(blur(64, 5), PROCESSOR, [1, 2]).points
    assert one.seconds == pytest.approx(1.0)
    assert two.compute == pytest.approx(uncorrected[1].compute / uncorrected[0].compute)


def test_overlap_hides_what_the_network_moves() -> None:
    card = Network(latency=1e-5, bandwidth=1e6, progress=1.0)
    [point] = simulate(blur(64, 5), PROCESSOR, [2], network=card, one_rank=1.0).points
    borders = 2 * CALL_SECONDS
    assert point.seconds == pytest.approx(max(point.compute, point.exchange) + borders, rel=1e-9)


def test_weak_scaling() -> None:
    scaling = simulate(lambda ranks: blur(16 * ranks, 5), PROCESSOR, [1, 2, 8], network=NETWORK)
    compute = [point.compute for point in scaling.points]
    assert scaling.kind == "weak" and compute[0] == pytest.approx(compute[2])
    assert scaling.points[2].efficiency < 1


def test_drawing(tmp_path: Path) -> None:
    scaling = simulate(blur(64, 5), PROCESSOR, [1, 2, 4])
    scaling.draw(tmp_path / "scaling.svg")
    assert "strong scaling, predicted" in (tmp_path / "scaling.svg").read_text()


def test_drawings_that_cannot_be_written(tmp_path: Path) -> None:
    scaling = simulate(blur(64, 5), PROCESSOR, [1, 2])
    for name in ("scaling.foo", "scaling"):
        with pytest.raises(InvalidInputError, match=f"cannot draw to '.*{name}'; expected"):
            scaling.draw(tmp_path / name)
    with pytest.raises(ArtifactError, match="cannot write .*: No such file or directory"):
        scaling.draw(tmp_path / "no" / "scaling.svg")
    assert not list(tmp_path.iterdir())


def test_no_ranks() -> None:
    with pytest.raises(InvalidInputError, match="numbers of ranks are"):
        simulate(blur(), PROCESSOR, [])
