"""Tests that every format must pass; a test module runs this class once for each format.

For a new format, subclass `FormatConformance`, or `IndexedFormatConformance` if its datasets get an
index from us, set its name and write a small dataset.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crc32c import crc32c

from penstock.cache import CorruptShardError, DatasetError
from penstock.readers import Dataset, byte_source, open_index
from penstock.readers.files import OWN_FOLDER
from penstock.readers.formats import (
    Candidates,
    check_format,
    format_named,
    format_names,
    formats,
    read_candidates,
    read_sidecar,
)
from penstock.readers.index import BuildOptions, IndexBuilder, IndexPlaces
from penstock.readers.origin import Scratch, locate
from tests import images
from tests.files import uploaded
from tests.readers.remote_sets import everything

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers import Encoded
    from penstock.readers.formats import Format, OpenShard
    from penstock.readers.index import Index
    from penstock.readers.origin import Origin

SAMPLES = 12


class FormatConformance:
    """One format, on one dataset of SAMPLES labelled images in at least two shards.

    field: the one whose bytes are in files; samples of another one have no labels.
    """

    name: str
    field = "image"

    def write(self, folder: Path) -> Path:
        """Write the dataset below an empty folder and return its root."""
        raise NotImplementedError

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return self.write(tmp_path)

    @pytest.fixture
    def remote_url(self, root: Path) -> Iterator[str]:
        with uploaded(root) as url:
            yield url

    @property
    def format(self) -> Format:
        return format_named(self.name)

    def index(self, root: Path) -> Index:
        place = None if self.format.has_own_index else root.with_name("own-index")
        return open_index(root, index=place, verify=images.verify)

    def everything(self, dataset: Dataset) -> object:
        """Return all samples of a dataset."""
        return everything(dataset)

    # Recognise and list.

    def test_it_is_registered_by_its_name(self) -> None:
        check_format(self.name)
        assert self.format.name == self.name
        assert format_names().count(self.name) == 1

    def test_its_datasets_are_recognised_by_it_first(self, root: Path) -> None:
        origin = local(root)
        first = next(each for each in formats() if each.recognises(origin))
        assert first is self.format
        assert self.index(root).format is self.format

    # Index a shard.

    def test_the_manifest_describes_each_shard_correctly(self, root: Path) -> None:
        index = self.index(root)
        assert index.samples == SAMPLES
        assert len(index.sizes) > 1
        assert (index.shard_bytes // self.format.least_sample_bytes >= index.sizes).all()
        for number in range(len(index.sizes)):
            entry, table = index.manifest.entry(number), index.open(number).table
            assert table.shape == (entry.samples, index.layout.table.count)
            start, end, crc, *_ = index.layout.table.spans[self.field]
            assert (table[:, start] < table[:, end]).all()
            assert (table[:, end] <= entry.size_bytes).all()
            assert (table[:, crc] >= 0).all()
            assert (table[:, crc] < 2**32).all()

    def test_an_image_and_its_label_are_six_numbers_of_one_table(self, root: Path) -> None:
        columns = self.index(root).layout.table
        assert columns.spans["image"] == (0, 1, 5, 2, None, None)
        assert (columns.values, columns.present, columns.count) == ({"label": 4}, {}, 6)

    # Read rows.

    def test_every_way_of_reading_a_row_returns_its_bytes(self, root: Path) -> None:
        index = self.index(root)
        for number in range(len(index.sizes)):
            shard = index.open(number)
            assert shard.source.is_mapped != self.format.is_file_per_sample
            start, end, crc, *_ = index.layout.table.spans[self.field]
            starts, ends = shard.table[:, start], shard.table[:, end]
            read = read_spans(shard, starts, ends, "pread")
            assert [crc32c(sample) for sample in read] == shard.table[:, crc].tolist()
            names = {shard.name(row) for row in range(len(shard.table))}
            assert len(names) == len(shard.table)
            source_names = shard.source_names()
            assert source_names is None or len(source_names) == len(shard.table)
            shard.source.advise(starts, ends)
            views = read_spans(shard, starts, ends, "mmap")
            assert list(map(bytes, views)) == list(map(bytes, read))

    def test_a_missing_file_is_an_error(self, root: Path) -> None:
        index = self.index(root)
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.parent.name != OWN_FOLDER.decode():
                path.rename(path.with_name(f"new-{path.name}"))
        with pytest.raises(DatasetError, match=r"gone|missing"):
            self._read_first(index)

    def _read_first(self, index: Index) -> None:
        shard, (start, end, *_) = index.open(0), index.layout.table.spans[self.field]
        read_spans(shard, shard.table[:, start], shard.table[:, end], "pread")

    @pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
    def test_blobs_hold_the_same_samples_and_their_keys_follow_from_the_manifest(
        self, root: Path, remote_url: str, tmp_path: Path
    ) -> None:
        place = None if self.format.has_own_index else tmp_path / "own-index"
        with Dataset(root, index=place) as dataset:
            expected = self.everything(dataset)
        found = []
        for cache in ("one", "two"):
            with Dataset(remote_url, cache=tmp_path / cache) as dataset:
                assert self.everything(dataset) == expected
                found.append(dataset.index.keys)
                sources = [dataset.index.source(n) for n in range(len(found[0]))]
                assert tuple(source.key for source in sources) == found[-1]
                sizes = [sum(s.size_bytes for s in source.segments) for source in sources]
                assert sizes == [source.size_bytes for source in sources]
        assert found[0] == found[1]
        assert len(set(found[0])) == len(found[0])
        assert all(len(key) == 40 for key in found[0])


class IndexedFormatConformance(FormatConformance):
    """A format whose datasets get an index from us."""

    def test_a_listing_is_the_same_each_time_and_current_until_a_file_changes(
        self, root: Path
    ) -> None:
        format, origin = self.format, local(root)
        listing = format.list(origin)
        snapshot = listing.snapshot()
        assert format.list(origin).snapshot() == snapshot
        assert format.is_current(origin, snapshot, lambda: format.list(origin))
        victim = next(path for path in sorted(root.rglob("*")) if path.is_file())
        victim.rename(victim.with_name(f"new-{victim.name}"))
        os.utime(victim.parent, ns=(1, 1))  # even if the clock has coarse steps
        assert format.list(origin).snapshot() != snapshot
        assert not format.is_current(origin, snapshot, lambda: format.list(origin))

    def test_each_candidate_has_one_shard_a_name_and_bytes(self, root: Path) -> None:
        candidates = self.format.list(local(root)).candidates(workers=1)
        count = len(candidates)
        assert isinstance(candidates, Candidates)
        assert count == SAMPLES
        assert next(iter(candidates.schema)) == self.field
        assert all(len(values) == count for values in candidates.values.values())
        assert len(set(candidates.names)) == count
        together = np.concatenate(candidates.shards)
        assert sorted(together.tolist()) == list(range(count))
        some = together[::-1]
        found = read_candidates(local(root), candidates, some)[self.field]
        assert [len(each) for each in found if isinstance(each, np.ndarray)] == (
            candidates.spans[self.field].sizes[some].tolist()
        )

    def builder(self, origin: Origin) -> IndexBuilder:
        places = IndexPlaces(origin=origin, scratch=Scratch())
        return IndexBuilder(places, self.format, BuildOptions(verify=images.verify))

    def test_a_sidecar_is_read_as_it_was_written(self, root: Path, tmp_path: Path) -> None:
        format, origin = self.format, local(root)
        builder = self.builder(origin)
        candidates = format.list(origin).candidates(workers=1)
        found = builder.rebuild_shard(candidates, 1)
        assert found is not None
        sidecar, summary = found
        path = os.fsencode(tmp_path / "sidecar.arrow")
        etag = sidecar.write(path)
        read = partial(
            read_sidecar,
            path,
            layout=candidates.layout,
            is_file_per_sample=self.format.is_file_per_sample,
        )
        again = read(etag=etag)
        assert (again.samples, again.size_bytes, again.suffix) == (
            sidecar.samples,
            sidecar.size_bytes,
            sidecar.suffix,
        )
        counts = {name: each.progressive for name, each in summary.fields.items()}
        counted = {name: count for name, count in counts.items() if count is not None}
        assert again.summary(progressive=counted) == summary
        assert list(again.segments()) == list(sidecar.segments())
        assert again.write(path) == etag
        with pytest.raises(CorruptShardError):
            read(etag="crc32c-00000000")

    def test_a_shard_can_be_rebuilt_from_its_files(self, root: Path) -> None:
        format, origin, index = self.format, local(root), self.index(root)
        builder = self.builder(origin)
        listing, total = format.list(origin), len(index.sizes)
        for number in range(total):
            entry = index.manifest.entry(number)
            candidates, same = next(
                listing.counterparts(number, entry.name, total=total, workers=1)
            )
            found = builder.rebuild_shard(candidates, same)
            assert found is not None
            assert found[1].sums == entry.sums


def local(root: Path) -> Origin:
    """Return the dataset's root as the readers use it."""
    return locate(root, storage_options=None, scratch=Scratch())


def read_spans(
    shard: OpenShard, starts: NDArray[np.int64], ends: NDArray[np.int64], mode: ReadMode
) -> list[Encoded]:
    """Return all samples of a shard."""
    wanted = byte_source.SourceSpans(shard.source, starts.tolist(), ends.tolist())
    (found,) = shard.source.load([wanted], mode)
    data = [np.empty(end - start, np.uint8) for start, end in zip(starts, ends, strict=True)]
    for slot, each in zip(data, found, strict=True):
        if isinstance(each, np.ndarray):
            slot[:] = each
        else:
            each.copy(slot)
    return data
