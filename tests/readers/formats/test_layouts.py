"""A folder's files are grouped into samples by their names. Only tables are read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import (
    Array,
    Bytes,
    ClassLabel,
    EncodedColumn,
    Image,
    Mask,
    Text,
    Value,
)
from penstock.readers.files import stem
from penstock.readers.formats import MISSING, virtual_shards
from penstock.readers.formats.folder import (
    LARGEST_JSON_BYTES,
    class_folder_samples,
    listed_samples,
    manifest_table,
    metadata_table,
    paired_samples,
    with_masks,
)
from penstock.readers.origin import Entry, count_left_out
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats import Candidates


def entries(*names: str, size_bytes: int = 10) -> list[Entry]:
    return [
        Entry(name=name.encode(), size_bytes=size_bytes, mtime_ns=0, version="") for name in names
    ]


def made(samples: Candidates, schema: Mapping[str, FieldType] | None = None) -> Candidates:
    return with_masks(samples, schema or {}).without_rejected().grouped(schema or {}, url="data")


def lying(*names: str, data: Mapping[str, bytes] | None = None, **schema: FieldType) -> Candidates:
    def read(files: Sequence[Entry]) -> list[bytes]:
        return [(data or {})[file.name.decode()] for file in files]

    return made(class_folder_samples(entries(*names), read, schema), schema)


def pairs(places: Mapping[str, str], *names: str, **schema: FieldType) -> Candidates:
    return made(paired_samples("data", entries(*names), list(places.items()), schema), schema)


def rows(
    table: str, *names: str, name: str = "list.csv", places: Any = (), **schema: FieldType
) -> Candidates:
    listed = manifest_table(table.encode(), name=name, places=places, schema=schema)
    found = {file.name: file for file in entries(*names)}
    return made(listed_samples("data", found, listed, schema), schema)


def in_metadata(files: Mapping[str, str], *names: str, **schema: FieldType) -> Candidates:
    pairs = [(name.encode(), text.encode()) for name, text in files.items()]
    listed = metadata_table(pairs, schema)
    found = {file.name: file for file in entries(*names)}
    return made(listed_samples("data", found, listed, schema), schema)


def files_of(found: Candidates, field: str) -> list[str | None]:
    return [
        None if number == MISSING else found.files[number].name.decode()
        for number in found.spans[field].files.tolist()
    ]


def values_of(found: Candidates, field: str) -> Any:
    column = found.values[field]
    if isinstance(column, EncodedColumn):
        return [bytes(each).decode() for each in column.samples]
    return column.values.tolist()  # type: ignore[union-attr]


def reasons(found: Candidates) -> dict[str, str]:
    return {q.name.decode(): q.reason for q in found.quarantined}


# Class folders and other files.


def test_class_folders_are_labels_in_torchvisions_order() -> None:
    found = lying("b/2.jpg", "b/1.jpg", "a/deep/er/3.jpg", "a/z.jpg", "a-b/4.jpg", "B/5.jpg")
    assert dict(found.schema) == {"image": Image(), "label": ClassLabel(("B", "a", "a-b", "b"))}
    expected = ["B/5.jpg", "a/z.jpg", "a/deep/er/3.jpg", "a-b/4.jpg", "b/1.jpg", "b/2.jpg"]
    assert files_of(found, "image") == expected
    assert [name.decode() for name in found.names] == expected
    assert values_of(found, "label") == [0, 1, 1, 2, 3, 3]
    assert found.sizes.tolist() == [18] * 6


def test_a_schema_numbers_class_folders() -> None:
    label = ClassLabel(("dog", "cat", "owl"))
    found = lying("cat/1.jpg", "dog/2.jpg", label=label)
    assert found.schema["label"] == label
    assert values_of(found, "label") == [1, 0]
    with pytest.raises(DatasetError, match="class folder 'cat' is not among"):
        lying("cat/1.jpg", "dog/2.jpg", label=ClassLabel(("dog",)))
    with pytest.raises(ConfigError, match="labels are class folders"):
        lying("cat/1.jpg", label=Text())


def test_texts_next_to_images_are_captions() -> None:
    found = lying("2.jpg", "1.jpg", "1.txt", "README.txt")
    assert list(found.schema.items()) == [("image", Image()), ("caption", Text())]
    assert files_of(found, "image") == ["1.jpg", "2.jpg"]
    assert files_of(found, "caption") == ["1.txt", None]
    assert found.spans["caption"].sizes.tolist() == [10, 0]
    assert reasons(found) == {"README.txt": "its name is of another kind than image"}


def test_arrays_and_json_next_to_images() -> None:
    found = lying(
        "a/1.jpg",
        "a/1.npy",
        "a/1.json",
        "a/2.jpg",
        data={"a/1.json": b'{"width": 3, "box": {"x": 0.5}, "caption": "hi"}'},
    )
    assert list(found.schema) == ["image", "label", "array", "width", "box.x", "caption"]
    assert files_of(found, "array") == ["a/1.npy", None]
    assert values_of(found, "width") == [3, 0]
    assert found.present["width"].tolist() == [True, False]


def test_a_caption_file_wins_over_a_key_of_its_name() -> None:
    found = lying("1.jpg", "1.txt", "1.json", data={"1.json": b'{"caption": "x", "n": 1}'})
    assert "caption" in found.spans
    assert "caption" not in found.values
    assert values_of(found, "n") == [1]


def test_json_that_is_none_is_named() -> None:
    found = lying("1.jpg", "1.json", "2.jpg", "2.json", data={"1.json": b"[", "2.json": b"{}"})
    assert files_of(found, "image") == ["2.jpg"]
    assert "isn't JSON" in reasons(found)["1.jpg"]


def test_a_key_of_two_kinds_is_left_out_but_for_labels() -> None:
    data = {"1.json": b'{"n": 1, "m": 2}', "2.json": b'{"n": "x", "m": 3}'}
    found = lying("1.jpg", "2.jpg", *data, data=data)
    assert list(found.schema) == ["image", "m"]
    data = {"1.json": b'{"label": 1}', "2.json": b'{"label": "x"}'}
    with pytest.raises(DatasetError, match=r"integers .* and text"):
        lying("1.jpg", "2.jpg", *data, data=data)


def test_json_that_is_no_row_is_named() -> None:
    data = {"1.json": b'{"a.b": 1, "a": {"b": 2}}', "2.json": b'{"n": 3}'}
    found = lying("1.jpg", "2.jpg", *data, data=data)
    assert files_of(found, "image") == ["2.jpg"]
    assert "occurs twice" in reasons(found)["1.jpg"]


def test_large_json_is_not_read() -> None:
    files = [*entries("1.jpg", "2.jpg"), *entries("1.json", size_bytes=LARGEST_JSON_BYTES + 1)]
    found = made(class_folder_samples(files, lambda files: [b""] * len(files), {}))
    assert "more than" in reasons(found)["1.jpg"]


def test_folders_of_arrays_and_of_texts() -> None:
    found = lying("a/1.npy", "b/2.npy")
    assert list(found.schema.items()) == [("array", Array()), ("label", ClassLabel(("a", "b")))]
    found = lying("neg/1.txt", "pos/2.txt")
    assert list(found.schema.items()) == [("text", Text()), ("label", ClassLabel(("neg", "pos")))]
    assert list(lying("README.txt").schema) == ["image"]


def test_two_images_of_one_name_share_their_caption() -> None:
    found = lying("1.jpg", "1.png", "1.txt")
    assert files_of(found, "caption") == ["1.txt", "1.txt"]


def test_schemas_name_what_is_there() -> None:
    with pytest.raises(ConfigError, match=r"got \"depth\", but data has \['image', 'caption'\]"):
        lying("1.jpg", "1.txt", depth=Image())
    with pytest.raises(ConfigError, match="lies in files of its own"):
        lying("1.jpg", "1.txt", caption=Value("int64"))
    assert lying("1.jpg", "1.txt", caption=Bytes()).schema["caption"] == Bytes()


# Folders by field.


def test_folders_are_paired_by_name() -> None:
    found = pairs(
        {"image": "images", "mask": "masks"},
        *("images/a/1.jpg", "images/2.jpg", "images/3.jpg", "masks/2.png", "masks/a/1.png"),
        *("masks/4.png", "README.md"),
    )
    assert list(found.schema.items()) == [("image", Image()), ("mask", Mask(of="image"))]
    assert files_of(found, "image") == ["images/2.jpg", "images/a/1.jpg"]
    assert files_of(found, "mask") == ["masks/2.png", "masks/a/1.png"]
    assert reasons(found) == {
        "images/3.jpg": "mask: no file of its name in 'masks'",
        "masks/4.png": "image: no file of its name in 'images'",
    }
    assert found.passed_over == {"md": 1}


def test_several_images_arrays_and_captions_by_folder() -> None:
    places = {"left": "left/", "right": "./right", "flow": "flow", "caption": "texts"}
    found = pairs(places, "left/1.png", "right/1.png", "flow/1.npy", "texts/1.txt")
    assert list(found.schema.items()) == [
        ("left", Image()),
        ("right", Image()),
        ("flow", Array()),
        ("caption", Text()),
    ]


def test_a_star_is_the_name_that_pairs() -> None:
    names = [
        "leftImg8bit/ulm/ulm_01_leftImg8bit.png",
        "gtFine/ulm/ulm_01_gtFine_labelIds.png",
        "gtFine/ulm/ulm_01_gtFine_color.png",
    ]
    places = {"image": "leftImg8bit/*_leftImg8bit.png", "mask": "gtFine/*_gtFine_labelIds.png"}
    found = pairs(places, *names)
    assert files_of(found, "mask") == [names[1]]
    found = pairs({"image": "*.png", "mask": "*_mask.png"}, "1.png", "1_mask.png")
    assert files_of(found, "image") == ["1.png"]
    assert files_of(found, "mask") == ["1_mask.png"]


def test_masks_are_recognised_by_name_and_by_lossless_files() -> None:
    assert pairs({"image": "a", "mask": "b"}, "a/1.jpg", "b/1.jpg").schema["mask"] == Image()
    assert pairs({"image": "a", "gt": "b"}, "a/1.jpg", "b/1.png").schema["gt"] == Image()
    schema = pairs({"image": "a", "lung_mask": "b"}, "a/1.jpg", "b/1.png").schema
    assert schema["lung_mask"] == Mask(of="image")
    found = pairs({"image": "a", "mask": "b"}, "a/1.jpg", "b/1.png", mask=Image())
    assert found.schema["mask"] == Image()
    found = pairs({"l": "a", "r": "b", "mask": "c"}, "a/1.png", "b/1.png", "c/1.png")
    assert found.schema["mask"] == Image()


@pytest.mark.parametrize("kind", ["jpg", "webp", "gif", "npy"])
def test_one_file_of_another_kind_leaves_masks_masks(kind: str) -> None:
    """As pictures all would pass, and `Normalize` would take class numbers for colours."""
    names = [f"a/{i}.jpg" for i in range(3)] + ["b/0.png", "b/1.png", f"b/2.{kind}"]
    assert pairs({"image": "a", "mask": "b"}, *names).schema["mask"] == Mask(of="image")


def test_one_field_needs_no_pair() -> None:
    assert files_of(pairs({"x": "a"}, "a/2.jpg", "a/1.jpg"), "x") == ["a/1.jpg", "a/2.jpg"]
    with pytest.raises(DatasetError, match=r"in each of \['a'\] \(such as a/1\.jpg\)"):
        pairs({"x": "a"}, "a/1.jpg", "a/1.png")


def test_two_files_for_one_are_named() -> None:
    found = pairs(
        {"image": "a", "mask": "b"}, "a/1.jpg", "b/1.png", "b/1.bmp", "a/2.jpg", "b/2.png"
    )
    assert files_of(found, "image") == ["a/2.jpg"]
    assert set(reasons(found)) == {"a/1.jpg", "b/1.png", "b/1.bmp"}
    counted = count_left_out(found.quarantined)
    assert counted == {"mask: 2 files of its name in 'b'": (1, "a/1.jpg")}


@pytest.mark.parametrize("place", ["/images", "../images", "a/*/*.png", ""])
def test_places_stay_below_the_root(place: str) -> None:
    with pytest.raises(ConfigError, match="wanted a folder below"):
        pairs({"image": place, "mask": "masks"}, "images/1.jpg")


def test_two_fields_in_one_place_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\"x\" and \"y\" have the same place, '\./a/'"):
        pairs({"x": "a", "y": "./a/"}, "a/1.jpg")


def test_folders_that_are_not_there_and_names_that_do_not_pair() -> None:
    with pytest.raises(
        DatasetError, match=r"no file in 'mask'\. Its folders are 'images', 'masks'"
    ):
        pairs({"image": "images", "mask": "mask"}, "images/1.jpg", "masks/1.png")
    with pytest.raises(DatasetError, match=r"nothing pairs: .*images/1\.jpg.*masks/1_m\.png"):
        pairs({"image": "images", "mask": "masks"}, "images/1.jpg", "masks/1_m.png")


# Tables.


def test_a_manifest_is_samples_in_its_order() -> None:
    found = rows(
        "path,label,score\nb/2.jpg,dog,0.5\na/1.jpg,cat,1\n", "a/1.jpg", "b/2.jpg", "c.jpg"
    )
    assert dict(found.schema) == {
        "image": Image(),
        "label": ClassLabel(("cat", "dog")),
        "score": Value("float32"),
    }
    assert files_of(found, "image") == ["b/2.jpg", "a/1.jpg"]
    assert values_of(found, "label") == [1, 0]
    assert values_of(found, "score") == [0.5, 1]
    assert reasons(found) == {}


@pytest.mark.parametrize("column", ["path", "file_name", "filename", "file", "image"])
def test_names_of_the_column_of_paths(column: str) -> None:
    found = rows(f"label,{column}\n3,a.jpg\n", "a.jpg")
    assert list(found.schema) == ["image", "label"]


def test_two_rows_of_one_file_are_two_samples() -> None:
    found = rows("path,n\na.jpg,1\na.jpg,2\n./b/../a.jpg,3\n", "a.jpg")
    assert files_of(found, "image") == ["a.jpg"] * 3
    assert len(found.files) == 1
    assert values_of(found, "n") == [1, 2, 3]


def test_rows_whose_file_is_missing_are_named() -> None:
    found = rows("path,n\na.jpg,1\nb.jpg,2\n,3\n", "a.jpg")
    assert files_of(found, "image") == ["a.jpg"]
    assert reasons(found) == {
        "b.jpg": "image: the file isn't there (list.csv, line 3)",
        "list.csv, line 4": "the row names no file (list.csv, line 4)",
    }
    with pytest.raises(DatasetError, match=r"none of the 1 rows of list\.csv names an existing"):
        rows("path\nc.jpg\n", "a.jpg")
    with pytest.raises(DatasetError, match=r"a\.jpg: .*isn't there"):
        rows("path\na.jpg\n", "img/a.jpg")
    with pytest.raises(DatasetError, match="has no rows"):
        rows("path\n", "a.jpg")


@pytest.mark.parametrize("path", ["/data/a.jpg", "../a.jpg", "b/../../a.jpg", ".."])
def test_paths_that_leave_the_root_are_refused(path: str) -> None:
    with pytest.raises(DatasetError, match=r"list\.csv, line 2: .*stays below it"):
        rows(f"path\n{path}\n", "a.jpg")


def test_a_manifest_without_a_path_or_with_two() -> None:
    with pytest.raises(DatasetError, match=r"got the columns \['a', 'b'\], wanted one that names"):
        rows("a,b\n1,2\n", "a.jpg")
    with pytest.raises(DatasetError, match="each could be the path"):
        rows("path,image\na.jpg,b.jpg\n", "a.jpg", "b.jpg")
    with pytest.raises(DatasetError, match=r"wanted a table: \.csv, \.tsv or \.jsonl"):
        rows("", "a.jpg", name="list.xlsx")


def test_several_images_of_a_row() -> None:
    found = rows(
        '{"path": "1.jpg", "mask_file_name": "1.png", "depth": "1.npy"}\n{"path": "2.jpg"}\n',
        *("1.jpg", "1.png", "1.npy", "2.jpg"),
        name="list.jsonl",
        depth=Array("float32", (None, None)),
    )
    assert list(found.schema.items()) == [
        ("image", Image()),
        ("mask", Mask(of="image")),
        ("depth", Array("float32", (None, None))),
    ]
    assert files_of(found, "mask") == ["1.png", None]
    assert files_of(found, "depth") == ["1.npy", None]


def test_lists_of_arrays_have_the_array_as_their_own_file() -> None:
    found = rows("path,label\na.npy,1\n", "a.npy")
    assert list(found.schema.items()) == [("array", Array()), ("label", ClassLabel())]


def test_fields_name_a_manifests_columns() -> None:
    found = rows(
        "path,species,weight,seg\n1.jpg,owl,0.5,1.png\n",
        *("1.jpg", "1.png"),
        places=[("photo", "path"), ("label", "species"), ("mask", "seg")],
        mask=Mask(of="photo"),
    )
    assert list(found.schema.items()) == [
        ("photo", Image()),
        ("label", ClassLabel(("owl",))),
        ("mask", Mask(of="photo")),
    ]
    found = rows("photo,kind\n1.jpg,owl\n", "1.jpg", places=[("image", "photo"), ("n", "kind")])
    assert dict(found.schema) == {"image": Image(), "n": Text()}
    with pytest.raises(ConfigError, match=r'the column "no", but list\.csv has'):
        rows("path\n1.jpg\n", "1.jpg", places=[("image", "no")])
    with pytest.raises(DatasetError, match="wanted one that names each row's file"):
        rows("path,n\n1.jpg,1\n", "1.jpg", places=[("n", "n")])


def test_values_that_fit_no_schema_are_named() -> None:
    found = rows("path,n\na.jpg,1\nb.jpg,x\n", "a.jpg", "b.jpg", n=Value("int64"))
    assert files_of(found, "image") == ["a.jpg"]
    assert reasons(found) == {"b.jpg": "n: 'x' isn't an integer (line 3)"}
    assert values_of(found, "n") == [1]
    with pytest.raises(ConfigError, match='got "m", but data has'):
        rows("path,n\na.jpg,1\n", "a.jpg", m=Value("int64"))


def test_metadata_in_the_root_and_in_folders() -> None:
    found = in_metadata({"metadata.csv": "file_name,text\ntrain/1.jpg,hi\n"}, "train/1.jpg")
    assert files_of(found, "image") == ["train/1.jpg"]
    found = in_metadata(
        {
            "a/metadata.jsonl": '{"file_name": "1.jpg", "n": 1}\n',
            "b/metadata.jsonl": '{"file_name": "deep/1.jpg", "text": "x"}\n',
        },
        *("a/1.jpg", "b/deep/1.jpg"),
    )
    assert files_of(found, "image") == ["a/1.jpg", "b/deep/1.jpg"]
    assert values_of(found, "n") == [1, 0]
    assert found.present["text"].tolist() == [False, True]


def test_metadata_of_objects() -> None:
    text = (
        '{"file_name": "1.jpg", "objects": {"bbox": [[0, 0, 1, 1]], "categories": [3]}}\n'
        '{"file_name": "2.jpg", "objects": {"bbox": [], "categories": []}}\n'
    )
    found = in_metadata({"metadata.jsonl": text}, "1.jpg", "2.jpg")
    assert found.schema["objects.bbox"] == Array("int64", (None, 4))
    assert found.schema["objects.categories"] == Array("int64", (None,))


def test_metadata_of_two_kinds_is_an_error() -> None:
    with pytest.raises(DatasetError, match=r"\.csv in all folders, or \.jsonl"):
        in_metadata({"metadata.csv": "file_name\n", "metadata.jsonl": "{}"}, "1.jpg")
    with pytest.raises(DatasetError, match="wanted one that names each row's file: file_name"):
        in_metadata({"metadata.csv": "image,label\n1.jpg,2\n"}, "1.jpg")


def test_a_file_next_to_class_folders_is_named_with_its_reason() -> None:
    found = lying("a/1.jpg", "README.txt")
    assert files_of(found, "image") == ["a/1.jpg"]
    assert "another kind" in reasons(found)["README.txt"]


def test_without_sub_folders_there_are_no_labels() -> None:
    found = lying("2.jpg", "1.jpg")
    assert files_of(found, "image") == ["1.jpg", "2.jpg"]
    assert list(found.schema) == ["image"]


# Shards.


@examples(60)
@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60), shard_bytes=st.integers(1, 5000)
)
def test_virtual_shards_hold_each_sample_once_in_order(sizes: list[int], shard_bytes: int) -> None:
    names = [b"%05d.jpg" % i for i in range(len(sizes))]
    shards = virtual_shards(names, np.array(sizes, np.int64), shard_bytes=shard_bytes)
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(sizes)))
    assert len(shards) <= max(1, -(-sum(sizes) // shard_bytes))
    for positions in shards:
        assert len(positions)
        assert positions.tolist() == sorted(positions.tolist())


def test_virtual_shards_depend_on_names_and_sizes_alone() -> None:
    names = [b"%05d.jpg" % i for i in range(50)]
    shards = virtual_shards(names, np.full(50, 100, np.int64), shard_bytes=600)
    # A golden value: another order would be another index of every folder.
    assert np.concatenate(shards)[:8].tolist() == [7, 9, 12, 13, 14, 28, 30, 33]


def test_shards_are_cut_by_all_fields() -> None:
    files = entries(*(f"images/{i}.jpg" for i in range(40)), size_bytes=2**21)
    files += entries(*(f"masks/{i}.png" for i in range(40)), size_bytes=2**21)
    found = made(paired_samples("data", files, [("image", "images"), ("mask", "masks")], {}))
    assert found.sizes.tolist() == [2**22] * 40
    assert len(found.shards) > 1


# No file is lost, with any names.

NAMES = st.lists(
    st.tuples(
        st.sampled_from(["", "a/", "b/", "a/c/", "images/", "masks/"]),
        st.sampled_from(["1", "2", "x.y", "ü", " "]),
        st.sampled_from(["", ".jpg", ".png", ".txt", ".npy", ".json", ".wav", ".csv"]),
    ).map("".join),
    min_size=1,
    max_size=12,
    unique=True,
)


def accounted(found: Candidates) -> list[str]:
    """The files that are fields of samples, or quarantined; values come from json."""
    files = {file.name.decode() for file in found.files}
    return sorted({*files, *reasons(found)})


@given(NAMES)
def test_each_file_is_in_a_sample_or_named(names: list[str]) -> None:
    data = dict.fromkeys((name for name in names if name.endswith(".json")), b"{}")
    found = lying(*names, data=data)
    left = set(names) - set(accounted(found))
    stems = {name.rpartition(".")[0] for name in accounted(found)} | set(accounted(found))
    assert all(name.endswith(".json") and name.rpartition(".")[0] in stems for name in left)
    assert len(set(found.names)) == len(found)


@given(NAMES)
def test_each_file_of_paired_folders_is_in_a_sample_or_named(names: list[str]) -> None:
    both = [f"images/{name}" for name in names[::2]] + [f"masks/{name}" for name in names[1:]]
    try:
        found = pairs({"image": "images", "mask": "masks"}, *both)
    except DatasetError:
        return
    assert accounted(found) == sorted(both)
    for image, mask in zip(files_of(found, "image"), files_of(found, "mask"), strict=True):
        assert image is not None
        assert mask is not None
        assert stem(image.removeprefix("images/").encode()) == stem(
            mask.removeprefix("masks/").encode()
        )


@given(NAMES, st.integers(0, 2**12 - 1))
def test_each_row_of_a_manifest_is_a_sample_or_named(names: list[str], there: int) -> None:
    here = [name for i, name in enumerate(names) if there >> i & 1]
    table = "\n".join(json.dumps({"path": name, "n": i}) for i, name in enumerate(names))
    try:
        found = rows(table, *here, name="list.jsonl")
    except DatasetError:
        assert not here
        return
    assert [name.decode() for name in found.names] == here
    assert values_of(found, "n") == [names.index(name) for name in here]
    assert sorted(reasons(found)) == sorted(set(names) - set(here))
