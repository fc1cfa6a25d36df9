# SPDX-License-Identifier: Apache-2.0
"""Family of exceptions and warnings that every storey raises.

It lives in the lowest storey so that passes, ops and schedules can raise it too; users import it as
``tvm_fusion.errors``. Beside it, how exceptions of TVM are told.
"""

from __future__ import annotations

import re


class TVMFusionError(Exception):
    """Base of every error that tvm-fusion raises on purpose."""


class InvalidModelError(TVMFusionError):
    """A model that cannot be read: not ONNX, damaged, inconsistent, or with an unbound shape."""


class UnsupportedOperatorError(TVMFusionError):
    """A valid model with operators that cannot be imported; the message lists all of them."""


class InvalidInputError(TVMFusionError):
    """Arguments of a compiled model's call with a wrong name, count, dtype or shape."""


class TargetError(TVMFusionError):
    """A target that is unknown, unsupported, or different from this machine."""


class ArtifactError(TVMFusionError):
    """A saved model that cannot be written or read."""


class CompilationError(TVMFusionError):
    """A valid model that TVM fails to optimise or to generate code for; a defect of TVM or ours."""


class OpError(TVMFusionError):
    """Arguments that an op, a pass or a schedule cannot take."""


class EngineError(TVMFusionError):
    """An engine of a comparison that is not installed, or failed on the model."""


class TuningError(TVMFusionError):
    """A tuning job that cannot run or has nothing to tune, or records that cannot be read."""


class DistributedError(TVMFusionError):
    """Ranks of a job that disagree, fail, or do not answer in time; or MPI that is not there."""


class PredictionError(TVMFusionError):
    """A machine file, a trace or a call whose time cannot be predicted; the message says why."""


class EagerModeWarning(UserWarning):
    """An op or a graph of PyTorch that runs in eager mode, because it cannot be compiled."""


class SlowPathWarning(UserWarning):
    """A schedule rule that failed on a kernel, which is compiled without it; a defect of ours."""


class ModelWarning(UserWarning):
    """A model that is not quite as ONNX has it, and how it is taken."""


class RecordWarning(UserWarning):
    """Tuning records that are skipped: damaged, or of another version of a template."""


_PRINTED = (
    (re.compile(r'ir\.Op\(span=.*?name="(?:relax\.)?([\w.]+)".*?support_level=\d+\)'), r"\1"),
    (re.compile(r"T\.int64\((-?\d+)\)"), r"\1"),
    (re.compile(r"R\.shape\((\[[^]]*\])\)"), r"\1"),
)
"""Texts that TVM prints in its messages, and those that replace them."""


def reason(error: BaseException, longest: int = 500) -> str:
    """Return an exception of TVM in a line.

    It is without the modules that TVM prints, and with ops by their names.
    """
    text = str(error).partition("\nError in pass:")[0]
    head, _, rest = text.partition("The IR with diagnostic is")
    text = " ".join(f"{head} {rest.partition('Error message:')[2]}".split())
    for pattern, told in _PRINTED:
        text = pattern.sub(told, text)
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-(longest // 2 - 5) :]}"
    return text or type(error).__name__
