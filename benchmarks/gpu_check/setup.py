"""The parts that all sections share: the device, the sizes of models, and a folder for their files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_check.expected import Chip, chip_named
from rl_core.devices import Device, device_named

if TYPE_CHECKING:
    import torch

    from gpu_check.accelerator import Accelerator
    from rl_core.torch.training.flops import ModelShape

VOCAB = 151936


@dataclass(frozen=True)
class Shape:
    """A random Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    inner: int
    head_dim: int
    vocab: int
    spread: float = 0.02

    @property
    def num_layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        heads = self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        return self.layers * self.hidden * (heads + 3 * self.inner)

    @property
    def num_head_weights(self) -> int:
        """Weights of the head, which shares the embedding's."""
        return self.vocab * self.hidden

    @property
    def fields(self) -> dict[str, int]:
        """Fields of its Hugging Face config."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "intermediate_size": self.inner,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
        }

    @property
    def model(self) -> ModelShape:
        """The shape, as model FLOPs are counted."""
        from rl_core.torch.training.flops import AttentionShape, ModelShape

        matrices = self.num_layer_weights + self.num_head_weights
        attention = AttentionShape(self.heads, self.head_dim, self.head_dim)
        return ModelShape(matrices, matrices, (attention,) * self.layers)


SHAPES = {"0.6B": Shape(1024, 28, 16, 8, 3072, 128, VOCAB), "1.7B": Shape(2048, 28, 16, 8, 6144, 128, VOCAB)}
TINY = {"tiny": Shape(64, 2, 4, 2, 96, 32, 509)}
PARITY = Shape(256, 4, 8, 4, 512, 64, 4096, 0.05)
"""Small enough to be exact against an oracle, large enough for every kernel."""
TINY_PARITY = Shape(64, 2, 4, 2, 96, 32, 509, 0.1)


@dataclass(frozen=True)
class Setup:
    """Settings of a section.

    Args:
        device: Name of the kind of device, as a `Rendezvous` has it.
        is_small: True for tiny models and few rows, which do not measure speed.
        workspace: Folder for files, the same for all sections.
        num_gpus: Number of GPUs, of which all sections but `meshes` use the first.
    """

    device: str
    is_small: bool
    workspace: Path
    num_gpus: int = 1

    @property
    def kind(self) -> Device:
        """The device; a process sees one."""
        return device_named(self.device)

    @cached_property
    def accelerator(self) -> Accelerator:
        """Measures memory and waits."""
        from gpu_check.accelerator import ACCELERATORS

        return ACCELERATORS[self.kind.kernels](self.kind)

    @property
    def torch_device(self) -> torch.device:
        """The `torch.device`."""
        return self.kind.torch_device

    @property
    def chip(self) -> Chip | None:
        """Rates of the GPU, if they are known."""
        return chip_named(self.kind.chip or "")

    @property
    def models(self) -> dict[str, Shape]:
        """Models to train, the smallest first."""
        return TINY if self.is_small else SHAPES

    @property
    def parity(self) -> Shape:
        """The model that is compared with an oracle."""
        return TINY_PARITY if self.is_small else PARITY

    def pick(self, small: int, full: int) -> int:
        """Return one of two sizes."""
        return small if self.is_small else full

    def folder(self, shape: Shape, *, dtype: str = "float32", seed: int = 0) -> Path:
        """Return the folder of a random model of this shape in Hugging Face's format, written once."""
        import torch
        from transformers.utils import logging

        from rl_core.selfcheck.torch.tiny_model import write_tiny_model

        folder = self.workspace / f"model-{shape.hidden}-{shape.layers}-{shape.vocab}-{dtype}-{seed}"
        if (folder / "config.json").exists():
            return folder
        logging.disable_progress_bar()
        aside = folder.with_suffix(".aside")
        with torch.device(self.torch_device):
            write_tiny_model(
                aside,
                "qwen3",
                dtype=dtype,
                seed=seed,
                max_shard_size="5GB",
                **shape.fields,
                max_position_embeddings=32768,
                initializer_range=shape.spread,
            )
        return aside.rename(folder)
