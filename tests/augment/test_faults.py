"""Test failed batches: faults of the sample and of the machine are distinguished by
DALI's messages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.augment import (
    DaliPipeline,
    FullImageDecoder,
    Graph,
    GraphPlan,
    check_recipe,
    dali_runs,
    draw,
    failing_rows,
    fault_of,
    imagenet_eval,
    reason_of,
)
from penstock.augment import graph as batches
from penstock.cache import DeviceError, PenstockError
from penstock.readers import EncodedBatch, ImageRange
from tests.augment.test_graph import jpeg_batch

if TYPE_CHECKING:
    from penstock.augment import DecodedBatch

SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)


def dali_says(text: str, operator: str = "fn.decoders.image_slice", device: str = "Mixed") -> str:
    """Wrap a message as DALI 2.4 does; the user's lines are in the traceback."""
    return (
        "Critical error in pipeline:\nCritical error in pipeline:\n"
        f"Error in {device} operator `nvidia.dali.{operator}`,\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        '  File "/home/u/CUDA_ERROR/alloc/out of memory.py", line 12, in run\n'
        "    images = allocated(encoded)  # cudaError, bad_alloc\n\n"
        f"encountered:\n\n{text}\n"
        "Current pipeline object is no longer valid.\nCurrent pipeline object is no longer valid."
    )


MACHINE = [
    "Unsupported data type: float16\nC++ context: [/opt/dali/operators/generic/erase/erase.cu:129]",
    "Unsupported type: 9",
    "CUDA runtime API error cudaErrorIllegalAddress (700):\nan illegal memory access was "
    "encountered",
    "CUDA driver API error CUDA_ERROR_NO_DEVICE (100):\nno CUDA-capable device is detected",
    "CUDA driver API error CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803):\nsystem has unsupported "
    "display driver / cuda driver combination",
    "CUDA runtime API error cudaErrorNoKernelImageForDevice (209):\nno kernel image is available "
    "for execution on the device",
    *(
        f"nvImageCodec failure: '#{code}'"
        for code in (1, 2, 6, 7, 8, 9, 10, 11, 12, 16, 18, 20, 21)
    ),
    "nvImageCodec failure: 'NVIMGCODEC_STATUS_INTERNAL_ERROR'",
    "nvImageCodec failure",
    "nvjpeg error (8): NVJPEG_STATUS_ARCH_MISMATCH",
    "The pipeline requires a CUDA-capable GPU but the CUDA driver is not installed or its version "
    "is insufficient.",
]
MEMORY = [
    "CUDA allocation failed",
    "Can't allocate 1073741824 bytes on device 0.",
    "Can't allocate 1073741824 bytes on host.",
    "std::bad_alloc",
    "CUDA driver API error CUDA_ERROR_OUT_OF_MEMORY (2):\nout of memory",
    "nvImageCodec failure: '#5'",
    "nvImageCodec failure: '#15'",
]
SAMPLE = [
    "Failed to decode sample #1 : ",
    "nvImageCodec failure: '#3'",
    "nvImageCodec failure: '#4'",
    "nvImageCodec failure: '#17'",
    "The cropping window [0..500, 0..10] is not valid for image dimensions [64 x 64]\n"
    "C++ context: [/opt/dali/dali/util/crop_window.h:91] ",
    "Invalid sample_type: 3",
]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        *(("machine", text) for text in MACHINE),
        *(("memory", text) for text in MEMORY),
        *(("sample", text) for text in SAMPLE),
        ("unclear", "Something that no version has said yet"),
    ],
)
def test_a_message_states_whose_fault_it_is(fault: str, text: str, wrapped: bool) -> None:
    message = dali_says(text) if wrapped else f"Critical error in pipeline:\n{text}"
    assert fault_of(RuntimeError(message)) == fault


@pytest.mark.parametrize("text", MACHINE + MEMORY)
def test_the_machines_fault_is_no_samples(text: str) -> None:
    with pytest.raises(DeviceError) as raised:
        dali_runs.check_machine(RuntimeError(dali_says(text)))
    assert isinstance(raised.value, PenstockError)
    assert text.splitlines()[0].strip(" :") in str(raised.value)
    assert "no image" not in str(raised.value)
    assert "/home/u" not in str(raised.value)


@pytest.mark.parametrize("text", SAMPLE)
def test_a_samples_fault_is_not_the_machines(text: str) -> None:
    dali_runs.check_machine(RuntimeError(dali_says(text)))
    assert "codec" not in reason_of(RuntimeError(dali_says(text)))


def test_the_search_for_culprits_ends_with_the_machine() -> None:
    tried: list[list[int]] = []

    def run(rows: list[int]) -> None:
        tried.append(rows)
        raise DeviceError("gone")

    with pytest.raises(DeviceError, match="gone"):
        failing_rows(list(range(8)), run)
    assert tried == [list(range(8))]


# -- the graph, with a DALI that fails on demand


@pytest.fixture
def batch() -> EncodedBatch:
    return jpeg_batch(8, first_id=100)


class Failing:
    """In the place of `DaliPipeline.take`: fails in its own words, each time or the first times."""

    def __init__(self, text: str, monkeypatch: pytest.MonkeyPatch, times: int = 10**6) -> None:
        self.left, self.calls = times, 0
        take = DaliPipeline.take

        def fails(pipe, samples):
            images = take(pipe, samples)
            self.calls += 1
            if self.left > 0:
                self.left -= 1
                raise RuntimeError(dali_says(text))
            return images

        monkeypatch.setattr(DaliPipeline, "take", fails)


def decoded(batch: EncodedBatch, graph: Graph, recipe) -> DecodedBatch:
    draws = draw(recipe, ids=batch.ids, dims=batch.dims, seed=1, epoch=0)
    graph.feed(batch, draws)
    return graph.outputs_marked()


@pytest.fixture
def recipe():
    return check_recipe(imagenet_eval(32, resize=40), images=SIZES)


@pytest.fixture
def graph(recipe):
    made = Graph(GraphPlan(recipe, batch_size=8, threads=1))
    yield made
    made.close()


UNKNOWN = "Something that no version reports"


@pytest.mark.parametrize(
    ("text", "message", "calls"),
    [
        # No other call searches for a bad sample.
        (MACHINE[0], "no sample is the cause", 1),
        (MACHINE[2], "no sample is the cause", 1),
        ("nvImageCodec failure: '#8'", "no sample is the cause", 1),
        (MEMORY[0], "ran out of memory", 1),
        ("nvImageCodec failure: '#17'", "whose header it can read", None),
        (UNKNOWN, rf"all 8 samples.*{UNKNOWN}", None),
    ],
)
def test_a_batch_that_the_machine_failed_ends_the_run(
    batch: EncodedBatch, graph: Graph, recipe, text, message, calls, monkeypatch
) -> None:
    failing = Failing(text, monkeypatch)
    with pytest.raises(DeviceError, match=message):
        decoded(batch, graph, recipe)
    assert calls in (None, failing.calls)


def test_an_unknown_reason_for_some_is_theirs(
    batch: EncodedBatch, graph: Graph, recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The whole batch, a quarter of it, and the first of that alone.
    Failing("Something that no version has said yet", monkeypatch, times=3)
    assert decoded(batch, graph, recipe).bad == {0: "Something that no version has said yet"}


def test_runs_and_batches_stay_in_step_when_the_machine_fails(
    batch: EncodedBatch, graph: Graph, recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = decoded(batch, graph, recipe).images
    torn = replace(batch, ids=batch.ids + 1000, encoded=[batch.encoded[0][:99], *batch.encoded[1:]])
    assert list(decoded(torn, graph, recipe).bad) == [0]  # from here on the graph is careful
    monkeypatch.setattr(batches, "SMALL_RUN_SAMPLES", 3)
    failing = Failing(MACHINE[2], monkeypatch, times=1)
    with pytest.raises(DeviceError):
        decoded(batch, graph, recipe)
    assert failing.calls == 3
    assert decoded(batch, graph, recipe).images.equal(whole)


def test_whole_images_are_not_left_out_for_the_machines_faults(batch: EncodedBatch, recipe) -> None:
    decoder = FullImageDecoder(GraphPlan(recipe, batch_size=8, threads=1))

    class Broken:
        def schedule(self, _):
            pass

        def output(self):
            raise RuntimeError(dali_says(MACHINE[2]))

    decoder.pipeline = cast("Any", Broken())
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        list(decoder(batch.encoded, [1] * 8))
