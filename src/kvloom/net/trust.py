"""Trust: whether the certificate of an open connection would still be accepted."""

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from kvloom.net.tls import authorities, revocation_lists
from kvloom.net.tlsconfig import TlsConfig


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


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
