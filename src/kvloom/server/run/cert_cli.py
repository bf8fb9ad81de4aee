"""`kvloom cert dev DIR`: makes all files for mutual TLS, where config.json's defaults expect them."""

from pathlib import Path
from typing import Annotated

import typer

from kvloom.net.devcerts import LOCAL_HOSTS, make_files
from kvloom.net.tlsconfig import default_paths

app = typer.Typer(help="Certificates for trying TLS out.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Certificates for trying TLS out."""


@app.command()
def dev(
    directory: Annotated[Path, typer.Argument(help="Where to write; must not hold certificates yet.")],
    host: Annotated[list[str] | None, typer.Option(help="A further name or address of the server.")] = None,
) -> None:
    """Make a CA, a server, a node of the pool, a client and a revocation list."""
    if default_paths(directory).cert.exists():
        typer.echo(f"{directory} holds certificates already", err=True)
        raise typer.Exit(1)
    make_files(directory, LOCAL_HOSTS + tuple(host or ()))
    client = directory / "client"
    typer.echo(f"curl --cacert {client}/ca.pem --cert {client}/client.pem --key {client}/client.key.pem "
               "https://127.0.0.1:1025/v1/models")  # fmt: skip
