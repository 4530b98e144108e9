"""Check every field of a sample completely before the sample may enter a dataset.

Images are decoded by the installed decoder (`verify`), masks by Pillow; of everything else the
structure is checked. The schema determines the checks of a field; nothing is guessed from its
bytes. Sound and video are checked by their first bytes only, because they can't be decoded yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from penstock.cache import ConfigError
from penstock.readers.fieldtypes.array_forms import decode_array
from penstock.readers.fieldtypes.boxes import check_points
from penstock.readers.fieldtypes.field_types import (
    Array,
    Audio,
    Boxes,
    Bytes,
    Image,
    Keypoints,
    Mask,
    Text,
    Tokens,
    Video,
)
from penstock.readers.fieldtypes.fit import array_misfit
from penstock.readers.fieldtypes.masks import (
    TOO_WIDE,
    mask_codec,
    mask_dtype,
    read_mask,
    sniff_mask,
)
from penstock.readers.fieldtypes.npy_header import read_npy_header
from penstock.readers.fieldtypes.sniff import MEDIA_HEAD_BYTES, sniff_audio, sniff_video
from penstock.readers.fieldtypes.verification import find_verify, image_verdicts, strict_pillow
from penstock.readers.types import MAX_PIXELS, Facts, ImageFacts, Rejection, pixel_refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.field_types import FieldType
    from penstock.readers.fieldtypes.schema import Schema
    from penstock.readers.types import Encoded, Verify

    Spans = Mapping[str, Sequence[Encoded | Rejection | None]]
    Noted = Mapping[str, Sequence[NDArray[Any] | None]]
    Checked = Mapping[str, Sequence[Facts | Rejection | None]]

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


def verify_for(
    schema: Schema, verify: Verify | None, *, workers: int, max_pixels: int | None = None
) -> Verify | None:
    """Return the decoder of a dataset's images: `verify`, else the installed one; None if there are
    no images, so that none needs to be installed. max_pixels: of an image; None uses the default.
    Raises MissingDependencyError."""
    if not schema.of_type(Image):
        return None
    return verify or find_verify(workers=workers, max_pixels=max_pixels)


def check_masks(samples: Spans, schema: Schema, *, max_pixels: int = MAX_PIXELS) -> Checked:
    """Decode masks without their images, on otherwise idle threads: this is the slow part of
    `examine` apart from decoding images. Returns the facts of each mask, or why it is none; None if
    the sample lacks it."""
    return {
        name: [
            each
            if each is None or isinstance(each, Rejection)
            else _mask(each, type, max_pixels=max_pixels)
            for each in samples[name]
        ]
        for name, type in schema.of_type(Mask).items()
        if name in samples
    }


def examine(
    samples: Spans,
    schema: Schema,
    verify: Verify | None,
    *,
    noted: Noted | None = None,
    masks: Checked | None = None,
    max_pixels: int = MAX_PIXELS,
) -> list[Mapping[str, Facts] | Rejection]:
    """Check all fields of each sample: return the facts of the fields that it has, or why it is
    bad.

    samples: by field, the bytes of every field that lies in files, or why they couldn't be read;
    None if the sample lacks the field. noted: values that a table holds of boxes, keypoints and the
    arrays that belong to boxes, as stored; None if it holds none. verify: decodes images; None if
    the schema has none. masks: the result of `check_masks`, if it was called. max_pixels: of an
    image or a mask. Raises ConfigError for fields that can't lie in files.
    """
    images = _images(samples, schema, verify, max_pixels=max_pixels)
    if masks is None:
        masks = check_masks(samples, schema, max_pixels=max_pixels)
    decoded = {**images, **masks}
    count = max(map(len, samples.values()), default=0)
    # Images come first: masks and boxes need their sizes.
    names = [*images, *(name for name in schema if name in samples and name not in images)]
    return [
        _check_sample(row, names, samples, schema, decoded, noted or {}) for row in range(count)
    ]


def _check_sample(
    row: int, names: Sequence[str], samples: Spans, schema: Schema, decoded: Checked, noted: Noted
) -> Mapping[str, Facts] | Rejection:
    """Return the facts of one sample in the schema's order, or the first reason against it.
    decoded: the facts of images and masks."""
    facts: dict[str, Facts] = {}
    for name in names:
        type = schema[name]
        checked: Facts | Rejection | None
        if name in decoded:
            checked = decoded[name][row]
            if isinstance(type, Mask) and isinstance(checked, Facts):
                checked = _fitting(checked, type, facts)
        else:
            sample = samples[name][row]
            if sample is None or isinstance(sample, Rejection):
                checked = sample
            else:
                checked = _check(name, type, sample, facts)
        if isinstance(checked, Rejection):
            is_alone = len(samples) + len(noted) == 1
            return checked if is_alone else Rejection(f"{name}: {checked.reason}")
        if checked is not None:
            facts[name] = checked
    refusal = check_noted({name: each[row] for name, each in noted.items()}, facts, schema)
    return refusal or {name: facts[name] for name in schema if name in facts}


def check_noted(
    values: Mapping[str, NDArray[Any] | None], facts: Mapping[str, Facts], schema: Schema
) -> Rejection | None:
    """Return why the values that a table holds of one sample's boxes and points don't fit its
    image, or why arrays that belong to boxes don't have one row per box; else None. values: None if
    the table holds none."""
    lengths = {name: each.shape[0] for name, each in facts.items() if each.shape}
    for name, value in values.items():
        if value is None:
            continue
        lengths[name] = len(value)
        refusal = _check_points(schema[name], value, facts)
        if refusal is not None:
            return Rejection(f"{name}: {refusal.reason}")
    for name, type in schema.of_type(Array).items():
        if type.of is None or name not in lengths or type.of not in lengths:
            continue
        if lengths[name] != lengths[type.of]:
            return Rejection(
                f'{name}: {lengths[name]} rows for the {lengths[type.of]} boxes of "{type.of}"'
            )
    return None


def _images(
    samples: Spans, schema: Schema, verify: Verify | None, *, max_pixels: int
) -> dict[str, list[Facts | Rejection | None]]:
    """Return the facts of all image fields, decoded together."""
    names = [name for name in schema.of_type(Image) if name in samples]
    places = [
        (name, row, sample)
        for name in names
        for row, sample in enumerate(samples[name])
        if sample is not None
    ]
    found: dict[str, list[Facts | Rejection | None]] = {
        name: [None] * len(samples[name]) for name in names
    }
    if not places:
        return found
    if verify is None:
        raise TypeError("examine: got images, wanted verify= to decode them")
    verdicts = image_verdicts([sample for _, _, sample in places], verify)
    for (name, row, sample), verdict in zip(places, verdicts, strict=True):
        if isinstance(verdict, ImageFacts) and not isinstance(sample, Rejection):
            shape = (verdict.height, verdict.width, verdict.channels)
            found[name][row] = pixel_refusal(
                verdict.width, verdict.height, max_pixels=max_pixels
            ) or _facts_of(sample, 0, shape, verdict.codec)
        else:
            assert isinstance(verdict, Rejection)
            found[name][row] = verdict
    return found


def _check(
    name: str, type: FieldType, data: Encoded, facts: Mapping[str, Facts]
) -> Facts | Rejection:
    """Check one field of one sample other than images and masks. facts: of its other fields."""
    match type:
        case Text():
            return _text(data)
        case Bytes():
            return _facts_of(data, 0, (), "bytes")
        case Audio() | Video():
            sniff = sniff_audio if isinstance(type, Audio) else sniff_video
            container = sniff(data[:MEDIA_HEAD_BYTES].tobytes())
            if isinstance(container, Rejection):
                return container
            return _facts_of(data, 0, (), container)
        case Array():
            return _array(name, data, type)
        case Tokens():
            return _array(name, data, Array(type.dtype, (None,)))
        case Boxes() | Keypoints():
            return _points(data, type, facts)
    raise ConfigError(
        f'schema["{name}"]: {type!r} is a value of a table or a JSON file. For a value in a file '
        'of its own (.npy) use an Array, such as Array("float32", ()).'
    )


def _facts_of(data: Encoded, start: int, shape: tuple[int, ...], codec: str) -> Facts:
    return Facts(crc32c(data[start:]), start, len(data) - start, shape, codec)


def _text(data: Encoded) -> Facts | Rejection:
    """Check that a text is UTF-8; a byte order mark at its start isn't part of it."""
    head = data[: len(_BOM)].tobytes()
    if head.startswith(_WIDE_BOMS):
        return Rejection("not UTF-8 text but UTF-16: convert it (iconv -f UTF-16 -t UTF-8)")
    start = len(_BOM) if head == _BOM else 0
    try:
        str(data.data[start:], "utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        return Rejection(f"not UTF-8 text (0x{int(data[at]):02X} at byte {at}): convert it")
    return _facts_of(data, start, (), "utf-8")


def _array(name: str, data: Encoded, type: Array) -> Facts | Rejection:
    header = read_npy_header(data)
    if isinstance(header, Rejection):
        return header
    misfit = array_misfit(header.codec.name, header.shape, type, field=name)
    if misfit is not None:
        return misfit
    is_bool = header.codec.dtype.kind == "b"
    if is_bool and len(data) > header.start and data[header.start :].max() > 1:
        return Rejection("damaged: booleans that are neither 0 nor 1")
    return _facts_of(data, header.start, header.shape, str(header.codec))


def _mask(data: Encoded, type: Mask, *, max_pixels: int) -> Facts | Rejection:
    codec = sniff_mask(data)
    if isinstance(codec, Rejection):
        return codec
    messages: list[str] = []
    if codec == "npy":
        classes = read_mask(data, codec, max_pixels=max_pixels)
    else:
        with strict_pillow() as messages:
            classes = read_mask(data, codec, max_pixels=max_pixels)
    if isinstance(classes, Rejection):
        return Rejection("; ".join((classes.reason, *messages)))
    codec = mask_codec(codec, classes)
    if type.dtype == "uint8" and mask_dtype(codec) != "uint8":
        return Rejection(TOO_WIDE)
    # The payload includes the header of an .npy file: masks are decoded from their bytes alone.
    return _facts_of(data, 0, (*classes.shape, 1), codec)


def _fitting(mask: Facts, type: Mask, facts: Mapping[str, Facts]) -> Facts | Rejection:
    """Return the mask if it has the size of its image, else a Rejection."""
    image = facts.get(type.of)
    if image is None:
        return Rejection(f'a mask without its image ("{type.of}")')
    if mask.shape[:2] != image.shape[:2]:
        return Rejection(
            f"it is {mask.shape[1]} wide and {mask.shape[0]} high, and its image is "
            f"{image.shape[1]} wide and {image.shape[0]} high"
        )
    return mask


def _points(
    data: Encoded, type: Boxes | Keypoints, facts: Mapping[str, Facts]
) -> Facts | Rejection:
    header = read_npy_header(data)
    if isinstance(header, Rejection):
        return header
    values = decode_array(data[header.start :], str(header.codec), header.shape)
    if (refusal := _check_points(type, values, facts)) is not None:
        return refusal
    columns = 4 if isinstance(type, Boxes) else 2
    shape = header.shape if len(header.shape) == 2 else (0, columns)
    return _facts_of(data, header.start, shape, str(header.codec))


def _check_points(
    type: FieldType, values: NDArray[Any], facts: Mapping[str, Facts]
) -> Rejection | None:
    """Check boxes against their image, and points by themselves."""
    if not isinstance(type, Boxes | Keypoints):
        return None
    image = facts.get(type.of)
    size = None if image is None else (image.shape[0], image.shape[1])
    return check_points(type, values, size)
