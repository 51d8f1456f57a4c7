"""`ringcp.attention_varlen`: packed documents in one row of tokens, as flash-attn's varlen functions take them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.attention import attend
from ringcp.errors import ArgumentError
from ringcp.groups import group_name_of
from ringcp.layout import Layout
from ringcp.mask import Documents, Mask
from ringcp.options import Options, degree_in, unknown_keyword


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | Sequence[int],
    mesh: DeviceMesh,
    mask: Mask | None = None,
    layout: Layout | str = "auto",
    seq_len: int | None = None,
    mode: str = "auto",
    ulysses_degree: int | None = None,
    gather_memory: int | None = None,
    save: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    return_lse: bool = False,
    agree: str | None = None,
    timeout: float | timedelta | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within packed documents: `ringcp.attention` with ``Documents(cu_seqlens=cu_seqlens) & mask``.

    For many layers on one batch, make that mask once and call `attention`: here it is read, on the host, in each call.

    Args:
        q: (T_local, Hq, D), this rank's tokens of the packed row; k: (T_local, Hkv, D); v: (T_local, Hkv, Dv).
        cu_seqlens: (documents + 1,) cumulative lengths of the *whole* packed row, from 0 on; the same on every rank.
            Tokens after the last document are padding: lengths of a rank's own tokens would make padding of the rest.
        mask: which positions of a document attend to which, such as ``Causal()``; None is all of them.
        mesh, layout, seq_len, mode, ulysses_degree, gather_memory, save, scale, softcap, alibi_slopes, dropout_p,
            kernel, sinks, return_lse, agree, timeout: as in `ringcp.attention`.

    Returns:
        out (T_local, Hq, Dv); with `return_lse` also lse (T_local, Hq).

    Raises:
        ArgumentError: tensors that are not 3-D, or wrong `cu_seqlens`; and as `ringcp.attention`.
    """
    refusal = unknown_keyword(unknown, "attention_varlen")
    try:
        q, k, v = (_as_BHSD(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        documents = Documents(cu_seqlens=cu_seqlens)
        mask = documents if mask is None else documents & mask
    except ArgumentError as error:
        refusal = refusal or (type(error), str(error))
    options = Options(
        mask=mask,
        layout=layout,
        seq_len=seq_len,
        mode=mode,
        ulysses_degree=degree_in(mesh, ulysses_degree),
        gather_memory=gather_memory,
        save=save,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        kernel=kernel,
        sinks=sinks,
        agree=agree,
        timeout=timeout,
    )
    result = attend(q, k, v, options, group_name=group_name_of(mesh), return_lse=return_lse, refusal=refusal)
    if isinstance(result, tuple):
        out, lse = result
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return result[0].transpose(0, 1)


def _as_BHSD(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim != 3:
        got = f"{x.ndim} dims" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"{name}: expected 3 dims (local tokens, heads, head dim), got {got}; reshape it")
    return x.transpose(0, 1).unsqueeze(0)
