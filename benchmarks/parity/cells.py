"""What the parity table measures: attention and a step of a small decoder, on ranks, in one process, and in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ringcp
from benchmarks.cases import DTYPES
from ringcp.balance import choose_layout
from ringcp.layout import Layout
from ringcp.testing import in_process, reference_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

USP_DEGREE = 2
IGNORED = -100


def modes_of(world_size: int) -> tuple[str, ...]:
    """The modes that are different things on so many ranks; one rank has one."""
    if world_size == 1:
        return ("ring",)
    return ("ring", "gather", "ulysses") if world_size == 2 else ("ring", "gather", "ulysses", "usp")


def _dilated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Every third key, counted back from the query: no combination of the other masks says that."""
    return (q - k) % 3 == 0


def _documents(n: int) -> ringcp.Mask:
    """Other documents in each of the two batch rows, one of them a single token."""
    first = [n // 2 - 3, 1, n // 5]
    return ringcp.Documents([[*first, n - sum(first)], [n // 3, n - n // 3]])


# By name, for a batch of two rows of n tokens.
MASKS: dict[str, Callable[[int], ringcp.Mask]] = {
    "full": lambda n: ringcp.Full(),
    "causal": lambda n: ringcp.Causal(),
    "window": lambda n: ringcp.Window(n // 8),
    "documents & causal": lambda n: _documents(n) & ringcp.Causal(),
    "prefix": lambda n: ringcp.Prefix(n // 3),
    "padding & causal": lambda n: ringcp.Padding([n - n // 5, n // 2]) & ringcp.Causal(),
    "chunked & causal": lambda n: ringcp.Chunked(n // 6) & ringcp.Causal(),
    "predicate & causal": lambda n: ringcp.Predicate(_dilated, name="dilated") & ringcp.Causal(),
}


@dataclass(frozen=True)
class Cell:
    """One mask in one dtype. It pickles, and makes the same tensors wherever it is."""

    mask_name: str
    dtype_name: str
    seq_len: int = 521
    batch: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64

    @property
    def mask(self) -> ringcp.Mask:
        return MASKS[self.mask_name](self.seq_len)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def layout(self, world_size: int) -> Layout:
        """What `make_layout` chooses for the mask."""
        return choose_layout(self.mask, self.seq_len, world_size)

    def allowed(self) -> Tensor:
        """(B, 1, S, S): True where the query of the row attends to the key of the column."""
        at = torch.arange(self.seq_len)
        return self.mask.dense(at, at, batch=self.batch).expand(self.batch, 1, -1, -1)

    def tensors(self) -> list[Tensor]:
        """q, k, v and the upstream gradient of out (B, H, S, D), in the dtype of the cell."""
        generator = torch.Generator().manual_seed(self.seq_len)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        shapes = [(self.batch, h, self.seq_len, self.head_dim) for h in heads]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def tokens(self) -> list[Tensor]:
        """Ids, labels and positions (B, S) for the decoder; queries that attend to nothing have no label."""
        generator = torch.Generator().manual_seed(1)
        ids, labels = torch.randint(Decoder.VOCABULARY, (2, self.batch, self.seq_len), generator=generator)
        dead = ~self.allowed().any(-1)[:, 0]
        return [ids, labels.masked_fill(dead, IGNORED), torch.arange(self.seq_len).expand(self.batch, -1).clone()]

    def decoder(self) -> Decoder:
        """The same weights everywhere, rounded to the dtype of the cell."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Decoder(self.seq_len).to(self.dtype)


class Decoder(nn.Module):
    """Two pre-norm layers with grouped heads, and losses in at least fp32."""

    VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM = 97, 64, 4, 2, 16

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self.ids, self.places = nn.Embedding(self.VOCABULARY, self.WIDTH), nn.Embedding(seq_len, self.WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(self.WIDTH) for _ in range(4))
        heads = self.HEADS + 2 * self.KV_HEADS
        self.ins = nn.ModuleList(nn.Linear(self.WIDTH, heads * self.DIM) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(self.HEADS * self.DIM, self.WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(self.WIDTH, 2 * self.WIDTH), nn.GELU(), nn.Linear(2 * self.WIDTH, self.WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY)

    def losses(self, ids: Tensor, labels: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Of each token (B, S); 0 without a label."""
        x = self.ids(ids) + self.places(positions)
        for i, (into, out, mlp) in enumerate(zip(self.ins, self.outs, self.mlps, strict=True)):
            projected = into(self.norms[2 * i](x)).unflatten(-1, (-1, self.DIM)).transpose(1, 2)
            q, k, v = projected.split([self.HEADS, self.KV_HEADS, self.KV_HEADS], 1)
            x = x + out(attend(q, k, v).to(x.dtype).transpose(1, 2).flatten(2))
            x = x + mlp(self.norms[2 * i + 1](x))
        logits = self.head(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


@dataclass(frozen=True)
class Step:
    """The loss of a step, a mean over tokens with a label, and the gradient of all parameters; of a rank, its share."""

    loss: float
    gradient: Tensor  # (number of parameters,), fp64

    @classmethod
    def summed(cls, parts: Sequence[Step]) -> Step:
        return cls(sum(part.loss for part in parts), torch.stack([part.gradient for part in parts]).sum(0))


def _step(model: Decoder, tokens: Sequence[Tensor], attend: Attend, count: int) -> Step:
    loss = model.losses(*tokens, attend).sum() / count
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return Step(loss.item(), torch.cat([g.double().flatten() for g in gradient]))


def _count(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


def graded(tensors: Sequence[Tensor], attend: Attend) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(out.dtype))]


def _way(mode: str) -> dict[str, object]:
    return {"mode": mode, "ulysses_degree": USP_DEGREE if mode == "usp" else None}


def attention_on_rank(mesh: DeviceMesh, mask: ringcp.Mask, tensors: Sequence[Tensor], mode: str) -> list[Tensor]:
    """This rank's rows of out, dq, dk, dv, by `ringcp.attention`; `tensors` as `Cell.tensors` gives them, whole."""
    layout = choose_layout(mask, tensors[0].shape[2], mesh.size())
    local = [layout.shard(x, mesh.get_local_rank(), 2) for x in tensors]
    options = {"mesh": mesh, "mask": mask, "layout": layout, **_way(mode)}
    return graded(local, lambda q, k, v: ringcp.attention(q, k, v, **options))


def step_on_rank(mesh: DeviceMesh, cell: Cell, mode: str) -> Step:
    """This rank's share of a step in a `ringcp.context_parallel`, in which the model calls torch's attention."""
    model, tokens = cell.decoder(), cell.tokens()
    count = _count(tokens[1])
    with ringcp.context_parallel(
        mesh, buffers=tokens, buffer_seq_dims=[1, 1, 1], mask=cell.mask, layout=cell.layout(mesh.size()), **_way(mode)
    ):
        return _step(model, tokens, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), count)


@dataclass(frozen=True)
class Results:
    """Of the whole sequence: out, dq, dk, dv, and the step."""

    attention: list[Tensor]
    step: Step


def of_ranks(cell: Cell, parts: Sequence[tuple[list[Tensor], Step]]) -> Results:
    """What the ranks gave, put together; gradients of parameters are summed in fp64."""
    layout = cell.layout(len(parts))
    whole = [layout.unshard(rows, 2) for rows in zip(*(attention for attention, _ in parts), strict=True)]
    return Results(whole, Step.summed([step for _, step in parts]))


def both_on_rank(mesh: DeviceMesh, cell: Cell, mode: str) -> tuple[list[Tensor], Step]:
    """Attention and step: what a pool of ranks is asked for."""
    return attention_on_rank(mesh, cell.mask, cell.tensors(), mode), step_on_rank(mesh, cell, mode)


def _results(cell: Cell, attend: Attend, dtype: torch.dtype) -> Results:
    tokens = cell.tokens()
    step = _step(cell.decoder().to(dtype), tokens, attend, _count(tokens[1]))
    return Results(graded([x.to(dtype) for x in cell.tensors()], attend), step)


def in_one_process(cell: Cell, mode: str, world_size: int) -> Results:
    """The schedule, kernels and merges of so many ranks, by `ringcp.testing.in_process`."""
    options = {"mask": cell.mask, "layout": cell.layout(world_size), "world_size": world_size, **_way(mode)}
    return _results(cell, lambda q, k, v: in_process(q, k, v, **options), cell.dtype)


def one_kernel(cell: Cell) -> Results:
    """Torch's attention on one device in the same dtype, without ringcp; the mask is written out unless it is plain."""
    plain: dict[str, dict[str, object]] = {"full": {}, "causal": {"is_causal": True}}
    allowed = cell.allowed()
    dead = ~allowed.any(-1, keepdim=True)
    options = plain.get(cell.mask_name, {"attn_mask": allowed | dead})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        return out.masked_fill(dead, 0.0)  # a softmax over nothing, which torch leaves open

    return _results(cell, attend, cell.dtype)


def reference(cell: Cell) -> Results:
    """The truth: attention by its definition in fp64, from the inputs and weights as rounded to the cell's dtype."""
    return _results(cell, lambda q, k, v: reference_attention(q, k, v, mask=cell.allowed())[0], torch.float64)
