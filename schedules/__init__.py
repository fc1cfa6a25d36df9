# SPDX-License-Identifier: Apache-2.0
"""Loop nests: TE computes, schedule rules for CPUs and GPUs, and their shared vocabulary.

Families, lowest first: ``workload``; ``tir``; ``compute`` and ``distribute``; ``cpu`` and ``gpu``,
independent.
Imports nothing but TVM; ``relay_passes`` and ``tvm_fusion`` may import it.
Start with ``workload/conv2d.py``, then with ``RULES`` in ``cpu/__init__.py`` or
``gpu/__init__.py``.
"""
