"""Find a loader by its name among those that `penstock bench --against` can play.

To add a loader, write one module in this folder that ends with its `ADAPTERS` (see
`adapter.Adapter`; `spdl` is a short example), and add its name to `_ADAPTER_MODULES` below. These
modules import their library inside functions, because few machines have all of them installed.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.pipeline.bench.adapters.adapter import Adapter, PlayedLoader, Work

# The modules of this folder, in the order of help texts and results.
_ADAPTER_MODULES = (
    "penstock",
    "torch_loader",
    "dali",
    "webdataset",
    "mosaic",
    "litdata",
    "tfdata",
    "grain",
    "spdl",
    "ffcv",
)


def _adapters(module: str) -> tuple[Adapter, ...]:
    found = importlib.import_module(f"penstock.pipeline.bench.adapters.{module}")
    adapters: tuple[Adapter, ...] = found.ADAPTERS
    return adapters


ADAPTERS: Mapping[str, Adapter] = {
    adapter.name: adapter for module in _ADAPTER_MODULES for adapter in _adapters(module)
}
OURS = ("penstock", "penstock-folder")
LOADERS = tuple(name for name in ADAPTERS if name not in OURS)
TITLES: Mapping[str, str] = {name: adapter.title for name, adapter in ADAPTERS.items()}


def find_adapter(name: str) -> Adapter:
    """Return the adapter of that name. Raises ConfigError for an unknown name."""
    try:
        return ADAPTERS[name]
    except KeyError:
        raise ConfigError(
            f"--against: got {name!r}, wanted some of {', '.join(LOADERS)}. Leave it out."
        ) from None


def split_installed(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the installed loaders, in order, and the command that installs each of the others.
    Raises ConfigError for an unknown name."""
    adapters = [find_adapter(name) for name in dict.fromkeys(names)]
    there = [a.name for a in adapters if a.is_installed()]
    return there, {a.name: a.install for a in adapters if a.name not in there}


def build(name: str, work: Work) -> PlayedLoader:
    """Build the loader of that name."""
    return find_adapter(name).build(work)


def prepare(name: str, work: Work) -> None:
    """Convert the data for a loader with a format of its own; converted data are kept."""
    if (convert := find_adapter(name).prepare) is not None:
        convert(work)


def imports(name: str) -> float:
    """Import a loader's modules, so that no figure includes that time, and return the seconds.
    Raises MissingDependencyError for a missing module."""
    began = time.perf_counter()
    loader = find_adapter(name)
    for module in ("torch", "torch.utils.data", *loader.imports):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"The loader {name} needs `{module}`. Run `{loader.install}`."
            ) from error
    if name in OURS:
        from penstock.augment import resample_operator

        # A loader imports, or compiles, the operator at its first use.
        resample_operator.is_compiled()
    return time.perf_counter() - began
