"""The agent's options for TLS between nodes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvloom.net.tlsconfig import DEFAULT_MASTER, DEFAULT_STANDBY, TlsConfig, TlsNames, node_paths

_OF_FOLDER = TlsNames(*["--tls-dir"] * 5)
_OF_FILES = TlsNames("--tls-ca", "--tls-cert", "--tls-key", "--tls-dir", "--tls-crl")


def tls_from(given: Mapping[str, Any]) -> TlsConfig | None:
    """The files of the options tls_dir, tls_ca (a sequence), tls_cert, tls_key and tls_crl; None when none is given.

    Raises ValueError naming the option.
    """
    names = ("tls_dir", "tls_ca", "tls_cert", "tls_key", "tls_crl")
    named = {f"--{name.replace('_', '-')}": given[name] for name in names if given.get(name)}
    folder: Path | None = named.pop("--tls-dir", None)
    if folder is not None:
        if named:
            raise ValueError(f"{next(iter(named))}: --tls-dir names all files; give one of the two")
        return replace(node_paths(folder), names=_OF_FOLDER)
    if not named:
        return None
    missing = [name for name in ("--tls-ca", "--tls-cert", "--tls-key") if name not in named]
    if missing:
        raise ValueError(f"{missing[0]}: needed beside {next(iter(named))}")
    crls = (named["--tls-crl"],) if "--tls-crl" in named else ()
    ca_files, cert, key = tuple(named["--tls-ca"]), named["--tls-cert"], named["--tls-key"]
    return TlsConfig(ca_files, cert, key, None, DEFAULT_MASTER, DEFAULT_STANDBY, crls, _OF_FILES)
