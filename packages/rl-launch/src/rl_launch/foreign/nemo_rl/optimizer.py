"""Optimizers and schedules of NeMo RL, of both backends."""

from __future__ import annotations

from typing import Any

from rl_launch.foreign.schedules import MegatronSchedule, scaled
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
_OF_FUSED_ADAM = (
    "master_weights",
    "master_weight_dtype",
    "store_param_remainders",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
"""Arguments of FusedAdam that choose how its state is stored."""
_OPTIMIZERS = {"adam": "torch.optim.AdamW", "adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}


def translate_optimizer(config: Translation, model: str, backend: str) -> None:
    """Answer the keys of a model's optimizer and schedule.

    Args:
        config: Translation that holds the foreign values and receives the answers.
        model: Key of the model's section.
        backend: Key of the section of the backend that trains it.
    """
    if f"{model}.optimizer" in config.keys(f"{model}.optimizer"):
        config.unneeded(f"{model}.optimizer", "null; the optimizer of Megatron is used")
    if f"{model}.scheduler" in config.keys(f"{model}.scheduler") and config.get(f"{model}.scheduler") is None:
        config.unneeded(f"{model}.scheduler", "null; the learning rate is constant")
    if model == "teacher":
        return
    updates = _updates_per_step(config, model)
    if backend == "megatron_cfg":
        for name in ("optimizer", "scheduler"):
            for key in config.keys(f"{model}.{name}"):
                config.unneeded(key, f"{model} trains with megatron_cfg, whose {name} is used")
        _megatron_optimizer(config, model, updates)
        return
    if config.get(f"{model}.max_grad_norm") == 0:
        config.put(f"{model}.max_grad_norm", None)
        config.follows([f"{model}.max_grad_norm"], f"{model}.max_grad_norm: null, which turns clipping off")
    name = config.get(f"{model}.optimizer.name", "torch.optim.AdamW")
    if name == _FUSED_ADAM:
        _fused_adam(config, f"{model}.optimizer")
        name = "torch.optim.AdamW"
    if not name.startswith("torch.optim."):
        config.refuse(f"{model}.optimizer.name", f"the optimizer {name}")
        for key in config.keys(f"{model}.optimizer"):
            config.refuse(key, f"the optimizer {name}")
    schedules = config.get(f"{model}.scheduler")
    if isinstance(schedules, dict) and "name" in schedules:
        schedules = [schedules]
    if isinstance(schedules, list):
        schedules = [each for each in schedules if each.get("name") or each.get("milestones")]
        config.put(f"{model}.scheduler", scaled(schedules, updates))
        key = f"{model}.scheduler"
        kind, text = (Kind.SAME, key) if updates == 1 else (Kind.FOLLOWS, _counted(key, updates))
        config.answer(key, kind, text)


def _fused_adam(config: Translation, section: str) -> None:
    """Take the same optimizer of torch, which computes the same step and keeps its state in float32."""
    config.put(f"{section}.name", "torch.optim.AdamW")
    config.follows([f"{section}.name"], f"{section}.name: torch.optim.AdamW, which is the same optimizer")
    for name in _OF_FUSED_ADAM:
        config.unneeded(f"{section}.kwargs.{name}", "the optimizer's state is float32")
    config.notes.append(
        f"{section}: its state and the master weights are float32, which take more memory than bfloat16"
    )


def _updates_per_step(config: Translation, model: str) -> int:
    """Optimizer steps of one step of the loop."""
    loop = config.algorithm
    rows = config.get(f"{loop}.num_prompts_per_step", 0) * config.get(f"{loop}.num_generations_per_prompt", 0)
    batch = config.get(f"{model}.train_global_batch_size", 0)
    passes = config.get("ppo.ppo_epochs", 1) if loop == "ppo" else 1
    return max(1, rows // batch if batch else 1) * passes


def _counted(key: str, updates: int) -> str:
    return f"{key}, counted in optimizer steps, of which a step has {updates}"


def _megatron_optimizer(config: Translation, model: str, updates: int) -> None:
    section = f"{model}.megatron_cfg.optimizer"
    if not config.has(section):
        return
    values = config.get(section) or {}
    kind = _OPTIMIZERS.get(str(values.get("optimizer", "adam")))
    if kind is None:
        config.refuse(f"{section}.optimizer", f"Megatron's optimizer {values.get('optimizer')}")
        return
    arguments: dict[str, Any] = {"lr": values.get("lr", 1e-6), "weight_decay": values.get("weight_decay", 0.0)}
    if kind == "torch.optim.SGD":
        arguments["momentum"] = values.get("sgd_momentum", 0.0)
    else:
        arguments["betas"] = [values.get("adam_beta1", 0.9), values.get("adam_beta2", 0.999)]
        arguments["eps"] = values.get("adam_eps", 1e-8)
    config.put(f"{model}.optimizer.name", kind)
    config.put(f"{model}.optimizer.kwargs", arguments)
    clip = values.get("clip_grad", config.get(f"{model}.max_grad_norm"))
    config.put(f"{model}.max_grad_norm", clip or None)
    config.follows([f"{section}.clip_grad", f"{model}.max_grad_norm"], f"{model}.max_grad_norm")
    if values.get("params_dtype", "float32") not in ("float32", "torch.float32"):
        config.notes.append(f"{section}.params_dtype: master weights are float32, which take more memory than 16 bits")
    if values.get("optimizer_cpu_offload") and model == "policy":
        config.notes.append(f"{section}.optimizer_cpu_offload: the optimizer's state stays on the GPUs")
    used = ["optimizer", "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "min_lr"]
    config.follows([f"{section}.{name}" for name in used], f"{model}.optimizer")
    if values.get("params_dtype") is not None:
        config.unneeded(f"{section}.params_dtype", "master weights are float32")
    schedule = MegatronSchedule.of(values, config.get(f"{model}.megatron_cfg.scheduler") or {})
    problem = schedule.problem
    if problem:
        config.refuse(f"{model}.megatron_cfg.scheduler.{problem[0]}", problem[1])
    else:
        last = config.get(f"{config.algorithm}.max_num_steps", 1000)
        config.put(f"{model}.scheduler", scaled(schedule.torch_schedules(last), updates))
    for key in config.keys(f"{model}.megatron_cfg.scheduler"):
        text = f"{model}.scheduler" if updates == 1 else _counted(f"{model}.scheduler", updates)
        config.follows([key], text)
