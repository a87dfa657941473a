"""Model families that do something of their own with attention or logits."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WorkerError
from rl_core.model import ENTROPY, LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.selfcheck import LENGTHS, case_on
from rl_core.selfcheck.torch.tiny_model import SIZES, write_tiny_model
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import SGD, make_batch
from rl_dtensor.model.attention import RowsUnknown, tell_chunks
from rl_dtensor.selfcheck import CHECK, MESHES, write_tiny

FACTORY = "dtensor_factories:build"
SLIDING = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
FAMILIES = {
    "qwen2-sliding": ("qwen2", SLIDING),
    "mistral-sliding": ("mistral", {"sliding_window": 4}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "phi": ("phi", {}),
    "gemma2": (
        "gemma2",
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_reads_and_steps_are_those_of_transformers(ranks, tmp_path, name, is_packed):
    family, fields = FAMILIES[name]
    assert_like_transformers(ranks, write_tiny_model(tmp_path, family, **fields), is_packed)


def test_logits_that_are_made_some_other_way_are_refused(ranks, tmp_path):
    folder = write_tiny_model(tmp_path, "granite", logits_scaling=4.0)
    config = ModelConfig(model_name=str(folder))
    ranks.run("dtensor_factories:forget_transforms", [(), ()])
    try:
        with pytest.raises(WorkerError, match="logits of granite models"):
            PooledModel(ranks, FACTORY, config, ModelSpec(), 2)
    finally:
        ranks.run("dtensor_factories:recall_transforms", [(), ()])


@pytest.mark.parametrize(
    ("family", "is_packed", "lora"),
    [
        ("gpt2", True, True),  # sizes by other names, places by table, adapters on transposed weights
        pytest.param("gpt_neox", True, False, marks=exhaustive),  # a head that the files call something else
        pytest.param("biogpt", True, False, marks=exhaustive),  # layers that are not named
        pytest.param("mamba", False, False, marks=exhaustive),  # layers named with what is in them, and no attention
        pytest.param("stablelm", False, False, marks=exhaustive),  # attention that is not told of rows
        pytest.param("falcon", False, False, marks=exhaustive),  # a table of attentions of its own
        pytest.param("bloom", False, False, marks=exhaustive),  # no places at all
        pytest.param("glm4_moe", True, True, marks=exhaustive),  # adapters beside experts of the same name
    ],
)
def test_families_of_other_shapes_train_and_stream_as_one_process(ranks, tmp_path, family, is_packed, lora):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    case = case_on(MESHES, "fsdp2", is_packed=is_packed, has_adapters=lora)
    outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=lora))
    assert outcome.verdict == "exact", outcome


@exhaustive
def test_a_family_that_changes_states_outside_of_its_layers_is_not_cut(ranks, tmp_path):
    """Its buffers are filled in the layers of a stage only, before the stages are tried."""
    folder = write_tiny(AutoConfig.for_model("falcon_h1"), tmp_path / "model")
    case = case_on(MESHES, "pp2", is_packed=False, has_adapters=False)
    outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=False))
    assert outcome.verdict == "refused"
    assert "change hidden states outside of their layers" in outcome.reason


@pytest.mark.parametrize("mesh", partly_exhaustive(["tp2", "tp2+sp"], always=["tp2+sp"]))
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",  # shared experts that are split, beside stacked ones and attention that every rank has whole
        pytest.param("phimoe", marks=exhaustive),  # a family without a plan
        pytest.param("glm4_moe", marks=exhaustive),  # attention that is split
        pytest.param("solar_open", marks=exhaustive),  # shared experts that every rank has whole
        pytest.param("hy_v3", marks=exhaustive),  # shared experts that are called with tokens of all rows in one dim
    ],
)
def test_experts_beside_shared_ones_are_split(ranks, tmp_path, family, mesh):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=False)
    outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=False))
    assert outcome.verdict == "exact", outcome


@pytest.mark.parametrize("mesh", partly_exhaustive(["tp2+sp", "cp2", "cp2 ulysses", "pp2", "ep2 x fsdp2"], always=[]))
def test_llama_4_is_the_same_packed_and_split(ranks, tmp_path, mesh):
    """Attention in chunks, temperatures by place, and experts that are called with all tokens."""
    config = AutoConfig.for_model("llama4_text")
    folder = write_tiny(config, tmp_path / "model")
    tiny = AutoConfig.from_pretrained(folder)
    assert {*tiny.layer_types} == {"chunked_attention", "full_attention"}
    assert max(LENGTHS) > 2 * tiny.attention_chunk_size > tiny.floor_scale
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=mesh == "tp2+sp")
    outcome = CHECK.check_case(ranks, folder, case, CHECK.expect(folder, has_adapters=case.has_adapters))
    assert outcome.verdict == "exact", outcome


def test_chunks_of_unknown_length_are_refused():
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    hf.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(RowsUnknown, match="no attention_chunk_size"):
        tell_chunks(hf, hf.model.layers)


@pytest.mark.parametrize(
    ("family", "settings", "message"), [("jetmoe", {"expert_parallel_size": 2}, "have no stacked experts")]
)
def test_models_that_cannot_be_split_so_are_refused_with_the_reason(ranks, tmp_path, family, settings, message):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    config = ModelConfig(model_name=str(folder), sequence_packing=SequencePackingConfig(enabled=False))
    with pytest.raises(WorkerError, match=message):
        PooledModel(ranks, FACTORY, config, ModelSpec(), 2, **settings)


def test_rows_that_change_one_another_are_refused(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("gpt2"), tmp_path / "model")
    ranks.run("dtensor_factories:forget_places", [()])
    try:
        with pytest.raises(WorkerError, match=r"gpt2 models cannot be packed: one changes another.*packing.enabled"):
            PooledModel(ranks, FACTORY, ModelConfig(model_name=str(folder), precision="float32"), ModelSpec(), 1)
    finally:
        ranks.run("dtensor_factories:recall_places", [()])


@pytest.mark.parametrize(
    "family",
    [
        "stablelm",  # attention that is not told
        "falcon",  # a table of attentions of its own
    ],
)
def test_attention_that_is_not_told_of_rows_is_refused_where_they_are_packed(ranks, tmp_path, family):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path / "model")
    with pytest.raises(WorkerError, match=r"cannot be told where rows start and end.*packing.enabled=false"):
        PooledModel(ranks, FACTORY, ModelConfig(model_name=str(folder)), ModelSpec(), 1)


def assert_like_transformers(ranks, folder, is_packed):
    batch = make_batch((9, 3, 17))
    oracle = Oracle(folder)
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=SGD,
        sequence_packing=SequencePackingConfig(enabled=is_packed),
    )
    with PooledModel(ranks, FACTORY, config, ModelSpec(), 1) as model:
        found = model.infer(batch, [LOGPROBS, ENTROPY])
        for column, expected in oracle.infer(batch, [LOGPROBS, ENTROPY]).items():
            assert found.ragged(column).values == pytest.approx(expected, abs=1e-5), column
        expected = oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        metrics = model.train_step(batch, TokenLoss())
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("family", "fields", "ways"),
    [
        (
            "gpt_oss",  # sinks and windows; experts with biases
            {},
            [("cp2 ulysses", True, True)],
        ),
        pytest.param("gemma2", CAPPED, [("cp2", True, False)], marks=exhaustive),  # scores and logits with a cap
        pytest.param("gpt_oss", {}, [("tp2+sp", True, False), ("ep2 x fsdp2", True, False)], marks=exhaustive),
        pytest.param("gemma2", CAPPED, [("tp2", True, True), ("pp2", False, False)], marks=exhaustive),
        # sinks of some layers, which have other key heads
        pytest.param("mimo_v2_flash", {}, [("cp2 x tp2", True, False)], marks=exhaustive),
    ],
)
def test_capped_scores_and_sinks_are_split_over_ranks(ranks, tmp_path, family, fields, ways):
    folder = write_tiny(AutoConfig.for_model(family, **fields), tmp_path)
    cases = [case_on(MESHES, mesh, is_packed=packed, has_adapters=adapters) for mesh, packed, adapters in ways]
    found = list(CHECK.check_family(ranks, folder, cases))
    assert [case.verdict for case in found] == ["exact"] * len(ways), found


@exhaustive
def test_weights_that_a_layer_reads_and_features_that_count_together_are_whole_on_tensor_parallel_ranks(
    ranks, tmp_path
):
    folder = write_tiny(AutoConfig.for_model("gemma3n_text"), tmp_path)
    ways = [case_on(MESHES, mesh, is_packed=True, has_adapters=False) for mesh in ("tp2", "tp2+sp")]
    exact, refused = CHECK.check_family(ranks, folder, ways)
    assert exact.verdict == "exact", exact
    assert refused.verdict == "refused"
    assert "tokens cannot be split between its layers; set sequence_parallel=false" in refused.reason


@pytest.mark.parametrize("mesh", partly_exhaustive(["tp2", "tp2+sp"], always=["tp2+sp"]))
@pytest.mark.parametrize("adapters", partly_exhaustive([False, True], always=[True]))
@pytest.mark.parametrize("family", partly_exhaustive(["olmo2", "phi3", "glm4", "cohere"], always=["olmo2"]))
def test_plans_of_transformers_hold_on_tensor_parallel_meshes(ranks, tmp_path, family, adapters, mesh):
    folder = write_tiny(AutoConfig.for_model(family), tmp_path)
    case = case_on(MESHES, mesh, is_packed=True, has_adapters=adapters)
    (found,) = CHECK.check_family(ranks, folder, [case])
    assert found.verdict == "exact", found
