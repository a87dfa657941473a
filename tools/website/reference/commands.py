"""Pages of the command line, from its parsers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from rl_launch.cli.app import app
from website.reference.text import block, code, prose, table

FOLDER = "reference/cli"
_OPENING = """# Command line

`rl` has these commands. `rl COMMAND --help` prints the same in a terminal.

"""


def pages() -> dict[str, str]:
    """Return the text of each page by its place: an index, and a page for each command with its subcommands."""
    root = typer.main.get_command(app)
    rows, texts = [], {}
    for name, command in sorted(root.commands.items()):  # type: ignore[attr-defined]
        if command.hidden:
            continue
        texts[f"{FOLDER}/{name}.md"] = "\n".join(_sections(command, f"rl {name}", 1))
        rows.append((f"[{code(f'rl {name}')}]({name}.md)", prose(_first_line(command))))
    index = _OPENING + table(("command", "purpose"), rows) + "\n" + _parameters(root)
    return {f"{FOLDER}/index.md": index, **texts}


def paths() -> list[str]:
    """Return every command and subcommand, such as `rl config explain`."""
    return [path for path, _ in _commands(typer.main.get_command(app), "rl")]


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield f"{path} {name}", below
            yield from _commands(below, f"{path} {name}")


def _sections(command: Any, path: str, level: int) -> Iterator[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    help_text = inspect.cleandoc(command.help or command.short_help or "").replace("\b", "")
    yield (
        f"{'#' * min(level, 6)} {code(path)} {{ #{path.replace(' ', '-')} }}\n\n"
        f"{prose(help_text)}\n\n{block('text', ' '.join(usage.split()))}\n{_parameters(command)}"
    )
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if not below.hidden:
            yield from _sections(below, f"{path} {name}", level + 1)


def _parameters(command: Any) -> str:
    arguments = [
        (code(each.metavar or each.name.upper()), prose(each.help or ""))
        for each in command.params
        if each.param_type_name == "argument" and not getattr(each, "hidden", False)
    ]
    options = [
        (_names(each), prose(each.help or ""), _default(each))
        for each in command.params
        if each.param_type_name == "option" and not each.hidden
    ]
    text = table(("argument", "meaning"), arguments) + "\n" if arguments else ""
    return text + (table(("option", "meaning", "default"), options) if options else "")


def _names(option: Any) -> str:
    kind = option.type_descriptor.annotation
    value = "" if option.is_flag or option.count else f" {option.metavar or kind.__name__.upper()}"
    return ", ".join(code(f"{name}{value}") for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    default = option.default
    if option.required:
        return "must be given"
    is_shown = isinstance(default, str | int | float) and default not in ("", False)
    return code(str(default)) if is_shown else ""


def _first_line(command: Any) -> str:
    text = inspect.cleandoc(command.help or command.short_help or "")
    return " ".join(text.partition("\n\n")[0].split())
