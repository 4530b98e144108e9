"""Test URLs that select files: one file, patterns, lists, arrangements, local and in stores."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock import Dataset
from penstock.cache import ConfigError, DatasetNotFoundError, MissingDependencyError
from penstock.readers.fieldtypes import Text
from penstock.readers.origin import (
    DEFAULT_ARRANGEMENT,
    Arrangement,
    LocalFolder,
    Scratch,
    local_path,
    locate,
    of_names,
    options_scope,
    place_of,
    show,
)
from tests.servers.faulty import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.origin import Origin


FILES = (
    "data/train-00001-of-2.parquet",
    "data/train-00000-of-2.parquet",
    "data/.hidden.parquet",
    "data/test.parquet",
    "data/deep/er/test.parquet",
    "data/deep/x[1].parquet",
    "data/deep/_SUCCESS",
    "data/old.penstock/manifest.parquet",
    "x.npy",
    "x.npy.penstock/manifest.arrow",
    "spark.parquet/part-0.parquet",
)


class CountingFiles(MemoryFileSystem):
    """A file system of another protocol that records its calls."""

    protocol = "hf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[list[tuple[str, str]]] = []
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = MemoryFileSystem._strip_protocol(path.replace("hf://", "memory://"))
        return found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.asked.append(("info", path))
        found: dict[str, Any] = super().info(path, **options)
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.asked.append(("ls", path))
        return super().ls(path, detail=detail, **options)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        self.asked.append(("find", path))
        return super().find(path, *args, **options)


@pytest.fixture
def local(tmp_path: Path) -> str:
    for name in FILES:
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(name.encode())
    return str(tmp_path / "set")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # fsspec has no way to take an implementation back.
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", CountingFiles)
    files = CountingFiles()
    for name in FILES:
        files.pipe(f"/datasets/me/set/{name}", name.encode())
    CountingFiles.asked.clear()
    yield "hf://datasets/me/set"
    CountingFiles.store.clear()
    CountingFiles.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("tree")
    for name in ("a", "b.x", "d/a", "d/b.x", "d/d/a", "d/d/bb.x", "d/d/c/a", "f/a", "f/.h", ".g/a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return str(root)


@pytest.fixture(params=["local", "hub"])
def base(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Origin]]:
    with contextlib.ExitStack() as stack:
        scratch = Scratch(tmp_path / "cache")
        stack.callback(scratch.close)

        def open(url: Any, **options: Any) -> Origin:
            origin = locate(url, storage_options=None, scratch=scratch, **options)
            stack.callback(origin.close)
            return origin

        yield open


def names(origin: Origin) -> list[str]:
    found = [os.fsdecode(entry.name) for entry in origin.entries(bool)]
    assert [os.fsdecode(name) for name in origin.names().files] == found
    return found


CASES = [
    ("x.npy", ["x.npy"]),
    ("data/*.parquet", ["test.parquet", "train-00000-of-2.parquet", "train-00001-of-2.parquet"]),
    ("data/train-*-of-*.parquet", ["train-00000-of-2.parquet", "train-00001-of-2.parquet"]),
    ("data/train-0000[0-9]-of-?.parquet", ["train-00000-of-2.parquet", "train-00001-of-2.parquet"]),
    ("data/train-{00001..00001}-of-2.parquet", ["train-00001-of-2.parquet"]),
    ("data/{train-00001-of-2,test}.parquet", ["train-00001-of-2.parquet", "test.parquet"]),
    ("data/{train-*,tes?}.parquet", ["train-00000-of-2.parquet", "train-00001-of-2.parquet"]),
    (
        "data/**/*.parquet",
        [
            "deep/er/test.parquet",
            "deep/x[1].parquet",
            "test.parquet",
            "train-00000-of-2.parquet",
            "train-00001-of-2.parquet",
        ],
    ),
    ("data/**/test.parquet", ["deep/er/test.parquet", "test.parquet"]),
    ("*/*/er/*", ["data/deep/er/test.parquet"]),
    ("data/de*/er/test.parquet", ["deep/er/test.parquet"]),
    ("data/deep/x[[]1].parquet", ["x[1].parquet"]),
    ("spark.parquet/**", ["part-0.parquet"]),
]


@pytest.mark.parametrize(("url", "wanted"), CASES)
def test_a_url_names_files(
    base: str, opened: Callable[..., Origin], url: str, wanted: list[str]
) -> None:
    origin = opened(f"{base}/{url}")
    assert origin.selection is not None
    extra = ["test.parquet"] if "tes?" in url else []
    assert names(origin) == wanted + extra
    assert names(origin) == wanted + extra
    assert origin.entry(os.fsencode(wanted[0])) == origin.entries(bool)[0]
    assert origin.entries(lambda name: name.endswith(b"nothing")) == []


def test_a_folder_with_the_name_of_a_file_is_a_folder(
    base: str, opened: Callable[..., Origin]
) -> None:
    for url in (f"{base}/spark.parquet", f"{base}/spark.parquet/", f"{base}/data"):
        assert opened(url).selection is None
    assert opened(f"{base}/spark.parquet").names().files == (b"part-0.parquet",)
    assert opened(f"{base}/data").names().folders == (b"deep", b"old.penstock")


def test_a_list_is_in_its_own_order_and_its_root_is_what_it_shares(
    base: str, opened: Callable[..., Origin]
) -> None:
    urls = [f"{base}/data/test.parquet", f"{base}/data/deep/er/*", f"{base}/data/train-*.parquet"]
    origin = opened(urls)
    trains = ["train-00000-of-2.parquet", "train-00001-of-2.parquet"]
    assert names(origin) == ["test.parquet", "deep/er/test.parquet", *trains]
    assert opened(urls[::-1]).key != origin.key
    assert opened(tuple(urls)).key == origin.key
    assert show(urls) == f"{urls[0]} and 2 more"


@pytest.mark.parametrize(
    ("urls", "error", "match"),
    [
        (["{}/data/no*.parquet"], DatasetNotFoundError, "no file matches"),
        (["{}/data/no.parquet", "{}/x.npy"], DatasetNotFoundError, "1 of 2 files.*no.parquet"),
        (["{}/data/*", "{}/data/test.parquet"], ConfigError, "twice"),
        (["{}/data/test.parquet", "{}/data/test.parquet"], ConfigError, "twice"),
        (["{}/data/a**.parquet"], ConfigError, r"\*\* stands for whole folders"),
        (["{}/x.npy", "s3://bucket/x.npy"], ConfigError, "one store"),
        (["{}/data/[z-a]*.npy"], DatasetNotFoundError, "no file matches"),
        ([], ConfigError, "list of 0"),
        (["{}/x.npy", 5], ConfigError, "in a list"),
    ],
)
def test_invalid_lists_are_refused(
    base: str, opened: Callable[..., Origin], urls: list[Any], error: type[Exception], match: str
) -> None:
    given = [each.format(base) if isinstance(each, str) else each for each in urls]
    with pytest.raises(error, match=match):
        opened(given).names()


def test_folders_arent_joined_by_a_list(local: str) -> None:
    with pytest.raises(ConfigError, match="concat"):
        place_of([f"{local}/data", f"{local}/spark.parquet"])


@pytest.mark.parametrize("as_list", [False, True])
def test_programs_of_webdataset_are_refused(as_list: bool) -> None:
    url = "pipe:aws s3 cp s3://bucket/{0..3}.tar -"
    with pytest.raises(ConfigError, match="runs a program"):
        Dataset([url] if as_list else url)


def test_an_existing_file_whose_name_looks_like_a_pattern_is_selected(
    base: str, opened: Callable[..., Origin]
) -> None:
    origin = opened([f"{base}/data/deep/x[1].parquet", f"{base}/x.npy"])
    assert names(origin) == ["data/deep/x[1].parquet", "x.npy"]


@pytest.mark.parametrize(
    "urls",
    [
        ["s3://a/x.npy", "s3://b/x.npy"],
        ["s3://a/x.npy", "gs://a/x.npy"],
        ["https://one/x.npy", "https://two/x.npy"],
        ["https://one/x.npy?sig=1", "https://one/y.npy?sig=2"],
        ["s3://a/x.npy", "/a/x.npy"],
        ["zip://a::s3://b/x.zip", "zip://b::s3://b/x.zip"],
    ],
)
def test_a_list_of_files_of_several_stores_is_refused(urls: list[Any]) -> None:
    with pytest.raises(ConfigError, match="one store"):
        place_of(urls)


@pytest.mark.parametrize(
    ("url", "root", "parts"),
    [
        ("s3://b/x.npy", "s3://b", ["x.npy"]),
        ("s3://x.npy", "s3://x.npy", None),
        ("memory://x.npy", "memory://", ["x.npy"]),
        ("https://h/x.npy", "https://h", ["x.npy"]),
        ("https://h/a%20b/x%20y.npy?sig=*", "https://h/a%20b?sig=*", ["x y.npy"]),
        ("https://h/set?list=*", "https://h/set?list=*", None),
        ("s3://b/set[2020]/2021", "s3://b/set[2020]/2021", None),
        ("s3://b/set", "s3://b/set", None),
        ("s3://b/set/*.npy", "s3://b/set", ["*.npy"]),
        ("s3://b/*/*.npy", "s3://b", ["*/*.npy"]),
    ],
)
def test_what_a_url_names_is_known_without_a_request(
    url: str, root: str, parts: list[str] | None
) -> None:
    place = place_of(url)
    assert place.root == root
    assert (list(place.selection.parts) if place.selection else None) == parts


def test_a_pattern_must_be_below_a_bucket() -> None:
    with pytest.raises(ConfigError, match="bucket"):
        place_of("s3://*/x.npy")


def test_only_folders_that_can_match_a_pattern_are_listed(
    hub: str, opened: Callable[..., Origin]
) -> None:
    asked = CountingFiles.asked
    origin = opened(f"{hub}/data/train-*.parquet")
    assert asked == []
    origin.names()
    origin.entries(bool)
    assert [name for name, _ in asked] == ["ls"]
    asked.clear()
    opened(f"{hub}/x.npy").names()
    assert {path for _, path in asked} == {"/datasets/me/set/x.npy"}


def test_an_index_of_files_has_its_own_name_next_to_them() -> None:
    def name(url: str) -> bytes:
        place = place_of(url)
        assert place.selection is not None
        return place.selection.index_name

    assert name("s3://b/d/x.npy") == b"x.npy.penstock"
    kinds = {name(f"s3://b/d/{each}") for each in ("*.npy", "t-*.npy", "t-{0..1}.npy", "**/*.npy")}
    assert len(kinds) == 4
    assert sorted(each.partition(b"-")[0] for each in kinds) == [b"npy", b"npy", b"t", b"t"]
    assert all(each.endswith(b".penstock") for each in kinds)


def test_a_single_object_of_a_web_server_needs_no_listing(
    local: str, opened: Callable[..., Origin]
) -> None:
    server = Server(local)
    try:
        origin = opened(f"{server.url}/x.npy?signature=secret")
        server.reset()
        (entry,) = origin.entries(bool)
        assert (entry.name, entry.size_bytes) == (b"x.npy", 5)
        assert server.requests == 1
        assert "secret" not in origin.url + origin.key
    finally:
        server.close()


def test_the_hubs_package_is_named() -> None:
    if find_spec("huggingface_hub") is not None:
        pytest.skip("it is installed")
    with pytest.raises(MissingDependencyError, match="huggingface_hub"):
        locate("hf://datasets/me/set/x.parquet", storage_options=None, scratch=Scratch())


PART = st.sampled_from(["a", "d", "b*", "*", "?", "**", "[a-d]*", "[!a]", "*.x"])


PARTS = st.lists(PART, min_size=1, max_size=4)


@given(parts=PARTS)
def test_patterns_match_like_pythons_glob(tree: str, parts: list[str]) -> None:
    pattern = "/".join(parts)
    found = glob.glob(pattern, root_dir=tree, recursive=True)
    wanted = {os.path.normpath(each) for each in found if os.path.isfile(f"{tree}/{each}")}
    selection = of_names([pattern])
    assume(selection.is_listed)
    origin = LocalFolder(os.fsencode(tree), selection)
    try:
        names = [os.fsdecode(name) for name in origin.names().files]
    except DatasetNotFoundError:
        names = []
    assert names == sorted(wanted)


ARRANGEMENTS = (
    DEFAULT_ARRANGEMENT,
    Arrangement(manifest="list.csv"),
    Arrangement(manifest="other.csv"),
    Arrangement(places=(("image", "images"), ("mask", "masks"))),
    Arrangement(places=(("mask", "masks"), ("image", "images"))),
    Arrangement(schema={"label": Text()}),
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


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("photos", b"photos"),
        (b"pho\xff", b"pho\xff"),
        (Path("/data/photos"), b"/data/photos"),
        ("file:///data/photos", b"/data/photos"),
        ("local:///data", b"/data"),
        ("a::b", b"a::b"),
        ("s3://bucket/photos", None),
        ("https://host/photos", None),
        ("simplecache::s3://bucket/photos", None),
        ("zip://photos::file:///data/set.zip", None),
    ],
)
def test_paths_are_distinguished_from_urls(url: object, path: bytes | None) -> None:
    assert local_path(url) == path  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("s3://bucket/a", "s3://other/b", True),
        ("S3://bucket/a", "s3://bucket/a", True),
        ("s3://bucket/a", "gs://bucket/a", False),
        ("https://host/a", "https://host/b?c=d", True),
        ("https://me:word@host/a", "https://host/b", True),
        ("https://host/a", "https://other/a", False),
        ("https://host/a", "http://host/a", False),
    ],
)
def test_options_are_for_one_store(first: str, second: str, is_same: bool) -> None:
    assert (options_scope(first) == options_scope(second)) is is_same


def test_credentials_are_not_shown() -> None:
    assert show("https://me:word@host/set?sig=abc") == "https://host/set"
    assert show(b"/data/photos") == "/data/photos"
