# SPDX-License-Identifier: Apache-2.0
"""A target for numbers alone."""

from __future__ import annotations

from tvm.target import Target

# A third of the time to compile TVM's own kernels, whose numbers do not depend on it.
PLAIN = Target({"kind": "llvm", "opt-level": 0})
