"""The place of an index: next to the data, never inside it, or elsewhere if that isn't possible."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

import penstock.cache.base.folders
import penstock.readers.index.index_folders
from penstock.cache import ConfigError, DatasetNotFoundError, IndexChangedError, PenstockWarning
from penstock.readers import Dataset, build_index, open_index
from penstock.readers.origin import index_url, place_of
from tests import images, tars
from tests.images import CountingVerifier

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache directory for this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images.class_folder(tmp_path / "data" / "photos", samples=6)


@pytest.fixture
def sealed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without write permission next to it, even for root."""
    real = penstock.readers.index.index_folders.IndexPlaces.can_write

    def can_write(self: penstock.readers.index.index_folders.IndexPlaces, place: bytes) -> bool:
        return os.path.dirname(place) != os.fsencode(folder.parent) and real(self, place)

    monkeypatch.setattr(penstock.readers.index.index_folders.IndexPlaces, "can_write", can_write)
    return folder


def test_an_indexed_folder_is_still_the_folder_that_others_read(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    open_index(folder, verify=images.verify)
    assert sorted(folder.rglob("*")) == before
    assert sorted(p.name for p in folder.parent.iterdir()) == ["photos", "photos.penstock"]


@pytest.mark.parametrize("name", [".", "idx", "class-0/idx"])
def test_an_index_that_would_become_a_class_is_refused(folder: Path, name: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match="inside the dataset"):
        build_index(folder, out=folder / name, verify=images.verify)
    assert sorted(folder.rglob("*")) == before


def test_an_index_inside_is_no_class_of_ours(folder: Path) -> None:
    build_index(folder, out=folder / "mine.penstock", verify=images.verify)
    images.write_folder(folder, {"other.penstock/1.jpg": images.jpeg(1)})
    index = open_index(folder, verify=images.verify)
    assert (index.samples, index.schema.class_names()) == (6, ("class-0", "class-1", "class-2"))


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/.", "file://{}", "{}/../photos"])
def test_a_folder_has_one_place_however_it_is_spelled(folder: Path, spelling: str) -> None:
    index = open_index(spelling.format(folder), verify=images.verify)
    assert Path(index.place) == folder.with_name("photos.penstock")


def test_the_index_of_tar_files_is_next_to_them(tmp_path: Path) -> None:
    for name in ("a-0.tar", "a-1.tar", "b.tar"):
        path = tmp_path / name
        path.write_bytes(tars.archive({f"{k}.jpg": images.jpeg(k) for k in range(2)}))
    one = open_index(tmp_path / "b.tar", verify=images.verify)
    assert Path(one.place) == tmp_path / "b.tar.penstock"
    some = open_index(f"{tmp_path}/a-{{0..1}}.tar", verify=images.verify)
    place = Path(some.place)
    assert (place.parent, place.suffix) == (tmp_path, ".penstock")
    assert place.name.startswith("a-")
    whole = open_index(tmp_path, verify=images.verify)
    assert Path(whole.place) == tmp_path.with_name(tmp_path.name + ".penstock")
    assert [each.samples for each in (one, some, whole)] == [2, 4, 6]
    shutil.rmtree(whole.place)


def test_a_long_pattern_has_a_name_that_a_file_system_takes() -> None:
    for url in ("/x/" + "é" * 120 + "-{0..9}.tar", "/x/" + "n" * 251 + ".tar", "/x/{a,b}.tar"):
        found = place_of(url).selection
        assert found is not None
        assert len(found.index_name) <= 255
        assert found.index_name.endswith(b".penstock")


def test_the_index_of_a_link_is_next_to_it_or_to_its_target(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert Path(open_index(link, verify=images.verify).place) == tmp_path / "link.penstock"
    shutil.rmtree(tmp_path / "link.penstock")
    open_index(folder, verify=images.verify)
    verify = CountingVerifier()
    assert Path(open_index(link, verify=verify).place) == folder.with_name("photos.penstock")
    assert verify.decoded == 0


def test_without_permission_the_index_is_in_the_cache_folder(sealed: Path, tmp_path: Path) -> None:
    for _ in range(2):
        verify = CountingVerifier()
        index = open_index(sealed, cache=tmp_path / "cache", verify=verify)
        assert Path(index.place).is_relative_to(tmp_path / "cache")
    assert verify.decoded == 0


def test_without_a_cache_it_goes_into_the_users_cache_directory(sealed: Path, home: Path) -> None:
    for _ in range(2):
        verify = CountingVerifier()
        index = open_index(sealed, verify=verify)
        assert Path(index.place).is_relative_to(home / "penstock" / "indexes")
    assert verify.decoded == 0
    assert (home / "penstock").stat().st_mode & 0o077 == 0
    images.write_folder(sealed, {"class-0/new.jpg": images.jpeg(77)})
    assert open_index(sealed, verify=verify).samples == 7
    assert verify.decoded == 1


def test_another_disk_at_the_same_path_has_another_index(
    sealed: Path, home: Path, tmp_path: Path
) -> None:
    del home
    first = open_index(sealed, verify=images.verify)
    sealed.rename(tmp_path / "away")
    images.class_folder(sealed, samples=6)
    assert open_index(sealed, verify=images.verify).place != first.place


def test_without_a_writable_place_there_is_a_warning(
    sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(PenstockWarning, match="isn't kept"):
        assert open_index(sealed, verify=images.verify).samples == 6


@pytest.mark.parametrize("message", ["", "relative/path"])
def test_the_users_cache_directory_is_the_specifications(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", message)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert penstock.cache.base.folders.user_cache() == b"/home/somebody/.cache/penstock"
    monkeypatch.setenv("HOME", "nowhere")
    assert penstock.cache.base.folders.user_cache() is None


def test_an_index_of_another_user_is_left_alone(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_index(folder, verify=images.verify)
    place = os.fsencode(folder) + b".penstock"
    owners = {place: 4242}
    real_stat, real_lstat = os.stat, os.lstat

    def foreign(real: object) -> object:
        def stat(path: object, *args: object, **more: object) -> os.stat_result:
            found = real(path, *args, **more)  # type: ignore[operator]
            uid = owners.get(path, found.st_uid)  # type: ignore[call-overload]
            return os.stat_result((*found[:4], uid, *found[5:]), found.__reduce__()[1][1])

        return stat

    monkeypatch.setattr(os, "stat", foreign(real_stat))
    monkeypatch.setattr(os, "lstat", foreign(real_lstat))
    index = open_index(folder, verify=images.verify)
    assert Path(index.place).is_relative_to(home)
    assert "another user" in caplog.text


@pytest.fixture
def bucket() -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    for i in range(4):
        memory.pipe(f"/bucket/photos/{'ab'[i % 2]}/{i}.jpg", images.jpeg(i))
    yield "memory://bucket/photos"
    memory.rm("/", recursive=True)


def test_a_bucket_is_written_only_on_request(bucket: str, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    before = set(memory.find("/"))
    build_index(bucket, cache=tmp_path / "one", verify=images.verify)
    open_index(bucket, cache=tmp_path / "one", verify=images.verify)
    assert set(memory.find("/")) == before
    summary = build_index(
        bucket, out=f"{bucket}.penstock", cache=tmp_path / "one", verify=images.verify
    )
    assert summary.place == f"{bucket}.penstock"
    assert not any("penstock" in name for name in memory.find("/bucket/photos"))
    verify = CountingVerifier()
    with Dataset(bucket, cache=tmp_path / "two") as dataset:
        dataset.open(verify=verify)
        assert dataset.index.place == f"{bucket}.penstock"
        assert dataset.names(range(4)) == ["a/0.jpg", "a/2.jpg", "b/1.jpg", "b/3.jpg"]
    assert verify.decoded == 0


def test_an_index_elsewhere_in_the_store_is_used(bucket: str, tmp_path: Path) -> None:
    elsewhere = "memory://indexes/of-photos"
    build_index(bucket, out=elsewhere, cache=tmp_path / "one", verify=images.verify)
    verify = CountingVerifier()
    index = open_index(bucket, index=elsewhere, cache=tmp_path / "two", verify=verify)
    assert (index.samples, index.place, verify.decoded) == (4, elsewhere, 0)
    with pytest.raises(DatasetNotFoundError, match="there is no index"):
        open_index(bucket, index="memory://indexes/none", cache=tmp_path / "two", verify=verify)
    with pytest.raises(ConfigError, match="another store"):
        open_index(bucket, index="s3://indexes/x", cache=tmp_path / "two", verify=verify)


@pytest.mark.parametrize("place", ["memory://indexes/train", "local"])
def test_an_index_of_other_remote_files_is_refused(bucket: str, tmp_path: Path, place: str) -> None:
    """Else a part of the shards would be read with the samples of all."""
    memory, index = fsspec.filesystem("memory"), place.replace("local", str(tmp_path / "index"))
    shards = [f"memory://bucket/train/{i}.tar" for i in range(4)]
    for i in range(4):
        memory.pipe(f"/bucket/train/{i}.tar", tars.archive(tars.photographs(3 * i, 3)))
        memory.pipe(f"/bucket/bad/{i}.tar", tars.archive(tars.photographs(30 + 3 * i, 3)))

    def samples(url: object) -> int:
        return open_index(url, index=index, cache=tmp_path / "two", verify=images.verify).samples

    build_index("memory://bucket/train", out=index, cache=tmp_path / "one", verify=images.verify)
    for other in ("memory://bucket/bad", "memory://bucket/train/{0..1}.tar", shards[:2], bucket):
        with pytest.raises(IndexChangedError, match=r"index of memory://bucket/train, not of"):
            samples(other)
    with pytest.raises(
        IndexChangedError, match=r"index 'memory://bucket/train/\{0..1\}.tar' --out"
    ):
        samples("memory://bucket/train/{0..1}.tar")
    assert samples("memory://bucket/train/") == 12
    assert samples("memory://bucket/train/{0..3}.tar") == 12  # other words for the same files
    build_index(shards[:3], out=index, cache=tmp_path / "one", verify=images.verify)
    assert samples(shards[:3]) == 9
    with pytest.raises(IndexChangedError, match="and 2 more"):
        samples([shards[0], *shards[2:]])


def test_local_data_has_a_local_index(folder: Path) -> None:
    with pytest.raises(ConfigError, match="local folder"):
        build_index(folder, out="memory://x/y", verify=images.verify)


def test_remote_data_without_a_cache_is_listed_again(
    tmp_path: Path, home: Path, httpserver_folder: tuple[str, Path]
) -> None:
    del tmp_path
    url, root = httpserver_folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        first, again, more = CountingVerifier(), CountingVerifier(), CountingVerifier()
        index = open_index(url, verify=first)
        assert Path(index.place).is_relative_to(home)
        open_index(url, verify=again)
        images.write_folder(root, {"class-0/new.jpg": images.jpeg(9)})
        assert open_index(url, verify=more).samples == 7
    assert (first.decoded, again.decoded, more.decoded) == (6, 0, 1)


@pytest.fixture
def httpserver_folder(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    from tests.servers.faulty import serving

    root = images.class_folder(tmp_path / "srv" / "photos", samples=6)
    with serving(tmp_path / "srv") as server:
        yield f"{server.url}/photos", root


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket/a/photos/", "s3://bucket/a/photos.penstock"),
        ("s3://bucket", None),
        ("s3://bucket/", None),
        ("https://host:8000/x?token=abc", "https://host:8000/x.penstock?token=abc"),
        ("https://host", None),
        ("abfs://data@account/photos", "abfs://data@account/photos.penstock"),
        ("hf://datasets/org/name", None),
        ("hf://datasets/org/name@main/train", "hf://datasets/org/name@main/train.penstock"),
        ("memory://photos", "memory://photos.penstock"),
        ("zip://a::s3://bucket/photos.zip", None),
    ],
)
def test_a_root_has_no_place_next_to_it(url: str, place: str | None) -> None:
    assert index_url(url, None) == place
