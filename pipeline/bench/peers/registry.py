"""The peers by name: what each needs, what brings it, and which module plays it."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.pipeline.bench.peers.work import Peer, Work

_PEERS = "pip install 'penstock[peers]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One peer.

    module, maker: where `maker(work) -> Peer` is; a module whose peer has a format of its own has
    `prepare(work)` too. needs: modules that must be importable. imports: what to import before
    anything is measured. distribution: the package whose version results tell. install: how to get
    what it needs. reads: what it reads, in words. converts: that is a format of its own, made
    from the files. decodes: "its own" decoder, or "ours", the fastest that pip installs, where it
    leaves decoding to its user.
    """

    name: str
    title: str
    module: str
    needs: tuple[str, ...]
    install: str
    reads: str
    converts: bool = False
    decodes: Literal["its own", "ours"] = "its own"
    maker: str = "build"
    imports: tuple[str, ...] = ()
    distribution: str = ""

    def is_installed(self) -> bool:
        return all(map(_is_there, self.needs))


_FOLDER = "the image folder"
_OURS = ("penstock.pipeline.loader", "readers", "augment", "nvidia.dali.fn")
_IMAGES = ("PIL.Image", "PIL.JpegImagePlugin", "numpy")
_ADAPTERS = (
    Adapter(
        name="penstock",
        title="Penstock (pack)",
        module="penstock",
        maker="build_over_pack",
        needs=("nvidia.dali",),
        imports=_OURS,
        install="pip install 'penstock[dali]'",
        reads="its pack",
    ),
    Adapter(
        name="penstock-folder",
        title="Penstock (folder)",
        module="penstock",
        maker="build_over_folder",
        needs=("nvidia.dali",),
        imports=_OURS,
        install="pip install 'penstock[dali]'",
        reads=_FOLDER,
    ),
    Adapter(
        name="torch",
        title="torch DataLoader + Pillow",
        module="torch_loader",
        maker="build_pillow",
        needs=("PIL",),
        imports=_IMAGES,
        install="pip install pillow",
        reads=_FOLDER,
        distribution="pillow",
    ),
    Adapter(
        name="simplejpeg",
        title="torch DataLoader + simplejpeg",
        module="torch_loader",
        maker="build_simplejpeg",
        needs=("simplejpeg",),
        imports=(*_IMAGES, "simplejpeg"),
        install=_PEERS,
        reads=_FOLDER,
        distribution="simplejpeg",
    ),
    Adapter(
        name="dali",
        title="DALI's own file reader",
        module="dali",
        needs=("nvidia.dali",),
        imports=("nvidia.dali.fn",),
        install="pip install 'penstock[dali]'",
        reads=_FOLDER,
    ),
    Adapter(
        name="webdataset",
        title="WebDataset",
        module="webdataset",
        needs=("webdataset",),
        imports=(*_IMAGES, "webdataset"),
        install=_PEERS,
        reads="tar files of the same bytes",
        decodes="ours",
        converts=True,
        distribution="webdataset",
    ),
    Adapter(
        name="streaming",
        title="MosaicML Streaming",
        module="mosaic",
        needs=("streaming",),
        imports=(*_IMAGES, "streaming"),
        install="pip install mosaicml-streaming",
        reads="MDS shards of the same bytes",
        decodes="ours",
        converts=True,
        distribution="mosaicml-streaming",
    ),
    Adapter(
        name="litdata",
        title="LitData",
        module="litdata",
        needs=("litdata",),
        imports=(*_IMAGES, "litdata.streaming.dataloader", "litdata.processing.functions"),
        install=_PEERS,
        reads="its chunks of the same bytes",
        decodes="ours",
        converts=True,
        distribution="litdata",
    ),
    Adapter(
        name="tfdata",
        title="tf.data",
        module="tfdata",
        needs=("tensorflow",),
        imports=("tensorflow",),
        install=_PEERS,
        reads=_FOLDER,
        distribution="tensorflow-cpu",
    ),
    Adapter(
        name="grain",
        title="Grain",
        module="grain",
        needs=("grain",),
        imports=(*_IMAGES, "grain"),
        install=_PEERS,
        reads=_FOLDER,
        decodes="ours",
        distribution="grain",
    ),
    Adapter(
        name="spdl",
        title="SPDL",
        module="spdl",
        needs=("spdl.pipeline",),
        imports=(*_IMAGES, "spdl.pipeline"),
        install=_PEERS,
        reads=_FOLDER,
        decodes="ours",
        distribution="spdl",
    ),
    Adapter(
        name="ffcv",
        title="FFCV",
        module="ffcv",
        needs=("ffcv",),
        imports=("ffcv.loader", "ffcv.transforms", "ffcv.fields"),
        install=(
            "apt install libopencv-dev libturbojpeg0-dev pkg-config g++, then pip install ffcv"
        ),
        reads="a beton of the same bytes",
        converts=True,
        distribution="ffcv",
    ),
)
ADAPTERS: Mapping[str, Adapter] = {adapter.name: adapter for adapter in _ADAPTERS}
OURS = ("penstock", "penstock-folder")
PEERS = tuple(name for name in ADAPTERS if name not in OURS)
TITLES: Mapping[str, str] = {name: adapter.title for name, adapter in ADAPTERS.items()}


def adapter(name: str) -> Adapter:
    """Raises ConfigError for a name that nobody has."""
    try:
        return ADAPTERS[name]
    except KeyError:
        raise ConfigError(
            f"peers: got {name!r}, wanted some of {', '.join(PEERS)}. Leave that one out."
        ) from None


def split_installed(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Those that can play here, in order, and how to install each of the others.

    Raises ConfigError for a name that nobody has."""
    adapters = [adapter(name) for name in dict.fromkeys(names)]
    there = [a.name for a in adapters if a.is_installed()]
    return there, {a.name: a.install for a in adapters if a.name not in there}


def build(name: str, work: Work) -> Peer:
    """The loader of that name, built and ready to be asked."""
    made = adapter(name)
    peer: Peer = getattr(_module(made), made.maker)(work)
    return peer


def prepare(name: str, work: Work) -> None:
    """Convert the data where the peer has a format of its own; what was converted is kept."""
    if convert := getattr(_module(adapter(name)), "prepare", None):
        convert(work)


def imports(name: str) -> float:
    """Import what a peer needs, so that no figure holds it. Returns the seconds.

    Raises MissingDependencyError where something isn't there."""
    began = time.perf_counter()
    asked = adapter(name)
    for module in ("torch", "torch.utils.data", *asked.imports):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"The peer {name} needs `{module}`. Run `{asked.install}`."
            ) from error
    if asked.module == "penstock":
        from penstock.augment import resample_node

        resample_node.is_compiled()  # it is imported, or compiled, where a loader first needs it
    return time.perf_counter() - began


def _module(asked: Adapter) -> Any:
    return importlib.import_module(f"penstock.pipeline.bench.peers.{asked.module}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
