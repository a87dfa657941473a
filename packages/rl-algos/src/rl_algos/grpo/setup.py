"""From the resolved config to the objects of the GRPO loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rl_algos.data.example import info_of
from rl_algos.data.examples import Datasets
from rl_algos.data.examples import load as load_all
from rl_algos.data.stream import Stream
from rl_algos.grpo.collect import Validation
from rl_algos.grpo.config import GRPORoot
from rl_algos.grpo.estimators import reads
from rl_algos.grpo.loop import train
from rl_algos.grpo.loss import objective_of
from rl_algos.rollouts.source import SyncRolloutSource
from rl_core.environments.instance import unknown_environment
from rl_core.environments.trial import Attempt, attempts_on
from rl_core.errors import DataError
from rl_core.generation import Evaluation, RolloutPool, SamplingParams
from rl_core.model_config import GenerationConfig
from rl_core.plugins import RolloutNeeds
from rl_core.rollout import Prompt
from rl_core.run import Components, Run

TRIED_ROWS = 2
"""Rows of a dataset that its environment is tried on."""


@dataclass(frozen=True)
class GRPOData:
    """What the driver loads before anything is started.

    Args:
        train: prompts to train on.
        validation: prompts to validate on.
        end_of_sequence: token that ends every completion.
    """

    train: Stream[Prompt]
    validation: Sequence[Prompt]
    end_of_sequence: int


def load(config: GRPORoot) -> Datasets:
    """All data of the config, before it is tokenised, every row with an environment that scores it.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: if a file or a processor that a dataset names is not there.
    """
    datasets = load_all(config)
    known = set(type(config.env).model_fields)
    for dataset in (*datasets.train, *datasets.validation):
        for row_id in dataset.examples:
            name = dataset.environment(row_id)
            # what `env_name` says has been checked; a row may not name a file, as data must not choose code
            if not dataset.settings.env_name and name not in known:
                raise DataError(f"{dataset.place(row_id)}: {unknown_environment(name, sorted(known))}, as env_name")
    return datasets


def attempts(config: GRPORoot, datasets: Datasets) -> Mapping[str, list[Attempt]]:
    """The first rows of every dataset with responses, by the environment that scores them."""
    found: dict[str, list[Attempt]] = {}
    for dataset in (*datasets.train, *datasets.validation):
        for row_id in islice(dataset.examples, TRIED_ROWS):
            example = dataset.examples[row_id]
            tried = found.setdefault(dataset.environment(row_id), [])
            tried += attempts_on(dataset.place(row_id), row_id, example.messages, info_of(example))
    return found


def prepare(config: GRPORoot, tokenizer: Any, datasets: Datasets) -> GRPOData:
    """Tokenise and check the prompts; each leaves room for a whole completion."""
    # imports transformers, which takes a second that `load` need not pay
    from rl_algos.data.prompts import prompt_stream, validation_prompts

    room = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    train = prompt_stream(
        datasets.train,
        config.data,
        tokenizer,
        max_tokens=room,
        seed=config.grpo.seed,
        max_num_epochs=config.grpo.max_num_epochs,
    )
    held_out = validation_prompts(datasets.validation, config.data, tokenizer, max_tokens=room)
    return GRPOData(train, held_out, tokenizer.eos_token_id)


def rollouts(config: GRPORoot, data: GRPOData) -> RolloutNeeds:
    """The multi-turn program, over the environments that the prompts name."""
    return RolloutNeeds(
        program="rl_algos.rollouts.program:MultiTurnProgram",
        program_args={
            "max_turns": config.grpo.max_rollout_turns,
            "max_tokens": config.policy.max_total_sequence_length,
        },
        environments=frozenset(
            prompt.environment for prompts in (*data.train.datasets, data.validation) for prompt in prompts
        ),
    )


def run(config: GRPORoot, components: Components, run: Run) -> None:
    """Train as the config says."""
    data: GRPOData = components.data
    assert components.pool is not None, "GRPO generates"
    assert components.weights is not None, "GRPO generates"
    generation = config.policy.generation
    sampling = validation_sampling(generation, data.end_of_sequence)
    greedy = replace(training_sampling(generation, data.end_of_sequence), temperature=0.0)
    train(
        config.grpo,
        objective_of(config),
        policy=components.models["policy"],
        rollouts=_source(config, data, components.pool),
        weights=components.weights,
        validation=Validation(data.validation, sampling, config.grpo),
        run=run,
        rows_per_minibatch=config.policy.train_global_batch_size,
        greedy=greedy if reads(config.grpo, "baselines") else None,
    )


def evaluate(config: GRPORoot, data: GRPOData, pool: RolloutPool) -> Evaluation:
    """Roll out the validation prompts, as a validation of the run would, once each."""
    sampling = validation_sampling(config.policy.generation, data.end_of_sequence)
    return _source(config, data, pool).evaluate(data.validation[: config.grpo.max_val_samples], sampling)


def training_sampling(generation: GenerationConfig, end_of_sequence: int) -> SamplingParams:
    """How training rollouts are drawn."""
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        stop_token_ids=(end_of_sequence, *generation.stop_token_ids),
        stop_strings=tuple(generation.stop_strings),
    )


def validation_sampling(generation: GenerationConfig, end_of_sequence: int) -> SamplingParams:
    """How validation rollouts are drawn."""
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature,
        top_p=generation.val_top_p,
        top_k=generation.val_top_k or 0,
        stop_token_ids=(end_of_sequence, *generation.stop_token_ids),
        stop_strings=tuple(generation.stop_strings),
    )


def _source(config: GRPORoot, data: GRPOData, pool: RolloutPool) -> SyncRolloutSource:
    return SyncRolloutSource(
        pool,
        data.train,
        sampling=training_sampling(config.policy.generation, data.end_of_sequence),
        num_generations=config.grpo.num_generations_per_prompt,
        seed=config.grpo.seed,
        max_failed_share=config.grpo.max_failed_share,
    )
