"""Test the doctor's diagnoses of invented machines, and one of this machine."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache.base import Answer, ObjectInfo, RequestError, Store
from penstock.pipeline.cli import (
    CACHE,
    FOLDER,
    MACHINE,
    STORE,
    CheckTable,
    DoctorFacts,
    Finding,
    ModuleFacts,
    fail,
    hiding,
    probe_store,
    store_facts,
)
from penstock.pipeline.plan import World
from tests import warm
from tests.servers import Faults, Server, serving

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

Space = namedtuple("Space", "total free")
GPU = "H100 (80.0 GiB)"
A_FOLDER: dict[str, Any] = dict(
    path="/data",
    exists=True,
    is_folder=True,
    readable=True,
    writable=True,
    free_bytes=2**40,
    total_bytes=2**41,
    free_files=10**6,
    kind="ext4",
    network=False,
)
HEALTHY: dict[str, Any] = dict(
    python="3.11.7",
    system="Linux",
    machine="x86_64",
    torch=ModuleFacts(version="2.13.0+cu130", cuda="13.0"),
    dali=ModuleFacts(version="2.4.0", cuda="13.0"),
    dali_builds=["nvidia-dali-cuda130"],
    decode_error="",
    zarr=ModuleFacts(version="3.1.6"),
    gpus=[GPU],
    gpu_devices=1,
    driver_cuda=(13, 0),
    cpus=16,
    affinity=16,
    usable=16,
    omp_threads=None,
    torch_threads=16,
    world=World(0, 1),
    launcher=None,
    slurm_batch=False,
    shm=Space(2**34, 2**34),
    open_files=(65536, 65536),
    hiding=[],
    **A_FOLDER,
)
A_CACHE: dict[str, Any] = A_FOLDER | dict(
    problem=None,
    remedy="",
    owner=0,
    user=0,
    mode=0o700,
    max_bytes=2**40,
    used_bytes=2**39,
    blobs=12,
    unverified=0,
    dead_fills=0,
    dead_jobs=0,
    strays=0,
    leftover_bytes=0,
    jobs=[],
)
JOB = dict(label="s3://b/set", pid=1, share_bytes=2**30, wanted_bytes=2**30)
REMOTE: dict[str, Any] = dict(
    url="s3://b/set",
    unusable=None,
    listing=None,
    objects=3,
    folders=1,
    info=None,
    is_pack=False,
    sample=ObjectInfo(path="a", size_bytes=100, version="1"),
    ranges=None,
    request_s=0.02,
    slowest_s=0.04,
    conditional=True,
)


def machine(facts: dict[str, Any]) -> list[Finding]:
    return [*MACHINE.findings(DoctorFacts(**facts)), *FOLDER.findings(DoctorFacts(**facts))]


def on_cache(facts: dict[str, Any]) -> list[Finding]:
    return list(CACHE.findings(DoctorFacts(**facts)))


def on_store(facts: dict[str, Any]) -> list[Finding]:
    return list(STORE.findings(DoctorFacts(**facts)))


def broken(**changes: Any) -> dict[str, Any]:
    """The differences from a healthy machine."""
    return changes


def test_a_check_is_one_function() -> None:
    table = CheckTable()

    @table.check("disk", lambda _: {"free_bytes": 7})
    def judge_disk(facts: DoctorFacts) -> Iterator[Finding]:
        """Buy one."""
        yield from [fail(f"{facts.free_bytes} free")] * 2

    @table.check("power", is_gate=True)
    def judge_power(facts: DoctorFacts) -> Finding | None:
        return fail("off", "Switch it on.") if facts.free_bytes else None

    @table.check("light")
    def judge_light(_: DoctorFacts) -> Finding:
        raise AssertionError("a failed gate ends the table")

    found = list(table.findings(table.gather()))
    disk = Finding(name="disk", status="fail", found="7 free", remedy="Buy one.")
    power = Finding(name="power", status="fail", found="off", remedy="Switch it on.")
    assert found == [disk, disk, power]
    assert list(table.only("power").findings(DoctorFacts(free_bytes=0))) == []


def test_a_healthy_machine_has_no_remedy() -> None:
    for check in machine(HEALTHY):
        assert (check.status, check.remedy) == ("ok", ""), check


@pytest.mark.parametrize(
    ("changes", "name", "status", "message"),
    [
        (broken(python="3.10.4"), "python", "fail", "3.11"),
        (broken(system="Darwin"), "python", "fail", "Linux"),
        (broken(hiding=["/job/penstock.py"]), "package", "warn", "/job/penstock.py"),
        (broken(torch=ModuleFacts()), "torch", "fail", "pip install torch"),
        (
            broken(torch=ModuleFacts(version="2.13.0", error="OSError: libc10")),
            "torch",
            "fail",
            "libc10",
        ),
        (broken(torch=ModuleFacts(version="2.3.1", cuda="12.1")), "torch", "fail", "2.4"),
        (broken(torch=ModuleFacts(version="2.13.0+cpu"), gpus=[]), "torch", "warn", "CUDA build"),
        (broken(dali=ModuleFacts(), dali_builds=[]), "dali", "fail", "penstock[dali]"),
        (
            broken(dali=ModuleFacts(), dali_builds=[], driver_cuda=(12, 4)),
            "dali",
            "fail",
            "penstock[cuda12]",
        ),
        (
            broken(dali_builds=("nvidia-dali-cuda120", "nvidia-dali-cuda130")),
            "dali",
            "fail",
            "pip uninstall nvidia-dali-cuda120 nvidia-dali-cuda130",
        ),
        (
            broken(dali=ModuleFacts(version="2.4.0", cuda="13.0", error="ImportError: libcufft")),
            "dali",
            "fail",
            "libcufft",
        ),
        (broken(driver_cuda=(12, 8)), "dali", "fail", "penstock[cuda12]"),
        (broken(torch=ModuleFacts(version="2.13.0", cuda="12.8")), "dali", "warn", "12.8"),
        (broken(decode_error=None), "decoding", "warn", "pillow"),
        (broken(decode_error="RuntimeError: no"), "decoding", "fail", "no"),
        (broken(gpus=[]), "gpu", "fail", "driver"),
        (broken(zarr=ModuleFacts()), "zarr", "ok", "penstock[zarr]"),
        (broken(zarr=ModuleFacts(version="2.18.3")), "zarr", "warn", "3.0.8"),
        (
            broken(zarr=ModuleFacts(version="3.1.6", error="ImportError: x")),
            "zarr",
            "warn",
            "import",
        ),
        (broken(gpus=[], gpu_devices=0), "gpu", "ok", "CPU decoding"),
        (broken(usable=4, affinity=8), "cores", "ok", "quota"),
        (broken(usable=1, affinity=1), "cores", "warn", "affinity 1"),
        (broken(world=World(0, 8, local_size=8)), "threads", "warn", "OMP_NUM_THREADS=2"),
        (broken(gpus=[GPU] * 4), "threads", "warn", "OMP_NUM_THREADS=4"),
        (broken(usable=4), "threads", "warn", "OMP_NUM_THREADS=4"),
        (broken(torch_threads=None), "threads", "warn", "torch"),
        (broken(shm=Space(2**26, 2**26)), "/dev/shm", "warn", "--shm-size"),
        (broken(shm=None), "/dev/shm", "warn", "num_workers=0"),
        (broken(open_files=(256, 4096)), "open files", "warn", "ulimit -n 4096"),
        (broken(open_files=(-1, -1)), "open files", "ok", "no limit"),
        (broken(world="RANK: got 'x'"), "world", "fail", "RANK"),
        (broken(world=World(1, 2), launcher="torchrun"), "world", "ok", "rank 1 of 2"),
        (broken(slurm_batch=True), "world", "ok", "Slurm"),
        (broken(exists=False), "folder", "fail", "mkdir"),
        (broken(is_folder=False), "folder", "fail", "not a folder"),
        (broken(readable=False), "folder", "fail", "rights"),
        (broken(writable=False), "folder", "warn", "--out"),
        (broken(free_bytes=2**20), "space", "warn", "free some space"),
        (broken(free_files=0), "space", "fail", "inodes"),
        (broken(kind="nfs4", network=True), "file system", "warn", "pread"),
        (broken(kind="fuse.s3fs", network=True), "file system", "warn", "cache="),
        (broken(kind="tmpfs"), "file system", "warn", "restart"),
    ],
)
def test_each_fault_is_reported_with_its_remedy(
    changes: dict[str, Any], name: str, status: str, message: str
) -> None:
    found = {check.name: check for check in machine(HEALTHY | changes)}
    assert found[name].status == status
    assert message in f"{found[name].found} {found[name].remedy}"
    assert (status == "ok") == (found[name].remedy == "")


def test_a_healthy_cache_and_store_have_no_remedy() -> None:
    found = [*on_cache(A_CACHE), *on_store(REMOTE)]
    assert {(check.status, check.remedy) for check in found} == {("ok", "")}
    names = ["cache", "owner", "limit", "inodes", "boot", "leftovers", "jobs"]
    assert [check.name for check in found] == [*names, "store", "ranges", "versions", "requests"]


@pytest.mark.parametrize(
    ("changes", "name", "status", "message"),
    [
        (broken(problem="format 9", remedy="Upgrade."), "cache", "fail", "format 9 Upgrade."),
        (broken(owner=7, user=8), "owner", "fail", "user 7, mode 0700; this is user 8"),
        (broken(owner=7, user=0), "owner", "fail", "this is user 0"),
        (broken(mode=0o770), "owner", "warn", "chmod go-w"),
        (broken(max_bytes=0), "limit", "ok", "first job"),
        (broken(max_bytes=2**38), "limit", "warn", "evict"),
        (broken(max_bytes=2**42), "limit", "warn", "room for only 1.5 TiB"),
        (broken(network=True), "cache disk", "fail", "not a local"),
        (broken(unverified=3), "boot", "ok", "3 blobs"),
        (broken(dead_fills=1, leftover_bytes=2**20), "leftovers", "warn", "1 fill of a dead"),
        (broken(dead_jobs=2, strays=1), "leftovers", "warn", "2 dead jobs, 1 stray file"),
        (broken(jobs=[JOB, JOB | {"pid": 2}]), "jobs", "ok", "2 processes, share 1.0 GiB"),
        (broken(jobs=[JOB | {"share_bytes": 2**29}]), "jobs", "warn", "50 % stays"),
    ],
)
def test_each_fault_of_a_cache_is_reported_with_its_remedy(
    changes: dict[str, Any], name: str, status: str, message: str
) -> None:
    found = {check.name: check for check in on_cache(A_CACHE | changes)}
    assert found[name].status == status
    assert message in f"{found[name].found} {found[name].remedy}"
    assert (status == "ok") == (found[name].remedy == "")


def test_a_cache_needs_inodes() -> None:
    few = {c.name: c for c in on_cache(A_CACHE | {"free_files": 9})}
    assert (few["inodes"].status, few["inodes"].found) == ("warn", "9 free")
    many = {c.name: c for c in on_cache(A_CACHE | {"free_files": None})}
    assert many["inodes"].status == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "status", "message"),
    [
        (broken(unusable="needs 'gcsfs'"), "store", "fail", "gcsfs"),
        (broken(objects=0, folders=0, sample=None), "store", "fail", "the URL is empty"),
        (broken(is_pack=True), "store", "ok", "a pack, 3 objects and 1 folder"),
        (broken(listing=RequestError("denied", "403")), "store", "fail", "key, token"),
        (
            broken(listing=RequestError("refused", "no listing"), is_pack=True),
            "store",
            "ok",
            "a pack needs no listing",
        ),
        (broken(info=RequestError("transient", "reset")), "objects", "fail", "network"),
        (broken(ranges=RequestError("refused", "200")), "ranges", "fail", "200"),
        (broken(conditional=False), "versions", "warn", "overwrite"),
        (broken(request_s=0.9), "requests", "warn", "penstock warm"),
    ],
)
def test_each_fault_of_a_store_is_reported_with_its_remedy(
    changes: dict[str, Any], name: str, status: str, message: str
) -> None:
    found = {check.name: check for check in on_store(REMOTE | changes)}
    assert found[name].status == status
    assert message in f"{found[name].found} {found[name].remedy}"
    assert (status == "ok") == (found[name].remedy == "")


class Shelf(Store):
    """A store in memory. broken: the methods that fail, and how."""

    _info: Any = None  # replaced with the methods that call them
    _read: Any = None

    def __init__(self, objects: dict[str, bytes], **broken: str) -> None:
        super().__init__(url="shelf://set")
        self.objects, self.broken = objects, broken

    def _ask(self, what: str) -> None:
        if what in self.broken:
            raise RequestError(self.broken[what], f"{self.url}: {what}")  # type: ignore[arg-type]

    def walk(self, prefix: str = "") -> Any:
        self._ask("walk")
        return (
            ObjectInfo(path=path, size_bytes=len(data), version="1")
            for path, data in self.objects.items()
            if path.startswith(prefix)
        )

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        self._ask("top")
        found = list(self.walk(prefix))
        folders = {each.path.split("/")[0] for each in found if "/" in each.path}
        return [each for each in found if "/" not in each.path], sorted(folders)

    def info(self, path: str) -> ObjectInfo | None:
        self._ask("info")
        return next((each for each in self.walk() if each.path == path), None)

    def read(
        self,
        path: str,
        span: tuple[int, int] | None = None,
        *,
        version: str | None = None,
        size_bytes: int | None = None,
    ) -> Answer:
        del size_bytes
        self._ask("read")
        data = self.objects[path]
        if version not in (None, "1") and "versions" not in self.broken:
            raise RequestError("changed", f"{self.url}/{path}: changed")
        start, end = span or (0, len(data))
        assert 0 <= start < end <= len(data)
        return Answer(data=data[start:end], version="1", object_bytes=len(data))

    def put(self, local: str, path: str) -> None:
        raise AssertionError(f"a doctor writes nothing: {local} to {path}")

    def close(self) -> None: ...


def seen(store: Shelf) -> dict[str, Any]:
    ticks = iter(range(1000))
    return {"unusable": None} | probe_store(store, clock=lambda: float(next(ticks)))


def test_a_store_is_asked_for_what_training_needs() -> None:
    found = seen(Shelf({"a.tar": b"x" * 200_000, "b/c": b"", "empty": b""}))
    assert (found["objects"], found["folders"], found["is_pack"]) == (2, 1, False)
    assert found["sample"] is not None
    assert found["sample"].path == "a.tar"
    assert (found["request_s"], found["slowest_s"], found["conditional"]) == (1.0, 1.0, True)
    assert all(check.status != "fail" for check in on_store(found))


def test_objects_that_lie_in_folders_only_are_found() -> None:
    found = seen(Shelf({"dogs/1.jpg": b"x"}))
    assert found["sample"] is not None
    assert (found["sample"].path, found["objects"], found["folders"]) == ("dogs/1.jpg", 0, 1)


def test_a_pack_behind_a_store_without_listings_is_usable() -> None:
    found = seen(Shelf({"_penstock/manifest.arrow": b"xyz"}, top="refused"))
    assert [check.status for check in on_store(found)] == ["ok"] * 3 + ["warn"]  # slow ticks


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        ({"top": "denied", "info": "denied"}, "store", "key, token or role"),
        ({"read": "refused"}, "ranges", "another endpoint"),
        ({"info": "transient"}, "objects", "network"),
        ({"versions": "no"}, "versions", "don't overwrite"),
    ],
)
def test_what_a_store_refuses_is_reported(fault: dict[str, str], name: str, message: str) -> None:
    found = {each.name: each for each in on_store(seen(Shelf({"a": b"x" * 9}, **fault)))}
    assert message in found[name].remedy


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    """Serve a pack without listings by http, and a bucket by S3."""
    place = tmp_path / "bucket" / "set"
    (place / "_penstock").mkdir(parents=True)
    (place / "_penstock" / "manifest.arrow").write_bytes(b"m" * 5000)
    (place / "shard-000000.arrow").write_bytes(b"s" * 200_000)
    with serving(tmp_path) as server:
        yield server


QUICK = {"retry_timeout": 1, "connect_timeout": 60, "read_timeout": 60}


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_real_store_is_well(served: Server, scheme: str) -> None:
    url = f"{served.url}/bucket/set" if scheme == "http" else served.s3("bucket/set")
    options = QUICK if scheme == "http" else served.s3_options | QUICK
    facts = store_facts(url, options)
    assert facts["is_pack"]
    assert (facts["ranges"], facts["conditional"]) == (None, True)
    assert facts["request_s"] > 0
    assert {check.status for check in on_store(facts)} == {"ok"}


def test_a_real_store_that_is_gone_or_empty_is_reported(served: Server) -> None:
    empty = store_facts(served.s3("bucket/nothing"), served.s3_options | QUICK)
    assert [check.status for check in on_store(empty)] == ["fail"]
    served.go_away()
    gone = list(on_store(store_facts(f"{served.url}/bucket/set?sig=HUSH", QUICK)))
    assert gone[0].status == "fail"
    assert "network" in gone[0].remedy
    assert all("HUSH" not in check.found for check in gone)
    served.come_back()


def test_a_real_store_that_ignores_ranges_is_reported(served: Server) -> None:
    served.faults = Faults(p=1.0, kinds=("whole",))
    found = {
        check.name: check for check in on_store(store_facts(served.url + "/bucket/set", QUICK))
    }
    assert found["ranges"].status == "fail"


def test_files_that_hide_our_package_are_found(tmp_path: Path) -> None:
    (tmp_path / "cache.py").touch()
    assert hiding(tmp_path) == []
    (tmp_path / "penstock.py").touch()
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock/__init__.py").touch()
    assert sorted(Path(found).name for found in hiding(tmp_path)) == ["__init__.py", "penstock.py"]
    assert hiding(Path(__file__).resolve().parents[3]) == []


def doctor(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "penstock.pipeline.cli", "doctor", *arguments], cwd=cwd)


def test_this_machine_as_json_and_for_people(tmp_path: Path) -> None:
    run = doctor(str(tmp_path), "--json")
    report = json.loads(run.stdout)
    assert run.returncode == (0 if report["ok"] else 1), run.stderr
    names = [check["name"] for check in report["checks"]]
    assert names[:4] == ["python", "package", "torch", "dali"]
    assert names[-3:] == ["folder", "space", "file system"]
    missing = doctor(str(tmp_path / "nowhere"))
    assert missing.returncode == 1
    assert "mkdir -p" in missing.stdout
    assert "Traceback" not in missing.stderr


def test_a_remote_folder_is_used_wrongly() -> None:
    run = doctor("s3://bucket/x")
    assert run.returncode == 2
    assert "local folder" in run.stderr
