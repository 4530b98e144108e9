"""Define DALI nodes that several operations share: selection of samples, blends, level changes.

They are called inside pipeline definitions and only connect DALI's nodes. Images are uint8, HWC, in
and out, on the CPU or the GPU; numbers of samples come from the CPU.

Measured with DALI 2.4 on the CPU: each arithmetic operator is a pass over memory of its own, not a
part of a fused expression, so int16 takes half as long as float32; rounding float32 to uint8 takes
1.1 ms for an image of 224 x 224, int16 to uint8 0.3, and uint8 times a factor to int16 0.1. Casting
float pixels to uint8 is slow, 1.7 in fn.cast, so contrast and autocontrast use operators that cast
internally.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Nodes = dict[str, Any]

_MAX_LEVEL = 255


def if_else(
    nodes: Nodes, predicate: Any, then: Callable[[Nodes], Any], other: Callable[[Nodes], Any]
) -> Any:
    """Return then(nodes) for samples for which `predicate` is true, and other(nodes) for the rest.

    It splits and merges batches as DALI's own `if`, without copying pixels.
    """
    from nvidia.dali import fn

    conditional: Any = fn._conditional  # type: ignore[attr-defined]  # made at import time
    true, false = {}, {}
    for name, node in nodes.items():
        true[name], false[name] = conditional.split(node, predicate=predicate, _if_stmt=True)
    return conditional.merge(then(true), other(false), predicate=predicate)


def uint8(images: Any) -> Any:
    """Return pixels that are rounded and clipped to 0..255."""
    from nvidia.dali import fn, types

    return fn.cast(images, dtype=types.UINT8)


def int16(pixels: Any, factor: Any = 1.0) -> Any:
    """Return factor * pixels, rounded."""
    from nvidia.dali import fn, types

    return fn.brightness_contrast(pixels, brightness=factor, dtype=types.INT16)


def luma(images: Any) -> Any:
    """Return the luma, one channel: 0.299 R + 0.587 G + 0.114 B."""
    from nvidia.dali import fn, types

    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def as_rgb(gray: Any) -> Any:
    """Return grey images with three channels."""
    from nvidia.dali import fn, types

    return fn.color_space_conversion(gray, image_type=types.GRAY, output_type=types.RGB)


def on_device_of(images: Any, node: Any) -> Any:
    """Return a node's copy on the images' device."""
    return node.gpu() if images.device == "gpu" else node


def contrast(images: Any, factor: Any, gray: Any, *, arithmetic: bool | None = None) -> Any:
    """Blend with the mean of the grey image, or away from it. factor: on the CPU.

    arithmetic: compute with arithmetic operators; None: if the images are on the GPU. Arguments of
    other operators come from the CPU, so with an argument computed from pixels on the GPU the host
    would wait for the device in each batch.
    """
    from nvidia.dali import fn

    if arithmetic or (arithmetic is None and images.device == "gpu"):
        factor = on_device_of(images, factor)
        middle = fn.reductions.mean(gray, axes=[0, 1], keep_dims=True)
        return uint8(images * factor + middle * (1 - factor))
    middle = fn.reductions.mean(gray)
    return fn.brightness_contrast(images, contrast=factor, contrast_center=middle)


def level(images: Any, value: Any) -> Any:
    """Return one number per sample as uint8, on the device of the images."""
    return on_device_of(images, uint8(value))


def solarize(images: Any, threshold: Any) -> Any:
    """Replace values x of at least the threshold by 255 - x, which is x ^ 255. threshold: a `level`
    or a constant, uint8."""
    from nvidia.dali import types

    return images ^ ((images >= threshold) * types.Constant(_MAX_LEVEL, dtype=types.UINT8))


def autocontrast(images: Any, *, arithmetic: bool | None = None) -> Any:
    """Stretch each channel to 0..255; a channel of a single level isn't changed. arithmetic: as in
    `contrast`."""
    from nvidia.dali import fn, types

    low = fn.reductions.min(images, axes=[0, 1], keep_dims=True)
    spread = fn.reductions.max(images, axes=[0, 1], keep_dims=True) - low
    full = types.Constant(_MAX_LEVEL, dtype=types.UINT8)
    # DALI's arithmetic has no `if`: 0 and 255 for a single level.
    low, spread = low * (spread > 0), spread + (spread == 0) * full
    if arithmetic or (arithmetic is None and images.device == "gpu"):
        return uint8((images - low) * (types.Constant(float(_MAX_LEVEL)) / spread))
    low, spread = (fn.cast(node, dtype=types.FLOAT) for node in (low, spread))
    return fn.normalize(
        images, axes=[0, 1], mean=low, stddev=spread, scale=float(_MAX_LEVEL), dtype=types.UINT8
    )


def warp(images: Any, matrix: Any, *, fill: float, interpolation: str) -> Any:
    """Move pixels by matrices as `ImageOperation.geometry` returns them, float32, (3, 3).

    fill: value where the result shows nothing of the image. interpolation: "nearest" or "bilinear".
    On the CPU it takes a third of the time of DALI's warp_affine.
    """
    from nvidia.dali import fn

    options = {"fill_value": fill, "interp_type": interpolation_type(interpolation)}
    return fn.experimental.warp_perspective(images, matrix=matrix, **options)


def interpolation_type(name: str) -> Any:
    """Return DALI's constant for "nearest" or "bilinear"."""
    from nvidia.dali import types

    return {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}[name]
