"""Test `penstock bench` on samples of any fields: the printed code runs as it was measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ConfigError
from penstock.pipeline.bench import Workload, export_files, recipe_named
from penstock.pipeline.bench import bench as measure
from penstock.pipeline.cli import main
from penstock.readers import Dataset
from tests import field_sets, images, tars

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 12
WITHOUT_STAGES = {"decode", "augment", "python", "copy"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sets")
    field_sets.write_folder(place / "folder", SAMPLES)
    field_sets.write_tars(place / "tar", SAMPLES)
    field_sets.write_numbers(place / "numbers", SAMPLES)
    field_sets.pack_of(place / "numbers", place / "numbers-pack")
    return place


def bench(url: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["bench", str(url), "--seconds", "0.1", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def run_as_printed(found: dict[str, Any]) -> tuple[Any, Any]:
    """Return the loader of the printed line, and its first batch."""
    names: dict[str, Any] = {}
    exec("from penstock import DataLoader, Dataset, imagenet_train", names)
    with eval(found["python"], names) as loader:
        batch = next(iter(loader))
        loader.dataset.close()
        return loader, batch


@pytest.mark.parametrize("kind", ["numbers", "numbers-pack"])
def test_without_images_no_decoding_is_reported(
    sets: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(sets / kind, capsys=capsys)
    assert found["augment"] == "fields"
    assert found["limit"] not in ("decode", "augment")
    assert not WITHOUT_STAGES & found["ceilings"].keys()
    # An array of 40 bytes; ragged ones and texts too, where they aren't noted in the index.
    each = found["bytes_per_s"] / found["samples_per_s"]
    assert each == pytest.approx(40) if kind == "numbers" else each > 60
    assert sum(found["bytes_by_tier"].values()) >= 40 * found["samples"]
    _, batch = run_as_printed(found)
    assert len(batch) == 5
    assert batch[0].shape == (SAMPLES, 2, 5)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_what_batches_have_is_what_is_counted(
    sets: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(sets / kind, capsys=capsys)
    sizes = [len(field_sets.street(number).image) for number in range(SAMPLES)]
    each = found["bytes_per_s"] / found["samples_per_s"]
    assert each == pytest.approx(sum(sizes) / SAMPLES)
    _, (pixels, labels) = run_as_printed(found)
    assert (pixels.shape, labels.shape) == ((SAMPLES, 3, 224, 224), (SAMPLES,))


def test_fields_may_be_named(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(sets / "tar", "--fields", "mask,caption", capsys=capsys)
    assert (found["augment"], found["limit"] in ("decode", "augment")) == ("fields", False)
    _, (masks, captions) = run_as_printed(found)
    assert masks.shape == (SAMPLES, field_sets.HEIGHT, field_sets.WIDTH)
    assert isinstance(captions[0], str)


def test_fields_may_be_folders(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ("--fields", "image=images,mask=masks")
    found = bench(sets / "folder", *places, "--augment", "none", capsys=capsys)
    assert found["python"] is None  # no loader reads samples and drops them
    each = [field_sets.street(number) for number in range(SAMPLES)]
    size = sum(len(one.image + one.mask_png) for one in each) / SAMPLES
    assert found["bytes_per_s"] / found["samples_per_s"] == pytest.approx(size, rel=0.01)


def test_other_loaders_need_images_and_that_is_reported_before_anything_is_measured(
    sets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "penstock.pipeline.bench.measurement.play", lambda *_, **__: pytest.fail("it played")
    )
    assert main(["bench", str(sets / "numbers"), "--against", "torch"]) == 2
    report = " ".join(capsys.readouterr().err.split())
    assert "compared on images" in report
    assert "'signal', 'tokens', 'text', 'target', 'number'" in report


def test_imagenets_recipe_needs_images(sets: Path) -> None:
    workload = Workload(
        url=str(sets / "numbers"), recipe=recipe_named("imagenet"), device="cpu", seconds=0.1
    )
    with pytest.raises(ConfigError, match="works on images"):
        measure(workload, progress=lambda *_: None)


def test_only_images_are_written_out(sets: Path, tmp_path: Path) -> None:
    with (
        Dataset(sets / "numbers") as dataset,
        pytest.raises(ConfigError, match="no images that could be written"),
    ):
        export_files(dataset, tmp_path / "out")
    with Dataset(sets / "tar") as dataset:
        done = export_files(dataset, tmp_path / "out")
    assert (done.samples, done.same_labels) == (SAMPLES, True)
    written = sorted(each.read_bytes() for each in (tmp_path / "out").glob("*/*.png"))
    assert written == sorted(field_sets.street(number).image for number in range(SAMPLES))


def test_several_images_are_measured_together_where_some_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, bytes] = {}
    for number in range(SAMPLES):
        files[f"{number:02d}.left.jpg"] = images.jpeg(number, 24, 32)
        if number % 3:
            files[f"{number:02d}.right.jpg"] = images.jpeg(number, 20, 30)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/pairs.tar").write_bytes(tars.archive(files))
    both = bench(tmp_path / "set", "--fields", "left,right,right.present", capsys=capsys)
    assert {"read", "decode", "augment", "python"} <= both["ceilings"].keys()
    _, (left, right, present) = run_as_printed(both)
    assert left.shape == right.shape
    assert int(present.sum()) == SAMPLES * 2 // 3
