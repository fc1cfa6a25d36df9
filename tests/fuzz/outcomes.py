# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a case: what may become of an action on damaged input, and what must not."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable

RIGHT = ("result", "read", "compiled", "refused", "refused call")
"""Outcomes that are as they should be; all others are failures."""

Found = tuple[str, str]
"""An outcome, and the error's text or the place of a failure."""


class WrongResultError(Exception):
    """A result that differs from the expected one."""


def outcome_of(action: Callable[[], str]) -> Found:
    """Run an action that returns its outcome; errors of ours are refusals, all others failures.

    Warnings of our own categories are taken as said; any other one is a failure.
    """
    from tvm_fusion.errors import EagerModeWarning, ModelWarning, RecordWarning, TVMFusionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for quiet in (RecordWarning, EagerModeWarning, ModelWarning, ResourceWarning):
            warnings.simplefilter("ignore", quiet)
        try:
            return action(), ""
        except TVMFusionError as error:
            return "refused", f"{type(error).__name__}: {error}"
        except WrongResultError:
            return "wrong", traceback.format_exc()
        except Exception:
            return "failed", traceback.format_exc()
