"""A context without buffers in another one: what it takes from that, and which masks it may have."""

import pytest
import torch.nn.functional as F
from test_context_buffers import close, random

import ringcp
from ringcp import Causal, Chunked, Documents, Predicate, Prefix, Window
from ringcp.testing import reference_attention

SEQ_LEN = 13
SHARDED = {"buffer_seq_dims": [2, 2, 2]}
DOCUMENTS = Documents([5, 8]) & Causal()


def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 4


def nearer(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 3


# By what the inner context says: the mask of its calls. Around it are documents, causal ones.
WITHIN = {
    "nothing": ({}, DOCUMENTS),
    "a softcap alone": ({"softcap": 3.0}, DOCUMENTS),
    "the same": ({"mask": DOCUMENTS}, DOCUMENTS),
    "the same, said otherwise": ({"mask": Causal() & Documents([5, 8, 0])}, DOCUMENTS),
    "some of it": ({"mask": Window(2) & Documents([5, 8])}, Window(2) & DOCUMENTS),
    "shorter documents": ({"mask": Documents([5, 3, 5]) & Causal()}, Documents([5, 3, 5]) & Causal()),
    "a function": ({"mask": Predicate(near) & DOCUMENTS}, Window(3) & DOCUMENTS),
}


def tensors():
    return [random(2, 2, SEQ_LEN, 4, seed=i) for i in range(3)]


def check_within(mesh, options, mask):
    whole = [x.requires_grad_() for x in tensors()]
    kernel = "reference"
    softcap = options.get("softcap", 2.0)
    expected, _ = reference_attention(*whole, mask=mask, softcap=softcap)
    upstream = random(*expected.shape, seed=3)
    expected.backward(upstream)
    leaves = tensors()
    with ringcp.context_parallel(
        mesh, buffers=leaves, **SHARDED, mask=DOCUMENTS, softcap=2.0, mode="gather", kernel=kernel, save="local"
    ) as outer:
        shards = [x.detach().clone().requires_grad_() for x in leaves]
        with ringcp.context_parallel(mesh, **options) as inner:
            out = F.scaled_dot_product_attention(*shards)
    assert inner.options == outer.options._replace(**options)
    rows = outer.layout.positions(mesh.get_local_rank())
    out.backward(upstream[:, :, rows])
    assert close(out, expected[:, :, rows])
    assert all(close(x.grad, y.grad[:, :, rows]) for x, y in zip(shards, whole, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", WITHIN)
def test_what_is_left_out_is_what_the_context_around_says(worlds, world_size, case):
    worlds(world_size).run(check_within, *WITHIN[case])


# Masks around, inside; of a window with right=0 all is causal.
WIDER = {
    "documents would see each other": (DOCUMENTS, Window(3)),
    "one pair": (DOCUMENTS, Documents([6, 7]) & Causal()),
    "a prefix": (Causal(), Prefix(2)),
    "a wider window": (Window(3), Window(4)),
    "chunks across": (Chunked(4) & Causal(), Chunked(5) & Causal()),
    "of one batch row": (Documents([[5, 8], [6, 7]]), Documents([[5, 8], [5, 8]])),
    "without its function": (Predicate(near) & Causal(), Causal()),
    "another function": (Predicate(near) & Causal(), Predicate(nearer) & Causal()),
}


def check_wider(mesh, around, inside, sized):
    leaves, layout = tensors(), ringcp.HeadTail(SEQ_LEN, mesh.size())
    shards = [layout.shard(x, mesh.get_local_rank(), 2) for x in leaves]
    options = {"layout": layout} if sized else {}
    told = "mask: expected one that allows no more than .*, the mask of the context around, got .*; combine them with &"
    with ringcp.context_parallel(mesh, mask=around, kernel="reference", **options):
        with pytest.raises(ringcp.ArgumentError, match=told), ringcp.context_parallel(mesh, mask=inside):
            raise AssertionError("entered")
        with ringcp.context_parallel(mesh, mask=inside & around):
            out = F.scaled_dot_product_attention(*shards)
    expected, _ = reference_attention(*leaves, mask=inside & around)
    assert close(out, layout.shard(expected, mesh.get_local_rank(), 2))


@pytest.mark.parametrize("case", WIDER)
@pytest.mark.parametrize("sized", [True, False])
def test_a_mask_that_allows_more_than_the_one_around_is_refused(worlds, case, sized):
    """It could mean both, and one of them lets documents see each other."""
    worlds(2).run(check_wider, *WIDER[case], sized)


def check_others(mesh):
    """Contexts of another sequence, or of another mesh, take nothing."""
    outer_options = {"mask": DOCUMENTS, "softcap": 2.0, "mode": "gather", "kernel": "reference"}
    found = []
    with ringcp.context_parallel(mesh, layout="head_tail", **outer_options):
        x = random(2, 2, 9, 4)
        with ringcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]) as inner:
            found.append(inner.options)
            F.scaled_dot_product_attention(x, x, x)
        with ringcp.context_parallel(mesh, layout=ringcp.Striped(9, mesh.size())) as inner:
            found.append(inner.options)
        with ringcp.context_parallel(mesh, mode="ring") as inner:
            found.append(inner.options)
    return [(o.mask, o.softcap, o.mode, o.kernel, o.gather_memory) for o in found]


def test_a_context_of_another_sequence_takes_nothing(worlds):
    for found in worlds(2).run(check_others):
        assert found == [(None, None, "auto", "auto", None)] * 2 + [(DOCUMENTS, 2.0, "ring", "reference", None)]
