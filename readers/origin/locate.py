"""From a URL to the origin behind it: the one place that decides how a dataset is reached."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from penstock.cache.disk.mounts import is_network
from penstock.cache.errors import ConfigError, FetchError
from penstock.cache.secrets import redact
from penstock.readers.origin.arrangement import AS_IT_LIES
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder, dataset_key
from penstock.readers.origin.select import place_of
from penstock.readers.origin.urls import index_url, options_scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.blobs.remote import Remote
    from penstock.cache.blobs.upstream import Upstream
    from penstock.cache.fetch.fetcher import Fetcher
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.origin.url_patterns import Selection
    from penstock.readers.origin.urls import Url


def locate(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None,
    scratch: Scratch,
    filesystem: Any | None = None,
    arrangement: Arrangement = AS_IT_LIES,
) -> Origin:
    """The origin behind a URL. filesystem: an fsspec file system, of which url is a path then.
    arrangement: how its files make up samples, where the user says so.

    A URL that may be a file's or a folder's (x.parquet) is looked up in its store. A local path on
    a network file system is read through the cache, if the user has given one.

    Raises ConfigError, MissingDependencyError, FetchError."""
    place = place_of(url, is_path=filesystem is not None)
    root, selection = place.root, place.selection
    if isinstance(root, str):
        options = storage_options or {}
        found = _open_remote(root, options, scratch, selection, filesystem, arrangement=arrangement)
        if place.folder is None or _is_file(found):
            return found
        found.close()
        return _open_remote(
            place.folder, options, scratch, None, filesystem, arrangement=arrangement
        )
    if scratch.is_kept and is_network(os.fsdecode(os.path.abspath(root))):
        from fsspec.implementations.local import LocalFileSystem

        mount = os.path.abspath(root)
        mounted = _open_remote(
            os.fsdecode(mount), {}, scratch, selection, LocalFileSystem(), arrangement=arrangement
        )
        mounted.mount = mount
        return mounted
    return LocalFolder(root, selection, arrangement)


def _is_file(origin: RemoteFolder) -> bool:
    """Whether the one file that was selected is there. Where nobody can say, it is taken to be:
    what reads it says what is wrong."""
    assert origin.selection is not None
    try:
        return origin.remote.find(origin.selection.parts[0]) is not None
    except FetchError:
        return True


def _open_remote(
    url: str,
    options: Mapping[str, Any],
    scratch: Scratch,
    selection: Selection | None,
    filesystem: Any | None,
    of: Remote | None = None,
    arrangement: Arrangement = AS_IT_LIES,
) -> RemoteFolder:
    """of: the dataset that this folder belongs to, where it is none itself."""
    from penstock.cache.blobs.remote import Remote
    from penstock.cache.fetch.fetcher import Fetcher
    from penstock.cache.stores.opening import fetch_policy, open_store

    store = open_store(url, options, filesystem=filesystem)
    meter = None if of is None else of.fetcher.meter
    fetcher = Fetcher(store, policy=fetch_policy(options), meter=meter)
    shown = redact(url) if filesystem is None else store.url
    variant = arrangement.key_with_content()
    key = dataset_key(store.scope, shown.rstrip("/"), selection, variant)
    label = shown if selection is None else f"{shown.rstrip('/')}/{selection.pattern}"
    group = _group(key) if of is None else of.group
    cache = scratch.disk_cache()
    remote = Remote(
        fetcher,
        cache,
        group=group,
        label=label if of is None else of.label,
        upstream=None if cache.peers is None else _asking_peers(fetcher, group),
    )

    def folder_at(other: str) -> RemoteFolder:
        if filesystem is None and options_scope(other) != options_scope(url):
            raise ConfigError(
                f"index: {redact(other)} lies in another store than {redact(url)} does, and "
                "storage_options are for that one. Give a folder of the same store or a local one."
            )
        return _open_remote(other, options, scratch, None, filesystem, remote)

    place = index_url(url, selection, is_path=filesystem is not None, variant=variant)
    return RemoteFolder(
        remote,
        shown,
        selection,
        index_url=place,
        folder_at=folder_at,
        # Memory is this process's own, and a file system object may be anything.
        is_known_by_url=filesystem is None and not url.startswith("memory:"),
        arrangement=arrangement,
    )


def _asking_peers(fetcher: Fetcher, group: str) -> Upstream:
    """An upstream that asks other nodes' caches, once it is told of them."""
    from penstock.cache.blobs.store_upstream import StoreUpstream
    from penstock.cache.peers.peer_directory import PeerDirectory
    from penstock.cache.peers.peer_upstream import PeerUpstream

    directory = PeerDirectory(group=group)
    return PeerUpstream(StoreUpstream(fetcher), directory, meter=fetcher.meter)


def _group(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
