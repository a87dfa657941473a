"""A whole config of NeMo RL."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.nemo_rl.data import translate_data
from rl_launch.foreign.nemo_rl.environments import translate_environments
from rl_launch.foreign.nemo_rl.evaluation import translate_evaluation
from rl_launch.foreign.nemo_rl.generation import translate_asynchrony, translate_generation
from rl_launch.foreign.nemo_rl.model import translate_model, translate_pairs
from rl_launch.foreign.nemo_rl.objective import translate_loop, translate_loss
from rl_launch.foreign.nemo_rl.validation import translate_validation
from rl_launch.foreign.translation import Translation

ALGORITHMS = {"grpo": "grpo", "ppo": "ppo", "sft": "sft", "dpo": "dpo", "rm": "rm", "distillation": "distillation"}
"""Sections of NeMo RL that choose the script, and the algorithm here."""

_EVALUATION = ("eval", "generation")


def algorithm_of(values: dict[str, Any]) -> str:
    """The algorithm of a config by its sections; empty if none of them says."""
    found = [name for key, name in ALGORITHMS.items() if isinstance(values.get(key), dict)]
    if not found and all(isinstance(values.get(key), dict) for key in _EVALUATION):
        return "evaluation"
    return found[0] if len(found) == 1 else "grpo" if "grpo" in found else ""


def translate(config: Translation) -> None:
    """Answer the keys that need more than a table, then the others."""
    config.put("algorithm", config.algorithm)
    if config.algorithm == "evaluation":
        translate_evaluation(config)
        config.finish()
        _cluster(config)
        return
    _off_policy_distillation(config)
    if config.get("policy.draft.enabled"):
        for key in config.keys("policy.draft"):
            config.unneeded(key, "a draft model does not change what is sampled")
        config.notes.append(
            "policy.draft: the EAGLE head is not trained, and speculative decoding is off. policy.draft_head trains "
            "one, with dtensor_cfg and policy.generation.vllm_cfg.speculation"
        )
    translate_asynchrony(config)
    translate_generation(config)
    for model in ("policy", "value", "teacher"):
        if isinstance(config.values.get(model), dict):
            translate_model(config, model)
    translate_pairs(config)
    translate_loop(config)
    translate_loss(config)
    translate_data(config)
    translate_environments(config)
    translate_validation(config)
    _trackers(config)
    config.finish()
    _cluster(config)


def _off_policy_distillation(config: Translation) -> None:
    if config.get("teachers"):
        for section in ("teachers", "teacher", "token_aligner", "distillation"):
            config.refuse(section, "distillation of logits across tokenizers from given text (teachers, xtoken)")
    if config.get("on_policy_distillation.enabled"):
        config.refuse("on_policy_distillation", "on-policy distillation inside GRPO (on_policy_distillation)")


def _trackers(config: Translation) -> None:
    for name, keys in (("wandb", ("project", "name")), ("mlflow", ("experiment_name", "run_name", "tracking_uri"))):
        if not config.get(f"logger.{name}_enabled"):
            for key in config.keys(f"logger.{name}"):
                config.unneeded(key, f"logger.{name}_enabled is false")
        for each in keys:
            if config.get(f"logger.{name}.{each}") is not None:
                config.rename(f"logger.{name}.{each}", f"logger.{name}.{each}")


def _cluster(config: Translation) -> None:
    config.put("cluster.device", "cuda")
