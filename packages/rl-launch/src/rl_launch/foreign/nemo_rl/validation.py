"""What NeMo RL validates on, and the metric that ranks checkpoints."""

from __future__ import annotations

from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_METRICS = {
    "accuracy": "val:accuracy",
    "loss": "val:loss",
    "val_loss": "val:loss",
    "reward": "val:reward",
    "mean_length": "val:mean_length",
}


def translate_validation(config: Translation) -> None:
    """Answer the keys of validation and of the checkpoints' metric."""
    loop = config.algorithm
    has_data = config.written("data.validation") is not None or _holds_out(config)
    period = config.get(f"{loop}.val_period", 0)
    validates = has_data and (
        (period or 0) > 0 or config.get(f"{loop}.val_at_start") or config.get(f"{loop}.val_at_end")
    )
    if not has_data:
        for name in ("val_period", "val_at_start", "val_at_end", "val_batches", "val_global_batch_size"):
            config.unneeded(f"{loop}.{name}", "there is nothing to validate on")
            config.remove(f"{loop}.{name}")
        if loop in ("sft", "dpo", "rm"):
            config.put(f"{loop}.val_period", 0)
    name = config.get("checkpointing.metric_name")
    if name is None:
        return
    key = "checkpointing.metric_name"
    scope, _, metric = name.replace("/", ":").partition(":") if ":" in name or "/" in name else name.partition("_")
    if scope == "val" and not validates:
        config.unneeded(key, "this run does not validate; the newest checkpoints are kept")
        config.unneeded("checkpointing.higher_is_better", "no metric ranks checkpoints")
    elif scope == "val":
        here = _METRICS.get(metric) or ("val:loss" if metric.endswith("loss") else "val:accuracy")
        if loop in ("sft", "dpo", "rm") and here != "val:loss" and "accuracy" not in metric:
            here = "val:loss"
        config.put(key, here)
        config.answer(key, Kind.SAME if here == name else Kind.FOLLOWS, f"{key}: {here}")
    else:
        config.put(key, f"train:{metric}")
        config.answer(key, Kind.SAME if ":" in name else Kind.FOLLOWS, key)


def _holds_out(config: Translation) -> bool:
    datasets = config.written("data.train")
    several = datasets if isinstance(datasets, list) else [datasets]
    return any(isinstance(each, dict) and each.get("split_validation_size") for each in several)
