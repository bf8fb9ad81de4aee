"""Mutual TLS between nodes, by the OpenSSL that `cryptography` brings: encryption in memory, apart from any socket.

Python's own `ssl` passes a record at a time between its socket and its caller, and encrypts with the system's OpenSSL
(docs/decisions/nodes.md).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.bindings.openssl.binding import Binding
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import SSL, crypto

from kvloom.net.tls import authorities, check_files, revocation_lists
from kvloom.net.tlsconfig import TlsConfig, TlsError


class MutualTls:
    """Both sides of connections between nodes: TLS 1.3, and each side has a certificate of the CA, for either role.

    Names in certificates are not compared with addresses: any certificate of the CA is accepted. May be called from any
    thread.
    """

    def __init__(self, config: TlsConfig) -> None:
        """Raises TlsError, one sentence."""
        self._config = config
        self.reload()

    def reload(self) -> None:
        """New connections use the present files. Raises TlsError and keeps the old ones in use if these are invalid."""
        password = check_files(self._config)
        _check_usage(self._config)
        trust = Trust(self._config)
        context = _context(self._config, password, trust.lists)
        self._trust, self._context = trust, context

    def is_revoked(self, chain: Sequence[x509.Certificate]) -> bool:
        """Whether the certificate of an existing connection, the first of what its peer sent, is revoked, or its CA is
        no longer one of those in use.
        """
        return not self._trust.accepts(chain)

    def connection(self, is_server: bool) -> SSL.Connection:
        """One end of a new connection, before its handshake, without a socket: `bio_read` gives what is to be sent to
        the peer, `bio_write` takes what came from it.
        """
        connection = SSL.Connection(self._context, None)
        (connection.set_accept_state if is_server else connection.set_connect_state)()
        return connection


class Trust:
    """The CAs and revocation lists of the files as they were when this was made. May be called from any thread."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises TlsError."""
        self._authorities = authorities(config)
        self.lists = revocation_lists(config)
        self._revoked = frozenset((each.issuer, one.serial_number) for each in self.lists for one in each)

    def accepts(self, chain: Sequence[x509.Certificate]) -> bool:
        """Whether a CA has issued the first certificate, directly or through others of `chain`, and none on that way is
        revoked. For certificates that were accepted before: usage and dates are not looked at.
        """
        current, others = chain[0], list(chain[1:])
        while (current.issuer, current.serial_number) not in self._revoked:
            if any(current == each or _has_issued(each, current) for each in self._authorities):
                return True
            above = next((each for each in others if _has_issued(each, current)), None)
            if above is None:
                return False
            others.remove(above)
            current = above
        return False


def refusal_of(connection: SSL.Connection) -> str:
    """Why the peer's certificate is refused; "" when it is not."""
    code = Binding.lib.SSL_get_verify_result(connection._ssl)
    return "" if code == 0 else str(Binding.ffi.string(Binding.lib.X509_verify_cert_error_string(code)), "ascii")


def ends_of(connection: SSL.Connection) -> tuple[int, int, int]:
    """Addresses of its SSL*, and of the memory BIOs that hold what came from the peer and what is to be sent to it."""
    parts = connection._ssl, connection._into_ssl, connection._from_ssl
    return (_address(parts[0]), _address(parts[1]), _address(parts[2]))


@cache
def function_at(name: str) -> int:
    """The address of a function of the OpenSSL behind every `connection`."""
    return _address(getattr(Binding.lib, name))


def _address(thing: Any) -> int:
    return int(Binding.ffi.cast("uintptr_t", Binding.ffi.cast("void *", thing)))


def _context(config: TlsConfig, password: bytes | None, lists: list[x509.CertificateRevocationList]) -> SSL.Context:
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    # a resumed session would not be checked against a newer revocation list
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION)
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
    try:
        context.use_certificate_chain_file(str(config.cert))
        key: Any = load_pem_private_key(config.key.read_bytes(), password)
        context.use_privatekey(key)
        for path in config.ca_files:
            context.load_verify_locations(str(path))
    except (SSL.Error, OSError, ValueError) as error:
        raise TlsError(f"the TLS files cannot be loaded: {reason_in(error)}") from error
    store = context.get_cert_store()
    if config.crls and store is not None:
        for each in lists:
            store.add_crl(each)
        store.set_flags(crypto.X509StoreFlags.CRL_CHECK)
    return context


def reason_in(error: Exception) -> str:
    """What OpenSSL says in an error of `SSL`, in a few words."""
    queue = error.args[0] if error.args else None
    if isinstance(error, SSL.Error) and isinstance(queue, list) and queue:
        return str(queue[0][-1])
    return str(error)


def _check_usage(config: TlsConfig) -> None:
    certificate = x509.load_pem_x509_certificates(config.cert.read_bytes())[0]
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} <= set(usage):
        what = f"the certificate in {config.cert} must be for servers and clients, a node is both"
        raise TlsError(f"{config.names.cert}: {what}")


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
