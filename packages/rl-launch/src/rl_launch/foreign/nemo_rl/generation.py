"""How NeMo RL generates, and how far generation runs ahead of training."""

from __future__ import annotations

from rl_launch.foreign.nemo_rl.data import ROLLOUTS, has_images
from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "dynamo": "Dynamo"}
"""Engines that vLLM replaces, by the backend of NeMo RL."""
_SIZES = {"sglang": "sglang_cfg.tp_size", "trtllm": "trtllm_cfg.tensor_parallel_size"}
_IN_BF16 = ("num_first_layers_in_bf16", "num_last_layers_in_bf16")
_IGNORED = "quantization_ignored_layer_kws"


def take_variable(config: Translation, key: str, here: str) -> None:
    """Take an environment variable of workers over, as text."""
    name, value = key.rpartition(".")[2], config.get(key)
    if name.startswith("NRL_"):
        config.unneeded(key, "only NeMo RL reads it")
    elif value is not None and not isinstance(value, dict):
        config.put(f"{here}.{name}", str(value))
        config.answer(key, Kind.RENAMED, f"{here}.{name}")


def translate_asynchrony(config: Translation) -> None:
    """Answer the single controller's settings of how far generation runs ahead."""
    section = f"{config.algorithm}.async_grpo"
    for old in ("async_ppo", "async_distillation"):
        if config.get(f"{config.algorithm}.{old}.enabled") is False:
            config.unneeded(f"{config.algorithm}.{old}", "the run is synchronous")
    if not config.has("async_rl"):
        return
    sampler = config.get("async_rl.sampler.name", "windowed")
    lead = "max_lookahead_versions" if sampler == "in_order" else "max_staleness_versions"
    age = config.get(f"async_rl.sampler.{lead}", 0)
    if sampler not in ("windowed", "weight_fifo", "in_order", "ready_first"):
        config.refuse("async_rl.sampler.name", f"another choice of groups (async_rl.sampler {sampler})")
    elif age:
        if sampler in ("in_order", "ready_first"):
            config.put(f"{section}.sampler", sampler)
        config.put(f"{section}.enabled", True)
        config.put(f"{section}.max_trajectory_age_steps", age)
        config.put(f"{section}.in_flight_weight_updates", True)
        if config.get("async_rl.recompute_kv_cache_after_weight_updates") is False:
            config.put(f"{section}.recompute_kv_cache_after_weight_updates", False)
    for key in config.keys("async_rl"):
        rule = config.table.rule(key)
        if rule is not None:
            config.answer(key, rule.kind, rule.text)


def translate_generation(config: Translation) -> None:
    """Answer the keys of `policy.generation`."""
    section = "policy.generation"
    if config.algorithm not in ROLLOUTS:
        config.unneeded(section, f"{config.algorithm} generates nothing")
        return
    backend = config.get(f"{section}.backend", "vllm")
    if backend in _ENGINES:
        _replace_engine(config, section, backend)
        backend = "vllm"
    elif backend not in ("vllm", "hf", "megatron"):
        config.refuse(f"{section}.backend", f"generation by {backend}")
    if backend != "vllm":
        for name in ("vllm_cfg", "vllm_kwargs"):
            config.unneeded(f"{section}.{name}", f"{section}.backend is {backend}")
    if backend == "megatron":
        own = f"{section}.mcore_generation_config.tensor_model_parallel_size"
        size = config.get(own) or config.get("policy.megatron_cfg.tensor_model_parallel_size", 1)
        if size > 1:
            config.notes.append(
                f"{section}.backend: a replica of the megatron generator is one GPU, in the place of {size}. If the "
                "model does not fit, set vllm and its tensor_parallel_size"
            )
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None)):
        # Releases without these keys validate as they train. Here validation is greedy by default.
        if not config.has(f"{section}.val_{name}"):
            config.put(f"{section}.val_{name}", config.get(f"{section}.{name}", default))
    _lengths(config, section)
    is_on = has_images(config)
    config.unneeded(f"{section}.vllm_kwargs.language_model_only", "it follows from policy.vision.enabled")
    for at in (f"{section}.vllm_kwargs.limit_mm_per_prompt", f"{section}.vllm_cfg.limit_mm_per_prompt"):
        for key in config.keys(at):
            if is_on and key.endswith(".image"):
                config.compute(key, "policy.vision.max_images", config.get(key))
            elif not config.get(key):
                config.unneeded(key, "0")
    if backend == "vllm":
        _vllm(config, section)
    if config.get(f"{section}.colocated.enabled", True):
        config.unneeded(f"{section}.colocated.resources", "generation shares the policy's devices")
    elif config.get(f"{section}.colocated.resources.num_nodes") and config.get("cluster.num_nodes", 1) == 1:
        config.unneeded(f"{section}.colocated.resources.num_nodes", "there is only one node")
    for key in config.keys(section):
        if (key.startswith(f"{section}.val_top_k") or key.endswith(".top_k")) and config.get(key, 0) == -1:
            config.unneeded(key, "-1 samples from all tokens, which is the default")


def _replace_engine(config: Translation, section: str, backend: str) -> None:
    """Take vLLM in the place of another engine, which samples from the same distribution."""
    name = _ENGINES[backend]
    config.put(f"{section}.backend", "vllm")
    config.follows([f"{section}.backend"], f"{section}.backend: vllm, in the place of {name}")
    own = ". To use SGLang, start servers and set policy.generation.backend=server" if backend == "sglang" else ""
    config.notes.append(f"{section}.backend: vllm, in the place of {name}, whose settings are not taken over{own}")
    size = f"{section}.{_SIZES.get(backend, '')}"
    if backend in _SIZES and config.get(size):
        here = f"{section}.vllm_cfg.tensor_parallel_size"
        config.put(here, config.get(size))
        config.follows([size, here], here)
    for part in ("cfg", "kwargs"):
        config.unneeded(f"{section}.{backend}_{part}", f"a setting of {name}")


def _lengths(config: Translation, section: str) -> None:
    """Leave room for a prompt in a row: NeMo RL bounds a completion by the rest of a row after its prompt, and here a
    prompt has the rest of a row after the longest completion."""
    total = config.get("policy.max_total_sequence_length")
    longest = config.get(f"{section}.max_new_tokens")
    if total and longest and longest >= total:
        prompts = total // 4
        config.put(f"{section}.max_new_tokens", total - prompts)
        said = f"{section}.max_new_tokens: {total - prompts}, which leaves {prompts} of {total} tokens to prompts"
        config.follows([f"{section}.max_new_tokens"], said)
        config.notes.append(
            f"{said}; NeMo RL shares the row out by the length of each prompt. Set it to what your prompts need"
        )
    room, key = config.get(f"{section}.vllm_cfg.max_model_len"), f"{section}.vllm_cfg.max_model_len"
    if total and room and room >= total:
        config.unneeded(key, "it follows policy.max_total_sequence_length")


def _vllm(config: Translation, section: str) -> None:
    engine, further = f"{section}.vllm_cfg", f"{section}.vllm_cfg.vllm_kwargs"
    precision, policy = config.get(f"{engine}.precision"), config.get("policy.precision", "bfloat16")
    if precision == "fp8":
        _quantization(config, engine)
    else:
        for name in (*_IN_BF16, _IGNORED):
            config.unneeded(f"{engine}.{name}", f"{engine}.precision is not fp8")
    if precision == "mxfp8":
        config.refuse(f"{engine}.precision", "generation in MXFP8")
    elif precision in (None, policy):
        config.unneeded(f"{engine}.precision", "it is policy.precision")
    elif precision != "fp8":
        config.refuse(f"{engine}.precision", f"generation in {precision} beside training in {policy}")
    experts, tensor = config.get(f"{engine}.expert_parallel_size", 1), config.get(f"{engine}.tensor_parallel_size", 1)
    if experts == 1:
        config.unneeded(f"{engine}.expert_parallel_size", "experts are not sharded over ranks")
    elif experts > tensor and experts % tensor == 0:
        config.compute(f"{engine}.expert_parallel_size", f"{engine}.data_parallel_size", experts // tensor)
    else:
        config.put(f"{further}.enable_expert_parallel", True)
    kwargs = f"{section}.vllm_kwargs"
    if room := config.get(f"{kwargs}.kv_cache_memory_bytes"):
        config.compute(f"{kwargs}.kv_cache_memory_bytes", f"{engine}.kv_cache_gib", room / 2**30)
    for name in ("precision", "dtype"):
        if name in (config.get(kwargs) or {}):
            config.unneeded(f"{kwargs}.{name}", "it is policy.precision")
    for key in config.keys(kwargs):
        rule = config.table.rule(key)
        if rule is not None and rule.kind is Kind.FOLLOWS and config.get(key) is not None:
            config.rename(key, key.replace(kwargs, further))
    for key in config.keys(f"{engine}.env_vars"):
        take_variable(config, key, f"{section}.env_vars")


def _quantization(config: Translation, engine: str) -> None:
    """Answer rollouts in 8 bits, which NeMo RL quantises in blocks of 128 by 128 and does not have to correct."""
    here = f"{engine}.quantization"
    config.put(f"{here}.method", "fp8_per_block")
    text = f"{here}.method: fp8_per_block"
    if config.algorithm != "distillation" and not config.get("loss_fn.use_importance_sampling_correction"):
        config.put("loss_fn.allow_uncorrected_precision", True)
        text += ", and loss_fn.allow_uncorrected_precision, because the loss does not correct for it"
    config.follows([f"{engine}.precision"], text)
    for name in _IN_BF16:
        config.rename(f"{engine}.{name}", f"{here}.{name}")
    if config.get(f"{engine}.{_IGNORED}"):
        config.put(f"{here}.ignored_layers", [f"*{word}*" for word in config.get(f"{engine}.{_IGNORED}")])
