"""Where, when and how numbers were measured: what each line of results says beside them. Needs torch alone."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[1]


def num_cores() -> int:
    """Those that this process may use, a container's limit included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, _, period = (limit.read_text() if limit.exists() else "max").partition(" ")
    return cores if quota.strip() == "max" else max(1, min(cores, int(quota) // int(period)))


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"


@dataclass(frozen=True)
class Origin:
    """Versions, machine, commit, command and time. `cores`: of this process's machine, also where a GPU computes."""

    torch: str
    device: str
    commit: str
    command: str
    python: str = field(default_factory=platform.python_version)
    cores: int = field(default_factory=num_cores)
    date: str = field(default_factory=_now)

    @classmethod
    def of(cls, device: str, command: str) -> Origin:
        """Of this process, now. device: "cpu" or "cuda"."""
        name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
        return cls(torch.__version__, name, commit(), command)


def commit() -> str:
    """The commit of this tree, with "+" if code of ringcp or benchmarks differs; empty without git."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "ringcp", "benchmarks", ":!benchmarks/results", ":!*.md")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
