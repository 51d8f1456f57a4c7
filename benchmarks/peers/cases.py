"""What is compared: cases by short names, what must hold in them, and about how long each takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.cases import Case
from benchmarks.suite import DOCUMENTS

_SMOKE_DIVISOR = 8
# Longer cases are tried at a quarter of their length first.
_TRIED_LEN_MIN = 4096

# What a case takes on 2 cores, for the planning alone: a launch with its imports and small checks, the modes that are
# timed to the end, what a call has beside its arithmetic, FLOP/s, and calls beside the rounds (memory is counted in a
# slow one).
_LAUNCH_S = 45.0
_MODES = 16
_CALL_S = 0.02
_FLOPS = 2e11
_OTHER_CALLS = 3


@dataclass(frozen=True)
class Named:
    """A case by a short name; ringcp is to be at least `target` times as fast as each library that is right in it.

    modes: of ringcp. A library's mode is held against the one of the same name, or else against the first.
    less_memory: ringcp is to need less than each library.
    """

    name: str
    case: Case
    target: float | None = None
    world_size: int = 2
    modes: tuple[str, ...] = ("auto",)
    less_memory: bool = False

    @property
    def title(self) -> str:
        """The case in the CSV."""
        return f"{self.case.name} W{self.world_size}"

    @property
    def tried(self) -> Case | None:
        """The same kind of problem, small enough for a call of the slowest; None where the case is that itself."""
        return self.case.shrunk(4) if self.case.seq_len >= _TRIED_LEN_MIN else None

    def shrunk(self) -> Named:
        """The same at a size that only shows whether it works, and has no targets."""
        return replace(self, case=self.case.shrunk(_SMOKE_DIVISOR), target=None, less_memory=False)

    def seconds(self, rounds: int) -> float:
        """About how long it takes."""
        return _LAUNCH_S + _MODES * (_OTHER_CALLS + rounds) * (_CALL_S + self.case.flops / _FLOPS)


# Short ones first: what they leave of their time is the long ones'.
CASES = (
    Named("causal-2k", Case(2048, "bf16"), 1.0),
    Named("causal-2k-fp32", Case(2048), 1.0),
    Named("window", Case(16384, "bf16", "window:1024"), 1.5),
    Named("documents", Case(sum(DOCUMENTS), "bf16", f"documents:{','.join(map(str, DOCUMENTS))}"), 1.25),
    Named("gqa-8k", Case(8192, "bf16", kv_heads=2), 1.0),
    Named("causal-8k", Case(8192, "bf16"), 0.98),
    Named("causal-8k-fp32", Case(8192), 0.98),
    Named("causal-8k-w4", Case(8192, "bf16"), 0.98, world_size=4, modes=("ring", "ulysses", "usp"), less_memory=True),
)
