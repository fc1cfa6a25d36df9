# SPDX-License-Identifier: Apache-2.0
"""Questions about a model: how long it takes, what a change would bring; tables of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
from rich.console import Group, RenderableType
from rich.table import Table

from tvm_fusion.errors import PredictionError

from ..cluster import load_cluster
from ..report import Answer, answer_table
from ..timeline.execution_graph import HostCosts
from .layers import StaticModel
from .lowered import PRECISIONS
from .predict_model import ENGINES, ModelPrediction, predict_on

PHASES = ("prefill", "decode")
_OF_RANKS = ("link", "bucket", "sharding")


@dataclass(frozen=True)
class Question:
    """Model, and how it is to run."""

    model: Any
    machine: Any = "native"
    engine: str = "tvm_fusion"
    shapes: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """``machine``, ``engine``, ``shapes`` and ``options``: as for :func:`predict`."""

    phase: str = ""
    step: int = 0

    def imported(self) -> StaticModel:
        """The model with its shapes, which serves any machine."""
        shapes = dict(self.shapes or {})
        if not self.phase:
            return StaticModel(self.model, shapes)
        return StaticModel(
            self.model, lambda graph: {**phase_shapes(graph, self.phase, self.step), **shapes}
        )

    def predict(self, imported: StaticModel) -> ModelPrediction:
        """The answer, without changes."""
        return predict_on(imported, self.machine, self.engine, **self.options)

    def what_if(
        self, imported: StaticModel, prediction: ModelPrediction, changes: Sequence[str]
    ) -> ModelPrediction:
        """Add what changes would bring to a prediction of this question.

        =========================== ========================================================
        ``machine=NAME|FILE``       on another machine
        ``batch=FACTOR``            so many times the size of the open dimension ``batch``
        ``engine=ENGINE``           by the other engine
        ``precision=PRECISION``     in another type of floats, on a GPU
        ``ranks=N``                 shared by so many GPUs of a node
        ``phase=PHASE``             ``prefill`` or ``decode`` of a decoder
        ``step=N``                  with so many tokens before, or in the prompt
        ``fusion=auto|all|none``    pairs of convolutions that are fused
        ``winograd=auto|always|never``  convolutions by Winograd's algorithm
        =========================== ========================================================

        and, after these, those of :func:`tvm_fusion.prediction.what_if.change` that need no ranks,
        several joined by `` and ``.

        Raises ``PredictionError`` if a change is unknown, its value is wrong, or it matches no
        operator.
        """
        answers = tuple(self._answer(imported, prediction, text) for text in changes)
        return replace(prediction, answers=answers)

    def _answer(self, imported: StaticModel, prediction: ModelPrediction, text: str) -> Answer:
        question, edits = self, list[str]()
        for part in text.split(" and "):
            name, _, value = part.strip().partition("=")
            if name in _OF_RANKS:
                raise PredictionError(f"{part!r} is for traces of several ranks")
            if name in _SETTINGS:
                question = _SETTINGS[name](question, value)
            elif name in _EDITS:
                edits.append(part)
            else:
                known = ", ".join((*_SETTINGS, *_EDITS))
                raise PredictionError(f"unknown change {part!r}; expected {known}")
        scenario = prediction.scenario
        if question != self:
            same = all(
                getattr(question, x) == getattr(self, x) for x in ("shapes", "phase", "step")
            )
            changed = question.predict(imported if same else question.imported())
            scenario = replace(changed.scenario, notes=changed.notes)
        if edits:
            scenario = scenario.change(" and ".join(edits))
        return scenario.answer(text, prediction.seconds)


def phase_shapes(graph: onnx.GraphProto, phase: str, step: int) -> dict[str, int]:
    """Sizes of a decoder's open dimensions, which exporters name alike.

    A name with ``total``, or with ``past`` and a sum, is of all tokens; one with ``past`` of those
    whose keys and values are given; one with ``seq`` or ``length`` of the new ones.

    Raises ``PredictionError`` if phase or step is none, or the model has no such dimension: the
    message lists those that it has.
    """
    _one_of("phase", phase, PHASES)
    if type(step) is not int or not 0 < step < 1 << 31:
        raise PredictionError(f"step is {step!r}; expected a number of tokens from 1 on")
    past, new = (step, 1) if phase == "decode" else (0, step)
    stored = {each.name for each in graph.initializer}
    names = {
        dim.dim_param: dim.dim_param.lower()
        for each in graph.input
        if each.name not in stored
        for dim in each.type.tensor_type.shape.dim
        if dim.dim_param
    }
    shapes = {}
    for name, low in names.items():
        if "total" in low or ("past" in low and "+" in low):
            shapes[name] = past + new
        elif "past" in low:
            shapes[name] = past
        elif "seq" in low or "length" in low:
            shapes[name] = new
    if new not in shapes.values() or (past and not {past, past + new} & set(shapes.values())):
        wanted = "sequence" if new not in shapes.values() else "past"
        raise PredictionError(
            f"phase {phase}: no open dimension is called like {wanted!r}; the model has "
            f"{', '.join(names) or 'none'}: bind them by shapes (--shape NAME=SIZE)"
        )
    if 0 in shapes.values():
        name = next(name for name, size in shapes.items() if not size)
        raise PredictionError(
            f"phase prefill: {name!r} would be 0; expected a model of the prompt, without a past"
        )
    return shapes


def _machine(asked: Question, value: str) -> Question:
    if asked.options.get("cluster") is not None:
        raise PredictionError(f"machine={value}: a cluster has its own machine")
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


def _phase(asked: Question, value: str) -> Question:
    return replace(asked, phase=_one_of("phase", value, PHASES))


def _step(asked: Question, value: str) -> Question:
    if not asked.phase or not value.isdecimal() or not 0 < int(value) < 1 << 31:
        raise PredictionError(f"step={value}: expected a number of tokens, and a phase")
    return replace(asked, step=int(value))


def _fusion(asked: Question, value: str) -> Question:
    fuse = _one_of("fusion", value, ("auto", "all", "none"))
    return replace(asked, options={**asked.options, "fuse": fuse})


def _winograd(asked: Question, value: str) -> Question:
    winograd = _one_of("winograd", value, ("auto", "always", "never"))
    return replace(asked, options={**asked.options, "winograd": winograd})


def _batch(question: Question, value: str) -> Question:
    shapes = dict(question.shapes or {})
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
    return replace(question, shapes={**shapes, "batch": int(larger)})


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
    "phase": _phase,
    "step": _step,
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
    cluster: Any = None,
    phase: str = "",
    step: int = 0,
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
        Type of the floats on a GPU: ``fp32``, ``tf32`` (matrices only), ``fp16`` or ``bf16``. On a
        CPU ``fp32`` or ``bf16``, that of ``compile``.
    ranks : int
        GPUs that share the model by tensor parallelism; engine ``pytorch`` only.
    cluster : path, optional
        File of nodes, whose machine replaces ``machine``; see :mod:`tvm_fusion.prediction.cluster`.
        Without it all ranks are in one node.
    phase, step : str, int
        Phase of a decoder, whose open dimensions it binds: ``prefill`` of a prompt of ``step``
        tokens, or ``decode``, the token after ``step`` others; see :func:`phase_shapes`.
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
    options |= {"cluster": None if cluster is None else load_cluster(cluster)}
    asked = Question(model, machine, engine, shapes, options, phase, step)
    imported = asked.imported()
    return asked.what_if(imported, asked.predict(imported), what_if)


def predictions_table(predictions: Sequence[ModelPrediction], title: str = "") -> RenderableType:
    """One table a machine, and, where there are several, one that compares them."""
    tables: list[RenderableType] = [kernels_table(found, title) for found in predictions]
    tables += [
        answer_table(f"{found.engine} on {found.title}", found.seconds, found.answers)
        for found in predictions
        if found.answers
    ]
    return Group(*tables, *([_comparison(predictions)] if len(predictions) > 1 else []))


def kernels_table(prediction: ModelPrediction, title: str = "") -> Table:
    """One row a launch, in the order of the run."""
    table = Table(
        title=f"{title}, {prediction.engine} on {prediction.title}",
        caption="\n".join([_totals(prediction), *prediction.notes]),
    )
    table.add_column("call", justify="right")
    table.add_column("kernel")
    for heading in ("us", "from", "to", "% of kernels"):
        table.add_column(heading, justify="right")
    table.add_column("bound by")
    table.add_column("of roofline", justify="right")
    table.add_column("model")
    for row in prediction.kernels:
        table.add_row(
            str(row.position),
            f"{row.kernel}: {row.operator}" if row.kernel not in row.operator else row.operator,
            *(f"{seconds * 1e6:.1f}" for seconds in (row.seconds, row.low, row.high)),
            f"{row.seconds / prediction.kernel_seconds:.1%}",
            row.bound,
            f"{row.roofline_share:.0%}",
            row.model if row.in_range else " ".join((row.model, "*", ", ".join(row.extrapolated))),
        )
    return table


def _totals(prediction: ModelPrediction) -> str:
    outside = sum(not row.in_range for row in prediction.kernels)
    text = (
        f"A run takes {prediction.seconds * 1e3:.3f} ms ({prediction.low * 1e3:.3f} to "
        f"{prediction.high * 1e3:.3f}): kernels {prediction.kernel_seconds * 1e3:.3f} ms, and "
        f"{prediction.host_seconds * 1e3:.3f} ms of the host that they do not hide."
    )
    if prediction.memory_bytes is not None:
        text += f"\nPeak memory of a rank: {prediction.memory_bytes / 1e9:.3g} GB."
    if outside:
        text += f"\n* {outside} kernels outside of what their model was fitted to"
        text += ", in machine, type or size"
    return text


def _comparison(predictions: Sequence[ModelPrediction]) -> Table:
    table = Table(title="a run")
    table.add_column("machine")
    for heading in ("ms", "from", "to", "kernels ms", "times as fast as the first"):
        table.add_column(heading, justify="right")
    for found in predictions:
        times = (found.seconds, found.low, found.high, found.kernel_seconds)
        ratio = predictions[0].seconds / found.seconds
        table.add_row(found.title, *(f"{each * 1e3:.3f}" for each in times), f"{ratio:.2f}")
    return table
