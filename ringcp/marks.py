"""Which keys are attended to by queries that lie apart, as in striped layouts: each position is marked. Pure.

Of queries that are neighbours, each band's keys are one run, whose ends say all; with gaps between them, what a query
sees may or may not meet what the next one sees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ringcp.band import Band, Range
from ringcp.layout import Span

_MARK = b"\1"


def marked(bands: Iterable[Band], spans_of: Sequence[Sequence[Span]], num_keys: int) -> Iterator[bytearray]:
    """For each rank one byte a key: 1 if some of the rank's queries attends to it.

    Each query of a band shorter than the gaps is looked at once, and each other band once a rank: in time O(keys) a
    rank beside that.

    bands: of all batch rows, over positions. spans_of: the positions of each rank's queries.
    """
    step = max((span.step for spans in spans_of for span in spans), default=1)
    long, short = [], defaultdict(list)
    for band in bands:
        if band.num_q >= step:
            long.append(band)
        else:
            for at in range(*band.q):
                short[at].append(_seen(band, at, at))
    for spans in spans_of:
        marks = bytearray(num_keys)
        for span in spans:
            for band in long:
                queries = range(_first_from(span, band.q[0]), min(band.q[1], span.stop), span.step)
                if queries:
                    _mark(marks, band, queries)
            for at in range(*span) if short else ():
                for start, stop in short.get(at, ()):
                    marks[start:stop] = _MARK * (stop - start)
        yield marks


def marks_on(marks: bytearray, spans: Iterable[Span]) -> int:
    """How many of the positions of `spans` are marked."""
    return sum(marks[span.start : span.stop : span.step].count(_MARK) for span in spans)


def _mark(marks: bytearray, band: Band, queries: range) -> None:
    if band.hi - band.lo + 1 >= queries.step:  # what a query sees meets what the next one sees
        start, stop = _seen(band, queries[0], queries[-1])
        marks[start:stop] = _MARK * (stop - start)
        return
    for ahead in range(band.lo, band.hi + 1):
        key = Span(queries[0] - ahead, queries[-1] - ahead + 1, queries.step)
        keys = range(_first_from(key, band.k[0]), min(band.k[1], key.stop), key.step)
        if keys:
            marks[keys.start : keys.stop : keys.step] = _MARK * len(keys)


def _seen(band: Band, first: int, last: int) -> Range:
    """From the first key that query `first` attends to up to the last one of query `last`."""
    return max(band.k[0], first - band.hi), min(band.k[1], last - band.lo + 1)


def _first_from(span: Span, start: int) -> int:
    """The first position of a span from `start` on, if there is one."""
    return span.start if start <= span.start else start + (span.start - start) % span.step
