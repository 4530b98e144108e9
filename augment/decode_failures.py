"""Distinguish bad samples from a failing machine when a run of DALI fails, and find the samples.

DALI seldom names the bad samples of a failed batch (42 of 212 times), so parts of it are run
separately until each bad sample is alone. But a lost device, an unsupported data type or a lack of
memory would make every good sample look bad. So DALI's message decides (`fault_of`); the known
messages are those in the libraries of DALI 2.4 and nvImageCodec 0.9.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from penstock.cache import CorruptSampleError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

Fault = Literal["memory", "machine", "sample", "unclear"]

SPLIT_WAYS = 4  # parts of a failed run: 20 decodes find one bad sample of 16; halving: 30
NO_IMAGE = "its bytes are no image that DALI knows"

_NAMED_IDS = 5  # additional sample ids in one message

_MEMORY = re.compile(
    r"out[ _]of[ _]memory|bad_alloc|can't allocate|cannot allocate|alloc\w* fail|"
    r"allocator_failure|memoryallocation|failed to allocate",
    re.IGNORECASE,
)
_MACHINE = re.compile(
    r"CUDA_ERROR_|cudaError|CUDA (?:driver|runtime)|nvImageCodec failure|CUDA-capable|cuInit|NVML|"
    r"\bnvjpeg\w* (?:error|failure|status)|NVJPEG_STATUS_(?!BAD_JPEG|JPEG_NOT)|"
    r"\bNPP\w* (?:error|status)|cuFFT|"
    r"unsupported (?:data )?types?\b|unsupported (?:data )?type:|no kernel image|"
    r"invalid device function|device-side assert|illegal memory access|unspecified launch failure|"
    r"illegal instruction|misaligned address|peer access|driver version|"
    r"no data was provided",
    re.IGNORECASE,
)
_SAMPLE = re.compile(
    r"failed to decode|cropping window|not valid for image dimensions|out of bounds|"
    r"invalid sample_type|truncated|corrupt|do not decode|are no image",
    re.IGNORECASE,
)
_NVIMGCODEC = re.compile(r"nvImageCodec failure: '#(\d+)'|NVIMGCODEC_STATUS_(\w+)", re.IGNORECASE)
# nvImageCodec's codes for bytes that it can't parse; 17 is an internal error, and also the code of
# its PNG parser for a truncated file.
_BAD_BYTES_CODES = {3, 4, 13, 14, 17, 19}
_BAD_BYTES_NAMES = {"CODESTREAM", "CODE_STREAM", "BITSTREAM"}
_MEMORY_CODES = {5, 15}


def failing_rows(
    rows: list[int], run: Callable[[list[int]], None], size: int | None = None
) -> dict[int, str]:
    """Return the rows that fail alone, with reasons; every other row was in a successful run.

    run: decodes some rows together; raises DALI's RuntimeError if one of them fails, and
    DeviceError, which ends the search, if none is the cause. size: rows of the first runs; None:
    all of them.
    """
    failing: dict[int, str] = {}
    parts = split_rows(rows, size or len(rows) or 1)
    while parts:
        part = parts.pop(0)
        try:
            run(part)
        except DeviceError:  # a RuntimeError too
            raise
        except RuntimeError as error:
            if len(part) == 1:
                failing[part[0]] = reason_of(error)
            else:
                parts[:0] = split_rows(part, -(-len(part) // SPLIT_WAYS))
    return failing


def split_rows(rows: list[int], size: int) -> list[list[int]]:
    """Return the rows in parts of `size`; the last one may be smaller."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def fault_of(error: BaseException) -> Fault:
    """Return the cause of a failed run by DALI's message; "unclear" for an unknown message."""
    text = _message(error)
    if _MEMORY.search(text):
        return "memory"
    if found := _NVIMGCODEC.search(text):
        code, name = int(found[1] or 0), (found[2] or "").upper()
        if code in _MEMORY_CODES:
            return "memory"
        is_bad = code in _BAD_BYTES_CODES or any(part in name for part in _BAD_BYTES_NAMES)
        return "sample" if is_bad else "machine"
    if _MACHINE.search(text):
        return "machine"
    return "sample" if not text or _SAMPLE.search(text) else "unclear"


def check_machine(error: BaseException, *, remedy: str = "a smaller batch") -> None:
    """Raise DeviceError if no sample is the cause. remedy: a change that needs less memory."""
    fault = fault_of(error)
    if fault == "memory":
        raise DeviceError(
            f"DALI ran out of memory while decoding a batch ({_message(error)}). Use {remedy}."
        ) from error
    if fault == "machine":
        raise machine_error(_message(error)) from error


def machine_error(reason: str) -> DeviceError:
    """Return the error for a failure of the device, its driver, DALI or the recipe."""
    return DeviceError(
        f"DALI failed, and no sample is the cause: {reason}. Check `nvidia-smi` and `penstock "
        'doctor`. If neither reports a problem, run on the CPU (device="cpu"): if that fails too, '
        "the recipe is at fault, else the driver, the GPU or DALI's version."
    )


def reason_of(error: BaseException) -> str:
    """Return DALI's reason in one line, without the traceback of the graph's definition."""
    reason = _message(error)
    if not reason or reason.startswith("Failed to decode sample"):
        return "its bytes do not decode"
    if reason.startswith("nvImageCodec failure") and fault_of(error) == "sample":
        return NO_IMAGE
    return reason


def is_unclear(reason: str) -> bool:
    """Return True if a reason names no known cause, neither the bytes nor the machine."""
    return fault_of(RuntimeError(reason)) == "unclear"


def _message(error: BaseException) -> str:
    # A traceback of the definition with the user's paths comes before it.
    text = str(error).rpartition("encountered:")[2].partition("C++ context")[0]
    lines = [line.strip(" :") for line in text.splitlines()]
    return " ".join(
        line
        for line in lines
        if line
        and "no longer valid" not in line
        and not line.startswith("Critical error in pipeline")
    )


def corrupt_sample_error(culprits: dict[int, str]) -> CorruptSampleError:
    """Return the error for bad samples. culprits: reasons by sample id, at least one."""
    (sample_id, reason), *others = sorted(culprits.items())
    named = ", ".join(str(number) for number, _ in others[:_NAMED_IDS])
    also = f" The same holds for {len(others)} more: {named}." if others else ""
    return CorruptSampleError(
        f"Sample {sample_id} can't be decoded: {reason}.{also} Leave it out of the dataset (a "
        "native one: dataset.subset), or repair or delete it in the source and index or pack that "
        "again.",
        sample_id=sample_id,
    )
