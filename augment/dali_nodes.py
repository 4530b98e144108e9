"""Define DALI nodes that several operations share: selection of samples, blends, level changes.

They are called inside pipeline definitions and only connect DALI's nodes. Images are uint8, HWC, in
and out, on the CPU or the GPU; numbers of samples come from the CPU.

Measured with DALI 2.4 on the CPU: each arithmetic operator is a pass over memory of its own, not a
part of a fused expression, so int16 takes half as long as float32; rounding float32 to uint8 takes
1.1 ms for an image of 224 x 224, int16 to uint8 0.3, and uint8 times a factor to int16 0.1. Casting
float pixels to uint8 is slow, 1.7 in fn.cast, so contrast and autocontrast use operators that cast
internally.

The passes that `resample_kernels` compiles are operators too, if numba is installed. DALI's
NumbaFunction compiles Python functions and passes their addresses to its operator. These functions
are already compiled, so the two methods that compile are replaced. DALI calls the functions in its
decode threads, without the GIL.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment.dali_runs import check_machine, fn, new_pipeline, reason_of, types
from penstock.augment.draw_keys import Uniform
from penstock.cache import RecipeError, log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.augment.operation import ImageOperation, ImageShape
    from penstock.readers import Floats, Numbers

    Nodes = dict[str, Any]

_MAX_LEVEL = 255


def if_else(
    nodes: Nodes, predicate: Any, then: Callable[[Nodes], Any], other: Callable[[Nodes], Any]
) -> Any:
    """Return then(nodes) for samples for which `predicate` is true, and other(nodes) for the rest.

    It splits and merges batches as DALI's own `if`, without copying pixels.
    """
    conditional: Any = fn._conditional
    true, false = {}, {}
    for name, node in nodes.items():
        true[name], false[name] = conditional.split(node, predicate=predicate, _if_stmt=True)
    return conditional.merge(then(true), other(false), predicate=predicate)


def uint8(images: Any) -> Any:
    """Return pixels that are rounded and clipped to 0..255."""
    return fn.cast(images, dtype=types.UINT8)


def int16(pixels: Any, factor: Any = 1.0) -> Any:
    """Return factor * pixels, rounded."""
    return fn.brightness_contrast(pixels, brightness=factor, dtype=types.INT16)


def luma(images: Any) -> Any:
    """Return the luma, one channel: 0.299 R + 0.587 G + 0.114 B."""
    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def as_rgb(gray: Any) -> Any:
    """Return grey images with three channels."""
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
    return images ^ ((images >= threshold) * types.Constant(_MAX_LEVEL, dtype=types.UINT8))


def autocontrast(images: Any, *, arithmetic: bool | None = None) -> Any:
    """Stretch each channel to 0..255; a channel of a single level isn't changed. arithmetic: as in
    `contrast`."""
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


def warp(images: Any, matrix: Any, *, fill: float, interpolation: str = "nearest") -> Any:
    """Move pixels by matrices as `ImageOperation.geometry` returns them, float32, (3, 3).

    fill: value where the result shows nothing of the image. interpolation: "nearest" or "bilinear".
    On the CPU it takes a third of the time of DALI's warp_affine.
    """
    kind = {"nearest": types.INTERP_NN, "bilinear": types.INTERP_LINEAR}[interpolation]
    options = {"fill_value": fill, "interp_type": kind}
    return fn.experimental.warp_perspective(images, matrix=matrix, **options)


def dali_type(name: str) -> Any:
    """Return DALI's constant for a dtype of numpy."""
    return getattr(types, {"float32": "FLOAT"}.get(name, name.upper()))


def source(name: str, dtype: str, ndim: int) -> Any:
    """Return an input of a pipeline on the CPU. dtype: of numpy."""
    return fn.external_source(name=name, no_copy=True, dtype=dali_type(dtype), ndim=ndim)


def foreign_node(
    op: ImageOperation, device: str, inputs: Nodes, shape: ImageShape
) -> Callable[..., Any]:
    """Return op.node, whose result becomes uint8, HWC, of the same shape.

    It is tried on one black image: in the graph itself a failing node would look like samples that
    don't decode. Raises RecipeError if it fails, or returns another shape.
    """
    from nvidia.dali import Pipeline

    size = (shape.height, shape.width, shape.channels)

    def call(images: Any, inputs: Nodes, shape: ImageShape) -> Any:
        changed = op.node(images, inputs, shape)
        if isinstance(changed, type(images)):
            return changed
        raise RecipeError(f"{op}: its node returned {changed!r}, wanted one DALI node of images.")

    for node in inputs.values():  # it may ignore some, but DALI drops unused inputs
        fn.copy(node, preserve=True)
    drawn = op.draw(Uniform(np.zeros(1, np.uint64), 0), shape)
    trial = new_pipeline(1, threads=1, device_id=Pipeline.current().device_id)
    with trial:
        images = fn.reshape(fn.zeros(shape=list(size), dtype=types.UINT8), layout="HWC")
        given = {
            name: types.Constant(np.asarray(as_input(each)[0]), device="cpu")
            for name, each in drawn.items()
            if name != "on"
        }
        trial.set_outputs(call(images.gpu() if device == "gpu" else images, given, shape))
    trial.build()
    try:
        (changed,) = trial.run()
    except RuntimeError as error:
        if device == "gpu":  # on the CPU the function fails, whatever the message
            check_machine(error)
        raise RecipeError(
            f"{op}: its node fails on one image of {size} (height, width, channels): "
            f"{reason_of(error)}."
        ) from error
    got, layout = tuple(changed[0].shape()), changed.layout()
    if got != size or layout not in ("HWC", ""):
        raise RecipeError(
            f"{op}: its node returned {got} in layout {layout!r} for {size}, wanted the same "
            'shape, in layout "HWC". Put operations that crop and resize into the recipe.'
        )
    return lambda *given: uint8(fn.reshape(call(*given), shape=list(size), layout="HWC"))


def as_input(values: Numbers) -> Numbers:
    """Return drawn values as an input of a graph: float32, bool or int32, C-contiguous."""
    kinds: dict[str, Any] = {"f": np.float32, "b": np.bool_}
    return np.ascontiguousarray(values, kinds.get(values.dtype.kind, np.int32))


@functools.cache
def _operator() -> Callable[..., Any] | None:
    """Return the operator that calls a function of `resample_kernels` by name, or None."""
    try:
        from nvidia.dali.plugin.numba import NumbaFunction

        from penstock.augment import resample_kernels as kernels
    except Exception as error:  # numba is optional, and a failing compiler must not stop the job
        # numba also rejects unknown versions of numpy by an ImportError.
        level = logging.INFO if isinstance(error, ImportError) else logging.WARNING
        log.log(
            level,
            "DALI's own operators resize, at about half the speed, since the compiled resize isn't "
            "available (%r). Install numba, or another version of it.",
            error,
        )
        return None

    class Compiled(NumbaFunction):
        def _get_setup_fn_cpu(self, setup_fn: Any) -> int:
            return _address(setup_fn)

        def _get_run_fn_cpu(self, run_fn: Any, *_: Any) -> int:
            return _address(run_fn)

    def _address(function: Any) -> int:
        found = getattr(kernels, function) if isinstance(function, str) else function
        return int(found.address)

    return Compiled


def is_compiled() -> bool:
    """Return True if the compiled pass is available. The first call imports numba, and on a new
    machine compiles for some seconds."""
    return _operator() is not None


def planes_like(
    shape: tuple[int, int, int], scaling: tuple[Sequence[float], Sequence[float]] | None
) -> NDArray[np.float32]:
    """Return an array of a shape (channels, height, width) that holds the factors and summands that
    normalise all channels. scaling: mean and standard deviation by channel in units of 0..1, or
    None."""
    like = np.zeros(shape, np.float32)
    norm = _norm(shape[0], scaling)
    like.reshape(-1)[: norm.size] = norm.reshape(-1)
    return like


def _norm(channels: int, scaling: tuple[Sequence[float], Sequence[float]] | None) -> Floats:
    """Return the factor and the summand that normalise each channel of pixels, 0..255."""
    if scaling is None:
        return np.array([[1.0, 0.0]] * channels)
    mean, std = np.array(scaling)
    return np.stack([1 / (255 * std), -mean / std], axis=1)


OUTPUTS = ("planes", "octets", "pixels")
"""The kinds of output of `compiled_resize` by their numbers: float32 CHW, normalised; uint8 CHW;
and uint8 HWC."""


def compiled_resize(
    images: Any,
    like: Any,
    numbers: Any,
    *,
    to: str,
    region: tuple[Any, Any] | None,
    channels: int,
    scaling: tuple[Sequence[float], Sequence[float]] | None = None,
    fills: tuple[float, float] = (0.0, 0.0),
) -> Any:
    """Resize and flip images into outputs of any size, or into parts of these.

    images: uint8, HWC, on the CPU. like, numbers: see `resample_kernels`. to: one of OUTPUTS.
    region: (low, high), float32 (y, x) in pixels; None: the full image. scaling: mean and standard
    deviation by channel in units of 0..1, or None. fills: the values around an image in its window,
    and of the padding.
    """
    whole = types.Constant(np.zeros(2, np.float32), device="cpu")
    low, high = region or (whole, whole)
    norm = np.append(_norm(channels, scaling), [fills], axis=0).astype(np.float32)
    out = types.FLOAT if to == "planes" else types.UINT8
    kinds = [types.UINT8, types.FLOAT, types.FLOAT, types.INT32, types.UINT8, types.FLOAT]
    given = images, low, high, numbers, like, types.Constant(norm, device="cpu")
    shape = "shape_of_pixels" if to == "pixels" else "shape_of_planes"
    found = _run("resample", shape, (out, 3), kinds, [3, 1, 1, 1, 3, 2], *given)
    return fn.reshape(found, layout="HWC" if to == "pixels" else "CHW")


def compiled_equalize(images: Any) -> Any:
    """Equalize the histogram of each channel, uint8, HWC, on the CPU."""
    octets = types.UINT8
    found = _run("equalize", "shape_of_image", (octets, 3), [octets], [3], images)
    return fn.reshape(found, layout="HWC")


def compiled_views(
    images: Any, numbers: Any, programs: Numbers, like: Numbers, *, is_bytes: bool
) -> Any:
    """Make several views of each image by `view_kernels`, which describes the arguments. images:
    uint8, HWC, on the CPU. is_bytes: the views are uint8, else float32."""
    from penstock.augment import view_kernels as kernels

    out, kinds = types.UINT8 if is_bytes else types.FLOAT, [types.UINT8, *[types.FLOAT] * 3]
    given = images, numbers, *(types.Constant(each, device="cpu") for each in (programs, like))
    return _run(kernels.make_views, kernels.shape_views, (out, 4), kinds, [3, 2, 2, 3], *given)


def _run(
    run: Any, shape: Any, out: tuple[Any, int], kinds: list[Any], dimensions: list[int], *given: Any
) -> Any:
    """Call a compiled function, or that of a name in `resample_kernels`. shape: the function that
    computes the result's shape. out: the result's type and its number of dimensions."""
    operator = _operator()
    assert operator is not None  # the caller has checked is_compiled()
    call = operator(run, [out[0]], kinds, [out[1]], dimensions, setup_fn=shape, device="cpu")
    return call(*given)
