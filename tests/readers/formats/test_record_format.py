"""Simple formats of other packages are recognised, indexed, read, cached and checked like ours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import (
    ConfigError,
    CorruptSampleError,
    DatasetError,
    IndexChangedError,
    MissingDependencyError,
)
from penstock.readers import Dataset
from penstock.readers.fieldtypes import ClassLabel, DenseColumn
from penstock.readers.formats import format_registry
from tests import images
from tests.files import uploaded
from tests.readers.formats.conformance import SAMPLES, IndexedFormatConformance
from tests.readers.formats.guests import RECORD_BYTES, Cifar, install
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GUESTS = "tests.readers.formats.guests"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from tests.readers.formats import guests

    monkeypatch.setattr(guests, "CIFAR", guests.Cifar(), raising=False)
    monkeypatch.setattr(guests, "STRIP", guests.Strip(), raising=False)
    install(monkeypatch, strip=f"{GUESTS}:STRIP", cifar=f"{GUESTS}:CIFAR")
    yield
    format_registry.format_named.cache_clear()


@pytest.mark.usefixtures("_installed")
class TestStrip(IndexedFormatConformance):
    name = "strip"

    def write(self, folder: Path) -> Path:
        root = folder / "strips"
        root.mkdir()
        for number in range(3):
            data, lines = b"", []
            for seed in range(number * 4, number * 4 + 4):
                image = images.jpeg(seed, 16 + seed % 7, 20 + seed % 5)
                lines.append(f"{len(data)} {len(image)} {seed % 3}")
                data += image
            (root / f"{number}.strip").write_bytes(data)
            (root / f"{number}.txt").write_text("\n".join(lines))
        assert SAMPLES == 12
        return root

    def test_its_datasets_are_recognised_by_it_first(self, root: Path) -> None:
        assert self.index(root).format is self.format
        assert self.index(root).about.progressive == 0


def cifar(root: Path, *, files: int = 2, records: int = 5) -> tuple[Path, np.ndarray]:
    """Write files of records; also return their content, shape (records, 3073)."""
    root.mkdir()
    data = np.random.default_rng(7).integers(0, 256, (files * records, RECORD_BYTES), np.uint8)
    data[:, 0] %= 10
    for number in range(files):
        part = data[number * records : (number + 1) * records]
        (root / f"batch_{number}.bin").write_bytes(part.tobytes())
    return root, data


@pytest.mark.usefixtures("_installed")
def test_bare_records_are_arrays_and_numbers_in_local_and_remote_datasets(tmp_path: Path) -> None:
    root, data = cifar(tmp_path / "cifar")
    with uploaded(root) as remote:
        for url in (root, remote):
            for mode in ("copy", "mmap", "pread"):
                with Dataset(url, cache=tmp_path / "cache") as dataset:
                    assert dataset.fields == ("pixels", "label")
                    batch = dataset.read(rows_of(dataset)[::-1], mode=mode)
                    pixels, labels = batch.columns["pixels"], batch.columns["label"]
                    assert isinstance(pixels, DenseColumn)
                    assert isinstance(labels, DenseColumn)
                    assert pixels.values.dtype == np.uint8
                    assert pixels.values.shape == (10, 3, 32, 32)
                    assert (pixels.values.reshape(10, -1) == data[::-1, 1:]).all()
                    assert labels.values.dtype == np.int64
                    assert labels.values.tolist() == data[::-1, 0].tolist()
                    assert dataset.names([7]) == ["batch_1.bin[2]"]


@pytest.mark.usefixtures("_installed")
def test_a_changed_record_is_bad_and_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    root, data = cifar(tmp_path / "cifar")
    with Dataset(root) as dataset:
        dataset.open()
        with (root / "batch_0.bin").open("r+b") as file:
            file.seek(RECORD_BYTES + 9)
            file.write(bytes([data[1, 9] ^ 1]))
        bad: dict[int, str] = {}
        batch = dataset.read(rows_of(dataset), bad=bad)
        assert list(bad) == [1]
        pixels = batch.columns["pixels"]
        assert isinstance(pixels, DenseColumn)
        assert not pixels.values[1].any()
        assert (pixels.values[2:].reshape(8, -1) == data[2:, 1:]).all()
        with pytest.raises((CorruptSampleError, IndexChangedError), match="batch_0"):
            dataset.read(rows_of(dataset))
    (root / "batch_0.bin").write_bytes(data[:5].tobytes()[:-1])
    with pytest.raises(DatasetError, match=r"batch_0\.bin: isn't a valid cifar file"):
        Dataset(root).open()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.array([1, 0, 2, 1], np.uint16), [1, 0, 2, 1]),
        ([2, 0, 1, "b"], [2, 0, 1, 1]),
        ([np.int64(2), 0, 7, None], [2, 0, 0]),  # no class is left out, None is missing
        (np.array(["a", "b", "c", "a"]), [0, 1, 2, 0]),
        (np.array([0.5, 1, 2, 0]), r"batch_0\.bin.*float64 for 'label'"),
        (np.zeros(3, int), r"batch_0\.bin.*3 values of 'label' for 4 records"),
    ],
)
@pytest.mark.usefixtures("_installed")
def test_values_are_arrays_or_lists_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Any, wanted: list[int] | str
) -> None:
    root, data = cifar(tmp_path / "cifar", files=1, records=4)
    records_of = Cifar.records

    def changed(self: Cifar, *arguments: Any) -> Any:
        return replace(records_of(self, *arguments), values={"label": values})

    monkeypatch.setattr(Cifar, "records", changed)
    schema = {"label": ClassLabel(("a", "b", "c"))}
    fields = ("pixels", "label", "label.present")
    with Dataset(root, schema=schema, fields=fields, allow_left_out=1) as dataset:
        if isinstance(wanted, str):
            with pytest.raises(DatasetError, match=wanted):
                dataset.open()
            return
        batch = dataset.read(rows_of(dataset))
        labels, pixels = batch.columns["label"], batch.columns["pixels"]
        assert isinstance(labels, DenseColumn)
        assert isinstance(pixels, DenseColumn)
        assert labels.values.tolist() == wanted
        kept = [0, 1, 3] if len(wanted) == 3 else [0, 1, 2, 3]
        assert (pixels.values.reshape(len(kept), -1) == data[kept, 1:]).all()
        present = batch.present.get("label")
        assert present is None if len(wanted) == 4 else present.tolist() == [True, True, False]


def test_the_error_for_a_broken_format_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, absent="no_such_package.format", odd="json:dumps")
    with pytest.raises(MissingDependencyError, match=r"absent.*no_such_package"):
        Dataset(tmp_path, format="absent").open()
    with pytest.raises(ConfigError, match=r"odd.*isn't a valid format"):
        Dataset(tmp_path, format="odd").open()
    with pytest.raises(ConfigError, match="'absent', 'odd'"):
        Dataset(tmp_path, format="zip")


@pytest.mark.usefixtures("_installed")
def test_an_index_of_a_format_that_is_no_longer_installed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.bin").write_bytes(bytes(4 * RECORD_BYTES))
    with Dataset(tmp_path / "set") as dataset:
        fingerprint = dataset.index.fingerprint
    with monkeypatch.context() as without:
        install(without)
        with pytest.raises(MissingDependencyError, match=r"manifest\.arrow: .*format 'cifar'"):
            Dataset(tmp_path / "set").open()
    with Dataset(tmp_path / "set") as dataset:
        assert dataset.index.fingerprint == fingerprint


def test_an_image_folder_loads_no_format_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, absent="no_such_package.format")
    for root in (images.class_folder(tmp_path / "set", 4), tmp_path / "flat"):
        images.write_folder(tmp_path / "flat", {"1.jpg": images.jpeg(1)})
        Dataset(root).open(verify=images.verify)
