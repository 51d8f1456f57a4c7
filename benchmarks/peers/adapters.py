"""One function a library: its public API, its own layout, what can be set up once outside of the timed call.

What a library has no argument for raises here. What it accepts is asked for, and the check says whether it is right.
Without flash-attn the stand-in takes its place; both take fp16 and bf16 alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringcp
from benchmarks.cases import Case, document_lengths
from benchmarks.peers.rows import Rows, in_each_document
from benchmarks.providers import Attention, Prepared, Provider, Setting

# What a rank waits for one that raised, in a library that says nothing to its peers; less than a call may take.
PATIENCE = timedelta(seconds=45)
_NO_WINDOW = -1, -1
_MOST_SCORES = 2**30


@dataclass(frozen=True)
class Wanted:
    """A case in the words of flash-attn, on this rank."""

    case: Case
    mesh: dist.DeviceMesh

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def world_size(self) -> int:
        return self.mesh.size()

    @property
    def causal(self) -> bool:
        return self.case.mask != "full"

    @property
    def window(self) -> tuple[int, int]:
        kind, _, tokens = self.case.mask.partition(":")
        return (int(tokens) - 1, 0) if kind == "window" else _NO_WINDOW

    @property
    def documents(self) -> list[int]:
        return document_lengths(self.case.mask)

    @property
    def lengths(self) -> list[int]:
        """Those of the documents; of one, if none are packed."""
        return self.documents or [self.case.seq_len]

    def cu_seqlens(self, divisor: int = 1) -> Tensor:
        return torch.tensor([0, *accumulate(n // divisor for n in self.lengths)], dtype=torch.int32)

    def group(self) -> dist.ProcessGroup:
        """A new one: what a library leaves behind in it after an error meets no other."""
        return dist.new_group(list(range(self.world_size)), timeout=PATIENCE)

    def layout(self, kind: Callable[[int, int], ringcp.Layout], *, sequence_first: bool = True) -> Rows:
        return Rows.of(kind(self.case.seq_len, self.world_size), sequence_first=sequence_first)

    def refuse(self, *, half: bool = False, documents: str = "", window: str = "") -> None:
        """Raises NotImplementedError: where a library takes half precision alone, or has no way to say a mask."""
        if half and self.case.dtype not in ("bf16", "fp16"):
            raise NotImplementedError(f"dtype: flash-attn takes bf16 and fp16, got {self.case.dtype}")
        if documents and self.documents:
            raise NotImplementedError(f"documents: {documents}")
        if window and self.window != _NO_WINDOW:
            raise NotImplementedError(f"window: {window}")


Adapter = Callable[[Wanted], Prepared]


def rows_first(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attention:
    """Attention of (B, H, S, D) tensors by a function of (B, S, H, D) ones."""
    return lambda q, k, v: attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def packed(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Attention:
    """Attention of (1, H, T, D) tensors by a function of packed (T, H, D) ones."""
    return rows_first(lambda q, k, v: attention(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0))


def on_whole_heads(wanted: Wanted) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention over the whole sequence, (B, S, H, D), for libraries that exchange heads around the user's own: SDPA
    where it has the mask, else flash-attn.
    """
    if not wanted.documents and wanted.window == _NO_WINDOW:
        gqa = wanted.case.heads != wanted.case.kv_heads
        return rows_first(partial(F.scaled_dot_product_attention, is_causal=wanted.causal, enable_gqa=gqa))
    wanted.refuse(half=True)
    import flash_attn

    if not wanted.documents:
        return partial(flash_attn.flash_attn_func, causal=True, window_size=wanted.window)
    cu, longest = wanted.cu_seqlens(), max(wanted.lengths)
    call = partial(
        flash_attn.flash_attn_varlen_func,
        cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
    )  # fmt: skip
    return lambda q, k, v: call(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)


# --- ring-flash-attn


def _ring_flash_attn(name: str, kind: Callable[[int, int], ringcp.Layout], wanted: Wanted) -> Prepared:
    wanted.refuse(half=True, documents="its varlen functions take them")
    _stand_in_for_transformers()
    import ring_flash_attn

    function = getattr(ring_flash_attn, name)
    call = partial(function, causal=wanted.causal, window_size=wanted.window, group=wanted.group())
    return Prepared(rows_first(call), wanted.layout(kind))


def _ring_flash_attn_varlen(name: str, head_tail: bool, wanted: Wanted) -> Prepared:
    wanted.refuse(half=True)
    _stand_in_for_transformers()
    import ring_flash_attn

    rows = in_each_document(wanted.lengths, wanted.world_size, head_tail=head_tail)
    local = wanted.cu_seqlens(wanted.world_size)
    call = partial(
        getattr(ring_flash_attn, name),
        cu_seqlens=local, max_seqlen=max(wanted.lengths) // wanted.world_size, causal=wanted.causal,
        window_size=wanted.window, group=wanted.group(),
    )  # fmt: skip
    return Prepared(packed(call), rows)


def _llama3(wanted: Wanted) -> Prepared:
    wanted.refuse(half=True)
    _stand_in_for_transformers()
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice"
    given = llama3_flash_attn_prepare_cu_seqlens(wanted.cu_seqlens(), wanted.causal, wanted.rank, wanted.world_size)
    # All heads in one go: on CPU the all-gathers that are hidden cost more than they hide.
    call = partial(
        llama3_flash_attn_varlen_func,
        **dict(zip(names, given, strict=True)),
        heads_k_stride=wanted.case.kv_heads, causal=wanted.causal, window_size=wanted.window, group=wanted.group(),
    )  # fmt: skip
    return Prepared(packed(call), wanted.layout(ringcp.Contiguous))


# --- yunchang


def _yunchang_ulysses(wanted: Wanted) -> Prepared:
    wanted.refuse(half=True, documents="no argument says where they end")
    from yunchang import UlyssesAttention

    call = partial(UlyssesAttention(wanted.group()), causal=wanted.causal, window_size=wanted.window)
    return Prepared(rows_first(call), wanted.layout(ringcp.Contiguous))


def _yunchang_usp(ulysses_degree: int, wanted: Wanted) -> Prepared:
    wanted.refuse(half=True, documents="no argument says where they end")
    ring_degree = wanted.world_size // ulysses_degree
    if ring_degree < 2:
        raise NotImplementedError(f"ranks: a ring of one sends to itself, which gloo refuses; got {wanted.world_size}")
    from yunchang import LongContextAttention, set_seq_parallel_pg

    set_seq_parallel_pg(ulysses_degree, ring_degree, wanted.rank, wanted.world_size)
    call = partial(LongContextAttention(ring_impl_type="zigzag"), causal=wanted.causal, window_size=wanted.window)
    of_rings = ringcp.HeadTail(wanted.case.seq_len, ring_degree)
    parts = [part for rank in range(ring_degree) for part in of_rings.positions(rank).chunk(ulysses_degree)]
    return Prepared(rows_first(call), Rows(tuple(parts)))


# --- axolotl-ringmaster


def _ringmaster(backend: str, balance: str, rotate: str, wanted: Wanted) -> Prepared:
    _stand_in_for_transformers()
    import ringmaster as rm
    from ringmaster.runtime import set_runtime
    from ringmaster.shard import varlen_meta
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size, usp = wanted.world_size, backend == "usp"
    if usp and size < 4:
        raise NotImplementedError(f"ranks: two axes need 4, got {size}")
    config = rm.RingmasterConfig(
        size=size, backend=rm.Backend(backend), load_balance=rm.LoadBalance(balance),
        rotate_method=rm.RotateMethod(rotate), ulysses_size={"ulysses": size, "ring": 1, "usp": 2}[backend],
        ring_size={"ulysses": 1, "ring": size, "usp": size // 2}[backend],
    )  # fmt: skip
    plain = not wanted.documents and wanted.window == _NO_WINDOW
    # Without CUDA these are plain matrix products, and hold all scores of a block several times over.
    scores = 4 * wanted.case.heads * (wanted.case.seq_len // size) ** 2
    if (balance != "none" or (rotate == "alltoall" and plain)) and scores > _MOST_SCORES:
        raise NotImplementedError(f"memory: without CUDA it holds all scores of a block, {scores / 2**30:.1f} GiB")
    flash = backend != "ulysses" or not plain
    wanted.refuse(half=flash)
    runtime = rm.setup(
        config, num_kv_heads=wanted.case.kv_heads, device_mesh=None if usp else wanted.mesh,
        device_type="cpu", inner_attn="flash_attention_2" if flash else "sdpa",
    )  # fmt: skip
    if wanted.documents:
        positions = torch.cat([torch.arange(n) for n in wanted.lengths]).unsqueeze(0)
        runtime.varlen = varlen_meta(positions, wanted.case.seq_len)
    function = ALL_ATTENTION_FUNCTIONS[runtime.attn_implementation]
    module = SimpleNamespace(num_key_value_groups=wanted.case.heads // wanted.case.kv_heads, is_causal=wanted.causal)
    window = None if wanted.window == _NO_WINDOW else wanted.window[0] + 1

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_runtime(runtime)  # one for the process, and the last one set up is another mode's
        out, _ = function(module, q, k, v, None, is_causal=wanted.causal, sliding_window=window)
        return out.transpose(1, 2)

    return Prepared(attention, wanted.layout(ringcp.HeadTail if balance == "head_tail" else ringcp.Contiguous))


# --- ring-attention-pytorch


def _lucidrains_ring(wanted: Wanted) -> Prepared:
    wanted.refuse(documents="no argument says where they end", window="max_lookback_seq_len is in buckets, not tokens")
    from ring_attention_pytorch import ring_flash_attn

    # 0.5.20, called as its own tests do: dk comes back as dk + dv, since backward takes what a pass returns, what was
    # received and what was sent, for dk and dv. Not so much as that in half precision, whose sums it holds in fp32.
    call = partial(ring_flash_attn, causal=wanted.causal, ring_reduce_col=True, ring_size=wanted.world_size)
    return Prepared(rows_first(call), wanted.layout(ringcp.Contiguous))


def _lucidrains_zigzag(wanted: Wanted) -> Prepared:
    wanted.refuse(documents="no argument says where they end", window="no argument for one")
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

    # 0.5.20: dk and dv are those of the own queries, since the backward of its all-gather sums over no ranks; the same
    # with its own sharding. Key heads are repeated in another order than flash-attn's.
    rows = wanted.layout(ringcp.HeadTail, sequence_first=False)
    allowed = rows.positions(wanted.rank)[:, None] >= torch.cat(rows.by_rank)
    return Prepared(partial(zig_zag_attn, attn_mask=allowed if wanted.causal else None), rows)


# --- para-attn


def _para_attn_ulysses(wanted: Wanted) -> Prepared:
    from para_attn import ulysses_attn_func

    whole = rows_first(on_whole_heads(wanted))
    call = partial(
        ulysses_attn_func, is_causal=wanted.causal, mesh=wanted.group(), attn_func=lambda q, k, v, **_: whole(q, k, v)
    )
    return Prepared(call, wanted.layout(ringcp.Contiguous, sequence_first=False))


def _para_attn_ring(wanted: Wanted) -> Prepared:
    wanted.refuse(documents="no mask", window="no mask")
    from para_attn import ring_attn_func

    call = partial(ring_attn_func, is_causal=wanted.causal, mesh=wanted.group())
    return Prepared(call, wanted.layout(ringcp.Contiguous, sequence_first=False))


# --- DeepSpeed


def _deepspeed_ulysses(wanted: Wanted) -> Prepared:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        # It would compile an extension now, for an all-reduce that is not used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    layer = DistributedAttention(on_whole_heads(wanted), wanted.group(), scatter_idx=2, gather_idx=1)
    return Prepared(rows_first(lambda q, k, v: layer(q, k, v, 0)), wanted.layout(ringcp.Contiguous))


# --- torch


def _torch_ring(rotate: str, wanted: Wanted) -> Prepared:
    """The loop behind torch's context_parallel, handed the ops for CPU: what DTensor dispatches to has none."""
    wanted.refuse(documents="no mask but causal", window="no mask but causal")
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ops = torch.ops.aten
    group = wanted.group()

    def choose() -> None:
        ring._cp_options.enable_load_balance = wanted.causal
        ring._cp_options.rotate_method = ring._RotateMethod[rotate]

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            choose()
            op = ops._scaled_dot_product_flash_attention_for_cpu
            out, lse = ring._templated_ring_attention(group, 2, op, q, k, v, is_causal=wanted.causal, dropout_p=0.0)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            choose()
            op = ops._scaled_dot_product_flash_attention_for_cpu_backward.default
            return ring._templated_ring_attention_backward(
                group, 2, op, grad, "grad_out", *ctx.saved_tensors, is_causal=wanted.causal, dropout_p=0.0
            )

    layout = ringcp.HeadTail if wanted.causal else ringcp.Contiguous
    return Prepared(Attention.apply, wanted.layout(layout, sequence_first=False))


ADAPTERS: Mapping[str, Mapping[str, Adapter]] = MappingProxyType(
    {
        "ring-flash-attn": {
            "ring": partial(_ring_flash_attn, "ring_flash_attn_func", ringcp.Contiguous),
            "zigzag": partial(_ring_flash_attn, "zigzag_ring_flash_attn_func", ringcp.HeadTail),
            "stripe": partial(_ring_flash_attn, "stripe_flash_attn_func", ringcp.Striped),
            "ring varlen": partial(_ring_flash_attn_varlen, "ring_flash_attn_varlen_func", False),
            "zigzag varlen": partial(_ring_flash_attn_varlen, "zigzag_ring_flash_attn_varlen_func", True),
            "llama3": _llama3,
        },
        "yunchang": {
            "ulysses": _yunchang_ulysses,
            "zigzag": partial(_yunchang_usp, 1),
            "usp": partial(_yunchang_usp, 2),
        },
        "axolotl-ringmaster": {
            "ulysses": partial(_ringmaster, "ulysses", "none", "allgather"),
            "allgather": partial(_ringmaster, "ring", "none", "allgather"),
            "p2p": partial(_ringmaster, "ring", "none", "alltoall"),
            "zigzag": partial(_ringmaster, "ring", "head_tail", "alltoall"),
            "distflash": partial(_ringmaster, "ring", "distflash", "alltoall"),
            "usp": partial(_ringmaster, "usp", "none", "allgather"),
        },
        "ring-attention-pytorch": {"ring": _lucidrains_ring, "zigzag": _lucidrains_zigzag},
        "para-attn": {"ulysses": _para_attn_ulysses, "ring": _para_attn_ring},
        "deepspeed": {"ulysses": _deepspeed_ulysses},
        "torch": {"p2p": partial(_torch_ring, "ALL_TO_ALL"), "allgather": partial(_torch_ring, "ALL_GATHER")},
    }
)


def installed() -> dict[str, Provider]:
    """The libraries of this environment as providers, by name and version."""
    found = {}
    for name, modes in ADAPTERS.items():
        try:
            label = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
        found[label] = Provider(partial(_prepare, modes), modes=tuple(modes))
    return found


def _prepare(modes: Mapping[str, Adapter], setting: Setting) -> Prepared:
    _stand_in_for_flash_attn()
    return modes[setting.mode](Wanted(setting.case, setting.mesh))


def _stand_in_for_flash_attn() -> None:
    """Makes `flash_attn` what is in `standin/`, unless there is a real one."""
    if importlib.util.find_spec("flash_attn") is None:
        sys.path.append(str(Path(__file__).parent / "standin"))


def _stand_in_for_transformers() -> None:
    """What ring-flash-attn and ringmaster want of transformers and a CPU has not."""
    import flash_attn
    from transformers import modeling_flash_attention_utils as utils

    # ring-flash-attn 0.1.8 imports this name, for a part of it that is not used here; transformers 5 has it no more.
    utils.is_flash_attn_greater_or_equal_2_10 = lambda: True
    # ringmaster asks for flash-attn here, which finds it on CUDA alone.
    functions = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, None, None, None
    utils._lazy_imports = lambda *_: functions
