"""Store, find and compare the recorded values."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


from tests.goldens.material import HERE, Case
from tests.goldens.outputs import FILES, KEYS, NAMES
from tests.goldens.plans import ORDERS, STATES
from tests.goldens.samples import CONTENTS, DRAWS

CONCEPTS: dict[str, dict[str, Case]] = {"orders": ORDERS, "states": STATES, "draws": DRAWS}
CONCEPTS |= {"contents": CONTENTS, "files": FILES, "keys": KEYS, "names": NAMES}


def place(concept: str) -> Path:
    return HERE / "recorded" / f"{concept}.json"


@cache
def recorded(concept: str) -> dict[str, Any]:
    """Return what was recorded of a concept, by case."""
    found: dict[str, Any] = json.loads(place(concept).read_text("utf-8"))
    return found


def write(concept: str, values: dict[str, Any]) -> None:
    text = json.dumps(values, ensure_ascii=False, indent=1, sort_keys=True)
    place(concept).write_text(text + "\n", "utf-8")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give each single value with its path."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from leaves(each, f"{path} / {key}" if path else str(key))
    else:
        yield path, value


def differences(concept: str, old: Any, new: Any) -> list[str]:
    """Name each value that isn't as recorded.

    In shapes None stands for whatever this machine doesn't have, or didn't measure.
    """
    was, now = dict(leaves(old)), dict(leaves(json.loads(json.dumps(new))))
    if concept == "keys":
        unknown = [path for each in (was, now) for path, value in each.items() if value is None]
        hidden = tuple(f"{path} / " for path in unknown)
        was = {path: value for path, value in was.items() if not f"{path} / ".startswith(hidden)}
        now = {path: value for path, value in now.items() if not f"{path} / ".startswith(hidden)}
    return [
        f"{path}: was {str(was.get(path, 'absent'))[:200]}, is {str(now.get(path, 'absent'))[:200]}"
        for path in sorted(was.keys() | now.keys())
        if path not in was or path not in now or not _same(path, was[path], now[path])
    ]


def _same(path: str, old: Any, new: Any) -> bool:
    if ", pixels / " in path:  # means of pixels: see tests.goldens.samples
        both = list(zip(old.split(), new.split(), strict=True))
        return all(abs(int(one) - int(other)) <= 2 for one, other in both)
    return bool(_unpacked(old) == _unpacked(new)) if path.endswith(" / state") else bool(old == new)


def _unpacked(state: str) -> str:
    """Put in place of compressed states of generators what they hold: builds of zlib differ."""

    def held(found: re.Match[str]) -> str:
        return hashlib.sha256(zlib.decompress(base64.b64decode(found[0]))).hexdigest()

    return re.sub(r"\beJ[\w+/]{60,}={0,2}", held, state, flags=re.ASCII)
