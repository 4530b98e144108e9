"""Test that this code equals the recorded behaviour byte for byte, and reads files of earlier code.

Record an intended change with `python -m tests.goldens --update`, which prints it.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from tests.goldens.material import PACKS, SOURCES, WRITTEN, Material, extract, quiet
from tests.goldens.plans import JOBS, go_on
from tests.goldens.records import CONCEPTS, differences, recorded
from tests.goldens.samples import CACHED, contents, fields_of, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL = [(concept, name) for concept, cases in CONCEPTS.items() for name in cases]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of this module's own to work in."""
    with pytest.MonkeyPatch.context() as patch, quiet():
        folder = tmp_path_factory.mktemp("goldens")
        patch.chdir(folder)
        yield folder
        fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def material(here: Path) -> Material:
    return Material(here)


@pytest.fixture(scope="module")
def kept(here: Path) -> Material:
    """The inputs, and what an earlier commit made of them."""
    found = Material(here / "kept", store="kept")
    extract(WRITTEN, found.root)
    found.packs.update(PACKS)
    return found


def written(kept: Material) -> dict[str, int]:
    """Return when each file of packs and indexes was written last, none of which may be."""
    found = (path for each in ("in", *PACKS) for path in (kept.root / each).rglob("*"))
    return {str(path): path.stat().st_mtime_ns for path in found}


@pytest.mark.parametrize(("concept", "name"), ALL)
def test_it_is_as_recorded(concept: str, name: str, material: Material) -> None:
    with quiet(), contextlib.closing(material):
        now = CONCEPTS[concept][name](material)
    assert not differences(concept, {name: recorded(concept).get(name)}, {name: now})


@pytest.mark.parametrize("concept", CONCEPTS)
def test_all_that_was_recorded_is_there(concept: str) -> None:
    assert sorted(recorded(concept)) == sorted(CONCEPTS[concept])


@pytest.mark.parametrize("name", SOURCES)
def test_kept_packs_and_indexes_are_read_as_they_are(name: str, kept: Material) -> None:
    before = written(kept)
    with quiet(), contextlib.closing(kept):
        found = contents(name, kept)
    assert not differences("contents", recorded("contents")[name], found)
    assert written(kept) == before


@pytest.mark.parametrize("name", CACHED)
def test_a_kept_cache_serves_all_samples(name: str, kept: Material) -> None:
    with quiet(), kept.open(name, *fields_of(name), cache=kept.root / "cache") as dataset:
        found = read(dataset)
    assert found["from the store"] == 0
    assert not differences("contents", recorded("contents")[name], found)


@pytest.mark.parametrize("name", JOBS)
def test_a_kept_state_continues_as_it_did(name: str, material: Material, kept: Material) -> None:
    was: dict[str, Any] = json.loads((kept.root / "states.json").read_text("utf-8"))[name]
    with quiet(), contextlib.closing(material):
        found = go_on(name, material, was["state"])
    assert found == {key: was[key] for key in found}
