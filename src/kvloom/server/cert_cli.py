"""`kvloom cert dev DIR`: everything that mutual TLS needs, in the layout that config.json names by default."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from kvloom.server.devcerts import issue, make_authority, make_crl
from kvloom.server.keystore import KeyStore, write_private
from kvloom.server.tls import TlsConfig

app = typer.Typer(help="Certificates for trying TLS out.", no_args_is_help=True, add_completion=False)

TLS_DOMAIN = 1
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def default_paths(folder: Path) -> TlsConfig:
    """The files of the default config.json below an install folder."""
    security = folder / "security"
    return TlsConfig(
        ca_files=(security / "ca/ca.pem",),
        cert=security / "certs/server.pem",
        key=security / "keys/server.key.pem",
        key_password=security / "pass/mindie_server_key_pwd.txt",
        keystore_master=folder / "tools/pmt/master/ksfa",
        keystore_standby=folder / "tools/pmt/standby/ksfb",
        crl=security / "certs/server_crl.pem",
    )


def make_files(folder: Path, hosts: tuple[str, ...] = LOCAL_HOSTS) -> TlsConfig:
    """Writes server, CA and CRL below `folder`, and what a client needs below `folder`/client."""
    paths = default_paths(folder)
    authority = make_authority("kvloom development CA")
    server = issue(authority, "kvloom server", hosts)
    client = issue(authority, "kvloom client")
    password = secrets.token_urlsafe(32).encode()
    sealed = KeyStore(paths.keystore_master, paths.keystore_standby).encrypt(password, TLS_DOMAIN)
    files = {
        paths.ca_files[0]: authority.certificate_pem(),
        paths.cert: server.certificate_pem(),
        paths.key: server.key_pem(password),
        folder / "security/ca/ca.key.pem": authority.key_pem(),
        folder / "client/ca.pem": authority.certificate_pem(),
        folder / "client/client.pem": client.certificate_pem(),
        folder / "client/client.key.pem": client.key_pem(),
    }
    if paths.key_password is not None:
        files[paths.key_password] = sealed.encode()
    if paths.crl is not None:
        files[paths.crl] = make_crl(authority)
    for path, data in files.items():
        write_private(path, data)
    return paths


@app.callback()
def main() -> None:
    """Certificates for trying TLS out."""


@app.command()
def dev(
    directory: Annotated[Path, typer.Argument(help="Where to write; must not hold certificates yet.")],
    host: Annotated[list[str] | None, typer.Option(help="A further name or address of the server.")] = None,
) -> None:
    """Make a CA, a server, a client and a revocation list."""
    if default_paths(directory).cert.exists():
        typer.echo(f"{directory} holds certificates already", err=True)
        raise typer.Exit(1)
    make_files(directory, LOCAL_HOSTS + tuple(host or ()))
    client = directory / "client"
    typer.echo(f"curl --cacert {client}/ca.pem --cert {client}/client.pem --key {client}/client.key.pem "
               "https://127.0.0.1:1025/v1/models")  # fmt: skip
