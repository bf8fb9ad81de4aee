"""Certificates for trying TLS out, and for tests. Not a CA for production: its key lies beside the certificates."""

import ipaddress
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

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

from kvloom.net.keystore import KeyStore
from kvloom.net.tlsconfig import TlsConfig, default_paths, node_paths
from kvloom.writing import write_private

VALID_DAYS = 365
TLS_DOMAIN = 1
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and the private key that belongs to it."""

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
    """Issue a server's certificate if there are hosts, else a client's. Valid for `num_days` from `start_days` on."""
    usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    return _signed(authority, name, [usage], hosts, _valid(start_days, num_days))


def issue_node(authority: Pair, name: str, start_days: int = 0, num_days: int = VALID_DAYS) -> Pair:
    """Issue a node's certificate, valid for both roles, because nodes call each other. Valid as in `issue`."""
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _signed(authority, name, usages, (), _valid(start_days, num_days))


def _signed(
    authority: Pair,
    name: str,
    usages: list[x509.ObjectIdentifier],
    hosts: tuple[str, ...],
    valid: tuple[datetime, datetime],
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_name(name), authority.certificate.subject, key, *valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
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
    """Begin and end of validity. Begins an hour early, because clocks differ."""
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(days=start_days, hours=-1)
    return start, start + timedelta(days=num_days)


def make_files(folder: Path, hosts: tuple[str, ...] = LOCAL_HOSTS) -> TlsConfig:
    """Write the files of server, node, CA and CRL below `folder`, and a client's below `folder`/client."""
    paths, node_files = default_paths(folder), node_paths(folder)
    authority = make_authority("kvloom development CA")
    server = issue(authority, "kvloom server", hosts)
    client = issue(authority, "kvloom client")
    node = issue_node(authority, "kvloom node")
    password = secrets.token_urlsafe(32).encode()
    sealed = KeyStore(paths.keystore_master, paths.keystore_standby).encrypt(password, TLS_DOMAIN)
    files = {
        paths.ca_files[0]: authority.certificate_pem(),
        paths.cert: server.certificate_pem(),
        paths.key: server.key_pem(password),
        node_files.cert: node.certificate_pem(),
        node_files.key: node.key_pem(password),
        folder / "security/ca/ca.key.pem": authority.key_pem(),
        folder / "client/ca.pem": authority.certificate_pem(),
        folder / "client/client.pem": client.certificate_pem(),
        folder / "client/client.key.pem": client.key_pem(),
    }
    if paths.key_password is not None:
        files[paths.key_password] = sealed.encode()
    for path in paths.crls:
        files[path] = make_crl(authority)
    for path, data in files.items():
        write_private(path, data)
    return paths
