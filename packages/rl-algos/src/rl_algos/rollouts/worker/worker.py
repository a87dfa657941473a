"""The process that runs rollouts next to a replica."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_algos.judges.answers import JudgeAnswer
from rl_algos.judges.judged import CONVERSATION, JudgingSpec, given_verdicts, judged_rollout, with_rewards
from rl_algos.rollouts.recorded import TurnsRecorder, key_of
from rl_algos.rollouts.training.metrics import REFILLED
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.client import PlayClient, PlayServices, ServingProgram
from rl_algos.rollouts.worker.conversations import EnvironmentClient
from rl_algos.rollouts.worker.judge_engine import EngineJudge
from rl_algos.rollouts.worker.opponents import OpponentSpec, opponents_of_play
from rl_algos.tokenizer import load_tokenizer
from rl_core import resolve
from rl_core.data.batch import Batch
from rl_core.environments.rewards import VERDICTS
from rl_core.errors import GeneratorError, InfrastructureFailed, RequestRefused, RLError
from rl_core.images import image_digests
from rl_core.model_config import TokenizerConfig, VisionConfig
from rl_core.rollouts.delivery import Delivery, Taken, score_canary, take_over
from rl_core.rollouts.generation import Generator
from rl_core.rollouts.group import RECORD, GroupReport, parts_of
from rl_core.rollouts.judging import JudgeBudgetSpent, JudgedReward, JudgedRollout, Question
from rl_core.rollouts.pool import RolloutTask, RolloutTurns
from rl_core.rollouts.program import OfferingProgram, PreparedProgram, RolloutProgram
from rl_core.rollouts.record import write_records
from rl_core.rollouts.rollout import Prompt, Rollout, has_images, has_routing
from rl_core.rollouts.thoughts import PROMPT_END, opened_by
from rl_core.tracing import spans
from rl_core.tracing.profiling import ProfileOrder, ProfileReport
from rl_core.user_code import FromFile
from rl_core.weights import Manifest

_log = logging.getLogger(__name__)

MAX_TOGETHER = 16
"""Maximum number of groups whose columns are joined in one answer: a node that needs one row fetches all of them."""

_COUNTS = ("num_requests", "num_sampled")
"""Numbers of an engine's health that show its progress."""

JOIN_PERIOD_S = 5.0
"""Seconds between two offers of engines to the judges, whose process may have been started again."""

MAX_REFILLS = 2
"""Maximum number of times that a play begins again because infrastructure failed."""

Group = tuple[Prompt, Sequence[Rollout]]
"""A prompt and its rollouts, in the order of their seeds; the rollouts of one play are consecutive."""


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
        opponents: Opponents of the policy, whose engines run next to its own.
        vision: Settings of images.
        judging: Judging of its rollouts, and the judges in its engines; None without judges.
        index: Number of the replica.
        turns: Folder for the turns of finished groups; empty if they are not kept.
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
    opponents: tuple[OpponentSpec, ...] = ()
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)
    judging: JudgingSpec | None = None
    index: int = 0
    turns: str = ""


class GroupJudges(Protocol):
    """Judges of a run as a rollout worker calls them; see `rl_core.ray.judges.RemoteJudges`."""

    async def judge(
        self, environment: str, group: Sequence[JudgedRollout | None]
    ) -> Sequence[Mapping[str, JudgedReward]]:
        """Return the rewards of the rollouts of one prompt, by name."""

    async def join(self, index: int, ready: Mapping[str, str]) -> None:
        """Offer the engines of this process to the judges."""


class Meeting(Protocol):
    """A place where the nodes of a replica meet, as `rl_core.ray.host.Place`."""

    address: str
    port: int


class RolloutWorker:
    """Holds one replica and runs rollouts on it, so that no turn of a rollout passes through the driver.

    Args:
        spec: The parts to build.
        environments: Clients by environment name.
        judges: Language models that judge rollouts; None without judges.
        meeting: Where the nodes of its replica meet; None for a replica on one node.
    """

    def __init__(
        self,
        spec: RolloutWorkerSpec,
        environments: Mapping[str, EnvironmentClient],
        judges: GroupJudges | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        engine = resolve(spec.generator)
        generator_args = spec.generator_args
        if meeting is not None:
            *settings, placement = generator_args
            generator_args = (*settings, dataclasses.replace(placement, meeting=(meeting.address, meeting.port)))
        self._generator: Generator = engine(*generator_args)
        self._needs = [each.need for each in spec.opponents]
        self._opponents: dict[str, Generator] = {
            each.need.name: engine(*each.generator_args) for each in spec.opponents
        }
        program = resolve(spec.program) if isinstance(spec.program, str) else spec.program.load()
        self._program: RolloutProgram = program(**spec.program_args)
        self._logs = Path(spec.logs)
        self._max_seconds = spec.max_seconds
        tokenizer = load_tokenizer(spec.tokenizer, spec.model_name, spec.vision)
        chat = Chat(tokenizer, spec.tokenizer.tool_format)
        later = spec.judging.later if spec.judging else frozenset[str]()
        self._services = PlayServices(self._generator, chat, dict(environments), spec.max_steps, later)
        self._recorder = TurnsRecorder(Path(spec.turns)) if spec.turns else None
        self._recording = asyncio.Lock()
        self._finished: deque[tuple[int, asyncio.Task[Group]]] = deque()
        self._any_finished = asyncio.Event()
        self._under_way: set[asyncio.Task[Group]] = set()
        self._clients: dict[int, list[PlayClient]] = {}
        self._limits: set[asyncio.Timeout] = set()
        self._stopped_limits: dict[asyncio.Timeout, float] = {}
        self._keeps_weights = True
        self._idle = IdleTime()
        self._judging, self._judges, self._index = spec.judging, judges, spec.index
        engines = {"": self._generator, **self._opponents}
        self._engine_judges = {
            each.name: EngineJudge(each, engines[each.engine])
            for each in (spec.judging.engines if spec.judging else ())
        }
        self._ready: dict[str, str] = {}
        self._joining: asyncio.Task[None] | None = None
        self._judging_span = spans.overlapping("judging", "judging")
        self._rolling_out = spans.overlapping("rollouts", "rollouts")
        self._writing = spans.overlapping("recording", "recording")

    async def start(self) -> int:
        """Load the engine, and return its number of ranks."""
        await self._generator.start()
        await self._call_opponents("start")  # One after another: each measures the memory that is free.
        if isinstance(self._program, ServingProgram):
            self._program.serve_with(self._services)
        if isinstance(self._program, PreparedProgram):
            self._services.chat.prepare()
            await self._program.start(self._logs)
        if self._engine_judges:
            self._ready = {name: "" for name, each in self._engine_judges.items() if not each.awaits_weights}
            self._joining = asyncio.create_task(self._keep_joined())
        return self._generator.num_ranks

    async def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        """Start groups, each with its own number; `finished` answers with them.

        Their first requests reach the engine together and in order, so that its batches do not depend on timing.
        """
        self._idle.begin()
        for number, task in tasks:
            clients = self._clients[number] = []
            shown = [None] * (len(task.seeds) - task.num_demonstrated) + [
                task.prompt.demonstration
            ] * task.num_demonstrated
            turns = task.turns or [RolloutTurns()] * len(task.seeds)
            for seed, earlier, response in zip(task.seeds, turns, shown, strict=True):
                names = opponents_of_play(self._needs, seed)
                opponents = {agent: self._opponents[name] for agent, name in names.items()}
                client = PlayClient(self._services, task.prompt, task.sampling, seed, earlier, opponents, response)
                clients.append(client)
            # Each play is a task at once, so that the engine has the first request before the last group is read.
            plays = range(len(clients))
            rollouts = [asyncio.create_task(self._run_one(task.prompt, clients, play)) for play in plays]
            key = key_of(task, self._services.version)
            running = asyncio.create_task(self._whole_group(task.prompt, rollouts, clients, key))
            self._under_way.add(running)
            running.add_done_callback(partial(self._note_finished, number))

    async def finished(self) -> tuple[Sequence[tuple[int, GroupReport]], Batch, Batch]:
        """Wait for the next group to finish, and take all finished groups that have the same columns.

        Returns:
            Number and report of each, then the columns and the records of all their rollouts, in the same order.

        Raises:
            GeneratorError: If the engine died; all groups that have not been taken may run again elsewhere.
        """
        await self._any_finished.wait()
        taken = [self._take()]
        _, (_, first) = taken[0]
        while self._finished and len(taken) < MAX_TOGETHER and _has_columns_of(first, self._finished[0][1]):
            taken.append(self._take())
        said = self._said if self._judging is not None and self._judging.scored else None
        reports, columns, records = parts_of([group for _, group in taken], said)
        return list(zip([number for number, _ in taken], reports, strict=True)), columns, records

    async def turns(self) -> Mapping[int, tuple[RolloutTurns, ...]]:
        """Return the turns so far of the groups that have not been taken, by number, without groups that have none."""
        found = {number: tuple(client.turns for client in clients) for number, clients in self._clients.items()}
        return {number: turns for number, turns in found.items() if any(each.completions for each in turns)}

    async def num_untaken(self) -> int:
        """Return the number of rollouts that wait for a program elsewhere to take them."""
        return self._program.num_untaken if isinstance(self._program, OfferingProgram) else 0

    async def program(self, method: str, *args: Any) -> Any:
        """Call a method of the rollout program."""
        return await getattr(self._program, method)(*args)

    async def idle_time(self) -> tuple[float, float]:
        """Return the seconds since the last call, or the first group, without an unfinished rollout; and all
        seconds."""
        return self._idle.take()

    async def generator(self, method: str, *args: Any) -> Any:
        """Call a method of the replica. The engines of opponents sleep and wake with it.

        Sleep interrupts rollouts in progress. They continue when the engines are awake with weights, so `wake` resumes
        them unless the weights were dropped; then `resume` does after the weights have been sent.
        """
        with spans.span("weights", method):
            if method == "sleep":
                await self._interrupt_all()
            answer = await getattr(self._generator, method)(*args)
            if method in ("sleep", "wake"):
                await self._call_opponents(method)
            if method == "sleep":
                self._keeps_weights = bool(answer)
            if method == "resume" or (method == "wake" and self._keeps_weights):
                await self._continue_all()
        return answer

    async def take_over(self, manifest: Manifest, delivery: Delivery) -> Taken:
        """See `rl_core.rollouts.delivery.take_over`."""
        with spans.span("weights", f"take over version {manifest.version}"):
            taken = await take_over(self._generator, manifest, delivery)
        self._services.version = manifest.version
        await self._note_version("", taken)
        return taken

    async def score_canary(self, canary: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """See `rl_core.rollouts.delivery.score_canary`; the engines of opponents are awake from then."""
        with spans.span("weights", "score canary"):
            scores = await score_canary(self._generator, canary)
        await self._call_opponents("wake")
        return scores

    async def opponent_takes_over(self, name: str, manifest: Manifest, delivery: Delivery) -> Taken:
        """Bring an opponent to a weight version; it stays paused until `resume_opponent`."""
        with spans.span("weights", f"{name} takes over version {manifest.version}"):
            taken = await take_over(self._opponents[name], manifest, delivery)
        await self._note_version(name, taken)
        return taken

    async def answer(self, judge: str, question: Question) -> JudgeAnswer:
        """Return the answer of a judge in an engine of this process."""
        return await self._engine_judges[judge].answer(question)

    async def resume_opponent(self, name: str) -> None:
        """Let an opponent serve its weights."""
        await self._opponents[name].resume()

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
        """Return the replica's report, with the requests and tokens of opponents added."""
        reports = [await engine.health() for engine in (self._generator, *self._opponents.values())]
        if not self._opponents:
            return reports[0]
        return {**reports[0], **{name: sum(report[name] for report in reports) for name in _COUNTS}}

    async def close(self) -> None:
        """End the program and the replica."""
        if self._joining is not None:
            self._joining.cancel()
        if isinstance(self._program, PreparedProgram):
            await self._program.close()
        await self._call_opponents("close")
        await self._generator.close()

    async def _call_opponents(self, method: str, *args: Any) -> None:
        for engine in self._opponents.values():
            await getattr(engine, method)(*args)

    async def _interrupt_all(self) -> None:
        """Interrupt all requests, and stop the clocks of `max_rollout_s`."""
        await self._generator.pause("interrupt")
        await self._call_opponents("pause", "interrupt")
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired() and (when := limit.when()) is not None:
                self._stopped_limits[limit] = when - now
                limit.reschedule(None)

    async def _continue_all(self) -> None:
        """Let the engines serve and the clocks run that `_interrupt_all` stopped."""
        now = asyncio.get_running_loop().time()
        stopped, self._stopped_limits = self._stopped_limits, {}
        for limit in stopped.keys() & self._limits:
            limit.reschedule(now + stopped[limit])
        await self._generator.resume()
        await self._call_opponents("resume")

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

    async def _whole_group(
        self, prompt: Prompt, plays: Sequence[asyncio.Task[Sequence[Rollout]]], clients: Sequence[PlayClient], key: str
    ) -> Group:
        with self._rolling_out:
            rollouts = [_with_verdicts(each) for each in _numbered(await asyncio.gather(*plays))]
        if self._judging is not None:
            with self._judging_span:
                rollouts = await self._judged(prompt, rollouts, self._judging)
        if self._recorder is not None:
            turns = [client.turns for client in clients]
            # Compression takes long, so a thread does it. The lock is fair: groups are written in the order in which
            # they end, one at a time.
            async with self._recording:
                with self._writing:
                    await asyncio.to_thread(self._recorder.write, key, turns)
        return prompt, rollouts

    async def _judged(self, prompt: Prompt, rollouts: Sequence[Rollout], judging: JudgingSpec) -> list[Rollout]:
        """Return the rollouts of a prompt with the rewards of language models, which compare those of one agent and its
        peers. Opponents are not judged."""
        judged = list(rollouts)
        weights = judging.weights.get(prompt.environment)
        if weights is None:
            return judged
        assert self._judges is not None, "a rollout worker whose rollouts are judged has judges"
        opened = self._opened(prompt)
        compared: dict[tuple[str, str], list[int]] = {}
        for place, rollout in enumerate(rollouts):
            if not rollout.is_opponent:
                compared.setdefault((rollout.agent, rollout.peers), []).append(place)

        async def judge(places: Sequence[int]) -> None:
            assert self._judges is not None
            group = [judged_rollout(prompt, rollouts[place], opened) for place in places]
            if any(group):
                given = await self._judges.judge(prompt.environment, group)
                for place, shown, rewards in zip(places, group, given, strict=True):
                    if shown is not None:
                        judged[place] = with_rewards(prompt, rollouts[place], rewards, weights)

        await asyncio.gather(*map(judge, compared.values()))
        return judged

    def _said(self, prompt: Prompt, rollout: Rollout) -> np.ndarray:
        """Return the entry of a rollout in the column `said`, empty if no reward model judges it."""
        judging = self._judging
        is_scored = judging is not None and prompt.environment in judging.scored and not rollout.is_opponent
        judged = judged_rollout(prompt, rollout, self._opened(prompt)) if is_scored else None
        text = "" if judged is None else json.dumps(list(map(dict, judged.messages)), default=repr)
        return np.frombuffer(text.encode(), np.uint8)

    def _opened(self, prompt: Prompt) -> str:
        """Return the mark of thoughts that ends the policy's prompts; empty if there is none."""
        return opened_by(self._services.chat.shown(prompt.token_ids[-PROMPT_END:]))

    async def _note_version(self, engine: str, taken: Taken) -> None:
        """Offer the judges of an engine with the version that it has taken over."""
        own = [name for name, each in self._engine_judges.items() if each.engine == engine and each.awaits_weights]
        if own:
            assert self._judges is not None, "an engine that judges has judges"
            self._ready |= dict.fromkeys(own, ",".join(sorted(set(taken.digests))))
            await self._judges.join(self._index, self._ready)

    async def _keep_joined(self) -> None:
        assert self._judges is not None, "an engine that judges has judges"
        while True:
            if self._ready:
                try:
                    await self._judges.join(self._index, self._ready)
                except RLError as error:
                    _log.warning("%s", error)
            await asyncio.sleep(JOIN_PERIOD_S)

    async def _run_one(self, prompt: Prompt, clients: list[PlayClient], play: int) -> Sequence[Rollout]:
        """Return the rollouts of a play. If its infrastructure fails, it begins again, at most `MAX_REFILLS` times.

        It has the same seed and the completions that it had, so that the group is the one that it would have been.

        Args:
            prompt: Prompt of the play.
            clients: Clients of the plays of its group; the client of another play is put in their place.
            play: Place of the play in the group.
        """
        for refill in range(MAX_REFILLS + 1):
            client = clients[play] = clients[play].again() if refill else clients[play]
            try:
                played = await self._played(prompt, client)
                further = {REFILLED: refill} if refill else {}
                return [dataclasses.replace(each, info={**each.info, **further}) for each in played]
            except InfrastructureFailed as error:
                if refill == MAX_REFILLS:
                    return _failed(prompt, error, client)
                number = f"{refill + 1} of {MAX_REFILLS}"
                _log.warning("%s: %s; the rollout begins again (%s)", prompt, error, number)
            except RequestRefused as error:
                return _failed(prompt, error, client)
            except (GeneratorError, JudgeBudgetSpent):
                raise
            except Exception as error:  # noqa: BLE001 - a program's failure costs its rollout, not the run
                return _failed(prompt, error, client)
            finally:
                await client.release()
        raise AssertionError("the last play has returned")

    async def _played(self, prompt: Prompt, client: PlayClient) -> Sequence[Rollout]:
        """Return the rollouts of a play.

        Raises:
            TimeoutError: If it takes longer than `max_rollout_s`.
        """
        limit = asyncio.timeout(self._max_seconds)
        try:
            async with limit:
                self._limits.add(limit)
                played = await self._program.run(prompt, client)
                rollouts = (played,) if isinstance(played, Rollout) else tuple(played)
                if not rollouts:
                    raise ValueError(
                        "the rollout program returned no rollout; return one for every agent that is trained"
                    )
                return client.marked(rollouts)
        except TimeoutError:
            if not limit.expired():
                raise
            allowed = f"the {self._max_seconds:g} s that max_rollout_s allows"
            raise TimeoutError(f"the rollout took longer than {allowed}") from None
        finally:
            self._limits.discard(limit)


def _has_columns_of(rollouts: Sequence[Rollout], task: asyncio.Task[Group]) -> bool:
    """Return whether a group that ended did not fail, and has the columns of another."""
    if task.exception() is not None:
        return False
    _, others = task.result()
    return has_routing(others) == has_routing(rollouts) and has_images(others) == has_images(rollouts)


def _numbered(plays: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    """Return the rollouts of all plays in order, with the number of their play if some play has several."""
    if all(len(play) == 1 for play in plays):
        return [rollout for (rollout,) in plays]
    return [dataclasses.replace(rollout, play=number) for number, play in enumerate(plays) for rollout in play]


def _with_verdicts(rollout: Rollout) -> Rollout:
    """Return a rollout with the verdicts that its reward functions were given. What is scored later is the policy's."""
    if not rollout.info.keys() & {VERDICTS, CONVERSATION}:
        return rollout
    info, verdicts = given_verdicts(rollout.info)
    if rollout.is_opponent:
        info.pop(CONVERSATION, None)
    return dataclasses.replace(rollout, info=info, verdicts=(*rollout.verdicts, *verdicts))


def _failed(prompt: Prompt, error: Exception, client: PlayClient) -> Sequence[Rollout]:
    reason = f"{type(error).__name__}: {error}"
    _log.warning("rollout of %s failed: %s", prompt, reason)
    return (Rollout.failed(prompt, reason, image_digests(prompt.messages), client.played()),)


class IdleTime:
    """Measures the seconds without work since the first work, from one reading to the next.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at: float | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def begin(self) -> None:
        """Note that there is work."""
        now = self._clock()
        if self._read_at is None:
            self._read_at = now
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def end(self) -> None:
        """Note that all work is done."""
        self._idle_since = self._clock()

    def take(self) -> tuple[float, float]:
        """Return the seconds without work since the last reading, or the first work, and all seconds since then."""
        if self._read_at is None:
            return 0.0, 0.0
        now = self._clock()
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        found = self._idle_s, now - self._read_at
        self._idle_s, self._read_at = 0.0, now
        return found
