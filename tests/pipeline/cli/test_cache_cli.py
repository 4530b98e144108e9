"""Test `penstock cache …` and `penstock doctor DIR` on used, damaged and foreign folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import DiskCache
from penstock.cache.base import BlobSource, Segment, blob_key
from penstock.cache.disk import CacheFolder, PinnedShare
from penstock.pipeline.cli import CACHE, DoctorFacts, ago, cache_facts, folder_facts, main
from tests import warm
from tests.files import flip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT = 16 * 2**20
BLOB_BYTES = 100_000


def a_source(name: str) -> BlobSource:
    uri = f"s3://b/{name}"
    segment = Segment(path=name, size_bytes=BLOB_BYTES, version=None)
    key = blob_key(scope="", uri=uri, version="1")
    return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=BLOB_BYTES)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of two datasets with six blobs."""
    folder = tmp_path / "cache"
    shelf = CacheFolder(str(folder), max_bytes=LIMIT)
    for number in range(6):
        group = "one" if number < 4 else "two"
        shelf.catalogue.set_label(group, f"s3://b/{group}")
        data = memoryview(os.urandom(BLOB_BYTES))
        assert shelf.put(a_source(f"{group}/[{number}].tar"), data, group=group, kept=False)
    shelf.close()
    return folder


@pytest.fixture
def job(root: Path) -> Iterator[CacheFolder]:
    """A live job on it, which has one blob mapped."""
    shelf = CacheFolder(str(root), max_bytes=LIMIT)
    mapped = shelf.find(a_source("one/[0].tar").key, BLOB_BYTES)
    assert mapped is not None
    yield shelf
    del mapped
    shelf.close()


def json_of(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> dict[str, Any]:
    """Return the output of `penstock cache … --json`."""
    assert main(["cache", *map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Return the output without --json, on one line."""
    assert main(list(map(str, arguments))) == code
    both = capsys.readouterr()
    return " ".join((both.out + both.err).split())


@pytest.mark.usefixtures("job")
def test_ls_names_each_blob(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs = json_of(capsys, "ls", root)["blobs"]
    assert {(b["label"], b["size_bytes"], b["state"]) for b in blobs} == {
        ("s3://b/one", BLOB_BYTES, "ready"),
        ("s3://b/two", BLOB_BYTES, "ready"),
    }
    assert [b["uri"] for b in blobs if b["in_use"]] == ["s3://b/one/[0].tar"]
    assert len(json_of(capsys, "ls", root, "--dataset", "b/two")["blobs"]) == 2
    text = shown(capsys, "cache", "ls", root)
    assert "6 blobs, 585.9 KiB" in text
    assert "mapped" in text
    assert "[5].tar" in text.replace(" ", "")


def test_stat_names_limit_datasets_and_jobs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = DiskCache(root, max_bytes=LIMIT)
    sources = [a_source(f"two/[{number}].tar") for number in (4, 5)]
    keys, sizes = [each.key for each in sources], [BLOB_BYTES] * 2
    membership = PinnedShare(cache.use, group="two", label="s3://b/two", keys=keys, sizes=sizes)
    found = json_of(capsys, "stat", root)
    assert (found["max_bytes"], found["blobs"], found["fills"]) == (LIMIT, 6, 0)
    assert set(found["labels"]) == {"s3://b/one", "s3://b/two"}
    assert [each["pid"] for each in found["jobs"]] == [os.getpid()]
    text = shown(capsys, "cache", "stat", root)
    assert "16.0 MiB" in text
    assert f"process {os.getpid()}: s3://b/two, keeps" in text
    membership.leave()
    cache.close()
    assert json_of(capsys, "stat", root)["jobs"] == []


def test_verify_drops_bad_blobs_and_reports_them(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json_of(capsys, "verify", root)["checked"] == 6
    bad = a_source("one/[2].tar")
    flip(root / "blobs" / bad.key, 777)
    short = a_source("one/[3].tar")
    os.truncate(root / "blobs" / short.key, 5000)
    found = json_of(capsys, "verify", root, code=1)
    assert {each["uri"] for each in found["bad"]} == {bad.uri, short.uri}
    assert not (root / "blobs" / bad.key).exists()
    assert json_of(capsys, "verify", root)["checked"] == 4
    flip(root / "blobs" / a_source("two/[4].tar").key, 777)
    text = shown(capsys, "cache", "verify", root, code=1)
    assert "s3://b/two/[4].tar: dropped; the next job fetches it again" in text
    assert "done 3 blobs checked" in shown(capsys, "cache", "verify", root)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_verify_drops_what_a_disk_cant_read_and_nothing_where_the_machine_fails(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    before = sorted((root / "blobs").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        assert main(["cache", "verify", str(root)]) == 1
    said = capsys.readouterr()
    assert os.strerror(code) in " ".join((said.out + said.err).split())
    assert sorted((root / "blobs").iterdir()) == ([] if code == errno.EIO else before)


def test_verify_reports_what_it_cant_check(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "catalogue.db").write_bytes(b"not a catalogue" * 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        text = shown(capsys, "cache", "verify", root)
    assert "6 of them lost their dataset" in text
    assert "6 blobs without checksums" in text


def test_evict_takes_the_least_recently_used_and_nothing_that_is_mapped(
    root: Path, job: CacheFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job.space.flush_uses()
    found = json_of(capsys, "evict", root, "--to", "350KB")
    assert (found["blobs"], found["left_bytes"] <= 350_000) == (3, True)
    left = {each["uri"] for each in json_of(capsys, "ls", root)["blobs"]}
    assert "s3://b/one/[0].tar" in left
    assert json_of(capsys, "evict", root, "--dataset", "s3://b/two")["blobs"] >= 1
    assert main(["cache", "evict", str(root), "--to", "0"]) == 0
    warning = " ".join(capsys.readouterr().err.split())
    assert "more than --to 0 B" in warning
    assert [each["uri"] for each in json_of(capsys, "ls", root)["blobs"]] == ["s3://b/one/[0].tar"]


@pytest.mark.usefixtures("job")
def test_clear_asks_and_leaves_what_a_job_has_mapped(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert main(["cache", "clear", str(root)]) == 1
    assert len(os.listdir(root / "blobs")) == 6
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    text = shown(capsys, "cache", "clear", root)
    assert "5 blobs evicted" in text
    assert "left: 100.0 KiB" in text
    assert len(os.listdir(root / "blobs")) == 1
    assert json_of(capsys, "clear", root, "--yes")["left_bytes"] > 0


def test_clear_without_a_terminal_clears_nothing(root: Path) -> None:
    run = warm.run(["-m", "penstock.pipeline.cli", "cache", "clear", root])
    assert run.returncode == 1
    assert len(os.listdir(root / "blobs")) == 6


def leave_litter(root: Path) -> None:
    """Write files that killed processes and users leave behind."""
    (root / "fills" / f"{'ab' * 20}.part").write_bytes(bytes(50_000))
    (root / "fills" / f"{'ab' * 20}.map").write_bytes(bytes(600))
    (root / "trash" / f"{'cd' * 20}-123").write_bytes(bytes(50_000))
    with sqlite3.connect(root / "catalogue.db") as books:
        books.execute("INSERT INTO members VALUES (77, 'one', 'x', 1, 1, 'g', 1, 0)")
    books.close()


def test_gc_and_the_doctor_find_what_the_dead_left(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_litter(root)
    before = sorted(os.listdir(root / "fills"))
    facts = cache_facts(root)
    assert (facts["dead_jobs"], facts["strays"], facts["blobs"]) == (1, 3, 6)
    assert facts["leftover_bytes"] >= 100_000
    assert sorted(os.listdir(root / "fills")) == before  # a doctor only looks
    found = {
        check.name: check for check in CACHE.findings(DoctorFacts(**facts | folder_facts(root)))
    }
    assert "1 dead job, 3 stray files" in found["leftovers"].found
    json_of(capsys, "gc", root)
    assert [os.listdir(root / name) for name in ("fills", "trash")] == [[], []]
    facts = cache_facts(root)
    assert (facts["dead_jobs"], facts["strays"], facts["leftover_bytes"], facts["blobs"]) == (
        0,
        0,
        0,
        6,
    )
    assert "0 leftovers removed" in shown(capsys, "cache", "gc", root)


def test_the_doctor_sees_live_jobs_and_a_reboot(root: Path) -> None:
    with_job = DiskCache(root, max_bytes=LIMIT)
    keys = [a_source(f"one/{number}").key for number in range(1000)]
    sizes = [BLOB_BYTES] * len(keys)
    membership = PinnedShare(with_job.use, group="one", label="s3://b/one", keys=keys, sizes=sizes)
    facts = cache_facts(root)
    (one,) = facts["jobs"]
    assert (one["label"], one["pid"]) == ("s3://b/one", os.getpid())
    assert one["wanted_bytes"] == 1000 * 102_400
    assert 0 < one["share_bytes"] < LIMIT
    checks = {
        check.name: check for check in CACHE.findings(DoctorFacts(**facts | folder_facts(root)))
    }
    assert (checks["jobs"].status, "larger max_bytes" in checks["jobs"].remedy) == ("warn", True)
    membership.leave()
    with_job.close()
    (root / "boot").write_text("another boot")
    facts = cache_facts(root)
    assert (facts["jobs"], facts["unverified"]) == ((), 6)


def test_a_folder_that_is_no_cache_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for name in ("ls", "stat", "verify", "gc"):
        assert "isn't a cache folder" in shown(capsys, "cache", name, tmp_path, code=2)
    assert "isn't a cache" in shown(capsys, "cache", "clear", tmp_path, "--yes", code=2)
    assert "isn't a cache" in shown(capsys, "cache", "evict", tmp_path, "--to", "1GB", code=2)
    assert "isn't a cache" in shown(capsys, "cache", "ls", tmp_path / "nowhere", code=2)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_newer_format_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "format.json").write_text('{"format": 999}')
    for name in ("ls", "verify", "gc"):
        assert "format 999" in shown(capsys, "cache", name, root, code=2)
    assert "format 999" in shown(capsys, "cache", "clear", root, "-y", code=2)
    facts = cache_facts(root)
    assert "format 999" in facts["problem"]
    assert [c.status for c in CACHE.findings(DoctorFacts(**facts | folder_facts(root)))] == ["fail"]
    assert len(os.listdir(root / "blobs")) == 6


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--to", "1.5 parsecs"], "1.5 parsecs"),
        (["--to", "-1"], "-1"),
        ([], "neither --to nor --dataset"),
        (["--dataset", "s3://b/three"], "s3://b/three"),
    ],
)
def test_wrong_use_of_evict_changes_nothing(
    root: Path, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what in shown(capsys, "cache", "evict", root, *arguments, code=2)
    assert len(os.listdir(root / "blobs")) == 6


# The interpreter may lie where another user can't read, so all is imported before.
AS_NOBODY = """
import os, sys, unicodedata
from penstock.pipeline.cli import main
root, *arguments = sys.argv[1:]
assert main(["cache", arguments[0], root + "-none", *arguments[1:]]) == 2
assert main(["cache", "ls", root]) == 0
os.setgroups([]), os.setgid(65534), os.setuid(65534)
sys.exit(main(["cache", arguments[0], root, *arguments[1:]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_another_users_cache_is_left_alone(root: Path, mode: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        moved = shutil.copytree(root, f"{place}/cache")
        os.chmod(moved, mode)
        for command in (["stat"], ["clear", "--yes"], ["gc"]):
            run = warm.run(["-c", AS_NOBODY, moved, *command])
            assert run.returncode in (1, 2), run.stdout + run.stderr
            assert "Traceback" not in run.stderr
            assert f"error: {moved}: the cache can't be" in " ".join(run.stderr.split())
        assert len(os.listdir(f"{moved}/blobs")) == 6


@given(seconds=st.floats(-1e9, 1e12, allow_nan=False))
def test_an_age_is_short_and_never_negative(seconds: float) -> None:
    text = ago(seconds)
    assert text == "now" or (text.split()[1] in ("min", "h", "d") and not text.startswith("-"))
    assert (text == "now") == (seconds < 60)
