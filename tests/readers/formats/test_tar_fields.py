"""The fields that members of tar files become, and the keys that become samples."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, DatasetError, PenstockError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import (
    Array,
    Audio,
    Bytes,
    ClassLabel,
    EncodedColumn,
    Image,
    Mask,
    Text,
    Value,
    Video,
    is_field_name,
)
from penstock.readers.files import IMAGES
from penstock.readers.formats import MISSING
from penstock.readers.formats.tar import (
    MemberField,
    RequestedFields,
    archive_samples,
    join_archives,
    member_field,
)
from penstock.readers.origin import Entry
from tests import images, tars
from tests.field_sets import column_values
from tests.files import npy
from tests.properties import examples
from tests.readers.fieldtypes.arrays import palette, picture


class Memory:
    """An archive in memory."""

    def __init__(self, data):
        self._data = data

    def read_at(self, offset, size_bytes):
        return self._data[offset : offset + size_bytes]


def joined(*archives, schema=None, fields=None):
    """Join archives of these members."""
    asked = RequestedFields(schema or {}, fields or {})
    found = []
    for number, files in enumerate(archives):
        data = tars.archive(files)
        entry = Entry(name=b"%d.tar" % number, size_bytes=len(data), mtime_ns=0, version="")
        found.append(archive_samples(entry, Memory(data), asked))
    return join_archives(found, asked, url="/set")


def candidates(*archives, **asked):
    samples = joined(*archives, **asked).without_rejected()
    return samples.grouped(asked.get("schema") or {}, url="/set")


def quarantine(found):
    return {entry.name.decode(): entry.reason for entry in found.quarantined}


KNOWN = {
    "jpg": MemberField("image", "image"),
    "left.png": MemberField("left", "image"),
    "cam.0.webp": MemberField("cam.0", "image"),
    "txt": MemberField("caption", "text"),
    "prompt.txt": MemberField("prompt", "text"),
    "cls": MemberField("label", "class"),
    "fine.cls": MemberField("fine", "class"),
    "json": MemberField("", "json"),
    "meta.json": MemberField("meta", "json"),
    "npy": MemberField("array", "array"),
    "feat.npy": MemberField("feat", "array"),
    "flac": MemberField("audio", "audio"),
    "mp4": MemberField("video", "video"),
}


@pytest.mark.parametrize(("extension", "wanted"), KNOWN.items())
def test_an_extension_names_its_field(extension, wanted):
    assert member_field(extension) == wanted


SUFFIXES = sorted({*IMAGES, "txt", "json", "npy", "cls", "wav", "mp4", "pkl", "pth", "pyd", "tar"})


@given(stem=st.text(max_size=12), suffix=st.sampled_from(SUFFIXES))
def test_every_extension_is_a_field_of_a_valid_name_or_none(stem, suffix):
    found = member_field(f"{stem}.{suffix}" if stem else suffix)
    if suffix in ("pkl", "pth", "pyd", "tar"):
        assert found is None
    elif found is None:
        assert stem == "id" or stem.endswith(".present") or not is_field_name(stem)
    elif stem:
        assert found.name == stem
    else:
        assert is_field_name(found.name) or found == MemberField("", "json")


@examples(60)
@given(
    keys=st.lists(
        st.sets(st.sampled_from(sorted(KNOWN)), min_size=1, max_size=5), min_size=1, max_size=6
    ),
    cut=st.integers(0, 6),
)
def test_each_key_is_a_sample_or_quarantined(keys, cut):
    contents = {"cls": b"3", "fine.cls": b"4", "json": b'{"n": 1}', "meta.json": b'{"n": 2}'}
    sets = [
        {f"{i}.{part}": contents.get(part, b"data") for part in sorted(parts)}
        for i, parts in enumerate(keys)
    ]
    archives = [
        {name: data for files in some for name, data in files.items()}
        for some in (sets[:cut], sets[cut:])
    ]
    found = candidates(*archives)
    assert len(found) + len(found.quarantined) - archives.count({}) == len(keys)
    image_names = {"jpg", "left.png", "cam.0.webp"}
    is_pictured = any(parts & image_names for parts in keys)
    is_labelled = any("cls" in parts for parts in keys)
    good = [
        i
        for i, parts in enumerate(keys)
        if (not is_pictured or parts & image_names) and (not is_labelled or "cls" in parts)
    ]
    is_labelled = "label" in found.schema
    assert [int(name.rpartition(b"/")[2].partition(b".")[0]) for name in found.names] == good
    is_single = all(len(parts & image_names) < 2 for parts in keys)
    for name, spans in found.spans.items():
        names = {KNOWN[part].name for part in image_names} if name == "image" else {name}
        names = names if is_single else {name}
        wanted = [any(KNOWN[part].name in names for part in keys[i]) for i in good]
        assert (spans.files != MISSING).tolist() == wanted
        assert (spans.sizes == 4).tolist() == wanted
    for name, part in (("n", "json"), ("meta.n", "meta.json"), ("fine", "fine.cls")):
        if name in found.schema:
            present = found.present.get(name, np.ones(len(good), np.bool_))
            assert present.tolist() == [part in keys[i] for i in good]
    first = sum(i < cut for i in good)
    assert [len(each) for each in found.shards] == [first, len(good) - first]


def test_captions_labels_masks_and_json_have_their_types():
    found = candidates(
        [
            ("a.jpg", b"1"),
            ("a.txt", b"a dog"),
            ("a.cls", b"7"),
            ("a.seg.png", b"m"),
            ("a.json", b'{"caption": "x", "w": 3, "box": {"xy": [1, 2.5]}, "label": 9}'),
            ("b.jpg", b"2"),
            ("b.seg.png", b"m"),
            ("b.cls", b"-1"),
            ("b.json", b'{"caption": "y", "w": 4, "box": {"xy": [3]}, "label": 8}'),
        ]
    )
    assert dict(found.schema) == {
        "image": Image(),
        "seg": Mask(of="image"),
        "label": ClassLabel(),
        "caption": Text(),
        "json.caption": Text(),
        "w": Value("int64"),
        "box.xy": Array("float32", (None,)),
        "json.label": Value("int64"),
    }
    assert list(found.schema)[:3] == ["image", "seg", "label"]
    assert {name: column_values(column) for name, column in found.values.items()} == {
        "label": [7, -1],
        "json.caption": ["x", "y"],
        "w": [3, 4],
        "box.xy": [[1, 2.5], [3]],
        "json.label": [9, 8],
    }
    assert found.spans["caption"].files.tolist() == [0, MISSING]
    assert found.names == [b"0.tar/a.jpg", b"0.tar/b.jpg"]


def test_sets_without_images_have_samples_too():
    found = candidates(
        [("a.feat.npy", b"1"), ("a.json", b'{"y": 0.5}'), ("b.json", b'{"y": 1}')],
        [("c.feat.npy", b"1"), ("c.json", b'{"y": 2}'), ("c.wav", b"w"), ("c.mp4", b"v")],
    )
    assert dict(found.schema) == {
        "feat": Array(),
        "audio": Audio(),
        "video": Video(),
        "y": Value("float32"),
    }
    assert found.names == [b"0.tar/a.feat.npy", b"0.tar/b.json", b"1.tar/c.feat.npy"]
    assert found.spans["feat"].files.tolist() == [0, MISSING, 1]
    assert column_values(found.values["y"]) == [0.5, 1, 2]
    assert found.quarantined == []


def test_two_members_for_one_field_are_quarantined():
    found = candidates(
        [
            ("a.jpg", b"1"),
            ("a.png", b"2"),
            ("b.jpg", b"1"),
            ("b.jpg", b"2"),
            ("c.jpg", b"3"),
            ("d.jpg", b"4"),
            ("d.caption.txt", b"t"),
            ("d.txt", b"t"),
        ]
    )
    refused = quarantine(found)
    assert refused["0.tar/a.jpg"].startswith("two members of one key (jpg, png)")
    assert "two members of one key (jpg, jpg)" in refused["0.tar/b.jpg"]
    assert '"caption"' in refused["0.tar/d.jpg"]
    assert found.names == [b"0.tar/c.jpg"]


def test_a_mask_belongs_to_the_only_image_and_is_never_guessed_among_several():
    mask = [("a.mask.png", b"m")]
    assert candidates([("a.jpg", b"1"), *mask]).schema["mask"] == Mask(of="image")
    two = [("a.rgb.jpg", b"1"), ("a.ir_seg.png", b"1"), *mask]
    assert candidates(two).schema["ir_seg"] == Mask(of="image")
    assert candidates(mask).schema["mask"] == Image()
    assert candidates([("a.jpg", b"1"), ("a.mask.jpg", b"m")]).schema["mask"] == Image()
    several = joined([("a.left.jpg", b"1"), ("a.right.jpg", b"2"), *mask])
    assert several.schema["mask"] == Image()
    assert 'Mask(of="left")' in several.unread[0]
    given = candidates([("a.jpg", b"1"), *mask], schema={"mask": Image()})
    assert given.schema["mask"] == Image()


def test_json_that_is_not_an_object_is_a_value_and_broken_json_is_quarantined():
    found = candidates(
        [
            ("a.jpg", b"1"),
            ("a.json", b'[{"bbox": [1, 2, 3, 4]}, {"bbox": [5, 6, 7, 8]}]'),
            ("b.jpg", b"2"),
            ("b.json", b"[]"),
            ("c.jpg", b"3"),
            ("c.json", b"{"),
            ("d.jpg", b"4"),
            ("d.json", b"[" * 100000),
            ("e.jpg", b"5"),
            ("e.json", b'{"a": 1, "a": 2}'),
        ]
    )
    assert column_values(found.values["json.bbox"]) == [[[1, 2, 3, 4], [5, 6, 7, 8]], []]
    refused = quarantine(found)
    assert set(refused) == {"0.tar/c.jpg", "0.tar/d.jpg", "0.tar/e.jpg"}
    assert all("its json: isn't JSON" in reason for reason in refused.values())


def test_a_key_of_json_that_cant_be_a_field_is_left_out_alone():
    found = joined(
        [
            ("a.jpg", b"1"),
            ("a.json", b'{"mixed": 1, "ok": 2, "id": 3, "none": null}'),
            ("b.jpg", b"1"),
            ("b.json", b'{"mixed": "x", "ok": 2, "id": 4}'),
        ]
    )
    assert list(found.schema) == ["image", "ok", "id"]
    (left_out,) = found.unread
    assert '"mixed": ' in left_out
    assert "sample 0.tar/a.jpg" in left_out
    assert '"none"' not in left_out
    with pytest.raises(DatasetError, match='"label" holds'):
        joined(
            [
                ("a.jpg", b"1"),
                ("a.json", b'{"label": 1}'),
                ("b.jpg", b"1"),
                ("b.json", b'{"label": "x"}'),
            ]
        )


def test_a_sample_without_a_label_is_quarantined():
    files = [("a.jpg", b"1"), ("a.cls", b"1"), ("b.jpg", b"2"), ("c.jpg", b"3"), ("d.jpg", b"4")]
    files += [("d.cls", b"dog")]
    found = candidates(files, [("c.cls", b"2"), ("e.cls", b"3")])
    assert column_values(found.values["label"]) == [1]
    refused = quarantine(found)
    assert "no label (cls, or in json)" in refused["0.tar/b.jpg"]
    assert "Write all members of a key into one archive" in refused["0.tar/c.jpg"]
    assert "isn't an integer" in refused["0.tar/d.jpg"]
    for name in ("1.tar/c.cls", "1.tar/e.cls"):
        assert refused[name].startswith("label whose image isn't in its archive")
    kept = candidates(files, schema={"label": ClassLabel()})
    assert kept.present["label"].tolist() == [True, False, False]
    few = candidates(files[:2] + files[3:5], schema={"label": ClassLabel(("x",))})
    assert "isn't a class" in quarantine(few)["0.tar/a.jpg"]


def test_a_schema_gives_types_that_names_dont_imply():
    files = [("a.jpg", b"1"), ("a.pth", b"raw"), ("a.mask.npy", b"m"), ("a.x.bin", b"b")]
    found = candidates(files, schema={"pth": Bytes(), "mask": Mask(of="image")})
    assert dict(found.schema) == {"image": Image(), "pth": Bytes(), "mask": Mask(of="image")}
    assert found.passed_over == {"x.bin": 1}
    with pytest.raises(ConfigError, match=r'got "depth".*image'):
        candidates(files, schema={"depth": Array()})


def test_the_only_image_of_each_key_is_the_image():
    found = joined([("a.jpg", b"1"), ("b.input.png", b"2"), ("b.seg.png", b"3")])
    assert dict(found.schema) == {"image": Image(), "seg": Mask(of="image")}
    assert found.spans["image"].files.tolist() == [0, 0]
    assert 'is the field "image"' in found.notes[0]
    several = candidates([("a.left.jpg", b"1"), ("a.right.jpg", b"2"), ("b.left.jpg", b"2")])
    assert dict(several.schema) == {"left": Image(), "right": Image()}
    asked = candidates([("a.input.jpg", b"1")], schema={"input": Image()})
    assert dict(asked.schema) == {"input": Image()}


def test_labels_of_cls_and_json_are_one_field_if_they_never_differ():
    files = [("a.jpg", b"1"), ("a.cls", b"3"), ("a.json", b'{"label": 3}'), ("b.jpg", b"2")]
    both = candidates([*files, ("b.json", b'{"label": 4}')])
    assert dict(both.schema) == {"image": Image(), "label": ClassLabel()}
    assert column_values(both.values["label"]) == [3, 4]
    assert both.present == {}
    differ = candidates([*files[:2], ("a.json", b'{"label": 4}')])
    assert column_values(differ.values["json.label"]) == [4]


def test_fields_may_be_named_by_extension_or_key_and_nothing_else_is_read():
    files = [("a.jpg", b"1"), ("a.left.png", b"2"), ("a.pth", b"3"), ("a.cls", b"x")]
    files += [("a.json", b'{"k": {"n": 1, "m": 2}, "w": 4}'), ("a.pkl", b"4")]
    named = {"left.png": "target", "pth": "raw", "k.n": "count"}
    found = candidates(files, fields=named)
    assert dict(found.schema) == {"target": Image(), "raw": Bytes(), "count": Value("int64")}
    assert found.passed_over == {}
    whole = candidates(files, fields={"json": "meta"})
    assert list(whole.schema) == ["meta.k.n", "meta.k.m", "meta.w"]
    beside = [("a.jpg", b"1"), ("a.png", b"2")]
    assert (
        'fields={"image": "jpg", "other": "png"}' in quarantine(candidates(beside))["0.tar/a.jpg"]
    )
    both = candidates(beside, fields={"jpg": "image", "png": "mask"})
    assert dict(both.schema) == {"image": Image(), "mask": Mask(of="image")}
    with pytest.raises(ConfigError, match=r"ends in 'right\.png'"):
        candidates(files, fields={"right.png": "other"})


def test_too_many_or_conflicting_fields_raise_an_error():
    with pytest.raises(DatasetError, match=r"1,500 fields.*first dot"):
        candidates([(f"photo.{i}.jpg", b"1") for i in range(1500)])
    with pytest.raises(DatasetError, match="two kinds"):
        candidates([("a.x.npy", b"1"), ("b.x.jpg", b"1")])


def whole(i):
    """Return all members of one key."""
    mask = picture(palette(np.full((24, 32), i, np.uint8)))
    return {
        f"{i}.jpg": images.jpeg(i),
        f"{i}.mask.png": mask,
        f"{i}.cls": b"%d" % i,
        f"{i}.txt": b"caption %d" % i,
        f"{i}.vec.npy": npy(np.full((i, 3), i, np.float32)),
        f"{i}.json": b'{"n": %d, "tags": [1, %d], "size": {"w": 2.5}}' % (i, i),
    }


RICH = tars.archive(whole(1) | whole(2))


@examples(150)
@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(RICH) - 1), st.integers(0, 255)), min_size=1, max_size=8
    ),
    cut=st.one_of(st.none(), st.integers(0, len(RICH))),
)
def test_any_damage_to_any_field_yields_samples_or_an_error(flips, cut):
    data = bytearray(RICH)
    for at, value in flips:
        data[at] = value
    with tempfile.TemporaryDirectory() as above, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(above, "set")
        folder.mkdir()
        Path(folder, "a.tar").write_bytes(data[:cut])
        try:
            dataset = Dataset(folder)
            index = dataset.open(verify=images.verify, workers=1)
        except PenstockError:
            return
        rows = np.array([(0, row) for row in range(index.samples)], np.int64)
        batch = dataset.read(rows, fields=tuple(index.about.schema))
        assert set(batch.columns) == set(index.about.schema)
        assert all(len(column) == len(rows) for column in batch.columns.values())
        for name, type in index.about.schema.items():
            column = batch.columns[name]
            if isinstance(type, Mask) and isinstance(column, EncodedColumn):
                for mask in column.samples:
                    assert len(mask) == 0 or type.decode(mask).shape == (24, 32)


def test_a_dataset_of_all_kinds_is_read_back(tmp_path):
    (tmp_path / "a.tar").write_bytes(RICH)
    dataset = Dataset(tmp_path)
    schema = dataset.open(verify=images.verify, workers=1).about.schema
    assert dict(schema) == {
        "image": Image(),
        "mask": Mask(of="image", dtype="uint8"),
        "label": ClassLabel(),
        "caption": Text(),
        "vec": Array("float32", (None, 3)),
        "n": Value("int64"),
        "tags": Array("int64", (2,)),
        "size.w": Value("float32"),
    }
    batch = dataset.read(np.array([(0, 1), (0, 0)], np.int64), fields=tuple(schema))
    for row, i in enumerate((2, 1)):
        masks, vectors = batch.columns["mask"], batch.columns["vec"]
        assert (Mask(of="image").decode(masks.samples[row]) == i).all()
        assert np.array_equal(vectors.sample(row), np.full((i, 3), i, np.float32))
        assert batch.columns["tags"].values[row].tolist() == [1, i]
        assert batch.columns["label"].values[row] == i
        assert bytes(batch.columns["caption"].samples[row]) == b"caption %d" % i
