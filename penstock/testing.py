"""Test that a format of datasets, a type of field or an operation fulfils its contract, by the
public interface.

For a type of field, subclass `FieldTypeConformance`; for an operation on pixels,
`OperationConformance`. For a format, subclass `FormatConformance` in a pytest module, set the
format's name and write a small dataset. Each test method then runs on it:

    from penstock.testing import FormatConformance

    class TestCards(FormatConformance):
        format = "cards"

        def write(self, folder):
            ...                                     # files below folder, in two shards or more
            return folder

        def samples(self):
            return {"deck-0/3": {"image": png_bytes, "suit": 2, "title": "three of clubs"}, ...}

`penstock.readers.formats.format` defines a format; docs/reference/formats.md describes how to
register one.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
from abc import ABCMeta, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from penstock.augment import (
    Graph,
    GraphPlan,
    ImageOperation,
    Map,
    Resize,
    check_recipe,
    draw_with_moves,
)
from penstock.cache import ConfigError, PenstockError
from penstock.pipeline import DataLoader
from penstock.pipeline.plan import World
from penstock.readers import Dataset, EncodedBatch, ImageRange, pack
from penstock.readers.fieldtypes import (
    NUMBER,
    PRESENT,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    Schema,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.augment import ImageMoves
    from penstock.readers.fieldtypes import Column, FieldType, SampleBatch

__all__ = ["FieldTypeConformance", "FormatConformance", "OperationConformance", "sample_values"]

_WORLDS = (1, 2, 3, 5)
_MISSING = object()


def sample_values(batch: SampleBatch, schema: Schema) -> list[dict[str, Any]]:
    """Convert the samples of a batch from `Dataset.read` to Python values.

    Text becomes str, other encoded fields become bytes, and numbers and arrays are numpy's. A field
    that a sample lacks is left out.
    """
    return [
        {
            name: _value(column, row, is_text=schema[name].codec == "utf-8")
            for name, column in batch.columns.items()
            if name not in batch.present or batch.present[name][row]
        }
        for row in range(len(batch))
    ]


def _value(column: Column, row: int, *, is_text: bool) -> Any:
    if isinstance(column, EncodedColumn):
        data = bytes(column.samples[row])
        return data.decode() if is_text else data
    assert isinstance(column, DenseColumn | RaggedColumn), column
    return column.sample(row)


class FormatConformance(metaclass=ABCMeta):
    """Tests of one format, on one small dataset of at least 8 samples in at least two shards.

    format: its name. options: further arguments of `Dataset`, if it needs some. has_checksums:
    False if neither the files nor the index detect damaged bytes; that is usual for data in chunks,
    which aren't read for the index.
    """

    format: str
    options: Mapping[str, Any] = {}
    has_checksums = True

    @abstractmethod
    def write(self, folder: Path) -> str | Path:
        """Write the dataset below an empty folder, and return the argument of `Dataset` that opens
        it."""

    @abstractmethod
    def samples(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the content of the dataset: values by field, by the sample's name.

        Images and other encoded fields are bytes, a text is a str, and all other fields are numbers
        or arrays. A field that a sample lacks is left out.
        """

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return Path(self.write(tmp_path / "data"))

    @pytest.fixture
    def remote_url(self, root: Path, tmp_path: Path) -> Iterator[str]:
        """The same dataset in a remote store."""
        memory = fsspec.filesystem("memory")
        place = f"/conformance-{self.format}-{tmp_path.name}"
        for path in sorted(root.rglob("*")):
            if path.is_file():
                memory.pipe_file(f"{place}/{path.relative_to(root)}", path.read_bytes())
        yield f"memory:/{place}"
        memory.rm(place, recursive=True)

    def open(self, url: str | Path, **options: Any) -> Dataset:
        """Open a dataset with every field."""
        with Dataset(url, **{**self.options, **options}) as found:
            schema, lacking = found.schema, found.index.lacking
        fields = [*schema, *(name + PRESENT for name in schema if lacking.get(name)), NUMBER]
        return Dataset(url, **{**self.options, **options}).select(*fields)

    def everything(self, dataset: Dataset, **options: Any) -> dict[str, dict[str, Any]]:
        """Read all samples in one batch, and return them by name."""
        sizes = dataset.index.sizes.tolist()
        rows = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
        batch = dataset.read(np.array(rows, np.int64).reshape(-1, 2), **options)
        names = dataset.names(batch.ids)
        assert len(set(names)) == len(names)
        return dict(zip(names, sample_values(batch, dataset.schema), strict=True))

    def test_its_datasets_are_recognised(self, root: Path) -> None:
        with self.open(root) as by_itself, self.open(root, format=self.format) as by_name:
            assert by_itself.index.kind == self.format == by_name.index.kind
            assert by_itself.index.fingerprint == by_name.index.fingerprint

    def test_an_empty_folder_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(PenstockError), self.open(tmp_path / "empty", format=self.format) as it:
            it.open()

    def test_the_index_has_the_counts_of_the_samples(self, root: Path) -> None:
        expected = self.samples()
        with self.open(root) as dataset:
            index = dataset.index
            assert index.samples == len(expected) >= 8
            assert len(index.sizes) >= 2
            assert (index.sizes > 0).all()
            fields = {name for values in expected.values() for name in values}
            assert set(dataset.schema) == fields
            for name in fields:
                lacking = sum(name not in values for values in expected.values())
                assert index.lacking.get(name, 0) == lacking

    def test_an_index_is_built_once_and_updated_when_a_file_changes(self, root: Path) -> None:
        with self.open(root) as first, self.open(root) as again:
            assert first.index.fingerprint == again.index.fingerprint
        victim = min(path for path in root.rglob("*") if path.is_file())
        victim.rename(victim.with_name(f"renamed-{victim.name}"))
        os.utime(victim.parent, ns=(1, 1))  # the clock may be too coarse to show the change
        try:
            with self.open(root) as dataset:
                now = self.everything(dataset)
        except PenstockError:
            return  # a format may need this name
        values = [str(sorted(each.items(), key=str)) for each in now.values()]
        assert len(values) == len(now)

    @pytest.mark.parametrize("mode", ["copy", "pread", "mmap"])
    def test_every_sample_is_what_was_written(self, root: Path, mode: str) -> None:
        with self.open(root) as dataset:
            assert_same(self.everything(dataset, mode=mode), self.samples())

    def test_rows_come_in_the_order_asked_for(self, root: Path) -> None:
        with self.open(root) as dataset:
            starts, samples = dataset.index.starts, dataset.index.samples
            ids = np.random.default_rng(3).permutation(samples).astype(np.int64)
            ids = np.concatenate([ids, ids[:3]])
            shards = np.searchsorted(starts, ids, side="right") - 1
            batch = dataset.read(np.stack([shards, ids - starts[shards]], axis=1))
            assert batch.ids.tolist() == ids.tolist()
            found = sample_values(batch, dataset.schema)
            wanted = self.everything(dataset)
            for name, values in zip(dataset.names(ids), found, strict=True):
                assert_same({name: values}, {name: wanted[name]})
            assert len(dataset.read(np.empty((0, 2), np.int64))) == 0

    def test_only_the_chosen_fields_are_read(self, root: Path) -> None:
        with self.open(root) as dataset:
            for name in dataset.schema:
                chosen = [field for field in dataset.fields if field in (name, name + PRESENT)]
                found = self.everything(dataset.select(*chosen))
                wanted = {
                    key: {k: v for k, v in values.items() if k == name}
                    for key, values in self.samples().items()
                }
                assert_same(found, wanted)
            with pytest.raises(ConfigError):
                dataset.select("no such field").open()

    @pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")
    def test_a_remote_gives_the_same_samples_with_a_cache_and_without(
        self, remote_url: str, tmp_path: Path
    ) -> None:
        place = tmp_path / "own-index"
        for cache in (None, tmp_path / "one", tmp_path / "one"):
            with self.open(remote_url, cache=cache, index=place) as dataset:
                assert_same(self.everything(dataset), self.samples())

    def test_damage_is_reported_and_no_damaged_sample_is_returned(self, root: Path) -> None:
        with self.open(root) as dataset:
            expected = self.everything(dataset)
        victim = max(
            (path for path in root.rglob("*") if path.is_file() and not _is_ours(path, root)),
            key=lambda path: path.stat().st_size,
        )
        data, times = bytearray(victim.read_bytes()), victim.stat()
        for place in range(len(data) // 3, len(data), 7):
            data[place] ^= 0x55
        victim.write_bytes(data)
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
        bad: dict[int, str] = {}
        try:
            with self.open(root) as dataset:
                found = self.everything(dataset, bad=bad)
                names = list(found)
        except PenstockError:
            return
        if not self.has_checksums:
            assert sorted(found) == sorted(expected)
            return
        assert bad
        good = {name: found[name] for row, name in enumerate(names) if row not in bad}
        assert_same(good, {name: expected[name] for name in good})

    @pytest.mark.parametrize("size", _WORLDS)
    def test_a_loader_delivers_each_sample_once_over_all_ranks(self, root: Path, size: int) -> None:
        def ids(rank: int) -> list[int]:
            dataset = self.open(root).select(NUMBER)
            options: dict[str, Any] = {"seed": 5, "shuffle": True, "pad": "mask"}
            world = World(rank, size)
            with DataLoader(dataset, global_batch_size=8, world=world, **options) as loader:
                return [i for numbers, valid in loader for i in numbers[valid].tolist()]

        together = [i for rank in range(size) for i in ids(rank)]
        assert sorted(together) == list(range(len(self.samples())))

    def test_a_pack_of_it_holds_the_same(self, root: Path, tmp_path: Path) -> None:
        if self.options.keys() <= {"format", "fields", "manifest", "schema"}:
            pack(root, tmp_path / "pack", shard_bytes=20_000, **self.options)
        else:
            with self.open(root) as dataset:
                pack(dataset, tmp_path / "pack", shard_bytes=20_000)
        with FormatConformance.open(self, tmp_path / "pack", format="pack") as dataset:
            assert_same(self.everything(dataset), self.samples())

    def test_a_spawned_worker_opens_the_same(self, root: Path) -> None:
        dataset = self.open(root)
        with pickle.loads(pickle.dumps(dataset)) as again:
            assert again.fields == dataset.fields
            assert_same(self.everything(again), self.samples())
        dataset.close()


def _is_ours(path: Path, root: Path) -> bool:
    """Return True if a file is a part of an index."""
    return any(part.startswith("_penstock") for part in path.relative_to(root).parts)


def assert_same(
    found: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    """Assert that samples are equal, value by value. A failure names the difference."""
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        assert sorted(found[name]) == sorted(values), name
        for field, value in values.items():
            _assert_equal(found[name][field], value, f"{field} of {name}")


def _assert_equal(found: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, bytes | str):
        assert type(found) is type(wanted), what
        assert found == wanted, what
        return
    left, right = np.asarray(found), np.asarray(wanted)
    assert left.shape == right.shape, f"{what}: {left.shape} and {right.shape}"
    assert np.array_equal(left, right.astype(left.dtype), equal_nan=left.dtype.kind in "fc"), what


class FieldTypeConformance(metaclass=ABCMeta):
    """Tests of one type of field: `make` returns it, without `of`, and `samples` some values.
    damaged: a file, or the cell of a table, that is no sample."""

    damaged: bytes | str

    @abstractmethod
    def make(self) -> FieldType:
        """Return the type."""

    @abstractmethod
    def samples(self) -> Sequence[tuple[bytes | str, Any]]:
        """Return four samples or more: the content of a file, or the cell of a table in text, and
        the value in a batch."""

    def write(self, folder: Path, stored: Sequence[bytes | str]) -> Path:
        """Write a folder with a table that names the file of each sample, or holds its cell."""
        folder.mkdir()
        is_file = isinstance(stored[0], bytes)
        with (folder / "table.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["note_file_name", "value_file_name" if is_file else "value"])
            for number, each in enumerate(stored):
                (folder / f"{number}.txt").write_text(str(number))
                if isinstance(each, bytes):
                    (folder / f"{number}.value").write_bytes(each)
                table.writerow([f"{number}.txt", f"{number}.value" if is_file else each])
        return folder

    def open(self, folder: Path, **options: Any) -> Dataset:
        """Open the folder that `write` returned."""
        schema = {"value": self.make()}
        return Dataset(
            folder, manifest="table.csv", schema=schema, fields=("value", "id"), **options
        )

    def values(self, dataset: Dataset, **options: Any) -> dict[int, Any]:
        """Return the value of each sample of a dataset, by its id."""
        found: dict[int, Any] = {}
        with dataset, DataLoader(dataset, 3, as_dict=True, seed=7, **options) as loader:
            for batch in loader:
                found |= {int(n): batch["value"][row] for row, n in enumerate(batch["id"])}
        return found

    def test_it_is_a_frozen_value(self) -> None:
        type = self.make()
        assert hash(type) == hash(self.make())
        assert pickle.loads(pickle.dumps(type)) == type
        schema = Schema({"value": type})
        assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema

    def test_batches_have_its_values(self, tmp_path: Path) -> None:
        wanted = [value for _, value in self.samples()]
        folder = self.write(tmp_path / "data", [stored for stored, _ in self.samples()])
        pack(self.open(folder), tmp_path / "pack", fields=("value",), shuffle=False)
        packed = Dataset(tmp_path / "pack", fields=("value", "id"))
        for dataset in (self.open(folder), packed):
            found = self.values(dataset)
            assert found.keys() == set(range(len(wanted)))
            for number, value in enumerate(wanted):
                _assert_equal(found[number], value, f"sample {number}")

    def test_a_damaged_sample_is_left_out(self, tmp_path: Path) -> None:
        stored = [each for each, _ in self.samples()]
        folder = self.write(tmp_path / "data", [*stored, self.damaged])
        with self.open(folder, allow_left_out=1.0) as dataset:
            assert len(dataset) == len(stored)

    def test_a_map_returns_what_it_receives(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path / "data", [stored for stored, _ in self.samples()])
        same = Map(lambda value: value, fields=("value",), returns={"value": self.make()})
        for number, value in self.values(self.open(folder), augment=[same]).items():
            _assert_equal(value, self.samples()[number][1], f"sample {number}")


class OperationConformance(metaclass=ABCMeta):
    """Tests of one operation on pixels: `make` returns it."""

    @abstractmethod
    def make(self) -> ImageOperation:
        """Return the operation."""

    @pytest.fixture
    def files(self) -> list[bytes]:
        """Images of 40 x 48 pixels, black with a white square, as PNG."""
        pytest.importorskip("nvidia.dali")
        from PIL import Image

        found = []
        for number in range(8):
            pixels, file = np.zeros((40, 48, 3), np.uint8), io.BytesIO()
            pixels[12 + number : 26, 16 : 34 - number] = 255
            Image.fromarray(pixels).save(file, "PNG")
            found.append(file.getvalue())
        return found

    def run(self, files: list[bytes], rows: list[int]) -> tuple[Any, ImageMoves]:
        """Return the images of these rows as one batch, and the moves of their masks."""
        size = ImageRange(min_height=40, max_height=40, min_width=48, max_width=48)
        recipe = check_recipe([Resize((40, 48)), self.make()], images=size)
        ids, dims = np.array(rows) * 5, np.full((len(rows), 2), (40, 48), np.int32)
        draws, moves = draw_with_moves(recipe, ids=ids, dims=dims, seed=1, epoch=2)
        encoded = [np.frombuffer(files[row], np.uint8) for row in rows]
        graph = Graph(GraphPlan(recipe, batch_size=len(rows), threads=1))
        try:
            graph.feed(EncodedBatch(ids=ids, encoded=encoded, dims=dims), draws)
            return graph.outputs().numpy(), moves
        finally:
            graph.close()

    def test_it_is_a_frozen_value(self) -> None:
        op = self.make()
        assert op == self.make()
        assert hash(op) == hash(self.make())
        assert pickle.loads(pickle.dumps(op)) == op

    def test_pixels_depend_on_the_sample_alone(self, files: list[bytes]) -> None:
        whole, _ = self.run(files, [*range(8)])
        for rows in ([3], [7, 0, 5], [2, 2]):
            np.testing.assert_array_equal(self.run(files, rows)[0], whole[rows])

    def test_masks_follow_the_pixels(self, files: list[bytes]) -> None:
        op = self.make()
        if op.moves_pixels and not op.can_be_followed:
            return
        images, moves = self.run(files, [*range(8)])
        masks = []
        for number in range(8):
            mask = np.zeros((40, 48), np.uint8)
            mask[12 + number : 26, 16 : 34 - number] = 1
            masks.append(mask)
        moved = moves.move_masks(masks)
        if op.moves_pixels:  # edges may be a pixel off: a mask takes the nearest pixel
            assert ((moved == 1) == (images[:, 0] > 127)).mean() > 0.96
        else:
            np.testing.assert_array_equal(moved, masks)

    def test_a_loader_resumes_exactly(self, files: list[bytes], tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        for number, file in enumerate(files):
            (tmp_path / "data" / f"{number}.png").write_bytes(file)
        for augment in ([self.make()], {"image": [self.make()]}):

            def loader(augment: Any = augment) -> DataLoader:
                dataset = Dataset(tmp_path / "data", fields=("image",))
                return DataLoader(dataset, 2, seed=3, shuffle=True, augment=augment)

            with loader() as first, loader() as second:
                batches = iter(first)
                next(batches)
                second.load_state_dict(first.state_dict())
                for ours, again in zip(batches, second, strict=True):
                    np.testing.assert_array_equal(ours[0].numpy(), again[0].numpy())
