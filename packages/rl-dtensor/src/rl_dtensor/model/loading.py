"""The end of building a model: values that no file holds, and short passes that verify the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl_core.data.batch import TOKENS
from rl_core.model import LOGPROBS
from rl_core.torch.loss import Rows
from rl_dtensor.model.model import ShardedModel
from rl_dtensor.parallel.fsdp import local
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.parallel.stages import AbsentModule

MAX_LOGIT_ERROR = 0.05
"""Relative; rounding in half precision stays below a fifth of it."""

MAX_PACKING_ERROR = 0.15
"""Relative; in half precision tokens may also go to other experts after another row."""


def rebuild_buffers(hf: PreTrainedModel) -> None:
    """Fill the buffers that no checkpoint holds (rotary frequencies): building on `meta` leaves them without values.

    Raises:
        ValueError: Naming a buffer that the model's own initialisation leaves unfilled.
    """
    transient = dict(hf.named_non_persistent_buffers())
    # A model may fill buffers of its parts.
    models = {name: module for name, module in hf.named_modules() if isinstance(module, PreTrainedModel)}
    owners = sorted({name.rpartition(".")[0] for name in transient} | set(models), reverse=True)
    # A value that is unchanged after two different fillings is not filled by the model.
    found = []
    for filling in (0, 1):
        for buffer in transient.values():
            buffer.fill_(torch.nan if buffer.is_floating_point() else filling)
        with torch.no_grad():
            for owner in owners:
                innermost = max((name for name in models if f"{owner}.".startswith(name and f"{name}.")), key=len)
                _init_buffers(models[innermost], hf.get_submodule(owner))
        found.append([buffer.clone() for buffer in transient.values() if not buffer.is_floating_point()])
    unfilled = [name for name, buffer in transient.items() if buffer.is_floating_point() and buffer.isnan().any()]
    counted = [name for name, buffer in transient.items() if not buffer.is_floating_point()]
    unfilled += [name for name, *twice in zip(counted, *found, strict=True) if not torch.equal(*twice)]
    if unfilled:
        raise ValueError(f"{hf.config.model_type} models do not say how to fill {', '.join(unfilled)}")


def _init_buffers(hf: PreTrainedModel, module: nn.Module) -> None:
    """Run a model's own initialisation of a module's buffers and leave its parameters, which files fill, unchanged."""
    held = module._parameters
    filled: Any = nn.Parameter(torch.empty(0))
    filled._is_hf_initialized = True  # `transformers` leaves parameters with this mark of its loader as they are.
    module.__dict__["_parameters"] = {name: None if held[name] is None else filled for name in held}
    # A model may fill buffers of all of its layers, so its lists have only the layers of this pipeline rank meanwhile.
    lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    for name, child in lists.items():
        setattr(module, name, nn.ModuleList(each for each in child if not isinstance(each, AbsentModule)))
    try:
        hf._init_weights(module)
    except AttributeError as error:  # The code of the family did not foresee the call.
        raise ValueError(f"{hf.config.model_type} models do not say how to fill their buffers: {error}") from None
    finally:
        for name, child in lists.items():
            setattr(module, name, child)
        module.__dict__["_parameters"] = held


def check_logits(model: ShardedModel, mesh: DTensorMesh) -> None:
    """Compare a few tokens' logits with the logits of the model's own forward pass, on the ranks that hold the head."""
    last = model.chunks[-1]
    if not last.is_last:
        return
    layout = model.lay_out(probe_row(model.hf.config, mesh.device))
    entered = None
    if model.num_stages > 1:
        shape = model.hidden_shape(layout)
        entered = torch.linspace(-1, 1, shape[1] * shape[2], device=mesh.device).view(1, *shape[1:]).to(model.compute)
    model.train(False)
    with torch.no_grad():
        error = last(layout, entered, (), 1.0, checks_logits=True)["logit_error"].item()
    model.reshard_all()
    broken: list[str] = []
    if not math.isfinite(error):
        broken = [name for name, tensor in model.weights.held.items() if not bool(local(tensor).isfinite().all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"weights of the model are not finite: {broken[0]}{more}; its files are damaged, or were saved from a run "
            "that diverged: choose an earlier checkpoint or another copy"
        )
    if not error < MAX_LOGIT_ERROR:
        kind = last.hf.config.model_type
        raise ValueError(
            f"logits of {kind} models are not a scaled or capped product with the head (off by {error:.2g})"
        )


def check_packing(model: ShardedModel, mesh: DTensorMesh) -> None:
    """Compare the reads of a row that follows another with its reads as the only row.

    Runs only if one rank sees whole rows and all layers.
    """
    chunk = model.chunks[0]
    if not chunk.is_packed or chunk.alignment.context is not None or model.num_stages > 1:
        return
    row = probe_row(model.hf.config, mesh.device)
    tokens, count = row.columns[TOKENS], len(row.columns[TOKENS])
    ends = torch.tensor([0, count - 1, 2 * count - 1], device=mesh.device)
    both = Rows(ends, {TOKENS: torch.cat([tokens.flip(0)[:-1], tokens])})
    model.train(False)
    with torch.no_grad():
        read = [chunk(model.lay_out(rows), None, (LOGPROBS,), 1.0)["logprobs"][-count:] for rows in (row, both)]
    model.reshard_all()
    first, second = (logprobs.float() for logprobs in read)
    error = ((first - second).abs().max() / first.abs().max().clamp(min=1e-6)).item()
    if not error < MAX_PACKING_ERROR:
        raise ValueError(
            f"rows of {model.hf.config.model_type} models cannot be packed: one changes another (by {error:.2g}); set "
            "sequence_packing.enabled=false"
        )


def probe_row(config: PreTrainedConfig, device: torch.device) -> Rows:
    """Return a row of different tokens; padding would have an embedding of zeros."""
    tokens = torch.arange(1, 5, device=device) % config.get_text_config().vocab_size
    return Rows(torch.tensor([0, len(tokens)], device=device), {TOKENS: tokens})
