"""Which container sound or video comes in, by its first bytes; nothing is decoded yet."""

from __future__ import annotations

from penstock.readers.types import Rejection

HEAD_BYTES = 192
"""As many first bytes as these functions look at."""

_ASF = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"
_MATROSKA = b"\x1aE\xdf\xa3"
_TS_PACKET_BYTES = 188


def sniff_audio(head: bytes) -> str | Rejection:
    """The container of a piece of sound by its first HEAD_BYTES bytes, or why it is none."""
    if not head:
        return Rejection("empty file")
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    for magic, container in (
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"ID3", "mp3"),
        (b".snd", "au"),
        (_ASF, "wma"),
        (_MATROSKA, "webm"),
    ):
        if head.startswith(magic):
            return container
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    if head[4:8] == b"ftyp":
        return "mp4"
    if len(head) > 1 and head[0] == 0xFF:
        if head[1] & 0xF6 == 0xF0:  # ADTS: the sync word, then layer 0
            return "aac"
        if head[1] & 0xE0 == 0xE0 and head[1] & 0x06:
            return "mp3"
    return Rejection("not sound (its first bytes are of no known sound format)")


def sniff_video(head: bytes) -> str | Rejection:
    """The container of a video by its first HEAD_BYTES bytes, or why it is none."""
    if not head:
        return Rejection("empty file")
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    for magic, container in (
        (_MATROSKA, "webm"),
        (b"OggS", "ogg"),
        (b"FLV", "flv"),
        (b"\x00\x00\x01\xba", "mpeg"),
        (b"\x00\x00\x01\xb3", "mpeg"),
        (_ASF, "wmv"),
    ):
        if head.startswith(magic):
            return container
    if head[:1] == head[_TS_PACKET_BYTES : _TS_PACKET_BYTES + 1] == b"G":
        return "ts"
    return Rejection("not a video (its first bytes are of no known video format)")
