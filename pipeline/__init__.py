"""The loader, its order, state and statistics; importing it loads neither torch nor DALI."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.loader import DataLoader
    from penstock.pipeline.options.order_options import Order
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.statistics import Statistics

__all__ = ["DataLoader", "Order", "Statistics", "World"]

_HOME = {
    "DataLoader": "penstock.pipeline.loader",
    "Order": "penstock.pipeline.options.order_options",
    "Statistics": "penstock.pipeline.report.statistics",
    "World": "penstock.pipeline.plan.world",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
