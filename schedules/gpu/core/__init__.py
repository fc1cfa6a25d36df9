# SPDX-License-Identifier: Apache-2.0
"""Machine, intrinsics and kernel frame: the base of all families of GPU kernels.

Imports ``workload`` and ``tir``; every family of ``gpu`` may import it.
Start with ``machine.py`` (``GPUInfo``), then ``kernel_function.py``.
"""
