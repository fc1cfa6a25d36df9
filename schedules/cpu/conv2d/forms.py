# SPDX-License-Identifier: Apache-2.0
"""Forms of a convolution and of a pair: one kernel or two, on planes or in blocks, by Winograd.

A tuning job races them, and its record, which is data as those of knobs, chooses for
``FuseConv2D``, ``ChooseWinograd`` and the rule of fused pairs. The workload of a form is a
:class:`Conv2DKernel` in NCHW, whatever the layout of the kernels that compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from schedules.tuning.records import Key, Records
from schedules.tuning.template import Space
from schedules.workload.conv2d import Conv2DKernel, FusedConv2DWorkload, from_json, to_json
from schedules.workload.winograd_matrices import TILE_SIZES

from ..core.machine import CPUInfo
from ..cost.fused_conv2d_limits import plain_sides, unsupported
from ..cost.winograd_knobs import takes_winograd
from .planar.planar_knobs import can_be_planar


@dataclass(frozen=True)
class Form:
    """Form in which one or two convolutions are computed.

    Parameters
    ----------
    fused : bool
        Whether one kernel computes both.
    planes : bool
        Whether that kernel computes on planes.
    tile1, tile2 : int
        Height and width of Winograd's tiles of a separate layer; 0 for a direct convolution.
    """

    fused: bool = False
    planes: bool = False
    tile1: int = 0
    tile2: int = 0

    @property
    def tiles(self) -> tuple[int, int]:
        """The tiles of both layers."""
        return self.tile1, self.tile2

    def title(self, layers: int) -> str:
        """Name of the form of a workload with one or two layers."""
        if self.fused:
            return "fused on planes" if self.planes else "fused"
        kinds = [f"Winograd {tile}x{tile}" if tile else "direct" for tile in self.tiles[:layers]]
        return f"apart: {', '.join(kinds)}" if layers > 1 else kinds[0]


class Forms(Space[Conv2DKernel, Form, CPUInfo]):
    """The legal forms of a workload."""

    name = "cpu.form"
    version = 1
    knobs = Form

    def read_workload(self, text: str) -> Conv2DKernel:
        """Read the JSON of a kernel."""
        return from_json(text)

    def describe(self, workload: Conv2DKernel) -> str:
        """Return the layers and the size of the image."""
        layers = " + ".join(map(str, workload.layers))
        return f"form of {layers} on {workload.height}x{workload.width}"

    def settings(self, workload: Conv2DKernel, machine: CPUInfo) -> Iterator[Form]:
        """Yield separate kernels with all tiles, and the fused ones that can compute the pair."""
        layers, size = workload.layers, (int(workload.height or 0), int(workload.width or 0))
        if len(layers) not in (1, 2) or workload.data_layout != "NCHW":
            return
        choices = []
        for layer in layers:
            takes = takes_winograd(layer, size, workload.dtype, machine)
            choices.append((0, *TILE_SIZES) if takes else (0,))
            size = layer.output_size(*size)
        for tiles in product(*choices):
            yield Form(False, False, *tiles)
        if len(layers) == 2 and unsupported(layers[1]) is None:
            yield Form(fused=True)
            if can_be_planar(packed(workload, machine), machine):
                yield Form(fused=True, planes=True)


FORMS = Forms()


@dataclass(frozen=True)
class RecordedForm:
    """Form that a record gives a workload.

    Parameters
    ----------
    form : Form
        The fastest one of those that are allowed.
    seconds : dict
        Measured time of each of them by its name.
    about : dict
        The record, for reports.
    """

    form: Form
    seconds: dict[str, float]
    about: dict[str, Any]

    @property
    def text(self) -> str:
        """The times in words, the fastest first."""
        ranked = sorted(self.seconds.items(), key=lambda item: item[1])
        times = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in ranked)
        return f"by record: {times}"


def recorded_form(
    records: Records,
    workload: Conv2DKernel,
    cpu: CPUInfo,
    winograd: tuple[bool, bool] = (True, True),
) -> RecordedForm | None:
    """Look up the form of a workload.

    Parameters
    ----------
    records : Records
        Records of tuning jobs.
    workload : Conv2DKernel
        One or two layers, as :func:`pair_workload` or :func:`layer_workload` returns them.
    cpu : CPUInfo
        The machine; records of another CPU, vector width or number of threads do not count.
    winograd : tuple[bool, bool]
        Whether each layer may be computed by Winograd's algorithm.

    Returns
    -------
    RecordedForm | None
        None without a record, or if it knows the time of no allowed form.
    """
    if not records:
        return None
    found = records.lookup(form_key(workload, cpu), (FORMS,), workload, cpu)
    if found is None:
        return None
    _, winner, record, source = found
    count = len(workload.layers)
    allowed = {
        form.title(count): form
        for form in FORMS.settings(workload, cpu)
        if all(may or not tile for may, tile in zip(winograd, form.tiles, strict=True))
    }
    times = {**record.times, winner.title(count): record.best_seconds}
    seconds = {name: times[name] for name in allowed if name in times}
    if not seconds:
        return None
    fastest = min(seconds, key=seconds.__getitem__)
    form = winner if winner.title(count) in allowed else allowed[fastest]
    return RecordedForm(form, seconds, record.about(source))


def form_key(workload: Conv2DKernel, cpu: CPUInfo) -> Key:
    """Key of the record of a workload's form."""
    return Key(to_json(workload), cpu.name, cpu.vector_bits, cpu.num_cores)


def pair_workload(pair: FusedConv2DWorkload) -> Conv2DKernel:
    """Workload of the form of a pair."""
    return Conv2DKernel(
        layers=(pair.layer1, pair.layer2),
        batch=pair.batch,
        height=pair.height,
        width=pair.width,
        residual=pair.residual,
        dtype=pair.dtype,
        plain_data=pair.plain_data,
        plain_out=pair.plain_out,
    )


def layer_workload(kernel: Conv2DKernel) -> Conv2DKernel:
    """Workload of the form of a packed kernel; a symbolic batch counts as one."""
    return replace(kernel, batch=kernel.batch or 1, data_layout="NCHW", out_layout="NCHW")


def packed(workload: Conv2DKernel, cpu: CPUInfo) -> Conv2DKernel:
    """The packed kernel that legalization makes of a workload."""
    lanes = cpu.lanes(workload.dtype)
    layout, size = f"NCHW{lanes}c", (int(workload.height or 1), int(workload.width or 1))
    data, out = False, False
    if len(workload.layers) == 2:
        data, out = plain_sides(*workload.layers, size, lanes)
    return replace(
        workload,
        data_layout=layout,
        out_layout=layout,
        plain_data=workload.plain_data and data,
        plain_out=workload.plain_out and out,
    )
