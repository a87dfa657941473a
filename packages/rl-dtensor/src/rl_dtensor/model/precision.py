"""Tensors of a model that stay float32 while the rest of it computes in lower precision."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from rl_core.errors import ConfigError
from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.training.export import float32_among_others
from rl_dtensor.model.tiny import check_size, made_tiny, shrink
from rl_dtensor.model.weights import Catalog, persistent
from rl_dtensor.parallel.body import body_of
from rl_dtensor.parallel.experts import expert_modules

_PROBE_TOKENS = 8

_FAMILY_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code for a dtype that it did not foresee."""


class Kept(NamedTuple):
    """Names of parameters and persistent buffers that stay float32.

    Args:
        stored: Tensors that are float32 in memory, in checkpoints and in transfers.
        computed: Tensors among these that the model also computes with in float32. The others are cast for each pass,
            as `transformers` casts them.
    """

    stored: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, hf: PreTrainedModel, catalog: Catalog, files: WeightFiles, compute: torch.dtype) -> Kept:
        """Decide from a model's class, its files and its code.

        A tensor stays float32 if the family keeps it so, or if it is float32 in files whose other tensors are not. It
        also computes in float32 if the family's code takes it so.

        Args:
            hf: The whole model, built in the compute dtype, without adapters.
            catalog: Its weights by their file names.
            files: Files of the model, whose dtypes are compared.
            compute: Compute dtype of the model.
        """
        if compute == torch.float32:
            return cls()
        by_family = kept_by_family(hf, compute)
        by_files = kept_by_files(catalog, files) - by_family
        computed = computed_in_float32(hf.config, by_family, by_files, compute)
        return cls(frozenset(by_family | by_files), frozenset(computed))


def kept_by_family(hf: PreTrainedModel, compute: torch.dtype) -> set[str]:
    """Return the tensors, by name, that `transformers` keeps in float32 when it loads a family in another dtype:
    the ones that the class lists, and the ones that the code makes in float32.

    Args:
        hf: Model, built in the compute dtype.
        compute: Compute dtype of the model.
    """
    plan = hf._get_dtype_plan(compute)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    return {
        name
        for name, tensor in persistent(hf).items()
        if tensor.is_floating_point()
        and (tensor.dtype == torch.float32 or (pattern is not None and pattern.search(name)))
    }


def kept_by_files(catalog: Catalog, files: WeightFiles) -> set[str]:
    """Return the tensors, by name, that are float32 in files whose other tensors are not, if the model is of lower
    precision by its config, or by most of its values."""
    wide = float32_among_others(files)
    sources = {entry.name: catalog.sources(entry, files.names) for entry in catalog.entries}
    return {name for name, pieces in sources.items() if pieces and all(piece.name in wide for piece in pieces)}


def computed_in_float32(
    config: PreTrainedConfig, by_family: Set[str], by_files: Set[str], compute: torch.dtype
) -> set[str]:
    """Return the tensors, by name, that a family's code computes with in float32 among another dtype.

    Passes of a tiny model of the family show them. Experts, which are split over ranks, are never among them.

    Args:
        config: Hugging Face config of the model.
        by_family: Tensors that the family keeps. They are assumed to compute so if no tiny model can be made, or the
            tiny model does not have them.
        by_files: Tensors that only files keep.
        compute: Compute dtype of the rest of the model.
    """
    if not by_family and not by_files:
        return set()
    if config.get_text_config() is not config:  # A tiny model of a vision tower cannot be made.
        return set(by_family)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = shrink(config)
            with made_tiny(small.model_type):
                check_size(small)
                tiny = AutoModelForCausalLM.from_config(small, dtype=compute, attn_implementation="eager").eval()
    except ConfigError:
        return set(by_family)
    if not _runs(tiny, []):
        return set(by_family)
    known = {_kind(name) for name in _plain_tensors(tiny)}
    taken: list[str] = []
    for names in (by_family, by_files):
        kinds = sorted({_kind(name) for name in names} & known)
        if not _runs(tiny, [*taken, *kinds]):
            kinds = [kind for kind in kinds if _runs(tiny, [*taken, kind])]
            # Kinds that the code takes one at a time may fail together.
            kinds = kinds if len(kinds) < 2 or _runs(tiny, [*taken, *kinds]) else []
        taken += kinds
    unknown = {name for name in by_family if _kind(name) not in known}
    return unknown | {name for name in by_family | by_files if _kind(name) in taken}


def widen(hf: PreTrainedModel, names: Set[str] | None = None) -> None:
    """Make parameters and persistent buffers of a model float32.

    Args:
        hf: Model, changed in place.
        names: Tensors to widen; all of lower precision if None. Buffers that no file holds keep the dtype
            of the family's code.
    """
    for name, tensor in persistent(hf).items():
        is_lower = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
        if is_lower and (names is None or name in names):
            tensor.data = tensor.data.float()


def _kind(name: str) -> str:
    """Return a name with a star for the number of each layer."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _plain_tensors(tiny: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, without tensors of experts."""
    stacks = expert_modules(tiny)
    experts = tuple(f"{name}." for name, module in tiny.named_modules() if module in stacks)
    return {name: tensor for name, tensor in persistent(tiny).items() if not (experts and name.startswith(experts))}


def _runs(tiny: PreTrainedModel, kinds: list[str]) -> bool:
    """Return whether a tiny model computes with tensors of only these kinds in float32, and returns its own dtype."""
    dtype = tiny.config.dtype
    for name, tensor in _plain_tensors(tiny).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if _kind(name) in kinds else dtype)
    returned: list[torch.dtype] = []
    hook = body_of(tiny).register_forward_hook(lambda *call: returned.append(call[-1].last_hidden_state.dtype))
    tokens = torch.arange(_PROBE_TOKENS)[None] % cast("nn.Embedding", tiny.get_input_embeddings()).num_embeddings
    try:
        with torch.no_grad():
            tiny(input_ids=tokens, use_cache=False)
    except _FAMILY_ERRORS:
        return False
    else:
        return returned == [dtype]
    finally:
        hook.remove()
