"""Packed documents and padding over gloo: nothing leaks, nothing moves that is not needed, and nobody is misled."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import LAYOUTS, assert_none, differences, packed
from torch import Tensor, nn

import ringcp
from ringcp import Causal, Documents, Full, Padding, Window
from ringcp.layout import layout_named
from ringcp.testing import reference_attention

NAMES = ("out", "lse", "dq", "dk", "dv")


def made(seq_len: int, batch: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, and the upstream gradient of out, of the whole sequence."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(batch, heads, seq_len, dim) for heads, dim in ((4, 6), (2, 6), (2, 5), (4, 5))]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(tensors: list[Tensor], attend) -> dict[str, Tensor]:
    """out, lse and the gradients of ``attend(q, k, v)``."""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def of_each_document(tensors: list[Tensor], lengths: list[int], mask=None) -> dict[str, Tensor]:
    """Each document by itself, as if it were alone in the world; zeros, and an lse of -inf, behind the last."""
    total = sum(lengths)
    parts = [x[:, :, :total].split(lengths, 2) for x in tensors]
    alone = [
        results(list(xs), lambda q, k, v: reference_attention(q, k, v, mask=mask)) for xs in zip(*parts, strict=True)
    ]
    rest = tensors[0].shape[2] - total
    joined = {name: torch.cat([part[name] for part in alone], 2) for name in NAMES}
    pad = {name: (0, rest) if name == "lse" else (0, 0, 0, rest) for name in NAMES}
    return {name: F.pad(x, pad[name], value=-torch.inf if name == "lse" else 0.0) for name, x in joined.items()}


def check_varlen(mesh, lengths, mask):
    """(T, H, D) in, (T, H, D) out, the same bits as the dense call, and what each document gives alone."""
    rank, seq_len, found = mesh.get_local_rank(), sum(lengths) + 3, []
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tensors, documents = made(seq_len), Documents(lengths)
    want = of_each_document(tensors, [n for n in lengths if n], mask)
    for name in LAYOUTS:
        layout = layout_named(name, seq_len, mesh.size())
        local = [layout.shard(x, rank, 2) for x in tensors]

        def dense(q: Tensor, k: Tensor, v: Tensor, layout=layout):
            both = documents if mask is None else documents & mask
            return ringcp.attention(q, k, v, mesh=mesh, mask=both, layout=layout, return_lse=True)

        def varlen(q: Tensor, k: Tensor, v: Tensor, layout=layout):
            packed_row = [x[0].transpose(0, 1) for x in (q, k, v)]
            options = {"mesh": mesh, "mask": mask, "layout": layout}
            out, lse = ringcp.attention_varlen(*packed_row, cu_seqlens=cu_seqlens, return_lse=True, **options)
            assert (out.shape, lse.shape) == ((q.shape[2], 4, 5), (q.shape[2], 4))
            assert torch.equal(ringcp.attention_varlen(*packed_row, cu_seqlens=cu_seqlens.tolist(), **options), out)
            return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]

        got, same = results(local, varlen), results(local, dense)
        found += differences(f"rank {rank}, {name}", got, {key: layout.shard(x, rank, 2) for key, x in want.items()})
        found += [f"{name}, {key}: other bits" for key in NAMES if not torch.equal(got[key], same[key])]
    return found


@pytest.mark.parametrize("mask", [None, Causal(), Window(3)], ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.report("1.28")
@pytest.mark.report("1.32")
def test_varlen_is_each_document_alone(worlds, world_size, mask):
    """Longer and shorter than a shard, of one token and of none, and tokens of padding behind them."""
    for lengths in ([1, 19, 0, 2, 1, 10], [30], [1, 1]):
        assert_none(worlds(world_size).run(check_varlen, lengths, mask))


def refused_varlen(mesh):
    q, k, v, _ = made(8)
    rank, layout, said = mesh.get_local_rank(), layout_named("head_tail", 8, mesh.size()), []
    q, k, v = (layout.shard(x, rank, 2)[0].transpose(0, 1) for x in (q, k, v))
    attend = {"mesh": mesh, "layout": layout, "cu_seqlens": [0, 3, 8]}
    for tensors, changed in (
        ((q[None], k, v), {}),
        ((q, k, 3), {}),
        ((q, k, v), {"cu_seqlens": [0, 5, 3]}),
        ((q, k, v), {"cu_seqlens": torch.tensor([0, 9])}),
        ((q, k, v), {"sinks": torch.ones(3)}),
        ((q, k, v), {"cu_seqlens": [1, 8] if rank else [0, 8]}),
    ):
        with pytest.raises(ringcp.RingcpError) as info:
            ringcp.attention_varlen(*tensors, **{**attend, **changed})
        said.append(f"{type(info.value).__name__}: {info.value}")
    ringcp.attention_varlen(q, k, v, **attend)
    return said


def test_varlen_refuses_on_every_rank(worlds):
    first, second = worlds(2).run(refused_varlen)
    for said in (first, second):
        assert said[0].startswith("ArgumentError: q: expected 3 dims (local tokens, heads, head dim), got 4 dims; ")
        assert said[1].startswith("ArgumentError: v: expected 3 dims (local tokens, heads, head dim), got int; ")
        assert said[2].startswith("ArgumentError: cu_seqlens: expected sums that start at 0 and never fall, got [0, 5,")
        assert said[3].startswith("LayoutError: mask: expected documents of at most 8 tokens in all, got 9 in Docu")
        assert said[4].startswith("ArgumentError: sinks: expected a floating tensor of one logit for each query head")
    assert first[5].startswith("AgreementError: rank 0: rank 1 refused its arguments (cu_seqlens: expected")
    assert second[5].startswith("ArgumentError: cu_seqlens: expected sums that start at 0")


GARBAGE = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "huge": 1e30}


def padded_masks(seq_len: int) -> dict[str, tuple[ringcp.Mask, list[list[bool]]]]:
    """Masks with padding for batches of two, and which tokens of each row are padding."""
    p = range(seq_len)
    cut = [seq_len - 5, seq_len // 3]
    lengths = [packed(seq_len), [2, seq_len // 2]]
    right = [[i >= n for i in p] for n in cut]
    left = [[i < seq_len - n for i in p] for n in cut]
    return {
        "right": (Padding(cut), right),
        "right_causal": (Causal() & Padding(cut), right),
        "left_causal": (Padding(cut, side="left", seq_len=seq_len) & Causal(), left),
        "left_window": (Padding(cut, side="left", seq_len=seq_len) & Window(4, 1), left),
        "same_for_all": (Padding(cut[1:]), [right[1]] * 2),
        "all_of_a_row": (Padding([0, seq_len]), [[True] * seq_len, [False] * seq_len]),
        "documents": (Documents(lengths) & Causal(), [[i >= sum(row) for i in p] for row in lengths]),
    }


def check_garbage(mesh, seq_len, kernel):
    """Whatever pads hold, they give exact zeros, and other tokens what they give with zeros for pads."""
    rank, found = mesh.get_local_rank(), []
    for (name, (mask, pads)), layout_name, garbage in itertools.product(
        padded_masks(seq_len).items(), LAYOUTS, GARBAGE
    ):
        layout, pad = layout_named(layout_name, seq_len, mesh.size()), torch.tensor(pads)[:, None, :, None]
        clean = [x.masked_fill(pad, 0.0) for x in made(seq_len, 2)]
        want = results(clean, lambda q, k, v, mask=mask: reference_attention(q, k, v, mask=mask))
        dirty = [layout.shard(x.masked_fill(pad, GARBAGE[garbage]), rank, 2) for x in clean]
        got = results(
            dirty,
            lambda q, k, v, mask=mask, layout=layout: ringcp.attention(
                q, k, v, mesh=mesh, mask=mask, layout=layout, kernel=kernel, return_lse=True
            ),
        )
        what = f"rank {rank}, {name}, {layout_name}, {garbage}"
        found += differences(what, got, {key: layout.shard(x, rank, 2) for key, x in want.items()})
        on_pads = {key: got[key][layout.shard(pad, rank, 2).expand_as(got[key])] for key in got if key != "lse"}
        found += [f"{what}, {key}: not zero on pads" for key, x in on_pads.items() if not (x == 0).all()]
    return found


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.report("1.20")
@pytest.mark.report("1.22")
@pytest.mark.report("1.23")
@pytest.mark.report("1.25")
def test_garbage_in_pads_reaches_nothing(worlds, world_size, kernel):
    assert_none(worlds(world_size).run(check_garbage, 26, kernel))


def check_seven_of_eight(mesh):
    """Seven tokens padded to eight, of which the eighth is none."""
    layout, rank = layout_named("head_tail", 8, mesh.size()), mesh.get_local_rank()
    tensors = made(8)
    want = results([x[:, :, :7] for x in tensors], lambda q, k, v: reference_attention(q, k, v, mask=Causal()))
    want = {key: F.pad(x, (0, 1) if key == "lse" else (0, 0, 0, 1)) for key, x in want.items()}
    want["lse"][..., 7] = -torch.inf
    got = results(
        [layout.shard(x, rank, 2) for x in tensors],
        lambda q, k, v: ringcp.attention(
            q, k, v, mesh=mesh, mask=Padding([7]) & Causal(), layout=layout, return_lse=True
        ),
    )
    return differences(f"rank {rank}", got, {key: layout.shard(x, rank, 2) for key, x in want.items()})


@pytest.mark.report("1.21")
def test_a_length_padded_to_a_multiple(worlds):
    assert_none(worlds(2).run(check_seven_of_eight))


def probe(mesh, layout_name, mask, seq_len, at):
    """The positions whose out, dq, dk or dv changed in some bit when one token's q, k, v and dout did."""
    layout, rank = layout_named(layout_name, seq_len, mesh.size()), mesh.get_local_rank()

    def run(tensors):
        return results(
            [layout.shard(x, rank, 2) for x in tensors],
            lambda q, k, v: ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout, return_lse=True),
        )

    tensors = made(seq_len)
    moved = [x.index_add(2, torch.tensor([at]), torch.ones_like(x[:, :, :1])) for x in tensors]
    before, after = run(tensors), run(moved)
    changed = {name: before[name] != after[name] for name in NAMES}
    rows = {name: (x if name == "lse" else x.any(3)).flatten(0, 1).any(0) for name, x in changed.items()}
    return {name: layout.positions(rank)[x].tolist() for name, x in rows.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.report("1.27")
def test_a_token_of_one_document_changes_nothing_in_another(worlds, layout):
    """The probe of the report: half the positions may change, and none of the other half, in any bit."""
    found = worlds(2).run(probe, layout, Documents([16, 16]), 32, 1)
    for name in NAMES:
        changed = sorted(itertools.chain(*(of[name] for of in found)))
        assert changed == list(range(16)), name
    found = worlds(3).run(probe, layout, Documents([9, 14, 9]) & Causal(), 32, 12)
    for name, seen in {
        **dict.fromkeys(("out", "lse"), range(12, 23)),
        "dq": range(12, 23),
        **dict.fromkeys(("dk", "dv"), range(9, 23)),
    }.items():
        assert sorted(itertools.chain(*(of[name] for of in found))) == list(seen), name


def traffic(mesh, layout_name, mask, seq_len, batch):
    """Bytes (sent, received), forward and backward, of one call."""
    layout = layout_named(layout_name, seq_len, mesh.size())
    q, k, v, dout = (layout.shard(x, mesh.get_local_rank(), 2) for x in made(seq_len, batch, torch.bfloat16))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with ringcp.record() as r:
        ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout).backward(dout)
    assert {step.direction for step in r.steps} == {"forward", "backward"}
    return [
        tuple(sum(getattr(step, f"bytes_{way}") for step in r.steps if step.direction == d) for way in WAYS)
        for d in ("forward", "backward")
    ]


WAYS = ("sent", "received")
ROW = 2 * (6 + 5)
"""Elements of a row of keys and values: two heads of 6 and of 5."""


def need(lengths_of_rows: list[list[int]], layout_name: str, seq_len: int, world_size: int, causal: bool):
    """[rank][owner]: the tokens of `owner` that `rank` attends to in some batch row, counted one by one."""
    owner = {
        p: rank
        for rank in range(world_size)
        for p in layout_named(layout_name, seq_len, world_size).positions(rank).tolist()
    }
    fetched = [[set() for _ in range(world_size)] for _ in range(world_size)]
    for lengths in lengths_of_rows:
        for stop, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            for q in range(stop - length, stop):
                for k in range(stop - length, q + 1 if causal else stop):
                    fetched[owner[q]][owner[k]].add(k)
    return [[len(fetched[r][o]) * (r != o) for o in range(world_size)] for r in range(world_size)]


# By case: lengths of each batch row, layout, and how many rows move in all, where it is easy to see.
MOVED = {
    "inside": ([[4, 8, 12, 3, 9, 12]], "contiguous", 0),
    "inside_chunks": ([[6] * 8], "head_tail", 0),
    "one_over_two": ([[4, 8, 8, 9, 7, 12]], "contiguous", None),
    "one_over_three": ([[20, 24, 4]], "contiguous", None),
    "chunks_of_one_rank": ([[18, 12, 18]], "head_tail", None),
    "rows": ([[12] * 4, [10, 2, 12, 24]], "contiguous", None),
    "some": ([packed(48), packed(48, 1)], "head_tail", None),
    "one_token_each": ([[1] * 48], "head_tail", 0),
    "one_token_each_striped": ([[1] * 48], "striped", 0),
    "pairs_striped": ([[2, 1] * 16], "striped", 16),
    "none": ([[]], "contiguous", 0),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", MOVED)
@pytest.mark.report("1.36")
def test_documents_move_what_is_needed_and_no_more(worlds, case, causal):
    rows, layout, easy = MOVED[case]
    mask = Documents(rows) & (Causal() if causal else Full())
    want = need(rows, layout, 48, 4, causal)
    fetched, lent = [sum(of) for of in want], [sum(of[rank] for of in want) for rank in range(4)]
    if easy is not None:
        assert sum(fetched) == easy * (1 if causal else 2)
    row = ROW * len(rows)
    for rank, (ahead, back) in enumerate(worlds(4).run(traffic, layout, mask, 48, len(rows))):
        assert ahead == (lent[rank] * row * 2, fetched[rank] * row * 2), rank
        # Keys and values as ahead; their gradients the other way, in fp32.
        assert back == (
            (lent[rank] * 2 + fetched[rank] * 4) * row,
            (fetched[rank] * 2 + lent[rank] * 4) * row,
        ), rank


class Tiny(nn.Module):
    """Two layers of attention, as a decoder has them."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(19, 12), nn.Embedding(40, 12)
        self.ins = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 19)

    def forward(self, ids, position_ids):
        x = self.tokens(ids) + self.places(position_ids)
        for into, out in zip(self.ins, self.outs, strict=True):
            q, k, v = into(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(2))
        return self.head(x)


def check_model(mesh, lengths, layout):
    torch.manual_seed(3)
    model, total = Tiny().double(), sum(lengths)
    ids = torch.randint(19, (1, total))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    parts = zip(ids.split(lengths, 1), position_ids.split(lengths, 1), strict=True)
    want = torch.cat([model(*part) for part in parts], 1)
    want.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    mask = Documents(position_ids=position_ids)
    with ringcp.context_parallel(
        mesh, buffers=[ids, position_ids], buffer_seq_dims=[1, 1], layout=layout, mask=mask
    ) as context:
        assert context.mask == Documents(lengths)
        local = model(ids, position_ids)
        local.square().sum().backward()
        (got,) = ringcp.context_parallel_unshard(mesh, [local], [1])
    summed = [ringcp.all_gather(p.grad[None], mesh, dim=0).sum(0) for p in model.parameters()]
    found = differences("logits", {"logits": got.detach()}, {"logits": want.detach()})
    for i, (a, b) in enumerate(zip(summed, grads, strict=True)):
        found += differences(f"parameter {i}", {"grad": a}, {"grad": b})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[3, 2, 4, 1], [5, 11, 3, 13]], ids=str)
@pytest.mark.report("1.7")
@pytest.mark.report("1.31")
@pytest.mark.report("5.MLM PR #5243")
def test_a_model_of_packed_documents_in_a_context(worlds, lengths, layout):
    """``is_causal=True`` of the model and the context's documents hold both."""
    assert_none(worlds(3).run(check_model, lengths, layout))
