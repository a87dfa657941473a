"""Processors, which make an example of a row, by the name that a dataset gives, and OpenAssistant's trees of messages.

The trees become conversations or ranked replies (arXiv:2304.07327). The hub's Parquet files hold a message in each row
(`message_id`, `parent_id`, `role` of `prompter` or `assistant`, `text`, `rank`); the `*.trees.jsonl.gz` files hold a
tree in each, nested in `prompt.replies`. Both are understood.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows import problems, programs
from rl_algos.data.rows.example import Example, Processor, by_keys, column, plain_text, text_column
from rl_algos.data.rows.preference import helpsteer3, preference, ultrafeedback
from rl_algos.data.sources.files import DataRows, Row
from rl_core import resolve
from rl_core.config import did_you_mean
from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.rollout import Message
from rl_core.user_code import is_in_file, place_of, raised_at

PROCESSORS: Mapping[str, Processor] = {
    "apps": programs.apps,
    "clevr_count": problems.clevr_count,
    "dapo_math": problems.dapo_math,
    "eurus_code": programs.eurus_code,
    "geometry3k": problems.geometry3k,
    "gpqa": problems.gpqa,
    "gsm8k": problems.gsm8k,
    "helpsteer3": helpsteer3,
    "humaneval_plus": programs.humaneval_plus,
    "livecodebench": programs.livecodebench,
    "llava": problems.llava,
    "math_problem": problems.math_problem,
    "mbpp_plus": programs.mbpp_plus,
    "multiple_choice": problems.multiple_choice,
    "numina_cot": problems.numina_cot,
    "oasst": by_keys,
    "oasst_preference": preference,
    "openmathinstruct2": problems.openmathinstruct2,
    "openr1_math": problems.openr1_math,
    "preference": preference,
    "refcoco": problems.refcoco,
    "squad": problems.squad,
    "text": plain_text,
    "ultrafeedback": ultrafeedback,
}
"""Processors by the name that `processor` takes."""

_ROLES = {"prompter": "user", "assistant": "assistant"}


def arranged(rows: DataRows, settings: DatasetConfig) -> DataRows:
    """Return the rows that the dataset's processor takes: the rows of files, unless an example is made of several."""
    arrange = _ARRANGED.get(settings.processor or "")
    return rows if arrange is None else arrange(rows)


def check_streamable(settings: DatasetConfig) -> None:
    """Raise a `DataError` if an example of this dataset is made of several rows, which must then all be read."""
    if settings.processor in _ARRANGED:
        reason = "because an example consists of several rows"
        raise DataError(f"{settings.source!r} cannot be streamed, {reason}; remove `streaming`")


def processor(settings: DatasetConfig, default: Processor = by_keys) -> Processor:
    """Return the dataset's processor; `default` if its settings have none.

    Raises:
        ConfigError: If the name is neither a built-in one nor the name of a function.
    """
    name = settings.processor
    if name is None:
        return default
    if ":" not in name:
        if name not in PROCESSORS:
            raise ConfigError(
                f"data: {name!r} is not a processor{did_you_mean(name, PROCESSORS)}; allowed: {', '.join(PROCESSORS)}, "
                "or your own function as package.module:function or file.py:function"
            )
        return PROCESSORS[name]
    try:
        found = resolve(name)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"data: processor {name!r} cannot be imported: {error}") from error
    return _callable(found, name)


def _callable(found: Any, name: str) -> Processor:
    """Return a processor that takes a row and the settings of its dataset; refuse anything else."""
    shown = f"{Path(name.rpartition(':')[0]).name}:{name.rpartition(':')[2]}" if is_in_file(name) else name
    if place := place_of(found):
        shown = f"{shown} ({place})"
    try:
        inspect.signature(found).bind({}, None)
    except TypeError as error:
        problem = f"data: processor {shown} cannot be called with a row and the settings of its dataset: {error}"
        remedy = f"define it as def {getattr(found, '__name__', 'convert')}(row, settings) -> Example"
        raise ConfigError(f"{problem}; {remedy}") from None

    def convert(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
        try:
            example = found(row, settings)
        except DataError:
            raise
        except Exception as error:  # A failure in the user's code becomes a report with the row.
            where = raised_at(error)
            problem = f"the processor {shown} raised {type(error).__name__}: {error}{f' (at {where})' if where else ''}"
            raise DataError(f"{problem}; the columns are {', '.join(sorted(row))}") from error
        if not isinstance(example, Example):
            kind = type(example).__name__
            raise DataError(f"the processor {shown} returned {kind}; return an rl_algos.Example(messages, answer)")
        return example

    return convert


@dataclass
class _TreeMessage:
    """A message of a tree.

    Args:
        number: Number of the row that it is in.
    """

    message: Message
    rank: float | None
    number: int
    replies: list[_TreeMessage] = field(default_factory=list)

    @property
    def best_first(self) -> list[_TreeMessage]:
        """Replies by their rank; replies without a rank come last, in their order."""
        return sorted(self.replies, key=lambda reply: (reply.rank is None, reply.rank or 0))


def _conversations(rows: DataRows) -> DataRows:
    """Return a row with `messages` for each tree: from the first message along the best reply to the assistant's
    last."""
    found: list[tuple[int, Row]] = []
    for root in _trees(rows):
        thread = [root]
        while thread[-1].replies:
            thread.append(thread[-1].best_first[0])
        while thread and thread[-1].message["role"] != "assistant":
            thread.pop()
        if thread:
            found.append((root.number, {"messages": [each.message for each in thread]}))
    return _placed(found, rows)


def _ranked_replies(rows: DataRows) -> DataRows:
    """Return a row with `prompt` and `completions` for each message that the assistant has ranked replies to."""
    found: list[tuple[int, Row]] = []
    for root in _trees(rows):
        pending = [[root]]
        while pending:
            thread = pending.pop()
            replies = thread[-1].best_first
            pending.extend([*thread, reply] for reply in reversed(replies))
            ranked = [reply for reply in replies if reply.rank is not None]
            if thread[-1].message["role"] == "user" and len(ranked) > 1:
                completions = [{"completion": reply.message["content"], "rank": reply.rank} for reply in ranked]
                prompt = [each.message for each in thread]
                found.append((thread[-1].number, {"prompt": prompt, "completions": completions}))
    return _placed(found, rows)


def _placed(found: list[tuple[int, Row]], rows: DataRows) -> DataRows:
    return DataRows([row for _, row in found], lambda index: f"{rows.place(found[index][0])} (its tree)")


def _trees(rows: DataRows) -> Iterator[_TreeMessage]:
    """Yield the first message of every tree, in the order of the rows."""
    by_id: dict[str, _TreeMessage] = {}
    parents: list[tuple[_TreeMessage, str | None]] = []
    for number in range(len(rows)):
        row = rows[number]
        try:
            if isinstance(row.get("prompt"), Mapping):
                root = _tree_message(row["prompt"], number)
                pending = [(root, row["prompt"])]
                while pending:
                    message, node = pending.pop()
                    for reply in node.get("replies") or ():
                        message.replies.append(_tree_message(reply, number))
                        pending.append((message.replies[-1], reply))
                yield root
                continue
            message = _tree_message(row, number)
            by_id[text_column(row, "message_id")] = message
            parents.append((message, row.get("parent_id")))
        except DataError as error:
            raise DataError(f"{rows.place(number)}: {error}") from None
    for message, parent in parents:
        if parent in by_id:
            by_id[parent].replies.append(message)
    # A reply whose parent is in another split, or was deleted, starts no conversation.
    yield from (each for each, parent in parents if parent is None and each.message["role"] == "user")


def _tree_message(row: Mapping[str, Any], number: int) -> _TreeMessage:
    role, rank = column(row, "role"), row.get("rank")
    if role not in _ROLES:
        raise DataError(f"`role` must be prompter or assistant, got {role!r}")
    if isinstance(rank, bool) or not isinstance(rank, int | float | None):
        raise DataError(f"`rank` must be a number, got {rank!r}")
    return _TreeMessage({"role": _ROLES[role], "content": text_column(row, "text")}, rank, number)


_ARRANGED: Mapping[str, Callable[[DataRows], DataRows]] = {"oasst": _conversations, "oasst_preference": _ranked_replies}
"""Preparation of all rows, before a processor gets them one by one, by the name of the processor."""
