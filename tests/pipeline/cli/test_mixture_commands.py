"""Test that commands take a mixture file in place of a URL."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock import DataLoader, DiskCache, World, mix_file, pack
from penstock.pipeline.cli import main
from penstock.readers import RemoteShards

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"web": 300, "code": 90, "math": 30}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arrays of numbers, and a mixture of them."""
    folder: Path = tmp_path_factory.mktemp("sets")
    for name, size in SIZES.items():
        np.save(folder / f"{name}.npy", np.arange(size))
    path = folder / "mixture.yaml"
    values = {
        "parts": {name: f"{name}.npy" for name in SIZES},
        "weights": {"web": 0.5, "code": 0.3, "math": 0.2},
        "epoch": 200,
    }
    path.write_text(json.dumps(values))
    return path


def run(capsys: Any, *arguments: object) -> str:
    """Run a command of this process, and return what it prints."""
    code = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return str(out)


def test_inspect_says_what_each_part_gives(file, capsys):
    values = json.loads(run(capsys, "inspect", file, "--json", "--batch-size", 20, "--epoch", 1))
    parts = {part["name"]: part for part in values["mixture"]["parts"]}
    with mix_file(file) as mixture:
        mine = mixture.summary(epoch=1)
    assert [part["samples"] for part in parts.values()] == [part.samples for part in mine.parts]
    assert sum(part["samples"] for part in parts.values()) == values["samples"] == 200
    assert abs(parts["code"]["samples"] - 60) <= 2
    assert parts["math"]["epochs"] == parts["math"]["samples"] / 30
    assert parts["web"]["bytes"] == pytest.approx(parts["web"]["samples"] * 8, rel=0.2)
    assert min(part["lanes"] for part in parts.values()) >= 1
    text = run(capsys, "inspect", file)
    assert re.search(r"math +20 % +\d+ +30 +1\.3", text)
    assert [part["weight"] for part in parts.values()] == [0.5, 0.3, 0.2]


def test_inspect_shows_a_batch_of_a_mixture(file, capsys):
    values = json.loads(run(capsys, "inspect", file, "--json", "--batch", 40))
    names = {sample["values"]["part"] for sample in values["samples"]}
    assert names == set(SIZES)


def test_plan_has_the_parts_of_the_first_epoch(file, capsys):
    job = ("--samples-per-s", 100, "--gpus", 1, "--batch", 10)
    values = json.loads(run(capsys, "plan", file, *job, "--json"))
    assert values["assumptions"]["samples"] == {"value": "200", "from": "index"}
    assert sum(part["samples"] for part in values["mixture"]["parts"]) == 200
    assert "math" in run(capsys, "plan", file, *job)


def test_bench_plays_a_mixture(file, capsys):
    short = ("--seconds", 0.2, "--batch-size", 20)
    values = json.loads(run(capsys, "bench", file, *short, "--json"))
    assert values["samples_per_s"] > 0
    assert values["dataset"] == {"samples": 200, "bytes": 3360, "kind": "mixture of npy"}
    assert values["python"].startswith("DataLoader(mix_file(")
    values = json.loads(run(capsys, "bench", file, *short, "--json", "--augment", "none"))
    assert values["ceilings"]["read"]["samples_per_s"] > 0


@pytest.mark.parametrize("command", ["inspect", "bench", "warm --cache x", "plan --model resnet50"])
def test_a_file_contains_the_options_of_its_parts(command, file, capsys):
    name, *others = command.split()
    assert main([name, str(file), *others, "--format", "npy"]) == 2
    assert "--format: " in capsys.readouterr().err


def test_a_file_that_does_not_exist(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none.yaml")]) == 1
    assert "this mixture file doesn't exist" in capsys.readouterr().err


def test_warm_of_local_parts_has_nothing_to_do(file, tmp_path, capsys):
    values = json.loads(run(capsys, "warm", file, "--cache", tmp_path / "cache", "--json"))
    assert values["objects"] == 0


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of two packs in a store, of 12 and 6 shards."""
    folder: Path = tmp_path_factory.mktemp("remote")
    for name, size in {"big": 240, "small": 120}.items():
        np.save(folder / f"{name}.npy", np.zeros((size, 64), np.int64))
        pack(folder / f"{name}.npy", folder / name, shard_bytes=20 * 64 * 8)
        fsspec.filesystem("memory").put(str(folder / name), f"/mixed-{name}", recursive=True)
    path = folder / "mixture.json"
    parts = {name: f"memory://mixed-{name}" for name in ("big", "small")}
    path.write_text(json.dumps({"parts": parts, "weights": {"big": 3, "small": 1}, "epoch": 80}))
    return path


def test_warm_fetches_the_parts_in_the_order_of_need(remote, tmp_path, capsys, monkeypatch):
    order, real = list[int](), RemoteShards.fill

    def fill(self: Any, shard: int, **rest: Any) -> int:
        order.append(shard)
        return real(self, shard, **rest)

    monkeypatch.setattr(RemoteShards, "fill", fill)
    given = ("--cache", tmp_path, "--seed", 3, "--global-batch-size", 20, "--workers", 1)
    values = json.loads(run(capsys, "warm", remote, *given, "--json"))
    with mix_file(remote, cache=tmp_path) as mixture:
        shards = len(mixture.contents.sizes)
        first = len(mixture.contents.mixture.parts[0].sizes)
        with DataLoader(mixture, 20, shuffle=True, seed=3, world=World(0, 1)) as loader:
            batches = [loader.samples_of(step) for step in range(4)]
            assert len(list(loader)) == 4
            assert loader.statistics().bytes_passed == 0
        wanted = [{*mixture.rows(batch)[:, 0].tolist()} for batch in batches]
    assert values["objects"] == shards == len(order) == len({*order})
    assert not values["failed"]
    # The shards of the first batch, of both parts, come before those that only later ones need.
    early = order[: len(wanted[0])]
    assert {*early} == wanted[0]
    assert {shard < first for shard in early} == {True, False}


def test_a_node_warms_its_share_of_each_part(remote, tmp_path, capsys):
    fetched = []
    for node in range(2):
        given = ("--nodes", 2, "--node-rank", node, "--global-batch-size", 32, "--dry-run")
        cache = ("--cache", tmp_path / str(node))
        fetched.append(json.loads(run(capsys, "warm", remote, *given, *cache, "--json")))
    assert all(each["objects"] > 0 for each in fetched)


@pytest.mark.parametrize("weights", [(3, 1), (1, 30)])
@pytest.mark.parametrize("epochs", [1, 4])
def test_plan_forecasts_the_bytes_of_the_store(folder_of, weights, epochs, tmp_path, capsys):
    """Within 15 % of the shards that a job opens, also if parts are repeated or reached in part."""
    file = folder_of(weights)
    job = ["--samples-per-s", 1e4, "--gpus", 1, "--batch", 24, "--epochs", epochs, "--remote"]
    values = json.loads(run(capsys, "plan", file, *job, "--json", "--cache", tmp_path))
    with mix_file(file, cache=DiskCache(tmp_path, max_bytes="1GB")) as mixture:
        shard_bytes, wanted = mixture.contents.shard_bytes, set[int]()
        with DataLoader(mixture, 24, shuffle=True, seed=3, world=World(0, 1)) as loader:
            for step in range(len(loader) * epochs):
                wanted |= {*mixture.rows(loader.samples_of(step))[:, 0].tolist()}
    read = int(shard_bytes[sorted(wanted)].sum())
    assert values["remote_bytes"] == pytest.approx(read, rel=0.15)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a mixture of packs of 120 and 24 shards with weights."""
    folder: Path = tmp_path_factory.mktemp("forecast")
    for name, size in {"big": 2400, "small": 480}.items():
        np.save(folder / f"{name}.npy", np.zeros((size, 64), np.int64))
        pack(folder / f"{name}.npy", folder / name, shard_bytes=20 * 64 * 8)
        fsspec.filesystem("memory").put(str(folder / name), f"/forecast-{name}", recursive=True)

    def write(weights: tuple[int, int]) -> Path:
        path = folder / f"{weights[0]}.json"
        parts = {name: f"memory://forecast-{name}" for name in ("big", "small")}
        values = {"parts": parts, "weights": dict(zip(parts, weights, strict=True)), "epoch": 960}
        path.write_text(json.dumps(values))
        return path

    return write
