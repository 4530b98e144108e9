"""Test mixtures whose parts have different fields: common ones, masks of what a part lacks."""

from __future__ import annotations

import json
import pickle
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import (
    ClassLabel,
    DataLoader,
    Dataset,
    DiskCache,
    Map,
    RandomCrop,
    Resize,
    Value,
    World,
    concat,
    imagenet_train,
    mix,
)
from penstock.errors import ConfigError
from tests.files import uploaded
from tests.images import class_folder, jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 24
ROWS = 40  # of tables


def lists(values: list[list[float]], type: Any = None) -> pa.Array:
    return pa.array(values, pa.list_(type or pa.int32()))


def write_captions(folder: Path) -> Path:
    """Images whose captions are in a table of JSON lines."""
    lines = []
    for number in range(SAMPLES):
        name = f"{number:03d}.jpg"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(jpeg(number, 40, 48))
        lines.append(json.dumps({"file_name": name, "caption": f"caption {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dataset]]:
    root = tmp_path_factory.mktemp("schemas")
    numbers = range(ROWS)
    pq.write_table(
        pa.table(
            {
                "text": [f"web {number}" for number in numbers],
                "score": pa.array([number / 2 for number in numbers], pa.float32()),
                "tokens": lists([[*range(number % 5)] for number in numbers]),
                "point": pa.array(
                    [[number, -number] for number in numbers], pa.list_(pa.float32(), 2)
                ),
            }
        ),
        root / "web.parquet",
        row_group_size=8,
    )
    pq.write_table(
        pa.table(
            {
                "text": [f"code {number}" for number in numbers],
                "language": pa.array([number % 3 for number in numbers], pa.int64()),
            }
        ),
        root / "code.parquet",
        row_group_size=8,
    )
    pq.write_table(
        pa.table({"text": pa.array([None if n % 2 else f"some {n}" for n in numbers])}),
        root / "gaps.parquet",
    )
    np.savez(root / "arrays.npz", grid=np.arange(ROWS * 36, dtype=np.int16).reshape(ROWS, 6, 6))
    labels = class_folder(root / "labels", SAMPLES)
    found = {
        "web": Dataset(str(root / "web.parquet")),
        "code": Dataset(str(root / "code.parquet")),
        "gaps": Dataset(str(root / "gaps.parquet"), fields=("text", "text.present")),
        "arrays": Dataset(str(root / "arrays.npz")),
        "labels": Dataset(str(labels)),
        "captions": Dataset(str(write_captions(root / "captions")), fields=("image", "caption")),
    }
    yield found
    for each in found.values():
        each.close()


def some(data: dict[str, Dataset], *names: str) -> dict[str, Dataset]:
    return {name: data[name] for name in names}


def batches(source: Any, **arguments: Any) -> Iterator[dict[str, Any]]:
    given = {"shuffle": True, "seed": 3, "batch_size": 8, "as_dict": True, **arguments}
    with DataLoader(source, **given) as loader:
        yield from loader


class TestTables:
    @pytest.fixture
    def source(self, data):
        return mix(some(data, "web", "code"), epoch="once", missing="mask")

    def test_fields_are_those_of_all_parts(self, source):
        assert source.fields == (
            *("text", "score", "score.present", "tokens", "tokens.present"),
            *("point", "point.present", "language", "language.present"),
        )
        assert [*source.schema] == ["text", "score", "tokens", "point", "language", "part"]

    def test_what_a_part_lacks_is_masked(self, source):
        seen = set()
        for batch in batches(source):
            assert isinstance(batch["score"], torch.Tensor)
            for row, text in enumerate(batch["text"]):
                part, number = text.split()
                number, is_web = int(number), part == "web"
                seen.add(text)
                for name in ("score", "tokens", "point"):
                    assert batch[f"{name}.present"][row] == is_web
                assert batch["language.present"][row] == (not is_web)
                assert batch["score"][row] == (number / 2 if is_web else 0)
                assert batch["tokens"][row].tolist() == [*range(number % 5 if is_web else 0)]
                assert batch["point"][row].tolist() == ([number, -number] if is_web else [0, 0])
                assert batch["language"][row] == (0 if is_web else number % 3)
        assert len(seen) == 2 * ROWS

    def test_every_world_delivers_the_same(self, source):
        def texts(**arguments: Any) -> list[list[str]]:
            found = batches(source, pad="mask", **arguments)
            return [[*compress(batch["text"], batch["valid"])] for batch in found]

        from_ranks = [texts(batch_size=3, world=World(rank, 3)) for rank in range(3)]
        together = [[*chain.from_iterable(each)] for each in zip(*from_ranks, strict=True)]
        assert together == texts(batch_size=9)

    def test_a_field_of_some_samples(self, data):
        source = mix(some(data, "gaps", "code"), epoch="once", missing="mask")
        assert source.fields == ("text", "text.present", "language", "language.present")
        assert source.contents.lacking == {"text": ROWS // 2, "language": ROWS}
        for batch in batches(source):
            for text, has in zip(batch["text"], batch["text.present"], strict=True):
                assert has == bool(text)
        with pytest.raises(ConfigError, match=r"20 samples of the mixture .* have no 'text'"):
            mix(some(data, "gaps", "code"), fields=("text",))

    def test_chosen_fields(self, data):
        source = mix(some(data, "web", "code"), fields=("id", "text", "part"), epoch="once")
        for batch in batches(source):
            texts = [("web", "code")[part] for part in batch["part"].tolist()]
            assert [text.split()[0] for text in batch["text"]] == texts
            assert (batch["id"] // ROWS).tolist() == batch["part"].tolist()

    def test_a_part_may_lack_all_chosen_fields(self, data):
        fields = ("language", "language.present", "part")
        source = mix(some(data, "web", "code"), fields=fields, epoch="once", missing="mask")
        for batch in batches(source):
            assert batch["language.present"].tolist() == batch["part"].bool().tolist()

    def test_columns_and_lengths(self, source):
        assert source.column("language.present").tolist() == [False] * ROWS + [True] * ROWS
        rows = source.contents.rows(np.array([4, 3, 2 * ROWS - 1]))
        assert source.lengths("tokens", rows).tolist() == [4, 3, 0]
        with pytest.raises(ConfigError, match=r"40 samples of .* lack it"):
            source.column("language")

    def test_a_copy_in_another_process(self, source):
        again = pickle.loads(pickle.dumps(source))
        assert (again.fields, again.schema) == (source.fields, source.schema)
        assert again.contents.fingerprint == source.contents.fingerprint
        wanted, found = (next(iter(batches(each)))["text"] for each in (source, again))
        assert wanted == found
        again.close()

    def test_a_renamed_mixture(self, source):
        renamed = source.rename({"language": "lang", "score": "quality"})
        assert renamed.fields[1:3] == ("quality", "quality.present")
        wanted, found = (next(iter(batches(each))) for each in (source, renamed))
        assert torch.equal(wanted["language"], found["lang"])
        assert wanted["text"] == found["text"]
        with pytest.raises(ConfigError, match="rename: got 'nothing', but the parts"):
            source.rename({"nothing": "x"})

    def test_a_map_gets_masks(self, source):
        def describe(has: bool, language: int) -> int:
            return int(language) if has else -1

        fields = ("language.present", "language")
        made = Map(describe, fields=fields, returns={"made": Value("int64")})
        for batch in batches(source, augment=[made]):
            wanted = torch.where(batch["language.present"], batch["language"], -1)
            assert torch.equal(batch["made"], wanted)


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("is_remote", [False, True])
def test_one_table_twice(data, tmp_path, is_same, is_remote):
    """Two parts share files, chunks and cache, with ids of their own."""
    with uploaded(Path(data["web"].url).parent) as folder:
        url = f"{folder}/web.parquet" if is_remote else data["web"].url
        cache = DiskCache(tmp_path / "cache", max_bytes="16MiB") if is_remote else None
        one = Dataset(url, cache=cache, decoded_bytes=2000)
        with one, one if is_same else Dataset(url, cache=cache, decoded_bytes=2000) as other:
            fields = ("text", "tokens", "id", "part")
            seen = dict[int, str]()
            source = mix({"a": one, "b": other}, epoch="once", fields=fields)
            for batch in batches(source):
                for text, tokens, number, part in zip(
                    batch["text"], batch["tokens"], batch["id"].tolist(), batch["part"], strict=True
                ):
                    assert len(tokens) == int(text.split()[1]) % 5
                    assert part == number // ROWS
                    seen[number] = text
    assert [seen[number] for number in range(2 * ROWS)] == 2 * [f"web {n}" for n in range(ROWS)]


def test_crops_of_arrays(data):
    source = mix(
        some(data, "web", "arrays"),
        epoch="once",
        missing="mask",
        fields=("grid", "grid.present", "part"),
    )
    for batch in batches(source, augment=[RandomCrop((3, 3))]):
        assert batch["grid"].shape[1:] == (3, 3)
        assert batch["grid.present"].tolist() == batch["part"].bool().tolist()
        assert (batch["grid"].flatten(1) != 0).any(dim=1).tolist() == batch["part"].bool().tolist()


class TestImages:
    def test_masked_captions_and_labels(self, data):
        source = mix(some(data, "captions", "labels"), epoch="once", missing="mask")
        names = ("image", "caption", "caption.present", "label", "label.present")
        assert source.fields == names
        seen = 0
        for batch in batches(source, augment=[Resize((16, 16))]):
            assert batch["image"].shape[1:] == (3, 16, 16)
            assert batch["image"].flatten(1).any(dim=1).all()
            has = batch["caption.present"]
            assert torch.equal(has, ~batch["label.present"])
            assert [bool(text) for text in batch["caption"]] == has.tolist()
            seen += len(has)
        assert seen == 2 * SAMPLES

    @pytest.mark.parametrize("resident", [False, True])
    def test_texts_without_images(self, data, resident):
        fields = ("image", "image.present", "text", "text.present", "part", "id")
        source = mix(
            some(data, "labels", "code"), fields=fields, epoch=SAMPLES + ROWS, missing="mask"
        )
        found: list[dict[int, torch.Tensor]] = []
        for world in (1, 2):
            images = dict[int, torch.Tensor]()
            for rank in range(world):
                for batch in batches(
                    source,
                    batch_size=8 // world,
                    world=World(rank, world),
                    drop_last=True,
                    augment=imagenet_train(16),
                    resident=resident,
                ):
                    has = batch["image.present"]
                    assert torch.equal(has, batch["part"] == 0)
                    assert torch.equal(has, batch["image"].flatten(1).any(dim=1))
                    images |= dict(zip(batch["id"].tolist(), batch["image"], strict=True))
            assert len(images) == SAMPLES + ROWS
            found.append(images)
        alone, together = found
        assert all(torch.equal(image, together[number]) for number, image in alone.items())

    def test_the_classes_are_those_of_labels(self, data):
        parts = {"a": data["labels"], "b": data["labels"]}
        assert mix(parts, fields=("part", "image", "label")).classes == data["labels"].classes
        assert mix(parts).num_classes == 3
        numbers = mix(some(data, "code"), fields=("text", "part"))
        assert (numbers.classes, numbers.num_classes) == ((), None)

    def test_common_fields_of_images(self, data):
        source = mix(some(data, "captions", "labels"), fields=("image",), epoch="once")
        images = [batch["image"] for batch in batches(source, augment=[Resize((16, 16))])]
        assert sum(map(len, images)) == 2 * SAMPLES


class TestErrors:
    def test_a_part_that_lacks_a_field(self, data):
        with pytest.raises(
            ConfigError,
            match=r'mix: the part "code" has no field "score", and "web" has it. Fields of "code": '
            r"\['text', 'language'\]. Leave it out by fields= of mix, such as fields=\('text',\); "
            r'or pass missing="mask": batches then have "score.present"',
        ):
            mix(some(data, "web", "code"))
        with pytest.raises(
            ConfigError, match=r'mix: the parts "arrays", "labels" have no field "text"'
        ):
            mix(some(data, "web", "arrays", "labels"), fields=("text",))

    def test_an_unknown_field(self, data):
        with pytest.raises(ConfigError, match=r"fields: got 'mood', but the mixture of the parts"):
            mix(some(data, "web", "code"), fields=("text", "mood"))
        with pytest.raises(ConfigError, match=r"40 samples of .*'language'"):
            mix(some(data, "web", "code"), fields=("text", "language"), missing="mask")
        with pytest.raises(ConfigError, match="missing: got 'zero', wanted"):
            mix(some(data, "web", "code"), missing="zero")

    def test_types_that_differ(self, data, tmp_path):
        pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "numbers.parquet")
        parts = {**some(data, "web"), "numbers": Dataset(str(tmp_path / "numbers.parquet"))}
        for missing in ("error", "mask"):
            with pytest.raises(
                ConfigError, match=r'field "text" of the parts "web" and "numbers" differs: Text'
            ):
                mix(parts, fields=("text",), missing=missing)
        source = mix(parts, fields=("score", "score.present"), missing="mask")
        assert "text" not in source.schema

    def test_class_names_that_differ(self, data):
        source = data["code"].url
        parts = {
            name: Dataset(source, schema={"language": ClassLabel(("c", "go", name))})
            for name in ("rust", "zig")
        }
        with pytest.raises(
            ConfigError, match=r"only one has the classes \['rust', 'zig'\].*schema"
        ):
            mix(parts)

    def test_a_field_named_part(self, data, tmp_path):
        pq.write_table(pa.table({"text": ["a"], "part": [1]}), tmp_path / "own.parquet")
        own = Dataset(str(tmp_path / "own.parquet"))
        with pytest.raises(ConfigError, match=r'the part "own" has a field of that name. Leave it'):
            mix({**some(data, "web"), "own": own}, missing="mask")
        with pytest.raises(ConfigError, match=r"has a field of that name. Give it another name"):
            mix({**some(data, "web"), "own": own}, fields=("text", "part"))
        renamed = own.rename({"part": "chapter"})
        assert "chapter" in mix({**some(data, "web"), "own": renamed}, missing="mask").fields

    def test_views_of_a_mixture(self, data):
        source = mix(some(data, "web", "code"), fields=("text",))
        for call in (lambda: source.subset([1]), lambda: source.split(0.5, 0.5, seed=0)):
            with pytest.raises(ConfigError, match="got a mixture, whose epochs"):
                call()
        with pytest.raises(ConfigError, match=r"concat: got a mixture.*Give it to mix\(\)"):
            concat([source, source])
