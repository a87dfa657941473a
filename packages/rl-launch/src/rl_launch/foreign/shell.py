"""Commands of a shell script, which is read without being run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_core.config.tree import read_text
from rl_core.errors import ConfigError

MAX_SCRIPT_BYTES = 1 << 19
"""Maximum size of a script."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-((?:[^${}]|\$(?!\{))*))?\}|\$([A-Za-z_]\w*)")
_HOME = re.compile(r"(?<![^=\[,'\"\s])\$(HOME\b|\{HOME\})(?=/|$)")
"""The home folder at the start of a path."""
_ENDS = (";", "&", "|", "\n")
_EXPORTS = ("export", "declare", "local", "readonly")


@dataclass(frozen=True)
class Command:
    """A command of a script.

    Args:
        line: Line on which it starts.
        text: The line.
        words: Its words, with variables of the script replaced by their values.
        variables: Environment variables that it sets.
    """

    line: int
    text: str
    words: tuple[str, ...]
    variables: tuple[str, ...]


def read_commands(path: Path) -> list[Command]:
    """Return the commands of a shell script.

    Variables that the script does not set stay interpolations of the environment (`${oc.env:NAME}`), and a path below
    the home folder starts with `~`.

    Raises:
        ConfigError: If it cannot be read.
    """
    text = read_text(path, str(path), MAX_SCRIPT_BYTES)
    try:
        pieces = [(line, shlex.split(piece)) for line, piece in _pieces(text)]
    except ValueError as error:
        raise ConfigError(f"{path}: not a shell script that can be read: {error}") from None
    lines = text.splitlines()
    known: dict[str, str] = {}

    def expanded(word: str) -> str:
        word = _VARIABLE.sub(lambda found: _value(found, known), _HOME.sub("~", word))
        if len(word) > MAX_SCRIPT_BYTES:
            raise ConfigError(f"{path}: the variables of {word[:40]!r}... hold more than {MAX_SCRIPT_BYTES:,} bytes")
        return word

    found = []
    for line, words in pieces:
        rest = list(words)
        is_exported = bool(rest) and rest[0] in _EXPORTS
        rest = rest[1:] if is_exported else rest
        set_here = []
        while rest and (parts := rest[0].partition("="))[1] and _NAME.fullmatch(parts[0]):
            name, _, value = parts
            known[name] = expanded(value)
            set_here.append(name)
            rest.pop(0)
        exported = tuple(set_here) if is_exported or rest else ()
        found.append(Command(line, lines[line - 1].strip(), tuple(map(expanded, rest)), exported))
    return found


def _value(found: re.Match[str], known: dict[str, str]) -> str:
    name, default = found[1] or found[3], found[2]
    if name in known:
        return known[name]
    return default if default is not None else f"${{oc.env:{name}}}"


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Yield each command with the number of its first line, without comments and continued lines."""
    line, start, piece, quote, place = 1, 1, "", "", 0
    while place < len(text):
        character = text[place]
        if text.startswith("\\\n", place):
            line, place = line + 1, place + 2
            piece += " "
            continue
        if character == "#" and not quote and (not piece or piece[-1].isspace()):
            place = text.find("\n", place) % (len(text) + 1)  # without a line break, the end of the text
            continue
        if character in _ENDS and not quote:
            if piece.strip():
                yield start, piece
            piece = ""
        else:
            if character in "\"'" and quote in ("", character):
                quote = "" if quote else character
            if not piece.strip() and not character.isspace():
                start = line
            piece += character
        line, place = line + (character == "\n"), place + 1
    if piece.strip():
        yield start, piece
