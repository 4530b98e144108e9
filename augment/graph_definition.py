"""Define the DALI operators of a checked recipe: decode, windows, resizes, the last pass.

Pipeline definitions call these functions; they only connect DALI's nodes. The nodes of operations
on pixels are in their classes.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.augment import dali_nodes as nodes
from penstock.augment.dali_runs import PipelinePlan, fn, types
from penstock.augment.draws import FLIPS, input_kinds
from penstock.augment.views import CompiledViews, part_draws

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.augment.draws import Draws
    from penstock.augment.operation import DType, GeometricOperation
    from penstock.augment.recipe import CheckedRecipe, GeometryStage, ViewField


@dataclass(frozen=True, slots=True)
class GraphPlan(PipelinePlan):
    """The arguments of a `Graph`, from which its pipeline is built.

    pixels: samples are RGB, uint8, shape (height, width, 3). resident: pixels come from a
    `FullImageDecoder`: uint8, shape (height, width, channels), in the recipe's colours; on CUDA
    each as a `resident_tensor`. deterministic: decode without the hardware decoder on CUDA, so that
    pixels don't depend on the decoder that a sample gets; on the CPU they never do. check_headers:
    read each sample's header before DALI decodes it, in 4 us a sample; necessary for bytes that
    `verify_images` hasn't checked, or whose checksum wasn't compared since. constant: for
    benchmarks: use the same inputs, decode nothing and return a constant, which leaves the cost of
    everything but decoding.
    """

    recipe: CheckedRecipe
    _: KW_ONLY
    deterministic: bool = False
    check_headers: bool = False
    constant: bool = False


def define_outputs(plan: GraphPlan, encoded: Any) -> tuple[Any, ...]:
    """Return the pipeline's outputs; called inside its definition. encoded: node of the samples."""
    kinds = _view_kinds(plan) if plan.recipe.views else _inputs(plan)
    inputs = {name: nodes.source(name, *kind) for name, kind in kinds.items()}
    if plan.constant:  # DALI's smallest outputs, with every input in use
        return (encoded.shape(), *inputs.values())
    images = (_from_pixels if plan.pixels else _from_encoded)(plan, encoded, inputs)
    if plan.recipe.views:
        return tuple(_views(plan, place, images, inputs) for place in range(len(plan.recipe.views)))
    return (_augmented(plan, images, inputs),)


def _view_kinds(plan: GraphPlan) -> dict[str, tuple[str, int]]:
    """Return the argument inputs of a graph that makes views, as `_inputs`."""
    found: dict[str, tuple[str, int]] = {}
    for place, field in enumerate(plan.recipe.views):
        if _is_compiled_field(plan, field):
            found[f"{place}"] = ("float32", 2)
            continue
        for number, (count, recipe) in enumerate(field.parts):
            for name, kind in _inputs(replace(plan, recipe=recipe)).items():
                found |= {f"{place}.{number}.{view}.{name}": kind for view in range(count)}
    return found


class ViewInputs:
    """Converts the draws of views to the argument inputs of their graph."""

    def __init__(self, plan: GraphPlan) -> None:
        """plan: of the graph, whose images have views."""
        self._plan = plan
        self._compiled = {
            place: CompiledViews(field, place)
            for place, field in enumerate(plan.recipe.views)
            if _is_compiled_field(plan, field)
        }

    def __call__(self, draws: Draws, samples: int) -> dict[str, Any]:
        """Return the inputs of a run. draws: of `draw_views`, for so many samples."""
        found: dict[str, Any] = {}
        for place, field in enumerate(self._plan.recipe.views):
            if place in self._compiled:
                found[f"{place}"] = self._compiled[place].numbers(draws, samples)
                continue
            for number, (count, recipe) in enumerate(field.parts):
                own = part_draws(draws, f"{place}.{number}")
                for view in range(count):
                    some = {name: np.ascontiguousarray(each[:, view]) for name, each in own.items()}
                    some = graph_inputs(replace(self._plan, recipe=recipe), some)
                    found |= {f"{place}.{number}.{view}.{n}": each for n, each in some.items()}
        return found


def _is_compiled_field(plan: GraphPlan, field: ViewField) -> bool:
    """Return True if one compiled function makes the views of a field."""
    return not plan.is_cuda and CompiledViews.can_make(field)


def _views(plan: GraphPlan, place: int, images: Any, inputs: dict[str, Any]) -> Any:
    """Return the views of the field with a number. images: full, on the device."""
    field = plan.recipe.views[place]
    if _is_compiled_field(plan, field):
        return CompiledViews(field, place).node(images, inputs[f"{place}"])
    made = []
    for number, (count, recipe) in enumerate(field.parts):
        own = replace(plan, recipe=recipe, pixels=True, resident=True)
        for view in range(count):
            some = part_draws(inputs, f"{place}.{number}.{view}")
            made.append(_augmented(own, _from_pixels(own, images, some), some))
    return fn.stack(*made)


def _augmented(plan: GraphPlan, images: Any, inputs: dict[str, Any]) -> Any:
    """Return images after all operations. images: the windows to show, HWC."""
    recipe, last = plan.recipe, len(plan.recipe.geometries) - 1
    # One compiled pass may do the last resize, the flip, Normalize and HWC to CHW.
    is_framed = _is_framed(plan)
    is_last = recipe.dtype != "uint8" and not recipe.pixels and "upend" not in inputs
    has_room = nodes.fits_planes(recipe.shape)
    one_pass = is_last and has_room and _is_compiled(plan, recipe.geometries[last])
    for number, geometry in enumerate(recipe.geometries):
        if geometry.padding is not None:  # a window that may reach outside the image
            window = inputs[f"anchor{number}"], inputs[f"extent{number}"]
            images = _window(images, window, geometry.padding)
        if geometry.resize is None:
            continue
        if is_framed and number == last:
            images, one_pass = _framed(plan, images, inputs), not recipe.pixels
            continue
        to_the_end = one_pass and number == last
        images = _resized(plan, images, number, inputs, to_the_end=to_the_end)
        if geometry.frame is not None:
            start = 0 - inputs[f"inset{number}"]
            images = _window(images, (start, inputs[f"frame{number}"]), geometry.frame)
    if "upend" in inputs:
        images = fn.flip(images, horizontal=0, vertical=inputs["upend"])
    for placed in recipe.pixels:
        if "mirror" in inputs and not placed.op.commutes_with_flips:
            images = fn.flip(images, horizontal=inputs.pop("mirror"))
        images = placed.node(images, inputs, recipe.image)
    dtype = recipe.dtype
    if (one_pass and dtype != "uint8") or (recipe.erasing and dtype == "float16"):
        dtype = "float32"  # DALI's Erase doesn't support float16 on the GPU
    if not one_pass:
        images = _last_pass(recipe, images, inputs, dtype)
    for erasing in recipe.erasing:
        images = erasing.node(images, inputs, recipe.image)
    if "canvas" in inputs and recipe.form != "list":
        fill = 0.0 if recipe.pad is None else recipe.pad.value
        images = fn.pad(images, axes=[1, 2], shape=inputs["canvas"], fill_value=fill)
    if recipe.dtype != dtype:
        images = fn.cast(images, dtype=nodes.dali_type(recipe.dtype))
    return images


def _window(images: Any, window: tuple[Any, Any], op: GeometricOperation) -> Any:
    """Return a window, (y, x) and (height, width), that may reach outside the images."""
    options: Any = {"out_of_bounds_policy": "pad", "fill_values": [op.fill]}
    return fn.slice(images, *window, axes=[0, 1], **options)


# -- outputs of different sizes, and parts of outputs, by `resample_kernels`


def _is_framed(plan: GraphPlan) -> bool:
    """Return True if the framed functions of `resample_kernels` do the last resize."""
    last = plan.recipe.geometries[-1]
    is_open = plan.recipe.has_canvas or last.frame is not None
    return is_open and last.resize is not None and not plan.is_cuda and nodes.is_compiled()


def _replaced(plan: GraphPlan) -> list[str]:
    """Return the names of draws that are in "numbers" or "like" if the last resize is framed."""
    number = len(plan.recipe.geometries) - 1
    names = [f"{name}{number}" for name in ("inset", "frame", "size", "filter")]
    names = [*names, "upend", "mirror", "extent", "canvas"]
    pads = bool(plan.recipe.pixels or plan.recipe.erasing) and plan.recipe.form != "list"
    return [name for name in names if not (name == "canvas" and pads)]


def _inputs(plan: GraphPlan) -> dict[str, tuple[str, int]]:
    """Return the dtype and number of dimensions of each argument input of the graph, by name."""
    kinds = input_kinds(plan.recipe)
    if not _is_framed(plan):
        return {name: kind for name, kind in kinds.items() if name in _used(plan, kinds)}
    replaced = _replaced(plan)
    kept = {name: kind for name, kind in kinds.items() if name not in replaced}
    return kept | {"numbers": ("int32", 1), "like": ("uint8", 3)}


def _used(plan: GraphPlan, names: Iterable[str]) -> list[str]:
    """Return the draws that a graph without a framed resize has as inputs."""
    is_list = plan.recipe.form == "list"
    return [n for n in names if n != "extent" and not (n == "canvas" and is_list)]


def graph_inputs(plan: GraphPlan, draws: Draws) -> dict[str, Any]:
    """Return the argument inputs of a run: an array with a row for each sample, or a list."""
    if not _is_framed(plan):
        return {name: draws[name] for name in _used(plan, draws)}
    recipe = plan.recipe
    number = len(recipe.geometries) - 1
    geometry = recipe.geometries[number]
    extent = draws["extent"]
    count = len(extent)
    numbers = np.zeros((count, 9), np.int32)
    numbers[:, 0] = draws.get(f"filter{number}", geometry.antialias)
    inset = draws.get(f"inset{number}", np.zeros((1, 2)))
    size = draws.get(f"size{number}", extent)
    for axis, flip in enumerate(FLIPS):
        start = inset[:, axis]
        if flip in draws:
            numbers[:, 1 + axis] = draws[flip]
            mirrored = extent[:, axis] - start - size[:, axis]
            start = np.where(draws[flip] != 0, mirrored, start)
        # A window that doesn't touch the image shows none of it.
        is_outside = (start < 0) | (start + size[:, axis] > extent[:, axis])
        numbers[:, 3 + axis] = np.where(is_outside, 0, start)
        numbers[:, 5 + axis] = np.where(is_outside, 0, size[:, axis])
    numbers[:, 7:] = extent
    canvas = extent if recipe.pixels or recipe.erasing else draws["canvas"]
    if (canvas == canvas[:1]).all():
        like: Any = np.empty((count, *canvas[0], 0), np.uint8)
    else:
        like = [np.empty((height, width, 0), np.uint8) for height, width in canvas.tolist()]
    replaced = _replaced(plan)
    kept = {name: values for name, values in draws.items() if name not in replaced}
    return kept | {"numbers": numbers, "like": like}


def _framed(plan: GraphPlan, images: Any, inputs: dict[str, Any]) -> Any:
    """Resize and flip images by the last geometry; without operations on pixels also normalise, pad
    and turn them to CHW."""
    recipe, number = plan.recipe, len(plan.recipe.geometries) - 1
    geometry = recipe.geometries[number]
    to: Literal["planes", "octets", "pixels"] = "pixels"
    if not recipe.pixels:
        to = "octets" if recipe.dtype == "uint8" else "planes"
    scaling = None
    if recipe.normalize and to == "planes":
        scaling = (recipe.normalize.mean, recipe.normalize.std)
    return nodes.framed_resize(
        images,
        inputs.pop("like"),
        inputs.pop("numbers"),
        region=(inputs[f"low{number}"], inputs[f"high{number}"]) if geometry.crops_after else None,
        scaling=scaling,
        channels=recipe.decode.channels,
        fills=(
            0.0 if geometry.frame is None else geometry.frame.fill,
            0.0 if recipe.pad is None else recipe.pad.value,
        ),
        to=to,
    )


def _from_pixels(plan: GraphPlan, images: Any, inputs: dict[str, Any]) -> Any:
    """Return the window of decoded images, on the device and in the recipe's colours."""
    if plan.is_cuda and not plan.resident:
        images = images.gpu()
    if plan.recipe.decodes_window:
        images = fn.slice(images, inputs["start"], inputs["shape"], axes=[0, 1])
    if plan.recipe.decode.color == "gray" and not plan.resident:
        colours = {"image_type": types.RGB, "output_type": types.GRAY}
        images = fn.color_space_conversion(images, **colours)
    return images


def decoded(plan: GraphPlan, encoded: Any) -> Any:
    """Return full images, upright and in the recipe's colours, HWC."""
    return fn.decoders.image(encoded, **decode_options(plan))


def _from_encoded(plan: GraphPlan, encoded: Any, inputs: dict[str, Any]) -> Any:
    """Decode upright images, HWC; only the window if the recipe has one."""
    if not plan.recipe.decodes_window:
        return decoded(plan, encoded)
    window = {"start": inputs["start"], "shape": inputs["shape"], "axes": [0, 1]}
    windows = plan.recipe.decode.windows
    if windows == "slice" or (windows == "auto" and plan.is_cuda):
        return fn.slice(decoded(plan, encoded), **window)
    return fn.decoders.image_slice(encoded, **window, **decode_options(plan))


def decode_options(plan: GraphPlan) -> dict[str, Any]:
    """Return the arguments of DALI's decoders."""
    # Never ANY_DATA: on the CPU it corrupts the heap on a grey JPEG (DALI 2.4).
    gray = plan.recipe.decode.color == "gray"
    options: dict[str, Any] = {
        "output_type": types.GRAY if gray else types.RGB,
        "adjust_orientation": True,  # the windows are in upright coordinates
    }
    if plan.is_cuda:
        decode = plan.recipe.decode
        options["device"] = "mixed"
        if decode.hw_decoder_load is not None:
            options["hw_decoder_load"] = decode.hw_decoder_load
        if decode.preallocate is not None:
            height, width = decode.preallocate
            options |= {"preallocate_height_hint": height, "preallocate_width_hint": width}
        if plan.deterministic:
            # One decoder for all, with the CPU's chroma upsampling.
            options |= {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True}
    return options


def _is_compiled(plan: GraphPlan, geometry: GeometryStage) -> bool:
    """Return True if `resample_kernels` resizes."""
    has_one_size = geometry.resize is not None and geometry.sized is not None
    return has_one_size and not plan.is_cuda and nodes.is_compiled()


def _resized(
    plan: GraphPlan, images: Any, number: int, inputs: dict[str, Any], *, to_the_end: bool
) -> Any:
    """Resize images by the geometry of a number. to_the_end: flip, normalise and turn to CHW,
    too."""
    recipe, geometry = plan.recipe, plan.recipe.geometries[number]
    if not _is_compiled(plan, geometry):
        return _resized_by_dali(images, geometry, number, inputs)
    assert geometry.sized is not None
    region = (inputs[f"low{number}"], inputs[f"high{number}"]) if geometry.crops_after else None
    filtered = inputs[f"filter{number}"] if geometry.antialias == "auto" else geometry.antialias
    options: dict[str, Any] = {"region": region, "filtered": filtered}
    if not to_the_end:
        like = np.zeros((*geometry.sized, recipe.decode.channels), np.uint8)
        return fn.reshape(nodes.compiled_resize(images, like, **options), layout="HWC")
    scaling = (recipe.normalize.mean, recipe.normalize.std) if recipe.normalize else None
    options["mirror"] = inputs.get("mirror")
    planes = nodes.planes_like(recipe.shape, scaling)
    images = nodes.compiled_resize(images, planes, **options)
    if recipe.erasing:  # it needs names of axes, which numba's output doesn't have
        images = fn.reshape(images, layout="CHW")
    return images


def _resized_by_dali(
    images: Any, geometry: GeometryStage, number: int, inputs: dict[str, Any]
) -> Any:
    names = {} if geometry.sized else {"size": f"size{number}"}
    if geometry.crops_after:
        names |= {"roi_start": f"low{number}", "roi_end": f"high{number}"}
    options: dict[str, Any] = {"size": list(geometry.sized)} if geometry.sized else {}
    options["interp_type"] = types.INTERP_LINEAR

    def resize(given: dict[str, Any], *, antialias: bool) -> Any:
        return fn.resize(given.pop("images"), antialias=antialias, **options, **given)

    given = {"images": images, **{option: inputs[name] for option, name in names.items()}}
    if geometry.antialias != "auto":
        return resize(given, antialias=geometry.antialias)
    return nodes.if_else(
        given,
        inputs[f"filter{number}"],
        lambda some: resize(some, antialias=True),
        lambda some: resize(some, antialias=False),
    )


def _last_pass(recipe: CheckedRecipe, images: Any, inputs: dict[str, Any], dtype: DType) -> Any:
    """Flip, normalise, cast and HWC to CHW in one pass."""
    options: dict[str, Any] = {"dtype": nodes.dali_type(dtype), "output_layout": "CHW"}
    if "mirror" in inputs:
        options["mirror"] = inputs["mirror"]
    if recipe.normalize:  # in units of 0..1; pixels come as 0..255
        options["mean"] = [255 * mean for mean in recipe.normalize.mean]
        options["std"] = [255 * std for std in recipe.normalize.std]
    return fn.crop_mirror_normalize(images, **options)
