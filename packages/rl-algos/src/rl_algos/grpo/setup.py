"""From the resolved config to the objects of the GRPO loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.data.prompts import prompt_stream, validation_prompts
from rl_algos.data.stream import Stream
from rl_algos.grpo.config import LossConfig
from rl_algos.grpo.loop import train
from rl_algos.grpo.validation import Validation
from rl_algos.losses.policy import ImportanceCorrection, KLPenalty, PolicyLoss
from rl_algos.rollouts.source import SyncRolloutSource
from rl_core.generation import SamplingParams
from rl_core.model_config import GenerationConfig
from rl_core.plugins import RolloutNeeds
from rl_core.rollout import Prompt
from rl_core.run import Components, Run


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


def prepare(config: Any, tokenizer: Any, datasets: Datasets) -> GRPOData:
    """Tokenise and check the prompts; each leaves room for a whole completion."""
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


def rollouts(config: Any, data: GRPOData) -> RolloutNeeds:
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


def run(config: Any, components: Components, run: Run) -> None:
    """Train as the config says."""
    data: GRPOData = components.data
    assert components.pool is not None, "GRPO generates"
    assert components.weights is not None, "GRPO generates"
    generation = config.policy.generation
    source = SyncRolloutSource(
        components.pool,
        data.train,
        sampling=training_sampling(generation, data.end_of_sequence),
        num_generations=config.grpo.num_generations_per_prompt,
        seed=config.grpo.seed,
        max_failed_share=config.grpo.max_failed_share,
    )
    train(
        config.grpo,
        policy_loss(config),
        policy=components.models["policy"],
        rollouts=source,
        weights=components.weights,
        validation=Validation(data.validation, validation_sampling(generation, data.end_of_sequence), config.grpo),
        run=run,
        rows_per_minibatch=config.policy.train_global_batch_size,
    )


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


def policy_loss(config: Any) -> PolicyLoss:
    """The loss a config describes."""
    loss: LossConfig = config.loss_fn
    kl = KLPenalty(
        weight=loss.reference_policy_kl_penalty,
        estimator=loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    importance = ImportanceCorrection(
        truncation=loss.truncated_importance_sampling_type,
        low=loss.truncated_importance_sampling_ratio_min,
        high=loss.truncated_importance_sampling_ratio,
    )
    has_one_minibatch = config.policy.train_global_batch_size == config.grpo.rollouts_per_step
    on_policy = has_one_minibatch if loss.force_on_policy_ratio is None else loss.force_on_policy_ratio
    return PolicyLoss(
        clip_low=loss.ratio_clip_min,
        clip_high=loss.ratio_clip_max,
        dual_clip=loss.ratio_clip_c,
        level="token" if loss.token_level_loss else "sequence",
        sequence_ratio=loss.sequence_level_importance_ratios,
        cispo=loss.use_cispo,
        on_policy=on_policy,
        kl=kl if kl.weight > 0 else None,
        importance=importance if loss.use_importance_sampling_correction else None,
        mismatch_threshold=config.grpo.seq_logprob_error_threshold,
        temperature=config.policy.generation.temperature,
    )
