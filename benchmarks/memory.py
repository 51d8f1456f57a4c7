"""How much memory the attention of one layer needs: the score matrix, flash attention, and ringcp on P ranks.

    python benchmarks/memory.py --seq-len 131072

What it prints follows from shapes alone; nothing is measured or allocated. The buffers of ringcp are those of the
docstring of `ringcp/executor.py`, which `tests/test_memory.py` holds to the byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

_ACC = 4  # bytes of an element of the accumulators: fp32


class Layer(NamedTuple):
    """The attention of one layer over a whole sequence; `size` bytes an element."""

    seq_len: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    size: int = 2

    def score_matrix(self) -> int:
        """Bytes of the weights that plain attention keeps for backward."""
        return self.batch * self.heads * self.seq_len**2 * self.size

    def kept(self, ranks: int = 1) -> int:
        """Bytes a rank keeps for backward: q, k, v, out, and the lse."""
        row = 2 * (self.heads + self.kv_heads) * self.head_dim * self.size + self.heads * _ACC
        return self.batch * self._tokens(ranks) * row

    def forward_buffers(self, ranks: int) -> int:
        """Bytes that ringcp allocates beside that in forward: two blocks of keys and values, and sums for out and lse.

        On one rank the kernel's own result is the sum.
        """
        if ranks == 1:
            return 0
        sums = self.batch * self._tokens(ranks) * self.heads * (self.head_dim + 1) * _ACC
        return 2 * self._block(ranks) * self.size + sums

    def backward_buffers(self, ranks: int) -> int:
        """The same in backward: two blocks, two travelling sums, the own dK and dV, and dQ."""
        if ranks == 1:
            return 0
        dq = self.batch * self._tokens(ranks) * self.heads * self.head_dim * _ACC
        return 2 * self._block(ranks) * self.size + 3 * self._block(ranks) * _ACC + dq

    def _tokens(self, ranks: int) -> int:
        return -(-self.seq_len // ranks)

    def _block(self, ranks: int) -> int:
        return 2 * self.batch * self._tokens(ranks) * self.kv_heads * self.head_dim


def memory_table(layer: Layer, ranks: Sequence[int]) -> str:
    """A line for plain attention, one for flash attention, and one for each number of ranks."""
    head = ("attention", "tokens a rank", "kept for backward", "buffers forward", "buffers backward")
    rows = [
        ("score matrix, 1 device", f"{layer.seq_len:,}", _text(layer.kept() + layer.score_matrix()), "", ""),
        ("flash, 1 device", f"{layer.seq_len:,}", _text(layer.kept()), "", ""),
    ]
    for count in ranks:
        kept, forward, backward = layer.kept(count), layer.forward_buffers(count), layer.backward_buffers(count)
        tokens = f"{-(-layer.seq_len // count):,}"
        rows.append((f"ringcp, {count} ranks", tokens, _text(kept), _text(forward), _text(backward)))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))])
        for row in (head, *rows)
    ]
    title = (
        f"One layer, {layer.seq_len:,} tokens, batch {layer.batch}, {layer.heads} query and {layer.kv_heads} key/value "
        f"heads of {layer.head_dim}, {layer.size} bytes an element"
    )
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _text(num_bytes: int) -> str:
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, 4)
    value = num_bytes / 1024**power
    return f"{value:.0f} {_UNITS[power]}" if value >= 100 or power == 0 else f"{value:.2f} {_UNITS[power]}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def main(argv: Sequence[str] | None = None) -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens of the whole sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=2, help="bytes an element")
    args = parser.parse_args(argv)
    layer = Layer(args.seq_len, args.heads, args.kv_heads, args.head_dim, args.batch, args.size)
    print(memory_table(layer, args.ranks))


if __name__ == "__main__":
    main()
