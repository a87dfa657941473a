"""The rows of a training step, from the config alone: how many, how long, and how they are cut into microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from rl_algos import DistillationConfig, PolicyGradientConfig, PreferenceConfig, RolloutConfig
from rl_algos.online_dpo.config import OnlineDPOConfig
from rl_core.model_config import ModelConfig
from rl_launch.run_config.plan import RunPlan

MIN_ROW = 2
"""Fewest tokens of a row."""


class Lengths(NamedTuple):
    """Mean tokens that the user states.

    Args:
        prompt: Of a prompt; None if it is not known.
        completion: Of a completion, or of a row of data; None if it is not known.
        longest: Of the longest completion of a step; None for the longest that is allowed.
    """

    prompt: float | None = None
    completion: float | None = None
    longest: float | None = None


@dataclass(frozen=True)
class Workload:
    """The rows of a step.

    Args:
        num_rows: Rows; with generation, the rollouts.
        num_trained: Rows that are trained on.
        group: Rows of a prompt.
        prompt: Mean tokens of a prompt; 0 without generation.
        completion: Mean tokens of a completion; of a whole row without generation.
        longest: Maximum tokens of a completion, all turns together, or of a whole row.
        longest_row: Maximum tokens of a row.
        updates: Optimizer steps.
        passes: Times that each row is trained on.
        reads_own: True if the policy reads logprobs of its own before it trains.
        teaches_itself: True if the policy reads logprobs as its own teacher.
        staleness: Steps by which rollouts may be older than the weights; 0 if generation and training take turns.
        assumptions: What is assumed of lengths, as sentences.
    """

    num_rows: int
    num_trained: int
    group: int
    prompt: float
    completion: float
    longest: int
    longest_row: int
    updates: int
    passes: int
    reads_own: bool = False
    teaches_itself: bool = False
    staleness: int = 0
    assumptions: tuple[str, ...] = ()

    @property
    def row(self) -> float:
        """Mean tokens of a row."""
        return min(self.prompt + self.completion, float(self.longest_row))

    @property
    def num_tokens(self) -> float:
        """Tokens of all rows, prompts included."""
        return self.num_rows * self.row

    @property
    def trained(self) -> Workload:
        """The rows that are trained on, for passes over these only."""
        return replace(self, num_rows=self.num_trained)

    @classmethod
    def of(cls, plan: RunPlan, lengths: Lengths) -> Workload:
        """Read the rows of a step from the plan of a run."""
        policy, section = plan.config.policy, steps_section(plan)
        rows, longest_row = policy.train_global_batch_size, policy.max_total_sequence_length
        if not isinstance(section, RolloutConfig):
            rows *= 2 if isinstance(section, PreferenceConfig) else 1
            mean, assumptions = lengths.completion, []
            if mean is None:
                mean = longest_row / 2
                assumptions.append(f"rows have {mean:,.0f} tokens, half of max_total_sequence_length (--tokens)")
            mean = min(mean, longest_row)
            return cls(rows, rows, 1, 0, mean, longest_row, longest_row, 1, 1, assumptions=tuple(assumptions))
        prompt, longest, assumptions = _prompt_and_limit(plan, section, lengths)
        completion, seen = lengths.completion, lengths.longest
        if completion is None:
            completion = min(longest, max(1, longest_row - prompt)) / 2
            several = f" in up to {section.turn_limit} turns" if section.turn_limit > 1 else ""
            assumptions.append(
                f"completions have {completion:,.0f} tokens{several}, half of what is allowed (--tokens)"
            )
        longest = longest if seen is None else min(longest, round(seen))
        assumptions.append(f"the longest completion of a step has {longest:,} tokens")
        if isinstance(section, PolicyGradientConfig) and section.use_dynamic_sampling:
            assumptions.append("every group that is sampled trains, in one round of dynamic sampling")
        count, group = section.rollouts_per_step, section.num_generations_per_prompt
        trained, of_update = count, rows
        if isinstance(section, OnlineDPOConfig):
            pairs = 1 if section.pairing == "best-worst" else group * (group - 1) // 2
            trained, of_update = 2 * section.num_prompts_per_step * pairs, 2 * rows
        passes = section.passes_per_step if isinstance(section, PolicyGradientConfig) else 1
        updates = max(1, math.ceil(trained / of_update)) * passes
        return cls(
            num_rows=count,
            num_trained=trained,
            group=group,
            prompt=prompt,
            completion=min(completion, longest),
            longest=longest,
            longest_row=longest_row,
            updates=updates,
            passes=passes,
            # With one update, the logprobs before it are those of the update itself.
            reads_own=isinstance(section, PolicyGradientConfig) and updates > 1,
            teaches_itself=isinstance(section, DistillationConfig) and section.self_teacher is not None,
            staleness=section.max_staleness,
            assumptions=tuple(assumptions),
        )


def steps_section(plan: RunPlan) -> RolloutConfig | PreferenceConfig | None:
    """Return the section that decides on the rows of a step; None if `train_global_batch_size` alone does."""
    sections = (getattr(plan.config, key, None) for key in plan.plugin.sections)
    return next((each for each in sections if isinstance(each, RolloutConfig | PreferenceConfig)), None)


def _prompt_and_limit(plan: RunPlan, section: RolloutConfig, lengths: Lengths) -> tuple[float, int, list[str]]:
    """Return the mean tokens of a prompt, the maximum tokens of a completion with all its turns, and what is assumed of
    the prompt, as sentences."""
    policy = plan.config.policy
    longest_row = policy.max_total_sequence_length
    of_turn = min(policy.generation.max_new_tokens, longest_row - 1)
    longest = min(of_turn * section.turn_limit, longest_row - 1)
    if lengths.prompt is not None:
        return min(lengths.prompt, longest_row - 1), longest, []
    allowed = getattr(plan.config, "data", None)
    most = getattr(allowed, "max_input_seq_length", None) or max(MIN_ROW, longest_row - of_turn)
    return most / 2, longest, [f"prompts have {most / 2:,.0f} tokens, half of the longest (--prompt-tokens)"]


def microbatch_tokens(model: ModelConfig, *, training: bool) -> int:
    """Return the maximum number of tokens of a microbatch on all context-parallel ranks together."""
    longest, packing = model.max_total_sequence_length, model.sequence_packing
    dynamic = model.dynamic_batching
    rows = model.train_micro_batch_size if training else model.logprob_batch_size
    tokens = None
    for chosen in (packing, dynamic):
        if chosen.enabled:
            tokens = chosen.train_mb_tokens if training else chosen.logprob_mb_tokens
            break
    return max(tokens or rows * longest, longest)


def num_microbatches(model: ModelConfig, work: Workload, data_ranks: int, *, training: bool) -> float:
    """Return the mean number of microbatches of a rank for all rows of a step, each row once.

    Args:
        model: Section of the model.
        work: Rows of the step.
        data_ranks: Ranks with different rows.
        training: True for training, false for logprobs.
    """
    rows, packed = work.num_rows / data_ranks, model.sequence_packing.enabled or model.dynamic_batching.enabled
    updates = work.updates / work.passes if training else 1
    if packed:
        room = max(1.0, microbatch_tokens(model, training=training) // work.row)
    else:
        room = float(model.train_micro_batch_size if training else model.logprob_batch_size)
    return max(updates, math.ceil(rows / updates / room) * updates)
