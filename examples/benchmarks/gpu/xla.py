# SPDX-License-Identifier: Apache-2.0
"""XLA through JAX, which launches on its own streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from examples.benchmarks.reduction_cases import Case
from tvm_fusion.errors import EngineError

from .array_steps import reduce_numpy, run_case
from .engine import Engine, Launcher, Sets, module

PLATFORMS = ("gpu", "cuda")


class XLA(Engine):
    """``jax.jit``.

    One compiled function runs a case on every input set and returns all results, so that the
    launch from Python is shared by all of them; its time until ready is divided by their number.
    """

    title = "XLA"
    package = "jax"

    def check(self) -> None:
        """Look for JAX and for a GPU that it reaches."""
        # JAX would take three quarters of the memory before others allocate.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        platform = module("jax").default_backend()
        if platform not in PLATFORMS:
            raise EngineError(f"JAX runs on {platform!r}, not on the GPU")

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile a case twice: for one input set, and for all of them."""
        jax, jnp = module("jax"), module("jax.numpy")
        jax.config.update("jax_enable_x64", True)  # else 64-bit inputs are narrowed
        arrays = [[jnp.from_dlpack(tensor) for tensor in tensors] for tensors in sets]

        def one(inputs: Sequence[Any]) -> tuple[Any, ...]:
            return run_case(case, inputs, jnp, reduce_numpy)

        def every(all_inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
            return [one(inputs) for inputs in all_inputs]

        compiled, compiled_all = jax.jit(one), jax.jit(every)
        return Launcher(
            lambda number: jax.block_until_ready(compiled(arrays[number])),
            capturable=False,
            all_sets=lambda: jax.block_until_ready(compiled_all(arrays)),
            repeatable=True,
        )
