"""Check by a tiny random model that a family trains on every mesh as it does in one process.

Every case trains two steps in float32 and is compared with `transformers` in float64, row by row, in one process. The
weights that leave the model before the first step are compared with the files, bit for bit. A model whose gradients
float32 does not resolve to the tolerance is compared with what `transformers` makes of it in float32 as well.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import WorkerDied, WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.plugins import MeshCase
from rl_core.selfcheck.cases import FamilyCase
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.selfcheck.torch.oracle import Oracle, adapt, merge, merge_files
from rl_core.torch.files.model_files import WeightFiles

TOLERANCE = 1e-5
MAX_ROUNDED = 1e-4
"""Largest difference that rounding may explain; then as large a one is looked for in one process in float32."""
ROUNDING_RUNS = 3
ROUNDING_SPREAD = 4
"""Times the largest difference of these runs that a mesh may differ by: each order of operations rounds otherwise."""
NUM_STEPS = 2
"""The second one begins with the weights and the momentum that the first one left."""
LENGTHS = (9, 3, 17, 1, 12, 2, 7)
VOCABULARY = 101
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})

Layouts = Mapping[str, tuple[int, Mapping[str, Any]]]
"""Name of a mesh to its ranks and the settings of the backend's config."""


class Expected(NamedTuple):
    """Training in one process, in float64.

    Args:
        steps: `loss` and `grad_norm` of each step.
        weights: Weights by name in the files, adapters merged, after the last step.
    """

    steps: tuple[Mapping[str, float], ...]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class SelfCheck:
    """The check of one backend.

    Args:
        build: `"package.module:function"`, a factory of workers for `PooledModel`.
        weights_of: The weights that a model sends or exports, by name in the files.
        first_token: Smallest token id of the batches.
        lora: Adapters of the cases that have some.
    """

    build: str
    weights_of: Callable[[PooledModel], Mapping[str, Tensor]]
    first_token: int = 0
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(enabled=True))

    def check_family(self, pool: RankPool, folder: Path, cases: Sequence[MeshCase]) -> Iterator[FamilyCase]:
        """Train a tiny model in each way; the failure of one case leaves the others to be tried.

        Args:
            pool: Pool of as many ranks as the largest mesh has.
            folder: Folder of the model.
            cases: Mesh, layout and trained weights of each run.
        """
        expected: dict[bool, Expected | Exception] = {}
        for has_adapters in sorted({case.has_adapters for case in cases}):
            try:
                expected[has_adapters] = self.expect(folder, has_adapters=has_adapters)
            except Exception as error:  # noqa: BLE001  # Any kind, from a family's own code, becomes the answer.
                expected[has_adapters] = error
        for case in cases:
            wanted = expected[case.has_adapters]
            if isinstance(wanted, Expected):
                yield self.check_case(pool, folder, case, wanted)
            else:
                reason = f"transformers cannot train it in one process, in float64: {wanted}"
                yield FamilyCase(case.mesh, case.layout, "refused", reason=reason)

    def check_case(self, pool: RankPool, folder: Path, case: MeshCase, expected: Expected) -> FamilyCase:
        """Train on one mesh."""
        config = ModelConfig(
            model_name=str(folder),
            precision="float32",
            optimizer=SGD,
            lora_cfg=self.lora if case.has_adapters else LoraConfig(),
            train_micro_batch_size=3,
            sequence_packing=SequencePackingConfig(enabled=case.is_packed, train_mb_tokens=16),
        )
        try:
            with PooledModel(pool, self.build, config, ModelSpec(), case.num_ranks, **case.settings) as model:
                before = self.weights_of(model)
                steps = [model.train_step(self.batch(seed), TokenLoss()) for seed in range(NUM_STEPS)]
                after = self.weights_of(model)
                by_adapter: Mapping[str, Tensor] = {}
                if case.has_adapters:
                    with tempfile.TemporaryDirectory() as adapter, tempfile.TemporaryDirectory() as merged:
                        model.export_adapter(adapter)
                        base = Oracle(folder).model
                        merge_files(base, Path(adapter))
                        base.save_pretrained(merged)
                        by_adapter = read_files(Path(merged))
        except (WorkerError, WorkerDied, TimeoutError) as error:
            refused = str(error).partition("ValueError: ")[2]
            return FamilyCase(case.mesh, case.layout, "refused" if refused else "off", reason=refused or str(error))
        source = read_files(folder)
        inexact = source.keys() ^ before.keys()
        for name in source.keys() & before.keys():
            sent, stored = before[name], source[name]
            if sent.dtype != stored.dtype or not torch.equal(sent, stored):
                inexact.add(name)
        differences = _differences(steps, after, expected)
        if case.has_adapters:
            differences["adapter"] = _farthest(by_adapter, expected)
        is_exact, reason = not inexact and _are_within(differences, {}), ""
        if not inexact and not is_exact and _are_within(differences, dict.fromkeys(differences, MAX_ROUNDED)):
            rounded = self.rounding(folder, expected, has_adapters=case.has_adapters)
            is_exact = _are_within(differences, {name: ROUNDING_SPREAD * value for name, value in rounded.items()})
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in rounded.items())
            reason = f"in one process transformers in float32 differs from float64 by {shown}" if is_exact else ""
        return FamilyCase(
            case.mesh, case.layout, "exact" if is_exact else "off", differences, tuple(sorted(inexact)), reason
        )

    def rounding(self, folder: Path, expected: Expected, *, has_adapters: bool) -> dict[str, float]:
        """Return the largest differences in one process that come only from float32, by what is compared: with the
        weights of the files, and with weights that are moved by at most their last bit."""
        found = []
        for seed in range(ROUNDING_RUNS):
            run = self.expect(folder, has_adapters=has_adapters, float32_seed=seed)
            found.append(_differences(run.steps, run.weights, expected))
        return {name: _maximum(each[name] for each in found) for name in found[0]}

    def expect(self, folder: Path, *, has_adapters: bool, float32_seed: int | None = None) -> Expected:
        """Train in one process.

        Args:
            folder: Folder of the model.
            has_adapters: True if adapters train, rather than all weights.
            float32_seed: Train in float32, with weights that are moved by their last bit unless it is 0.
        """
        oracle = Oracle(folder)
        if float32_seed is not None:
            oracle.model.float()
            if float32_seed:
                generator = torch.Generator().manual_seed(float32_seed)
                with torch.no_grad():
                    for parameter in oracle.model.parameters():
                        step = torch.randint(-1, 2, parameter.shape, generator=generator)
                        parameter.mul_(1 + step * torch.finfo(torch.float32).eps)
        if has_adapters:
            adapt(oracle.model, self.lora)
        steps = tuple(oracle.train_step(self.batch(seed), TokenLoss(), SGD, 1.0) for seed in range(NUM_STEPS))
        merge(oracle.model)
        with tempfile.TemporaryDirectory() as trained:
            oracle.model.save_pretrained(trained)  # Files may call weights otherwise.
            return Expected(steps, read_files(Path(trained)))

    def batch(self, seed: int) -> Batch:
        """Return random rows with the columns that `TokenLoss` needs."""
        rng = np.random.default_rng(seed)
        rows = [rng.integers(self.first_token, VOCABULARY, length) for length in LENGTHS]
        tokens = Ragged.from_rows(rows, dtype=np.int32)
        mask = (rng.random(len(tokens.values)) < 0.7).astype(np.int8)
        weights = rng.normal(size=len(mask)).astype(np.float32)
        candidates = rng.integers(-1, VOCABULARY, (len(mask), 3), dtype=np.int32)
        columns: dict[str, np.ndarray] = {"loss_mask": mask, "weights": weights, "candidates": candidates}
        return Batch({"tokens": tokens, **{name: tokens.like(column) for name, column in columns.items()}})


def case_on(layouts: Layouts, mesh: str, *, is_packed: bool, has_adapters: bool) -> MeshCase:
    """Return a case on one of these meshes."""
    num_ranks, settings = layouts[mesh]
    return MeshCase(mesh, num_ranks, settings, is_packed, has_adapters)


def all_cases(layouts: Layouts) -> list[MeshCase]:
    """Return every mesh, packed and padded, and with adapters."""
    rows = ((True, False), (False, False), (True, True))
    return [
        case_on(layouts, mesh, is_packed=is_packed, has_adapters=has_adapters)
        for mesh in layouts
        for is_packed, has_adapters in rows
    ]


def write_random(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Write a random model as Hugging Face files, no parameter of it the same as another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(folder)
    return folder


def read_files(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a folder."""
    files = WeightFiles.of(folder)
    with files.open() as opened:
        return {name: opened.read(name, ()) for name in files.names}


def _differences(
    steps: Sequence[Mapping[str, float]], weights: Mapping[str, Tensor], expected: Expected
) -> dict[str, float]:
    """Return the largest differences by compared quantity; over the steps they are relative to values above 1."""
    found = {}
    for name in ("loss", "grad_norm"):
        pairs = ((one[name], other[name]) for one, other in zip(steps, expected.steps, strict=True))
        found[name] = _maximum(abs(one - other) / max(1.0, abs(other)) for one, other in pairs)
    return {**found, "weights": _farthest(weights, expected)}


def _farthest(weights: Mapping[str, Tensor], expected: Expected) -> float:
    missing = expected.weights.keys() - weights.keys()
    if missing:
        return math.inf
    return _maximum(float((weights[name] - weight).abs().max()) for name, weight in expected.weights.items())


def _are_within(differences: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Return whether all differences are at most their limits, or the tolerance if it is larger; one that is not a
    number is not."""
    return all(value <= max(TOLERANCE, limits.get(name, 0.0)) for name, value in differences.items())


def _maximum(values: Iterable[float]) -> float:
    """Return the maximum, which is not a number if a value is not one."""
    return float(np.max(list(values)))
