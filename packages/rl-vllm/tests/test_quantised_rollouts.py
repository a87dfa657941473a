"""Rollouts with weights in 8 bits: one engine that takes several versions, each verified or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from spoilable_generator import SpoilableGenerator
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WeightSyncError
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.delivery import noise_of
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.testing.torch.reference_model import write_reference_model
from rl_core.testing.torch.weight_sender import Fault, SenderProcess, manifest_of
from rl_core.testing.weights import SYNC_TIMEOUT_S, Bench, _address, model_config, prompt
from rl_core.torch.quantization.float8 import Float8Recipe, Float8Weight
from rl_core.weights import Transport
from rl_vllm import VllmConfig
from rl_vllm.config import QuantizationConfig

RECIPE = Float8Recipe("per_channel", smallest_scale=1 / (448 * 512))
FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
QKV, DOWN = "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.down_proj"


def write_model(folder: Path, *, seed: int) -> Path:
    """A bfloat16 Qwen3 of three layers, of which the engine leaves the first in bfloat16."""
    write_reference_model(folder, seed=seed)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types, config.initializer_range = 3, ["full_attention"] * 3, 0.1
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_update(folder: Path, before: Path, *, seed: int) -> Path:
    """The weights of a model after a step."""
    folder.mkdir()
    (folder / "config.json").write_text((before / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: weight + (torch.randn(weight.shape, generator=generator) * 0.02).to(weight.dtype)
        for name, weight in load_file(before / "model.safetensors").items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantised_of(folder: Path) -> dict[str, Float8Weight]:
    """The weights of a trainer, quantised by the recipe under the names of the engine's layers."""
    weights = load_file(folder / "model.safetensors")
    found = {}
    for layer in (1, 2):
        for path, parts in FUSED.items():
            prefix = f"model.layers.{layer}.{path.partition('.')[0]}"
            joined = torch.cat([weights[f"{prefix}.{part}.weight"] for part in parts])
            found[f"model.layers.{layer}.{path}"] = RECIPE.quantise(joined)
    return found


def logprobs_of(folder: Path, row: np.ndarray) -> np.ndarray:
    """float64 `[tokens - 1]`, logprobs of all tokens but the first by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.from_numpy(row.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(tokens).logits[0].double().log_softmax(-1)[:-1]
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()


@dataclass
class Rollouts:
    """The bench of the engine, and the versions of its policy."""

    bench: Bench
    versions: list[Path]

    @property
    def generator(self) -> SpoilableGenerator:
        assert isinstance(self.bench.generator, SpoilableGenerator)
        return self.bench.generator

    def sync(self, folder: Path) -> int:
        return self.bench.runner.run(self.bench.sync(folder))

    def spoil(self, method: str, *args: object) -> object:
        (found,) = self.bench.runner.run(self.generator.spoil(method, *args))
        return found

    def sync_spoilt(self, folder: Path, *calls: tuple[object, ...]) -> WeightSyncError:
        """Damage the engine between the transfer and the commit; returns what the commit raised."""
        bench = self.bench
        bench.version += 1
        manifest = manifest_of(folder, bench.version)

        async def sync() -> None:
            await bench.generator.pause()
            try:
                await bench.generator.begin(manifest)
                transport = Transport("ipc", _address(), 1, timeout_s=SYNC_TIMEOUT_S)
                sending = bench.senders["policy"].send(folder, manifest, transport, Fault())
                await bench.generator.receive(transport, 1)
                sending.result(SYNC_TIMEOUT_S)
                for method, *args in calls:
                    await self.generator.spoil(str(method), *args)
                await bench.generator.commit(manifest.version)
            finally:
                await bench.generator.resume()

        with pytest.raises(WeightSyncError) as caught:
            bench.runner.run(sync())
        return caught.value


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    folder = tmp_path_factory.mktemp("models")
    versions = [write_model(folder / "0", seed=1)]
    for seed in (1, 2, 3):
        versions.append(write_update(folder / str(seed), versions[-1], seed=seed))
    quantization = QuantizationConfig(method="fp8_per_channel", num_first_layers_in_bf16=1, oracle_every=1)
    backend = VllmConfig(kv_cache_gib=0.25, quantization=quantization)
    model = model_config(versions[0]).model_copy(update={"precision": "bfloat16"})
    generator = SpoilableGenerator(GenerationConfig(), backend, model, Placement("cpu", awaits_weights=True))
    sender = SenderProcess()
    bench = Bench(generator, versions[0], versions[0], sender)
    try:
        yield Rollouts(bench, versions)
    finally:
        bench.runner.run(generator.close())
        bench.runner.close()
        sender.close()


def test_every_update_is_held_as_the_trainer_quantises_it_and_is_computed_with(rollouts: Rollouts) -> None:
    row = prompt(60)
    addresses = []
    for folder in rollouts.versions:
        rollouts.sync(folder)
        held, expected = rollouts.spoil("quantised"), quantised_of(folder)
        assert held.keys() == expected.keys()
        for path, (values, scales, _) in held.items():
            assert torch.equal(values.view(torch.uint8), expected[path].values.view(torch.uint8)), path
            assert torch.equal(scales, expected[path].scales), path
        addresses.append([place for _, _, place in held.values()])
        scores = rollouts.bench.runner.run(rollouts.generator.score(row))[1:]
        differences = {each: np.abs(scores - logprobs_of(each, row)).mean() for each in rollouts.versions}
        assert min(differences, key=differences.__getitem__) == folder, differences
        noise = noise_of(rollouts.bench.runner.run(rollouts.generator.health()))
        assert 0.02 < noise < 0.2
        assert differences[folder] < 2 * noise * scores.std()
    assert all(each == addresses[0] for each in addresses), "a sync keeps the memory of the parameters"


def test_completions_have_the_logprobs_that_the_engine_scores(rollouts: Rollouts) -> None:
    version = rollouts.sync(rollouts.versions[0])
    request = GenerationRequest(prompt(8), SamplingParams(20), 1)
    found = rollouts.bench.runner.run(rollouts.generator.generate(request))
    assert [span.version for span in found.spans] == [version]
    scores = rollouts.bench.runner.run(rollouts.generator.score(np.concatenate([prompt(8), found.token_ids])))
    # another shape of the batch rounds bfloat16 elsewhere
    assert np.abs(scores[8:] - found.logprobs).mean() < 0.1


@pytest.mark.parametrize(
    ("factor", "reason"), [(1.0001, "1 of 64 scales are not"), (0.0, "1 are zero"), (float("inf"), "1 are not finite")]
)
def test_a_corrupted_scale_is_refused_by_name(rollouts: Rollouts, factor: float, reason: str) -> None:
    error = rollouts.sync_spoilt(rollouts.versions[1], ("set_scale", DOWN, 5, factor))
    assert error.tensors == ("model.layers.1.mlp.down_proj.weight",)
    assert DOWN in str(error)
    assert reason in str(error)
    rollouts.sync(rollouts.versions[1])


def test_scales_that_a_sync_did_not_write_are_refused_by_name(rollouts: Rollouts) -> None:
    rollouts.sync(rollouts.versions[0])
    _, scales, _ = rollouts.spoil("quantised")[QKV]
    error = rollouts.sync_spoilt(rollouts.versions[2], ("set_scales", QKV, scales))
    assert "they are those of the version before" in str(error)
    assert set(error.tensors) == {f"model.layers.1.self_attn.{part}.weight" for part in FUSED["self_attn.qkv_proj"]}
    rollouts.sync(rollouts.versions[2])


def test_a_flipped_value_is_refused_by_name(rollouts: Rollouts) -> None:
    error = rollouts.sync_spoilt(rollouts.versions[0], ("flip_value", DOWN, 3, 4))
    assert "its values have digest" in str(error)
    assert error.tensors == ("model.layers.1.mlp.down_proj.weight",)
    rollouts.sync(rollouts.versions[0])


def test_weights_that_are_not_finite_are_refused_by_name(rollouts: Rollouts, tmp_path: Path) -> None:
    folder = write_update(tmp_path / "broken", rollouts.versions[0], seed=5)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][2, 3] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightSyncError, match="scales are not finite") as caught:
        rollouts.sync(folder)
    assert caught.value.tensors == ("model.layers.1.mlp.down_proj.weight",)
    rollouts.sync(rollouts.versions[0])


def test_vllms_own_reload_is_verified_alike(rollouts: Rollouts) -> None:
    rollouts.spoil("reload", True)
    try:
        rollouts.sync(rollouts.versions[3])
        held, expected = rollouts.spoil("quantised"), quantised_of(rollouts.versions[3])
        assert all(torch.equal(held[path][1], expected[path].scales) for path in expected)
        error = rollouts.sync_spoilt(rollouts.versions[1], ("set_scale", DOWN, 0, 1.5))
        assert error.tensors == ("model.layers.1.mlp.down_proj.weight",)
    finally:
        rollouts.spoil("reload", False)
    rollouts.sync(rollouts.versions[0])


def test_what_is_loaded_by_plan_is_planned(rollouts: Rollouts) -> None:
    rollouts.sync(rollouts.versions[0])
    assert rollouts.spoil("loads_by_plan")
