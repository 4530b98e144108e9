"""Record order values and states: the samples of each rank, and how a job continues."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.utils.data

import penstock
from penstock.pipeline import Order
from tests.goldens.material import SOURCES, Case, Material, digest, loader, plain, spaced

WORLDS, EPOCHS = (1, 3), (0, 6)
USUAL: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": True, "global_batch_size": 12}
SMALL: dict[str, Any] = {**USUAL, "global_batch_size": 8}
WIDE: dict[str, Any] = {**USUAL, "global_batch_size": 48}
BY_TOKENS = {**USUAL, "global_batch_size": None, "batch_tokens": {"tokens": 400}}
SETTINGS: dict[str, dict[str, Any]] = {
    "shuffled": WIDE,
    "another seed": {**WIDE, "seed": 2**40 + 1},
    "in index order": {**WIDE, "shuffle": False},
    "padded": {**WIDE, "drop_last": False, "pad": "mask"},
    "lanes": {**WIDE, "order": Order(lanes=2, window=2)},
    "reshuffle": {**WIDE, "order": Order(lanes=4, reshuffle=0.3)},
    "slots by rank": {**WIDE, "order": Order(slots="rank")},
    "growing": {**WIDE, "global_batch_size": {0: 24, 200: 36, 700: 60}},
    "odd batch": {**WIDE, "global_batch_size": 47},
    "per rank": {**WIDE, "global_batch_size": None, "batch_size": 16},
    "tokens": BY_TOKENS,
    "padded tokens": {**BY_TOKENS, "augment": [penstock.Pad("tokens")]},
}
WITHIN_EPOCH = {"torch, its own order": 11, "torch, drawing stream": 6}
"""Jobs whose later epochs draw from the process's generators, which no state holds."""


class Numbers(torch.utils.data.Dataset[Any]):
    """A map-style torch dataset: an item's number, and draws of two generators."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, np.random.randint(10**6), int(torch.randint(10**6, ()))


class Drawing(torch.utils.data.IterableDataset[Any]):
    """A stream without a state, that draws."""

    def __iter__(self) -> Any:
        return ((number, np.random.randint(9**9), torch.rand(())) for number in range(30))


class Remembering(torch.utils.data.IterableDataset[Any]):
    """A stream with a state of its own."""

    at = 0

    def __iter__(self) -> Any:
        while self.at < 30:
            self.at += 1
            yield self.at - 1, 0
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def walk(dataset: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Read epochs on every rank of every world, and return what came."""
    found: dict[str, Any] = {}
    for size in WORLDS:
        ranks: list[list[Any]] = []
        for rank in range(size):
            with loader(dataset, world=(rank, size), **settings) as each:
                ranks.append([])
                for epoch in EPOCHS:
                    each.set_epoch(epoch)
                    ranks[-1].append([plain(batch) for batch in each])
        found[f"{size} ranks"] = {
            "steps": spaced([[len(epoch) for epoch in epochs] for epochs in ranks]),
            "first": [spaced(epochs[0][0][0][:6]) for epochs in ranks],
            "batches": digest(ranks),
        }
    return found


def steps(material: Material) -> dict[str, Any]:
    """Ask for steps by their numbers, far ones too, and skip to one."""
    found: dict[str, Any] = {}
    for size in (1, 2, 5, 8):
        with loader(material.open("wide-pack", "id"), world=(0, size), **WIDE) as each:
            for step in (0, 7, 12345):
                ids = [each.samples_of(step, rank=rank).tolist() for rank in (*range(size), None)]
                found[f"{size} ranks, step {step}"] = f"{spaced(ids[-1][:4])} … {digest(ids)}"
            each.skip(61)
            found[f"{size} ranks, skipped"] = spaced([each.step, each.epoch, *next(iter(each))[0]])
    return found


def parts(material: Material) -> dict[str, Any]:
    """Walk subsets, splits and datasets end to end."""
    wide, folder = material.open("wide-pack", "id"), material.open("folder", "id")
    table, by_class = material.open("parquet", "id"), material.open("pack", "id")
    half, fifth = wide.split(0.5, 0.2, seed=9)
    sources = {
        "subset": wide.subset(range(100, 400, 3)),
        "mask": wide.subset(np.arange(600) % 7 > 2).subset(range(3, 597, 7)),
        "half": half,
        "by class": by_class.split(0.5, 0.5, seed=1, by="label")[1],
        "by group": table.split(0.6, 0.4, seed=2, by=[number // 5 for number in range(85)])[0],
        "end to end": penstock.concat([wide, folder, fifth]),
    }
    return {name: {"samples": len(each), **walk(each, USUAL)} for name, each in sources.items()}


def of_format(name: str, material: Material) -> dict[str, Any]:
    with material.open(name, "id") as dataset:
        names = dataset.names(range(len(dataset)))
        facts = {"samples": len(dataset), "left out": sum(dataset.left_out.values())}
        schema = {field: repr(type) for field, type in dataset.schema.items()}
        return {**facts, "names": [names[0], digest(names)], **schema, **walk(dataset, SMALL)}


def with_setting(name: str, material: Material) -> dict[str, Any]:
    fields = ("documents", "id", "tokens") if "tokens" in name else ("wide-pack", "id")
    return walk(material.open(*fields), SETTINGS[name])


ORDERS: dict[str, Case] = {"steps": steps, "parts": parts}
ORDERS |= {f"format: {name}": partial(of_format, name) for name in SOURCES}
ORDERS |= {f"setting: {name}": partial(with_setting, name) for name in SETTINGS}
ORDERS["torch dataset"] = lambda _: walk(Numbers(), SMALL)
ORDERS["torch dataset, lanes"] = lambda _: walk(
    Numbers(), {**SMALL, "order": Order(lanes=2, reshuffle=0.5)}
)


def _refuse(number: Any) -> Any:
    if int(number) % 50 == 7:
        raise penstock.BadSampleError("recorded")
    return number


def _native(name: str, *fields: str, **settings: Any) -> Case:
    arguments = {**USUAL, "global_batch_size": 24, **settings}
    return lambda material: loader(material.open(name, "id", *fields), **arguments)


def _torch(make: Any, **settings: Any) -> Case:
    def made(_: Material) -> Any:
        torch.manual_seed(5)
        np.random.seed(6)
        return loader(make(), batch_size=4, **settings)

    return made


def _plain_torch() -> Any:
    return torch.utils.data.TensorDataset(torch.arange(50), -torch.arange(50))


def _parts(material: Material) -> Any:
    half, _ = material.open("wide-pack", "id").split(0.7, 0.3, seed=4)
    both = [half.subset(np.arange(len(half)) % 2 == 0), material.open("parquet", "id")]
    return loader(penstock.concat(both), **USUAL)


def _moved(material: Material) -> Any:
    """Begin on one rank, and go on as one of three with other batches."""
    with _native("wide-pack")(material) as first:
        list(islice(first, 7))
        state = json.loads(json.dumps(first.state_dict()))
    second = _native("wide-pack", world=(2, 3), global_batch_size=45)(material)
    second.load_state_dict(state)
    return second


def _ordered(material: Material) -> Any:
    """Take up a job of two ranks whose caches gave its six lanes another order."""
    found = _native("wide-pack", world=(1, 2), order=Order(lanes=6))(material)
    found.load_state_dict({**found.state_dict(), "lane_order": "groups:6:BQABAAMABAACAAAA"})
    return found


_MAP = penstock.Map(_refuse, fields="id", returns={"n": penstock.Value("int64")})
JOBS: dict[str, Case] = {
    **{name: _native(name, **SMALL) for name in SOURCES},
    "rank 1 of 2": _native("wide-pack", world=(1, 2)),
    "in index order": _native("wide-pack", shuffle=False, seed=None),
    "order settings": _native(
        "wide-pack", order=Order(lanes=3, window=2, reshuffle=0.25, slots="rank")
    ),
    "growing": _native("wide-pack", global_batch_size={0: 24, 100: 48, 900: 60}),
    "padded": _native("wide-pack", drop_last=False, pad="mask", global_batch_size=70),
    "per rank": _native("wide-pack", drop_last=False, global_batch_size=None, batch_size=70),
    "by tokens": _native("documents", "tokens", **BY_TOKENS, world=(0, 2)),
    "bad samples": _native("wide-pack", max_bad=0.2, augment=[_MAP]),
    "parts": _parts,
    "moved": _moved,
    "lane order": _ordered,
    "torch, planned": _torch(Numbers, seed=3, shuffle=True),
    "torch, rank 1 of 2": _torch(Numbers, seed=3, shuffle=True, world=(1, 2), drop_last=True),
    "torch, its own order": _torch(_plain_torch, shuffle=True),
    "torch, in order": _torch(_plain_torch),
    "torch, drawing stream": _torch(Drawing),
    "torch, stream with a state": _torch(Remembering),
}


def follow(name: str, each: penstock.DataLoader[Any], batches: list[Any]) -> dict[str, Any]:
    """Read on over the ends of epochs, to 40 batches, and describe all."""
    wanted = WITHIN_EPOCH.get(name, 40)
    while len(batches) < wanted:
        batches += [plain(batch) for batch in each]
    return {"next": spaced(batches[0][0][:8]), "batches": digest(batches[:wanted])}


def go_on(name: str, material: Material, state: str) -> dict[str, Any]:
    """Load a state in a new loader and read on."""
    with JOBS[name](material) as each:
        each.load_state_dict(json.loads(state))
        return follow(name, each, [])


def job(name: str, material: Material) -> dict[str, Any]:
    """Take a state after two batches; read on without it."""
    with JOBS[name](material) as each:
        iterator = iter(each)
        list(islice(iterator, 2))
        state = json.dumps(each.state_dict(), separators=(",", ":"))
        rest = [plain(batch) for batch in iterator]
        return {"state": state, **follow(name, each, rest)}


STATES: dict[str, Case] = {name: partial(job, name) for name in JOBS}
