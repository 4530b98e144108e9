"""Test all stores with the conformance tests of `cache.base.store.Store`, and mounts that fail."""

from __future__ import annotations

import errno
import os
import re
import uuid
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from penstock.cache import ConfigError, ReadError
from penstock.cache.base import ObjectInfo, RequestError, Store
from penstock.cache.stores import STORES, FsspecStore, open_store
from penstock.readers.origin import LocalFolder
from tests.servers import NGINX, Faults, MotoServer, Server, moto, nginx, serving
from tests.servers.moto import HAS_MOTO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


OBJECTS = {
    "a.bin": bytes(range(256)) * 40,
    "folder/b.bin": b"0123456789" * 100,
    "folder/deep/c d+é%41#&=.bin": b"odd name",
    "folder/empty": b"",
    "other/x": b"x",
}


class Place:
    """A store and a way around it: `write` puts an object there without the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def write(self, path: str, data: bytes) -> None:
        raise NotImplementedError


class StoreTests:
    """The contract of every Store. Subclasses give `place`, filled with OBJECTS."""

    @pytest.fixture
    def place(self) -> Iterator[Place]:
        raise NotImplementedError

    @pytest.fixture
    def store(self, place: Place) -> Store:
        return place.store

    def test_walk_finds_every_object_with_its_size(self, store: Store) -> None:
        found = {info.path: info.size_bytes for info in store.walk()}
        assert found == {path: len(data) for path, data in OBJECTS.items()}

    def test_walk_of_a_folder_keeps_to_it(self, store: Store) -> None:
        assert {info.path for info in store.walk("folder/deep")} == {
            path for path in OBJECTS if path.startswith("folder/deep/")
        }
        assert list(store.walk("fold")) == []
        assert list(store.walk("nowhere")) == []

    def test_top_lists_objects_and_folders(self, store: Store) -> None:
        objects, folders = store.list_folder()
        assert [info.path for info in objects] == ["a.bin"]
        assert sorted(folders) == ["folder", "other"]
        objects, folders = store.list_folder("folder")
        assert sorted(info.path for info in objects) == ["folder/b.bin", "folder/empty"]
        assert folders == ["deep"]
        assert store.list_folder("nowhere") == ([], [])

    def test_info_and_the_listings_agree(self, store: Store) -> None:
        listed = {info.path: info for info in store.walk()}
        for path in OBJECTS:
            assert store.info(path) == listed[path]
        assert store.info("nowhere") is None
        assert store.info("folder/nowhere") is None

    def test_a_whole_object(self, store: Store) -> None:
        for path, data in OBJECTS.items():
            answer = store.read(path)
            assert bytes(answer.data) == data
            assert answer.object_bytes == len(data)
            assert answer.version == info_of(store, path).version != ""

    @pytest.mark.parametrize("span", [(0, 1), (0, 10240), (255, 257), (10239, 10240), (0, 10239)])
    def test_a_range_is_exact(self, store: Store, span: tuple[int, int]) -> None:
        version = info_of(store, "a.bin").version
        for given in (None, version):
            answer = store.read("a.bin", span, version=given)
            assert bytes(answer.data) == OBJECTS["a.bin"][slice(*span)]
            assert (answer.version, answer.object_bytes) == (version, 10240)

    @pytest.mark.parametrize("span", [(0, 10241), (10240, 10250), (20000, 20001)])
    def test_a_range_past_the_end_means_another_object(
        self, store: Store, span: tuple[int, int]
    ) -> None:
        for version in (None, info_of(store, "a.bin").version):
            with pytest.raises(RequestError) as caught:
                store.read("a.bin", span, version=version)
            assert caught.value.kind == "changed"

    def test_an_empty_range_is_refused(self, store: Store) -> None:
        with pytest.raises(RequestError) as caught:
            store.read("a.bin", (5, 5))
        assert caught.value.kind == "refused"

    def test_a_missing_object_is_reported(self, store: Store) -> None:
        for span in (None, (0, 4)):
            with pytest.raises(RequestError) as caught:
                store.read("folder/nowhere", span)
            assert caught.value.kind == "missing"

    def test_another_version_is_never_delivered(self, place: Place) -> None:
        store = place.store
        old = info_of(store, "folder/b.bin").version
        place.write("folder/b.bin", b"9876543210" * 101)
        assert info_of(store, "folder/b.bin").version != old
        for span in (None, (0, 5), (1000, 1010)):
            assert failure_of(lambda span=span: store.read("folder/b.bin", span, version=old)) == (
                "changed"
            )
        assert bytes(store.read("folder/b.bin", (0, 3)).data) == b"987"

    def test_its_address_is_shown_without_secrets(self, store: Store) -> None:
        assert store.url in repr(store)
        assert "@" not in store.url
        assert re.fullmatch("[0-9a-f]*", store.scope)
        store.close()
        store.close()


class WritableStoreTests(StoreTests):
    """Of a store that can put."""

    def test_put_then_read(self, store: Store, tmp_path: Path) -> None:
        local = tmp_path / "local"
        local.write_bytes(b"put here")
        store.put(str(local), "new/put")
        assert bytes(store.read("new/put").data) == b"put here"
        assert info_of(store, "new/put").size_bytes == 8


def info_of(store: Store, path: str) -> ObjectInfo:
    info = store.info(path)
    assert info is not None
    return info


def failure_of(read: Callable[[], object]) -> str:
    """What a request that must fail fails with. nginx closes a connection after some errors; a
    request that was just sent on it is cut, which is what retries are for."""
    for _ in range(8):
        with pytest.raises(RequestError) as caught:
            read()
        if caught.value.kind != "transient":
            break
    return caught.value.kind


def write_all(place: Place) -> Place:
    for path, data in OBJECTS.items():
        place.write(path, data)
    return place


class InFolder(Place):
    def __init__(self, store: Store, folder: Path) -> None:
        super().__init__(store)
        self.folder = folder

    def write(self, path: str, data: bytes) -> None:
        local = self.folder / path
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(data)


LOGINS = {
    "gs": {"anon": True},
    "gcs": {"anon": True},
    **{az: {"account_name": "a", "account_key": "a2V5"} for az in ("az", "abfs", "abfss")},
    **{s3: {"key": "k", "secret": "s", "region": "r"} for s3 in ("s3", "s3a")},
}


@pytest.mark.parametrize("scheme", [*STORES, "memory", "file"])
def test_the_scheme_chooses_the_store(scheme: str) -> None:
    """fsspec serves schemes that aren't in the table."""
    store = open_store(f"{scheme}://bucket/folder", LOGINS.get(scheme, {}))
    assert isinstance(store, FsspecStore) == (scheme not in STORES)
    assert store.url == f"{scheme}://bucket/folder"
    store.close()


class TestLocalFiles(WritableStoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        root = tmp_path / "root"
        return write_all(InFolder(open_store(root.as_uri(), {}), root))


class TestFolderOfAFileSystem(WritableStoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        files = DirFileSystem(str(tmp_path / "set"), fs=LocalFileSystem())
        return write_all(InFolder(open_store("root", {}, filesystem=files), tmp_path / "set/root"))

    def test_folders_of_one_name_are_two_places(self, tmp_path: Path) -> None:
        urls = {
            open_store("root", {}, filesystem=DirFileSystem(str(tmp_path / name))).url
            for name in ("one", "two")
        }
        assert urls == {f"{tmp_path}/one/root", f"{tmp_path}/two/root"}

    def test_a_place_outside_of_the_folder_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"\.\./root: .*escapes"):
            open_store("../root", {}, filesystem=DirFileSystem(str(tmp_path)))


class TestMemory(WritableStoreTests):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        root = f"memory://{uuid.uuid4().hex}/set"

        class Memory(Place):
            def write(self, path: str, data: bytes) -> None:
                with fsspec.open(f"{root}/{path}", "wb") as file:
                    file.write(data)

        yield write_all(Memory(open_store(root, {})))
        fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with serving(tmp_path / "root") as server:
        yield server


class TestHttp(StoreTests):
    @pytest.fixture
    def place(self, server: Server) -> Place:
        folder = InFolder(open_store(f"{server.url}/bucket/", {}), _folder(server))
        return write_all(folder)


class TestS3OfThePlainServer(WritableStoreTests):
    @pytest.fixture
    def place(self, server: Server) -> Place:
        store = open_store("s3://bucket/set", server.s3_options)
        return write_all(InFolder(store, _folder(server) / "set"))


def _folder(server: Server) -> Path:
    from pathlib import Path

    return Path(server.folder) / "bucket"


class TestHttpThroughFsspec(StoreTests):
    @pytest.fixture
    def place(self, server: Server) -> Place:
        pytest.importorskip("aiohttp")
        fs = fsspec.filesystem("http", skip_instance_cache=True, use_listings_cache=True)
        store = open_store(f"{server.url}/bucket", {}, filesystem=fs)
        return write_all(InFolder(store, _folder(server)))


@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed (Debian: nginx-light)")
class TestNginx(StoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        root = tmp_path / "root"
        root.mkdir()
        with nginx(root) as url:
            yield write_all(InFolder(open_store(f"{url}/set", {}), root / "set"))


@pytest.fixture(scope="module")
def moto_server() -> Iterator[MotoServer]:
    if not HAS_MOTO:
        pytest.skip("moto[server] isn't installed")
    with moto() as server:
        yield server


class InBucket(Place):
    def __init__(self, store: Store, server: MotoServer, bucket: str) -> None:
        super().__init__(store)
        self._client = server.client
        self._bucket = bucket

    def write(self, path: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"set/{path}", Body=data)


class TestS3OfMoto(WritableStoreTests):
    @pytest.fixture
    def place(self, moto_server: MotoServer) -> Place:
        bucket = f"b{uuid.uuid4().hex}"
        moto_server.bucket(bucket)
        store = open_store(f"s3://{bucket}/set", moto_server.s3_options)
        return write_all(InBucket(store, moto_server, bucket))

    def test_markers_of_folders_are_no_objects(self, place: Place) -> None:
        place.write("folder/", b"")
        place.write("folder/deep/", b"")
        place.write("", b"")
        assert {info.path for info in place.store.walk()} == set(OBJECTS)
        assert [info.path for info in place.store.list_folder()[0]] == ["a.bin"]
        assert sorted(info.path for info in place.store.list_folder("folder")[0]) == [
            "folder/b.bin",
            "folder/empty",
        ]

    def test_a_bucket_that_is_not_there_is_reported(self, moto_server: MotoServer) -> None:
        store = open_store("s3://no-such-bucket/set", moto_server.s3_options)
        assert failure_of(lambda: list(store.walk())) == "missing"
        assert failure_of(store.list_folder) == "missing"
        assert failure_of(lambda: store.read("x")) == "missing"


class TestS3fsOfMoto(WritableStoreTests):
    @pytest.fixture
    def place(self, moto_server: MotoServer) -> Place:
        s3fs = pytest.importorskip("s3fs")
        bucket = f"b{uuid.uuid4().hex}"
        moto_server.bucket(bucket)
        fs = s3fs.S3FileSystem(**moto_server.s3_options, skip_instance_cache=True)
        store = open_store(f"s3://{bucket}/set", {}, filesystem=fs)
        return write_all(InBucket(store, moto_server, bucket))


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("status", ["503", "429"])
def test_what_follows_a_throttled_request_sees_retry_after(
    tmp_path: Path, scheme: str, status: str
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x.bin").write_bytes(bytes(range(200)))
    with serving(tmp_path) as server:
        url, options = server.s3("bucket"), server.s3_options
        if scheme == "http":
            url, options = f"{server.url}/bucket", {}
        store = open_store(url, options)
        whole = store.read("x.bin", (5, 20))
        server.faults = Faults(p=1.0, kinds=(status,), times=3, retry_after="7")
        server.reset()
        for waits in (7.0, 7.0, 7.0):
            with pytest.raises(RequestError) as caught:
                store.read("x.bin", (5, 20), version=whole.version)
            assert caught.value.kind == "throttled"
            assert caught.value.retry_after_s == waits
        again = store.read("x.bin", (5, 20), version=whole.version)
        assert (bytes(again.data), again.version) == (bytes(whole.data), whole.version)
        assert again.object_bytes == 200
        (tmp_path / "bucket" / "x.bin").write_bytes(bytes(100))
        with pytest.raises(RequestError) as caught:
            store.read("x.bin", (5, 20), version=whole.version)
        assert caught.value.kind == "changed"
        store.close()


FAULTS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT]


def failing(code: int) -> Any:
    def fail(*_args: Any, **_more: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("what", ["walk", "top", "info", "read"])
def test_a_mount_that_fails_is_no_empty_folder(
    what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "x").write_bytes(b"hello")
    store = open_store(tmp_path.as_uri(), {})
    found = store.info("inner/x")
    assert found is not None
    version = found.version
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if os.fspath(path).endswith("inner"):
            failing(code)()
        return real(path)

    if what in ("walk", "top"):
        monkeypatch.setattr("os.scandir", scandir)
    elif what == "info":
        monkeypatch.setattr("os.stat", failing(code))
    else:
        monkeypatch.setattr("builtins.open", failing(code))
    ask = {
        "walk": lambda: list(store.walk()),
        "top": lambda: store.list_folder("inner"),
        "info": lambda: store.info("inner/x"),
        "read": lambda: store.read("inner/x", (0, 5), version=version),
    }[what]
    with pytest.raises(RequestError) as caught:
        ask()
    monkeypatch.undo()
    assert caught.value.kind == ("denied" if code == errno.EACCES else "transient")
    assert caught.value.remedy is not None
    assert "credentials" not in caught.value.remedy
    assert [info.path for info in store.walk()] == ["inner/x"]
    assert list(store.walk("nowhere")) == []
    assert store.info("nowhere") is None


@pytest.mark.parametrize("code", FAULTS)
def test_a_file_that_cant_be_looked_at_is_not_missing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.tar").write_bytes(b"hello")
    origin = LocalFolder(os.fsencode(tmp_path), None)
    assert origin.entry(b"x.tar") is not None
    assert origin.entry(b"nowhere") is None
    real = os.stat

    def stat(path: Any, **more: Any) -> Any:
        if os.fsencode(path).endswith(b"x.tar"):
            failing(code)()
        return real(path, **more)

    monkeypatch.setattr("os.stat", stat)
    with pytest.raises(ReadError, match=r"x\.tar: can't be examined"):
        origin.entry(b"x.tar")
