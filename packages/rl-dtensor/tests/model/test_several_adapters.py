"""Adapters that share a base and a pass train as each does alone."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_core.data.batch import Batch
from rl_core.errors import WorkerError
from rl_core.model import ADAPTER, LOGPROBS, AdapterLosses, AdapterSettings, ModelSpec, StepSettings
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SchedulerConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_dtensor.selfcheck import MESHES

ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2})
SETTINGS = {
    0: AdapterSettings(rank=4, alpha=8, seed=1),
    1: AdapterSettings(rank=2, alpha=4, seed=2),
    2: AdapterSettings(rank=3, alpha=9, seed=3, parts=("attention",)),
}
RATES = {0: 1e-2, 1: 3e-2, 2: 5e-3}
LOSSES = {0: TokenLoss(), 1: TokenLoss(entropy_weight=0.0), 2: TokenLoss(sequence_weight=0.0)}
LENGTHS = {0: (5, 9), 1: (7, 3, 6), 2: (8,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def open_model(ranks, folder, mesh, lora, *, seed=0, rows=None):
    num_ranks, settings = MESHES[mesh]
    packing = SequencePackingConfig(enabled=rows is None)
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=ADAMW,
        lora_cfg=lora,
        sequence_packing=packing,
        train_micro_batch_size=rows or 4,
    )
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(seed=seed), num_ranks, **settings)


def several(dim=4):
    return LoraConfig(enabled=True, dim=dim, alpha=8, max_adapters=4)


def batch_of(place, step):
    rows = make_batch(LENGTHS[place], seed=10 * step + place)
    return rows.with_columns({ADAPTER: np.full(len(rows), place, dtype=np.int32)})


def mixed(places, step):
    """Rows of several adapters, none next to another of its own where that can be."""
    rows = Batch.concat([batch_of(place, step) for place in places])
    return rows.select(np.random.default_rng(step).permutation(len(rows)))


def train(model, places, *, steps=3, together=True):
    losses = AdapterLosses({place: LOSSES[place] for place in places})
    for step in range(steps):
        if together:
            metrics, _ = model.accumulate(mixed(places, step), losses)
            assert {f"{place}/loss/sequences" for place in places} <= metrics.keys()
        for place in places:
            if not together:
                model.accumulate(batch_of(place, step), losses)
            model.apply(StepSettings(lr=RATES[place]), adapter=place)


def exported(model, place, folder):
    model.call("adapters.export", place, str(folder))
    return load_file(folder / "adapter_model.safetensors")


def assert_close(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


MESH_NAMES = ["1", "fsdp2", "hsdp 2x2", "tp2", "cp2", "pp2", "tp2 x fsdp2", "cp2 x fsdp2", "pp2 x fsdp2"]


@pytest.fixture(scope="module")
def alone(ranks, folder, tmp_path_factory):
    """Adapters of models that have one."""
    found = {}
    for place, settings in SETTINGS.items():
        attention = {"match_all_linear": False, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
        targets = attention if settings.parts == ("attention",) else {}
        lora = LoraConfig(enabled=True, dim=settings.rank, alpha=settings.alpha, **targets)
        with open_model(ranks, folder, "1", lora, seed=settings.seed) as model:
            for step in range(3):
                model.accumulate(batch_of(place, step), LOSSES[place])
                model.apply(StepSettings(lr=RATES[place]))
            path = tmp_path_factory.mktemp("alone")
            model.export_adapter(str(path))
        found[place] = load_file(path / "adapter_model.safetensors")
    return found


@pytest.mark.parametrize("mesh", partly_exhaustive(MESH_NAMES, always=["1", "fsdp2", "tp2", "pp2"]))
def test_adapters_of_one_pass_train_as_each_in_a_model_of_its_own(ranks, folder, tmp_path, alone, mesh):
    with open_model(ranks, folder, mesh, several()) as model:
        for place, settings in SETTINGS.items():
            model.call("adapters.make", place, settings)
        train(model, list(SETTINGS))
        for place, settings in SETTINGS.items():
            found = exported(model, place, tmp_path / str(place))
            described = json.loads((tmp_path / str(place) / "adapter_config.json").read_text())
            assert (described["r"], described["lora_alpha"]) == (settings.rank, settings.alpha)
            expected = alone[place]
            left = {name: value for name, value in found.items() if name not in expected}
            assert all(not value.any() for value in left.values())  # layers that it does not adapt
            assert_close({name: found[name] for name in expected}, expected, 1e-6)
        assert not exported(model, 3, tmp_path / "3")["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].any()


@pytest.mark.parametrize("mesh", ["1", "fsdp2"])
def test_equal_microbatches_give_equal_bits(ranks, folder, tmp_path, mesh):
    """A microbatch is a row, so that it is the same in a pass of several adapters as in one of its own."""
    found = {}
    for together in (True, False):
        with open_model(ranks, folder, mesh, several(), rows=1) as model:
            for place, settings in SETTINGS.items():
                model.call("adapters.make", place, settings)
            if together and mesh == "1":
                losses = AdapterLosses(LOSSES)
                for step in range(3):
                    model.accumulate(Batch.concat([batch_of(place, step) for place in SETTINGS]), losses)
                    for place in SETTINGS:
                        model.apply(StepSettings(lr=RATES[place]), adapter=place)
            else:
                train(model, list(SETTINGS), together=False)
            found[together] = [exported(model, place, tmp_path / f"{together}{place}") for place in SETTINGS]
    for one, other in zip(found[True], found[False], strict=True):
        assert_close(one, other, 0.0)


def test_a_step_of_one_adapter_leaves_the_gradients_and_states_of_the_others(ranks, folder, tmp_path):
    with open_model(ranks, folder, "1", several()) as model:
        for place, settings in SETTINGS.items():
            model.call("adapters.make", place, settings)
        train(model, [1], steps=1)
        expected = exported(model, 1, tmp_path / "expected")
        model.accumulate(mixed([0, 1], 1), AdapterLosses({0: LOSSES[0], 1: LOSSES[1]}))
        for _ in range(3):
            model.accumulate(batch_of(0, 2), AdapterLosses({0: LOSSES[0]}))
            model.apply(StepSettings(lr=0.5), adapter=0)
        assert_close(exported(model, 1, tmp_path / "now"), expected, 0.0)
        with pytest.raises(WorkerError, match="no gradient to step with"):
            model.apply(adapter=2)
        with pytest.raises(WorkerError, match=r"lacks|missing|columns"):
            model.accumulate(batch_of(0, 2).only(["tokens", ADAPTER]), AdapterLosses({0: LOSSES[0]}))
        model.apply(StepSettings(lr=RATES[1]), adapter=1)
        stepped = exported(model, 1, tmp_path / "stepped")
    with open_model(ranks, folder, "1", several()) as model:
        for place, settings in SETTINGS.items():
            model.call("adapters.make", place, settings)
        train(model, [1], steps=1)
        model.accumulate(mixed([0, 1], 1), AdapterLosses({0: LOSSES[0], 1: LOSSES[1]}))
        model.apply(StepSettings(lr=RATES[1]), adapter=1)
        assert_close(stepped, exported(model, 1, tmp_path / "other"), 0.0)


@pytest.mark.parametrize(
    ("mesh", "other"), partly_exhaustive([("1", "fsdp2"), ("fsdp2", "tp2"), ("pp2", "1")], always=[("fsdp2", "tp2")])
)
def test_an_adapter_goes_on_in_another_place_and_on_another_mesh(ranks, folder, tmp_path, mesh, other):
    losses = {place: AdapterLosses({place: LOSSES[1]}) for place in (1, 3)}
    rows = {place: batch_of(1, 9).with_columns({ADAPTER: np.full(3, place, dtype=np.int32)}) for place in (1, 3)}
    with open_model(ranks, folder, mesh, several()) as model:
        model.call("adapters.make", 1, SETTINGS[1])
        train(model, [1], steps=2)
        files = [file for part in model.call("adapters.save", 1, str(tmp_path / "saved")) for file in part]
        assert {file.path for file in files} >= {"adapter.json"}
        model.accumulate(rows[1], losses[1])
        model.apply(StepSettings(lr=RATES[1]), adapter=1)
        expected = exported(model, 1, tmp_path / "expected")
    with open_model(ranks, folder, other, several()) as model:
        model.accumulate(batch_of(0, 0), AdapterLosses({0: LOSSES[0]}))
        model.call("adapters.load", 3, str(tmp_path / "saved"))
        model.accumulate(rows[3], losses[3])
        model.apply(StepSettings(lr=RATES[1]), adapter=3)
        assert_close(exported(model, 3, tmp_path / "found"), expected, 1e-6)
        model.call("adapters.load", 3, str(tmp_path / "saved"), with_optimizer=False)
        model.accumulate(rows[3], losses[3])
        model.apply(StepSettings(lr=RATES[1]), adapter=3)
        fresh = exported(model, 3, tmp_path / "fresh")
    assert any((fresh[name] - value).abs().max() > 1e-4 for name, value in expected.items())


def test_a_checkpoint_of_the_model_has_all_adapters_with_their_scales(ranks, folder, tmp_path):
    with open_model(ranks, folder, "fsdp2", several()) as model:
        for place, settings in SETTINGS.items():
            model.call("adapters.make", place, settings)
        train(model, list(SETTINGS), steps=2)
        model.save(str(tmp_path / "checkpoint"))
        files = model.finish_save()
        train(model, list(SETTINGS), steps=1)
        expected = {place: exported(model, place, tmp_path / f"expected-{place}") for place in SETTINGS}
    with open_model(ranks, folder, "fsdp2", several()) as model:
        model.load(str(tmp_path / "checkpoint"), files=files)
        train(model, list(SETTINGS), steps=1)
        for place, settings in SETTINGS.items():
            assert_close(exported(model, place, tmp_path / f"found-{place}"), expected[place], 0.0)
            described = json.loads((tmp_path / f"found-{place}" / "adapter_config.json").read_text())
            assert described["r"] == settings.rank


def test_peft_gives_the_logprobs_of_each_adapter(ranks, folder, tmp_path):
    from peft import PeftModel

    rows = make_batch((6, 8), seed=7)
    with open_model(ranks, folder, "tp2", several()) as model:
        for place, settings in SETTINGS.items():
            model.call("adapters.make", place, settings)
        train(model, list(SETTINGS))
        for place in SETTINGS:
            own = rows.with_columns({ADAPTER: np.full(2, place, dtype=np.int32)})
            expected = model.infer(own, [LOGPROBS]).ragged("logprobs").values
            exported(model, place, tmp_path / str(place))
            model.call("adapters.export", place, str(tmp_path / f"merged{place}"), merged=True)
            oracle, merged = Oracle(folder), Oracle(tmp_path / f"merged{place}")
            oracle.model = PeftModel.from_pretrained(oracle.model, tmp_path / str(place)).merge_and_unload()
            for each in (oracle, merged):
                np.testing.assert_allclose(each.infer(rows, [LOGPROBS])["logprobs"], expected, atol=1e-5)


def test_a_damaged_file_is_found_before_an_adapter_is_loaded(ranks, folder, tmp_path):
    with open_model(ranks, folder, "1", several()) as model:
        model.call("adapters.make", 1, SETTINGS[1])
        (files,) = model.call("adapters.save", 1, str(tmp_path / "saved"))
        expected = exported(model, 1, tmp_path / "expected")
        shard = next(file for file in files if file.path.startswith("shards/") and file.path.endswith("distcp"))
        path = tmp_path / "saved" / shard.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(WorkerError, match=f"CheckpointDamaged: .*{shard.path} has other contents"):
            model.call("adapters.load", 1, str(tmp_path / "saved"), files=files)
        assert_close(exported(model, 1, tmp_path / "now"), expected, 0.0)


@pytest.mark.parametrize("mesh", partly_exhaustive(MESH_NAMES, always=["1", "tp2"]))
def test_an_adapter_that_diverges_harms_no_other(ranks, folder, tmp_path, mesh):
    """Both have rows in every microbatch; the first has infinite factors after its first step."""
    found = {}
    for rate in (1e-2, 3e38):
        with open_model(ranks, folder, mesh, several()) as model:
            for place in (0, 1):
                model.call("adapters.make", place, SETTINGS[place])
            for step in range(3):
                metrics, _ = model.accumulate(mixed([0, 1], step), AdapterLosses({0: LOSSES[0], 1: LOSSES[1]}))
                assert math.isfinite(metrics["1/loss/sequences"])
                model.apply(StepSettings(lr=rate), adapter=0)
                assert model.apply(StepSettings(lr=RATES[1]), adapter=1)["skipped_steps"] == 0
            assert math.isfinite(metrics["0/loss/sequences"]) is (rate < 1)
            found[rate] = exported(model, 1, tmp_path / str(rate))
    assert_close(found[3e38], found[1e-2], 1e-6)


def test_rates_are_those_of_the_schedule(ranks, folder):
    kwargs = {"start_factor": 0.5, "total_iters": 2}
    schedule = [SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs=kwargs)]
    with open_model(ranks, folder, "1", several()) as model:
        assert model.call("adapters.rates", 0.1, schedule, 4)[0] == pytest.approx([0.05, 0.075, 0.1, 0.1])
        assert model.call("adapters.rates", 0.1, [], 2)[0] == [0.1, 0.1]


def test_what_several_adapters_cannot_be_is_refused_by_name(ranks, folder):
    with open_model(ranks, folder, "1", several(dim=2)) as model:
        with pytest.raises(WorkerError, match=r"rank 4 does not fit a model with lora_cfg.dim=2"):
            model.call("adapters.make", 0, SETTINGS[0])
        with pytest.raises(WorkerError, match=r"no adapter 4: the model has 4 \(lora_cfg.max_adapters\)"):
            model.call("adapters.make", 4, SETTINGS[1])
        with pytest.raises(WorkerError, match=r"rows have adapters \[7\]; the model has 4"):
            model.infer(make_batch().with_columns({ADAPTER: np.full(len(make_batch()), 7)}), [LOGPROBS])
    with (
        open_model(ranks, folder, "1", LoraConfig(enabled=True)) as model,
        pytest.raises(WorkerError, match=r"no adapters that step apart; set lora_cfg.max_adapters"),
    ):
        model.apply(adapter=0)
    with (
        open_model(ranks, folder, "1", LoraConfig(enabled=True)) as model,
        pytest.raises(WorkerError, match=r"no adapters that step apart; set lora_cfg.max_adapters"),
    ):
        model.call("adapters.make", 0, SETTINGS[1])
    with pytest.raises(ValueError, match=r"some of attention, mlp, got \('head',\)"):
        AdapterSettings(rank=1, alpha=1, parts=("head",))
