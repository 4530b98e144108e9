"""Chunks of every codec that zarr-python writes are read back equal; damaged ones raise."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pyarrow as pa
import pytest
import zarr.codecs as v3
import zarr.codecs.numcodecs as guests
from numcodecs.abc import Codec as GuestCodec

from penstock.cache import DatasetError, MissingDependencyError
from penstock.readers.formats.zarr import decoder_of, lzma_decompressor
from tests.readers.formats.zarr.zarr_files import chunks, metadata_of, read, uses_zarr, written

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.formats import ChunkDecoder

pytestmark = pytest.mark.filterwarnings("ignore:.*Numcodecs codecs.*", "ignore:.*not in the Zarr.*")

DTYPES = (
    *("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *("M8[ns]", "m8[10s]", ">i4", ">f8", ">c8"),
)
INNER = ("lz4", "zstd", "zlib", "blosclz", "lz4hc")


def numbers(dtype: str, shape: tuple[int, ...] = (10, 7, 5)) -> NDArray[Any]:
    rng = np.random.default_rng(3)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind in "mM":
        return rng.integers(0, 10**9, shape).view(dtype)
    values = rng.normal(size=shape) * 50
    if kind == "c":
        return (values + 1j * rng.normal(size=shape)).astype(dtype)
    return np.abs(values).astype(dtype) if kind == "u" else values.astype(dtype)


def check(values: NDArray[Any], **options: Any) -> ChunkDecoder:
    files, wanted = written(values, **options)
    found, decoder = read(files)
    if wanted.dtype.kind in "mM":
        wanted = wanted.view(np.int64)
    assert found.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, wanted)
    return decoder


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_type_are_read_as_zarr_reads_them(dtype: str, version: int) -> None:
    assert not uses_zarr(check(numbers(dtype), chunks=(4, 3, 5), zarr_format=version))


V2 = [
    None,
    *(numcodecs.get_codec({"id": name}) for name in ("zstd", "gzip", "zlib", "bz2", "lzma", "lz4")),
    *(numcodecs.Blosc(name, 5, shuffle) for name in INNER for shuffle in (0, 1, 2)),
]


@pytest.mark.parametrize("codec", V2, ids=str)
def test_version_2_with_every_compressor_and_order(codec: Any) -> None:
    for order in "CF":
        options = {"zarr_format": 2, "chunks": (4, 3, 5), "compressors": codec, "order": order}
        assert not uses_zarr(check(numbers("f4"), **options))


FILTERS = [
    ("i4", [numcodecs.Delta("<i4")]),
    ("i4", [numcodecs.Delta("<i4", "<i2")]),
    ("f8", [numcodecs.FixedScaleOffset(0, 10, "<f8", "<i2")]),
    ("f8", [numcodecs.Quantize(3, "<f8", "<f4")]),
    ("f8", [numcodecs.BitRound(10)]),
    ("f8", [numcodecs.AsType("<f4", "<f8")]),
    ("bool", [numcodecs.PackBits()]),
    ("f8", [numcodecs.Shuffle(8)]),
    ("f8", [numcodecs.Shuffle(3)]),
    *(
        ("i4", [numcodecs.get_codec({"id": name})])
        for name in ("crc32", "adler32", "crc32c", "fletcher32", "jenkins_lookup3", "zlib", "zstd")
    ),
    ("i4", [numcodecs.Delta("<i4"), numcodecs.Shuffle(4)]),
]


@pytest.mark.parametrize(("dtype", "filters"), FILTERS, ids=str)
def test_version_2_with_every_filter(dtype: str, filters: list[Any]) -> None:
    for codec in (None, numcodecs.Zstd(), numcodecs.Blosc()):
        options = {"zarr_format": 2, "chunks": (4, 3, 5), "compressors": codec, "order": "F"}
        assert not uses_zarr(check(numbers(dtype), filters=filters, **options))


def v3_compressors() -> list[Any]:
    return [
        None,
        v3.ZstdCodec(checksum=True),
        v3.GzipCodec(),
        v3.Crc32cCodec(),
        [v3.ZstdCodec(), v3.Crc32cCodec()],
        [v3.GzipCodec(), v3.ZstdCodec()],
        [v3.ZstdCodec(), v3.BloscCodec(typesize=1)],
        *(v3.BloscCodec(cname=name, shuffle="bitshuffle") for name in INNER),
        *(guests.BZ2(), guests.LZMA(), guests.LZ4(), guests.Zlib(), guests.Zstd()),
        *(guests.Blosc(), guests.GZip(), guests.Shuffle(), guests.CRC32(), guests.CRC32C()),
        *(guests.Adler32(), guests.Fletcher32(), guests.JenkinsLookup3()),
        [guests.Shuffle(elementsize=4), v3.ZstdCodec()],
    ]


@pytest.mark.parametrize("shards", [None, (4, 4, 6)])
def test_version_3_with_every_compressor(shards: tuple[int, ...] | None) -> None:
    for codec in v3_compressors():
        for filters in ((), [v3.TransposeCodec(order=(2, 0, 1))], [guests.Delta(dtype="<f4")]):
            options = {"chunks": (4, 2, 3), "shards": shards, "filters": filters}
            values = numbers("f4", (5, 4, 7))
            assert not uses_zarr(check(values, compressors=codec, **options))


def test_version_3_with_every_filter_and_byte_order() -> None:
    for codec, dtype in (
        (guests.FixedScaleOffset(offset=0, scale=10, dtype="<f8", astype="<i2"), "f8"),
        (guests.FixedScaleOffset(offset=0, scale=10), "f8"),
        (guests.Quantize(digits=3), "f8"),
        (guests.BitRound(keepbits=9), "f8"),
        (guests.PackBits(), "bool"),
        (guests.AsType(encode_dtype="<f4", decode_dtype="<f8"), "f8"),
    ):
        for filters in ([codec], [v3.TransposeCodec(order=(2, 0, 1)), codec]):
            assert not uses_zarr(check(numbers(dtype), chunks=(4, 3, 5), filters=filters))
    for endian in ("little", "big"):
        for dtype in ("i4", "c8", "M8[s]", "u1", "bool"):
            serializer = v3.BytesCodec(endian=endian)
            for filters in ([], [v3.TransposeCodec(order=(2, 0, 1))]):
                options = {"serializer": serializer, "filters": filters, "chunks": (4, 3, 5)}
                assert not uses_zarr(check(numbers(dtype), **options))


def test_other_chains_are_decoded_by_zarr() -> None:
    shards = v3.ShardingCodec(chunk_shape=(2, 3, 5))
    for options in (
        {"serializer": shards, "compressors": [v3.GzipCodec()]},
        {"serializer": v3.BytesCodec(endian="big"), "filters": [guests.Delta(dtype="i4")]},
        {"filters": [guests.Quantize(digits=3), v3.TransposeCodec(order=(2, 0, 1))]},
    ):
        dtype = "i4" if "serializer" in options else "f8"
        assert uses_zarr(check(numbers(dtype), chunks=(4, 6, 5), **options))
    for dtype in ("M8[s]", "bool"):
        options = {"serializer": shards, "compressors": [v3.GzipCodec()], "chunks": (4, 6, 5)}
        assert uses_zarr(check(numbers(dtype), **options))


def damaged(files: dict[str, bytes]) -> tuple[Any, NDArray[np.uint8]]:
    metadata = metadata_of(files)
    _, data = next(iter(chunks(files, metadata)))
    return decoder_of(metadata), data


@pytest.mark.parametrize("codec", V2, ids=str)
def test_damaged_chunks_raise_value_errors_only(codec: Any) -> None:
    values = np.arange(12_000, dtype="u4") % 77
    files, _ = written(values, chunks=(12_000,), zarr_format=2, compressors=codec)
    decoder, data = damaged(files)
    rng = np.random.default_rng(1)
    buffer = np.empty(12_000, "u4")
    for cut in (0, 1, 5, 15, 16, 17, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match=r".+"):
            decoder.decode(data[:cut], buffer)
    for number in range(60):
        flipped = data.copy()
        flipped[rng.integers(0, min(len(data), 40) if number % 2 else len(data))] ^= 1 << number % 8
        with contextlib.suppress(ValueError):  # undetected damage has the right size
            assert decoder.decode(flipped).shape == (12_000,)


@pytest.mark.parametrize("name", ["zstd", "gzip", "zlib", "bz2", "lzma", "lz4", "blosc"])
def test_a_bomb_is_rejected_before_memory_is_allocated(name: str) -> None:
    codec = numcodecs.get_codec({"id": name})
    for options in ({}, {"filters": [codec]}):
        files, _ = written(
            np.ones(100, "u1"), chunks=(100,), zarr_format=2, compressors=codec, **options
        )
        decoder, _ = damaged(files)
        bomb = np.frombuffer(codec.encode(np.zeros(30_000_000, "u1")), np.uint8)
        with pytest.raises(ValueError, match=r"decodes to 30,000,000|holds more than"):
            decoder.decode(bomb)
        short = np.frombuffer(codec.encode(np.zeros(99, "u1")), np.uint8)
        with pytest.raises(ValueError, match=r".+"):
            decoder.decode(short)


def test_zstd_frames_without_a_size_and_several_frames() -> None:
    values = np.arange(50_000, dtype="u2")
    files, _ = written(values, chunks=(50_000,), compressors=v3.ZstdCodec())
    decoder, _ = damaged(files)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(values.tobytes())
    silent = np.frombuffer(sink.getvalue(), np.uint8)
    halves = [numcodecs.Zstd().encode(part) for part in np.split(values, 2)]
    assert (decoder.decode(silent) == values).all()
    assert (decoder.decode(np.frombuffer(b"".join(halves), np.uint8)) == values).all()
    with pytest.raises(ValueError, match="expected 100,000"):
        decoder.decode(np.frombuffer(halves[0], np.uint8))
    with pytest.raises(ValueError, match="zstd"):
        decoder.decode(silent[:-9])
    with pytest.raises(ValueError, match="expected 100,000"):
        decoder.decode(np.concatenate([silent, silent]))


def test_any_bytes_decode_to_valid_bools() -> None:
    files, _ = written(np.zeros(4, bool), chunks=(4,), compressors=None, fill_value=True)
    decoder, _ = damaged(files)
    assert decoder.decode(np.array([0, 1, 2, 255], np.uint8)).tolist() == [False, True, True, True]


def test_lzma_of_every_format_within_its_memory_limit() -> None:
    values = np.arange(1000, dtype="u1")
    raw = [{"id": 0x21, "dict_size": 2**16}]
    for options in ({"format": 1}, {"format": 2}, {"format": 3, "filters": raw}):
        data = numcodecs.LZMA(**options).encode(values)
        assert lzma_decompressor(options)().decompress(data) == values.tobytes()
    for options in (
        {"format": 9},
        {"format": 3},
        {"format": 3, "filters": [{"id": 0x21, "dict_size": 2**31}]},
        {"format": 3, "filters": [{"id": 99}]},
    ):
        files, _ = written(values, compressors=guests.LZMA())
        document = json.loads(files["zarr.json"])
        document["codecs"][-1]["configuration"] = options
        with pytest.raises(DatasetError, match=r"array.*codecs are invalid"):
            decoder_of(metadata_of({"zarr.json": json.dumps(document).encode()}))


def renamed(files: dict[str, bytes], **codec: Any) -> dict[str, bytes]:
    document = json.loads(files["zarr.json"])
    document["codecs"].append(codec)
    return {**files, "zarr.json": json.dumps(document).encode()}


def test_an_unknown_codec_is_named_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, _ = written(np.arange(4), chunks=(4,))
    for name, package in (("imagecodecs_jpegxl", "imagecodecs"), ("mine", "the package that")):
        with pytest.raises(MissingDependencyError, match=f"{name}.*{package}"):
            decoder_of(metadata_of(renamed(files, name=name, configuration={})))
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingDependencyError, match=r"mine.*penstock\[zarr\]"):
        decoder_of(metadata_of(renamed(files, name="mine", configuration={})))


def test_the_extra_is_named_if_numcodecs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = written(np.arange(4), chunks=(4,), compressors=v3.ZstdCodec())
    monkeypatch.setitem(sys.modules, "numcodecs.zstd", None)
    with pytest.raises(MissingDependencyError, match=r"'zstd'.*penstock\[zarr\]"):
        decoder_of(metadata_of(files))


class Inverted(GuestCodec):  # type: ignore[misc]
    """A codec of version 2 that another package registers."""

    codec_id = "inverted"

    def encode(self, buf: Any) -> Any:
        return ~np.asarray(buf).view("u1").reshape(-1)

    def decode(self, buf: Any, out: Any = None) -> Any:
        assert out is None
        if len(buf) < 4:
            raise RuntimeError("too short to be turned")
        return ~np.frombuffer(buf, "u1")


def test_a_codec_of_another_package_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numcodecs.registry.codec_registry, "inverted", Inverted)
    values = np.arange(24, dtype="f4").reshape(4, 6)
    check(values, chunks=(2, 6), zarr_format=2, compressors=Inverted())
    check(values, chunks=(2, 6), zarr_format=2, filters=[numcodecs.Base64()])
    files, _ = written(values, chunks=(2, 6), zarr_format=2, compressors=Inverted())
    decoder, data = damaged(files)
    with pytest.raises(ValueError, match="too short to be turned"):
        decoder.decode(data[:2])
    with pytest.raises(ValueError, match=r".+"):
        decoder.decode(data[:-4])


def test_the_configuration_of_a_codec_names_no_other_codec() -> None:
    files, _ = written(np.arange(4), chunks=(4,), compressors=None)
    codec = {"name": "numcodecs.crc32", "configuration": {"id": "pickle"}}
    decoder = decoder_of(metadata_of(renamed(files, **codec)))
    with pytest.raises(ValueError, match="crc32"):
        decoder.decode(np.frombuffer(numcodecs.Pickle().encode([1]), np.uint8))


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "transpose", "configuration": {"order": [0, 0]}},
        {"name": "numcodecs.crc32", "configuration": {"location": "middle"}},
        {"name": "numcodecs.delta", "configuration": {"dtype": "O"}},
        {"name": "numcodecs.delta", "configuration": {"dtype": "<i7"}},
        {"name": "numcodecs.lzma", "configuration": {"format": "x"}},
        {"name": "numcodecs.fixedscaleoffset", "configuration": {"scale": "x"}},
        {"name": "bytes", "configuration": {"endian": "middle"}},
    ],
    ids=lambda codec: codec["name"],
)
def test_invalid_codecs_are_named(codec: dict[str, Any]) -> None:
    files, _ = written(np.zeros((4, 4), "i4"), chunks=(4, 4))
    document = json.loads(files["zarr.json"])
    document["codecs"] = [codec, *document["codecs"]]
    with pytest.raises(DatasetError, match=r"array.*codecs are invalid"):
        decoder_of(metadata_of({"zarr.json": json.dumps(document).encode()}))
