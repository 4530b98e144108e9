"""A warm-up fetches a node's share in order, skips cached shards and survives failures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock.cache import ConfigError, DatasetNotFoundError, PlanError, WriteError
from penstock.cache.base import RequestError
from penstock.cache.disk import DiskCache
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.cli import main
from penstock.pipeline.feed import node_world, warm
from penstock.readers import Dataset
from tests import tars
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.pipeline.feed import WarmState


def dataset_of(
    pack: Path, cache: Path | None, *, max_bytes: int | str = "64MiB", fields: Any = ("id",)
) -> Dataset:
    kept = DiskCache(cache, max_bytes=max_bytes) if cache is not None else None
    files = fsspec.filesystem("file", skip_instance_cache=True)
    return Dataset(str(pack), fields=fields, filesystem=files, cache=kept)


def data_bytes(pack: Path) -> int:
    return sum(file.stat().st_size for file in pack.glob("*.arrow"))


def watch(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, *, broken: str = "") -> list[str]:
    """Paths whose data is read, in order; those that hold `broken` can't be."""
    dataset.open()
    assert dataset.remote is not None
    store = dataset.remote.fetcher.store
    read, seen, lock = store.read, list[str](), threading.Lock()

    def watched(path: str, span: Any = None, **rest: Any) -> Any:
        if broken and broken in path:
            raise RequestError("denied", "no longer allowed")
        with lock:
            seen.append(path)
        return read(path, span, **rest)

    monkeypatch.setattr(store, "read", watched)
    return seen


def test_a_job_after_warm_up_asks_the_remote_for_no_data(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[WarmState] = []
    with dataset_of(pack, tmp_path / "cache") as dataset:
        result = warm(dataset, seed=5, global_batch_size=8, progress=states.append)
        shards = len(dataset.index.sizes)
    assert (result.objects, result.skipped, result.failed) == (shards, 0, ())
    assert result.bytes == result.node_bytes == result.kept_bytes == data_bytes(pack)
    assert max(state.fetched_bytes for state in states) == data_bytes(pack)
    with dataset_of(pack, tmp_path / "cache") as dataset:
        seen = watch(dataset, monkeypatch)
        with DataLoader(dataset, 8, shuffle=True, seed=5) as loader:
            assert len([batch for batch in loader]) == len(loader)
            assert loader.statistics().hit_ratio == 1.0
    assert seen == []


def test_a_warm_up_needs_neither_torch_nor_a_graph(pack: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys
        import fsspec
        from penstock import Dataset, DiskCache, warm
        files = fsspec.filesystem("file", skip_instance_cache=True)
        cache = DiskCache(sys.argv[2], max_bytes="64MiB")
        with Dataset(sys.argv[1], filesystem=files, cache=cache) as dataset:
            assert warm(dataset).bytes > 0
        heavy = {"torch", "nvidia.dali", "penstock.augment.graph", "penstock.pipeline.loader"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """
    command = [sys.executable, "-c", code, str(pack), str(tmp_path / "cache")]
    subprocess.run(command, check=True, timeout=PATIENCE_S)


def test_shards_come_in_the_order_in_which_the_job_reads_them(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"seed": 9, "order": Order(lanes=2, window=1), "global_batch_size": 4}
    with dataset_of(pack, tmp_path / "cache") as dataset:
        seen = watch(dataset, monkeypatch)
        warm(dataset, workers=1, **options)
        names = [dataset.index.shard_name(n) for n in range(len(dataset.index.sizes))]
        with DataLoader(dataset, shuffle=True, **options) as loader:
            ids = [batch[0].numpy() for batch in loader]
        starts = dataset.index.starts
    first: dict[int, int] = {}
    for step, batch in enumerate(ids):
        for shard in np.unique(np.searchsorted(starts, batch, side="right") - 1).tolist():
            first.setdefault(shard, step)
    order = list(dict.fromkeys(names.index(path) for path in seen))
    needed = [first[shard] for shard in order]
    assert needed == sorted(needed)
    assert len(order) == len(names)


def test_what_is_there_is_skipped(pack: Path, tmp_path: Path) -> None:
    stop = threading.Event()

    def halfway(state: WarmState) -> None:
        if state.fetched_bytes > state.wanted_bytes / 2:
            stop.set()

    with dataset_of(pack, tmp_path / "cache") as dataset:
        begun = warm(dataset, workers=1, progress=halfway, stop=stop)
        rest = warm(dataset)
        again = warm(dataset)
        shards = len(dataset.index.sizes)
    assert 0 < begun.objects < shards
    assert rest.objects + rest.skipped == shards
    assert rest.skipped >= begun.objects
    assert begun.bytes + rest.bytes == data_bytes(pack)
    assert (again.objects, again.bytes, again.skipped) == (0, 0, shards)


def test_a_dry_run_fetches_nothing(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset_of(pack, tmp_path / "cache") as dataset:
        seen = watch(dataset, monkeypatch)
        result = warm(dataset, dry_run=True)
        assert seen == []
        assert result.bytes == data_bytes(pack)
        assert warm(dataset).bytes == result.bytes


def test_only_what_fits_is_fetched(pack: Path, tmp_path: Path) -> None:
    whole = data_bytes(pack)
    with dataset_of(pack, tmp_path / "cache", max_bytes="1MiB") as dataset:
        result = warm(dataset, order=Order(lanes=1, window=1))
        assert dataset.remote is not None
        index = dataset.index
        kept = [n for n in range(len(index.sizes)) if dataset.remote.is_whole(index.source(n))]
    assert 0 < result.kept_bytes < whole
    assert result.bytes == result.kept_bytes == int(index.shard_bytes[kept].sum())
    assert result.left_out == len(index.sizes) - len(kept)
    assert result.objects == len(kept)


def test_nodes_warm_their_shares_and_processes_of_a_node_parts_of_it(
    pack: Path, tmp_path: Path
) -> None:
    whole: set[str] = set()
    for node in range(2):
        mine: list[set[str]] = []
        for local in range(2):
            cache = tmp_path / f"cache-{node}-{local}"
            with dataset_of(pack, cache) as dataset:
                world = node_world(4, nodes=2, node_rank=node)
                warm(
                    dataset,
                    world=world,
                    order=Order(lanes=4),
                    global_batch_size=16,
                    process=(local, 2),
                )
                assert dataset.remote is not None
                sources = [dataset.index.source(n) for n in range(len(dataset.index.sizes))]
                mine.append({s.key for s in sources if dataset.remote.is_whole(s)})
        assert not mine[0] & mine[1]
        assert len(mine[0] | mine[1]) < len(sources)
        whole |= mine[0] | mine[1]
    assert len(whole) == len(sources)


def test_a_failed_object_is_listed_and_the_others_come(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset_of(pack, tmp_path / "cache") as dataset:
        watch(dataset, monkeypatch, broken="shard-000003")
        result = warm(dataset)
        shards = len(dataset.index.sizes)
    ((uri, reason),) = result.failed
    assert "shard-000003" in uri
    assert "no longer allowed" in reason
    assert result.objects == shards - 1


def test_a_warm_up_beside_a_job_shares_its_fills(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset_of(pack, tmp_path / "cache") as job, dataset_of(pack, tmp_path / "cache") as aside:
        seen = [watch(one, monkeypatch) for one in (job, aside)]
        with DataLoader(job, 8, shuffle=True, seed=5) as loader:
            batches = iter(loader)
            next(batches)
            result = warm(aside, seed=5, global_batch_size=8)
            assert sum(1 for _ in batches) == len(loader) - 1
        traffic = [one.traffic() for one in (job, aside)]
        assert result.objects + result.skipped == len(aside.index.sizes)
    assert seen[0]
    assert sum(t.bytes_filled for t in traffic) <= 1.02 * data_bytes(pack) + 2**16


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((4, 2, 2), "node_rank: got 2, wanted 0 to 1"),
        ((4, 1, 1), "wanted 0 to 0 for 1 node"),
        ((5, 2, 0), "multiple of the 2 nodes"),
        ((0, 1, 0), "at least 1 of each"),
    ],
)
def test_a_node_that_does_not_exist_is_refused(arguments: tuple[int, int, int], told: str) -> None:
    size, nodes, rank = arguments
    with pytest.raises(ConfigError, match=told):
        node_world(size, nodes=nodes, node_rank=rank)


def test_a_nodes_world() -> None:
    assert node_world(64, nodes=8, node_rank=3) == World(24, 64, local_rank=0, local_size=8)


def test_what_can_not_be_warmed_is_told(pack: Path, tmp_path: Path) -> None:
    with (
        Dataset(str(pack), cache=None) as local,
        pytest.raises(ConfigError, match="is local: there is nothing to warm"),
    ):
        warm(local)
    with (
        pytest.warns(match="cache= isn't given"),
        dataset_of(pack, None) as uncached,
        pytest.raises(ConfigError, match=r"no cache to warm.*DiskCache"),
    ):
        warm(uncached)
    with (
        dataset_of(pack, tmp_path / "cache") as dataset,
        pytest.raises(PlanError, match="global_batch_size=3 is smaller than the world of 4"),
    ):
        warm(dataset, world=World(0, 4), global_batch_size=3)
    empty = tmp_path / "empty"
    empty.mkdir()
    with dataset_of(empty, tmp_path / "cache") as nothing, pytest.raises(DatasetNotFoundError):
        warm(nothing)


def test_a_cache_that_can_not_be_used_is_an_error(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.warns(match="can't be used"),
        dataset_of(pack, tmp_path / "file") as dataset,
        pytest.raises(WriteError, match="nothing can be warmed"),
    ):
        warm(dataset)


# -- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["warm", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def url(pack: Path) -> str:
    """The pack in a remote file system that lives in this process."""
    memory = fsspec.filesystem("memory")
    target = f"/warm-{pack.parent.name}"
    for file in pack.rglob("*"):
        if file.is_file():
            memory.pipe(f"{target}/{file.relative_to(pack).as_posix()}", file.read_bytes())
    return f"memory:/{target}"


def test_the_command_tells_what_it_fetched_and_what_was_there(
    url: str, pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (url, "--cache", str(tmp_path / "cache"), "--max-bytes", "64MiB")
    code, out, _ = run(capsys, *options, "--dry-run", "--json")
    assert (code, json.loads(out)["bytes"]) == (0, data_bytes(pack))
    code, out, _ = run(capsys, *options, "--json")
    fetched = json.loads(out)
    assert code == 0
    assert fetched["bytes"] == data_bytes(pack)
    assert (fetched["skipped"], fetched["failed"]) == (0, [])
    code, out, _ = run(capsys, *options)
    assert code == 0
    assert f"{fetched['objects']} already cached" in out


def test_a_dry_run_builds_no_index_and_a_warm_up_counts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, cache = fsspec.filesystem("memory"), tmp_path / "cache"
    shards = [tars.archive(tars.photographs(3 * i, 3)) for i in range(4)]
    for i, data in enumerate(shards):
        memory.pipe(f"/dry/{tmp_path.name}/{i}.tar", data)
    options = (f"memory://dry/{tmp_path.name}", "--cache", str(cache), "--max-bytes", "64MiB")
    code, out, _ = run(capsys, *options, "--dry-run", "--json")
    assert (code, json.loads(out)["index_bytes"]) == (0, sum(map(len, shards)))
    assert not [*cache.glob("blobs/*")]
    assert "there is no index yet" in run(capsys, *options, "--dry-run")[1]
    code, out, _ = run(capsys, *options, "--json")
    warmed = json.loads(out)
    assert code == 0
    assert warmed["bytes"] + warmed["index_bytes"] >= sum(map(len, shards))
    assert "4 already cached" in run(capsys, *options, "--dry-run")[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--max-bytes", "1.5 parsecs"), "1.5 parsecs"),
        (("--max-bytes", "64MiB", "--nodes", "2", "--node-rank", "2"), "node_rank: got 2"),
        (
            ("--max-bytes", "64MiB", "--world-size", "3", "--nodes", "2", "--node-rank", "1"),
            "multiple of the 2",
        ),
        (("--max-bytes", "64MiB", "--nodes", "8"), "--node-rank 0 to 7"),
    ],
)
def test_nonsense_is_used_wrongly(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    told: str,
) -> None:
    code, _, err = run(capsys, url, "--cache", str(tmp_path / "cache"), *options)
    assert code == 2
    assert told in err


def test_a_local_dataset_has_nothing_to_warm_which_ends_no_script(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (str(pack), "--cache", str(tmp_path / "cache"), "--max-bytes", "64MiB")
    code, out, err = run(capsys, *options)
    assert (code, out) == (0, "")
    assert "there is nothing to warm" in err
    code, out, _ = run(capsys, *options, "--json")
    assert code == 0
    assert (json.loads(out)["bytes"], json.loads(out)["failed"]) == (0, [])
    code, _, err = run(capsys, str(pack / "not-there"), *options[1:])
    assert code != 0


def test_a_cache_that_holds_some_is_left_as_it_is(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (url, "--cache", str(tmp_path / "cache"), "--max-bytes", "64MiB", "--if-empty")
    half = (*options, "--nodes", "2", "--node-rank", "0", "--json")
    assert json.loads(run(capsys, *half)[1])["objects"] > 0
    code, out, err = run(capsys, *options)
    assert (code, out) == (0, "")
    assert "nothing is fetched (--if-empty)" in err
    code, out, _ = run(capsys, *options[:-1], "--json")
    assert json.loads(out)["objects"] > 0


def test_an_interrupt_says_that_it_goes_on(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.pipeline.feed.warm_up.ShareFills.run", interrupted)
    code, _, err = run(capsys, url, "--cache", str(tmp_path / "cache"))
    assert code == 130
    assert "The same command resumes" in err


def test_launched_processes_of_a_node_share_its_list_out(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = []
    for rank in range(2):
        for name, value in (
            ("RANK", rank),
            ("WORLD_SIZE", 2),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", 2),
        ):
            monkeypatch.setenv(name, str(value))
        code, out, _ = run(capsys, url, "--cache", str(tmp_path / "cache"), "--json")
        assert code == 0
        objects.append(json.loads(out))
    assert [found["skipped"] for found in objects] == [0, 0]
    assert sum(found["bytes"] for found in objects) == objects[0]["node_bytes"]


def launcher(monkeypatch: pytest.MonkeyPatch, **told: object) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("told", "flags", "share"),
    [
        ({}, (), "rank 0 of 1, on the only node"),
        (
            {"SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0},
            (),
            "rank 1 of 2, on one of 2 nodes",
        ),
        (
            {"JOB_COMPLETION_INDEX": 1},
            ("--nodes", "2", "--world-size", "4"),
            "ranks 2 to 3 of 4, on one of 2 nodes",
        ),
        ({"JOB_COMPLETION_INDEX": 1}, ("--nodes", "1"), "rank 0 of 1, on the only node"),
        (
            {"JOB_COMPLETION_INDEX": 1},
            ("--nodes", "2", "--node-rank", "0"),
            "rank 0 of 2, on one of 2 nodes",
        ),
        (
            {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2},
            (),
            "ranks 2 to 3 of 4, part 2 of 2, on one of 2 nodes",
        ),
    ],
)
def test_it_knows_its_share_by_the_launcher(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, object],
    flags: tuple[str, ...],
    share: str,
) -> None:
    launcher(monkeypatch, **told)
    options = ("--cache", str(tmp_path / "cache"), "--max-bytes", "64MiB", "--dry-run", *flags)
    code, out, _ = run(capsys, url, *options)
    assert code == 0
    assert share in " ".join(out.split())


def test_a_pod_that_does_not_know_how_many_there_are_asks(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(monkeypatch, JOB_COMPLETION_INDEX=3)
    code, _, err = run(capsys, url, "--cache", str(tmp_path / "cache"))
    assert code == 2
    assert "pod 3" in err
    assert "--nodes" in err
