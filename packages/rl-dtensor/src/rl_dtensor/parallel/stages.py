"""Consecutive layers of a model on pipeline ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_dtensor.parallel.body import body_name, body_of


class AbsentModule(nn.Module):
    """A module in the place of one that another pipeline rank has: it returns its input.

    Args:
        replaced: Layer whose strings and numbers it copies: some models read the kind of a layer.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        words = {name: value for name, value in vars(replaced).items() if isinstance(value, str | int | float)}
        self.__dict__.update(words)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the first argument."""
        return hidden_states


@dataclass(frozen=True)
class Stages:
    """Assignment of the parts of a model to the stages of a pipeline.

    Args:
        layers: Name of the list of layers.
        embedding: Name of the module before it.
        final_norm: Name of the module after it.
        num_layers: Layers of the whole model.
        count: Stages; with several chunks per rank more than there are ranks.
    """

    layers: str
    embedding: str
    final_norm: str
    num_layers: int
    count: int

    @classmethod
    def of(cls, hf: PreTrainedModel, count: int) -> Stages:
        """Read the stages of a whole model on `meta`; with a count of 1 only its parts, for a split of tokens.

        Raises:
            ValueError: If the model is more than an embedding, a list of layers and a norm, and cannot be cut.
        """
        base, prefix = body_of(hf), f"{body_name(hf)}."
        lists = [name for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
        others = [name for name, child in base.named_children() if any(True for _ in child.parameters())]
        embedding = next((name for name, child in base.named_children() if child is hf.get_input_embeddings()), "")
        norms = [name for name in others if name not in (embedding, *lists)]
        if len(lists) != 1 or len(norms) != 1 or not embedding:
            refused = "it cannot be cut into stages; set pipeline_parallel_size=1"
            if count == 1:
                refused = "tokens cannot be split between its layers; set sequence_parallel=false"
            raise ValueError(
                f"{type(hf).__name__} is more than an embedding, a list of layers and a norm ({', '.join(others)}), so "
                f"{refused}"
            )
        num_layers = len(cast("nn.ModuleList", base.get_submodule(lists[0])))
        return cls(prefix + lists[0], prefix + embedding, prefix + norms[0], num_layers, count)

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage: split evenly, the first stages get one more each if some are left."""
        share, more = divmod(self.num_layers, self.count)
        start = stage * share + min(stage, more)
        return range(start, start + share + (stage < more))

    def stage_of(self, name: str) -> int:
        """Return the stage that holds a parameter of the whole model."""
        layer = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        if layer:
            return next(stage for stage in range(self.count) if int(layer[1]) in self.layers_of(stage))
        return 0 if name.startswith(f"{self.embedding}.") else self.count - 1

    def cut(self, hf: PreTrainedModel, stage: int) -> None:
        """Remove the parts of other stages from a whole model."""
        layers = hf.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        kept = self.layers_of(stage)
        for index in range(self.num_layers):
            if index not in kept:
                layers[index] = AbsentModule(layers[index])
        if stage > 0:
            hf.set_submodule(self.embedding, AbsentModule(hf.get_submodule(self.embedding)))
        if stage < self.count - 1:
            hf.set_submodule(self.final_norm, AbsentModule(hf.get_submodule(self.final_norm)))
            for head in ("lm_head", "score"):
                if head in dict(hf.named_children()):
                    hf.set_submodule(head, AbsentModule(hf.get_submodule(head)))

    def check_cut(self, hf: PreTrainedModel, rows: dict[str, Any], num_tokens: int, device: torch.device) -> None:
        """Pass hidden states through a stage without its own modules; all stages answer alike.

        Args:
            hf: Model cut to this stage; its modules are restored afterwards.
            rows: Arguments of the model's forward pass that describe the rows.
            num_tokens: Number of tokens to pass, as many as `rows` describes.
            device: Device of the hidden states.

        Raises:
            ValueError: If they change, as the model does something between its modules that a stage would repeat, or if
                it expects more of a layer than hidden states.
        """
        layers = hf.get_submodule(self.layers)
        norm = hf.get_submodule(self.final_norm)
        assert isinstance(layers, nn.ModuleList)
        held = list(layers)
        probe = torch.linspace(-1, 1, num_tokens * hf.config.hidden_size, device=device).view(1, num_tokens, -1)
        try:
            _fill(layers, [AbsentModule(layer) for layer in held])
            hf.set_submodule(self.final_norm, AbsentModule(norm))
            with torch.no_grad():
                out = body_of(hf)(inputs_embeds=probe, use_cache=False, **rows).last_hidden_state
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{hf.config.model_type} models cannot be cut into stages, as their code does not pass by layers that "
                f"are elsewhere ({type(error).__name__}: {error}); set pipeline_parallel_size=1"
            ) from None
        finally:
            _fill(layers, held)
            hf.set_submodule(self.final_norm, norm)
        if out.shape != probe.shape or not torch.equal(out, probe):
            raise ValueError(
                f"{hf.config.model_type} models change hidden states outside of their layers and cannot be cut into "
                "stages; set pipeline_parallel_size=1"
            )


def _fill(layers: nn.ModuleList, modules: list[nn.Module]) -> None:
    for index, module in enumerate(modules):
        layers[index] = module
