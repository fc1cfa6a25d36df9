# SPDX-License-Identifier: Apache-2.0
"""Warnings of libraries about their own inner workings, kept from users."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """Context without warnings.

    The filters belong to the whole process, so one thread at a time: of two that overlap, the
    second would restore what the first had set.
    """
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
