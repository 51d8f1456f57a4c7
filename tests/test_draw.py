"""The picture is the schedule: regions hold each allowed pair once, arrows are the transfers; a PNG comes out."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from schedule_checks import allowed_pairs, any_call

from ringcp import Causal, Contiguous, Full, HeadTail, Striped, Window, draw
from ringcp.errors import ArgumentError, UnsupportedError
from ringcp.schedule import Heads, build
from ringcp.steps import owner_words
from ringcp.topology import Topology, ring

ROOT = Path(__file__).parents[1]
LAYOUTS = [Contiguous, HeadTail, Striped]
MASKS = [Full(), Causal(), Window(5), Window(3, 2), Causal() & Window(9) | Window(0, 4)]


def painted(traced):
    """How often each (query, key) is computed, by rank and step: (ranks, steps, S, S), from the regions' positions.

    In 60ths of the heads.
    """
    layout = traced.layout
    times = torch.zeros(layout.world_size, traced.num_steps, layout.seq_len, layout.seq_len, dtype=torch.int)
    for work in traced.work:
        for i, q in enumerate(range(*work.q)):
            for j, k in enumerate(range(*work.k)):
                times[work.rank, work.step, q, k] += work.band.allows(i, j) * int(60 * work.share)
    return times


def check(layout, mask, topology, row=0, heads=None, gather=None):
    traced = draw.trace(layout, mask, topology=topology, row=row, heads=heads, gather=gather)
    times = painted(traced)
    everywhere = torch.arange(layout.seq_len)
    allowed = torch.from_numpy(allowed_pairs(mask, layout.seq_len)[row])
    assert torch.equal(times.sum((0, 1)), 60 * allowed.int()), "each allowed pair exactly once"
    for rank in range(layout.world_size):
        owned = torch.isin(everywhere, layout.positions(rank))
        assert not times[rank, :, ~owned].any(), "a rank computes the rows of its own queries"
        schedule = build(layout, mask, topology, rank, heads, gather=gather)
        assert traced.kind == schedule.kind
        assert traced.num_steps == len(schedule.forward)
        for at, step in enumerate(schedule.forward):
            works = bool(times[rank, at].any())
            if step.source is not None:
                source = torch.isin(everywhere, layout.positions(step.source))
                assert not times[rank, at, :, ~source].any(), "with the keys in hand"
            assert traced.source(rank, at) == (step.source if works else None)
            assert traced.keys(rank, at) == (owner_words(step.source) if works else "")
            assert traced.pairs(rank, at) == round(times[rank, at].sum().item() / 60)
            posted = traced.posted(rank, at)
            assert [(t.receiver, t.num_rows) for t in posted] == [(m.peer, m.num_rows) for m in step.sends]
            assert all(
                t.owner == (step.source if m.own_rows is None else rank)
                for t, m in zip(posted, step.sends, strict=True)
            )
            arriving = [(t.sender, t.num_rows) for t in traced.transfers if (t.receiver, t.step) == (rank, at)]
            assert sorted(arriving) == sorted((m.peer, m.num_rows) for m in step.recvs)
            if at and step.source is not None:
                owners = [t.owner for t in traced.transfers if (t.receiver, t.step) == (rank, at - 1)]
                assert owners == ([step.source] if step.rows else []), "what arrives is used in the next step"
        num_groups = 1 if schedule.kind != "gather" else -(-heads.kv // gather)
        assert traced.sent(rank) * num_groups == schedule.rows_sent("kv")
    return traced


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seq_len", [1, 23, 41])
def test_what_is_drawn_is_the_schedule(make, mask, world_size, seq_len):
    check(make(seq_len, world_size), mask, ring(world_size))


@given(any_call(max_world=6, max_len=24))
@settings(max_examples=60)
def test_of_any_layout_mask_and_ring(call):
    layout, mask, topology = call
    if getattr(mask, "problem", lambda *_: "")(None, layout.seq_len):
        with pytest.raises(ArgumentError, match="mask: expected"):
            draw.trace(layout, mask)
        return
    for row in range(mask.rows or 1):
        check(layout, mask, topology, row)


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(
    "heads, gather", [(Heads(6, 3), 1), (Heads(6, 3), 2), (Heads(5, 3, 1, 2), 2), (Heads(5, 3, 1, 2), None)]
)
def test_groups_of_heads_and_parts_of_them(make, mask, heads, gather):
    """A step of some heads counts for their share."""
    for world_size in (1, 2, 4):
        check(make(23, world_size), mask, ring(world_size), heads=heads, gather=gather)


def test_a_gather_is_written_and_drawn():
    traced = draw.trace(HeadTail(4096, 4), Full(), heads=Heads(4, 2), gather=1)
    wire = draw.Wire(kv_heads=2, head_dim=32, element_size=4)
    words = words_of(draw.figure(traced, wire))
    assert words[0] == "4,096 tokens on 4 ranks: Full(), layout head_tail, gather plan"
    # Two steps send; in each a rank lends 1,024 rows of 2 * 32 * 4 bytes to each of three.
    assert words.count("→ 3 ranks: 3,072 rows, 786 kB") == 2 * 4
    assert words.count("keys of all ranks") == 2 * 4
    assert words.count("sends 3,072 rows, 1.57 MB") == 4
    assert words.count("4.19 M pairs, 25 %") == 4
    lines = draw.text(traced, wire).splitlines()
    assert "  rank 0: 2,097,152 pairs with keys of all ranks" in lines
    assert any(line.startswith("  rank 0: 0 pairs; sends 1,024 rows of rank 0 to rank 1, 262 kB; ") for line in lines)


def test_another_order_of_the_ring():
    traced = check(HeadTail(21, 4), Full(), Topology((2, 0, 3, 1)))
    assert {(t.sender, t.receiver) for t in traced.transfers} == {(2, 0), (0, 3), (3, 1), (1, 2)}


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_cells_are_the_pairs(make, mask):
    """Short sequences: a square for each pair, at its place, and with `shown` those of the first positions only."""
    layout, shown = make(23, 3), 14
    works = draw.trace(layout, mask).work
    allowed = {tuple(pair) for pair in mask.dense(torch.arange(23), torch.arange(23)).nonzero().tolist()}
    squares = [polygon for work in works for polygon in draw.outlines(work, cells=True)]
    assert sorted((y, x) for (x, y), *_ in squares) == sorted(allowed)
    assert all(area(square) == 1 for square in squares)
    first = [polygon for work in works for polygon in draw.outlines(work, cells=True, shown=shown)]
    assert sorted((y, x) for (x, y), *_ in first) == sorted(pair for pair in allowed if max(pair) < shown)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("make", [Contiguous, HeadTail])
def test_polygons_are_as_large_as_the_work_and_stay_within_its_rows_and_keys(make, mask):
    for work in draw.trace(make(401, 4), mask).work:
        (polygon,) = draw.outlines(work)
        pairs = sum(work.band.allows(i, j) for i in range(work.q.length) for j in range(work.k.length))
        assert area(polygon) == pytest.approx(pairs, abs=1)
        assert all(work.k.start <= x <= work.k.stop and work.q.start <= y <= work.q.stop for x, y in polygon)


def area(polygon):
    following = polygon[1:] + polygon[:1]
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(polygon, following, strict=True))) / 2


def words_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_figure_says_rows_bytes_and_pairs_of_the_schedule():
    traced = draw.trace(HeadTail(4096, 4), Causal())
    figure = draw.figure(traced, draw.Wire(kv_heads=2, head_dim=32, element_size=4))
    words = words_of(figure)
    assert words[0] == "4,096 tokens on 4 ranks: Causal(), layout head_tail, ring plan"
    # Three steps of four send; in each a rank passes 1,024 rows of 2 * 2 * 32 * 4 bytes to the next one.
    for peer in range(4):
        assert words.count(f"→ {peer}: 1,024 rows, 524 kB") == 3
    assert words.count("sends 3,072 rows, 1.57 MB") == 4
    for owner in range(4):
        assert words.count(f"keys of rank {owner}") == 4
    assert words.count("2.1 M pairs, 25 %") == 4
    assert all(f"step {i}" in " ".join(words) for i in range(4))
    assert "all steps" in words


def test_an_arrow_a_transfer_from_lane_to_lane():
    traced = draw.trace(Contiguous(4096, 4), Window(100))
    figure = draw.figure(traced)
    arrows = [p for p in figure.axes[0].patches if type(p).__name__ == "FancyArrowPatch"]
    assert len(arrows) == len(traced.transfers) == 3
    assert words_of(figure).count("nothing to compute") == 1, "the first rank has no one to wait for"


def test_everything_written_lies_on_the_page():
    for layout, mask in [(HeadTail(2**20, 8), Causal()), (HeadTail(16384, 2), Full()), (Striped(7, 1), Window(2))]:
        figure = draw.figure(draw.trace(layout, mask))
        figure.draw_without_rendering()
        page = figure.bbox
        for text in figure.axes[0].texts:
            box = text.get_window_extent()
            assert page.x0 <= box.x0 < box.x1 <= page.x1, text.get_text()
            assert page.y0 <= box.y0 < box.y1 <= page.y1, text.get_text()


def test_the_text_says_the_same():
    words = draw.text(draw.trace(HeadTail(16, 2), Causal()), draw.Wire(1, 8, 4)).splitlines()
    assert words[0] == "HeadTail(16, 2)"
    assert words[-6:] == [
        "step 0",
        "  rank 0: 36 pairs with keys of rank 0; sends 4 rows of rank 0 to rank 1, 256 B",
        "  rank 1: 36 pairs with keys of rank 1; sends 8 rows of rank 1 to rank 0, 512 B",
        "step 1",
        "  rank 0: 32 pairs with keys of rank 1",
        "  rank 1: 32 pairs with keys of rank 0",
    ]


@pytest.mark.parametrize("number, short", [(7, "7 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_048_576, "1.05 MB")])
def test_three_digits_and_a_prefix(number, short):
    assert draw.short(number, "B") == short


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("mask", [Full(), Window(7)], ids=repr)
@pytest.mark.parametrize("seq_len, world_size", [(3, 4), (1001, 2)])
def test_a_png_of_each(make, mask, seq_len, world_size, tmp_path):
    path = tmp_path / "ring.png"
    draw.save(draw.trace(make(seq_len, world_size), mask), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def command():
    """The command line that the docstring gives."""
    return next(line.split() for line in draw.__doc__.splitlines() if line.strip().startswith("python -m"))


def run(*options):
    line = [sys.executable, "-W", "error", "-m", "ringcp.draw", *options]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_of_the_docstring_makes_the_picture_of_the_docs(tmp_path):
    options = command()[3:]
    where = options.index("--out") + 1
    kept = ROOT / options[where]
    options[where] = str(tmp_path / "ring.png")
    done = run(*options)
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "ring.png").read_bytes()
    assert made[:24] == kept.read_bytes()[:24], "the sizes differ: run the command in ringcp/draw.py again"
    assert len(kept.read_bytes()) < 200_000


def test_without_out_the_command_prints_the_text():
    done = run("--seq-len", "11", "--world-size", "3", "--mask", "window:4", "--layout", "contiguous")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Contiguous(11, 3)\n")
    assert "Window(3, 0), direct plan" in done.stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (["--mask", "window:0"], "mask: expected causal, full or window:N, got 'window:0'; for example window:1024"),
        (["--world-size", "0"], "world_size: expected an integer of at least 1, got 0; give an int"),
        (["--world-size", "17", "--out", "x.png"], "layout: expected at most 16 ranks and at least one token to draw"),
    ],
)
def test_the_command_says_what_is_wrong(options, said):
    with pytest.raises(SystemExit, match=f"draw: {said}"):
        draw.main(options)


@pytest.mark.parametrize("layout", [HeadTail(100, 17), HeadTail(0, 2)])
def test_what_can_not_be_drawn(layout):
    wanted = r"layout: expected at most 16 ranks and at least one token to draw, got .*; draw a smaller layout"
    with pytest.raises(ArgumentError, match=wanted):
        draw.figure(draw.trace(layout, Causal()))


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    traced = draw.trace(HeadTail(100, 2), Causal())
    wanted = r"matplotlib: expected it installed .*, got no such module; pip install matplotlib"
    with pytest.raises(UnsupportedError, match=wanted):
        draw.figure(traced)
    assert draw.text(traced)


def test_importing_it_does_not_import_matplotlib():
    program = "import sys, ringcp, ringcp.draw as d; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
