"""All modes agree on drawn shapes; and where every element lands in the exchange, told by numbers that occur once."""

import itertools

import pytest
import torch
from cases import LAYOUTS, MASKS, MASKS_OF, allowed, differences
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringcp
from ringcp import exchange as exchanged
from ringcp.exchange import Part
from ringcp.executor import drive_all
from ringcp.grouped import Grid, grouped
from ringcp.kernels.registry import KERNELS
from ringcp.layout import Layout, layout_named
from ringcp.modes import MODES, Choice, divisors, head_shares
from ringcp.runs import Sizes, make_run, sizes_of
from ringcp.schedule import Heads
from ringcp.testing import in_process, reference_attention
from ringcp.transport import InProcess

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_LAYOUTS = (*LAYOUTS, "balanced")
NAMES = ("out", "lse", "dq", "dk", "dv")


def graded(tensors: list[Tensor], attend) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of ``attend(q, k, v)``; after q, k and v come the upstream gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    results = attend(*leaves)
    grads = torch.autograd.grad(results, leaves, tensors[3:])
    return dict(zip(NAMES, [*(x.detach() for x in results), *grads], strict=True))


def ways(draw, world_size: int) -> list[dict]:
    """Every mode there is on so many ranks, with drawn degrees and memory."""
    degree = st.sampled_from(divisors(world_size))
    memory, save = st.none() | st.integers(1, 20_000), st.sampled_from(("auto", "exchanged", "local"))
    return [
        {"mode": "ring"},
        {"mode": "gather", "gather_memory": draw(memory)},
        {"mode": "gather", "gather_memory": draw(memory), "ulysses_degree": draw(degree), "save": draw(save)},
        {"mode": "ulysses", "save": draw(save)},
        {"mode": "usp", "ulysses_degree": draw(degree), "save": draw(save)},
        {"mode": "auto", "ulysses_degree": draw(st.none() | degree)},
    ]


@st.composite
def calls(draw):
    world_size, batch = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    kv_heads, group, seq_len = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 40))
    name = draw(st.sampled_from([*MASKS, *MASKS_OF]))
    mask = MASKS_OF[name](seq_len, batch) if name in MASKS_OF else MASKS[name]
    layout = draw(st.sampled_from(ALL_LAYOUTS))
    full = ringcp.Full() if mask is None else mask
    layout = ringcp.Balanced(seq_len, world_size, full) if layout == "balanced" else layout
    options = {"mask": mask, "layout": layout, "kernel": draw(st.sampled_from(("auto", "reference")))}
    return (batch, kv_heads * group, kv_heads, seq_len, name), world_size, options, ways(draw, world_size)


@settings(max_examples=30)
@given(calls(), st.integers(1, 3))
def test_all_modes_agree(call, parts):
    """Exchanges in one part or several, as those of many bytes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "parts", lambda *_: parts)
        all_modes_agree(call)


def all_modes_agree(call):
    (batch, q_heads, kv_heads, seq_len, name), world_size, options, every = call
    generator = torch.Generator().manual_seed(batch * seq_len)
    shapes = ((q_heads, 4), (kv_heads, 4), (kv_heads, 3), (q_heads, 3), (q_heads,))
    tensors = [
        torch.randn(batch, heads, seq_len, *dim, generator=generator, dtype=torch.float64) for heads, *dim in shapes
    ]
    dense = allowed(name, seq_len, batch)
    want = graded(tensors, lambda q, k, v: reference_attention(q, k, v, mask=dense))
    for way in every:

        def attend(q: Tensor, k: Tensor, v: Tensor, way=way) -> object:
            return in_process(q, k, v, world_size=world_size, return_lse=True, **options, **way)

        found = differences(f"{way}", graded(tensors, attend), want)
        assert not found, "\n".join(found)


def integers(start: int, *shape: int) -> Tensor:
    """Whole numbers, each once."""
    num = torch.Size(shape).numel()
    return torch.arange(start, start + num, dtype=torch.float64).view(shape)


PLACES = [(2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (6, 2), (8, 4), (6, 3), (4, 1)]


def fits(mode: str, world_size: int, degree: int) -> bool:
    return degree == 1 if mode == "ring" else degree == world_size if mode == "ulysses" else True


@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (3, 3), (28, 4)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_where_every_element_lands(mode, heads):
    """Each query sees its own key alone and all scores are whole numbers, so that every result is one: nothing rounds.

    With keys of 1 in their first column, lse is the first column of q, and dq of lse alone.
    """
    num_q, num_kv = heads
    group = num_q // num_kv
    for (world_size, degree), name in itertools.product(PLACES, ALL_LAYOUTS):
        if (
            (degree > 1)
            if mode == "ring"
            else mode in ("ulysses", "usp") and (degree == world_size) != (mode[1] == "l")
        ):
            continue
        seq_len = 2 * world_size + 3
        layout = layout_of(name, seq_len, world_size)
        q, v = integers(1, 2, num_q, seq_len, 2), integers(10_000, 2, num_kv, seq_len, 3)
        k = torch.zeros(2, num_kv, seq_len, 2, dtype=torch.float64)
        k[..., 0] = 1.0
        dout, dlse = integers(20_000, 2, num_q, seq_len, 3), integers(40_000, 2, num_q, seq_len)

        def attend(q: Tensor, k: Tensor, v: Tensor, layout=layout, way=(world_size, degree)) -> object:
            options = {"mask": ringcp.Window(0), "layout": layout, "scale": 1.0, "kernel": "reference"}
            options |= {"world_size": way[0], "mode": mode, "ulysses_degree": way[1]}
            options |= {"gather_memory": 1} if mode == "gather" else {}
            return in_process(q, k, v, return_lse=True, **options)

        got = graded([q, k, v, dout, dlse], attend)
        by_group = (2, num_kv, group, seq_len)
        want = {
            "out": v.repeat_interleave(group, 1),
            "lse": q[..., 0],
            "dq": torch.stack([dlse, torch.zeros_like(dlse)], -1),
            "dk": (dlse[..., None] * q).view(*by_group, 2).sum(2),
            "dv": dout.view(*by_group, 3).sum(2),
        }
        for what, x in want.items():
            assert torch.equal(got[what], x), (world_size, degree, name, what)


def layout_of(name: str, seq_len: int, world_size: int) -> Layout:
    if name == "balanced":
        return ringcp.Balanced(seq_len, world_size, ringcp.Causal())
    return layout_named(name, seq_len, world_size)


class Scene:
    """A call whose every number occurs once, as each rank has it and as the runs of its exchange must get it."""

    def __init__(self, layout: Layout, degree: int, num_q: int, num_kv: int) -> None:
        self.layout, self.grid = layout, Grid(layout.world_size, degree)
        self.ranks, rings = range(layout.world_size), range(layout.world_size // degree)
        self.shares = head_shares(num_q, num_kv, degree)
        spans = [grouped(layout, degree).spans(c) for c in rings]
        self.rows = [torch.cat([torch.arange(*span) for span in of]) for of in spans]
        kinds = {"q": (num_q, 2), "out": (num_q, 3), "lse": (num_q,), "dout": (num_q, 3), "dlse": (num_q,)}
        kinds |= {"k": (num_kv, 2), "v": (num_kv, 3), "dk": (num_kv, 2), "dv": (num_kv, 3), "dq": (num_q, 2)}
        self.whole = {
            name: integers(10_000 * i, 2, heads, layout.seq_len, *dim)
            for i, (name, (heads, *dim)) in enumerate(kinds.items())
        }
        transport, sizes = InProcess(), sizes_of(self.whole["k"], self.whole["v"], layout.seq_len, None)
        how = Choice("usp", degree, ""), layout, None, ringcp.Full(), Heads(num_q, num_kv)
        self.runs = [
            make_run(*how, rank, KERNELS["reference"], 1.0, transport.endpoint(rank), sizes) for rank in self.ranks
        ]

    def local(self, names: tuple[str, ...]) -> list[list[Tensor]]:
        """By rank: its rows, all heads."""
        return [[self.layout.shard(self.whole[name], rank, 2) for name in names] for rank in self.ranks]

    def exchanged(self, names: tuple[str, ...]) -> list[list[list[Tensor]]]:
        """By rank and part: all rows of its ring rank, the heads of its share."""
        return [[self._of(rank, part, names) for part in self.runs[rank].parts] for rank in self.ranks]

    def _of(self, rank: int, part: Part, names: tuple[str, ...]) -> list[Tensor]:
        share, rows = part.exchange.shares[self.grid.place(rank)], self.rows[self.grid.ring_rank(rank)]
        cuts = {name: slice(*(share.kv if name.endswith(("k", "v")) else share.q)) for name in names}
        return [self.whole[name][:, heads, rows] for name, heads in cuts.items()]

    @property
    def busy(self) -> list[tuple[int, int]]:
        """The ranks with query heads, and their parts."""
        ranks = [rank for rank in self.ranks if len(range(*self.shares[self.grid.place(rank)].q))]
        return [(rank, i) for rank in ranks for i in range(len(self.runs[rank].parts))]

    @property
    def takers(self) -> Tensor:
        """(Hkv, 1, 1), on how many ranks of an exchange each key head is."""
        num_kv = self.whole["k"].shape[1]
        numbers = [sum(head in range(*share.kv) for share in self.shares) for head in range(num_kv)]
        return torch.tensor(numbers)[:, None, None]


class Standing:
    """In the executor's place: keeps what each rank brings, and gives back that rank's part of `names`."""

    def __init__(self, scene: Scene, names: tuple[str, ...]) -> None:
        self.brought: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._jobs = {(rank, i): part.job for rank, run in enumerate(scene.runs) for i, part in enumerate(run.parts)}
        self._results = scene.exchanged(names)

    def __call__(self, job, *tensors):
        ((rank, i),) = (at for at, known in self._jobs.items() if known is job)
        self.brought[rank, i] = tensors
        return self._results[rank][i]
        yield


def shapes_of(local: list[Tensor], kept: bool) -> list[Tensor | None]:
    """What backward gets: all, or of what is kept the shapes of q, k and v alone."""
    dout, dlse, *saved = local
    return [dout, dlse, *(x.new_full((), torch.nan).expand(x.shape) for x in saved[:3]), None, None] if kept else local


PASSES = {
    "forward": (("q", "k", "v"), ("out", "lse")),
    "backward": (("dout", "dlse", "q", "k", "v", "out", "lse"), ("dq", "dk", "dv")),
}


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("name", ALL_LAYOUTS)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_the_exchange_alone(monkeypatch, name, heads, parts, keep):
    """Each run gets all rows of its ring rank for its share of the heads, and what it makes of them goes home.

    What is kept comes in no other way: the local rows that backward gets then are not numbers.
    """
    monkeypatch.setattr(Sizes, "parts", lambda *_: parts)
    for world_size, degree in PLACES:
        if degree == 1:
            continue
        scene = Scene(layout_of(name, 2 * world_size + 3, world_size), degree, *heads)
        kept: list[Tensor | None] = [None for _ in scene.ranks]
        for way, (inputs, results) in PASSES.items():
            standing = Standing(scene, results)
            monkeypatch.setattr(exchanged.executor, way, standing)
            if way == "forward":
                runs = [run.forward(*local, keep) for run, local in zip(scene.runs, scene.local(inputs), strict=True)]
                *home, kept = zip(*drive_all(runs), strict=True)
                home = list(zip(*home, strict=True))
                assert all((memory is not None) == keep for memory in kept)
            else:
                each = zip(scene.runs, scene.local(inputs), kept, strict=True)
                home = drive_all([run.backward(*shapes_of(local, keep), memory) for run, local, memory in each])
            assert sorted(standing.brought) == scene.busy, "a rank without heads computes nothing"
            want = scene.exchanged(inputs)
            for (rank, i), brought in standing.brought.items():
                assert len(brought) == len(inputs)
                assert all(map(torch.equal, brought, want[rank][i])), (world_size, degree, way, rank, i)
            for rank, local in enumerate(scene.local(results)):
                # What several ranks have made of one key head is their sum.
                times = [scene.takers if result in ("dk", "dv") else 1 for result in results]
                right = [x * n for x, n in zip(local, times, strict=True)]
                assert len(home[rank]) == len(results)
                assert all(map(torch.equal, home[rank], right)), (world_size, degree, way, rank)
