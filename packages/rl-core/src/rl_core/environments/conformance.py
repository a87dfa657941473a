"""Checks that an environment behaves as rollouts need it to: each a finding in a line, with its remedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_core.environments.instance import EnvironmentInstance
from rl_core.environments.pool import EnvironmentPool
from rl_core.environments.trial import Attempt, compared_as_text, raised_remedy, run_quietly
from rl_core.errors import WorkerDied, WorkerError
from rl_core.rollouts.environment import (
    Conversation,
    EnvironmentFailure,
    Fault,
    KeptState,
    Resumption,
    StepResult,
    ToolCall,
)
from rl_core.rollouts.rollout import Message

MAX_TURNS = 4
"""Maximum number of turns of a conversation that a check plays; each repeats the response."""
BATCH = 8
"""Maximum number of conversations of a call in the check of batches."""

MIN_FORMS = 4
"""Minimum number of responses to a row that show whether only one form is rewarded."""

Status = Literal["ok", "warned", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Args:
        name: Name of the check, in a word or two.
        said: The problem if it failed, otherwise the evidence or the reason that it was skipped.
        status: Result of the check; `warned` if it holds but is probably not what was meant.
        remedy: How to fix it if it failed, or how to find out.
    """

    name: str
    said: str
    status: Status = "ok"
    remedy: str = ""


@dataclass(frozen=True)
class Sample:
    """The rewards of a conversation that was played.

    Args:
        attempt: Its row and response.
        rewards: Rewards by name, summed over its turns.
        num_turns: Turns played.
        done: True if the environment ended it.
    """

    attempt: Attempt
    rewards: Mapping[str, float]
    num_turns: int
    done: bool


@dataclass(frozen=True)
class Conformance:
    """The findings of all checks, in order, and the conversations that were answered."""

    findings: Sequence[Finding]
    samples: Sequence[Sample]

    @property
    def holds(self) -> bool:
        """Return whether no check failed."""
        return all(finding.status != "failed" for finding in self.findings)


def check(
    instance: EnvironmentInstance, attempts: Sequence[Attempt], tools: Sequence[Mapping[str, Any]] = ()
) -> Conformance:
    """Play the attempts in several orders and processes, and compare the answers.

    Args:
        instance: The environment.
        attempts: Rows with responses, at least one; each is played to its end, or for `MAX_TURNS` turns of the same
            response.
        tools: Schemas of its tools.
    """
    return run_quietly(_check(instance, attempts, tools))


@dataclass(frozen=True)
class _Answer:
    """A turn's answer, as far as two plays of a conversation have to agree."""

    rewards: Mapping[str, float]
    done: bool
    observation: tuple[Message, ...]
    stop_strings: tuple[str, ...] | None
    max_new_tokens: int | None


@dataclass
class _Play:
    """A conversation that is played.

    Args:
        attempt: Its row and response.
        conversation: Conversation with the newest turn.
        answers: So far.
        failure: Why it went no further, if it failed.
        state: State after the newest answer; None if there is none.
        slowest_s: Seconds of its longest call; those of a batch are shared.
        has_agents: True if several agents take turns in it, each with the same response.
    """

    attempt: Attempt
    conversation: Conversation
    answers: list[_Answer]
    failure: EnvironmentFailure | None = None
    state: KeptState | None = None
    slowest_s: float = 0.0
    has_agents: bool = False

    @property
    def over(self) -> bool:
        if self.failure is not None or len(self.answers) == MAX_TURNS:
            return True
        return bool(self.answers) and (self.answers[-1].done or not self.answers[-1].observation)

    def take(self, outcome: StepResult | EnvironmentFailure, seconds: float) -> None:
        """Note an outcome, and add the next turn."""
        self.slowest_s = max(self.slowest_s, seconds)
        if isinstance(outcome, EnvironmentFailure):
            self.failure = outcome
            return
        found = tuple(outcome.observation)
        self.state = outcome.state
        rewards = {**outcome.rewards(), **_rewards_of_agents(outcome.agent_rewards)}
        self.answers.append(_Answer(rewards, outcome.done, found, outcome.stop_strings, outcome.max_new_tokens))
        self.has_agents = self.has_agents or bool(outcome.agent or outcome.next_agent)
        said = self.attempt.conversation.messages[-1]
        self.conversation = replace(
            self.conversation, messages=(*self.conversation.messages, *found, said), turn=self.conversation.turn + 1
        )

    def sample(self) -> Sample:
        rewards: dict[str, float] = {}
        for answer in self.answers:
            for name, value in answer.rewards.items():
                rewards[name] = rewards.get(name, 0.0) + value
        return Sample(self.attempt, rewards, len(self.answers), self.answers[-1].done)


def _rewards_of_agents(given: Mapping[str, float | Mapping[str, float]]) -> dict[str, float]:
    """Return the rewards of other agents by the name of the agent, followed by that of a part."""
    found: dict[str, float] = {}
    for agent, rewards in given.items():
        if isinstance(rewards, Mapping):
            found |= {f"{agent} {name}": value for name, value in rewards.items()}
        else:
            found[agent] = rewards
    return found


async def _check(
    instance: EnvironmentInstance, attempts: Sequence[Attempt], tools: Sequence[Mapping[str, Any]]
) -> Conformance:
    async with _Process(instance) as first:
        started = time.monotonic()
        try:
            await first.pool.start()
        except (WorkerError, WorkerDied) as error:
            kind = f"{error.kind}: " if isinstance(error, WorkerError) and error.kind != "ValueError" else ""
            said = error.message if isinstance(error, WorkerError) else str(error)
            remedy = "fix its import or constructor; pass settings as KEY=VALUE"
            return Conformance([Finding("start", kind + said, "failed", remedy)], [])
        findings = [Finding("start", f"built in {time.monotonic() - started:.1f} s")]
        plays: list[_Play] = []
        for attempt in attempts:
            plays.append(await first.play(attempt))
            if (failure := plays[-1].failure) is not None and failure.fault == "deadline":
                # each of the others may take as long
                break
        findings += _single_play_findings(plays, instance)
        answered = [play for play in plays if play.failure is None]
        if tools:
            findings.append(await _malformed_calls(first, attempts[0], tools))
    if answered:
        findings += await _comparisons(instance, answered)
    else:
        findings += [Finding(name, "no response was answered", "skipped") for name in _COMPARED]
    return Conformance(findings, [play.sample() for play in answered])


class _Process:
    """A pool with its own process, to play conversations on.

    Args:
        hash_seed: Seed of Python's hashes of strings, which processes of another number do not share, even if the
            user's shell has `PYTHONHASHSEED` set.
    """

    def __init__(self, instance: EnvironmentInstance, *, max_batch: int = 1, hash_seed: int = 1) -> None:
        env_vars = {"PYTHONHASHSEED": str(hash_seed), **instance.config.env_vars}
        config = instance.config.model_copy(
            update={
                "num_workers": 1,
                "max_batch": max_batch,
                "max_concurrent": None,
                "retries": 0,
                "env_vars": env_vars,
            }
        )
        self.pool = EnvironmentPool.of(instance.environment, config, name=instance.label)
        self._num_played = 0

    async def __aenter__(self) -> _Process:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pool.close()

    async def play(self, attempt: Attempt) -> _Play:
        """Play one conversation to its end."""
        [play] = await self.play_together([attempt])
        return play

    async def begin(self, attempt: Attempt, num_turns: int) -> _Play:
        """Play the first turns of a conversation."""
        play = self._begin(attempt)
        for _ in range(num_turns):
            await self._step([play])
        await self.pool.abandon([play.conversation.id])
        return play

    async def resume(self, play: _Play) -> _Play:
        """Play on what another process began, from its saved state."""
        assert play.state is not None, "a conversation without a state has nothing to resume from"
        resumed = self._begin(play.attempt)
        conversation = replace(play.conversation, id=resumed.conversation.id, resumption=Resumption(play.state.saved))
        resumed.conversation, resumed.answers = conversation, list(play.answers)
        while not resumed.over:
            await self._step([resumed])
        await self.pool.abandon([conversation.id])
        return resumed

    async def play_together(self, attempts: Sequence[Attempt]) -> list[_Play]:
        """Play conversations turn by turn: all their first turns, then all their second ones."""
        plays = [self._begin(attempt) for attempt in attempts]
        while under_way := [play for play in plays if not play.over]:
            await self._step(under_way)
        await self.pool.abandon([play.conversation.id for play in plays])
        return plays

    async def _step(self, plays: Sequence[_Play]) -> None:
        begin = time.monotonic()
        outcomes = await self.pool.step([play.conversation for play in plays])
        for play, outcome in zip(plays, outcomes, strict=True):
            play.take(outcome, time.monotonic() - begin)

    def _begin(self, attempt: Attempt) -> _Play:
        self._num_played += 1
        id = f"{attempt.conversation.id}/{self._num_played}"
        return _Play(attempt, replace(attempt.conversation, id=id), [])


_REMEDIES: Mapping[Fault, str] = {
    "signature": (
        "name parameters after fields of the row, map columns with data.train.columns={PARAMETER: COLUMN}, or "
        "give parameters defaults"
    ),
    "process": "catch the exception that ends the process, or increase memory_limit_gib",
    "deadline": "make the call faster, or increase deadline_s",
    "lost": "return the state of a conversation with every turn that does not end it",
    "answer": "return finite numbers, single or by name",
}


def _single_play_findings(plays: Sequence[_Play], instance: EnvironmentInstance) -> Iterator[Finding]:
    """Findings about conversations that were played one by one."""
    count = len(plays)
    yield _failures(plays, "signature", ("signature",), f"the rows have every field that it asks for ({count} tried)")
    yield _answers(plays)
    slowest, deadline = max(play.slowest_s for play in plays), instance.config.deadline_s
    yield _failures(plays, "deadline", ("deadline",), f"the slowest call took {slowest:.2f} s of {deadline:g} s")
    yield _rewards(plays, is_own=instance.is_own)


def _failures(plays: Sequence[_Play], name: str, faults: tuple[Fault, ...], holds: str) -> Finding:
    """A finding that fails with the first failure of these kinds."""
    for play in plays:
        if play.failure is not None and play.failure.fault in faults:
            said = f"{play.failure.reason.removesuffix('.')}; tried on {play.attempt}"
            is_raised = play.failure.fault == "raised"
            remedy = raised_remedy(said, play.attempt) if is_raised else _REMEDIES[play.failure.fault]
            return Finding(name, said, "failed", remedy)
    return Finding(name, holds)


def _answers(plays: Sequence[_Play]) -> Finding:
    answered = sum(play.failure is None for play in plays)
    turns = max((len(play.answers) for play in plays), default=0)
    length = "a turn each" if turns == 1 else f"up to {turns} turns each"
    found = _failures(plays, "answers", ("raised", "process"), f"{answered} of {len(plays)} responses, {length}")
    if found.status == "failed":
        return found
    for play in plays:
        if play.answers and not play.answers[-1].done and not play.answers[-1].observation:
            said = f"turn {len(play.answers)} of {play.attempt} neither ended the rollout nor had an observation"
            return Finding("answers", said, "failed", "return a message for the policy to answer, or done=True")
    return found


def _rewards(plays: Sequence[_Play], *, is_own: bool) -> Finding:
    """The finding about the rewards that were seen."""
    values: dict[str, list[float]] = {}
    for play in plays:
        for name, value in play.sample().rewards.items() if play.answers else ():
            values.setdefault(name, []).append(value)
    if not values:
        return _failures(plays, "rewards", ("answer",), "none were given")
    said = ", ".join(f"{name} {min(found):g} to {max(found):g}" for name, found in values.items())
    found = _failures(plays, "rewards", ("answer",), f"finite: {said}")
    if found.status == "failed" or len(plays) < 2:
        return found
    if any(play.has_agents for play in plays):
        varies = any(min(each) != max(each) for each in values.values())
        return found if varies else replace(found, said=f"{found.said}; in each play all agents gave the same response")
    constant = [name for name, each in values.items() if len(each) > 1 and min(each) == max(each)]
    if constant:
        is_all, count = len(constant) == len(values), len(plays)
        be = "are" if len(constant) > 1 else "is"
        what = f"and all {count} responses earn the same" if is_all else ""
        what = what or f"but {' and '.join(constant)} {be} the same for all {count} responses"
        remedy = "pass a response that must earn more with --response TEXT; if it earns the same, correct the reward"
        # A response that earns more than the empty one shows that the reward reads answers.
        pays_answers = any(
            max(map(_total, row)) > _total(play)
            for row in _rows(plays)
            for play in row
            if not play.attempt.conversation.completion
        )
        mismatch = compared_as_text(plays[0].attempt) if is_own and not pays_answers else ""
        return Finding("rewards", f"finite, {what}: {said}", "warned", mismatch or remedy)
    if form := _only_form(plays):
        said = f"{found.said}; of each row's responses only {form} earns the most"
        return replace(found, said=said, remedy="ask for this form in the prompt, or let the reward read others")
    return found


def _rows(plays: Sequence[_Play]) -> list[list[_Play]]:
    """Return the plays of each row."""
    rows: dict[str, list[_Play]] = {}
    for play in plays:
        rows.setdefault(play.attempt.conversation.id.rpartition("/")[0], []).append(play)
    return list(rows.values())


def _total(play: _Play) -> float:
    return play.sample().rewards.get("reward", 0.0) if play.answers else 0.0


def _only_form(plays: Sequence[_Play]) -> str:
    """The first row's response of the most reward, if in each row just the same form earns it, and all others clearly
    less; empty if not.
    """
    rows = _rows(plays)
    num_forms = max(map(len, rows))
    whole = [row for row in rows if len(row) == num_forms and all(play.answers for play in row)]
    if num_forms < MIN_FORMS or not whole:
        return ""
    best = set()
    for row in whole:
        totals = [_total(play) for play in row]
        *_, second, most = sorted(totals)
        if second >= (min(totals) + most) / 2:
            return ""
        best.add(totals.index(most))
    return f"{whole[0][best.pop()].attempt.conversation.completion!r:.60}" if len(best) == 1 else ""


_COMPARED = ("repeats", "state", "batches", "resume")


async def _comparisons(instance: EnvironmentInstance, plays: Sequence[_Play]) -> list[Finding]:
    """Findings about the same conversations played again: in a fresh process, in another order and side by side in a
    used one, and in batches.
    """
    attempts = [play.attempt for play in plays]
    async with _Process(instance, hash_seed=2) as process:
        again = [await process.play(attempt) for attempt in attempts]
        differs = _difference(plays, again, "in another process")
        if differs:
            remedy = "draw what is random from the conversation's seed or a field of the row, and order sets and hashes"
            skipped = "its answers do not repeat"
            return [
                Finding("repeats", differs, "failed", remedy),
                *(Finding(name, skipped, "skipped") for name in _COMPARED[1:]),
            ]
        findings = [Finding("repeats", f"{len(plays)} conversations, answered alike in two processes")]
        reverse = [await process.play(attempt) for attempt in reversed(attempts)][::-1]
        differs = _difference(plays, reverse, "after others in the same process")
        mixed = await process.play_together(attempts)
        differs = differs or _difference(plays, mixed, "beside others in the same process")
        resumption = await _resumption(instance, plays, process)
    remedy = "keep what a conversation learns in its state (or its object), and nothing in globals or files"
    findings.append(
        Finding("state", differs, "failed", remedy)
        if differs
        else Finding("state", "conversations leave nothing behind for others")
    )
    findings.append(await _batches(instance, plays))
    return [*findings, resumption]


async def _resumption(instance: EnvironmentInstance, plays: Sequence[_Play], process: _Process) -> Finding:
    """The finding about conversations that are saved halfway in a process and resume in another."""
    several = [play for play in plays if len(play.answers) > 1]
    if not several:
        return Finding("resume", "no conversation had a second turn", "skipped")
    num_resumed, states = 0, []
    async with _Process(instance) as other:
        for play in several:
            begun = await process.begin(play.attempt, len(play.answers) // 2)
            states.append(begun.state)
            if begun.state is None or begun.state.saved is None:
                continue
            resumed = await other.resume(begun)
            if differs := _difference([play], [resumed], "after it was saved and resumed in another process"):
                remedy = "save all that later answers depend on, and return it to its place in `restore`"
                return Finding("resume", differs, "failed", remedy)
            num_resumed += 1
    if num_resumed:
        return Finding("resume", f"{num_resumed} conversations were saved and resumed in another process")
    if all(state is None for state in states):
        return Finding("resume", "conversations keep no state between turns")
    said = "states are not saved: a conversation under way is lost with its process, and replayed if a run resumes"
    return Finding("resume", said, "skipped")


async def _batches(instance: EnvironmentInstance, plays: Sequence[_Play]) -> Finding:
    size = min(max(instance.config.max_batch, BATCH), len(plays))
    attempts = [play.attempt for play in plays]
    orders: list[Callable[[Sequence[Any]], list[Any]]] = [list, lambda items: list(reversed(items))]
    async with _Process(instance, max_batch=size) as process:
        for order in orders:
            found = order(await process.play_together(order(attempts)))
            differs = _difference(plays, found, f"in calls of up to {size} conversations")
            if not differs:
                continue
            if instance.config.max_batch == 1:
                return Finding("batches", f"{differs}; max_batch is 1, so rollouts never share a call", "skipped")
            remedy = "answer each conversation only from its own values, in the order given, or set max_batch=1"
            return Finding("batches", differs, "failed", remedy)
    return Finding("batches", f"answered alike in calls of up to {size}, in two orders")


def _difference(before: Sequence[_Play], after: Sequence[_Play], how: str) -> str:
    """The first conversation that was answered in another way, in words; empty if there is none."""
    for one, other in zip(before, after, strict=True):
        if other.failure is not None:
            return f"{one.attempt} was answered, and failed {how}: {other.failure.reason}"
        if one.answers == other.answers:
            continue
        turn = next(
            (i for i, pair in enumerate(zip(one.answers, other.answers, strict=False)) if pair[0] != pair[1]), 0
        )
        first, second = one.answers[turn], other.answers[turn]
        where = f"{one.attempt}, turn {turn + 1}," if len(one.answers) > 1 else f"{one.attempt}"
        if first.rewards != second.rewards:
            return f"{where} had reward {_shown(first.rewards)}, and {_shown(second.rewards)} {how}"
        return f"{where} had another answer {how}: {_text(first)!r:.80} became {_text(second)!r:.80}"
    return ""


def _shown(rewards: Mapping[str, float]) -> str:
    if set(rewards) == {"reward"}:
        return f"{rewards['reward']:g}"
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items())


def _text(answer: _Answer) -> str:
    return " ".join(str(message.get("content", "")) for message in answer.observation)


async def _malformed_calls(process: _Process, attempt: Attempt, tools: Sequence[Mapping[str, Any]]) -> Finding:
    """The finding about calls that cannot be made, which are to be answered so that the policy can learn from it."""
    name = str(tools[0]["function"]["name"])
    calls = {
        "that is not valid JSON": ToolCall("", {}, "call00000", error="it is not valid JSON"),
        "of a tool that does not exist": ToolCall("no_such_tool", {}, "call00000"),
        "with an argument that does not exist": ToolCall(name, {"no_such_argument": 1}, "call00000"),
    }
    for kind, call in calls.items():
        tried = replace(attempt, conversation=replace(attempt.conversation, completion="", tool_calls=(call,)))
        [outcome] = await process.pool.step([replace(tried.conversation, id=f"malformed/{kind}")])
        await process.pool.abandon([f"malformed/{kind}"])
        remedy = "answer it with an observation that says what is wrong, or end the rollout with a reward"
        if isinstance(outcome, EnvironmentFailure):
            return Finding("tool calls", f"a call {kind} fails its rollout: {outcome.reason}", "failed", remedy)
        if not outcome.done and not outcome.observation:
            return Finding("tool calls", f"a call {kind} is not answered", "failed", remedy)
    return Finding("tool calls", f"{len(calls)} malformed calls are answered")
