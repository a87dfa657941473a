"""The section `megatron_cfg` of NeMo RL."""

from __future__ import annotations

from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_FIELDS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "fine_grained_activation_offloading",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "offload_modules",
)
"""Keys of `megatron_cfg` that are fields of Megatron's config, passed on by `megatron_kwargs`."""

_OF_TRANSFORMER_ENGINE = ("apply_rope_fusion", "gradient_accumulation_fusion", "moe_permute_fusion")
"""Fields of layers that have no adapters."""

_ON = ("apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion")
"""Fields that are on unless `megatron_kwargs` turns them off."""


def translate_megatron(config: Translation, model: str) -> None:
    """Answer the keys of `megatron_cfg` of a model that Megatron trains.

    Args:
        config: Translation that holds the foreign values and receives the answers.
        model: Key of the model's section.
    """
    section = f"{model}.megatron_cfg"
    adapts = bool(config.get(f"{section}.peft.enabled"))
    fields = [f"{section}.{name}" for name in _FIELDS]
    fields += [key for key in config.keys(f"{section}.model_overrides") if key != f"{section}.model_overrides"]
    # A key that neither system has is a field of Megatron's config, which the backend accepts or refuses by name.
    fields += [key for key in config.keys(section) if key.count(".") == 2 and not config.is_known(key)]
    for key in fields:
        name, value = key.rpartition(".")[2], config.get(key)
        here = f"{section}.megatron_kwargs.{name}"
        is_off = value in (None, [], False) and not (value is False and name in _ON)
        if is_off or (adapts and name in _OF_TRANSFORMER_ENGINE):
            config.unneeded(key, "adapters do not have this kernel" if adapts and value else "off")
        else:
            config.put(here, value)
            config.answer(key, Kind.RENAMED, here)
    _multi_token_prediction(config, section)
    _experts(config, section)
    if config.get(f"{section}.sequence_parallel") and config.get(f"{section}.tensor_model_parallel_size", 1) == 1:
        config.unneeded(f"{section}.sequence_parallel", "there is only one tensor-parallel rank")
    _recompute(config, section)


def _multi_token_prediction(config: Translation, section: str) -> None:
    """Answer layers that draft tokens: if their loss does not reach the policy, it is the same policy without them."""
    weight = f"{section}.mtp_loss_scaling_factor"
    if config.get(weight) and config.get(f"{section}.mtp_num_layers") and config.get(f"{section}.mtp_detach_heads"):
        config.unneeded(weight, "the layers only draft tokens, and their loss does not reach the policy")
        config.notes.append(
            f"{section}.mtp_*: the layers that draft tokens are not trained. policy.draft_head trains them for "
            "speculative decoding, with dtensor_cfg"
        )
    elif not config.get(f"{section}.mtp_num_layers"):
        config.unneeded(weight, "the model has no such layers")


def _recompute(config: Translation, section: str) -> None:
    """Answer the three keys of recomputation, which are two here."""
    switch, granularity, modules = (
        f"{section}.{name}" for name in ("activation_checkpointing", "recompute_granularity", "recompute_modules")
    )
    here = f"{section}.recompute"
    if config.keys(switch):
        config.put(here, config.get(granularity, "full") if config.get(switch) else "none")
        config.answer(switch, Kind.RENAMED, here)
    if config.written(here) in ("full", "selective"):
        config.follows([granularity], here)
    config.unneeded(granularity, "nothing is recomputed")
    if config.written(here) != "selective" or not config.get(modules):
        config.unneeded(modules, f"{here} is not selective, or the default suffices")


def _experts(config: Translation, section: str) -> None:
    experts = config.get(f"{section}.expert_model_parallel_size", 1)
    tensor = config.get(f"{section}.tensor_model_parallel_size", 1)
    if experts == 1:
        config.unneeded(f"{section}.expert_tensor_parallel_size", "experts are not sharded over ranks")
    parallel = f"{section}.sequence_parallel"
    if experts > 1 and tensor > 1 and not config.get(parallel):
        config.put(parallel, True)
        config.follows([parallel], f"{parallel}: true; otherwise Megatron does not spread experts over such ranks")
    dispatcher, dtype = f"{section}.moe_token_dispatcher_type", config.get(f"{section}.moe_router_dtype") or "fp32"
    is_flexible = config.get(dispatcher) == "flex" or config.get(f"{section}.moe_enable_deepep")
    if is_flexible or config.get(dispatcher) == "allgather":
        may_be_flexible = is_flexible and dtype == "fp32" and experts * tensor > 1
        config.put(dispatcher, "flex" if may_be_flexible else "alltoall")
        config.follows([dispatcher], f"{dispatcher}: {config.written(dispatcher)}, which computes the same")
    config.follows([f"{section}.moe_enable_deepep"], f"{dispatcher}")
    for name in ("moe_flex_dispatcher_backend", "moe_hybridep_num_sms"):
        key = f"{section}.{name}"
        if config.get(key) is not None and config.written(dispatcher) == "flex":
            config.rename(key, f"{section}.megatron_kwargs.{name}")
        config.unneeded(key, f"{dispatcher} is not flex")
    _balancing(config, section, experts)
    rate = f"{section}.moe_router_bias_update_rate"
    if config.get(rate) and experts == 1:
        config.unneeded(rate, "a model without experts has no router biases")
    elif config.get(rate):
        config.notes.append(
            f"{rate}: remove it if the routers of the model have no biases, as those of DeepSeek-V3 have"
        )


def _balancing(config: Translation, section: str, experts: int) -> None:
    """Answer the loss that balances experts, whose weight is a field of the model's own config."""
    key, model = f"{section}.moe_router_load_balancing_type", section.partition(".")[0]
    overrides = config.get(f"{model}.hf_config_overrides") or {}
    weights = [each.get("router_aux_loss_coef") for each in (overrides, overrides.get("text_config") or {})]
    weight = next((each for each in weights if each is not None), None)
    if config.get(key, "none") == "none":
        return
    if weight:
        config.put(f"{section}.moe_aux_loss_coeff", weight)
        config.notes.append(f"{section}.moe_aux_loss_coeff is router_aux_loss_coef of {model}.hf_config_overrides")
        return
    if weight == 0:
        config.unneeded(key, "its weight, router_aux_loss_coef, is 0")
    elif config.get(f"{section}.freeze_moe_router"):
        config.unneeded(key, "the routers are frozen")
    elif experts == 1:
        config.unneeded(key, "a model without experts does not have this loss")
        config.notes.append(
            f"{key}: if the model has experts, set it, and {section}.moe_aux_loss_coeff to the model's own weight"
        )
    else:
        name = key.partition(".")[2]
        text = f"a balancing loss of unknown weight ({name}): set it to none, or give"
        config.refuse(key, f"{text} hf_config_overrides.router_aux_loss_coef")
