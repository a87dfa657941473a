"""The self-check of model families on this backend's layouts; see `rl_core.selfcheck.torch.selfcheck`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from rl_core.errors import ConfigError
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.plugins import MeshCase
from rl_core.selfcheck.cases import FamilyCase
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.selfcheck.torch.selfcheck import SelfCheck, all_cases, read_files, write_random
from rl_core.selfcheck.torch.tiny_model import SIZES
from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import family_of
from rl_megatron.worker import MegatronWorker

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2+sp": (2, SEQUENCE),
    # Two ranks share each of the tiny model's two key-value heads.
    "tp4+sp": (4, {**SEQUENCE, "tensor_model_parallel_size": 4}),
    "pp2": (2, PIPELINE),
    "pp2 virtual": (2, {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2+sp x pp2": (4, {**SEQUENCE, **PIPELINE}),
    "ep2": (2, EXPERTS),
    "tp2+sp x ep2": (4, {**SEQUENCE, **EXPERTS}),
}
"""Name of each layout to its ranks and settings."""

SMALL: Mapping[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "shared_expert_intermediate_size": 40,
}
"""Sizes of the tiny model; fields that the family's config has no value for are left out."""


def cases_of(model: str, only: MeshCase | None = None) -> Iterator[FamilyCase]:
    """Yield the outcome of every layout, packed and padded, and with adapters, as `rl doctor model` shows it.

    Args:
        model: A folder with a `config.json`, or a hub name.
        only: The only case to check; all if None.

    Raises:
        ConfigError: If transformers does not know the family, or this backend has no maps of its weights.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        family_of(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} cannot be trained on Megatron Core: {str(error).splitlines()[0]}") from None
    cases = all_cases(LAYOUTS) if only is None else [only]
    with RankPool(max(case.num_ranks for case in cases)) as pool, tempfile.TemporaryDirectory() as workspace:
        yield from CHECK.check_family(pool, write_tiny(config, Path(workspace, "tiny")), cases)


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: Any) -> MegatronWorker:
    """Return a worker in a process of the pool."""
    return MegatronWorker(config, MegatronConfig(**settings), spec, rendezvous)


def exported(model: PooledModel) -> dict[str, Tensor]:
    """Return the weights that a model exports."""
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder)
        return read_files(Path(folder))


CHECK = SelfCheck(
    "rl_megatron.selfcheck:build",
    exported,
    first_token=3,
    lora=LoraConfig(enabled=True, exclude_modules=["shared_expert_gate"]),
)
"""Its batches hold no padding: an embedding of zeros makes gradients of 1e12 in a model without biases. Gates of shared
experts get no adapters here, so the expected ones have none there either."""


def write_tiny(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Write a random model of the family at a tiny size as Hugging Face files."""
    fields = config.to_dict()
    small = {name: value for name, value in SMALL.items() if fields.get(name) is not None}
    if "kv_lora_rank" in small:  # Latent attention has a key for every head.
        small["num_key_value_heads"] = small["num_attention_heads"]
    if fields.get("layer_types"):
        small["layer_types"] = (list(dict.fromkeys(fields["layer_types"])) * 4)[:4]
    if fields.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    return write_random(type(config).from_dict({**fields, **small}), folder, seed)
