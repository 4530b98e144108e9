"""Offer the compiled pass of `resample_kernels` as a DALI operator, if numba is installed.

DALI's NumbaFunction compiles Python functions and passes their addresses to its operator. These
functions are already compiled, so the two methods that compile are replaced. DALI calls the
functions in its decode threads, without the GIL.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.dali_library import fn, types

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_LOG = logging.getLogger("penstock")


@functools.cache
def _operator() -> Callable[..., Any] | None:
    """Return the operator that calls a function of `resample_kernels` by name, or None."""
    try:
        from nvidia.dali.plugin.numba import NumbaFunction

        from penstock.augment import resample_kernels as kernels
    except ImportError as error:  # numba is optional, and rejects unknown versions of numpy
        _LOG.info("resizing by DALI's own operators: the compiled pass isn't available (%s)", error)
        return None
    except Exception:  # a failing compiler must not stop the job
        _LOG.warning(
            "The compiled resize failed to compile, so DALI's own operators resize, at about half "
            "the speed. Try another version of numba.",
            exc_info=True,
        )
        return None

    class Compiled(NumbaFunction):
        def _get_setup_fn_cpu(self, _setup_fn: Any) -> int:
            return int(kernels.shape_like.address)

        def _get_run_fn_cpu(self, run_fn: Any, *_: Any) -> int:
            return int(getattr(kernels, run_fn).address)

    return Compiled


def is_compiled() -> bool:
    """Return True if the compiled pass is available. The first call imports numba, and on a new
    machine compiles for some seconds."""
    return _operator() is not None


def fits_planes(shape: tuple[int, int, int]) -> bool:
    """Return True if `planes_like` supports this shape: an input of the output's shape holds the
    factors and summands of all channels."""
    return shape[1] * shape[2] >= 2


def planes_like(
    shape: tuple[int, int, int], scaling: tuple[Sequence[float], Sequence[float]] | None
) -> NDArray[np.float32]:
    """Return the array that makes `resize` return normalised planes. shape: channels, height,
    width. scaling: mean and standard deviation by channel in units of 0..1, or None."""
    like = np.zeros(shape, np.float32)
    norm = np.array([[1.0, 0.0]] * shape[0])
    if scaling is not None:  # pixels come as 0..255
        mean, std = np.array(scaling)
        norm = np.stack([1 / (255 * std), -mean / std], axis=1)
    like.reshape(-1)[: norm.size] = norm.reshape(-1)
    return like


def resize(
    images: Any,
    like: NDArray[Any],
    *,
    region: tuple[Any, Any] | None,
    filtered: Any,
    mirror: Any = None,
) -> Any:
    """Resize and mirror images to the shape and dtype of `like`: float32 planes (`planes_like`), or
    pixels, uint8, HWC, rounded half up.

    images: uint8, HWC, on the CPU. region: (low, high), float32 (y, x) in pixels; None: the full
    image. filtered: antialias, a bool or a bool node. mirror: an int32 node, or None.
    """

    def constant(value: Any, **kind: Any) -> Any:
        return types.Constant(value, device="cpu", **kind)

    whole = constant(np.zeros(2, np.float32))
    low, high = region or (whole, whole)
    if isinstance(filtered, bool):
        filtered = constant(filtered, dtype=types.BOOL)
    if mirror is None:
        mirror = constant(0, dtype=types.INT32)
    name, out = ("to_pixels", types.UINT8) if like.dtype == np.uint8 else ("to_planes", types.FLOAT)
    kinds = [types.UINT8, types.FLOAT, types.FLOAT, types.BOOL, types.INT32, out]
    given = images, low, high, filtered, mirror, constant(like)
    return _run(name, out, kinds, [3, 1, 1, 0, 0, 3], *given)


def equalize(images: Any) -> Any:
    """Equalize the histogram of each channel, uint8, HWC, on the CPU."""
    return fn.reshape(_run("equalize", types.UINT8, [types.UINT8], [3], images), layout="HWC")


def _run(name: str, out: Any, kinds: list[Any], dimensions: list[int], *given: Any) -> Any:
    """Call a function of `resample_kernels`, whose result has the shape of the last input."""
    operator = _operator()
    assert operator is not None  # the caller has checked is_compiled()
    return operator(name, [out], kinds, [3], dimensions, device="cpu")(*given)
