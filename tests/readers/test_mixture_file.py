"""Test mixture files: the same mixture as in Python, and an error with its place for each fault."""

from __future__ import annotations

import json
import pickle
import sys
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import Dataset, mix, mix_file, warm
from penstock.errors import ConfigError, DatasetError, MissingDependencyError, PenstockError
from penstock.readers import is_mixture_file, mixture_file

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"web": 300, "code": 90, "math": 31}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("sets")
    for number, (name, size) in enumerate(SIZES.items()):
        np.save(found / f"{name}.npy", 1000 * number + np.arange(size))
    return found


def write(folder: Path, text: Any, name: str = "mixture.yaml") -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def parts() -> dict[str, Any]:
    return {name: f"{name}.npy" for name in SIZES}


def same(found: Any, wanted: Any) -> bool:
    return bool(
        found.contents.fingerprint == wanted.contents.fingerprint and len(found) == len(wanted)
    )


TEXT = """
parts:
  web: web.npy              # relative to this file
  code: {url: code.npy, format: npy, allow_left_out: 0.2}
  math:
    url: math.npy
weights:
  0: {web: 0.5, code: 0.3, math: 2e-1}
  50_000: size
epoch: all
max_repeats: {math: 40}
temperature: 1.5
transition: linear
fields: [web, part]
"""


def test_a_file_gives_the_mixture_of_the_same_arguments(folder):
    schedule: Any = {0: WEIGHTS, 50_000: "size"}
    with pytest.raises(ConfigError, match=r"mixture\.yaml: .*web"):
        mix_file(write(folder, TEXT))
    arguments: dict[str, Any] = {
        "weights": schedule,
        "epoch": "all",
        "max_repeats": {"math": 40},
        "temperature": 1.5,
        "transition": "linear",
    }
    sources = {name: Dataset(folder / f"{name}.npy") for name in SIZES}
    field = sources["web"].fields[0]
    wanted = mix(sources, **arguments, fields=(field, "part"))
    text = TEXT.replace("[web, part]", f"[{field}, part]")
    assert same(mix_file(write(folder, text)), wanted)
    as_json = {
        "parts": parts(),
        **arguments,
        "weights": {"0": WEIGHTS, "50_000": "size"},
        "fields": [field, "part"],
    }
    with mix_file(write(folder, as_json, "mixture.json")) as found:
        assert same(found, wanted)
        assert found.fields == (field, "part")
        assert same(pickle.loads(pickle.dumps(found)), wanted)


def test_a_part_may_be_another_file(folder):
    write(
        folder, {"parts": {"a": "web.npy", "b": "code.npy"}, "weights": {"a": 3, "b": 1}}, "i.yml"
    )
    outer = write(folder, {"parts": {"in": "i.yml", "math": "math.npy"}, "epoch": 100})
    with mix_file(outer) as found:
        assert found.parts == ("in/a", "in/b", "math")


def test_closing_the_mixture_closes_its_parts(folder):
    found = mix_file(write(folder, {"parts": parts()}))
    row = np.zeros((1, 2), np.int64)
    assert len(found.read(row)) == 1
    found.close()
    with pytest.raises(PenstockError):
        found.read(row)
    own = Dataset(folder / "web.npy")
    mix({"web": own}).close()
    assert len(own.read(row)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got null, wanted a mapping with some of parts, weights"),
        ("[1, 2]", "wanted a mapping with some of parts"),
        ("weights: size", "got no parts"),
        ("parts: {}", "got no parts"),
        ("parts: [a.npy]", "parts: got .*wanted the parts by name"),
        ("parts: {web: 3}", "parts: got .*wanted the parts by name"),
        ("parts: {web: {format: npy}}", "parts.web: got no url"),
        ("parts: {web: {url: web.npy, formt: npy}}", "parts.web.formt: .*Did you mean format"),
        ("parts: {web: {url: web.npy, cache: x}}", "parts.web.cache: the key isn't known"),
        ("parts: {web: {url: 7}}", "parts.web.url: got 7, wanted a URL"),
        ("parts: {web: {url: web.npy, vocabulary: true}}", "vocabulary: got true, wanted a whole"),
        ("parts: {web: {url: web.npy, sample: [x]}}", "parts.web: "),
        ("parts: {web: {url: web.npy, schema: {a: {kind: B B}}}}", "parts.web.schema.a: "),
        ("parts: {web: web.npy}\nweigths: size", "weigths: the key isn't known. Did you mean weig"),
        ("parts: {web: web.npy}\nfields: web", 'fields: got "web", wanted a list of names'),
        ("parts: {web: web.npy}\nmax_repeats: [2]", "max_repeats: got"),
        ("parts: {web: web.npy, code: code.npy}\nweights: {web: 1}", 'there is none for "code"'),
        ("parts: {web: web.npy}\nweights: {web: 1, x: 2}", 'got some for "x"'),
        ('parts: {web: web.npy}\nweights: {web: "1"}', 'weights.web: got "1"'),
        ("parts: {web: web.npy}\nweights: {web: .nan}", 'got nan for "web"'),
        ("parts: {web: web.npy}\nweights: {0: size, web: 3}", "weights.web: got 3"),
        ("parts: {web: web.npy}\nweights: {5: size}", "wanted 0 first"),
        ("parts: {web: web.npy}\nper: week", "per: got 'week'"),
        ("parts: {web: web.npy, web: code.npy}", 'line 1: the key "web" occurs twice'),
        ("parts: {on: web.npy}", "line 1: the key True is no text"),
        ("parts: {a: &x {url: web.npy}, b: *x}", "an alias"),
        ("parts: !!python/object/apply:os.system ['true']", "line 1: the tag"),
        ("parts: {a: !secret web.npy}", "line 1: the tag"),
        ("parts: {", "can't be parsed"),
        ("[" * 20_000, "can't be parsed"),
    ],
)
def test_a_fault_is_named_with_its_place(folder, text, words):
    path = write(folder, text)
    with pytest.raises(ConfigError, match=words) as caught:
        mix_file(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ['{"parts": {"a": "x", "a": "y"}}', '{"epoch": NaN}', "{"])
def test_a_fault_of_json_is_named(folder, text):
    with pytest.raises(ConfigError, match="can't be parsed"):
        mix_file(write(folder, text, "bad.json"))


def test_a_part_that_does_not_exist_is_named(folder):
    path = write(folder, {"parts": {"web": "web.npy", "code": "missing/x.npy"}})
    with pytest.raises(DatasetError, match=r"parts\.code: .*missing/x\.npy"):
        mix_file(path)
    with pytest.raises(FileNotFoundError, match="mixture file doesn't exist"):
        mix_file(folder / "none.yaml")
    with pytest.raises(ConfigError, match="remote"):
        mix_file("s3://bucket/mixture.yaml")


def test_files_that_form_a_cycle_are_refused(folder):
    write(folder, {"parts": {"b": "b.yaml"}}, "a.yaml")
    write(folder, {"parts": {"web": "web.npy", "a": "a.yaml"}}, "b.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: parts\.b: .*b\.yaml: parts\.a: .*cycle: "):
        mix_file(folder / "a.yaml")
    write(folder, {"parts": {"b": {"url": "i.yaml", "format": "npy"}}}, "c.yaml")
    with pytest.raises(ConfigError, match="leave out format"):
        mix_file(folder / "c.yaml")


def test_yaml_needs_a_package_and_json_does_not(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert len(mix_file(write(folder, {"parts": parts()}, "plain.json"))) > 0
    with pytest.raises(MissingDependencyError, match=r"penstock\[yaml\].*as JSON"):
        mix_file(write(folder, {"parts": parts()}))


def test_the_keys_are_the_arguments_of_dataset_and_mix():
    assert mixture_file.PART_KEYS.keys() == signature(Dataset).parameters.keys() - {
        "cache",
        "filesystem",
    }
    assert mixture_file.MIX_KEYS.keys() == signature(mix).parameters.keys() - {
        "parts",
        "part_augment",
    }


def test_names_of_mixture_files(tmp_path):
    assert is_mixture_file("a/mixture.YAML")
    assert is_mixture_file("mixture.json")
    assert not is_mixture_file(["a.yaml"])
    assert not is_mixture_file("photos")
    assert not is_mixture_file("web.jsonl")
    (tmp_path / "photos.json").mkdir()
    assert not is_mixture_file(tmp_path / "photos.json")


def test_the_url_of_many_parts_names_some(folder):
    many = {f"{name}{number}": f"{name}.npy" for name in SIZES for number in range(50)}
    with mix_file(write(folder, {"parts": many})) as found:
        assert found.url.endswith("web.npy and 146 others")
        assert len(found.parts) == 150
        assert len(found.summary().parts) == 150


def test_warm_takes_a_file(folder, tmp_path):
    with pytest.raises(ConfigError, match="local"):
        warm(str(write(folder, {"parts": parts()})), cache=tmp_path)
