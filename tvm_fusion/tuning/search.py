# SPDX-License-Identifier: Apache-2.0
"""Search over the settings of one kernel: an analytic order, corrected by what was measured.

With ``p`` the predicted and ``t`` the measured time of a setting, gradient-boosted trees (XGBoost)
learn ``log(t / p)`` from knobs and from the terms of the analytic model; every setting is scored,
as ``log(p)`` plus what the trees say. The first batch follows the analytic model alone. Of
:data:`EXPLORED` candidates one is drawn at random, and one is the best with a value of a knob that
was tried least, so that a wrong model is found out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

BATCH = 8
EXPLORED = 8
LEAST_COVERED = 4
"""Smallest batch of which one candidate covers values of knobs."""
REACH = 2
"""Values of a knob on either side of the best setting's whose settings are its neighbours."""
LEAST_LEARNT = 6
"""Measured settings with which the trees begin."""

PARAMETERS = {
    "max_depth": 4,
    "eta": 0.15,
    "lambda": 10,  # few settings are measured: small corrections of the analytic model
    "tree_method": "exact",
    "nthread": 1,
    "verbosity": 0,
}
ROUNDS = 60

Matrix = NDArray[np.float64]


class Search:
    """The order in which settings are tried; the same seed and measurements give the same order.

    Parameters
    ----------
    features : array of float
        Row of each setting, NaN where a setting lacks a feature. The first setting is the default.
    log_predicted : array of float
        Logarithm of each setting's predicted time, in any unit.
    groups : sequence of int, optional
        Template of each setting: predictions are compared within one.
    seed : int
        Seed of the random choices.
    first : iterable of int
        Settings to try before all others.
    knobs : int
        Number of features that are knobs, which come last.
    """

    def __init__(
        self,
        features: Matrix,
        log_predicted: Matrix,
        groups: Sequence[int] | None = None,
        seed: int = 0,
        first: Iterable[int] = (),
        knobs: int = 0,
    ) -> None:
        self.features = np.asarray(features, dtype=float)
        self.log_predicted = np.asarray(log_predicted, dtype=float)
        self.measured: dict[int, float] = {}
        self.failed: set[int] = set()
        self._random = random.Random(seed)
        self._seed = seed
        count = len(self.log_predicted)
        self._first = [index for index in dict.fromkeys(first) if 0 < index < count]
        self._order = _interleaved(self.log_predicted, groups or [0] * count)
        self._knobs = self.features[:, self.features.shape[1] - knobs :]
        self._with_value = _settings_by_value(self._knobs)

    def __len__(self) -> int:
        return len(self.log_predicted)

    @property
    def trials(self) -> int:
        """Settings that were tried, without the default."""
        return len((self.measured.keys() | self.failed) - {0})

    @property
    def best(self) -> int:
        """The fastest setting so far; the default before any was measured."""
        return min(self.measured, key=self.measured.__getitem__, default=0)

    def add(self, index: int, log_time: float) -> None:
        """Take in a measurement: logarithm of the time, in units of the default's time."""
        self.measured[index] = log_time

    def fail(self, index: int) -> None:
        """Take in that a setting cannot be used."""
        self.failed.add(index)

    def propose(self, count: int = BATCH) -> list[int]:
        """Return the settings to try next; none if all were tried."""
        untried = [index for index in range(1, len(self)) if not self._was_tried(index)]
        count = min(count, len(untried))
        scores = self.scores()
        if scores is None:
            ranked = [index for index in [*self._first, *self._order] if not self._was_tried(index)]
        else:
            ranked = sorted(untried, key=lambda index: (scores[index], index))
        ranked = list(dict.fromkeys(ranked))
        drawn = self._random.sample(untried, -(-count // EXPLORED)) if count else []
        if self._with_value and count >= LEAST_COVERED:
            drawn += [self._least_tried(ranked, drawn)]
        chosen = [index for index in ranked if index not in drawn]
        return chosen[: count - len(drawn)] + drawn

    def neighbours(self) -> list[int]:
        """Return the untried settings that differ from the best in one knob, the best score first.

        By one of the next :data:`REACH` values on either side. The trees see steps between values
        that were measured; where they promise nothing, one of these may still be better.
        """
        own = self._knobs[self.best]
        same = (self._knobs == own) | (np.isnan(self._knobs) & np.isnan(own))
        in_one = same.sum(axis=1) == len(own) - 1
        near_by: list[int] = []
        for values, value in zip(self._knobs.T, own, strict=True):
            above, below = (np.unique(values[in_one & (values * s > value * s)]) for s in (1, -1))
            near = [*above[:REACH], *below[-REACH:]]
            near_by += np.flatnonzero(in_one & np.isin(values, near)).tolist()
        scores = self.scores()
        order = self.log_predicted if scores is None else scores
        untried = [index for index in near_by if index and not self._was_tried(index)]
        return sorted(untried, key=lambda index: (order[index], index))

    def _least_tried(self, ranked: Sequence[int], drawn: Sequence[int]) -> int:
        """The first of the ranked settings with a value of a knob that was tried least."""
        left = [index for index in ranked if index not in drawn]
        rank = np.full(len(self), len(self))
        rank[left] = range(len(left))
        tried = [*self.measured, *self.failed, *drawn]
        best: dict[int, set[int]] = {}
        for settings in self._with_value:
            first = int(settings[rank[settings].argmin()])
            if rank[first] < len(self):
                best.setdefault(int(np.isin(settings, tried).sum()), set()).add(first)
        return self._random.choice(sorted(best[min(best)]) if best else left)

    def scores(self) -> Matrix | None:
        """Logarithm of each setting's expected time; None while too few were measured."""
        if len(self.measured) < LEAST_LEARNT:
            return None
        known = sorted(self.measured)
        times = np.array([self.measured[index] for index in known])
        residual = times - self.log_predicted[known]
        offset = float(np.median(residual))
        learnt = fit(self.features[known], residual - offset, self.features, self._seed)
        return self.log_predicted + offset + learnt

    def expected_gain(self) -> float:
        """Return by how much the best untried setting should beat the best one so far."""
        scores = self.scores()
        untried = [index for index in range(1, len(self)) if not self._was_tried(index)]
        if not untried:
            return 0.0
        if scores is None:
            return float("inf")
        best = self.measured[self.best]
        return float(np.exp(best - min(scores[untried])) - 1)

    def _was_tried(self, index: int) -> bool:
        return index in self.measured or index in self.failed


def fit(rows: Matrix, targets: Matrix, all_rows: Matrix, seed: int = 0) -> Matrix:
    """Fit boosted trees to some rows, and return what they predict for all rows."""
    import xgboost

    parameters = PARAMETERS | {"seed": seed}
    trees = xgboost.train(parameters, xgboost.DMatrix(rows, targets), ROUNDS)
    return np.asarray(trees.predict(xgboost.DMatrix(all_rows)), dtype=float)


def _settings_by_value(knobs: Matrix) -> list[NDArray[np.int64]]:
    """Settings with each value of each knob that has several."""
    found = []
    for column in knobs.T:
        values = np.unique(column[~np.isnan(column)])
        found += [np.flatnonzero(column == value) for value in values if len(values) > 1]
    return found


def _interleaved(log_predicted: Matrix, groups: Sequence[int]) -> list[int]:
    """Settings but the default by predicted time: the first of each group, the second ..."""
    ranks = {
        index: rank
        for group in set(groups)
        for rank, index in enumerate(
            sorted(
                (index for index in range(1, len(groups)) if groups[index] == group),
                key=lambda index: (log_predicted[index], index),
            )
        )
    }
    return sorted(ranks, key=lambda index: (ranks[index], log_predicted[index], index))
