"""The server's identity: a key in memory, pinned by the digest that the agent was told."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.api.tls import ServerIdentity, make_identity, require_loopback
from appliance.errors import ConfigError
from tests.sim.api_process import ApiProcess
from tests.sim.times import NOW


@pytest.fixture(scope="module")
def identity() -> ServerIdentity:
    return make_identity("node.example", at=NOW)


def certificate(identity: ServerIdentity) -> x509.Certificate:
    return x509.load_pem_x509_certificate(identity.certificate)


def spki(read: x509.Certificate) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return read.public_key().public_bytes(serialization.Encoding.DER, form)


def test_digest_is_of_the_certificates_public_key(identity: ServerIdentity) -> None:
    assert identity.key_sha384 == hashlib.sha384(spki(certificate(identity))).digest()


def test_key_is_p384(identity: ServerIdentity) -> None:
    key = certificate(identity).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP384R1)


def test_certificate_names_the_host_and_loopback(identity: ServerIdentity) -> None:
    names = certificate(identity).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node.example", "localhost"]
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]


def test_certificate_for_every_address_names_the_machine() -> None:
    read = certificate(make_identity("0.0.0.0", at=NOW))
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert socket.gethostname() in names.get_values_for_type(x509.DNSName)
    assert "0.0.0.0" not in [str(name) for name in names.get_values_for_type(x509.IPAddress)]


def test_certificate_bears_with_clocks_that_differ_and_with_platform_limits(identity: ServerIdentity) -> None:
    read = certificate(identity)
    assert read.not_valid_before_utc == NOW - timedelta(days=30)
    assert read.not_valid_after_utc - read.not_valid_before_utc <= timedelta(days=825)


def test_each_start_makes_a_new_key(identity: ServerIdentity) -> None:
    assert make_identity("node.example", at=NOW).key_sha384 != identity.key_sha384


def test_no_named_file_and_no_open_descriptor_holds_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208  # the numbers are wanted, not paths
    make_identity("localhost", at=NOW)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208  # as above
    assert list(tmp_path.iterdir()) == []


def test_running_server_shows_the_key_that_the_agent_was_told(api: ApiProcess) -> None:
    with api.connect() as connection:
        assert isinstance(connection, ssl.SSLSocket)
        shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        assert connection.version() == "TLSv1.3"
    assert hashlib.sha384(spki(x509.load_der_x509_certificate(shown))).digest() == api.listening.tls_key_sha384


def test_old_tls_is_refused(api: ApiProcess) -> None:
    context = api.tls()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", api.listening.port)) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


def test_certificate_of_another_start_is_refused(api: ApiProcess, identity: ServerIdentity) -> None:
    context = ssl.create_default_context(cadata=identity.certificate.decode())
    with (
        socket.create_connection(("127.0.0.1", api.listening.port)) as raw,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


def test_plain_http_serves_on_loopback(start: Callable[..., ApiProcess]) -> None:
    api = start(tls=False)
    assert api.listening.certificate == b""
    assert api.listening.tls_key_sha384 == bytes(48)
    assert api.get("/health").status_code == 503


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "node.example"])
def test_plain_http_is_refused_where_others_can_reach_it(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_loopback(host)
    assert caught.value.code == "api.tls.required"
