"""Datasets: samples in containers, by index. Image folders and packs, local or behind a URL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.readers.dataset import Dataset
    from penstock.readers.fields.columns import SampleBatch
    from penstock.readers.index.index import Index
    from penstock.readers.index.opening import IndexSummary, build_index, open_index
    from penstock.readers.packing.packing import pack
    from penstock.readers.packing.summary import PackSummary
    from penstock.readers.source import Source
    from penstock.readers.types import EncodedBatch, ImageFacts, ImageRange, Rejection

__all__ = [
    "Dataset",
    "EncodedBatch",
    "ImageFacts",
    "ImageRange",
    "Index",
    "IndexSummary",
    "PackSummary",
    "Rejection",
    "SampleBatch",
    "Source",
    "build_index",
    "open_index",
    "pack",
]

# Each name's module. Loaded at first use: `readers.types` is all that many importers want.
_HOME = {
    "Dataset": "penstock.readers.dataset",
    "EncodedBatch": "penstock.readers.types",
    "ImageFacts": "penstock.readers.types",
    "ImageRange": "penstock.readers.types",
    "Index": "penstock.readers.index.index",
    "IndexSummary": "penstock.readers.index.opening",
    "PackSummary": "penstock.readers.packing.summary",
    "Rejection": "penstock.readers.types",
    "Source": "penstock.readers.source",
    "SampleBatch": "penstock.readers.fields.columns",
    "build_index": "penstock.readers.index.opening",
    "open_index": "penstock.readers.index.opening",
    "pack": "penstock.readers.packing.packing",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
