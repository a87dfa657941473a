"""One rollout of an agent: its calls, answered and recorded token by token."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from rl_algos.agents.calls import Answer, Call, CallRefused, Choice, FinishReason, Limits
from rl_algos.agents.tree import CallTree, Node, conversation_digests
from rl_algos.rollouts.ignored_fields import ignored_info
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout
from rl_core.rollouts.thoughts import THOUGHTS, opened_by

T = TypeVar("T")

SMALL = 4096
"""Maximum number of bytes of a request that is read and tokenised on the event loop, which takes a few milliseconds."""

MAX_AGENTS = 64
"""Maximum number of agents of one rollout."""

_MAX_REFUSALS = 64
"""Maximum number of refused calls that a session remembers."""

LARGE = 2**18
"""Number of bytes of a request above which few are in memory at a time; one of them is tokenised."""

_WORKERS = ThreadPoolExecutor(4, thread_name_prefix="agent-calls")
_LARGE_WORKER = ThreadPoolExecutor(1, thread_name_prefix="large-agent-calls")
"""Threads that read, render and tokenise requests. A token takes 200 bytes meanwhile."""


@dataclass
class _Prepared:
    """A call as tokens.

    Args:
        num_tokens: Number of tokens before the completion; a lower bound if the call cannot have room for one.
        tokens: int32 `[tokens]`; None if the call cannot have room.
        parent: The completion that they continue; None if they begin a branch.
        num_known: Number of messages, or of characters of its text, that the parent's branch has.
    """

    num_tokens: int
    tokens: np.ndarray | None = None
    parent: Node | None = None
    num_known: int = 0


@dataclass
class _Draw:
    """The answer to one of several equal calls.

    Args:
        number: Number of the call among them.
        key: Key by which the client identifies the call; empty if it gave none.
        prepared: Done when the call is tokenised, or has failed.
        answer: The answer.
        is_delivered: True if it was sent.
        is_abandoned: True if the client hung up before.
    """

    number: int
    key: str
    prepared: asyncio.Future[None]
    answer: asyncio.Task[Answer]
    is_delivered: bool = False
    is_abandoned: bool = False


@dataclass
class _Admission:
    """Requests of one rollout, of which one at a time is read and tokenised.

    However many an agent sends, and whether it waits for the answers or hangs up, they take the memory of one request
    and one thread.

    Args:
        lock: Held by the request.
        jobs: Work in threads that has not ended. It continues after its client has hung up.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    jobs: set[asyncio.Future[Any]] = field(default_factory=set)

    def add(self, job: asyncio.Future[Any]) -> None:
        """Have the next request wait for a job."""
        self.jobs.add(job)
        job.add_done_callback(self.jobs.discard)


class AgentSession:
    """Answers the calls of one rollout. It may answer several at once.

    Equal calls are told apart by their number: the seed of a completion follows from the rollout's seed, the tokens
    before it and the number of earlier equal calls, so calls that run in parallel are drawn in the same way whichever
    comes first, and a rollout that is repeated after a crash finds the completions that it had. A call that is repeated
    because its answer did not arrive gets that answer; if it may be the answer to another equal call, it is drawn anew.

    Args:
        prompt: The prompt of the rollout.
        client: The policy.
        limits: Limits of the rollout.
        splits: True to render every conversation anew, as a chat server does, which cuts the rollout where the chat
            template rewrites earlier turns; False to continue from the tokens as they were sampled.
        agent: Name of the agent whose calls these are, if the program has several; empty for the only one.
    """

    def __init__(
        self, prompt: Prompt, client: GenerationClient, limits: Limits, *, splits: bool = False, agent: str = ""
    ) -> None:
        # unlike any before it, for an environment may still know those of a rollout worker that died
        self.id = f"{prompt.id}/{uuid.uuid4().hex}"
        self._prompt = prompt
        self._client = client
        self._limits = limits
        self._splits = splits
        self._agent = agent
        # equal calls of two agents are draws of their own, whichever agent calls first
        self._first_draw = int(_short(agent)[:7], 16) << 32 if agent else 0
        self._agents: dict[str, AgentSession] = {}
        self._tree = CallTree()
        self._answered: dict[str, list[Node]] = {}
        self._stored: dict[str, tuple[Message, ...]] = {}
        self._draws: dict[str, list[_Draw]] = defaultdict(list)
        self._num_failed: Counter[str] = Counter()
        self._refused: dict[tuple[str, int], CallRefused] = {}
        self._admission = _Admission()
        self._drawn: dict[tuple[bytes, SamplingParams], set[int]] = defaultdict(set)
        self._rewards: dict[str, float] = {}
        self._num_sampled_calls = 0
        self._is_truncated = False
        self._is_closed = False
        self._messages: tuple[Message, ...] = ()
        self._opened_thoughts = ""
        self.ignored: set[str] = set()

    @property
    def prompt(self) -> Prompt:
        """The prompt of the rollout."""
        return self._prompt

    def of_agent(self, name: str) -> AgentSession:
        """Return the calls of one of several agents, which are a rollout of their own; these for an empty name.

        Raises:
            CallRefused: If the rollout has ended.
        """
        if not name:
            return self
        self._check_open()
        if name not in self._agents:
            if len(self._agents) >= MAX_AGENTS:
                raise CallRefused(f"this rollout has {MAX_AGENTS} agents, the maximum", status=403, code="agent_limit")
            session = AgentSession(self._prompt, self._client, self._limits, splits=self._splits, agent=name)
            session.ignored, session._admission = self.ignored, self._admission
            self._agents[name] = session
        return self._agents[name]

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Context in which one request of the rollout is received, read and tokenised; others wait."""
        async with self._admission.lock:
            if self._admission.jobs:
                await asyncio.wait(self._admission.jobs)
            self._check_open()
            yield

    async def off_loop(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns, which runs in a thread unless its input is small.

        Args:
            size: Number of bytes or characters of the input.
            function: Function without effects on the session.
            *args: Its arguments.
        """
        if size <= SMALL:
            return function(*args)
        workers = _WORKERS if size <= LARGE else _LARGE_WORKER
        job = asyncio.get_running_loop().run_in_executor(workers, partial(function, *args))
        self._admission.add(job)
        try:
            return await asyncio.shield(job)
        finally:
            del job  # an error of it would hold it, and with it the input, in a cycle

    async def answer(self, call: Call, *, is_retry: bool = False, key: str = "") -> Answer:
        """Answer a call.

        Args:
            call: Call of the agent, which may continue an earlier answer by its id.
            is_retry: True if the client says that it has made the call before.
            key: Key that is equal for all tries of a call and for no other; empty if the client gives none.

        Raises:
            CallRefused: If it cannot be served.
        """
        self._check_open()
        return await (await self.begin(call, is_retry=is_retry, key=key))

    async def begin(self, call: Call, *, is_retry: bool = False, key: str = "") -> Coroutine[Any, Any, Answer]:
        """Tokenise a call, and begin to answer it; see `answer`. Await the returned coroutine at once."""
        call = self._whole(call)
        self.ignored.update(call.ignored)
        digest = await self.off_loop(call.size, _digest_of, call)
        self._check_open()
        if (refused := self._refused.get((digest, self._num_sampled_calls))) is not None:
            raise refused.again()
        draw = self._repeated(digest, is_retry, key)
        if draw is None:
            draws = self._draws[digest]
            number = _first_free({each.number for each in draws})
            prepared = asyncio.get_running_loop().create_future()
            draw = _Draw(number, key, prepared, asyncio.create_task(self._answer(call, digest, number, prepared)))
            draws.append(draw)
        draw.is_abandoned = False
        try:
            ready: list[asyncio.Future[Any]] = [draw.prepared, draw.answer]
            await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            draw.is_abandoned = True
            raise
        return self._awaited(call, digest, draw)

    async def _awaited(self, call: Call, digest: str, draw: _Draw) -> Answer:
        try:
            answer = await asyncio.shield(draw.answer)
        except asyncio.CancelledError:
            if self._is_closed and draw.answer.cancelled():
                raise _ended() from None
            # the client hung up: who asks again gets this answer
            draw.is_abandoned = True
            raise
        except CallRefused as error:
            self._forget(digest, draw, error)
            # the frames of the traceback hold the request and, in a cycle, the draw
            raise error.again() from error.with_traceback(None)
        except Exception as error:
            self._forget(digest, draw, error)
            raise
        self._note_last(call, answer)
        return answer

    def _forget(self, digest: str, draw: _Draw, error: Exception) -> None:
        """Free the number of a draw that failed."""
        draws = self._draws[digest]
        if draw in draws:  # several requests may wait for one draw
            draws.remove(draw)
            if not isinstance(error, CallRefused):
                self._num_failed[digest] += 1
        if not draws:
            del self._draws[digest]
        if isinstance(error, CallRefused):
            self._refused[digest, self._num_sampled_calls] = error.again()
            if len(self._refused) > _MAX_REFUSALS:
                del self._refused[next(iter(self._refused))]

    def _repeated(self, digest: str, is_retry: bool, key: str) -> _Draw | None:
        """The draw that a call repeats; None if it is the first try, or may be one that was never drawn."""
        draws = [draw for draw in self._draws[digest] if draw.key == key]
        if key:
            return next(iter(draws), None)
        abandoned = next((draw for draw in draws if draw.is_abandoned or self._is_without_room(draw)), None)
        if abandoned is not None or not is_retry:
            return abandoned
        if self._num_failed[digest]:
            self._num_failed[digest] -= 1
            return None
        # a client that still waits for its answer does not try again, and one that has continued it has received it
        lost = [draw for draw in draws if draw.is_delivered and not self._is_continued(draw)]
        return lost[0] if len(lost) == 1 else None

    def _is_continued(self, draw: _Draw) -> bool:
        return any(node.children for node in self._answered.get(draw.answer.result().id, ()))

    def _is_without_room(self, draw: _Draw) -> bool:
        """Return whether an answer has no completion, because there was no room; equal calls get the same."""
        answer = _result(draw)
        return answer is not None and answer.id not in self._answered

    async def num_tokens(self, call: Call) -> int:
        """Return the number of tokens before the completion of a call.

        Raises:
            CallRefused: If it cannot be served.
        """
        self._check_open()
        call = self._whole(call)
        prepared = await self.off_loop(call.size, self._prepared, call)
        if prepared.tokens is None:
            raise self._too_long(prepared)
        return prepared.num_tokens

    def delivered(self, answer: Answer, *, is_delivered: bool = True) -> None:
        """Note whether the client has received an answer; one that has not may ask again."""
        for draw in (draw for draws in self._draws.values() for draw in draws):
            if _result(draw) is answer:
                draw.is_delivered |= is_delivered
                draw.is_abandoned = not is_delivered

    def add_rewards(self, rewards: Mapping[str, float], answer_id: str = "", choice: int = 0) -> None:
        """Set rewards of the rollout, or of one of its calls.

        Args:
            rewards: Rewards by name; a later one of the same name replaces an earlier one, so that posting is
                idempotent.
            answer_id: Id of the answer to the call; empty for the whole rollout.
            choice: Index of the completion, for a call of several.

        Raises:
            CallRefused: If no call has that id.
        """
        self._check_open()
        if not answer_id:
            self._rewards.update(rewards)
            return
        nodes = self._answered.get(answer_id, [])
        if not 0 <= choice < len(nodes):
            name = f"choice {choice} of call {answer_id!r}"
            raise CallRefused(f"no {name} in this rollout", status=404, code="unknown_call", param="call")
        nodes[choice].rewards.update(rewards)

    def close(self) -> None:
        """Refuse further calls, and stop those that are being answered."""
        self._is_closed = True
        for session in self._agents.values():
            session.close()
        for draw in (draw for draws in self._draws.values() for draw in draws):
            if not draw.answer.done():
                draw.answer.cancel()
            elif not draw.answer.cancelled():
                draw.answer.exception()  # of a call whose client has gone: nobody else retrieves it

    @property
    def has_reward(self) -> bool:
        """Whether a reward of this agent was posted."""
        return bool(self._rewards) or any(node.rewards for node in self._tree.nodes)

    @property
    def without_reward(self) -> list[str]:
        """Names of the agents that have called the policy and have no reward, neither their own nor the rollout's."""
        if self._rewards:
            return []
        sessions = {"": self, **self._agents}
        return [name for name, session in sessions.items() if session._answered and not session.has_reward]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation of the call that was answered last, with its completion."""
        return self._messages

    @property
    def opened_thoughts(self) -> str:
        """Mark with which the text that was continued last opened thoughts; empty for a chat, whose thoughts are not in
        `messages`."""
        return self._opened_thoughts

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts of all agents so far, by their names: one without reward earns that of the whole rollout.

        Raises:
            ValueError: If no agent has called the policy.
        """
        sessions = [self._agents[name] for name in sorted(self._agents)]
        called = [session for session in (self, *sessions) if session._answered]
        for session in called:
            if not session.has_reward:
                session._rewards = dict(self._rewards)
        return [session.rollout() for session in called or [self]]

    def played(self) -> list[Rollout]:
        """Return the rollouts of all agents so far; none if no agent has called the policy."""
        try:
            return self.rollouts()
        except ValueError:
            return []

    def rollout(self) -> Rollout:
        """Return the rollout of one agent so far.

        Raises:
            ValueError: If the agent has not called the policy.
        """
        for draw in (draw for draws in self._draws.values() for draw in draws if draw.is_abandoned):
            if (answer := _result(draw)) is not None:
                for node in self._answered.pop(answer.id, ()):
                    self._tree.drop(node)
        if not self._answered:
            raise ValueError("the agent ended without a completion of the policy, so there is nothing to train on")
        rollout = self._tree.rollout(self._prompt, self._rewards, is_truncated=self._is_truncated)
        return replace(rollout, agent=self._agent, info={**rollout.info, **ignored_info(self.ignored)})

    def _check_open(self) -> None:
        if self._is_closed:
            raise _ended()

    def _whole(self, call: Call) -> Call:
        """The call with the conversation that it continues by an answer's id."""
        if not call.continues:
            return call
        if call.continues not in self._stored:
            raise CallRefused(
                f"previous_response_id {call.continues!r} is not the id of a stored answer of this rollout; pass an id "
                "that this rollout has answered with store=true, or the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        own = call.num_instructions
        messages = (*call.messages[:own], *self._stored[call.continues], *call.messages[own:])
        return replace(call, messages=messages, continues="", size=max(call.size, SMALL + 1))

    async def _answer(self, call: Call, digest: str, draw: int, is_prepared: asyncio.Future[None]) -> Answer:
        try:
            prepared = await self.off_loop(call.size, self._prepared, call)
        finally:
            is_prepared.set_result(None)
        parent = prepared.parent
        kept = 0 if parent is None else parent.num_tokens
        sampling = self._sampling(call, prepared)
        answer_id = f"rl-{_short(digest, str(draw))}"
        if sampling is None or prepared.tokens is None:
            self._is_truncated = True
            choice = Choice("", "", (), "length", _NOTHING)
            return Answer(answer_id, int(time.time()), (choice,) * call.num_choices, prepared.num_tokens, kept)
        self._count(call.num_choices)
        tokens = prepared.tokens
        completions = await self._sampled(tokens, sampling, call.num_choices)
        size = max(call.size, sum(len(completion.token_ids) for completion in completions))
        made = await self.off_loop(size, self._made, call, prepared, answer_id, completions)
        for _, node in made:
            self._tree.add(node)
        choices, nodes = [choice for choice, _ in made], [node for _, node in made]
        self._answered[answer_id] = nodes
        return Answer(answer_id, int(time.time()), tuple(choices), len(tokens), kept)

    def _made(
        self, call: Call, prepared: _Prepared, answer_id: str, completions: Sequence[Completion]
    ) -> list[tuple[Choice, Node]]:
        """Each completion as an answer, and as a node of the tree."""
        parent, tokens = prepared.parent, prepared.tokens
        assert tokens is not None
        opened = opened_by(self._client.shown(tokens[-_PROMPT_END:]))
        said = call.messages[prepared.num_known :]
        if call.text is not None:
            said = ({"role": "user", "content": call.text[prepared.num_known :]},)
        made = []
        for number, completion in enumerate(completions):
            choice, message = self._read(call, completion, f"{answer_id}/{number}", opened)
            node = Node(
                parent=parent,
                context=tokens[0 if parent is None else parent.num_tokens :],
                completion=completion,
                message=message,
                text=self._client.read(completion.token_ids, ()).text,
                key=_short(answer_id, str(number)),
                has_invalid_call=choice.has_invalid_call,
                shown="" if call.text is None else self._client.shown(np.concatenate([tokens, completion.token_ids])),
                said=said,
                tools=call.tools,
                digests=tuple(conversation_digests(call, message)[-len(said) - 1 :]),
            )
            made.append((choice, node))
        return made

    async def _sampled(self, tokens: np.ndarray, sampling: SamplingParams, num_choices: int) -> list[Completion]:
        """Completions of the first draws that no equal call has; those of a call that fails are free again."""
        # calls that differ only in what the policy does not see ask for the same draws
        drawn = self._drawn[hashlib.blake2b(tokens.data, digest_size=16).digest(), sampling]
        own: list[int] = []
        for _ in range(num_choices):
            own.append(_first_free(drawn))
            drawn.add(own[-1])
        try:
            first, told = self._first_draw, {"agent": self._agent} if self._agent else {}
            return await asyncio.gather(
                *[self._client.generate(tokens, sampling, draw=first + draw, **told) for draw in own]
            )
        except BaseException:
            drawn.difference_update(own)
            raise

    def _continued(self, call: Call) -> tuple[Node | None, int]:
        """The branch that a call continues, and how many of its messages, or characters of its text, the branch has."""
        if call.text is None:
            return self._tree.continued_by(call.messages, call.tools)
        begun = [
            (len(node.shown), node) for node in self._tree.nodes if node.shown and call.text.startswith(node.shown)
        ]
        length, node = max(begun, key=lambda each: each[0], default=(0, None))
        return node, length

    def _prepared(self, call: Call) -> _Prepared:
        """Render and tokenise a call. Most that cannot have room are found by their size, before that."""
        num_characters = _num_characters(call)
        num_tokens = math.ceil(num_characters / self._client.characters_per_token)
        if num_tokens > self._limits.max_tokens:
            return _Prepared(num_tokens)
        continued, num_known = self._continued(call)
        tokens, parent = self._tokens(call, continued, num_known)
        return _Prepared(len(tokens), tokens, parent, 0 if parent is None else num_known)

    def _tokens(self, call: Call, parent: Node | None, num_known: int) -> tuple[np.ndarray, Node | None]:
        """The tokens to continue, and the completion that they continue; None if they begin a branch."""
        before = _NO_TOKENS if parent is None else parent.tokens
        if call.text is not None:
            return np.concatenate([before, self._client.encoded(call.text[num_known:])]), parent
        if parent is not None and not self._splits:
            said = call.messages[num_known:]
            try:
                between = self._client.continuation(parent.message, said, parent.completion.token_ids)
            except (ValueError, TemplateError):
                # the template does not render these messages behind a turn; it may in a whole conversation
                return self._rendered(call, _NO_TOKENS), None
            return np.concatenate([before, between]), parent
        tokens = self._rendered(call, before)
        keeps = parent is not None and np.array_equal(tokens[: len(before)], before)
        return tokens, parent if keeps else None

    def _rendered(self, call: Call, before: np.ndarray) -> np.ndarray:
        try:
            return self._client.rendered(call.messages, before, call.tools)
        except TemplateError as error:
            raise CallRefused(
                f"the chat template of the policy does not render this conversation: {error}; check the order and the "
                "roles of its messages",
                param="messages",
            ) from error

    def _sampling(self, call: Call, prepared: _Prepared) -> SamplingParams | None:
        """How the completion is drawn; None if there is no room for one."""
        room = self._limits.max_tokens - prepared.num_tokens
        if room < 1:
            if not self._num_sampled_calls:
                raise self._too_long(prepared)
            return None
        configured = self._client.sampling
        wanted = configured.max_new_tokens if call.max_new_tokens is None else call.max_new_tokens
        return replace(
            configured,
            max_new_tokens=min(room, configured.max_new_tokens, wanted),
            stop_strings=tuple(dict.fromkeys((*configured.stop_strings, *call.stop_strings))),
        )

    def _too_long(self, prepared: _Prepared) -> CallRefused:
        least = "" if prepared.tokens is not None else "at least "
        return CallRefused(
            f"the conversation has {least}{prepared.num_tokens} tokens; the maximum is {self._limits.max_tokens} "
            "(policy.max_total_sequence_length), with what is sampled",
            code="context_length_exceeded",
            param="messages",
        )

    def _count(self, num_completions: int) -> None:
        if self._num_sampled_calls + num_completions > self._limits.max_calls:
            self._is_truncated = True
            raise CallRefused(
                f"this rollout has had its {self._limits.max_calls} completions (agent.max_calls)",
                status=403,
                code="rollout_call_limit",
            )
        self._num_sampled_calls += num_completions

    def _note_last(self, call: Call, answer: Answer) -> None:
        nodes = self._answered.get(answer.id)
        if call.is_stored:
            self._stored[answer.id] = (
                *call.messages[call.num_instructions :],
                nodes[0].message if nodes else {"role": "assistant", "content": ""},
            )
        if nodes:
            asked = call.messages if call.text is None else ({"role": "user", "content": call.text},)
            self._messages = (*asked, nodes[0].message)
            self._opened_thoughts = "" if call.text is None else opened_by(call.text)

    def _read(self, call: Call, completion: Completion, place: str, opened: str) -> tuple[Choice, Message]:
        """The completion as an answer, and as chat templates take it.

        Args:
            call: Call that it answers.
            completion: Sampled tokens.
            place: Id of the completion in the rollout.
            opened: Mark with which the prompt opened thoughts; empty if it did not.
        """
        pieces = tuple(self._client.pieces(completion.token_ids)) if call.wants_logprobs else ()
        reads_calls = call.text is None and call.reads_calls
        reply = self._client.read(completion.token_ids, call.tools if reads_calls else ())
        if call.text is not None:
            text, stop = _before_stop(reply.text, call, completion)
            return Choice(text, "", (), _reason(completion, ()), completion, pieces, stop), reply.message
        # a call that cannot be read stays text, as from any other server
        readable = [(each, made) for made, each in enumerate(reply.tool_calls) if not each.error]
        calls = tuple(replace(each, id=_short(place, str(made))[:9]) for each, made in readable)
        message = {**reply.message, "content": reply.message.get("content") or ""}
        written = message.pop("tool_calls", ())
        stop = ""
        if calls:
            message["tool_calls"] = [
                {**written[made], "id": call.id} for call, (_, made) in zip(calls, readable, strict=True)
            ]
        else:
            message["content"], stop = _before_stop(reply.text, call, completion)
        thoughts, message["content"] = _split_thoughts(message["content"], opened, has_calls=bool(calls))
        reason, is_invalid = _reason(completion, calls), reply.has_invalid_call
        choice = Choice(message["content"], thoughts, calls, reason, completion, pieces, stop, is_invalid)
        return choice, message


_NO_TOKENS = np.zeros(0, np.int32)
_PROMPT_END = 32
"""Number of tokens at the end of a prompt that are searched for a mark of thoughts."""
_NOTHING = Completion(_NO_TOKENS, np.zeros(0, np.float32), "length", ())


def _reason(completion: Completion, calls: Sequence[ToolCall]) -> FinishReason:
    if completion.stop_reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def _before_stop(text: str, call: Call, completion: Completion) -> tuple[str, str]:
    """The text before the stop string of the call that ended it, as servers of language models answer, and that string;
    the whole text and an empty string if none did."""
    found = [(text.find(stop), stop) for stop in call.stop_strings if stop in text]
    if not found or completion.stop_reason != "stop":
        return text, ""
    end, stop = min(found, key=lambda each: each[0])
    return text[:end], stop


def _split_thoughts(text: str, opened: str, *, has_calls: bool) -> tuple[str, str]:
    """The thoughts that a turn begins with, or that its prompt has opened, and the rest. Thoughts that the prompt
    opened and a call ended are part of the rest, as for the parsers of calls."""
    begin = next((mark for mark in THOUGHTS if text.lstrip().startswith(mark)), opened)
    if not begin or (has_calls and THOUGHTS[begin] not in text):
        return "", text
    thoughts, _, rest = text.lstrip().removeprefix(begin).partition(THOUGHTS[begin])
    return thoughts.strip(), rest.lstrip("\n")


def _num_characters(call: Call) -> int:
    """A number of characters that every chat template shows: it may leave out tools, parts of the policy's turns, and
    spaces around the others."""
    if call.text is not None:
        return len(call.text)
    others = (message["content"] for message in call.messages if message["role"] != "assistant")
    return sum(len(str(content).strip()) for content in others)


def _result(draw: _Draw) -> Answer | None:
    """The answer of a draw; None before it is there, and if it failed."""
    is_done = draw.answer.done() and not draw.answer.cancelled() and draw.answer.exception() is None
    return draw.answer.result() if is_done else None


def _first_free(taken: set[int]) -> int:
    """The smallest number from 0 that is not taken."""
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _ended() -> CallRefused:
    return CallRefused("this rollout has ended", status=410, code="rollout_ended")


def _digest_of(call: Call) -> str:
    """The same for equal calls, streamed or not."""
    asked: list[Any] = [call.messages, call.text, call.tools, call.reads_calls, call.max_new_tokens]
    asked += [call.stop_strings, call.num_choices, call.wants_logprobs]
    return _short(json.dumps(asked, sort_keys=True, default=str))


def _short(*parts: str) -> str:
    """16 hexadecimal digits that are the same for the same strings."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
