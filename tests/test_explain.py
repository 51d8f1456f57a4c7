"""`ringcp.explain`: what it returns and prints, that its bytes are those of the plans, and what it refuses."""

import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringcp
from ringcp import ArgumentError, Causal, Documents, Full, Padding, Prefix, Window
from ringcp.balance import choose_layout
from ringcp.explain import Explanation
from ringcp.groups import neighbours
from ringcp.modes import Traffic, Weight, most, rows_bytes, whole_blocks
from ringcp.schedule import build
from ringcp.topology import ring

LLAMA = {"q_heads": 32, "kv_heads": 8, "seq_len": 32768, "world_size": 8}
SMALL = {"q_heads": 4, "kv_heads": 2, "seq_len": 61, "head_dim": 3, "batch": 2, "dtype": torch.float32}


def explained(**arguments):
    return ringcp.explain(**{**LLAMA, **arguments})


def test_it_prints_what_it_returns(capsys):
    explanation = explained(world_size=16, ranks_per_node=8, mask=Causal(), device="cuda", seq_len=131072)
    assert isinstance(explanation, Explanation)
    printed = capsys.readouterr().out
    assert printed == f"{explanation}\n"
    lines = printed.splitlines()
    assert lines[0] == (
        "16 ranks, 8 a node, on cuda: Causal() over 131,072 tokens, batch 1, "
        "32 query heads and 8 key heads of 128, bfloat16"
    )
    assert lines[1] == f"usp: {explanation.choice.why}"
    assert "8 ranks divide 32 query and 8 key heads" in lines[1]
    assert lines[2].startswith("sent by the rank that sends most, in one call")
    head, *table = lines[3:8]
    assert re.split(r"\s\s+", head.strip()) == [
        "mode",
        "exchange",
        "forward MB",
        "backward MB",
        "together MB",
        "same bits",
    ]
    assert [line.split()[:2] for line in table] == [["ring", "1"], ["gather", "1"], ["ulysses", "16"], ["*", "usp"]]
    # 15 blocks of 8,192 rows, keys and values, 8 heads of 128, two bytes; their sums in fp32 beside them in backward.
    assert table[0].split()[2:] == ["503.316", "1,509.949", "2,013.266", "none", "known"]
    ends = [
        line.index(cell) + len(cell)
        for line, cell in zip([head, *table], ["forward MB", "503.316", "503.316", "189.727", "181.273"], strict=True)
    ]
    assert len(set(ends)) == 1
    assert lines[8] == "not taken:"
    assert [line.split(":")[0] for line in lines[9:]] == ["  ring", "  gather", "  ulysses"]
    assert len(lines) == 12
    assert "usp" in repr(explanation)
    assert "\n" not in repr(explanation)


def needed_by(layout, mask, batch):
    """For each rank, how many rows of each other its queries attend to, from the mask written out."""
    ranks = range(layout.world_size)
    positions = [layout.positions(rank) for rank in ranks]

    def needed(rank, source):
        allowed = mask.dense(positions[rank], positions[source]).reshape(
            -1, len(positions[rank]), len(positions[source])
        )
        assert allowed.shape[0] in (1, batch)
        return int(allowed.any(0).any(0).sum()) if rank != source else 0

    return [[needed(rank, source) for source in ranks] for rank in ranks]


MASKS = [
    Full(),
    Causal(),
    Window(3),
    Window(30, 2),
    Documents([20, 7, 3, 31]),
    Documents([[20, 7], [9, 50]]) & Causal(),
    Prefix([3, 20]),
    Padding([30, 12]),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_bytes_of_a_gather_are_those_of_the_rows_that_are_needed(mask, size):
    explanation = ringcp.explain(**SMALL, world_size=size, mask=mask)
    layout = choose_layout(mask, 61, size)
    needed = needed_by(layout, mask, 2)
    row = 2 * 2 * (3 + 3) * 4
    lent = [sum(of[rank] for of in needed) for rank in range(size)]
    fetched = [sum(of) for of in needed]
    assert explanation.bytes_sent["gather"] == Traffic(
        max(lent) * row, max(a + b for a, b in zip(lent, fetched, strict=True)) * row
    )
    if build(layout, mask, ring(size), 0).kind == "direct":
        assert explanation.bytes_sent["ring"] == explanation.bytes_sent["gather"]
    else:
        whole = whole_blocks([layout.local_len(rank) for rank in range(size)])
        assert explanation.bytes_sent["ring"] == most(rows_bytes(whole, Weight(4, 2, 3, 4, 2)))


def test_bytes_of_every_mode():
    """12 tokens on 4 ranks, full attention, one key head of 1: everything can be counted by hand."""
    sent = ringcp.explain(q_heads=2, kv_heads=1, seq_len=12, world_size=4, head_dim=1, dtype=torch.bfloat16).bytes_sent
    assert list(sent) == ["ring", "gather", "ulysses", "usp"]
    # 9 rows of K and V of 2 bytes; then again, and their sums of 4.
    assert sent["ring"] == sent["gather"] == Traffic(9 * 4, 9 * 4 + 9 * 8)
    # Heads lie on ranks 1 and 3. There 3 tokens to both, or to the other one, q and KV (2 + 4 bytes) each; back, by a
    # rank with a head, 9 tokens of out and lse (2 + 4).
    assert sent["ulysses"].forward == 3 * 6 + 9 * 6
    # There dout (2), back dq and sums (2 + 8).
    assert sent["ulysses"].backward == 3 * 2 + 9 * 10
    # In pairs of 3 + 3 tokens one query head each: there q and KV, back out and lse; and a ring of 2 with 6 rows.
    assert sent["usp"].forward == 3 * 6 + 3 * 6 + 6 * 4
    assert sent["usp"].backward == 3 * 2 + 3 * 10 + 6 * 4 + 6 * 8


def test_dtypes_and_batch():
    def total(**arguments):
        return {mode: sent.total for mode, sent in explained(seq_len=1024, **arguments).bytes_sent.items()}

    one = total(dtype=torch.float32)
    assert total(dtype=torch.float32, batch=3) == {mode: 3 * n for mode, n in one.items()}
    assert total(dtype=torch.float64) == {mode: 2 * n for mode, n in one.items()}
    assert total(dtype=torch.float16) == total(dtype=torch.bfloat16)
    assert total()["ring"] * 3 == one["ring"] * 2  # the sums are fp32 in both


def test_which_modes_there_are():
    assert "usp" not in explained(world_size=7).bytes_sent
    assert explained(world_size=7).reasons["usp"] == "nothing lies between exchanges of 1 and of all of 7 ranks"
    assert explained(world_size=12, ranks_per_node=6, kv_heads=4).degrees["usp"] == 2  # the one that is chosen
    assert explained(world_size=12, ranks_per_node=6, kv_heads=1, q_heads=1).degrees["usp"] == 6
    assert explained(world_size=12, ranks_per_node=1).degrees["usp"] == 6
    for world_size in range(1, 13):
        found = explained(world_size=world_size, seq_len=50)
        assert set(found.reasons) == {"ring", "gather", "ulysses", "usp"}
        assert all(found.reasons.values())
        assert found.choice.mode in found.bytes_sent
        assert found.reasons[found.choice.mode] == found.choice.why
        assert set(found.bytes_sent) == set(found.degrees) == set(found.same_bits)


def test_fewer_tokens_than_ranks():
    found = {n: explained(seq_len=n, ulysses_degree=4) for n in (0, 1, 5)}
    assert {f.choice.mode for f in found.values()} == {"usp"}
    sends = {n: {mode for mode, sent in f.bytes_sent.items() if sent.total} for n, f in found.items()}
    # One token's owner has all keys that its queries need, but not all heads.
    assert sends == {0: set(), 1: {"ulysses", "usp"}, 5: {"ring", "gather", "ulysses", "usp"}}


EVERYTHING = ("out", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize(
    ("arguments", "mode", "names"),
    [
        ({"dtype": torch.float32}, "ulysses", EVERYTHING),
        ({"dtype": torch.bfloat16}, "ulysses", EVERYTHING),
        ({"dtype": torch.float16}, "ulysses", ()),
        ({"dtype": torch.float64, "seq_len": 64}, "ulysses", EVERYTHING),
        ({"dtype": torch.float64, "seq_len": 63}, "ulysses", ()),
        ({"device": "cuda"}, "ulysses", ()),
        ({"mask": Documents([5000, 7]) & Causal()}, "ulysses", EVERYTHING),
        ({"kv_heads": 4}, "ulysses", EVERYTHING[:3]),
        ({"seq_len": 2048}, "gather", ("out", "dq")),
        ({"seq_len": 2048, "mask": Full()}, "gather", ("out", "dq")),
        ({"seq_len": 2048, "mask": Causal()}, "gather", ()),
        ({"seq_len": 2048, "dtype": torch.float64}, "gather", ()),
        ({"seq_len": 2048, "device": "cuda"}, "gather", ()),
        ({"seq_len": 2050}, "gather", ()),
        ({}, "ring", ()),
        ({}, "usp", ()),
        ({"world_size": 1, "device": "cuda"}, "ring", EVERYTHING),
    ],
)  # fmt: skip
def test_which_bits_are_those_of_one_process(arguments, mode, names, capsys):
    found = explained(**arguments)
    assert found.same_bits[mode] == names
    (line,) = (line for line in capsys.readouterr().out.splitlines() if re.match(rf"\*?\s+{mode} ", line))
    assert line.endswith(", ".join(names) or "none known")


# Meshes --------------------------------------------------------------------------------------------------------------


def explain_meshes(mesh, monkeypatched):
    call = {"q_heads": 8, "kv_heads": 4, "seq_len": 64}
    for name, value in monkeypatched.items():
        assert name == "LOCAL_WORLD_SIZE"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            assert ringcp.explain(**call, mesh=mesh).choice.mode == "usp"
            assert ringcp.explain(**call, mesh=mesh).choice.ulysses_degree == 2
            assert ringcp.explain(**call, mesh=mesh, ranks_per_node=4).choice.mode == "ulysses"
            assert neighbours([0, 2, 1, 3]) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert ringcp.explain(**call, mesh=mesh).choice.mode == "ulysses"
        patch.setenv("LOCAL_WORLD_SIZE", "0")
        assert neighbours(range(4)) == 4
    usp = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("cp", "sp"))
    for arguments in ({}, {"ulysses_degree": 2}):
        found = ringcp.explain(**call, mesh=usp, **arguments)
        assert (found.choice.mode, found.choice.ulysses_degree) == ("usp", 2)
        assert found.heading.startswith("4 ranks, 4 a node, on cpu: Full() over 64 tokens")
    refusals = [
        (
            {"mesh": usp, "ulysses_degree": 4},
            r"^ulysses_degree: expected 2, the mesh's second axis, got 4; leave it out$",
        ),
        (
            {"mesh": usp, "ulysses_degree": "2"},
            "^ulysses_degree: expected an integer of at least 1, got '2'; give an int$",
        ),
        ({"mesh": mesh, "world_size": 4}, "^mesh, world_size: expected exactly one of them, got both; give one$"),
        (
            {"mesh": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))},
            r"^mesh: expected a mesh of 1 dim, or of the dims \('cp', 'sp'\), .*, got 2 dims \('dp', 'cp'\); .+",
        ),
        (
            {"mesh": DeviceMesh("cpu", [[[0, 1]], [[2, 3]]])},
            "^mesh: expected a mesh of 1 dim, .+, got 3 dims None; take .+",
        ),
    ]
    for arguments, message in refusals:
        with pytest.raises(ArgumentError, match=message):
            ringcp.explain(**call, **arguments)


def test_of_a_mesh(worlds):
    worlds(4).run(explain_meshes, {"LOCAL_WORLD_SIZE": "2"})


# Refusals ------------------------------------------------------------------------------------------------------------

AT_LEAST_1 = "expected an integer of at least 1"
FLOATING = "expected one of torch.bfloat16, torch.float16, torch.float32, torch.float64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_heads": 0}, f"q_heads: {AT_LEAST_1}, got 0; give an int"),
        ({"kv_heads": True}, f"kv_heads: {AT_LEAST_1}, got True; give an int"),
        (
            {"q_heads": 30},
            "q_heads, kv_heads: expected query heads that are a multiple of the key heads, got 30 and 8; "
            "give those of the model",
        ),
        ({"seq_len": -1}, "seq_len: expected an integer of at least 0, got -1; give an int"),
        ({"seq_len": 8.0}, "seq_len: expected an integer of at least 0, got 8.0; give an int"),
        ({"head_dim": 0}, f"head_dim: {AT_LEAST_1}, got 0; give an int"),
        ({"batch": torch.ones(2)}, f"batch: {AT_LEAST_1}, got a tensor (2,) of torch.float32; give an int"),
        ({"world_size": None}, "mesh, world_size: expected exactly one of them, got neither; give one"),
        ({"world_size": 0}, f"world_size: {AT_LEAST_1}, got 0; give an int"),
        (
            {"world_size": None, "mesh": 8},
            "mesh: expected a DeviceMesh, got 8; make one with init_device_mesh, or pass world_size=",
        ),
        ({"ranks_per_node": 0}, f"ranks_per_node: {AT_LEAST_1}, got 0; give an int"),
        (
            {"ranks_per_node": 3},
            "ranks_per_node: expected a divisor of the 8 ranks, or at least as many, got 3; "
            "give the neighbours that always share a node",
        ),
        ({"ulysses_degree": 3}, "ulysses_degree: expected a divisor of the 8 ranks, got 3; choose one of 1, 2, 4, 8"),
        ({"ulysses_degree": 0}, f"ulysses_degree: {AT_LEAST_1}, got 0; give an int"),
        ({"device": "tpu"}, "device: expected 'cpu' or 'cuda', got 'tpu'; choose one of these"),
        ({"device": 3}, "device: expected 'cpu' or 'cuda', got 3; choose one of these"),
        ({"dtype": torch.int64}, f"dtype: {FLOATING}, got torch.int64; choose one"),
        ({"dtype": "bf16"}, f"dtype: {FLOATING}, got 'bf16'; choose one"),
        (
            {"mask": Causal},
            "mask: expected a ringcp mask or None, got ringcp.Causal, not called; write ringcp.Causal(...)",
        ),
        ({"mask": "causal"}, "mask: expected a ringcp mask or None, got 'causal'; build one, such as ringcp.Causal()"),
        (
            {"mask": Padding([3, 4])},
            "mask: expected one entry for each of 1 batch rows, or one for all, got 2 in Padding([[0, 3], [0, 4]]); "
            "give what this batch holds",
        ),
        (
            {"mask": Prefix(40000)},
            "mask: expected a prefix of at most 32768 tokens, got 40000 in Prefix(40000); give what this batch holds",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message, capsys):
    with pytest.raises(ArgumentError) as caught:
        explained(**arguments)
    assert str(caught.value) == message
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 1), torch.device("cuda")])
def test_devices_with_a_number(device):
    assert " on cuda: " in explained(device=device).heading


def test_more_ranks_a_node_than_ranks():
    assert explained(ranks_per_node=64).heading.startswith("8 ranks, 8 a node, ")
