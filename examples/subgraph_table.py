# SPDX-License-Identifier: Apache-2.0
"""Table 2 of the Panamera paper: its twelve sub-graphs as data.

Panamera: Zhao et al., "Parallelizing Neural Network Models Effectively on GPU by Implementing
Reductions Atomically", PACT 2022. The table gives types, shapes, reduced axes and the order of the
operators. Its gaps are filled as follows:

* *Second operands* of ``add`` and ``mul`` are further inputs of the shape and type that the table
  gives. None is broadcast: the table lists one configuration, and this has the most memory traffic.
* *Chains*: every operator takes the result of the one before it; a branch begins with an input of
  its own and ends with its reduction. So the branches of 8 (three inputs each) and of 9 (one each)
  share nothing but the shape; shared inputs would make a single kernel look better.
* *Reshapes* merge the reduced axes, and the kept ones where there are several: (64, 128, 12, 64)
  and (64, 128, 768) become (8192, 768), which is summed over its rows as the gradients of BERT's
  biases are (64 sentences of 128 words, 12 heads of 64); (64, 20) becomes (1280,).
* The underlining of 11 is read as that of 10: its first two axes are reduced.
* *Casts* round; sums of float16 give float16, but are accumulated in float32.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Branch:
    """Element-wise operators and the sum after them.

    Parameters
    ----------
    steps : tuple[str, ...]
        ``cast TYPE``, ``neg``, ``add`` and ``mul`` (which take the next input), ``reshape SHAPE``.
    axes : tuple[int, ...]
        Reduced axes of the result of the steps.
    """

    steps: tuple[str, ...]
    axes: tuple[int, ...]

    @property
    def operands(self) -> int:
        """Number of inputs that the branch reads."""
        return 1 + sum(step in ("add", "mul") for step in self.steps)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Parameters
    ----------
    number : int
        Number in the first column.
    shape, dtype : tuple[int, ...], str
        Shape and type of every input.
    branches : tuple[Branch, ...]
        One output each.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str
    branches: tuple[Branch, ...]

    @property
    def inputs(self) -> int:
        """Number of inputs: ``x0``, ``x1`` and so on."""
        return sum(branch.operands for branch in self.branches)


def _one(
    number: int, shape: tuple[int, ...], dtype: str, axes: tuple[int, ...], *steps: str
) -> Row:
    return Row(number, shape, dtype, (Branch(steps, axes),))


ROWS = (
    _one(1, (64, 2), "float32", (0,), "cast float16", "cast float32", "cast float16"),
    _one(2, (1280, 21128), "float32", (0,), "cast float16"),
    _one(3, (64, 768), "float16", (0,), "cast float32"),
    _one(4, (1280, 21128), "float32", (1,), "mul"),
    _one(5, (1280,), "float32", (0,), "neg", "mul"),
    _one(6, (3072,), "float32", (0,), "mul", "mul"),
    _one(7, (64, 128, 768), "float32", (0,), "add", "mul"),
    Row(8, (64, 128, 768), "float32", (Branch(("add", "mul"), (0, 1)),) * 2),
    Row(9, (8192, 768), "float32", (Branch((), (0,)),) * 2),
    _one(10, (64, 128, 12, 64), "float16", (0,), "reshape 8192 768", "cast float32"),
    _one(11, (64, 128, 768), "float16", (0,), "reshape 8192 768", "cast float32"),
    _one(12, (64, 20), "float16", (0,), "reshape 1280"),
)
"""All twelve rows, in the order of the table."""
