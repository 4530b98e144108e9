"""Test each table of the catalogue over a file of its own."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.cache.base import Folder
from penstock.cache.disk import BlobRow, Catalogue, JobRow, UncountedError, is_damage
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.cache.disk import State


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    made = Catalogue(Folder.at(str(tmp_path)))
    made.recount()
    yield made
    made.close()


def enter(
    catalogue: Catalogue,
    key: str,
    *,
    disk_bytes: int = 4096,
    state: State = "ready",
    kept: bool = False,
    used_s: float = 1.0,
    group: str = "g",
) -> None:
    catalogue.add(
        BlobRow(
            key=key,
            group=group,
            uri=f"mem://{key}",
            size_bytes=disk_bytes,
            disk_bytes=disk_bytes,
            state=state,
            kept=kept,
            used_s=used_s,
        )
    )


def a_job(catalogue: Catalogue, *, below: str, share_bytes: int = 10**6, number: int = 1) -> None:
    catalogue.add_job(
        JobRow(
            id=number,
            group="g",
            reads="r",
            wanted_bytes=10**6,
            share_bytes=share_bytes,
            below=below,
            pid=1,
        )
    )


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=12))
def test_what_is_used_is_the_sum_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    catalogue = Catalogue(Folder.at(str(tmp_path_factory.mktemp("books"))))
    catalogue.recount()
    rows: dict[str, int] = {}
    for key, blocks in steps:
        if blocks:
            enter(catalogue, key, disk_bytes=blocks * 4096)
            rows[key] = blocks * 4096
        else:
            catalogue.remove(key)
            rows.pop(key, None)
        assert catalogue.used_bytes == sum(rows.values())
    assert catalogue.recount() == sum(rows.values())
    assert catalogue.sizes("ready") == rows
    catalogue.close()


def test_new_books_know_no_sum(tmp_path: Path) -> None:
    made = Catalogue(Folder.at(str(tmp_path)))
    with pytest.raises(UncountedError):
        _ = made.used_bytes
    made.close()


def test_victims_are_data_before_manifests_the_least_recently_used_first(
    catalogue: Catalogue,
) -> None:
    enter(catalogue, "aa", used_s=3.0)
    enter(catalogue, "bb", used_s=1.0, kept=True)
    enter(catalogue, "cc", used_s=2.0)
    enter(catalogue, "dd", used_s=0.0, state="fill")
    enter(catalogue, "ee", used_s=0.0, state="trash")
    assert [row.key for row in catalogue.victims()] == ["cc", "aa", "bb"]
    catalogue.touch({"cc": 9.0})
    assert [row.key for row in catalogue.victims()] == ["aa", "cc", "bb"]


def test_a_job_pins_keys_below_its_threshold_and_its_groups_manifests(catalogue: Catalogue) -> None:
    for key in ("0a", "0b", "0c"):
        enter(catalogue, key)
    enter(catalogue, "ff", kept=True)
    enter(catalogue, "0d", group="another")
    a_job(catalogue, below="0b")
    assert [row.key for row in catalogue.victims()] == ["0b", "0c", "0d"]
    pinned = {row.key for row in catalogue.blobs() if row.pinned}
    assert pinned == {"0a", "ff"}
    catalogue.set_share(1, share_bytes=0, below="")
    assert {row.key for row in catalogue.blobs() if row.pinned} == {"ff"}
    catalogue.remove_job(1)
    assert not any(row.pinned for row in catalogue.blobs())


def test_a_job_is_owed_what_it_lacks_of_its_share(catalogue: Catalogue) -> None:
    assert catalogue.owed_bytes("g") == 0
    a_job(catalogue, below="0c", share_bytes=40_960)
    assert catalogue.owed_bytes("g") == 40_960
    enter(catalogue, "0a", disk_bytes=8192)
    enter(catalogue, "0d", disk_bytes=8192)  # above the threshold: not of its share
    assert catalogue.owed_bytes("g") == 32_768
    assert catalogue.owed_bytes("another") == 0
    catalogue.set_share(1, share_bytes=8192 - 20, below="0c")
    assert catalogue.owed_bytes("g") == 0  # it holds more than its share


def test_what_is_dropped_counts_until_it_is_gone(catalogue: Catalogue) -> None:
    enter(catalogue, "aa")
    catalogue.to_trash("aa", "aa-7")
    assert catalogue.blob("aa") is None
    assert catalogue.counts() == {"trash": 1}
    assert catalogue.used_bytes == 4096


def test_a_number_that_was_changed_is_damage(catalogue: Catalogue, tmp_path: Path) -> None:
    catalogue.set_number("max_bytes", 12)
    assert catalogue.number("max_bytes") == 12
    assert catalogue.number("nothing") is None
    with sqlite3.connect(tmp_path / "catalogue.db") as books:
        books.execute("UPDATE facts SET value = '13' WHERE name = 'max_bytes'")
    books.close()
    with pytest.raises(sqlite3.DatabaseError, match="max_bytes") as raised:
        catalogue.number("max_bytes")
    assert is_damage(raised.value)


def test_names_tell_never_asked_from_not_there(catalogue: Catalogue) -> None:
    assert catalogue.recall("x") == (False, None)
    catalogue.remember("x", None)
    assert catalogue.recall("x") == (True, None)
    catalogue.remember("x", (5, "v"))
    assert catalogue.recall("x") == (True, (5, "v"))


def test_a_transaction_that_fails_leaves_nothing(catalogue: Catalogue) -> None:
    def fail_behind_a_change() -> None:
        with catalogue.writing():
            enter(catalogue, "aa")
            raise KeyError

    with pytest.raises(KeyError):
        fail_behind_a_change()
    assert catalogue.blobs() == []
    assert catalogue.used_bytes == 0


def test_a_catalogue_that_another_process_replaced_is_opened_before_the_next_change(
    tmp_path: Path,
) -> None:
    folder = Folder.at(str(tmp_path))
    one, other = Catalogue(folder), Catalogue(folder)
    one.set_label("g", "of one")
    entered: list[str] = []
    other.renew(sqlite3.DatabaseError("torn"), lambda: entered.append("files"))
    assert entered == ["files"]
    one.set_label("h", "of one again")
    assert other.labels() == {"h": "of one again"}
    one.close()
    other.close()


def test_errors_of_the_disk_are_no_damage() -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = 13
    torn = sqlite3.DatabaseError("malformed")
    torn.sqlite_errorcode = 11
    assert not is_damage(full)
    assert is_damage(torn)
    assert not is_damage(sqlite3.ProgrammingError("closed"))
    assert not is_damage(OSError())
