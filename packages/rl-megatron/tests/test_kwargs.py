"""Fields of Megatron's config that `megatron_kwargs` passes on, and those that it refuses."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from layouts import write_family
from megatron.core.transformer.transformer_config import MLATransformerConfig
from pydantic import ValidationError

from rl_core.errors import WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.testing.model_worker import make_batch
from rl_megatron.checks import check_layout
from rl_megatron.config import MegatronConfig
from rl_megatron.plugin import PLUGIN
from rl_megatron.preflight import check, kwargs_problems
from rl_megatron.transformer_fields import ANYWHERE, FUSIONS, MODEL_REASON, ON_CUDA, PASSED, REFUSED, WITH_TE

PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
FULL = {"recompute": "full"}
PP2 = {"pipeline_model_parallel_size": 2}


def test_fields_that_are_passed_on_or_refused_by_decision_are_megatrons():
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert fields >= PASSED | REFUSED.keys()
    assert not PASSED & REFUSED.keys()
    assert not (PASSED | REFUSED.keys()) & MegatronConfig.model_fields.keys()
    assert not ANYWHERE & (ON_CUDA | WITH_TE)
    assert FUSIONS <= ON_CUDA | WITH_TE


def test_keys_that_messages_name_exist():
    for reason in (MODEL_REASON, *REFUSED.values()):
        section, _, name = reason.partition("`")[2].partition("`")[0].partition(".")
        if section == "megatron_cfg":
            assert name.split(":")[0] in MegatronConfig.model_fields, reason
        elif section == "megatron_kwargs":
            assert name in PASSED, reason
        elif section == "policy":
            assert name in ModelConfig.model_fields, reason


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("tensor_model_parallel_size", "", "`megatron_cfg.tensor_model_parallel_size`"),
        ("params_dtype", "", "`policy.precision`"),
        ("moe_z_loss_coeff", "padding", "`megatron_cfg.moe_aux_loss_coeff`"),
        ("cuda_graph_impl", "the number of rows", None),
        ("tp_comm_split_ag", "no longer reads it", None),
        ("delay_wgrad_compute", "as soon as a backward pass has made them", None),
        ("deterministic_mode", "keeps the scores of all pairs of tokens in GPU memory", None),
    ],
)
def test_fields_that_are_refused_by_decision_need_no_engine(name, reason, remedy):
    with pytest.raises(ValidationError) as caught:
        MegatronConfig(megatron_kwargs={name: 1, "recompute_num_layers": 2})
    (problem,) = caught.value.errors()[0]["ctx"]["error"].problems
    assert problem.key == f"megatron_kwargs.{name}"
    assert reason in problem.reason
    assert problem.remedy == (f"Set {remedy}" if remedy else "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hidden_size", "cannot be set here: it follows from the model. Set `policy.hf_config_overrides`"),
        ("kv_lora_rank", "cannot be set here: it follows from the model. Set `policy.hf_config_overrides`"),
        ("recompute_methd", "is not a field of Megatron's TransformerConfig; did you mean recompute_method?"),
        ("nothing_like_it", "is not a field of Megatron's TransformerConfig"),
    ],
)
def test_other_fields_are_judged_by_the_installed_megatron_before_training_starts(name, message):
    (found,) = check({"megatron_cfg": {"megatron_kwargs": {name: 1, "recompute_num_layers": 2}}})
    assert found == f"megatron_cfg.megatron_kwargs.{name}: {message}"


def problems(device="cpu", lora=False, model=None, **settings):
    config = ModelConfig(**{"model_name": "model", "lora_cfg": LoraConfig(enabled=lora), **(model or {})})
    fields = {name: getattr(config, name) for name in ModelConfig.model_fields}
    section = SimpleNamespace(**fields, megatron_cfg=MegatronConfig(**settings))
    config = SimpleNamespace(cluster=SimpleNamespace(device=device))
    (check_kwargs,) = (check for check in PLUGIN.checks if check.__name__ == "check_kwargs")
    return {problem.key.rpartition(".")[2]: problem for problem in check_kwargs(section, config)}


@pytest.mark.parametrize(
    ("name", "settings", "mention"),
    [
        ("bias_activation_fusion", {}, "cluster.device is cpu"),
        ("apply_rope_fusion", {}, "Transformer Engine"),
        ("apply_rope_fusion", {"device": "cuda", "transformer_engine": False}, "transformer_engine is false"),
        ("apply_rope_fusion", {"device": "cuda", "lora": True}, "lora_cfg.enabled=false"),
        ("fp8_margin", {"device": "cuda"}, "megatron_cfg.fp8_cfg.enabled=true"),
        ("moe_deepep_num_sms", {"device": "cuda"}, "megatron_cfg.moe_token_dispatcher_type=flex"),
        ("moe_router_fusion", {"device": "cuda", "moe_router_replay": True}, "moe_router_replay=true"),
        ("moe_router_fusion", {"device": "cuda", "moe_router_dtype": "fp64"}, "moe_router_dtype=fp32"),
        ("cp_comm_type", {"device": "cuda"}, "context_parallel_size above 1"),
        ("tp_comm_bulk_dgrad", {"device": "cuda"}, "megatron_kwargs.tp_comm_overlap=true"),
        ("recompute_method", {}, "megatron_cfg.recompute=full"),
        ("pipeline_model_parallel_layout", {}, "megatron_cfg.pipeline_model_parallel_size=2"),
        ("overlap_p2p_comm_warmup_flush", PP2, "megatron_cfg.virtual_pipeline_model_parallel_size"),
    ],
)
def test_fields_that_the_run_lacks_something_for_are_named(name, settings, mention):
    problem = problems(megatron_kwargs={name: 1}, **settings)[name]
    assert mention in f"{problem.reason}. {problem.remedy}"
    needed = {"bias_activation_fusion", "apply_rope_fusion", "moe_router_fusion", "pipeline_model_parallel_layout"}
    assert problem.is_unused == (name not in needed)
    assert problems(megatron_kwargs={"clone_scatter_output_in_embedding": True}, **settings) == {}


@pytest.mark.parametrize(
    ("settings", "mention"),
    [
        ({"recompute": "none"}, "expert_model_parallel_size is 1"),
        ({"expert_model_parallel_size": 2}, "recompute to none or selective"),
        (
            {"expert_model_parallel_size": 2, "recompute": "none", "pipeline_model_parallel_size": 2},
            "needs megatron_cfg.virtual_pipeline_model_parallel_size",
        ),
    ],
)
def test_exchanges_of_tokens_overlap_only_in_schedules_that_megatron_has(settings, mention):
    name = "overlap_moe_expert_parallel_comm"
    (problem,) = problems(megatron_kwargs={name: True}, **settings).values()
    assert mention in f"{problem.reason}. {problem.remedy}"
    fitting = {"expert_model_parallel_size": 2, "recompute": "selective"}
    assert problems(megatron_kwargs={name: True}, **fitting) == {}


OVERLAP = {
    "device": "cuda",
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "megatron_kwargs": {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True},
}
ONE_LENGTH = {"sequence_packing": {"enabled": True, "train_mb_tokens": 4096, "logprob_mb_tokens": 4096}}


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"device": "cpu"}, "cluster.device is cpu"),
        ({"device": "rehearsal"}, "cluster.device is rehearsal"),
        ({"lora": True}, "adapters need layers of megatron-core"),
        ({"sequence_parallel": False}, "sequence_parallel=true"),
        ({"model": {**ONE_LENGTH, "precision": "float32"}}, "needs precision=bfloat16"),
        ({"fp8_cfg": {"enabled": True, "fp8_recipe": "blockwise"}}, "fp8_recipe is blockwise"),
        ({"model": {"sequence_packing": {"enabled": False}}}, "sequence_packing.enabled=true"),
        ({"fixed_length_microbatches": False}, "fixed_length_microbatches=auto"),
        ({"model": {"sequence_packing": {"train_mb_tokens": 4096, "logprob_mb_tokens": 8192}}}, "have 4096 and 8192"),
        ({"model": {**ONE_LENGTH, "max_total_sequence_length": 8192}}, None),
        ({}, None),
    ],
)
def test_overlap_of_tensor_parallel_collectives_needs_microbatches_of_one_length(changes, mention):
    given = {"model": ONE_LENGTH, **OVERLAP, **changes}
    assert MegatronConfig(megatron_kwargs=OVERLAP["megatron_kwargs"]).pads_microbatches
    found = problems(**given).get("tp_comm_overlap")
    assert (found is None) == (mention is None)
    assert mention is None or mention in f"{found.reason}. {found.remedy}"


@pytest.mark.parametrize(("value", "is_refused"), [(True, True), ("auto", False), (False, False)])
def test_rows_cannot_share_prefixes(value, is_refused):
    config = ModelConfig(model_name="model", sequence_packing={"shared_prefixes": value})
    section = SimpleNamespace(**dict(config), megatron_cfg=MegatronConfig())
    found = {problem.key: problem for problem in check_layout(section, SimpleNamespace())}
    assert ("sequence_packing.shared_prefixes" in found) == is_refused
    assert not is_refused or "dtensor_cfg" in found["sequence_packing.shared_prefixes"].remedy


def test_latent_attention_has_no_overlap(tmp_path):
    folder = write_family(tmp_path, "deepseek_v3")
    found = problems(**{**OVERLAP, "model": {**ONE_LENGTH, "model_name": str(folder)}})
    assert "this model's is latent" in found["tp_comm_overlap"].reason


@pytest.mark.parametrize(
    ("settings", "mention"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type=alltoall"),
        ({"recompute_modules": ["shared_experts"]}, "shared_experts in megatron_cfg.recompute_modules"),
    ],
)
def test_shared_experts_are_computed_while_tokens_travel_or_refused_at_the_start(settings, mention):
    kwargs = {"moe_shared_expert_overlap": True}
    found = problems(device="cuda", megatron_kwargs=kwargs, **settings)["moe_shared_expert_overlap"]
    assert mention in found.reason
    assert problems(device="cuda", megatron_kwargs=kwargs) == {}


def test_activations_on_the_host_are_not_recomputed():
    found = problems(device="cuda", megatron_kwargs={"cpu_offloading": True})["cpu_offloading"]
    assert "cannot be combined with megatron_cfg.recompute=auto" in found.reason
    assert problems(device="cuda", megatron_kwargs={"cpu_offloading": True}, recompute="none") == {}


def test_fusions_can_be_turned_off_whatever_there_is():
    off = dict.fromkeys(FUSIONS, False)
    for settings in ({}, {"device": "cuda", "transformer_engine": False}, {"device": "cuda", "lora": True}):
        assert problems(megatron_kwargs=off, moe_router_replay=True, **settings) == {}
    assert list(kwargs_problems(off, has_te=False)) == []


def test_types_are_megatrons():
    wrong = {"recompute_method": "blok", "recompute_num_layers": "2", "attention_backend": "flsh", "fp8_margin": 1.5}
    found = dict(zip(wrong, kwargs_problems(wrong, has_te=True), strict=True))
    assert all(text.startswith(f"megatron_cfg.megatron_kwargs.{name}: got ") for name, text in found.items())
    assert "'uniform' or 'block'" in found["recompute_method"]
    assert "flash, fused" in found["attention_backend"]
    right = {"recompute_method": "block", "recompute_num_layers": 2, "attention_backend": "flash", "fp8_margin": 1}
    assert list(kwargs_problems(right, has_te=True)) == []
    (missing,) = check({"megatron_cfg": {"megatron_kwargs": {"moe_permute_fusion": True}}})
    assert "moe_permute_fusion needs Transformer Engine, which is not installed" in missing


def test_a_dispatcher_that_is_not_installed_is_refused_before_anything_starts():
    (problem,) = check({"megatron_cfg": {"moe_token_dispatcher_type": "flex"}})
    assert "needs DeepEP, which is not installed" in problem
    assert "cluster.worker_envs=shared; or set alltoall" in problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(folder):
    oracle = Oracle(folder)
    return [oracle.train_step(make_batch(seed=seed), TokenLoss(), PLAIN, 0.5) for seed in range(2)]


def open_model(ranks, folder, num_ranks, **backend):
    config = ModelConfig(model_name=str(folder), precision="float32", max_grad_norm=0.5, optimizer=PLAIN)
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **backend)


def assert_trains(model, expected):
    for seed, metrics in enumerate(expected):
        found = model.train_step(make_batch(seed=seed), TokenLoss())
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (seed, name)


@pytest.mark.parametrize(
    ("stages", "virtual", "kwargs", "held"),
    [
        ("Ettt|tL", None, {"deallocate_pipeline_outputs": True}, [[1, 2, 3], [4]]),
        ("E|tt|t|tL", 2, {"overlap_p2p_comm_warmup_flush": True}, [[3], [1, 2, 4]]),
    ],
)
def test_stages_hold_the_layers_of_the_pipelines_layout(ranks, folder, expected, stages, virtual, kwargs, held):
    kwargs = {**kwargs, "pipeline_model_parallel_layout": stages}
    backend = {**PP2, "virtual_pipeline_model_parallel_size": virtual, "megatron_kwargs": kwargs}
    with open_model(ranks, folder, 2, **backend) as model:
        assert ranks.run("megatron_factories:layers_held", [()] * 2) == held
        assert_trains(model, expected)


@pytest.mark.parametrize(("num_layers", "recomputed"), [(1, [1]), (3, [1, 2, 3])])
def test_as_many_layers_are_recomputed_as_chosen(ranks, tmp_path, num_layers, recomputed):
    folder = write_family(tmp_path, "qwen3_moe")
    oracle = Oracle(folder)
    expected = [oracle.train_step(make_batch(), TokenLoss(), PLAIN, 0.5)]
    kwargs = {"recompute_method": "block", "recompute_num_layers": num_layers}
    with open_model(ranks, folder, 1, **FULL, megatron_kwargs=kwargs) as model:
        ranks.run("megatron_factories:note_runs_without_gradients", [()])
        assert_trains(model, expected)
        assert ranks.run("megatron_factories:layers_run_without_gradients", [()]) == [recomputed]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ({**PP2, "megatron_kwargs": {"pipeline_model_parallel_layout": "Et|t|t|tL"}}, "virtual_pipeline_model_para"),
        (
            {**PP2, "megatron_kwargs": {"pipeline_model_parallel_layout": "Et|tL"}},
            "does not fit the model or the layout",
        ),
        ({**PP2, "megatron_kwargs": {"moe_permute_fusion": True}}, "moe_permute_fusion needs layers of Transformer"),
    ],
)
def test_values_that_do_not_fit_the_model_are_refused_naming_the_key(ranks, folder, backend, message):
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folder, 2, **backend)


def test_the_readme_lists_the_fields():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    offloading = {name for name in PASSED if name.startswith("cpu_offloading_")}
    assert len(offloading) == 4
    assert {name for name in PASSED if f"`{name}`" not in text} == offloading
