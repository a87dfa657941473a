"""Preference optimisation: the supervised loop on pairs of responses, or on single ones with a label."""

from __future__ import annotations

from typing import Any

from rl_algos.dpo.config import DPORoot
from rl_algos.dpo.kto import with_reference_point
from rl_algos.dpo.loss import KTO, loss_of, uses_reference
from rl_algos.preference.reference import ReferenceLogprobs
from rl_algos.preference.rows import judged_batch, pair_batch
from rl_algos.supervised.loop import Objective, train
from rl_core.batch import Batch
from rl_core.model import Model
from rl_core.run import Components, Run


def run(config: DPORoot, components: Components, run: Run) -> None:
    """Train the policy as configured; `components.data` is what `prepare` returned."""
    policy = components.models["policy"]
    objective = objective_of(config)
    train(config.dpo, objective, policy, components.data, run, batch_size=config.policy.train_global_batch_size)


def objective_of(config: DPORoot) -> Objective[Any]:
    """The objective: the configured loss, and the columns that it needs from a model."""
    dpo, loss = config.dpo, loss_of(config.dpo)
    if not uses_reference(dpo):
        return Objective(loss, pair_batch)
    reference = ReferenceLogprobs(cached=dpo.cache_reference_logprobs)
    if dpo.loss.name != KTO:
        return Objective(loss, pair_batch, reference)

    def complete(batch: Batch, policy: Model) -> Batch:
        max_tokens = config.policy.max_total_sequence_length
        return with_reference_point(reference(batch, policy), policy, max_tokens=max_tokens)

    return Objective(loss, judged_batch, complete)
