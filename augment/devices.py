"""Check the device of a graph, and try if it can decode windows of images.

Decoding a region of a JPEG on the GPU is broken in nvImageCodec 0.9.0: reportedly it ends the
process by SIGSEGV on an H100 and a B200, and fails on an A100 and a GB200 (its issue 55; 0.8.0
worked). A trial would end this process, so a child process tries it (`region_child`), once for each
GPU. Unless it gets the right pixels, images are decoded in full and cropped afterwards.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.cache import ConfigError, describe_exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.recipe import CheckedRecipe


def checked_device(device: str, device_id: int | None) -> int | None:
    """Return the CUDA ordinal of a checked device; None for the CPU. device_id: None: torch's
    current one.

    Raises ConfigError for a device that doesn't exist.
    """
    if device == "cpu":
        return None
    if device != "cuda":
        raise ConfigError(f'device: got {device!r}, wanted "cpu" or "cuda".')
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            'device="cuda": torch finds no GPU. Pass device="cpu", or check the driver, '
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build."
        )
    count = torch.cuda.device_count()
    number = torch.cuda.current_device() if device_id is None else device_id
    if not 0 <= number < count:
        raise ConfigError(f'device="cuda:{number}": this process sees {count} GPU(s), from 0.')
    return number


WindowDecoding = Literal["decoder", "slice"]

TRIAL_TIMEOUT_S = 60.0  # importing DALI and creating a CUDA context takes some seconds

_LOG = logging.getLogger("penstock")
_CHILD = Path(__file__).with_name("region_child.py")
decoding_by_gpu: dict[int, WindowDecoding] = {}
_trial_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class WindowTrial:
    """The result of a trial of window decoding. works: the child succeeded. report: what it found,
    as text."""

    works: bool
    report: str


def window_decoding(recipe: CheckedRecipe, device_id: int | None) -> WindowDecoding:
    """Return how windows of this recipe are decoded: as in `Decode(windows=)`; "auto" runs a trial
    at the first use on each GPU. On the CPU (None) the decoder decodes windows correctly."""
    choice = recipe.decode.windows
    if choice != "auto":
        return choice
    return "decoder" if device_id is None else usable_decoding(device_id)


def usable_decoding(device_id: int) -> WindowDecoding:
    """Return the way of decoding windows that works on a GPU; the process keeps the result."""
    with _trial_lock:
        if device_id not in decoding_by_gpu:
            trial = try_window_decoding(device_id)
            decoding_by_gpu[device_id] = "decoder" if trial.works else "slice"
            if trial.works:
                _LOG.info("cuda:%d decodes only windows: %s", device_id, trial.report)
            else:
                _LOG.warning(
                    "cuda:%d: images are decoded in full and cropped afterwards, as decoding only "
                    "windows doesn't work there: %s. Set Decode(windows=...) to override this.",
                    device_id,
                    trial.report,
                )
        return decoding_by_gpu[device_id]


def try_window_decoding(
    device_id: int, *, child: Sequence[str] = (str(_CHILD),), timeout_s: float = TRIAL_TIMEOUT_S
) -> WindowTrial:
    """Try to decode windows on a GPU in a child process. child: arguments of its Python."""
    request = json.dumps({"path": sys.path, "device_id": device_id})
    # -P: the child must not search this module's folder first.
    command = [sys.executable, "-P", *child]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return WindowTrial(False, f"a process that tried it didn't end within {timeout_s:g} s")
    except OSError as error:
        return WindowTrial(False, f"no process could be started to try it ({error})")
    if done.returncode == 0:
        return WindowTrial(True, done.stdout.strip() or "it was tried")
    last_line = done.stderr.strip().rpartition("\n")[2]
    end = describe_exit(done.returncode)
    return WindowTrial(False, f"a process that tried it {end} ({last_line or 'it wrote nothing'})")
