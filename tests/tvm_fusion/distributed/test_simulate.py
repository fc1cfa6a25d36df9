# SPDX-License-Identifier: Apache-2.0
"""Simulated scaling: messages and bytes against programs that run, times against the formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_nests import blur, heat2d
from tvm import te, tirx

from examples.stencils import function, image
from schedules.distribute.cost import CALL_SECONDS, Network, Processor
from schedules.distribute.distribute import distribute
from schedules.distribute.exchange import LocalBuffer
from tvm_fusion.distributed import compile
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


def sums(rows: int = 5, cols: int = 3) -> tirx.PrimFunc:
    a, k = image(rows, cols), te.reduce_axis((0, rows), "k")
    return function(a, te.compute((cols,), lambda j: te.sum(a[k, j], axis=k), "C"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_gathers_of_reductions_are_those_of_a_run(ranks: int) -> None:
    """Counted where ranks gather; 7 are more than there are iterations."""
    program = compile(sums(), ranks, loop="k")

    def run(world: LocalWorld) -> list[tuple[int, int, int]]:
        sent, gather = [], world.all_gather

        def counted(array: np.ndarray) -> np.ndarray:
            others = set(range(world.size)) - {world.rank}
            sent.extend((world.rank, other, array.nbytes) for other in others)
            return gather(array)

        world.all_gather = counted  # type: ignore[method-assign]
        program.on(world)()
        assert not world.sent
        return sent

    found = [row for rows in run_ranks(ranks, run) for row in rows]
    size = sum(size for *_, size in found)
    [point] = simulate(sums(), PROCESSOR, [ranks], loop="k").points
    assert (point.messages, point.bytes) == (len(found), size)
    text = program.explain()
    assert text.startswith(f"sum of loop k over {ranks} ranks; {size} bytes in {len(found)} messag")
    for source, line in enumerate(line for line in text.splitlines() if "part_" in line):
        each = sum(size for rank, _, size in found if rank == source)
        assert line[24:48].split() == [str(each), str(each)]
    assert ("each rank sends its part of C, 12 bytes, to each other" in text) == (ranks > 1)


def test_time_of_reductions() -> None:
    one, four = simulate(sums(64), PROCESSOR, [1, 4], network=NETWORK, loop="k").points
    assert one.exchange == 0 and one.seconds == pytest.approx((64 * 3 + 3) * 4 / 1e8)
    assert four.exchange == pytest.approx(2e-5 + 3 * 12 / 1e7)
    assert four.compute == pytest.approx((16 * 3 + 3) * 4 / 1e8 + 5 * 12 / 1e8)
    assert four.seconds == pytest.approx(four.compute + four.exchange)
    options = {"loop": "k", "sizes": [1, 62, 0, 1]}
    [uneven] = simulate(sums(64), PROCESSOR, [4], network=NETWORK, **options).points
    assert uneven.compute == pytest.approx((62 * 3 + 3) * 4 / 1e8 + 5 * 12 / 1e8)
    text = compile(sums(64), network=NETWORK, processor=PROCESSOR, **options).explain()
    assert [line[48:70].split() for line in text.splitlines()[4:6]] == [
        ["8.2", "us", "23.6", "us"],
        ["0.7", "us", "23.6", "us"],
    ]


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


def test_steps_together_move_the_arrays_once() -> None:
    """Arrays move into the cache and out of it once in a run of four steps."""
    slow_memory, array = Processor(rate=1e18, bandwidth=1e9), 4 * 960 * 64
    steps: Any = {"repeat": "A", "exchange_every": 4}
    [apart] = simulate(heat2d(960, 64), slow_memory, [1], **steps).points
    [together] = simulate(heat2d(960, 64), slow_memory, [1], cache_bytes=1 << 14, **steps).points
    assert apart.seconds == pytest.approx(4 * 2 * array / 1e9)
    assert together.seconds == pytest.approx(2 * 2 * array / 1e9, rel=1e-6)


def test_ranks_of_a_node_share_its_memory() -> None:
    """Two ranks gain nothing where one has all of the bandwidth; four are on two nodes."""
    shared = replace(PROCESSOR, bandwidth=1e6, node_bandwidth=1e6, node_ranks=2)
    fast = Network(latency=1e-12, bandwidth=1e15)
    one, two, four = simulate(blur(64, 5), shared, [1, 2, 4], network=fast).points
    assert one.seconds < two.seconds < 1.1 * one.seconds
    assert four.seconds == pytest.approx(two.seconds / 2, rel=0.1)
    corrected = simulate(blur(64, 5), shared, [1], network=fast, one_rank=1.0).points
    assert corrected[0].seconds == pytest.approx(1.0)


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


@pytest.mark.parametrize("ranks", [[], 4, "4", [2, 1], [0, 1], [1.5], [True]])
def test_no_ranks(ranks: Any) -> None:
    with pytest.raises(InvalidInputError, match="numbers of ranks are"):
        simulate(blur(), PROCESSOR, ranks)


def test_arguments_of_other_types() -> None:
    other: Any = "alpha=1us"
    with pytest.raises(InvalidInputError, match="processor is 'alpha=1us'; expected a Processor"):
        simulate(blur(), other, [1])
    with pytest.raises(InvalidInputError, match="cache_bytes is '1M'; expected bytes, or 0"):
        simulate(blur(), PROCESSOR, [1], cache_bytes="1M")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="network is 'alpha=1us'; expected a Network"):
        simulate(blur(), PROCESSOR, [1], network=other)
    with pytest.raises(InvalidInputError, match="'alpha=1us' is no function; expected a PrimFunc"):
        simulate(other, PROCESSOR, [1])
