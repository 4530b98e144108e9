"""Names of the sidecars in an index's folder, and sweeping those of earlier builds away."""

from __future__ import annotations

import os
import re

SIDECARS = b"sidecars"
"""The folder that they lie in, below the index's."""

_NAMED_IN_MANIFEST = re.compile(rb"sidecars/[0-9a-f]{16}-\d{6,12}(-[0-9a-f]{32})?\.arrow")
_FILE = re.compile(rb"[0-9a-f]{16}-\d{6,}(-[0-9a-f]{32})?\.arrow")
_GENERATION_DIGITS = 16


def sidecar_name(fingerprint: str, number: int, suffix: bytes) -> bytes:
    """Name a sidecar below the index's folder. Each generation has names of its own: a process that
    has the old manifest open never reads new sidecars as if they were the old ones.

    fingerprint: of the listing that is indexed; suffix: see `Sidecar`.
    """
    generation = fingerprint[:_GENERATION_DIGITS].encode()
    return b"%s/%s-%06d%s.arrow" % (SIDECARS, generation, number, suffix)


def is_sidecar_name(name: bytes) -> bool:
    """Whether a manifest can name a sidecar so."""
    return _NAMED_IN_MANIFEST.fullmatch(name) is not None


def sweep_sidecars(folder: bytes, *, keep: set[bytes]) -> None:
    """Remove sidecars of earlier generations and what a killed build left. folder: the index's."""
    sidecars = os.path.join(folder, SIDECARS)
    for name in os.listdir(sidecars):
        ours = _FILE.fullmatch(name.removeprefix(b".").removesuffix(b".tmp"))
        if ours and SIDECARS + b"/" + name not in keep:
            os.unlink(os.path.join(sidecars, name))
