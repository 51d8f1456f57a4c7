"""Packages with kernels that may not be installed: looked for without importing, imported once a call needs them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import torch

from ringcp.kernels.base import Problem


@dataclass(frozen=True)
class Package:
    """What an adapter wants of a package.

    distribution: its name on PyPI. module: where its functions are.
    takes: for each function the keywords that are passed to it, by which suitable versions are told from others.
    wanted: the versions that have them, in words.
    """

    distribution: str
    module: str
    takes: tuple[tuple[str, tuple[str, ...]], ...]
    wanted: str

    def refusals(self, problem: Problem, chips: Collection[int], others: list[str]) -> list[str]:
        """`others`, and why this package or the GPU will not do. It is imported only if nothing else speaks against it.

        chips: major compute capabilities that it has kernels for.
        """
        reasons = others + _chip(problem, chips, self.distribution)
        if not _found(self.module):
            return [*reasons, f"{self.distribution} is not installed"]
        if reasons:
            return reasons
        try:
            module = self.load()
        except Exception as error:  # a build for another torch or CUDA fails in many ways
            return [f"{self._named()} cannot be imported ({type(error).__name__}: {error})"]
        for function, keywords in self.takes:
            missing = set(keywords).difference(_parameters(getattr(module, function, None)))
            if missing:
                return [f"{self._named()}: its {function} does not take {min(missing)}; install {self.wanted}"]
        return []

    def load(self) -> Any:
        """The module, imported if need be."""
        return sys.modules.get(self.module) or importlib.import_module(self.module)

    def _named(self) -> str:
        try:
            return f"{self.distribution} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return f"{self.distribution} of unknown version"


def _found(module: str) -> bool:
    return module in sys.modules or _on_disk(module)


@lru_cache(maxsize=16)
def _on_disk(module: str) -> bool:
    """Whether the module can be found. No parent is imported, as `find_spec` would do, since that may take seconds."""
    top, *rest = module.split(".")
    spec, name = find_spec(top), top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec is not None


def _parameters(function: Callable[..., Any] | None) -> Collection[str]:
    """The names of its parameters; of a custom op, those of the function that it was made of."""
    if function is None:
        return ()
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def _chip(problem: Problem, chips: Collection[int], distribution: str) -> list[str]:
    if problem.device.type != "cuda":
        return []
    if torch.version.hip is not None:
        return [f"{distribution} for ROCm has other conventions, which ringcp does not know"]
    major, minor = torch.cuda.get_device_capability(problem.device)
    if major in chips:
        return []
    return [f"compute capability {major}.{minor} is not {' or '.join(f'{chip}.x' for chip in sorted(chips))}"]
