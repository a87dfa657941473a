"""peft computes with an exported adapter as the run did that trained it."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, SCORES, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import PairLoss, TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.selfcheck import case_on
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import make_batch, make_pairs
from rl_dtensor.model.layers.lora import add_adapters
from rl_dtensor.selfcheck import CHECK, MESHES, check_of, write_tiny

SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.5})
ATTENTION = LoraConfig(enabled=True, match_all_linear=False, target_modules=["q_proj", "self_attn.v_proj"])

PATTERNS = LoraConfig(
    enabled=True,
    dim=4,
    alpha=8,
    rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.(up|gate)_proj": 6},
    alpha_pattern={"layers.0.self_attn.q_proj": 3, "down_proj": 16},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def open_model(ranks, folder, mesh, lora, spec=None):
    num_ranks, settings = MESHES[mesh]
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, lora_cfg=lora)
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, spec or ModelSpec(), num_ranks, **settings)


def with_adapter(oracle, folder):
    """The oracle with the adapter that peft loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*adapter keys")  # of factors that are missing
        oracle.model = PeftModel.from_pretrained(oracle.model, folder).merge_and_unload()
    return oracle


@pytest.mark.parametrize(
    ("mesh", "lora"),
    [
        ("1", LoraConfig(enabled=True, dim=4, alpha=8, use_rslora=True)),
        pytest.param("fsdp2", LoraConfig(enabled=True, exclude_modules=["0.mlp.up_proj"]), marks=exhaustive),
        ("cp2 x tp2", ATTENTION),
        pytest.param("tp2", PATTERNS, marks=exhaustive),
        # steps of adapters on these meshes are in `test_parity`
        pytest.param("tp2+sp", LoraConfig(enabled=True), marks=exhaustive),
        pytest.param("tp2 x fsdp2", ATTENTION, marks=exhaustive),
        pytest.param("pp2 x fsdp2", LoraConfig(enabled=True, dim=3), marks=exhaustive),
    ],
)
def test_peft_gives_the_logprobs_of_the_run(ranks, folder, tmp_path, mesh, lora):
    batch = make_batch(seed=7)
    with open_model(ranks, folder, mesh, lora) as model:
        for seed in range(2):
            model.train_step(make_batch(seed=seed), TokenLoss())
        expected = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        files = model.export_adapter(str(tmp_path))
    assert {file.path: file.size for file in files} == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    before = Oracle(folder).infer(batch, [LOGPROBS])["logprobs"]
    found = with_adapter(Oracle(folder), tmp_path).infer(batch, [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(found - before).max() > 1e-3


@pytest.mark.parametrize(
    ("mesh", "other"), partly_exhaustive([("fsdp2", "tp2"), ("pp2", "1")], always=[("fsdp2", "tp2")])
)
def test_a_model_starts_from_an_adapter_on_any_mesh(ranks, folder, tmp_path, mesh, other):
    batch, lora = make_batch(seed=7), LoraConfig(enabled=True, dim=4)
    with open_model(ranks, folder, mesh, lora) as model:
        model.train_step(make_batch(), TokenLoss())
        expected = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export_adapter(str(tmp_path))
    start = lora.model_copy(update={"adapter": str(tmp_path)})
    with open_model(ranks, folder, other, start, ModelSpec(keeps_reference=True)) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.train_step(make_batch(), TokenLoss())
        reference = model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").values
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.array_equal(reference, found)


@pytest.mark.parametrize(
    ("mesh", "lora"),
    [
        ("1", PATTERNS),
        ("fsdp2", PATTERNS),
        ("tp2", PATTERNS.model_copy(update={"use_rslora": True})),
        ("tp2 x fsdp2", PATTERNS),
    ],
)
def test_layers_train_at_their_own_rank_and_scale_as_in_one_process(ranks, folder, mesh, lora):
    check = replace(CHECK, lora=lora)
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=True)
    outcome = check.check_case(ranks, folder, case, check.expect(folder, has_adapters=True))
    assert outcome.verdict == "exact", outcome


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_dora_layers_compute_in_float64_as_those_of_peft(tmp_path, family):
    """Values and gradients, with biases and with weights that are stored transposed."""
    write = write_tiny_model if family == "llama" else lambda path, kind: write_tiny(AutoConfig.for_model(kind), path)
    path = write(tmp_path / "model", family)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for _ in range(2))
    names = ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else ["q_proj", "k_proj", "down_proj", "up_proj"]
    lora = LoraConfig(enabled=True, dim=4, alpha=6, use_dora=True, match_all_linear=False, target_modules=names)
    add_adapters(ours, lora)
    in_conv = {"fan_in_fan_out": True} if family == "gpt2" else {}
    made = PeftConfig(r=4, lora_alpha=6, use_dora=True, target_modules=names, **in_conv)
    inject_adapter_in_model(made, theirs)
    drawn = torch.Generator().manual_seed(0)
    trained = {name: each for name, each in theirs.named_parameters() if ".lora_" in name}
    assert trained.keys() == {name for name, each in ours.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(torch.rand(each.shape, generator=drawn) + 0.5 * (each.dim() == 1))
            own = ours.get_parameter(name)
            own.data = each.detach().clone()
    ids = torch.arange(1, 12)[None]
    outs = [model.double()(input_ids=ids).logits for model in (ours, theirs)]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)
    for out in outs:
        out.square().sum().backward()
    for name, each in trained.items():
        torch.testing.assert_close(ours.get_parameter(name).grad, each.grad, rtol=1e-9, atol=1e-9)


VARIANTS = {
    "dora": LoraConfig(enabled=True, dim=4, alpha=8, use_dora=True),
    "pissa": LoraConfig(enabled=True, dim=4, alpha=8, init="pissa", rank_pattern={"q_proj": 2}),
    "pissa dora": LoraConfig(enabled=True, dim=4, alpha=8, init="pissa", use_dora=True),
}
FOUR = ("1", "fsdp2", "tp2", "tp2 x fsdp2")
OFTEN = [("dora", "tp2 x fsdp2"), ("pissa", "tp2 x fsdp2")]
OF_VARIANTS = [(name, mesh) for name in ("dora", "pissa") for mesh in (*FOUR, "tp2+sp", "pp2 x fsdp2")]


@pytest.mark.parametrize(("name", "mesh"), partly_exhaustive([*OF_VARIANTS, ("pissa dora", "tp2")], always=OFTEN))
def test_dora_and_pissa_train_as_in_one_process(ranks, folder, name, mesh):
    """The oracle decomposes and normalises whole weights in float64."""
    check = replace(CHECK, lora=VARIANTS[name])
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=True)
    outcome = check.check_case(ranks, folder, case, check.expect(folder, has_adapters=True))
    assert outcome.differences.keys() == {"loss", "grad_norm", "weights", "adapter"}, outcome.reason
    assert max(outcome.differences.values()) <= 1e-5, outcome
    # A rest and its principal part add up to a weight only up to rounding.
    assert bool(outcome.names) == ("pissa" in name)


@pytest.mark.parametrize(
    ("name", "mesh"),
    partly_exhaustive([(name, mesh) for name in VARIANTS for mesh in ("1", "fsdp2")], always=[("pissa dora", "fsdp2")]),
)
def test_dora_and_pissa_resume_bit_equal(ranks, folder, tmp_path, name, mesh):
    check_resumes(ranks, folder, tmp_path, VARIANTS[name], mesh)


def check_resumes(ranks, folder, tmp_path, lora, mesh):
    with open_model(ranks, folder, mesh, lora) as model:
        model.train_step(make_batch(), TokenLoss())
        model.save(str(tmp_path / "saved"))
        expected = model.train_steps([make_batch(seed=seed) for seed in (1, 2)], TokenLoss())
        logprobs = model.infer(make_batch(seed=7), [LOGPROBS]).ragged("logprobs").values
    with open_model(ranks, folder, mesh, lora, ModelSpec(keeps_reference=True)) as model:
        model.load(str(tmp_path / "saved"))
        assert model.train_steps([make_batch(seed=seed) for seed in (1, 2)], TokenLoss()) == expected
        assert np.array_equal(model.infer(make_batch(seed=7), [LOGPROBS]).ragged("logprobs").values, logprobs)
        reference = model.infer(make_batch(seed=7), [LOGPROBS], reference=True).ragged("logprobs").values
    return reference


def test_the_reference_of_principal_factors_is_the_model_of_the_files(ranks, folder, tmp_path):
    reference = check_resumes(ranks, folder, tmp_path, VARIANTS["pissa"], "tp2")
    expected = Oracle(folder).infer(make_batch(seed=7), [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(reference, expected, atol=1e-5)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_no_adapter_is_refused_by_name(ranks, folder, key):
    lora = ATTENTION.model_copy(update={key: {"o_proj": 2}})
    with pytest.raises(WorkerError, match=rf"lora_cfg.{key}: 'o_proj' matches no layer .* in q_proj, v_proj"):
        open_model(ranks, folder, "1", lora)


def test_the_head_of_a_reward_model_is_exported_with_its_adapter(ranks, folder, tmp_path):
    batch = make_pairs()
    with open_model(ranks, folder, "fsdp2", LoraConfig(enabled=True), ModelSpec("reward_model")) as model:
        model.train_step(batch, PairLoss())
        expected = model.infer(batch, [SCORES]).array("scores")
        model.export_adapter(str(tmp_path))
    found = with_adapter(Oracle(folder, "reward_model"), tmp_path).infer(batch, [SCORES])["scores"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_without_adapters_exports_none(ranks, folder, tmp_path):
    with open_model(ranks, folder, "1", LoraConfig()) as model:
        assert model.export_adapter(str(tmp_path / "adapter")) == ()
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "q_projj"], "'q_projj' is not a linear layer of this .*; name some of down_proj, "),
        (["lm_head"], "'lm_head' names the head, a router or stacked experts .* which get no adapter from this key"),
        ([], "match no linear layer"),
    ],
)
def test_targets_that_get_no_adapter_are_refused_by_name(ranks, folder, targets, message):
    lora = LoraConfig(enabled=True, match_all_linear=False, target_modules=targets)
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folder, "1", lora)


STACKS = ["experts.gate_up_proj", "experts.down_proj"]
EXPERTS = LoraConfig(enabled=True, dim=4, alpha=8, target_parameters=STACKS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_tiny(AutoConfig.for_model("qwen3_moe"), tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3_moe", "ep2 x fsdp2"),
        pytest.param("gpt_oss", "1", marks=exhaustive),  # transposed weights, which the files hold stacked
        pytest.param("qwen3_moe", "tp2+sp", marks=exhaustive),
        pytest.param("qwen3_moe", "pp2 x fsdp2", marks=exhaustive),
        pytest.param("glm4_moe", "fsdp2", marks=exhaustive),  # beside linear layers whose names end alike
    ],
)
def test_adapters_on_experts_train_merge_and_export_as_in_one_process(ranks, tmp_path, family, mesh):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    case = case_on(MESHES, mesh, is_packed=family != "gpt_oss", has_adapters=True)
    check = check_of(AutoConfig.from_pretrained(folder))
    assert sorted(check.lora.target_parameters) == sorted(STACKS)
    outcome = check.check_case(ranks, folder, case, check.expect(folder, has_adapters=True))
    assert outcome.verdict == "exact", outcome


ALONE = EXPERTS.model_copy(update={"match_all_linear": False})


@pytest.mark.parametrize("lora", partly_exhaustive([EXPERTS, ALONE], always=[EXPERTS]))
def test_peft_gives_the_logprobs_of_adapters_on_experts(ranks, mixture, tmp_path, lora):
    batch = make_batch(seed=7)
    with open_model(ranks, mixture, "ep2 x fsdp2", lora) as model:
        for seed in range(2):
            model.train_step(make_batch(seed=seed), TokenLoss())
        expected = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export_adapter(str(tmp_path))
    before = Oracle(mixture).infer(batch, [LOGPROBS])["logprobs"]
    found = with_adapter(Oracle(mixture), tmp_path).infer(batch, [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(found - before).max() > 1e-3


@exhaustive
def test_adapters_on_experts_go_on_from_a_checkpoint_or_a_folder_on_another_mesh(ranks, mixture, tmp_path):
    saved, adapter = str(tmp_path / "saved"), str(tmp_path / "adapter")
    with open_model(ranks, mixture, "ep2 x fsdp2", EXPERTS) as model:
        model.train_step(make_batch(), TokenLoss())
        model.save(saved)
        model.export_adapter(adapter)
        expected = [model.train_step(make_batch(seed=seed), TokenLoss()) for seed in (1, 2)]
    with open_model(ranks, mixture, "tp2", EXPERTS) as model:
        model.load(saved)
        assert_alike([model.train_step(make_batch(seed=seed), TokenLoss()) for seed in (1, 2)], expected)
    start = EXPERTS.model_copy(update={"adapter": adapter})
    with open_model(ranks, mixture, "tp2", start, ModelSpec(keeps_reference=True)) as model:
        before = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        assert_alike([model.train_step(make_batch(seed=seed), TokenLoss()) for seed in (1, 2)], expected)
        reference = model.infer(make_batch(), [LOGPROBS], reference=True).ragged("logprobs").values
    assert np.array_equal(reference, before)


def assert_alike(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), name


def test_the_reference_of_new_adapters_on_experts_is_the_model_without_them(ranks, mixture):
    batch = make_batch(seed=7)
    with open_model(ranks, mixture, "ep2 x fsdp2", EXPERTS, ModelSpec(keeps_reference=True)) as model:
        model.train_step(make_batch(), TokenLoss())
        trained = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        reference = model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").values
    plain = Oracle(mixture).infer(batch, [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(reference, plain, atol=1e-5)
    assert abs(trained - plain).max() > 1e-3


@pytest.mark.parametrize("family", partly_exhaustive(["qwen3_moe", "glm4_moe"], always=["qwen3_moe"]))
def test_adapters_on_experts_have_a_rank_of_their_own(ranks, tmp_path, family):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    patterns = {"rank_pattern": {"experts.down_proj": 2, "o_proj": 3}, "alpha_pattern": {"experts.gate_up_proj": 5}}
    lora = EXPERTS.model_copy(update=patterns)
    check = replace(check_of(AutoConfig.from_pretrained(folder)), lora=lora)
    case = case_on(MESHES, "ep2 x fsdp2", is_packed=True, has_adapters=True)
    outcome = check.check_case(ranks, folder, case, check.expect(folder, has_adapters=True))
    assert outcome.verdict == "exact", outcome


def test_variants_that_a_model_does_not_fit_are_refused_by_name(ranks, folder, tmp_path):
    with pytest.raises(
        WorkerError, match=r"q_proj.weight of shape .* has only 32 singular values, .* rank 40; lower dim"
    ):
        open_model(ranks, folder, "1", LoraConfig(enabled=True, dim=40, init="pissa"))
    gpt2 = write_tiny(AutoConfig.for_model("gpt2"), tmp_path)
    with pytest.raises(WorkerError, match="pissa is not supported for weights that are stored transposed"):
        open_model(ranks, gpt2, "1", LoraConfig(enabled=True, init="pissa"))


def test_stacked_weights_that_are_not_there_are_refused_by_name(ranks, folder, mixture):
    lora = LoraConfig(enabled=True, target_parameters=["experts.up_proj"])
    with pytest.raises(WorkerError, match=r"'experts.up_proj' is not a weight .* name some of experts.down_proj, exp"):
        open_model(ranks, mixture, "1", lora)
    with pytest.raises(WorkerError, match=r"target_parameters: 'experts.up_proj' .* this model has none"):
        open_model(ranks, folder, "1", lora)
