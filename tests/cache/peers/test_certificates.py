"""Who encrypts, with what, and what is wrong with files of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization

from penstock.cache import ConfigError
from penstock.cache.base import Peers, TlsFiles
from penstock.cache.peers import PeerSecret, credentials_of, is_loopback, make_credentials, protocol
from tests.cache.peers.serving import serving
from tests.servers.certificates import authority, server_context

if TYPE_CHECKING:
    from pathlib import Path

SECRET = PeerSecret.draw()


@pytest.mark.parametrize(
    ("address", "tls", "encrypts"),
    [
        ("127.0.0.1:0", None, False),
        ("127.8.0.1:0", None, False),
        ("localhost:0", None, False),
        ("[::1]:0", None, False),
        ("10.0.0.7:0", None, True),
        ("[fd00::7]:0", None, True),
        ("node-7.cluster:0", None, True),
        ("10.0.0.7:0", False, False),
        ("127.0.0.1:0", True, True),
    ],
)
def test_what_leaves_the_machine_is_encrypted_unless_said_otherwise(
    address: str, tls: bool | None, encrypts: bool
) -> None:
    assert (credentials_of(Peers(address, tls=tls), SECRET) is not None) == encrypts


@pytest.mark.parametrize("host", ["localhost.evil.example", "1270.0.0.1", "", "::2", "10.0.0.1"])
def test_a_name_that_looks_like_loopback_isnt(host: str) -> None:
    assert not is_loopback(host)


def test_keys_are_drawn_anew_and_in_no_words() -> None:
    one, other = make_credentials(SECRET, "10.0.0.7"), make_credentials(SECRET, "10.0.0.7")
    assert one.key != other.key
    assert one.key not in repr(one)
    assert "PRIVATE" not in repr(one)


def own_files(folder: Path, *, expired: bool = False) -> TlsFiles:
    """Of an authority of the tests', for 127.0.0.1."""
    root = authority(folder)
    server_context(folder, root, expired=expired)
    text = next(folder.glob("127.0.0.1-*.pem")).read_text()
    key, _, certificate = text.partition("-----END PRIVATE KEY-----\n")
    (folder / "node.key").write_text(key + "-----END PRIVATE KEY-----\n")
    (folder / "node.crt").write_text(certificate)
    return TlsFiles(str(folder / "node.crt"), str(folder / "node.key"), root.path)


def test_files_of_ones_own_are_used_by_both_sides(tmp_path: Path) -> None:
    files = own_files(tmp_path)
    with serving(tmp_path / "cache", Peers("127.0.0.1:0", tls=files)) as served:
        assert served.server.is_encrypted
        assert served.ask(protocol.ALIVE).status == 200


def test_files_that_are_missing_or_dont_fit_are_named(tmp_path: Path) -> None:
    files = own_files(tmp_path)
    for wrong, match in (
        (TlsFiles(files.certificate, str(tmp_path / "none"), files.authority), "the key"),
        (TlsFiles(files.certificate, files.certificate, files.authority), "don't fit"),
        (TlsFiles(files.certificate, files.key, files.key), "don't fit"),
    ):
        with pytest.raises(ConfigError, match=match) as found:
            credentials_of(Peers("10.0.0.7:0", tls=wrong), SECRET)
        assert "BEGIN" not in str(found.value)
    other = make_credentials(SECRET, "127.0.0.1")
    (tmp_path / "other.key").write_text(other.key)
    with pytest.raises(ConfigError, match="don't fit"):
        credentials_of(
            Peers(
                "10.0.0.7:0",
                tls=TlsFiles(files.certificate, str(tmp_path / "other.key"), files.authority),
            ),
            SECRET,
        )
    assert serialization.load_pem_private_key(other.key.encode(), None)


def test_a_certificate_that_others_would_refuse_is_seen_at_home(tmp_path: Path) -> None:
    files = own_files(tmp_path)
    assert credentials_of(Peers("127.0.0.1:0", tls=files), SECRET) is not None
    with pytest.raises(ConfigError, match=r"would refuse .*not valid for '10\.0\.0\.7'"):
        credentials_of(Peers("10.0.0.7:0", tls=files), SECRET)
    (tmp_path / "other").mkdir()
    other = own_files(tmp_path / "other").authority
    with pytest.raises(ConfigError, match=r"would refuse .*signed by"):
        credentials_of(
            Peers("127.0.0.1:0", tls=TlsFiles(files.certificate, files.key, other)), SECRET
        )
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match=r"would refuse .*expired"):
        credentials_of(Peers("127.0.0.1:0", tls=own_files(tmp_path / "old", expired=True)), SECRET)
