"""Tar headers: the same members as Python's tarfile, or an error that names the offset."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import DatasetError, PenstockError
from penstock.readers.formats.tar import EXTENDED_BYTES, TarMember, archive_members
from tests.properties import examples
from tests.tars import END, archive, header, padded, special

NAMES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=20),
    st.text("abc.é/", min_size=90, max_size=300).map(lambda t: f"x{t}y"),
)


def parse(data: bytes) -> list[TarMember]:
    """All members of an archive in memory."""
    return list(archive_members(lambda at, n: data[at : at + n], len(data), shown="t.tar"))


@examples(100)
@given(
    files=st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=6),
    format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_members_are_those_that_tarfile_reads(files: list[tuple[str, bytes]], format: int) -> None:
    data = archive(files, format=format)
    found = parse(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        wanted = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isfile()]
    got = [(m.name.decode().rstrip("/"), m.start, m.end - m.start) for m in found]
    assert got == wanted
    assert [data[m.start : m.end] for m in found] == [content for _, content in files]


BASE = archive({"a.jpg": b"x" * 700, "a.cls": b"1", "n" * 200 + ".txt": b"long"})


@examples(200)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(BASE) - 1), st.integers(0, 255)), max_size=8),
    cut=st.integers(0, len(BASE)),
)
def test_damage_yields_members_within_the_file_or_an_error(
    flips: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(BASE)
    for at, value in flips:
        data[at] = value
    try:
        found = parse(bytes(data[:cut] if cut % 3 == 0 else data))
    except PenstockError:
        return
    assert all(0 <= m.start <= m.end <= len(data) for m in found)


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 700, 1024, 1536, 2047, 2048, 3000])
def test_a_truncated_archive_is_rejected_with_its_name_and_offset(cut: int) -> None:
    whole = archive({"a.jpg": b"x" * 700, "a.cls": b"1"})
    assert len(parse(whole)) == 2
    with pytest.raises(DatasetError, match=r"t\.tar: .*at byte \d+.*Fetch or write"):
        parse(whole[:cut])


@pytest.mark.parametrize(
    "field", [b"\x80" + b"\0" * 3 + b"\x10" + b"\0" * 7, b"77777777777\0", b"\xff" * 12, b"9" * 12]
)
def test_an_impossible_size_is_rejected_without_an_allocation(field: bytes) -> None:
    data = header("a.jpg", 0, size_field=field) + bytes(512) + END
    tracemalloc.start()
    with pytest.raises(DatasetError, match=r"bytes, and 1536 are left|isn't a number"):
        parse(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_pax_size_of_exabytes_and_malformed_records_are_refused() -> None:
    for record in (b"27 size=9000000000000000000\n", b"99 path=a\n", b"5 a\n", b"x", b"8 size=-\n"):
        data = header("pax", len(record), b"x") + padded(record) + header("a", 0) + END
        with pytest.raises(DatasetError, match="at byte"):
            parse(data)
    long = EXTENDED_BYTES + 1
    data = header("pax", long, b"x") + padded(bytes(long)) + header("a", 0) + END
    with pytest.raises(DatasetError, match="1048577"):
        parse(data)
    record = b"11 path=ab\n"
    data = header("pax", len(record), b"g") + padded(record) + header("a", 0) + END
    with pytest.raises(DatasetError, match="global"):
        parse(data)


def test_a_wrong_checksum_is_refused() -> None:
    data = bytearray(header("a.jpg", 3) + padded(b"abc") + END)
    data[3] ^= 1
    with pytest.raises(DatasetError, match=r"at byte 0: .*checksum"):
        parse(bytes(data))


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6"])
def test_links_and_devices_are_rejected_and_other_members_are_read(kind: bytes) -> None:
    data = special("evil.jpg", kind) + header("b.jpg", 3) + padded(b"abc") + END
    evil, good = parse(data)
    assert evil.refused
    assert (good.name, good.refused, data[good.start : good.end]) == (b"b.jpg", None, b"abc")


def test_sparse_and_unknown_members_are_rejected_and_skipped() -> None:
    block = header("s.jpg", 3, b"S")
    data = block + padded(b"abc") + header("q.jpg", 2, b"Q") + padded(b"hi")
    record = b"22 GNU.sparse.major=1\n"
    data += header("pax", len(record), b"x") + padded(record) + header("p.jpg", 1) + padded(b"x")
    found = parse(data + header("b.jpg", 0) + END)
    assert [(m.name, bool(m.refused)) for m in found] == [
        (b"s.jpg", True),
        (b"q.jpg", True),
        (b"p.jpg", True),
        (b"b.jpg", False),
    ]
    long = bytearray(block)
    long[482] = 1  # a further block of the map follows
    long[148:156] = b" " * 8
    long[148:156] = b"%06o\0 " % sum(long)
    with pytest.raises(DatasetError, match="--sparse"):
        parse(bytes(long) + bytes(512) + padded(b"abc") + END)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_the_error_for_a_compressed_archive_names_the_remedy(pack: object) -> None:
    with pytest.raises(DatasetError, match="Decompress it"):
        parse(pack(BASE))  # type: ignore[operator]


def test_volumes_and_joined_archives_are_refused() -> None:
    with pytest.raises(DatasetError, match="multi-volume"):
        parse(header("a.jpg", 3, b"M") + padded(b"abc") + END)
    with pytest.raises(DatasetError, match="data follow the archive's end mark"):
        parse(BASE + BASE)
