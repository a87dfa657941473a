"""Workers without models, which `driver.py` hosts in Ray actors: they take what is sent and answer from its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_core.batch import Batch
from rl_core.generation import RolloutTask
from rl_core.metrics import Metric
from rl_core.model import Loss, Read
from rl_core.rollout import Prompt, RolloutGroup
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeUpdate


class SimulatedRanks:
    """Any rank of a policy; one process can stand for several."""

    def __init__(self) -> None:
        self._model = FakeModel()

    async def start(self) -> None:
        """Ready at once."""

    async def infer(
        self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0
    ) -> Batch:
        """Numbers in the place of logprobs."""
        self._model.calls.clear()
        return self._model.infer(batch, reads, reference=reference, temperature=temperature)

    async def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Metrics of one update of this rank's shard."""
        self._model.calls.clear()
        return self._model.train_step(batch, loss)


class SimulatedReplica:
    """A rollout worker whose completions are drawn at random.

    Args:
        completion_length: tokens of each.
    """

    def __init__(self, completion_length: int) -> None:
        self._rollouts = FakeRolloutSource((), _even_share, completion_length=completion_length, vocab_size=50_000)
        self._rollouts.adopt(FakeUpdate(1))

    async def start(self) -> None:
        """Ready at once."""

    async def run(self, tasks: Sequence[RolloutTask]) -> list[RolloutGroup]:
        """One group per task, in order."""
        prompts = [task.prompt for task in tasks]
        groups = self._rollouts.evaluate(prompts, tasks[0].sampling, num_generations=len(tasks[0].seeds)).groups
        return list(groups)


def _even_share(_: Prompt, tokens: np.ndarray) -> float:
    return float(np.mean(tokens % 2 == 0))
