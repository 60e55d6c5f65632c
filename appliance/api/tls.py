"""The server's TLS identity: a key that exists in this process's memory only, and a certificate around it.

Clients trust it by pinning: the digest of the public key is bound into the appliance's evidence, so whoever appraises
the evidence knows which key the TLS connection must show (docs/api.md). Each start makes a new key.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha384

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from appliance.errors import ConfigError

# Clients' clocks and the node's may disagree by weeks in an air gap. Some platforms refuse more than 825 days in all.
_BEFORE = timedelta(days=30)
_AFTER = timedelta(days=790)
_ANY = ("0.0.0.0", "::")  # noqa: S104  # compared with, not bound to
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What the listener presents.

    Attributes:
        context: for the listener; holds the private key.
        certificate: PEM.
        key_sha384: SHA-384 of the SubjectPublicKeyInfo, DER.
    """

    context: ssl.SSLContext
    certificate: bytes
    key_sha384: bytes


def make_identity(host: str, *, at: datetime) -> ServerIdentity:
    """Make a P-384 key, a self-signed certificate for ``host`` and the loopback names, and a TLS 1.3 context."""
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _certificate(key, names=_names(host), at=at).public_bytes(serialization.Encoding.PEM)
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, key, certificate)
    return ServerIdentity(context=context, certificate=certificate, key_sha384=sha384(public).digest())


def require_loopback(host: str) -> None:
    """Refuse plain HTTP on anything but loopback: keys and prompts would cross the network readable.

    Raises:
        ConfigError: ``api.tls.required``.
    """
    if host not in _LOOPBACK_NAMES:
        raise ConfigError(
            "api.tls.required",
            found="tls off on an address that others can reach",
            expected="tls on, or host 127.0.0.1",
            hint="set api.tls = true",
        )


def _names(host: str) -> list[x509.GeneralName]:
    hosts = [host, *_LOOPBACK_NAMES]
    if host in _ANY:
        families = (socket.AF_INET, socket.AF_INET6)
        addresses = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
        hosts = [socket.gethostname(), *(entry.address for entry in addresses if entry.family in families), *hosts[1:]]
    return [_name(entry) for entry in dict.fromkeys(hosts)]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return x509.DNSName(host)


def _certificate(key: ec.EllipticCurvePrivateKey, *, names: list[x509.GeneralName], at: datetime) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lethe appliance")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - _BEFORE)
        .not_valid_after(at + _AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def _load(context: ssl.SSLContext, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> None:
    """Give key and certificate to OpenSSL, whose Python face takes file names only: a nameless file in memory."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = private + certificate
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        os.pwrite(descriptor, bytes(len(pem)), 0)
    finally:
        os.close(descriptor)
