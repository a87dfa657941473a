"""Does a model family train on every layout as it does in one process? A tiny random model of it says.

Every case trains three steps in float32 and is held against `transformers` in float64, row by row, in one process; what
is exported before the first step is held against the files, bit for bit.
"""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rl_core.batch import Batch
from rl_core.errors import ConfigError, WorkerDied, WorkerError
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.ragged import Ragged
from rl_core.selfcheck import FamilyCase, MeshCase
from rl_core.testing.losses import TokenLoss
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.rank_pool import RankPool
from rl_core.testing.torch.oracle import Oracle
from rl_core.testing.torch.tiny_model import SIZES
from rl_core.torch.files.model_files import WeightFiles
from rl_megatron.config import MegatronConfig
from rl_megatron.families.catalog import family_of
from rl_megatron.worker import MegatronWorker

TOLERANCE = 1e-5
NUM_STEPS = 3
LENGTHS = (9, 3, 17, 1, 12, 2, 7)
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})
LORA = LoraConfig(enabled=True)

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2+sp": (2, SEQUENCE),
    "pp2": (2, PIPELINE),
    "pp2 virtual": (2, {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2+sp x pp2": (4, {**SEQUENCE, **PIPELINE}),
    "ep2": (2, EXPERTS),
    "tp2+sp x ep2": (4, {**SEQUENCE, **EXPERTS}),
}
"""Name of each layout to its ranks and settings."""

SMALL: Mapping[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
"""Sizes of the tiny model, for those of these fields that the family's config has a value of."""


@dataclass(frozen=True)
class Expected:
    """What one process does, in float64.

    Args:
        steps: `loss` and `grad_norm` of each step.
        weights: by name, adapters merged, after the last step.
    """

    steps: tuple[Mapping[str, float], ...]
    weights: Mapping[str, Tensor]


def cases_of(model: str, only: MeshCase | None = None) -> Iterator[FamilyCase]:
    """Every layout, packed and padded, and with adapters, as `rl doctor model` shows it, or one.

    Args:
        model: a folder with a `config.json`, or a hub name.
        only: the one to check; `all_cases` if None.

    Raises:
        ConfigError: where transformers knows no such family, or this backend has no maps of its weights.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        family_of(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model} cannot be trained on Megatron Core: {str(error).splitlines()[0]}") from None
    cases = all_cases() if only is None else [only]
    num_ranks = max(case.num_ranks for case in cases)
    with RankPool(num_ranks) as pool, tempfile.TemporaryDirectory() as workspace:
        yield from check_family(pool, config, Path(workspace), cases)


def case_on(layout: str, *, is_packed: bool, has_adapters: bool) -> MeshCase:
    """A case on one of `LAYOUTS`."""
    num_ranks, settings = LAYOUTS[layout]
    return MeshCase(layout, num_ranks, settings, is_packed, has_adapters)


def all_cases() -> list[MeshCase]:
    """Every layout of ranks, packed and padded, and with adapters."""
    rows = ((True, False), (False, False), (True, True))
    return [
        case_on(layout, is_packed=is_packed, has_adapters=has_adapters)
        for layout in LAYOUTS
        for is_packed, has_adapters in rows
    ]


def check_family(
    pool: RankPool, config: PreTrainedConfig, workspace: Path, cases: Sequence[MeshCase]
) -> Iterator[FamilyCase]:
    """As `cases_of`, in a pool of as many ranks as the largest layout has, and an empty folder."""
    folder = write_tiny(config, workspace / "tiny")
    kinds = {case.has_adapters for case in cases}
    expected = {has_adapters: expect(folder, has_adapters=has_adapters) for has_adapters in sorted(kinds)}
    for case in cases:
        yield check_case(pool, folder, case, expected[case.has_adapters])


def check_case(pool: RankPool, folder: Path, case: MeshCase, expected: Expected) -> FamilyCase:
    """One layout of ranks and rows."""
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=SGD,
        lora_cfg=LORA if case.has_adapters else LoraConfig(),
        train_micro_batch_size=3,
        sequence_packing=SequencePackingConfig(enabled=case.is_packed, train_mb_tokens=16),
    )
    try:
        with (
            tempfile.TemporaryDirectory() as exports,
            PooledModel(
                pool, "rl_megatron.selfcheck:build", config, ModelSpec(), case.num_ranks, **case.settings
            ) as model,
        ):
            model.export(f"{exports}/before")
            steps = [model.train_step(make_batch(seed), TokenLoss()) for seed in range(NUM_STEPS)]
            model.export(f"{exports}/after")
            before, after = (_read(Path(exports, name)) for name in ("before", "after"))
    except (WorkerError, WorkerDied, TimeoutError) as error:
        refused = str(error).partition("ValueError: ")[2]
        return FamilyCase(case.mesh, case.layout, "refused" if refused else "off", reason=refused or str(error))
    source = _read(folder)
    inexact = tuple(sorted(name for name in {*source, *before} if not _same(before.get(name), source.get(name))))
    differences = {
        name: max(
            abs(found[name] - wanted[name]) / max(1.0, abs(wanted[name]))
            for found, wanted in zip(steps, expected.steps, strict=True)
        )
        for name in ("loss", "grad_norm")
    }
    differences["weights"] = max(
        float((after[name] - weight).abs().max()) if name in after else math.inf
        for name, weight in expected.weights.items()
    )
    is_exact = all(value <= TOLERANCE for value in differences.values()) and not inexact
    return FamilyCase(case.mesh, case.layout, "exact" if is_exact else "off", differences, inexact)


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: Any) -> MegatronWorker:
    """A worker in a process of the pool."""
    return MegatronWorker(config, MegatronConfig(**settings), spec, rendezvous)


def write_tiny(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """A random model of the family at a tiny size, no parameter of it the same as another, as Hugging Face files."""
    fields = config.to_dict()
    small = {name: value for name, value in SMALL.items() if fields.get(name) is not None}
    if "kv_lora_rank" in small:  # latent attention has a key for every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    if fields.get("layer_types"):
        small["layer_types"] = (list(dict.fromkeys(fields["layer_types"])) * 4)[:4]
    if fields.get("mlp_only_layers"):
        small["mlp_only_layers"] = [0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(type(config).from_dict({**fields, **small}), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder


def expect(folder: Path, *, has_adapters: bool) -> Expected:
    """Train in one process."""
    oracle = Oracle(folder)
    if has_adapters:
        adapt(oracle.model, LORA)
    steps = tuple(oracle.train_step(make_batch(seed), TokenLoss(), SGD, 1.0) for seed in range(NUM_STEPS))
    with tempfile.TemporaryDirectory() as trained:
        merge(oracle.model)
        oracle.model.save_pretrained(trained)  # under the names of files
        return Expected(steps, _read(Path(trained)))


class AdaptedLinear(nn.Module):
    """A linear layer of transformers with an adapter that starts as peft's.

    Args:
        name: of the layer, which seeds it.
    """

    def __init__(self, base: nn.Linear, name: str, config: LoraConfig) -> None:
        super().__init__()
        self.base = base
        self.scale = config.alpha / config.dim
        generator = torch.Generator().manual_seed(ModelSpec().seed + zlib.crc32(f"{name}.weight".encode()))
        bound = 1 / math.sqrt(base.in_features)
        down = torch.empty(config.dim, base.in_features).uniform_(-bound, bound, generator=generator)
        self.down = nn.Parameter(down.to(base.weight.dtype))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, config.dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """As the linear layer's."""
        out: Tensor = self.base(hidden) + self.scale * (hidden @ self.down.T @ self.up.T)
        return out


def adapt(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters on the linear layers of a model of transformers; experts and routers are none there."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        is_named = any(f".{name}".endswith(f".{ending}") for ending in config.target_modules)
        if isinstance(module, nn.Linear) and name != "lm_head" and (config.match_all_linear or is_named):
            model.set_submodule(name, AdaptedLinear(module, name, config))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters of a model to the weights that they sit on, and take them away."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            module.base.weight += module.scale * module.up @ module.down
            model.set_submodule(name, module.base)


def make_batch(seed: int) -> Batch:
    """Random rows with the columns that `TokenLoss` needs, of tokens that are no padding."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, SMALL["vocab_size"], length) for length in LENGTHS]
    tokens = Ragged.from_rows(rows, dtype=np.int32)
    mask = (rng.random(len(tokens.values)) < 0.7).astype(np.int8)
    weights = rng.normal(size=len(mask)).astype(np.float32)
    return Batch({"tokens": tokens, "loss_mask": tokens.like(mask), "weights": tokens.like(weights)})


def _read(folder: Path) -> dict[str, Tensor]:
    files = WeightFiles.of(folder)
    with files.open() as opened:
        return {name: opened.read(name, ()) for name in files.file_of}


def _same(found: Tensor | None, wanted: Tensor | None) -> bool:
    return found is not None and wanted is not None and found.dtype == wanted.dtype and torch.equal(found, wanted)
