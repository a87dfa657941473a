"""The same three models on what the policy generates: it learns its own rollouts, the critic what the teacher thinks of
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_algos.data.examples import Datasets
from rl_algos.data.prompts import prompt_stream
from rl_algos.data.stream import Stream
from rl_algos.losses.tokens import NLLLoss
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.supervised.algorithm import SupervisedAlgorithm
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS, VALUES
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, RECORD
from rl_core.rollouts.rollout import Prompt
from rl_core.run import Components, Run
from three_roles.loss import ValueLoss


@dataclass(frozen=True)
class Prompts:
    """Prompts to roll out, and the token that ends a completion."""

    train: Stream[Prompt]
    end_of_sequence: int


class ThreeRolesOnRollouts(SupervisedAlgorithm[Any, Prompts]):
    """The policy on its own rollouts."""

    def prepare(self, config: Any, tokenizer: Any, loaded: Datasets) -> Prompts:
        """Tokenise the prompts."""
        room = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
        train = prompt_stream(loaded.train, config.data, tokenizer, max_tokens=room, seed=config.sft.seed)
        return Prompts(train, tokenizer.eos_token_id)

    def rollouts(self, config: Any, prepared: Prompts) -> RolloutNeeds:
        """One turn per rollout."""
        return RolloutNeeds(
            program="rl_algos.rollouts.worker.program:MultiTurnProgram",
            program_args={"max_turns": 1, "max_tokens": config.policy.max_total_sequence_length},
            environments=frozenset(prompt.environment for prompts in prepared.train.datasets for prompt in prompts),
        )

    def run(self, config: Any, components: Components, run: Run) -> None:
        """Take `sft.max_num_steps` steps of both models that train, on new rollouts each."""
        policy, critic, teacher = (components.models[role] for role in ("policy", "critic", "teacher"))
        weights, data = components.weights, components.data
        assert components.pool is not None
        assert weights is not None
        sampling = SamplingParams(config.policy.generation.max_new_tokens, stop_token_ids=(data.end_of_sequence,))
        source = PacedRolloutSource(
            components.pool, data.train, sampling=sampling, num_generations=1, seed=config.sft.seed
        )
        state = {"rollouts": source, "weights": weights}
        steps = run.steps(config.sft.max_num_steps, models=components.models, state=state)
        source.adopt(weights.publish())
        for step in steps:
            with run.phase("generation"):
                groups = source.collect(config.policy.train_global_batch_size)
            columns = [name for name in groups[0].columns if name != RECORD]
            batch = Batch.concat([group.columns.only(columns) for group in groups])
            with run.phase("logprobs"):
                ours = policy.infer(batch, [LOGPROBS]).ragged("logprobs")
                targets = teacher.infer(batch, [LOGPROBS]).ragged("logprobs")
                values = critic.infer(batch, [VALUES]).ragged("values")
            sampled = batch.ragged(LOSS_MASK).values == 1
            differences = np.abs(ours.values - batch.ragged(GENERATION_LOGPROBS).values)[sampled]
            with run.phase("training"):
                of_critic = critic.train_step(batch.with_columns({"targets": targets}), ValueLoss())
                of_policy = policy.train_step(batch, NLLLoss())
            with run.phase("weight_sync"):
                source.adopt(weights.publish())
            run.record(step, {f"train/{name}": value for name, value in of_policy.items()})
            run.record(step, {f"critic/{name}": value for name, value in of_critic.items()})
            run.record(step, {"teacher/sum": float(targets.values.sum()), "values/sum": float(values.values.sum())})
            run.record(step, {"mismatch/max": float(differences.max())})
