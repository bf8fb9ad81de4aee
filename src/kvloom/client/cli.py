"""`kvloom chat`."""

from typing import Annotated

import httpx
import typer
from rich.console import Console

from kvloom.client.address import authorization, without_version
from kvloom.client.chat import Chat, ChatFailed, first_model, run
from kvloom.commands import finite

console = Console()


def chat(
    url: Annotated[
        str, typer.Option(help="Base URL of a running server, with or without /v1.")
    ] = "http://127.0.0.1:1025",
    api_key: Annotated[str | None, typer.Option(help="API key, when the server asks for one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; the server's first by default.")] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=2, callback=finite, help="How far answers stray; not at all by default, which small models need."
        ),
    ] = 0.0,
) -> None:
    """Chat in the terminal with a running server."""
    headers = authorization(api_key)
    try:
        timeout = httpx.Timeout(10.0, read=None)  # no proxy of the environment: the address is a given one
        made = httpx.Client(base_url=without_version(url), headers=headers, timeout=timeout, trust_env=False)
        made.base_url.raw_host.decode("ascii").encode("idna")  # as the system's look-up will want it
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ChatFailed(f"--url {url!r} is no URL: {error}") from None
    with made as client:
        run(Chat(client, model or first_model(client), temperature), console)
