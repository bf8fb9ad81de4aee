"""The options of `kvloom simulate`, with their help texts."""

from pathlib import Path
from typing import Annotated

from typer import Option

from kvloom.commands import finite

MAX_BLOCKS = 10_000_000  # most simulated blocks, each of which takes 100 bytes of bookkeeping
MAX_REPLICAS = 10_000
_MEASURED = "Step times of an engine; measured and written when not there."

Times = Annotated[Path, Option(help=_MEASURED)]
Config = Annotated[Path | None, Option(help="A config.json; else the defaults and --model.")]
Model = Annotated[str | None, Option(help="What is measured without --config; smollm2 unless given.")]
Backend = Annotated[str | None, Option(help="auto, cpu, torch or mock, without --config.")]
MaxBatch = Annotated[int | None, Option(min=1, help="Most requests in a step.")]
MaxTokens = Annotated[int | None, Option(min=1, help="Most tokens of a step.")]
NumBlocks = Annotated[int | None, Option(min=2, max=MAX_BLOCKS, help="KV blocks, instead of those measured.")]
NumHostBlocks = Annotated[int | None, Option(min=0, max=MAX_BLOCKS, help="Blocks for what is swapped out.")]
Policy = Annotated[int | None, Option(help="0 FCFS, 1 STATE, 3 MLFQ.")]
MaxGap = Annotated[float | None, Option(min=0, callback=finite, help="Longest step beside streams; 0 = any.")]
Limit = Annotated[int | None, Option(min=1, help="Only so many requests, from the first line on.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]

Fleet = Annotated[bool, Option("--fleet", help="Many replicas; the options below are of it.")]
Replicas = Annotated[int | None, Option(min=1, max=MAX_REPLICAS, help="So many; else as few as keep the SLO.")]
MaxReplicas = Annotated[int, Option(min=1, max=MAX_REPLICAS, help="Most that are tried for the SLO.")]
RoutingNames = Annotated[
    list[str] | None, Option("--routing", help="prefix (as a fleet routes), power_of_two, round_robin; repeatable.")
]
Prefill = Annotated[int, Option(min=0, max=MAX_REPLICAS, help="More replicas, that only compute long prompts.")]
PrefillFrom = Annotated[int, Option(min=1, help="Tokens from which on a prompt is long.")]
PoolSpeed = Annotated[
    float, Option("--pool-gb-s", min=0.001, callback=finite, help="GB a second out of the pool, for such prompts.")
]
Failures = Annotated[
    list[str] | None,
    Option("--fail", help="A replica that is lost: from when, which, for how many seconds, as 30:0:20; repeatable."),
]
SloTtft = Annotated[float | None, Option(help="Longest time to the first token.")]
SloTpot = Annotated[float | None, Option(help="Longest mean time of a further token.")]
SloPercentile = Annotated[float, Option(help="Of the requests, that are to keep it.")]
Plot = Annotated[Path | None, Option(help="An HTML page with the picture.")]
