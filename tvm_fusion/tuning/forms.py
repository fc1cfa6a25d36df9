# SPDX-License-Identifier: Apache-2.0
"""Forms of the convolutions and pairs of a model, each as a small program that can be raced.

The program of a form is a module of its layers alone, which passes through the whole pipeline with
records that force the form and give the kernels their best knobs: what is raced is what a model
with these records is compiled to. Data and result are packed where those of the model are.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.target import Target

from relay_passes import can_choose, decide, decide_winograd
from relay_passes import op as ops
from relay_passes.op.conv2d import CONV2D
from relay_passes.op.conv_types import read_kernel
from schedules.cpu.conv2d.forms import FORMS, Form, form_key, layer_workload, packed, pair_workload
from schedules.cpu.conv2d.fused_conv2d import FUSED, PLANAR, FusedConv2D
from schedules.cpu.conv2d.planar.planar_knobs import prefers_planar
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.rule import CPUTemplate
from schedules.tuning.records import Key, Record, Records
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, FusedConv2DWorkload

from ..compiler import pipeline
from ..errors import TuningError
from .measure import KernelSequence
from .tasks import Task, extract_tasks

_WRITING = threading.Lock()
"""Held while a module is rewritten: Relax's builder is one for all threads."""


@dataclass
class FormTask:
    """The forms of one convolution or pair."""

    workload: Conv2DKernel  # The layers, in NCHW.
    forms: Sequence[Form]  # Two or more; the first is chosen without records.
    machine: CPUInfo  # The CPU.
    calls: int  # How often the model has the layers.
    share: float = 1.0  # Part of the time of all such tasks.
    knobs: dict[Form, list[Record]] = field(default_factory=dict)
    """Records of the kernels of each form."""
    weights: tuple[int, ...] = ()
    outputs: int = 1

    @property
    def key(self) -> Key:
        """Key of its record."""
        return form_key(self.workload, self.machine)

    @property
    def about(self) -> str:
        """The layers and the size of the image."""
        return FORMS.describe(self.workload)

    @property
    def name(self) -> str:
        """The same, for messages."""
        return self.about

    def title(self, number: int) -> str:
        """Name of a form."""
        return self.forms[number].title(len(self.workload.layers))

    def kernels(self, target: Target) -> list[Task]:
        """Kernels of all forms."""
        found: dict[Key, Task] = {}
        for form in self._different():
            options = pipeline.Options(records=Records(self._forced(form)))
            for task in extract_tasks(self._module(), target, None, options):
                found.setdefault(task.key, task).calls = self.calls
        return list(found.values())

    def _different(self) -> Iterator[Form]:
        """Forms that together have all kernels."""
        for form in self.forms:
            some = {tile for tile in form.tiles if tile}
            if not form.planes and not (len(some) > 1):
                yield form

    def choose_knobs(
        self, known: Mapping[Key, Record], trials: Callable[[Key], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Give each form the best known knobs of its kernels.

        Parameters
        ----------
        known : mapping
            Winners of the kernels.
        trials : callable
            Function from a key to its trials, which have the best knobs of each nest.
        """
        for form in self.forms:
            self.knobs[form] = list(known.values())
            if not form.fused:
                continue
            kernel = packed(self.workload, self.machine)
            template = PLANAR if form.planes else FUSED
            key = FusedConv2D().key(kernel, self.machine)
            best = _best_trial(template, trials(key))
            record = known.get(key)
            if record is None or record.template != template.name:
                default = template.default(kernel, self.machine)
                knobs = default if best is None else template.read_knobs(best)
                self.knobs[form].insert(0, Record.of_key(key, template, knobs))

    def program(self, number: int, target: Target) -> KernelSequence:
        """Write a form with the knobs of its records."""
        form = self.forms[number]
        sourced = [*self._forced(form), *(("", one) for one in self.knobs.get(form, ()))]
        return self._program(form, target, Records(sourced), scheduled=True)

    def reference(self, target: Target) -> KernelSequence:
        """Return the layers one by one without schedules."""
        form = Form()
        return self._program(form, target, Records(self._forced(form)), scheduled=False)

    def _program(
        self, form: Form, target: Target, records: Records, scheduled: bool
    ) -> KernelSequence:
        plan = pipeline.phases(target, pipeline.Options(records=records))
        if not scheduled:
            plan.pop("schedule")
        with _WRITING:
            return program_of(pipeline.run_phases(self._module(), target, plan))

    def tensors(self, generator: np.random.Generator) -> list[np.ndarray]:
        """Draw the data and the residual; the result comes last."""
        work, lanes = self.workload, self.machine.lanes(self.workload.dtype)
        size, (_, last) = _sizes(work)
        out_channels = work.layers[-1].out_channels
        shapes = [(work.layers[0].in_channels, size, work.plain_data)]
        shapes += [(out_channels, last, work.plain_out)] * (2 if work.residual else 1)
        return [
            _drawn((int(work.batch or 1), channels, *extents), 0 if plain else lanes, generator)
            for channels, extents, plain in shapes
        ]

    def _module(self) -> tvm.IRModule:
        return layers_module(self.workload, self.machine.lanes(self.workload.dtype))

    def _forced(self, form: Form) -> list[tuple[str, Record]]:
        """Records with which the pipeline chooses a form."""
        forced = [(self.workload, form)]
        if len(self.workload.layers) == 2 and not form.fused:
            forced += [
                (layer, Form(tile1=tile))
                for layer, tile in zip(separate(self.workload), form.tiles, strict=True)
            ]
        return [("", form_record(work, one, self.machine)) for work, one in forced]


def form_record(
    workload: Conv2DKernel,
    form: Form,
    info: CPUInfo,
    seconds: tuple[float, float] = (1.0, 1.0),
    **fields: Any,
) -> Record:
    """Return the record of a form; ``fields`` are the other fields of a record."""
    return Record.of_key(form_key(workload, info), FORMS, form, seconds, **fields)


def _best_trial(
    template: CPUTemplate, trials: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The fastest knobs of a template in a log, if there are any."""
    of_form = [
        trial
        for trial in trials
        if (trial["template"], trial["version"]) == (template.name, template.version)
        and "ratio" in trial
    ]
    return min(of_form, key=lambda trial: trial["ratio"], default={}).get("knobs")


def separate(pair: Conv2DKernel) -> tuple[Conv2DKernel, Conv2DKernel]:
    """Workloads of the layers of a pair."""
    layer1, layer2 = pair.layers
    height, width = layer1.output_size(int(pair.height or 1), int(pair.width or 1))
    apart = replace(pair, plain_data=False, plain_out=False)
    return (
        replace(apart, layers=(layer1,), residual=False),
        replace(apart, layers=(layer2,), height=height, width=width),
    )


def find_forms(mod: tvm.IRModule, target: Target, options: pipeline.Options) -> list[FormTask]:
    """Find the convolutions and pairs of a module that have several forms.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module of static shapes.
    target : Target
        A resolved CPU.
    options : pipeline.Options
        Pairs have forms where ``fuse`` is ``"auto"``, and layers where ``winograd`` is.

    Returns
    -------
    list of FormTask
        Layers before pairs.
    """
    pairs: Counter[Conv2DKernel] = Counter()

    def note(pair: FusedConv2DWorkload, _: Target) -> bool:
        pairs[pair_workload(pair)] += 1
        return False

    collects = replace(options, fuse=note if options.fuse == "auto" else options.fuse)
    plan = pipeline.phases(target, replace(collects, winograd="never", records=Records()))
    plan = {name: plan[name] for name in ("simplify", "fuse", "pack")}
    if options.weights != "int8":  # else bytes are kept before forms are chosen
        plan["pack"] = [one for one in plan["pack"] if one.info.name != "KeepBytes"]
    mod = pipeline.run_phases(mod, target, plan)
    tiles = options.winograd == "auto"
    layers = _layers(mod, target) if tiles else Counter()
    machine = CPUInfo.from_target(target)
    tasks = []
    for workload, calls in [*layers.items(), *pairs.items()]:
        default = default_form(workload, target, tiles)
        legal = [form for form in FORMS.settings(workload, machine) if tiles or not any(form.tiles)]
        forms = list(dict.fromkeys([default, *legal]))
        if len(forms) > 1:
            tasks.append(FormTask(workload, forms, machine, calls))
    for task in tasks:
        task.share = 1 / len(tasks)
    return tasks


def _layers(mod: tvm.IRModule, target: Target) -> Counter[Conv2DKernel]:
    """Packed convolutions of float32 that Winograd's algorithm could compute."""
    layers: Counter[Conv2DKernel] = Counter()

    def visit(node: Any) -> None:
        is_call = isinstance(node, relax.Call) and isinstance(node.op, tvm.ir.Op)
        if is_call and node.op.name == CONV2D.name:
            kernel = read_kernel(node, CONV2D)
            if kernel.sums is None and can_choose(node, kernel, target):
                layers[layer_workload(kernel)] += 1

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return layers


def default_form(workload: Conv2DKernel, target: Target, tiles: bool = True) -> Form:
    """Return the form that is chosen without records; ``tiles`` allows Winograd's algorithm."""
    if len(workload.layers) == 1:
        decision = _winograd(workload, target) if tiles else None
        return Form(tile1=decision or 0)
    pair = FusedConv2DWorkload(
        batch=int(workload.batch or 1),
        height=int(workload.height or 1),
        width=int(workload.width or 1),
        layer1=workload.layers[0],
        layer2=workload.layers[1],
        residual=workload.residual,
        dtype=workload.dtype,
        plain_data=workload.plain_data,
        plain_out=workload.plain_out,
    )
    if decide(pair, target, (tiles, tiles)).fuse:
        machine = CPUInfo.from_target(target)
        return Form(fused=True, planes=prefers_planar(packed(workload, machine), machine))
    if not tiles:
        return Form()
    return Form(False, False, *(_winograd(layer, target) for layer in separate(workload)))


def _winograd(workload: Conv2DKernel, target: Target) -> int:
    """The predicted size of tiles; 0 for a direct convolution."""
    (layer,) = workload.layers
    extents = int(workload.batch or 1), int(workload.height or 1), int(workload.width or 1)
    found = decide_winograd(layer, *extents, workload.dtype, target)
    return found.tile if found is not None and found.pays else 0


def layers_module(workload: Conv2DKernel, lanes: int, seed: int = 0) -> tvm.IRModule:
    """Write the layers of a workload as a Relax module, with random weights and biases.

    Its ``main`` takes the data and the residual, in blocks of ``lanes`` channels unless they are
    plain.
    """
    generator = np.random.default_rng(seed)
    size, (_, last) = _sizes(workload)
    batch, dtype = int(workload.batch or 1), workload.dtype
    sides = [("data", workload.layers[0].in_channels, size, workload.plain_data)]
    if workload.residual:
        sides.append(("residual", workload.layers[-1].out_channels, last, workload.plain_out))
    params = [
        relax.Var(name, relax.TensorType(_shape((batch, channels, *extents), lanes, plain), dtype))
        for name, channels, extents, plain in sides
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            plain = [
                param if is_plain else builder.emit(ops.unpack(param, channels))
                for param, (_, channels, _, is_plain) in zip(params, sides, strict=True)
            ]
            value = plain[0]
            for number, layer in enumerate(workload.layers, 1):
                is_last = number == len(workload.layers)
                residual = plain[1] if is_last and workload.residual else None
                value = _emit_layer(builder, layer, value, residual, generator, dtype)
            if not workload.plain_out:
                value = builder.emit(ops.pack(value, lanes))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return builder.get()


def _emit_layer(
    builder: relax.BlockBuilder,
    layer: ConvLayer,
    data: relax.Expr,
    residual: relax.Expr | None,
    generator: np.random.Generator,
    dtype: str,
) -> relax.Var:
    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
    weight = generator.standard_normal(shape) * math.prod(shape[1:]) ** -0.5
    bias = generator.standard_normal((1, layer.out_channels, 1, 1))
    value = builder.emit(
        relax.op.nn.conv2d(
            data,
            relax.const(weight.astype(dtype)),
            strides=layer.strides,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
        )
    )
    value = builder.emit(relax.op.add(value, relax.const(bias.astype(dtype))))
    if residual is not None:
        value = builder.emit(relax.op.add(value, residual))
    ended = _activated(layer.activation, value)
    return value if ended is None else builder.emit(ended)


def _activated(activation: Activation, value: relax.Expr) -> relax.Expr | None:
    bounds = {"relu6": (0.0, 6.0), "clip": (activation.low, activation.high)}
    if activation.kind in bounds:
        return relax.op.clip(value, *bounds[activation.kind])
    if activation.kind == "round_clip":
        return ops.round_clip(value, activation.low, activation.high)
    functions = {
        "relu": relax.op.nn.relu,
        "sigmoid": relax.op.sigmoid,
        "silu": relax.op.nn.silu,
        "gelu": relax.op.nn.gelu,
        "hardswish": ops.hardswish,
    }
    return None if activation.kind == "none" else functions[activation.kind](value)


Size = tuple[int, int]


def _sizes(workload: Conv2DKernel) -> tuple[Size, tuple[Size, Size]]:
    """Heights and widths of the data; of what the last layer reads, and of the result."""
    first = size = int(workload.height or 1), int(workload.width or 1)
    before = size
    for layer in workload.layers:
        before, size = size, layer.output_size(*size)
    return first, (before, size)


def _shape(shape: tuple[int, ...], lanes: int, plain: bool) -> tuple[int, ...]:
    """An NCHW shape, in blocks of channels unless it is plain."""
    batch, channels, *size = shape
    return shape if plain else (batch, -(-channels // lanes), *size, lanes)


def _drawn(shape: tuple[int, ...], lanes: int, generator: np.random.Generator) -> np.ndarray:
    """A random tensor, in blocks of ``lanes`` channels unless that is 0."""
    array = generator.standard_normal(shape, dtype=np.float32)
    if not lanes:
        return array
    batch, blocks, height, width, _ = _shape(shape, lanes, False)
    padded = np.zeros((batch, blocks * lanes, height, width), np.float32)
    padded[:, : shape[1]] = array
    split = padded.reshape(batch, blocks, lanes, height, width)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2))


def program_of(mod: tvm.IRModule) -> KernelSequence:
    """Read a lowered module, whose ``main`` only calls kernels, as a program.

    Raises
    ------
    TuningError
        If ``main`` does anything else.
    """
    main = mod["main"]
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    same = {one.var: one.value for one in bindings if isinstance(one.value, relax.Var)}
    result = main.body.body
    while result in same:
        result = same[result]
    tensors = len(main.params) + 1
    slots = {param: ("tensor", number) for number, param in enumerate(main.params)}
    slots[result] = ("tensor", tensors - 1)
    constants: list[np.ndarray] = []
    buffers: list[tuple[tuple[int, ...], str]] = []
    calls: list[tuple[str, list[tuple[str, int]]]] = []
    for binding in bindings:
        var, call = binding.var, binding.value
        if var in same:
            slots.setdefault(var, slots[call])
            continue
        if not _is_kernel_call(call, var):
            raise TuningError(f"the form has {call} between its kernels")
        if var not in slots:
            slots[var] = ("buffer", len(buffers))
            extents = tuple(int(extent) for extent in var.ty.shape.values)
            buffers.append((extents, str(var.ty.dtype)))
        arguments = []
        for argument in call.args[1].fields:
            if isinstance(argument, GenericConst):
                arguments.append(("constant", len(constants)))
                constants.append(argument.value.numpy())
            else:
                arguments.append(slots[argument])
        calls.append((call.args[0].name_hint, [*arguments, slots[var]]))
    first = {"tensor": 0, "constant": tensors, "buffer": tensors + len(constants)}
    functions = {name: mod[name].with_attr("global_symbol", name) for name, _ in calls}
    return KernelSequence(
        tvm.IRModule(functions),
        tuple((name, tuple(first[kind] + n for kind, n in arguments)) for name, arguments in calls),
        tuple(constants),
        tuple(buffers),
    )


def _is_kernel_call(call: relax.Expr, var: relax.Var) -> bool:
    """Return whether a value is a kernel's one output."""
    is_call = isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op)
    if not is_call or call.op.name != "relax.call_tir" or len(call.args) != 2:
        return False
    return isinstance(var.ty, relax.TensorType)
