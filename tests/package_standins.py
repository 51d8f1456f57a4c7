"""flash-attn 2, 3 and 4 on the CPU: the signatures, conventions and demands of the packages, in plain torch, any dtype.

Read in Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (v2.7.0 to
v2.8.3), hopper/flash_attn_interface.py and hopper/flash_api.cpp, flash_attn/cute/interface.py (0251105a, August 2026).
Those of 2 and 3 are custom ops there, and so here: dispatch checks the types. A stand-in shows that an adapter calls as
the source says; it shows nothing about a GPU.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import torch
from kernel_standins import INF, _check_plain_lse, _group_sum, _repeat, _sequences_mask, _wide, _window_mask
from torch import Tensor

CALLS: list[tuple[str, dict]] = []
"""What was called, with what is not a tensor."""


def _cap(scores, softcap):
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _dense(q, k, v, mask, scale, softcap):
    """out (..., M, H, X) and lse with -inf for rows that see nothing."""
    q, k, v = (x.transpose(-3, -2) for x in _wide(q, k, v))
    k, v = _repeat(k, q.shape[-3]), _repeat(v, q.shape[-3])
    scores = _cap(q @ k.mT * scale, softcap).masked_fill(~mask, -INF)
    lse = scores.logsumexp(-1)
    out = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1)) @ v
    return out.transpose(-3, -2).contiguous(), lse.contiguous()


def _dense_backward(dout, q, k, v, out, lse, dlse, mask, scale, softcap):
    """dq, dk, dv (..., S, H, W), in the dtype of q."""
    kv_heads, dtype = k.shape[-2], q.dtype
    dout, q, k, v, out = (x.transpose(-3, -2) for x in _wide(dout, q, k, v, out))
    k, v = _repeat(k, q.shape[-3]), _repeat(v, q.shape[-3])
    capped = _cap(q @ k.mT * scale, softcap)
    probs = torch.exp(capped.masked_fill(~mask, -INF) - lse.unsqueeze(-1))
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse)
    dscores = probs * (dout @ v.mT - delta.unsqueeze(-1)) * scale
    if softcap:
        dscores = dscores * (1 - (capped / softcap) ** 2)
    grads = dscores @ k, _group_sum(dscores.mT @ q, kv_heads), _group_sum(probs.mT @ dout, kv_heads)
    return tuple(x.transpose(-3, -2).to(dtype) for x in grads)


def _check(q, k, v, softcap, *more, one_dim=True, largest=256):
    for x in (q, k, v, *more):
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert x.data_ptr() % 16 == 0, "misaligned address"
        assert all(x.stride(d) * x.element_size() % 16 == 0 for d in range(x.ndim - 1)), "misaligned rows"
        assert x.dtype == q.dtype
        assert x.shape[-1] % 8 == 0, "head_size should be a multiple of 8"
        assert x.shape[-1] <= largest
    assert q.shape[-1] == k.shape[-1]
    assert k.shape[:-1] == v.shape[:-1]
    assert q.shape[-2] % k.shape[-2] == 0
    assert not one_dim or q.shape[-1] == v.shape[-1]
    assert isinstance(softcap, float)


def _mask(q, k, cu_q, cu_k, max_q, max_k, mask_of):
    """Of (B, S, H, D) operands, or of sequences side by side."""
    if cu_q is not None:
        return _sequences_mask(cu_q, cu_k, max_q, max_k, q, k, mask_of)
    assert cu_k is max_q is max_k is None
    assert q.ndim == 4
    return mask_of(q.shape[1], k.shape[1])


def _num(cu):
    """How many sequences; none for (B, S, H, D) operands."""
    return 0 if cu is None else len(cu) - 1


def _lse_shape(q):
    return q.transpose(-3, -2).shape[:-1]


def _copied(grads, out_of):
    for x, y in zip(grads, out_of, strict=True):
        assert x.shape == y.shape
        assert x.stride(-1) == 1
        x.copy_(y)


# --- flash-attn 2


def _forward_of_2(q, k, v, sequences, dropout_p, scale, causal, left, right, softcap, alibi_slopes, return_softmax):
    options = {"causal": causal, "window": (left, right), "softcap": softcap, "sequences": _num(sequences[0])}
    CALLS.append(("fa2_forward", options))
    _check(q, k, v, softcap)
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert not return_softmax, "return_softmax is only supported when p_dropout > 0.0"
    rows = q.shape[1] if sequences[2] is None else sequences[2]
    of_one = partial(_window_mask, is_causal=causal and rows > 1, left=left, right=right, longest=sequences[3])
    out, lse = _dense(q, k, v, _mask(q, k, *sequences, of_one), scale, softcap)
    lse = lse.masked_fill(lse == -INF, INF)
    return out.to(q.dtype), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _backward_of_2(
    dout, q, k, v, out, lse, grads, sequences, dropout_p, scale, causal, left, right, softcap, alibi_slopes,
    deterministic, rng_state,
):  # fmt: skip
    options = {"causal": causal, "window": (left, right), "softcap": softcap, "sequences": _num(sequences[0])}
    CALLS.append(("fa2_backward", {**options, "deterministic": deterministic}))
    _check(q, k, v, softcap, out, dout)
    _check_plain_lse(lse, _lse_shape(q), q.dtype)
    assert dropout_p == 0.0
    assert alibi_slopes is rng_state is None
    of_one = partial(_window_mask, is_causal=causal, left=left, right=right, longest=sequences[3])
    mask = _mask(q, k, *sequences, of_one)
    _copied(grads, _dense_backward(dout, q, k, v, out, lse, None, mask, scale, softcap))
    return torch.empty_like(lse)


@torch.library.custom_op("flash_attn_2_standin::_flash_attn_forward", mutates_args=())
def fa2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    window = window_size_left, window_size_right
    none = (None,) * 4
    return _forward_of_2(
        q, k, v, none, dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, return_softmax
    )


@torch.library.custom_op("flash_attn_2_standin::_flash_attn_varlen_forward", mutates_args=())
def fa2_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert block_table is leftpad_k is seqused_k is None
    assert not zero_tensors
    window, sequences = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = *window, softcap, alibi_slopes, return_softmax
    return _forward_of_2(q, k, v, sequences, dropout_p, softmax_scale, causal, *options)


@torch.library.custom_op("flash_attn_2_standin::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def fa2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    options = window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state
    operands = dout, q, k, v, out, softmax_lse, (dq, dk, dv)
    return _backward_of_2(*operands, (None,) * 4, dropout_p, softmax_scale, causal, *options)


@torch.library.custom_op("flash_attn_2_standin::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def fa2_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    assert not zero_tensors
    options = window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state
    operands = dout, q, k, v, out, softmax_lse, (dq, dk, dv)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _backward_of_2(*operands, sequences, dropout_p, softmax_scale, causal, *options)


# --- flash_attn_3


def _edges_of_3(m, n, causal, left, right, max_m, max_n):
    """As hopper/flash_api.cpp has it: -1 is no edge, and an edge as wide as the longest other side is none."""
    left = -1 if left >= (n if max_n is None else max_n) - 1 else left
    right = -1 if right >= (m if max_m is None else max_m) - 1 else right
    right = 0 if causal else right
    return _mask_of_edges(m, n, None if left < 0 else left, None if right < 0 else right)


def _mask_of_edges(m, n, left, right):
    ahead = torch.arange(n) - torch.arange(m).unsqueeze(1) - (n - m)
    mask = torch.ones(m, n, dtype=torch.bool)
    if left is not None:
        mask &= ahead >= -left
    return mask if right is None else mask & (ahead <= right)


@torch.library.custom_op("flash_attn_3_standin::_flash_attn_forward", mutates_args=())
def fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    window, sequences = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"causal": causal, "window": window, "softcap": softcap, "sequences": _num(cu_seqlens_q)}
    CALLS.append(("fa3_forward", options))
    _check(q, k, v, softcap)
    assert softmax_scale is not None
    mask = _mask(q, k, *sequences, lambda m, n: _edges_of_3(m, n, causal, *window, *sequences[2:]))
    out, lse = _dense(q, k, v, mask, softmax_scale, softcap)
    return out.to(q.dtype), lse, torch.tensor([]), torch.tensor([])


@torch.library.custom_op("flash_attn_3_standin::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def fa3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    window, sequences = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"causal": is_causal, "window": window, "softcap": softcap, "sequences": _num(cu_seqlens_q)}
    CALLS.append(("fa3_backward", {**options, "deterministic": deterministic}))
    _check(q, k, v, softcap, out, dout)
    _check_plain_lse(softmax_lse, _lse_shape(q), q.dtype)
    assert softmax_scale is not None
    assert not deterministic or q.shape[-1] <= 192, "Deterministic backward not supported for hdim 256."
    mask = _mask(q, k, *sequences, lambda m, n: _edges_of_3(m, n, is_causal, *window, *sequences[2:]))
    grads = _dense_backward(dout, q, k, v, out, softmax_lse, None, mask, softmax_scale, softcap)
    _copied((dq, dk, dv), grads)
    return torch.empty_like(softmax_lse)


# --- flash-attn-4


def _edges_of_4(m, n, causal, left, right):
    """None is no edge, other numbers are meant; a sum below 0 would be taken for no edges."""
    for edge in (left, right):
        assert edge is None or edge >= 0, "-1 would be an edge one before the diagonal"
    return _mask_of_edges(m, n, left, 0 if causal else right)


def fa4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
    intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None,
    k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
):  # fmt: skip
    window, sequences = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"causal": causal, "window": window, "softcap": softcap, "sequences": _num(cu_seqlens_q)}
    CALLS.append(("fa4_forward", options))
    _check(q, k, v, softcap, one_dim=False)
    assert softmax_scale is not None
    assert qv is None
    mask = _mask(q, k, *sequences, lambda m, n: _edges_of_4(m, n, causal, *window))
    out, lse = _dense(q, k, v, mask, softmax_scale, softcap)
    wanted = return_lse or any(x.requires_grad for x in (q, k, v))
    return out.to(q.dtype), lse if wanted else None, None, None


def fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
    AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    window, sequences = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = {"causal": causal, "window": window, "softcap": softcap, "sequences": _num(cu_seqlens_q)}
    CALLS.append(("fa4_backward", {**options, "deterministic": deterministic}))
    _check(q, k, v, softcap, one_dim=False)
    assert dout.shape == out.shape == (*q.shape[:-1], v.shape[-1])
    assert dout.dtype == out.dtype == q.dtype
    for x in (lse, *(() if dlse is None else (dlse,))):
        _check_plain_lse(x, _lse_shape(q), q.dtype)
    assert dq is dk is dv is learnable_sink is None
    mask = _mask(q, k, *sequences, lambda m, n: _edges_of_4(m, n, causal, *window))
    return _dense_backward(dout, q, k, v, out, lse, dlse, mask, softmax_scale, softcap)


MODULES = {
    "flash_attn.flash_attn_interface": {
        "_flash_attn_forward": fa2_forward,
        "_flash_attn_backward": fa2_backward,
        "_flash_attn_varlen_forward": fa2_varlen_forward,
        "_flash_attn_varlen_backward": fa2_varlen_backward,
    },
    "flash_attn_interface": {"_flash_attn_forward": fa3_forward, "_flash_attn_backward": fa3_backward},
    "flash_attn.cute.interface": {"_flash_attn_fwd": fa4_forward, "_flash_attn_bwd": fa4_backward},
}


def install(monkeypatch, *names, **instead):
    """Put stand-in modules (all, if none is named) in place, with some functions replaced; CALLS starts anew."""
    CALLS.clear()
    for name, module in modules(*names, **instead).items():
        monkeypatch.setitem(sys.modules, name, module)


def modules(*names, **instead):
    """The same, by name."""
    made = {}
    for name in names or MODULES:
        made[name] = ModuleType(name)
        made[name].__dict__.update({**MODULES[name], **{key: instead[key] for key in instead if key in MODULES[name]}})
    return made
