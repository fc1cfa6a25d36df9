# SPDX-License-Identifier: Apache-2.0
"""Targets of compilation: CPUs and GPUs, from a user's notation to a complete TVM target."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from tvm.target import Target, TargetKind, codegen, list_tags

from schedules.cost.machine import Machine
from schedules.gpu.core.machine import GPUInfo

from ..errors import TargetError
from ..machine.host import (
    CROSS_TRIPLES,
    arch_of_triple,
    canonical_arch,
    host_arch,
    host_cpu,
    host_features,
    physical_cores,
    probe_features,
)
from ..runtime.tvm_runtime import DeviceInfo, DeviceNeeds, find_device

GPU_KINDS = ("cuda", "opencl")

ARCHITECTURES = tuple(
    f"sm_{name}"
    for name in "70 72 75 80 86 87 88 89 90 90a 100 100a 100f 101 101a 101f 103 103a 103f "
    "110 110a 110f 120 120a 120f 121 121a 121f".split()
)
"""NVIDIA's names; those with a letter run on that model or its family only."""

MODEL = "multiprocessors={}"
"""Format of the option ``model`` that the schedules read; TVM has none for multiprocessors."""

_DEFAULTS = {
    "cuda": {"max_num_threads": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32},
    "opencl": {"max_num_threads": 256, "max_shared_memory_per_block": 16384, "thread_warp_size": 1},
}


def spell_out_gpu(config: dict[str, Any]) -> None:
    """Fill in the missing options of a ``cuda`` or ``opencl`` target, and check the others.

    Raises TargetError if a value is invalid, or if there is no GPU for a ``cuda`` target without
    ``arch``.
    """
    kind = config["kind"]
    if kind == "cuda":
        if "arch" not in config:
            _ask_device(config)
        _check_arch(config["arch"])
        _check_model(config.get("model"))
    if "max_threads_per_block" in config:
        config.setdefault("max_num_threads", config["max_threads_per_block"])
    for name, value in _DEFAULTS[kind].items():
        config.setdefault(name, value)
    config.setdefault("max_threads_per_block", config["max_num_threads"])
    for name in (*_DEFAULTS[kind], "max_threads_per_block"):
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TargetError(f"target option {name} is {value!r}; expected a positive integer")
    for name in ("max_num_threads", "max_threads_per_block") if kind == "cuda" else ():
        if config[name] > 1024:
            raise TargetError(f"{name} is {config[name]}; a CUDA block has at most 1024 threads")


def take_machine(config: dict[str, Any], machine: Machine) -> None:
    """Fill in architecture and multiprocessors of a machine where a target names none.

    Raises TargetError if the machine is no NVIDIA GPU, or the target is another kind of GPU. Raises
    PredictionError if the machine lacks a figure.
    """
    refuse_other_kind(machine, config["kind"])
    config.setdefault("arch", f"sm_{_capability(machine)}")
    config.setdefault("model", MODEL.format(int(machine["multiprocessors"])))


def refuse_other_kind(machine: Machine, kind: str) -> None:
    """Refuse a machine that has not the kind of a target: ``cuda`` for a GPU, ``llvm`` for a CPU.

    Raises TargetError if it has another one; the message names both.
    """
    expected = "cuda" if machine.kind == "gpu" else "llvm"
    if kind != expected:
        device = "an NVIDIA GPU" if machine.kind == "gpu" else "a CPU"
        raise TargetError(
            f"the machine {machine.name!r} is {device}, and the target is of kind {kind!r}: name a "
            f"target of kind {expected!r}, or another machine"
        )


def check_machine(target: Target, machine: Machine) -> None:
    """Refuse a machine that is not the device of a resolved target.

    Raises TargetError if its kind, its compute capability or its number of multiprocessors is
    another one; the message names both. Raises PredictionError if the machine lacks a figure.
    """
    refuse_other_kind(machine, target.kind.name)
    if machine.kind != "gpu":
        return  # the cost models of CPUs compare the families
    gpu, arch = GPUInfo.from_target(target), _capability(machine)
    if gpu.arch != arch:
        raise TargetError(
            f"the machine {machine.name!r} has compute capability {arch / 10}, and the target is "
            f"for {target.attrs['arch']}: name a machine of that architecture, or the target "
            f"'cuda -arch=sm_{arch}'"
        )
    count = int(machine["multiprocessors"])
    if gpu.multiprocessors != count:
        raise TargetError(
            f"the machine {machine.name!r} has {count} multiprocessors, and the target "
            f"{gpu.multiprocessors}: leave them out of the target, or name "
            f"'-model={MODEL.format(count)}'"
        )


def _capability(machine: Machine) -> int:
    """Compute capability times ten."""
    return round(10 * machine["compute_capability"])


def named_after(target: Target, device: DeviceInfo) -> Target:
    """Name the device in an OpenCL target, by which records tell devices apart."""
    if target.kind.name != "opencl" or "model" in target.attrs:
        return target
    return Target({**json.loads(str(target)), "model": device.name})


def _ask_device(config: dict[str, Any]) -> None:
    """Take the missing options from the first GPU of this machine."""
    try:
        device: DeviceInfo = find_device("cuda")
    except TargetError as error:
        raise TargetError(
            f"a target 'cuda' without an architecture means this machine's GPU, and {error}; "
            "to compile for another machine name its architecture: 'cuda -arch=sm_90'"
        ) from error
    config["arch"] = device.arch
    config.setdefault("max_num_threads", device.max_threads)
    config.setdefault("max_shared_memory_per_block", device.shared_bytes)
    config.setdefault("model", MODEL.format(device.multiprocessors))


def _check_arch(arch: Any) -> None:
    number = re.fullmatch(r"sm_(\d+)[a-z]?", str(arch))
    if arch in ARCHITECTURES:
        return
    if number and int(number[1]) < 70:
        raise TargetError(f"architecture {arch} is too old; expected sm_70 or newer")
    raise unknown_name("CUDA architecture", str(arch), ARCHITECTURES, "'sm_80' or 'sm_90'")


def _check_model(model: Any) -> None:
    if model is not None and not re.fullmatch(MODEL.format(r"[1-9]\d*"), str(model)):
        raise TargetError(
            f"target option model is {model!r}; expected for example {MODEL.format(132)!r}"
        )


BASELINE = {"x86_64": "x86-64", "aarch64": "generic"}

CODEGEN_FEATURES = {
    "x86_64": frozenset(
        "cmov cx8 cx16 sahf sse sse2 sse3 ssse3 sse4.1 sse4.2 sse4a popcnt avx avx2 fma fma4 xop "
        "f16c bmi bmi2 tbm lzcnt movbe gfni pclmul vpclmulqdq avx512f avx512cd avx512bw avx512dq "
        "avx512vl avx512bf16 avx512bitalg avx512fp16 avx512ifma avx512vbmi avx512vbmi2 "
        "avx512vnni avx512vpopcntdq avxifma avxneconvert avxvnni avxvnniint8 avxvnniint16 "
        "amx-tile amx-int8 amx-bf16 avx10.1 avx10.2 egpr ndd ccmp nf zu cf ppx push2pop2".split()
    ),
    "aarch64": frozenset("fp-armv8 neon crc lse dotprod i8mm bf16 sve sve2".split()),
}
"""Features whose instructions LLVM may generate by itself. The other features of a CPU model
(system instructions, ciphers, tuning hints) never occur in a kernel; on AArch64 these are also
those that can be read from the running machine."""


def triple_for(arch: str) -> str:
    """A triple of the architecture: this system's own if the architecture is the same."""
    system = str(codegen.llvm_get_system_triple())
    return system if canonical_arch(system.split("-")[0]) == arch else CROSS_TRIPLES[arch]


@lru_cache(maxsize=2)
def known_cpus(arch: str) -> frozenset[str]:
    """CPUs of the architecture that LLVM can generate 64-bit code for."""
    triple = CROSS_TRIPLES[arch]
    names = codegen.llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": triple}))
    return frozenset(
        str(name) for name in names if arch != "x86_64" or "64bit" in _cpu_features(arch, name)
    )


def arch_of_cpu(name: str) -> str | None:
    """The architecture of a CPU that LLVM knows, this machine's first; None if there is none."""
    arches = sorted(CROSS_TRIPLES, key=lambda arch: arch != host_arch())
    return next((arch for arch in arches if name in known_cpus(arch)), None)


@lru_cache(maxsize=2)
def known_features(arch: str) -> frozenset[str]:
    """Every feature that LLVM knows for the architecture from a CPU or from this machine."""
    here = set(probe_features()) if arch == host_arch() else set()
    return frozenset(here.union(*(_cpu_features(arch, name) for name in known_cpus(arch))))


def _cpu_features(arch: str, cpu: str) -> set[str]:
    triple = CROSS_TRIPLES[arch]
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": str(cpu)})
    return {str(name) for name in codegen.llvm_get_cpu_features(target)}


def unknown_name(what: str, name: str, known: Iterable[str], example: str = "") -> TargetError:
    """Create the error for an unknown name; it lists the most similar known ones."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=5, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    if not near and example:
        hint = f"; expected for example {example}"
    return TargetError(f"unknown {what} {name!r}{hint}")


_SEVERAL = re.compile(r"[^\s{,]+\s*,\s*[^\s,]")
"""Beginning of a list that begins with a name."""
_COMMON_HOST = "x86-64-v3"


def resolve(
    target: str | Mapping[str, Any] | Target = "native",
    cores: int | None = None,
    machine: Machine | None = None,
) -> Target:
    """Turn a target into a TVM target with all options.

    Parameters
    ----------
    target : str, mapping or tvm.target.Target
        - ``"native"``: this machine's CPU with exactly the features that it has;
        - a CPU that LLVM knows, for example ``"x86-64-v3"``, ``"znver4"``, ``"cortex-a72"``;
        - ``"aarch64"`` or ``"x86_64"``: the least CPU of that architecture (with NEON, SSE2);
        - ``"llvm"`` with options, for example ``"llvm -mcpu=skylake-avx512 -mattr=-avx512f"``;
        - ``"cuda"``, this machine's NVIDIA GPU, or ``"cuda -arch=sm_90"``, any other one;
        - ``"opencl"``, with options such as ``"opencl -max_num_threads=128"``;
        - a TVM target as JSON, a mapping, a tag (``"nvidia/nvidia-a100"``) or an object.

        The host of a GPU is a CPU, written in the same ways (``-host=native``). By default it is
        one that others are like, so that a file runs on them, too: ``"x86-64-v3"``, or the least
        CPU of this machine's architecture where this machine is less than that, or no x86-64.
    cores : int, optional
        Cores to compile for where the target has none; by default those of this machine.
    machine : Machine, optional
        GPU whose architecture and multiprocessors a ``cuda`` target has that names none.

    Returns
    -------
    tvm.target.Target
        A CPU has ``mcpu``, ``mtriple``, ``num-cores``, and ``mattr`` if features differ from the
        CPU's. A GPU has ``max_num_threads``, ``max_threads_per_block``, ``thread_warp_size``,
        ``max_shared_memory_per_block``, such a CPU as its host, and ``arch`` if it is ``cuda``.

    Raises
    ------
    TargetError
        If it is of another kind, if a name in it is unknown, if it means this machine's GPU and
        there is none, or if ``machine`` is of another kind.
    """
    config = _read_config(target)
    kind = config.get("kind")
    if kind in GPU_KINDS:
        return _resolve_gpu(config, target, cores, machine)
    if kind != "llvm":
        raise TargetError(
            f"target kind {kind!r} is not supported: this version compiles for CPUs, CUDA and "
            "OpenCL; use 'native', a CPU such as 'x86-64-v3', 'cuda -arch=sm_90' or 'opencl'"
        )
    if machine is not None:
        refuse_other_kind(machine, "llvm")
    _spell_out(config)
    if "num-cores" not in config:
        config["num-cores"] = cores or physical_cores()
    resolved = _make(config, target)
    if config["num-cores"] < 1:
        raise TargetError(f"num-cores is {config['num-cores']}; expected at least 1")
    return resolved


def _resolve_gpu(
    config: dict[str, Any], target: Any, cores: int | None, machine: Machine | None
) -> Target:
    host = resolve(config.pop("host", None) or _common_host(), cores)
    if is_gpu(host):
        raise TargetError(f"the host of a GPU is a CPU; got {host.kind.name!r}")
    unknown = sorted(set(config) - set(_option_types(config["kind"])))
    if unknown:
        raise unknown_name(f"{config['kind']} option", unknown[0], _option_types(config["kind"]))
    if machine is not None:
        take_machine(config, machine)
    spell_out_gpu(config)
    return Target(_make(config, target), host)


def _common_host() -> str:
    """The host of a GPU for all machines like this one: it runs the program, but no kernel."""
    if host_arch() != arch_of(common := resolve(_COMMON_HOST)):
        return host_arch()
    return _COMMON_HOST if host_features().issuperset(required_features(common)) else host_arch()


def names_gpu(target: str | Mapping[str, Any] | Target) -> bool:
    """Return whether :func:`resolve` would give a GPU; this queries no device."""
    return _read_config(target).get("kind") in GPU_KINDS


def is_gpu(target: Target) -> bool:
    """Return whether kernels run on a GPU; the target's host then runs the program."""
    return target.kind.name in GPU_KINDS


def host_of(target: Target) -> Target:
    """The CPU of a resolved target: the target itself, or the host of a GPU."""
    return target.host if is_gpu(target) else target


def device_needs(target: Target) -> DeviceNeeds | None:
    """Requirements of a resolved target on a GPU; None if it is a CPU."""
    if not is_gpu(target):
        return None
    return DeviceNeeds(
        kind=target.kind.name,
        arch=str(target.attrs.get("arch", "")),
        max_threads=max(  # our rules read the first, those of TVM the second
            int(target.attrs["max_num_threads"]), int(target.attrs["max_threads_per_block"])
        ),
        shared_bytes=int(target.attrs["max_shared_memory_per_block"]),
    )


def required_features(target: Target) -> tuple[str, ...]:
    """CPU features that a machine needs to run code compiled for ``target``, sorted.

    Only those that compiled code may use count: a missing cipher instruction affects no kernel.
    """
    known = CODEGEN_FEATURES[arch_of(target)]
    return tuple(sorted(known & codegen.llvm_get_cpu_features(host_of(target))))


def arch_of(target: Target) -> str:
    """Architecture of a resolved target's CPU, ``x86_64`` or ``aarch64``."""
    return arch_of_triple(str(host_of(target).attrs["mtriple"]))


def _read_config(target: Any) -> dict[str, Any]:
    """Read a user's target options, without checks."""
    if isinstance(target, Target):
        return _from_target(target)
    if isinstance(target, Mapping):
        if "tag" in target and "kind" not in target:
            return _from_target(_make(dict(target), target))
        return {str(key): _plain(value) for key, value in target.items()}
    if isinstance(target, list | tuple) or _SEVERAL.match(str(target).strip()):
        raise TargetError(
            f"expected one target, got {target!r:.80}: tvm_fusion.compile and the commands compile "
            "and explain take several"
        )
    if not isinstance(target, str):
        raise TargetError(
            f"a target is a str, a mapping or a tvm.target.Target; got {type(target).__name__}"
        )
    text = target.strip()
    if text == "native":
        return {"kind": "llvm", "mcpu": "native"}
    if text.startswith("{"):
        return _from_json(text)
    words = text.split()
    if words and (len(words) > 1 or words[0] in Target.list_kinds()):
        return _from_words(words)
    if text in list_tags():
        return _from_target(_make(text, text))
    return _from_name(text)


def _from_target(target: Target) -> dict[str, Any]:
    """Options of a target object, without those that TVM derives, and without a CPU's host."""
    derived = ("keys", "tag", "host")
    host = {"host": target.host} if is_gpu(target) and target.host else {}
    return host | {
        str(key): _plain(value)
        for key, value in target.export().items()
        if key not in derived and not str(key).startswith("feature.")
    }


def _from_json(text: str) -> dict[str, Any]:
    try:
        return _read_config(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise TargetError(f"target {_show(text)} is not valid JSON: {error}") from error


def _from_words(words: list[str]) -> dict[str, Any]:
    """Options of the form ``llvm -mcpu=znver3 -mattr=+avx2,+fma``, which TVM itself dropped."""
    kind, *options = words
    if kind not in Target.list_kinds():
        raise unknown_name("target kind", kind, Target.list_kinds())
    types = _option_types(kind)
    config: dict[str, Any] = {"kind": kind}
    for option in options:
        match = re.fullmatch(r"--?([a-z][\w.-]*)(?:=(.+))?", option)
        if match is None:
            raise TargetError(f"target option {option!r} is not of the form -name=value")
        name, value = match.groups()
        if name not in types:
            raise unknown_name(f"{kind} option", name, types)
        config[name] = _convert(name, value, types[name])
    return config


def _option_types(kind: str) -> dict[str, str]:
    return {str(key): str(value) for key, value in TargetKind.options_from_name(kind).items()}


def _convert(name: str, value: str | None, kind: str) -> Any:
    if kind == "bool":
        return value is None or value.lower() in ("1", "true")
    if value is None:
        raise TargetError(f"target option -{name} needs a value: -{name}=...")
    if kind == "int":
        if not re.fullmatch(r"-?\d+", value):
            raise TargetError(f"target option -{name} is {value!r}; expected an integer")
        return int(value)
    return value.split(",") if kind.startswith("Array") else value


def _from_name(name: str) -> dict[str, Any]:
    """The target of an architecture or of a CPU, this machine's architecture first."""
    arch = canonical_arch(name)
    if arch in BASELINE:
        return {"kind": "llvm", "mtriple": triple_for(arch), "mcpu": BASELINE[arch]}
    if (found := arch_of_cpu(name)) is not None:
        return {"kind": "llvm", "mtriple": triple_for(found), "mcpu": name}
    if re.fullmatch(r"sm_\d+[a-z]?", name):
        raise TargetError(f"target {name!r} is not a CPU; did you mean 'cuda -arch={name}'?")
    known = [name for arch in CROSS_TRIPLES for name in known_cpus(arch)]
    known += ["native", *BASELINE, *Target.list_kinds()]
    raise unknown_name("target", name, known, "'native', 'x86-64-v3' or 'llvm -mcpu=...'")


def _spell_out(config: dict[str, Any]) -> None:
    """Fill in triple and CPU, and check all names, which LLVM does not."""
    arch = arch_of_triple(config.setdefault("mtriple", triple_for(host_arch())))
    cpu = config.setdefault("mcpu", BASELINE[arch])
    features = config.get("mattr") or []
    if not isinstance(cpu, str) or not isinstance(features, list):
        raise TargetError("a target's mcpu is a string and its mattr a list of strings")
    if cpu == "native":
        if arch != host_arch():
            raise TargetError(f"mcpu 'native' is a {host_arch()} CPU, and the target is {arch}")
        config["mcpu"] = cpu = host_cpu()
        features = [*_host_mattr(), *features]
    if cpu not in known_cpus(arch):
        raise unknown_name(f"{arch} mcpu", cpu, known_cpus(arch))
    for feature in features:
        if not isinstance(feature, str) or feature[:1] not in ("+", "-"):
            raise TargetError(f"feature {feature!r} in mattr must begin with '+' or '-'")
        if feature[1:] not in known_features(arch):
            raise unknown_name(f"{arch} mattr feature", feature[1:], known_features(arch))
    if features:
        config["mattr"] = features


def _host_mattr() -> list[str]:
    """Differences between this machine and LLVM's model of it that affect kernels.

    Absent features come last, so that features depending on them are removed, too.
    """
    matter = CODEGEN_FEATURES[host_arch()]
    model = codegen.llvm_get_cpu_features(
        Target({"kind": "llvm", "mtriple": triple_for(host_arch()), "mcpu": host_cpu()})
    )
    probe = sorted(item for item in probe_features().items() if item[0] in matter)
    more = [f"+{name}" for name, there in probe if there and name not in model]
    less = [f"-{name}" for name, there in probe if not there and name in model]
    return more + less


def _make(config: Any, text: Any) -> Target:
    """The target of a configuration; an error shows the user's input."""
    try:
        return Target(config)
    except (ValueError, TypeError) as error:
        reason = str(error).partition(" Target creation from")[0]
        raise TargetError(f"target {_show(text)} is not valid: {reason}") from error


def _plain(value: Any) -> Any:
    """A value without TVM's own containers."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Target):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Iterable) else value


def _show(target: Any) -> str:
    text = repr(target)
    return text if len(text) <= 200 else f"{text[:200]}..."
