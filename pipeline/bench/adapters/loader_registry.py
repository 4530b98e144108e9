"""Find a loader by its name among those that `penstock bench --against` can play.

Penstock, torch's DataLoader and DALI are built in. Other distributions add loaders by entry points
of the group `penstock.bench`, each a tuple of `Adapter`s; benchmarks/loaders in a checkout is such
a distribution. An adapter imports its library inside functions, because few machines have all of
them installed.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.pipeline.bench.adapters import dali, penstock, torch_loader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.pipeline.bench.adapters.adapter import Adapter

GROUP = "penstock.bench"
_log = logging.getLogger("penstock")


def _adapters() -> Iterable[Adapter]:
    yield from (*penstock.ADAPTERS, *torch_loader.ADAPTERS, *dali.ADAPTERS)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            yield from entry.load()
        except ImportError as error:
            _log.warning("The loader %s can't be imported and is left out: %s", entry.name, error)


ADAPTERS: Mapping[str, Adapter] = {adapter.name: adapter for adapter in _adapters()}
OURS = ("penstock", "penstock-folder")
LOADERS = tuple(name for name in ADAPTERS if name not in OURS)
TITLES: Mapping[str, str] = {name: adapter.title for name, adapter in ADAPTERS.items()}


def find_adapter(name: str) -> Adapter:
    """Return the adapter of that name. Raises ConfigError for an unknown name."""
    try:
        return ADAPTERS[name]
    except KeyError:
        raise ConfigError(
            f"--against: got {name!r}, wanted some of {', '.join(LOADERS)}. Leave it out, or "
            "install its adapter: `pip install ./benchmarks/loaders` in a checkout adds more."
        ) from None


def split_installed(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the installed loaders, in order, and the command that installs each of the others.
    Raises ConfigError for an unknown name."""
    adapters = [find_adapter(name) for name in dict.fromkeys(names)]
    there = [a.name for a in adapters if a.is_installed()]
    return there, {a.name: a.install for a in adapters if a.name not in there}
