"""DataLoader(batch_tokens=): batches of samples of about one length, exact over worlds, resume."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, Pad, World, concat
from penstock.cache import ConfigError, PenstockWarning, PlanError, ResumeError
from penstock.readers.fieldtypes import Array
from tests import field_sets
from tests.token_files import write_megatron

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 90
TYPES = {"tokens": Array("int64", (None,))}


@pytest.fixture(scope="module", params=["folder", "pack"])
def dataset(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Dataset:
    root = tmp_path_factory.mktemp("tokens")
    folder = field_sets.write_numbers(root / "numbers", COUNT)
    if request.param == "pack":
        return Dataset(
            field_sets.pack_of(folder, root / "pack", schema=TYPES, shuffle=False),
            fields=("tokens", "id"),
        )
    return Dataset(folder, schema=TYPES, fields=("tokens", "id"))


def loader(dataset: Any, tokens: int = 24, world: World | None = None, **more: Any) -> Any:
    options = {"shuffle": True, "seed": 4, **more}
    return DataLoader(dataset, batch_tokens=tokens, world=world or World(0, 1), **options)


def flat(batches: Any) -> list[int]:
    return [*chain.from_iterable(batches)]


def handed_out(batches: Any) -> list[list[int]]:
    return [ids.tolist() for _, ids in batches]


def test_batches_hold_at_most_their_tokens_and_each_sample_once(dataset: Dataset) -> None:
    with loader(dataset) as ours:
        count, seen = len(ours), []
        for tokens, ids in ours:
            lengths = tokens.lengths.tolist()
            assert sum(max(1, each) for each in lengths) <= 24
            assert lengths == [sample % 6 for sample in ids.tolist()]
            seen.append(ids.tolist())
        assert len(seen) == count
        assert sorted(flat(seen)) == list(range(COUNT))
        second = handed_out(ours)
        assert second != seen
        assert sorted(flat(second)) == list(range(COUNT))
        assert ours.batch_size >= 1


def test_padded_batches_count_what_is_filled_up(dataset: Dataset) -> None:
    with loader(dataset, augment=[Pad("tokens", value=-1)]) as ours:
        for tokens, ids in ours:
            assert tokens.numel() <= 24
            assert tokens.shape[0] == len(ids)


def resumed(dataset: Dataset, state: Any, tokens: int, size: int, *, bound: int | None) -> Any:
    """Return the global batches of a world that resumes from a state. bound: in its warning."""
    rest, state = [], json.loads(json.dumps(state))
    for rank in range(size):
        with loader(dataset, tokens, World(rank, size)) as again:
            if bound is None:
                again.load_state_dict(state)
            else:
                with pytest.warns(PenstockWarning, match=f"may hold up to {bound}:"):
                    again.load_state_dict(state)
            rest.append(handed_out(again))
    for batch in chain.from_iterable(rest):
        assert sum(max(1, sample % 6) for sample in batch) <= (bound or tokens)
    return [flat(each) for each in zip(*rest, strict=True)]


def test_ranks_take_whole_bins_and_another_world_continues(dataset: Dataset) -> None:
    def begun(stop: int) -> Any:
        with loader(dataset, 12, World(0, 4)) as first:
            batches = iter(first)
            for _ in range(stop):
                next(batches)
            return first.state_dict()

    wanted = resumed(dataset, begun(0), 12, 4, bound=None)
    assert sorted(flat(wanted)) == list(range(COUNT))
    for stop in range(len(wanted)):
        state = begun(stop)
        assert state["plan"]["buckets"]["bins"] == 4
        for tokens, size, bound in ((48, 1, None), (24, 2, None), (16, 3, 24), (12, 4, None)):
            assert resumed(dataset, state, tokens, size, bound=bound) == wanted[stop:]


def test_a_state_without_bins_continues_in_slices(dataset: Dataset) -> None:
    with loader(dataset, 48) as first:
        state, wanted = first.state_dict(), handed_out(first)
    assert "bins" not in state["plan"]["buckets"]
    for tokens, size, bound in ((48, 1, None), (24, 2, 48), (16, 3, 48)):
        assert resumed(dataset, state, tokens, size, bound=bound) == wanted
    state["plan"]["buckets"]["bins"] = 0
    with loader(dataset, 48) as again, pytest.raises(ResumeError, match="damaged: its buckets"):
        again.load_state_dict(state)


def test_a_state_keeps_its_tokens(dataset: Dataset) -> None:
    with loader(dataset) as first:
        next(iter(first))
        state = first.state_dict()
    with loader(dataset, 30) as other:
        with pytest.warns(PenstockWarning, match="24 tokens apply"):
            other.load_state_dict(state)
        assert len(flat(handed_out(other))) < COUNT
    plain = DataLoader(dataset, batch_size=4, shuffle=True, seed=4, world=World(0, 1))
    with plain, pytest.raises(ResumeError, match="with batch_tokens="):
        plain.load_state_dict(state)
    with (
        loader(dataset, augment=[Pad("tokens")]) as padded,
        pytest.raises(ResumeError, match="padded"),
    ):
        padded.load_state_dict(state)


def test_parts_and_selections_have_lengths(dataset: Dataset) -> None:
    both = concat([dataset.subset(np.arange(0, COUNT, 2)), dataset.subset(np.arange(1, COUNT, 2))])
    with loader(both) as ours:
        assert len(flat(handed_out(ours))) == COUNT
    with loader(dataset, shuffle=False) as ordered:
        assert len(flat(handed_out(ordered))) == COUNT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": 0}, "wanted the most tokens"),
        ({"tokens": {"a": 3, "b": 4}}, "wanted the most tokens"),
        ({"tokens": {"nowhere": 3}}, "wanted one of"),
        ({"tokens": {"target": 3}}, "don't differ in length"),
        ({"batch_size": 3}, "batch_tokens= and batch_size=3"),
        ({"pad": "mask"}, "batch_tokens= and pad="),
        ({"augment": [Pad("tokens", to=9)]}, "all samples are of one length"),
    ],
)
def test_invalid_arguments_are_reported(
    dataset: Dataset, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loader(dataset, **options)


def test_a_batch_shorter_than_its_longest_sample_is_reported_at_the_start(dataset: Dataset) -> None:
    with pytest.raises(PlanError, match=r"got 4 a rank \(4 on 1\).* has 5.* Pass 5 or more"):
        loader(dataset, 4)
    with pytest.raises(PlanError, match="Pass 10 or more"):
        loader(dataset, 9, World(0, 2))


def test_fields_of_one_length_have_no_tokens(tmp_path: Path) -> None:
    folder = field_sets.write_numbers(tmp_path / "numbers", 5)
    with pytest.raises(ConfigError, match="whose lengths count isn't clear"):
        loader(Dataset(folder, fields=("target", "id")))


def test_documents_tell_their_lengths_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 99, int(n)).astype(np.uint16) for n in rng.integers(1, 40, 60)]
    (tmp_path / "corpus").mkdir()
    write_megatron(tmp_path / "corpus" / "a", documents)
    pieces = Dataset(tmp_path / "corpus", sample=(16,), documents="within", fields=("tokens", "id"))
    with pieces, loader(pieces, 64) as ours:
        reads = []
        monkeypatch.setattr(pieces, "read", lambda *_, **__: reads.append(1))
        lengths = pieces.lengths("tokens", pieces.rows(np.arange(len(pieces))))
        monkeypatch.undo()
        assert not reads
        assert lengths.sum() == sum(map(len, documents))
        seen = 0
        for tokens, ids in ours:
            assert tokens.lengths.tolist() == lengths[ids.numpy()].tolist()
            assert int(tokens.lengths.sum()) <= 64
            seen += len(ids)
        assert seen == len(pieces)


def test_steps_by_number_and_skipping(dataset: Dataset) -> None:
    with loader(dataset) as ours:
        steps = [ids for _ in range(3) for ids in handed_out(ours)]
        assert ours.step == ours.state_dict()["step"] == len(steps)
        assert [ours.samples_of(number).tolist() for number in range(len(steps))] == steps
    with loader(dataset) as ours:
        ours.skip(len(steps) - 2)
        assert handed_out(ours) == steps[-2:]
        state = json.loads(json.dumps(ours.state_dict()))
    with loader(dataset, tokens=12, world=World(1, 2)) as ours:
        with pytest.warns(PenstockWarning, match="24 tokens apply.* may hold up to 24:"):
            ours.load_state_dict(state)
        assert ours.step == len(steps)
        assert ours.samples_of(4).tolist() == steps[4]
        half = ours.samples_of(4, rank=1).tolist()
        assert half == steps[4][len(steps[4]) // 2 :]


def test_a_step_that_takes_too_long_to_number_is_not_known(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.plan.buckets.MOST_COUNTED", 200)
    with loader(dataset) as ours:
        ours.set_epoch(9)
        with pytest.raises(PlanError, match="too much to wait for"):
            ours.step  # noqa: B018
        state = ours.state_dict()
        assert state["step"] is None
        ours.load_state_dict(json.loads(json.dumps(state)))
        assert len(next(iter(ours))[-1])
        assert ours.state_dict()["step"] is None
