"""Preference optimisation: the supervised loop on pairs of responses, or on single ones with a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.dpo.config import DPORoot
from rl_algos.dpo.kto import with_reference_point
from rl_algos.dpo.loss import learns_from_responses, loss_of, uses_reference
from rl_algos.preference.algorithm import PreferenceAlgorithm
from rl_algos.preference.reference import ReferenceLogprobs
from rl_algos.preference.rows import judged_batch, pair_batch
from rl_algos.supervised.loop import Objective, train
from rl_core.data.batch import Batch
from rl_core.model import Model
from rl_core.run import Components, Run

if TYPE_CHECKING:
    from rl_algos.preference.data import PreferenceData


class DPO(PreferenceAlgorithm[DPORoot]):
    """Preference optimization."""

    def prepare(self, config: DPORoot, tokenizer: Any, loaded: Datasets) -> PreferenceData:
        # imports transformers, which takes a second that checks before need not pay
        from rl_algos.dpo.data import prepare

        return prepare(config, tokenizer, loaded)

    def row_reader(self, config: DPORoot) -> RowReader:
        from rl_algos.dpo.data import reader

        return reader(config)

    def run(self, config: DPORoot, components: Components, run: Run) -> None:
        policy = components.models["policy"]
        objective = objective_of(config)
        train(config.dpo, objective, policy, components.data, run, batch_size=config.policy.train_global_batch_size)


def objective_of(config: DPORoot) -> Objective[Any]:
    """The objective: the configured loss, and the columns that it needs from a model."""
    loss = loss_of(config.dpo)
    to_batch: Callable[[Sequence[Any]], Batch] = judged_batch if learns_from_responses(loss) else pair_batch
    if not uses_reference(loss):
        return Objective(loss, to_batch)
    reference = ReferenceLogprobs(cached=config.dpo.cache_reference_logprobs)
    if "kl" not in loss.columns:
        return Objective(loss, to_batch, reference)

    def complete(batch: Batch, policy: Model) -> Batch:
        max_tokens = config.policy.max_total_sequence_length
        return with_reference_point(reference(batch, policy), policy, max_tokens=max_tokens)

    return Objective(loss, to_batch, complete)
