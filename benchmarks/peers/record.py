"""What a launch has found so far, on disk: what it dies of takes nothing else with it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.results import Result

DONE = "done"


class Call(NamedTuple):
    """Whose call is under way: provider and mode as they are asked for, and what it is for; nobody when all is done."""

    provider: str
    mode: str
    what: str


class Record:
    """A folder that rank 0 of a launch writes and the process that started it reads, at any time.

    settled: written before a launch: what earlier ones of the case found about modes that are not run again.
    results: those of this launch. doing: the call that is under way.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def settle(self, results: Sequence[Result]) -> None:
        """For the next launch; what the last one wrote is gone."""
        for name in ("results", "doing"):
            self._at(name).unlink(missing_ok=True)
        self._write("settled", [asdict(result) for result in results])

    def settled(self) -> list[Result]:
        return [Result(**fields) for fields in self._read("settled") or []]

    def write(self, results: Sequence[Result]) -> None:
        self._write("results", [asdict(result) for result in results])

    def results(self) -> list[Result]:
        """All of this launch, the settled ones among them."""
        found = self._read("results")
        return self.settled() if found is None else [Result(**fields) for fields in found]

    def begin(self, provider: str, mode: str, what: str) -> None:
        self._write("doing", [provider, mode, what])

    def doing(self) -> Call | None:
        """The call that is under way, or was when the launch ended."""
        found = self._read("doing")
        return Call(*found) if found else None

    def stamp(self) -> int | None:
        """Another one for each call; None before the first."""
        try:
            return self._at("doing").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _at(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write(self, name: str, value: Any) -> None:
        """Whole or not at all."""
        draft = self._at(name).with_suffix(".draft")
        draft.write_text(json.dumps(value))
        os.replace(draft, self._at(name))

    def _read(self, name: str) -> Any:
        return json.loads(self._at(name).read_text()) if self._at(name).exists() else None
