# SPDX-License-Identifier: Apache-2.0
"""Tasks of a model: its kernels with knobs, each once, with their share of the predicted time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir.transform import Pass
from tvm.target import Target

from schedules import cpu, gpu
from schedules.tuning.records import Key, Record, canonical
from schedules.tuning.tunable_rule import AnyTemplate, tunable_rule_of

from ..compiler import pipeline
from ..compiler.registry import rank_compiler
from ..compiler.targets import is_gpu
from ..errors import InvalidModelError
from ..onnx.frontend import import_onnx
from ..runtime.host_arrays import refuse_open_shapes
from .measure import KernelSequence

DTYPES = ("float32", "float16", "float64", "uint8", "int8")

NOTHING_TO_TUNE = (
    "the model has nothing to tune: no convolution, product of matrices or reduction of known "
    "shape; products of one row, and of a few rows with narrow weights, have no settings"
)

Setting = tuple[AnyTemplate, Any]


@dataclass
class Task:
    """One kernel to tune."""

    name: str  # Name of the function in the model.
    about: str  # What it computes.
    key: Key  # What its record must have.
    func: tirx.PrimFunc  # The function without a schedule, of static shapes.
    weights: tuple[int, ...]  # Parameters that are constants of the model.
    workload: Any  # What the templates compute.
    templates: Sequence[AnyTemplate]  # The default's first.
    machine: Any  # The CPU or GPU.
    calls: int = 1  # Calls in a call of the model.
    share: float = 1.0  # Part of the predicted time of all tasks.
    wide: bool = False  # Whether templates search their wider spaces, where they have any.
    outputs: int = 1  # Parameters that are outputs, the last ones.
    numbers: dict[str, int] = field(default_factory=dict)

    @cached_property
    def settings(self) -> list[Setting]:
        """Every legal setting of all templates, the default first."""
        space = [
            (template, knobs)
            for template in self.templates
            for knobs in template.space(self.workload, self.machine, self.wide)
        ]
        self.numbers = {text_of(*setting): number for number, setting in enumerate(space)}
        return space

    @cached_property
    def table(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Features of all settings, logarithms of predicted cycles, and how many are knobs."""
        return table_of_features(self.settings, self.workload, self.machine)

    @property
    def groups(self) -> list[int]:
        """Position of each setting's template."""
        order = {template.name: number for number, template in enumerate(self.templates)}
        return [order[template.name] for template, _ in self.settings]

    def program(self, number: int, target: Target) -> KernelSequence:
        """Write the nest of a setting."""
        template, knobs = self.settings[number]
        return self._sole(template.write(self.func, self.workload, knobs, target).mod)

    def reference(self, target: Target) -> KernelSequence:
        """Return the function without a schedule."""
        return self._sole(tvm.IRModule({"main": self.func}))

    def _sole(self, mod: tvm.IRModule) -> KernelSequence:
        """The program of one kernel; a workspace before the parameters is a constant of it."""
        params, own = mod["main"].params, len(self.func.params)
        added = params[: len(params) - own]
        constants = tuple(np.zeros([int(e) for e in one.shape], str(one.dtype)) for one in added)
        numbers = (*range(own, len(params)), *range(own))
        return KernelSequence(mod, (("main", numbers),), constants)

    def tensors(self, generator: np.random.Generator) -> list[np.ndarray]:
        """Draw the parameters, with weights that do not saturate activations."""
        arrays = []
        for position, param in enumerate(self.func.params):
            shape = [int(extent) for extent in param.shape]
            if str(param.dtype).endswith("int8"):
                limits = np.iinfo(str(param.dtype))
                array = generator.integers(limits.min, limits.max + 1, shape, str(param.dtype))
            else:
                scale = math.prod(shape[1:-1]) ** -0.5 if position in self.weights else 1.0
                array = (generator.standard_normal(shape) * scale).astype(str(param.dtype))
            template, _ = self.settings[0]
            template.clear_padding(self.workload, position, array)
            arrays.append(array)
        return arrays

    def number_of(self, template: str, version: int, knobs: Mapping[str, Any]) -> int | None:
        """Position of a setting that was written as JSON; None if it is not in the space."""
        known = {one.name: one.version for one in self.templates}
        if known.get(template) != version or not self.settings:
            return None
        return self.numbers.get(canonical({"template": template, "knobs": knobs}))

    def is_in_wide_space(self, record: Record) -> bool:
        """Return whether a record has one of the settings that only a wide search tries."""
        known = {one.name: one for one in self.templates}
        template = known.get(record.template)
        if template is None or template.version != record.version:
            return False
        try:
            knobs = template.read_knobs(record.knobs)
        except ValueError:
            return False
        return template.contains(self.workload, knobs, self.machine)


def text_of(template: AnyTemplate, knobs: Any) -> str:
    """A setting as JSON."""
    return canonical({"template": template.name, "knobs": asdict(knobs)})


def table_of_features(
    settings: Sequence[Setting], workload: Any, machine: Any
) -> tuple[np.ndarray, np.ndarray, int]:
    """Features of settings, one row each, logarithms of their predicted cycles, number of knobs.

    The first column has the cycles, the next ones what the analytic model says, the last ones the
    knobs; NaN where a template has no such feature. Knobs of several templates have columns of
    their own.
    """
    rows: list[dict[str, float]] = []
    knob_names: dict[str, None] = {}
    term_names: dict[str, None] = {}
    for template, knobs in settings:
        row = template.features(workload, knobs, machine)
        names = asdict(knobs)
        renamed = {f"{template.name}.{key}" if key in names else key: row[key] for key in row}
        for key in renamed:
            (knob_names if "." in key else term_names)[key] = None
        rows.append(renamed)
    columns = [*term_names, *knob_names]
    table = np.array([[row.get(column, math.nan) for column in columns] for row in rows])
    return table, np.log(table[:, columns.index("cycles")]), len(knob_names)


def extract_tasks(
    model: Any,
    target: Target,
    shapes: Mapping[str, Any] | None = None,
    options: pipeline.Options | None = None,
    wide: bool = False,
    ranks: int | None = None,
) -> list[Task]:
    """Find the kernels of a model that have knobs.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or tvm.IRModule
        A model as for ``compile``, or a Relax module as for ``pipeline.optimize``.
    target : Target
        A resolved CPU or GPU.
    shapes : mapping, optional
        Sizes of symbolic dimensions.
    options : pipeline.Options, optional
        The user's choices of forms.
    wide : bool
        Whether tasks have the wider spaces of their templates.
    ranks : int, optional
        Ranks that compute the model together, on a CPU each: the kernels are those of all.

    Returns
    -------
    list of Task
        The one with the largest share of the predicted time first.

    Raises
    ------
    InvalidModelError
        If a shape remains symbolic.
    """
    mod = import_model(model, shapes)
    plan = _phases(target, options or pipeline.Options(), ranks)
    plan.pop("schedule")
    mod = pipeline.run_phases(mod, target, plan)
    rules = gpu.RULES if is_gpu(target) else cpu.RULES
    tasks: dict[Key, Task] = {}
    for name, (count, weights, arguments) in _calls(mod).items():
        func = mod[name]
        if not isinstance(func, tirx.PrimFunc) or not _is_measurable(func):
            continue
        found = tunable_rule_of(func, target, rules)
        if found is None:
            continue
        rule, workload = found
        machine = rule.machine(target)
        key, templates = rule.key(workload, machine), rule.templates(workload, machine)
        task = Task(
            name=name,
            about=templates[0].describe(workload),
            key=key,
            func=func.with_attr("global_symbol", "main"),
            weights=weights,
            workload=workload,
            templates=templates,
            machine=machine,
            calls=0,
            wide=wide,
            outputs=len(func.params) - arguments,
        )
        tasks.setdefault(key, task).calls += count
    return _with_shares(list(tasks.values()))


def _phases(target: Target, options: pipeline.Options, ranks: int | None) -> dict[str, list[Pass]]:
    if ranks is None:
        return pipeline.phases(target, options)
    return rank_compiler().rank_phases(target, options, ranks)


def import_model(model: Any, shapes: Mapping[str, Any] | None = None) -> tvm.IRModule:
    """Return the Relax module of a model as for :func:`extract_tasks`.

    Raises
    ------
    InvalidModelError
        If a shape remains symbolic.
    """
    if isinstance(model, tvm.IRModule):
        return model
    imported = import_onnx(model, shapes)
    remedy = "tuning needs sizes: give them in shapes (--shape)"
    refuse_open_shapes(imported.inputs, InvalidModelError, remedy)
    return imported.mod


def merged(tasks: Sequence[Task]) -> list[Task]:
    """Keep the first of equal tasks, with new shares, the largest first."""
    found: dict[Key, Task] = {}
    for task in tasks:
        found.setdefault(task.key, task)
    return _with_shares(list(found.values()))


def _with_shares(tasks: list[Task]) -> list[Task]:
    """Set the shares of the predicted time, and sort by them."""
    for task in tasks:
        template = task.templates[0]
        default = template.default(task.workload, task.machine)
        task.share = task.calls * template.cycles(task.workload, default, task.machine)
    total = sum(task.share for task in tasks)
    for task in tasks:
        task.share /= total
    return sorted(tasks, key=lambda task: -task.share)


def _calls(mod: tvm.IRModule) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Calls of each function, which of its arguments are constants, and how many it has."""
    counts: Counter[str] = Counter()
    weights: dict[str, tuple[int, ...]] = {}
    arguments: dict[str, int] = {}

    def visit(node: Any) -> None:
        if not isinstance(node, relax.Call) or not isinstance(node.op, tvm.ir.Op):
            return
        if node.op.name == "relax.call_tir":
            name = node.args[0].name_hint
            counts[name] += 1
            arguments[name] = len(node.args[1].fields)
            weights[name] = tuple(
                number
                for number, argument in enumerate(node.args[1].fields)
                if isinstance(argument, tvm.ir.GenericConst)
            )

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return {name: (count, weights[name], arguments[name]) for name, count in counts.items()}


def _is_measurable(func: tirx.PrimFunc) -> bool:
    """Return whether all parameters are tensors of static shapes and types that NumPy knows."""
    return all(
        hasattr(param, "shape")
        and all(isinstance(extent, tirx.IntImm) for extent in param.shape)
        and str(param.dtype) in DTYPES
        for param in func.params
    )
