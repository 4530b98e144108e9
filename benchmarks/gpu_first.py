"""`python -m benchmarks.gpu_first WHAT --data DIR`: the first check of a GPU, one process per case.

canary: whether it decodes at all: whole images and windows, with and without the JPEG unit.
decoding: ways of decoding windows, shares of the JPEG unit, threads, preallocation: one after the
other, each with the best settings before it (--grid: all combinations). operations: the cost
without decoding, then crops, policies and jitter; GPU memory. where: decoding on the CPU with
pinned memory compared with decoding on the GPU, both with a training step.

Each WHAT ends within --minutes and writes benchmarks/results/gpu-WHAT.json. Without a GPU nothing
is measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.console import Console

from benchmarks.data import prepare
from benchmarks.gpu_cases import Answer, Budget, ask, facts, has_cuda, refused
from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import machine, send_to_parent, tree_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock import Operation

What = Literal["canary", "decoding", "operations", "where"]
Case = dict[str, Any]

HW_LOADS = (0.65, 0.0, 0.5, 0.8, 0.95)  # DALI's default first
WAYS = ("decoder", "slice")
MINUTES = {"canary": 4.0, "decoding": 8.0, "operations": 5.0, "where": 3.0}
CANARY = {
    "image": {},
    "image_slice": {},
    "image_slice, no JPEG unit": {"hw_decoder_load": 0.0},
    "image_random_crop": {},
}
OPERATIONS = ("nothing decoded", "crops", "TrivialAugmentWide", "RandAugment", "ColorJitter")


def canary_cases(base: Case) -> list[Case]:
    """Return each way of decoding as a case."""
    return [{**base, "what": "canary", "name": name, "batches": 10} for name in CANARY]


def decoding_grid(base: Case, threads: tuple[int, ...]) -> list[Case]:
    """Return all combinations of the settings."""
    grid = itertools.product(WAYS, HW_LOADS, threads, (False, True))
    return [
        {**base, "what": "decoding", "windows": w, "hw_load": load, "threads": n, "preallocate": p}
        for w, load, n, p in grid
    ]


def decoding_one_by_one(
    base: Case, threads: tuple[int, ...], rate: Callable[[Case], float]
) -> Case:
    """Return the best case: each setting is tried with the best of those before. rate:
    plays one."""
    best: Case = {
        **base,
        "what": "decoding",
        "windows": WAYS[0],
        "hw_load": HW_LOADS[0],
        "threads": threads[0],
        "preallocate": False,
    }
    known = {json.dumps(best): rate(best)}
    for name, values in (
        ("windows", WAYS),
        ("hw_load", HW_LOADS),
        ("threads", threads),
        ("preallocate", (False, True)),
    ):
        for value in values:
            case = {**best, name: value}
            known.setdefault(json.dumps(case), -1.0)
            if known[json.dumps(case)] < 0:
                known[json.dumps(case)] = rate(case)
        best = json.loads(max(known, key=lambda case: known[case]))
    return best


def operation_cases(base: Case) -> list[Case]:
    """Return the cases of operations after the decoder."""
    return [{**base, "what": "operations", "name": name} for name in OPERATIONS]


def where_cases(base: Case) -> list[Case]:
    """Return cases on the CPU and on the GPU, alternating."""
    places = ("cpu", base["device"], base["device"], "cpu")
    return [{**base, "what": "where", "decodes_on": place} for place in places]


# -- inside a case's process


def canary_nodes(name: str, device: str) -> Any:
    """Define the decoded images; called within a pipeline's definition."""
    from nvidia.dali import fn, types

    encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    options = {"output_type": types.RGB, **CANARY[name]}
    if device.startswith("cuda"):
        options["device"] = "mixed"
    else:
        options.pop("hw_decoder_load", None)
    operator = getattr(fn.decoders, name.partition(",")[0])
    window = {"rel_start": [0.13, 0.21], "rel_shape": [0.6, 0.5], "axes": [0, 1]}
    return operator(encoded, **(window if "slice" in name else {}), **options)


def _canary(case: Case) -> dict[str, Any]:
    import numpy as np
    from nvidia.dali import Pipeline

    from penstock import Dataset

    with Dataset(case["pack"]) as dataset:
        n = min(case["batch_size"], int(dataset.index.sizes[0]))
        samples = (
            dataset.read(np.array([(0, row) for row in range(n)], np.int64))
            .encoded("image")
            .encoded
        )
    device_id = 0 if case["device"].startswith("cuda") else None
    pipe = Pipeline(batch_size=n, num_threads=4, device_id=device_id, prefetch_queue_depth=1)
    with pipe:
        pipe.set_outputs(canary_nodes(case["name"], case["device"]))
    pipe.build()
    began = time.perf_counter()
    for _ in range(case["batches"]):
        pipe.feed_input("encoded", list(samples))
        (images,) = pipe.run()
        images = images.as_cpu() if device_id is not None else images
        mean = float(np.mean([np.array(image).mean() for image in images]))
    took_s = time.perf_counter() - began
    return {"images_per_s": n * case["batches"] / took_s, "mean": mean}


def recipe_of(case: Case) -> tuple[Operation, ...]:
    """Return the operations of a case, and its settings of the decoder."""
    from penstock import ColorJitter, Decode, RandAugment, TrivialAugmentWide, imagenet_train

    _, crop, flip, *rest = imagenet_train(case["size"])
    decode = Decode(
        windows=case.get("windows", "auto"),
        hw_decoder_load=case.get("hw_load"),
        preallocate=tuple(case["largest"]) if case.get("preallocate") else None,
    )
    more = {
        "TrivialAugmentWide": (TrivialAugmentWide(),),
        "RandAugment": (RandAugment(),),
        "ColorJitter": (ColorJitter(0.4, 0.4, 0.4, 0.1),),
    }
    return decode, crop, flip, *more.get(case.get("name", ""), ()), *rest


def _batches(case: Case, *, device: str, pin: bool = False) -> Iterator[Any]:
    from penstock import DataLoader, Dataset

    with (
        Dataset(case["pack"]) as dataset,
        DataLoader(
            dataset,
            batch_size=case["batch_size"],
            shuffle=True,
            drop_last=True,
            seed=7,
            num_workers=case.get("threads") or int(machine()["cores"]),
            augment=recipe_of(case),
            device=device,
            pin_memory=pin,
        ) as loader,
    ):
        while True:
            yield from loader


def _rate(batches: Iterator[Any], case: Case, use: Callable[[Any], Any]) -> dict[str, Any]:
    for _ in range(case["settle"]):
        use(next(batches))
    _synchronise(case)
    images, began, cpu_s = 0, time.perf_counter(), tree_cpu_s()
    for _ in range(case["timed"]):
        batch = next(batches)
        images += len(batch[1])
        use(batch)
    _synchronise(case)
    took_s, used_s = time.perf_counter() - began, tree_cpu_s() - cpu_s
    return {"images_per_s": images / took_s, "cpu_s_per_1000": 1000 * used_s / images}


def _synchronise(case: Case) -> None:
    if case["device"].startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _free_bytes(case: Case) -> int | None:
    if not case["device"].startswith("cuda"):
        return None
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _decoding(case: Case) -> dict[str, Any]:
    batches = _batches(case, device=case["device"])
    return _rate(batches, case, lambda _: None)


def _operations(case: Case) -> dict[str, Any]:
    before = _free_bytes(case)
    if case["name"] == "nothing decoded":
        report = _rate(_undecoded(case), case, lambda _: None)
    else:
        report = _decoding(case)
    return {**report, "free_before": before, "free_after": _free_bytes(case)}


def _undecoded(case: Case) -> Iterator[Any]:
    """Yield batches that are read, drawn for and fed, without decoding."""
    import numpy as np

    from penstock import Dataset
    from penstock.augment import Graph, GraphPlan, check_recipe, draw

    with Dataset(case["pack"]) as dataset:
        recipe = check_recipe(recipe_of(case), images=dataset.index.images["image"])
        n = min(case["batch_size"], int(dataset.index.sizes[0]))
        rows = np.array([(0, row) for row in range(n)], np.int64)
        graph = Graph(
            GraphPlan(
                recipe,
                batch_size=n,
                threads=int(machine()["cores"]),
                device_id=0 if case["device"].startswith("cuda") else None,
                constant=True,
            )
        )
        try:
            for epoch in itertools.count():
                batch = dataset.read(rows).encoded("image")
                draws = draw(recipe, ids=batch.ids, dims=batch.dims, seed=7, epoch=epoch)
                graph.feed(batch, draws)
                yield graph.outputs(), batch.ids
        finally:
            graph.close()


def _where(case: Case) -> dict[str, Any]:
    import torch

    from benchmarks.resnet import resnet50, training_step

    torch.manual_seed(7)
    device = torch.device(case["device"])
    step = training_step(resnet50(stem=case.get("stem", 64)), device=device)
    on_cpu = case["decodes_on"] == "cpu"
    batches = _batches(case, device=case["decodes_on"], pin=on_cpu)

    def use(batch: Any) -> None:
        step(*(tensor.to(device, non_blocking=True) for tensor in batch))

    return _rate(batches, case, use)


PLAY: dict[str, Callable[[Case], dict[str, Any]]] = {
    "canary": _canary,
    "decoding": _decoding,
    "operations": _operations,
    "where": _where,
}


# -- the parent


def measure(
    what: What,
    base: Case,
    *,
    threads: tuple[int, ...],
    grid: bool = False,
    minutes: float | None = None,
    results: Path = RESULTS,
    console: Console,
    play: Callable[[Case, Budget], Answer] | None = None,
) -> Path:
    """Play all cases, print and write their answers. base: pack, device, batch_size, size, settle,
    timed, largest. play: for tests. Returns the record's path."""
    play = play or (lambda case, budget: ask("benchmarks.gpu_first", case, budget=budget))
    budget = Budget(60 * (MINUTES[what] if minutes is None else minutes))
    report: list[dict[str, Any]] = []

    def played(case: Case) -> Answer:
        answer = play(case, budget)
        shown = {key: value for key, value in case.items() if key not in base and key != "what"}
        report.append({"case": shown, **answer.record()})
        console.print(shown, answer.record(), highlight=False)
        return answer

    best: Mapping[str, Any] | None = None
    if what == "decoding" and not grid:
        best = decoding_one_by_one(
            base, threads, lambda case: float(played(case).told.get("images_per_s", 0.0))
        )
    else:
        cases = {
            "canary": canary_cases,
            "decoding": lambda base: decoding_grid(base, threads),
            "operations": operation_cases,
            "where": where_cases,
        }[what](base)
        for case in cases:
            played(case)
    chosen = {key: value for key, value in (best or {}).items() if key not in base}
    work = {key: value for key, value in base.items() if key != "pack"}
    record = {"gpu": facts(), "work": work, "cases": report, "best": chosen}
    return write_result(f"gpu-{what}", record, folder=results)


def base_case(pack: Path, *, device: str, batch_size: int, size: int, quick: bool) -> Case:
    """Return the settings that all cases share."""
    from penstock import Dataset

    with Dataset(pack) as dataset:
        images = dataset.index.images["image"]
    largest = (0, 0) if images is None else (images.max_height, images.max_width)
    return {
        "pack": str(pack.absolute()),
        "device": device,
        "batch_size": batch_size,
        "size": size,
        "largest": list(largest),
        "settle": 2 if quick else 10,
        "timed": 4 if quick else 60,
    }


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure; with --case, run one case. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=get_args(What))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="few batches, for a quick check")
    parser.add_argument("--grid", action="store_true", help="decoding: all combinations (an hour)")
    parser.add_argument("--minutes", type=float, help="time limit of all cases")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--pack", type=Path, help="a local pack instead of --data")
    parser.add_argument(
        "--work", type=Path, default=Path("demo"), help="folder for images and packs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="pixels of a crop's side")
    parser.add_argument("--threads", type=int, nargs="+", default=[8, 14, 16])
    options = parser.parse_args(argv)
    if options.case:
        case = json.loads(options.case)
        send_to_parent(PLAY[case["what"]](case))
        return 0
    if options.what is None:
        parser.error(f"wanted one of {', '.join(get_args(What))}")
    if not has_cuda():
        return refused()
    pack = options.pack or prepare(options.work, data=options.data).pack
    base = base_case(
        pack, device="cuda", batch_size=options.batch_size, size=options.size, quick=options.quick
    )
    console = Console()
    path = measure(
        options.what,
        base,
        threads=tuple(options.threads),
        grid=options.grid,
        minutes=options.minutes,
        results=options.results,
        console=console,
    )
    console.print(f"   {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
