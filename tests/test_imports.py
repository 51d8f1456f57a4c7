"""What plans is pure: it does not know torch.distributed. The order of the files is import-linter's to check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ringcp

PURE = ["errors", "band", "layout", "mask", "mask_mods", "node", "mask_nodes", "row_nodes", "predicate_node",
        "mask_spec", "mask_entries", "integers", "vectorize", "balance", "topology", "grouped", "modes", "steps",
        "needs", "gather_schedule", "schedule", "lower", "traces", "draw", "rotate"]  # fmt: skip


def mentions_distributed(source: str) -> list[int]:
    """Lines on which code (not a comment or a docstring) names `distributed`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Call):  # getattr(torch, "distributed"), import_module("torch.distributed")
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if any("distributed" in name.split(".") for name in names):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("module", PURE)
def test_pure_files_do_not_name_torch_distributed(module):
    root = Path(ringcp.__file__).parent
    files = [root / f"{module}.py"] if (root / f"{module}.py").exists() else sorted((root / module).rglob("*.py"))
    assert files, f"{module}: no such file; if it was renamed, rename it here and in pyproject.toml"
    for file in files:
        assert mentions_distributed(file.read_text()) == [], file


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "import torch.distributed.device_mesh",
        "from torch import distributed",
        "from torch.distributed import P2POp",
        "def f():\n    from torch.distributed.device_mesh import DeviceMesh",
        "import torch\nx = torch.distributed.get_rank()",
        "x = getattr(torch, 'distributed')",
        "x = importlib.import_module('torch.distributed')",
    ],
)
def test_the_check_sees(source):
    assert mentions_distributed(source)


@pytest.mark.parametrize("source", ['"""Not torch.distributed."""', "# torch.distributed", "import torch"])
def test_the_check_passes(source):
    assert not mentions_distributed(source)


def test_importing_starts_nothing():
    """No process group, no thread, no fork, no logging handler; no warning either."""
    program = (
        "import logging, threading, multiprocessing as mp, ringcp.testing, torch.distributed as dist;"
        "assert not dist.is_initialized() and threading.active_count() == 1 and not mp.active_children();"
        "assert not logging.getLogger('ringcp').handlers and not logging.getLogger().handlers"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
