"""Files of mutual TLS: CA, certificate, encrypted key, its password and revocation lists, all checked."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvloom.mistakes import reason_of
from kvloom.net.keystore import KeyStore, KeyStoreError, is_encrypted
from kvloom.net.tlsconfig import TlsConfig, TlsError

MIN_RSA_BITS = 2048
MIN_EC_BITS = 256
MAX_FILE_BYTES = 10 * 1024 * 1024
CIPHERS_TLS12 = "ECDHE+AESGCM:ECDHE+CHACHA20"  # forward secrecy and AEAD only; TLS 1.3 has no others
READABLE_BY_GROUP = 0o037  # mode bits that a secret must not have: 0640 at most
WRITABLE_BY_OWNER = 0o022  # mode bits that a public file must not have

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey


def check_files(config: TlsConfig) -> bytes | None:
    """The password of the key, None when it has none. Raises TlsError, one sentence, for the first problem."""
    now = datetime.now(UTC)
    authorities = [certificate for path in config.ca_files for certificate in _authorities(config.names.ca, path, now)]
    if not authorities:
        raise TlsError(f"{config.names.ca}: at least one CA certificate is needed to check the other side")
    password = _password(config)
    _check_pair(config, password, now)
    if config.crls:
        _check_crls(config, authorities, now)
    return password


def load_context(config: TlsConfig, protocol: int) -> ssl.SSLContext:
    """A context of ssl.PROTOCOL_TLS_SERVER or _CLIENT: TLS 1.2 or later; the peer must have a certificate of the CA.

    Host names are not checked. Raises TlsError, one sentence, for the first problem.
    """
    password = check_files(config)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS_TLS12)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(config.cert, config.key, password or b"")
        for path in (*config.ca_files, *config.crls):
            context.load_verify_locations(path)
        if config.crls:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"the TLS files cannot be loaded: {reason_of(error)}") from error
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


def _authorities(option: str, path: Path, now: datetime) -> list[x509.Certificate]:
    certificates = _certificates(option, path, now)
    for certificate in certificates:
        try:
            is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_authority = False
        if not is_authority:
            raise TlsError(f"{option}: {path} is not the certificate of a CA")
    return certificates


def _password(config: TlsConfig) -> bytes | None:
    if config.key_password is None:
        return None
    option = config.names.password
    text = _read(option, config.key_password, READABLE_BY_GROUP).decode(errors="replace").strip()
    if not is_encrypted(text):
        raise TlsError(f"{option}: {config.key_password} is not encrypted: write it with seceasy_encrypt --encrypt")
    try:
        return KeyStore(config.keystore_master, config.keystore_standby).decrypt(text).rstrip(b"\r\n")
    except (KeyStoreError, OSError) as error:
        raise TlsError(f"{option}: {config.key_password} cannot be decrypted: {reason_of(error)}") from error


def _check_pair(config: TlsConfig, password: bytes | None, now: datetime) -> None:
    names = config.names
    certificate = _certificates(names.cert, config.cert, now)[0]
    pem = _read(names.key, config.key, READABLE_BY_GROUP)
    try:
        key = load_pem_private_key(pem, password)
    except TypeError as error:  # a password for a key that has none, or none for one that has
        needs = (
            f"is not encrypted, but {names.password} is" if password else f"is encrypted, but {names.password} is not"
        )
        raise TlsError(f"{names.key}: {config.key} {needs} given") from error
    except ValueError as error:
        fits = f", or {names.password} does not fit" if password else ""
        raise TlsError(f"{names.key}: {config.key} is not a private key in PEM form{fits}") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise TlsError(f"{names.key}: {config.key} is not the key of the certificate {config.cert}")


def _check_crls(config: TlsConfig, authorities: list[x509.Certificate], now: datetime) -> None:
    """Raises TlsError unless each CA has a list: OpenSSL refuses the clients of a CA without one."""
    lists = [revoked for path in config.crls for revoked in _crls(config.names.crl, path, now)]
    for authority in authorities:
        if not any(_is_signed(revoked, authority) for revoked in lists):
            shown = ", ".join(map(str, config.crls))
            whose = authority.subject.rfc4514_string()
            raise TlsError(f"{config.names.crl}: {shown} has no revocation list of {whose}")


def revocation_lists(config: TlsConfig) -> list[x509.CertificateRevocationList]:
    """The lists in its files that are signed by one of its CAs. Raises TlsError."""
    now, known = datetime.now(UTC), authorities(config)
    lists = [each for path in config.crls for each in _crls(config.names.crl, path, now)]
    return [each for each in lists if any(_is_signed(each, authority) for authority in known)]


def authorities(config: TlsConfig) -> list[x509.Certificate]:
    """The CAs in its files. Raises TlsError."""
    now = datetime.now(UTC)
    return [certificate for path in config.ca_files for certificate in _authorities(config.names.ca, path, now)]


def _crls(option: str, path: Path, now: datetime) -> list[x509.CertificateRevocationList]:
    pem = _read(option, path, WRITABLE_BY_OWNER)
    end = b"-----END X509 CRL-----"
    try:
        lists = [x509.load_pem_x509_crl(part + end) for part in pem.split(end)[:-1]]
    except ValueError as error:
        raise TlsError(f"{option}: {path} holds no revocation list in PEM form") from error
    for revoked in lists:
        if revoked.next_update_utc is not None and revoked.next_update_utc < now:
            raise TlsError(f"{option}: the revocation list in {path} expired on {revoked.next_update_utc:%F}")
    return lists


def _is_signed(revoked: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    if revoked.issuer != authority.subject or not isinstance(key, PublicKey):
        return False
    try:
        return revoked.is_signature_valid(key)
    except InvalidSignature:
        return False
