"""`kvloom dataset | simulate | tune`. Options and wiring, no logic."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvloom.engine.hub import find_model
from kvloom.engine.tokenizer import load_tokenizer
from kvloom.tuning.dataset import MAX_ROW_TOKENS, convert, read_texts, write_rows

console = Console()


def dataset(
    source: Annotated[Path, typer.Argument(help="A .jsonl, .csv or .parquet file, or a folder of them.")],
    output: Annotated[Path, typer.Argument(help="The CSV of token ids to write.")] = Path("token_input.csv"),
    model: Annotated[str, typer.Option(help="Whose tokenizer: a folder, a .gguf file or a fetched model.")] = "smollm2",
    field: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    where: Annotated[list[str] | None, typer.Option(help="name=value that a record must have; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer rows are cut.")] = MAX_ROW_TOKENS,
    begin_with: Annotated[int | None, typer.Option(min=0, help="Token put before rows that lack it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows at most.")] = None,
) -> None:
    """Turn texts into the CSV of token ids that llm_engine_test and `kvloom tune` take."""
    encode = load_tokenizer(find_model(model)).encode
    with Console(stderr=True).status("0 rows") as status:
        texts = read_texts(source, field, where or ())
        rows = convert(texts, encode, max_tokens, begin_with, limit, lambda count: status.update(f"{count} rows"))
    write_rows(output, rows)
    console.print(f"{len(rows)} rows, {sum(map(len, rows))} tokens in {output}", highlight=False, soft_wrap=True)
