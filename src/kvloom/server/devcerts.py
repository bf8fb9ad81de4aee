"""Certificates for trying TLS out, and for tests. Not a CA for production: its key lies beside what it signs."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 365


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def key_pem(self, password: bytes | None = None) -> bytes:
        lock: KeySerializationEncryption = BestAvailableEncryption(password) if password else NoEncryption()
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)


def make_authority(name: str) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    start, end = _valid(0)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(_name(name), _name(name), key, start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identity, critical=False)
        .sign(key, SHA256())
    )
    return Pair(certificate, key)


def issue(
    authority: Pair, name: str, hosts: tuple[str, ...] = (), start_days: int = 0, num_days: int = VALID_DAYS
) -> Pair:
    """A server's certificate if it has hosts, else a client's. Valid for `num_days` from `start_days` from now on."""
    key = ec.generate_private_key(ec.SECP256R1())
    start, end = _valid(start_days, num_days)
    usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_name(name), authority.certificate.subject, key, start, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(identifier, critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return Pair(builder.sign(authority.key, SHA256()), key)


def make_crl(authority: Pair, revoked: tuple[Pair, ...] = ()) -> bytes:
    """A revocation list in PEM form."""
    start, end = _valid(0)
    builder = x509.CertificateRevocationListBuilder(authority.certificate.subject, start, end)
    for pair in revoked:
        entry = x509.RevokedCertificateBuilder(pair.certificate.serial_number, start).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority.key, SHA256()).public_bytes(Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), start, end)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _valid(start_days: int, num_days: int = VALID_DAYS) -> tuple[datetime, datetime]:
    """Begins an hour early, for clocks that differ."""
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(days=start_days, hours=-1)
    return start, start + timedelta(days=num_days)
