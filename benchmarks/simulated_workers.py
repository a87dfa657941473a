"""Workers without models, which `driver.py` hosts in Ray actors: they answer from the shapes of their inputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_algos.rollouts.worker.worker import RolloutWorker
from rl_core.data.batch import Batch
from rl_core.images import image_digests
from rl_core.metrics import Metric
from rl_core.model import Loss, Read
from rl_core.rollouts.group import GroupReport, parts_of
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.fakes import FakeModel

TEXT_PER_TOKEN = "word "
"""As long as an English token on average."""


class SimulatedRanks:
    """Any rank of a policy; one process can stand for several."""

    def __init__(self) -> None:
        self._model = FakeModel()

    def infer(self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0) -> Batch:
        """Return numbers instead of logprobs."""
        self._model.calls.clear()
        return self._model.infer(batch, reads, reference=reference, temperature=temperature)

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Return the metrics of one update of this rank's shard."""
        self._model.calls.clear()
        return self._model.train_step(batch, loss)


class SimulatedReplica:
    """A rollout worker whose completions are drawn at random.

    Args:
        completion_length: tokens of each.
        together: most groups in an answer.
    """

    def __init__(self, completion_length: int, together: int) -> None:
        self._length = completion_length
        self._together = together
        self._text = TEXT_PER_TOKEN * completion_length
        self._random = np.random.default_rng(0)
        self._tasks: deque[tuple[int, RolloutTask]] = deque()
        self._has_tasks = asyncio.Event()

    async def start(self) -> None:
        """Return at once: it is ready."""

    async def begin(self, tasks: Sequence[tuple[int, RolloutTask]]) -> None:
        """Take groups."""
        self._tasks += tasks
        self._has_tasks.set()

    async def finished(self) -> tuple[Sequence[tuple[int, GroupReport]], Batch, Batch]:
        """Return the next groups, as if all of them had finished together."""
        await self._has_tasks.wait()
        taken = [self._tasks.popleft() for _ in range(min(self._together, len(self._tasks)))]
        if not self._tasks:
            self._has_tasks.clear()
        groups = [(task.prompt, [self._rollout(task.prompt) for _ in task.seeds]) for _, task in taken]
        reports, columns, records = parts_of(groups)
        return list(zip([number for number, _ in taken], reports, strict=True)), columns, records

    async def write_rollouts(self, path: str, part: Any, row: Any, advantages: Any, *stores: Batch) -> None:
        """Write as a rollout worker does."""
        await RolloutWorker.write_rollouts(self, path, part, row, advantages, *stores)  # type: ignore[arg-type]  # it reads nothing of a worker

    async def health(self) -> Mapping[str, Any]:
        """Return the health of an engine without requests."""
        return {"num_requests": 0, "num_sampled": 0}

    def _rollout(self, prompt: Prompt) -> Rollout:
        sampled = self._random.integers(50_000, size=self._length, dtype=np.int32)
        before, reward = len(prompt.token_ids), float(np.mean(sampled % 2 == 0))
        mask = np.concatenate([np.zeros(before, dtype=np.uint8), np.ones(self._length, dtype=np.uint8)])
        images = image_digests(prompt.messages)
        return Rollout(
            prompt_id=prompt.id,
            tokens=np.concatenate([prompt.token_ids, sampled]),
            loss_mask=mask,
            generation_logprobs=mask.astype(np.float32) * np.float32(-0.5),
            spans=(WeightSpan(1, self._length),),
            turns=(Turn(self._text, None, {"reward": reward}),),
            rewards={"reward": reward},
            stop_reason="stop",
            images=(images,) if images else (),
        )
