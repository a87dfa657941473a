"""The tokens that an agent's calls consumed and sampled, as a tree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl_algos.rollouts.worker.transcript import Transcript
from rl_core.images import image_digests
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout, SegmentContext


@dataclass(eq=False)
class Node:
    """One completion, after all tokens that its branch had before.

    Args:
        parent: The completion that this one continues; None at the start of a branch.
        context: int32 `[tokens]`, that the agent added between the parent's completion and this one.
        completion: The sampled tokens.
        message: The policy's turn, as chat templates take it.
        text: Text of the turn, for people to read.
        key: Digest of everything that decides the completion; equal in a run that is repeated.
        has_invalid_call: True if a tool call of the turn cannot be read.
        shown: Text of the whole branch with special tokens, if the branch continues a string without a chat template.
        given: Messages of the agent between the parent's turn and this one, which the tokens of `context` are.
        tools: JSON schemas of the tools that the policy may call.
        digests: Digest of the conversation up to each message of `given`, and up to this turn.
        rewards: Rewards of the completion by name.
        children: Completions that continue it.
        number: Number of the completion in the order of time.
    """

    parent: Node | None
    context: np.ndarray
    completion: Completion
    message: Message
    text: str
    key: str
    has_invalid_call: bool = False
    shown: str = ""
    given: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    digests: tuple[str, ...] = ()
    rewards: dict[str, float] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)
    number: int = 0

    @property
    def path(self) -> list[Node]:
        """The completions of the branch, this one last."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def tokens(self) -> np.ndarray:
        """int32 `[tokens]` of the branch, consumed and sampled."""
        return np.concatenate([part for node in self.path for part in (node.context, node.completion.token_ids)])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the branch."""
        return sum(len(node.context) + len(node.completion.token_ids) for node in self.path)


class CallTree:
    """The branches of one rollout.

    A call whose conversation begins with all messages of a branch continues it, and adds its new tokens to the branch.
    Any other call begins a branch. Branches that share a beginning share its completions; each completion is trained
    once, in the first of them.
    """

    def __init__(self) -> None:
        self._roots: list[Node] = []
        self._by_conversation: dict[str, Node] = {}
        self._messages: dict[str, Message] = {}
        self._num_added = 0

    @property
    def nodes(self) -> Iterator[Node]:
        """The completions, each after its parent, siblings in the order of their keys: an order that does not depend on
        which of several calls at once was answered first."""
        open_nodes = sorted(self._roots, key=lambda node: node.key, reverse=True)
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += sorted(node.children, key=lambda child: child.key, reverse=True)

    def continued_by(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Node | None, int]:
        """Return the longest branch that a conversation continues, and the number of messages of the branch."""
        found: tuple[Node | None, int] = (None, 0)
        for number, digest in enumerate(digests_of(messages, tools), start=1):
            if number < len(messages) and (node := self._by_conversation.get(digest)) is not None:
                found = node, number
        return found

    def add(self, node: Node) -> None:
        """Add a completion of a call."""
        (self._roots if node.parent is None else node.parent.children).append(node)
        self._num_added += 1
        node.number = self._num_added
        # Agents send their whole conversation with every call, so equal beginnings are kept once.
        node.given = tuple(map(self._messages.setdefault, node.digests, node.given))
        if node.shown:
            return
        # One of equal conversations is continued, whichever of several calls at once was answered first.
        same = self._by_conversation.setdefault(node.digests[-1], node)
        self._by_conversation[node.digests[-1]] = min(same, node, key=lambda each: each.key)

    def drop(self, node: Node) -> None:
        """Forget a completion that nobody has received."""
        siblings = self._roots if node.parent is None else node.parent.children
        if not node.children and node in siblings:
            siblings.remove(node)

    def rollout(self, prompt: Prompt, rewards: Mapping[str, float], *, is_truncated: bool) -> Rollout:
        """Return the rollout of all branches, each a segment.

        Args:
            prompt: Prompt of the rollout.
            rewards: Rewards of the rollout, in addition to the rewards of its completions.
            is_truncated: True if it ran into a limit; it also did if a branch ends with a completion that did.
        """
        leaves = [node for node in self.nodes if not node.children]
        first = leaves[0].path[0]
        transcript = Transcript(prompt, first.context, images=image_digests(first.given))
        trained: set[int] = set()
        for number, leaf in enumerate(leaves):
            path = leaf.path
            for depth, node in enumerate(path):
                if depth:
                    transcript.add_context(node.context, image_digests(node.given))
                elif number:
                    transcript.begin(node.context, image_digests(node.given))
                if id(node) in trained:
                    transcript.add_context(node.completion.token_ids)
                    continue
                trained.add(id(node))
                transcript.add_completion(node.completion)
                answered = path[depth + 1].given if node is not leaf else ()
                result = StepResult(reward=node.rewards or {}, observation=answered)
                transcript.add_result(node.text, result, ends=node is leaf, has_invalid_call=node.has_invalid_call)
        transcript.add_rewards(rewards)
        is_cut = any(leaf.completion.stop_reason != "stop" for leaf in leaves)
        return replace(transcript.rollout(truncated=is_truncated or is_cut), contexts=_contexts(leaves))


def _contexts(leaves: Sequence[Node]) -> tuple[SegmentContext, ...]:
    """Return the conversation that each branch begins with, without the part that an earlier branch has."""
    branches: list[tuple[list[Node], int]] = []
    taken: set[int] = set()
    for leaf in leaves:
        path = leaf.path
        branches.append((path, next(depth for depth, node in enumerate(path) if id(node) not in taken)))
        taken.update(map(id, path))
    found: dict[int, SegmentContext] = {}
    owners: dict[str, int] = {}
    for index, (path, begin) in sorted(enumerate(branches), key=lambda each: each[1][0][each[1][1]].number):
        first = path[begin]
        messages = [message for node in path[:begin] for message in (*node.given, node.message)] + [*first.given]
        digests = [digest for node in path for digest in node.digests]
        shared = next((number for number in range(len(messages), 0, -1) if digests[number - 1] in owners), 0)
        found[index] = SegmentContext(
            messages=tuple(messages[shared:]),
            tools=() if shared else first.tools,
            num_turns=len(path) - begin,
            call=first.number,
            shared_with=owners[digests[shared - 1]] if shared else 0,
            num_shared=shared,
        )
        for digest in digests:
            owners.setdefault(digest, index)
    return tuple(found[index] for index in range(len(branches)))


def digests_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a digest of the conversation up to each message.

    Frameworks add fields, drop thoughts and trim the policy's turns, so only the other parts are compared.
    """
    digest = hashlib.blake2b(json.dumps(list(tools), sort_keys=True, default=str).encode(), digest_size=16)
    for message in messages:
        content = str(message.get("content") or "")
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            # Chat templates of some models take arguments as JSON text.
            with suppress(ValueError):
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append((call.get("id", ""), call["function"]["name"], arguments))
        compared = content.strip() if message["role"] == "assistant" else content
        part = [message["role"], compared, calls, message.get("tool_call_id", "")]
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
        yield digest.hexdigest()
