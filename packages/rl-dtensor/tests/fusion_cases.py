"""Cases of models with fused layers, run here or in Triton's interpreter."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.selfcheck.rank_pool import Rank
from rl_dtensor.model import build
from rl_dtensor.model.layers import experts, fusion
from rl_dtensor.model.layers.fusion import fuse_layers
from rl_dtensor.model.tiny import made_tiny, shrink
from rl_dtensor.model.whole import decoder_layers


def trained(family: str, dtype: torch.dtype, *, is_fused: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits of a tiny model and the gradients of its parameters."""
    config = shrink(AutoConfig.for_model(family))
    torch.manual_seed(seed)
    with made_tiny(config.model_type):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model = model.to(torch.bfloat16).to(dtype)  # the same values in every dtype
    if is_fused:
        fuse_layers(model, decoder_layers(model))
    tokens = torch.arange(1, 13).view(2, 6)
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.double().sin().mean().backward()
    return {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters()}}


def half_precision_errors(rank: Rank, family: str) -> tuple[dict[str, float], dict[str, float]]:
    """Distances in bfloat16 from float64, relative to its norm, of a model with kernels and of one without."""
    exact = trained(family, torch.float64, is_fused=False)
    return tuple(
        {
            name: float((found[name].double() - value).norm() / value.norm())
            for name, value in exact.items()
            if value is not None and value.norm() > 0
        }
        for found in (trained(family, torch.bfloat16, is_fused=is_fused) for is_fused in (True, False))
    )


class _Counted:
    def __init__(self, program: Any, counts: list[int]) -> None:
        self.program = program
        self.counts = counts

    def __getitem__(self, grid: Any) -> Any:
        self.counts[0] += 1
        return self.program[grid]


def count_launches(rank: Rank) -> None:
    """Count the norms that kernels of this process compute from here on."""
    from rl_core.torch.kernels import layer_programs as norm

    program = rank.held.setdefault("norm program", norm.rms_norm_backward)
    rank.held["launches"] = [0]
    norm.rms_norm_backward = _Counted(program, rank.held["launches"])


def launched(rank: Rank) -> int:
    """Number of norms since `count_launches`."""
    return rank.held["launches"][0]


def fuse_formulas(rank: Rank) -> None:
    """Build models of this process with fused layers that compute by the plain formulas, until `fuse_nothing`."""
    rank.held["fused"] = []
    rank.held["originals"] = originals = [
        (module, name, getattr(module, name))
        for module, names in {
            build: ("runs_kernels", "fuse_layers"),
            experts: ("takes",),
            fusion: ("takes", "takes_norm"),
        }.items()
        for name in names
    ]
    for module, name, _ in originals:
        setattr(module, name, lambda *_: True)

    def fuse(*args: Any) -> None:
        rank.held["fused"].append(sum(fuse_layers(*args).values()))

    build.fuse_layers = fuse


def fuse_nothing(rank: Rank) -> list[int]:
    """Numbers of modules that were fused in each model."""
    for module, name, original in rank.held.pop("originals"):
        setattr(module, name, original)
    return rank.held.pop("fused")
