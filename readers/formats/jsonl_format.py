"""Read files with one JSON object a line (`.jsonl`): a line is a sample, its text is the field
"json".

A recipe's `Map` parses the text and returns what the model needs, such as the tokens of a
conversation. So nothing is guessed about keys, which may differ from line to line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.fieldtypes import FieldTypes, Text
from penstock.readers.files import is_passed_over
from penstock.readers.formats.record_format import RecordFormat, Records, RecordSpans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry, Origin


_JSON = "json"
_METADATA = b"metadata.jsonl"  # Hugging Face's name for a table that describes other files
_PIECE_BYTES = 2**24
_OPEN, _CLOSE = b"{}"
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


class JsonlFormat(RecordFormat):
    """Files of JSON objects, one a line. Empty lines are skipped."""

    name = "jsonl"
    suffix = ".jsonl"
    least_sample_bytes = 2

    def recognises(self, origin: Origin) -> bool:
        """Return True if all files are JSONL files. A JSONL file next to folders or files of other
        kinds is a table that describes these."""
        names, arrangement = origin.names(), origin.arrangement
        if arrangement.manifest is not None or arrangement.places:
            return False
        if origin.selection is None and not all(map(is_passed_over, names.folders)):
            return False
        own = [name.rpartition(b"/")[2] for name in names.files]
        return bool(own) and _METADATA not in own and all(map(self.is_file, own))

    def schema(self, origin: Origin) -> FieldTypes:
        """Return the only field: the text of a line."""
        return {_JSON: Text()}

    def records(self, file: DataFile, entry: Entry, beside: Mapping[str, bytes]) -> Records:
        """Return the lines of a file that aren't empty."""
        spans: list[tuple[int, int]] = []
        names: list[bytes] = []
        rejected: dict[int, str] = {}
        start, line, rest = 0, 0, b""
        for at in range(0, entry.size_bytes, _PIECE_BYTES):
            piece = rest + file.read_at(at, min(_PIECE_BYTES, entry.size_bytes - at))
            *lines, rest = piece.split(b"\n")
            if at + _PIECE_BYTES >= entry.size_bytes:
                lines.append(rest)
            for text in lines:
                line += 1
                content = text.removeprefix(_BOM) if line == 1 else text
                if content := content.strip(_BLANK):
                    if content[0] != _OPEN or content[-1] != _CLOSE:
                        rejected[len(spans)] = "it is no JSON object: wanted {…} on one line"
                    spans.append((start, len(text)))
                    names.append(b"%d" % line)
                start += len(text) + 1
        starts, sizes = np.array(spans, np.int64).reshape(-1, 2).T
        return Records(spans={_JSON: RecordSpans(starts, sizes)}, names=names, rejected=rejected)


FORMAT = JsonlFormat()
