"""Test tokens and certificates: each permits one request of this job, for some minutes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.cache.base import Peers
from penstock.cache.peers import (
    MOST_LIFE_S,
    SECRET_VARIABLE,
    TOKEN_LIFE_S,
    PeerSecret,
    Question,
    authorize,
    check_token,
    credentials_of,
    date_text,
    is_loopback,
    job_secret,
    make_credentials,
    prove_server,
    server_time,
)
from penstock.pipeline.plan import peer_token

if TYPE_CHECKING:
    from pathlib import Path


OURS, OTHERS = PeerSecret(b"ours-" * 8), PeerSecret(b"theirs" * 8)


ASKED = Question("GET", "/v4/blobs/" + "0" * 40, "bytes=0-9")


NOW_S = 1.75e9


def test_a_token_holds_for_what_it_was_signed_for_and_not_for_ever() -> None:
    token = authorize(OURS, ASKED, now_s=NOW_S)
    assert check_token(OURS, ASKED, token, now_s=NOW_S) == "valid"
    assert check_token(OURS, ASKED, token, now_s=NOW_S + TOKEN_LIFE_S - 1) == "valid"
    assert check_token(OURS, ASKED, token, now_s=NOW_S + TOKEN_LIFE_S) == "expired"
    assert check_token(OURS, ASKED, token, now_s=NOW_S + 3600) == "expired"


def test_a_token_of_a_clock_that_runs_ahead_is_expired_too() -> None:
    token = authorize(OURS, ASKED, now_s=NOW_S + MOST_LIFE_S)
    assert check_token(OURS, ASKED, token, now_s=NOW_S) == "expired"


@given(
    st.sampled_from(["GET", "HEAD", "PUT"]),
    st.sampled_from([ASKED.path, ASKED.path[:-1] + "1", "/v4/alive", ""]),
    st.sampled_from(["bytes=0-9", "bytes=0-99", "", "0-9"]),
)
def test_a_token_asks_for_nothing_else(method: str, path: str, range_: str) -> None:
    other = Question(method, path, range_)
    found = check_token(OURS, other, authorize(OURS, ASKED, now_s=NOW_S), now_s=NOW_S)
    assert found == ("valid" if other == ASKED else "unknown")


def test_parts_of_a_question_cant_change_places() -> None:
    token = authorize(OURS, Question("GET", "/a", "b"), now_s=NOW_S)
    assert check_token(OURS, Question("GET", "/ab", ""), token, now_s=NOW_S) == "unknown"
    assert check_token(OURS, Question("GET/a", "", "b"), token, now_s=NOW_S) == "unknown"


def test_another_jobs_token_is_none() -> None:
    assert check_token(OURS, ASKED, authorize(OTHERS, ASKED, now_s=NOW_S), now_s=NOW_S) == "unknown"


@given(st.text(max_size=120))
def test_any_other_text_is_none(text: str) -> None:
    assert check_token(OURS, ASKED, text, now_s=NOW_S) == "unknown"


@given(st.integers(0, 87), st.sampled_from("0f. Zé"))
def test_a_token_with_one_letter_changed_is_none(place: int, letter: str) -> None:
    token = authorize(OURS, ASKED, now_s=NOW_S)
    changed = token[:place] + letter + token[place + 1 :]
    found = check_token(OURS, ASKED, changed, now_s=NOW_S)
    assert found == ("valid" if changed == token else "unknown")


def test_only_who_knows_the_secret_sets_a_clients_clock() -> None:
    token, date = authorize(OURS, ASKED, now_s=NOW_S), date_text(NOW_S + 3600)
    proof = prove_server(OURS, token, date)

    def time_of(token: str, date: str, proof: str) -> float | None:
        return server_time(OURS, token, {"date": date, "penstock-proof": proof})

    assert time_of(token, date, proof) == NOW_S + 3600
    assert time_of(token, date_text(NOW_S), proof) is None
    assert time_of(token + "0", date, proof) is None
    assert time_of(token, date, prove_server(OTHERS, token, date)) is None
    for wrong in ("", "é", proof[:-1]):
        assert time_of(token, date, wrong) is None
    assert server_time(OURS, token, {}) is None


def test_a_secret_is_in_no_words() -> None:
    secret = PeerSecret.draw()
    for shown in (repr(secret), str(secret), f"{secret}"):
        assert secret.text not in shown
        assert secret.job in shown
    assert secret.text not in authorize(secret, ASKED, now_s=NOW_S)
    assert PeerSecret.draw() != secret


def test_a_file_that_only_its_owner_reads_has_the_secret(tmp_path: Path) -> None:
    place = tmp_path / "token"
    place.write_bytes(b"\n " + b"x" * 32 + b" \n")
    place.chmod(0o600)
    assert PeerSecret.of_file(place) == PeerSecret.of_text("x" * 32, what="a test")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o606, 0o622])
def test_a_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "token"
    place.write_text("x" * 32)
    place.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        PeerSecret.of_file(place)


def test_a_file_that_ones_group_reads_is_refused_unless_it_is_roots(tmp_path: Path) -> None:
    place = tmp_path / "token"
    place.write_text("x" * 32)
    place.chmod(0o640)
    if os.geteuid() == 0:  # as a mounted secret of Kubernetes is
        assert PeerSecret.of_file(place).value == b"x" * 32
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            PeerSecret.of_file(place)


@pytest.mark.parametrize("content", [b"", b" \n", b"short", b"x" * 5000])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, content: bytes) -> None:
    place = tmp_path / "token"
    place.write_bytes(content)
    place.chmod(0o600)
    with pytest.raises(ConfigError, match="token_hex") as found:
        PeerSecret.of_file(place)
    assert "short" not in str(found.value)


class Store:
    """The job's store, as far as a secret needs it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def under(self, name: str) -> Store:
        del name
        return self

    def set_once(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)


def test_the_secret_is_the_files_else_the_environments_else_the_jobs_own(tmp_path: Path) -> None:
    place, store = tmp_path / "token", Store()
    place.write_text("f" * 32)
    place.chmod(0o600)
    filed, bare = Peers("127.0.0.1:0", token_file=place), Peers("127.0.0.1:0")
    assert job_secret(filed, store, "e" * 32).value == b"f" * 32
    assert job_secret(bare, store, "e" * 32).value == b"e" * 32
    assert not store.values
    drawn = job_secret(bare, store, None)
    assert job_secret(bare, store, None) == drawn
    assert job_secret(bare, Store(), None) == drawn  # changed members draw no other secret
    assert peer_token({}) is None
    assert peer_token({SECRET_VARIABLE: "e" * 32}) == "e" * 32
    with pytest.raises(ConfigError, match=SECRET_VARIABLE) as found:
        job_secret(bare, store, "hunter2")
    assert "hunter2" not in str(found.value)
    with pytest.raises(ConfigError, match="share no secret"):
        job_secret(bare, None, None)


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place in (tmp_path, tmp_path / "nothing", tmp_path / "pipe", "a\0b"):
        with pytest.raises(ConfigError, match="token_file"):
            PeerSecret.of_file(place)


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
def test_remote_traffic_is_encrypted_unless_disabled(
    address: str, tls: bool | None, encrypts: bool
) -> None:
    assert (credentials_of(Peers(address, tls=tls), SECRET) is not None) == encrypts


@pytest.mark.parametrize("host", ["localhost.evil.example", "1270.0.0.1", "", "::2", "10.0.0.1"])
def test_a_name_that_looks_like_loopback_isnt(host: str) -> None:
    assert not is_loopback(host)


def test_all_nodes_of_a_job_have_one_key_which_is_never_shown() -> None:
    one = make_credentials(SECRET)
    assert make_credentials(SECRET) == one
    assert make_credentials(PeerSecret.draw()).key != one.key
    assert one.key not in repr(one)
    assert "PRIVATE" not in repr(one)
