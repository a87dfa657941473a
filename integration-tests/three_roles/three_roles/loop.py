"""The policy learns the data, and the critic learns the teacher's logprobs."""

from __future__ import annotations

from typing import Any

from rl_algos.losses.tokens import NLLLoss
from rl_algos.sft.algorithm import SFT
from rl_algos.sft.data import to_batch
from rl_core.model import LOGPROBS, VALUES
from rl_core.run import Components, Run
from three_roles.loss import ValueLoss


class ThreeRoles(SFT):
    """The policy on given rows, as SFT reads them."""

    def run(self, config: Any, components: Components, run: Run) -> None:
        """Take `sft.max_num_steps` steps of both models that train."""
        policy, critic, teacher = (components.models[role] for role in ("policy", "critic", "teacher"))
        data = components.data.train
        for step in run.steps(config.sft.max_num_steps, models=components.models, state={"data": data}):
            batch = to_batch(data.take(config.policy.train_global_batch_size))
            with run.phase("teacher"):
                targets = teacher.infer(batch, [LOGPROBS]).ragged("logprobs")
            with run.phase("values"):
                values = critic.infer(batch, [VALUES]).ragged("values")
            with run.phase("training"):
                of_critic = critic.train_step(batch.with_columns({"targets": targets}), ValueLoss())
                of_policy = policy.train_step(batch, NLLLoss())
            run.record(step, {f"train/{name}": value for name, value in of_policy.items()})
            run.record(step, {f"critic/{name}": value for name, value in of_critic.items()})
            run.record(step, {"teacher/sum": float(targets.values.sum()), "values/sum": float(values.values.sum())})
