"""What the parity run leaves: a CSV of every error, a page in Markdown, and a picture of errors against ranks."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.origin import Origin
from benchmarks.parity.errors import ATTENTION, ONE_KERNEL, QUANTITIES, Error, above_bar
from benchmarks.parity.probe import Answer
from benchmarks.parity.reports import Report, Run, verdict

COLORS = {"ring": "C0", "gather": "C1", "ulysses": "C2", "usp": "C3"}
MARKERS = {"ring": "o", "gather": "s", "ulysses": "^", "usp": "D"}


@dataclass(frozen=True)
class Parity:
    """Everything that the run found. `about`: sizes, in words."""

    errors: list[Error]
    answers: list[Answer]
    reports: list[Report]
    runs: Mapping[str, list[Run]]
    about: str
    origin: Origin

    def failures(self) -> list[str]:
        """What is not as it must be, in words."""
        said = above_bar(self.errors)
        for a in self.answers:
            if a.leaks != a.is_control:
                said.append(f"probe: {a.question.what}, {a.mode}: {'leaks' if a.leaks else 'sees nothing'}")
        said += [f"report {r.id}: {verdict(runs)}" for r, runs in self.replayed() if verdict(runs) == "FAILS"]
        return said

    def replayed(self) -> list[tuple[Report, list[Run]]]:
        """Every report, with the runs of its tests."""
        return [(report, self.runs.get(report.id, [])) for report in self.reports]


def write(parity: Parity, out: Path) -> list[Path]:
    """Writes parity.csv, parity.md and parity.png into the folder `out`, which is made; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    table, page, picture = (out / f"parity.{end}" for end in ("csv", "md", "png"))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for kind in (Error, Origin) for field in fields(kind))
        origin = astuple(parity.origin)
        writer.writerows([*astuple(e)[:-2], _text(e.max_abs), _text(e.rel_l2), *origin] for e in parity.errors)
    page.write_text(markdown(parity))
    draw(parity.errors, picture)
    return [table, page, picture]


def markdown(parity: Parity) -> str:
    """The page."""
    failures, origin = parity.failures(), parity.origin
    machine = f"{origin.cores} cores of {origin.device} with {torch.backends.cpu.get_cpu_capability()}"
    held = "All is as it must be."
    if failures:
        held = "NOT as it must be:\n\n" + "\n".join(f"- {failure}" for failure in failures)
    return "\n\n".join(
        [
            "# Parity",
            f"Written by `{origin.command}` at commit {origin.commit or 'unknown'}, {origin.date}, with torch "
            f"{origin.torch} and Python {origin.python} on {machine}, one thread a rank. {parity.about} Seeds are "
            f"fixed: another run differs in last digits at most. {held}",
            "## Errors against fp64",
            _ERRORS,
            _summary(parity.errors),
            "![Relative L2 error against the number of ranks](parity.png)",
            "## The dependence probe",
            _PROBE,
            _probe(parity.answers),
            "## Public reports",
            _REPORTS,
            _counts(parity),
            _reports(parity),
            "## All errors",
            "Largest absolute error / relative L2 error.",
            *(
                f"### {dtype}\n\n{_all(parity.errors, dtype)}"
                for dtype in dict.fromkeys(e.dtype for e in parity.errors)
            ),
            "",
        ]
    )


_ERRORS = """The truth is attention by its definition in fp64, from inputs as rounded to the dtype of the row, with
every mask written out. "One kernel" is torch's `F.scaled_dot_product_attention` over the whole sequence, no ringcp:
what the dtype itself costs. One, two and four ranks are processes over gloo, eight are `ringcp.testing.in_process`: the
same schedule, kernels and merges. Layouts are what `make_layout` chooses for the mask. `loss`, `gradient norm` and
`gradient` (of all parameters) are of one step of a two-layer decoder, on ranks inside `ringcp.context_parallel`.

Bars: fp64 within 1e-10; else relative L2 of out, dq, dk, dv at most 1.5 times that of one kernel, on any number of
ranks.

Largest relative L2 error over all masks and modes, and in parentheses the largest absolute error:"""

_PROBE = """One token's q, k, v and upstream gradient are moved, and rows that differ in any bit are counted, in fp32 on
gloo ranks. "12 of 12" are the rows that the token can change by the definition of attention, and how many did; "+ 3"
would be rows elsewhere. The control computes without the mask, to show that the probe sees a leak."""

_REPORTS = """What went wrong for users of context parallelism in public, and what the tests with
`@pytest.mark.report(id)` that replay it on ringcp say. "pass": the result is right; "raises": ringcp refuses by name,
before anything is sent; "no test": mostly what ringcp does not have (yet), such as losses, data loaders and trainers. A
fault that was reported in several places has several lines. `benchmarks/parity/reports.csv` is the list. Tests in
`test_context_torch.py` show the fault itself, in torch."""


def _summary(found: Sequence[Error]) -> str:
    sizes = sorted({e.ranks for e in found if e.mode != ONE_KERNEL})
    head = ["dtype", "", "one kernel", *(f"{n} rank{'s' * (n > 1)}" for n in sizes)]
    rows = []
    for dtype in dict.fromkeys(e.dtype for e in found):
        for quantity in QUANTITIES:
            of = [e for e in found if (e.dtype, e.quantity) == (dtype, quantity)]
            groups = [[e for e in of if e.mode == ONE_KERNEL]]
            groups += [[e for e in of if e.mode != ONE_KERNEL and e.ranks == n] for n in sizes]
            worst = [(max(e.rel_l2 for e in g), max(e.max_abs for e in g)) for g in groups]
            rows.append([dtype, quantity, *(f"{_text(rel)} ({_text(most)})" for rel, most in worst)])
    return _table(head, rows)


def _probe(answers: Sequence[Answer]) -> str:
    def cell(answer: Answer, name: str) -> str:
        count = answer.counts[name]
        return f"{count.changed} of {count.reachable}" + (f" **+ {count.elsewhere}**" if count.elsewhere else "")

    rows = [[a.question.what, a.mode, str(a.ranks), *(cell(a, name) for name in ATTENTION)] for a in answers]
    return _table(["moved", "mode", "ranks", *(f"rows of {name}" for name in ATTENTION)], rows)


def _counts(parity: Parity) -> str:
    verdicts = [verdict(runs) for _, runs in parity.replayed()]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)) + f"; {len(verdicts)} in all."


def _reports(parity: Parity) -> str:
    rows = []
    for report, runs in parity.replayed():
        tests = dict.fromkeys(run.test for run in runs if run.outcome != "skipped")
        named = "<br>".join(f"`{test}`" for test in tests)
        rows.append([report.id, _linked(report.upstream), report.subject, verdict(runs), named])
    return _table(["id", "reported in", "what", "ringcp", "tests"], rows)


def _linked(upstream: str) -> str:
    """``owner/name#number`` as a link; GitHub leads from the number of an issue to a pull request, if it is one."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\g<0>](https://github.com/\1/issues/\2)", upstream)


def _all(found: Sequence[Error], dtype: str) -> str:
    ways: dict[tuple[str, str, int, str], dict[str, Error]] = {}
    for e in found:
        if e.dtype == dtype:
            ways.setdefault((e.mask, e.mode, e.ranks, e.ran), {})[e.quantity] = e
    rows = [
        [mask, mode, str(ranks), ran, *(f"{_text(of[q].max_abs)} / {_text(of[q].rel_l2)}" for q in QUANTITIES)]
        for (mask, mode, ranks, ran), of in ways.items()
    ]
    return _table(["mask", "mode", "ranks", "on", *QUANTITIES], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _text(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"


def draw(found: Sequence[Error], path: Path) -> None:
    """Relative L2 against ranks, the largest over the masks: out above, gradients below, a panel a dtype."""
    dtypes = list(dict.fromkeys(e.dtype for e in found))
    figure = Figure(figsize=(4 * len(dtypes), 6), layout="constrained")
    axes = figure.subplots(2, len(dtypes), squeeze=False, sharex=True)
    for row, (title, quantities) in enumerate({"out": ("out",), "dq, dk, dv": ("dq", "dk", "dv")}.items()):
        for column, dtype in enumerate(dtypes):
            of = [e for e in found if e.dtype == dtype and e.quantity in quantities]
            ax = axes[row][column]
            kernel = max(e.rel_l2 for e in of if e.mode == ONE_KERNEL)
            ax.axhline(kernel, color="black", linestyle="--", linewidth=1, label="one kernel, no ringcp")
            one_rank = max(e.rel_l2 for e in of if e.mode != ONE_KERNEL and e.ranks == 1)
            for mode, color in COLORS.items():
                sizes = sorted({e.ranks for e in of if e.mode == mode and e.ranks > 1})
                worst = [max(e.rel_l2 for e in of if (e.mode, e.ranks) == (mode, n)) for n in sizes]
                if sizes:
                    start = ([1], [one_rank]) if sizes[0] == 2 else ([], [])
                    ax.plot(start[0] + sizes, start[1] + worst, color=color, marker=MARKERS[mode], label=mode)
            ax.set(xscale="log", title=f"{title}, {dtype}")
            ax.set_ylim(0, 1.1 * max(2 * kernel, *(e.rel_l2 for e in of)))
            ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"], minor=False)
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            if row == 1:
                ax.set_xlabel("ranks")
            if column == 0:
                ax.set_ylabel("relative L2 error, worst mask")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": None})
