"""Define the DALI operators of a checked recipe: decode, windows, resizes, the last pass.

Pipeline definitions call these functions; they only connect DALI's nodes. The nodes of operations
on pixels are in their classes.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import dali_nodes as nodes
from penstock.augment.dali_runs import PipelinePlan, fn, types
from penstock.augment.draws import FLIPS, Draws, input_kinds
from penstock.augment.views import CompiledViews, has_passes, part_draws

if TYPE_CHECKING:
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
    kinds = _view_kinds(plan) if plan.recipe.views else GraphInputs(plan).kinds
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
            for name, kind in GraphInputs(replace(plan, recipe=recipe)).kinds.items():
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
        self._others = {
            (place, number): GraphInputs(replace(plan, recipe=recipe))
            for place, field in enumerate(plan.recipe.views)
            for number, (_, recipe) in enumerate(field.parts)
        }

    def __call__(self, draws: Draws, samples: int) -> dict[str, Any]:
        """Return the inputs of a run. draws: of `draw_views`, for so many samples."""
        found: dict[str, Any] = {}
        for place, field in enumerate(self._plan.recipe.views):
            if place in self._compiled:
                found[f"{place}"] = self._compiled[place].numbers(draws, samples)
                continue
            for number, (count, _) in enumerate(field.parts):
                own = part_draws(draws, f"{place}.{number}")
                for view in range(count):
                    some = {name: np.ascontiguousarray(each[:, view]) for name, each in own.items()}
                    some = self._others[place, number](some, samples)
                    found |= {f"{place}.{number}.{view}.{n}": each for n, each in some.items()}
        return found


def _is_compiled_field(plan: GraphPlan, field: ViewField) -> bool:
    """Return True if one compiled function makes the views of a field."""
    can_make = nodes.is_compiled() and all(has_passes(recipe) for _, recipe in field.parts)
    return can_make and not plan.is_cuda


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
    recipe, passes = plan.recipe, _passes(plan)
    compiled = {each.number: each for each in passes}
    for number, geometry in enumerate(recipe.geometries):
        if geometry.padding is not None:  # a window that may reach outside the image
            window = inputs[f"anchor{number}"], inputs[f"extent{number}"]
            images = _window(images, window, geometry.padding)
        if number in compiled:
            images = compiled[number].node(recipe, images, inputs)
        elif geometry.resize is not None:
            images = _resized_by_dali(images, geometry, number, inputs)
            if geometry.frame is not None:
                start = 0 - inputs[f"inset{number}"]
                images = _window(images, (start, inputs[f"frame{number}"]), geometry.frame)
    if "upend" in inputs:
        images = fn.flip(images, horizontal=0, vertical=inputs["upend"])
    for placed in recipe.pixels:
        if "mirror" in inputs and not placed.op.commutes_with_flips:
            images = fn.flip(images, horizontal=inputs.pop("mirror"))
        images = placed.node(images, inputs, recipe.image)
    is_complete = bool(passes) and passes[-1].to != "pixels"
    dtype = recipe.dtype
    if (is_complete or recipe.erasing) and dtype == "float16":
        dtype = "float32"  # DALI's Erase doesn't support float16 on the GPU
    if not is_complete:
        images = _last_pass(recipe, images, inputs, dtype)
    for erasing in recipe.erasing:
        images = erasing.node(images, inputs, recipe.image)
    if "canvas" in inputs:
        fill = 0.0 if recipe.pad is None else recipe.pad.value
        images = fn.pad(images, axes=[1, 2], shape=inputs["canvas"], fill_value=fill)
    if recipe.dtype != dtype:
        images = fn.cast(images, dtype=nodes.dali_type(recipe.dtype))
    return images


def _window(images: Any, window: tuple[Any, Any], op: GeometricOperation) -> Any:
    """Return a window, (y, x) and (height, width), that may reach outside the images."""
    options: Any = {"out_of_bounds_policy": "pad", "fill_values": [op.fill]}
    return fn.slice(images, *window, axes=[0, 1], **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPass:
    """A resize by `resample_kernels`. It also flips, and, without operations on pixels, normalises,
    pads and turns images to CHW, if it is the last of the recipe.

    number: of the geometry. to: its kind of output. flips: True if it flips images. pads: True if
    it puts them on the canvas of the batch.
    """

    number: int
    geometry: GeometryStage
    to: str
    flips: bool
    pads: bool

    @property
    def numbers(self) -> str:
        """The name of the input with the numbers of each sample."""
        return f"numbers{self.number}"

    @property
    def like(self) -> str:
        """The name of the input whose shape is the output's."""
        return f"like{self.number}"

    @property
    def replaces(self) -> set[str]:
        """The names of draws that are in its own inputs."""
        names = {f"{name}{self.number}" for name in ("inset", "frame", "size", "filter")}
        return names | (set(FLIPS) if self.flips else set())

    def inputs(self, draws: Draws, count: int) -> dict[str, Any]:
        """Return its inputs for a run of `count` samples."""
        number, geometry = self.number, self.geometry
        size: Any = draws.get(f"size{number}", geometry.sized)
        window: Any = draws.get(f"frame{number}", size)
        start: Any = draws.get(f"inset{number}", (0, 0))
        numbers = np.empty((count, 10), np.int32)
        numbers[:, 0] = draws.get(f"filter{number}", geometry.antialias)
        numbers[:, 0] += 2 * geometry.cubic
        numbers[:, 1:3] = 0
        numbers[:, 3:5], numbers[:, 5:7], numbers[:, 7:9] = start, size, window
        numbers[:, 9] = nodes.OUTPUTS.index(self.to)
        for axis, flip in enumerate(FLIPS) if self.flips else ():
            if flip in draws:
                numbers[:, 1 + axis] = draws[flip]
                first, length, sides = (numbers[:, k + axis] for k in (3, 5, 7))
                np.copyto(first, sides - first - length, where=draws[flip] != 0)
        if geometry.frame is not None:  # a window that doesn't touch the image shows none of it
            ends = numbers[:, 3:5] + numbers[:, 5:7]
            is_outside = (numbers[:, 3:5] < 0) | (ends > numbers[:, 7:9])
            numbers[is_outside.any(axis=1), 3:7] = 0
        shapes = numbers[:, 7:9]
        if self.pads and "canvas" in draws:
            shapes = draws["canvas"]
        if count and (shapes != shapes[0]).any():
            like: Any = [np.empty((*shape, 0), np.uint8) for shape in shapes.tolist()]
        else:
            like = np.empty((count, *shapes[:1].reshape(-1), 0), np.uint8)
        return {self.numbers: numbers, self.like: like}

    def node(self, recipe: CheckedRecipe, images: Any, inputs: dict[str, Any]) -> Any:
        """Return the resized images. inputs: nodes by name."""
        number, normalize = self.number, recipe.normalize if self.to == "planes" else None
        frame, pad, region = self.geometry.frame, recipe.pad, None
        if self.geometry.crops_after:
            region = inputs[f"low{number}"], inputs[f"high{number}"]
        return nodes.compiled_resize(
            images,
            inputs[self.like],
            inputs[self.numbers],
            to=self.to,
            region=region,
            channels=recipe.decode.channels,
            scaling=(normalize.mean, normalize.std) if normalize else None,
            fills=(0.0 if frame is None else frame.fill, 0.0 if pad is None else pad.value),
        )


def _passes(plan: GraphPlan) -> list[CompiledPass]:
    """Return the resizes that `resample_kernels` does, in order."""
    if plan.is_cuda or not nodes.is_compiled():
        return []
    recipe, found = plan.recipe, []
    for number, geometry in enumerate(recipe.geometries):
        is_last = number == len(recipe.geometries) - 1
        has_one_size = geometry.sized is not None
        if geometry.resize is None or not (has_one_size or is_last):
            continue
        is_complete = is_last and not recipe.pixels
        to = "pixels"
        if is_complete:
            to = "octets" if recipe.dtype == "uint8" else "planes"
        # Operations on pixels may get images before they are mirrored without a pass.
        flips = is_complete or (is_last and not has_one_size)
        pads = is_complete and not recipe.erasing
        found.append(CompiledPass(number=number, geometry=geometry, to=to, flips=flips, pads=pads))
    return found


class GraphInputs:
    """Converts the draws of a run to the argument inputs of its graph.

    kinds: dtype and number of dimensions of each input, by name.
    """

    def __init__(self, plan: GraphPlan) -> None:
        self._passes = _passes(plan)
        kinds = input_kinds(plan.recipe)
        unused = set[str]().union(*(each.replaces for each in self._passes))
        if plan.recipe.form == "list" or any(each.pads for each in self._passes):
            unused.add("canvas")
        self._names = [name for name in kinds if name not in unused]
        self.kinds = {name: kinds[name] for name in self._names}
        for each in self._passes:
            self.kinds |= {each.numbers: ("int32", 1), each.like: ("uint8", 3)}

    def __call__(self, draws: Draws, samples: int) -> dict[str, Any]:
        """Return the inputs of a run of so many samples: an array with a row for each, or a
        list."""
        found: dict[str, Any] = {name: draws[name] for name in self._names}
        for each in self._passes:
            found |= each.inputs(draws, samples)
        return found


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


def _resized_by_dali(
    images: Any, geometry: GeometryStage, number: int, inputs: dict[str, Any]
) -> Any:
    names = {} if geometry.sized else {"size": f"size{number}"}
    if geometry.crops_after:
        names |= {"roi_start": f"low{number}", "roi_end": f"high{number}"}
    options: dict[str, Any] = {"size": list(geometry.sized)} if geometry.sized else {}
    options["interp_type"] = types.INTERP_CUBIC if geometry.cubic else types.INTERP_LINEAR

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
