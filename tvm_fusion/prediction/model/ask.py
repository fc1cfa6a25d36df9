# SPDX-License-Identifier: Apache-2.0
"""Questions about a model: how long it takes on a machine, and what a change would bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import PredictionError
from ...onnx.frontend import ImportedModel
from ..report import Answer
from ..timeline.execution_graph import HostCosts
from .lowered import PRECISIONS
from .predict_model import ENGINES, ModelPrediction, import_static, predict_on

_OF_RANKS = ("link", "bucket", "sharding")


@dataclass(frozen=True)
class Question:
    """Model, and how it is to run.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        The model.
    machine, engine, shapes, options
        As for :func:`predict`.
    """

    model: Any
    machine: Any = "native"
    engine: str = "tvm_fusion"
    shapes: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def imported(self) -> ImportedModel:
        """The model with its shapes, which serves any machine."""
        return import_static(self.model, self.shapes)

    def predict(self, imported: ImportedModel) -> ModelPrediction:
        """The answer, without changes."""
        return predict_on(imported, self.machine, self.engine, **self.options)

    def what_if(
        self, imported: ImportedModel, found: ModelPrediction, changes: Sequence[str]
    ) -> ModelPrediction:
        """Add what changes would bring to a prediction of this question.

        =========================== ========================================================
        ``machine=NAME|FILE``       on another machine
        ``batch=FACTOR``            so many times the size of the open dimension ``batch``
        ``engine=ENGINE``           by the other engine
        ``precision=PRECISION``     in another type of floats, on a GPU
        ``ranks=N``                 shared by so many GPUs of a node
        ``fusion=auto|all|none``    pairs of convolutions that are fused
        ``winograd=auto|always|never``  convolutions by Winograd's algorithm
        =========================== ========================================================

        and, after these, those of :func:`tvm_fusion.prediction.what_if.change` that need no ranks,
        several joined by `` and ``.

        Raises
        ------
        PredictionError
            If a change is unknown, its value is wrong, or it matches no operator.
        """
        answers = tuple(self._answer(imported, found, text) for text in changes)
        return replace(found, answers=answers)

    def _answer(self, imported: ImportedModel, found: ModelPrediction, text: str) -> Answer:
        asked, edits = self, list[str]()
        for part in text.split(" and "):
            name, _, value = part.strip().partition("=")
            if name in _OF_RANKS:
                raise PredictionError(f"{part!r} is for traces of several ranks")
            if name in _SETTINGS:
                asked = _SETTINGS[name](asked, value)
            elif name in _EDITS:
                edits.append(part)
            else:
                known = ", ".join((*_SETTINGS, *_EDITS))
                raise PredictionError(f"unknown change {part!r}; expected {known}")
        scenario = found.scenario
        if asked != self:
            same = asked.shapes == self.shapes
            changed = asked.predict(imported if same else asked.imported())
            scenario = replace(changed.scenario, notes=changed.notes)
        if edits:
            scenario = scenario.change(" and ".join(edits))
        return scenario.answer(text, found.seconds)


def _machine(asked: Question, value: str) -> Question:
    return replace(asked, machine=value)


def _engine(asked: Question, value: str) -> Question:
    return replace(asked, engine=_one_of("engine", value, ENGINES))


def _precision(asked: Question, value: str) -> Question:
    precision = _one_of("precision", value, tuple(PRECISIONS))
    return replace(asked, options={**asked.options, "precision": precision})


def _ranks(asked: Question, value: str) -> Question:
    if not value.isdecimal() or not 0 < int(value) <= 4096:
        raise PredictionError(f"ranks={value}: expected a number of GPUs")
    return replace(asked, options={**asked.options, "ranks": int(value)})


def _fusion(asked: Question, value: str) -> Question:
    fuse = _one_of("fusion", value, ("auto", "all", "none"))
    return replace(asked, options={**asked.options, "fuse": fuse})


def _winograd(asked: Question, value: str) -> Question:
    winograd = _one_of("winograd", value, ("auto", "always", "never"))
    return replace(asked, options={**asked.options, "winograd": winograd})


def _batch(asked: Question, value: str) -> Question:
    shapes = dict(asked.shapes or {})
    size = shapes.get("batch")
    if type(size) is not int:
        raise PredictionError(
            f"batch={value}: needs a model with an open dimension 'batch', and its size (--batch)"
        )
    try:
        larger = size * float(value)
    except ValueError:
        larger = 0.0
    if not (0 < larger < 1 << 31 and larger == int(larger)):
        raise PredictionError(f"batch={value}: {value!r} times {size} is no positive integer")
    return replace(asked, shapes={**shapes, "batch": int(larger)})


def _one_of(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise PredictionError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    return value


_SETTINGS: dict[str, Callable[[Question, str], Question]] = {
    "machine": _machine,
    "batch": _batch,
    "engine": _engine,
    "precision": _precision,
    "ranks": _ranks,
    "fusion": _fusion,
    "winograd": _winograd,
}

_EDITS = ("graph", "fuse", "remove", "resize", "parallelize")


def predict(
    model: Any,
    machine: Any = "native",
    engine: str = "tvm_fusion",
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: Any = "auto",
    winograd: str = "auto",
    records: Any = None,
    threads: int | None = None,
    overheads: HostCosts | None = None,
    precision: str = "fp32",
    ranks: int = 1,
    what_if: Sequence[str] = (),
) -> ModelPrediction:
    """Predict how long a run of an ONNX model takes; nothing is compiled to code or run.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        The model.
    machine : str, path or Machine
        ``native``, the name of a known machine, a file of ``tvm-fusion calibrate``, or a machine.
    engine : str
        ``tvm_fusion``, our kernels, which on a GPU are estimates; or ``pytorch``, the library's
        kernels, operator by operator.
    shapes : mapping, optional
        Sizes of open dimensions, as for ``compile``.
    fuse, winograd, records
        As for ``compile``; our kernels only.
    threads : int, optional
        Threads of a CPU; by default those that its figures were measured with.
    overheads : HostCosts, optional
        Overheads of the host, such as those of :func:`load_overheads`.
    precision : str
        Type of the floats on a GPU: ``fp32``, ``tf32`` (matrices only), ``fp16`` or ``bf16``.
    ranks : int
        GPUs of a node that share the model by tensor parallelism; engine ``pytorch`` only.
    what_if : sequence of str
        Changes whose effect is predicted, such as ``machine=h100``, see :meth:`Question.what_if`.

    Returns
    -------
    ModelPrediction

    Raises
    ------
    PredictionError
        If there is no such machine or engine, the machine lacks a figure, or a change cannot be
        made.
    InvalidModelError, UnsupportedOperatorError
        As for ``compile``, or if the shape of an input is open.
    """
    options = {"fuse": fuse, "winograd": winograd, "records": records, "threads": threads}
    options |= {"overheads": overheads, "precision": precision, "ranks": ranks}
    asked = Question(model, machine, engine, shapes, options)
    imported = asked.imported()
    return asked.what_if(imported, asked.predict(imported), what_if)
