"""`kvloom pool credentials`."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from kvloom.mistakes import problem_of
from kvloom.pool.auth import new_credential, problem_of_tenant, read_credentials, write_credentials
from kvloom.pool.control.state import ACCESS_ID
from kvloom.writing import write_private


def credentials(
    file: Annotated[Path, typer.Argument(help="JSON file for `kvloom pool agent --credentials`; made when missing.")],
    access_id: Annotated[str, typer.Option(help="1 to 512 characters of 0-9 a-z . - _")],
    tenant: Annotated[str, typer.Option(help="Whose pool it opens; without it one of the same name.")] = "",
    key_file: Annotated[Path | None, typer.Option(help="Where the access key goes; without it, it is printed.")] = None,
) -> None:
    """Add an access id to a file of credentials, or give it a new key. The file holds no keys."""
    try:
        if not ACCESS_ID.fullmatch(access_id):
            raise ValueError("access_id: must be 1 to 512 characters of 0-9 a-z . - _")
        if problem := problem_of_tenant(tenant or access_id):
            raise ValueError(f"tenant: {problem}")
        if key_file is not None and key_file.resolve() == file.resolve():
            raise ValueError(f"--key-file: {key_file} is the file of credentials")
        known = read_credentials(file) if file.exists() else []
        access_key = secrets.token_hex(32)
        fresh = new_credential(access_id, tenant or access_id, access_key)
        if key_file is not None:  # before the old key ends
            write_private(key_file, f"{access_key}\n".encode())
        write_credentials(file, [*(each for each in known if each.access_id != access_id), fresh])
        if key_file is None:
            typer.echo(access_key)
    except (OSError, ValueError) as error:
        typer.echo(f"kvloom pool credentials: {problem_of(error) or error}", err=True)
        raise typer.Exit(1) from None
