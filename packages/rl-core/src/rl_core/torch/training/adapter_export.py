"""Adapters as files in the format of `peft`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_core.model import Role
from rl_core.model_config import ModelConfig
from rl_core.torch.collective_errors import on_rank0
from rl_core.torch.training.backend import RankMesh, RankWeights
from rl_core.torch.training.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rl_core.torch.training.peft_form import PeftForm, peft_form


class AdapterExport:
    """Writes the adapters of a model, and a score head that trains with them, as `peft.PeftModel.from_pretrained` and
    vLLM load them.

    Args:
        weights: Weights of the model.
        config: The model and its adapters.
        role: Role of the model.
        folder: Folder of the model's files, which the adapters are attached to.
        mesh: Mesh of the model.
    """

    def __init__(self, weights: RankWeights, *, config: ModelConfig, role: Role, folder: Path, mesh: RankMesh) -> None:
        self._weights = weights
        self._config, self._role = config, role
        self._folder = folder
        self._mesh = mesh
        self._form: PeftForm | None = None
        self._is_checked = False

    def check(self) -> None:
        """Find out on rank 0 how peft loads these adapters; collective.

        Raises:
            ValueError: If it cannot load them.
        """
        specs = self._weights.adapter_specs("float32")

        def find() -> None:
            factors = {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}
            self._form = peft_form(self._config, self._role, factors, self._folder)

        on_rank0(self._mesh.control, find)
        self._is_checked = True

    def write(self, path: Path) -> None:
        """Write the adapters into a folder; collective. Rank 0 brings them together in host memory and writes."""
        if not self._is_checked:
            self.check()
        gathered: dict[str, Tensor] = {}
        for name, tensor in self._weights.adapters():
            if self._mesh.rank == 0:
                assert tensor is not None, f"{name} did not reach the rank that writes it"
                gathered[name] = tensor.cpu()

        def write() -> None:
            assert self._form is not None
            path.mkdir(parents=True, exist_ok=True)
            save_file(self._form.files(gathered), path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            described = json.dumps(self._form.described.as_json(), indent=2)
            (path / ADAPTER_CONFIG).write_text(described + "\n", encoding="utf-8")

        on_rank0(self._mesh.control, write)
