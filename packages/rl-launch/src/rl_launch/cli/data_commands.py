"""`rl data show`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rl_launch.cli.completion import complete_algorithm, complete_override, complete_rows
from rl_launch.cli.failure import reported


def show(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DATASET|RECIPE|FILE.yaml|RUN",
            help="Data (JSON Lines, Parquet, ..., or the name of a dataset), or a config with data.",
            autocompletion=complete_rows,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Config keys to set, such as data.train.input_key=question.",
            autocompletion=complete_override,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Use the tokenizer and chat template of this model.")
    ] = "",
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            metavar="NAME",
            help="Read a data file as this algorithm does (default: inferred from its columns).",
            autocompletion=complete_algorithm,
        ),
    ] = "",
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="Show the first N rows.")] = 3,
    row: Annotated[int | None, typer.Option("--row", metavar="N", min=1, help="Show only the Nth row.")] = None,
    over: Annotated[
        int | None, typer.Option("--over", metavar="N", min=1, help="Count over the first N rows (default: 1000).")
    ] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Show the validation data.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how rows of data are read: the text of the model with special tokens, the parts that are learned (green, or
    between « and » without colours), and the fields that rewards receive.

    Rows that are too long or refused are shown with the reason. A summary line counts tokens and such rows over the
    first rows of each dataset. No run is started. The exit code is 1 if one of these rows ends a run of the config.

    With --json: {"schema": 1, "algorithm", "model", "limit", "datasets": [{"name", "num_rows", "rows": [{"number",
    "place", "texts": [{"title", "num_tokens", "num_learned", "too_long", "spans": [{"text", "learned"}, ...]}, ...],
    "environment", "fields", "not_used"}, ...], "counts": {"num_read", "tokens": {"min", "median", "max"},
    "num_learned", "num_too_long", "not_used": {REASON: COUNT}, "num_ending"}}, ...]}.
    """
    with reported():
        from rich.console import Console

        from rl_core.errors import ConfigError
        from rl_launch.cli import data_text
        from rl_launch.commands.data_rows import MOST_READ, counts, ends_run, given_rows, shown_row

        given = given_rows(recipe, overrides or (), model=model, algorithm=algorithm, validation=validation)
        if row is not None and all(row > len(dataset.numbers) for dataset in given.datasets):
            sizes = ", ".join(f"{dataset.name} has {len(dataset.numbers)} rows" for dataset in given.datasets)
            raise ConfigError(f"--row: got {row}; {sizes}")
        shown = []
        for dataset in given.datasets:
            size = len(dataset.numbers)
            chosen = range(1, min(rows, size) + 1) if row is None else range(row, row + 1) if row <= size else range(0)
            found = [shown_row(given, dataset, number) for number in chosen]
            shown.append((dataset, found, counts(given, dataset, over or MOST_READ)))
        if as_json:
            sys.stdout.write(json.dumps(data_text.as_json(given, shown), indent=2, ensure_ascii=False) + "\n")
        else:
            console = Console()
            data_text.print_heading(recipe, given, console)
            for dataset, found, _ in shown:
                for each in found:
                    data_text.print_row(given, dataset, each, console)
            for dataset, _, counted in shown:
                data_text.print_counts(given, dataset, counted, console)
        ends = any(counted.num_ending or any(ends_run(given, each) for each in found) for _, found, counted in shown)
        if given.is_run and ends:
            raise typer.Exit(1)
