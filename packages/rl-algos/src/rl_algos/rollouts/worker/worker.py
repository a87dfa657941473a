"""The process that runs rollouts next to a replica."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.conversations import Conversations, EnvironmentClient
from rl_algos.rollouts.worker.idle_time import IdleTime
from rl_algos.tokenizer import load_tokenizer
from rl_core import spans
from rl_core.data.batch import Batch
from rl_core.errors import GeneratorError, RequestRefused
from rl_core.model_config import TokenizerConfig
from rl_core.plugins import resolve
from rl_core.plugins.user_code import FromFile
from rl_core.profiling import ProfileOrder, ProfileReport
from rl_core.rollouts.delivery import Delivery, Taken, score_canary, take_over
from rl_core.rollouts.environment import Conversation, StepResult, TrainerState
from rl_core.rollouts.generation import GenerationRequest, Generator, SamplingParams
from rl_core.rollouts.group import RECORD, GroupReport, parts_of
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.pool import RolloutTask, RolloutTurns
from rl_core.rollouts.program import PreparedProgram, Reply, RolloutProgram
from rl_core.rollouts.record import write_records
from rl_core.rollouts.rollout import Completion, Message, Prompt, Rollout, has_routing
from rl_core.weights import Manifest

_log = logging.getLogger(__name__)

MOST_TOGETHER = 16
"""Most groups whose columns are joined in one answer, as a node that needs one of their rows fetches all of them."""

Group = tuple[Prompt, Sequence[Rollout]]
"""A prompt and its rollouts, in the order of their seeds; those of one play next to one another."""


@dataclasses.dataclass(frozen=True)
class RolloutWorkerSpec:
    """The parts of a rollout worker; sent to its process.

    Args:
        generator: `"package.module:Class"` of the generator.
        generator_args: Its arguments.
        program: `"package.module:Class"` of the rollout program, or a class in a file of the user's.
        program_args: Its keyword arguments.
        tokenizer, model_name: Settings of the tokenizer, and the model that has it by default.
        max_seconds: Timeout of a rollout in seconds; None for no limit.
        max_steps: Number of training steps of the run, which rewards may ask for; 1 outside training.
        logs: Folder of the run's logs.
    """

    generator: str
    generator_args: tuple[Any, ...]
    program: str | FromFile
    program_args: Mapping[str, Any]
    tokenizer: TokenizerConfig
    model_name: str
    max_seconds: float | None = None
    max_steps: int = 1
    logs: str = ""


class RolloutWorker:
    """Holds one replica and runs rollouts on it, so that no turn of a rollout passes through the driver.

    Args:
        spec: The parts to build.
        environments: Clients by environment name.
    """

    def __init__(self, spec: RolloutWorkerSpec, environments: Mapping[str, EnvironmentClient]) -> None:
        self._generator: Generator = resolve(spec.generator)(*spec.generator_args)
        program = resolve(spec.program) if isinstance(spec.program, str) else spec.program.load()
        self._program: RolloutProgram = program(**spec.program_args)
        self._logs = Path(spec.logs)
        self._max_seconds = spec.max_seconds
        self._max_steps = spec.max_steps
        self._chat = Chat(load_tokenizer(spec.tokenizer, spec.model_name), spec.tokenizer.tool_format)
        self._environments = dict(environments)
        self._finished: deque[tuple[int, asyncio.Task[Group]]] = deque()
        self._any_finished = asyncio.Event()
        self._under_way: set[asyncio.Task[Group]] = set()
        self._clients: dict[int, list[_Client]] = {}
        self._idle = IdleTime()
        self._rolling_out = spans.overlapping("rollouts", "rollouts")
        self._generating = spans.overlapping("generation", "generation")
        self._writing = spans.overlapping("recording", "recording")

    async def start(self) -> int:
        """Load the engine; returns its number of ranks."""
        await self._generator.start()
        if isinstance(self._program, PreparedProgram):
            await self._program.start(self._logs)
        return self._generator.num_ranks

    async def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        """Start groups, each with its own number; `finished` answers with them.

        Their first requests reach the engine together and in order, so that its batches do not depend on timing.
        """
        self._idle.begin()
        for number, task in tasks:
            clients = [
                _Client(self, task.prompt, task.sampling, seed, earlier)
                for seed, earlier in zip(task.seeds, task.turns or [RolloutTurns()] * len(task.seeds), strict=True)
            ]
            self._clients[number] = clients
            # tasks of their own at once: the engine has the first request before the last group has been looked at
            rollouts = [asyncio.create_task(self._run_one(task.prompt, client)) for client in clients]
            running = asyncio.create_task(self._whole_group(task.prompt, rollouts))
            self._under_way.add(running)
            running.add_done_callback(partial(self._note_finished, number))

    async def finished(self) -> tuple[Sequence[tuple[int, GroupReport]], Batch, Batch]:
        """Wait for the next group to finish, and take all that are finished by then and have the same columns.

        Returns:
            Number and report of each, then the columns and the records of all their rollouts, in the same order.

        Raises:
            GeneratorError: If the engine died; all groups that have not been taken may run again elsewhere.
        """
        await self._any_finished.wait()
        taken = [self._take()]
        _, (_, first) = taken[0]
        while self._finished and len(taken) < MOST_TOGETHER and _has_columns_of(first, self._finished[0][1]):
            taken.append(self._take())
        reports, columns, records = parts_of([group for _, group in taken])
        return list(zip([number for number, _ in taken], reports, strict=True)), columns, records

    async def turns(self) -> Mapping[int, tuple[RolloutTurns, ...]]:
        """Turns so far of the groups that have not been taken, by number; groups without any are left out."""
        found = {number: tuple(client.turns for client in clients) for number, clients in self._clients.items()}
        return {number: turns for number, turns in found.items() if any(each.completions for each in turns)}

    async def idle_time(self) -> tuple[float, float]:
        """Seconds since the last call, or the first group, without a rollout under way, and all seconds since then."""
        return self._idle.take()

    async def generator(self, method: str, *args: Any) -> Any:
        """Call a method of the replica."""
        with spans.span("weights", method):
            return await getattr(self._generator, method)(*args)

    async def take_over(self, manifest: Manifest, delivery: Delivery) -> Taken:
        """See `rl_core.rollouts.delivery.take_over`."""
        with spans.span("weights", f"take over version {manifest.version}"):
            return await take_over(self._generator, manifest, delivery)

    async def score_canary(self, canary: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """See `rl_core.rollouts.delivery.score_canary`."""
        with spans.span("weights", "score canary"):
            return await score_canary(self._generator, canary)

    async def write_rollouts(
        self, path: str, part: np.ndarray, row: np.ndarray, advantages: Sequence[float | None], *stores: Batch
    ) -> None:
        """Write a new file of rollouts while this process does other work.

        Args:
            path: Path of the file, in a folder shared with the driver.
            part: int64 `[rollouts]`, index of the store with the record of each rollout.
            row: int64 `[rollouts]`, row of the record in that store.
            advantages: Advantages of each rollout.
            *stores: Batches with the records of rollouts, each record the bytes of a line of JSON.
        """
        records = [store.ragged(RECORD) for store in stores]
        places = zip(part.tolist(), row.tolist(), strict=True)
        lines = zip((records[store][record] for store, record in places), advantages, strict=True)
        with self._writing:
            await asyncio.to_thread(write_records, Path(path), lines)

    async def start_profile(self, order: ProfileOrder) -> ProfileReport:
        """Begin to record the engine's processes."""
        return await self._generator.start_profile(order)

    async def stop_profile(self) -> ProfileReport:
        """End the recording, and write its files."""
        return await self._generator.stop_profile()

    async def health(self) -> Mapping[str, Any]:
        """The replica's report."""
        return await self._generator.health()

    async def close(self) -> None:
        """End the program and the replica."""
        if isinstance(self._program, PreparedProgram):
            await self._program.close()
        await self._generator.close()

    def _note_finished(self, number: int, task: asyncio.Task[Group]) -> None:
        self._under_way.discard(task)
        if not self._under_way:
            self._idle.end()
        self._finished.append((number, task))
        self._any_finished.set()

    def _take(self) -> tuple[int, Group]:
        number, task = self._finished.popleft()
        if not self._finished:
            self._any_finished.clear()
        del self._clients[number]
        return number, task.result()

    async def _whole_group(self, prompt: Prompt, plays: Sequence[asyncio.Task[Sequence[Rollout]]]) -> Group:
        with self._rolling_out:
            return prompt, _numbered(await asyncio.gather(*plays))

    async def _run_one(self, prompt: Prompt, client: _Client) -> Sequence[Rollout]:
        try:
            async with asyncio.timeout(self._max_seconds) as limit:
                return _rollouts_of(await self._program.run(prompt, client))
        except TimeoutError as error:
            return _failed(prompt, self._overdue() if limit.expired() else error)
        except RequestRefused as error:
            return _failed(prompt, error)
        except GeneratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a program's failure costs its rollout, not the run
            return _failed(prompt, error)
        finally:
            await client.release()

    def _overdue(self) -> TimeoutError:
        return TimeoutError(f"the rollout took longer than the {self._max_seconds:g} s that max_rollout_seconds allows")


def _has_columns_of(rollouts: Sequence[Rollout], task: asyncio.Task[Group]) -> bool:
    """Return whether a group that ended did not fail, and has the columns of another."""
    return task.exception() is None and has_routing(task.result()[1]) == has_routing(rollouts)


def _rollouts_of(played: Rollout | Sequence[Rollout]) -> Sequence[Rollout]:
    rollouts = (played,) if isinstance(played, Rollout) else tuple(played)
    if not rollouts:
        raise ValueError("the rollout program returned no rollout; return one for every agent that is trained")
    return rollouts


def _numbered(plays: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    """The rollouts of all plays in order, with the number of their play if some play has several."""
    if all(len(play) == 1 for play in plays):
        return [rollout for (rollout,) in plays]
    return [dataclasses.replace(rollout, play=number) for number, play in enumerate(plays) for rollout in play]


def _failed(prompt: Prompt, error: Exception) -> Sequence[Rollout]:
    reason = f"{type(error).__name__}: {error}"
    _log.warning("rollout of %s failed: %s", prompt, reason)
    return (Rollout.failed(prompt, reason),)


class _Client:
    """The client that one rollout gets.

    Args:
        earlier: Turns of an earlier run of the rollout.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        earlier: RolloutTurns,
    ) -> None:
        self._worker = worker
        environment = worker._environments.get(prompt.environment)
        self._conversations = (
            None if environment is None else Conversations(environment, prompt.environment, seed, earlier.conversations)
        )
        self._prompt = prompt
        self._tools = prompt.tools
        self._sampling = sampling
        self._seed = seed
        self._later_seeds: np.random.SeedSequence | None = None
        self._completions = dict(earlier.completions)
        self._newest: Completion | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self._sampling

    @property
    def turns(self) -> RolloutTurns:
        """Turns so far."""
        return RolloutTurns(dict(self._completions), self._conversations.turns if self._conversations else ())

    async def generate(
        self, token_ids: np.ndarray, sampling: SamplingParams | None = None, *, draw: int | None = None
    ) -> Completion:
        request = GenerationRequest(token_ids, sampling or self._sampling, self._seed)
        request = dataclasses.replace(request, seed=self._next_seed() if draw is None else _seed_of(request, draw))
        digest = request.digest
        if digest not in self._completions:
            with self._worker._generating:
                self._completions[digest] = await generate_whole(self._worker._generator.generate, request)
        self._newest = self._completions[digest]
        return self._newest

    async def step(self, conversation: Conversation) -> StepResult:
        assert self._conversations is not None, "the prompt names no environment of this run"
        sampled = None if self._newest is None else self._newest.token_ids
        return await self._conversations.step(
            dataclasses.replace(
                conversation,
                completion_ids=sampled if conversation.completion_ids is None else conversation.completion_ids,
                num_prompt_messages=(
                    len(self._prompt.messages)
                    if conversation.num_prompt_messages is None
                    else conversation.num_prompt_messages
                ),
                is_text=self._prompt.is_text,
                trainer_state=self._trainer_state(),
            )
        )

    def read(self, token_ids: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
        return self._worker._chat.read(token_ids, self._tools if tools is None else tools)

    def continuation(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        return self._worker._chat.continuation(turn, observation, sampled)

    def rendered(
        self, messages: Sequence[Message], so_far: np.ndarray, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        return self._worker._chat.rendered(messages, so_far, self._tools if tools is None else tools)

    def encoded(self, text: str) -> np.ndarray:
        return self._worker._chat.encoded(text)

    def shown(self, token_ids: np.ndarray) -> str:
        return self._worker._chat.shown(token_ids)

    def pieces(self, token_ids: np.ndarray) -> list[str]:
        return [self.shown(token_ids[place : place + 1]) for place in range(len(token_ids))]

    async def release(self) -> None:
        """See `Conversations.release`."""
        if self._conversations is not None:
            await self._conversations.release()

    def _trainer_state(self) -> TrainerState:
        """Progress of the training as the newest completion tells it: every step publishes the next weight version, and
        the first is published before the first step."""
        spans = self._newest.spans if self._newest is not None else ()
        return TrainerState(max(spans[0].version - 1, 0) if spans else 0, self._worker._max_steps)

    def _next_seed(self) -> int:
        """That of the rollout for its first turn; the later ones follow from it."""
        if self._later_seeds is None:
            self._later_seeds = np.random.SeedSequence(self._seed)
            return self._seed
        return int(self._later_seeds.spawn(1)[0].generate_state(1)[0])


def _seed_of(request: GenerationRequest, draw: int) -> int:
    """The seed of one of several equal requests of a rollout, whose own seed the request has."""
    return int(np.random.SeedSequence([int(request.digest, 16), draw]).generate_state(1)[0])
