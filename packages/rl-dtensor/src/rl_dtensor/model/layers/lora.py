"""Low-rank adapters on linear layers, by peft, and on stacked experts.

The weights that leave the model have the adapters merged in. The adapters of stacked experts are parameters of the
experts' module, stacked in the same way, so that a split of experts over ranks splits them too. The module computes
with `weight + scale * up @ down`. (peft's own adapters for such weights keep the experts in the last dim of `up`, where
no mesh can split them.)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_core.model import ADAPTER as ADAPTER_COLUMN
from rl_core.model_config import LoraConfig
from rl_core.torch.host_arrays import to_device
from rl_core.torch.training.lora import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    AdapterSize,
    InitialFactors,
    check_sizes,
    ends_with,
    is_adapted,
    is_adapted_stack,
    nothing_adapted,
    peft_layers,
    refused_by_peft,
    size_of,
)
from rl_dtensor.model.layers.quantized_base import (
    BASE,
    format_of,
    local_values,
    logical_slices,
    quantized_layers,
    whole_values,
)
from rl_dtensor.parallel.collectives import Parameters, compute_on
from rl_dtensor.parallel.experts import STACK_DIMS, expert_modules
from rl_dtensor.parallel.fsdp import local, local_slices, whole

if TYPE_CHECKING:
    from rl_dtensor.model.layout import RowLayout

ADAPTER = "default"
"""Name in peft of the adapter, and of the first one of several."""
OTHERS = "adapter_"
"""Start of the names in peft of the other ones of several adapters."""
STACKED_A, STACKED_B = "lora_A_", "lora_B_"
"""Prefixes of the factors of a stacked weight, which are parameters of the same module."""
LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of the modules that take adapters. The latter belongs to GPT-2 and its kin, whose weights are
transposed. A router may be a linear layer that returns more than its product, which is another function."""


class Adapter(NamedTuple):
    """An adapter: `scale * up @ down` is added to the weight. With stacked experts every tensor has a first dim of
    experts.

    Args:
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
        is_transposed: True if the weight is `[inputs, outputs]`.
        magnitude: `[outputs]`, the norms that the rows of the sum are given (DoRA); None if they keep their own.
    """

    down: Tensor
    up: Tensor
    scale: float
    is_transposed: bool = False
    magnitude: Tensor | None = None

    @property
    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors by the suffixes of their names in the files of peft."""
        yield from ((LORA_A, self.down), (LORA_B, self.up))
        if self.magnitude is not None:
            yield MAGNITUDE, self.magnitude

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """Return float32 `[..., rows, dim]` and `[..., dim, columns]`, whose product times the last value is added to
        the weight; collective over the ranks that share it."""
        down, up = whole(self.down, torch.float32), whole(self.up, torch.float32)
        return (down.mT, up.mT, self.scale) if self.is_transposed else (up, down, self.scale)

    def norms(self, weight: Tensor) -> Tensor:
        """Return float32 `[outputs]`, the norms of the rows of the sum; collective over the ranks that share it.

        Args:
            weight: The whole weight in float32.
        """
        left, right, scale = self.factors()
        return torch.linalg.vector_norm(weight + scale * (left @ right), dim=0 if self.is_transposed else 1)

    def row_factor(self, weight: Tensor) -> Tensor | None:
        """Return float32 `[outputs, 1]`, or `[1, outputs]` for a transposed weight, that the sum is multiplied by; None
        if it is not. Collective over the ranks that share it.

        Args:
            weight: The whole weight in float32.
        """
        if self.magnitude is None:
            return None
        factor = whole(self.magnitude, torch.float32) / self.norms(weight)
        return factor[None] if self.is_transposed else factor[:, None]

    def merged(self, weight: Tensor) -> Tensor:
        """Return the whole weight with the adapter, in float32; collective over the ranks that share it.

        Args:
            weight: The whole weight in float32.
        """
        left, right, scale = self.factors()
        factor, summed = self.row_factor(weight), weight + scale * (left @ right)
        return summed if factor is None else factor * summed


class AdapterRuns(NamedTuple):
    """The tokens of each adapter in a pass.

    Args:
        lengths: Number of tokens of each adapter, which are all tokens of the pass.
        order: Int64 `[tokens]`, the places of the tokens in the pass in the order of the adapters, and the way back;
            None if they lie in this order.
    """

    lengths: list[int]
    order: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, adapters: np.ndarray, count: int, device: torch.device) -> AdapterRuns:
        """Return the runs of a pass.

        Args:
            adapters: Adapter of each token of the pass, on the host.
            count: Number of adapters.
            device: Device of the pass.
        """
        lengths = np.bincount(adapters, minlength=count).tolist()
        if not (np.diff(adapters) < 0).any():
            return cls(lengths)
        order = np.argsort(adapters, kind="stable")
        there, back = to_device([order, np.argsort(order)], device)
        return cls(lengths, (there, back))


class SeveralAdapters:
    """The variant of peft's linear layers in which each token has one of several adapters.

    Every adapter takes part in every pass, one without tokens with none, so that gradients are reduced alike on all
    ranks.

    Args:
        count: Number of adapters.

    Attributes:
        runs: Tokens of each adapter in the pass at hand.
    """

    def __init__(self, count: int) -> None:
        self.names = (ADAPTER, *(f"{OTHERS}{number}" for number in range(1, count)))
        self.runs: AdapterRuns | None = None

    def give(self, layout: RowLayout) -> None:
        """Set the adapters of the tokens of the next pass. A backward pass may compute layers again."""
        adapters = layout.rows.host_column(ADAPTER_COLUMN) if ADAPTER_COLUMN in layout.rows else None
        places = layout.places.cpu().numpy() if layout.host_places is None else layout.host_places
        count = len(self.names)
        of_tokens = np.zeros(len(places), dtype=np.int64)
        if adapters is not None:
            if len(adapters) and not (adapters.min() >= 0 and adapters.max() < count):
                raise ValueError(f"rows have adapters {sorted(set(adapters.tolist()))}; the model has {count}")
            each = np.repeat(adapters, np.diff(layout.rows.host_offsets))
            of_tokens = each[places.clip(min=0)]
            # Padding joins the tokens that it comes after.
            before = np.maximum.accumulate(np.where(places < 0, 0, np.arange(len(places))))
            of_tokens = of_tokens[before]
        self.runs = AdapterRuns.of(of_tokens, count, layout.places.device)

    def forward(self, module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return the result of a layer with the adapters of its tokens, for the result of the layer without them."""
        assert self.runs is not None, "no adapters were given before the pass"
        inputs = x.flatten(0, -2)
        if len(inputs) != sum(self.runs.lengths):
            raise ValueError(
                f"a layer sees {len(inputs)} tokens where {sum(self.runs.lengths)} were expected; several adapters "
                "(lora_cfg.max_adapters) cannot be on layers that see some of the tokens, such as those of experts: "
                "leave them out by lora_cfg.exclude_modules"
            )
        if self.runs.order is not None:
            inputs = inputs[self.runs.order[0]]
        parts = inputs.split(self.runs.lengths)
        added = torch.cat(
            [
                module.lora_B[name](module.lora_A[name](part) * module.scaling[name])
                for name, part in zip(self.names, parts, strict=True)
            ]
        )
        if self.runs.order is not None:
            added = added[self.runs.order[1]]
        return result + added.view(*x.shape[:-1], -1)


class Magnitude(nn.Module):
    """Magnitudes of the rows of an adapted weight.

    Args:
        outputs: Number of rows.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    def forward(self, product: Tensor, added: Tensor, norms: Tensor) -> Tensor:
        """Return the change of a layer's result.

        Args:
            product: `[..., outputs]`, the product with the weight.
            added: `[..., outputs]`, the product of the adapter, scaled.
            norms: `[outputs]`, at least in float32, the norms of the rows of the sum of both weights.
        """
        factor = self.weight / norms
        return ((factor - 1) * product + factor * added).to(product.dtype)


class Directions:
    """The variant of peft's linear layers that computes with magnitudes (DoRA, arXiv:2402.09353).

    peft's own variant multiplies the adapter with an identity matrix to read it, and cannot see a weight that is split
    over ranks. Here the dropped inputs go to the adapter only.
    """

    @staticmethod
    def forward(module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return the result of a layer with its adapter, for the result of the layer without it."""
        base, magnitude = module.get_base_layer(), module.lora_magnitude_vector[active_adapter]
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scale = module.scaling[active_adapter]
        added = up(down(module.lora_dropout[active_adapter](x))) * scale
        product = result
        if base.bias is not None:
            product = result - whole(base.bias, result.dtype)[local_slices(magnitude.weight)]
        norms = _norms_of_split(base, down.weight, up.weight, magnitude.weight, scale)
        change: Tensor = magnitude(product, added, norms)
        return result + change


@torch.no_grad()
def _norms_of_split(base: Any, down: Tensor, up: Tensor, magnitude: Tensor, scale: float) -> Tensor:
    """Return the norms of the rows of a weight with its adapter, at least in float32. They are the norms of the rows
    whose magnitudes this rank has.

    Args:
        base: Layer without the adapter, whose weight is gathered, or split over tensor-parallel ranks.
        down: `[dim, inputs]`.
        up: `[outputs, dim]`.
        magnitude: `[outputs]`.
        scale: Factor of the adapter.
    """
    weight, fmt, dtype = base.weight, format_of(base), torch.promote_types(down.dtype, torch.float32)
    own, (rows, columns) = local_values(weight, fmt, dtype), logical_slices(weight, fmt)
    if isinstance(base, Conv1D):
        own, rows, columns = own.mT, columns, rows
    whole_down, whole_up = whole(down, dtype), whole(up, dtype)
    squares = torch.addmm(own, whole_up[rows], whole_down[:, columns], alpha=scale).square().sum(1)
    if isinstance(weight, DTensor) and isinstance(magnitude, DTensor):
        (placement,) = weight.placements
        summed = Partial() if placement.is_shard(0 if isinstance(base, Conv1D) else 1) else placement
        split = DTensor.from_local(squares, weight.device_mesh, [summed], run_check=False)
        squares = split.redistribute(placements=magnitude.placements).to_local()
    return squares.sqrt()


def add_adapters(
    hf: PreTrainedModel, config: LoraConfig, *, is_left_out: Callable[[str], bool] = lambda _: False
) -> None:
    """Put adapters on linear layers and stacked experts of a model and freeze everything else but a score head.

    Args:
        hf: Model, changed in place.
        config: Layers that get adapters, and their size.
        is_left_out: Returns whether a module of this name belongs to a part without adapters.

    Raises:
        ValueError: If the config contains no layer of the model, or a part that gets no adapter.
    """
    _check_targets(hf, config)
    stacks = {name: module for name, module in stacked_weights(hf).items() if is_adapted_stack(name, config)}
    targets = [name for name in adapted_modules(hf, config) if not is_left_out(name)]
    if not targets and not stacks:
        raise nothing_adapted(config, type(hf).__name__)
    check_sizes(config, [*targets, *stacks])
    transposed = [name for name in targets if isinstance(hf.get_submodule(name), Conv1D)]
    if config.init == "pissa" and transposed:
        raise ValueError(
            f"lora_cfg.init: pissa is not supported for weights that are stored transposed, such as {transposed[0]}; "
            "set init=default"
        )
    hf.requires_grad_(False)
    if targets:
        sizes = {name: size_of(name, config) for name in targets}
        # The import takes seconds, which models without adapters do not need.
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        # If peft knows the family, it takes any `gate_proj` in a model with experts for one of the experts' layers. It
        # does not know the shell around the model.
        peft = PeftConfig(
            r=config.dim,
            lora_alpha=cast("int", config.alpha),  # peft computes with any number.
            rank_pattern={f"hf.{name}": size.dim for name, size in sizes.items() if size.dim != config.dim},
            alpha_pattern={
                f"hf.{name}": cast("int", size.alpha) for name, size in sizes.items() if size.alpha != config.alpha
            },
            lora_dropout=config.dropout,
            use_rslora=config.use_rslora,
            target_modules=[f"hf.{name}" for name in targets],
        )
        inject_adapter_in_model(peft, nn.ModuleDict({"hf": hf}), adapter_name=ADAPTER)
        for name in targets if config.use_dora else ():
            module: Any = hf.get_submodule(name)
            module.lora_magnitude_vector[ADAPTER] = Magnitude(module.lora_B[ADAPTER].out_features)
            module.lora_variant[ADAPTER] = Directions
    several = SeveralAdapters(config.max_adapters)
    for name in targets if config.max_adapters > 1 else ():
        module = hf.get_submodule(name)
        module.lora_variant[ADAPTER] = several
        for other in several.names[1:]:
            for held in (module.lora_A, module.lora_B):
                held[other] = deepcopy(held[ADAPTER])
            module.scaling[other] = module.scaling[ADAPTER]
    for module in dict.fromkeys(stacks.values()):
        own = {name.rpartition(".")[2]: size_of(name, config) for name, of in stacks.items() if of is module}
        _adapt_stacks(module, own)
    score = dict(hf.named_children()).get("score")
    if score is not None:
        score.requires_grad_(True)


def names_of(hf: nn.Module) -> tuple[str, ...]:
    """Return the names in peft of the adapters of a model: one, unless it has several."""
    several = several_adapters(hf)
    return (ADAPTER,) if several is None else several.names


def without_adapter(name: str) -> str:
    """Return the name of a parameter without the name of its adapter."""
    return re.sub(rf"\.({ADAPTER}|{OTHERS}\d+)(?=\.)", "", name)


def set_scale(hf: nn.Module, place: int, scale: float) -> None:
    """Set the scale of one of several adapters of a model.

    Args:
        hf: The model.
        place: Place of the adapter.
        scale: Factor of its products.
    """
    several = several_adapters(hf)
    if several is None:
        return
    for module in hf.modules():
        if several in getattr(module, "lora_variant", {}).values():
            cast("Any", module).scaling[several.names[place]] = scale


def several_adapters(hf: nn.Module) -> SeveralAdapters | None:
    """Return the adapters that each token of a model has one of; None if it has no layer with several."""
    peft: Any = sys.modules.get("peft.tuners.lora")
    for module in hf.modules() if peft is not None else ():
        if isinstance(module, peft.LoraLayer):
            variant = module.lora_variant.get(ADAPTER)
            return variant if isinstance(variant, SeveralAdapters) else None
    return None


def _adapt_stacks(module: nn.Module, sizes: Mapping[str, AdapterSize]) -> None:
    """Make stacked experts compute with adapters.

    Args:
        module: Module with the stacked experts of a layer, changed in place.
        sizes: Sizes of the adapters of the module's parameters.
    """
    is_transposed = _is_transposed(module)
    for name, size in sizes.items():
        weight = cast("Tensor", module._parameters[name])
        num_experts, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
        module.register_parameter(STACKED_A + name, nn.Parameter(weight.new_empty(num_experts, size.dim, inputs)))
        module.register_parameter(STACKED_B + name, nn.Parameter(weight.new_empty(num_experts, outputs, size.dim)))
    vars(module)["lora_sizes"] = sizes

    def merged(held: Parameters) -> Parameters:
        computed = dict(held)
        for name, size in sizes.items():
            weight, down, up = (cast("Tensor", held[each]) for each in (name, STACKED_A + name, STACKED_B + name))
            left, right = (down.mT, up.mT) if is_transposed else (up, down)
            computed[name] = torch.baddbmm(weight, left, right, alpha=size.scale)
        return computed

    compute_on(module, merged)


def adapted_modules(hf: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the linear layers, by name, that get an adapter: never the head, nor layers that peft refuses unless
    they are named."""
    layers = [name for name in _linear_layers(hf) if is_adapted(name, config)]
    refused = refused_by_peft(hf, layers) if config.match_all_linear else set()
    return [name for name in layers if name not in refused]


def adapters_of(hf: PreTrainedModel, adapter: str = ADAPTER) -> dict[str, Adapter]:
    """Return the adapter of each weight by the weight's name without adapters in it.

    Args:
        hf: Model.
        adapter: Name of one of several adapters (`SeveralAdapters.names`).
    """
    peft: Any = sys.modules.get("peft.tuners.lora")  # It is not imported before the first adapter.
    linear = {
        f"{name}.weight": Adapter(
            cast("Tensor", module.lora_A[adapter].weight),
            cast("Tensor", module.lora_B[adapter].weight),
            float(module.scaling[adapter]),
            is_transposed=isinstance(module.get_base_layer(), Conv1D),
            magnitude=module.lora_magnitude_vector[ADAPTER].weight if ADAPTER in module.lora_magnitude_vector else None,
        )
        for name, module in hf.named_modules()
        if peft is not None and isinstance(module, peft.LoraLayer)
    }
    stacked = {}
    for name, module in stacked_weights(hf).items():
        short = name.rpartition(".")[2]
        down, up = (module._parameters.get(prefix + short) for prefix in (STACKED_A, STACKED_B))
        if down is not None and up is not None:
            stacked[name] = Adapter(down, up, module.lora_sizes[short].scale, is_transposed=_is_transposed(module))
    return linear | stacked


def stacked_weights(hf: PreTrainedModel) -> dict[str, Any]:
    """Return the module of each weight of stacked experts by the name of the weight."""
    experts = {id(module) for module in expert_modules(hf)}
    return {
        f"{module_name}.{name}": module
        for module_name, module in hf.named_modules()
        if id(module) in experts
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() == STACK_DIMS and not name.startswith((STACKED_A, STACKED_B))
    }


def _is_transposed(module: Any) -> bool:
    """Return whether weights of stacked experts are `[experts, inputs, outputs]`, as peft decides it."""
    return bool(getattr(module, "is_transposed", False))


def _linear_layers(hf: PreTrainedModel) -> list[str]:
    heads = (hf.get_output_embeddings(), dict(hf.named_children()).get("score"))
    return [
        name
        for name, module in hf.named_modules()
        if type(module).forward in LINEAR and not any(module is head for head in heads)
    ]


def _check_targets(hf: PreTrainedModel, config: LoraConfig) -> None:
    stacks = stacked_weights(hf)
    for ending in config.target_parameters:
        if not any(ends_with(name, [ending]) for name in stacks):
            known = sorted({".".join(name.split(".")[-2:]) for name in stacks})
            advice = f"name some of {', '.join(known)}" if known else "this model has none, leave it empty"
            raise ValueError(
                f"lora_cfg.target_parameters: {ending!r} is not a weight of stacked experts of this "
                f"{type(hf).__name__}; {advice}"
            )
    if config.match_all_linear:
        return
    linear = _linear_layers(hf)
    others = [name for name, _ in (*hf.named_modules(), *hf.named_parameters())]
    for ending in config.target_modules:
        if any(ends_with(name, [ending]) for name in linear):
            continue
        problem = f"is not a linear layer of this {type(hf).__name__}"
        if any(ends_with(name, [ending]) for name in others):
            problem = (
                f"names the head, a router or stacked experts of this {type(hf).__name__}, which get no adapter from "
                "this key"
            )
        raise ValueError(
            f"lora_cfg.target_modules: {ending!r} {problem}; name some of "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))}, or name stacked experts in "
            "target_parameters"
        )


def init_adapters(hf: PreTrainedModel, initial: InitialFactors, adapter: str = ADAPTER) -> None:
    """Fill adapters with values that are the same on any mesh, and take them out of the weights if they are parts of
    these; collective."""
    with torch.no_grad():
        adapters = adapters_of(hf, adapter)
        held = {name.replace(BASE, ""): parameter for name, parameter in hf.named_parameters()}
        formats = {f"{name}.weight".replace(BASE, ""): layer.format for name, layer in quantized_layers(hf)}
        layers = peft_layers(adapters)
        for name, own in adapters.items():
            down, up = initial.of_weight(name, own.down.shape, own.up.shape, layer=layers[name])
            set_factors(own, down, up)
            weight = held[name]
            if initial.is_principal:
                part, (rows, columns) = local(weight), local_slices(weight)
                part.copy_(part.float() - (own.scale * up[rows] @ down[:, columns]).to(part.device))
            if own.magnitude is not None:
                norms = initial.magnitude(layers[name])
                if norms is None:
                    norms = own.norms(whole_values(weight, formats.get(name), torch.float32))
                local(own.magnitude).copy_(norms[local_slices(own.magnitude)])


@torch.no_grad()
def set_factors(adapter: Adapter, down: Tensor, up: Tensor) -> None:
    """Fill this rank's parts of the factors of an adapter.

    Args:
        adapter: The adapter.
        down: `[dim, inputs]`, or `[experts, dim, inputs]`, on the host.
        up: `[outputs, dim]`, or `[experts, outputs, dim]`.
    """
    local(adapter.down).copy_(down[local_slices(adapter.down)])
    local(adapter.up).copy_(up[local_slices(adapter.up)])
