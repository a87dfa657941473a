"""Adapters as files in the format of `peft`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rl_core.model import HEADLESS_ROLES, Role
from rl_core.model_config import ModelConfig
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.training.backend import RankMesh, RankWeights
from rl_core.torch.training.lora import (
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    LORA_A,
    LORA_B,
    WEIGHT,
    flat_factors,
    peft_layers,
)

CONFIG = "adapter_config.json"
SCORE = "score"
"""Name of the head of models without a language-model head."""


def export_adapter(weights: RankWeights, path: Path, *, config: ModelConfig, role: Role, mesh: RankMesh) -> None:
    """Write the adapters of a model, and a score head that trains with them, as `peft.PeftModel.from_pretrained` and
    vLLM load them; collective. Rank 0 brings them together in host memory and writes.
    """
    gathered: dict[str, Tensor] = {}
    for name, tensor in weights.adapters():
        if mesh.rank == 0:
            assert tensor is not None, f"{name} did not reach the rank that writes it"
            gathered[name] = tensor.cpu()

    def write() -> None:
        path.mkdir(parents=True, exist_ok=True)
        downs = {name.removesuffix(LORA_A): factor for name, factor in gathered.items() if name.endswith(LORA_A)}
        stacks = [name for name, down in downs.items() if down.dim() > 2]
        layers = downs.keys() - set(stacks)
        others = {spec.name.removesuffix(WEIGHT) for spec in weights.specs("float32")} - layers
        described = AdapterConfig.of(config, role, endings(layers, others), stacks).as_json()
        for weight, layer in peft_layers(stacks).items():
            factors = flat_factors(gathered.pop(weight + LORA_A), gathered.pop(weight + LORA_B))
            gathered.update(zip((layer + LORA_A, layer + LORA_B), factors, strict=True))
        files = {ADAPTER_PREFIX + name: tensor.contiguous() for name, tensor in gathered.items()}
        save_file(files, path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (path / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    on_rank0(mesh.control, write)


def endings(layers: Iterable[str], others: Iterable[str]) -> list[str]:
    """Ends of names that these layers have and no others: the last part of a name if it will do, else all of it."""
    taken = {_last(name) for name in others}
    return sorted({name if _last(name) in taken else _last(name) for name in layers})


@dataclass(frozen=True)
class AdapterConfig:
    """Contents of `adapter_config.json`.

    Args:
        base: The model that the adapters sit on.
        targets: Ends of the names of the layers that have one.
        stacks: Names of the weights of stacked experts that have one for each.
        scores: True if the model has a score head in the place of its language-model head.
    """

    base: str
    targets: list[str]
    stacks: list[str]
    dim: int
    alpha: float
    dropout: float
    use_rslora: bool
    scores: bool

    @classmethod
    def of(cls, config: ModelConfig, role: Role, targets: list[str], stacks: Sequence[str] = ()) -> AdapterConfig:
        """Of the adapters of a model."""
        lora = config.lora_cfg
        scores = role in HEADLESS_ROLES
        return cls(
            config.model_name, targets, list(stacks), lora.dim, lora.alpha, lora.dropout, lora.use_rslora, scores
        )

    def as_json(self) -> dict[str, Any]:
        """The fields that `peft` and vLLM read."""
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.scores else "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "inference_mode": True,
            "r": self.dim,
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.use_rslora,
            "use_dora": False,
            "target_modules": self.targets,
            "target_parameters": self.stacks or None,
            "modules_to_save": [SCORE] if self.scores else None,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "rank_pattern": {},
            "alpha_pattern": {},
        }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
