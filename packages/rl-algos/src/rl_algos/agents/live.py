"""The rollout program of live learning: users begin conversations, and their rewards come later."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from rl_algos.agents.calls import CallRefused, ModelAnswer, ModelCall
from rl_algos.agents.conversation_store import ConversationStore, KeptCall, KeptConversation
from rl_algos.agents.endpoint import DIALECTS, parsed
from rl_algos.agents.live_endpoint import LiveEndpoint, LiveKeys, OpenConversation, too_many_open
from rl_algos.agents.session import AgentSession
from rl_algos.agents.tree import digests_of
from rl_algos.connections import collect_rarely
from rl_algos.rollouts.config import AgentConfig, StructuredOutput
from rl_algos.rollouts.driver.live_source import NO_REWARD, NO_TEXT, SERVED, TRIED, USERS
from rl_algos.rollouts.worker.client import PlayClient, PlayServices
from rl_algos.rollouts.worker.program import MultiTurnProgram
from rl_core.errors import RequestRefused
from rl_core.rollouts.generation import GenerationRequest, Generator, SamplingParams
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.program import GenerationClient
from rl_core.rollouts.rollout import Completion, Prompt, Rollout

_log = logging.getLogger(__name__)

FOLDER = "live"
"""Folder of the run directory with conversations, keys and the address."""

MAX_IN_MEMORY = 512
"""Maximum number of conversations in memory; others are read from the store when they continue."""

_POLL_S = 0.25
"""Seconds between questions to the store, which other processes change too."""

_ANSWER = re.compile(r"rl-([0-9a-f]{16})[0-9a-f]{16}")
_MAX_BRACKETS = 2**24
_NO_TOKENS = np.zeros(0, np.int32)

_REFUSED = {
    "unknown": (404, "unknown_conversation", "no kept conversation has this answer or this name"),
    "rewarded": (409, "already_rewarded", "this conversation has been rewarded, with other rewards"),
    "expired": (410, "deadline_passed", "the deadline for rewards of this conversation has passed"),
    "left_out": (409, "left_out", "this conversation has been left out of training"),
}


class LiveProgram:
    """Serves users, keeps their conversations, and gives the ones that have ended to training.

    A rollout of the dataset `users` is a place in the order in which conversations ended: it waits until there is a
    conversation for it, and is made by answering the calls of that conversation again with the completions that were
    sampled then. So a place gives the same rollout in every process, whatever ended in between. Rollouts of other
    datasets, such as those that prove a weight version, are single turns with their environment.

    Args:
        config: Settings of the agent.
        max_tokens: Maximum number of tokens of a conversation.
        sampling: How completions for users are drawn.
        group_size: Number of conversations of a place.
        split: True to render every conversation anew.
        takes_images: True if the policy reads images.
        structured_output: Treatment of calls that ask for a form of the answer.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        max_tokens: int,
        sampling: SamplingParams,
        group_size: int,
        split: bool = False,
        takes_images: bool = False,
        structured_output: StructuredOutput = "refuse",
    ) -> None:
        assert config.live is not None, "users are served with agent.live only"
        self._config, self._limits = config, config.live
        self._max_tokens, self._sampling, self._size = max_tokens, sampling, group_size
        self._splits, self._takes_images, self._structured_output = split, takes_images, structured_output
        self._single_turn = MultiTurnProgram(
            max_turns=1, max_tokens=max_tokens, split=split, structured_output=structured_output
        )
        self._in_memory: OrderedDict[str, OpenConversation] = OrderedDict()
        self._finding = asyncio.Lock()
        self._changed = asyncio.Event()
        self._num_played: Counter[int] = Counter()
        self._num_waiting = self._num_left_out = 0
        self._services: PlayServices | None = None
        self._tidying: asyncio.Task[None] | None = None

    def serve_with(self, services: PlayServices) -> None:
        """Use the engine and the tokenizer of the rollout worker; called once, before `start`."""
        self._services = services

    async def start(self, logs: Path) -> None:
        """Open the conversations of the run, and serve users.

        Args:
            logs: Folder of the run's logs.
        """
        folder = logs.parent / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._store = ConversationStore(folder / "conversations.sqlite")
        await self._store.open()
        keys = LiveKeys.of_run(folder / "keys.json")
        self._endpoint = LiveEndpoint(self, keys, self._config, self._max_tokens, takes_images=self._takes_images)
        await self._endpoint.start()
        self._endpoint.describe(folder / "endpoint.json")
        self._tidying = asyncio.create_task(self._tidy())
        collect_rarely()
        _log.info("users are served at %s; the keys are in %s", self._endpoint.url, folder / "endpoint.json")

    async def close(self) -> None:
        """Stop serving."""
        if self._tidying is not None:
            self._tidying.cancel()
            await self._endpoint.close()
            await self._store.close()

    @property
    def num_untaken(self) -> int:
        """Number of places that wait for conversations; see `rl_core.rollouts.program.OfferingProgram`."""
        return self._num_waiting

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout | Sequence[Rollout]:
        """Return the rollout of a place, or a single turn for a prompt of a dataset."""
        if prompt.dataset != USERS:
            return await self._single_turn.run(prompt, client)
        place = int(prompt.id.rpartition("/")[2])
        member = self._num_played[place] % self._size
        self._num_played[place] += 1
        kept = await self._ended(place)
        chosen = kept[min(member, len(kept) - 1)]
        if chosen.outcome != "rewarded":
            return Rollout.failed(prompt, NO_REWARD)
        calls = await self._store.calls(chosen.id)
        if not calls:
            return Rollout.failed(prompt, NO_TEXT)
        session = (await self._replayed(chosen.id, calls)).session
        session.add_rewards(chosen.rewards)
        rollout = session.rollout()
        session.close()
        return replace(rollout, prompt_id=prompt.id)

    async def set_verdict(self, version: int, verdict: str, score: float | None = None) -> None:
        """Note whether users are answered with a weight version; see `ConversationStore.set_verdict`."""
        await self._store.set_verdict(version, verdict, score)

    async def counts(self) -> Mapping[str, int]:
        """Return the number of conversations by their state; those that were not kept are of this process only."""
        found = await self._store.counts()
        return {**found, "left_out": found["left_out"] + self._num_left_out}

    async def folder(self) -> str:
        """Return the folder of live learning in the run directory."""
        return str(self._folder)

    async def conversation_of(self, call: ModelCall, name: str, task: str, *, is_kept: bool) -> OpenConversation:
        """See `LiveDesk`."""
        if not is_kept:
            self._num_left_out += 1
            if found := await self._found(call, name):
                await self._store.leave_out(found)
                self._in_memory.pop(found, None)
            return self.aside()
        async with self._finding:
            found = await self._found(call, name)
            if not found:
                if self._size > 1 and not task:
                    problem = f"this run compares {self._size} conversations of the same task with one another"
                    raise CallRefused(f"{problem}; name the task in the header X-RL-Task", param="X-RL-Task")
                if await self._store.num_open() >= self._limits.max_open:
                    raise too_many_open(self._limits)
                found = await self._store.add(name, task)
            opened = self._in_memory.get(found)
            # Another process may have answered calls of the conversation meanwhile.
            if opened is None or opened.num_calls != await self._store.num_calls(found):
                calls = await self._store.calls(found)
                opened = self._in_memory[found] = await self._replayed(found, calls)
            self._in_memory.move_to_end(found)
            if len(self._in_memory) > MAX_IN_MEMORY:
                self._in_memory.popitem(last=False)
        return opened

    def aside(self) -> OpenConversation:
        """See `LiveDesk`."""
        return self._opened(secrets.token_hex(8), {}, is_kept=False)

    async def keep(self, opened: OpenConversation, path: str, body: bytes, answer: ModelAnswer) -> None:
        """See `LiveDesk`. An answer without a completion is not kept: there is nothing to train on."""
        digest = opened.session.digest_after(answer.id)
        if not digest:
            return
        found = opened.completions()
        new = {digest: completion for digest, completion in found.items() if digest not in opened.stored}
        if await self._store.keep(opened.id, KeptCall(path, body, answer.id, digest, new)):
            opened.stored |= set(new)
            opened.num_calls = await self._store.num_calls(opened.id)

    async def reward(self, answer: str, name: str, rewards: Mapping[str, float]) -> bool:
        """See `LiveDesk`."""
        found = _ANSWER.fullmatch(answer)
        posted = "unknown"
        if name or found is not None:
            id = "" if found is None else found[1]
            posted = await self._store.reward(id, name, rewards, self._limits.deadline_s)
            self._in_memory.pop(id, None)
        if posted in _REFUSED:
            status, code, problem = _REFUSED[posted]
            raise CallRefused(problem, status=status, code=code, param="call")
        self._changed.set()
        return posted == "repeated"

    async def _found(self, call: ModelCall, name: str) -> str:
        """Return the id of the open conversation that a call belongs to; empty if there is none."""
        if name:
            return await self._store.find(name=name)
        if call.continues:
            found = _ANSWER.fullmatch(call.continues)
            kept = None if found is None else await self._store.conversation(found[1])
            return kept.id if kept is not None and kept.outcome == "open" else ""
        if call.text is not None:
            return ""
        digests = await asyncio.to_thread(lambda: list(digests_of(call.messages, call.tools)))
        return await self._store.find(digests=digests[:-1])

    def _opened(
        self, id: str, completions: Mapping[str, Completion], num_calls: int = 0, *, is_kept: bool = True
    ) -> OpenConversation:
        assert self._services is not None, "not started"
        engine = ServedVersions(self._services, self._store.verdict if self._limits.canary.enabled else None)
        prompt = Prompt(f"{USERS}/{id}", (), _NO_TOKENS, "", dataset=USERS)
        seed = int.from_bytes(hashlib.blake2b(id.encode(), digest_size=4).digest(), "big")
        services = replace(self._services, generator=cast("Generator", engine))
        client = PlayClient(services, prompt, self._sampling, seed, RolloutTurns(completions), {})
        session = AgentSession(
            prompt,
            client,
            self._max_tokens,
            self._config.max_calls,
            splits=self._splits,
            structured_output=self._structured_output,
            answer_ids=id,
        )
        return OpenConversation(
            id, session, lambda: client.turns.completions, num_calls, set(completions), is_kept=is_kept
        )

    async def _replayed(self, id: str, calls: Sequence[KeptCall]) -> OpenConversation:
        """Return a conversation after its calls, whose completions are not sampled again."""
        merged = {digest: completion for call in calls for digest, completion in call.completions.items()}
        opened = self._opened(id, merged, len(calls))
        for kept in calls:
            call = await asyncio.to_thread(_read, kept)
            answer = await (await opened.session.begin(call))
            opened.session.delivered(answer)
            if answer.id != kept.answer or len(opened.completions()) > len(merged):
                problem = "the calls of a conversation do not give the completions that they had"
                raise RequestRefused(f"{problem}; its tokenizer or the limits of the run have changed")
        return opened

    async def _ended(self, place: int) -> list[KeptConversation]:
        """Wait for the conversations of a place."""
        self._num_waiting += 1
        try:
            while not (found := await self._store.take(place, self._size)):
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()
            return found
        finally:
            self._num_waiting -= 1

    async def _tidy(self) -> None:
        while True:
            try:
                await self._store.tidy(self._limits.deadline_s, self._limits.retention_s, self._size)
            except Exception as error:  # noqa: BLE001 - users are served although the disk is full
                _log.warning("old conversations could not be removed: %s", error)
            await asyncio.sleep(min(5.0, self._limits.deadline_s / 4))


@dataclass(eq=False)
class ServedVersions:
    """The engine of the policy for users: they get no answer of a weight version that is tried or was taken back.

    Args:
        services: Parts of the rollout worker, with its engine and the version that it has.
        verdict: Returns the verdict about a version; None if every version is served.
    """

    services: PlayServices
    verdict: Callable[[int], Awaitable[str]] | None

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return a completion of a version that users are served, however long one is being tried."""
        while True:
            while not self.services.version or await self._of(self.services.version) != SERVED:
                await asyncio.sleep(_POLL_S)
            completion = await self.services.generator.generate(request)
            newest = max((span.version for span in completion.spans), default=self.services.version)
            while (verdict := await self._of(newest)) == TRIED:
                await asyncio.sleep(_POLL_S)
            if verdict == SERVED:
                return completion

    async def _of(self, version: int) -> str:
        return SERVED if self.verdict is None else await self.verdict(version)


def _read(kept: KeptCall) -> ModelCall:
    body = bytearray(kept.body)
    return replace(DIALECTS[kept.dialect].read(parsed(body, _MAX_BRACKETS)), size=len(body))
