"""The memory that resident images may take, and the part that a rank needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import check_recipe
from penstock.cache import ConfigError
from penstock.cache.base import available_memory_bytes
from penstock.pipeline import DataLoader, World
from penstock.pipeline.feed import (
    ASKED_SHARE,
    AUTO_MAX_BYTES_CPU,
    AUTO_SHARE_CPU,
    decoded_bytes,
    memory_budget,
    resident_bytes,
    share_of_rank,
)
from penstock.pipeline.plan import BatchSchedule, Cursor, Plan, PlanSettings, Walk
from penstock.readers import Dataset, ImageRange
from tests.pipeline.plan.plans import batch_of
from tests.properties import examples
from tests.servers import serving

if TYPE_CHECKING:
    from pathlib import Path

from tests.pipeline.feed.resident.resident_loaders import (
    FIELDS,
    RECIPES,
    bits,
    make,
    pixels_of_all,
    room_options,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Labels cluster inside shards"),
    pytest.mark.filterwarnings("ignore:Sample .* is bad"),
    pytest.mark.filterwarnings("ignore:.* is remote and cache= isn't given"),
]


class TestRoom:
    def room(self, mode: Any, monkeypatch: pytest.MonkeyPatch, free: int, ranks: int = 1) -> int:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident_images.available_memory_bytes", lambda: free
        )
        recipe = check_recipe(
            RECIPES["train"],
            images=ImageRange(min_height=9, max_height=9, min_width=9, max_width=9),
        )
        world = World(0, ranks, local_rank=0, local_size=ranks)
        return memory_budget(room_options(mode, world=world), recipe).most_bytes

    @pytest.mark.parametrize("free", [0, 10**9, 10**11])
    @pytest.mark.parametrize("ranks", [1, 8])
    def test_the_rule(self, free: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        auto = self.room("auto", monkeypatch, free, ranks)
        assert auto == min(int(AUTO_SHARE_CPU * free) // ranks, AUTO_MAX_BYTES_CPU)
        assert self.room(True, monkeypatch, free, ranks) == int(ASKED_SHARE * free) // ranks

    def test_what_was_asked_for_and_does_not_fit_is_refused(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident_images.available_memory_bytes", lambda: 1_000_000
        )
        with pytest.raises(ConfigError, match=r"resident=True: .* room for .*50%"):
            make(pack, resident=True)

    def test_auto_keeps_nothing_then_and_says_so(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident_images.available_memory_bytes", lambda: 10_000_000
        )
        with caplog.at_level("INFO", "penstock"), make(pack, resident="auto") as loader:
            bits(loader)
            bits(loader)
            assert loader.statistics().resident_bytes == 0
        assert "resident: no images are kept" in caplog.text

    def test_auto_fetches_nothing_to_find_out(
        self, pack: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            serving(pack.parent) as server,
            caplog.at_level("INFO", "penstock"),
            Dataset(f"{server.url}/{pack.name}", fields=FIELDS) as dataset,
            DataLoader(dataset, 16, augment=RECIPES["eval"], resident="auto") as loader,
        ):
            next(iter(loader))
            assert loader.statistics().resident_bytes == 0
        assert "their decoded size is unknown" in caplog.text

    def test_auto_keeps_what_fits(
        self, pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(
            "penstock.pipeline.feed.resident_images.available_memory_bytes", lambda: 10**9
        )
        with caplog.at_level("INFO", "penstock"), make(pack, resident="auto") as loader:
            bits(loader)
            assert loader.statistics().resident_bytes > 0
        assert "resident: " in caplog.text

    @examples(20)
    @given(most=st.integers(0, 10**7), channels=st.sampled_from([1, 3]))
    def test_decoded_bytes_are_counted_as_far_as_they_matter(
        self, pack: Path, most: int, channels: int
    ) -> None:
        dataset = Dataset(str(pack))
        exact = pixels_of_all() // 3 * channels
        found = decoded_bytes(dataset, image="image", channels=channels, most=most, only_near=True)
        assert found is not None
        assert found == exact if exact <= most else most < found <= exact

    @pytest.mark.parametrize("cuda", [False, True])
    def test_bookkeeping_counts_too(self, same_size: Path, cuda: bool) -> None:
        from penstock.pipeline.feed import SAMPLE_BYTES_CPU, SAMPLE_BYTES_CUDA, MemoryBudget

        dataset = Dataset(str(same_size))
        recipe = check_recipe(RECIPES["train"], images=dataset.index.images["image"])
        pixels = 30 * 40 * 48 * 3
        least = pixels + 30 * (SAMPLE_BYTES_CUDA if cuda else SAMPLE_BYTES_CPU)
        for room, wanted in ((least, pixels), (least - 1, None)):
            got = resident_bytes(
                room_options("auto", device="cuda" if cuda else "cpu", depth=0),
                MemoryBudget(most_bytes=room, reason=""),
                dataset,
                recipe,
                image="image",
                share=1.0,
            )
            assert got == wanted

    @examples(25)
    @given(
        sizes=st.lists(st.integers(1, 15), min_size=1, max_size=9),
        lanes=st.sampled_from([1, 2, 3, 4, 6]),
        per_lane=st.integers(1, 4),
        spare=st.integers(0, 1),
        ranks=st.sampled_from([1, 2, 3, 4]),
        reshuffle=st.sampled_from([0.0, 0.5]),
        shuffle=st.booleans(),
    )
    def test_a_rank_reads_no_more_than_its_share(
        self,
        sizes: list[int],
        lanes: int,
        per_lane: int,
        spare: int,
        ranks: int,
        reshuffle: float,
        shuffle: bool,
    ) -> None:
        frozen = PlanSettings(
            seed=3,
            shuffle=shuffle,
            lanes=lanes if shuffle else 1,
            window=2 if shuffle else 1,
            reshuffle=reshuffle if shuffle else 0.0,
        )
        batch = max(lanes * per_lane + spare, ranks)
        plan = Plan(
            np.array(sizes),
            seed=frozen.seed if shuffle else None,
            lanes=frozen.lanes,
            window=frozen.window,
            reshuffle=frozen.reshuffle,
        )
        samples = sum(sizes)
        walk = Walk(samples=samples, schedule=BatchSchedule.constant(batch), drop_last=False)
        share = share_of_rank(frozen, global_batch=batch, world=World(0, ranks))
        for rank in range(ranks):
            seen: set[tuple[int, int]] = set()
            for epoch in range(3):
                for step in walk.steps(Cursor(epoch, 0), endless=False):
                    at = step.start
                    rows = batch_of(plan, at.epoch, at.position, batch, rank=rank, world=ranks)
                    seen |= set(map(tuple, rows.tolist()))
            # Lanes differ by one sample, and the last batch of an epoch is cut anew.
            assert len(seen) <= share * samples + 3 * batch


MEMINFO = "MemTotal:  16000 kB\nMemFree: 10 kB\nMemAvailable:   8000 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        ("", {}, 8000 * 1024),
        (
            "0::/a\n",
            {
                "sys/fs/cgroup/a/memory.max": "1000000\n",
                "sys/fs/cgroup/a/memory.current": "700000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 200000\n",
            },
            500_000,
        ),
        (
            "0::/a\n",
            {
                "sys/fs/cgroup/a/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.current": "700000\n",
                "sys/fs/cgroup/memory.max": "800000\n",
                "sys/fs/cgroup/memory.current": "750000\n",
            },
            50_000,
        ),
        (
            "5:cpu:/x\n4:memory:/job\n",
            {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "100000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 40000\n",
            },
            40_000,
        ),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "5\n"}, 8000 * 1024),
    ],
)
def test_available_memory_is_what_machine_and_groups_leave(
    tmp_path: Path, cgroup: str, files: dict[str, str], free: int
) -> None:
    for name, text in {"proc/self/cgroup": cgroup, "proc/meminfo": MEMINFO, **files}.items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    assert available_memory_bytes(root=tmp_path) == free


def test_a_machine_that_does_not_tell_has_nothing_to_give(tmp_path: Path) -> None:
    assert available_memory_bytes(root=tmp_path) == 0
    assert available_memory_bytes() > 0
