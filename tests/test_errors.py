"""What people meet: one sentence that says the argument, what was expected, what came, and what to do."""

import re
import subprocess
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from calls import attend, check_exact, each, make_call
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringcp

BUILT_IN = {
    ringcp.ArgumentError: ValueError,
    ringcp.LayoutError: ValueError,
    ringcp.KeywordError: TypeError,
    ringcp.UnsupportedError: NotImplementedError,
    ringcp.AgreementError: RuntimeError,
    ringcp.PeerError: RuntimeError,
}


def assert_readable(error, kind, words):
    """One sentence (or two with a colon's worth of reasons): argument, expected, got, and a fix behind them."""
    assert type(error) is kind, repr(error)
    assert isinstance(error, (ringcp.RingcpError, BUILT_IN[kind]))
    assert isinstance(error, BUILT_IN[kind])
    text = str(error)
    assert "\n" not in text
    for word in words:
        assert word in text, f"{word!r} is missing in: {text}"
    if issubclass(kind, ringcp.ArgumentError):
        # "argument: expected ..., got ...; fix"
        assert re.match(r"[\w, ]+: expected .+, got .+; .+", text), text


def option(**options):
    return lambda call: options


A, K, L, U = ringcp.ArgumentError, ringcp.KeywordError, ringcp.LayoutError, ringcp.UnsupportedError
# By case: the changes to a valid call on the only rank of a mesh (q 4 heads, k and v 2, 9 tokens, head dim 8), the
# class, and words of the message. Where ranks differ is `test_agreement`'s.
CALLS = {
    "no mesh": (option(mesh=None), L, ["mesh", "DeviceMesh", "got NoneType", "init_device_mesh"]),
    "3 dims": (each(lambda x: x[0]), A, ["q, k, v", "4 dims (batch, heads,", "q (4, 9, 8), k (2, 9, 8)", "add"]),
    "5 dims": (each(lambda x: x[None]), A, ["4 dims", "q (1, 2, 4, 9, 8)"]),
    "q and kv dtypes": (
        each(torch.Tensor.half, "q"),
        A,
        ["one dtype", "torch.float16, torch.float64", "torch.autocast"],
    ),
    "v dtype": (each(torch.Tensor.float, "v"), A, ["one dtype", "torch.float64, torch.float64, torch.float32"]),
    "integers": (each(torch.Tensor.long), A, ["q, k, v", "a floating dtype", "torch.int64", "cast"]),
    "fp8": (
        each(lambda x: x.to(torch.float8_e4m3fn)),
        U,
        ["float8_e4m3fn is not float16 or bfloat16 or float32 or float64", "floating dtype"],
    ),
    "no head dim": (each(lambda x: x[..., :0]), A, ["head dims of at least 1 in dim 3", "q (2, 4, 9, 0)"]),
    "no value dim": (each(lambda x: x[..., :0], "v"), A, ["head dims of at least 1", "v (2, 2, 9, 0)"]),
    "numpy": (each(torch.Tensor.numpy, "q"), A, ["q: expected a tensor, got ndarray", "local shard"]),
    "list": (each(torch.Tensor.tolist, "v"), A, ["v: expected a tensor, got list"]),
    "meta": (each(lambda x: x.to("meta"), "k"), U, ["k: expected a CPU or CUDA tensor, got one on meta"]),
    "is_causal": (option(is_causal=True), K, ["got is_causal=True; pass mask=ringcp.Causal()"]),
    "attn_mask": (
        option(attn_mask=torch.ones(9, 9)),
        K,
        ["got attn_mask=a tensor (9, 9) of torch.float32; pass mask="],
    ),
    "dropout_p": (option(dropout_p=1.0), A, ["dropout_p: expected a number from 0 to below 1, got 1.0; pass 0.0"]),
    "dropout with a kernel that has none": (
        option(dropout_p=0.1),
        U,
        ["kernel='auto': expected a kernel that can do", "dropout", "sdpa_flash_cpu: no dropout", "asked for by name"],
    ),
    "softcap": (option(softcap=0.0), A, ["softcap: expected a positive number or None, got 0.0; pass None"]),
    "alibi_slopes": (
        option(alibi_slopes=torch.ones(2, 2)),
        A,
        [
            "alibi_slopes: expected a float32 tensor",
            "(4,) or (2, 4), or None",
            "a tensor (2, 2)",
            "pass slopes of shape",
        ],
    ),
    "sinks": (option(sinks=torch.ones(3)), A, ["sinks: expected a floating tensor", "each query head, (4,)", "(3,)"]),
    "enable_gqa": (option(enable_gqa=True), K, ["got enable_gqa=True; leave it out: the head counts say it"]),
    "group": (option(group=None), K, ["got group=None; pass mesh=", "DeviceMesh.from_group"]),
    "causal": (option(causal=True), K, ["got causal=True; pass mask=ringcp.Causal()"]),
    "window_size": (option(window_size=(3, 0)), K, ["got window_size=(3, 0); pass mask=ringcp.Window(left, right)"]),
    "softmax_scale": (option(softmax_scale=1.0), K, ["got softmax_scale=1.0; pass scale="]),
    "cu_seqlens": (option(cu_seqlens=[0, 9]), K, ["got cu_seqlens=[0, 9]; pass mask=ringcp.Documents(cu_seqlens"]),
    "deterministic": (option(deterministic=True), K, ["deterministic: ", "leave it out; help(ringcp.attention)"]),
    "batches": (
        each(lambda x: x[:1], "k"),
        A,
        ["equal batch sizes in dim 0", "q (2, 4, 9, 8), k (1, 2, 9, 8)", "expand"],
    ),
    "heads of k and v": (
        each(lambda x: x[:, :1], "k"),
        A,
        ["k, v", "equal head counts in dim 1", "k (2, 1, 9, 8), v (2, 2,"],
    ),
    "heads that do not divide": (
        each(lambda x: x[:, :3], "q"),
        A,
        ["q, k", "multiple of the key heads", "got 3 and 2", "repeat"],
    ),
    "no heads": (each(lambda x: x[:, :0], "kv"), A, ["multiple of the key heads", "got 4 and 0"]),
    "head dims": (each(lambda x: x[..., :4], "k"), A, ["q, k", "equal head dims in dim 3", "k (2, 2, 9, 4)", "pad"]),
    "lengths": (
        each(lambda x: x[:, :, :5], "kv"),
        L,
        ["equal local lengths in dim 2", "k (2, 2, 5, 8)", "one layout", "a KV cache"],
    ),
    "shard that does not fit": (
        option(layout=ringcp.Striped(10, 1)),
        L,
        ["q, k, v", "local lengths in dim 2", "Striped(10, 1)", "9 on rank 0 instead of 10", "ringcp.shard"],
    ),
    "shard that does not fit seq_len": (option(seq_len=8), L, ["HeadTail(8, 1)", "9 on rank 0 instead of 8"]),
    "layout of another world": (
        option(layout=ringcp.HeadTail(9, 4)),
        L,
        ["layout", "the 1 ranks of mesh", "for 4", "mesh.size()"],
    ),
    "seq_len beside a layout": (
        option(layout=ringcp.HeadTail(9, 1), seq_len=8),
        L,
        ["seq_len", "the layout's 9", "got 8", "give one of them"],
    ),
    "seq_len": (option(seq_len="9"), A, ["seq_len", "an integer or None", "got '9'", "whole sequence"]),
    "layout name": (
        option(layout="zigzag"),
        L,
        ["layout", "one of contiguous, head_tail, striped, auto", "got 'zigzag'", "choose"],
    ),
    "layout type": (
        option(layout=torch.arange(9)),
        L,
        ["layout", "a Layout or one of", "got a tensor (9,) of torch.int64"],
    ),
    "mask tensor": (
        option(mask=torch.ones(9, 9).bool()),
        A,
        ["mask", "a ringcp mask or None", "ringcp.Causal()"],
    ),
    "mask flag": (option(mask=True), A, ["mask", "got True"]),
    "mask class": (option(mask=ringcp.Causal), A, ["mask", "got ringcp.Causal, not called; write ringcp.Causal(...)"]),
    "mode": (option(mode="rings"), U, ["mode", "expected one of 'auto', 'ring'", "got 'rings'", "choose"]),
    "mode without its degree": (option(mode="usp"), A, ["ulysses_degree", "got None", "2-D mesh"]),
    "mode type": (option(mode=None), A, ["mode", "expected a word", "got None"]),
    "agree": (option(agree="never"), U, ["agree", "'call', 'context'", "got 'never'", "choose"]),
    "agree type": (option(agree=True), A, ["agree", "expected a word", "got True"]),
    "kernel": (
        option(kernel="flash9"),
        U,
        ["kernel='flash9'", "expected one of auto, flash3, flash4, flash2, sdpa, flex, reference", 'kernel="auto"'],
    ),
    "kernel type": (option(kernel=torch.matmul), A, ["kernel", "expected a word"]),
    "kernel that cannot": (
        option(kernel="sdpa_flash"),
        U,
        ["kernel='sdpa_flash'", "a kernel that can do cpu", "head_dim 8", "sdpa_flash: ", 'kernel="reference"'],
    ),
    "scale": (option(scale="1"), A, ["scale", "a number or None", "got '1'", "float(scale)"]),
    "scale of nan": (option(scale=float("nan")), A, ["scale", "a finite number or None", "got nan"]),
    "scale of inf": (option(scale=float("-inf")), A, ["scale", "a finite number or None", "got -inf"]),
    "scale flag": (option(scale=True), A, ["scale", "a number or None", "got True"]),
    "scale tensor": (
        option(scale=torch.tensor(1.0)),
        A,
        ["a number or None", "got a tensor () of torch.float32"],
    ),
    "timeout": (option(timeout="1 s"), A, ["timeout", "expected seconds", "got '1 s'"]),
    "timeout below zero": (option(timeout=-1), A, ["timeout", "got -1"]),
    "timeout of no time": (option(timeout=timedelta(0)), A, ["timeout", "got "]),
    "timeout of 0": (option(timeout=0), A, ["timeout", "seconds above 0 and below 2592000", "got 0"]),
    "timeout of inf": (option(timeout=float("inf")), A, ["timeout", "got inf"]),
    "timeout that is too long": (option(timeout=1e18), A, ["timeout", "got 1e+18"]),
    "timeout flag": (option(timeout=True), A, ["timeout", "got True"]),
    "timeout that is no number": (option(timeout=float("nan")), A, ["timeout", "got nan"]),
}


def run_call(mesh, name):
    call, *_ = make_call(mesh, 9)
    change, kind, words = CALLS[name]
    with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
        attend({**call, **change(call)})
    assert recorder.steps == []
    assert_readable(info.value, kind, words)
    check_exact(mesh, 9)


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused(worlds, name):
    worlds(1).run(run_call, name)


def every_kernel_refuses(mesh):
    call, *_ = make_call(mesh, 9)
    with sdpa_kernel([SDPBackend.MATH]), pytest.raises(ringcp.UnsupportedError) as info:
        attend({**call, "kernel": "sdpa"})
    words = [
        "kernel='sdpa'",
        "expected a kernel that can do cpu",
        "flash is disabled by sdpa_kernel",
        'kernel="reference"',
    ]
    words += ["sdpa_flash: ", "sdpa_cudnn: ", "sdpa_efficient: ", "sdpa_flash_cpu: "]
    assert_readable(info.value, ringcp.UnsupportedError, words)


def test_when_no_kernel_is_left_all_reasons_are_given(worlds):
    worlds(1).run(every_kernel_refuses)


def unknown_keyword(mesh):
    call, *_ = make_call(mesh, 9)
    for name in ("is_causal", "attn_mask", "dropout", "enable_gqa", "softmax_scale", "window_size"):
        with pytest.raises(ringcp.KeywordError, match=f"^{name}: expected an argument of ringcp.attention") as info:
            attend({**call, name: None})
        assert isinstance(info.value, ringcp.ArgumentError)
        assert isinstance(info.value, TypeError)
        assert isinstance(info.value, ValueError)
    with pytest.raises(TypeError, match="positional"):
        ringcp.attention(call["q"], call["k"], call["v"], mesh)
    with pytest.raises(TypeError, match="mesh"):
        ringcp.attention(call["q"], call["k"], call["v"])


def test_unknown_keywords_are_not_swallowed(worlds):
    worlds(1).run(unknown_keyword)


def meshes(mesh):
    call, *_ = make_call(mesh, 9)
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    unnamed = init_device_mesh("cpu", (2, 1))
    wrong = [
        (square, ["mesh of 1 dim", "or of the dims ('cp', 'sp')", "2 dims ('dp', 'cp')", 'mesh["cp"]']),
        (unnamed, ["mesh of 1 dim", "2 dims None"]),
        (mesh.get_group(), ["DeviceMesh", "got ProcessGroup", "DeviceMesh.from_group"]),
        ("cp", ["DeviceMesh", "got str"]),
    ]
    for value, words in wrong:
        with pytest.raises(ringcp.LayoutError) as info:
            attend({**call, "mesh": value})
        assert_readable(info.value, ringcp.LayoutError, ["mesh", *words])
    check_exact(mesh, 9)
    check_exact(square["cp"], 9)


@pytest.mark.report("1.75", raises=True)
def test_meshes_that_are_refused(worlds):
    worlds(2).run(meshes)


def left_out(mesh):
    call, *_ = make_call(mesh, 9)
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    if mesh.get_local_rank() < 2:
        check_exact(pair, 9)
        return
    with pytest.raises(ringcp.LayoutError) as info:
        attend({**call, "mesh": pair})
    assert_readable(info.value, ringcp.LayoutError, ["mesh", "this rank is part of", "call on its ranks only"])


def test_a_rank_that_the_mesh_leaves_out(worlds):
    worlds(3).run(left_out)


NO_GROUP = """
import torch, ringcp
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

x = torch.ones(1, 1, 4, 2)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
ringcp.attention(x, x, x, mesh=mesh)
dist.destroy_process_group()
try:
    ringcp.attention(x, x, x, mesh=mesh)
except ringcp.LayoutError as error:
    print(error)
"""


def test_no_process_group():
    done = subprocess.run([sys.executable, "-c", NO_GROUP], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert_readable(ringcp.LayoutError(done.stdout.strip()), ringcp.LayoutError, ["mesh", "process group", "init"])


def keys_of_a_cache(mesh):
    k = torch.ones(1, 2, 9, 8)
    with ringcp.context_parallel(mesh, buffers=[k], buffer_seq_dims=[2]):
        F.scaled_dot_product_attention(k, k, k)
        with pytest.raises(ringcp.LayoutError) as info:
            F.scaled_dot_product_attention(k[:, :, :1], k, k)
        assert_readable(info.value, ringcp.LayoutError, ["got 1, 9 and 9", "a KV cache is not supported"])
        with pytest.raises(ringcp.LayoutError) as info:
            F.scaled_dot_product_attention(*[k[:, :, :3]] * 3)
        assert "KV cache" not in str(info.value)


def test_a_query_beside_the_keys_of_a_cache(worlds):
    worlds(1).run(keys_of_a_cache)


def casts(mesh):
    call, *_ = make_call(mesh, 9, dtype=torch.float32)
    call["v"] = call["v"].bfloat16()
    with pytest.raises(ringcp.ArgumentError) as info:
        attend(call)
    assert_readable(
        info.value, ringcp.ArgumentError, ["torch.float32, torch.float32, torch.bfloat16", "torch.autocast"]
    )
    with torch.autocast("cpu", torch.bfloat16):  # the message's advice works
        assert attend(call).dtype == torch.bfloat16


def test_the_hint_at_autocast_is_good(worlds):
    worlds(1).run(casts)


def refused_transforms(mesh):
    call, *_ = make_call(mesh, 9)
    rest = {name: value for name, value in call.items() if name != "q"}
    q = call["q"]

    def attention(x):
        return attend({**rest, "q": x})

    def with_dual_numbers():
        with forward_ad.dual_level():
            attention(forward_ad.make_dual(q, q))

    transforms = {
        "vmap": lambda: torch.vmap(attention)(q[None]),
        "grad": lambda: torch.func.grad(lambda x: attention(x).sum())(q),
        "vjp": lambda: torch.func.vjp(attention, q),
        "jvp": lambda: torch.func.jvp(attention, (q,), (q,)),
        "jacrev": lambda: torch.func.jacrev(attention)(q),
        "forward mode": with_dual_numbers,
    }
    errors = {}
    for name, run in transforms.items():
        # torch keeps its rules for jvp as scripts, and warns of them when it first needs one.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
            with pytest.raises(Exception) as info:
                run()
        errors[name] = type(info.value).__name__, str(info.value)
    check_exact(mesh, 9)
    return errors


def test_function_transforms(worlds):
    (errors,) = worlds(1).run(refused_transforms)
    for name, (kind, text) in errors.items():
        assert kind == "UnsupportedError", (name, kind, text)
        assert re.match(r"[\w.: -]+ringcp.attention .+, got .+; .+", text), (name, text)


def double_backward(mesh):
    call, *_ = make_call(mesh, 9, requires_grad=True)
    q = call["q"]
    (dq,) = torch.autograd.grad(attend(call).square().sum(), q, create_graph=True)
    with pytest.raises(ringcp.UnsupportedError) as info:
        torch.autograd.grad(dq.sum(), q)
    check_exact(mesh, 9)
    return str(info.value)


def test_double_backward(worlds):
    for text in worlds(2).run(double_backward):
        assert "double backward: ringcp.attention is differentiable once, got" in text
        assert "; call backward without create_graph=True" in text
