"""TLS files of nodes, signed by a CA whose key the test has."""

from pathlib import Path

from kvloom.net.devcerts import Pair, issue_node, make_authority, make_crl
from kvloom.net.tlsconfig import TlsConfig
from kvloom.writing import write_private


class NodeFiles:
    """A CA, and for each node a folder with its certificate and the CAs that it trusts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = make_authority("test CA")

    def config(self, name: str, pair: Pair | None = None, authority: Pair | None = None) -> TlsConfig:
        """TLS files of one node: a valid certificate, or `pair`; it trusts the CA, or `authority`."""
        folder = self._folder / name
        none = folder / "none"
        config = TlsConfig((folder / "ca",), folder / "cert", folder / "key", None, none, none, (folder / "crl",))
        write_private(folder / "ca", (authority or self.authority).certificate_pem())
        write_private(folder / "crl", make_crl(authority or self.authority))
        self.show(config, pair or issue_node(self.authority, name))
        return config

    def show(self, config: TlsConfig, pair: Pair) -> None:
        """The node presents the certificate `pair` after its next reload."""
        write_private(config.cert, pair.certificate_pem())
        write_private(config.key, pair.key_pem())

    def revoke(self, config: TlsConfig, *pairs: Pair) -> None:
        """The node of `config` refuses these certificates after its next reload."""
        write_private(config.crls[0], make_crl(self.authority, pairs))
