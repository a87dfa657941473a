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
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from rl_algos.agents.calls import CallRefused, FinishReason, ModelAnswer, ModelCall, ModelChoice
from rl_algos.agents.tree import CallTree, Node, digests_of
from rl_algos.images.image_tokens import texts_of
from rl_algos.rollouts.config import StructuredOutput
from rl_algos.rollouts.training.metrics import ignored_info
from rl_core.errors import DataError
from rl_core.images import image_digests
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout
from rl_core.rollouts.thoughts import PROMPT_END, THOUGHTS, opened_by

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

_NO_TOKENS = np.zeros(0, np.int32)
_NO_COMPLETION = Completion(_NO_TOKENS, np.zeros(0, np.float32), "length", ())


@dataclass
class _Prepared:
    """A call as tokens.

    Args:
        num_tokens: Number of tokens before the completion; a lower bound if the call cannot have room for one.
        tokens: int32 `[tokens]`; None if the call cannot have room.
        parent: The completion that they continue; None if they begin a branch.
        num_known: Number of messages, or of characters of its text, that the parent's branch has.
        grammar: Grammar of the form that the call asks for; empty for none.
    """

    num_tokens: int
    tokens: np.ndarray | None = None
    parent: Node | None = None
    num_known: int = 0
    grammar: str = ""


@dataclass
class _Draw:
    """The answer to one of several equal calls.

    Args:
        number: Number of the call among them.
        key: The client's key of the call; empty if it gave none.
        prepared: Done when the call is tokenised, or has failed.
        answer: The answer.
        is_delivered: True if it was sent.
        is_abandoned: True if the client hung up before.
    """

    number: int
    key: str
    prepared: asyncio.Future[None]
    answer: asyncio.Task[ModelAnswer]
    is_delivered: bool = False
    is_abandoned: bool = False


class AgentSession:
    """Answers the calls of one rollout. It may answer several at once.

    Equal calls are told apart by their number: the seed of a completion follows from the rollout's seed, the tokens
    before it and the number of earlier equal calls, so calls that run in parallel are drawn in the same way whichever
    comes first, and a rollout that is repeated after a crash finds the completions that it had. A call that is repeated
    because its answer did not arrive gets that answer; if it may be the answer to another equal call, it is drawn anew.

    Args:
        prompt: The prompt of the rollout.
        client: The policy.
        max_tokens: Maximum number of tokens of a conversation, including sampled ones.
        max_calls: Maximum number of completions that are sampled.
        splits: True to render every conversation anew, as a chat server does, which cuts the rollout where the chat
            template rewrites earlier turns; False to continue from the tokens as they were sampled.
        agent: Name of the agent whose calls these are, if the program has several; empty for the only one.
        structured_output: Treatment of calls that ask for a form of the answer.
        answer_ids: Beginning of the ids of its answers, for answers of several sessions at one address.
    """

    def __init__(
        self,
        prompt: Prompt,
        client: GenerationClient,
        max_tokens: int,
        max_calls: int = 256,
        *,
        splits: bool = False,
        agent: str = "",
        structured_output: StructuredOutput = "refuse",
        answer_ids: str = "",
    ) -> None:
        # The id is new, because an environment may still know the ids of a rollout worker that died.
        self.id = f"{prompt.id}/{uuid.uuid4().hex}"
        self.prompt = prompt
        self._client = client
        self._max_tokens, self._max_calls = max_tokens, max_calls
        self._splits = splits
        self._agent = agent
        self._structured_output = structured_output
        self._answer_ids = answer_ids
        # Equal calls of two agents are separate draws, whichever agent calls first.
        self._first_draw = int(_short(agent)[:7], 16) << 32 if agent else 0
        self._agents: dict[str, AgentSession] = {}
        self._tree = CallTree()
        self._answered: dict[str, list[Node]] = {}
        self._stored: dict[str, tuple[Message, ...]] = {}
        self._draws: dict[str, list[_Draw]] = defaultdict(list)
        self._num_failed: Counter[str] = Counter()
        self._refused: dict[tuple[str, int], CallRefused] = {}
        # One request of a rollout at a time is read and tokenised. However many an agent sends, and whether it waits
        # for the answers or hangs up, they take the memory of one request and one thread. The jobs are work in threads
        # that has not ended; it continues after its client has hung up, and the next request waits for it.
        self._admission = asyncio.Lock()
        self._jobs: set[asyncio.Future[Any]] = set()
        self._drawn: dict[tuple[bytes, tuple[str, ...], SamplingParams], set[int]] = defaultdict(set)
        self._rewards: dict[str, float] = {}
        self._num_sampled_calls = 0
        self._is_truncated = False
        self._is_closed = False
        # The conversation of the call that was answered last, with its completion.
        self.messages: tuple[Message, ...] = ()
        # The mark that opened thoughts in the text that was continued last; empty for a chat, because `messages` does
        # not have its thoughts.
        self.opened_thoughts = ""
        self.ignored: set[str] = set()

    def of_agent(self, name: str) -> AgentSession:
        """Return the calls of one of several agents, which are a separate rollout; these for an empty name.

        Raises:
            CallRefused: If the rollout has ended.
        """
        if not name:
            return self
        self._check_open()
        if name not in self._agents:
            if len(self._agents) >= MAX_AGENTS:
                raise CallRefused(f"this rollout has {MAX_AGENTS} agents, the maximum", status=403, code="agent_limit")
            session = AgentSession(
                self.prompt,
                self._client,
                self._max_tokens,
                self._max_calls,
                splits=self._splits,
                agent=name,
                structured_output=self._structured_output,
            )
            session.ignored, session._admission, session._jobs = self.ignored, self._admission, self._jobs
            self._agents[name] = session
        return self._agents[name]

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Admit one request of the rollout to be received, read and tokenised in the context; others wait."""
        async with self._admission:
            if self._jobs:
                await asyncio.wait(self._jobs)
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
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.shield(job)
        finally:
            del job  # An error of the job would hold it, and with it the input, in a cycle.

    async def answer(self, call: ModelCall, *, is_retry: bool = False, key: str = "") -> ModelAnswer:
        """Answer a call.

        Args:
            call: Call of the agent, which may continue an earlier answer by its id.
            is_retry: True if the client reports that it has made the call before.
            key: Key that is equal for all tries of a call and for no other; empty if the client gives none.

        Raises:
            CallRefused: If it cannot be served.
        """
        self._check_open()
        return await (await self.begin(call, is_retry=is_retry, key=key))

    async def begin(
        self, call: ModelCall, *, is_retry: bool = False, key: str = ""
    ) -> Coroutine[Any, Any, ModelAnswer]:
        """Tokenise a call, and begin to answer it; see `answer`. Await the returned coroutine at once."""
        call = self._formed(self._whole(call))
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

    async def _awaited(self, call: ModelCall, digest: str, draw: _Draw) -> ModelAnswer:
        try:
            answer = await asyncio.shield(draw.answer)
        except asyncio.CancelledError:
            if self._is_closed and draw.answer.cancelled():
                raise _ended() from None
            # The client hung up. A client that asks again gets this answer.
            draw.is_abandoned = True
            raise
        except CallRefused as error:
            self._forget(digest, draw, error)
            # The frames of the traceback hold the request and, in a cycle, the draw.
            raise error.again() from error.with_traceback(None)
        except Exception as error:
            self._forget(digest, draw, error)
            raise
        nodes = self._answered.get(answer.id)
        if call.is_stored:
            turn = nodes[0].message if nodes else {"role": "assistant", "content": ""}
            self._stored[answer.id] = (*call.messages[call.num_instructions :], turn)
        if nodes:
            self.messages = (*call.asked, nodes[0].message)
            self.opened_thoughts = "" if call.text is None else opened_by(call.text)
        return answer

    def _forget(self, digest: str, draw: _Draw, error: Exception) -> None:
        """Free the number of a draw that failed."""
        draws = self._draws[digest]
        if draw in draws:  # Several requests may wait for one draw.
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
        """Return the draw that a call repeats; None if it is the first try, or may be one that was never drawn."""
        draws = [draw for draw in self._draws[digest] if draw.key == key]
        if key:
            return next(iter(draws), None)
        for draw in draws:
            # An answer that had no room has no completion; equal calls get the same.
            answer = _result(draw)
            if draw.is_abandoned or (answer is not None and answer.id not in self._answered):
                return draw
        if not is_retry:
            return None
        if self._num_failed[digest]:
            self._num_failed[digest] -= 1
            return None
        # A client that still waits for its answer does not try again, and one that has continued it has received it.
        lost = []
        for draw in draws:
            if draw.is_delivered:
                nodes = self._answered.get(draw.answer.result().id, ())
                if not any(node.children for node in nodes):
                    lost.append(draw)
        return lost[0] if len(lost) == 1 else None

    async def num_tokens(self, call: ModelCall) -> int:
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

    def delivered(self, answer: ModelAnswer, *, is_delivered: bool = True) -> None:
        """Note whether the client has received an answer; one that has not may ask again."""
        for draw in chain.from_iterable(self._draws.values()):
            if _result(draw) is answer:
                draw.is_delivered |= is_delivered
                draw.is_abandoned = not is_delivered

    def digest_after(self, answer_id: str) -> str:
        """Return the digest of the conversation up to an answer, as in `digests_of`; empty if there is none."""
        nodes = self._answered.get(answer_id)
        return nodes[0].digests[-1] if nodes else ""

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
        for draw in chain.from_iterable(self._draws.values()):
            if not draw.answer.done():
                draw.answer.cancel()
            elif not draw.answer.cancelled():
                draw.answer.exception()  # Nobody else retrieves the error of a call whose client has gone.

    @property
    def _has_reward(self) -> bool:
        return bool(self._rewards) or any(node.rewards for node in self._tree.nodes)

    @property
    def without_reward(self) -> list[str]:
        """Names of the agents that have called the policy and have no reward, neither their own nor the rollout's."""
        if self._rewards:
            return []
        sessions = {"": self, **self._agents}
        return [name for name, session in sessions.items() if session._answered and not session._has_reward]

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts of all agents so far, by their names. An agent without reward earns the whole rollout's.

        Raises:
            ValueError: If no agent has called the policy.
        """
        sessions = [self._agents[name] for name in sorted(self._agents)]
        called = [session for session in (self, *sessions) if session._answered]
        for session in called:
            if not session._has_reward:
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
        for draw in chain.from_iterable(self._draws.values()):
            if draw.is_abandoned and (answer := _result(draw)) is not None:
                for node in self._answered.pop(answer.id, ()):
                    self._tree.drop(node)
        if not self._answered:
            raise ValueError("the agent ended without a completion of the policy, so there is nothing to train on")
        rollout = self._tree.rollout(self.prompt, self._rewards, is_truncated=self._is_truncated)
        return replace(rollout, agent=self._agent, info={**rollout.info, **ignored_info(self.ignored)})

    def _check_open(self) -> None:
        if self._is_closed:
            raise _ended()

    def _whole(self, call: ModelCall) -> ModelCall:
        """Return the call with the conversation that it continues by an answer's id."""
        if not call.continues:
            return call
        if call.continues not in self._stored:
            problem = f"previous_response_id {call.continues!r} is not the id of a stored answer of this rollout"
            remedy = "pass an id that this rollout has answered with store=true, or the whole conversation as input"
            code = "previous_response_not_found"
            raise CallRefused(f"{problem}; {remedy}", code=code, param="previous_response_id")
        own = call.num_instructions
        messages = (*call.messages[:own], *self._stored[call.continues], *call.messages[own:])
        return replace(call, messages=messages, continues="", size=max(call.size, SMALL + 1))

    def _formed(self, call: ModelCall) -> ModelCall:
        """Return the call with the form that its answer will have; without a form, the fields that ask for one are
        among the ignored.

        Raises:
            CallRefused: If the text of the answer cannot have the form.
        """
        if call.form is None or self._structured_output == "constrain":
            return call
        if call.form.schema and self._structured_output == "refuse":
            param = call.form_fields[0]
            free = "completions are sampled freely; parse and check them in the agent"
            remedy = "set structured_output of the algorithm to constrain, or to ignore"
            raise CallRefused(f"{param} is not offered: {free}, or {remedy}", param=param)
        return replace(call, form=None, ignored=(*call.ignored, *call.form_fields))

    async def _answer(self, call: ModelCall, digest: str, draw: int, is_prepared: asyncio.Future[None]) -> ModelAnswer:
        try:
            prepared = await self.off_loop(call.size, self._prepared, call)
        finally:
            is_prepared.set_result(None)
        parent = prepared.parent
        kept = 0 if parent is None else parent.num_tokens
        if call.form is not None and not prepared.grammar:
            self.ignored.update(call.form_fields)
        sampling = self._sampling(call, prepared)
        answer_id = f"rl-{self._answer_ids}{_short(digest, str(draw))}"
        if sampling is None or prepared.tokens is None:
            self._is_truncated = True
            choice = ModelChoice("", "", (), "length", _NO_COMPLETION)
            return ModelAnswer(answer_id, int(time.time()), (choice,) * call.num_choices, prepared.num_tokens, kept)
        if self._num_sampled_calls + call.num_choices > self._max_calls:
            self._is_truncated = True
            problem = f"this rollout has had its {self._max_calls} completions (agent.max_calls)"
            raise CallRefused(problem, status=403, code="rollout_call_limit")
        self._num_sampled_calls += call.num_choices
        images = image_digests(call.messages)
        completions = await self._sampled(prepared.tokens, images, sampling, call.num_choices)
        size = max(call.size, sum(len(completion.token_ids) for completion in completions))
        made = await self.off_loop(size, self._made, call, prepared, answer_id, completions)
        for _, node in made:
            self._tree.add(node)
        self._answered[answer_id] = [node for _, node in made]
        choices = tuple(choice for choice, _ in made)
        return ModelAnswer(answer_id, int(time.time()), choices, len(prepared.tokens), kept)

    def _made(
        self, call: ModelCall, prepared: _Prepared, answer_id: str, completions: Sequence[Completion]
    ) -> list[tuple[ModelChoice, Node]]:
        """Return each completion as an answer, and as a node of the tree."""
        parent, tokens = prepared.parent, prepared.tokens
        assert tokens is not None
        opened = opened_by(self._client.shown(tokens[-PROMPT_END:]))
        given = call.messages[prepared.num_known :]
        if call.text is not None:
            given = ({"role": "user", "content": call.text[prepared.num_known :]},)
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
                given=given,
                tools=call.tools,
                digests=tuple(digests_of([*call.asked, message], call.tools))[-len(given) - 1 :],
            )
            made.append((choice, node))
        return made

    async def _sampled(
        self, tokens: np.ndarray, images: tuple[str, ...], sampling: SamplingParams, num_choices: int
    ) -> list[Completion]:
        """Return completions of the first draws that no equal call has. The draws of a failed call are free again."""
        # Calls that differ only in fields that the policy does not see ask for the same draws.
        drawn = self._drawn[hashlib.blake2b(tokens.data, digest_size=16).digest(), images, sampling]
        own: list[int] = []
        for _ in range(num_choices):
            own.append(_first_free(drawn))
            drawn.add(own[-1])
        try:
            first = self._first_draw
            told: dict[str, Any] = {"agent": self._agent} if self._agent else {}
            told |= {"images": images} if images else {}
            return await asyncio.gather(
                *[self._client.generate(tokens, sampling, draw=first + draw, **told) for draw in own]
            )
        except BaseException:
            drawn.difference_update(own)
            raise

    def _prepared(self, call: ModelCall) -> _Prepared:
        """Render and tokenise a call. Most calls without room for a completion are found by their size, before that."""
        # Count only characters that every chat template shows: it may leave out tools, parts of the policy's turns, and
        # spaces around the other messages.
        others = ["".join(texts_of(each)).strip() for each in call.messages if each["role"] != "assistant"]
        num_characters = sum(map(len, others)) if call.text is None else len(call.text)
        num_tokens = math.ceil(num_characters / self._client.characters_per_token)
        if num_tokens > self._max_tokens:
            return _Prepared(num_tokens)
        if call.text is None:
            parent, num_known = self._tree.continued_by(call.messages, call.tools)
        else:
            begun = [node for node in self._tree.nodes if node.shown and call.text.startswith(node.shown)]
            parent = max(begun, key=lambda node: len(node.shown), default=None)
            num_known = 0 if parent is None else len(parent.shown)
        tokens, parent = self._tokens(call, parent, num_known)
        grammar = ""
        if call.form is not None:
            try:
                grammar = self._client.grammar(call.form, tokens)
            except ValueError as error:
                raise CallRefused(f"{call.form_fields[0]}: {error}", param=call.form_fields[0]) from error
        return _Prepared(len(tokens), tokens, parent, 0 if parent is None else num_known, grammar)

    def _tokens(self, call: ModelCall, parent: Node | None, num_known: int) -> tuple[np.ndarray, Node | None]:
        """Return the tokens to continue, and the completion that they continue; None if they begin a branch."""
        before = _NO_TOKENS if parent is None else parent.tokens
        if call.text is not None:
            return np.concatenate([before, self._client.encoded(call.text[num_known:])]), parent
        if parent is not None and not self._splits:
            given = call.messages[num_known:]
            try:
                between = self._client.continuation(parent.message, given, parent.completion.token_ids)
            except (ValueError, TemplateError):
                # The template does not render these messages after a turn; it may in a whole conversation.
                return self._rendered(call, _NO_TOKENS), None
            return np.concatenate([before, between]), parent
        tokens = self._rendered(call, before)
        keeps = parent is not None and np.array_equal(tokens[: len(before)], before)
        return tokens, parent if keeps else None

    def _rendered(self, call: ModelCall, before: np.ndarray) -> np.ndarray:
        try:
            return self._client.rendered(call.messages, before, call.tools)
        except TemplateError as error:
            problem = f"the chat template of the policy does not render this conversation: {error}"
            remedy = "check the order and the roles of its messages"
            raise CallRefused(f"{problem}; {remedy}", param="messages") from error
        except DataError as error:
            raise CallRefused(str(error), param="messages") from error

    def _sampling(self, call: ModelCall, prepared: _Prepared) -> SamplingParams | None:
        """Return how the completion is drawn; None if there is no room for one."""
        room = self._max_tokens - prepared.num_tokens
        if room < 1:
            if not self._num_sampled_calls:
                raise self._too_long(prepared)
            return None
        configured = self._client.sampling
        wanted = configured.max_new_tokens if call.max_new_tokens is None else call.max_new_tokens
        stop_strings = tuple(dict.fromkeys((*configured.stop_strings, *call.stop_strings)))
        num_new = min(room, configured.max_new_tokens, wanted)
        grammar = prepared.grammar
        return replace(configured, max_new_tokens=num_new, stop_strings=stop_strings, grammar=grammar)

    def _too_long(self, prepared: _Prepared) -> CallRefused:
        least = "" if prepared.tokens is not None else "at least "
        maximum = f"the maximum is {self._max_tokens} (policy.max_total_sequence_length), with what is sampled"
        problem = f"the conversation has {least}{prepared.num_tokens} tokens; {maximum}"
        return CallRefused(problem, code="context_length_exceeded", param="messages")

    def _read(self, call: ModelCall, completion: Completion, place: str, opened: str) -> tuple[ModelChoice, Message]:
        """Return the completion as an answer, and as chat templates take it.

        Args:
            call: Call that it answers.
            completion: Sampled tokens.
            place: Id of the completion in the rollout.
            opened: Mark that opened thoughts in the prompt; empty for none.
        """
        pieces = tuple(self._client.pieces(completion.token_ids)) if call.wants_logprobs else ()
        reads_calls = call.text is None and call.reads_calls
        reply = self._client.read(completion.token_ids, call.tools if reads_calls else ())
        if call.text is not None:
            text, stop = _before_stop(reply.text, call, completion)
            return ModelChoice(text, "", (), _reason(completion, ()), completion, pieces, stop), reply.message
        # A call that cannot be read stays text, as from any other server.
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
        text = message["content"]
        thoughts = ""
        # A turn may begin with thoughts, or continue thoughts that its prompt opened. Thoughts that the prompt opened
        # and a call ended stay in the text, as for the parsers of calls.
        begin = next((mark for mark in THOUGHTS if text.lstrip().startswith(mark)), opened)
        if begin and (not calls or THOUGHTS[begin] in text):
            thoughts, _, rest = text.lstrip().removeprefix(begin).partition(THOUGHTS[begin])
            thoughts, message["content"] = thoughts.strip(), rest.lstrip("\n")
        reason, is_invalid = _reason(completion, calls), reply.has_invalid_call
        return ModelChoice(message["content"], thoughts, calls, reason, completion, pieces, stop, is_invalid), message


def _reason(completion: Completion, calls: Sequence[ToolCall]) -> FinishReason:
    if completion.stop_reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def _before_stop(text: str, call: ModelCall, completion: Completion) -> tuple[str, str]:
    """Return the text before the call's stop string that ended it, as servers of language models answer, and that
    string; the whole text and an empty string if none did."""
    found = [(text.find(stop), stop) for stop in call.stop_strings if stop in text]
    if not found or completion.stop_reason != "stop":
        return text, ""
    end, stop = min(found, key=lambda each: each[0])
    return text[:end], stop


def _result(draw: _Draw) -> ModelAnswer | None:
    """Return the answer of a draw; None before it is there, and if it failed."""
    is_done = draw.answer.done() and not draw.answer.cancelled() and draw.answer.exception() is None
    return draw.answer.result() if is_done else None


def _first_free(taken: set[int]) -> int:
    """Return the smallest number from 0 that is not taken."""
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _ended() -> CallRefused:
    return CallRefused("this rollout has ended", status=410, code="rollout_ended")


def _digest_of(call: ModelCall) -> str:
    """Return a digest that is the same for equal calls, streamed or not."""
    asked: list[Any] = [call.messages, call.text, call.tools, call.reads_calls, call.max_new_tokens]
    asked += [call.stop_strings, call.num_choices, call.wants_logprobs]
    if call.form is not None:
        asked.append(astuple(call.form))
    return _short(json.dumps(asked, sort_keys=True, default=str))


def _short(*parts: str) -> str:
    """Return 16 hexadecimal digits that are the same for the same strings."""
    joined = "\0".join(parts)
    return hashlib.blake2b(joined.encode(), digest_size=8).hexdigest()
