"""The self-check of model families on this backend's meshes; see `rl_core.selfcheck.torch.selfcheck`."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rl_core.errors import ConfigError
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.plugins import MeshCase
from rl_core.selfcheck.cases import FamilyCase
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool, free_port
from rl_core.selfcheck.torch.received import receive
from rl_core.selfcheck.torch.selfcheck import SelfCheck, all_cases, write_random
from rl_core.weights import Transport
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.layers.lora import stacked_weights
from rl_dtensor.model.tiny import SMALL, check_size, made_tiny, shrink
from rl_dtensor.worker import DTensorWorker

TENSOR = {"tensor_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
MESHES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1": (1, {}),
    "fsdp2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate_size": 2}),
    "tp2": (2, TENSOR),
    "tp2+sp": (2, {**TENSOR, "sequence_parallel": True}),
    "tp2 x fsdp2": (4, TENSOR),
    "cp2": (2, CONTEXT),
    "cp2 ulysses": (2, {**CONTEXT, "context_parallel_method": "ulysses"}),
    "cp2 x fsdp2": (4, CONTEXT),
    "cp2 x tp2": (4, {**CONTEXT, **TENSOR, "sequence_parallel": True}),
    "pp2": (2, PIPELINE),
    "pp2 x fsdp2": (4, PIPELINE),
    "ep2 x fsdp2": (4, {"expert_parallel_size": 2}),
}
"""Name of each mesh to its ranks and settings; the last is only for models with experts."""


def cases_of(model: str, only: MeshCase | None = None) -> Iterator[FamilyCase]:
    """Check every mesh, packed and padded, and with adapters, as `rl doctor model` shows it, or one case.

    Args:
        model: A folder with a `config.json`, or a hub name.
        only: The case to check; all if None.

    Raises:
        ConfigError: If transformers knows no such family, or no language model of it.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} has no config that transformers can read: {str(error).splitlines()[0]}") from None
    if type(config.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = config.model_type
        raise ConfigError(f"{model} is a {kind} model, and transformers has no language model of that kind")
    cases = all_cases(MESHES) if only is None else [only]
    with RankPool(max(case.num_ranks for case in cases)) as pool, tempfile.TemporaryDirectory() as workspace:
        tiny = write_tiny(config, Path(workspace, "tiny"))
        yield from check_of(AutoConfig.from_pretrained(tiny)).check_family(pool, tiny, cases)


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: Any) -> DTensorWorker:
    """Build a worker in a process of the pool."""
    return DTensorWorker(config, DTensorConfig(**settings), spec, rendezvous)


def streamed(model: PooledModel) -> dict[str, Tensor]:
    """Return the weights that a model sends."""
    manifest = model.manifest(1)
    transport = Transport("collective", f"127.0.0.1:{free_port()}", 1, bucket_bytes=4096, timeout_s=60)
    received: list[dict[str, Tensor]] = []
    receiver = threading.Thread(target=lambda: received.append(receive(manifest, transport)[0]))
    receiver.start()
    model.send(manifest, transport)
    receiver.join(60)
    return received[0]


CHECK = SelfCheck("rl_dtensor.selfcheck:build", streamed)


def check_of(config: PreTrainedConfig) -> SelfCheck:
    """Return the check for a family, whose adapters are also on stacked experts if it has them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stacks = sorted({".".join(name.split(".")[-2:]) for name in stacked_weights(model)})
    return replace(CHECK, lora=LoraConfig(enabled=True, target_parameters=stacks))


def write_tiny(config: PreTrainedConfig, folder: Path, seed: int = 0, sizes: Mapping[str, Any] = SMALL) -> Path:
    """Write a random model of the family at a tiny size as Hugging Face files."""
    small = shrink(config, sizes)
    with made_tiny(small.model_type):
        check_size(small)
        return write_random(small, folder, seed)
