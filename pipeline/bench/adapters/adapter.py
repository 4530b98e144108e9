"""Describe a loader that `penstock bench` plays: each adapter's module holds such values."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.bench.adapters.work import PlayedLoader, Work

IMAGE_FOLDER = "the image folder"
IMAGE_PACKAGES = "simplejpeg opencv-python-headless"
"""The fastest decoder and resize that pip installs, for loaders that leave both to their user."""
IMAGE_MODULES = ("PIL.Image", "PIL.JpegImagePlugin", "numpy")
"""What decoding by `adapters.images` imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One loader: its name, what it needs, and how to build it.

    build: makes the loader for a work. prepare: of a loader with a format of its own, converts the
    data. needs: modules that must be importable. imports: what to import before
    anything is measured. distribution: the package whose version results tell. install: how to get
    what it needs. reads: what it reads, in words. converts: that is a format of its own, made
    from the files. decodes: "its own" decoder, or "ours", the fastest that pip installs, where it
    leaves decoding to its user.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    install: str
    reads: str
    build: Callable[[Work], PlayedLoader]
    prepare: Callable[[Work], None] | None = None
    converts: bool = False
    decodes: Literal["its own", "ours"] = "its own"
    imports: tuple[str, ...] = ()
    distribution: str = ""

    def is_installed(self) -> bool:
        return all(map(_is_there, self.needs))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
