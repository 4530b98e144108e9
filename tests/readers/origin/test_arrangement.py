"""Another arrangement of the same files is another dataset, with an index of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from penstock.cache import ConfigError
from penstock.readers.origin import DEFAULT_ARRANGEMENT, Arrangement, Scratch, locate

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.readers.origin import Origin

ARRANGEMENTS = (
    DEFAULT_ARRANGEMENT,
    Arrangement(manifest="list.csv"),
    Arrangement(manifest="other.csv"),
    Arrangement(places=(("image", "images"), ("mask", "masks"))),
    Arrangement(places=(("mask", "masks"), ("image", "images"))),
    Arrangement(schema='[{"kind": "text", "name": "label"}]'),
)


def at(url: str, arrangement: Arrangement, tmp_path: Path) -> Origin:
    scratch = Scratch(tmp_path / "cache")
    return locate(url, storage_options=None, scratch=scratch, arrangement=arrangement)


def test_arrangements_have_keys_of_their_own() -> None:
    assert DEFAULT_ARRANGEMENT.key == ""
    assert len({each.key for each in ARRANGEMENTS}) == len(ARRANGEMENTS)
    assert Arrangement(manifest="list.csv").key == ARRANGEMENTS[1].key


def test_each_arrangement_has_its_index_and_its_name_in_a_cache(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    local = [at(str(folder), each, tmp_path) for each in ARRANGEMENTS]
    remote = [at("memory://photos", each, tmp_path) for each in ARRANGEMENTS]
    assert len({each.key for each in local}) == len(ARRANGEMENTS)
    assert len({each.key for each in remote}) == len(ARRANGEMENTS)
    folders = [each.index_folders()[0] for each in local]  # type: ignore[attr-defined]
    assert folders[0] == os.fsencode(tmp_path / "photos.penstock")
    assert len(set(folders)) == len(ARRANGEMENTS)
    assert all(os.path.basename(each).startswith(b"photos") for each in folders)
    assert all(each.endswith(b".penstock") for each in folders)
    urls = [each.index_url for each in remote]  # type: ignore[attr-defined]
    assert urls[0] == "memory://photos.penstock"
    assert len(set(urls)) == len(ARRANGEMENTS)


def test_a_local_table_of_remote_data_counts_with_its_content(tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    arrangement = Arrangement(manifest=str(table))
    keys = set()
    for text in ("path\na.jpg\n", "path\nb.jpg\n"):
        table.write_text(text)
        keys.add(at("memory://photos", arrangement, tmp_path).key)
    assert len(keys) == 2
    table.unlink()
    with pytest.raises(ConfigError, match=r"manifest: .*list\.csv can't be read"):
        at("memory://photos", arrangement, tmp_path)
