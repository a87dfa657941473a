"""Optimizers and schedules by dotted name, and what is wrong with one in words."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig

from rl_core.errors import WorkerError
from rl_core.facts.optimizer_arguments import OPTIMIZERS
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.torch.optim.optimizer import build_optimizer, build_schedule
from rl_dtensor.config import DTensorConfig
from rl_dtensor.plugin import UNSUPPORTED_OPTIMIZERS, check_device
from rl_dtensor.preflight import check
from rl_dtensor.selfcheck import CHECK, write_tiny

LINEAR = SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "total_iters": 3})
COSINE = SchedulerConfig(name="torch.optim.lr_scheduler.CosineAnnealingLR", kwargs={"T_max": 5})


def parameters():
    return [torch.nn.Parameter(torch.ones(3))]


def test_an_optimizer_of_torch_is_built():
    config = OptimizerConfig(name="torch.optim.RMSprop", kwargs={"lr": 0.5, "alpha": 0.8})
    optimizer = build_optimizer(config, parameters())
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert optimizer.defaults["alpha"] == 0.8


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.AdmaW", {}, "cannot be imported"),
        ("torch.nn.Linear", {}, "is not a torch Optimizer"),
        ("torch.optim.SGD", {"lr": -1.0}, "does not take"),
        ("torch.optim.SGD", {"learning_rate": 1.0}, "does not take"),
    ],
)
def test_what_is_wrong_with_an_optimizer_is_said(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), parameters())
    problems = check({"optimizer": {"name": name, "kwargs": kwargs}})
    assert len(problems) == 1
    assert message in problems[0]


def test_schedules_take_over_at_their_milestones():
    optimizer = build_optimizer(OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0}), parameters())
    schedule = build_schedule([LINEAR, COSINE, SchedulerConfig(milestones=[3])], optimizer)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1, 0.4, 0.7, 1.0, (1 + torch.tensor(torch.pi / 5).cos().item()) / 2])


def test_no_schedule_is_constant():
    assert build_schedule([], build_optimizer(OptimizerConfig(), parameters())) is None


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([LINEAR, COSINE], "2 schedules and 0 milestones"),
        ([LINEAR, SchedulerConfig(milestones=[3])], "1 schedules and 1 milestones"),
        ([LINEAR, COSINE, LINEAR, SchedulerConfig(milestones=[5, 3])], "strictly increasing"),
        ([SchedulerConfig(name="torch.optim.lr_scheduler.StepLR")], "does not take"),
        ([SchedulerConfig(name="torch.optim.SGD")], "is not a torch LRScheduler"),
    ],
)
def test_what_is_wrong_with_schedules_is_said(schedules, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(schedules, build_optimizer(OptimizerConfig(), parameters()))
    problems = check({"scheduler": [schedule.model_dump() for schedule in schedules]})
    assert len(problems) == 1
    assert message in problems[0]


def test_defaults_pass_the_preflight():
    assert check({"model_name": "m"}) == []


FLAGS = ("foreach", "maximize", "differentiable", "capturable", "fused")
FURTHER = {
    "Adam": ({"amsgrad": True}, {"decoupled_weight_decay": True}),
    "AdamW": ({"amsgrad": True},),
    "NAdam": ({"decoupled_weight_decay": True},),
    "RAdam": ({"decoupled_weight_decay": True},),
    "RMSprop": ({"momentum": 0.9}, {"centered": True}),
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}),
}
"""Arguments that change what an optimizer computes, by its name."""


def variants():
    """Configs of every optimizer of torch: plain, with each way to step, and with each formula."""
    for name, arguments in OPTIMIZERS.items():
        decay = {"weight_decay": 0.1} if "weight_decay" in arguments else {}
        formulas = FURTHER.get(name.rpartition(".")[2], ())
        ways = [{flag: True} for flag in FLAGS if flag in arguments]
        grouped = [{**formula, "foreach": True} for formula in formulas]
        for chosen in ({}, *ways, *formulas, *grouped):
            yield OptimizerConfig(name=name, kwargs={"lr": 0.5, **decay, **chosen})


def refusals(config):
    """Problems of the driver and of the worker's environment."""
    section = SimpleNamespace(
        **dict(ModelConfig(model_name="m", optimizer=config, precision="float32")), dtensor_cfg=DTensorConfig()
    )
    run = SimpleNamespace(cluster=SimpleNamespace(device="cpu"))
    light = [problem.message for problem in check_device(section, run)]
    return light or check({"optimizer": config.model_dump()})


def test_an_optimizer_steps_sharded_parameters_or_is_refused(ranks):
    configs = [config for config in variants() if not refusals(config)]
    assert {config.name for config in configs} == OPTIMIZERS.keys() - UNSUPPORTED_OPTIMIZERS
    for num_ranks in (1, 2):
        found = ranks.run("optimizer_cases:differences", [(configs,)] * num_ranks)
        for config, *differences in zip(configs, *found, strict=True):
            assert max(differences) < 1e-5, config


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "mentions"),
    [
        ("Adafactor", {}, "optimizer.name", "whole parameter"),
        ("Rprop", {}, "optimizer.name", "DTensor"),
        ("AdamW", {"differentiable": True}, "optimizer.kwargs.differentiable", "Remove this key"),
        ("SGD", {"differentiable": True}, "optimizer.kwargs.differentiable", "Remove this key"),
        ("RAdam", {"capturable": True}, "optimizer.kwargs.capturable", "needs GPUs"),
    ],
)
@pytest.mark.parametrize("of_head", [False, True])
def test_an_optimizer_that_sharded_parameters_do_not_take_is_refused_by_the_driver(
    name, kwargs, key, mentions, of_head
):
    chosen = {"name": f"torch.optim.{name}", "kwargs": kwargs}
    settings = {"draft_head": {"model_name": "head", "optimizer": chosen}} if of_head else {"optimizer": chosen}
    section = SimpleNamespace(**dict(ModelConfig(model_name="m", **settings)), dtensor_cfg=DTensorConfig())
    (problem,) = check_device(section, SimpleNamespace(cluster=SimpleNamespace(device="cpu")))
    assert problem.key == ("draft_head." if of_head else "") + key
    assert mentions in problem.message


def test_an_optimizer_of_another_package_is_tried_on_sharded_parameters():
    (problem,) = check({"optimizer": {"name": "transformers.Adafactor", "kwargs": {}}})
    assert "transformers.Adafactor cannot step sharded parameters" in problem
    assert check({"optimizer": HALF_STATE.model_dump()}) == []


def test_a_block_that_ranks_would_split_is_refused_with_the_remedy(ranks):
    for found in ranks.run("optimizer_cases:split_block", [()] * 2):
        assert "a rank holds 16 of 32 columns" in found
        assert "optimizer.kwargs.block_size" in found


FUSED_SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.1, "fused": True})
FULL_STATE = OptimizerConfig(kwargs={"lr": 1e-3})
HALF_STATE = OptimizerConfig(name="rl_core.torch.HalfStateAdamW", kwargs={"lr": 1e-3})
EIGHT_BIT = OptimizerConfig(
    name="rl_core.torch.EightBitAdamW", kwargs={"lr": 1e-3, "block_size": 4, "min_8bit_size": 128}
)


def test_8_bit_steps_are_adamw_on_rounded_averages_on_every_mesh(ranks):
    for found in ranks.run("optimizer_cases:eight_bit_differences", [()] * 4):
        for name, (difference, rounding) in found.items():
            assert difference < 1e-6, name
            # The widest gap of signed codes, in the highest decade.
            assert rounding < 0.0143, name


def open_model(ranks, folder, optimizer, **settings):
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=optimizer)
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), 2, **settings)


def steps(model, seeds):
    """Metrics of a step on each batch, but for those that depend on the clock."""
    return model.train_steps([CHECK.batch(seed) for seed in seeds], TokenLoss())


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    config = AutoConfig.for_model("qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
    return write_tiny(config, tmp_path_factory.mktemp("experts"))


MUON = OptimizerConfig(
    name="torch.optim.Muon",
    kwargs={"lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32", "adamw": {"lr": 1e-3, "eps": 1e-3}},
)


@exhaustive
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (4, {"tensor_parallel_size": 2}),
        (4, {"expert_parallel_size": 2}),
        (4, {"dp_replicate_size": 2}),
        (4, {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_muon_steps_each_matrix_of_experts_whole_on_every_mesh(ranks, experts, tmp_path, num_ranks, settings):
    config = ModelConfig(model_name=str(experts), precision="float32", optimizer=MUON)
    oracle = Oracle(experts)
    oracle.step_by_muon(MUON)
    with PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), num_ranks, **settings) as model:
        for seed in range(3):
            batch = CHECK.batch(seed)
            expected = oracle.train_step(batch, TokenLoss(), MUON, 1.0)
            assert model.train_step(batch, TokenLoss())["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        model.export(str(tmp_path))
    trained = dict(Oracle(tmp_path).model.named_parameters())
    for name, parameter in oracle.model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-5, atol=2e-5, msg=name)


def num_state_bytes(shards):
    """Of the averages in a checkpoint."""
    saved = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    averages = [entry for name, entry in saved.items() if "/exp_avg" in name]
    return sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in averages)


@pytest.mark.parametrize(
    "kwargs", partly_exhaustive([{"fused": True}, {"foreach": True}], always=[{"fused": True}]), ids=str
)
def test_fused_and_grouped_steps_run_over_meshes_that_differ(ranks, experts, kwargs):
    """Experts and the rest are sharded over different meshes."""
    with open_model(ranks, experts, FULL_STATE, expert_parallel_size=2) as model:
        expected = [step["loss"] for step in steps(model, range(3))]
    fused = OptimizerConfig(kwargs={"lr": 1e-3, **kwargs})
    with open_model(ranks, experts, fused, expert_parallel_size=2) as model:
        assert [step["loss"] for step in steps(model, range(3))] == pytest.approx(expected, rel=1e-6)


def settings_of(ranks):
    return [settings for rank in ranks.run("dtensor_factories:optimizer_settings", [()] * 2) for settings in rank]


@exhaustive
def test_steps_are_fused_also_where_experts_have_a_mesh_of_their_own(ranks, experts):
    with open_model(ranks, experts, FULL_STATE, expert_parallel_size=2) as model:
        losses = [step["loss"] for step in steps(model, range(3))]
        assert all(settings["fused"] for settings in settings_of(ranks))
    with open_model(ranks, experts, OptimizerConfig(kwargs={"lr": 1e-3, "fused": False})) as model:
        assert [step["loss"] for step in steps(model, range(3))] == pytest.approx(losses, rel=1e-6)


def test_a_resumed_run_steps_as_its_own_config_says(ranks, experts, tmp_path):
    by_tensor = OptimizerConfig(kwargs={**FULL_STATE.kwargs, "foreach": True})
    with open_model(ranks, experts, by_tensor, expert_parallel_size=2) as model:
        steps(model, range(2))
        model.save(str(tmp_path))
        uninterrupted = [step["loss"] for step in steps(model, range(2, 4))]
    with open_model(ranks, experts, FULL_STATE) as model:
        model.load(str(tmp_path))
        assert all(settings["fused"] and not settings["foreach"] for settings in settings_of(ranks))
        assert [step["loss"] for step in steps(model, range(2, 4))] == pytest.approx(uninterrupted, rel=1e-6)


def test_a_fused_step_that_cannot_run_on_sharded_parameters_is_refused(ranks, experts):
    with pytest.raises(WorkerError, match=r"leave fused out of optimizer.kwargs"):
        open_model(ranks, experts, FUSED_SGD)
    assert "leave fused out" in check({"optimizer": FUSED_SGD.model_dump()})[0]


FUSED = OptimizerConfig(kwargs={"lr": 1e-3, "fused": True})


@pytest.mark.parametrize(
    "optimizer", partly_exhaustive([HALF_STATE, EIGHT_BIT, FUSED], always=[EIGHT_BIT, FUSED]), ids=str
)
def test_a_run_with_lean_or_fused_steps_resumes_bit_equal(ranks, experts, tmp_path, optimizer):
    settings = {"tensor_parallel_size": 2, "sequence_parallel": True}
    with open_model(ranks, experts, optimizer, **settings) as model:
        steps(model, range(2))
        model.save(str(tmp_path))
        uninterrupted = steps(model, range(2, 4))
    with open_model(ranks, experts, optimizer, **settings) as model:
        model.load(str(tmp_path))
        assert steps(model, range(2, 4)) == uninterrupted


def test_half_the_state_trains_alike_on_every_mesh_and_takes_half_the_space(ranks, experts, tmp_path):
    sizes, losses = {}, {}
    for name, optimizer, mesh in (
        ("full", FULL_STATE, {}),
        ("half", HALF_STATE, {}),
        ("half split", HALF_STATE, {"tensor_parallel_size": 2}),
        ("8-bit", EIGHT_BIT, {}),
        ("8-bit split", EIGHT_BIT, {"tensor_parallel_size": 2}),
    ):
        with open_model(ranks, experts, optimizer, **mesh) as model:
            losses[name] = [step["loss"] for step in steps(model, range(3))]
            model.save(str(tmp_path / name))
        sizes[name] = num_state_bytes(tmp_path / name / "shards")
    assert losses["half"] == pytest.approx(losses["full"], rel=1e-2)
    assert losses["half split"] == pytest.approx(losses["full"], rel=1e-2)
    assert sizes["half"] == sizes["half split"] == sizes["full"] / 2
    assert losses["8-bit"] == pytest.approx(losses["full"], rel=1e-2)
    assert losses["8-bit split"] == pytest.approx(losses["full"], rel=1e-2)
    # A byte for each number, a scale for four of them, and float32 of norms.
    assert sizes["8-bit"] == sizes["8-bit split"] < 0.52 * sizes["full"]


@exhaustive
def test_8_bit_averages_are_read_by_another_mesh(ranks, experts, tmp_path):
    with open_model(ranks, experts, EIGHT_BIT) as model:
        steps(model, range(2))
        model.save(str(tmp_path / "one"))
        expected = steps(model, range(2, 3))[0]["loss"]
    with open_model(ranks, experts, EIGHT_BIT, tensor_parallel_size=2) as model:
        model.load(str(tmp_path / "one"))
        model.save(str(tmp_path / "other"))
        assert steps(model, range(2, 3))[0]["loss"] == pytest.approx(expected, rel=1e-6)
    first, second = (read_averages(tmp_path / name / "shards") for name in ("one", "other"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def read_averages(shards):
    """Averages in a checkpoint, with their scales."""
    saved = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if "/exp_avg" in name
    }
    assert any(name.endswith("_scale") for name in state)
    dcp.load(state, storage_reader=dcp.FileSystemReader(shards), no_dist=True)
    return state
