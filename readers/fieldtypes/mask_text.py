"""Parse the JSON of a sample's segmentations without the GIL, compiled by numba.

Python's own parser makes an object of each number, and holds the GIL for longer than drawing the
masks takes. This one reads what COCO's annotations have: lists of plain numbers, and objects with a
size and counts. It rejects everything else; the caller then parses the text with `json`, and finds
the reason if it is wrong. A number of at most 15 digits, divided by a power of ten, is the float64
that is nearest to the text, as Python's is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from penstock.readers.fieldtypes.mask_kernels import (
    BEGIN,
    COUNTS,
    END,
    INSTANCE,
    KIND,
    MOST,
    POLYGON,
    TEXT,
    compiled,
    first_wrong,
)

_DIGITS = 15
_TENS = 10.0 ** np.arange(_DIGITS + 1)
_ZERO, _NINE, _MINUS, _POINT, _COMMA, _COLON = (ord(each) for each in "09-.,:")
_OPEN, _CLOSE, _OBJECT, _OBJECT_END, _QUOTE, _ESCAPE = (ord(each) for each in '[]{}"\\')
_NULL, _SIZE, _COUNTS = (np.frombuffer(each, np.uint8) for each in (b"null", b'size"', b'counts"'))
_LEAST = 6  # numbers of a polygon
SPARE = 16
"""The number of zeros that end a text."""

_helper: Any = njit(nogil=True, error_model="numpy")


@_helper
def _skip(text: Any, place: Any) -> Any:
    """Return the next place that isn't white space. The text ends with zeros."""
    while text[place] == 32 or 9 <= text[place] <= 10 or text[place] == 13:
        place += 1
    return place


@_helper
def _is_at(text: Any, place: Any, word: Any) -> Any:
    same = 0
    for i in range(len(word)):
        same += text[place + i] == word[i]
    return same == len(word)


@_helper
def _number(text: Any, place: Any) -> Any:
    """Return the number at a place and the place after it, or 0 if it isn't a plain number."""
    sign, digits, decimals = 1.0, 0, 0
    if text[place] == _MINUS:
        sign, place = -1.0, place + 1
    begin = place
    while _ZERO <= text[place] <= _NINE and place - begin <= _DIGITS:
        digits, place = 10 * digits + (text[place] - _ZERO), place + 1
    if place == begin or (text[begin] == _ZERO and place > begin + 1):
        return 0.0, 0
    if text[place] == _POINT:
        point = place = place + 1
        while _ZERO <= text[place] <= _NINE and place - begin <= _DIGITS + 1:
            digits, place = 10 * digits + (text[place] - _ZERO), place + 1
        decimals = place - point
        begin += 1
        if decimals == 0:
            return 0.0, 0
    if place - begin > _DIGITS:
        return 0.0, 0
    return sign * (np.float64(digits) / _TENS[decimals]), place


@_helper
def _list(text: Any, place: Any, out: Any, count: Any) -> Any:
    """Write the numbers of a list after the first count ones. place: after its bracket. Returns
    how many there are then, and the place after the list, or 0."""
    while True:
        value, place = _number(text, _skip(text, place))
        if place == 0 or abs(value) > MOST or count == len(out):
            return count, 0
        out[count] = value
        count, place = count + 1, _skip(text, place)
        if text[place] == _CLOSE:
            return count, place + 1
        if text[place] != _COMMA:
            return count, 0
        place += 1


@_helper
def _string(text: Any, place: Any, out: Any, count: Any) -> Any:
    """Write the characters of a text after the first count ones, as `_list` does."""
    while text[place] != _QUOTE:
        if text[place] == _ESCAPE:  # a code may have the character that JSON escapes
            place += 1
            if text[place] != _ESCAPE:
                return count, 0
        if not 32 <= text[place] < 128:
            return count, 0
        out[count], count, place = text[place], count + 1, place + 1
    return count, place + 1


@_helper
def _polygons(
    text: Any, place: Any, box: Any, numbers: Any, parts: Any, count: Any, rows: Any
) -> Any:
    """Write the polygons of a box. Returns the numbers and the rows then, and the place after the
    list, or 0."""
    while True:
        place = _skip(text, place)
        if text[place] != _OPEN:
            return count, rows, 0
        end, place = _list(text, place + 1, numbers, count)
        if place == 0 or end - count < _LEAST or (end - count) % 2 or rows == len(parts):
            return count, rows, 0
        row = parts[rows]
        row[INSTANCE], row[BEGIN], row[END], row[KIND] = box, count, end, POLYGON
        count, rows, place = end, rows + 1, _skip(text, place)
        if text[place] == _CLOSE:
            return count, rows, place + 1
        if text[place] != _COMMA:
            return count, rows, 0
        place += 1


@_helper
def _key(text: Any, place: Any, word: Any) -> Any:
    """Return the place of the value of a key, or 0 if another one is there."""
    place = _skip(text, place)
    if text[place] != _QUOTE or not _is_at(text, place + 1, word):
        return 0
    place = _skip(text, place + 1 + len(word))
    return _skip(text, place + 1) if text[place] == _COLON else 0


@_helper
def _runs(
    text: Any, place: Any, box: Any, max_pixels: Any, numbers: Any, texts: Any, row: Any, found: Any
) -> Any:
    """Write the part of the runs of a box, whose size must be that of the others. found: as of
    `scan`. Returns the place after the object, or 0."""
    size = np.zeros(2)
    row[INSTANCE], row[KIND] = box, -1
    for member in range(2):
        at = _key(text, place, _SIZE)
        if at:
            if text[at] != _OPEN:
                return 0
            count, place = _list(text, at + 1, size, 0)
            if place == 0 or count != 2:
                return 0
        else:
            at = _key(text, place, _COUNTS)
            if at == 0 or row[KIND] >= 0:
                return 0
            if text[at] == _QUOTE:
                row[BEGIN] = found[2]
                found[2], place = _string(text, at + 1, texts, found[2])
                row[END], row[KIND] = found[2], TEXT
            elif text[at] == _OPEN:
                row[BEGIN] = found[1]
                found[1], place = _list(text, at + 1, numbers, found[1])
                row[END], row[KIND] = found[1], COUNTS
            else:
                return 0
            if place == 0:
                return 0
        place = _skip(text, place)
        if text[place] != (_OBJECT_END if member else _COMMA):
            return 0
        place += 1
    height, width = np.int64(size[0]), np.int64(size[1])
    if height != size[0] or width != size[1] or height < 1 or width < 1:
        return 0
    if height * width > max_pixels or (found[4] and (found[4] != height or found[5] != width)):
        return 0
    found[4], found[5] = height, width
    if row[KIND] == COUNTS:
        for i in range(row[BEGIN], row[END]):
            if numbers[i] < 0 or numbers[i] != np.floor(numbers[i]):
                return 0
    return place if row[KIND] >= 0 else 0


@compiled("boolean(uint8[::1], int64, float64[::1], uint8[::1], int64[:, ::1], int64[::1])")
def scan(text: Any, max_pixels: Any, numbers: Any, texts: Any, parts: Any, found: Any) -> Any:
    """Parse the segmentations of a sample, and return True if they are right and of this form.

    text: ends with `SPARE` zeros. numbers, texts, parts: get the content, as `Segmentations` has
    it; of half, all and an eighth of the text's length. found: zeros, int64, gets the boxes, the
    length of each of the three, and the height and width that runs record, or 0.
    """
    place, boxes, rows = _skip(text, 0), 0, 0
    if text[place] != _OPEN:
        return False
    place = _skip(text, place + 1)
    if text[place] == _CLOSE:
        return _skip(text, place + 1) == len(text) - SPARE
    while True:
        if _is_at(text, place, _NULL):
            place += len(_NULL)
        elif text[place] == _OPEN:
            found[1], rows, place = _polygons(
                text, place + 1, boxes, numbers, parts, found[1], rows
            )
        elif text[place] == _OBJECT and rows < len(parts):
            place = _runs(text, place + 1, boxes, max_pixels, numbers, texts, parts[rows], found)
            rows += 1
        else:
            return False
        if place == 0:
            return False
        boxes, place = boxes + 1, _skip(text, place)
        if text[place] == _CLOSE:
            break
        if text[place] != _COMMA:
            return False
        place = _skip(text, place + 1)
    found[0], found[3] = boxes, rows
    if _skip(text, place + 1) != len(text) - SPARE:
        return False
    return first_wrong(numbers, texts, parts[:rows], found[4] * found[5]) < 0
