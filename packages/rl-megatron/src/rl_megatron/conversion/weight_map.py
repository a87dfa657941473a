"""One Megatron parameter and the Hugging Face tensors it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_megatron.conversion.splits import Split


@dataclass(frozen=True)
class HFTensor:
    """Name and shape of a tensor in Hugging Face files."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightMap:
    """Source and target of a parameter.

    Args:
        target: Megatron's name with the local layers, layers and experts numbered over the whole model.
        sources: The Hugging Face tensors, in the order that `split` numbers them.
        split: How it is made of them, and spread.
        over: The ranks it is spread over: `tp`, or `etp` for experts.
        copy_of: Target of the map whose weights it repeats (a tied head on its own pipeline rank); a copy is
            loaded, and never sent, exported or saved.
        dtype: Dtype in which the family keeps the parameter, and its tensors in exports and on the wire, whatever the
            rest of the model has; None if it has the model's. Tensors may also stay float32 because the files or
            `transformers` have them so (`rl_megatron.model.precision`).
    """

    target: str
    sources: tuple[HFTensor, ...]
    split: Split
    over: Literal["tp", "etp"] = "tp"
    copy_of: str | None = None
    dtype: Literal["float32"] | None = None

    @property
    def stored(self) -> str:
        """The name under which checkpoints have it."""
        return self.copy_of or self.target

    def check_split(self, size: int) -> None:
        """Refuse to spread it over a number of ranks that does not fit.

        Raises:
            ValueError: Naming the tensor.
        """
        if not self.split.divides(size):
            name = "expert_tensor" if self.over == "etp" else "tensor_model"
            raise ValueError(
                f"megatron_cfg.{name}_parallel_size: {self.sources[0].name} cannot be spread over {size} ranks; use "
                "fewer"
            )


@dataclass(frozen=True)
class AdapterMap:
    """A low-rank adapter of one Hugging Face weight, to which `scale * up @ down` is added.

    Args:
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
    """

    down: WeightMap
    up: WeightMap
    scale: float
