# SPDX-License-Identifier: Apache-2.0
"""Cases of damaged models: compiled, and called if they are accepted."""

from __future__ import annotations

import math
import random
from functools import cache

import onnx

from .mutations import damaged
from .outcomes import Found, outcome_of

MOST_ELEMENTS = 1 << 20


@cache
def corpus() -> tuple[onnx.ModelProto, ...]:
    """Models to damage: ONNX's own test cases, and two small networks many times."""
    from small_onnx import dense_model, small_model

    from operator_cases import cases

    return (*(case.model for case in cases(every=True)), *[small_model(), dense_model()] * 50)


def attempt(number: int) -> Found:
    """Compile and call a damaged model."""
    import tvm_fusion
    from tvm_fusion.errors import TVMFusionError
    from tvm_fusion.runtime.host_arrays import random_inputs

    def compile_and_call() -> str:
        model = tvm_fusion.compile(data, threads=1)
        if any(isinstance(size, str) for spec in model.inputs for size in spec.shape):
            return "compiled"
        if any(math.prod(map(int, spec.shape)) > MOST_ELEMENTS for spec in model.inputs):
            return "compiled"
        inputs = random_inputs(model.inputs, number, normal=True)
        try:
            model(inputs)
        except TVMFusionError:
            return "refused call"
        return "result"

    models = corpus()
    data = damaged(random.Random(f"model {number}").choice(models), number)
    return outcome_of(compile_and_call)
