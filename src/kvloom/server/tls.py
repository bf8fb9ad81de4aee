"""Mutual TLS of the server: files are checked when they are loaded, and reloaded without dropping a connection."""

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvloom.engine.errors import UserError
from kvloom.server.keystore import KeyStore, KeyStoreError, is_encrypted

logger = logging.getLogger(__name__)

MIN_RSA_BITS = 2048
MIN_EC_BITS = 256
MAX_FILE_BYTES = 10 * 1024 * 1024
CIPHERS_TLS12 = "ECDHE+AESGCM:ECDHE+CHACHA20"  # forward secrecy and AEAD only; TLS 1.3 has no others
READABLE_BY_GROUP = 0o037  # bits that a secret may not have: 0640 at most
WRITABLE_BY_OWNER = 0o022  # bits that a public file may not have

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey


class TlsError(UserError):
    """One sentence that names the file and what to do. Never holds a secret."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of the seed's ServeParam, resolved against the install folder."""

    ca_files: tuple[Path, ...]  # tlsCaPath + each of tlsCaFile
    cert: Path  # tlsCert
    key: Path  # tlsPk
    key_password: Path | None  # tlsPkPwd, written by seceasy_encrypt; None: the key is not encrypted
    keystore_master: Path  # kmcKsfMaster
    keystore_standby: Path  # kmcKsfStandby
    crl: Path | None  # tlsCrl; None: revocation is not checked


class ServerContext(ssl.SSLContext):
    """An SSLContext that asyncio keeps for the life of a listener, while `reload` changes what new handshakes use.

    asyncio and uvloop make every connection's TLS state with `wrap_bio`, so connections that exist keep the files that
    they began with.
    """

    _config: TlsConfig
    _current: ssl.SSLContext

    def __new__(cls, config: TlsConfig) -> "ServerContext":
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._config = config
        context.reload()
        return context

    def __init__(self, config: TlsConfig) -> None:
        """All is done in `__new__`, which alone can choose the protocol."""

    def reload(self) -> None:
        """Raises TlsError and keeps what is in use if the files are not good."""
        self._current = _load(self._config)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class _LoggedHandshake(ssl.SSLObject):
    """asyncio drops a connection whose handshake failed without a word; this says why."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            logger.warning(
                "TLS handshake refused: %s", getattr(error, "verify_message", "") or error.reason or "broken"
            )
            raise


def tls_context(config: TlsConfig) -> ServerContext:
    """Raises TlsError, one sentence, for the first thing that is wrong."""
    return ServerContext(config)


def reload_on_sighup(context: ServerContext, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Returns the handler, which a caller may also run by itself. Bad files are logged and change nothing."""

    def reload() -> None:
        try:
            context.reload()
        except TlsError as error:
            logger.error("TLS files are not reloaded, the ones in use stay: %s", error)
        else:
            logger.info("TLS files reloaded")

    loop.add_signal_handler(signal.SIGHUP, reload)
    return reload


def _load(config: TlsConfig) -> ssl.SSLContext:
    now = datetime.now(UTC)
    authorities = [certificate for path in config.ca_files for certificate in _authorities(path, now)]
    if not authorities:
        raise TlsError("tlsCaFile: at least one CA certificate is needed to check clients")
    password = _password(config)
    _check_pair(config, password, now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS_TLS12)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslobject_class = _LoggedHandshake
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.cert, config.key, password or b"")
        for path in config.ca_files:
            context.load_verify_locations(path)
        if config.crl is not None:
            _check_crls(config.crl, authorities, now)
            context.load_verify_locations(config.crl)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"the TLS files cannot be loaded: {error}") from error
    return context


def _read(option: str, path: Path, forbidden_mode: int) -> bytes:
    try:
        status = path.stat()
        if not 0 < status.st_size <= MAX_FILE_BYTES:
            raise TlsError(f"{option}: {path} must hold 1 to {MAX_FILE_BYTES} bytes, it has {status.st_size}")
        if status.st_mode & forbidden_mode:
            raise TlsError(f"{option}: {path} has mode {status.st_mode & 0o777:04o}, at most "
                           f"{0o777 & ~forbidden_mode & 0o666:04o} is allowed")  # fmt: skip
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{option}: {path} cannot be read: {error.strerror}") from error


def _certificates(option: str, path: Path, now: datetime) -> list[x509.Certificate]:
    try:
        certificates = x509.load_pem_x509_certificates(_read(option, path, WRITABLE_BY_OWNER))
    except ValueError as error:
        raise TlsError(f"{option}: {path} holds no certificate in PEM form") from error
    for certificate in certificates:
        if certificate.not_valid_after_utc < now:
            raise TlsError(f"{option}: the certificate in {path} expired on {certificate.not_valid_after_utc:%F}")
        if certificate.not_valid_before_utc > now:
            raise TlsError(f"{option}: the certificate in {path} is valid only from {certificate.not_valid_before_utc}")
        _check_strength(option, path, certificate)
    return certificates


def _check_strength(option: str, path: Path, certificate: x509.Certificate) -> None:
    key = certificate.public_key()
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS:
        raise TlsError(f"{option}: the RSA key of {path} has {key.key_size} bits, at least {MIN_RSA_BITS} are needed")
    if isinstance(key, ec.EllipticCurvePublicKey) and key.key_size < MIN_EC_BITS:
        raise TlsError(f"{option}: the EC key of {path} has {key.key_size} bits, at least {MIN_EC_BITS} are needed")
    if not isinstance(key, PublicKey):
        raise TlsError(f"{option}: the key of {path} is neither RSA, EC nor Ed25519/Ed448")


def _authorities(path: Path, now: datetime) -> list[x509.Certificate]:
    certificates = _certificates("tlsCaFile", path, now)
    for certificate in certificates:
        try:
            is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_authority = False
        if not is_authority:
            raise TlsError(f"tlsCaFile: {path} is not the certificate of a CA")
    return certificates


def _password(config: TlsConfig) -> bytes | None:
    if config.key_password is None:
        return None
    text = _read("tlsPkPwd", config.key_password, READABLE_BY_GROUP).decode(errors="replace").strip()
    if not is_encrypted(text):
        raise TlsError(f"tlsPkPwd: {config.key_password} is not encrypted: write it with seceasy_encrypt --encrypt")
    try:
        return KeyStore(config.keystore_master, config.keystore_standby).decrypt(text)
    except (KeyStoreError, OSError) as error:
        raise TlsError(f"tlsPkPwd: {config.key_password} cannot be decrypted: {error}") from error


def _check_pair(config: TlsConfig, password: bytes | None, now: datetime) -> None:
    certificate = _certificates("tlsCert", config.cert, now)[0]
    pem = _read("tlsPk", config.key, READABLE_BY_GROUP)
    try:
        key = load_pem_private_key(pem, password)
    except TypeError as error:  # a password for a key that has none, or none for one that has
        needs = "is not encrypted, but tlsPkPwd is given" if password else "is encrypted, but tlsPkPwd is not given"
        raise TlsError(f"tlsPk: {config.key} {needs}") from error
    except ValueError as error:
        raise TlsError(f"tlsPk: {config.key} is not a private key in PEM form, or tlsPkPwd does not fit") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise TlsError(f"tlsPk: {config.key} is not the key of the certificate {config.cert}")


def _check_crls(path: Path, authorities: list[x509.Certificate], now: datetime) -> None:
    """Every CA needs a list of its own: OpenSSL refuses the clients of a CA that has none."""
    pem = _read("tlsCrl", path, WRITABLE_BY_OWNER)
    end = b"-----END X509 CRL-----"
    try:
        lists = [x509.load_pem_x509_crl(part + end) for part in pem.split(end)[:-1]]
    except ValueError as error:
        raise TlsError(f"tlsCrl: {path} holds no revocation list in PEM form") from error
    for revoked in lists:
        if revoked.next_update_utc is not None and revoked.next_update_utc < now:
            raise TlsError(f"tlsCrl: the revocation list in {path} expired on {revoked.next_update_utc:%F}")
    for authority in authorities:
        if not any(_is_signed(revoked, authority) for revoked in lists):
            raise TlsError(f"tlsCrl: {path} has no revocation list of {authority.subject.rfc4514_string()}")


def _is_signed(revoked: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    if revoked.issuer != authority.subject or not isinstance(key, PublicKey):
        return False
    try:
        return revoked.is_signature_valid(key)
    except InvalidSignature:
        return False
