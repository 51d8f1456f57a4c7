"""Modes that do not fit: refused in words, nothing sent; ranks that differ; peers that die; rotate methods."""

import contextlib
import os
import re
import time

import pytest
import torch
import torch.nn.functional as F
from calls import attend, check_exact, grid, make_call, new_mesh, ways
from contexts import in_thread
from test_faults import EXIT_CODE, TIMEOUT_S, fail_at, peer_error
from torch.distributed.device_mesh import init_device_mesh

import ringcp
from ringcp import exchange, replicas
from ringcp.testing.pool import RankLost

A, U = ringcp.ArgumentError, ringcp.UnsupportedError
DEGREE = "ulysses_degree: expected a number of ranks of at least 1 or None, got"
MEMORY = "gather_memory: expected a number of bytes of at least 1 or None, got"
OF_GRID = "ulysses_degree: expected 2, the size of the second dim of mesh, or None, got"
ON_GRID = (
    "mode: expected 'usp', 'gather' or 'auto' with ulysses_degree=2 (the size of the second dim of a 2-D mesh) on 4"
)
WRONG = {
    "unknown": (
        {"mode": "ulises"},
        U,
        "mode: expected one of 'auto', 'ring', 'gather', 'ulysses', 'usp', got 'ulises';",
    ),
    "no word": ({"mode": 2}, A, "mode: expected a word, got 2; "),
    "ring on a grid": (
        {"mesh": grid, "mode": "ring"},
        A,
        f"{ON_GRID} ranks, got 'ring'; pass mode='usp', or a 1-D mesh",
    ),
    "ulysses on a grid": (
        {"mesh": grid, "mode": "ulysses"},
        A,
        f"{ON_GRID} ranks, got 'ulysses', which exchanges among",
    ),
    "ring of exchanges": ({"mode": "ring", "ulysses_degree": 2}, A, f"{ON_GRID} ranks, got 'ring';"),
    "usp of what": (
        {"mode": "usp"},
        A,
        "ulysses_degree: expected how many neighbouring ranks exchange heads in mode='usp'",
    ),
    "no divisor": (
        {"mode": "usp", "ulysses_degree": 3},
        A,
        "ulysses_degree: expected a divisor of 4 ranks, got 3; choose",
    ),
    "too many": (
        {"mode": "auto", "ulysses_degree": 8},
        A,
        "ulysses_degree: expected a divisor of 4 ranks, got 8; choose",
    ),
    "flag": ({"mode": "usp", "ulysses_degree": True}, A, f"{DEGREE} True; give an int"),
    "none": ({"mode": "usp", "ulysses_degree": 0}, A, f"{DEGREE} 0; give an int"),
    "text": ({"mode": "usp", "ulysses_degree": "2"}, A, f"{DEGREE} '2'; give an int"),
    "float": ({"mode": "usp", "ulysses_degree": 2.0}, A, f"{DEGREE} 2.0; give an int"),
    "not the grid's": ({"mesh": grid, "mode": "usp", "ulysses_degree": 4}, A, f"{OF_GRID} 4; leave it out"),
    "text beside a grid": ({"mesh": grid, "ulysses_degree": "2"}, A, f"{OF_GRID} '2'; leave it out"),
    "no memory": ({"mode": "gather", "gather_memory": 0}, A, f"{MEMORY} 0; give an int"),
    "memory as text": ({"mode": "gather", "gather_memory": "1G"}, A, f"{MEMORY} '1G'; give an int"),
    "saves what": (
        {"mode": "ulysses", "save": "remote"},
        ringcp.UnsupportedError,
        "save: expected one of 'auto', 'exchanged', 'local', got 'remote'; choose",
    ),
    "saves by number": (
        {"mode": "ulysses", "save": 1},
        A,
        "save: expected a word, got 1; help(ringcp.attention) lists",
    ),
    "memory of what does not gather": (
        {"mode": "ring", "gather_memory": 1 << 20},
        A,
        "gather_memory: expected None beside mode='ring', which does not gather, got 1048576; pass mode=\"gather\", or",
    ),
    "memory as a flag": ({"mode": "gather", "gather_memory": True}, A, f"{MEMORY} True; give an int"),
}


def resolved(options, mesh):
    made = options.get("mesh")
    return {**options, "mesh": mesh if made is None else made()}


def enter(options, layout):
    """What a call does, as a context."""
    options = dict(options)
    with ringcp.context_parallel(options.pop("mesh"), layout=layout, **options):
        pass


def refuse(mesh, what, odd):
    """On all ranks (odd None) or on one: all raise, nothing is sent, and the next call works."""
    options, kind, words = WRONG[what]
    options, call = resolved(options, mesh), {**make_call(mesh, 13)[0], "mode": "auto"}
    right = {"mesh": options["mesh"]}
    mine = odd is None or mesh.get_local_rank() == odd
    varlen = [call[name][0].transpose(0, 1) for name in "qkv"]
    for run in (
        lambda more: attend({**call, **more}),
        lambda more: ringcp.attention_varlen(*varlen, cu_seqlens=[0, 13], **more),
        lambda more: enter(more, ringcp.HeadTail(13, 4)),
    ):
        with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
            run(options if mine else right)
        assert recorder.steps == []
        text = str(info.value)
        if mine:
            assert type(info.value) is kind
            assert text.startswith(words), text
            assert re.fullmatch(r"[\w, ]+: expected .+, got .+; [^\n]+", text), text
        else:
            assert isinstance(info.value, ringcp.AgreementError)
            assert f"rank {odd} refused its arguments ({words}" in text
        attend({**call, "mesh": options["mesh"]})
    check_exact(mesh, 9)


@pytest.mark.parametrize("what", WRONG)
def test_modes_that_do_not_fit_are_refused(worlds, what):
    worlds(4).run(refuse, what, None)
    worlds(4).run(refuse, what, 2)


def refuse_meshes(mesh):
    q, k, v = (make_call(mesh, 13)[0][name] for name in "qkv")
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("cp", "sp", "tp"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "cp"))
    for wrong, words in (
        (deep, "mesh: expected a mesh of 1 dim, or of the dims ('cp', 'sp'), in this order, got one of 3 dims"),
        (turned, "mesh: expected a mesh of 1 dim, or of the dims ('cp', 'sp'), in this order, got one of 2 dims"),
        (None, "mesh: expected a 1-D or 2-D DeviceMesh, got NoneType; make one with"),
    ):
        for run in (
            lambda wrong=wrong: ringcp.attention(q, k, v, mesh=wrong),
            lambda wrong=wrong: enter({"mesh": wrong}, "auto"),
            lambda wrong=wrong: ringcp.shard(q, wrong, dim=2),
            lambda wrong=wrong: ringcp.make_layout(None, 13, wrong),
        ):
            with pytest.raises(ringcp.LayoutError, match="^" + re.escape(words)):
                run()
    out = ringcp.attention(q, k, v, mesh=deep["cp", "sp"], mask=ringcp.Causal())
    assert torch.equal(out, ringcp.attention(q, k, v, mesh=grid(), mask=ringcp.Causal()))
    check_exact(mesh, 9)


def test_meshes_that_do_not_fit(worlds):
    worlds(4).run(refuse_meshes)


# What rank 2 does otherwise than the others, and what it is told.
DIFFERENT = {
    "mode": ({"mode": "ring"}, {"mode": "gather"}, "mode=gather, not mode=ring"),
    "degree": (
        {"mode": "usp", "ulysses_degree": 2},
        {"mode": "usp", "ulysses_degree": 4},
        "ulysses_degree=4, not ulysses_degree=2",
    ),
    "memory": (
        {"mode": "gather"},
        {"mode": "gather", "gather_memory": 1 << 20},
        "gather_memory=1048576, not gather_memory=None",
    ),
    "save": (
        {"mode": "ulysses", "save": "local"},
        {"mode": "ulysses", "save": "exchanged"},
        "save=exchanged, not save=local",
    ),
    "grid": ({"mesh": grid, "mode": "usp"}, {"mesh": grid, "mode": "gather"}, "mode=gather, not mode=usp"),
}


def differ(mesh, what):
    usual, odd, words = DIFFERENT[what]
    options = resolved(odd if mesh.get_local_rank() == 2 else usual, mesh)
    call = make_call(mesh, 13)[0]
    for run in (lambda: attend({**call, **options}), lambda: enter(options, "auto")):
        with ringcp.record() as recorder, pytest.raises(ringcp.AgreementError) as info:
            run()
        assert recorder.steps == []
        assert f"rank 2 made a different call than rank 0: {words}. Nothing was sent." in str(info.value)
    attend({**call, **resolved(usual, mesh)})


def nodes_of_two_sizes(mesh):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2" if mesh.get_local_rank() < 2 else "1")
        group = new_mesh()
        with (
            pytest.raises(ringcp.AgreementError, match="ranks a node=1, not ranks a node=2"),
            ringcp.context_parallel(group, agree="context"),
        ):
            raise AssertionError("entered")


def test_ranks_that_count_their_nodes_otherwise_are_told_on_entry(worlds):
    """They would choose other modes, in calls that do not vote."""
    worlds(4).run(nodes_of_two_sizes)


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_with_another_mode_is_named(worlds, what):
    worlds(4).run(differ, what)


def die(*_):
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def dying_in_exchange(direction, step):
    swap = exchange._swap

    def dying(part, device, direction_, step_, *args):
        return die() if (direction_, step_) == (direction, step) else swap(part, device, direction_, step_, *args)

    exchange._swap = dying
    try:
        yield
    finally:
        exchange._swap = swap


def survive(mesh, way, place, pattern):
    options = ways(mesh)[way]
    if way == "ulysses" or "usp" in way:
        dying = dying_in_exchange(*place)
    else:
        dying = fail_at(*place, "post", die)
    call = make_call(mesh, 13, requires_grad=True)[0]

    def train():
        attend({**call, **options, "timeout": TIMEOUT_S}).sum().backward()

    train()
    if mesh.get_local_rank() == mesh.size() - 1:
        with dying:
            train()
    error = r": (receiving from|sending to) rank \d: .* of \d+ bytes did not go through within 2 s; the peer died"
    return peer_error(train, mesh, pattern + error)


DEATHS = [
    (2, "ulysses", ("forward", 0), r"call \d+, forward exchange 0"),
    (2, "ulysses", ("forward", 1), r"call \d+, forward exchange 1"),
    (3, "ulysses", ("backward", 0), r"call \d+, backward exchange 0"),
    (2, "gather", ("forward", 0), r"call \d+, forward step 0"),
    (3, "gather by heads", ("backward", 1), r"call \d+, backward step \d"),
    (4, "usp", ("forward", 0), r"call \d+, forward (exchange|step) \d"),
]


@pytest.mark.parametrize(("world_size", "way", "place", "pattern"), DEATHS)
def test_a_peer_that_dies_is_named_with_the_step(worlds, world_size, way, place, pattern):
    results = worlds(world_size).run(survive, way, place, pattern, return_exceptions=True)
    assert isinstance(results[-1], RankLost)
    for said in results[:-1]:
        assert isinstance(said, str), said


def survive_joint(mesh):
    layout = ringcp.Joint(replicated=2, rest=ringcp.HeadTail(6, mesh.size()))
    x = torch.randn(1, 2, layout.local_len(mesh.get_local_rank()), 4, requires_grad=True)
    ringcp.attention(x, x, x, mesh=mesh, layout=layout).sum().backward()
    if mesh.get_local_rank():
        replicas.gather = die
    with pytest.raises(ringcp.PeerError, match=r"rank 0, all-gather: .* within the group's timeout; the peer died"):
        ringcp.attention(x, x, x, mesh=mesh, layout=layout)
    with pytest.raises(ringcp.PeerError, match="was broken by an earlier failure"):
        ringcp.attention(x, x, x, mesh=mesh, layout=layout)
    return "told"


def test_a_peer_that_dies_before_replicated_rows_meet(worlds):
    told, lost = worlds(2).run(survive_joint, return_exceptions=True)
    assert told == "told"
    assert isinstance(lost, RankLost)


def late_for_joint(_):
    mesh = new_mesh()
    layout = ringcp.Joint(replicated=2, rest=ringcp.HeadTail(6, mesh.size()))
    x = torch.randn(1, 2, layout.local_len(mesh.get_local_rank()), 4, requires_grad=True)
    options = {"mesh": mesh, "layout": layout, "timeout": TIMEOUT_S}
    out = ringcp.attention(x, x, x, **options)
    out.sum().backward()
    out = ringcp.attention(x, x, x, **options)
    if mesh.get_local_rank():
        time.sleep(4 * TIMEOUT_S)
        return "late"
    start = time.monotonic()
    said = r"rank 0, all-to-all: .* within 2 s; the peer died, .*, or raise timeout="
    with pytest.raises(ringcp.PeerError, match=said):
        out.sum().backward()
    return time.monotonic() - start


def test_replicated_rows_wait_as_long_as_is_said(worlds):
    seconds, late = worlds(2).run(late_for_joint)
    assert late == "late"
    assert TIMEOUT_S / 2 < seconds < 3 * TIMEOUT_S


def modes_in(mesh, **options):
    """The mode of a context, and whether its attention gathered."""
    call = make_call(mesh if mesh.ndim == 1 else mesh["cp"], 16)[0]
    q = call["q"] if mesh.ndim == 1 else call["q"][:, :, :4]
    with ringcp.context_parallel(mesh, layout=ringcp.HeadTail(16, mesh.size()), **options) as context:
        ringcp.set_rotate_method(None)  # read on entry, and then no more
        with ringcp.record() as recorder:
            F.scaled_dot_product_attention(q, q, q)
    return context.mode, any(step.source is None for step in recorder.steps)


def rotate(mesh):
    for method, on, options, expected in (
        (None, mesh, {}, ("auto", False)),
        ("allgather", mesh, {}, ("gather", True)),
        ("alltoall", mesh, {}, ("ring", False)),
        ("allgather", mesh, {"mode": "ring"}, ("ring", False)),
        ("alltoall", mesh, {"mode": "gather"}, ("gather", True)),
        ("alltoall", mesh, {"mode": "ulysses"}, ("ulysses", False)),
        ("alltoall", mesh, {"ulysses_degree": 2}, ("usp", False)),
        ("alltoall", grid(), {}, ("usp", False)),
        ("allgather", grid(), {}, ("gather", True)),
        (None, grid(), {}, ("auto", False)),
    ):
        ringcp.set_rotate_method(method)
        assert modes_in(on, **options) == expected, (method, options)
    ringcp.set_rotate_method("allgather")
    assert in_thread(lambda: modes_in(mesh)) == ("auto", False)  # of this thread only
    assert modes_in(mesh) == ("gather", True)
    ringcp.set_rotate_method("alltoall" if mesh.get_local_rank() == 1 else "allgather")
    with pytest.raises(
        ringcp.AgreementError, match=r"rank 1 made a different call than rank 0: mode=ring, not mode=gath"
    ):
        enter({"mesh": mesh}, "auto")
    with pytest.raises(
        ringcp.UnsupportedError, match=r"^rotate_method: expected 'allgather', 'alltoall' or None, got 'al"
    ):
        ringcp.set_rotate_method("all-gather")
    ringcp.set_rotate_method(None)


def test_the_rotate_method_is_what_auto_means_on_entry(worlds):
    worlds(4).run(rotate)
