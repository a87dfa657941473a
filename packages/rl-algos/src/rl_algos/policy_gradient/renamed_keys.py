"""Keys of `loss_fn` in version 0.1.0, and what to write now."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "ratio_clip_min": "surrogate.clip_low",
    "ratio_clip_max": "surrogate.clip_high",
    "ratio_clip_c": "surrogate.dual_clip",
    "sequence_level_importance_ratios": "surrogate=gspo",
    "use_cispo": "surrogate=cispo",
    "disable_ppo_ratio": "surrogate=reinforce",
    "token_level_loss": "aggregation: token-mean if true, sequence-mean if false",
    "aggregation_divisor": "aggregation.divisor",
    "reference_policy_kl_penalty": "kl.weight",
    "reference_policy_kl_type": "kl.estimator",
    "reference_policy_kl_unbiased": "kl.unbiased",
    "use_on_policy_kl_approximation": "kl.from_generation",
    "use_kl_in_reward": "kl.in_reward",
    "adaptive_kl": "kl.target and kl.horizon",
    "kl_input_clamp_value": "kl.input_clamp",
    "kl_output_clamp_value": "kl.output_clamp",
    "use_importance_sampling_correction": "importance: a section if true, null if false",
    "importance_sampling_level": "importance.level",
    "importance_sampling_batch_normalize": "importance.batch_normalize",
    "importance_sampling_rejection": "importance.rejection",
    "truncated_importance_sampling_type": "importance.truncation",
    "truncated_importance_sampling_ratio": "importance.high",
    "truncated_importance_sampling_ratio_min": "importance.low",
    "staleness_decay": "staleness.decay",
    "off_policy_sequence_mask_threshold": "filters.off_policy_threshold",
    "top_entropy_share": "filters.top_entropy_share",
}
"""What to write for each key, relative to `loss_fn`: a key, a key and its value, or a key and an explanation."""
