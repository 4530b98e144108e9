"""The loader, its order, state and statistics. `import pipeline` loads neither torch nor DALI."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.loader import DataLoader
    from penstock.pipeline.report.statistics import Statistics
    from penstock.pipeline.plan.world import World

__all__ = ["DataLoader", "Statistics", "World"]
__version__ = "0.1.0"

_HOME = {
    "DataLoader": "penstock.pipeline.loader",
    "Statistics": "penstock.pipeline.report.statistics",
    "World": "penstock.pipeline.plan.world",
}


def _refuse_hidden_packages() -> None:
    """Our packages have everyday names; a user's own `cache.py` beside a script would hide ours.

    A plain ImportError: the error tree itself may be what is hidden.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("cache", "readers", "augment"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != home / name / "__init__.py":
            where = found or (list(spec.submodule_search_locations or []) if spec else "nowhere")
            raise ImportError(
                f"Penstock's package `{name}` is hidden: Python finds {where}, wanted "
                f"{home / name / '__init__.py'}. Rename your file or folder, or start Python "
                "where it isn't first on the path.",
                name=name,
            )


_refuse_hidden_packages()


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
