"""Lowering: calls that compute exactly the tiles, each in a form that the kernel takes, for all caps."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import any_call, disjoint, pairs_of
from schedule_checks import leaves as masks

import ringcp
from ringcp import Causal, Contiguous, Documents, Full, HeadTail, Striped, Window, cutting, lower
from ringcp.band import Band, trim
from ringcp.cutting import Caps, Strips
from ringcp.layout import Span
from ringcp.lower import Call, Form, Region
from ringcp.schedule import Heads, Schedule, Step, Tile, build
from ringcp.topology import ring

CAUSAL = ["square", "top_left", "bottom_right", "none"]
# Strips of a few rows, so that small cases have many of them, with edges and middles.
STRIPS = {"forward": Strips(3), "backward": Strips(3, triangles=2)}
VARLEN = Caps("bottom_right", "any", varlen=True)
ALL_CAPS = [*(Caps(causal, band, **STRIPS) for causal, band in product(CAUSAL, ["any", "mask", "none"])), VARLEN]
every_caps = pytest.mark.parametrize("caps", ALL_CAPS, ids=lambda c: f"{c.causal}-{c.band}{'-varlen' * c.varlen}")


@pytest.fixture(autouse=True, scope="module")
def few_masked_keys():
    """Likewise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "_MASKED_KEYS", 8)
        yield


def pairs_of_call(call: Call) -> np.ndarray:
    """The rectangle of a call written out: bool (m, n)."""
    m, n = call.q[1] - call.q[0], call.k[1] - call.k[0]
    ahead = np.arange(m)[:, None] - np.arange(n)[None, :]
    lo, hi = call.form
    return (ahead >= (-n if lo is None else lo)) & (ahead <= (m if hi is None else hi))


def takes(caps: Caps, call: Call) -> bool:
    """Whether a kernel with these caps can run the call."""
    m, n = call.q[1] - call.q[0], call.k[1] - call.k[0]
    lo, hi = call.form
    if call.form == Form() or caps.band != "none":
        return True
    aligned = {"square": m == n and lo == 0, "top_left": lo == 0, "bottom_right": lo == m - n, "none": False}
    return hi is None and aligned[caps.causal]


def check_calls(steps, calls_of, shape, caps):
    """Tiles and calls have the same pairs, each once; no dead row or key in a call; forms that the kernel takes."""
    for step, calls in zip(steps, calls_of, strict=True):
        tiled, called = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
        for tile in step.tiles:
            tiled[place(tile)][..., slice(*tile.band.q), slice(*tile.band.k)] += pairs_of(tile.band)
        for call in calls:
            pairs = pairs_of_call(call)
            assert pairs.any(1).all(), f"dead row in {call}"
            assert pairs.any(0).all(), f"dead key in {call}"
            assert (call.form == Form()) == pairs.all()
            assert takes(caps, call), f"{call} for {caps}"
            called[place(call)][..., slice(*call.q), slice(*call.k)] += pairs
        assert tiled.max(initial=0) <= 1
        assert np.array_equal(tiled, called)


def check_launches(step, caps):
    """Calls share a launch only if the kernel takes several, and they are alike and share no query row and no key."""
    for launch in step.launches:
        calls = launch.calls
        assert len(calls) == 1 or caps.varlen
        sizes = [(call.q[1] - call.q[0], call.k[1] - call.k[0]) for call in calls]
        assert len({(c.q_heads, c.kv_heads, c.form.from_the_end(*mn)) for c, mn in zip(calls, sizes, strict=True)}) == 1
        if len(calls) > 1:
            assert all(m <= n or call.form == Form() for call, (m, n) in zip(calls, sizes, strict=True))
        for i, a in enumerate(calls):
            for b in calls[:i]:
                assert not meet(a.batch, b.batch) or not (meet(a.q, b.q) or meet(a.k, b.k))
        for cell in launch.cells:
            assert len({call.batch for call in (*cell.calls, *cell.rows, *cell.keys)}) == 1
            fresh = [(i, call.fresh) for call in cell.calls for i in range(*call.q)]
            assert fresh == [(i, call.fresh) for call in cell.rows for i in range(*call.q)]
            assert [j for c in cell.calls for j in range(*c.k)] == [j for c in cell.keys for j in range(*c.k)]


def meet(a, b):
    """Whether two ranges share something; None is all."""
    return a is None or b is None or max(a[0], b[0]) < min(a[1], b[1])


def place(x):
    """Batch rows, query heads and KV heads of a tile or call, as slices."""
    return tuple(slice(None) if r is None else slice(*r) for r in (x.batch, x.q_heads, x.kv_heads))


def check_fresh(one_way, batch, heads, num_rows):
    """A fresh call writes rows that nobody wrote; any other finds them written, or started with zeros."""
    started = np.zeros((batch, heads, num_rows), dtype=bool)
    for region in one_way.unstarted:
        part = tuple(slice(*r) for r in region)
        assert not started[part].any()
        started[part] = True
    written = np.zeros_like(started)
    for step in one_way.steps:
        for call in step.calls:
            part = (*place(call)[:2], slice(*call.q))
            if call.fresh:
                assert not written[part].any()
                assert not started[part].any()
            else:
                assert (written | started)[part].all()
            written[part] = True
    assert (written | started).all(), "rows without work start as zeros"


def check_plan(plan, shape, caps):
    """Both ways: calls, first writes, and the transfers and blocks of the schedule."""
    schedule = plan.schedule
    for steps, one_way in ((schedule.forward, plan.forward), (schedule.backward, plan.backward)):
        check_calls(steps, [step.calls for step in one_way.steps], shape, caps)
        check_fresh(one_way, *shape[:2], schedule.num_rows)
        for step in one_way.steps:
            check_launches(step, caps)
        assert [(s.source, s.source == schedule.rank, s.num_rows, s.sends, s.recvs) for s in steps] == [
            (p.source, p.own, p.num_rows, p.sends, p.recvs) for p in one_way.steps
        ]


NUM_ROWS, NUM_KEYS = 14, 17


@st.composite
def one_step(draw) -> tuple[Tile, ...]:
    """Random disjoint tiles, for all batch rows and heads or for some of them."""
    ends_q, ends_k = st.integers(0, NUM_ROWS), st.integers(0, NUM_KEYS)
    bands = []
    for _ in range(draw(st.integers(0, 4))):
        q, k = (tuple(sorted(draw(st.tuples(ends, ends)))) for ends in (ends_q, ends_k))
        lo = draw(st.one_of(st.just(-NUM_KEYS), st.integers(-NUM_KEYS, NUM_ROWS)))
        hi = draw(st.one_of(st.just(NUM_ROWS), st.integers(lo, lo + 12)))
        bands.append(trim(q, k, lo, hi))
    tiles = [Tile(band) for band in disjoint([b for b in bands if b is not None])]
    if draw(st.booleans()):
        return tuple(tiles)
    somewhere = st.tuples(*(st.sampled_from([None, (0, 1), (1, 2)]) for _ in range(3)))
    return tuple(tile._replace(batch=b, q_heads=q, kv_heads=k) for tile in tiles for b, q, k in [draw(somewhere)])


def schedule_of(steps: list[tuple[Tile, ...]]) -> Schedule:
    made = tuple(Step(i, ((0, NUM_KEYS),), tiles) for i, tiles in enumerate(steps))
    return Schedule("local", 0, 1, NUM_ROWS, made, made)


@every_caps
@given(st.lists(one_step(), min_size=1, max_size=3).map(schedule_of))
@settings(max_examples=60)
def test_calls_are_exactly_the_tiles(caps, schedule):
    try:
        plan = lower.lower(schedule, caps)
    except ringcp.UnsupportedError:
        assert caps.band == "none"
        bands = [tile.band for step in schedule.forward for tile in step.tiles]
        assert any(b.cuts_high or (b.cuts_low and caps.causal == "none") for b in bands)
        return
    check_plan(plan, (3, 2, 2, NUM_ROWS, NUM_KEYS), caps)


@given(any_call(max_world=7, max_len=40), st.sampled_from([c for c in ALL_CAPS if c.band != "none"]), st.data())
@settings(max_examples=200)
def test_calls_of_built_schedules(call, caps, data):
    layout, mask, topology = call
    rank = data.draw(st.integers(0, layout.world_size - 1))
    heads, gather = data.draw(
        st.sampled_from(
            [(None, None), (Heads(2, 2), None), (Heads(2, 1), None), (Heads(5, 3, 1, 2), None), (Heads(5, 3, 0, 2), 2)]
            + [(Heads(4, 2), 1), (Heads(4, 2), 2), (Heads(4, 1), 3)]
        )
    )
    schedule = build(layout, mask, topology, rank, heads, gather=gather)
    plan = lower.lower(schedule, caps)
    widest = max(step.num_rows for step in schedule.forward)
    check_plan(plan, (3, *((2, 2) if heads is None else heads[:2]), schedule.num_rows, widest), caps)


@pytest.mark.parametrize("causal", ["square", "top_left", "bottom_right"])
@given(
    st.sampled_from([Contiguous, HeadTail, Striped]),
    st.integers(0, 60),
    st.integers(1, 9),
    masks.filter(lambda mask: not mask.needs_band),
)
@settings(max_examples=60)
def test_masks_without_bands_need_no_kernel_with_bands(causal, make, seq_len, world_size, mask):
    for rank in range(world_size):
        lower.lower(build(make(seq_len, world_size), mask, ring(world_size), rank), Caps(causal, "none"))


def calls_by_step(layout, mask, rank, caps):
    schedule = build(layout, mask, ring(layout.world_size), rank)
    return [
        (step.source, [(c.q, c.k, c.form, c.fresh) for c in step.calls])
        for step in lower.lower(schedule, caps).forward.steps
    ]


@pytest.mark.parametrize("causal", ["square", "top_left", "bottom_right"])
def test_a_causal_head_tail_ring_is_one_call_a_step(causal):
    """The own block is one causal call; an earlier one all rows by its first half; a later one half by all."""
    steps = calls_by_step(HeadTail(64, 4), Causal(), 1, Caps(causal, "none"))
    assert steps == [
        (1, [((0, 16), (0, 16), Form(lo=0), True)]),
        (0, [((0, 16), (0, 8), Form(), False)]),
        (3, [((8, 16), (0, 16), Form(), False)]),
        (2, [((8, 16), (0, 16), Form(), False)]),
    ]


@pytest.mark.parametrize("causal", ["square", "top_left", "bottom_right"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_causal_head_tail_ring_is_one_call_a_step_at_any_length(causal, world_size):
    for seq_len in range(2 * world_size, 6 * world_size):
        for rank in range(world_size):
            for source, calls in calls_by_step(HeadTail(seq_len, world_size), Causal(), rank, Caps(causal, "none")):
                assert len(calls) == 1
                assert calls[0][2] == (Form(lo=0) if source == rank else Form())


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_causal_head_tail_gather_is_two_calls_a_group_at_any_length(world_size):
    """For a kernel whose last row sees every key: full size, and none needs a merge."""
    caps, heads = Caps("bottom_right", "none"), Heads(6, 3)
    for seq_len, rank in product(range(4 * world_size, 8 * world_size), range(world_size)):
        layout = HeadTail(seq_len, world_size)
        one_way = lower.plan(layout, Causal(), ring(world_size), rank, heads, caps, gather=2).forward
        first, *groups = one_way.steps
        assert not first.calls
        at = [0]
        for span in layout.spans(rank):
            at.append(at[-1] + span.length)
        for step, q_heads, kv_heads in zip(groups, ((0, 4), (4, 6)), ((0, 2), (0, 1)), strict=True):
            assert step.calls == tuple(
                Call((a, b), (0, span.stop), Form(lo=b - a - span.stop), None, q_heads, kv_heads, fresh=True)
                for a, b, span in zip(at, at[1:], layout.spans(rank), strict=False)
            )


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("make", [Contiguous, HeadTail, Striped])
def test_a_full_gather_is_one_call_a_group(make, causal):
    for world_size, seq_len in product((2, 3, 5), (1, 7, 40)):
        for rank in range(world_size):
            layout = make(seq_len, world_size)
            plan = lower.plan(layout, Full(), ring(world_size), rank, Heads(4, 2), Caps(causal, "none"), gather=1)
            rows = layout.local_len(rank)
            calls = [[call[:3] for call in step.calls] for step in plan.forward.steps]
            whole = [((0, rows), (0, seq_len), Form())] if rows else []
            assert calls == [[], whole, whole]


@pytest.mark.parametrize(
    "causal, expected",
    [
        ("square", [((2, 10), (0, 3), Form()), ((2, 6), (3, 7), Form(lo=0)), ((6, 10), (3, 7), Form())]),
        ("top_left", [((2, 10), (0, 3), Form()), ((2, 10), (3, 7), Form(lo=0))]),
        ("bottom_right", [((2, 6), (0, 7), Form(lo=-3)), ((6, 10), (0, 7), Form())]),
    ],
)
def test_an_edge_that_is_not_aligned_is_cut_into_full_parts_and_an_aligned_one(causal, expected):
    """Row i sees keys up to i + 1: row 2 sees 4 of 7, row 5 is the first to see all."""
    tile = Tile(trim((2, 10), (0, 7), -1, 99))
    (step,) = lower.lower(schedule_of([(tile,)]), Caps(causal, "none")).forward.steps
    assert [call[:3] for call in step.calls] == expected


@every_caps
def test_a_window_is_taken_as_the_kernel_takes_it(caps):
    """In one call, or in strips: a wide strip is a full middle and two masked edges."""
    layout, mask = Contiguous(30, 1), Window(15)
    if caps.band == "none":
        with pytest.raises(ringcp.UnsupportedError):
            calls_by_step(layout, mask, 0, caps)
        return
    ((_, calls),) = calls_by_step(layout, mask, 0, caps)
    if caps.band == "any":
        assert calls == [((0, 30), (0, 30), Form(lo=0, hi=15), True)]
        return
    assert [c[0] for c in calls if c[3]] == [(i, i + 3) for i in range(0, 30, 3)]
    assert [c for c in calls if 24 <= c[0][0] < 27] == [
        ((24, 27), (11, 25), Form(), True),
        ((24, 26), (9, 11), Form(hi=0), False),
        ((25, 27), (25, 27), Form(lo=0), False),
    ]


def test_strips_waste_little():
    """The rectangles of a window under masks stay near the window, whatever the length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "_MASKED_KEYS", 8 * 256)
        schedule = build(Contiguous(65536, 1), Window(4095), ring(1), 0)
        (step,) = lower.lower(schedule, Caps("square", "mask", forward=Strips(256))).forward.steps
    area = sum((c.q[1] - c.q[0]) * (c.k[1] - c.k[0]) for c in step.calls)
    assert area < 1.1 * 4096 * 65536
    assert len(step.calls) <= 3 * 65536 // 256


def test_a_wide_window_becomes_triangles():
    """Each waits for one causal launch, straight or mirrored; what is left at the end is a strip."""
    schedule = build(Contiguous(40, 1), Window(9), ring(1), 0)
    plan = lower.lower(schedule, Caps("top_left", "mask", forward=Strips(3), backward=Strips(3, triangles=8)))
    calls = [(c.q, c.k, c.form) for c in plan.backward.steps[0].calls]
    assert calls == [
        ((0, 10), (0, 10), Form(lo=0)),
        ((10, 20), (1, 11), Form(hi=0)),
        ((11, 21), (11, 21), Form(lo=0)),
        ((21, 31), (12, 22), Form(hi=0)),
        ((22, 32), (22, 32), Form(lo=0)),
        ((32, 40), (30, 33), Form()),
        ((32, 39), (23, 30), Form(hi=0)),
        ((33, 40), (33, 40), Form(lo=0)),
    ]
    assert sum(c.fresh for c in plan.forward.steps[0].calls) == 13, "strips of three rows"


def test_a_window_of_half_the_rows_is_not_one_of_triangles():
    for window, rows in ((Window(6), 40), (Window(60), 7)):
        schedule = build(Contiguous(rows, 1), window, ring(1), 0)
        steps = lower.lower(schedule, Caps("top_left", "mask", forward=Strips(3, 8), backward=Strips(3))).forward.steps
        assert (
            steps
            == lower.lower(schedule, Caps("top_left", "mask", forward=Strips(3), backward=Strips(3))).forward.steps
        )


def test_half_precision_may_have_caps_of_its_own():
    half = Caps("square", "none")
    caps = Caps("square", "any", half=half)
    assert [caps.of(size) for size in (8, 4, 2)] == [caps, caps, half]
    assert half.of(2) == half


def test_one_token_documents_do_not_ask_for_a_window():
    """Full tiles along a diagonal would join into a band; a kernel without bands gets them one by one."""
    tiles = tuple(Tile(Band((i, i + 1), (i, i + 1), 0, 0)) for i in range(5))
    for causal in CAUSAL:
        (step,) = lower.lower(schedule_of([tiles]), Caps(causal, "none")).forward.steps
        assert [call.q for call in step.calls] == [(i, i + 1) for i in range(5)]
    (step,) = lower.lower(schedule_of([tiles]), Caps("square", "any")).forward.steps
    assert [call.form for call in step.calls] == [Form(lo=0, hi=0)]


SIXTEEN = [40, 30, 20, 15, 10, 10, 7, 6, 5, 5, 4, 3, 2, 1, 1, 1]


def launches_of(layout, mask, rank, **more):
    """For each step, how many calls each launch has."""
    steps = lower.plan(layout, mask, ring(layout.world_size), rank, None, VARLEN, **more).forward.steps
    return [[len(launch.calls) for launch in step.launches] for step in steps]


def test_documents_are_a_launch_of_each_kind_and_step():
    mask = Documents(SIXTEEN)
    # The last three, of one token each, are one window.
    assert launches_of(Contiguous(160, 1), mask & Causal(), 0) == [[13, 1]]
    assert launches_of(Contiguous(160, 1), mask, 0) == [[13, 1]]
    # Documents of at most 4 tokens lie inside the window, and are causal.
    assert launches_of(Contiguous(160, 1), mask & Window(3), 0) == [[10, 3, 1]]
    # The head and the tail of a rank may share keys of one document, and its own rows.
    for rank in range(4):
        for launches in launches_of(HeadTail(160, 4), mask & Causal(), rank):
            assert len(launches) <= 3
    assert sum(map(len, launches_of(HeadTail(160, 4), mask & Causal(), 3))) < sum(
        map(sum, launches_of(HeadTail(160, 4), mask & Causal(), 3))
    )


def test_batch_rows_packed_differently_share_a_launch():
    mask = Documents([[3, 4, 3], [10], [5, 5]]) & Causal()
    ((launch,),) = launches_of(Contiguous(10, 1), mask, 0)
    assert launch == 6
    (step,) = lower.plan(Contiguous(10, 1), mask, ring(1), 0, None, VARLEN).forward.steps
    assert [(c.rows[0].batch, c.rows[0].q, c.keys[0].k) for c in step.launches[0].cells] == [
        ((row, row + 1), (0, 10), (0, 10)) for row in range(3)
    ]


def test_tiles_that_share_keys_or_query_rows_are_launches_of_their_own():
    """So that a launch never writes a row twice, and what is packed is never more than the block."""
    bands = [
        Band((0, 2), (0, 4), -3, 1),
        Band((4, 6), (4, 8), -3, 1),
        Band((6, 8), (2, 6), 1, 7),
        Band((4, 6), (10, 14), -9, -5),
    ]
    tiles = tuple(Tile(trim(band.q, band.k, -99, 99)) for band in bands)
    (step,) = lower.lower(schedule_of([tiles]), VARLEN).forward.steps
    assert [[call.q for call in launch.calls] for launch in step.launches] == [[(0, 2), (4, 6)], [(4, 6), (6, 8)]]
    assert [call.fresh for call in step.calls] == [True, True, False, True]


def test_rows_of_a_launch_are_joined_where_they_are_written_alike():
    """Rows 0 and 1 have been written in the first step: the second merges into them, and writes rows 2 to 5."""
    ranges = [((0, 2), (0, 4))], [((0, 2), (6, 8)), ((2, 4), (8, 11)), ((4, 6), (11, 17))]
    steps = [tuple(Tile(trim(q, k, -99, 99)) for q, k in of_step) for of_step in ranges]
    (cell,) = lower.lower(schedule_of(steps), VARLEN).forward.steps[1].launches[0].cells
    assert [(call.q, call.fresh) for call in cell.rows] == [((0, 2), False), ((2, 6), True)]
    assert [call.k for call in cell.keys] == [(6, 17)]


def test_a_window_of_more_rows_than_keys_is_a_launch_of_its_own():
    """FlashAttention 2 misreads some of them, and would have to be given them in parts."""
    wide, tall = trim((0, 4), (0, 6), -2, 1), trim((4, 10), (6, 10), -5, 0)
    (step,) = lower.lower(schedule_of([(Tile(wide), Tile(tall), Tile(tall.shift(4, 4)))]), VARLEN).forward.steps
    assert len(step.launches) == 3


def test_tiles_of_different_batch_rows_and_heads_stay_apart():
    halves = [Band((0, 2), (0, 4), -3, 1), Band((2, 4), (0, 4), -1, 3)]
    tiles = [Tile(b, batch=(1, 2)) for b in halves] + [Tile(b, q_heads=(0, 2), kv_heads=(0, 1)) for b in halves]
    one_way = lower.lower(schedule_of([tuple(tiles)]), ALL_CAPS[0]).forward
    assert one_way.steps[0].calls == (
        ((0, 4), (0, 4), Form(), (1, 2), None, None, True),
        ((0, 4), (0, 4), Form(), None, (0, 2), (0, 1), False),  # batch row 1 has been written
    )
    assert Region((0, 1), (0, 2), (0, 4)) in one_way.unstarted


def test_rows_without_work_and_half_written_rows_have_to_start_as_zeros():
    first, wider, rest = Band((0, 4), (0, 2), -1, 3), Band((2, 8), (2, 4), -1, 5), Band((8, 10), (0, 1), 8, 9)
    one_way = lower.lower(schedule_of([(Tile(first),), (Tile(wider), Tile(rest))]), ALL_CAPS[0]).forward
    assert [call.fresh for step in one_way.steps for call in step.calls] == [True, False, True]
    assert sorted(region.rows for region in one_way.unstarted) == [(4, 8), (10, NUM_ROWS)]


def test_backward_does_half_the_heads_of_the_own_block_last():
    """So that the way home of the last gradients is hidden too."""
    schedule = build(HeadTail(64, 4), Causal(), ring(4), 1, Heads(8, 2))
    plan = lower.lower(schedule, Caps("square", "none"))
    own = [(step.own, [call[3:6] for call in step.calls]) for step in plan.backward.steps]
    everything = (None, None, None)
    assert own == [
        (True, [(None, (0, 4), (0, 1))]),
        *[(False, [everything])] * 3,
        (True, [(None, (4, 8), (1, 2))]),
    ]
    assert [call.fresh for call in plan.backward.steps[0].calls] == [True]
    assert [[call[3:6] for call in step.calls] for step in plan.forward.steps] == [[everything]] * 4


def test_what_a_kernel_cannot_take_is_named():
    for caps, mask, wanted in (
        (Caps("square", "none"), Window(2), "windows"),
        (Caps("none", "none"), Causal(), "causal masks"),
    ):
        with pytest.raises(NotImplementedError) as caught:
            calls_by_step(Contiguous(6, 1), mask, 0, caps)
        assert isinstance(caught.value, ringcp.UnsupportedError)
        (band,) = mask.pieces(Span(0, 6), Span(0, 6))
        assert (
            str(caught.value)
            == f'kernel: expected one that takes {wanted}, got one that takes {caps}, for {band}; pass kernel="auto"'
        )


def test_plans_are_made_once():
    one, other = (
        lower.plan(HeadTail(40, 4), Causal(), ring(4), 1, Heads(4, 2), Caps("square", "any")) for _ in range(2)
    )
    assert one is other
