"""Data with a wrong field raise one clear error, or their samples are counted by name.

From the files to the loader's batches; what each part refuses has tests of its own.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.augment import Map
from penstock.cache import ConfigError, DatasetError, MapError, PenstockError
from penstock.pipeline import DataLoader
from penstock.pipeline.cli import main
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, Boxes, ClassLabel, Value
from tests import images, tars
from tests.files import npy, quarantine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


N = 6
HEIGHT, WIDTH = 24, 32


def png(number: int, height: int = HEIGHT, width: int = WIDTH, mode: str = "RGB") -> bytes:
    return images.encoded(images.picture(number, height, width, mode), "PNG")


def pictures(place: Path, *, table: str = "", rows: list[Mapping[str, Any]] | None = None) -> Path:
    """A folder of images with a table."""
    place.mkdir()
    for number in range(N):
        (place / f"{number}.png").write_bytes(png(number))
    if table:
        (place / "metadata.csv").write_text(table)
    if rows:
        (place / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return place


def archives(place: Path, *parts: Mapping[str, bytes]) -> Path:
    place.mkdir()
    for number, files in enumerate(parts):
        (place / f"{number}.tar").write_bytes(tars.archive(dict(files)))
    return place


def batches(dataset: Dataset, **options: Any) -> list[dict[str, Any]]:
    with DataLoader(dataset, batch_size=3, shuffle=False, as_dict=True, **options) as loader:
        found = list(loader)
        assert loader.statistics().bad == 0  # what the index left out is no bad sample of a job
    dataset.close()
    return found


# --- shards that differ -------------------------------------------------------------------------


@pytest.mark.parametrize("second", [np.zeros(3, "f8"), np.zeros((3, 2), "f4")], ids=["f8", "2d"])
def test_arrays_that_differ_between_shards_name_both(tmp_path: Path, second: Any) -> None:
    place = archives(
        tmp_path / "set",
        {f"{i}.npy": npy(np.zeros(3, "f4")) for i in range(N)},
        {f"{N + i}.npy": npy(second) for i in range(N)},
    )
    with pytest.raises(DatasetError, match=r"0\.tar/0\.npy.*1\.tar/6\.npy.*schema=") as report:
        Dataset(place, allow_left_out=1).open()
    assert "float32 of shape (3,)" in str(report.value)
    kept = Dataset(place, allow_left_out=1, schema={"array": Array("float32", (3,))})
    assert [len(batch["array"]) for batch in batches(kept)] == [3, 3]


def test_keys_that_differ_between_shards_are_left_out_and_named_once(tmp_path: Path) -> None:
    place = archives(
        tmp_path / "set",
        {f"{i}.json": json.dumps({"a": i, "b": i}).encode() for i in range(N)},
        {f"{N + i}.json": json.dumps({"a": "x", "b": i}).encode() for i in range(N)},
    )
    dataset = Dataset(place, allow_left_out=1)
    with pytest.warns(match='keys of json are left out: "a"') as report:
        assert list(dataset.schema) == ["b"]
    (words,) = {str(each.message) for each in report}
    assert words.count(str(place)) == 1
    assert ".." not in words
    dataset.close()


def test_fields_that_one_shard_lacks_are_never_chosen(tmp_path: Path) -> None:
    place = archives(
        tmp_path / "set",
        {f"{i}.npy": npy(np.zeros(3, "f4")) for i in range(N)},
        {f"{N + i}.txt": b"text" for i in range(N)},
    )
    with pytest.raises(ConfigError, match="no field that all samples have"):
        batches(Dataset(place, allow_left_out=1))
    with pytest.raises(ConfigError, match=r'6 samples of .* have no \'array\'.*"array\.present"'):
        batches(Dataset(place, allow_left_out=1, fields=("array",)))
    found = batches(Dataset(place, allow_left_out=1, fields=("array", "array.present", "id")))
    assert [batch["array.present"].tolist() for batch in found] == [[True] * 3] * 2 + [
        [False] * 3
    ] * 2


# --- values that don't fit ----------------------------------------------------------------------


def rows(name: str, values: list[Any]) -> list[Mapping[str, Any]]:
    return [{"file_name": f"{i}.png", name: value} for i, value in enumerate(values)]


WRONG: list[tuple[str, Any, Any, str]] = [
    ("vector", Array("float32", (2,)), [1.0, 2.0, 3.0], "3"),
    ("label", ClassLabel(("cat", "dog")), "cow", "cow"),
    ("boxes", Boxes(of="image"), [[9, 9, 2, 2]], "inverted|x1|below"),
    ("boxes", Boxes(of="image"), [[100, 100, 120, 120]], "outside"),
    ("boxes", Boxes(of="image"), [[1, 1, float("nan"), 3]], "finite|NaN|nan"),
    ("number", Value("int64"), 1.5, "1.5"),
]
RIGHT: dict[str, Any] = {"vector": [1.0, 2.0], "label": "dog", "boxes": [[1, 1, 5, 5]], "number": 1}


@pytest.mark.parametrize(("field", "kind", "wrong", "message"), WRONG)
def test_a_row_that_does_not_fit_is_left_out_by_name(
    tmp_path: Path, field: str, kind: Any, wrong: Any, message: str
) -> None:
    values = [RIGHT[field] if i != 2 else wrong for i in range(N)]
    place = pictures(tmp_path / "set", rows=rows(field, values))
    with Dataset(place, allow_left_out=1, schema={field: kind}) as dataset:
        assert len(dataset) == N - 1
        (reason,) = quarantine(dataset.index.place).values()
        assert list(quarantine(dataset.index.place)) == ["2.png"]
        assert reason.startswith(f"{field}: ")
        assert re.search(message, reason), reason
    assert (
        sum(
            len(b["image"]) for b in batches(Dataset(place, allow_left_out=1, schema={field: kind}))
        )
        == N - 1
    )


def test_a_row_whose_file_is_missing_is_counted(tmp_path: Path) -> None:
    table = "file_name,y\n" + "".join(f"{i}.png,{i}\n" for i in range(N + 1))
    dataset = Dataset(pictures(tmp_path / "set", table=table), allow_left_out=1)
    with pytest.warns(match=r"1 of 7 rows of metadata\.csv are left out.*line 8"):
        assert len(dataset) == N
    assert list(quarantine(dataset.index.place)) == ["6.png"]
    assert [batch["y"].tolist() for batch in batches(dataset)] == [[0, 1, 2], [3, 4, 5]]


def test_a_mask_of_another_size_and_a_caption_that_is_no_text_are_counted(tmp_path: Path) -> None:
    for name in ("images", "masks", "captions"):
        (tmp_path / "set" / name).mkdir(parents=True)
    for i in range(N):
        (tmp_path / "set/images" / f"{i}.png").write_bytes(png(i))
        height = HEIGHT - (i == 1)
        (tmp_path / "set/masks" / f"{i}.png").write_bytes(png(i, height, mode="L"))
        (tmp_path / "set/captions" / f"{i}.txt").write_bytes(b"caf\xe9" if i == 4 else b"a cafe")
    places = {"image": "images", "mask": "masks", "caption": "captions"}
    with Dataset(tmp_path / "set", fields=places, allow_left_out=1) as dataset:
        reasons = quarantine(dataset.index.place)
    assert [name.rpartition("/")[2] for name in reasons] == ["1.png", "4.png"]
    mask, caption = reasons.values()
    assert mask.startswith("mask: ")
    assert "23" in mask
    assert caption == "caption: not UTF-8 text (0xE9 at byte 3): convert it"
    found = batches(Dataset(tmp_path / "set", fields=places, allow_left_out=1))
    assert [batch["caption"] for batch in found] == [["a cafe"] * 3, ["a cafe"]]


def test_a_key_twice_in_an_archive_is_no_sample(tmp_path: Path) -> None:
    place = archives(tmp_path / "set", {f"{i}.npy": npy(np.full(2, i, "f4")) for i in range(3)})
    with tarfile.open(place / "0.tar", "a") as archive:
        data = npy(np.full(2, 9, "f4"))
        member = tarfile.TarInfo("1.npy")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    with Dataset(place, allow_left_out=1) as dataset:
        (reason,) = quarantine(dataset.index.place).values()
        assert reason.startswith("two members of one key (npy, npy)")
    assert batches(Dataset(place, allow_left_out=1))[0]["array"][:, 0].tolist() == [0, 2]


# --- what users ask for -------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    table = "file_name,y,x\n" + "".join(f"{i}.png,{i},{i}.5\n" for i in range(N))
    return pictures(tmp_path / "plain", table=table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fields": ("image", "caption")},
            r"got 'caption', but .* has \['image', 'y', 'x', 'id'\]",
        ),
        ({"fields": ("image", "z.present")}, "got 'z.present'"),
        ({"fields": ("image", "image_size")}, "on request .*Did you mean 'image.size'"),
        ({"schema": {"x": "int64"}}, r'got \'int64\', wanted Value\("int64"\)'),
        ({"schema": {"x": Value}}, r"wanted an instance of it: Value\(\)"),
        ({"schema": {"z": Value("int64")}}, r'got "z", but .* has \[\'image\', \'y\', \'x\'\]'),
        ({"schema": {"x": 3}}, "wanted a field type"),
        ({"manifest": "nowhere.csv"}, "nowhere.csv"),
    ],
)
def test_unknown_fields_are_one_error(plain: Path, options: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        batches(Dataset(plain, **options))


def one_more(x: Any) -> Any:
    x += 1
    return x


MAPS: list[tuple[Callable[[Any], Any], Any, str]] = [
    (lambda y: np.float64(y), Value("int64"), "one float64 for .*wanted one int64"),
    (lambda _: np.zeros(4, "f4"), Array("float32", (3,)), r"shape \(4,\) for .*wanted .*\(3,\)"),
    (lambda _: "text", Value("int64"), "wanted one int64"),
    (lambda _: None, Value("int64"), "None"),
    (lambda _: (1, 2), Value("int64"), "wanted"),
]


@pytest.mark.parametrize(("function", "kind", "message"), MAPS)
def test_a_map_that_returns_something_else_names_the_sample(
    plain: Path, function: Any, kind: Any, message: str
) -> None:
    recipe = [Map(function, fields="y", returns={"made": kind})]
    with pytest.raises(MapError, match=rf"At sample 0 \(0\.png\): .*{message}"):
        batches(Dataset(plain, fields=("y",)), augment=recipe)


def floats(y: Any) -> Any:
    return np.float64(y)


def test_a_map_in_a_process_states_the_same(plain: Path) -> None:
    recipe = [Map(floats, fields="y", returns={"made": Value("int64")}, processes=1)]
    with pytest.raises(MapError, match=r"At sample 0 \(0\.png\): .*wanted one int64"):
        batches(Dataset(plain, fields=("y",)), augment=recipe)


def test_a_map_that_changes_its_input_is_advised_to_copy_it(tmp_path: Path) -> None:
    place = archives(tmp_path / "set", {f"{i}.npy": npy(np.full(2, i, "f4")) for i in range(3)})
    before = (place / "0.tar").read_bytes()
    recipe = [Map(one_more, fields="array", returns={"more": Array("float32", (2,))})]
    with pytest.raises(MapError, match=r"in place.*x\.copy\(\)"):
        batches(Dataset(place), augment=recipe)
    assert (place / "0.tar").read_bytes() == before


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "bench", "index"])
def test_commands_say_it_in_one_line(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = archives(
        tmp_path / "set", {"0.npy": npy(np.zeros(3, "f4"))}, {"1.npy": npy(np.zeros(3, "f8"))}
    )
    assert main([command, str(place)]) == 1
    report = capsys.readouterr().err
    assert 'The field "array" is float32' in report
    assert "Traceback" not in report
