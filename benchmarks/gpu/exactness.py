"""Part (a): every mode and mask with each kernel, all ranks in one process, against fp64 and against one call.

The bar is that of `ringcp.testing.assert_close`: at most twice the error of one call in the same dtype, and a rounding
floor. One call is torch's SDPA, never cuDNN's; where a gradient comes through the lse, which SDPA does not have, it is
attention by matmuls in which the probabilities and their gradients are rounded as a flash kernel rounds them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringcp
from benchmarks.gpu.part import Bench, Found, Row, Skipped, deterministic
from ringcp.errors import UnsupportedError
from ringcp.kernels.base import Problem
from ringcp.kernels.registry import KERNELS
from ringcp.modes import MODES
from ringcp.testing import assert_close, in_process, reference_attention

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("out", "dq", "dk", "dv")
BATCH, Q_HEADS, KV_HEADS = 2, 8, 2
# fp32 in every kernel, of a magnitude of about 7. A wrong convention (another base, a lost row) is off by far more.
LSE_BOUND = 1e-4
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Case:
    """A mask for a length, the head dims of q and v, whether a gradient comes through the lse as well, and an attn_mask
    beside the mask, if there is one: of bool, or numbers, which get the dtype of q.
    """

    name: str
    mask: Callable[[int], ringcp.Mask]
    head_dim: int = 64
    value_dim: int = 64
    through_lse: bool = True
    attn_mask: Callable[[int], Tensor] | None = None


def _documents(n: int) -> list[int]:
    return [n // 2, n // 4, 1, n // 8]


def _every_third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx) % 3 != 1


def _padding(n: int) -> Tensor:
    """(B, 1, 1, S) of bool: on the left, so that rows before it see nothing if causal, and on the right."""
    at = torch.arange(n)
    return torch.stack([at >= n // 5, at < n // 2])[:, None, None]


def _numbers(n: int) -> Tensor:
    """(1, Hq, S, S): each head its own, of which some are -inf."""
    numbers = torch.randn(1, Q_HEADS, n, n, generator=torch.Generator().manual_seed(n))
    return numbers.masked_fill(numbers > 1, -torch.inf)


CASES = (
    Case("causal", lambda n: ringcp.Causal(), 128, 128, through_lse=False),
    Case("full", lambda n: ringcp.Full()),
    Case("window", lambda n: ringcp.Window(n // 8), 128, 128, through_lse=False),
    Case("two-sided window", lambda n: ringcp.Window(n // 16, n // 32)),
    Case("documents", lambda n: ringcp.Documents(_documents(n)) & ringcp.Causal(), 128, 128, through_lse=False),
    Case("prefix", lambda n: ringcp.Prefix([n // 4, n // 3])),
    Case("padding", lambda n: ringcp.Padding([n - n // 5, n // 2]) & ringcp.Causal()),
    Case("chunked", lambda n: ringcp.Chunked(n // 4) & ringcp.Causal()),
    Case("causal, head dims 72 and 40", lambda n: ringcp.Causal(), 72, 40),
    Case("predicate", lambda n: ringcp.Predicate(_every_third, name="every third") & ringcp.Causal()),
    Case("attn_mask of keys", lambda n: ringcp.Causal(), attn_mask=_padding),
    Case("attn_mask of numbers", lambda n: ringcp.Full(), attn_mask=_numbers),
)


class Tensors(NamedTuple):
    """q, k, v, the upstream gradients of out and, in some cases, of the lse, and the attn_mask that some have."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    attn_mask: Tensor | None = None


def tensors(case: Case, seq_len: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Whole tensors, stored as (B, S, H, D), as a projection gives them."""
    generator = torch.Generator().manual_seed(seq_len)

    def make(heads: int, *last: int) -> Tensor:
        x = torch.randn(BATCH, seq_len, heads, *last, generator=generator)
        return x.to(device, dtype if last else torch.float32).transpose(1, 2)

    d, v = case.head_dim, case.value_dim
    q, k, value, dout = make(Q_HEADS, d), make(KV_HEADS, d), make(KV_HEADS, v), make(Q_HEADS, v)
    given = None if case.attn_mask is None else case.attn_mask(seq_len).to(device)
    attn_mask = given.to(dtype) if given is not None and given.is_floating_point() else given
    return Tensors(q, k, value, dout, make(Q_HEADS) if case.through_lse else None, attn_mask)


def graded(given: Tensors, attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out, lse = attend(*leaves)
    outputs, upstream = [out], [given.dout.to(out.dtype)]
    if given.dlse is not None:
        outputs, upstream = [out, lse], [*upstream, given.dlse.to(lse.dtype)]
    grads = torch.autograd.grad(outputs, leaves, upstream)
    return dict(zip(("out", "lse", *NAMES[1:]), (out.detach(), lse.detach(), *grads), strict=True))


class Expected(NamedTuple):
    """What must come out, and what one call in the same dtype gives."""

    exact: dict[str, Tensor]
    one_call: dict[str, Tensor]


def expected(case: Case, given: Tensors) -> Expected:
    mask = case.mask(given.q.shape[2])
    at = torch.arange(given.q.shape[2], device=given.q.device)
    allowed, bias = mask.dense(at, at, batch=BATCH, heads=Q_HEADS), None
    exact = graded(given, lambda q, k, v: reference_attention(q, k, v, mask=allowed, attn_mask=given.attn_mask))
    if given.attn_mask is not None and given.attn_mask.dtype == torch.bool:
        allowed = allowed & given.attn_mask
    elif given.attn_mask is not None:
        low = given.attn_mask == -torch.inf
        allowed, bias = allowed & ~low, given.attn_mask.float().masked_fill(low, 0.0)
    # A row that attends to nothing attends to everything here, and no gradient comes of it.
    dead = ~allowed.any(-1, keepdim=True).expand(*given.q.shape[:3], 1)
    seen = allowed | ~allowed.any(-1, keepdim=True)
    dlse = None if given.dlse is None else given.dlse.masked_fill(dead[..., 0], 0.0)
    masked = given._replace(dout=given.dout.masked_fill(dead, 0.0), dlse=dlse)
    one_call = partial(rounded, seen=seen, bias=bias) if case.through_lse else partial(_sdpa, mask=mask, seen=seen)
    one = graded(masked, one_call)
    return Expected(exact, one | {"out": one["out"].masked_fill(dead, 0.0)})


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: ringcp.Mask, seen: Tensor) -> tuple[Tensor, Tensor]:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        if mask in (ringcp.Causal(), ringcp.Full()):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=mask == ringcp.Causal(), enable_gqa=True)
        else:
            group = Q_HEADS // KV_HEADS
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out, out.new_zeros(out.shape[:3], dtype=torch.float32)


def rounded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse by matmuls, rounded where a flash kernel rounds. bias: what is added to the scores."""
    dtype, group = q.dtype, Q_HEADS // KV_HEADS
    wide_q, wide_k, wide_v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = wide_q @ wide_k.mT * q.shape[-1] ** -0.5
    scores = (scores if bias is None else scores + bias).masked_fill(~seen, -torch.inf)
    scores.register_hook(lambda grad: grad.to(dtype).float())
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    rounded = weights + (weights.to(dtype).float() - weights).detach()
    return (rounded @ wide_v).to(dtype), lse


class Tally:
    """What the cases of a row have come to. ratios: of the error's L2 norm to that of one call's, the largest for each
    tensor.
    """

    def __init__(self) -> None:
        self.right = self.refused = self.late = 0
        self.wrong: list[str] = []
        self.ratios = dict.fromkeys(NAMES, 0.0)

    def found(self) -> Found:
        """The values of the row.

        Raises:
            AssertionError: some case is wrong; it says which.
            Skipped: none could be tried.
        """
        if self.wrong:
            shown = "\n".join(self.wrong[:_MOST_SHOWN])
            raise AssertionError(f"{len(self.wrong)} wrong, {self.right} right, {self.refused} refused:\n{shown}")
        if not self.right:
            raise Skipped(f"{self.refused} cases refused, {self.late} left out for want of time")
        counts = {"right": self.right, "refused": self.refused, "no time for": self.late}
        worst = max(self.ratios, key=lambda name: self.ratios[name])
        values = {name: count for name, count in counts.items() if count}
        return Found(values, f"error at most {self.ratios[worst]:.2f} x one call's ({worst})")


class Exactness:
    """The checks of one kernel; what a case must give is computed once."""

    def __init__(self, bench: Bench, kernel: str) -> None:
        self._bench = bench
        self._kernel = kernel
        self._seq_len = 67 if bench.smoke else 1003
        self._worlds = (4,) if bench.smoke else (4, 2, 8)
        self._known: dict[tuple[str, torch.dtype], tuple[Tensors, Expected]] = {}

    def one_mode(self, mode: str, dtype: torch.dtype) -> Found:
        """All masks on all numbers of ranks."""
        tally = Tally()
        for world_size in self._worlds:
            if mode == "usp" and world_size < 4:
                continue
            for case in CASES:
                if dtype == torch.float32 and case.through_lse:
                    continue  # a kernel's fp32 may be split TF32, which only another kernel can be held against
                if self._bench.left() <= 0:
                    tally.late += 1
                else:
                    self._try(tally, case, world_size, mode, dtype)
        return tally.found()

    def _try(self, tally: Tally, case: Case, world_size: int, mode: str, dtype: torch.dtype) -> None:
        name = f"{case.name}, {world_size} ranks"
        try:
            given, want = self._case(case, dtype)
            got = self._run(case, given, world_size, mode)
            for part in NAMES:
                exact, one_call = want.exact[part], want.one_call[part]
                tally.ratios[part] = max(tally.ratios[part], _norm(got[part], exact) / _norm(one_call, exact))
            for part in NAMES:
                assert_close(got[part], want.exact[part], baseline=want.one_call[part], name=part)
            if case.through_lse:
                error = _errors(got["lse"], want.exact["lse"]).max().item()
                assert error <= LSE_BOUND, f"lse: error {error:.3e} is above {LSE_BOUND:.0e}"
            tally.right += 1
        except UnsupportedError:
            tally.refused += 1
        except AssertionError as error:
            tally.wrong.append(f"{name}: {error}")
        except Exception:
            tally.wrong.append(f"{name}: {traceback.format_exc()}")
            self._bench.survive()

    def same_bits(self, mode: str, must: bool) -> Found:
        """Two runs of the same, causal on four ranks. must: whether other bits are wrong, or only told."""
        case = CASES[0]
        given, _ = self._case(case, torch.bfloat16)
        try:
            first, second = (self._run(case, given, 4, mode) for _ in range(2))
        except UnsupportedError as error:
            raise Skipped(str(error)) from error
        other = [part for part in first if not torch.equal(first[part], second[part])]
        assert not (must and other), f"{', '.join(other)} have other bits in the second run"
        return Found({}, f"other bits in {', '.join(other)}" if other else "all the same", "ok" if must else "info")

    def _case(self, case: Case, dtype: torch.dtype) -> tuple[Tensors, Expected]:
        key = case.name, dtype
        if key not in self._known:
            given = tensors(case, self._seq_len, dtype, self._bench.device)
            self._known[key] = given, expected(case, given)
        return self._known[key]

    def _run(self, case: Case, given: Tensors, world_size: int, mode: str) -> dict[str, Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            results = in_process(
                q, k, v, world_size=world_size, mask=case.mask(self._seq_len), mode=mode, kernel=self._kernel,
                ulysses_degree=2 if mode == "usp" else None, attn_mask=given.attn_mask, return_lse=case.through_lse,
            )  # fmt: skip
            return results if isinstance(results, tuple) else (results, results.new_empty(0))

        return graded(given, attend)


def exactness(bench: Bench, kernel: str) -> None:
    """A row for each dtype and mode, over masks and numbers of ranks; and whether two runs give the same bits."""
    of_kernel = Exactness(bench, kernel)
    reasons = refusals(kernel, bench.device)
    if reasons:
        bench.report(Row("all", "skipped", "; ".join(reasons), {}, 0.0))
        return
    dtypes = {"bf16": torch.bfloat16} if bench.smoke else HALF
    for mode in MODES:
        bench.check(f"{mode} bf16", partial(of_kernel.one_mode, mode, torch.bfloat16))
    for mode in MODES:
        bench.check(f"{mode} two runs", partial(of_kernel.same_bits, mode, must=not bench.on_cuda))
        with deterministic():
            bench.check(f"{mode} two runs, deterministic", partial(of_kernel.same_bits, mode, must=True))
    for name, dtype in dtypes.items():
        for mode in MODES if dtype != torch.bfloat16 else ():
            bench.check(f"{mode} {name}", partial(of_kernel.one_mode, mode, dtype))
    if not refusals(kernel, bench.device, torch.float32) and not bench.smoke:
        bench.check("ring fp32", partial(of_kernel.one_mode, "ring", torch.float32))


def refusals(kernel: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> list[str]:
    """Why a kernel cannot do plain attention here; empty if it can."""
    problem = Problem(
        device, dtype, dim, dim, Q_HEADS, KV_HEADS, dim**-0.5, needs_band=False, needs_grad=True, needs_lse_grad=False
    )
    return KERNELS[kernel].refusals(problem)


def _errors(x: Tensor, exact: Tensor) -> Tensor:
    return (x.double() - exact).abs().masked_fill(x == exact, 0.0)  # equal infinities are none


def _norm(x: Tensor, exact: Tensor) -> float:
    """Of the error; at least a tiny one, so that it divides."""
    return max(_errors(x, exact).norm().item(), 1e-30)
