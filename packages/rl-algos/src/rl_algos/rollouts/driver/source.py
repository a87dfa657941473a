"""Rollouts of the prompts of a stream, at most so many versions old, each prompt once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rl_algos.rollouts.driver.failures import FailureWatch
from rl_algos.rollouts.driver.ledger import Ledger
from rl_algos.rollouts.driver.saved_groups import group_from, group_state
from rl_algos.rollouts.driver.saved_turns import turns_from, turns_state
from rl_algos.rollouts.driver.staleness import staleness_metrics
from rl_core.errors import DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutPool, RolloutTask, SampledTurns, Ticket
from rl_core.rollouts.rollout import Prompt
from rl_core.rollouts.source import Evaluation
from rl_core.weights import WeightUpdate


class PromptStream(Protocol):
    """Prompts in a repeatable order, each once per epoch."""

    def take(self, count: int) -> list[Prompt]:
        """The next prompts; fewer at the end of the last epoch."""
        ...

    def state(self) -> Mapping[str, Any]:
        """The position of the stream."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


@dataclass
class _Open:
    """A prompt that was drawn and has not left.

    Args:
        prompt: of the draw.
        version: newest weight version when it was handed to the pool, the oldest that its tokens can have; None
            before.
        group: its rollouts, once they are finished.
        turns: of an earlier run of its rollouts, from which they go on.
        turned_at: version of that run, as `version`.
    """

    prompt: Prompt
    version: int | None = None
    group: RolloutGroup | None = None
    turns: tuple[SampledTurns, ...] = ()
    turned_at: int | None = None


@dataclass(frozen=True)
class _Drawing:
    """Draws that were made together, and the position of the stream before them."""

    first: int
    count: int
    position: Mapping[str, Any]


class PacedRolloutSource:
    """Rolls out the prompts of a stream, `max_staleness` steps ahead of training. At staleness 0 it is synchronous:
    every group is sampled with the newest weights, on request.

    A group is at most `max_staleness` versions old when it is trained, by pacing alone; none is discarded for its age:

    - `collect(n)` first hands prompts to the pool until n and `max_staleness * prompts_per_step` are under way or
      finished, or fewer if later steps need fewer. A group that was set aside has left, so another prompt comes in its
      place.
    - A batch takes groups by the version at which they were begun, the oldest first. Of the last version that it takes
      not all of, it takes those that are finished, so that a batch waits for slow groups only when they are due.

    A ledger keeps the state of every draw. Groups that were collected leave it with the next `adopt`, as trained or as
    set aside; until then they come again after `restore`. The state of a checkpoint holds the ledger, finished groups
    and the draws that are to be run again, whose rollouts have the same seeds and go on from the turns that they had
    finished.

    Args:
        pool: runs the rollouts.
        prompts: the prompts to roll out.
        sampling: how completions are drawn.
        num_generations: rollouts per prompt.
        seed: of sampling; a rollout's seed follows from it, from the number of prompts drawn before, and its place in
            the group.
        max_staleness: versions between the begin of a group and its training.
        prompts_per_step: groups that a step trains on; read above staleness 0 only.
        in_flight: whether new weights interrupt the completions under way, which then go on with them.
        max_failed_share: share of failed rollouts of one call above which they are refused, as they are if all failed.
        section: config section of that share, named in messages.
        clock: seconds.
    """

    def __init__(
        self,
        pool: RolloutPool,
        prompts: PromptStream,
        *,
        sampling: SamplingParams,
        num_generations: int,
        seed: int,
        max_staleness: int = 0,
        prompts_per_step: int = 0,
        in_flight: bool = False,
        max_failed_share: float = 1.0,
        section: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_staleness == 0 or prompts_per_step > 0, "to run ahead of a step its size must be known"
        self._pool = pool
        self._prompts = prompts
        self._sampling = sampling
        self._num_generations = num_generations
        self._seed = seed
        self._max_staleness = max_staleness
        self._num_ahead = max_staleness * prompts_per_step
        self._in_flight = in_flight
        self._failures = FailureWatch(max_failed_share, section=section)
        self._ledger = Ledger()
        self._version = 0
        self._drawings: list[_Drawing] = []
        self._open: dict[int, _Open] = {}
        self._collected: dict[int, _Open] = {}
        self._set_aside: dict[int, str] = {}
        self._draws: dict[Ticket, int] = {}
        self._evaluated: dict[Ticket, RolloutGroup | None] = {}
        self._clock = clock
        self._step_began_at = self._collected_at = clock()
        self._waited_s = 0.0

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """The next groups, in the order in which their prompts were drawn; fewer at the end of the data.

        Raises:
            RolloutsFailed: if too many of their rollouts failed.
        """
        asked_at = self._clock()
        self._begin(num_groups + min(self._num_ahead, self._num_ahead if num_later is None else num_later))
        chosen = self._wait_for(num_groups)
        self._collected_at = self._clock()
        self._waited_s += self._collected_at - asked_at
        self._collected |= {draw: self._open.pop(draw) for draw in chosen}
        groups = [_finished(self._collected[draw]) for draw in chosen]
        self._failures.check(groups)
        return groups

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Note that groups which were collected for this step train nothing, and why."""
        draws = {id(each.group): draw for draw, each in self._collected.items()}
        self._set_aside |= {draws[id(group)]: reason for group in groups}

    def metrics(self) -> Mapping[str, float]:
        """The number of replicas and, above staleness 0, ages of the groups that were collected since the last `adopt`,
        how many are under way or finished behind them, the share of the step's time that was spent waiting for them,
        and the share of the replicas' time since the last call in which they had no rollouts.
        """
        replicas = {"generation/replicas": float(self._pool.num_replicas)}
        if not self._max_staleness:
            return replicas
        groups = [_finished(each) for draw, each in self._collected.items() if draw not in self._set_aside]
        num_finished = sum(each.group is not None for each in self._open.values())
        elapsed = self._collected_at - self._step_began_at
        idle = self._pool.idle_share()
        return {
            **replicas,
            **staleness_metrics(groups, self._version, max_staleness=self._max_staleness),
            "queue/under_way": float(len(self._open) - num_finished),
            "queue/finished": float(num_finished),
            "idle/trainer": self._waited_s / elapsed if elapsed > 0 else 0.0,
            **({} if idle is None else {"idle/generators": idle}),
        }

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Roll out given prompts with the current weights; the same prompts always get the same seeds."""
        tasks = evaluation_tasks(prompts, sampling, num_generations=num_generations, seed=self._seed)
        tickets = self._pool.submit([replace(task, is_urgent=True) for task in tasks])
        self._evaluated = dict.fromkeys(tickets)
        num_left = len(tickets)
        while num_left:
            if self._take_one() is None:
                num_left -= 1
        groups = [group for group in self._evaluated.values() if group is not None]
        self._evaluated = {}
        self._failures.check(groups)
        return Evaluation(groups)

    def adopt(self, update: WeightUpdate) -> None:
        """Bring the replicas to this version; the groups collected before it count as trained, but for those that were
        set aside.
        """
        self._pool.adopt(update, in_flight=self._in_flight)
        self._version = update.version
        # a step is measured from the end of the collecting before it, the first from the first weights
        self._step_began_at, self._waited_s = self._collected_at if self._collected else self._clock(), 0.0
        self._ledger.train(self._collected.keys() - self._set_aside.keys(), update.version)
        for draw, reason in self._set_aside.items():
            self._ledger.drop([draw], update.version, reason)
        self._collected, self._set_aside = {}, {}

    def state(self) -> Mapping[str, Any]:
        """The ledger, data position, finished groups and draws to run again with their turns, as of the last `adopt`:
        groups collected since then have trained nothing yet and come again.
        """
        pending = {**self._collected, **self._open}
        drawings = [each for each in self._drawings if any(draw in pending for draw in _range(each))]
        finished = {draw: each for draw, each in self._open.items() if each.group is not None}
        return {
            "ledger": self._ledger.state(),
            "prompts": self._prompts.state(),
            "drawings": [{"first": each.first, "count": each.count, "prompts": each.position} for each in drawings],
            "finished": {
                str(draw): {"version": each.version, **group_state(_finished(each))}
                for draw, each in sorted(finished.items())
            },
            "turns": {str(draw): {"version": version, **turns_state(turns)} for draw, version, turns in self._turns()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            DataError: if the prompts are not those of the state, or end before them.
        """
        self._ledger = Ledger()
        self._ledger.restore(state["ledger"])
        self._drawings = [_Drawing(each["first"], each["count"], each["prompts"]) for each in state["drawings"]]
        drawn: dict[int, Prompt] = {}
        for drawing in self._drawings:
            drawn |= self._drawn_again(drawing)
        self._prompts.restore(state["prompts"])
        self._open = {draw: _Open(drawn[draw]) for draw in self._ledger.pending()}
        for draw, each in self._open.items():
            self._check_prompt(draw, each.prompt)
        for key, saved in state["finished"].items():
            each = self._open[int(key)]
            each.version, each.group = saved["version"], group_from(saved, each.prompt)
        for key, saved in state.get("turns", {}).items():
            each = self._open[int(key)]
            each.turned_at, each.turns = saved["version"], turns_from(saved)
        self._collected, self._set_aside, self._draws = {}, {}, {}

    def close(self) -> None:
        """Do nothing: the source owns no process."""

    def _begin(self, num_groups: int) -> None:
        """Draw prompts, and hand prompts to the pool, until so many are under way or finished."""
        self._forget_old()
        missing = num_groups - len(self._open)
        if missing > 0:
            self._draw(missing)
        waiting = sorted(draw for draw, each in self._open.items() if each.version is None)
        num_begun = len(self._open) - len(waiting)
        draws = waiting[: max(0, num_groups - num_begun)]
        tickets = self._pool.submit([self._task(draw) for draw in draws])
        for ticket, draw in zip(tickets, draws, strict=True):
            self._draws[ticket] = draw
            each = self._open[draw]
            each.version = self._version if each.turned_at is None else each.turned_at

    def _forget_old(self) -> None:
        """Have finished groups and turns sampled again that are older than the bound, as those of a checkpoint are if
        the bound was lowered since.
        """
        oldest = self._version - self._max_staleness
        for each in self._open.values():
            is_old = each.version is not None and each.version < oldest
            if is_old and each.group is not None:
                each.version, each.group = None, None
            if each.version is None and each.turned_at is not None and each.turned_at < oldest:
                each.turned_at, each.turns = None, ()

    def _draw(self, count: int) -> None:
        position = self._prompts.state()
        prompts = self._prompts.take(count)
        draws = self._ledger.draw([prompt.id for prompt in prompts])
        self._open |= {draw: _Open(prompt) for draw, prompt in zip(draws, prompts, strict=True)}
        pending = self._open.keys() | self._collected.keys()
        kept = [each for each in self._drawings if not pending.isdisjoint(_range(each))]
        self._drawings = [*kept, _Drawing(draws.start, len(draws), position)] if prompts else kept

    def _wait_for(self, num_groups: int) -> list[int]:
        """The draws of a batch, in order, once their groups are finished."""
        version_of = {draw: each.version for draw, each in self._open.items() if each.version is not None}
        begun = sorted(version_of, key=lambda draw: (version_of[draw], draw))
        wanted = begun[:num_groups]
        # of the last version that the batch takes, any groups will do
        last = version_of[wanted[-1]] if wanted else self._version
        due = [draw for draw in wanted if version_of[draw] < last]
        others = {draw for draw in begun if version_of[draw] == last}
        num_others = len(wanted) - len(due)
        awaited = {draw for draw in due if self._open[draw].group is None}
        ready = {draw for draw in others if self._open[draw].group is not None}
        while awaited or len(ready) < num_others:
            draw = self._take_one()
            assert draw is not None, "an evaluation waits for its own groups"
            awaited.discard(draw)
            if draw in others:
                ready.add(draw)
        return sorted([*due, *sorted(ready)[:num_others]])

    def _take_one(self) -> int | None:
        """Take the next group that is finished; returns its draw, or None if it belongs to an evaluation."""
        ticket, group = self._pool.next_done()
        if ticket in self._evaluated:
            self._evaluated[ticket] = group
            return None
        draw = self._draws.pop(ticket)
        self._open[draw].group = group
        return draw

    def _task(self, draw: int) -> RolloutTask:
        each, seeds = self._open[draw], _seeds((self._seed, draw), self._num_generations)
        return RolloutTask(each.prompt, self._sampling, seeds, turns=each.turns)

    def _turns(self) -> Iterator[tuple[int, int, tuple[SampledTurns, ...]]]:
        """Draws that are not finished and have turns, with the version that they were begun at."""
        unfinished = {draw: each for draw, each in self._open.items() if each.group is None}
        under_way = [ticket for ticket, draw in self._draws.items() if draw in unfinished]
        latest = self._pool.turns() if under_way else {}
        turns = {draw: each.turns for draw, each in unfinished.items()}
        turns |= {self._draws[ticket]: latest[ticket] for ticket in under_way if ticket in latest}
        for draw, each in sorted(unfinished.items()):
            version = each.turned_at if each.version is None else each.version
            if turns[draw] and version is not None:
                yield draw, version, turns[draw]

    def _drawn_again(self, drawing: _Drawing) -> dict[int, Prompt]:
        self._prompts.restore(drawing.position)
        prompts = self._prompts.take(drawing.count)
        if len(prompts) < drawing.count:
            raise DataError(
                f"the data ends after {drawing.first + len(prompts)} prompts, but the checkpoint has drawn "
                f"{self._ledger.num_drawn}; raise max_num_epochs, or start a fresh run"
            )
        return dict(zip(_range(drawing), prompts, strict=True))

    def _check_prompt(self, draw: int, prompt: Prompt) -> None:
        if not self._ledger.is_of(draw, prompt.id):
            raise DataError(
                f"the data has changed since the checkpoint: draw {draw} was another prompt than {prompt}; restore the "
                "data and its settings, or start a fresh run"
            )


def evaluation_tasks(
    prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int, seed: int
) -> list[RolloutTask]:
    """The rollouts of an evaluation. The seed of a sample follows from `seed`, the place of its prompt and its place in
    the group, and depends neither on the number of prompts nor on that of samples.
    """
    return [RolloutTask(prompt, sampling, _seeds((seed, i, 1), num_generations)) for i, prompt in enumerate(prompts)]


def _seeds(entropy: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(int(seed) for seed in np.random.SeedSequence(entropy).generate_state(count))


def _range(drawing: _Drawing) -> range:
    return range(drawing.first, drawing.first + drawing.count)


def _finished(each: _Open) -> RolloutGroup:
    assert each.group is not None, f"the rollouts of {each.prompt} are not finished"
    return each.group
