"""Rollouts of the prompts of a stream, each prompt once, with a limit on the age of their weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rl_algos.rollouts.config import Sampler
from rl_algos.rollouts.driver.draw import BatchRule, Draw, DrawState
from rl_algos.rollouts.driver.ledger import Ledger
from rl_algos.rollouts.driver.saved import group_from, group_state, turns_from, turns_state
from rl_algos.rollouts.driver.watches import FailureWatch, IgnoredFieldsWatch
from rl_core.errors import DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import Evaluation, RolloutPool, RolloutTask, RolloutTurns, Ticket
from rl_core.rollouts.rollout import Prompt
from rl_core.weights import WeightUpdate


class PromptStream(Protocol):
    """Prompts in a fixed order, from a position."""

    def take(self, count: int) -> list[Prompt]:
        """Return the next prompts; fewer at the end."""

    def state(self) -> Mapping[str, Any]:
        """Return the position."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""


_OF_DEMONSTRATIONS = 0x64656D
"""Separates the choice of demonstrations from the seeds of rollouts."""


@dataclass(frozen=True)
class _Drawing:
    """Draws that were made together, and the position of the stream before them."""

    first: int
    count: int
    position: Mapping[str, Any]

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


class PacedRolloutSource:
    """Rolls out the prompts of a stream, up to `max_staleness` steps ahead of training. At staleness 0 it is
    synchronous: every group is sampled with the newest weights, on request.

    A group is at most `max_staleness` versions old when it is trained, by pacing only; none is discarded for its age:

    - `collect(n)` first hands prompts to the pool until n and `num_ahead` are unfinished or finished, or fewer if later
      steps need fewer. A group that was set aside has left, so another prompt comes in its place.
    - A batch takes groups by `rl_algos.rollouts.driver.draw.BatchRule`, and waits for slow groups only when they are
      due.

    Every draw goes through the states of `rl_algos.rollouts.driver.draw.DrawState`. A ledger keeps what became of every
    draw. Groups that were collected leave it with the next `adopt`, as trained or as set aside; until then they come
    again after `restore`. The state of a checkpoint holds the ledger, finished groups and the draws that are to be run
    again, whose rollouts have the same seeds and continue from the turns that they had finished.

    Args:
        pool: Runs the rollouts.
        prompts: The prompts to roll out.
        sampling: How completions are drawn.
        num_generations: Rollouts per prompt.
        seed: Sampling seed; a rollout's seed follows from it, from the number of prompts drawn before, and its place in
            the group.
        max_staleness: Maximum number of weight versions between the start of a group and its training.
        prompts_per_step: Groups that a step trains on; read above staleness 0 only.
        num_ahead: Maximum number of groups in addition to those of a step, at most `max_staleness * prompts_per_step`;
            None for as many.
        sampler, window: See `BatchRule`.
        overlaps_training: True if rollouts continue while the policy trains, False if the two take turns.
        in_flight: True if new weights interrupt in-flight completions, which then continue with them.
        max_failed_share: Share of failed rollouts of one call above which they are refused, as they are if all failed.
        section: Config section of that share, for messages.
        demonstrated_share: Share of the rollouts of a prompt with a demonstration that take it instead of a sample.
        clock: Seconds.
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
        num_ahead: int | None = None,
        sampler: Sampler = "weight_fifo",
        window: int = 0,
        overlaps_training: bool = True,
        in_flight: bool = False,
        max_failed_share: float = 1.0,
        section: str = "",
        demonstrated_share: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_staleness == 0 or prompts_per_step > 0, "to run ahead of a step its size must be known"
        self._pool = pool
        self._prompts = prompts
        self._sampling = sampling
        self._num_generations = num_generations
        self._seed = seed
        self._max_staleness = max_staleness
        most_ahead = max_staleness * prompts_per_step
        self._num_ahead = most_ahead if num_ahead is None else num_ahead
        assert self._num_ahead <= most_ahead, f"{num_ahead} groups run ahead, but {most_ahead} keep the staleness bound"
        self._rule = BatchRule(sampler, max_staleness, prompts_per_step, window)
        self._overlaps_training = overlaps_training
        self._in_flight = in_flight
        self._demonstrated_share = demonstrated_share
        self._failures = FailureWatch(max_failed_share, section=section)
        self._ignored = IgnoredFieldsWatch()
        self._ledger = Ledger()
        self._version = 0
        self._drawings: list[_Drawing] = []
        self._draws: dict[int, Draw] = {}
        self._under_way: dict[Ticket, Draw] = {}
        self._evaluated: dict[Ticket, RolloutGroup | None] = {}
        self._clock = clock
        self._step_began_at = self._collected_at = clock()
        self._waited_s = 0.0
        self._idle_share: float | None = None

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """Return the next groups, in the order their prompts were drawn; fewer at the end of the data.

        Raises:
            RolloutsFailed: If too many of their rollouts failed.
        """
        groups = self._collected(num_groups, num_later)
        self._check(groups)
        return groups

    def _collected(self, num_groups: int, num_later: int | None) -> list[RolloutGroup]:
        """Take the next groups; see `collect`."""
        asked_at = self._clock()
        if self._max_staleness and self._overlaps_training:
            # Replicas answer late while they begin groups.
            self._idle_share = self._pool.idle_share()
        self._begin(num_groups + min(self._num_ahead, self._num_ahead if num_later is None else num_later))
        chosen = self._wait_for(num_groups)
        self._collected_at = self._clock()
        self._waited_s += self._collected_at - asked_at
        return [self._draws[number].collect() for number in chosen]

    def _check(self, groups: Sequence[RolloutGroup]) -> None:
        self._ignored.check(groups)
        self._failures.check(groups)

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Note that groups which were collected for this step train nothing, and why."""
        collected = {id(draw.group): draw for draw in self._in(DrawState.COLLECTED)}
        for group in groups:
            collected[id(group)].set_aside(reason)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of replicas and the counts of speculative decoding since the last call. Above staleness 0,
        there are also the ages of the groups that were collected since the last `adopt`, the lengths of the rollouts
        that an earlier step began beside those of the others, the numbers of groups that are under way or finished,
        and, if rollouts continue during training, the share of the step's time that was spent waiting for groups and
        the share of the replicas' time from the start of the last collecting to that of this one without rollouts.
        """
        speculation = self._pool.speculation()
        replicas = {
            "generation/replicas": float(self._pool.num_replicas),
            **({} if speculation is None else speculation.metrics()),
        }
        if not self._max_staleness:
            return replicas
        draws = self._in(DrawState.COLLECTED)
        sampled = [draw.group.sampled for draw in draws]
        num_finished = len(self._in(DrawState.FINISHED))
        metrics = {
            **replicas,
            **staleness_metrics(sampled, self._version, max_staleness=self._max_staleness),
            **carried_metrics(draws, self._version),
            "queue/under_way": float(sum(not draw.is_collected for draw in self._draws.values()) - num_finished),
            "queue/finished": float(num_finished),
        }
        if not self._overlaps_training:
            return metrics
        elapsed = self._collected_at - self._step_began_at
        metrics["idle/trainer"] = self._waited_s / elapsed if elapsed > 0 else 0.0
        if self._idle_share is not None:
            metrics["idle/generators"] = self._idle_share
        return metrics

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
        """Bring the replicas to this version. Groups that were collected before it count as trained, unless they were
        set aside.
        """
        self._deliver(update)
        self._version = update.version
        collected = [draw for draw in self._draws.values() if draw.is_collected]
        # A step is measured from the end of the collecting before it, the first step from the first weights.
        self._step_began_at, self._waited_s = self._collected_at if collected else self._clock(), 0.0
        self._ledger.train([draw.number for draw in self._in(DrawState.COLLECTED)], update.version)
        for draw in self._in(DrawState.SET_ASIDE):
            self._ledger.drop([draw.number], update.version, draw.reason)
        for draw in collected:
            del self._draws[draw.number]

    def _deliver(self, update: WeightUpdate) -> None:
        """Bring the replicas to a version."""
        self._pool.adopt(update, in_flight=self._in_flight)

    def state(self) -> Mapping[str, Any]:
        """Return the ledger, data position, finished groups and draws to run again with their turns, as of the last
        `adopt`: groups collected since then have trained nothing yet and come again.
        """
        return {
            "ledger": self._ledger.state(),
            "prompts": self._prompts.state(),
            "drawings": [{"first": each.first, "count": each.count, "prompts": each.position} for each in self._kept()],
            "finished": {
                str(draw.number): {"version": draw.begun_at, **group_state(draw.group)}
                for draw in self._in(DrawState.FINISHED)
            },
            "turns": {
                str(draw.number): {"version": draw.begun_at, **turns_state(turns)} for draw, turns in self._turns()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            DataError: If the prompts are not the ones of the state, or end before them.
        """
        self._ledger = Ledger()
        self._ledger.restore(state["ledger"])
        self._drawings = [_Drawing(each["first"], each["count"], each["prompts"]) for each in state["drawings"]]
        drawn: dict[int, Prompt] = {}
        for drawing in self._drawings:
            drawn |= self._drawn_again(drawing)
        self._prompts.restore(state["prompts"])
        self._draws = {number: Draw(number, drawn[number]) for number in self._ledger.pending()}
        for draw in self._draws.values():
            if not self._ledger.is_of(draw.number, draw.prompt.id):
                raise DataError(
                    f"the data has changed since the checkpoint: draw {draw.number} was not the prompt {draw.prompt}; "
                    "restore the data and its settings, or start a new run"
                )
        for key, saved in state["finished"].items():
            draw = self._draws[int(key)]
            draw.restore_group(saved["version"], group_from(saved, draw.prompt))
        for key, saved in state.get("turns", {}).items():
            self._draws[int(key)].restore_turns(saved["version"], turns_from(saved))
        self._under_way = {}

    def close(self) -> None:
        """Do nothing: the source owns no process."""

    def _in(self, *states: DrawState) -> list[Draw]:
        """Return the draws in one of these states, in the order they were drawn."""
        return [draw for draw in self._draws.values() if draw.state in states]

    def _begin(self, num_groups: int) -> None:
        """Draw prompts, and hand prompts to the pool, until this many groups are unfinished or finished."""
        for draw in self._in(DrawState.RESTORED, DrawState.FINISHED):
            # Groups and turns of a checkpoint are too old if the bound was lowered since.
            if draw.begun_at < self._version - self._max_staleness:
                draw.discard()
        missing = num_groups - sum(not draw.is_collected for draw in self._draws.values())
        if missing > 0:
            self._draw(missing)
        num_begun = len(self._in(DrawState.UNDER_WAY, DrawState.FINISHED))
        waiting = self._in(DrawState.WAITING, DrawState.RESTORED)
        draws = waiting[: max(0, num_groups - num_begun)]
        seeds = [_seeds((self._seed, draw.number), self._num_generations) for draw in draws]
        pairs = zip(draws, seeds, strict=True)
        tasks = [
            RolloutTask(
                draw.prompt, self._sampling, own, turns=draw.turns, num_demonstrated=self._num_demonstrated(draw)
            )
            for draw, own in pairs
        ]
        tickets = self._pool.submit(tasks)
        for ticket, draw in zip(tickets, draws, strict=True):
            draw.begin(self._version)
            self._under_way[ticket] = draw

    def _num_demonstrated(self, draw: Draw) -> int:
        """Return the number of rollouts of a draw that take its demonstration. It depends only on the seed and the
        number of the draw, so that a draw that runs again has the same."""
        if draw.prompt.demonstration is None:
            return 0
        # Rounded, because a product such as 0.7 * 10 may be a little less than a whole number.
        whole, part = divmod(round(self._demonstrated_share * self._num_generations, 9), 1)
        chance = np.random.default_rng((self._seed, draw.number, _OF_DEMONSTRATIONS)).random()
        return int(whole) + int(chance < part)

    def _kept(self) -> list[_Drawing]:
        """Return the drawings that have at least one draw left."""
        return [each for each in self._drawings if any(number in self._draws for number in each.numbers)]

    def _draw(self, count: int) -> None:
        position = self._prompts.state()
        prompts = self._prompts.take(count)
        kept = self._kept()
        numbers = self._ledger.draw([prompt.id for prompt in prompts])
        self._draws |= {number: Draw(number, prompt) for number, prompt in zip(numbers, prompts, strict=True)}
        self._drawings = [*kept, _Drawing(numbers.start, len(numbers), position)] if prompts else kept

    def _wait_for(self, num_groups: int) -> list[int]:
        """Return the draws of a batch, in order, once their groups are finished."""
        begun = self._in(DrawState.UNDER_WAY, DrawState.FINISHED)
        plan = self._rule.plan({draw.number: draw.begun_at for draw in begun}, num_groups, self._version)
        finished = {draw.number for draw in begun if draw.state is DrawState.FINISHED}
        while (chosen := plan.select(finished)) is None:
            draw = self._take_one()
            assert draw is not None, "an evaluation waits for its own groups"
            finished.add(draw.number)
        return chosen

    def _take_one(self) -> Draw | None:
        """Take the next group that is finished. Return its draw, or None if it belongs to an evaluation."""
        ticket, group = self._pool.next_done()
        if ticket in self._evaluated:
            self._evaluated[ticket] = group
            return None
        draw = self._under_way.pop(ticket)
        draw.finish(group)
        return draw

    def _turns(self) -> Iterator[tuple[Draw, tuple[RolloutTurns, ...]]]:
        """Yield the draws that are not finished and have turns, with these."""
        latest = self._pool.turns() if self._under_way else {}
        turns = {draw.number: latest[ticket] for ticket, draw in self._under_way.items() if ticket in latest}
        for draw in self._in(DrawState.RESTORED, DrawState.UNDER_WAY):
            if found := turns.get(draw.number, draw.turns):
                yield draw, found

    def _drawn_again(self, drawing: _Drawing) -> dict[int, Prompt]:
        self._prompts.restore(drawing.position)
        prompts = self._prompts.take(drawing.count)
        if len(prompts) < drawing.count:
            raise DataError(
                f"the data ends after {drawing.first + len(prompts)} prompts, but the checkpoint has drawn "
                f"{self._ledger.num_drawn}. Increase max_num_epochs, or start a new run"
            )
        return dict(zip(drawing.numbers, prompts, strict=True))


def evaluation_tasks(
    prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int, seed: int
) -> list[RolloutTask]:
    """Return the rollouts of an evaluation. The seed of a sample follows from `seed`, the place of its prompt and its
    place in the group, and depends neither on the number of prompts nor on the number of samples.
    """
    return [RolloutTask(prompt, sampling, _seeds((seed, i, 1), num_generations)) for i, prompt in enumerate(prompts)]


def _seeds(entropy: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(int(seed) for seed in np.random.SeedSequence(entropy).generate_state(count))


def staleness_metrics(groups: Sequence[RolloutGroup], version: int, *, max_staleness: int) -> dict[str, float]:
    """Return the ages of the sampled tokens, in weight versions; nothing if no token was sampled.

    Args:
        groups: Groups trained on.
        version: Version of the weights that train on the groups.
        max_staleness: Bound of the ages; each age up to it has its own share.
    """
    by_rollout = [spans for group in groups for spans in group.rollouts.spans if spans]
    if not by_rollout:
        return {}
    spans = np.array([span for spans in by_rollout for span in spans], dtype=np.int64)
    ages, num_tokens = version - spans[:, 0], spans[:, 1]
    total = max(1, int(num_tokens.sum()))
    is_mixed = [len({sampled_by for sampled_by, _ in spans}) > 1 for spans in by_rollout]
    metrics = {
        "staleness/mean": float((ages * num_tokens).sum() / total),
        "staleness/max": float(ages.max()),
        "staleness/several_versions": float(np.mean(is_mixed)),
    }
    shares = {age: float(num_tokens[ages == age].sum() / total) for age in range(max_staleness + 1)}
    return metrics | {f"staleness/share_{age}": share for age, share in shares.items()}


def carried_metrics(draws: Sequence[Draw], version: int) -> dict[str, float]:
    """Return the share of the groups that an earlier step began, with the mean number of sampled tokens of their
    rollouts beside the mean of the other rollouts: long rollouts train later. Nothing without groups.

    Args:
        draws: Draws whose groups are trained on.
        version: Version of the weights that train on the groups.
    """
    if not draws:
        return {}
    metrics = {"carried/share": float(np.mean([draw.begun_at < version for draw in draws]))}
    for name, is_carried in (("carried/mean_length", True), ("carried/mean_length_of_others", False)):
        chosen = [draw.group.sampled.rollouts.num_sampled for draw in draws if (draw.begun_at < version) == is_carried]
        if lengths := [length for group in chosen for length in group]:
            metrics[name] = float(np.mean(lengths))
    return metrics
