# SPDX-License-Identifier: Apache-2.0
"""Docstrings as Markdown: an extension of griffe, which reads them.

numpydoc's sections are griffe's own matter; what is left of reStructuredText are roles, and the
double colon before a block of code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`[~.]?([^`]+)`")
BLOCK = re.compile(r"::$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = BLOCK.sub(":", text)
