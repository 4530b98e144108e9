"""A job without image fields runs without DALI."""

from __future__ import annotations

import subprocess
import sys

# Imports fail as where DALI isn't installed.
JOB = """
import sys

class NoDali:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "nvidia":
            raise ImportError(f"{name} isn't installed here")

sys.meta_path.insert(0, NoDali())

import threading
import numpy as np
from penstock import DataLoader, Map, Pad
from penstock.cache import MissingDependencyError
from penstock.readers.fieldtypes import Array, Image, Mask, Text, Value
from tests.pipeline.feed.memory import Memory

types = {
    "image": Image(), "mask": Mask(of="image"), "caption": Text(), "vector": Array("float32", (3,)),
    "tokens": Array("int64", (None,)), "label": Value("int64"),
}
columns = {
    "image": [np.zeros((8, 8, 3), np.uint8)] * 20,
    "mask": [np.zeros((8, 8), np.uint8)] * 20,
    "caption": [str(i) for i in range(20)],
    "vector": [np.full(3, i, np.float32) for i in range(20)],
    "tokens": [np.arange(i % 4) for i in range(20)],
    "label": list(range(20)),
}
fields = ("mask", "caption", "vector", "tokens", "label")
with DataLoader(
    Memory(types, columns, fields=fields), 4, shuffle=True, seed=1,
    augment=[Map(lambda caption: caption + "!", "caption"), Pad("tokens")],
) as loader:
    for epoch in range(2):
        batches = list(loader)
        assert all(text.endswith("!") for batch in batches for text in batch[1])
        labels = [int(label) for batch in batches for label in batch[-1]]
        assert sorted(labels) == list(range(20)), labels
        assert labels != sorted(labels)
    names = [thread.name for thread in threading.enumerate()]
    print(loader.statistics().samples, sum("decode" in name for name in names))
try:
    DataLoader(Memory(types, columns, fields=("image", "label")), 4)
except MissingDependencyError as error:
    print(error)
assert not [name for name in sys.modules if name.split(".")[0] == "nvidia"]
"""


def test_a_loader_without_images_needs_no_dali() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JOB], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    counts, missing = done.stdout.splitlines()
    assert counts == "40 0"
    assert "pip install 'penstock[dali]'" in missing
