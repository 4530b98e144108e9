"""Test graphs: the same bits in any batch, errors that name the sample, graphs for CUDA that are
defined and serialised without a GPU.
"""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from penstock.augment import (
    AutoAugment,
    Cast,
    CenterCrop,
    ColorJitter,
    Decode,
    GaussianBlur,
    Graph,
    GraphPlan,
    Normalize,
    RandAugment,
    RandomAffine,
    RandomAutocontrast,
    RandomCrop,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomPerspective,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    Solarize,
    TrivialAugmentWide,
    check_recipe,
    dali_nodes,
    define_outputs,
    draw,
    imagenet_eval,
    imagenet_train,
    load_dali,
    reason_of,
)
from penstock.cache import ClosedError, CorruptSampleError, MissingDependencyError, PenstockError
from penstock.readers import EncodedBatch, ImageRange
from tests.conftest import photograph
from tests.images import encoded_array

SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)


SAMPLES = 192


@pytest.fixture(scope="module")
def samples():
    pictures = [photograph(number) for number in range(SAMPLES)]
    return EncodedBatch(
        ids=np.arange(SAMPLES) * 1000 + 7,
        encoded=[
            encoded_array(p, "PNG") if i % 9 == 8 else encoded_array(p, "JPEG", quality=90)
            for i, p in enumerate(pictures)
        ],
        dims=np.array([p.shape[:2] for p in pictures], np.int32),
    )


def take(batch, rows):
    rows = np.asarray(rows, np.int64)
    return EncodedBatch(
        ids=batch.ids[rows], encoded=[batch.encoded[row] for row in rows], dims=batch.dims[rows]
    )


class Bench:
    """A recipe, its graph and the draws of seed 1, epoch 2."""

    def __init__(self, recipe, images=SIZES, device="cpu", **options):
        self.recipe = check_recipe(recipe, images=images)
        options = {"batch_size": 96, "threads": 2, **options}
        number = 0 if device == "cuda" else None
        self.graph = Graph(GraphPlan(self.recipe, device_id=number, **options))

    def feed(self, batch):
        draws = draw(self.recipe, ids=batch.ids, dims=batch.dims, seed=1, epoch=2)
        self.graph.feed(batch, draws)

    def __call__(self, batch):
        self.feed(batch)
        return self.graph.outputs()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.graph.close()


RECIPES = {
    "train": imagenet_train(32),
    "eval": imagenet_eval(32, resize=40),
    "uint8": (Resize((20, 24)), Cast("uint8")),
    "half": (Decode("gray"), Resize(40), RandomHorizontalFlip(), CenterCrop(36), Cast("float16")),
    "chain": (Resize(50), RandomResizedCrop(40), RandomHorizontalFlip(), CenterCrop(30), Resize(9)),
    "plain": (RandomResizedCrop((17, 30), antialias=False), Normalize()),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_bits_at_any_batch_size_thread_count_and_order(samples, name):
    order = np.random.default_rng(0).permutation(96)
    seen = []
    for size, threads, rows in ((96, 2, np.arange(96)), (32, 1, order), (1, 2, order[:24])):
        with Bench(RECIPES[name], batch_size=size, threads=threads) as bench:
            got = torch.cat(
                [bench(take(samples, part)) for part in np.split(rows, len(rows) // size)]
            )
            assert got.shape[1:] == bench.recipe.shape
            assert got.dtype == getattr(torch, bench.recipe.dtype)
        seen.append((rows, got))
    (_, whole), *others = seen
    for rows, got in others:
        assert torch.equal(whole[torch.from_numpy(rows)], got)


def test_runs_in_flight_come_out_in_order_and_batches_vary(samples):
    sizes = [5, 96, 1, 0, 40, 96, 7, 0]
    parts = [np.arange(size) for size in sizes]
    with Bench(imagenet_train(24)) as bench:
        wanted = bench(take(samples, np.arange(96)))
        for ahead in (1, 2, 3):
            got = []
            for part in parts:
                bench.feed(take(samples, part))
                if bench.graph.in_flight == ahead:
                    got.append(bench.graph.outputs())
            while bench.graph.in_flight:
                got.append(bench.graph.outputs())
            assert [len(images) for images in got] == sizes
            assert all(torch.equal(images, wanted[: len(images)]) for images in got)


def test_a_held_tensor_is_never_overwritten(samples):
    with Bench(imagenet_train(24), batch_size=16) as bench:
        held = bench(take(samples, range(16)))
        copy = held.clone()
        later = [bench(take(samples, range(i, i + 16))) for i in range(1, 30)]
        assert torch.equal(held, copy)
    assert torch.equal(held, copy)
    assert len({images.data_ptr() for images in [held, *later]}) == 30


def test_a_flip_mirrors(samples):
    images = take(samples, range(8))
    same = (Resize((16, 16)),)
    with Bench(same) as plain, Bench((*same, RandomHorizontalFlip(1))) as mirrored:
        assert torch.equal(plain(images).flip(-1), mirrored(images))


def truncated(encoded, share=0.5):
    return encoded[: int(len(encoded) * share)].copy()


def test_samples_that_do_not_decode_are_named_and_the_graph_continues(samples):
    broken = take(samples, range(20))
    for row in (11, 3):
        broken.encoded[row] = truncated(broken.encoded[row])
    good = take(samples, range(6))
    with Bench(imagenet_eval(32, resize=40)) as bench:
        wanted = bench(good)
        for _ in range(3):
            bench.feed(broken)
            bench.feed(good)
            with pytest.raises(
                CorruptSampleError, match=r"Sample 3007 .* for 1 more: 11007\."
            ) as raised:
                bench.graph.outputs()
            assert raised.value.sample_id == 3007
            assert torch.equal(bench.graph.outputs(), wanted)


def test_many_culprits_make_a_short_message(samples):
    broken = take(samples, range(16))
    broken.encoded[:] = [truncated(encoded) for encoded in broken.encoded]
    with (
        Bench(imagenet_eval(32, resize=40)) as bench,
        pytest.raises(CorruptSampleError, match=r"for 15 more: 1007, 2007, 3007, 4007, 5007\."),
    ):
        bench(broken)


def test_bad_headers_never_reach_dali(samples):
    """Through DALI they end in a segmentation fault more often than in an error."""
    batch = take(samples, range(8))
    batch.encoded[2] = np.frombuffer(b"this was an image once, long ago", np.uint8)
    batch.dims[5] = (4000, 4000)
    good = take(samples, range(6))
    with Bench(imagenet_train(32), check_headers=True) as bench:
        wanted = bench(good)
        for _ in range(20):
            bench.feed(batch)
            bench.feed(good)
            with pytest.raises(CorruptSampleError, match=r"Sample 2007 .*not an image.* 5007\."):
                bench.graph.outputs()
            assert torch.equal(bench.graph.outputs(), wanted)
        batch.encoded[2] = batch.encoded[5]
        batch.dims[2] = batch.dims[5]
        with pytest.raises(CorruptSampleError, match="pixels, and 4000 x 4000 was stored"):
            bench(batch)


def test_draining_drops_batches_and_their_errors(samples):
    broken = take(samples, range(4))
    broken.encoded[0] = truncated(broken.encoded[0], 0.1)
    with Bench(imagenet_train(32)) as bench:
        wanted = bench(take(samples, range(6)))
        for batch in (broken, take(samples, range(9)), take(samples, []), broken):
            bench.feed(batch)
        bench.graph.drain()
        assert bench.graph.in_flight == 0
        assert torch.equal(bench(take(samples, range(6))), wanted)


def test_close_gives_threads_back_and_may_come_twice(samples):
    def threads():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads"))

    Bench(imagenet_train(32)).graph.close()  # what DALI starts once for the process
    before, ours = threads(), threading.active_count()
    bench = Bench(imagenet_train(32))
    bench.feed(take(samples, range(8)))
    bench.graph.close()
    bench.graph.close()
    assert threads() <= before
    assert threading.active_count() == ours
    with pytest.raises(ClosedError):
        bench.graph.outputs()
    with pytest.raises(ClosedError):
        bench.feed(take(samples, range(8)))


def test_wrong_use_is_refused():
    with (
        Bench(imagenet_train(32), batch_size=4) as bench,
        pytest.raises(PenstockError, match="no batch is in flight"),
    ):
        bench.graph.outputs()


@pytest.mark.parametrize(
    ("platform", "remedy"), [("linux", "penstock\\[dali\\]"), ("darwin", "for Linux only")]
)
def test_a_missing_dali_names_the_remedy(monkeypatch, platform, remedy):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(MissingDependencyError, match=remedy):
        Bench(imagenet_train(32))


def test_constant_decode_delivers_the_right_shape(samples):
    with Bench(imagenet_train(32), constant=True) as bench:
        images = bench(take(samples, range(10)))
        assert images.shape == (10, 3, 32, 32)
        assert images.dtype == torch.float32
        assert not images.any()


def test_reasons_are_one_line():
    error = "Error in CPU operator `x`,\nencountered:\n\nThe window is bad\nC++ context: [a]"
    assert reason_of(RuntimeError(error)) == "The window is bad"
    for unclear in ("encountered:\n\nFailed to decode sample #1 : \n", ""):
        assert reason_of(RuntimeError(unclear)) == "its bytes do not decode"


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_cuda_gives_nearly_the_pixels_of_the_cpu(samples, name):
    batch = take(samples, range(32))
    with Bench(RECIPES[name]) as cpu, Bench(RECIPES[name], device="cuda") as cuda:
        ours, theirs = cpu(batch).float(), cuda(batch)
        assert theirs.device.type == "cuda"
        scale = 1 if cpu.recipe.normalize else 60
        assert (ours - theirs.float().cpu()).abs().mean() < 0.05 * scale


@pytest.mark.gpu
def test_deterministic_cuda_gives_the_same_bits_at_any_batch_size(samples):
    options = {"device": "cuda", "deterministic": True}
    with Bench(imagenet_train(32), **options) as many, Bench(imagenet_train(32), **options) as one:
        whole = many(take(samples, range(96)))
        assert torch.equal(whole, torch.cat([one(take(samples, [row])) for row in range(96)]))


HALF_ERASED = (
    RandomResizedCrop(32),
    RandomHorizontalFlip(),
    Normalize(),
    RandomErasing(p=1.0, value=0.3),
    Cast("float16"),
)


GPU_RECIPES = {
    "train": imagenet_train(32),
    "half erased": HALF_ERASED,
    "half erased behind pixels": (
        Resize((32, 32)),
        ColorJitter(0.4),
        RandomErasing(p=1.0),
        Cast("float16"),
    ),
    "half": (RandomResizedCrop(32), Normalize(), Cast("float16")),
    "erased": (RandomResizedCrop(32), Normalize(), RandomErasing(p=1.0)),
    "bytes erased": (RandomResizedCrop(32), RandomErasing(p=1.0), Cast("uint8")),
    "jitter": (RandomResizedCrop(32), ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "gray": (Decode("gray"), RandomResizedCrop(32), ColorJitter(0.4, 0.4)),
    "policies": (
        RandomResizedCrop(32),
        RandAugment(),
        TrivialAugmentWide(),
        AutoAugment("imagenet"),
    ),
    "padded": (
        RandomCrop(32, padding=4),
        RandomVerticalFlip(),
        RandomHorizontalFlip(),
        Normalize(),
    ),
    "levels": (
        RandomResizedCrop(32),
        RandomPosterize(3),
        Solarize(99),
        RandomEqualize(),
        RandomAutocontrast(),
    ),
    "warped": (RandomResizedCrop(32), RandomAffine(9, (0.1, 0.1)), RandomPerspective()),
    "others": (RandomResizedCrop(32), RandomGrayscale(0.5), GaussianBlur(5), RandomRotation(20)),
}


def defined(recipe: Any, device: Any, **plan: Any) -> list[Any]:
    """The operators of the graph, in order of definition, as far as DALI checks them here."""
    from nvidia.dali import fn, types

    made = GraphPlan(
        check_recipe(recipe, images=SIZES),
        batch_size=4,
        threads=1,
        device_id=0 if device == "cuda" else None,
        **plan,
    )
    pipe = load_dali().Pipeline(
        batch_size=4, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True
    )
    with pipe:
        where = "gpu" if made.resident and device == "cuda" else "cpu"
        form: Any = {"ndim": 3, "layout": "HWC"} if made.pixels else {"ndim": 1}
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, device=where, **form)
        pipe.set_outputs(*define_outputs(made, encoded))
    if device == "cuda":
        assert pipe.serialize()
    else:
        pipe.build()
    return list(pipe._ops)


def kinds(operators: list[Any]) -> list[str]:
    """Such as Erase, of those that DALI named itself."""
    found = (re.fullmatch(r"__(\w+?)_\d+", operator.name) for operator in operators)
    return [name[1] for name in found if name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["half erased", "half erased behind pixels"])
def test_what_is_erased_becomes_half_behind_it(name: str, device: str) -> None:
    """DALI's Erase on the GPU: uint8 to int64 and float, no float16."""
    assert kinds(defined(GPU_RECIPES[name], device))[-2:] == ["Erase", "Cast"]


@pytest.mark.parametrize("name", ["half", "erased", "bytes erased"])
def test_nothing_is_cast_where_erase_knows_the_type(name: str) -> None:
    assert kinds(defined(GPU_RECIPES[name], "cuda"))[-1] in ("CropMirrorNormalize", "Erase")


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_every_recipe_has_a_graph_for_cuda_that_never_asks_the_host(name: str) -> None:
    operators = defined(GPU_RECIPES[name], "cuda")
    for operator in operators:
        inputs = [node for node in operator.inputs if not isinstance(node, list)]
        if any(node.device == "gpu" for node in inputs):
            assert all(node.device == "gpu" for node in operator.outputs), operator.name
    assert operators[-1].outputs[0].device == "gpu"


@pytest.mark.parametrize("given", ["pixels", "resident"])
def test_decoded_pixels_have_a_graph_for_cuda(given: str) -> None:
    operators = defined(HALF_ERASED, "cuda", **{"pixels": True, given: True})
    assert not any("decoder" in kind.lower() for kind in kinds(operators))
    assert operators[-1].outputs[0].device == "gpu"


def jpeg_batch(count: int, *, first_id: int = 0) -> EncodedBatch:
    """Return photographs as JPEGs."""
    pictures = [photograph(number) for number in range(count)]
    return EncodedBatch(
        ids=np.arange(count) + first_id,
        encoded=[encoded_array(picture, "JPEG", quality=90) for picture in pictures],
        dims=np.array([picture.shape[:2] for picture in pictures], np.int32),
    )


@pytest.fixture(scope="module")
def batch() -> EncodedBatch:
    return jpeg_batch(16)


def images(recipe: Any, batch: EncodedBatch, device: str = "cpu") -> torch.Tensor:
    checked = check_recipe(recipe, images=SIZES)
    number = 0 if device == "cuda" else None
    graph = Graph(GraphPlan(checked, batch_size=len(batch.ids), threads=2, device_id=number))
    try:
        graph.feed(batch, draw(checked, ids=batch.ids, dims=batch.dims, seed=3, epoch=0))
        return graph.outputs().cpu()
    finally:
        graph.close()


@pytest.mark.skipif(not dali_nodes.is_compiled(), reason="no numba")
@pytest.mark.parametrize("recipe", [HALF_ERASED, HALF_ERASED[:-1]])
def test_what_was_resized_by_the_compiled_pass_is_erased(
    batch: EncodedBatch, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = images(recipe, batch)
    monkeypatch.setattr(dali_nodes, "is_compiled", lambda: False)
    # Resampled pixels differ a little; which of them are erased doesn't.
    assert torch.equal(compiled == compiled.new_tensor(0.3), images(recipe, batch) == 0.3)
    assert (compiled == compiled.new_tensor(0.3)).any()


@pytest.mark.parametrize("name", ["half erased", "half erased behind pixels"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_is_what_was_erased_in_full(batch: EncodedBatch, name: str, device: str) -> None:
    recipe = GPU_RECIPES[name]
    half, full = images(recipe, batch, device), images(recipe[:-1], batch, device)
    assert half.dtype == torch.float16
    assert torch.equal(half, full.half())
    untouched = images([op for op in recipe if not isinstance(op, RandomErasing)], batch, device)
    assert (half != untouched).any()
