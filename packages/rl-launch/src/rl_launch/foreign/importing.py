"""Import the config of another system as a recipe, with an answer to each of its keys, and both as text."""

from __future__ import annotations

import copy
import os
import re
import resource
import signal
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from rl_core.config import Config, Problem, as_written, did_you_mean, load, show, to_override
from rl_core.config.keys import Key, key_at, value_at
from rl_core.config.tree import KeyPath, leaves, mapped, parse_path
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.plugins import algorithm_named
from rl_launch.foreign import nemo_rl, trl
from rl_launch.foreign.source import interpolated, read
from rl_launch.foreign.translation import KeyAnswer, ScriptLine, Translation
from rl_launch.foreign.trl.command import read_command
from rl_launch.foreign.trl.script import read_script
from rl_launch.foreign_keys.table import SYSTEMS, Kind, table
from rl_launch.run_config.reading import read_plan
from rl_launch.run_config.root_types import root_type

_ROUNDS = 8
_MAX_CPU_S = 2.0
"""Processor time to read a file and to translate it, in seconds; large files take a quarter of a second."""
_MAX_BYTES = 1 << 29
"""Memory to read a file and to translate it."""


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe made from the config of another system.

    Args:
        system: Name of the system.
        source: The file.
        recipe: Nested plain values.
        answers: One for each key of the file, in its order.
        notes: Points for the user to check.
        behaviour: Behaviour of the system that no key sets and that differs here.
        lines: Result for each statement of a script.
    """

    system: str
    source: str
    recipe: dict[str, Any]
    answers: tuple[KeyAnswer, ...]
    notes: tuple[str, ...]
    behaviour: tuple[str, ...] = ()
    lines: tuple[ScriptLine, ...] = ()

    @property
    def features(self) -> dict[str, list[str]]:
        """Unsupported features, each with the keys that request it."""
        found: dict[str, list[str]] = {}
        for answer in self.answers:
            if answer.kind is Kind.REFUSED:
                found.setdefault(answer.text, []).append(answer.key)
        return found

    def of(self, kind: Kind) -> Iterator[KeyAnswer]:
        """Return the answers of one kind."""
        return (answer for answer in self.answers if answer.kind is kind)

    def count(self) -> Counter[Kind]:
        """Return the number of keys by kind."""
        return Counter(answer.kind for answer in self.answers)


def import_config(path: Path, system: str, *, algorithm: str = "", gpus: int | None = None) -> ImportedRecipe:
    """Import the config of another system as a recipe.

    Args:
        path: The file. Files that it inherits from are next to it.
        system: `nemo-rl` or `trl`.
        algorithm: Name of the algorithm, if the file does not contain it.
        gpus: Number of GPUs, if the file does not contain it.

    Raises:
        ConfigError: If the file cannot be read, or its algorithm is not known.
    """
    if system not in _TRANSLATORS:
        near = did_you_mean(system, _TRANSLATORS)
        known = f" `rl config explain KEY` answers a key of {SYSTEMS[system]}." if system in SYSTEMS else ""
        raise ConfigError(f"--from: got {system!r}{near}; allowed: {', '.join(_TRANSLATORS)}.{known}")
    with _limited(path):
        config = _TRANSLATORS[system](path, algorithm, gpus)
    if config.written("policy.model_name") is None:
        config.notes.append("policy.model_name: the file does not contain a model. Set it in the recipe")
        config.put("policy.model_name", "OWNER/MODEL")
    for _ in range(_ROUNDS):
        problems = _problems(config.recipe)
        unused = [
            each for each in problems if each.is_unused and value_at(config.recipe, parse_path(each.key)) is not None
        ]
        if not unused:
            _refuse(config, problems)
            break
        for problem in unused:
            config.remove(problem.key)
            for answer in config.answers:
                if _leads_to(answer, problem.key):
                    config.answer_anew(answer.key, Kind.NOT_NEEDED, problem.reason)
    if unset := _unset_variables(config.recipe):
        config.notes.append(f"set the environment variables that the recipe uses: {', '.join(unset)}")
    if any(answer.kind is Kind.REFUSED for answer in config.answers):
        found = _problems(config.recipe)
        config.notes += [f"{problem.key}: without the refused keys, {problem.message}" for problem in found]
    return ImportedRecipe(
        SYSTEMS[system],
        str(path),
        _tidy(config.recipe),
        tuple(config.answers),
        tuple(config.notes),
        tuple(config.behaviour),
        config.lines,
    )


class _OutOfTime(BaseException):
    """Raised if the limit has passed. Not an `Exception`, so that nothing catches it on the way."""


@contextmanager
def _limited(path: Path) -> Iterator[None]:
    """Refuse a file that takes more processor time or memory than a config or a script: constants of a script are
    computed, and a few lines of them can produce very large values.

    Only the main thread of a process can set the limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    before, limits = signal.signal(signal.SIGVTALRM, stop), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + _MAX_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_CPU_S)
    try:
        yield
    except (_OutOfTime, MemoryError):
        raise ConfigError(
            f"{path}: reading it takes more than {_MAX_CPU_S:g} s of processor time or {_MAX_BYTES >> 20} MiB of "
            "memory. Remove what does not configure the training"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _well_typed(config: Translation, path: Path) -> Iterator[None]:
    """Refuse values of other types and sizes than the other system takes, which fail where they are computed with."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, OSError) as error:
        asked = config.asked
        raise ConfigError(
            f"{path}: the value of {asked}, or of a key near it, has another type or size than the other system takes: "
            f"{show(config.get(asked))} ({type(error).__name__}: {str(error)[:100]})"
        ) from None


def _of_nemo_rl(path: Path, algorithm: str, gpus: int | None) -> Translation:
    values = interpolated(read(path), str(path))
    config = _started(values, "nemo-rl", algorithm or nemo_rl.algorithm_of(values), path)
    with _well_typed(config, path):
        nemo_rl.translate(config)
    return config


def _of_trl(path: Path, algorithm: str, gpus: int | None) -> Translation:
    if path.suffix in (".py", ".sh"):
        script = read_script(path) if path.suffix == ".py" else read_command(path)
        config = _started(script.values, "trl", algorithm or script.algorithm, path)
        config.lines = script.lines
        config.notes += [f"{each.place}: `{each.text}`: {each.reason}" for each in script.checks]
        with _well_typed(config, path):
            trl.translate(config, gpus or script.gpus, folder=path.parent, computed=script.computed)
        for each in script.refused:
            config.refuse_line(each)
        return config
    values = interpolated(read(path), str(path))
    config = _started(values, "trl", algorithm or trl.algorithm_of(values), path)
    with _well_typed(config, path):
        trl.translate(config, gpus, folder=path.parent)
    return config


_TRANSLATORS: Mapping[str, Callable[[Path, str, int | None], Translation]] = {"nemo-rl": _of_nemo_rl, "trl": _of_trl}
"""Functions that translate a file, by system. They take the algorithm and the number of GPUs in case the file does not
contain them."""


@cache
def _root(algorithm: str) -> type[Config]:
    return root_type(algorithm_named(algorithm), load({"algorithm": algorithm}))


def _started(values: dict[str, Any], system: str, algorithm: str, path: Path) -> Translation:
    if not algorithm:
        raise ConfigError(
            f"{path}: the algorithm cannot be inferred from its keys. Pass it, for example with --algorithm grpo"
        )
    root = _root(algorithm)

    def key_here(name: str) -> Key | None:
        try:
            return key_at(root, parse_path(name), {})
        except ConfigError:
            return None

    config = Translation(values, table(system), key_here)
    config.algorithm = algorithm
    return config


_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")


def _unset_variables(recipe: Any) -> list[str]:
    """Return the environment variables that the recipe needs and that are not set on this machine."""
    texts = [value for value in leaves(recipe).values() if isinstance(value, str)]
    named = dict.fromkeys(name for text in texts for name in _VARIABLE.findall(text))
    return [name for name in named if name not in os.environ]


def _on_another_machine(recipe: Any) -> Any:
    """Return the recipe with unset variables replaced by their names, so that it can be checked without them."""
    unset = _unset_variables(recipe)

    def stand_in(_: KeyPath, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return _VARIABLE.sub(lambda found: found[1] if found[1] in unset else found[0], value)

    return mapped(recipe, stand_in)


def _problems(recipe: dict[str, Any]) -> list[Problem]:
    try:
        read_plan(_on_another_machine(recipe))
    except ConfigProblems as error:
        return list(error.problems)
    except ConfigError as error:
        return [Problem("", str(error))]
    return []


def _refuse(config: Translation, problems: list[Problem]) -> None:
    """Refuse the keys that cause problems of the recipe."""
    refused = [answer.key for answer in config.answers if answer.kind is Kind.REFUSED]
    for problem in problems:
        key = problem.key
        section = key.rpartition(".")[0]
        if any(each == key or each.startswith(f"{key}.") or (section and each == section) for each in refused):
            continue  # it is missing, or wrong, because it is refused
        found = value_at(config.recipe, parse_path(key)) if key else None
        if refused and found is None:
            continue
        if found is not None and not isinstance(found, dict):
            config.remove(key)
        # A feature is listed with the sizes in the message.
        text = f"{key}: {problem.message}" if key else problem.message
        if problem.feature:
            is_size = isinstance(problem.got, int) and not isinstance(problem.got, bool)
            text = f"{problem.feature}: {problem.reason}" if is_size else problem.feature
        sources = [answer for answer in config.answers if _leads_to(answer, key)]
        for answer in sources:
            config.answer_anew(answer.key, Kind.REFUSED, text)
        if not sources:
            config.answer_anew(key or "config", Kind.REFUSED, text)


def _leads_to(answer: KeyAnswer, key: str) -> bool:
    here = answer.text.partition(":")[0].partition(",")[0]
    return answer.kind is not Kind.REFUSED and bool(key) and here == key


_ORDER = (
    *("algorithm", "policy", "value", "teacher", "grpo", "ppo", "distillation", "sft", "dpo", "rm", "eval", "loss_fn"),
    *("data", "env", "checkpointing", "logger", "cluster", "run_dir"),
)
"""Order of the sections in recipes."""


def _tidy(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe in the usual order of sections, without default values."""
    ordered = {name: recipe[name] for name in (*_ORDER, *recipe) if name in recipe}
    try:
        whole = leaves(as_written(read_plan(_on_another_machine(ordered)).root))
    except ConfigError:
        return ordered
    shorter = _without_defaults(ordered, _root(str(recipe["algorithm"])), ())
    for _ in range(_ROUNDS):
        # a default may depend on other keys, and a section may be needed although all its values are defaults
        try:
            found = leaves(as_written(read_plan(_on_another_machine(shorter)).root))
            needed = [path for path in {**whole, **found} if whole.get(path) != found.get(path)]
        except ConfigProblems as error:
            needed = [parse_path(problem.key) for problem in error.problems]
        if not needed:
            return shorter
        for path in needed:
            _restore(shorter, ordered, path)
    return ordered


def _restore(shorter: dict[Any, Any], whole: dict[Any, Any], path: KeyPath) -> None:
    """Put the value of a key back, or the values of its section."""
    *sections, last = path
    for name in sections:
        if not isinstance(whole.get(name), dict):
            last = name
            break
        whole, shorter = whole[name], shorter.setdefault(name, {})
    if last in whole:
        shorter[last] = copy.deepcopy(whole[last])


def _without_defaults(values: Any, root: type[Config], path: KeyPath) -> Any:
    if not isinstance(values, dict):
        return values
    kept = {}
    for name, value in values.items():
        key = key_at(root, (*path, name), {})
        if path and key is not None and key.field is not None and not key.required:
            default = key.default
            # A named section may be given by its name.
            if default == value or (isinstance(default, dict) and default.get("name") == value):
                continue
        inner = _without_defaults(value, root, (*path, name)) if key is not None else value
        if inner != {} or value == {}:
            kept[name] = inner
    return kept


_WIDTH = 118
_MAX_COMMENTS = 10
_COUNTED = {
    Kind.SAME: "unchanged",
    Kind.RENAMED: "renamed",
    Kind.FOLLOWS: "worked out",
    Kind.NOT_NEEDED: "not needed",
    Kind.REFUSED: "refused",
}


def recipe_text(imported: ImportedRecipe, report: str = "") -> str:
    """Return the recipe as YAML, with at most ten lines of comments at its top.

    Args:
        imported: The recipe and its report.
        report: Name of the file with the whole report, if there is one.
    """
    lines = [f"Imported from {imported.system}: {imported.source}"]
    if report:
        lines.append(f"The result for each key is in {report}")
    checks = [f"- {note}" for note in (*_refused(imported), *imported.notes)]
    if checks:
        lines.append("Check before you train:")
        room = _MAX_COMMENTS - len(lines)
        shown = checks if len(checks) <= room else checks[: room - 1]
        lines += [textwrap.shorten(check, _WIDTH - 2, placeholder=" ...") for check in shown]
        if len(shown) < len(checks):
            lines.append(f"- and {len(checks) - len(shown)} more")
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + "".join(f"{line}\n" for line in _yaml(imported.recipe, 0))


def summary_text(imported: ImportedRecipe) -> str:
    """Return the number of keys by result, and everything that the user has to check."""
    return "\n".join([_counts(imported), *_checks(imported)]) + "\n"


def report_text(imported: ImportedRecipe) -> str:
    """Return the result for every key of a config, and for every line of a script."""
    lines = [_counts(imported), *_checks(imported)]
    if imported.behaviour:
        lines.append(f"Without a setting, {imported.system} differs from rl here:")
        lines += [line for text in imported.behaviour for line in _wrapped("", [text])]
    for kind, title in ((Kind.RENAMED, "Renamed:"), (Kind.FOLLOWS, "Worked out:")):
        answers = list(imported.of(kind))
        lines += [title, *(f"- {each.key} -> {each.text}" for each in answers)] if answers else []
    for kind, title in ((Kind.NOT_NEEDED, "Not taken over:"), (Kind.REFUSED, "Refused:")):
        by_reason: dict[str, list[str]] = {}
        for answer in imported.of(kind):
            by_reason.setdefault(answer.text, []).append(answer.key)
        grouped = [line for reason, keys in by_reason.items() for line in _wrapped(reason, keys)]
        lines += [title, *grouped] if grouped else []
    same = ", ".join(each.key for each in imported.of(Kind.SAME))
    lines += textwrap.wrap(f"Taken as they are: {same}", _WIDTH, subsequent_indent="  ") if same else []
    if imported.lines:
        lines.append("Lines of the script:")
        lines += [f"- {each.place}: {each.fate.name.lower()}: {each.text}: {each.reason}" for each in imported.lines]
    return "\n".join(lines) + "\n"


def refusal_text(imported: ImportedRecipe) -> str:
    """Return the features that are not offered, each with its keys."""
    features = imported.features
    counted = "1 feature" if len(features) == 1 else f"{len(features)} features"
    head = (
        f"{imported.source}: {counted} of {imported.system} not offered here, so nothing was written. Change these "
        "keys, or leave them out with --keep-going:"
    )
    lines = [head]
    for feature, keys in features.items():
        first = next(each for each in imported.of(Kind.REFUSED) if each.text == feature)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        given = f"{first.key}: {first.value}" if first.is_line else f"{first.key}={show(first.value)}"
        lines.append(f"  {feature}: {given}{more}")
    return "\n".join(lines)


def _counts(imported: ImportedRecipe) -> str:
    counts = imported.count()
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in _COUNTED.items() if counts[kind])
    return f"{imported.source} of {imported.system}: {sum(counts.values())} keys, {told}"


def _refused(imported: ImportedRecipe) -> list[str]:
    return [f"{', '.join(keys)}: refused and omitted: {feature}" for feature, keys in imported.features.items()]


def _checks(imported: ImportedRecipe) -> list[str]:
    notes = [*_refused(imported), *imported.notes]
    lines = ["Check before you train:"] if notes else []
    for note in notes:
        lines += textwrap.wrap(f"- {note}", _WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _yaml(tree: dict[str, Any], indent: int) -> Iterator[str]:
    """Yield the lines of nested values; a section that fits is on one line, at the top only if it has no others."""
    pad = " " * indent
    for key, value in tree.items():
        line = f"{pad}{key}: {_flow(value)}"
        inner = value.values() if isinstance(value, dict) else ()
        is_deep = indent == 0 and len(inner) > 1 and any(isinstance(each, dict | list) for each in inner)
        if isinstance(value, dict) and (is_deep or len(line) > _WIDTH):
            yield f"{pad}{key}:"
            yield from _yaml(value, indent + 2)
        elif isinstance(value, list) and len(line) > _WIDTH:
            yield f"{pad}{key}:"
            yield from (f"{pad}- {_flow(each)}" for each in value)
        else:
            yield line


def _flow(value: Any) -> str:
    return to_override("", value)[1:]


def _wrapped(reason: str, keys: list[str]) -> Iterator[str]:
    text = f"- {', '.join(keys)}{f': {reason}' if reason else ''}"
    yield from textwrap.wrap(text, _WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
