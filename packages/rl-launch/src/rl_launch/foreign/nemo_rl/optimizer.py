"""Optimizers and schedules of NeMo RL, for both backends."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from rl_launch.foreign.schedules import FOREVER, warmup_and_decay
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
_STATE_OF_FUSED_ADAM = (
    "master_weights", "master_weight_dtype", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype"
)  # fmt: skip
"""Arguments of FusedAdam that choose how its state is stored."""
_ADAMW = "torch.optim.AdamW"
_MUON = "torch.optim.Muon"
_EIGHT_BIT = dict.fromkeys(
    ("bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.PagedAdamW8bit", "torchao.optim.AdamW8bit"),
    "rl_core.torch.EightBitAdamW",
)
"""Optimizers with the averages of AdamW in 8 bits, and the one that takes the place of all."""
_OPTIMIZERS = {"adam": _ADAMW, "adamw": _ADAMW, "sgd": "torch.optim.SGD", "muon": _MUON, "dist_muon": _MUON}
_COUNTS = ("total_iters", "T_max", "T_0", "step_size")


def translate_optimizer(config: Translation, model: str, backend: str) -> None:
    """Answer the keys of a model's optimizer and schedule.

    Args:
        config: Translation that holds the foreign values and receives the answers.
        model: Key of the model's section.
        backend: Key of the section of the backend that trains it.
    """
    section, scheduler = f"{model}.optimizer", f"{model}.scheduler"
    if section in config.keys(section):
        config.unneeded(section, "null; the optimizer of Megatron is used")
    if scheduler in config.keys(scheduler) and config.get(scheduler) is None:
        config.unneeded(scheduler, "null; the learning rate is constant")
    if model == "teacher":
        return
    loop = config.algorithm
    rows = config.get(f"{loop}.num_prompts_per_step", 0) * config.get(f"{loop}.num_generations_per_prompt", 0)
    batch = config.get(f"{model}.train_global_batch_size", 0)
    passes = config.get("ppo.ppo_epochs", 1) if loop == "ppo" else 1
    updates = max(1, rows // batch if batch else 1) * passes
    if backend == "megatron_cfg":
        for name in ("optimizer", "scheduler"):
            config.unneeded(f"{model}.{name}", f"{model} trains with megatron_cfg, whose {name} is used")
        if config.has(f"{model}.megatron_cfg.optimizer"):
            _translate_megatron_optimizer(config, model, updates)
        return
    if config.get(f"{model}.max_grad_norm") == 0:
        config.put(f"{model}.max_grad_norm", None)
        config.follows([f"{model}.max_grad_norm"], f"{model}.max_grad_norm: null, which turns clipping off")
    name = config.get(f"{section}.name", _ADAMW)
    if name == _FUSED_ADAM:
        # It computes the same step. The optimizer of torch keeps its state in float32.
        config.put(f"{section}.name", _ADAMW)
        config.follows([f"{section}.name"], f"{section}.name: {_ADAMW}, which is the same optimizer")
        for each in _STATE_OF_FUSED_ADAM:
            config.unneeded(f"{section}.kwargs.{each}", "the optimizer's state is float32")
        config.notes.append(
            f"{section}: its state and the master weights are float32, which take more memory than bfloat16"
        )
    elif name in _EIGHT_BIT:
        config.put(f"{section}.name", _EIGHT_BIT[name])
        config.follows([f"{section}.name"], f"{section}.name: {_EIGHT_BIT[name]}, AdamW in 8 bits")
    elif not name.startswith("torch.optim."):
        config.refuse(section, f"the optimizer {name}")
    schedules = config.get(scheduler)
    if isinstance(schedules, dict) and "name" in schedules:
        schedules = [schedules]
    if isinstance(schedules, list):
        schedules = [each for each in schedules if each.get("name") or each.get("milestones")]
        config.put(scheduler, _scaled(schedules, updates))
        config.answer(scheduler, Kind.SAME if updates == 1 else Kind.FOLLOWS, _counted(scheduler, updates))


def _counted(key: str, updates: int) -> str:
    return key if updates == 1 else f"{key}, counted in optimizer steps; a step has {updates}"


def _scaled(schedules: Sequence[Mapping[str, Any]], factor: int) -> list[dict[str, Any]]:
    """Return schedules whose counts of steps are multiplied.

    Args:
        schedules: Entries of a `scheduler` section; not changed.
        factor: Optimizer steps here for each step that the schedules count.
    """
    found = [copy.deepcopy(dict(each)) for each in schedules]
    for each in found if factor > 1 else ():
        arguments = each.get("kwargs") or {}
        for name in _COUNTS:
            if isinstance(arguments.get(name), int) and arguments[name] < FOREVER:
                arguments[name] *= factor
        if "milestones" in each:
            each["milestones"] = [step * factor for step in each["milestones"]]
        if isinstance(arguments.get("milestones"), list):
            arguments["milestones"] = [step * factor for step in arguments["milestones"]]
    return found


def _muon(
    config: Translation, section: str, arguments: Mapping[str, float], adamw: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `torch.optim.Muon` for Megatron's."""
    values = config.get(section) or {}
    mode, factor = values.get("muon_scale_mode", "spectral"), values.get("muon_extra_scale_factor", 1.0)
    if mode not in ("spectral", "shape_scaling"):
        config.refuse(f"{section}.muon_scale_mode", f"the scale mode {mode} of Muon")
    if mode == "spectral":
        factor /= 0.2  # The factor that match_rms_adamw has already.
    if values.get("muon_tp_mode", "blockwise") == "blockwise":
        config.notes.append(f"{section}: Muon orthogonalises whole matrices, not the part of each tensor-parallel rank")
    if values.get("min_lr") and factor != 1:
        config.notes.append(f"{section}.min_lr: the minimum of Muon and of AdamW, whose learning rates differ")
    return {
        # Megatron's scale does not apply to weight decay, which the learning rate multiplies.
        "lr": arguments["lr"] * factor,
        "weight_decay": arguments["weight_decay"] / factor,
        "momentum": values.get("muon_momentum", 0.95),
        "nesterov": values.get("muon_use_nesterov", False),
        "ns_steps": values.get("muon_num_ns_steps", 5),
        "adjust_lr_fn": "match_rms_adamw" if mode == "spectral" else "original",
        "adamw": {**arguments, **adamw},
    }


def _translate_megatron_optimizer(config: Translation, model: str, updates: int) -> None:
    section = f"{model}.megatron_cfg.optimizer"
    values = config.get(section) or {}
    kind = _OPTIMIZERS.get(str(values.get("optimizer", "adam")))
    if kind is None:
        config.refuse(f"{section}.optimizer", f"Megatron's optimizer {values.get('optimizer')}")
        return
    arguments: dict[str, Any] = {"lr": values.get("lr", 1e-6), "weight_decay": values.get("weight_decay", 0.0)}
    adamw = {
        "betas": [values.get("adam_beta1", 0.9), values.get("adam_beta2", 0.999)],
        "eps": values.get("adam_eps", 1e-8),
    }
    if kind == _ADAMW:
        arguments |= adamw
    elif kind == _MUON:
        arguments = _muon(config, section, arguments, adamw)
    else:
        arguments["momentum"] = values.get("sgd_momentum", 0.0)
    config.put(f"{model}.optimizer.name", kind)
    config.put(f"{model}.optimizer.kwargs", arguments)
    if arguments["weight_decay"]:
        # Megatron decays neither biases nor other parameters of one dim.
        config.put(f"{model}.optimizer.decay_norms_and_biases", False)
    config.put(f"{model}.max_grad_norm", values.get("clip_grad", config.get(f"{model}.max_grad_norm")) or None)
    config.follows([f"{section}.clip_grad", f"{model}.max_grad_norm"], f"{model}.max_grad_norm")
    if values.get("params_dtype", "float32") not in ("float32", "torch.float32"):
        config.notes.append(f"{section}.params_dtype: master weights are float32, which take more memory than 16 bits")
    if values.get("optimizer_cpu_offload") and model == "policy":
        config.notes.append(f"{section}.optimizer_cpu_offload: the optimizer's state stays on the GPUs")
    if values.get("params_dtype") is not None:
        config.unneeded(f"{section}.params_dtype", "master weights are float32")
    section = f"{model}.megatron_cfg.scheduler"
    scheduler = config.get(section) or {}
    style = scheduler.get("lr_decay_style") or "constant"
    grows = scheduler.get("start_weight_decay") != scheduler.get("end_weight_decay")
    if style not in ("constant", "linear", "cosine"):
        config.refuse(f"{section}.lr_decay_style", f"the learning-rate schedule {style}")
    elif grows and scheduler.get("weight_decay_incr_style", "constant") != "constant":
        config.refuse(f"{section}.end_weight_decay", "weight decay that changes during training")
    else:
        last = config.get(f"{config.algorithm}.max_num_steps", 1000)
        schedules = warmup_and_decay(
            values.get("lr") or 1e-6,
            warmup=scheduler.get("lr_warmup_iters") or 0,
            decay=style,
            end=scheduler.get("lr_decay_iters") or last,
            last=last,
            start_rate=scheduler.get("lr_warmup_init") or 0.0,
            end_rate=values.get("min_lr") or 0.0,
        )
        config.put(f"{model}.scheduler", _scaled(schedules, updates))
    config.follows([section], _counted(f"{model}.scheduler", updates))
