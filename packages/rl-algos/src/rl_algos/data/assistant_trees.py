"""OpenAssistant's trees of messages, as conversations and as ranked replies (arXiv:2304.07327).

The hub's Parquet files hold a message in each row (`message_id`, `parent_id`, `role` of `prompter` or `assistant`,
`text`, `rank`); the `*.trees.jsonl.gz` files hold a tree in each, nested in `prompt.replies`. Both are understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_algos.data.example import column, text_column
from rl_algos.data.files import Row, Rows
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

_ROLES = {"prompter": "user", "assistant": "assistant"}


@dataclass
class _Said:
    """A message of a tree.

    Args:
        number: Number of the row that it is in.
    """

    message: Message
    rank: float | None
    number: int
    replies: list[_Said]

    @property
    def best_first(self) -> list[_Said]:
        """Replies by their rank; those without come last, in their order."""
        return sorted(self.replies, key=lambda reply: (reply.rank is None, reply.rank or 0))


def conversations(rows: Rows) -> Rows:
    """A row with `messages` for each tree: from the first message along the best reply to the assistant's last."""
    found = []
    for root in _trees(rows):
        said, thread = root, [root]
        while said.replies:
            said = said.best_first[0]
            thread.append(said)
        while thread and thread[-1].message["role"] != "assistant":
            thread.pop()
        if thread:
            found.append((root.number, {"messages": [each.message for each in thread]}))
    return _placed(found, rows)


def ranked_replies(rows: Rows) -> Rows:
    """A row with `prompt` and `completions` for each message that the assistant has ranked replies to."""
    found = []
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


def _placed(found: Sequence[tuple[int, Row]], rows: Rows) -> Rows:
    return Rows([row for _, row in found], lambda index: f"{rows.place(found[index][0])} (its tree)")


def _trees(rows: Rows) -> Iterator[_Said]:
    """The first message of every tree, in the order of the rows."""
    said: dict[str, _Said] = {}
    parents: list[tuple[_Said, str | None]] = []
    for number in range(len(rows)):
        row = rows[number]
        try:
            if isinstance(row.get("prompt"), Mapping):
                yield _nested(row["prompt"], number)
                continue
            each = _said(row, number)
            said[text_column(row, "message_id")] = each
            parents.append((each, row.get("parent_id")))
        except DataError as error:
            raise DataError(f"{rows.place(number)}: {error}") from None
    for each, parent in parents:
        if parent in said:
            said[parent].replies.append(each)
    # a reply whose parent is in another split, or was deleted, starts no conversation
    yield from (each for each, parent in parents if parent is None and each.message["role"] == "user")


def _nested(tree: Mapping[str, Any], number: int) -> _Said:
    root = _said(tree, number)
    pending = [(root, tree)]
    while pending:
        said, node = pending.pop()
        for reply in node.get("replies") or ():
            said.replies.append(_said(reply, number))
            pending.append((said.replies[-1], reply))
    return root


def _said(row: Mapping[str, Any], number: int) -> _Said:
    role, rank = column(row, "role"), row.get("rank")
    if role not in _ROLES:
        raise DataError(f"`role` must be prompter or assistant, got {role!r}")
    if isinstance(rank, bool) or not isinstance(rank, int | float | None):
        raise DataError(f"`rank` must be a number, got {rank!r}")
    return _Said({"role": _ROLES[role], "content": text_column(row, "text")}, rank, number, [])
