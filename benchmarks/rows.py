"""Rows of the append-only CSV files: quantiles of what was measured, and where it was."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.origin import Origin


@dataclass(frozen=True)
class Quantiles:
    median: float
    p20: float
    p80: float


def quantiles(values: Sequence[float]) -> Quantiles:
    """The median and the 20th and 80th percentile, interpolated linearly.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("values: expected at least one, got none; run at least one round")
    at = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    return Quantiles(*torch.quantile(torch.tensor(values, dtype=torch.float64), at).tolist())


def percent_of_baseline(baseline: Sequence[float], provider: Sequence[float], *, devices: int = 1) -> list[float]:
    """Speed in percent of the baseline's, round by round: both were measured in the same round, so drifts cancel.

    Args:
        baseline, provider: seconds by round.
        devices: how many times the hardware of the baseline the provider had; 1 on the same cores.

    Raises:
        ValueError: if the rounds do not pair up.
    """
    if len(baseline) != len(provider):
        raise ValueError(f"provider: expected {len(baseline)} rounds, as the baseline has, got {len(provider)}")
    return [100.0 * b / (p * devices) for b, p in zip(baseline, provider, strict=True)]


@dataclass(frozen=True)
class Row:
    """One line of the CSV: a metric of a provider in a case, and where it was measured.

    rounds: how many values the quantiles are of.
    """

    provider: str
    case: str
    mode: str
    metric: str
    unit: str
    median: float | str
    p20: float | str
    p80: float | str
    rounds: int | str = field(default="", kw_only=True)
    torch: str
    python: str
    device: str
    cores: int
    threads: int
    commit: str
    date: str
    command: str

    @classmethod
    def of(
        cls,
        who: tuple[str, str, str],
        metric: str,
        unit: str,
        values: Sequence[float],
        *,
        threads: int,
        origin: Origin,
    ) -> Row:
        """Of so many values, to six digits; without values the unit says why.

        who: provider, case, mode.
        """
        shown: list[float | str] = ["", "", ""]
        if values:
            q = quantiles(values)
            shown = [float(f"{x:.6g}") for x in (q.median, q.p20, q.p80)]
        unit = " ".join(unit.split())
        return cls(*who, metric, unit, *shown, rounds=len(values) or "", threads=threads, **vars(origin))


def append_csv(path: Path, rows: Iterable[Any], kind: type[Any] = Row) -> None:
    """Adds rows to a CSV file, which gets its header when it is made. What is in it is never changed.

    kind: the dataclass of the rows, whose fields are the columns.

    Raises:
        ValueError: the file has other columns.
    """
    names = [field.name for field in fields(kind)]
    header = [names]
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != names:
            raise ValueError(f"csv: expected {path} to have the columns {names}, got {found}; give another file name")
        header = []
    with path.open("a", newline="") as file:
        csv.writer(file).writerows(header + [[getattr(row, name) for name in names] for row in rows])
