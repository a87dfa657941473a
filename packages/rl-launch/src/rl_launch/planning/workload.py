"""The rows of a training step, from the config alone: how many, how long, and how they are cut into microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_algos import PreferenceConfig
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
        num_rows: Rows.
        group: Rows of a prompt.
        prompt: Mean tokens of a prompt; 0 without generation.
        completion: Mean tokens of a completion; of a whole row without generation.
        longest: Maximum tokens of a completion, or of a whole row.
        longest_row: Maximum tokens of a row.
        updates: Optimizer steps.
        passes: Times that each row is trained on.
        staleness: Steps by which rollouts may be older than the weights; 0 if generation and training take turns.
        assumptions: What is assumed of lengths, as sentences.
    """

    num_rows: int
    group: int
    prompt: float
    completion: float
    longest: int
    longest_row: int
    updates: int
    passes: int
    staleness: int
    assumptions: tuple[str, ...] = ()

    @property
    def row(self) -> float:
        """Mean tokens of a row."""
        return min(self.prompt + self.completion, float(self.longest_row))

    @property
    def num_tokens(self) -> float:
        """Tokens of all rows, prompts included."""
        return self.num_rows * self.row

    @classmethod
    def of(cls, plan: RunPlan, lengths: Lengths) -> Workload:
        """Read the rows of a step from the plan of a run."""
        policy = plan.config.policy
        section = _steps_of(plan)
        longest_row = policy.max_total_sequence_length
        rows, passes = policy.train_global_batch_size, getattr(section, "num_iterations", 1)
        assumptions = []
        if not plan.plugin.generates or section is None:
            rows *= 2 if isinstance(getattr(plan.config, plan.plugin.name, None), PreferenceConfig) else 1
            mean = lengths.completion
            if mean is None:
                mean = longest_row / 2
                assumptions.append(f"rows have {mean:,.0f} tokens, half of max_total_sequence_length (--tokens)")
            return cls(rows, 1, 0, min(mean, longest_row), longest_row, longest_row, 1, 1, 0, tuple(assumptions))
        group = section.num_generations_per_prompt
        count = section.num_prompts_per_step * group
        longest = min(policy.generation.max_new_tokens, longest_row - 1)
        prompt, completion, seen = lengths
        if prompt is None:
            allowed = getattr(plan.config, "data", None)
            most = getattr(allowed, "max_input_seq_length", None) or max(MIN_ROW, longest_row - longest)
            prompt = most / 2
            assumptions.append(f"prompts have {prompt:,.0f} tokens, half of the longest (--prompt-tokens)")
        if completion is None:
            completion = longest / 2
            assumptions.append(f"completions have {completion:,.0f} tokens, half of max_new_tokens (--tokens)")
        longest = longest if seen is None else min(longest, round(seen))
        assumptions.append(f"the longest completion of a step has {longest:,} tokens")
        asynchronous = getattr(section, "async_grpo", None)
        staleness = asynchronous.max_trajectory_age_steps if asynchronous is not None and asynchronous.enabled else 0
        return cls(
            num_rows=count,
            group=group,
            prompt=prompt,
            completion=min(completion, longest),
            longest=longest,
            longest_row=longest_row,
            updates=max(1, math.ceil(count / rows)) * passes,
            passes=passes,
            staleness=staleness,
            assumptions=tuple(assumptions),
        )


def _steps_of(plan: RunPlan) -> Any:
    """Return the section that decides on the rollouts of a step; None if there is none."""
    for key in plan.plugin.sections:
        section = getattr(plan.config, key, None)
        if hasattr(section, "num_prompts_per_step"):
            return section
    return None


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
