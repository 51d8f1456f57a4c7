"""What can be asked for, cell by cell (mask x mode x layout x kernel x feature), and the table of it in the README.

``python tests/support_table.py`` prints the table, ``--write`` puts it in its place. A kernel is asked as on the device
it is for: that its answers are true, with stand-ins where no GPU is, `test_support.py` shows.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import flex_standin
import kernel_standins as ops
import package_standins as packages
import torch

import ringcp
from ringcp.kernels import flex
from ringcp.kernels.base import Kernel, Problem
from ringcp.kernels.registry import KERNELS, choose
from ringcp.kernels.sdpa_cudnn import SdpaCudnn
from ringcp.kernels.sdpa_efficient import SdpaEfficient
from ringcp.kernels.sdpa_flash import SdpaFlash
from ringcp.mask import Mask

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support table: python tests/support_table.py --write -->", "<!-- end of the support table -->"

SEQ_LEN, WORLD_SIZE = 19, 4


def _every_third(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return (q_idx - kv_idx) % 3 != 1


MASKS: dict[str, Mask] = {
    "`Full()`": ringcp.Full(),
    "`Causal()`": ringcp.Causal(),
    "`Window(left, right)`": ringcp.Window(4, 2),
    "`Documents(...)`": ringcp.Documents([6, 1, 9]),
    "`Documents(...) & Causal()`": ringcp.Documents([6, 1, 12]) & ringcp.Causal(),
    "`Prefix(n)`": ringcp.Prefix(5),
    "`Padding(...) & Causal()`": ringcp.Padding([13]) & ringcp.Causal(),
    "`Chunked(size) & Causal()`": ringcp.Chunked(6) & ringcp.Causal(),
    "`Window(3) \\| Documents(...)`": ringcp.Window(3) | ringcp.Documents([6, 13]),
    "`Predicate(fn) & Causal()`": ringcp.Predicate(_every_third) & ringcp.Causal(),
}

MODES = {"ring": None, "gather": None, "ulysses": None, "usp": 2}

LAYOUTS = ("contiguous", "head_tail", "striped", "balanced")

FEATURES = {
    "plain": "",
    "sinks": "`sinks=`",
    "softcap": "`softcap=`",
    "alibi": "`alibi_slopes=`",
    "dropout": "`dropout_p=`",
    "key_mask": "`attn_mask` of keys, bool",
    "bias": "`attn_mask` of rows, numbers in the dtype of q",
    "lse": "gradient through `return_lse=True`",
}


class Home(NamedTuple):
    """Where a kernel is at home: what it is asked about, and what stands in for it here."""

    where: str
    device: str
    dtype: torch.dtype
    chip: tuple[int, int]
    standin: Kernel


HOMES = {
    "reference": Home("any", "cpu", torch.float64, (9, 0), KERNELS["reference"]),
    "sdpa_flash_cpu": Home("CPU", "cpu", torch.float64, (9, 0), KERNELS["sdpa_flash_cpu"]),
    "sdpa_flash": Home("GPU", "cuda", torch.bfloat16, (8, 0), SdpaFlash(ops.flash_forward, ops.flash_backward)),
    "sdpa_cudnn": Home("GPU", "cuda", torch.bfloat16, (9, 0), SdpaCudnn(ops.cudnn_forward, ops.cudnn_backward)),
    "sdpa_efficient": Home(
        "GPU", "cuda", torch.bfloat16, (8, 0), SdpaEfficient(ops.efficient_forward, ops.efficient_backward)
    ),
    "flex": Home("GPU", "cuda", torch.bfloat16, (8, 0), flex.Flex(flex_standin.flex_attention, None)),
    "flash2": Home("GPU", "cuda", torch.bfloat16, (8, 0), KERNELS["flash2"]),
    "flash3": Home("Hopper", "cuda", torch.bfloat16, (9, 0), KERNELS["flash3"]),
    "flash4": Home("Hopper, Blackwell", "cuda", torch.bfloat16, (10, 0), KERNELS["flash4"]),
}


@contextmanager
def everything_there(name: str) -> Iterator[Callable[[str, Problem], Kernel]]:
    """`choose`, as where a kernel is at home and all packages are installed, giving its stand-in."""
    home = HOMES[name]
    with ExitStack() as stack:
        for what, attribute, value in (
            (torch.cuda, "get_device_capability", lambda device: home.chip),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
            (torch.backends.cudnn, "version", lambda: 91501),
            (torch.version, "hip", None),
            (flex, "find_spec", lambda name: name),  # triton
        ):
            stack.enter_context(mock.patch.object(what, attribute, value))
        stack.enter_context(mock.patch.dict("sys.modules", packages.modules()))

        def chosen(kernel: str, problem: Problem) -> Kernel:
            of_mask = home.dtype if problem.attn_mask == problem.dtype else problem.attn_mask
            there = dataclasses.replace(problem, device=torch.device(home.device), dtype=home.dtype, attn_mask=of_mask)
            found = choose(kernel, there)
            assert found.name == name
            return home.standin

        yield chosen


def problem(mask: Mask, feature: str) -> Problem:
    """What a cell asks of a kernel."""
    return Problem(
        device=torch.device("cpu"),
        dtype=torch.float64,
        head_dim=6,
        value_dim=5,
        q_heads=4,
        kv_heads=2,
        scale=6**-0.5,
        needs_band=mask.superset.needs_band,
        needs_grad=True,
        needs_lse_grad=feature in ("lse", "sinks"),
        softcap=30.0 if feature == "softcap" else None,
        explicit=mask.explicit,
        alibi=feature == "alibi",
        attn_mask={"key_mask": torch.bool, "bias": torch.float64}.get(feature),
        dropout=feature == "dropout",
        deterministic=False,
    )


def supported(kernel: str, mask: Mask, feature: str) -> bool:
    """Whether the kernel says it can: in every mode and layout alike."""
    with everything_there(kernel) as chosen:
        try:
            chosen(kernel, problem(mask, feature))
        except ringcp.UnsupportedError:
            return False
    return True


def table() -> str:
    """Rows of masks and features, a column a kernel."""
    head = ["", *(f"`{name}`" for name in HOMES)]
    rows = [head, ["---"] * len(head), ["device", *(home.where for home in HOMES.values())]]

    def row(what: str, mask: Mask, feature: str) -> list[str]:
        return [what, *("yes" if supported(name, mask, feature) else "raises" for name in HOMES)]

    rows += [row(what, mask, "plain") for what, mask in MASKS.items()]
    rows += [row(what, ringcp.Full(), feature) for feature, what in FEATURES.items() if what]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def committed() -> str:
    """What is in the README."""
    return README.read_text().partition(BEGIN + "\n")[2].partition("\n" + END)[0]


def main() -> None:
    """Print or write it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="into the README")
    if parser.parse_args().write:
        before, begin, rest = README.read_text().partition(BEGIN + "\n")
        assert begin, f"README.md has no line {BEGIN}"
        README.write_text(before + begin + table() + "\n" + END + rest.partition(END)[2])
    else:
        print(table())


if __name__ == "__main__":
    main()
