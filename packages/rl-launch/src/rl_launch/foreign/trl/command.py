"""Shell scripts that start TRL: `trl sft --model ..`, or `accelerate launch train.py --learning_rate ..`. They are read
without being run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.config.tree import is_too_long, natural, read_scalar, read_text
from rl_core.errors import ConfigError
from rl_launch.foreign.source import read
from rl_launch.foreign.translation import Fate, ScriptLine
from rl_launch.foreign.trl.reading import HARMLESS_VARIABLES
from rl_launch.foreign.trl.script import MAX_SCRIPT_BYTES, Script, class_defaults, read_script
from rl_launch.foreign.trl.values import SCRIPTS

_PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus")
_NODES = ("num_machines", "nnodes", "num_nodes")
_OF_ACCELERATE = ("accelerate_config", "config_file", *_PROCESSES, *_NODES)
_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-((?:[^${}]|\$(?!\{))*))?\}|\$([A-Za-z_]\w*)")
_HOME = re.compile(r"(?<![^=\[,'\"\s])\$(HOME\b|\{HOME\})(?=/|$)")
"""The home folder at the start of a path."""
_ENDS = (";", "&", "|", "\n")
_EXPORTS = ("export", "declare", "local", "readonly")


@dataclass(frozen=True)
class ShellCommand:
    """A command of a script.

    Args:
        line: Its first line.
        text: The line.
        words: Its words, with variables of the script replaced by their values.
        variables: Environment variables that it sets.
    """

    line: int
    text: str
    words: tuple[str, ...]
    variables: tuple[str, ...]


def read_command(path: Path) -> Script:
    """Read the one command of a shell script that trains with TRL, and the Python script that it starts.

    Raises:
        ConfigError: If it cannot be read, or starts none or several.
    """
    commands = read_commands(path)
    started = [each for each in commands if _start(each.words) is not None]
    if len(started) > 1:
        started = [each for each in started if _trains(each, path.parent)]
    if len(started) != 1:
        found = ", ".join(f"line {each.line}: {each.text}" for each in started) or "none"
        raise ConfigError(
            f"{path}: a shell script is imported by the one command in it that starts `trl` or a Python script; found "
            f"{found}"
        )
    [command] = started
    start = _start(command.words)
    assert start is not None
    flags = read_flags(command.words[start + 1 :])
    if (file := flags.pop("config", None)) is not None:
        flags = {**read(path.parent / str(file)), **flags}
    given = {**flags, **read_flags(command.words[:start])}
    gpus = next((given[name] for name in _PROCESSES if isinstance(given.get(name), int)), None)
    if gpus and "nproc_per_node" in given:
        gpus *= next((given[name] for name in _NODES if isinstance(given.get(name), int)), 1)
    flags = {key: value for key, value in flags.items() if key not in _OF_ACCELERATE}
    script = _script(path, command.words[start], flags)
    others = [_accounted(each) for each in commands if each is not command]
    checks = [each for each in others if each.fate is Fate.CHECK]
    own = ScriptLine(command.line, command.text, Fate.CONVERTED, "the arguments of the trainer")
    return replace(script, checks=(*checks, *script.checks), lines=(*others, own, *script.lines), gpus=gpus)


def _start(words: tuple[str, ...]) -> int | None:
    """Return the place of the training script, or of the command of `trl`."""
    for place, word in enumerate(words):
        if place and words[place - 1].rpartition("/")[2] == "trl" and not word.startswith("-"):
            return None if word in ("env", "vllm-serve") else place
        if word.endswith(".py") and place:
            return place
    return None


def _trains(command: ShellCommand, folder: Path) -> bool:
    """Return whether a command that starts a Python script trains: it uses a launcher, or the script imports trl."""
    if {word.rpartition("/")[2] for word in command.words} & {"trl", "accelerate", "torchrun", "deepspeed"}:
        return True
    script = folder / command.words[_start(command.words) or 0]
    return script.is_file() and "trl" in script.read_text(encoding="utf-8", errors="replace")


def _script(path: Path, started: str, flags: dict[str, Any]) -> Script:
    file = path.parent / started
    if started.endswith(".py") and file.is_file():
        script = read_script(file, flags)
        return replace(
            script,
            checks=tuple(replace(each, file=started) for each in script.checks),
            refused=tuple(replace(each, file=started) for each in script.refused),
            lines=tuple(replace(each, file=started) for each in script.lines),
        )
    name = Path(started).stem
    stem = SCRIPTS["commands"].get(name.partition("_")[0])
    if stem is None:
        stems = {other.lower(): reason for other, reason in SCRIPTS["others"].items()}
        known = stems.get(name.partition("_")[0])
        raise ConfigError(
            f"{path}: it starts {started}, which is not imported: {known}"
            if known
            else f"{path}: it starts {started}, and there is no file {file}. Put the script there, or import it"
        )
    checks: tuple[ScriptLine, ...] = ()
    if started.endswith(".py"):
        text = f"there is no file {file}; it is taken for the script of TRL with this name"
        checks = (ScriptLine(1, started, Fate.CHECK, text),)
    values = dict(flags)
    algorithm = class_defaults(stem, values)
    return Script(algorithm, values, frozenset(), checks, (), ())


def read_flags(words: Iterable[str]) -> dict[str, Any]:
    """Return the flags of a command (`--name value`, `--name=value`, `--switch`, `--name a b`) as values."""
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _scalar(value) if equals else True
            name = None if equals else name
        elif name is not None:
            earlier = found[name]
            several = earlier if isinstance(earlier, list) else [earlier]
            found[name] = _scalar(word) if earlier is True else [*several, _scalar(word)]
    return found


def _scalar(word: str) -> Any:
    if word.lower() in ("none", "null"):
        return None
    return word if word in ("", "~", "???") or is_too_long(word) else natural(read_scalar(word))


def _accounted(command: ShellCommand) -> ScriptLine:
    listed = [name for name in command.variables if not name.startswith(HARMLESS_VARIABLES)]
    if listed:
        reason = "environment variables. Set them in policy.env_vars or in the shell if they matter"
        return ScriptLine(command.line, command.text, Fate.CHECK, reason)
    if not command.words or command.words[0].rpartition("/")[2] in SCRIPTS["harmless commands"].split():
        return ScriptLine(command.line, command.text, Fate.UNRELATED, "it prepares the command")
    return ScriptLine(command.line, command.text, Fate.CHECK, "another command, which is not read")


def read_commands(path: Path) -> list[ShellCommand]:
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

    def value_of(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return known.get(name, f"${{oc.env:{name}}}" if default is None else default)

    def expanded(word: str) -> str:
        word = _VARIABLE.sub(value_of, _HOME.sub("~", word))
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
        found.append(ShellCommand(line, lines[line - 1].strip(), tuple(map(expanded, rest)), exported))
    return found


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
