"""Test mixtures of token sequences: shares of tokens, packed sequences, batches by tokens."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import DataLoader, Dataset, Map, MixUp, Value, World, mix
from penstock.errors import ConfigError
from tests.token_files import write_megatron

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEANS = {"web": 10, "code": 30, "math": 60}  # tokens of a document
COUNTS = {"web": 400, "code": 120, "math": 60}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
OTHER = {"web": 0.2, "code": 0.2, "math": 0.6}
LONGEST = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents whose tokens name their part."""
    root, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for number, (name, mean) in enumerate(MEANS.items()):
        (root / name).mkdir()
        lengths = np.clip(random.poisson(mean, COUNTS[name]), 1, LONGEST).tolist()
        write_megatron(root / name / "a", [np.full(n, number) for n in lengths])
    return root


def opened(folder: Path, documents: str, **more: Any) -> dict[str, Dataset]:
    more = {"sample": (LONGEST,), "fields": ("tokens", "id"), **more}
    return {name: Dataset(folder / name, documents=documents, **more) for name in MEANS}


@pytest.fixture
def documents(folder: Path) -> Iterator[dict[str, Dataset]]:
    found = opened(folder, "within")
    yield found
    for each in found.values():
        each.close()


def loader(source: Any, tokens: int = 400, world: World | None = None, **more: Any) -> Any:
    options = {"shuffle": True, "seed": 4, "batch_tokens": tokens, **more}
    return DataLoader(source, world=world or World(0, 1), **options)


def ids(batches: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [*itertools.chain.from_iterable(batches)]


class TestShares:
    @pytest.mark.parametrize("per", ["token", "sample"])
    def test_of_documents(self, documents, per):
        """per="token": by the mean length of each part's samples."""
        source = mix(documents, weights=WEIGHTS, per=per, epoch=4000)
        counts = np.zeros(3)
        with loader(source, batch_tokens=None, batch_size=50) as job:
            for tokens, _ in job:
                values = tokens.values.numpy()
                begins = tokens.offsets.numpy()[:-1]
                counts += np.bincount(values if per == "token" else values[begins], minlength=3)
        share = counts / counts.sum()
        np.testing.assert_allclose(share, [*WEIGHTS.values()], rtol=0.02)

    @pytest.mark.parametrize("mode", ["pack", "across"])
    def test_of_packed_sequences(self, folder, mode):
        """Mixing happens after packing: each position is one packed sequence of one part."""
        parts = opened(folder, mode, sample=(64,))
        source = mix(parts, weights=WEIGHTS, per="token", epoch=1000)
        counts = np.zeros(3, np.int64)
        with loader(source, batch_tokens=None, batch_size=50) as job:
            for tokens, numbers in job:
                assert tokens.shape == (50, 64)
                part = np.searchsorted(source_starts(parts), numbers.numpy(), side="right") - 1
                assert all(set(row.tolist()) <= {0, n} for n, row in zip(part, tokens, strict=True))
                counts += np.bincount(part, minlength=3)
        np.testing.assert_allclose(counts, [500, 300, 200], atol=2)

    def test_of_what_has_no_tokens(self, folder):
        parts = opened(folder, "within", fields=("document", "id"))
        with pytest.raises(ConfigError, match="delivers no field of tokens"):
            mix(parts, weights=WEIGHTS, per="token")


def source_starts(parts: dict[str, Dataset]) -> Any:
    sizes = np.array([len(part) for part in parts.values()])
    return np.cumsum(sizes) - sizes


class TestBatchesByTokens:
    def test_each_sample_once(self, documents):
        source = mix(documents, weights=WEIGHTS, epoch="once")
        with loader(source) as job:
            for _ in range(2):
                count, found = len(job), list[list[int]]()
                for tokens, numbers in job:
                    assert int(tokens.lengths.sum()) <= 400
                    found.append(numbers.tolist())
                assert len(found) == count
                assert sorted(flat(found)) == list(range(sum(COUNTS.values())))

    def test_the_epochs_of_parts_are_complete(self, documents):
        with loader(mix(documents, weights=WEIGHTS, per="token", epoch=1000)) as job:
            found = np.array(flat(ids(job) + ids(job)))
        starts = [*source_starts(documents), sum(COUNTS.values())]
        for first, end in itertools.pairwise(starts):
            counts = np.bincount(found[(found >= first) & (found < end)] - first)
            assert len(counts) == end - first
            # Of the epoch that isn't over, some have one more, up to a pool that isn't either.
            assert counts.max() - counts.min() <= 1

    @pytest.mark.parametrize("size", [2, 3])
    def test_every_world_gives_the_same_batches(self, documents, size):
        source = mix(documents, weights=WEIGHTS, epoch=500)

        def batches(world: int, state: Any = None) -> list[list[int]]:
            found: list[list[int]] = []
            for rank in range(world):
                with loader(source, 1200 // world, World(rank, world)) as job:
                    if state is not None:
                        job.load_state_dict(json.loads(json.dumps(state)))
                    for step, batch in enumerate(ids(job) + ids(job)):
                        found[step:] = found[step:] or [[]]
                        found[step] += batch
            return found

        wanted = batches(size)
        with loader(source, 1200 // size, World(0, size)) as job:
            begun = iter(job)
            for _ in range(5):
                next(begun)
            state = job.state_dict()
        assert batches(size, state) == wanted[5:]
        assert batches(1, state) == wanted[5:]

    def test_repeats_get_draws_of_their_own(self, documents):
        noise = Map(_noise, fields="tokens", returns={"noise": Value("float64")})
        source = mix(documents, weights={"web": 1, "code": 1, "math": 2}, epoch=720)
        seen: dict[int, list[float]] = {}
        with loader(source, augment=[noise], as_dict=True) as job:
            for batch in job:
                for number, draw in zip(batch["id"].tolist(), batch["noise"].tolist(), strict=True):
                    seen.setdefault(number, []).append(draw)
        draws = [each for each in seen.values() if len(each) > 1]
        assert len(draws) >= COUNTS["math"]
        assert all(len({*each}) == len(each) for each in draws)

    def test_weights_are_set_from_the_next_pool_on(self, documents):
        """No sample is lost or repeated, and the job resumes exactly."""
        source = mix(documents, weights=WEIGHTS, epoch=3000)
        with loader(source, 100) as job:
            found, states = list[list[int]](), list[Any]()
            for batch in job:
                found.append(batch[1].tolist())
                if len(found) == 7:
                    job.set_weights(OTHER)
                    assert job.step == 7
                states.append(job.state_dict())
            pool = states[0]["plan"]["buckets"]["pool"]
            change = states[-1]["plan"]["mixture"]["changes"][-1]["start"]
            assert change % pool == 0 < change
            assert [sorted(job.samples_of(step).tolist()) for step in (0, 6, 7, 30)] == [
                sorted(found[step]) for step in (0, 6, 7, 30)
            ]
        with loader(source, 100) as plain:
            unchanged = ids(plain)
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(found, unchanged, strict=False)
        )
        assert len(flat(batch for batch, _ in same)) == change
        numbers = np.array(flat(found))
        starts = source_starts(documents)
        for first, size in zip(starts, COUNTS.values(), strict=True):
            counts = np.bincount(numbers[(numbers >= first) & (numbers < first + size)] - first)
            assert counts.max() - counts.min() <= 1
        part = np.searchsorted(starts, numbers[change:], side="right") - 1
        shares = np.bincount(part) / len(part)
        np.testing.assert_allclose(shares, [*OTHER.values()], rtol=0.1)
        for step in (6, 7, 40):
            with loader(source, 100) as again:
                again.load_state_dict(json.loads(json.dumps(states[step])))
                assert again.step == step + 1
                assert ids(again) == found[step + 1 :]

    def test_what_cannot_be_exact_is_refused(self, documents):
        with pytest.raises(ConfigError, match='per="batch"'):
            loader(mix(documents, weights=WEIGHTS, per="batch"))
        with pytest.raises(ConfigError, match=r"MixUp.* a mixture don't keep them together"):
            loader(mix(documents, weights=WEIGHTS), augment=[MixUp()])


def _noise(tokens: Any, rng: np.random.Generator) -> float:
    del tokens
    return rng.random()
