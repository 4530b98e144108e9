"""Test masks, boxes and points of images that are resized while they are packed."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from penstock.cache import ConfigError, DestinationError
from penstock.readers import Dataset, Rejection, pack
from penstock.readers.fieldtypes import (
    Array,
    Boxes,
    DenseColumn,
    EncodedColumn,
    FieldType,
    Image,
    ImageSize,
    InstanceKeypoints,
    InstanceMasks,
    Keypoints,
    ListColumn,
    Mask,
    RaggedColumn,
    Schema,
    Text,
    examine,
    nearest,
)
from penstock.readers.formats.pack import PackSample
from penstock.readers.packing import Transcode
from tests import annotated_sets, images
from tests.images import encoded_array

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.readers import Encoded
    from penstock.readers.fieldtypes import SampleBatch


SCHEMA = Schema(
    {
        "left": Image(),
        "right": Image(),
        "left_mask": Mask("left"),
        "right_mask": Mask("right"),
        "boxes": Boxes("left", format="xywh"),
        "areas": Array("float32", (None,), of="boxes"),
        "points": Keypoints("right"),
        "caption": Text(),
    }
)


def data(values: bytes) -> Encoded:
    return np.frombuffer(values, np.uint8)


def npy(values: Any) -> Encoded:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return data(buffer.getvalue())


def sample(**changes: Any) -> PackSample:
    """Return a sample whose images are 60 x 90 and 40 x 50 pixels."""
    rng = np.random.default_rng(0)
    encoded = {
        "left": data(images.jpeg(1, 60, 90)),
        "right": data(images.jpeg(2, 40, 50)),
        "left_mask": encoded_array(rng.integers(0, 9, (60, 90), np.uint8)),
        "right_mask": npy(rng.integers(0, 999, (40, 50), np.int32)),
        "caption": data(b"two"),
    } | changes
    given = {name: [each] for name, each in encoded.items()}
    (facts,) = examine(given, SCHEMA, images.verify)
    assert not isinstance(facts, Rejection), facts
    return PackSample(
        facts=facts,
        values={name: encoded[name][each.start :] for name, each in facts.items()}
        | {
            "boxes": np.array([[0, 0, 90, 60], [9, 6, 18, 12]], np.float32),
            "areas": np.array([5400, 216], np.float32),
            "points": np.array([[25, 20], [-1, -1], [-5, 60]], np.float32),
        },
    )


def test_data_that_belongs_to_an_image_is_resized_with_it() -> None:
    before = sample()
    after = Transcode(short_side=20).apply(before, SCHEMA)
    assert isinstance(after, PackSample)
    assert after.facts["left"].shape == (20, 30, 3)
    assert after.facts["right"].shape == (20, 25, 3)
    for name, size in (("left_mask", (20, 30)), ("right_mask", (20, 25))):
        classes, was = (
            Mask(of="image").decode(after.values[name]),
            Mask(of="image").decode(before.values[name]),
        )
        assert classes.shape == size
        assert after.facts[name].shape[:2] == size
        rows, columns = (nearest(a, b) for a, b in zip(was.shape, size, strict=True))
        assert np.array_equal(classes, was[rows][:, columns])
    assert after.values["boxes"].tolist() == [[0, 0, 30, 20], [3, 2, 6, 4]]
    assert after.values["points"].tolist() == [[12.5, 10], [-1, -1], [-2.5, 30]]
    assert after.values["areas"] is before.values["areas"]
    assert after.values["caption"] is before.values["caption"]
    # And it is a sample as any other.
    given = {name: [after.values[name]] for name in after.facts}
    (facts,) = examine(given, SCHEMA, images.verify)
    assert facts == after.facts


def test_only_the_image_fields_that_are_named_are_rewritten() -> None:
    before = sample()
    after = Transcode(short_side=20, images=["right"]).apply(before, SCHEMA)
    assert isinstance(after, PackSample)
    for name in ("left", "left_mask"):
        assert after.values[name] is before.values[name]
    assert after.values["boxes"] is before.values["boxes"]
    assert after.facts["right_mask"].shape == (20, 25, 1)
    assert after.values["points"][0].tolist() == [12.5, 10]


def test_an_image_of_the_same_size_changes_nothing() -> None:
    before = sample()
    after = Transcode(quality=30).apply(before, SCHEMA)
    assert isinstance(after, PackSample)
    assert after.values["left"] is not before.values["left"]
    assert after.values["left_mask"] is before.values["left_mask"]
    assert after.values["boxes"] is before.values["boxes"]


def test_a_missing_field_stays_missing() -> None:
    whole = sample()
    before = PackSample(values={"left": whole.values["left"]}, facts={"left": whole.facts["left"]})
    after = Transcode(short_side=20).apply(before, SCHEMA)
    assert isinstance(after, PackSample)
    assert after.values.keys() == {"left"}


@pytest.mark.parametrize("value", [-1, 2**16])
def test_classes_that_no_png_holds_reject_the_sample(value: int) -> None:
    before = sample(right_mask=npy(np.full((40, 50), value, np.int32)))
    after = Transcode(short_side=20).apply(before, SCHEMA)
    assert isinstance(after, Rejection)
    assert after.reason.startswith("right: the data that belongs to it")
    assert "65,535" in after.reason


def test_names_that_arent_image_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="image: got 'boxes'"):
        Transcode(quality=30, images=["boxes"]).image_fields(SCHEMA)
    with pytest.raises(ConfigError, match="image: it names"):
        Transcode(images=["left"])


@given(before=st.integers(1, 500), after=st.integers(1, 500))
def test_each_pixel_is_the_one_that_its_centre_lies_in(before: int, after: int) -> None:
    centres = (np.arange(after) + 0.5) * before / after
    found = nearest(before, after)
    assert (np.abs(found + 0.5 - centres) <= 0.5 + 1e-9).all()
    if before == after:
        assert found.tolist() == list(range(after))


@given(
    sizes=st.tuples(st.integers(2, 64), st.integers(2, 64), st.integers(1, 64), st.integers(1, 64)),
    corners=st.lists(st.tuples(*[st.integers(0, 64)] * 4), max_size=5),
)
def test_boxes_of_any_form_stay_the_same_boxes(
    sizes: Sequence[int], corners: list[tuple[int, ...]]
) -> None:
    before, after = (sizes[0], sizes[1]), (sizes[2], sizes[3])
    xyxy = np.array(corners, np.float32).reshape(-1, 4)
    xywh = np.concatenate((xyxy[:, :2], xyxy[:, 2:] - xyxy[:, :2]), axis=1)
    there = Boxes("left").resized(xyxy, before, after)
    also = Boxes("left", format="xywh").resized(xywh, before, after)
    assert np.allclose(also[:, 2:] + also[:, :2], there[:, 2:], atol=1e-3)
    factors = np.tile([after[1] / before[1], after[0] / before[0]], 2)
    assert np.allclose(there, xyxy * factors, atol=1e-3)


def test_a_mask_of_16_bits_keeps_its_classes() -> None:
    mask = Mask(of="image")
    payload = mask.resized(encoded_array(np.full((4, 4), 60_000, np.uint16)), (4, 4), (2, 3))
    assert mask.decode(payload).tolist() == [[60_000] * 3] * 2
    assert mask.check(payload).shape == (2, 3, 1)


def test_what_belongs_to_boxes_is_resized_with_the_image_of_the_boxes() -> None:
    masks, points = InstanceMasks("boxes"), InstanceKeypoints("boxes", 2)
    types = {"masks": masks, "joints": points, "was": ImageSize("left")}
    before = sample()
    runs = {"size": [60, 90], "counts": [5 * 60, 20 * 60, 65 * 60]}
    stored: dict[str, Any] = {
        "masks": data(json.dumps([[[6, 3, 9, 3, 9, 12.5]], runs, None]).encode()),
        "joints": np.array([[[6, 3, 2], [0, 0, 0]], [[0, 0, 0], [9, 12, 1]]], np.float32),
        "was": np.array([60, 90]),
    }
    facts = {**before.facts, "masks": masks.check(stored["masks"])}
    whole = PackSample(values={**before.values, **stored}, facts=facts)
    after = Transcode(short_side=20).apply(whole, Schema({**SCHEMA, **types}))
    assert isinstance(after, PackSample)
    found = [*masks.decode(after.values["masks"])]
    assert found[0] == [pytest.approx([2, 1, 3, 1, 3, 12.5 / 3])]
    # Columns 2 to 7 have their centres in the run.
    assert found[1:] == [{"size": [20, 30], "counts": [2 * 20, 6 * 20, 22 * 20]}, None]
    assert after.facts["masks"].shape == (3, 20, 30)
    assert after.values["joints"].tolist() == [[[2, 1, 2], [0, 0, 0]], [[0, 0, 0], [3, 4, 1]]]
    assert after.values["was"].tolist() == [60, 90]  # for evaluation


def test_a_type_that_follows_and_cannot_be_resized_rejects_the_sample() -> None:
    @dataclass(frozen=True)
    class Depth(Mask):
        resized = FieldType.resized

    after = Transcode(short_side=20).apply(sample(), Schema({**SCHEMA, "left_mask": Depth("left")}))
    assert isinstance(after, Rejection)
    assert "Depth has no `resized`" in after.reason


SAMPLES = 12


FOLDER_SCHEMA: dict[str, FieldType] = {
    "boxes": Boxes("image", format="xywh"),
    "points": Keypoints("image"),
}


def folder(root: Path) -> Path:
    """Images of one colour with a bright square, and a mask, a box, a point and a text about it."""
    files: dict[str, bytes] = {}
    lines = []
    for i in range(SAMPLES):
        height, width = 40 + 4 * (i % 3), 48 + 4 * (i % 2)
        x, y, side = 8 + i, 6 + i % 5, 16
        picture = np.full((height, width, 3), 20, np.uint8)
        mask = np.zeros((height, width), np.uint8)
        picture[y : y + side, x : x + side] = 240
        mask[y : y + side, x : x + side] = 7
        for name, pixels, codec in (("image", picture, "JPEG"), ("mask", mask, "PNG")):
            buffer = io.BytesIO()
            Pillow.fromarray(pixels).save(buffer, codec)
            files[f"{name}s/{i:03d}.{'jpg' if codec == 'JPEG' else 'png'}"] = buffer.getvalue()
        report: dict[str, Any] = {
            "file_name": f"images/{i:03d}.jpg",
            "mask_file_name": f"masks/{i:03d}.png",
            "caption": f"a square at {x}, {y}",
            "boxes": [[x, y, side, side]] * (1 + i % 2),
            "points": [[x + side / 2, y + side / 2], [-1, -1]],
            "vector": [x / 8, y / 8, side / 8],
            "label": i % 4,
        }
        if i % 4 == 2:
            del report["caption"]
        lines.append(json.dumps(report))
    files["metadata.jsonl"] = "\n".join(lines).encode()
    return images.write_folder(root, files)


def read(path: Path, **options: Any) -> tuple[list[str], SampleBatch]:
    with Dataset(path, **options) as dataset:
        dataset.open(verify=images.verify)
        fields = ("image", "mask", "caption", "boxes", "points", "vector", "label")
        batch = dataset.read(dataset.contents.rows(np.arange(len(dataset))), fields=fields)
        return dataset.names(range(len(dataset))), batch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "set")


def test_everything_stays_with_its_pixels(source: Path, tmp_path: Path) -> None:
    pack(
        source,
        tmp_path / "pack",
        schema=FOLDER_SCHEMA,
        short_side=20,
        quality=95,
        shard_bytes=4000,
        verify=images.verify,
    )
    names, batch = read(tmp_path / "pack")
    assert len(names) == SAMPLES
    columns = batch.columns
    pictures, masks, boxes, points = (
        columns[name] for name in ("image", "mask", "boxes", "points")
    )
    assert isinstance(pictures, EncodedColumn)
    assert isinstance(masks, EncodedColumn)
    assert isinstance(boxes, RaggedColumn)
    assert isinstance(points, RaggedColumn)
    for row in range(SAMPLES):
        picture = np.asarray(Pillow.open(io.BytesIO(bytes(pictures.samples[row]))).convert("L"))
        mask = Mask(of="image").decode(masks.samples[row])
        assert mask.shape == picture.shape
        assert min(mask.shape) == 20
        assert pictures.dims is not None
        assert pictures.dims[row].tolist() == list(mask.shape)
        is_bright = picture > 130
        assert (is_bright != (mask == 7)).mean() < 0.05
        x, y, width, height = boxes.sample(row)[0]
        found = np.argwhere(mask == 7)
        assert np.allclose(found.min(axis=0), (y, x), atol=1)
        assert np.allclose(found.max(axis=0) + 1, (y + height, x + width), atol=1)
        assert np.allclose(points.sample(row), [[x + width / 2, y + height / 2], [-1, -1]])


def test_undeclared_boxes_cause_a_warning(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        pack(
            source, tmp_path / "declared", schema=FOLDER_SCHEMA, verify=images.verify, short_side=16
        )
        assert "isn't resized" not in caplog.text
        pack(source, tmp_path / "whole", verify=images.verify)
        assert "isn't resized" not in caplog.text
        pack(source, tmp_path / "pack", verify=images.verify, short_side=16)
    assert '"boxes" isn\'t resized with the images' in caplog.text


def test_without_transcoding_nothing_changes(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", schema=FOLDER_SCHEMA, verify=images.verify, shuffle=False)
    (names, before), (packed_names, after) = (
        read(source, schema=FOLDER_SCHEMA),
        read(tmp_path / "pack"),
    )
    assert names == packed_names
    assert before.present["caption"].tolist() == after.present["caption"].tolist()
    for name, column in before.columns.items():
        other = after.columns[name]
        for row in range(SAMPLES):
            if isinstance(column, EncodedColumn | ListColumn):
                sample = column.samples[row]
                wanted = sample.encode() if isinstance(sample, str) else bytes(sample)
                assert isinstance(other, EncodedColumn)
                assert bytes(other.samples[row]) == wanted
            elif isinstance(column, DenseColumn):
                assert isinstance(other, DenseColumn)
                assert np.array_equal(column.values[row], other.values[row])
            else:
                assert isinstance(other, RaggedColumn)
                assert np.array_equal(column.sample(row), other.sample(row))


def test_a_pack_of_other_types_is_another_pack(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", schema=FOLDER_SCHEMA, verify=images.verify)
    again = pack(source, tmp_path / "pack", schema=FOLDER_SCHEMA, verify=images.verify)
    assert again.samples == SAMPLES
    with pytest.raises(DestinationError, match="another"):
        pack(source, tmp_path / "pack", verify=images.verify)


def test_what_belongs_to_boxes_is_resized_with_their_image(tmp_path: Path) -> None:
    content = annotated_sets.instances()
    content["categories"] = annotated_sets.PEOPLE
    for each in content["annotations"]:
        each |= {"category_id": 1, "keypoints": [*each["bbox"][:2], 2, 0, 0, 0]}
    root = annotated_sets.coco_set(tmp_path, content)
    manifest = "annotations/instances_train2017.json"
    small = tmp_path / "small"
    pack(root, small, manifest=manifest, short_side=20, shuffle=False, verify=images.verify)
    pack(small, tmp_path / "again", shuffle=False, verify=images.verify)  # sizes aren't compared
    with Dataset(root, manifest=manifest) as before, Dataset(tmp_path / "again") as after:
        before.open(verify=images.verify)
        rows = np.stack([np.zeros(12, np.int64), np.arange(12)], axis=1)
        fields = ("image", "boxes", "keypoints", "masks", "original_size")
        found: Any = [each.read(rows, fields=fields).columns for each in (before, after)]
        was, now = found
        for row in range(12):
            sizes = [column["image"].dims[row] for column in found]
            assert sizes[1].min() == 20
            by = (sizes[1] / sizes[0])[::-1]
            np.testing.assert_allclose(
                now["boxes"].sample(row), was["boxes"].sample(row) * np.tile(by, 2), rtol=1e-5
            )
            np.testing.assert_allclose(
                now["keypoints"].sample(row),
                was["keypoints"].sample(row) * np.append(by, 1),
                rtol=1e-5,
            )
            assert now["original_size"].sample(row).tolist() == sizes[0].tolist()
            masks = [json.loads(bytes(column["masks"].sample(row))) for column in found]
            assert len(masks[0]) == len(masks[1])
            for old, new in zip(*masks, strict=True):
                if isinstance(old, list):
                    np.testing.assert_allclose(new[0], old[0] * np.tile(by, len(old[0]) // 2))
                else:
                    assert new["size"] == sizes[1].tolist()
                    assert sum(new["counts"]) == sizes[1].prod()
                    share = [sum(m["counts"][1::2]) / sum(m["counts"]) for m in (old, new)]
                    assert share[1] == pytest.approx(share[0], abs=0.03)
