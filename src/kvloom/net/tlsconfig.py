"""Where the files of mutual TLS are; tls.py reads them. Separate, so that programs without TLS load no cryptography."""

from dataclasses import dataclass, replace
from pathlib import Path

from kvloom.contract.errors import UserError

DEFAULT_MASTER = Path("tools/pmt/master/ksfa")
DEFAULT_STANDBY = Path("tools/pmt/standby/ksfb")


class TlsError(UserError):
    """One sentence that names the file and what to do. Never holds a secret."""


@dataclass(frozen=True, slots=True)
class TlsNames:
    """Options that name the files, as errors call them."""

    ca: str = "tlsCaFile"
    cert: str = "tlsCert"
    key: str = "tlsPk"
    password: str = "tlsPkPwd"
    crl: str = "tlsCrl"


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of ServeParam (spec table 2-3), resolved against the install folder."""

    ca_files: tuple[Path, ...]  # tlsCaPath + each of tlsCaFile
    cert: Path  # tlsCert
    key: Path  # tlsPk
    key_password: Path | None  # tlsPkPwd, written by seceasy_encrypt; None: the key is not encrypted
    keystore_master: Path  # kmcKsfMaster
    keystore_standby: Path  # kmcKsfStandby
    crls: tuple[Path, ...]  # tlsCrl, or tlsCrlPath + each of tlsCrlFiles; none: revocation is not checked
    names: TlsNames = TlsNames()


def default_paths(folder: Path) -> TlsConfig:
    """The files of the default config.json below an install folder."""
    security = folder / "security"
    return TlsConfig(
        ca_files=(security / "ca/ca.pem",),
        cert=security / "certs/server.pem",
        key=security / "keys/server.key.pem",
        key_password=security / "pass/mindie_server_key_pwd.txt",
        keystore_master=folder / DEFAULT_MASTER,
        keystore_standby=folder / DEFAULT_STANDBY,
        crls=(security / "certs/server_crl.pem",),
    )


def node_paths(folder: Path) -> TlsConfig:
    """The files of a pool's node below an install folder; except certificate and key they are also the server's."""
    security = folder / "security"
    return replace(default_paths(folder), cert=security / "certs/node.pem", key=security / "keys/node.key.pem")
