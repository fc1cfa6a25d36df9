# SPDX-License-Identifier: Apache-2.0
"""Facts about the GPU that a schedule is written for; everything comes from the target.

TVM's targets have no option for the number of multiprocessors. A ``cuda`` target may give it in its
option ``model``, as ``multiprocessors=114``; else it follows from the architecture, as the largest
device of that architecture has them. That of an ``opencl`` target may name the device. Schedules
for a :func:`reproducible_target` are those for one device, whatever the target has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.target import Target

from schedules.errors import TargetError
from schedules.tir.index_math import floor_power_of_two

KINDS = ("cuda", "opencl")

# Multiprocessors of V100, T4, A100, RTX 3090 and A40, Jetson Orin, L40, H100 SXM, B200, RTX 5090.
_MULTIPROCESSORS = {
    70: 80,
    75: 40,
    80: 108,
    86: 84,
    87: 16,
    89: 142,
    90: 132,
    100: 148,
    120: 170,
}
_LANE_BITS = 32
_BFLOAT16_FROM = 80  # architecture
_TENSOR_CORES_FROM = 80  # These have cp.async, and products of 16x8x16.
_CLUSTERS_FROM = 90
_WARPGROUPS_OF = 90  # later ones multiply otherwise
_PORTABLE_CLUSTER = 8  # blocks; more of them are for some devices of some architectures only
_OPENCL_MULTIPROCESSORS = 32  # an estimate; OpenCL devices differ by a factor of a hundred
_OPENCL_LIMITS = (1024, 49152)  # threads and bytes of shared memory of a block
_REPRODUCIBLE = "reproducible"  # key of a target
_REFERENCE = 132  # multiprocessors for which reproducible kernels are divided into blocks


def gpu_target(target: Target | None) -> Target | None:
    """Return the target of a pass, the current one for None, if it is a GPU."""
    target = target or Target.current(allow_none=True)
    return target if target is not None and target.kind.name in KINDS else None


def reproducible_target(target: Target) -> Target:
    """Return a target for which sums have the same order on every GPU of its kind.

    Schedules for it do not depend on the number of multiprocessors, and use no clusters and no
    atomic updates of floats.

    Parameters
    ----------
    target : Target
        A GPU.
    """
    config = dict(target.export())
    return Target({**config, "keys": [*dict.fromkeys([*target.keys, _REPRODUCIBLE])]})


@dataclass(frozen=True)
class GPUInfo:
    """Parallelism of a target GPU.

    Parameters
    ----------
    kind : str
        ``cuda`` or ``opencl``.
    arch : int
        Compute capability times ten, 90 for ``sm_90``; 0 on OpenCL.
    multiprocessors : int
        Number of multiprocessors: blocks that run at once, at least.
    warp_size : int
        Lanes that exchange registers; 1 where there is no such instruction.
    max_threads : int
        Threads of one block.
    shared_bytes : int
        Shared memory of one block.
    max_cluster : int
        Blocks that may read each other's shared memory, a power of two; 1 if there are no clusters.
    model : str
        Name of an OpenCL device, if the target has it.
    device : GPUInfo | None
        The device itself, where the other fields are those of one on which all agree
        (:func:`reproducible_target`).
    is_specific : bool
        Whether the code runs on that architecture only, ``sm_90a``, and may use all it has.
    """

    kind: str
    arch: int
    multiprocessors: int
    warp_size: int
    max_threads: int
    shared_bytes: int
    max_cluster: int = 1
    model: str = ""
    device: GPUInfo | None = None
    is_specific: bool = False

    @classmethod
    def from_target(cls, target: Target) -> GPUInfo:
        """Read the GPU from a ``cuda`` or ``opencl`` target.

        Raises
        ------
        TargetError
            If the target is of another kind, or its architecture is older than sm_70.
        """
        found = cls._of_device(target)
        if _REPRODUCIBLE not in target.keys:
            return found
        return replace(found, multiprocessors=_REFERENCE, max_cluster=1, device=found)

    @classmethod
    def _of_device(cls, target: Target) -> GPUInfo:
        kind = target.kind.name
        if kind not in KINDS:
            raise TargetError(
                f"target kind is {kind!r}; the GPU schedules need one of {', '.join(KINDS)}"
            )
        threads = int(target.attrs.get("max_num_threads", 256 if kind == "opencl" else 1024))
        least = 16384 if kind == "opencl" else 49152  # Bytes that no launch has to ask for.
        shared = int(target.attrs.get("max_shared_memory_per_block", least))
        if kind == "opencl":
            model = str(target.attrs.get("model", ""))
            return cls(kind, 0, _OPENCL_MULTIPROCESSORS, 1, threads, shared, model=model)
        name = str(target.attrs["arch"])
        arch, is_specific = _arch_number(name), name.endswith("a")
        if arch < min(_MULTIPROCESSORS):
            raise TargetError(f"architecture sm_{arch} is too old; expected sm_70 or newer")
        cluster = _PORTABLE_CLUSTER if arch >= _CLUSTERS_FROM else 1
        count = _multiprocessors(target, arch)
        return cls(kind, arch, count, 32, threads, shared, cluster, is_specific=is_specific)

    @classmethod
    def named(cls, arch: str, multiprocessors: int) -> GPUInfo:
        """A device by its :attr:`name` and size; an OpenCL device has the limits of large ones.

        Raises
        ------
        TargetError
            If there is no such architecture.
        """
        kind, _, device = arch.partition(":")
        if kind == "opencl":
            return cls(kind, 0, multiprocessors, 1, *_OPENCL_LIMITS, model=device)
        _arch_number(arch)
        model = f"multiprocessors={multiprocessors}"
        return cls.from_target(Target({"kind": "cuda", "arch": arch, "model": model}))

    @property
    def name(self) -> str:
        """The architecture, ``sm_90``, or ``opencl:`` and the name of the device."""
        if self.kind == "cuda":
            return f"sm_{self.arch}"
        return f"{self.kind}:{self.model}" if self.model else self.kind

    @property
    def warp_bits(self) -> int:
        """Bits of a register of all lanes of a warp, in records the width of a vector."""
        return _LANE_BITS * self.warp_size

    @property
    def has_bfloat16(self) -> bool:
        """Return whether TVM supports the type; else it stores 16 bits and computes in float32."""
        return self.kind == "cuda" and self.arch >= _BFLOAT16_FROM

    @property
    def has_tensor_cores(self) -> bool:
        """Return whether the device multiplies matrices as :mod:`.tensor_core` has it."""
        return self.kind == "cuda" and self.arch >= _TENSOR_CORES_FROM

    @property
    def has_warpgroup_products(self) -> bool:
        """Return whether warpgroups multiply matrices as :mod:`.warpgroup` has it."""
        return self.kind == "cuda" and self.arch == _WARPGROUPS_OF and self.is_specific

    def block_threads(self, wanted: int) -> int:
        """Threads of a block: a power of two, as many as wanted if the device has them."""
        return floor_power_of_two(min(wanted, self.max_threads))


def _multiprocessors(target: Target, arch: int) -> int:
    name, _, number = str(target.attrs.get("model", "")).partition("=")
    if name == "multiprocessors" and number.isdigit():
        return int(number)
    return _MULTIPROCESSORS[max(known for known in _MULTIPROCESSORS if known <= arch)]


def _arch_number(arch: str) -> int:
    digits = arch.removeprefix("sm_").rstrip("af")
    if not digits.isdigit():
        raise TargetError(f"architecture is {arch!r}; expected sm_ and a number, such as 'sm_90'")
    return int(digits)
