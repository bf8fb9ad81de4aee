"""The command line: `kvloom serve | chat | pull | pool | gewu | cert`. Options and wiring, no logic."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvloom.engine.errors import ServingError
from kvloom.engine.hub import MODELS, find_model, pull
from kvloom.gewu.cli import app as gewu_app
from kvloom.pool.cli import app as pool_app
from kvloom.server.auth import AccessError, hash_key, new_key, read_hashes
from kvloom.server.cert_cli import app as cert_app
from kvloom.server.chat import Chat, first_model, run
from kvloom.server.config import Settings, load_settings
from kvloom.server.keystore import KeyStoreError
from kvloom.server.main import serve as run_server
from kvloom.server.tls import TlsError

DEMO_MODEL = "smollm2"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(pool_app, name="pool", help="The elastic KV-cache pool: agent, control plane, status, bench.")
app.add_typer(gewu_app, name="gewu", help="On-device inference sessions: daemon, status, run.")
app.add_typer(cert_app, name="cert", help="Certificates for trying out mutual TLS.")
console = Console()


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="A folder, a .gguf file, or the name of a fetched model.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name that requests use.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json; the other options override it.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, cpu, reference, or fake (a mock without weights).")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    weight_format: Annotated[str | None, typer.Option(help="auto, w8a8, w4a8 or bf16.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most requests computed in one step.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Hashes of API keys, one a line (kvloom api-key).")] = None,
    allow_all_addresses: Annotated[bool | None, typer.Option(help="Let --host be 0.0.0.0 or ::.")] = None,
    grace: Annotated[float | None, typer.Option(help="Seconds that running requests get when told to stop.")] = None,
) -> None:
    """Serve a model over HTTP. Without MODEL, the demo model is fetched and served."""
    settings = Settings(load_settings(config) if config else {})
    settings.override(host=host, port=port, served_model_name=served_model_name, backend=backend, dtype=dtype)
    settings.override(max_seq_len=max_seq_len, max_batch=max_batch, grace_s=grace, model=model)
    settings.override(weight_format=weight_format, allows_all_addresses=allow_all_addresses)
    settings.override(api_key_hashes=read_hashes(api_key_file) if api_key_file else None)
    run_server(settings.build(_model_path(settings)))


def _model_path(settings: Settings) -> str:
    """The model's path, "" for a mock; the demo model is fetched when nothing is named."""
    values = settings.values
    if values.get("instance_type") == "StandardMock" or values.get("backend") == "fake":
        settings.override(backend="fake")
        return ""
    name = values.get("model")
    if name:
        settings.override(served_model_name=values.get("served_model_name") or (name if name in MODELS else None))
        return str(find_model(name))
    settings.override(served_model_name=values.get("served_model_name") or DEMO_MODEL)
    return str(_fetch(DEMO_MODEL))


@app.command("api-key")
def api_key() -> None:
    """Make an API key: the key for its user on the first line, its hash for --api-key-file on the second."""
    key = new_key()
    console.print(f"{key}\n{hash_key(key)}", soft_wrap=True, highlight=False)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Base URL of a running server.")] = "http://127.0.0.1:1025",
    api_key: Annotated[str | None, typer.Option(help="API key, when the server asks for one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; the server's first by default.")] = None,
) -> None:
    """Chat in the terminal with a running server."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        run(Chat(client, model or first_model(client)), console)


@app.command("pull")
def pull_command(name: Annotated[str, typer.Argument(help=f"One of: {', '.join(MODELS)}.")] = DEMO_MODEL) -> None:
    """Fetch a demo model into the user's cache."""
    console.print(str(_fetch(name)), soft_wrap=True, highlight=False)


def _fetch(name: str) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"fetching {name}", total=None)
        return pull(name, lambda done, total: bar.update(task, completed=done, total=total))


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        console.print(f"kvloom {version('kvloom')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """kvloom: an LLM inference server, an elastic KV-cache pool, on-device sessions."""


def main() -> None:
    """Entry point: mistakes of a user are one line and exit code 1."""
    try:
        app()
    except (ServingError, AccessError, TlsError, KeyStoreError) as error:
        print(f"kvloom: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
