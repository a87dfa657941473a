"""The mismatch between policy and generator on some rows, and the causes that may explain it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_core.data.ragged import Ragged

MAX_ROWS, MAX_SAMPLED = 64, 1024
"""Maximum number of rows that are examined, and of sampled tokens in them, at least one row."""

MAX_DIFFERENCE = 20.0
"""Differences of logprobs count at most this much: one token that a filter left out would outweigh all others."""

MIN_GAP = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.0025}
"""Mean absolute difference of logprobs, by precision, up to which policy and generator agree: kernels round."""

MISMATCH_KL = 0.01
"""Divergence of generator and policy, in nats per token (`mismatch/kl`), from which on it is examined."""

CLOSED = "mismatch/closed/"
"""Beginning of the names of metrics: the share of the gap that a cause closes, as a run has found it by itself."""

MIN_CLOSED = 0.3
"""Share of the gap that a change has to close to be called a cause."""

FITTED_COST = 0.01
"""Share of the gap by which a change with a fitted number has to be better than one without."""

Side = Literal["generator", "policy", "either"]
"""The side that computes something else than `transformers` with the configured settings."""


@dataclass(frozen=True)
class MismatchRows:
    """Rows that a generator has sampled, as both sides have scored them.

    Args:
        tokens: Int32 `[tokens]` per row.
        mask: Uint8 `[tokens]`, 1 at sampled tokens.
        generation: Float32 `[tokens]`, logprobs of the generator at sampled tokens.
        policy: Float32 `[tokens]`, logprobs of the policy at sampled tokens; None if they are not known.
        prompts: The messages of each row's prompt; empty if they are not known.
    """

    tokens: Ragged
    mask: Ragged
    generation: Ragged
    policy: Ragged | None = None
    prompts: tuple[Sequence[Mapping[str, Any]], ...] = ()

    def first(self) -> MismatchRows:
        """Return the first rows, as many as are examined."""
        ends = np.cumsum(self.mask.sums())
        count = max(1, min(MAX_ROWS, int((ends <= MAX_SAMPLED).sum())))
        rows = np.arange(min(count, len(self.tokens)))
        columns = (self.tokens, self.mask, self.generation)
        tokens, mask, generation = (column.select(rows) for column in columns)
        policy = None if self.policy is None else self.policy.select(rows)
        return MismatchRows(tokens, mask, generation, policy, self.prompts[: len(rows)])

    def write(self, path: Path) -> None:
        """Write the rows into a new file, `.npz`."""
        columns: dict[str, np.ndarray] = {"mask": self.mask.values, "generation": self.generation.values}
        if self.policy is not None:
            columns["policy"] = self.policy.values
        prompts = np.frombuffer(json.dumps([list(map(dict, each)) for each in self.prompts]).encode(), np.uint8)
        columns |= {"tokens": self.tokens.values, "offsets": self.tokens.offsets, "prompts": prompts}
        # `savez` has an argument allow_pickle, which a dict of arrays could mean as well.
        np.savez(path, allow_pickle=False, **columns)

    @classmethod
    def read(cls, path: str | Path) -> MismatchRows:
        """Return the rows of a file that `write` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
        tokens = Ragged(found["tokens"], found["offsets"])
        return cls(
            tokens,
            tokens.like(found["mask"]),
            tokens.like(found["generation"]),
            tokens.like(found["policy"]) if "policy" in found else None,
            tuple(json.loads(found["prompts"].tobytes())),
        )


@dataclass(frozen=True)
class OlderWeights:
    """Weights that the policy had before.

    Args:
        label: Words for them, such as `the weights after step 3`.
        folder: Folder of Hugging Face files.
        is_base: True for the weights that the run began with, which adapters are added to.
    """

    label: str
    folder: str
    is_base: bool = False


@dataclass(frozen=True)
class MismatchCase:
    """All that is needed to examine a mismatch: plain data, which goes to another process as JSON.

    Args:
        model: Folder of Hugging Face files with the weights that sampled the rows.
        rows: File of `MismatchRows`.
        precision: Precision of the policy.
        overrides: `policy.hf_config_overrides`.
        temperature, top_k, top_p, min_p: Sampling as it is configured.
        older: Weights that the policy had before, the newest first.
        has_adapters: True if the policy trains low-rank adapters.
        tokenizer: Section `policy.tokenizer` as plain data; the tokenizer is the model's if it has no name.
        device: Torch device that computes.
    """

    model: str
    rows: str
    precision: str = "float32"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    older: tuple[OlderWeights, ...] = ()
    has_adapters: bool = False
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def as_json(self) -> str:
        """Return the case as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MismatchCase:
        """Return the case of `as_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "older": tuple(OlderWeights(**each) for each in fields["older"])})


@dataclass(frozen=True)
class TriedChange:
    """One change, and the gap that it leaves.

    Args:
        cause: Key of `CAUSES`.
        detail: The change, in words.
        side: The side that the change is on.
        left: Mean absolute difference of logprobs that is left.
        fitted: Number of values that were fitted to the rows.
    """

    cause: str
    detail: str
    side: Side
    left: float
    fitted: int = 0


@dataclass(frozen=True)
class MismatchFinding:
    """A cause with the share of the gap that it closes.

    Args:
        cause: Key of `CAUSES`.
        title: The cause in words.
        detail: The change that closes the gap, in words.
        side: The side that the change is on.
        closed: Share of the gap that it closes; 1 closes all.
        remedy: What to do, with the key.
    """

    cause: str
    title: str
    detail: str
    side: Side
    closed: float
    remedy: str


@dataclass(frozen=True)
class MismatchGap:
    """Differences of logprobs between policy and generator.

    Args:
        mean, largest: Mean and maximum of the absolute differences.
        rows: Share of the rows whose mean difference is above the noise of kernels.
        num_tokens: Number of sampled tokens that were compared.
        generator, policy: Mean absolute differences of either side from `transformers` with the configured settings;
            None for the policy if its logprobs are not known.
    """

    mean: float
    largest: float
    rows: float
    num_tokens: int
    generator: float
    policy: float | None

    @property
    def side(self) -> Side:
        """The side that is off: the one that is much farther from `transformers`."""
        if self.policy is None:
            return "generator"
        if self.policy < 0.5 * self.generator:
            return "generator"
        return "policy" if self.generator < 0.5 * self.policy else "either"


_OTHER_MODEL = "Both sides load policy.model_name with policy.hf_config_overrides"

CAUSES: Mapping[str, tuple[str, str]] = {
    "temperature": ("temperature in one of the two", "Both sides take it from policy.generation.temperature."),
    "top_p": ("top-p in one of the two", "Both sides take it from policy.generation.top_p."),
    "top_k": ("top-k in one of the two", "Both sides take it from policy.generation.top_k."),
    "min_p": ("min-p in one of the two", "Both sides take it from policy.generation.min_p."),
    "filter": (
        "sampler filter of one of the two",
        "Both sides take it from policy.generation.top_p, top_k and min_p, after the temperature.",
    ),
    "penalty": (
        "penalty on tokens that were there before",
        "The policy has none: remove it from generation_config.json of policy.model_name, or from the engine.",
    ),
    "forbidden": (
        "tokens that the sampler leaves out",
        "Both sides sample from all tokens: end completions by policy.generation.stop_token_ids instead.",
    ),
    "prompt": (
        "chat template, or the ends of the prompt",
        (
            "Both sides take the tokens that policy.tokenizer.chat_template writes: look for white space and special "
            "tokens that one of them adds."
        ),
    ),
    "end": (
        "another end-of-sequence token",
        "Set policy.generation.stop_token_ids, and compare eos_token_id in config.json and generation_config.json.",
    ),
    "retokenised": (
        "tokens made anew from text",
        "Train on the tokens that were sampled, and use one tokenizer (policy.tokenizer.name).",
    ),
    "stale": (
        "stale weights",
        (
            "Weights did not arrive: try policy.generation.weight_sync=disk, and lower "
            "policy.generation.canary_tolerance, so that the run stops."
        ),
    ),
    "age": (
        "rollouts of older weights",
        "Lower grpo.async_grpo.max_trajectory_age_steps, or weight them by loss_fn.importance.",
    ),
    "adapter": ("stale adapter", "Adapters did not arrive: set policy.generation.lora_sync=merged."),
    "adapter_scale": (
        "another scale of the adapter",
        "Compare policy.lora_cfg.alpha, dim and use_rslora, or set policy.generation.lora_sync=merged.",
    ),
    "prefix_cache": (
        "prefix cache kept over a weight change",
        (
            "Keys and values of older weights are used: set "
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true, or "
            "policy.generation.vllm_cfg.vllm_kwargs.enable_prefix_caching=false."
        ),
    ),
    "stale_part": (
        "older weights in a part of the model",
        "These weights did not arrive: try policy.generation.weight_sync=disk and weight_sync_encoding=full.",
    ),
    "tied_head": ("tied head", "Set policy.hf_config_overrides.tie_word_embeddings to what the files have."),
    "missing": ("weights that one of the two lacks", f"{_OTHER_MODEL}: compare the names in its files."),
    "rope_theta": ("theta of rotary embeddings", f"{_OTHER_MODEL}: set rope_parameters there."),
    "rope_scaling": ("scaling of rotary embeddings", f"{_OTHER_MODEL}: set rope_parameters there."),
    "norm_epsilon": ("epsilon of the norms", f"{_OTHER_MODEL}: set this field there."),
    "router": ("router of the experts", f"{_OTHER_MODEL}: set this field there."),
    "attention": ("window of attention", f"{_OTHER_MODEL}: set the field of config.json there."),
    "config": ("a field of config.json", f"{_OTHER_MODEL}: set this field there."),
    "head_dtype": (
        "dtype of the head",
        "Both sides compute the head in policy.precision: look for a setting of the engine that changes it.",
    ),
    "dtype": ("dtype of the model", "Both sides compute in policy.precision."),
    "attention_dtype": ("dtype of attention or of its cache", "Set policy.generation.vllm_cfg.kv_cache_dtype=auto."),
    "router_dtype": ("dtype of the router", "Set moe_router_replay in the section of the policy's backend."),
    "quantization": ("quantised weights", "Remove policy.generation.vllm_cfg.quantization, or set loss_fn.importance."),
    "engine": ("a setting of the engine", "Set this key."),
}
"""Causes by name: words for it, and the remedy with its key."""


def bounded(differences: np.ndarray) -> np.ndarray:
    """Return differences that count at most `MAX_DIFFERENCE`, also those that are not numbers."""
    return np.minimum(np.nan_to_num(differences, nan=MAX_DIFFERENCE, posinf=MAX_DIFFERENCE), MAX_DIFFERENCE)


def mean_difference(first: np.ndarray, second: np.ndarray) -> float:
    """Return the mean absolute difference."""
    return float(bounded(np.abs(first - second)).mean())


def ranked(gap: MismatchGap, attempts: Iterable[TriedChange]) -> tuple[MismatchFinding, ...]:
    """Return causes by the share of the gap that they close, most first.

    Args:
        gap: The gap.
        attempts: Changes that were tried; the best of each cause counts.
    """
    size, order = max(gap.mean, 1e-12), list(CAUSES)

    def cost(attempt: TriedChange) -> float:
        return attempt.left + FITTED_COST * attempt.fitted * gap.mean

    best: dict[str, TriedChange] = {}
    for attempt in attempts:
        if attempt.cause not in best or cost(attempt) < cost(best[attempt.cause]):
            best[attempt.cause] = attempt

    def place(attempt: TriedChange) -> tuple[float, int]:
        return round(cost(attempt) / size, 3), order.index(attempt.cause)

    return tuple(
        MismatchFinding(
            each.cause, CAUSES[each.cause][0], each.detail, each.side, 1 - each.left / size, CAUSES[each.cause][1]
        )
        for each in sorted(best.values(), key=place)
    )
