"""The adapters of flash-attn 2, 3 and 4: refusals, the choice among them, and every argument that they pass."""

import inspect
import itertools
import sys

import package_standins as standins
import pytest
import torch
from package_standins import CALLS, INF
from test_kernels import BANDS, FULL, SCALE, SQUARE, check, operands
from test_kernels_registry import cpu, gpu

import ringcp
from ringcp.kernels import flex, package
from ringcp.kernels.base import Form
from ringcp.kernels.flash2 import Flash2
from ringcp.kernels.flash3 import Flash3
from ringcp.kernels.flash4 import Flash4
from ringcp.kernels.reference import Reference
from ringcp.kernels.registry import KERNELS, choose
from ringcp.testing import assert_close, in_process, reference_attention

ADAPTERS = {kernel.name: kernel for kernel in (Flash2(), Flash3(), Flash4())}
PACKAGES = {
    "flash2": ("flash-attn", "flash_attn.flash_attn_interface", (8, 0)),
    "flash3": ("flash_attn_3", "flash_attn_interface", (9, 0)),
    "flash4": ("flash-attn-4", "flash_attn.cute.interface", (10, 0)),
}
every_adapter = pytest.mark.parametrize("name", ADAPTERS)


@pytest.fixture
def chip(monkeypatch):
    """Says what GPU there is, on a build of torch that has everything."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(flex, "find_spec", lambda name: name)  # triton
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.fixture
def installed(monkeypatch):
    standins.install(monkeypatch)


# --- refusals


@every_adapter
def test_a_package_that_is_not_there_is_refused_and_not_imported(chip, name):
    distribution, module, capability = PACKAGES[name]
    chip(*capability)
    assert KERNELS[name].refusals(gpu()) == [f"{distribution} is not installed"]
    with pytest.raises(ringcp.UnsupportedError, match=f"{name}: {distribution} is not installed. Pass kernel="):
        choose(name, gpu())
    with pytest.raises(ringcp.UnsupportedError, match=f"{name}: .*device cpu is not cuda"):
        choose(name, cpu(dtype=torch.bfloat16))
    assert module not in sys.modules


@every_adapter
def test_a_package_that_is_there_is_imported_only_when_it_is_chosen(chip, monkeypatch, tmp_path, name):
    """Found on disk below a package whose import fails: found without importing it, then refused with the reason."""
    distribution, module, capability = PACKAGES[name]
    chip(*capability)
    *parents, last = module.split(".")
    folder = tmp_path
    for parent in parents:
        folder = folder / parent
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (folder / f"{last}.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    package._on_disk.cache_clear()
    try:
        reasons = KERNELS[name].refusals(gpu(dtype=torch.float32))
        assert reasons == ["dtype float32 is not float16 or bfloat16"]
        assert parents == [] or parents[0] not in sys.modules
        (reason,) = KERNELS[name].refusals(gpu())
        assert reason == (
            f"{distribution} of unknown version cannot be imported (ImportError: undefined symbol: _ZN3c10)"
        )
    finally:
        package._on_disk.cache_clear()
        for i in range(len(parents)):
            sys.modules.pop(".".join(parents[: i + 1]), None)


@pytest.mark.parametrize(
    "name, function, old, missing, wanted",
    [
        (
            "flash2",
            "_flash_attn_forward",
            lambda q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax: None,
            "window_size_left",
            "flash-attn 2.7 or 2.8",
        ),
        (
            "flash3",
            "_flash_attn_backward",
            lambda dout, q, k, v, out, lse, cu_seqlens_q, causal, window_size, softcap, deterministic: None,
            "is_causal",
            "flash_attn_3 of August 2025 or later",
        ),
        (
            "flash4",
            "_flash_attn_bwd",
            lambda q, k, v, out, dout, lse, softmax_scale, softcap, window_size_left, cu_seqlens_q, deterministic: None,
            "dlse",
            "flash-attn-4 4.0.0b9 or later",
        ),
        ("flash4", "_flash_attn_fwd", None, "qv", "flash-attn-4 4.0.0b9 or later"),
    ],
)
def test_versions_of_other_signatures_are_refused(chip, monkeypatch, name, function, old, missing, wanted):
    distribution, module, capability = PACKAGES[name]
    chip(*capability)
    monkeypatch.setattr(package.metadata, "version", lambda distribution: "0.9.1")
    standins.install(monkeypatch, module, **{function: old})
    (reason,) = KERNELS[name].refusals(gpu())
    assert reason.startswith(f"{distribution} 0.9.1: its {function} does not take ")
    assert reason.endswith(f"; install {wanted}")
    assert missing in reason or old is None


@pytest.mark.parametrize(
    "name, capability, changes, reason",
    [
        ("flash2", (7, 5), {}, "compute capability 7.5 is not 8.x or 9.x or 10.x or 11.x or 12.x"),
        ("flash3", (8, 0), {}, "compute capability 8.0 is not 9.x"),
        ("flash3", (10, 0), {}, "compute capability 10.0 is not 9.x"),
        ("flash4", (8, 0), {}, "compute capability 8.0 is not 9.x or 10.x or 11.x"),
        ("flash4", (12, 0), {}, "compute capability 12.0 is not 9.x or 10.x or 11.x"),
        ("flash2", (8, 0), {"head_dim": 264}, "head_dim 264 > 256"),
        ("flash2", (8, 0), {"needs_lse_grad": True, "head_dim": 256}, "head_dim 256 > 254, which a gradient through"),
        ("flash2", (8, 0), {"dtype": torch.float32}, "dtype float32 is not float16 or bfloat16"),
        ("flash2", (8, 0), {"scale": -1.0}, "scale -1 <= 0"),
        ("flash3", (9, 0), {"needs_lse_grad": True, "value_dim": 255}, "head_dim 255 > 254, which a gradient through"),
        ("flash3", (9, 0), {"deterministic": True, "head_dim": 200}, "its backward is not deterministic for head dims"),
        ("flash3", (9, 0), {"deterministic": True, "head_dim": 192}, None),
        ("flash3", (9, 0), {"deterministic": True, "head_dim": 200, "needs_grad": False}, None),
        ("flash4", (10, 0), {"head_dim": 136}, "head_dim 136 > 128"),
        ("flash4", (10, 0), {"head_dim": 256, "value_dim": 256}, "head_dim 256 > 128"),
        ("flash4", (10, 0), {"head_dim": 192, "value_dim": 128}, None),
        ("flash4", (10, 0), {"head_dim": 128, "value_dim": 128, "needs_lse_grad": True}, None),
        ("flash4", (9, 0), {"head_dim": 256, "needs_lse_grad": True}, None),
        ("flash4", (9, 0), {"value_dim": 300}, "value_dim 300 > 256"),
        *((name, PACKAGES[name][2], {"softcap": 30.0, "needs_lse_grad": True}, None) for name in PACKAGES),
        *((name, PACKAGES[name][2], {"deterministic": True}, None) for name in PACKAGES),
    ],
)
def test_what_each_refuses(chip, installed, name, capability, changes, reason):
    chip(*capability)
    reasons = KERNELS[name].refusals(gpu(**changes))
    assert bool(reasons) == (reason is not None), reasons
    assert reason is None or reason in reasons[0]


def test_builds_for_rocm_are_refused(chip, installed, monkeypatch):
    chip(9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert KERNELS["flash2"].refusals(gpu()) == [
        "flash-attn for ROCm has other conventions, which ringcp does not know"
    ]


ALL = tuple(module for _, module, _ in PACKAGES.values())


@pytest.mark.parametrize(
    "capability, modules, changes, want",
    [
        ((8, 0), ALL, {}, "flash2"),
        ((8, 9), ALL, {}, "flash2"),
        ((9, 0), ALL, {}, "flash3"),
        ((10, 0), ALL, {}, "flash4"),
        ((12, 0), ALL, {}, "flash2"),
        ((9, 0), (PACKAGES["flash2"][1],), {}, "flash2"),
        ((9, 0), ALL[1:] + ALL[2:], {}, "flash3"),
        ((9, 0), ALL[::2], {}, "flash4"),
        ((10, 0), ALL, {"head_dim": 256}, "flash2"),
        ((9, 0), ALL, {"deterministic": True, "head_dim": 256}, "flash4"),
        ((9, 0), ALL, {"dtype": torch.float32}, "sdpa_efficient"),
        ((7, 5), ALL, {"dtype": torch.float16}, "sdpa_efficient"),
        ((9, 0), (), {}, "sdpa_flash"),
        ((9, 0), (), {"softcap": 30.0}, "flex"),
        ((9, 0), ALL, {"softcap": 30.0}, "flash3"),
    ],
)
def test_auto_takes_the_package_that_fits_the_chip(chip, monkeypatch, capability, modules, changes, want):
    chip(*capability)
    if modules:
        standins.install(monkeypatch, *dict.fromkeys(modules))
    assert choose("auto", gpu(**changes)).name == want


# --- arguments


@every_adapter
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.report("5.TE #3528")
def test_windows_count_from_the_last_row_and_the_last_key(installed, name, softcap):
    """Every band, with more rows than keys and the other way round; what means no edge is of each version its own."""
    none = None if name == "flash4" else -1
    for m, n, form in FULL + SQUARE + BANDS:
        *qkvd, dlse = operands(m, n)
        CALLS.clear()
        got = capped_run(ADAPTERS[name], *qkvd, dlse, form, softcap)
        check(got, capped_run(Reference(), *qkvd, dlse, form, softcap))
        for _, options in CALLS:
            assert options["softcap"] == (softcap or 0.0)
            left, right = options["window"]
            assert left == none or left >= 0
            assert right == none or right >= 0
            if form == Form():
                assert options["causal"] is False
                assert (left, right) == (none, none)
    # The last of 4 rows sees all of 11 keys, and row 0 the first 8 of them: causal, said as such.
    CALLS.clear()
    capped_run(ADAPTERS[name], *operands(4, 11), Form(lo=-7), softcap)
    assert [(options["causal"], options["window"]) for _, options in CALLS] == [(True, (none, none))] * 2
    # Two before row 9 and what lies up to one behind it: n - m = -3 keys less than rows.
    CALLS.clear()
    capped_run(ADAPTERS[name], *operands(12, 9), Form(lo=-1, hi=5), softcap)
    assert {options["window"] for _, options in CALLS} == {(2, 4)}


def capped_run(kernel, q, k, v, dout, dlse, form, softcap):
    how = {"form": form, "scale": SCALE, "softcap": softcap}
    out, lse = kernel.forward(q, k, v, **how)
    return out, lse, *kernel.backward(dout, q, k, v, out, lse, dlse, **how)


@every_adapter
def test_operands_are_passed_without_a_copy_where_strides_allow(installed, monkeypatch, name):
    seen = []
    functions = standins.MODULES[PACKAGES[name][1]]

    def spy(function):
        signature = inspect.signature(getattr(function, "_init_fn", function))

        def called(*args, **kwargs):
            bound = signature.bind(*args, **kwargs).arguments
            seen.extend(bound[which].data_ptr() for which in "qkv")
            return function(*args, **kwargs)

        called.__signature__ = signature
        return called

    standins.install(monkeypatch, PACKAGES[name][1], **{key: spy(function) for key, function in functions.items()})
    q, k, v, dout, _ = operands(6, 6, dtype=torch.bfloat16)
    capped_run(ADAPTERS[name], q, k, v, dout, None, Form(lo=0), None)
    assert seen == [x.data_ptr() for x in (q, k, v)] * 2


@every_adapter
def test_the_gradient_of_the_lse_costs_columns_only_where_it_is_not_an_argument(installed, monkeypatch, name):
    widths = []
    functions = standins.MODULES[PACKAGES[name][1]]
    backward = next(key for key in functions if key.endswith(("backward", "bwd")))
    real = functions[backward]

    def spy(*args, **kwargs):
        widths.append(args[0].shape[-1])
        return real(*args, **kwargs)

    standins.install(monkeypatch, PACKAGES[name][1], **{backward: spy})
    capped_run(ADAPTERS[name], *operands(6, 6), Form(), None)
    assert widths == [8 if name == "flash4" else 16]


@every_adapter
def test_rows_that_see_nothing_have_an_lse_of_minus_infinity(monkeypatch, name):
    """Forms have no such row, but a key of -inf does the same; flash-attn 2 says +inf, 3 and 4 -inf."""
    standins.install(monkeypatch)
    q, k, v, *_ = operands(3, 1)
    q = q.abs()
    q[:, :, 1] = 0.0
    k = torch.full_like(k, -1e308)
    _, lse = ADAPTERS[name].forward(q, k, v, form=Form(), scale=1e8)
    assert (lse[:, :, [0, 2]] == -INF).all()
    assert (lse[:, :, 1] == 0).all()


@every_adapter
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.report("5.TE PR #366")
def test_determinism_is_passed_on(installed, name, asked):
    torch.use_deterministic_algorithms(asked)
    try:
        capped_run(ADAPTERS[name], *operands(6, 6), Form(), None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [options["deterministic"] for what, options in CALLS if what.endswith("backward")] == [asked]


def test_flash3_is_not_asked_for_the_determinism_that_it_lacks(installed):
    """Told to warn only, torch goes on, and so do we."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        capped_run(ADAPTERS["flash3"], *operands(5, 5, dims=(200, 200)), Form(), None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert CALLS[-1][1]["deterministic"] is False


# --- in the executor


@every_adapter
@pytest.mark.parametrize(
    ("world_size", "mode"), [*itertools.product([2, 4], ["ring", "gather", "ulysses"]), (4, "usp")]
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_exact_in_the_executor(installed, monkeypatch, name, world_size, mode, softcap):
    # On the CPU: the choice is told to take the adapter whatever it says.
    monkeypatch.setattr(sys.modules["ringcp.testing.in_process"], "choose", lambda kernel, problem: ADAPTERS[name])
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 8, 37, 6), (2, 4, 37, 6), (2, 4, 37, 5), (2, 8, 37, 5), (2, 8, 37)
    *qkv, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    how = {"mode": mode, "ulysses_degree": 2 if mode == "usp" else None, "world_size": world_size}
    for mask in (ringcp.Causal(), ringcp.Window(4, 2), ringcp.Documents([9, 20, 8]) & ringcp.Causal()):
        results = []
        for attend, options in ((in_process, how), (reference_attention, {})):
            leaves = [x.clone().requires_grad_() for x in qkv]
            if attend is in_process:
                options = {**options, "return_lse": True}
            out, lse = attend(*leaves, mask=mask, softcap=softcap, **options)
            results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))
        for what, got, want in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            assert_close(got, want, name=f"{name} {mode} {mask} {what}")
    assert {what for what, _ in CALLS} == {f"fa{name[-1]}_{way}" for way in ("forward", "backward")}
