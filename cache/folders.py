"""Folders of our own on the local disk."""

from __future__ import annotations

import contextlib
import os


def make_private_folder(path: str) -> None:
    """Make a folder (0700) with its parents; one that is there keeps its mode."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_private_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
