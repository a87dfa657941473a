"""The answers that a model must give, computed row by row in float64 by transformers on one process.

Low-rank adapters are computed without peft.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, remove_parametrizations
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from rl_core.data.batch import TOKENS, Batch
from rl_core.model import Loss, ModelSpec, Read, Role, read_columns
from rl_core.model_config import LoraConfig, OptimizerConfig
from rl_core.plugins import resolve
from rl_core.token_filter import ALLOWED, TokenFilter, allowed_sets
from rl_core.torch.loss import Rows
from rl_core.torch.rows import to_rows
from rl_core.torch.training.lora import initial_down, is_adapted, is_adapted_stack, refused_by_peft, size_of
from rl_core.user_code import implementation_name


class ReferenceMuon(torch.optim.AdamW):
    """Muon over whole matrices, or stacks of them, in the dtype of the parameters; AdamW over the rest.

    Args:
        matrices: Parameters of Muon.
        rest: Parameters of AdamW.
        adamw: Arguments of AdamW.
        lr: Learning rate of Muon.
        weight_decay: Weight decay of Muon.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: Sequence[nn.Parameter],
        adamw: Mapping[str, Any],
        lr: float,
        weight_decay: float,
    ) -> None:
        super().__init__(rest, **adamw)
        self._matrices, self._lr, self._decay = matrices, lr, weight_decay
        self._momentum = [torch.zeros_like(matrix) for matrix in matrices]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        super().zero_grad(set_to_none)
        for matrix in self._matrices:
            matrix.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters."""
        super().step(closure)
        for matrix, momentum in zip(self._matrices, self._momentum, strict=True):
            assert matrix.grad is not None
            momentum.mul_(0.95).add_(matrix.grad, alpha=0.05)
            x = 0.05 * matrix.grad + 0.95 * momentum
            x = x / torch.linalg.matrix_norm(x, keepdim=True)
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
            ratio = math.sqrt(max(1, matrix.shape[-2] / matrix.shape[-1]))
            matrix.mul_(1 - self._lr * self._decay).sub_(x, alpha=self._lr * ratio)


LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of linear layers; the weights of the second are transposed. Routers may inherit from the first, and
return more than its product."""


class Oracle:
    """A model of a role in float64, each row passed through `transformers` alone, whole logits and all.

    Args:
        folder: Hugging Face files.

    Attributes:
        optimizer: Steps the model; None until it is built, at the latest by the first step.
    """

    def __init__(self, folder: Path, role: Role = "policy") -> None:
        has_score_head = role in ("critic", "reward_model")
        auto = AutoModelForSequenceClassification if has_score_head else AutoModelForCausalLM
        labels = {"num_labels": 1} if has_score_head else {}
        # eager experts too: the grouped product of matrices takes no float64
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = auto.from_pretrained(folder, dtype=torch.float64, **eager, **labels).eval()
        self.role = role
        self.optimizer: torch.optim.Optimizer | None = None

    def infer(self, batch: Batch, reads: Sequence[Read], temperature: float = 1.0) -> dict[str, np.ndarray]:
        """Return the columns of the reads, rows end to end."""
        with torch.no_grad():
            columns = self._reads(batch, reads, temperature)
        return {name: column.numpy() for name, column in columns.items()}

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """Return the loss over the whole batch, with gradients."""
        rows = to_rows(batch.only([TOKENS, *loss.columns]), torch.device("cpu"))
        wide = {name: each.double() if each.is_floating_point() else each for name, each in rows.columns.items()}
        rows = Rows(rows.offsets, wide)
        compute = resolve(implementation_name(loss, loss.implementation))
        sums = compute(loss, self._reads(batch, loss.reads, loss.temperature), rows)
        return sums.loss(loss.totals(batch))

    def train_step(
        self, batch: Batch | Sequence[Batch], loss: Loss, optimizer: OptimizerConfig, max_grad_norm: float | None
    ) -> dict[str, float]:
        """Make one step of a torch optimizer, kept from call to call, on the loss of a batch or on the sum of several.

        Returns:
            `loss` and `grad_norm` as a worker reports them.
        """
        if self.optimizer is None:
            self.optimizer = _class_of(optimizer)(self.model.parameters(), **optimizer.kwargs)
        self.optimizer.zero_grad()
        batches = [batch] if isinstance(batch, Batch) else batch
        value = torch.stack([self.loss(each, loss) for each in batches]).sum()
        value.backward()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt().item()
        if max_grad_norm is not None and norm > max_grad_norm:
            for grad in grads:
                grad *= max_grad_norm / norm
        self.optimizer.step()
        return {"loss": value.item(), "grad_norm": norm}

    def decay_matrices_alone(self, optimizer: OptimizerConfig) -> None:
        """Build the optimizer with norms and biases, known by name, in a group without weight decay."""
        named = dict(self.model.named_parameters())
        kept = {name: parameter for name, parameter in named.items() if "norm" in name or "bias" in name}
        decayed = [parameter for name, parameter in named.items() if name not in kept]
        assert kept
        assert decayed
        groups = [{"params": decayed}, {"params": list(kept.values()), "weight_decay": 0.0}]
        self.optimizer = _class_of(optimizer)(groups, **optimizer.kwargs)

    def train_by_name(self, optimizer: OptimizerConfig, rate: Callable[[str], float]) -> None:
        """Build the optimizer with a group for each parameter.

        Args:
            optimizer: Name and arguments of the optimizer.
            rate: Function from the name of a parameter to the factor of its learning rate; at 0 it does not train.
        """
        rates = {name: rate(name) for name, _ in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(rates[name] > 0)
        lr = optimizer.kwargs["lr"]
        groups = [
            {"params": [parameter], "lr": lr * rates[name]}
            for name, parameter in self.model.named_parameters()
            if rates[name] > 0
        ]
        self.optimizer = _class_of(optimizer)(groups, **optimizer.kwargs)

    def step_by_muon(self, optimizer: OptimizerConfig) -> None:
        """Build Muon over all matrices except embedding and head, and AdamW over the rest.

        Args:
            optimizer: Learning rate and weight decay of Muon, and arguments of AdamW, as `adamw`.
        """
        named = dict(self.model.named_parameters())
        ends = ("embed_tokens", "lm_head", "score.")
        matrices = [each for name, each in named.items() if each.dim() > 1 and not any(end in name for end in ends)]
        rest = [each for each in named.values() if all(each is not matrix for matrix in matrices)]
        settings = {key: value for key, value in optimizer.kwargs.items() if key in ("lr", "weight_decay")}
        self.optimizer = ReferenceMuon(matrices, rest, settings | optimizer.kwargs.get("adamw", {}), **settings)

    def _reads(self, batch: Batch, reads: Sequence[Read], temperature: float) -> Mapping[str, Tensor]:
        names = (TOKENS, *read_columns(reads))
        parts = [
            self._row({name: torch.as_tensor(batch.ragged(name)[row]).long() for name in names}, reads, temperature)
            for row in range(len(batch))
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _row(self, row: Mapping[str, Tensor], reads: Sequence[Read], temperature: float) -> dict[str, Tensor]:
        tokens = row[TOKENS]
        if self.role in ("critic", "reward_model"):
            hidden = self.model.base_model(input_ids=tokens[None]).last_hidden_state[0]
            heads = self.model.score(hidden)[:, 0]
            return {"scores": heads[-1:], "values": _after_first(heads[:-1])}
        logits = self.model(input_ids=tokens[None]).logits[0, :-1] / temperature
        token_filter = next((read.token_filter for read in reads if read.token_filter is not None), None)
        if token_filter is not None and token_filter.allowed:
            sets, bits = allowed_sets([row[ALLOWED].byte().numpy()], [len(tokens)])
            is_allowed = torch.from_numpy(np.unpackbits(bits[sets[1:]], axis=1, bitorder="little")).bool()
            # Rows of a head that pads its vocabulary have no token; a set that is not given has all of them.
            is_out = torch.from_numpy(sets[1:] > 0)[:, None].repeat(1, logits.shape[1])
            is_out[:, : is_allowed.shape[1]] &= ~is_allowed[:, : logits.shape[1]]
            logits = logits.masked_fill(is_out, -1e30)
        logprobs = (logits if token_filter is None else _kept_only(logits, tokens[1:], token_filter)).log_softmax(-1)
        columns = {
            "logprobs": logprobs.gather(1, tokens[1:, None])[:, 0],
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
            "collision": logprobs.exp().square().sum(-1),
        }
        k = max((read.k for read in reads), default=0)
        below = max((read.below for read in reads), default=0) or logprobs.shape[1]
        columns["topk_logprobs"], columns["topk_ids"] = logprobs[:, :below].topk(k)
        for name in read_columns([read for read in reads if read.name == "logprobs_at"]):
            ids = row[name][1:]
            columns["logprobs_at"] = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
        return {name: _after_first(columns[name]) for read in reads for name in read.columns}


def _class_of(optimizer: OptimizerConfig) -> Any:
    return resolve(":".join(optimizer.name.rsplit(".", 1)))


def _kept_only(logits: Tensor, tokens: Tensor, token_filter: TokenFilter) -> Tensor:
    """Return logits `[n, vocab]` with the tokens that a filter leaves out, except `tokens` `[n]`, so low that
    their probability is 0; written as the definition."""
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for place, row in enumerate(logits.detach()):
        falling = row.argsort(descending=True)
        probabilities = row.softmax(-1)[falling]
        falling = falling[probabilities >= token_filter.min_p * probabilities[0]]
        falling = _with_ties(row, falling, token_filter.top_k or len(falling))
        held = row[falling].softmax(-1).cumsum(0)
        num_kept = len(falling) if token_filter.top_p == 1 else 1 + int((held < token_filter.top_p).sum())
        is_kept[place, _with_ties(row, falling, num_kept)] = True
        is_kept[place, tokens[place]] = True
    return logits.masked_fill(~is_kept, -1e30)


def _with_ties(row: Tensor, falling: Tensor, num: int) -> Tensor:
    """Return the first ids of logits in descending order, and those whose logits equal the last one's."""
    return falling[row[falling] >= row[falling[min(num, len(falling)) - 1]]]


def _after_first(values: Tensor) -> Tensor:
    """Return the results of the tokens that follow another, after a 0 for the first."""
    return torch.cat([values.new_zeros((1, *values.shape[1:])), values])


class AdaptedExperts(nn.Module):
    """Adapters of a stacked weight, one for each expert, as a parametrization of it.

    Args:
        name: Name of the weight, which seeds the adapters.
        weight: `[experts, outputs, inputs]`, or `[experts, inputs, outputs]` if transposed.
    """

    def __init__(self, name: str, weight: Tensor, config: LoraConfig, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        num_experts, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
        size = size_of(name, config)
        self.scale = size.scale
        self.down = nn.Parameter(initial_down(name, (num_experts, size.dim, inputs), ModelSpec().seed).to(weight))
        self.up = nn.Parameter(weight.new_zeros(num_experts, outputs, size.dim))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weights with the adapters, expert by expert."""
        added = torch.stack([self.scale * up @ down for up, down in zip(self.up, self.down, strict=True)])
        return weight + (added.mT if self.is_transposed else added)


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter.

    Args:
        name: Name of the layer, which seeds the adapter.
    """

    def __init__(self, base: nn.Module, name: str, config: LoraConfig) -> None:
        super().__init__()
        self.base = base
        self.magnitude: nn.Parameter | None = None
        size = size_of(name, config)
        self.scale = size.scale
        weight: Any = base.weight
        self.is_transposed = isinstance(base, Conv1D)
        outputs, inputs = weight.T.shape if self.is_transposed else weight.shape
        down = initial_down(f"{name}.weight", (size.dim, inputs), ModelSpec().seed)
        self.down = nn.Parameter(down.to(weight.dtype))
        self.up = nn.Parameter(weight.new_zeros(outputs, size.dim))
        if config.init == "pissa":
            left, values, right = torch.linalg.svd(weight)
            roots = torch.diag(values[: size.dim] / self.scale) ** 0.5
            self.down = nn.Parameter(roots @ right[: size.dim])
            self.up = nn.Parameter(left[:, : size.dim] @ roots)
            with torch.no_grad():
                weight -= self.scale * self.up @ self.down
        if config.use_dora:
            self.magnitude = nn.Parameter(self._summed().detach().norm(dim=1))

    def forward(self, hidden: Tensor) -> Tensor:
        """As the linear layer's."""
        if self.magnitude is None:
            out: Tensor = self.base(hidden) + self.scale * (hidden @ self.down.T @ self.up.T)
            return out
        bias = cast("Tensor | None", self.base.bias)
        return nn.functional.linear(hidden, self._directed(), bias)

    @torch.no_grad()
    def merge(self) -> None:
        """Put the weight with the adapter in the place of its weight."""
        merged = self._summed() if self.magnitude is None else self._directed()
        cast("Tensor", self.base.weight).copy_(merged.T if self.is_transposed else merged)

    def _summed(self) -> Tensor:
        weight: Any = self.base.weight
        summed: Tensor = (weight.T if self.is_transposed else weight) + self.scale * self.up @ self.down
        return summed

    def _directed(self) -> Tensor:
        assert self.magnitude is not None
        summed = self._summed()
        return (self.magnitude / summed.detach().norm(dim=1))[:, None] * summed


def adapt(model: Any, config: LoraConfig) -> None:
    """Put adapters on the linear layers of a model but its head, and on stacked experts, and freeze the rest."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if type(module).forward in LINEAR and module is not head and is_adapted(name, config)
    ]
    refused = refused_by_peft(model, layers) if config.match_all_linear else set()
    for name in (layer for layer in layers if layer not in refused):
        model.set_submodule(name, AdaptedLinear(model.get_submodule(name), name, config))
    for name, weight in list(model.named_parameters()):
        if is_adapted_stack(name, config):
            owner, _, short = name.rpartition(".")
            experts = model.get_submodule(owner)
            adapters = AdaptedExperts(name, weight, config, is_transposed=_is_transposed(experts))
            register_parametrization(experts, short, adapters)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters of a model to their weights, and take them away."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            module.merge()
            model.set_submodule(name, module.base)
    for module in list(model.modules()):
        if is_parametrized(module):
            for short in list(cast("nn.ModuleDict", module.parametrizations)):
                remove_parametrizations(module, short)


@torch.no_grad()
def merge_files(model: nn.Module, folder: Path) -> None:
    """Add the adapters in a folder of the format of `peft` to the weights of a model.

    Raises:
        ValueError: If the folder lists other layers than it has factors of, or layers that the model does not have.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    factors = {
        name.removeprefix("base_model.model."): factor
        for name, factor in load_file(folder / "adapter_model.safetensors").items()
    }
    layers = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    named = {
        name
        for name, module in model.named_modules()
        if type(module).forward in LINEAR
        and (
            any(f".{name}".endswith(f".{target}") for target in config["target_modules"])
            or f"{name}.weight" in (config.get("target_parameters") or ())
        )
    }
    stacks = _wrapped_parameters(model, config.get("target_parameters") or ())
    if named | stacks.keys() != layers:
        odd = sorted((named | stacks.keys()) ^ layers)
        raise ValueError(f"{folder} lists {odd} without factors, or has factors of them without listing them")
    for layer, (name, stack) in stacks.items():
        down, up = (factors.pop(f"{layer}.lora_{which}.weight").to(stack.dtype) for which in "AB")
        dim = len(down) // len(stack)
        scale = _scale_in(config, [name], dim)
        for expert, stacked in enumerate(stack):
            rows = slice(expert * dim, (expert + 1) * dim)
            stacked += scale * up[:, expert :: len(stack)] @ down[rows]
    for layer in named:
        weight: Any = model.get_submodule(layer).weight
        down, up = (factors.pop(f"{layer}.lora_{which}.weight").to(weight.dtype) for which in "AB")
        plain = weight.T if isinstance(model.get_submodule(layer), Conv1D) else weight
        plain += _scale_in(config, [layer, f"{layer}.weight"], len(down)) * up @ down
        if config["use_dora"]:
            plain *= (factors.pop(f"{layer}.lora_magnitude_vector").to(weight.dtype) / plain.norm(dim=1))[:, None]
    for name in config["modules_to_save"] or ():
        cast("Tensor", model.get_submodule(name).weight).copy_(factors.pop(f"{name}.weight"))
    if factors:
        raise ValueError(f"{folder} holds {sorted(factors)}, which belong to no adapter")


def _scale_in(config: Mapping[str, Any], names: Sequence[str], dim: int) -> float:
    """Return the scale of the adapter of a layer, whose factors have this rank, by an `adapter_config.json`.

    Args:
        config: The contents of the file.
        names: Names by which the file may list the layer.
        dim: Rank of the factors.

    Raises:
        ValueError: If the config has another rank for the layer.
    """
    ranks, alphas = config["rank_pattern"], config["alpha_pattern"]
    rank = next((ranks[name] for name in names if name in ranks), config["r"])
    alpha = next((alphas[name] for name in names if name in alphas), config["lora_alpha"])
    if rank != dim:
        raise ValueError(f"the config of the adapter has rank {rank} for {names[0]}, whose factors have {dim}")
    return float(alpha / (math.sqrt(dim) if config["use_rslora"] else dim))


def _is_transposed(experts: Any) -> bool:
    return bool(getattr(experts, "is_transposed", False))


def _wrapped_parameters(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[str, Tensor]]:
    """Return the wrappers, by name, that peft puts around a module for its stacked parameters, the last one's
    outermost, to the names of these and to their values as `[experts, outputs, inputs]`.

    Args:
        model: Model without the wrappers.
        targets: Parameters by full name.
    """
    wrapped: dict[str, tuple[str, Tensor]] = {}
    for name, module in model.named_modules():
        own = [
            (f"{name}.{short}", parameter.mT if _is_transposed(module) else parameter)
            for short, parameter in module.named_parameters(recurse=False)
            if f"{name}.{short}" in targets and short != "weight"
        ]
        for depth, parameter in enumerate(reversed(own)):
            wrapped[name + ".base_layer" * depth] = parameter
    return wrapped
