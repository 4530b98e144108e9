"""Test every installed loader on a few images in a process of its own, the registry,
users' data."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import benchmarks
from penstock.augment import RandomResizedCrop, imagenet_eval, imagenet_train
from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.pipeline.bench import (
    Child,
    ChildFailedError,
    Comparison,
    LoaderComparison,
    Player,
    RoundSize,
    compare_loaders,
    crop_of,
    endless,
    export_files,
    fitted_size,
    summarise,
)
from penstock.pipeline.bench.adapters import (
    ADAPTERS,
    DEVIATION,
    LOADERS,
    MEAN,
    OURS,
    TITLES,
    Work,
    converted,
    list_files,
    loader_registry,
    split_installed,
)
from penstock.readers import Dataset, pack
from tests.benchmarks.test_benchmarks import PIXELS, a_round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers import Source

COLOURS = {"blue": (0, 0, 254), "green": (0, 254, 0), "red": (254, 0, 0)}  # sorted: labels 0, 1, 2
BRIGHT = {0: 2, 1: 1, 2: 0}  # label -> plane
EACH = 16


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write JPEGs of one colour per class, of several sizes, with a dot-file and a stray folder."""
    folder = tmp_path_factory.mktemp("coloured")
    for name, colour in COLOURS.items():
        (folder / name).mkdir()
        for number in range(EACH):
            image = Image.new("RGB", (60 + number, 70 - number), colour)
            image.save(folder / name / f"{number}.jpg", quality=95)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.jpg").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def packed(coloured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack(str(coloured), str(folder), shard_bytes="8KiB", workers=1)
    return folder


def a_work(folder: Path, packed: Path, scratch: Path) -> Work:
    return Work(
        folder=folder, pack=packed, scratch=scratch, batch_size=8, size=32, workers=2, seed=3
    )


# --- every loader --------------------------------------------------------------------------------


QUICK_LOADER = "simplejpeg"  # which pip brings with the tests; the others play in `make verify`
PLAYING = [
    pytest.param(name, marks=[] if name == QUICK_LOADER else [pytest.mark.timed])
    for name, adapter in ADAPTERS.items()
    if adapter.is_installed()
]


@pytest.mark.parametrize("name", PLAYING)
def test_a_loaders_batches_are_the_work_that_was_asked_for(
    name: str, coloured: Path, packed: Path, tmp_path: Path
) -> None:
    report = a_work(coloured, packed, tmp_path).to_json()
    with Child("tests.loader_child", [name, report, "8"]) as child:
        batches = list(child.messages())
    assert len(batches) == 8  # over the end of an epoch, which has 6
    for batch in batches:
        assert batch["shape"] == [8, 3, 32, 32]
        assert batch["dtypes"] == ["torch.float32", "torch.int64"]
        for label, planes in zip(batch["labels"], batch["planes"], strict=True):
            assert np.argmax(planes) == BRIGHT[label]
            expected = (254 * np.eye(3)[BRIGHT[label]] - MEAN) / DEVIATION
            assert np.abs(planes - expected).max() < 0.06
    assert {label for batch in batches for label in batch["labels"]} == {0, 1, 2}


# --- the registry --------------------------------------------------------------------------------


def test_each_loader_is_named_once_and_reports_why_to_get_it() -> None:
    assert set(LOADERS) | set(OURS) == set(ADAPTERS)
    assert len(set(TITLES.values())) == len(ADAPTERS)
    assert all("install" in adapter.install for adapter in ADAPTERS.values())


def test_every_adapter_in_benchmarks_is_an_entry_point() -> None:
    folder = Path(benchmarks.__file__).parent / "loaders"
    modules = {path.stem for path in (folder / "penstock_bench_loaders").glob("[!_]*.py")}
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]["penstock.bench"]) == modules
    assert {"webdataset", "streaming", "litdata", "tfdata", "grain", "spdl", "ffcv"} <= set(LOADERS)


def test_an_unknown_loader_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'tourch'.*torch, dali"):
        split_installed(["dali", "tourch"])


def test_a_loader_that_is_not_installed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {
        name: replace(a, needs=("nowhere.at_all",)) if name in ("grain", "torch") else a
        for name, a in ADAPTERS.items()
    }
    monkeypatch.setattr(loader_registry, "ADAPTERS", gone)
    there, missing = split_installed(["torch", "dali", "grain", "dali"])
    assert there == ["dali"]
    assert missing == {
        "torch": "pip install pillow",
        "grain": "pip install grain simplejpeg opencv-python-headless",
    }


# --- what other loaders read ---------------------------------------------------------------------


def test_files_are_listed_as_the_dataset_lists_them(coloured: Path) -> None:
    files = list_files(coloured)
    assert len(files) == EACH * len(COLOURS)
    assert files.labels == sorted(files.labels)
    assert sorted(files.shuffled().pairs()) == sorted(files.pairs())
    assert files.shuffled().labels != files.labels


def test_a_folder_without_classes_has_no_labels_to_compare(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="class folders"):
        list_files(tmp_path)
    with pytest.raises(DatasetNotFoundError):
        list_files(tmp_path / "nowhere")


def test_what_was_converted_is_kept_and_what_was_begun_is_not(
    coloured: Path, packed: Path, tmp_path: Path
) -> None:
    work = a_work(coloured, packed, tmp_path)
    seen = []

    def fails(_: Any, folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    def works(files: Any, folder: Path) -> None:
        assert not list(folder.iterdir())
        seen.append(len(files))
        (folder / "whole").write_text("")

    with pytest.raises(OSError, match="disk full"):
        converted(work, "some", fails)
    folder = converted(work, "some", works)
    assert converted(work, "some", works) == folder
    assert seen == [EACH * len(COLOURS)]
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_a_loader_that_gives_nothing_is_an_error_not_a_hang() -> None:
    assert [batch for batch, _ in zip(endless([1, 2]), range(5), strict=False)] == [1, 2, 1, 2, 1]
    with pytest.raises(ConfigError, match="no batch in an epoch"):
        next(endless([]))


def test_work_crosses_to_a_process_unchanged(tmp_path: Path) -> None:
    work = a_work(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert Work.from_json(work.to_json()) == work


@given(batch_size=st.integers(1, 4096), workers=st.integers(1, 256), rounds=st.integers(1, 20))
def test_a_round_is_long_enough_for_its_work(batch_size: int, workers: int, rounds: int) -> None:
    place = Path("unused")
    work = Work(folder=place, pack=place, scratch=place, batch_size=batch_size, workers=workers)
    size = fitted_size(RoundSize(), work, rounds=rounds)
    assert size.looked * rounds * batch_size >= 1024
    assert size.settle > 2 * workers
    assert size.timed >= 4 * workers
    assert fitted_size(size, work, rounds=rounds) == size


# --- a dataset as files --------------------------------------------------------------------------


def test_exported_files_hold_the_datasets_bytes_and_labels(
    coloured: Path, packed: Path, tmp_path: Path
) -> None:
    with Dataset(packed) as dataset:
        done = export_files(dataset, tmp_path / "all")
        few = export_files(dataset, tmp_path / "few", most_samples=5)
    assert (done.samples, done.same_labels) == (EACH * len(COLOURS), True)
    assert few.samples == 5
    assert len(list((tmp_path / "few").rglob("*.jpg"))) == 5
    wanted = {path.read_bytes(): label for path, label in pairs(coloured)}
    assert {path.read_bytes(): label for path, label in pairs(tmp_path / "all")} == wanted


def pairs(folder: Path) -> list[tuple[Path, int]]:
    return [(Path(path), label) for path, label in list_files(folder).pairs()]


def test_samples_without_labels_are_exported_as_one_class(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "flat" / f"{number}.png")
    with Dataset(tmp_path / "flat") as dataset:
        done = export_files(dataset, tmp_path / "out")
    assert (done.samples, done.same_labels) == (3, False)
    assert list_files(tmp_path / "out").labels == [0, 0, 0]
    assert len(list((tmp_path / "out").rglob("*.png"))) == 3


# --- penstock bench --against --------------------------------------------------------------------


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """compare_loaders with rounds that cost nothing; what they were asked for."""
    works: list[Work] = []

    def fake(names: Sequence[str], work: Work, *, rounds: int, **_: Any) -> Comparison:
        works.append(work)
        assert len(list_files(work.folder)) > 0  # while it is there
        done = {name: [a_round(PIXELS)] * rounds for name in names}
        first = done[names[0]]
        return Comparison(
            summaries={name: summarise(r, first) for name, r in done.items()},
            rounds=done,
            size=RoundSize(),
        )

    monkeypatch.setattr("penstock.pipeline.bench.loader_comparison.compare", fake)
    return works


def compared(names: list[str], dataset: Source, **changed: Any) -> LoaderComparison:
    options: dict[str, Any] = {"recipe": imagenet_train(), "batch_size": 8, "workers": 1}
    return compare_loaders(names, dataset, **(options | changed))


def test_a_labelled_folder_is_read_where_it_lies(coloured: Path, played: list[Work]) -> None:
    done = compared(["dali"], Dataset(coloured), recipe=imagenet_train(32))
    (work,) = played
    assert (work.folder, work.pack) == (coloured, coloured)
    assert (work.size, work.workers, work.batch_size) == (32, 1, 8)
    assert list(done.results) == ["dali"]
    assert done.ours is not None
    assert done.results["dali"].ratio == 1
    assert done.results["dali"].cpu_s_per_1000 == done.ours.cpu_s_per_1000 == 200


def test_a_packs_samples_are_given_to_others_as_files(
    packed: Path, played: list[Work], tmp_path: Path
) -> None:
    done = compared(["dali"], Dataset(packed), scratch=tmp_path)
    assert played[0].pack == packed
    assert played[0].folder.is_relative_to(tmp_path)
    assert not list(tmp_path.iterdir())  # the copy is gone again
    assert "48 samples as files" in done.note


def test_all_read_the_same_copy_of_a_set_that_is_too_large(
    packed: Path, played: list[Work]
) -> None:
    with Dataset(packed) as dataset:
        done = compared(["dali"], dataset, most_samples=20)
        assert len(dataset) == EACH * len(COLOURS)  # still open
    assert played[0].pack == played[0].folder
    assert "20 of 48 samples" in done.note


def test_all_read_the_same_copy_of_a_part_of_a_dataset(packed: Path, played: list[Work]) -> None:
    with Dataset(packed) as dataset:
        part = dataset.subset(range(0, 48, 3))
        done = compared(["dali"], part)
    assert played[0].pack == played[0].folder
    assert "16 of 16 samples" in done.note


def test_nothing_is_played_where_no_loader_is_installed(
    monkeypatch: pytest.MonkeyPatch, coloured: Path, played: list[Work]
) -> None:
    gone = {name: replace(a, needs=("nowhere",)) for name, a in ADAPTERS.items()}
    monkeypatch.setattr(loader_registry, "ADAPTERS", gone)
    done = compared(["ffcv"], Dataset(coloured))
    assert not done.results
    assert done.ours is None
    assert set(done.skipped) == {"ffcv"}
    assert not played


@pytest.mark.parametrize(
    "recipe",
    [imagenet_eval(), (), imagenet_train((32, 64)), (RandomResizedCrop(32),)],
    ids=["eval", "none", "not square", "parts"],
)
def test_other_loaders_play_the_training_recipe_only(recipe: Any) -> None:
    with pytest.raises(ConfigError, match="only on the ImageNet training recipe"):
        crop_of(recipe)


def test_a_batch_larger_than_the_set_is_refused(coloured: Path, played: list[Work]) -> None:
    with pytest.raises(ConfigError, match="49, but there are only 48 samples"):
        compared(["dali"], Dataset(coloured), batch_size=49)
    assert not played


def test_a_loader_that_fails_is_named(tmp_path: Path, packed: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff broken")
    work = replace(a_work(tmp_path, packed, tmp_path), batch_size=1, workers=0)
    with Player("torch", work) as player:
        player.receive()
        with pytest.raises(ChildFailedError, match=r"torch DataLoader \+ Pillow"):
            player.play(RoundSize(looked=1, settle=0, timed=1, stepped=0))
