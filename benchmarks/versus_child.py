"""Run one side of `benchmarks.versus`: a short job with the packages of one checkout, in a process.

Run it as a file with `python -P` and PYTHONPATH set to the checkout. It imports only the public
names of either layout, so that it also runs older and newer checkouts. A task as JSON in the only
argument, JSON on the last line of stdout.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Where releases before the move to `penstock` had their public names: for comparing with those.
WHERE_BEFORE = {
    "Dataset": "readers",
    "pack": "readers",
    "DataLoader": "pipeline",
    "imagenet_train": "augment",
}


def public(name: str, checkout: Path) -> Any:
    """Import a public name of the checkout. Raises SystemExit if another copy would be imported."""
    is_package = (checkout / "penstock").is_dir()
    module = importlib.import_module("penstock" if is_package else WHERE_BEFORE[name])
    found = Path(str(module.__file__)).resolve()
    if checkout not in found.parents:
        raise SystemExit(f"{module.__name__} came from {found}, wanted it from {checkout}.")
    return getattr(module, name)


def cpu_s(pid: int) -> float:
    """Return the CPU-seconds of a process and its children, including those that still run.

    /proc/PID/stat counts ended children only; the clock of a running one is identified by the
    complement of its id shifted left by three, plus 2 (clock_getcpuclockid(3)).
    """
    ended = os.times() if pid == os.getpid() else None
    total = ended.children_user + ended.children_system if ended else 0.0
    try:
        total += time.clock_gettime((~pid << 3) | 2)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(map(cpu_s, map(int, children.read_text().split())))
    except OSError:  # it ended meanwhile: os.times counts it next time
        pass
    return total


class Decoded:
    """A torch dataset of the same files, decoded by Pillow in workers."""

    def __init__(self, files: list[str], size: int) -> None:
        self._files, self._size = files, size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Any:
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self._files[number]) as image:
            small = image.convert("RGB").resize((self._size, self._size))
        return torch.from_numpy(np.asarray(small).copy()), number


def build(task: dict[str, Any], checkout: Path) -> Any:
    """Build the loader of a case."""
    loader_of = public("DataLoader", checkout)
    asked = {"batch_size": task["batch_size"], "shuffle": True, "drop_last": True}
    if task["case"] == "torch":
        files = sorted(map(str, Path(task["folder"]).rglob("*.jpg")))
        dataset = Decoded(files, task["size"])
        return loader_of(dataset, num_workers=task["workers"], seed=7, **asked)
    place = task["folder"] if task["case"] == "folder" else task["pack"]
    recipe = public("imagenet_train", checkout)(task["size"])
    dataset = public("Dataset", checkout)(place)
    return loader_of(dataset, num_workers=task["workers"], augment=recipe, seed=7, **asked)


def prepare(task: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """Write a pack and an index for this checkout, as formats may differ."""
    public("pack", checkout)(task["folder"], task["pack"], workers=task["workers"])
    with public("Dataset", checkout)(task["folder"]) as dataset:
        dataset.open()
    return {"prepared": task["pack"]}


def play(task: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """Measure from before the loader is built; imports are counted separately."""
    began = time.perf_counter()
    for name in WHERE_BEFORE:
        public(name, checkout)
    importlib.import_module("torch")
    if task["case"] != "torch":
        importlib.import_module("nvidia.dali")
    built, cpu_built = time.perf_counter(), cpu_s(os.getpid())
    with build(task, checkout) as loader:
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        next(endless)
        first_s, first_cpu_s = time.perf_counter() - built, cpu_s(os.getpid()) - cpu_built
        for _ in range(task["settle"]):
            next(endless)
        wall, cpu, samples = time.perf_counter(), cpu_s(os.getpid()), 0
        for images, _ in itertools.islice(endless, task["timed"]):
            samples += len(images)
        wall, cpu = time.perf_counter() - wall, cpu_s(os.getpid()) - cpu
    return {
        "import_s": built - began,
        "first_batch_s": first_s,
        "first_batch_cpu_s": first_cpu_s,
        "samples": samples,
        "samples_per_s": samples / wall,
        "cpu_s_per_1000": 1000 * cpu / samples,
    }


def main() -> None:
    """Run the task."""
    task = json.loads(sys.argv[1])
    checkout = Path(task["checkout"]).resolve()
    report = {"prepare": prepare, "play": play}[task["what"]](task, checkout)
    sys.stdout.write(f"\n{json.dumps(report)}\n")


if __name__ == "__main__":
    main()
