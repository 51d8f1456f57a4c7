"""What `make bench` measures, as data: named cases, which modes run in them, and what must hold.

`QUICK` has the cases with targets. `FULL` has one case, causal attention of 8,192 tokens in bf16 on 2 ranks, and varies
one factor of it at a time: the length (2k to 32k), the dtype, the mask, the heads, the ranks (1, 2, 4); documents and a
window are held against causal attention of their length, 16,384 tokens, and are bases themselves, of the same on 4
ranks. `bench.py --suite full --list` says for each case what it varies, and of which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import Case
from benchmarks.providers import PROVIDERS

BOTH = "forward+backward"
OF_SINGLE, OF_DENSE, OF_TWO, OF_BEST = "% of sdpa", "% of dense rate", "% of time on 2 ranks", "% of the fastest mode"
PEAK, SENT, OF_FORMULA = "peak memory", "sent", "% of formula"
OVER_BARE, FORWARD_OVER_BARE = f"{BOTH} minus bare transfers", "forward minus bare transfers"

# Measured beside the providers where a case names them.
DENSE = "dense"  # one process, full attention, the same heads and dtype: the kernel's own rate
TWO_RANKS = "on 2 ranks"  # the same modes on the first two ranks, the others asleep
BARE = "bare transfers of"  # the messages of a call of ringcp, through `batch_isend_irecv`, and nothing else
DENSE_LEN = 4096

DOCUMENTS = (4096, 3072, 2048, 1536, 1024, 1024, 768, 640, 512, 512, 384, 256, 192, 128, 128, 64)
# What 2 cores did, for the time that a suite takes: FLOP/s in the kernel; seconds around a call; for a case's checks.
_RATE, _CALL_S, _CASE_S = 1.1e11, 0.01, 10.0
_SMOKE_DIVISOR = 64
_SMOKE_LEN_MIN = 16


_THREE = ("ring", "gather", "ulysses")
_FOUR = (*_THREE, "usp")


@dataclass(frozen=True)
class Bar:
    """What the median of a metric must reach: at least `value`, or at most. None: it is shown, whatever it is.

    modes: of ringcp, for which it holds, "auto" being whichever that is; empty for all.
    """

    metric: str
    unit: str
    value: float | None
    modes: tuple[str, ...] = ()
    at_most: bool = False
    stretch: float | None = None

    def met(self, median: float) -> bool:
        if self.value is None:
            return True
        return median <= self.value if self.at_most else median >= self.value

    def holds_for(self, mode: str, auto: str) -> bool:
        return not self.modes or mode in self.modes or (mode == auto and "auto" in self.modes)

    def __str__(self) -> str:
        if self.value is None:
            return ""
        stretch = "" if self.stretch is None else f", stretch {self.stretch:g}"
        return f"{'<=' if self.at_most else '>='} {self.value:g}{stretch}"


@dataclass(frozen=True)
class Named:
    """A case by a short name, on so many ranks.

    modes: ringcp's; other providers run in all of theirs.
    drawn: a call of each mode becomes a picture.
    calls: of an entrant in a row, in each round: the first one after a pause finds caches that are cold.
    """

    name: str
    case: Case
    world_size: int = 2
    modes: tuple[str, ...] = _THREE
    bars: tuple[Bar, ...] = ()
    companions: tuple[str, ...] = ()
    drawn: bool = False
    calls: int = 1

    @property
    def title(self) -> str:
        """The case in the CSV."""
        return f"{self.case.name} W{self.world_size}"

    def entrants(self, providers: Iterable[str]) -> list[tuple[str, str]]:
        """Provider and mode of what runs, the baseline apart."""
        return [
            (provider, mode)
            for provider in providers
            for mode in (self.modes if provider == "ringcp" else PROVIDERS[provider].modes)
        ]

    @property
    def round_s(self) -> float:
        """About what a round takes on 2 cores, ringcp being the one provider: seconds."""
        calls = 1 + len(self.modes) * (2 if TWO_RANKS in self.companions else 1)
        dense = 14 * DENSE_LEN**2 * self.case.heads * self.case.head_dim if DENSE in self.companions else 0
        return calls * (self.case.flops / _RATE + _CALL_S) + dense / _RATE

    def shrunk(self) -> Named:
        """The same at a size that only shows whether it works, and has no bars."""
        divisor = min(_SMOKE_DIVISOR, max(1, self.case.seq_len // _SMOKE_LEN_MIN))
        return replace(self, case=self.case.shrunk(divisor), bars=())


def _single(value: float, *modes: str, stretch: float | None = None) -> Bar:
    return Bar(BOTH, OF_SINGLE, value, modes, stretch=stretch)


def _dense(value: float, stretch: float | None = None) -> Bar:
    return Bar(BOTH, OF_DENSE, value, ("ring",), stretch=stretch)


_GQA = {"kv_heads": 2}
_PACKED = f"documents:{','.join(map(str, DOCUMENTS))}"
_AT_2K = (_single(85, "ring", stretch=92),)
_AUTO = Bar(BOTH, OF_BEST, 97, ("auto",))
_AT_8K = (_single(97, "ring"), _single(95), _AUTO)
_FORMULA = Bar(PEAK, OF_FORMULA, 110, ("ring",), at_most=True)
_ON_DOCUMENTS = (_single(130, "ring"), _dense(72))
_ON_A_WINDOW = (_dense(58, stretch=63),)
_LATENCY = (Bar(OVER_BARE, "ms", 1, at_most=True), Bar(FORWARD_OVER_BARE, "ms", None, at_most=True))

# Short ones first: what they leave of their time is the long ones'.
QUICK = (
    Named("latency", Case(64), modes=("ring",), bars=_LATENCY, companions=(BARE,), calls=20),
    Named("causal-2k-fp32", Case(2048), bars=_AT_2K),
    Named("causal-2k-bf16", Case(2048, "bf16"), bars=_AT_2K),
    Named("causal-4k-bf16", Case(4096, "bf16")),
    Named("full-4k-fp32", Case(4096, mask="full")),
    Named("documents", Case(sum(DOCUMENTS), "bf16", _PACKED), bars=_ON_DOCUMENTS, companions=(DENSE,)),
    Named("window", Case(16384, "bf16", "window:1024"), modes=("ring",), bars=_ON_A_WINDOW, companions=(DENSE,)),
    Named("gqa-8k-fp32", Case(8192, **_GQA), bars=_AT_8K),
    Named("gqa-8k-bf16", Case(8192, "bf16", **_GQA), bars=_AT_8K),
    Named("causal-8k-fp32", Case(8192), bars=_AT_8K),
    Named("causal-8k-bf16", Case(8192, "bf16"), bars=_AT_8K, drawn=True),
    Named(
        "causal-8k-bf16-w4",
        Case(8192, "bf16"),
        world_size=4,
        modes=("ring", "ulysses"),
        bars=(Bar(BOTH, OF_TWO, 105, at_most=True), _FORMULA),
        companions=(TWO_RANKS,),
        drawn=True,
    ),
)

_BY_NAME = {named.name: named for named in QUICK}

# Each differs from one of `BASES` in one factor: the length, dtype, mask, heads or ranks. `varied` says from which.
FULL = (
    _BY_NAME["causal-2k-bf16"],
    _BY_NAME["causal-4k-bf16"],
    _BY_NAME["documents"],
    replace(_BY_NAME["window"], modes=_THREE),
    _BY_NAME["gqa-8k-bf16"],
    _BY_NAME["causal-8k-fp32"],
    _BY_NAME["causal-8k-bf16"],
    Named("full-8k-bf16", Case(8192, "bf16", "full")),
    Named("causal-16k-bf16", Case(16384, "bf16")),
    Named("causal-32k-bf16", Case(32768, "bf16")),
    Named("causal-8k-bf16-w1", Case(8192, "bf16"), world_size=1, modes=("ring",)),
    Named("documents-w4", Case(sum(DOCUMENTS), "bf16", _PACKED), 4, _FOUR, _ON_DOCUMENTS, (DENSE,)),
    Named("window-w4", Case(16384, "bf16", "window:1024"), 4, ("ring",), _ON_A_WINDOW, (DENSE,)),
    replace(_BY_NAME["causal-8k-bf16-w4"], modes=_FOUR),
)

# The first is what the suite is about. Documents and windows show at a length at which they leave something out.
BASES = ("causal-8k-bf16", "causal-16k-bf16", "documents", "window")


def varied(named: Named, cases: Sequence[Named]) -> tuple[str, str] | None:
    """The first of the bases among `cases` that a case differs from in one factor, and that factor. None for the first
    base itself, and where there is no such base.
    """
    known = {other.name: other for other in cases}
    if named.name == BASES[0]:
        return None
    for base in BASES:
        apart = _apart(named, known[base]) if base in known else []
        if len(apart) == 1:
            return base, apart[0]
    return None


def _apart(named: Named, other: Named) -> list[str]:
    """The factors in which two cases differ."""
    mine, theirs = (
        {
            "length": n.case.seq_len,
            "dtype": n.case.dtype,
            "mask": n.case.mask,
            "heads": (n.case.batch, n.case.heads, n.case.kv_heads, n.case.head_dim),
            "ranks": n.world_size,
        }
        for n in (named, other)
    )
    return [factor for factor in mine if mine[factor] != theirs[factor]]


@dataclass(frozen=True)
class Suite:
    """Cases and the seconds that they may take together on 2 cores.

    resumes: what the CSV has of this commit is passed over.
    """

    cases: tuple[Named, ...]
    seconds: float
    most_rounds: int
    least_rounds: int = 3
    resumes: bool = False

    def only(self, names: Sequence[str]) -> Suite:
        """With these cases alone.

        Raises:
            ValueError: there is none of such a name.
        """
        known = [named.name for named in self.cases]
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"only: expected names among {', '.join(known)}, got {', '.join(unknown)}")
        return replace(self, cases=tuple(named for named in self.cases if named.name in names))

    def planned(self) -> dict[str, float]:
        """About how many seconds each case takes on 2 cores, by name: its share of what is left, but no more than its
        most rounds need, and no less than its least. In the order in which they run.
        """
        left, plan = self.seconds, {}
        ordered = sorted(self.cases, key=lambda named: named.world_size)
        for i, named in enumerate(ordered):
            least, most = (_CASE_S + named.round_s * (2 + rounds) for rounds in (self.least_rounds, self.most_rounds))
            plan[named.name] = max(least, min(most, left / (len(ordered) - i)))
            left = max(0.0, left - plan[named.name])
        return plan

    def smoke(self) -> Suite:
        """Every case at a size that only shows whether it works, one round."""
        return replace(self, cases=tuple(named.shrunk() for named in self.cases), most_rounds=1, least_rounds=1)


SUITES = {
    "quick": Suite(QUICK, seconds=570, most_rounds=41),
    "full": Suite(FULL, seconds=5700, most_rounds=41, resumes=True),
}
