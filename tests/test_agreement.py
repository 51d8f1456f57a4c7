"""The vote before each call: every rank raises, the odd one is named, nothing is sent, and the next call works."""

import time

import pytest
import torch
from calls import attend, check_exact, each, make_call
from torch.distributed.tensor import DTensor

import ringcp
from ringcp import call as one_call

QUICK_S = 3.0  # promised is 1 s, against the group's timeout of 30 s; the rest is for a busy machine


def seq_len_of(world_size):
    return 4 * world_size + 1


def refused_everywhere(mesh, call):
    """The error of a call that must fail on every rank at once, with nothing sent."""
    check_exact(mesh, 9)  # the first call of a process imports half of torch
    started = time.perf_counter()
    with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
        attend(call)
    assert time.perf_counter() - started < QUICK_S
    assert recorder.steps == []
    return info.value


# What the odd rank does: the changed arguments, and the fields that the error must show.
MISMATCHES = {
    "dtype": (each(torch.Tensor.float), ["torch.float32", "not", "torch.float64"]),
    "query heads": (each(lambda q: q[:, :2], "q"), ["q=(B=2, H=2, S, D=8)", "not q=(B=2, H=4, S, D=8)"]),
    "kv heads": (each(lambda x: x[:, :1], "kv"), ["k=(B=2, H=1, S, D=8)", "v=(B=2, H=1, S, D=8)"]),
    "head dim": (each(lambda x: torch.cat([x, x], 3)), ["q=(B=2, H=4, S, D=16)"]),
    "batch": (each(lambda x: x[:1]), ["q=(B=1, H=4, S, D=8)"]),
    "layout name": (lambda _: {"layout": "striped"}, ["layout=striped, not layout=head_tail"]),
    "layout of another length": (
        lambda c: {"layout": ringcp.HeadTail(1000, c["mesh"].size())},
        ["layout=head_tail of 1000 tokens, not layout=head_tail"],
    ),
    "mask": (lambda _: {"mask": ringcp.Window(3)}, ["mask=Window(3, 0), not mask=Causal()"]),
    "no mask": (lambda _: {"mask": None}, ["mask=Full(), not mask=Causal()"]),
    "mode": (lambda _: {"mode": "gather"}, ["mode=gather, not mode=ring"]),
    "kernel": (lambda _: {"kernel": "reference"}, ["kernel=reference, not kernel=sdpa"]),
    "scale": (lambda _: {"scale": 0.5}, ["scale=0.5, not scale=None"]),
    "softcap": (lambda _: {"softcap": 30.0}, ["softcap=30.0, not softcap=None"]),
    "seq_len": (lambda c: {"seq_len": seq_len_of(c["mesh"].size())}, ["seq_len=", "not seq_len=None"]),
    "agree": (lambda _: {"agree": "context"}, ["agree=context, not agree=call"]),
    "requires_grad": (
        each(lambda q: q.detach().requires_grad_(), "q"),
        ["requires_grad=True, not requires_grad=False"],
    ),
}


def one_differs(mesh, what, odd):
    call, *_ = make_call(mesh, seq_len_of(mesh.size()))
    change, words = MISMATCHES[what]
    error = refused_everywhere(mesh, {**call, **change(call)} if mesh.get_local_rank() == odd else call)
    assert isinstance(error, ringcp.AgreementError)
    # Between two ranks either may be the odd one; of three, it is the one against two.
    text = str(error)
    if mesh.size() > 2:
        assert f"rank {odd} made a different call than rank {0 if odd else 1}: " in text
        assert text.count("made a different call") == 1
        assert all(word in text for word in words), text
    else:
        assert "rank 1 made a different call than rank 0: " in text
        assert all(word.removeprefix("not ").partition(", not")[0] in text for word in words), text
    assert "Nothing was sent" in text
    check_exact(mesh, seq_len_of(mesh.size()))
    return text.partition(": ")[2]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_raises_on_every_rank_and_names_the_odd_one(worlds, what, size):
    for odd in (0, size - 1):
        said = worlds(size).run(one_differs, what, odd)
        assert len(set(said)) == 1  # every rank says the same


def lse_on_one(mesh, odd):
    call, *_ = make_call(mesh, 9, requires_grad=True)
    error = refused_everywhere(mesh, {**call, "return_lse": mesh.get_local_rank() == odd})
    assert "gradient through lse (return_lse=True)=" in str(error)
    check_exact(mesh, 9)
    call, *_ = make_call(mesh, 9)  # without gradients the lse is nobody else's business
    attend({**call, "return_lse": mesh.get_local_rank() == odd})


@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_through_the_lse_is_agreed_on(worlds, size):
    worlds(size).run(lse_on_one, size - 1)


def one_is_longer(mesh, odd, layout):
    world_size, rank = mesh.size(), mesh.get_local_rank()
    seq_len = 4 * world_size if layout == "contiguous" else seq_len_of(world_size)
    call, _, sized = make_call(mesh, seq_len)
    call["layout"] = sized if layout == "instance" else layout
    if rank == odd:
        call |= each(lambda x: torch.cat([x, x[:, :, :3]], 2))(call)
    lengths = [ringcp.Contiguous(seq_len, world_size), sized][layout != "contiguous"].local_len(odd)
    error = refused_everywhere(mesh, call)
    assert isinstance(error, ringcp.LayoutError)
    assert f"{lengths + 3} on rank {odd} instead of " in str(error)
    if layout == "instance":  # then S is known, and with it who is wrong
        assert str(error).count("on rank") == 1
    check_exact(mesh, seq_len)
    return str(error)


@pytest.mark.parametrize("layout", ["auto", "contiguous", "instance"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_wrong_local_length_raises_on_every_rank(worlds, size, layout):
    said = worlds(size).run(one_is_longer, size - 1, layout)
    assert len(set(said)) == 1


# What the odd rank gets wrong on its own: it raises this, and its peers an AgreementError that quotes it.
REFUSALS = {
    "dims": (each(lambda x: x[0]), "expected 4 dims"),
    "mixed dtypes": (each(torch.Tensor.float, "q"), "expected one dtype"),
    "integers": (each(torch.Tensor.long), "expected a floating dtype"),
    "batch sizes": (each(lambda x: x[:1], "k"), "expected equal batch sizes"),
    "heads of k and v": (each(lambda x: x[:, :1], "v"), "expected equal head counts"),
    "heads that do not divide": (each(lambda x: x[:, :3], "q"), "multiple of the key heads"),
    "head dims": (each(lambda x: x[..., :4], "q"), "expected equal head dims"),
    "lengths of q and k": (each(lambda x: x[:, :, :1], "q"), "expected equal local lengths"),
    "mask": (lambda _: {"mask": torch.ones(2, 2)}, "mask: expected a ringcp mask"),
    "layout": (lambda _: {"layout": "zigzag"}, "layout: expected a Layout"),
    "layout of another world": (lambda _: {"layout": ringcp.Striped(9, 7)}, "got one for 7"),
    "seq_len": (lambda _: {"seq_len": "9"}, "seq_len: expected an integer"),
    "seq_len beside a layout": (
        lambda c: {"seq_len": 9, "layout": ringcp.HeadTail(10, c["mesh"].size())},
        "seq_len: expected the layout's 10",
    ),
    "scale": (lambda _: {"scale": "1"}, "scale: expected a number"),
    "scale of nan": (lambda _: {"scale": float("nan")}, "scale: expected a finite number"),
    "timeout": (lambda _: {"timeout": "1"}, "timeout: expected seconds"),
    "timeout of inf": (lambda _: {"timeout": float("inf")}, "timeout: expected seconds"),
    "timeout of 0": (lambda _: {"timeout": 0}, "timeout: expected seconds"),
    "fp8": (each(lambda x: x.to(torch.float8_e4m3fn)), "float8_e4m3fn is not float16 or bfloat16"),
    "no head dim": (each(lambda x: x[..., :0]), "expected head dims of at least 1"),
    "DTensor": (lambda c: {"q": DTensor.from_local(c["q"], c["mesh"])}, "q: expected a local tensor, got a DTensor"),
    "meta": (each(lambda x: x.to("meta"), "q"), "q: expected a CPU or CUDA tensor, got one on meta"),
    "numpy": (each(torch.Tensor.numpy, "q"), "q: expected a tensor, got ndarray"),
    "list": (each(torch.Tensor.tolist, "q"), "q: expected a tensor, got list"),
    "keyword": (lambda _: {"is_causal": True}, "is_causal: expected an argument of ringcp.attention"),
    "mode": (lambda _: {"mode": "rings"}, "mode: expected one of"),
    "agree": (lambda _: {"agree": "never"}, "agree: expected one of"),
    "kernel": (lambda _: {"kernel": "flash9"}, "kernel='flash9': expected one of"),
    "kernel that cannot": (lambda _: {"kernel": "sdpa_flash"}, "kernel='sdpa_flash': expected a kernel that can"),
}


def one_refuses(mesh, what, odd):
    call, *_ = make_call(mesh, seq_len_of(mesh.size()))
    change, words = REFUSALS[what]
    mine = mesh.get_local_rank() == odd
    error = refused_everywhere(mesh, {**call, **change(call)} if mine else call)
    assert words in str(error)
    assert isinstance(error, ringcp.AgreementError) != mine
    if not mine:
        assert f"rank {odd} refused its arguments (" in str(error)
    check_exact(mesh, seq_len_of(mesh.size()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", REFUSALS)
def test_when_one_rank_refuses_its_peers_raise_too(worlds, what, size):
    worlds(size).run(one_refuses, what, size - 1)


def all_refuse(mesh, what):
    call, *_ = make_call(mesh, seq_len_of(mesh.size()))
    change, words = REFUSALS[what]
    error = refused_everywhere(mesh, {**call, **change(call)})
    assert words in str(error)
    assert not isinstance(error, ringcp.AgreementError)
    check_exact(mesh, seq_len_of(mesh.size()))


@pytest.mark.parametrize("what", REFUSALS)
def test_when_all_ranks_refuse_each_raises_its_own_error(worlds, what):
    worlds(2).run(all_refuse, what)


def two_refuse(mesh):
    call, *_ = make_call(mesh, 13)
    rank = mesh.get_local_rank()
    error = refused_everywhere(mesh, {**call, **[{}, {"mode": "rings"}, {"scale": "1"}][rank]})
    if rank == 0:
        assert "rank 1 refused its arguments (mode: " in str(error)
        assert "rank 2 refused its arguments (scale: " in str(error)
    check_exact(mesh, 13)


def test_all_refusals_are_reported_together(worlds):
    worlds(3).run(two_refuse)


def one_breaks_down(mesh, odd):
    """What no one thought of, on one rank and before the vote, is no reason to leave the others waiting."""
    call, *_ = make_call(mesh, 9)
    mine = mesh.get_local_rank() == odd
    check_exact(mesh, 9)
    original = one_call.choose

    def fail(*_):
        raise RuntimeError("surprise")

    try:
        one_call.choose = fail if mine else original
        with pytest.raises(ringcp.RingcpError, match=r"RuntimeError: surprise") as info:
            attend(call)
    finally:
        one_call.choose = original
    assert isinstance(info.value, ringcp.AgreementError) != mine
    if mine:
        assert type(info.value) is ringcp.RingcpError
        assert str(info.value.__cause__) == "surprise"
    else:
        assert f"rank {odd} refused its arguments (" in str(info.value)
    check_exact(mesh, 9)


@pytest.mark.parametrize("size", [2, 3])
def test_an_unforeseen_error_before_the_vote_raises_on_every_rank(worlds, size):
    worlds(size).run(one_breaks_down, size - 1)


def lengths_in_a_row(mesh, lengths, options):
    for seq_len in lengths:
        check_exact(mesh, seq_len, **options)
    return [make_call(mesh, seq_len)[0]["q"].shape[2] for seq_len in lengths]


@pytest.mark.parametrize("agree", ["call", "context"])
@pytest.mark.parametrize("layout", ["auto", "instance"])
def test_another_length_works_at_once(worlds, layout, agree):
    """With floor chunks a rank's own length often stays when S changes, so it cannot stand for S."""
    options = {"layout": layout, "agree": agree}
    seen = worlds(2).run(lengths_in_a_row, (8, 9, 10, 11, 8), options)
    assert seen == [[4, 5, 5, 5, 4], [4, 4, 5, 6, 4]]
    worlds(3).run(lengths_in_a_row, (12, 13, 14, 15, 16, 17, 2), options)
