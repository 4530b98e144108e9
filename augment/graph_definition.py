"""Define the DALI operators of a checked recipe: decode, windows, resizes, the last pass.

Pipeline definitions call these functions; they only connect DALI's nodes. The nodes of operations
on pixels are in their classes.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import dali_nodes as nodes
from penstock.augment.dali_runs import PipelinePlan, fn, types
from penstock.augment.draws import input_kinds

if TYPE_CHECKING:
    from penstock.augment.operation import DType
    from penstock.augment.recipe import CheckedRecipe, GeometryStage


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
    inputs = {name: nodes.source(name, *kind) for name, kind in input_kinds(plan.recipe).items()}
    if plan.constant:  # DALI's smallest outputs, with every input in use
        return (encoded.shape(), *inputs.values())
    images = (_from_pixels if plan.pixels else _from_encoded)(plan, encoded, inputs)
    recipe, last = plan.recipe, len(plan.recipe.geometries) - 1
    # One compiled pass may do the last resize, the flip, Normalize and HWC to CHW.
    is_last = recipe.dtype != "uint8" and not recipe.pixels and "upend" not in inputs
    has_room = nodes.fits_planes(recipe.shape)
    one_pass = is_last and has_room and _is_compiled(plan, recipe.geometries[last])
    for number, geometry in enumerate(recipe.geometries):
        if geometry.padding is not None:  # a window that may reach outside the image
            window = inputs[f"anchor{number}"], inputs[f"extent{number}"]
            fill: Any = {"out_of_bounds_policy": "pad", "fill_values": [geometry.padding.fill]}
            images = fn.slice(images, *window, axes=[0, 1], **fill)
        if geometry.size is not None:
            to_the_end = one_pass and number == last
            images = _resized(plan, images, number, inputs, to_the_end=to_the_end)
    if "upend" in inputs:
        images = fn.flip(images, horizontal=0, vertical=inputs["upend"])
    for placed in recipe.pixels:
        if "mirror" in inputs and not placed.op.commutes_with_flips:
            images = fn.flip(images, horizontal=inputs.pop("mirror"))
        images = placed.node(images, inputs, recipe.image)
    dtype = recipe.dtype
    if one_pass or (recipe.erasing and dtype == "float16"):
        dtype = "float32"  # DALI's Erase doesn't support float16 on the GPU
    if not one_pass:
        images = _last_pass(recipe, images, inputs, dtype)
    for erasing in recipe.erasing:
        images = erasing.node(images, inputs, recipe.image)
    if recipe.dtype != dtype:
        images = fn.cast(images, dtype=nodes.dali_type(recipe.dtype))
    return (images,)


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
    has_one_size = geometry.size is not None and geometry.out is not None
    return has_one_size and not plan.is_cuda and nodes.is_compiled()


def _resized(
    plan: GraphPlan, images: Any, number: int, inputs: dict[str, Any], *, to_the_end: bool
) -> Any:
    """Resize images by the geometry of a number. to_the_end: flip, normalise and turn to CHW,
    too."""
    recipe, geometry = plan.recipe, plan.recipe.geometries[number]
    if not _is_compiled(plan, geometry):
        return _resized_by_dali(images, geometry, number, inputs)
    assert geometry.out is not None
    region = (inputs[f"low{number}"], inputs[f"high{number}"]) if geometry.crops_after else None
    filtered = inputs[f"filter{number}"] if geometry.antialias == "auto" else geometry.antialias
    options: dict[str, Any] = {"region": region, "filtered": filtered}
    if not to_the_end:
        like = np.zeros((*geometry.out, recipe.decode.channels), np.uint8)
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
    names = {} if geometry.out else {"size": f"size{number}"}
    if geometry.crops_after:
        names |= {"roi_start": f"low{number}", "roi_end": f"high{number}"}
    options: dict[str, Any] = {"size": list(geometry.out)} if geometry.out else {}
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
