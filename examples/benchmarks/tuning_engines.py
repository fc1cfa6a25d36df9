# SPDX-License-Identifier: Apache-2.0
"""Engine of ``tuning.py``: TVM alone, with the schedules that MetaSchedule found.

The worker of this engine runs this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_fusion.bench import engines

TUNED = "tvm-metaschedule"


def separate_functions(mod: Any, target: Any) -> Any:
    """Lower a model as TVM's own pipeline does before it tunes: a function for each convolution."""
    import tvm
    from tvm import relax

    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.get_pipeline("zero"),
    ]
    with target:
        return tvm.transform.Sequential(passes)(mod)


class TunedTVMEngine(engines.StockTVMEngine):
    """TVM alone, with the database ``database`` of ``options``."""

    def load(
        self,
        path: str,
        shapes: engines.Shapes,
        threads: int,
        options: Mapping[str, Any],
    ) -> None:
        """Import, apply the schedules, and build with Relax's default pipeline."""
        from tvm import relax

        from tvm_fusion.compiler.targets import resolve
        from tvm_fusion.onnx.frontend import import_onnx

        imported = import_onnx(path, shapes)
        target = resolve("native", cores=threads)
        mod = separate_functions(imported.mod, target)
        with target:
            mod = relax.transform.MetaScheduleApplyDatabase(str(options["database"]))(mod)
        pipeline = relax.get_default_pipeline(target)
        executable = self._tvm.compile(mod, target, relax_pipeline=pipeline)
        self._device = self._tvm.cpu()
        self._main = relax.VirtualMachine(executable, self._device)["main"]
        self.inputs = [
            engines.Input(spec.name, tuple(spec.shape), spec.dtype) for spec in imported.inputs
        ]


engines.ENGINES[TUNED] = engines.EngineKind(
    TunedTVMEngine, "MetaSchedule, apart", "tvm", program=__file__
)

if __name__ == "__main__":
    engines.main()
