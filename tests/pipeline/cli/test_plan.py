"""Test `penstock plan` on the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import pack
from penstock.cache import ConfigError
from penstock.cache.base import format_size, parse_rate
from penstock.pipeline.bench import disk_rate
from penstock.pipeline.cli import main, model_named, sweep
from penstock.pipeline.plan.sizing import duration
from tests.conftest import write_photographs
from tests.layers import ROOT
from tests.pipeline.plan.sizing.setups import setup

if TYPE_CHECKING:
    from pathlib import Path

RESNET = ["plan", "--model", "resnet50", "--samples", "1281167"]
PROMISED = {
    "shard_bytes",
    "lanes",
    "window",
    "connections",
    "lookahead_bytes",
    "first_batch_s",
    "epoch_s",
    "au_first",
    "au_later",
    "limit",
}


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_what_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *RESNET, "--nodes", "4")
    assert set(found) >= PROMISED
    assert found["au_later"] > 99
    assert found["limit"] == "model"
    assert all(one["from"] and one["value"] for one in found["assumptions"].values())


def test_peers_encrypt_unless_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    moved = [*RESNET, "--nodes", "4", "--moved", "1", "--peers"]
    encrypted, plain = planned(capsys, *moved), planned(capsys, *moved, "--no-tls")
    seconds = [found["first"]["peer_cpu_s"] for found in (encrypted, plain)]
    assert seconds[0] / seconds[1] == pytest.approx(1.64 / 0.71)
    assert encrypted["assumptions"]["between peers"]["from"] == "default"
    assert plain["assumptions"]["between peers"] == {"value": "plain HTTP", "from": "given"}
    assert main([*RESNET, "--no-tls"]) == 2
    assert "--peers" in capsys.readouterr().err


def test_a_unet3d_b200_takes_5_9_gib_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "unet3d", "--nodes", "9", "--nvme", "30TB"]) == 0
    report = capsys.readouterr().out
    assert "5.9 GiB/s each" in report
    assert "published, b200-unet3d" in report


def test_every_default_stands_among_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *RESNET, "--ram", "2TB")["assumptions"]
    assert found["RAM of a node"]["from"] == "given"
    assert found["cores of a node"]["from"] == "default"
    assert len(found) >= 17


def test_omissions_of_the_figures_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    decoding = "the plan assumes that the GPUs decode"
    assert decoding in " ".join(planned(capsys, *RESNET)["warnings"])
    assert decoding not in " ".join(planned(capsys, *RESNET, "--cpu-s-per-1000", "2")["warnings"])
    arrays = planned(capsys, "plan", "--model", "b200-unet3d", "--nvme", "30TB")
    assert decoding not in " ".join(arrays["warnings"])
    huge = planned(capsys, *RESNET, "--nodes", "100000", "--batch", "1")
    assert huge["au_first"] == huge["busy_first"] < 1
    assert "AU excludes the first step" in " ".join(huge["warnings"])
    slow = ("--samples", "12000", "--sample-bytes", "115KB", "--samples-per-s", "100")
    store = ("--store-latency", "500", "--store-requests-per-s", "1e6", "--shard-bytes", "12MB")
    slow_start = planned(capsys, "plan", *slow, *store, "--global-batch-size", "2048")
    assert "The first batch takes" in " ".join(slow_start["warnings"])
    few = ("--samples", "40000", "--shard-bytes", "86MB", "--global-batch-size", "400")
    shared = planned(capsys, *RESNET[:3], *few, "--nodes", "4", "--peers")
    assert "each fetch a part of it, up to 1.17" in " ".join(shared["warnings"])


def test_a_pack_has_its_own_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvidia.dali")
    write_photographs(tmp_path / "photos", samples=12, classes=2)
    pack(str(tmp_path / "photos"), str(tmp_path / "pack"))
    report = (str(tmp_path / "pack"), "--samples-per-s", "10", "--gpus", "1", "--batch", "4")
    found = planned(capsys, "plan", *report)
    assert found["shards"] == 1
    assert found["assumptions"]["samples"] == {"value": "12", "from": "index"}
    assert found["assumptions"]["store"]["from"] == "local URL"
    assert found["remote_bytes"] == 0
    found = planned(capsys, "plan", *report, "--store-bandwidth", "1GB/s")
    assert found["remote_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "--nodes: got 0"),
        (["--global-batch-size", "0"], "wanted a whole number from 1 on"),
        (["--spread", "1e300"], "wanted at most 1e+24"),
        (["--global-batch-size", "3"], "5 fewer than the 8 GPUs"),
        (["--nic", "5"], "wanted bytes or bits a second"),
        (["--nvme", "1MB"], "one shard is"),
        (["--nvme", "1 lightyear"], "--nvme: got"),
        (["--sample-bytes", "-4"], "--sample-bytes: got '-4'"),
        (["--epochs", "0"], "epochs: got 0"),
        (["--spread", "nan"], "spread: got nan"),
        (["--cores", "nan"], "--cores: got nan"),
        (["--store-latency", "-1"], "--store-latency: got -1"),
        (["--au", "nan"], "--au: got nan"),
        (["--samples-per-s", "3"], "both of --model and --samples-per-s"),
        (
            ["--nvme-bandwidth", "1MB/s", "--ram", "1GB", "--au", "90"],
            "Too slow for the GPUs: the local disk (",
        ),
        (["--plot", "/nowhere/a.png"], "isn't an existing folder"),
        (["/nowhere/photos"], "there is no such file or folder"),
    ],
)
def test_what_cant_be_is_code_2_with_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RESNET, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_unknown_models_and_rates_name_the_known_ones() -> None:
    assert model_named("resnet50").name == "h100-resnet50"
    assert model_named("dgx-pod").samples_per_s == 480
    with pytest.raises(ConfigError, match="b200-unet3d"):
        model_named("vgg")
    with pytest.raises(ConfigError, match="bits"):
        parse_rate("5 miles/h")
    assert parse_rate("100Gb/s") == parse_rate("12.5 GB/s") == 12.5e9
    assert parse_rate("800MiB/s") == 800 * 2**20


def test_the_chart_shows_both_kinds_of_epoch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    assert main([*RESNET, "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_pack_takes_its_shard_size_from_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 samples of 1 MB on 4 nodes: 10 shards of 4 MiB, where 64 MiB would make one."""
    rng = np.random.default_rng(0)
    rows = [rng.bytes(2**20) for _ in range(40)]
    pq.write_table(pa.table({"data": pa.array(rows, pa.binary())}), tmp_path / "d.parquet")
    packed = ["pack", str(tmp_path / "d.parquet"), str(tmp_path / "pack"), "--json"]
    assert main([*packed, "--for-nodes", "4", "--for-batch", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] in (10, 11)
    for wrong in (
        ["--for-nodes", "4", "--shard-bytes", "1MiB"],
        ["--for-batch", "4"],
        ["--for-nodes", "4", "--for-batch", "3"],
        ["--for-nodes", "0"],
    ):
        assert main([*packed, *wrong]) == 2


def test_measure_probes_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvidia.dali")
    write_photographs(tmp_path / "photos", samples=12, classes=2)
    pack(str(tmp_path / "photos"), str(tmp_path / "pack"))
    report = ["--samples-per-s", "10", "--gpus", "1", "--batch", "4", "--measure"]
    found = planned(capsys, "plan", str(tmp_path / "pack"), *report)["assumptions"]
    assert found["CPU-s to decode 1,000"]["from"].startswith("measured here")
    assert float(found["CPU-s to decode 1,000"]["value"]) > 0
    assert main(["plan", "--model", "resnet50", "--samples", "1000000", "--measure"]) == 2
    assert "Pass the URL of the data" in capsys.readouterr().err


def test_a_disk_is_measured_or_not_known(tmp_path: Path) -> None:
    rate = disk_rate(tmp_path / "not there yet", size_bytes=2**22)
    assert rate is None or rate > 0
    assert not any(tmp_path.iterdir())


IMAGENET = ["--model", "h100-resnet50", "--samples", "1281167", "--global-batch-size", "32768"]
UNET3D = ["--model", "b200-unet3d", "--nvme", "30TB", "--nvme-bandwidth", "50GB/s"]
UNET3D += ["--nic", "400Gb/s", "--store-bandwidth"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("8 GPUs", [*IMAGENET, "--nodes", "1"]),
        ("256 GPUs", [*IMAGENET, "--nodes", "32"]),
        ("1,024 GPUs", [*IMAGENET, "--nodes", "128"]),
        ("9 nodes", [*UNET3D, "100GB/s", "--nodes", "9", "--samples", "709410"]),
        ("660 nodes", [*UNET3D, "1000GB/s", "--nodes", "660", "--samples", "3325360"]),
    ],
)
def test_the_tables_of_the_docs_are_what_it_states(
    name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "plan", *arguments)
    row = (
        f"| {name} | {found['shards']:,} of {format_size(found['shard_bytes'])} "
        f"| {found['lanes']:,} / {found['window']} | {found['readers']:.2f} "
        f"| {found['cache_share']:.0%} | {format_size(found['bytes_per_s_node'])}/s "
    )
    for epoch, which in (("first", "_first"), ("later", "")):
        report = duration(found[f"epoch_{epoch}_s"])
        row += f"| {report}, AU {found[f'au_{epoch}']:.0f} %, {found[f'limit{which}']} "
    assert f"{row}|" in (ROOT / "docs" / "howto" / "sizes.md").read_text()


def test_an_epoch_of_one_step_has_no_au(capsys: pytest.CaptureFixture[str]) -> None:
    one_step = ["plan", "--model", "resnet50", "--samples", "4000", "--nodes", "1"]
    assert main([*one_step, "--global-batch-size", "4000"]) == 0
    shown = capsys.readouterr()
    assert "only one step" in " ".join((shown.out + shown.err).split())


def test_the_chart_ends_before_epochs_of_one_step() -> None:
    found = sweep(setup(samples=100_000, nodes=1, global_batch=8 * 256))
    assert [one.setup.nodes for one in found] == [1, 2, 4, 8, 16]
    assert all(one.setup.steps > 1 for one in found)
