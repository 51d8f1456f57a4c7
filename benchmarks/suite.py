"""What `make bench` measures, as data: named cases, which modes run in them, and what must hold."""

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
    """

    name: str
    case: Case
    world_size: int = 2
    modes: tuple[str, ...] = _THREE
    bars: tuple[Bar, ...] = ()
    companions: tuple[str, ...] = ()
    drawn: bool = False

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
    Named("latency", Case(64), modes=("ring",), bars=_LATENCY, companions=(BARE,)),
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

# Around causal-8k-bf16 on 2 ranks, one factor at a time: the length, dtype, mask, heads, ranks.
FULL = (
    *(
        replace(named, modes=_THREE if named.name == "window" else _FOUR if named.world_size == 4 else named.modes)
        for named in QUICK
    ),
    Named("causal-4k-fp32", Case(4096)),
    Named("full-8k-bf16", Case(8192, "bf16", "full")),
    Named("causal-16k-fp32", Case(16384)),
    Named("causal-16k-bf16", Case(16384, "bf16")),
    Named("causal-32k-bf16", Case(32768, "bf16")),
    Named("causal-8k-bf16-w1", Case(8192, "bf16"), world_size=1, modes=("ring",)),
    Named("causal-2k-bf16-w4", Case(2048, "bf16"), world_size=4, modes=_FOUR),
    Named("documents-w4", Case(sum(DOCUMENTS), "bf16", _PACKED), 4, _FOUR, _ON_DOCUMENTS, (DENSE,)),
    Named("window-w4", Case(16384, "bf16", "window:1024"), 4, ("ring",), _ON_A_WINDOW, (DENSE,)),
    Named("gqa-8k-bf16-w4", Case(8192, "bf16", **_GQA), 4, _FOUR),
)


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

    def smoke(self) -> Suite:
        """Every case at a size that only shows whether it works, one round."""
        return replace(self, cases=tuple(named.shrunk() for named in self.cases), most_rounds=1, least_rounds=1)


SUITES = {
    "quick": Suite(QUICK, seconds=570, most_rounds=41),
    "full": Suite(FULL, seconds=5700, most_rounds=41, resumes=True),
}
