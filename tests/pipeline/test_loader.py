"""The loader on real images: each sample once, the same bits at any batch, world, restart."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.augment import CenterCrop, Resize, imagenet_eval, imagenet_train
from penstock.cache import ClosedError, ConfigError, PenstockWarning, PlanError, ResumeError
from penstock.pipeline import DataLoader, Order, World
from penstock.readers import Dataset

if TYPE_CHECKING:
    from pathlib import Path

from tests.conftest import CLASSES, SAMPLES
from tests.watchdog import PATIENCE_S

# The unshuffled pack of a small folder is sorted by class, which the loader rightly warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Labels cluster inside shards")

FIELDS = ("image", "label", "id")
SIZE = 32


def make(path: Path, **options: Any) -> DataLoader:
    """Return a small training loader; options override its arguments."""
    settings: dict[str, Any] = {
        "batch_size": 16,
        "shuffle": True,
        "seed": 7,
        "augment": imagenet_train(SIZE),
        "num_workers": 2,
        **options,
    }
    return DataLoader(Dataset(str(path), fields=settings.pop("fields", FIELDS)), **settings)


def by_id(batches: Any) -> dict[int, bytes]:
    return {
        int(i): image.numpy().tobytes()
        for images, _, ids in batches
        for image, i in zip(images, ids, strict=True)
    }


def ids_of(batches: Any) -> list[list[int]]:
    return [ids.tolist() for _, _, ids in batches]


class TestBatches:
    def test_tuples_in_field_order(self, pack: Path) -> None:
        with make(pack, fields=None) as loader:
            images, labels = next(iter(loader))
        assert images.shape == (16, 3, SIZE, SIZE)
        assert images.dtype == torch.float32
        assert labels.shape == (16,)
        assert labels.dtype == torch.int64

    def test_each_sample_once_an_epoch_and_epochs_differ(self, pack: Path) -> None:
        with make(pack) as loader:
            epochs = [ids_of(loader) for _ in range(2)]
        for epoch in epochs:
            assert sorted(chain(*epoch)) == list(range(SAMPLES))
            assert len(epoch) == len(loader) == -(-SAMPLES // 16)
        assert epochs[0] != epochs[1]

    @pytest.mark.parametrize("saved", [True, False])
    def test_a_state_across_a_change_of_drop_last_states_what_changes(
        self, pack: Path, saved: bool
    ) -> None:
        with make(pack, drop_last=saved) as loader:
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
            following = next(batches)
        with make(pack, drop_last=not saved) as loader:
            rest = len(loader.dataset) % (loader.batch_size or 1)
            report = "ends with its last" if saved else "leaves out its last"
            with pytest.warns(
                PenstockWarning, match=rf"{report} {rest} samples.*drop_last={saved}"
            ):
                loader.load_state_dict(state)
            assert next(iter(loader))[-1].tolist() == following[-1].tolist()

    def test_drop_last(self, pack: Path) -> None:
        with make(pack, drop_last=True) as loader:
            epoch = ids_of(loader)
        assert [len(b) for b in epoch] == [16] * (SAMPLES // 16)
        assert len(loader) == SAMPLES // 16

    def test_unshuffled_is_index_order(self, folder: Path) -> None:
        with make(folder, shuffle=False, augment=imagenet_eval(SIZE, resize=40)) as loader:
            assert list(chain(*ids_of(loader))) == list(range(SAMPLES))

    def test_labels_and_pixels_belong_to_their_file(self, folder: Path) -> None:
        dataset = Dataset(str(folder), fields=FIELDS)
        recipe = (Resize((40, 40)), CenterCrop(40))
        with DataLoader(dataset, batch_size=16, augment=recipe) as loader:
            images, labels, ids = next(iter(loader))
        assert images.dtype == torch.uint8
        names = dataset.names(ids.numpy())
        assert [dataset.classes[i] for i in labels] == [name.split("/")[0] for name in names]
        with Image.open(folder / names[0]) as picture:
            peer = np.asarray(picture.resize((40, 40), Image.Resampling.BILINEAR))
        mine = images[0].permute(1, 2, 0).numpy()
        assert np.abs(mine.astype(int) - peer).mean() < 3

    def test_what_was_delivered_stays(self, pack: Path) -> None:
        with make(pack) as loader:
            held = [(images, images.clone()) for images, _, _ in loader]
            for _ in loader:
                pass
        assert all(torch.equal(images, copy) for images, copy in held)

    def test_fields_without_images_need_no_decoding(self, pack: Path) -> None:
        with make(pack, fields=("label", "id"), augment=None) as loader:
            labels, ids = next(iter(loader))
        assert labels.shape == ids.shape == (16,)

    def test_a_loader_of_one_size_needs_no_recipe(self, tmp_path: Path) -> None:
        for number in range(4):
            Image.new("RGB", (20, 10), (number, 0, 0)).save(tmp_path / f"{number}.png")
        with DataLoader(Dataset(str(tmp_path)), batch_size=4) as loader:
            (images,) = next(iter(loader))
        assert images.shape == (4, 3, 10, 20)
        assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]

    def test_the_sampler_contains_the_order(self, pack: Path) -> None:
        world = World(1, 3)
        with make(pack, batch_size=8, world=world, drop_last=True) as loader:
            report = list(loader.sampler)
            assert len(loader.sampler) == len(report)
            assert report == list(chain(*ids_of(loader)))
            loader.sampler.set_epoch(5)
            assert loader.epoch == 5


@pytest.fixture(scope="module")
def reference(ordered_pack: Path) -> dict[int, bytes]:
    """Sample id -> bits of epoch 0 at batch 16."""
    with make(ordered_pack, batch_size=16) as loader:
        return by_id(loader)


class TestBits:
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("batch", [1, 32, 96])
    def test_batch_size_and_threads_change_no_bit(
        self, ordered_pack: Path, reference: dict[int, bytes], batch: int, threads: int
    ) -> None:
        with make(ordered_pack, batch_size=batch, num_workers=threads) as loader:
            assert by_id(loader) == reference

    def test_a_folder_and_its_unshuffled_pack_agree(
        self, folder: Path, reference: dict[int, bytes]
    ) -> None:
        with make(folder) as loader:
            assert by_id(loader) == reference

    def test_pread_agrees(self, ordered_pack: Path, reference: dict[int, bytes]) -> None:
        with make(ordered_pack, read="pread") as loader:
            assert by_id(loader) == reference

    def test_seed_and_epoch_change_the_draws(
        self, ordered_pack: Path, reference: dict[int, bytes]
    ) -> None:
        with make(ordered_pack, seed=8) as loader:
            assert by_id(loader) != reference
        with make(ordered_pack) as loader:
            loader.set_epoch(1)
            assert by_id(loader) != reference


class TestWorlds:
    def global_batches(self, path: Path, size: int, **options: Any) -> list[dict[int, bytes]]:
        """One dict (id -> bits) a global batch, put together from all ranks."""
        steps: list[dict[int, bytes]] = []
        for rank in range(size):
            world = World(rank, size)
            with make(
                path, batch_size=1, global_batch_size=96, drop_last=True, world=world, **options
            ) as loader:
                for step, batch in enumerate(loader):
                    if rank == 0:
                        steps.append({})
                    steps[step] |= by_id([batch])
        return steps

    @pytest.mark.parametrize("size", [2, 5, 7])
    def test_global_batches_are_the_same_at_every_world_size(
        self, ordered_pack: Path, size: int
    ) -> None:
        assert self.global_batches(ordered_pack, size) == self.global_batches(ordered_pack, 1)

    @pytest.mark.grid
    @pytest.mark.parametrize("size", range(3, 97))
    def test_the_grid_of_worlds(self, ordered_pack: Path, size: int) -> None:
        assert self.global_batches(ordered_pack, size) == self.global_batches(ordered_pack, 1)

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
    def test_padded_evaluation_sees_each_sample_exactly_once(self, pack: Path, size: int) -> None:
        seen: list[int] = []
        steps = set()
        for rank in range(size):
            with make(
                pack, batch_size=13, shuffle=False, pad="mask", world=World(rank, size),
                augment=imagenet_eval(SIZE, resize=40),
            ) as loader:  # fmt: skip
                batches = list(loader)
            steps.add((len(batches), len(loader)))
            for images, labels, ids, valid in batches:
                assert images.shape[0] == labels.shape[0] == 13
                assert valid.dtype == torch.bool
                seen += ids[valid].tolist()
        assert sorted(seen) == list(range(SAMPLES))
        assert len(steps) == 1

    def test_several_ranks_must_say_how_an_epoch_ends(self, pack: Path) -> None:
        with pytest.raises(ConfigError, match=r"drop_last=True.*pad=\"mask\""):
            make(pack, world=World(0, 2))

    def test_several_ranks_need_a_seed(self, pack: Path) -> None:
        with pytest.raises(ConfigError, match="seed="):
            make(pack, world=World(0, 2), drop_last=True, seed=None)

    def test_a_batch_smaller_than_the_world(self, pack: Path) -> None:
        with pytest.raises(PlanError, match="8 ranks"):
            make(pack, batch_size=1, global_batch_size=4, world=World(0, 8), drop_last=True)


class TestResume:
    def test_at_every_step_of_an_epoch(self, ordered_pack: Path) -> None:
        with make(ordered_pack) as loader:
            states, whole = [loader.state_dict()], []
            for batch in loader:
                whole.append(batch)
                states.append(loader.state_dict())
            whole += list(loader)
        epoch = len(states) - 1
        with make(ordered_pack) as loader:
            for stop, state in enumerate(states):
                loader.load_state_dict(json.loads(json.dumps(state)))
                assert loader.epoch == (stop == epoch)
                rest = list(loader)
                end = epoch if stop < epoch else 2 * epoch
                for mine, theirs in zip(rest, whole[stop:end], strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def test_at_another_world_and_batch(self, ordered_pack: Path) -> None:
        with make(ordered_pack, batch_size=24, drop_last=True) as loader:
            it = iter(loader)
            seen = ids_of(next(it) for _ in range(3))
            state = loader.state_dict()
        for rank in range(3):
            world = World(rank, 3)
            with make(
                ordered_pack, batch_size=1, global_batch_size=10, world=world, drop_last=True,
            ) as loader:  # fmt: skip
                with pytest.warns(PenstockWarning, match="global_batch_size=24"):
                    loader.load_state_dict(state)
                seen += ids_of(loader)
        found = list(chain(*seen))
        assert len(set(found)) == len(found) == 72 + (SAMPLES - 72) // 10 * 10

    def test_without_a_batch_size_the_state_brings_it(self, ordered_pack: Path) -> None:
        with make(ordered_pack, batch_size=24, drop_last=True) as loader:
            it = iter(loader)
            next(it)
            state, expected = loader.state_dict(), next(it)[2].tolist()
        found: list[int] = []
        for rank in range(2):
            with make(ordered_pack, batch_size=1, world=World(rank, 2), drop_last=True) as loader:
                loader.load_state_dict(state)
                assert loader.batch_size == 12
                found += next(iter(loader))[2].tolist()
        assert sorted(found) == sorted(expected)

    def test_the_state_brings_seed_and_plan(self, pack: Path) -> None:
        with make(pack, seed=99, order=Order(lanes=4, window=2)) as loader:
            it = iter(loader)
            next(it)
            state, rest = loader.state_dict(), ids_of(it)
        with make(pack, seed=None) as loader:
            loader.load_state_dict(state)
            assert ids_of(loader) == rest

    def test_state_counts_what_was_delivered(self, pack: Path) -> None:
        with make(pack) as loader:
            assert loader.state_dict()["position"] == 0
            it = iter(loader)
            next(it)
            assert loader.state_dict()["position"] == 16
            assert len(json.dumps(loader.state_dict())) < 1000

    def test_the_epoch_moves_on_with_the_last_batch(self, pack: Path) -> None:
        with make(pack) as loader:
            it = iter(loader)
            for _ in range(len(loader)):
                assert loader.epoch == 0
                next(it)
            assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
            with pytest.raises(StopIteration):
                next(it)

    def test_set_epoch_keeps_a_restored_position(self, pack: Path) -> None:
        with make(pack) as loader:
            it = iter(loader)
            next(it)
            state, second = loader.state_dict(), ids_of([next(it)])
            loader.load_state_dict(state)
            loader.set_epoch(0)
            assert ids_of([next(iter(loader))]) == second
            loader.set_epoch(3)
            assert loader.state_dict()["position"] == 0
            assert loader.epoch == 3

    def test_iter_twice_consumes_nothing(self, pack: Path) -> None:
        with make(pack) as loader:
            first = ids_of([next(iter(loader))])
            iter(loader)
            second = iter(loader)
            assert ids_of([next(second)]) == first
            iter(loader)
            assert ids_of([next(second)]) != first

    def test_an_overtaken_iterator_reports_it(self, pack: Path) -> None:
        with make(pack) as loader:
            old = iter(loader)
            next(old)
            next(iter(loader))
            with pytest.raises(ConfigError, match="overtaken"):
                next(old)

    def test_states_of_other_data_seeds_and_plans_are_refused(
        self, pack: Path, ordered_pack: Path
    ) -> None:
        with make(pack) as loader:
            state = loader.state_dict()
        refused = {
            "another dataset": make(ordered_pack),
            "another seed": make(pack, seed=8),
            "other lanes": make(pack, order=Order(lanes=5)),
            "no shuffle": make(pack, shuffle=False),
        }
        for loader in refused.values():
            with loader, pytest.raises(ResumeError, match="State was saved"):
                loader.load_state_dict(state)
        with make(pack) as loader, pytest.raises(ResumeError, match="version"):
            loader.load_state_dict({**state, "version": 99})
        with make(pack) as loader, pytest.raises(ResumeError, match="orders samples differently"):
            loader.load_state_dict({**state, "plan": {**state["plan"], "lanes": 3}})


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
            ({"batch_size": None}, "batch_size=None"),
            ({"batch_size": 4, "global_batch_size": 8}, "Pass one of them"),
            ({"sampler": [1, 2]}, "sampler= and shuffle=True"),
            ({"batch_sampler": [[1]]}, "batch_sampler="),
            ({"collate_fn": list}, "collate_fn="),
            ({"worker_init_fn": print}, "worker_init_fn="),
            ({"multiprocessing_context": "fork"}, "multiprocessing_context="),
            ({"num_workers": -1}, "num_workers must be"),
            ({"prefetch_factor": 0}, "prefetch_factor must be"),
            ({"timeout": -1}, "timeout must be"),
            ({"max_bad": 2}, "max_bad must be a share"),
            ({"pad": "zeros"}, "pad must be None or 'mask'"),
            ({"pad": "mask", "drop_last": True}, "Pass one of them"),
            ({"read": "mmmap"}, "read must be"),
            ({"device": "tpu"}, "not a torch device"),
            ({"device": "meta"}, '"cpu" or "cuda" only'),
            ({"seed": "x"}, "seed must be an integer"),
            ({"shuffle": False, "order": Order(lanes=3)}, "no meaning with shuffle=False"),
            ({"batch_size": 500, "drop_last": True}, "an epoch would have no step"),
            ({"augment": None}, "A batch needs one size"),
        ],
    )
    def test_bad_arguments_are_named(
        self, pack: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            make(pack, **options)
        assert message in str(caught.value)

    def test_cuda_without_one_is_refused(self, pack: Path) -> None:
        if torch.cuda.is_available():
            return
        with pytest.raises(ConfigError, match="no CUDA device"):
            make(pack, device="cuda")

    def test_it_is_torchs_dataloader_with_its_attributes(self, pack: Path) -> None:
        with make(pack, num_workers=1) as loader:
            assert isinstance(loader, torch.utils.data.DataLoader)
            theirs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))
            for name in vars(theirs):
                if not name.startswith("_"):
                    assert hasattr(loader, name), name
            assert len(loader.dataset) == SAMPLES
            dataset: Any = loader.dataset
            assert len(dataset.classes) == CLASSES

    def test_a_seed_from_torch_follows_manual_seed(self, pack: Path) -> None:
        found = []
        for _ in range(2):
            torch.manual_seed(5)
            with make(pack, seed=None) as loader:
                found.append(ids_of(loader))
        assert found[0] == found[1]


class TestLife:
    def test_closed_loaders_refuse(self, pack: Path) -> None:
        loader = make(pack)
        it = iter(loader)
        next(it)
        loader.close()
        loader.close()
        with pytest.raises(ClosedError):
            next(it)
        with pytest.raises(ClosedError):
            iter(loader)

    def test_statistics_count_what_was_delivered(self, pack: Path) -> None:
        with make(pack) as loader:
            for _ in loader:
                pass
            found = loader.statistics()
        assert found.samples == SAMPLES
        assert found.batches == len(loader)
        assert found.bytes_disk > 0
        assert found.bytes_remote == 0
        assert found.limit in ("decode", "disk", "model")


def test_a_native_loader_starts_without_the_engine_for_torch_datasets(pack: Path) -> None:
    """Importing its modules would delay the first batch of every job."""
    code = (
        "import sys\n"
        "from penstock import DataLoader, Dataset\n"
        f"with DataLoader(Dataset({str(pack)!r}, fields=('label', 'id')), 8) as loader:\n"
        "    next(iter(loader))\n"
        "name = 'penstock.pipeline.torch_data'\n"
        "found = [found for found in sys.modules if found.startswith(name)]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
