# SPDX-License-Identifier: Apache-2.0
"""The search: its order, its determinism, and how fast it finds the best of recorded times."""

from __future__ import annotations

import functools
import statistics

import numpy as np
import pytest

from examples.benchmarks import search as replays
from tvm_fusion.tuning.search import BATCH, Search


def landscape(count: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, predictions, and times that differ from those by something that can be learnt."""
    features = np.random.default_rng(seed).uniform(0, 1, (count, 3))
    log_predicted = features[:, 0].copy()
    log_times = log_predicted + 0.8 * (features[:, 1] > 0.5)
    return features, log_predicted, log_times - log_times[0]


def play(search: Search, log_times: np.ndarray, trials: int) -> list[int]:
    search.add(0, 0.0)
    order: list[int] = []
    while search.trials < trials and (batch := search.propose()):
        for index in batch:
            search.add(index, float(log_times[index]))
        order += batch
    return order


@pytest.mark.slow
def test_the_same_seed_and_measurements_give_the_same_trials() -> None:
    features, predicted, times = landscape()
    first, second = (play(Search(features, predicted, seed=3), times, 40) for _ in range(2))
    other = play(Search(features, predicted, seed=4), times, 40)
    assert first == second != other
    assert len(set(first)) == len(first)


def test_the_first_batch_follows_the_analytic_model_but_for_one_in_eight() -> None:
    features, predicted, _ = landscape()
    search = Search(features, predicted)
    search.add(0, 0.0)
    batch = search.propose()
    order = [index for index in np.argsort(predicted) if index]
    assert len(batch) == BATCH
    assert len(set(batch) & set(order[:BATCH])) >= BATCH - 1


def test_templates_take_turns_in_the_first_batch() -> None:
    features, predicted, _ = landscape()
    groups = [0] * 100 + [1] * 100
    predicted[100:] += 5  # another scale
    batch = Search(features, predicted, groups).propose()
    assert {groups[index] for index in batch[:2]} == {0, 1}
    assert sum(groups[index] for index in batch[:6]) == 3


def test_exploration_tries_all_values_of_knobs() -> None:
    """A setting with a rare value is the fastest, and every model says that it is slow."""
    generator = np.random.default_rng(3)
    knobs = np.column_stack([generator.integers(0, 4, 200), generator.integers(0, 12, 200)])
    knobs[:, 1][knobs[:, 1] == 11] = 0
    knobs[150, 1] = 11
    predicted = generator.uniform(0, 0.1, 200)
    predicted[150] = 3.0
    times = predicted - predicted[0]
    times[150] = -1.0
    search = Search(np.column_stack([np.exp(predicted), knobs]), predicted, knobs=2)
    assert 150 in play(search, times, 64)


def test_neighbours_of_the_best_differ_in_one_knob_by_the_next_values() -> None:
    knobs = np.array([[a, b, np.nan] for a in (1, 2, 4, 8) for b in (0, 1)], dtype=float)
    knobs = np.vstack([knobs, [np.nan, np.nan, 2.0]])  # Knobs of another template.
    predicted = -np.arange(9.0)
    search = Search(np.column_stack([np.ones(9), knobs]), predicted, knobs=3)
    search.add(0, 0.0)
    assert search.neighbours() == [4, 2, 1]  # not 6: two values are nearer
    search.add(4, -1.0)
    assert search.neighbours() == [6, 5, 2]  # not 0: it was tried
    search.fail(2)
    assert search.neighbours() == [6, 5]


def test_neighbours_winners_come_first() -> None:
    features, predicted, _ = landscape()
    worst = int(np.argmax(predicted))
    assert Search(features, predicted, first=[worst, 0, 999]).propose()[0] == worst


def test_it_learns_where_the_model_is_wrong() -> None:
    features, predicted, times = landscape()
    search = Search(features, predicted)
    play(search, times, 32)
    scores = search.scores()
    assert scores is not None
    rest = [index for index in range(len(search)) if index not in search.measured]
    learnt = replays.rank_correlation([*scores[rest]], [*times[rest]])
    assert learnt > 0.8 > replays.rank_correlation([*predicted[rest]], [*times[rest]])


def test_failures_are_neither_repeated_nor_learnt_from() -> None:
    features, predicted, times = landscape(24)
    search = Search(features, predicted)
    search.add(0, 0.0)
    seen: list[int] = []
    while batch := search.propose():
        seen += batch
        for index in batch:
            search.fail(index) if index % 2 else search.add(index, float(times[index]))
    assert sorted(seen) == list(range(1, 24))
    assert search.trials == 23
    assert search.best % 2 == 0


def test_a_flat_landscape_promises_no_gain() -> None:
    features, predicted, _ = landscape()
    flat = np.zeros_like(predicted)
    search = Search(features, flat)
    assert search.expected_gain() == 0.0 or search.expected_gain() == float("inf")
    play(search, flat, 16)
    assert search.expected_gain() < 0.01


@functools.cache
def replayed(cpu: str, seeds: int) -> dict[str, list[replays.Replay]]:
    """Our search on all recorded kernels of a CPU, some times each."""
    return {
        found.name: [replays.replay(found, replays.ours(found, seed)) for seed in range(seeds)]
        for found in replays.recordings(replays.RESULTS / cpu / "knobs.json")
    }


ANOTHER = pytest.param("znver3", 3, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "seeds"), [ANOTHER, pytest.param("znver4", 1, marks=pytest.mark.slow), ("znver5", 1)]
)
def test_recorded_searches_find_the_best(cpu: str, seeds: int) -> None:
    kernels = replayed(cpu, seeds)
    assert len(kernels) >= 10
    assert statistics.median(replays.shares(kernels, 32)) >= 0.98
    assert statistics.median(replays.shares(kernels, 64)) >= 0.995
    assert min(replays.shares(kernels, 64)) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "seeds"), [ANOTHER, ("znver5", 1)])
def test_scores_rank_untried_settings_of_recorded_searches(cpu: str, seeds: int) -> None:
    assert replays.correlation(replayed(cpu, seeds)) >= 0.85
