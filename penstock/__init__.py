"""Penstock keeps GPUs fed: the public names, each imported when it is first used.

`import penstock` loads neither torch nor DALI. `__init__.pyi` lists the names.
"""

import sys

import lazy_loader

try:
    if sys.platform != "linux":
        raise ImportError
    import fcntl  # noqa: F401
except ImportError:
    raise ImportError(
        f"Penstock runs on Linux alone, and this Python is for {sys.platform}, or lacks fcntl: run "
        "it in a Linux container or virtual machine, or on Windows inside of WSL2."
    ) from None

from penstock.version import __version__ as __version__

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Return a public name; raise AttributeError, which has a similar name, for another one."""
    if name not in __all__ and not name.startswith("_"):
        import difflib  # needed for mistakes only

        if near := difflib.get_close_matches(name, __all__, n=1):
            raise AttributeError(f"No penstock attribute {name}, did you mean {near[0]!r}?")
    return _load(name)
