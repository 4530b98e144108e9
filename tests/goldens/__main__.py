"""Compare this code with the goldens, and record it: `python -m tests.goldens [--update | --keep]`.

Without an argument changes are printed. `--update` also writes them down: only after a change that
is meant. `--keep` writes the archive of packs, indexes, cache folders and states that all later
code has to read: for a new format, never to make a test pass.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import penstock
from tests.goldens.material import SOURCES, WRITTEN, Material, compress, quiet
from tests.goldens.records import CONCEPTS, differences, place, recorded, write
from tests.goldens.samples import CACHED, contents, fields_of


def keep(material: Material) -> None:
    """Write the archive with this code."""
    root = material.root
    for name in SOURCES:
        contents(name, material)
    for name in CACHED:
        with material.open(name, *fields_of(name), cache=root / "cache") as dataset:
            assert not penstock.warm(dataset).failed, f"{name} isn't cached"
    shutil.copy(place("states"), root / "states.json")
    for path in (root / "in").iterdir():
        if not path.name.endswith(".penstock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    compress(root, WRITTEN)


def main(*asked: str) -> int:
    changes = 0
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    for concept, cases in CONCEPTS.items():
        material = Material(
            Path(tempfile.mkdtemp()), store="kept" if "--keep" in asked else "golden"
        )
        os.chdir(material.root)
        if "--keep" in asked:
            keep(material)
            break
        now = {name: case(material) for name, case in cases.items()}
        for line in (found := differences(concept, recorded(concept), now)):
            print(f"{concept}: {line}")  # noqa: T201
        changes += len(found)
        if "--update" in asked:
            write(concept, now)
    return int(bool(changes) and "--update" not in asked)


if __name__ == "__main__":
    with quiet():
        sys.exit(main(*sys.argv[1:]))
