"""Samples that are left out are counted by reason at each opening."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock import ClassLabel, DataLoader, Dataset, Value, concat
from penstock.cache import ConfigError, DatasetError
from penstock.pipeline.cli import main
from penstock.readers import pack
from penstock.readers.origin import LeftOut, QuarantineEntry, count_left_out, joined_left_out
from tests import images, tars
from tests.files import uploaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRUNCATED = "truncated JPEG (no end-of-image marker)"
NO_IMAGE = "not an image (its first bytes match no known image format)"
GOOD = {f"{'ab'[i % 2]}/{i:02}.jpg": images.jpeg(i) for i in range(60)}
BAD = {"a/99.jpg": images.jpeg(1)[:300], "b/98.jpg": b"xx", "b/97": b"xx"}
PAPERS = {"README.md": b"x", "a/notes.txt": b"x", "list.md5": b"x", "b/LICENSE": b"x"}
WANTED = {NO_IMAGE: 2, TRUNCATED: 1}

pytestmark = pytest.mark.filterwarnings("default::penstock.cache.errors.PenstockWarning")


def folder(root: Path) -> Path:
    return images.write_folder(root, GOOD | BAD | PAPERS)


def archives(root: Path) -> Path:
    files = {name.replace("/", "-"): data for name, data in (GOOD | BAD).items()}
    return images.write_folder(
        root, {"0.tar": tars.archive({k if "." in k else f"{k}.png": v for k, v in files.items()})}
    )


def opened(url: object, **options: object) -> tuple[Dataset, list[str]]:
    """Open a dataset; return it with the warnings of opening it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = Dataset(url, **options)  # type: ignore[arg-type]
        dataset.open(verify=images.verify)
    return dataset, [str(each.message) for each in caught if " are left out:" in str(each.message)]


@pytest.mark.parametrize("write", [folder, archives])
@pytest.mark.parametrize("is_packed", [False, True])
def test_each_opening_reports_the_counts(
    tmp_path: Path, write: Callable[[Path], Path], is_packed: bool
) -> None:
    root = write(tmp_path / "set")
    if is_packed:
        summary = pack(root, tmp_path / "pack", verify=images.verify)
        root = tmp_path / "pack"
        assert summary.left_out == WANTED
    dataset, first = opened(root)
    again, second = opened(root)
    for one, messages in ((dataset, first), (again, second)):
        with one:
            assert one.left_out == WANTED
            assert ", 3 left out)" in repr(one)
            (message,) = messages
            assert "3 of 63 samples (4.76 %) are left out:\n  2 x not an image" in message
            assert message.count("\n") == 3  # a line for each reason, and one for the list
            assert "(such as " in message


def test_a_reason_is_counted_once_whatever_its_place_in_a_file() -> None:
    reasons = [
        f"meta: not JSON (Expecting value: line 1 column {n} (char {n - 1}))" for n in (3, 9)
    ]
    entries = [QuarantineEntry(name=b"x", reason=reason) for reason in reasons]
    assert count_left_out(entries) == {"meta: not JSON (Expecting value)": (2, "x")}


def test_many_reasons_that_differ_in_numbers_are_counted_as_the_first() -> None:
    several = [{f"image: {n} x 3 pixels": LeftOut(1, f"{n}.jpg")} for n in range(30)]
    wanted = {"image: 0 x 3 pixels (or similar)": (30, "0.jpg")}
    assert joined_left_out(several) == wanted
    assert joined_left_out([*several, *[joined_left_out(several)]]) == {
        "image: 0 x 3 pixels (or similar)": (60, "0.jpg")
    }
    assert joined_left_out(several[:2]) == {**several[0], **several[1]}


def test_selections_and_concatenations(tmp_path: Path) -> None:
    one, _ = opened(folder(tmp_path / "one"))
    other, _ = opened(archives(tmp_path / "other"), fields=("image",))
    half = one.select("image").subset(range(20))
    with other:
        assert half.left_out == WANTED
        assert concat([half, half]).left_out == WANTED
        assert concat([half, other]).left_out == {name: 2 * n for name, n in WANTED.items()}
        assert "3 left out" in repr(half)
    with one, DataLoader(one, 8) as loader:
        statistics = loader.statistics()
    assert statistics.left_out == WANTED
    assert "3 samples are left out of the dataset" in str(statistics)
    statistics = replace(statistics, left_out={"truncated JPEG": 1})
    assert "1 sample is left out of the dataset" in str(statistics)


def test_a_pack_has_what_its_source_left_out(tmp_path: Path) -> None:
    root = folder(tmp_path / "set")
    pack(root, tmp_path / "one", verify=images.verify)
    summary = pack(tmp_path / "one", tmp_path / "two", verify=images.verify)
    assert (summary.left_out, summary.quarantined) == (WANTED, 0)
    with opened(root)[0] as dataset:
        summary = pack(dataset.subset(range(30)), tmp_path / "three", verify=images.verify)
    assert summary.left_out == WANTED
    for name in ("two", "three"):
        with opened(tmp_path / name)[0] as packed:
            assert packed.left_out == WANTED
    again = pack(tmp_path / "one", tmp_path / "two", verify=images.verify)
    assert again.left_out == WANTED


def test_too_many_are_an_error_unless_the_user_allows_them(tmp_path: Path) -> None:
    root = images.write_folder(tmp_path / "set", {f"{i}.jpg": images.jpeg(i) for i in range(8)})
    table = "path,label\n" + "".join(f"{i}.jpg,{('cat', 'dgo')[i % 4 == 0]}\n" for i in range(8))
    (tmp_path / "list.csv").write_text(table)
    arguments = {"manifest": tmp_path / "list.csv", "schema": {"label": ClassLabel(("cat", "dog"))}}
    for _ in range(2):
        with pytest.raises(DatasetError) as refused:
            opened(root, **arguments)
        message = str(refused.value)
        assert "2 of 8 samples (25 %) are left out: 2 x label: 'dgo' isn't a class" in message
        assert "such as 0.jpg" in message
        assert "allow_left_out=0.25" in message
    for share in (0.25, 1.0, True):
        with opened(root, allow_left_out=share, **arguments)[0] as dataset:
            assert (len(dataset), sum(dataset.left_out.values())) == (6, 2)
    with pytest.raises(DatasetError, match=r"At most 0 % may be left out"):
        opened(root, allow_left_out=0, **arguments)
    for wrong in (-0.1, 1.5, "all", None, float("nan")):
        with pytest.raises(ConfigError, match=r"allow_left_out: got .*wanted the largest share"):
            Dataset(root, allow_left_out=wrong)  # type: ignore[arg-type]


def test_below_one_percent_there_is_no_warning(tmp_path: Path) -> None:
    files = {f"{i}.jpg": images.jpeg(i % 5) for i in range(150)} | {"bad.jpg": b"x"}
    dataset, messages = opened(images.write_folder(tmp_path / "set", files))
    assert (messages, dataset.left_out) == ([], {NO_IMAGE: 1})


def test_a_remote_dataset_and_a_remote_pack(tmp_path: Path) -> None:
    pack(folder(tmp_path / "set"), tmp_path / "pack", verify=images.verify)
    for name in ("set", "pack"):
        with uploaded(tmp_path / name) as url:
            dataset, messages = opened(url, cache=tmp_path / "cache")
            with dataset:
                assert (dataset.left_out, len(messages)) == (WANTED, 1)


def test_files_too_short_for_a_sample(tmp_path: Path) -> None:
    for i, length in enumerate((5, 100, 100)):
        images.write_folder(tmp_path / "t", {f"{i}.bin": np.arange(length, dtype="<u2").tobytes()})
    with opened(tmp_path / "t", format="tokens", dtype="uint16", sample=(10,))[0] as dataset:
        assert dataset.left_out == {"a file of less than one sequence (10)": 1}
    for i, rows in enumerate((2, 50, 50)):
        (tmp_path / "n").mkdir(exist_ok=True)
        np.save(tmp_path / "n" / f"{i}.npy", np.zeros((rows, 2)))
    with opened(tmp_path / "n", sample=(5, None))[0] as dataset:
        assert dataset.left_out == {"an array too short for one sample": 1}


def test_images_that_metadata_do_not_name(tmp_path: Path) -> None:
    files = {f"{i}.jpg": images.jpeg(i) for i in range(8)}
    table = b"file_name,n\n" + b"".join(b"%d.jpg,1\n" % i for i in range(6))
    root = images.write_folder(tmp_path / "set", files | {"metadata.csv": table})
    reason = "no row of the metadata names it"
    for _ in range(2):
        with pytest.raises(DatasetError, match=rf"2 of 8 samples .* 2 x {reason} \(such as 6.jpg"):
            opened(root)
    with opened(root, allow_left_out=0.3)[0] as dataset:
        assert (len(dataset), dataset.left_out) == (6, {reason: 2})
    # A table that the user names is a choice.
    with opened(root, manifest="metadata.csv")[0] as dataset:
        assert (len(dataset), dataset.left_out) == (6, {})


def test_similar_reasons_are_counted_together(tmp_path: Path) -> None:
    files = {f"{i}.jpg": images.jpeg(i % 5) for i in range(400)}
    root = images.write_folder(tmp_path / "set", files)
    table = "path,n\n" + "".join(f"{i}.jpg,{'x' * (i % 10 == 0)}{i}\n" for i in range(400))
    (root / "list.csv").write_text(table)
    arguments = {"manifest": "list.csv", "schema": {"n": Value("int64")}, "allow_left_out": 0.2}
    dataset, (message,) = opened(root, **arguments)
    ((reason, count),) = dataset.left_out.items()
    assert count == 40
    assert reason.startswith("n: ")
    assert len(message) < 400


def test_commands_say_that_a_dataset_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = {f"{i:03}.jpg": images.jpeg(i) for i in range(40)}
    root = images.write_folder(tmp_path / "set", GOOD | beside)
    plan = ["plan", root, "--samples-per-s", 9, "--gpus", 1]
    for command in (["inspect", root], ["index", root], ["pack", root, tmp_path / "pack"], plan):
        assert main([str(each) for each in command]) == 0
        shown = capsys.readouterr().err
        assert "40 of 100 samples (40 %) are left out:\n  40 x not in a class folder" in shown
        assert "By default, Dataset(…) allows 10 %" in shown
        assert "manifest=" in shown
        assert "allow_left_out=0.4)" in shown
