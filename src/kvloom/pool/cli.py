"""`kvloom pool agent | control | status | bench | doctor | credentials`."""

import typer

from kvloom.commands import group_of

_PLACES = {
    "agent": "kvloom.pool.commands.agent:agent",
    "control": "kvloom.pool.commands.control:control",
    "status": "kvloom.pool.commands.status:status",
    "bench": "kvloom.pool.bench.cli:bench",
    "doctor": "kvloom.pool.commands.doctor:doctor",
    "credentials": "kvloom.pool.commands.credentials:credentials",
}

app = typer.Typer(cls=group_of(_PLACES), no_args_is_help=True, add_completion=False)


@app.callback()
def options() -> None:
    """The elastic KV-cache pool: node agent, control plane, checks."""
