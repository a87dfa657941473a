"""Evaluation configs of NeMo RL, as recipes of `rl eval`."""

from __future__ import annotations

from rl_launch.foreign.translation import Translation
from rl_launch.foreign_keys.table import Kind

_ENGINE = (
    "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager", "kv_cache_dtype"
)  # fmt: skip


def translate_evaluation(config: Translation) -> None:
    """Answer the keys of an evaluation."""
    _model(config)
    config.rename("generation.temperature", "eval.temperature")
    config.rename("generation.top_p", "eval.top_p")
    if config.get("generation.top_k", -1) == -1:
        config.unneeded("generation.top_k", "-1 samples from all tokens, which is the default")
    else:
        config.rename("generation.top_k", "eval.top_k")
    for name in ("temperature", "top_p", "top_k"):
        config.unneeded(f"generation.val_{name}", f"eval.{name} holds")
    room = config.get("generation.vllm_cfg.max_model_len")
    longest = config.get("generation.max_new_tokens")
    if room:
        config.put("policy.max_total_sequence_length", room)
        config.answer("generation.vllm_cfg.max_model_len", Kind.RENAMED, "policy.max_total_sequence_length")
    if longest:
        config.put("policy.generation.max_new_tokens", min(longest, room - 1) if room else longest)
        config.follows(["generation.max_new_tokens"], "policy.generation.max_new_tokens, with room for a prompt")
    for name in ("stop_strings", "stop_token_ids"):
        if config.get(f"generation.{name}"):
            config.rename(f"generation.{name}", f"policy.generation.{name}")
        config.unneeded(f"generation.{name}", "unset")
    config.rename("eval.num_tests_per_prompt", "eval.num_samples")
    if k := config.get("eval.k_value"):
        config.put("eval.k", [k])
    config.rename("eval.seed", "eval.seed")
    _task(config)
    config.unneeded("generation.colocated", "an evaluation has no trained model to share devices with")
    config.unneeded("env", "the environment is set by the task")


def _model(config: Translation) -> None:
    model = config.get("generation.model_name")
    config.rename("generation.model_name", "policy.model_name")
    name = config.get("tokenizer.name")
    if name in (None, model):
        config.unneeded("tokenizer.name", "the default is the model's own")
    else:
        config.rename("tokenizer.name", "policy.tokenizer.name")
    template = config.get("tokenizer.chat_template")
    if template in (None, "default"):
        config.unneeded("tokenizer.chat_template", "the default is the tokenizer's own")
    else:
        config.rename("tokenizer.chat_template", "policy.tokenizer.chat_template")
    if kwargs := config.get("tokenizer.chat_template_kwargs"):
        config.put("policy.tokenizer.chat_template_kwargs", kwargs)
        for key in config.keys("tokenizer.chat_template_kwargs"):
            config.answer(key, Kind.RENAMED, f"policy.{key}")
    config.unneeded("tokenizer.chat_template_kwargs", "unset")
    if config.get("generation.backend", "vllm") != "vllm":
        config.refuse("generation.backend", f"generation by {config.get('generation.backend')}")
    config.rename("generation.backend", "policy.generation.backend")
    for name in _ENGINE:
        if config.get(f"generation.vllm_cfg.{name}") is not None:
            config.rename(f"generation.vllm_cfg.{name}", f"policy.generation.vllm_cfg.{name}")
    config.rename("generation.vllm_cfg.precision", "policy.precision")
    for key in ("expert_parallel_size", "async_engine", "skip_tokenizer_init", "use_deep_gemm"):
        if config.get(f"generation.vllm_cfg.{key}", 1) in (1, True, False):
            config.unneeded(f"generation.vllm_cfg.{key}", "the engine selects it")
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        config.rename(f"generation.vllm_kwargs.{key}", f"policy.generation.vllm_cfg.{key}")
    for key in config.keys("generation.vllm_kwargs"):
        rule = config.table.rule(f"policy.{key}")
        if rule is not None and rule.kind is Kind.NOT_NEEDED:
            config.unneeded(key, rule.text)


def _task(config: Translation) -> None:
    given, path = config.get("data.dataset_name"), config.get("data.data_path")
    name = str(given or "") if given is not None else ""
    task = config.table.tables["tasks"].get(name.lower(), name if "/" in name else "")
    if given is None and path is not None:
        task = str(path)
    files = ("prompt_file", "system_prompt_file")
    if not task:
        config.refuse("data.dataset_name", f"the evaluation on {name}")
    else:
        prompt = {key: config.get(f"data.{key}") for key in files if config.get(f"data.{key}") is not None}
        dataset = {"dataset_name": config.table.tables["task datasets"].get(task, task), **prompt}
        config.put("eval.tasks", [{"name": task, "dataset": dataset} if prompt else task])
        config.follows(["data.dataset_name", "data.data_path"], f"eval.tasks: {task}")
        for key in prompt:
            config.follows([f"data.{key}"], f"eval.tasks: {key} of the dataset")
            config.notes.append(f"data.{key}: copy the file next to the recipe, with {{input}} in it for {{}}")
    if config.get("data.repeat", 1) != 1:
        config.put("eval.num_samples", config.get("data.repeat") * config.get("eval.num_tests_per_prompt", 1))
        config.follows(["data.repeat"], "eval.num_samples")
    config.unneeded("data.repeat", "1")
    for key in ("split", "processor", "env_name", "subset"):
        config.unneeded(f"data.{key}", "it is set by the task")
    for key in files:
        config.unneeded(f"data.{key}", "unset")
    config.unneeded("data.max_input_seq_length", "prompts are not truncated")
