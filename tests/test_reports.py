"""Public reports that no other file replays: see benchmarks/parity/reports.csv."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_none, differences
from torch import Tensor, nn

import ringcp
from benchmarks.parity.cells import IGNORED, Decoder
from ringcp import Causal, Documents, Padding, Window
from ringcp.testing import in_process, reference_attention


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_exchange(mesh):
    """Each token attends to itself alone, so that out is v, and dv is dout, wherever the exchange put them."""
    found = []
    for seq_len, heads in ((13, 12), (8, 4), (3, 3)):
        layout = ringcp.HeadTail(seq_len, mesh.size())
        whole = torch.arange(2.0 * heads * seq_len * 5, dtype=torch.float64).view(2, heads, seq_len, 5)
        v, dout = (layout.shard(x, mesh.get_local_rank(), 2) for x in (whole, -whole))
        v = v.requires_grad_()
        x = torch.zeros_like(v)
        out = ringcp.attention(x, x, v, mesh=mesh, mask=Window(0), layout=layout, mode="ulysses")
        (dv,) = torch.autograd.grad(out, v, dout)
        if not (torch.equal(out, v) and torch.equal(dv, dout)):
            found.append(f"{seq_len} tokens, {heads} heads: numbers are not where they were")
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.report("1.12")
def test_an_exchange_puts_every_number_where_it_belongs(worlds, world_size):
    assert_none(worlds(world_size).run(check_exchange))


def normed(norms, q, k, v, attend):
    return attend(norms[0](q), norms[1](k), v)


def check_norms(mesh):
    """Norms with weights of q and k before an exchange: gradients of the weights, summed, and of the inputs."""
    rank, found = mesh.get_local_rank(), []
    for seq_len in (12, 13):
        layout = ringcp.HeadTail(seq_len, mesh.size())
        *inputs, dout = (normal(2, heads, seq_len, 6, seed=i) for i, heads in enumerate((6, 3, 3, 6)))
        norms = nn.ModuleList(nn.RMSNorm(6) for _ in range(2)).double()
        for i, norm in enumerate(norms):
            norm.weight = nn.Parameter(1 + normal(6, seed=7 + i))
        weights = list(norms.parameters())

        def graded(tensors, dout, attend, norms=norms, weights=weights):
            leaves = [x.detach().requires_grad_() for x in tensors]
            out = normed(norms, *leaves, attend)
            grads = torch.autograd.grad(out, [*leaves, *weights], dout)
            return dict(zip(("out", "dq", "dk", "dv", "q weight", "k weight"), (out.detach(), *grads), strict=True))

        def attend(q, k, v, layout=layout):
            return ringcp.attention(q, k, v, mesh=mesh, mask=Causal(), layout=layout, mode="ulysses")

        want = graded(inputs, dout, lambda *x: reference_attention(*x, mask=Causal())[0])
        got = graded([layout.shard(x, rank, 2) for x in inputs], layout.shard(dout, rank, 2), attend)
        for name in got:
            if name.endswith("weight"):
                got[name] = ringcp.all_gather(got[name][None], mesh, dim=0).sum(0)
            else:
                want[name] = layout.shard(want[name], rank, 2)
        found += differences(f"rank {rank}, {seq_len} tokens", got, want)
    return found


@pytest.mark.report("1.11")
def test_norms_before_an_exchange(worlds):
    assert_none(worlds(3).run(check_norms))


def check_three_numbers(mesh):
    positions = torch.arange(3 * 2 * 13).view(3, 2, 13)
    for layout in (ringcp.HeadTail(13, mesh.size()), ringcp.Striped(13, mesh.size())):
        local = ringcp.shard(positions, mesh, dim=-1, layout=layout)
        assert torch.equal(local, positions[..., layout.positions(mesh.get_local_rank())])
        assert torch.equal(ringcp.unshard(local, mesh, dim=-1, layout=layout), positions)


@pytest.mark.report("1.63")
def test_positions_of_three_numbers_a_token(worlds):
    worlds(3).run(check_three_numbers)


def check_one_query(mesh):
    """One query on the last rank; of keys dealt round-robin, this rank has one or none."""
    rank, found = mesh.get_local_rank(), []
    layout = ringcp.Contiguous(1, mesh.size())
    for num_keys in (3, 9):
        kv_layout = ringcp.Striped(num_keys, mesh.size())
        q, k, v = (normal(2, heads, n, 6, seed=n + heads) for heads, n in ((4, 1), (2, num_keys), (2, num_keys)))
        q_local, k_local, v_local = (lay.shard(x, rank, 2) for lay, x in ((layout, q), (kv_layout, k), (kv_layout, v)))
        out = ringcp.attention(q_local, k_local, v_local, mesh=mesh, layout=layout, kv_layout=kv_layout, mode="ring")
        want = layout.shard(reference_attention(q, k, v)[0], rank, 2)
        found += differences(f"rank {rank}, {num_keys} keys", {"out": out}, {"out": want})
    return found, k_local.shape[2], q_local.shape[2]


@pytest.mark.report("1.I1")
def test_a_query_of_a_decoder_over_keys_dealt_round_robin(worlds):
    found, keys, queries = zip(*worlds(4).run(check_one_query), strict=True)
    assert_none(found)
    assert sorted(queries) == [0, 0, 0, 1]
    assert keys == (3, 2, 2, 2)


# Real lengths of documents, the slots that they have in the buffer, the length of the buffer, and ranks.
PADDED = {
    "tail": pytest.param([698], [698], 704, 4, marks=pytest.mark.report("5.TE #3331")),
    "odd": pytest.param([4, 3], [4, 4], 10, 2, marks=pytest.mark.report("5.TE #1930")),
    "half of a rank": pytest.param(
        [9, 8, 8, 12, 8, 12], [12, 8, 8, 12, 8, 12], 60, 2, marks=pytest.mark.report("5.TE #2186")
    ),
    "exact zeros": pytest.param([3, 5], [4, 8], 16, 4, marks=pytest.mark.report("5.TE PR #2596")),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("lengths, slots, total, world_size", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("mode", ["ring", "gather", "ulysses"])
def test_documents_in_padded_slots(lengths, slots, total, world_size, mode):
    """Each document as if alone; slots are a document and one of its padding; zeros behind the last, to the bit."""
    parts = [n for length, slot in zip(lengths, slots, strict=True) for n in (length, slot - length) if n]
    starts = [sum(slots[:i]) for i in range(len(slots))]
    real = torch.zeros(total, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=True):
        real[start : start + length] = True
    q, k, v, dout = (normal(1, heads, total, 8, seed=i) for i, heads in enumerate((4, 2, 2, 4)))
    behind = torch.arange(total) >= sum(slots)
    q, k, v = (x.masked_fill(behind[:, None], torch.nan).requires_grad_() for x in (q, k, v))
    out = in_process(q, k, v, world_size=world_size, mask=Documents(parts) & Causal(), mode=mode)
    grads = torch.autograd.grad(out, (q, k, v), dout * real[:, None])
    got = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    assert all((x[:, :, ~real] == 0).all() for name, x in got.items() if name != "out")
    assert (got["out"][:, :, behind] == 0).all()
    for start, length in zip(starts, lengths, strict=True):
        rows = slice(start, start + length)
        leaves = [x.detach()[:, :, rows].requires_grad_() for x in (q, k, v)]
        alone = reference_attention(*leaves, mask=Causal())[0]
        want = (alone.detach(), *torch.autograd.grad(alone, leaves, dout[:, :, rows]))
        of_document = {name: x[:, :, rows] for name, x in got.items()}
        assert_none([differences(f"document at {start}", of_document, dict(zip(got, want, strict=True)))])


@pytest.mark.report("5.TE #3331")
def test_valid_tokens_of_each_rank():
    layout = ringcp.HeadTail(704, 4)
    assert [int((layout.positions(rank) < 698).sum()) for rank in range(4)] == [170, 176, 176, 176]


@pytest.mark.report("5.TE #961")
def test_the_seed_does_not_matter():
    q, k, v = (normal(1, 2, 33, 8, seed=i) for i in range(3))
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(in_process(q, k, v, world_size=4, mask=Causal() & Padding([30])))
    assert torch.equal(*results)


@pytest.mark.report("5.HF transformers #47525", raises=True)
def test_position_ids_with_padding_are_refused():
    with pytest.raises(ringcp.ArgumentError, match="position_ids: expected integers of at least 0, got -1"):
        Documents(position_ids=[0, 1, 2, 0, 1, 2, -1, -1])
    assert Documents(position_ids=[0, 1, 2, 0, 1, 2]) == Documents([3, 3])


# ---- losses, by the README's recipe: a sum on each rank over the tokens of all


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def shifted(ids: Tensor, lengths: list[int]) -> Tensor:
    """The next token of each document, before anything is sharded."""
    parts = ids.split(lengths, 1)
    return torch.cat([F.pad(part[:, 1:], (0, 1), value=IGNORED) for part in parts], 1)


def step(model: Decoder, tokens: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The losses of the tokens, divided by the number of all, and the gradient of their sum."""
    losses = model.losses(*tokens, plain) / count
    grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
    return losses.detach(), torch.cat([g.flatten() for g in grads])


def check_losses(mesh, lengths, slots, last, layout):
    """A batch of documents in slots, of which only the `last` tokens have labels, against each document alone."""
    torch.manual_seed(0)
    model, ids = Decoder(sum(slots)).double(), torch.randint(Decoder.VOCABULARY, (1, sum(lengths)))
    labels = shifted(ids, lengths)
    labels[:, : labels.shape[1] - last] = IGNORED
    count = int((labels != IGNORED).sum())
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    whole = [ids, labels, positions]
    alone = [step(model, list(parts), count) for parts in zip(*(x.split(lengths, 1) for x in whole), strict=True)]
    padded = [
        torch.cat(
            [F.pad(x, (0, n - x.shape[1]), value=fill) for x, n in zip(t.split(lengths, 1), slots, strict=True)], 1
        )
        for t, fill in zip(whole, (0, IGNORED, 0), strict=True)
    ]
    with ringcp.context_parallel(
        mesh, buffers=padded, buffer_seq_dims=[1] * 3, mask=Documents(slots), layout=layout
    ) as context:
        losses, gradient = step(model, padded, count)
        labelled = (padded[1] != IGNORED).sum()[None]
        (back,) = ringcp.context_parallel_unshard(mesh, [losses], [1])
        gradient = ringcp.all_gather(gradient[None], mesh, dim=0).sum(0)
        assert int(ringcp.all_gather(labelled, mesh, dim=0).sum()) == count
    assert context.layout.seq_len == sum(slots)
    real = [x[:, :n] for x, n in zip(back.split(slots, 1), lengths, strict=True)]
    got = {"losses": torch.cat(real, 1), "loss": back.sum()[None], "gradient": gradient}
    want = {"losses": torch.cat([x for x, _ in alone], 1), "gradient": sum(g for _, g in alone)}
    return differences(f"rank {mesh.get_local_rank()}", got, {**want, "loss": want["losses"].sum()[None]})


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
@pytest.mark.report("1.42")
@pytest.mark.report("1.45")
@pytest.mark.report("5.torchtitan #1132")
def test_losses_and_gradients_do_not_depend_on_the_number_of_ranks(worlds, world_size, layout):
    """Each token's loss, also where chunks of ranks meet; ranks with unequal numbers of labels."""
    assert_none(worlds(world_size).run(check_losses, [5, 11, 3, 13], [5, 11, 3, 13], 32, layout))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.report("1.29")
def test_documents_padded_to_a_multiple_of_the_chunks(worlds, world_size):
    slots = [-(-n // (2 * world_size)) * 2 * world_size for n in (5, 11, 3, 13)]
    assert_none(worlds(world_size).run(check_losses, [5, 11, 3, 13], slots, 32, "head_tail"))


@pytest.mark.report("1.40")
def test_no_label_is_lost_where_shards_meet(worlds):
    assert_none(worlds(2).run(check_losses, [8], [8], 8, "contiguous"))


@pytest.mark.report("1.17")
@pytest.mark.report("1.19")
@pytest.mark.report("5.MLM #1764")
def test_labels_on_one_rank_of_four(worlds):
    assert_none(worlds(4).run(check_losses, [32], [32], 8, "contiguous"))
