"""A dataset's first use by several processes of a job, over a real process group."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock.cache import JobStore, JobStoreError
from penstock.readers.index import shared_build
from tests import images
from tests.warm import ROOT, Warm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


RANK = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from penstock.cache.errors import PenstockError
from penstock.readers import open_index
from penstock.readers.index import shared_build
from tests import images

out, phases = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(sys.argv[3]), int(sys.argv[4])
shared_build.BEAT_S = 0.1
dist.init_process_group("gloo", init_method=f"file://{out}/group", rank=rank, world_size=size)

def verify(samples):
    (place / f"built-{rank}").touch()
    if phase.get("dies") and not (place / "died").exists():
        (place / "died").touch()
        os.kill(os.getpid(), 9)
    return images.verify(samples)

for phase in phases:
    place = out / phase["name"]
    shared_build.SILENT_S = phase.get("silent", 30.0)
    pieces = phase.get("pieces", 2**20)
    shared_build.MOST_PIECES_BYTES = shared_build.MOST_OWN_BYTES = pieces
    os.environ["XDG_CACHE_HOME"] = str(place / f"home-{rank}")
    answer = {}
    if rank in phase.get("ranks", range(size)):
        try:
            index = open_index(phase["url"], verify=verify)
            answer = {"samples": index.samples, "print": index.fingerprint, "place": index.place}
            open_index(phase["url"], verify=verify)  # it is there
        except PenstockError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            if phase.get("again"):
                answer["samples"] = open_index(phase["url"], verify=verify).samples
    (place / f"{rank}.json").write_text(json.dumps(answer))
    if not phase.get("dies"):
        dist.barrier()
os._exit(0)  # others may be dead
"""


def job(out: Path, phases: list[dict[str, Any]], size: int) -> dict[str, list[dict[str, Any]]]:
    """Run a job of several ranks, and return each rank's result of each phase; None for a killed
    rank."""
    for phase in phases:
        (out / phase["name"]).mkdir(parents=True)
    command = ["-c", RANK, out, json.dumps(phases)]
    ranks = [Warm([*command, rank, size], cwd=ROOT) for rank in range(size)]
    words = [rank.communicate()[1] for rank in ranks]
    for rank, said in zip(ranks, words, strict=True):
        assert rank.returncode in (0, -signal.SIGKILL), said
    return {
        phase["name"]: [
            json.loads(path.read_text()) if path.exists() else {}
            for path in (out / phase["name"] / f"{rank}.json" for rank in range(size))
        ]
        for phase in phases
    }


def photographs(root: Path, name: str, *, is_writable: bool) -> str:
    """40 photographs. is_writable: True if an index may be stored next to them."""
    folder = images.class_folder(root / name / "set", samples=40)
    if not is_writable:
        (root / name / "set.penstock").touch()
    return str(folder)


def test_one_process_builds_and_the_others_use_its_index(tmp_path: Path) -> None:
    bad = images.write_folder(tmp_path / "bad", {"a/1.jpg": b"", "a/2.jpg": b"?" * 5000})
    beside, apart, large, alone = (
        photographs(tmp_path, name, is_writable=name in ("beside", "alone"))
        for name in ("beside", "apart", "large", "alone")
    )
    out = tmp_path / "out"
    phases: list[dict[str, Any]] = [
        {"name": "beside", "url": beside},
        {"name": "apart", "url": apart},
        {"name": "large", "url": large, "pieces": 10},
        {"name": "alone", "url": alone, "ranks": [0]},
        {"name": "fails", "url": str(bad)},
    ]
    report = job(out, phases, 2)
    built = {name: len(list((out / name).glob("built-*"))) for name in report}
    # Too large for the store, each node builds its own.
    assert built == {"beside": 1, "apart": 1, "large": 2, "alone": 1, "fails": built["fails"]}
    for name in ("beside", "apart", "large"):
        assert [each.get("samples") for each in report[name]] == [40, 40], report
        assert len({each["print"] for each in report[name]}) == 1
    assert {each["place"] for each in report["beside"]} == {f"{beside}.penstock"}
    assert len({each["place"] for each in report["apart"]}) == 2
    assert report["alone"][0]["samples"] == 40
    assert all(each["error"].startswith("DatasetNotFoundError") for each in report["fails"])


def test_a_killed_builder_is_noticed_and_the_next_attempt_builds(tmp_path: Path) -> None:
    url = photographs(tmp_path, "data", is_writable=True)
    phase = {"name": "dies", "url": url, "dies": True, "silent": 1.0, "again": True}
    (left,) = [each for each in job(tmp_path / "out", [phase], 2)["dies"] if each]
    assert left["error"].startswith("StalledError"), left
    assert "has published no progress" in left["error"]
    assert left["samples"] == 40


class _SilentStore(JobStore):
    """A store that answers only a number of requests."""

    def __init__(self, answers: int) -> None:
        super().__init__(dist.HashStore())  # type: ignore[attr-defined]
        self.left = answers

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        if not self.left:
            raise JobStoreError("gone")
        self.left -= 1
        return super()._ask(question)


def test_a_builders_own_error_is_raised_without_a_store() -> None:
    job = shared_build.SharedBuild(_SilentStore(3), "key", "url")
    assert job.claim()
    with pytest.raises(ZeroDivisionError), job.building():
        raise ZeroDivisionError


def zipped(files: Mapping[str, bytes], *, cut: int = 0) -> str:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    data = packed.getvalue()
    return base64.b64encode(data[: len(data) - cut]).decode()


def test_an_index_from_a_store_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = "sidecars/0123456789abcdef-000000.arrow"
    well = {"manifest.arrow": b"abc", "quarantine.jsonl": b"", sidecar: b"de"}
    text = zipped(well)
    assert shared_build.decode_index(text) == {os.fsencode(n): data for n, data in well.items()}
    damaged = base64.b64encode(base64.b64decode(text).replace(b"abc", b"abd")).decode()
    for wrong in (
        *("", "x", "AAAA", base64.b64encode(b"{}").decode(), damaged),
        *(zipped({}), zipped({sidecar: b"de"}), zipped({"manifest.arrow": b"", sidecar: b"de"})),
        zipped({**well, "../../evil": b""}),
        zipped(well, cut=1),
    ):
        assert shared_build.decode_index(wrong) is None, wrong
    monkeypatch.setattr(shared_build, "_MOST_FILES_BYTES", 4)
    assert shared_build.decode_index(text) is None


def test_a_large_index_of_one_node_is_sent_through_the_store_and_removed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that other nodes see isn't copied if it is large."""
    result: dict[str, str] = {}

    class Store:
        def set(self, key: str, value: str) -> None:
            result[key] = value

        def get(self, key: str) -> str | None:
            return result.get(key)

        def add(self, key: str, count: int) -> int:
            result[key] = str(int(result.get(key, "0")) + count)
            return int(result[key])

    class Listed:
        names = (b"sidecars/0123456789abcdef-000000.arrow",)

    place, other = tmp_path / "index", tmp_path / "copy"
    (place / "sidecars").mkdir(parents=True)
    (place / "manifest.arrow").write_bytes(b"manifest")
    (place / "quarantine.jsonl").write_bytes(b"")
    (place / os.fsdecode(Listed.names[0])).write_bytes(os.urandom(600_000))
    monkeypatch.setattr(shared_build, "MOST_PIECES_BYTES", 10_000)
    use = shared_build.SharedBuild(Store(), "key", "url")  # type: ignore[arg-type]
    use.publish(Listed(), os.fsencode(place))  # type: ignore[arg-type]
    assert json.loads(result["key/0/done"])[-1] == 0
    use.publish(Listed(), os.fsencode(place), is_own=True)  # type: ignore[arg-type]
    report = shared_build.BuildReport(*json.loads(result["key/0/done"]))
    assert report.pieces > 1
    assert use.receive(report, os.fsencode(other))
    for file in place.rglob("*.*"):
        assert (other / file.relative_to(place)).read_bytes() == file.read_bytes()
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    use.leave(report)
    assert result["key/0/piece0"]
    use.leave(report)
    assert not any(result[f"key/0/piece{number}"] for number in range(report.pieces))
    assert not use.receive(report, os.fsencode(tmp_path / "late"))
