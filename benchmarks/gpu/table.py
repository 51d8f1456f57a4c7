"""Rows as text."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.part import Row, Value
from benchmarks.gpu.runner import Result

_DETAIL = 150


def line_of(row: Row) -> str:
    """A row on one line, as it comes."""
    return f"{row.status:8}{row.name}: {_said(row)}".rstrip(": ")


def table(results: Sequence[Result]) -> str:
    """Everything that was found, a line each, and the count of each status at the end."""
    cells = [(result.name, row.name, row.status, _said(row)) for result in results for row in result.rows]
    head = ("part", "what", "status", "found")
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(3)]
    lines, before = [], ""
    for part, *rest in (head, *cells):
        shown = "" if part == before else part
        before = part
        lines.append(
            "  ".join([*(x.ljust(w) for x, w in zip((shown, *rest[:2]), widths, strict=True)), rest[2]]).rstrip()
        )
    statuses = [row.status for result in results for row in result.rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return "\n".join([*lines, "", f"{len(statuses)} rows: {counts}"])


def _said(row: Row) -> str:
    values = ", ".join(f"{name} {_text(value)}" for name, value in row.values.items())
    # Of a traceback, the last line says most; the JSON has all of it.
    detail = row.detail.strip().splitlines()
    last = detail[-1] if detail else ""
    text = "; ".join(part for part in (values, last) if part)
    return text if row.values or len(text) <= _DETAIL else text[: _DETAIL - 3] + "..."


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
