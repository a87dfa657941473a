"""Adapters that reach an engine beside the weights that they sit on, and alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.errors import WeightSyncError
from rl_core.model_config import LoraConfig
from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.testing.torch.reference_model import ReferenceModel
from rl_core.testing.torch.weight_sender import Fault, manifest_of
from rl_core.testing.weights import Bench, WeightSinkSuite, prompt
from rl_core.torch.training.lora import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    LORA_A,
    LORA_B,
    WEIGHT,
    is_adapted,
    size_of,
)
from rl_core.weights import Manifest

ALL_LINEAR = LoraConfig(enabled=True, dim=4, alpha=6)
SOME = LoraConfig(
    enabled=True,
    dim=3,
    alpha=6,
    match_all_linear=False,
    target_modules=["q_proj", "v_proj", "up_proj", "mlp.down_proj"],
    rank_pattern={"v_proj": 5, "0.mlp.up_proj": 2},
    alpha_pattern={"q_proj": 4, "1.mlp.down_proj": 9},
    max_adapters=2,
)


NAMED = 10
"""Number of adapters that requests name, more than the engine keeps."""


@dataclass(frozen=True)
class Adapted:
    """A model with adapters.

    Args:
        parts: folder with the weights and the factors of the adapters, as they are sent.
        merged: folder with the weights that they make up together.
    """

    parts: Path
    merged: Path

    @classmethod
    def write(cls, folder: Path, base: Path, lora: LoraConfig, *, seed: int) -> Adapted:
        """Draw adapters on a model, large enough to change what it predicts."""
        parts, merged = folder / f"parts-{seed}", folder / f"merged-{seed}"
        shutil.copytree(base, merged)
        parts.mkdir()
        (parts / "config.json").write_text((base / "config.json").read_text())
        weights = load_file(base / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        factors, sums = {}, dict(weights)
        for name, weight in weights.items():
            layer = name.removesuffix(WEIGHT)
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name and is_adapted(layer, lora):
                size = size_of(layer, lora)
                down = torch.randn(size.dim, weight.shape[1], generator=generator)
                up = torch.randn(weight.shape[0], size.dim, generator=generator) * 0.05
                factors |= {layer + LORA_A: down, layer + LORA_B: up}
                sums[name] = weight + size.scale * up @ down
        save_file(sums, merged / "model.safetensors", metadata={"format": "pt"})
        save_file({**weights, **factors}, parts / "model.safetensors", metadata={"format": "pt"})
        return cls(parts, merged)

    def for_peft(self, folder: Path, lora: LoraConfig) -> Path:
        """The adapters in the format of peft."""
        folder.mkdir()
        factors = {name: each for name, each in load_file(self.parts / "model.safetensors").items() if ".lora_" in name}
        save_file({ADAPTER_PREFIX + name: each for name, each in factors.items()}, folder / ADAPTER_WEIGHTS)
        layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in factors}
        described = {"peft_type": "LORA", "r": lora.dim, "lora_alpha": lora.alpha, "target_modules": sorted(layers)}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(described))
        return folder

    def manifest(self, *, alone: bool) -> Manifest:
        """The manifest of the weights and factors, or of the factors alone."""
        whole = manifest_of(self.parts, 0)
        factors = [spec for spec in whole.tensors if spec.name.endswith((LORA_A, LORA_B))]
        weights = [] if alone else [spec for spec in whole.tensors if spec not in factors]
        return Manifest(0, (*weights, *factors), {} if alone else whole.tied, len(factors))


class AdapterSuite(WeightSinkSuite):
    """Tests of an engine that was started with `lora_sync=adapter`."""

    lora: ClassVar[LoraConfig] = ALL_LINEAR

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[Adapted]:
        """Two sets of adapters on the suite's first model."""
        folder = tmp_path_factory.mktemp("adapted")
        found = [Adapted.write(folder, bench.first, cls.lora, seed=seed) for seed in (1, 2)]
        bench.references |= {each.merged: ReferenceModel(each.merged) for each in found}
        return found

    def test_adapters_arrive_with_their_weights_and_then_alone(self, bench: Bench, adapted: list[Adapted]) -> None:
        first, second = adapted
        read_before = GenerationRequest(prompt(200), SamplingParams(4), seed=1)
        try:
            for kind in ("ipc", "collective"):
                version = bench.runner.run(bench.sync(first.parts, kind=kind, manifest=first.manifest(alone=False)))
                self._check_serves(bench, first.merged, version)
                bench.runner.run(bench.generator.generate(read_before))
                version = bench.runner.run(bench.sync(second.parts, kind=kind, manifest=second.manifest(alone=True)))
                self._check_serves(bench, second.merged, version)
                completion = bench.runner.run(bench.generator.generate(read_before))
                expected = bench.references[second.merged].completion_logprobs(
                    read_before.token_ids, completion.token_ids
                )
                assert abs(completion.logprobs - expected).max() < self.tolerance
        finally:
            version = bench.runner.run(bench.sync(bench.first))
        self._check_serves(bench, bench.first, version)

    def test_requests_name_their_adapters(self, bench: Bench, adapted: list[Adapted], tmp_path: Path) -> None:
        """At the same time, on the same prompt, more of them than the engine keeps; beside those that were received."""
        lora = self.lora.model_copy(update={"rank_pattern": {}, "alpha_pattern": {}})
        others = [Adapted.write(tmp_path, bench.first, lora, seed=seed) for seed in range(3, 3 + NAMED)]
        folders = [str(each.for_peft(tmp_path / f"peft-{number}", lora)) for number, each in enumerate(others)]
        references = [ReferenceModel(each.merged) for each in others]
        named: dict[str | None, ReferenceModel] = dict(zip(folders, references, strict=True))
        named[None] = bench.references[adapted[0].merged]
        bench.runner.run(bench.sync(adapted[0].parts, manifest=adapted[0].manifest(alone=False)))

        async def all_at_once() -> list[Completion]:
            requests = [GenerationRequest(prompt(40), SamplingParams(6), 3, adapter=each) for each in named]
            return await asyncio.gather(*(bench.generator.generate(each) for each in requests))

        try:
            for _ in range(2):
                for reference, found in zip(named.values(), bench.runner.run(all_at_once()), strict=True):
                    expected = reference.completion_logprobs(prompt(40), found.token_ids)
                    assert abs(found.logprobs - expected).max() < self.tolerance
            scores = bench.runner.run(bench.generator.score(prompt(40), folders[2]))
            assert abs(scores - references[2].score(prompt(40))).max() < self.tolerance
        finally:
            version = bench.runner.run(bench.sync(bench.first))
        self._check_serves(bench, bench.first, version)

    def test_adapters_change_what_is_served(self, bench: Bench, adapted: list[Adapted]) -> None:
        first, second = (bench.references[each.merged].score(prompt(20)) for each in adapted)
        assert abs(first - second).max() > 0.1
        assert abs(first - bench.reference.score(prompt(20))).max() > 0.1

    def test_adapters_alone_are_refused_without_the_weights_that_they_sit_on(
        self, bench: Bench, adapted: list[Adapted]
    ) -> None:
        first, second = adapted
        broken = Fault(corrupt=first.manifest(alone=False).tensors[0].name)
        with pytest.raises(WeightSyncError):
            bench.runner.run(bench.sync(first.parts, manifest=first.manifest(alone=False), fault=broken))
        with pytest.raises(WeightSyncError, match="no base weights"):
            bench.runner.run(bench.sync(second.parts, manifest=second.manifest(alone=True)))
        self._check_serves_nothing_until_mended(bench)

    def test_a_factor_of_a_layer_without_an_adapter_is_named(self, bench: Bench, adapted: list[Adapted]) -> None:
        manifest = adapted[0].manifest(alone=True)
        strange = replace(manifest.tensors[0], name="model.layers.7.self_attn.q_proj.lora_A.weight")
        self._check_names(bench, adapted[0], replace(manifest, tensors=(strange, *manifest.tensors[1:])), strange.name)

    def test_half_an_adapter_is_named(self, bench: Bench, adapted: list[Adapted]) -> None:
        manifest = adapted[0].manifest(alone=True)
        last = manifest.tensors[-1].name
        half = replace(manifest, tensors=manifest.tensors[:-1], num_factors=manifest.num_factors - 1)
        self._check_names(bench, adapted[0], half, last)

    def test_a_factor_that_arrives_broken_is_named(self, bench: Bench, adapted: list[Adapted]) -> None:
        manifest = adapted[0].manifest(alone=True)
        name = manifest.tensors[3].name
        self._check_names(bench, adapted[0], manifest, name, Fault(corrupt=name))

    def test_a_factor_that_a_layer_does_not_apply_is_named(self, bench: Bench, adapted: list[Adapted]) -> None:
        manifest = replace(adapted[0].manifest(alone=False), version=bench.version + 1)
        for path, names in (
            ("model.layers.1.self_attn.qkv_proj", ("q_proj", "v_proj")),
            ("model.layers.0.mlp.down_proj", ("down_proj",)),
        ):
            bench.runner.run(bench.sync(adapted[0].parts, manifest=manifest))
            with pytest.raises(WeightSyncError) as caught:
                bench.runner.run(self._sync_with_a_stale_factor(bench, adapted[1], path))
            parent = path.rpartition(".")[0]
            named = set(caught.value.tensors)
            assert {f"{parent}.{name}{LORA_B}" for name in names} <= named
            assert all(name.startswith(parent) and name.endswith(LORA_B) for name in named)
        self._check_serves_nothing_until_mended(bench)

    async def _sync_with_a_stale_factor(self, bench: Bench, adapted: Adapted, path: str) -> None:
        await bench.generator.spoil("spoil_factor_on_arrival", path)
        try:
            await bench.sync(adapted.parts, manifest=adapted.manifest(alone=True))
        finally:
            await bench.generator.spoil("spoil_factor_on_arrival", "")

    def _check_names(
        self, bench: Bench, adapted: Adapted, manifest: Manifest, name: str, fault: Fault | None = None
    ) -> None:
        bench.runner.run(bench.sync(adapted.parts, manifest=adapted.manifest(alone=False)))
        with pytest.raises(WeightSyncError) as caught:
            bench.runner.run(bench.sync(adapted.parts, manifest=manifest, fault=fault))
        assert name in str(caught.value)
        self._check_serves_nothing_until_mended(bench)
