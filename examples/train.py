"""Train a byte-level decoder on one long sequence that is split over the ranks.

    torchrun --standalone --nproc-per-node=2 examples/train.py --seq-len 16384 --steps 20

What context parallelism asks of a training loop is marked with CP; the model, in examples/model.py, is not changed. The
text is the Python documentation that comes with Python, or `--data FILE`. Every rank draws the same window of it, and
works on its share: on NCCL with one GPU a rank where there are GPUs, else on gloo. On one rank this is plain training.
`examples/demo.py` runs this file on several ranks and on one, and compares the losses. Needs rich.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Decoder
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp

IGNORED = -100  # the label of a token that has no next token to predict
WARMUP_STEPS = 3


def parse(argv: Sequence[str]) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--seq-len", type=int, help="tokens of the sequence, or of all the text if it is shorter (default: 16384)")
    add("--steps", type=int, help="optimizer steps (default: 20)")
    add("--data", type=Path, metavar="FILE", help="the text; any file")
    add("--lr", type=float, default=6e-3)
    add("--seed", type=int, default=0)
    add("--losses", type=Path, metavar="FILE", help="write what was measured to FILE, as JSON")
    add("--smoke", action="store_true", help="512 tokens and 2 steps, unless given")
    args = parser.parse_args(argv)
    for name, usual, smoke in (("seq_len", 16384, 512), ("steps", 20, 2)):
        if getattr(args, name) is None:
            setattr(args, name, smoke if args.smoke else usual)
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    return args


def read_bytes(path: Path | None) -> Tensor:
    """The text as bytes: uint8 (number of bytes,)."""
    if path is not None:
        text = path.read_bytes()
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values()).encode()
    if len(text) < 2:
        raise SystemExit(f"--data: expected a file of at least 2 bytes, got {len(text)}; give a longer one")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, seq_len: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and labels, int64 (1, seq_len) each, at random places of the text; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(len(text) - seq_len, (), generator=generator))
        window = text[start : start + seq_len + 1].long()[None]
        # CP: labels are shifted over the whole sequence; in a shard, the next row is not always the next token.
        yield window[:, :-1].clone(), window[:, 1:].clone()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, ids: Tensor, labels: Tensor
) -> tuple[float, float]:
    """One step on a whole sequence that every rank holds: the mean loss of its tokens, and the norm of the gradient."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    num_label_tokens = (labels != IGNORED).sum()  # CP: of the whole sequence, so before it is sharded

    # CP: in the body the buffers are this rank's rows, and attention is over the whole sequence.
    with ringcp.context_parallel(mesh, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
        logits = model(ids, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        loss = loss / num_label_tokens  # CP: the local sum over the global count
        loss.backward()

    sum_gradients(model, mesh)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return ringcp.all_gather(loss.detach()[None], mesh, dim=0).sum().item(), norm.item()


def sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """CP: each rank has the gradient of its part of the loss; the gradient of the loss is their sum, not their mean."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=mesh.get_group())
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def train(mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, object]:
    """All steps; what was measured."""
    first = mesh.get_local_rank() == 0
    console = Console(quiet=not first, highlight=False, soft_wrap=True)
    text = read_bytes(args.data)
    seq_len = min(args.seq_len, len(text) - 1)
    torch.manual_seed(args.seed)  # CP: every rank starts from the same parameters
    model = Decoder().to(mesh.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text; "
        f"{seq_len:,} tokens a step on {mesh.size()} rank{'s' * (mesh.size() > 1)} ({mesh.device_type})"
    )
    losses, norms, seconds = [], [], []
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=2) as bar:
        steps = bar.add_task("", total=args.steps)
        for step, (ids, labels) in zip(range(args.steps), windows(text, seq_len, args.seed), strict=False):
            start = time.perf_counter()
            loss, norm = train_step(model, optimizer, mesh, ids.to(mesh.device_type), labels.to(mesh.device_type))
            warmup.step()
            losses.append(loss)
            norms.append(norm)
            seconds.append(time.perf_counter() - start)
            line = f"step {step + 1:>3}/{args.steps}  loss {loss:.5f}  {seq_len / seconds[-1]:>8,.0f} tokens/s"
            console.print(line)
            bar.advance(steps)
    return {
        "world_size": mesh.size(),
        "device": mesh.device_type,
        "seq_len": seq_len,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "losses": losses,
        "gradient_norms": norms,
        "seconds": seconds,
    }


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if "RANK" not in os.environ:
        raise SystemExit("train.py: expected a launch by torchrun, got no RANK; --help shows the command")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            raise SystemExit(
                f"train.py: expected a GPU for each rank, got {torch.cuda.device_count()} GPUs for "
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks; run fewer ranks, or hide the GPUs to use the CPU"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    try:
        measured = train(mesh, args)
        if args.losses and mesh.get_local_rank() == 0:
            args.losses.write_text(json.dumps(measured))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
