"""Types of other packages, one class each, work wherever ours do."""

from __future__ import annotations

import json
import re
import struct
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.augment import RandomCrop, RandomHorizontalFlip
from penstock.cache import ConfigError, MissingDependencyError, RecipeError
from penstock.pipeline import DataLoader
from penstock.pipeline.cli import main
from penstock.readers import Dataset, pack
from penstock.readers.fieldtypes import FieldType, Image, named_type
from penstock.testing import FieldTypeConformance
from tests import images, warm
from tests.layers import ROOT
from tests.readers.fieldtypes.guest_types import (
    Cloud,
    Depth,
    Document,
    Quaternion,
    RunLengths,
    Timestamp,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from pathlib import Path

STEPS = [np.arange(12).reshape(3, 4) * n for n in range(4)]
CLOUDS = [np.arange(3 * n).reshape(n, 3).astype("<f4") for n in range(4)]


class TestDepth(FieldTypeConformance):
    damaged = images.png(STEPS[1].astype(np.uint16))[:40]

    def make(self) -> FieldType:
        return Depth(scale=0.5)

    def samples(self) -> Sequence[tuple[bytes, Any]]:
        return [(images.png(each.astype(np.uint16)), each * np.float32(0.5)) for each in STEPS]


class TestRunLengths(FieldTypeConformance):
    damaged = bytes((5, 1))

    def make(self) -> FieldType:
        return RunLengths((2, 3))

    def samples(self) -> Sequence[tuple[bytes, Any]]:
        return [(bytes((2, 0, 4, n)), np.array([[0, 0, n], [n, n, n]])) for n in range(4)]


class TestDocument(FieldTypeConformance):
    damaged = "{"

    def make(self) -> FieldType:
        return Document()

    def samples(self) -> Sequence[tuple[str, Any]]:
        return [(json.dumps({"n": n}), {"n": n}) for n in range(4)]


class TestCloud(FieldTypeConformance):
    damaged = b"123"

    def make(self) -> FieldType:
        return Cloud()

    def samples(self) -> Sequence[tuple[bytes, Any]]:
        return [(each.tobytes(), each) for each in CLOUDS]


class TestTimestamp(FieldTypeConformance):
    damaged = "yesterday"

    def make(self) -> FieldType:
        return Timestamp()

    def samples(self) -> Sequence[tuple[str, Any]]:
        return [(f"1970-01-0{n + 1}T00:00:01", 86_400 * n + 1) for n in range(4)]


class TestQuaternion(FieldTypeConformance):
    damaged = "0 0 0 2"

    def make(self) -> FieldType:
        return Quaternion()

    def samples(self) -> Sequence[tuple[str, Any]]:
        return [("0 0 0 1", (0, 0, 0, 1)), ("[1, 0, 0, 0]", (1, 0, 0, 0))] * 2


def table(folder: Path) -> str:
    """Write a Parquet table of which row 1 is bad, and row 2 lacks its cloud."""
    clouds = [each.tobytes() for each in CLOUDS]
    columns = {
        "depth": [images.png(each.astype(np.uint16)) for each in STEPS],
        "cloud": [*clouds[:2], None, clouds[3]],
        "when": ["1970-01-01T00:00:01"] * 4,
        "pose": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 3.0]] + [[1.0, 0.0, 0.0, 0.0]] * 2,
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return str(folder / "rows.parquet")


TYPES = {"depth": Depth(), "cloud": Cloud(), "when": Timestamp(), "pose": Quaternion()}
FIELDS = ("depth", "cloud", "cloud.present", "when", "pose", "id")


def values(url: str, **options: Any) -> dict[int, Any]:
    """Return the shape or value of each field, by the sample's number."""
    found = {}
    with (
        Dataset(url, fields=FIELDS, **options) as data,
        DataLoader(data, 2, as_dict=True, max_bad=1.0) as loader,
    ):
        for batch in loader:
            for row, number in enumerate(batch["id"].tolist()):
                shapes = tuple(batch["depth"][row].shape), tuple(batch["cloud"][row].shape)
                has_cloud, when = batch["cloud.present"][row].item(), batch["when"][row].item()
                found[number] = (*shapes, has_cloud, when, batch["pose"][row].tolist())
    return found


@pytest.mark.filterwarnings("ignore::penstock.cache.PenstockWarning")
def test_tables_are_checked_when_they_are_read_and_packs_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = table(tmp_path)
    found = values(url, schema=TYPES)
    assert found.keys() == {0, 2, 3}
    assert found[2] == ((3, 4), (0, 3), False, 1, [1.0, 0.0, 0.0, 0.0])
    pack(Dataset(url, schema=TYPES).subset([0, 2, 3]), tmp_path / "pack", shuffle=False)
    packed = values(str(tmp_path / "pack"))
    assert list(packed.values()) == [found[0], found[2], found[3]]
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "pack"), "/guests", recursive=True)
    cache = tmp_path / "cache"
    assert values("memory://guests", cache=cache) == packed
    memory.rm("/guests", recursive=True)
    assert not main(["inspect", str(tmp_path / "pack"), "--batch", "2"])
    shown = capsys.readouterr().out
    assert "Quaternion" in shown
    assert "1970-01-01" in shown  # as `show` writes it


@pytest.mark.filterwarnings("ignore::penstock.cache.PenstockWarning")
def test_invalid_values_of_arrays_in_files_are_found_when_they_are_read(tmp_path: Path) -> None:
    poses = np.tile([0.0, 0, 0, 1], (8, 1))
    poses[3] *= 2
    np.savez(tmp_path / "arrays.npz", pose=poses, when=np.arange(8, dtype=np.int16))
    schema = {"pose": Quaternion(), "when": Timestamp()}
    with (
        Dataset(tmp_path, schema=schema) as data,
        DataLoader(data, 4, as_dict=True, max_bad=1.0) as loader,
    ):
        found = [number for batch in loader for number in batch["when"].tolist()]
        assert data.column("when").tolist() == [*range(8)]
    assert found[:3] == [0, 1, 2]
    assert 3 not in found


def test_a_map_of_depths_follows_its_image(tmp_path: Path) -> None:
    for name in ("image", "depth"):
        (tmp_path / name).mkdir()
    for n in range(4):
        steps = np.random.default_rng(n).integers(0, 255, (8, 10)).astype(np.uint16)
        (tmp_path / "depth" / f"{n}.png").write_bytes(images.png(steps))
        pixels = np.repeat(steps.astype(np.uint8)[..., None], 3, 2)
        (tmp_path / "image" / f"{n}.png").write_bytes(images.png(pixels))
    pytest.importorskip("nvidia.dali")
    schema = {"image": Image(), "depth": Depth(scale=1, of="image")}
    with (
        Dataset(tmp_path, schema=schema, fields={"image": "image", "depth": "depth"}) as data,
        DataLoader(data, 4, augment=[RandomCrop((4, 4))], as_dict=True) as loader,
    ):
        (batch,) = loader
    np.testing.assert_array_equal(batch["image"][:, 0].numpy(), batch["depth"].numpy())


def test_a_type_that_does_not_follow_refuses_to_be_moved(tmp_path: Path) -> None:
    class Edges(Depth):
        kind = "edges"
        follow = FieldType.follow  # type: ignore[assignment]

    for name in ("image", "edges"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(images.png(np.zeros((8, 8), np.uint8)))
    schema = {"image": Image(), "edges": Edges(of="image")}
    pytest.importorskip("nvidia.dali")
    places = {"image": "image", "edges": "edges"}
    with (
        Dataset(tmp_path, schema=schema, fields=places) as data,
        pytest.raises(RecipeError, match=r"edges.*has no `follow`"),
    ):
        DataLoader(data, 1, augment=[RandomCrop((4, 4))], drop_last=False)


PACKAGE = """
from dataclasses import dataclass
from typing import ClassVar
from penstock.readers.fieldtypes import ArrayForm, FieldType

@dataclass(frozen=True)
class Pair(FieldType):
    kind: ClassVar[str] = "pair"
    is_encoded: ClassVar[bool] = True
    decoded = ArrayForm.of("<u2", (2,))

    def decode(self, payload):
        return payload.view("<u2")
"""
WRITE = """
import sys
from penstock import Dataset, pack
from pairs import Pair
pack(Dataset("data", schema={"image": Pair()}), "packed", fields=("image",))
"""
READ = """
from penstock import Dataset, DataLoader
print(sorted(DataLoader(Dataset("packed"), 2).__iter__().__next__()[0].tolist()))
"""


def run(code: str, folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    found = f"import sys\nsys.path += {[*map(str, path)]}\n"
    return warm.run(["-c", found + code], cwd=folder, env={"PATH": "", "HOME": str(folder)})


def test_other_processes_find_a_type_by_its_entry_point(tmp_path: Path) -> None:
    home, data = tmp_path / "site", tmp_path / "data"
    (home / "pairs-1.0.dist-info").mkdir(parents=True)
    (home / "pairs.py").write_text(PACKAGE)
    information = home / "pairs-1.0.dist-info"
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[penstock.field_types]\npair = pairs:Pair\n")
    data.mkdir()
    for n in range(2):
        (data / f"{n}.pair").write_bytes(struct.pack("<HH", n, 7))
    written = run(WRITE, tmp_path, home)
    assert written.returncode == 0, written.stderr
    read = run(READ, tmp_path, home)
    assert read.stdout == "[[0, 7], [1, 7]]\n", read.stderr
    without = run(READ, tmp_path)
    assert "field of the type 'pair'" in without.stderr
    assert "Install the package that provides it" in without.stderr


def test_a_kind_must_be_new_and_installed() -> None:
    with pytest.raises(MissingDependencyError, match=r"'nothing_like_it'.*entry point"):
        named_type("nothing_like_it")
    with pytest.raises(ConfigError, match="Penstock's own"):
        type("Mine", (Depth,), {"kind": "image"})
    with pytest.raises(ConfigError, match="lower-case"):
        type("Mine", (Depth,), {"kind": "My Kind"})
    with pytest.raises(ConfigError, match=r"guest_types and tests.*both define kind='guest.depth'"):
        type("Mine", (Depth,), {"kind": "guest.depth"})
    assert named_type("guest.depth") is Depth


def documented() -> Any:
    """Return the test class of the section in docs/reference/fields.md."""
    section = (
        (ROOT / "docs" / "reference" / "fields.md").read_text().split("## Your own field type")[1]
    )
    module = sys.modules["documented_types"] = ModuleType("documented_types")
    vars(module)["png"] = images.png
    for code in re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.S):
        # Beside the types above and those of the page, which its own test runs.
        other = re.sub(r'(kind: ClassVar\[str\] = ")', r"\1documented.", code)
        exec(compile(other, "fields.md", "exec"), vars(module))
    return module.TestDepth


TestDocumented = documented()


def test_the_documented_line_follows_its_image(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    line: Any = sys.modules["documented_types"].Line  # type: ignore[attr-defined]
    points = [np.arange(2 * n, dtype="<f4").reshape(-1, 2) for n in range(4)]
    rows = ["image_file_name,line_file_name"]
    for n, each in enumerate(points):
        (tmp_path / f"{n}.png").write_bytes(images.png(np.zeros((8, 10, 3), np.uint8)))
        (tmp_path / f"{n}.line").write_bytes(each.tobytes())
        rows.append(f"{n}.png,{n}.line")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    data = Dataset(tmp_path, manifest="table.csv", schema={"line": line(of="image")})
    for fields, augment, width in (
        (("image", "line", "id"), [RandomHorizontalFlip(p=1.0)], 9),
        (("line", "id"), None, 0),
    ):
        with data.select(*fields) as chosen, DataLoader(chosen, 4, augment=augment) as loader:
            (batch,) = loader
        for moved, number in zip(batch[-2], batch[-1].tolist(), strict=True):
            x, y = points[number].T
            np.testing.assert_array_equal(moved, np.stack([abs(width - x), y], 1))
