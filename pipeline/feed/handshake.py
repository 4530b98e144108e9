"""Whether the ranks' loaders were made alike; else every rank learns which wasn't, and in what.

Nobody waits when a loader is made: who comes first says what it has, who comes later compares. What
differs is an error where it was noticed, and a notice for all others, who look for one with every
batch. What happens at the first batch: see `meeting`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from penstock.pipeline.feed.agreement import Agreement
    from penstock.pipeline.plan.world import World

CUT_TWICE = (
    "Give every rank the same dataset: the loader shares it out itself, so a part of one's own "
    "(subset, split, a DistributedSampler's share, a folder a rank) would be shared out twice."
)
_REMEDIES = {
    "dataset": CUT_TWICE,
    "recipe": "Pass the same augment= on every rank.",
    "batch": "Pass the same batch_size= or global_batch_size= on every rank.",
    "ends": "Pass the same drop_last= and pad= on every rank.",
    "size": "Let every rank be of one world.",
}
_ONLY_TOLD = ("url", "recipe_words")
_AT = (
    "Call rejoin with the same step on every rank, and with a store that these ranks alone have, "
    "such as a PrefixStore: another rejoin needs another."
)
_OTHERS = "Pass the same seed= and order= on every rank."


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """What the ranks' loaders must share.

    dataset, plan: fingerprints; samples, url: of the dataset, where it may lie elsewhere on other
    nodes. lanes, window, reshuffle: of the plan. batch: global batches, by first sample; ends: how
    epochs end. recipe: its fingerprint, recipe_words: how it begins. size: ranks that it is for.
    at: where they go on, "" for a loader that begins.
    """

    dataset: str
    samples: int
    seed: int
    plan: str
    size: int
    at: str = ""
    url: str = ""
    lanes: int = 1
    window: int = 1
    reshuffle: float = 0.0
    batch: str = ""
    ends: str = ""
    recipe: str = ""
    recipe_words: str = ""


def check_same_plan(
    agreement: Agreement, facts: SharedFacts, *, label: str = "", follows_data: bool = False
) -> bool:
    """Raise PlanError unless the ranks' loaders agree; the others then stop at their next batch.

    label: what this process is called. follows_data: whether this rank would have slots follow the
    data. Returns what the first rank that came here would, so that all do the same.
    """
    mine, label = asdict(facts), label or f"rank {agreement.rank}"
    first = agreement.compare({**mine, "label": label, "follows_data": follows_data})
    theirs = {name: first.get(name) for name in mine}
    differ = [name for name in mine if name not in _ONLY_TOLD and theirs[name] != mine[name]]
    if not differ:
        return bool(first.get("follows_data"))
    other = str(first.get("label", "another rank"))
    remedy = _remedy(differ, goes_on="at" in differ)
    text = (
        f"{other.capitalize()} built this loader {_words(theirs, differ)}; {label} "
        f"{_words(mine, differ)}: samples would be lost or read twice. {remedy} For a "
        "loader that is this rank's own: world=World(0, 1)."
    )
    agreement.fail(text, differs=True)
    raise PlanError(text)


def check_places(agreement: Agreement, world: World) -> None:
    """Raise PlanError where more processes have a rank than a replica has, this one among them."""
    members = world.processes // world.size
    if agreement.number_of_rank <= members:
        return
    text = (
        f"{world.label.capitalize()} is one of more than {members} processes with that rank, "
        f"though {world.processes} processes are {world.size} replicas: others have none, and "
        "samples would be lost. Pass each process its replica's place: "
        'data_parallel=(rank, size), or world=World.from_mesh(mesh["dp"]).'
    )
    agreement.fail(text, differs=True)
    raise PlanError(text)


def _remedy(differ: list[str], *, goes_on: bool) -> str:
    if "dataset" in differ:
        return CUT_TWICE
    if goes_on:
        return _AT
    return (
        " ".join(dict.fromkeys(_REMEDIES.get(name, _OTHERS) for name in differ if name != "plan"))
        or _OTHERS
    )


def _words(facts: dict[str, Any], differ: list[str]) -> str:
    """What a rank has of that which differs."""
    told: list[str] = []
    if "dataset" in differ:
        url = f" of {facts['url']}" if facts["url"] else ""
        told.append(f"over dataset {str(facts['dataset'])[:12]} ({facts['samples']} samples{url})")
    if "seed" in differ:
        told.append(f"with seed {facts['seed']}")
    if "size" in differ:
        told.append(f"for {facts['size']} ranks")
    told += [
        f"with {name}={facts[name]}" for name in ("lanes", "window", "reshuffle") if name in differ
    ]
    if "batch" in differ:
        told.append(f"with global batches of {facts['batch']}")
    if "ends" in differ:
        told.append(f"with {facts['ends']}")
    if "recipe" in differ:
        told.append(f"with recipe {str(facts['recipe'])[:8]}, {facts['recipe_words']}")
    if "at" in differ:
        told.append(f"at {facts['at'] or 'its beginning'}")
    return ", ".join(told) or f"with plan {str(facts['plan'])[:12]}"
