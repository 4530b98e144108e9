"""Arrays that zarr-python 2 and tensorstore wrote (`make_fixtures.py`)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from penstock.readers.formats.zarr import (
    ArrayMetadata,
    consolidated_nodes,
    parse_array,
    read_document,
)
from tests.readers.formats.zarr.make_fixtures import values
from tests.readers.formats.zarr.zarr_files import Files, chunks, metadata_of, read, uses_zarr

KINDS = {"zarr_2": 13, "tensorstore": 11}


def files_of(kind: str) -> Files:
    with zipfile.ZipFile(Path(__file__).with_name(f"{kind}.zip")) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_read_equal(kind: str) -> None:
    files = files_of(kind)
    names = {name.rpartition("/")[0] for name in files if name.endswith(("/.zarray", "/zarr.json"))}
    assert len(names) == KINDS[kind]
    for name in names:
        found, decoder = read(files, name)
        assert not uses_zarr(decoder)
        wanted = values(found.dtype.str)
        if name == "scaled":
            np.testing.assert_allclose(found, wanted, atol=0.05)
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_chunks_of_fill_values_arent_stored() -> None:
    files = files_of("tensorstore")
    for name in ("v2-1", "v3-zstd", "v3-shards-start", "v3-shards-end"):
        metadata = metadata_of(files, name)
        places = [place for place, _ in chunks(files, metadata)]
        assert places
        assert len(places) < np.prod(metadata.grid.counts)


def test_consolidated_metadata_of_zarr_2() -> None:
    files = files_of("zarr_2")
    document = read_document(files[".zmetadata"], name=".zmetadata", is_consolidated=True)
    nodes = consolidated_nodes(document, version=2, name=".zmetadata")
    assert nodes.pop("").kind == "group"
    assert len(nodes) == KINDS["zarr_2"]
    assert all(isinstance(parse_array(node), ArrayMetadata) for node in nodes.values())
    assert metadata_of(files, "delta").dimension_names == ("t", "y", "x")
    assert metadata_of(files, "times").dtype == np.int64
