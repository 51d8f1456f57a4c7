"""The choice of a kernel: refusals, switches, messages. No GPU is needed: the questions to one are answered here."""

import dataclasses
import logging

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringcp.errors import RingcpError, UnsupportedError
from ringcp.kernels import flex, registry
from ringcp.kernels.base import Problem
from ringcp.kernels.registry import KERNELS, choose, kernel_at, kernel_index

CPU = Problem(
    device=torch.device("cpu"),
    dtype=torch.float32,
    head_dim=64,
    value_dim=64,
    q_heads=8,
    kv_heads=2,
    scale=0.125,
    needs_band=True,
    needs_grad=True,
    needs_lse_grad=False,
)
GPU = dataclasses.replace(CPU, device=torch.device("cuda:0"), dtype=torch.bfloat16)


def cpu(**changes):
    return dataclasses.replace(CPU, **changes)


def gpu(**changes):
    return dataclasses.replace(GPU, **changes)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """An H100 with a full build of torch, and triton."""
    monkeypatch.setattr(flex, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(torch.version, "hip", None)


def test_names_are_unique_and_codes_go_both_ways():
    packages = ["flash3", "flash4", "flash2"]
    torchs = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "sdpa_flash_cpu", "reference"]
    assert list(KERNELS) == [*packages, *torchs]
    assert list(registry.FAMILIES) == [*packages, "sdpa", "flex", "reference"]
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        assert kernel_at(kernel_index(name)) is kernel


def test_the_registry_cannot_be_written():
    with pytest.raises(TypeError):
        KERNELS["mine"] = KERNELS["reference"]
    for kernel in KERNELS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            kernel.name = "other"


@pytest.mark.parametrize(
    "kernel, problem, want",
    [
        ("auto", cpu(), "sdpa_flash_cpu"),
        ("auto", cpu(dtype=torch.float64, needs_lse_grad=True), "sdpa_flash_cpu"),
        ("auto", cpu(value_dim=48, dtype=torch.float16), "sdpa_flash_cpu"),
        ("auto", cpu(device=torch.device("meta")), "reference"),
        ("sdpa", cpu(), "sdpa_flash_cpu"),
        ("reference", cpu(), "reference"),
        ("sdpa_flash_cpu", cpu(), "sdpa_flash_cpu"),
        ("auto", gpu(), "sdpa_flash"),
        ("auto", gpu(head_dim=100, value_dim=128), "sdpa_flash"),
        ("auto", gpu(dtype=torch.float32), "sdpa_efficient"),
        ("auto", gpu(dtype=torch.float64), "reference"),
        ("auto", gpu(head_dim=264), "sdpa_efficient"),
        ("auto", gpu(head_dim=256, needs_lse_grad=True), "sdpa_efficient"),
        ("auto", gpu(head_dim=254, needs_lse_grad=True), "sdpa_flash"),
        ("auto", gpu(head_dim=256, needs_lse_grad=True, needs_grad=False), "sdpa_flash"),
        ("sdpa_cudnn", gpu(needs_band=False), "sdpa_cudnn"),
        ("sdpa_cudnn", gpu(needs_band=False, head_dim=120, value_dim=126, needs_lse_grad=True), "sdpa_cudnn"),
        ("sdpa", gpu(deterministic=True), "sdpa_flash"),
        ("reference", gpu(dtype=torch.float16), "reference"),
        ("auto", cpu(scale=0.0), "reference"),
        ("auto", gpu(scale=-0.5), "reference"),
        ("auto", cpu(softcap=30.0), "reference"),
        ("auto", gpu(softcap=30.0), "flex"),
        ("auto", gpu(softcap=30.0, dtype=torch.float64), "reference"),
        ("auto", cpu(alibi=True), "sdpa_flash_cpu"),
        ("auto", gpu(alibi=True), "flex"),
        ("auto", cpu(explicit=True), "sdpa_flash_cpu"),
        ("auto", gpu(explicit=True), "flex"),
        ("auto", gpu(explicit=True, dtype=torch.float32, head_dim=8), "flex"),
        ("auto", gpu(explicit=True, head_dim=512), "reference"),
        ("flex", gpu(dtype=torch.float32), "flex"),
        ("reference", gpu(dropout=True), "reference"),
    ],
)
def test_the_first_kernel_that_can_is_chosen(kernel, problem, want):
    assert choose(kernel, problem).name == want


REFUSALS = [
    ("sdpa_flash", cpu(), "device cpu is not cuda"),
    ("sdpa_flash", gpu(head_dim=264), "head_dim 264 > 256"),
    ("sdpa_flash", gpu(value_dim=300), "value_dim 300 > 256"),
    (
        "sdpa_flash",
        gpu(head_dim=255, needs_lse_grad=True),
        "head_dim 255 > 254, which a gradient through the lse needs",
    ),
    ("sdpa_cudnn", gpu(), "cannot mask a window or another band"),
    ("sdpa_cudnn", gpu(needs_band=False, head_dim=136), "head_dim 136 > 128"),
    (
        "sdpa_cudnn",
        gpu(needs_band=False, head_dim=128, needs_lse_grad=True),
        "head_dim 128 > 126, which a gradient through the lse needs",
    ),
    ("sdpa_cudnn", gpu(needs_band=False, deterministic=True), "its backward is not deterministic"),
    ("sdpa_efficient", gpu(dtype=torch.float64), "dtype float64 is not float32 or float16 or bfloat16"),
    ("sdpa_flash_cpu", gpu(), "device cuda is not cpu"),
    (
        "sdpa_flash_cpu",
        cpu(dtype=torch.float8_e5m2),
        "dtype float8_e5m2 is not float32 or float64 or bfloat16 or float16",
    ),
    ("sdpa_flash_cpu", cpu(scale=0.0), "scale 0 <= 0, which turns masked scores of -inf around"),
    ("sdpa_flash", gpu(scale=-0.5), "scale -0.5 <= 0, which turns masked scores of -inf around"),
    ("sdpa_flash", gpu(softcap=30.0), "no softcap"),
    ("sdpa_cudnn", gpu(softcap=30.0, needs_band=False), "no softcap"),
    ("sdpa_efficient", gpu(softcap=30.0), "no softcap"),
    ("sdpa_flash_cpu", cpu(softcap=30.0), "no softcap"),
    ("sdpa_flash", gpu(alibi=True, dropout=True), "no ALiBi slopes, no dropout"),
    ("sdpa_cudnn", gpu(alibi=True, dropout=True, needs_band=False), "no ALiBi slopes, no dropout"),
    ("sdpa_efficient", gpu(alibi=True, dropout=True), "no ALiBi slopes, no dropout"),
    ("sdpa_flash_cpu", cpu(dropout=True), "no dropout"),
    ("flex", cpu(), "device cpu is not cuda"),
    ("flex", gpu(dtype=torch.float64, dropout=True), "dtype float64 is not float32 or float16 or bfloat16, no dropout"),
    ("flash2", cpu(), "device cpu is not cuda, flash-attn is not installed"),
    ("flash2", gpu(), "flash-attn is not installed"),
    ("flash3", gpu(), "flash_attn_3 is not installed"),
    ("flash4", gpu(), "flash-attn-4 is not installed"),
    (
        "reference",
        cpu(dtype=torch.float8_e4m3fn),
        "dtype float8_e4m3fn is not float16 or bfloat16 or float32 or float64",
    ),
    ("reference", cpu(dtype=torch.int32), "dtype int32 is not float16 or bfloat16 or float32 or float64"),
]


@pytest.mark.parametrize("kernel, problem, reason", REFUSALS)
def test_each_refusal_says_why(kernel, problem, reason):
    assert ", ".join(KERNELS[kernel].refusals(problem)) == reason
    with pytest.raises(UnsupportedError) as caught:
        choose(kernel, problem)
    known = problem.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    fix = 'Pass kernel="reference"' if known else "Pass tensors of a floating dtype"
    assert f"{kernel}: {reason}. {fix}" in str(caught.value)


@pytest.mark.parametrize(
    "kernel, chip, problem, reason",
    [
        ("sdpa_flash", (7, 5), gpu(dtype=torch.float16), "compute capability 7.5 < 8.0"),
        ("sdpa_cudnn", (7, 5), gpu(dtype=torch.float16, needs_band=False), "compute capability 7.5 < 8.0"),
        ("sdpa_efficient", (7, 5), gpu(), "compute capability 7.5 < 8.0"),
        ("sdpa_efficient", (7, 5), gpu(dtype=torch.float16), None),
        (
            "sdpa_flash",
            (8, 9),
            gpu(head_dim=200),
            "head dims from 193 to 224 have no backward on compute capability 8.9",
        ),
        (
            "sdpa_flash",
            (12, 0),
            gpu(head_dim=224),
            "head dims from 193 to 224 have no backward on compute capability 12.0",
        ),
        ("sdpa_flash", (8, 9), gpu(head_dim=200, needs_grad=False), None),
        ("sdpa_flash", (8, 0), gpu(head_dim=200), None),
        ("sdpa_flash", (8, 9), gpu(head_dim=256), None),
    ],
)
def test_refusals_by_chip(monkeypatch, kernel, chip, problem, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)
    assert KERNELS[kernel].refusals(problem) == ([reason] if reason else [])


def test_refusals_by_build(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert KERNELS["sdpa_flash"].refusals(gpu()) == ["this torch was built without flash attention"]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8906)
    assert KERNELS["sdpa_cudnn"].refusals(gpu(needs_band=False)) == ["cuDNN 8906 is older than 9.0"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in ("flash", "cudnn", "efficient"):
        assert KERNELS[f"sdpa_{name}"].refusals(gpu(needs_band=False)) == [
            f"{name} attention of ROCm builds has other conventions, which ringcp does not know"
        ]


@pytest.mark.parametrize("active, refuses", [(None, False), ("FA2", False), ("FA3", True), ("FA4", True)])
def test_flash_refuses_what_was_put_in_its_place(monkeypatch, active, refuses):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active, raising=False)
    reason = f"{active} is active in place of FA2: restore_flash_attention_impl() brings that back"
    assert KERNELS["sdpa_flash"].refusals(gpu()) == ([reason] if refuses else [])
    assert (choose("auto", gpu()).name == "sdpa_flash") != refuses


def test_an_unknown_name_lists_the_names():
    with pytest.raises(UnsupportedError) as caught:
        choose("flash9", CPU)
    assert str(caught.value) == (
        "kernel='flash9': expected one of auto, flash3, flash4, flash2, sdpa, flex, reference, sdpa_flash, sdpa_cudnn, "
        'sdpa_efficient, sdpa_flash_cpu. Pass kernel="auto" to let ringcp choose.'
    )
    assert isinstance(caught.value, RingcpError)
    assert isinstance(caught.value, NotImplementedError)


def test_all_reasons_come_in_one_message():
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(UnsupportedError) as caught:
        choose("auto", gpu(head_dim=264, value_dim=32, needs_lse_grad=True, deterministic=True))
    assert str(caught.value) == (
        "kernel='auto': expected a kernel that can do cuda bfloat16, head_dim 264, value_dim 32, 8 query and "
        "2 key/value heads, windows or other bands, gradients, a gradient through the lse, determinism, "
        "but every one refuses: "
        "flash3: flash is disabled by sdpa_kernel, head_dim 264 > 256, its backward is not deterministic for head dims "
        "above 192, flash_attn_3 is not installed; "
        "flash4: flash is disabled by sdpa_kernel, head_dim 264 > 256, flash-attn-4 is not installed; "
        "flash2: flash is disabled by sdpa_kernel, head_dim 264 > 256, flash-attn is not installed; "
        "sdpa_flash: flash is disabled by sdpa_kernel, head_dim 264 > 256; "
        "sdpa_cudnn: cannot mask a window or another band, head_dim 264 > 128, its backward is not deterministic; "
        "sdpa_efficient: efficient is disabled by sdpa_kernel; "
        "flex: plain attention only if asked for by name, for it is compiled, which takes its time, "
        "head_dim 264 > 256; "
        "sdpa_flash_cpu: flash is disabled by sdpa_kernel, device cuda is not cpu; "
        "reference: math is disabled by sdpa_kernel. "
        'Pass kernel="reference" (plain matmuls, memory for the whole score matrix), or change what they refuse.'
    )


@pytest.mark.parametrize(
    "back_ends, problem, want",
    [
        ([SDPBackend.MATH], cpu(), "reference"),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], cpu(), "sdpa_flash_cpu"),
        ([SDPBackend.MATH], gpu(), "reference"),
        ([SDPBackend.EFFICIENT_ATTENTION], gpu(), "sdpa_efficient"),
        ([SDPBackend.CUDNN_ATTENTION], gpu(needs_band=False), "sdpa_cudnn"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], gpu(needs_band=False), "sdpa_flash"),
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], gpu(needs_band=False), "sdpa_cudnn"),
    ],
)
def test_the_back_ends_of_sdpa_kernel_are_respected(back_ends, problem, want):
    with sdpa_kernel(back_ends):
        assert choose("auto", problem).name == want
    assert choose("auto", CPU).name == "sdpa_flash_cpu"


def test_an_explicit_reference_is_always_allowed_and_other_names_are_not():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose("reference", CPU).name == "reference"
        for kernel in ("sdpa_flash_cpu", "sdpa"):
            with pytest.raises(UnsupportedError, match="sdpa_flash_cpu: flash is disabled by sdpa_kernel"):
                choose(kernel, CPU)


def test_an_order_set_by_the_user_goes_first():
    problem = gpu(needs_band=False)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose("auto", problem).name == "sdpa_efficient"
        assert choose("sdpa", problem).name == "sdpa_efficient"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose("auto", problem).name == "reference"
        assert choose("auto", CPU).name == "reference"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        assert choose("auto", problem).name == "sdpa_cudnn"
    assert choose("auto", problem).name == "sdpa_flash"


def test_the_order_that_torch_sets_by_itself_is_no_wish(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [3, 1, 2, 0])
    assert choose("auto", gpu(needs_band=False)).name == "sdpa_flash"
    monkeypatch.delattr(torch._C, "_get_sdp_priority_order")
    assert choose("auto", gpu(needs_band=False)).name == "sdpa_flash"


@pytest.mark.parametrize("warn_only, refuses", [(False, True), (True, False)])
def test_a_problem_asks_for_determinism_as_torch_was_told(warn_only, refuses):
    fields = {name: value for name, value in vars(gpu(needs_band=False)).items() if name != "deterministic"}
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        problem = Problem(**fields)
    finally:
        torch.use_deterministic_algorithms(False)
    assert problem.deterministic == refuses
    assert bool(KERNELS["sdpa_cudnn"].refusals(problem)) == refuses
    assert not Problem(**fields).deterministic


def test_what_was_rejected_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, "ringcp.kernels.registry"):
        choose("auto", gpu(dtype=torch.float32, needs_band=False))
    assert caplog.messages[3:] == [
        "chose sdpa_efficient; rejected sdpa_flash: dtype float32 is not float16 or bfloat16",
        "chose sdpa_efficient; rejected sdpa_cudnn: dtype float32 is not float16 or bfloat16",
    ]
