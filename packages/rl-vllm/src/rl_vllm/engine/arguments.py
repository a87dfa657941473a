"""Arguments of vLLM's engine and of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VllmSamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext

from rl_core.errors import GeneratorError, RequestRefused
from rl_core.facts.hf_config import image_token, is_composite, language_fields, with_overrides
from rl_core.facts.vllm_readings import arguments_for_vllm
from rl_core.model_config import ModelConfig, VisionConfig
from rl_core.rollouts.generation import GenerationRequest, Placement
from rl_core.torch.files.language_part import language_config, read_language_config
from rl_core.torch.training.lora import is_adapted
from rl_vllm.config import GIB, MAX_SHARE, MAX_TEMPERATURE, MIN_TEMPERATURE, VllmConfig
from rl_vllm.engine.holding_scheduler import HoldingScheduler
from rl_vllm.engine.nodes import NodePorts
from rl_vllm.engine.speculation import speculative_config
from rl_vllm.patches.continued_text import NUM_SAMPLED
from rl_vllm.patches.model_inspection import inspect_in_this_process

inspect_in_this_process()

LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of the modules that get adapters: routers may inherit from these and return more."""
CPU_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class AsSent:
    """Change of a Hugging Face config, as vLLM calls it, to the config of the model whose weights are sent. This is the
    language model of a composite model, with some fields, and without quantisation.

    A model that is served with its vision tower keeps its whole config, and its text config gets the fields.

    The field `quantization_config` is removed, because some of vLLM's models (gpt-oss) only ask whether there is one,
    and read it if it is None.

    vLLM also calls it for the config of a drafter, which is loaded from its own files and stays as it is.

    Args:
        fields: Name to value; the fields of a nested config form a separate mapping.
        drafter: Folder of the drafter; empty if there is none.
        with_images: True if the model is served with its vision tower.
    """

    fields: Mapping[str, Any]
    drafter: str = ""
    with_images: bool = False

    def __call__(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Change a config in place, and return it, or the one within it."""
        if self.drafter and config.name_or_path == self.drafter:
            return config
        config = config if self.with_images else language_config(config)
        _set_fields(config.get_text_config() if self.with_images else config, self.fields)
        for each in (config, config.get_text_config()):
            vars(each).pop("quantization_config", None)
        return config


def _set_fields(config: PreTrainedConfig, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        nested = getattr(config, name, None)
        if isinstance(nested, PreTrainedConfig) and isinstance(value, Mapping):
            _set_fields(nested, value)
        else:
            setattr(config, name, value)


def engine_arguments(
    backend: VllmConfig,
    model: ModelConfig,
    placement: Placement,
    *,
    max_len: int,
    eager: bool,
    extension: str,
    memory_share: float = MAX_SHARE,
    applies_adapters: bool = False,
    ports: NodePorts | None = None,
) -> AsyncEngineArgs:
    """Return the arguments that vLLM is started with.

    `ports` are the ports of the first node, for a replica over several.

    Nothing here chooses a model runner: both of vLLM 0.32's keep what training relies on. A draw depends on its
    request's seed and position, not on the batch (V2 hashes them with the token, V1 has a generator per request);
    processed logprobs belong to the logits that were drawn from; a prompt's logprobs are at temperature 1.
    """
    on_cpu = not placement.kind.runs_on_gpus
    kv_cache_gib = 1.0 if on_cpu and backend.kv_cache_gib is None else backend.kv_cache_gib
    drafting = speculative_config(backend.speculation)
    sleeps = placement.shares_devices and not on_cpu
    further = model_arguments(backend, model, placement) | rank_arguments(backend, placement, ports)
    if applies_adapters:
        # The engine has room for the adapters of one weight version, and for those that requests name.
        named = model.lora_cfg.max_adapters if model.lora_cfg.max_adapters > 1 else 0
        further |= {"enable_lora": True, "max_loras": 1 + named, "max_cpu_loras": 1 + 4 * named}
        further["max_lora_rank"] = min(rank for rank in get_args(MaxLoRARanks) if rank >= model.lora_cfg.max_dim)
        further["lora_target_modules"] = adapted_layers(model)
    if sleeps:
        # Graphs go to host memory with the weights, and communicators give back their buffers. Both are restored at the
        # same addresses. Without this a sleeping engine keeps 1.5 to 7 GB.
        further |= {"sleep_mode_offload_cudagraph": True, "enable_nccl_comm_suspend": backend.num_ranks > 1}
    return AsyncEngineArgs(
        enforce_eager=eager,
        # Scoring a row of full length samples one more token, which is discarded.
        max_model_len=max_len + 1,
        max_num_seqs=backend.max_num_seqs,
        gpu_memory_utilization=memory_share,
        kv_cache_dtype=backend.kv_cache_dtype,
        kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        logprobs_mode="processed_logprobs",
        worker_extension_cls=extension,
        enable_return_routed_experts=placement.reports_routing,
        enable_sleep_mode=sleeps,
        # vLLM 0.32 dies on CPU when the prompt of a request with a seed is read in parts: it takes back
        # the token drawn too early by rewinding the request's generator, which CPU generators cannot do.
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=backend.max_num_batched_tokens or batch_tokens(backend, placement, max_len),
        seed=0,
        speculative_config=drafting,
        per_request_spec_decode_metrics="none" if drafting is None else "detailed",
        disable_log_stats=True,
        scheduler_cls=HoldingScheduler,
        # Rollout workers find the allowed tokens of each token by the same library (`rl_core.rollouts.grammar`).
        structured_outputs_config={"backend": "xgrammar"},
        **{**further, **backend.vllm_kwargs},
    )


def model_arguments(backend: VllmConfig, model: ModelConfig, placement: Placement) -> dict[str, Any]:
    """Return the arguments that choose the model, its config and the load of its weights."""
    on_cpu, is_empty = not placement.kind.runs_on_gpus, starts_empty(backend, placement)
    stored, _ = PreTrainedConfig.get_config_dict(model.model_name)
    fields = with_overrides(language_fields(stored), model.hf_config_overrides)
    whole: Mapping[str, Any] = fields
    if fields.get("model_type") in CONFIG_MAPPING:
        # The file leaves out fields that have their defaults.
        whole = read_language_config(model.model_name, model.hf_config_overrides).to_dict()
    mending = arguments_for_vllm(whole)
    written = {name: fields[name] for name in model.hf_config_overrides}
    changed = {**written, **mending.get("hf_overrides", {})}
    # An engine that reads the weights of a composite model serves it whole.
    overrides: Any = {"text_config": changed} if is_composite(stored) else changed
    if is_empty:
        # The policy has dequantised the weights of the files, and sends them so.
        drafter = (speculative_config(backend.speculation) or {}).get("model", "")
        overrides = AsSent(changed, drafter, with_images=model.vision.enabled)
    found = {
        "model": model.model_name,
        "tokenizer": model.tokenizer.name,
        "dtype": model.precision,
        "hf_overrides": overrides,
        "load_format": "dummy" if is_empty else "auto",
        # Prefixes of states are cached only where prompts are read in parts; None is vLLM's own choice.
        "enable_prefix_caching": False if on_cpu and has_states(fields) else None,
        "generation_config": "vllm",
        "override_generation_config": mending.get("override_generation_config", {}),
    }
    found |= image_arguments(model.vision) if model.vision.enabled else {"language_model_only": is_composite(stored)}
    if on_cpu and fields.get("kv_lora_rank") is not None:
        # For latent attention (DeepSeek-V3) on processors with AMX, vLLM (0.32) takes its AMX_MLA backend. It does not
        # start in float32, and in bfloat16 frees weights that the next weight update needs.
        found["attention_backend"] = "CPU_MLA"
    if (quantization := backend.quantization) is not None:
        # Experts keep their precision.
        ignored = quantization.ignored(fields.get("num_hidden_layers", 0))
        found |= {"quantization": "online", "quantization_config": {"linear": quantization.method, "ignore": ignored}}
    return found


def rank_arguments(backend: VllmConfig, placement: Placement, ports: NodePorts | None) -> dict[str, Any]:
    """Return the arguments that distribute the engine over ranks and nodes.

    Args:
        backend: Settings of the engine.
        placement: Place of the replica.
        ports: Ports of the first node, for a replica over several.
    """
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    found: dict[str, Any] = {name: getattr(backend, name) for name in names}
    if backend.data_parallel_size > 1:
        found["enable_expert_parallel"] = True
    if backend.num_ranks > 1:
        # In a placement group of Ray vLLM would choose Ray.
        found["distributed_executor_backend"] = "mp"
    if ports is not None:
        assert placement.meeting is not None, "nodes of a replica meet"
        found |= {"nnodes": placement.num_nodes, "node_rank": placement.node}
        found |= {"master_addr": placement.meeting[0], "master_port": ports.ranks}
        found["data_parallel_rpc_port"] = ports.engines
    return found


def batch_tokens(backend: VllmConfig, placement: Placement, max_len: int) -> int:
    """Return the maximum number of tokens of a forward pass, if the config does not set it.

    On a GPU it is vLLM's own number for generation offline, 16,384 on one of 70 GiB or more that is not an A100 and
    8,192 on others, divided by the number of engines on it. vLLM's default for `AsyncLLM` is 2,048 on all of them,
    which keeps the time between two tokens of a chat short but makes prompts slow to read. A CPU reads a row whole.
    """
    if not placement.kind.runs_on_gpus:
        # The draft model needs a place for the token that it begins with.
        return max(max_len + 1, CPU_BATCH_TOKENS) + (backend.speculation is not None)
    tokens, _ = AsyncEngineArgs.get_batch_defaults(backend.num_ranks)
    offline = tokens[UsageContext.LLM_CLASS] // placement.num_engines
    return max(backend.max_num_seqs, min(offline, backend.max_num_seqs * (max_len + 1)))


def image_arguments(vision: VisionConfig) -> dict[str, Any]:
    """Return the arguments that make the engine serve requests with images.

    vLLM's cache of processed images is off, because it hands the engine an image once and nothing in its place later.
    Requests that are made here (`rl_vllm.engine.image_inputs`) cannot rely on that; their module has its own cache.
    """
    pixels = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
    given = {name: value for name, value in pixels.items() if value is not None}
    return {
        "limit_mm_per_prompt": {"image": vision.max_images, "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0.0,
        # The processor normalises, as for the trainer. vLLM's own layer for it keeps its constants among the weights,
        # and they are random in an engine that starts without weights (0.32).
        "mm_device_do_normalize": False,
        "mm_processor_kwargs": given or None,
    }


def image_token_of(model: ModelConfig) -> int:
    """Return the id of the tokens that represent an image.

    Raises:
        GeneratorError: If the model has none.
    """
    stored, _ = PreTrainedConfig.get_config_dict(model.model_name)
    token = image_token(stored)
    if token is None:
        raise GeneratorError(
            f"policy.vision.enabled: the config of {model.model_name} has no image token, so it takes no images. Set "
            "it to false, or choose a vision-language model"
        )
    return token


def adapted_layers(model: ModelConfig) -> list[str]:
    """Return the last parts of the names of the layers that the policy puts adapters on; the engine's other layers have
    no place for any."""
    lora = model.lora_cfg
    if not lora.match_all_linear:
        return sorted({target.rpartition(".")[2] for target in lora.target_modules})
    config = read_language_config(model.model_name, model.hf_config_overrides)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    head = hf.get_output_embeddings()
    linear = [name for name, module in hf.named_modules() if type(module).forward in LINEAR and module is not head]
    return sorted({name.rpartition(".")[2] for name in linear if is_adapted(name, lora)})


def starts_empty(backend: VllmConfig, placement: Placement) -> bool:
    """Return whether the engine needs only the weights that are sent, so that it can start with random ones.
    Scales of a cache that the engine quantises come only from the model's files.
    """
    return placement.awaits_weights and backend.kv_cache_dtype == "auto"


def has_states(fields: Mapping[str, Any]) -> bool:
    """Return whether vLLM keeps a state of each sequence for layers of this model, as for Mamba and linear attention,
    in addition to or instead of keys and values.

    Args:
        fields: Fields of the language model's Hugging Face config.
    """
    # The config within a composite model's has no architectures.
    names = fields.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(fields.get("model_type", ""))]
    found = [ModelRegistry.models.get(name) for name in names]
    return any(each is not None and each.inspect_model_cls().has_inner_state for each in found)


def sampling_params(request: GenerationRequest, *, max_tokens: int) -> VllmSamplingParams:
    """Return the parameters of one request: the sampled tokens' own logprobs, all at the end.

    Raises:
        RequestRefused: For a temperature that vLLM does not sample at.
    """
    sampling = request.sampling
    if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        raise RequestRefused(
            f"vLLM samples at temperature 0 or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, got {sampling.temperature}"
        )
    return VllmSamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        skip_special_tokens=False,  # A stop string may be a special token's text.
        ignore_eos=True,
        detokenize=bool(sampling.stop_strings),
        seed=request.draw_seed,  # Some of vLLM's model runners draw the same numbers in every request.
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={NUM_SAMPLED: request.num_sampled} if request.num_sampled and sampling.stop_strings else None,
        structured_outputs=StructuredOutputsParams(structural_tag=sampling.grammar) if sampling.grammar else None,
        skip_clone=True,
    )


def scoring_params() -> VllmSamplingParams:
    """Return the parameters of a prompt's own logprobs, which vLLM computes before temperature and filters."""
    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
