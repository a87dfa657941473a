"""Checks that an environment behaves as rollouts need it to, each with a finding and a remedy in a line."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_core.environments.instance import EnvironmentInstance
from rl_core.environments.pool import EnvironmentPool
from rl_core.environments.trial import Attempt, compared_as_text, raised_remedy, run_quietly
from rl_core.errors import WorkerDied, WorkerError
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, Fault, Resumption, StepResult, ToolCall
from rl_core.rollouts.judging import JudgeClient

MAX_TURNS = 4
"""Maximum number of turns of a conversation that a check plays; each repeats the response."""
BATCH = 8
"""Maximum number of conversations of a call in the check of batches."""

MIN_FORMS = 4
"""Minimum number of responses to a row that show whether only one form is rewarded."""

_NO_JUDGES: AbstractAsyncContextManager[None] = nullcontext()

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
    instance: EnvironmentInstance,
    attempts: Sequence[Attempt],
    tools: Sequence[Mapping[str, Any]] = (),
    judges: AbstractAsyncContextManager[JudgeClient | None] = _NO_JUDGES,
) -> Conformance:
    """Play the attempts in several orders and processes, and compare the answers.

    Args:
        instance: The environment.
        attempts: Rows with responses, at least one; each is played to its end, or for `MAX_TURNS` turns of the same
            response.
        tools: Schemas of its tools.
        judges: Judges that its reward functions may ask, entered once.
    """

    async def checked() -> Conformance:
        async with judges as client, _Process.of(instance, client) as first:
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
                plays += await first.play([attempt])
                if (failure := plays[-1].failure) is not None and failure.fault == "deadline":
                    # Each of the others may take as long.
                    break
            findings += _single_play_findings(plays, instance)
            answered = [play for play in plays if play.failure is None]
            if tools:
                findings.append(await _malformed_calls(first, attempts[0], tools))
        if answered:
            findings += await _comparisons(instance, client, answered)
        else:
            findings += [Finding(name, "no response was answered", "skipped") for name in _COMPARED]
        return Conformance(findings, [play.sample() for play in answered])

    return run_quietly(checked())


@dataclass
class _Play:
    """A conversation that is played.

    Args:
        attempt: Its row and response.
        conversation: Conversation with the newest turn.
        answers: Answers so far, each with the rewards of all agents.
        failure: Why it went no further, if it failed.
        slowest_s: Seconds of its longest call; calls of a batch are shared.
        has_agents: True if several agents take turns in it, each with the same response.
    """

    attempt: Attempt
    conversation: Conversation
    answers: list[tuple[Mapping[str, float], StepResult]]
    failure: EnvironmentFailure | None = None
    slowest_s: float = 0.0
    has_agents: bool = False

    @property
    def over(self) -> bool:
        if self.failure is not None or len(self.answers) == MAX_TURNS:
            return True
        return bool(self.answers) and (self.answers[-1][1].done or not self.answers[-1][1].observation)

    @property
    def total(self) -> float:
        return self.sample().rewards.get("reward", 0.0) if self.answers else 0.0

    def take(self, outcome: StepResult | EnvironmentFailure, seconds: float) -> None:
        """Note an outcome, and add the next turn."""
        self.slowest_s = max(self.slowest_s, seconds)
        if isinstance(outcome, EnvironmentFailure):
            self.failure = outcome
            return
        rewards = outcome.rewards()
        for agent, given in outcome.agent_rewards.items():
            named = given if isinstance(given, Mapping) else {"": given}
            rewards |= {f"{agent} {name}".rstrip(): value for name, value in named.items()}
        self.answers.append((rewards, outcome))
        self.has_agents = self.has_agents or bool(outcome.agent or outcome.next_agent)
        so_far, said = self.conversation, self.attempt.conversation.messages[-1]
        messages = (*so_far.messages, *outcome.observation, said)
        self.conversation = replace(so_far, messages=messages, turn=so_far.turn + 1)

    def sample(self) -> Sample:
        rewards: dict[str, float] = {}
        for given, _ in self.answers:
            for name, value in given.items():
                rewards[name] = rewards.get(name, 0.0) + value
        return Sample(self.attempt, rewards, len(self.answers), self.answers[-1][1].done)


class _Process:
    """A pool with its own process, to play conversations on.

    Args:
        hash_seed: Seed of Python's hashes of strings, which processes of another number do not share, even if the
            user's shell has `PYTHONHASHSEED` set.
    """

    def __init__(
        self, instance: EnvironmentInstance, judges: JudgeClient | None, *, max_batch: int = 1, hash_seed: int = 1
    ) -> None:
        env_vars = {"PYTHONHASHSEED": str(hash_seed), **instance.config.env_vars}
        single = {"num_workers": 1, "max_batch": max_batch, "max_concurrent": None, "retries": 0, "env_vars": env_vars}
        config = instance.config.model_copy(update=single)
        self.pool = EnvironmentPool.of(instance.environment, config, name=instance.label, judges=judges)
        self._num_played = 0

    @classmethod
    @asynccontextmanager
    async def of(
        cls, instance: EnvironmentInstance, judges: JudgeClient | None, **options: int
    ) -> AsyncIterator[_Process]:
        """Close the pool at the end of the context."""
        process = cls(instance, judges, **options)
        try:
            yield process
        finally:
            await process.pool.close()

    async def play(self, attempts: Sequence[Attempt], num_turns: int = MAX_TURNS) -> list[_Play]:
        """Play conversations turn by turn: all their first turns, then all their second ones."""
        plays = [self._begin(attempt) for attempt in attempts]
        await self._continue(plays, num_turns)
        return plays

    async def resume(self, play: _Play) -> _Play:
        """Continue a play that another process began, from its saved state."""
        state = play.answers[-1][1].state
        assert state is not None, "a conversation without a state has nothing to resume from"
        resumed = self._begin(play.attempt)
        conversation = replace(play.conversation, id=resumed.conversation.id, resumption=Resumption(state.saved))
        resumed.conversation, resumed.answers = conversation, list(play.answers)
        await self._continue([resumed], MAX_TURNS)
        return resumed

    def _begin(self, attempt: Attempt) -> _Play:
        self._num_played += 1
        id = f"{attempt.conversation.id}/{self._num_played}"
        return _Play(attempt, replace(attempt.conversation, id=id), [])

    async def _continue(self, plays: Sequence[_Play], num_turns: int) -> None:
        while num_turns and (playing := [play for play in plays if not play.over]):
            begin = time.monotonic()
            outcomes = await self.pool.step([play.conversation for play in playing])
            for play, outcome in zip(playing, outcomes, strict=True):
                play.take(outcome, time.monotonic() - begin)
            num_turns -= 1
        await self.pool.abandon([play.conversation.id for play in plays])


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


def _single_play_findings(plays: Sequence[_Play], instance: EnvironmentInstance) -> list[Finding]:
    """Return the findings about conversations that were played one by one."""
    count = len(plays)
    slowest, deadline = max(play.slowest_s for play in plays), instance.config.deadline_s
    answered = sum(play.failure is None for play in plays)
    turns = max((len(play.answers) for play in plays), default=0)
    length = "a turn each" if turns == 1 else f"up to {turns} turns each"
    answers = _failures(plays, "answers", ("raised", "process"), f"{answered} of {count} responses, {length}")
    for play in plays if answers.status != "failed" else ():
        if play.answers and not play.answers[-1][1].done and not play.answers[-1][1].observation:
            said = f"turn {len(play.answers)} of {play.attempt} neither ended the rollout nor had an observation"
            answers = Finding("answers", said, "failed", "return a message for the policy to answer, or done=True")
            break
    return [
        _failures(plays, "signature", ("signature",), f"the rows have every field that it asks for ({count} tried)"),
        answers,
        _failures(plays, "deadline", ("deadline",), f"the slowest call took {slowest:.2f} s of {deadline:g} s"),
        _rewards(plays, is_own=instance.is_own),
    ]


def _failures(plays: Sequence[_Play], name: str, faults: tuple[Fault, ...], holds: str) -> Finding:
    """Return a finding that fails with the first failure of these kinds."""
    for play in plays:
        if play.failure is not None and play.failure.fault in faults:
            said = f"{play.failure.reason.removesuffix('.')}; tried on {play.attempt}"
            is_raised = play.failure.fault == "raised"
            remedy = raised_remedy(said, play.attempt) if is_raised else _REMEDIES[play.failure.fault]
            return Finding(name, said, "failed", remedy)
    return Finding(name, holds)


def _rewards(plays: Sequence[_Play], *, is_own: bool) -> Finding:
    """Return the finding about the rewards that were seen."""
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
    rows: dict[str, list[_Play]] = {}
    for play in plays:
        rows.setdefault(play.attempt.conversation.id.rpartition("/")[0], []).append(play)
    if constant:
        is_all, count = len(constant) == len(values), len(plays)
        be = "are" if len(constant) > 1 else "is"
        what = f"and all {count} responses earn the same" if is_all else ""
        what = what or f"but {' and '.join(constant)} {be} the same for all {count} responses"
        remedy = "pass a response that must earn more with --response TEXT; if it earns the same, correct the reward"
        # A response that earns more than the empty one shows that the reward reads answers.
        pays_answers = any(
            max(other.total for other in row) > play.total
            for row in rows.values()
            for play in row
            if not play.attempt.conversation.completion
        )
        mismatch = compared_as_text(plays[0].attempt) if is_own and not pays_answers else ""
        return Finding("rewards", f"finite, {what}: {said}", "warned", mismatch or remedy)
    if form := _only_form(list(rows.values())):
        said = f"{found.said}; of each row's responses only {form} earns the most"
        return replace(found, said=said, remedy="ask for this form in the prompt, or let the reward read others")
    return found


def _only_form(rows: Sequence[Sequence[_Play]]) -> str:
    """Return the first row's response of the most reward, if in each row just the same form earns it, and all others
    clearly less; empty if not.
    """
    num_forms = max(map(len, rows))
    whole = [row for row in rows if len(row) == num_forms and all(play.answers for play in row)]
    if num_forms < MIN_FORMS or not whole:
        return ""
    best = set()
    for row in whole:
        totals = [play.total for play in row]
        *_, second, most = sorted(totals)
        if second >= (min(totals) + most) / 2:
            return ""
        best.add(totals.index(most))
    return f"{whole[0][best.pop()].attempt.conversation.completion!r:.60}" if len(best) == 1 else ""


_COMPARED = ("repeats", "state", "batches", "resume")


async def _comparisons(
    instance: EnvironmentInstance, judges: JudgeClient | None, plays: Sequence[_Play]
) -> list[Finding]:
    """Return the findings about the same conversations played again: in a fresh process, in another order and side by
    side in a used one, in batches, and resumed halfway.
    """
    attempts = [play.attempt for play in plays]
    async with _Process.of(instance, judges, hash_seed=2) as process:
        again = [play for attempt in attempts for play in await process.play([attempt])]
        if differs := _difference(plays, again, "in another process"):
            remedy = "draw what is random from the conversation's seed or a field of the row, and order sets and hashes"
            others = [Finding(name, "its answers do not repeat", "skipped") for name in _COMPARED[1:]]
            return [Finding("repeats", differs, "failed", remedy), *others]
        reverse = [play for attempt in reversed(attempts) for play in await process.play([attempt])]
        differs = _difference(plays, reverse[::-1], "after others in the same process")
        mixed = await process.play(attempts)
        differs = differs or _difference(plays, mixed, "beside others in the same process")
        resumption = await _resumption(instance, judges, plays, process)
    state = Finding("state", "conversations leave nothing behind for others")
    if differs:
        remedy = "keep what a conversation learns in its state (or its object), and nothing in globals or files"
        state = Finding("state", differs, "failed", remedy)
    repeats = Finding("repeats", f"{len(plays)} conversations, answered alike in two processes")
    return [repeats, state, await _batches(instance, judges, plays), resumption]


async def _resumption(
    instance: EnvironmentInstance, judges: JudgeClient | None, plays: Sequence[_Play], process: _Process
) -> Finding:
    """Return the finding about conversations that are saved halfway in a process and resume in another."""
    several = [play for play in plays if len(play.answers) > 1]
    if not several:
        return Finding("resume", "no conversation had a second turn", "skipped")
    num_resumed, has_state = 0, False
    async with _Process.of(instance, judges) as other:
        for play in several:
            [begun] = await process.play([play.attempt], len(play.answers) // 2)
            state = begun.answers[-1][1].state if begun.answers else None
            has_state = has_state or state is not None
            if state is None or state.saved is None:
                continue
            resumed = await other.resume(begun)
            if differs := _difference([play], [resumed], "after it was saved and resumed in another process"):
                remedy = "save all that later answers depend on, and return it to its place in `restore`"
                return Finding("resume", differs, "failed", remedy)
            num_resumed += 1
    if num_resumed:
        return Finding("resume", f"{num_resumed} conversations were saved and resumed in another process")
    if not has_state:
        return Finding("resume", "conversations keep no state between turns")
    said = "states are not saved: a conversation under way is lost with its process, and replayed if a run resumes"
    return Finding("resume", said, "skipped")


async def _batches(instance: EnvironmentInstance, judges: JudgeClient | None, plays: Sequence[_Play]) -> Finding:
    size = min(max(instance.config.max_batch, BATCH), len(plays))
    attempts = [play.attempt for play in plays]
    async with _Process.of(instance, judges, max_batch=size) as process:
        for order in (1, -1):
            found = (await process.play(attempts[::order]))[::order]
            differs = _difference(plays, found, f"in calls of up to {size} conversations")
            if not differs:
                continue
            if instance.config.max_batch == 1:
                return Finding("batches", f"{differs}; max_batch is 1, so rollouts never share a call", "skipped")
            remedy = "answer each conversation only from its own values, in the order given, or set max_batch=1"
            return Finding("batches", differs, "failed", remedy)
    return Finding("batches", f"answered alike in calls of up to {size}, in two orders")


def _difference(before: Sequence[_Play], after: Sequence[_Play], how: str) -> str:
    """Return the first conversation that was answered differently, in words; empty if there is none."""
    for one, other in zip(before, after, strict=True):
        if other.failure is not None:
            return f"{one.attempt} was answered, and failed {how}: {other.failure.reason}"
        answers, others = [[_compared(*each) for each in play.answers] for play in (one, other)]
        if answers == others:
            continue
        pairs = enumerate(zip(answers, others, strict=False))
        turn = next((index for index, pair in pairs if pair[0] != pair[1]), 0)
        where = f"{one.attempt}, turn {turn + 1}," if len(answers) > 1 else f"{one.attempt}"
        if answers[turn][0] != others[turn][0]:
            shown = [
                f"{rewards['reward']:g}"
                if set(rewards) == {"reward"}
                else ", ".join(f"{name} {value:g}" for name, value in rewards.items())
                for rewards in (answers[turn][0], others[turn][0])
            ]
            return f"{where} had reward {shown[0]}, and {shown[1]} {how}"
        first, second = [
            " ".join(str(message.get("content", "")) for message in play.answers[turn][1].observation)
            for play in (one, other)
        ]
        return f"{where} had another answer {how}: {first!r:.80} became {second!r:.80}"
    return ""


def _compared(rewards: Mapping[str, float], result: StepResult) -> tuple[Any, ...]:
    """Return the part of an answer that two plays of a conversation must agree in."""
    return rewards, result.done, tuple(result.observation), result.stop_strings, result.max_new_tokens


async def _malformed_calls(process: _Process, attempt: Attempt, tools: Sequence[Mapping[str, Any]]) -> Finding:
    """Return the finding about calls that cannot be made, whose answers let the policy learn from them."""
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
