# SPDX-License-Identifier: Apache-2.0
"""Description of a model over ranks as text: rows, halos, bytes, choices and times a segment."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.distribute.rows.rank_plan import Segment

_MOST_RANKS = 8  # whose rows are shown


def segments_table(segments: Sequence[Segment]) -> str:
    """Return a table with a line for each segment; times are predicted."""
    lines = [
        f"rows over {len(segments[0].rows)} ranks; {sum(s.bytes for s in segments)} bytes in "
        f"{sum(s.messages for s in segments)} messages a run; times are predicted",
        f"{'stages':<24}{'recomputed':>11}{'compute':>11}  {'then':<9}{'halo':>5}{'messages':>9}"
        f"{'bytes':>10}{'exchange':>11}  rows or blocks of channels",
    ]
    lines += [_line(segment) for segment in segments]
    compute = sum(segment.compute for segment in segments)
    exchange = sum(segment.exchange for segment in segments)
    lines.append(f"{'all':<24}{'':>11}{_time(compute):>11}{'':>35}{_time(exchange):>11}")
    return "\n".join(lines)


def _line(segment: Segment) -> str:
    stages = f"{segment.first} to {segment.last}, {segment.stages}"
    return (
        f"{stages:<24}{100 * segment.recomputed:>9.1f} %{_time(segment.compute):>11}  "
        f"{segment.end:<9}{segment.halo:>5}{segment.messages:>9}{segment.bytes:>10}"
        f"{_time(segment.exchange):>11}  {_rows(segment)}"
    )


def _rows(segment: Segment) -> str:
    busy = [(rank, rows) for rank, rows in enumerate(segment.rows) if rows[0] < rows[1]]
    shown = ", ".join(f"{rank}: {begin}:{end}" for rank, (begin, end) in busy[:_MOST_RANKS])
    shown = f"channels {shown}" if segment.split == "channels" else shown
    return shown + (f" and {len(busy) - _MOST_RANKS} more" if len(busy) > _MOST_RANKS else "")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
