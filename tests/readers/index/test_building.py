"""Build an index of candidates in memory: what is read, decoded, written and kept."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import DatasetNotFoundError
from penstock.readers import Facts, Rejection
from penstock.readers.fieldtypes import ClassLabel, DenseColumn, Image, Schema
from penstock.readers.formats import Candidates, Snapshot, Spans, format_named
from penstock.readers.index import (
    MANIFEST,
    SIDECARS,
    BuildOptions,
    IndexBuilder,
    IndexPlaces,
    cut_into_batches,
    is_sidecar_name,
    read_candidate_batches,
    read_manifest,
    sidecar_name,
)
from penstock.readers.origin import Entry, LocalFolder, Scratch
from tests import images
from tests.images import CountingVerifier
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.readers.formats import Contents
    from penstock.readers.index import Manifest

SNAPSHOT = Snapshot(fingerprint="0123456789abcdef" * 4, directories={b"": 7, b"a": 9})


class Memory:
    """Candidates in memory. samples: the bytes of each, or the reason why it is bad. shards: the
    number of candidates in each shard, in order. was_read: the positions of the latest read."""

    def __init__(self, samples: Sequence[bytes | Rejection], shards: Sequence[int]) -> None:
        self.samples = samples
        numbers = np.arange(len(samples), dtype=np.int64)
        sizes = np.array([len(s) if isinstance(s, bytes) else 1 for s in samples], np.int64)
        names = [b"%03d.jpg" % i for i in range(len(samples))]
        entries = [
            Entry(name=name, size_bytes=size, mtime_ns=0, version="")
            for name, size in zip(names, sizes.tolist(), strict=True)
        ]
        self.candidates = Candidates(
            schema=Schema({"image": Image(), "label": ClassLabel(("a", "b"))}),
            files=entries,
            names=names,
            spans={"image": Spans(files=numbers, starts=np.zeros_like(numbers), sizes=sizes)},
            values={"label": DenseColumn(numbers % 2)},
            shards=np.split(numbers, np.cumsum(shards[:-1])),
        )
        self.was_read: list[int] = []

    def read(self, positions: NDArray[np.int64]) -> Contents:
        self.was_read += positions.tolist()
        found = [self.samples[i] for i in positions.tolist()]
        return {"image": [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else s for s in found]}


@pytest.fixture(autouse=True)
def _reads_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(origin: object, candidates: Candidates, positions: NDArray[np.int64]) -> Contents:
        del origin
        return MEMORIES[id(candidates)].read(positions)

    monkeypatch.setattr("penstock.readers.index.candidate_checks.read_candidates", read)


MEMORIES: dict[int, Memory] = {}


def noted(memory: Memory) -> Candidates:
    """Return the candidates; from now on, reads are served from memory."""
    MEMORIES[id(memory.candidates)] = memory
    return memory.candidates


def builder_of(place: Path, decoder: CountingVerifier) -> IndexBuilder:
    origin = LocalFolder(os.fsencode(place / "data"))
    places = IndexPlaces(origin=origin, scratch=Scratch())
    options = BuildOptions(verify=decoder, workers=2)
    return IndexBuilder(places, format_named("folder"), options)


def build(
    place: Path, candidates: Memory, decoder: CountingVerifier, known: Any = None
) -> Manifest:
    builder = builder_of(place, decoder)
    return builder.write(noted(candidates), SNAPSHOT, os.fsencode(place), known=known)


def good(count: int) -> list[bytes | Rejection]:
    return [images.jpeg(seed) for seed in range(count)]


def test_a_shard_without_a_good_sample_is_left_out_and_all_bad_ones_are_named(
    tmp_path: Path,
) -> None:
    samples = good(6)
    samples[0], samples[2], samples[3] = (
        Rejection("denied"),
        b"no image",
        images.truncated(images.jpeg(3)),
    )
    manifest = build(tmp_path, Memory(samples, [2, 2, 0, 2]), CountingVerifier())
    assert manifest.samples.tolist() == [1, 2]
    assert list(manifest.names) == [sidecar_name(SNAPSHOT.fingerprint, n, b"") for n in range(2)]
    lines = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["000.jpg", "002.jpg", "003.jpg"]
    written = read_manifest(os.fsencode(tmp_path / MANIFEST.decode()), remedy="")
    assert written.about == manifest.about
    assert (written.about.directories, written.about.listing) == (
        (("", 7), ("a", 9)),
        SNAPSHOT.fingerprint,
    )


def test_nothing_good_means_no_manifest_and_a_quarantine(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="none of 2 samples"):
        build(tmp_path, Memory([b"x", Rejection("denied")], [2]), CountingVerifier())
    assert not (tmp_path / MANIFEST.decode()).exists()
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 2


def test_known_samples_are_neither_read_nor_decoded_and_give_the_same_index(tmp_path: Path) -> None:
    samples = good(6)
    facts = {
        i: {"image": Facts(crc32c(sample), 0, len(sample), (24, 32, 3), "jpeg")}
        for i, sample in enumerate(samples)
        if isinstance(sample, bytes)
    }
    fresh = build(tmp_path, Memory(samples, [3, 3]), CountingVerifier())
    candidates, decoder = Memory(samples, [3, 3]), CountingVerifier()
    again = build(tmp_path, candidates, decoder, {0: facts[0], 1: facts[1]})
    assert sorted(candidates.was_read) == [2, 3, 4, 5]
    assert decoder.decoded == 4
    assert again.about.fingerprint == fresh.about.fingerprint


def test_sidecars_of_earlier_builds_are_swept_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / SIDECARS.decode()
    folder.mkdir()
    old = os.fsdecode(sidecar_name("f" * 64, 3, b"-" + b"0" * 32))
    for name in (old, f"sidecars/.{old.rpartition('/')[2]}.tmp", "sidecars/notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    manifest = build(tmp_path, Memory(good(2), [2]), CountingVerifier())
    kept = {os.fsdecode(name).rpartition("/")[2] for name in manifest.names}
    assert {path.name for path in folder.iterdir()} == kept | {"notes.txt"}


def test_one_shard_is_rebuilt_like_the_whole_index(tmp_path: Path) -> None:
    candidates, decoder = Memory(good(5), [2, 3]), CountingVerifier()
    manifest = build(tmp_path, candidates, decoder)
    builder = builder_of(tmp_path, decoder)
    found = builder.rebuild_shard(candidates.candidates, 1)
    assert found is not None
    sidecar, summary = found
    assert sidecar.write(os.fsencode(tmp_path / "again.arrow")) == manifest.etags[1]
    assert summary.sums == manifest.sums(1)
    assert builder.rebuild_shard(noted(Memory([b"x"], [1])), 0) is None


@pytest.mark.parametrize("suffix", [b"", b"-" + b"0f" * 16])
def test_a_sidecars_name_is_one_that_a_manifest_may_hold(suffix: bytes) -> None:
    assert is_sidecar_name(sidecar_name(SNAPSHOT.fingerprint, 1_234_567, suffix))


@pytest.mark.parametrize(
    "name", [b"sidecars/../manifest.arrow", b"a.arrow", b"sidecars/0123456789abcdef-1.arrow"]
)
def test_other_names_are_no_sidecars(name: bytes) -> None:
    assert not is_sidecar_name(name)


@examples(60)
@given(sizes=st.lists(st.integers(0, 40 * 2**20), max_size=700))
def test_slices_cover_all_in_order_and_are_bounded(sizes: list[int]) -> None:
    slices = list(cut_into_batches(np.array(sizes, np.int64)))
    covered = [i for some in slices for i in range(some.start, some.stop)]
    assert covered == list(range(len(sizes)))
    for some in slices:
        count = some.stop - some.start
        assert 1 <= count <= 256
        assert count == 1 or sum(sizes[some]) <= 32 * 2**20


def test_batches_are_in_order_and_of_one_shard() -> None:
    candidates = noted(Memory([b"x"] * 600, [300, 300]))
    origin = LocalFolder(b"/data")
    wanted = [candidates.shards[n] for n in (1, 0)]
    chunks = list(read_candidate_batches(origin, candidates, wanted, workers=3))
    assert [len(chunk.positions) for chunk in chunks] == [256, 44, 256, 44]
    together = np.concatenate([chunk.positions for chunk in chunks])
    assert together.tolist() == [*range(300, 600), *range(300)]
