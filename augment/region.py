"""Whether a GPU decodes windows alone, or whole images that are cropped afterwards.

Decoding a region of a JPEG on the GPU is broken in nvImageCodec 0.9.0: reported to end the process
by SIGSEGV on an H100 and a B200, and to fail on an A100 and a GB200 (its issue 55; 0.8.0 was well).
Nothing in this process may find that out by trying. So a child does, once for each GPU: what
doesn't come back from it with the right pixels isn't used.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.recipe import CheckedRecipe

WindowDecoding = Literal["decoder", "slice"]

TIMEOUT_S = 60.0  # importing DALI and making a CUDA context takes some seconds

_LOG = logging.getLogger("penstock")
_CHILD = Path(__file__).with_name("region_child.py")
_found: dict[int, WindowDecoding] = {}
_finding = threading.Lock()


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial of window decoding showed. works: the child ended well; report: in words."""

    works: bool
    report: str


def window_decoding(recipe: CheckedRecipe, *, device: str, device_id: int | None) -> WindowDecoding:
    """How windows of this recipe are decoded: as `Decode(windows=)` says, "auto" by a trial at the
    first use on each GPU; on the CPU by the decoder, which is well there."""
    choice = recipe.decode.windows
    if choice != "auto":
        return choice
    return usable_decoding(device_id or 0) if device == "cuda" else "decoder"


def usable_decoding(device_id: int) -> WindowDecoding:
    """What works on a GPU, remembered for this process."""
    with _finding:
        if device_id not in _found:
            trial = try_out(device_id)
            _found[device_id] = "decoder" if trial.works else "slice"
            if trial.works:
                _LOG.info("cuda:%d decodes windows alone: %s", device_id, trial.report)
            else:
                _LOG.warning(
                    "cuda:%d: images are decoded whole and cropped afterwards, as decoding windows "
                    "alone doesn't work there: %s. Set Decode(windows=...) to override this.",
                    device_id,
                    trial.report,
                )
        return _found[device_id]


def try_out(
    device_id: int, *, child: Sequence[str] = (str(_CHILD),), timeout_s: float = TIMEOUT_S
) -> Trial:
    """Let a process of its own decode windows on a GPU. child: what Python runs there."""
    request = json.dumps({"path": sys.path, "device_id": device_id})
    # -P: our modules' folder isn't to be where the child looks first.
    command = [sys.executable, "-P", *child]
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Trial(False, f"a process that tried it didn't end within {timeout_s:g} s")
    except OSError as error:
        return Trial(False, f"no process could be started to try it ({error})")
    if done.returncode == 0:
        return Trial(True, done.stdout.strip() or "it was tried")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = f" ({lines[-1]})" if lines else ""
    if done.returncode < 0:
        return Trial(False, f"a process that tried it ended by {_name(-done.returncode)}{said}")
    return Trial(False, f"a process that tried it ended with {done.returncode}{said}")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
