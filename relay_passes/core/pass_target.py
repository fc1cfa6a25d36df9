# SPDX-License-Identifier: Apache-2.0
"""Target of a pass: the one it was given, else the current one."""

from __future__ import annotations

from tvm.target import Target

from schedules.errors import OpError


def pass_target(given: Target | None, name: str) -> Target:
    """Return the target that a pass was given, the current one for None.

    Parameters
    ----------
    given : Target | None
        The parameter ``target`` of the pass.
    name : str
        The pass, for the message.

    Raises
    ------
    OpError
        If there is none.
    """
    target = given or Target.current(allow_none=True)
    if target is None:
        raise OpError(f"{name}: no target; pass target=, or run it inside `with target:`")
    return target
