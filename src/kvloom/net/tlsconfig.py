"""Where the files of mutual TLS are; tls.py reads them. Apart, so that whoever uses no TLS loads no cryptography."""

from dataclasses import dataclass
from pathlib import Path


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
