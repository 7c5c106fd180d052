"""Credentials: only the whole key or token is admitted, nothing shows them, and both survive the way to a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils import z85

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.transport.credentials import (
    Admission,
    Credentials,
    RunKeys,
    RunToken,
    credentials_from_dict,
    make_credentials,
)

KEYS, TOKEN = RunKeys.make(), RunToken.make()
CLIENT = z85.decode(zmq.curve_public(KEYS.client.encode()))


@contextmanager
def admission_of(credentials: Credentials) -> Iterator[Admission]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    admission = Admission(context, credentials)
    try:
        yield admission
    finally:
        admission.close()
        context.term()


def request(mechanism: bytes, *shown: bytes, domain: bytes = b"elaswave", version: bytes = b"1.0") -> list[bytes]:
    return [version, b"7", domain, b"127.0.0.1", b"", mechanism, *shown]


def changed(secret: bytes) -> Iterator[bytes]:
    """What is nearly the secret: each byte another one, each shorter beginning, zeros for an end, one byte more."""
    for i in range(len(secret)):
        yield secret[:i] + bytes((secret[i] ^ 1,)) + secret[i + 1 :]
        yield secret[:i]
        if any(secret[i:]):  # A key is drawn, and one of 128 ends in a zero of its own.
            yield secret[:i] + bytes(len(secret) - i)
    yield secret + b"\0"


def test_the_whole_client_key_is_admitted_and_nothing_else() -> None:
    with admission_of(KEYS) as admission:
        assert admission.reply_to(request(b"CURVE", CLIENT)) == [b"1.0", b"7", b"200", b"", b"", b""]
        for near in changed(CLIENT):
            assert admission.reply_to(request(b"CURVE", near))[:3] == [b"1.0", b"7", b"400"], near


def test_the_whole_token_is_admitted_and_nothing_else() -> None:
    token = TOKEN.token.encode()
    with admission_of(TOKEN) as admission:
        assert admission.reply_to(request(b"PLAIN", b"elaswave", token))[2] == b"200"
        for near in changed(token):
            assert admission.reply_to(request(b"PLAIN", b"elaswave", near))[2] == b"400", near
        assert admission.reply_to(request(b"PLAIN", b"somebody", token))[2] == b"400"


@pytest.mark.parametrize(
    "asked",
    [
        request(b"NULL"),
        request(b"PLAIN", CLIENT),
        request(b"CURVE"),
        request(b"CURVE", CLIENT, CLIENT),
        request(b"CURVE", CLIENT, domain=b""),
        request(b"CURVE", CLIENT, version=b"2.0"),
        [b"1.0", b"7"],
        [],
    ],
    ids=["null", "plain", "no key", "two keys", "no domain", "version", "short", "empty"],
)
def test_other_requests_are_refused(asked: list[bytes]) -> None:
    with admission_of(KEYS) as admission:
        assert admission.reply_to(asked)[2] == b"400"


@pytest.mark.parametrize("credentials", [KEYS, TOKEN], ids=["keys", "token"])
def test_they_survive_the_way_to_a_worker_and_are_never_shown(credentials: Credentials) -> None:
    fields = credentials.to_dict()
    assert credentials_from_dict(json.loads(json.dumps(fields))) == credentials
    for secret in fields.values():
        assert len(secret) >= 40 and secret not in f"{credentials} {credentials!r}"


def test_every_run_has_its_own() -> None:
    made = [make_credentials(encrypted=encrypted) for encrypted in (True, True, False, False)]
    secrets = [secret for each in made for secret in each.to_dict().values()]
    assert len(set(secrets)) == len(secrets) == 6


def test_all_who_have_a_secret_derive_the_same_keys_for_one_purpose() -> None:
    derived = RunKeys.derive(b"a secret", "rendezvous")
    assert derived == RunKeys.derive(b"a secret", "rendezvous")
    assert derived not in (RunKeys.derive(b"a secret!", "rendezvous"), RunKeys.derive(b"a secret", "links"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"token": ""},
        {"token": "00" * 31},
        {"token": "zz" * 32},
        {"server": KEYS.server},
        {"server": KEYS.server, "client": KEYS.server},
        {"server": KEYS.server, "client": KEYS.client[:-1]},
        {"server": KEYS.server, "client": " " * 40},
        {"server": KEYS.server, "client": KEYS.client, "token": "00" * 32},
    ],
)
def test_what_is_no_credentials_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError) as caught:
        credentials_from_dict(fields)
    assert KEYS.server not in str(caught.value)


def test_a_libzmq_without_curve_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    with pytest.raises(ConfigError) as caught:
        make_credentials(encrypted=True)
    assert "runtime.encryption=false" in caught.value.fix and zmq.zmq_version() in caught.value.what
    assert make_credentials(encrypted=False)
