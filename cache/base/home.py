"""The user's own cache directory: for an index or a list that has no better place.

XDG_CACHE_HOME is the only variable that is read below the command line: a Dataset is opened without
one, and where a user keeps such files is the user's answer, not an argument of every call.
Source: XDG Base Directory Specification.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> bytes | None:
    """`$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # the specification has others ignored
        return os.path.join(os.fsencode(folder), b"penstock")
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return os.path.join(os.fsencode(home), b".cache", b"penstock") if home.is_absolute() else None
