"""What a config and the headers of files rule out, before anything starts. A case is a line."""

import json
import re
from types import SimpleNamespace

import pytest
from safetensors_files import write_weights

from rl_core.errors import ConfigError
from rl_core.model_config import ModelConfig
from rl_launch.model_files.model_facts import check_tokenizer, model_problems
from rl_launch.model_files.weight_files import weight_file_problems

PLAIN = {"model_type": "qwen3", "vocab_size": 16, "max_position_embeddings": 64}


def model(folder, fields=None, shapes=None, overrides=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PLAIN | (fields or {})))
    write_weights(folder / "model.safetensors", shapes or {"model.norm.weight": (4,)})
    overrides = overrides or {}
    return ModelConfig(
        model_name=str(folder),
        max_total_sequence_length=64,
        train_global_batch_size=1,
        train_micro_batch_size=1,
        hf_config_overrides=overrides,
    )


def problems(config, *, longest_row=64, has_scalar_head=False):
    found = model_problems("policy", config, longest_row=longest_row, has_scalar_head=has_scalar_head)
    return {problem.key: problem for problem in found}


@pytest.mark.parametrize(
    ("fields", "shapes", "key", "says"),
    [
        pytest.param(
            {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "m.NovelModel"}},
            {},
            "policy.model_name",
            "'novel'.*m.NovelModel",
            id="code of its own",
        ),
        pytest.param(
            {"model_type": "novel"}, {}, "policy.model_name", "'novel'", id="new type [microsoft/winml-cli#450]"
        ),
        pytest.param({"model_type": None}, {}, "policy.model_name", "model_type", id="no type"),
        pytest.param(
            {"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
            {},
            "policy.model_name",
            "T5ForConditionalGeneration",
            id="an encoder with a decoder [CarperAI/trlx#204]",
        ),
        pytest.param(
            {"architectures": ["BertForMaskedLM"]},
            {},
            "policy.model_name",
            "BertForMaskedLM",
            id="an encoder [huggingface/transformers#12079]",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "awq"}},
            {},
            "policy.model_name",
            " awq,",
            id="AWQ [huggingface/transformers#28193]",
        ),
        pytest.param(
            {}, {"model.layers.0.q.qweight": (4, 4)}, "policy.model_name", " gptq or awq,", id="seen in headers"
        ),
        pytest.param(
            {},
            {"model.layers.0.q.weight.quant_state.bitsandbytes__nf4": (4,)},
            "policy.model_name",
            " bitsandbytes,",
            id="seen in headers of bitsandbytes [tatsu-lab/alpaca_farm#63]",
        ),
        pytest.param(
            {"text_config": PLAIN, "vision_config": {}, "quantization_config": {"quant_method": "gptq"}},
            {},
            "policy.model_name",
            " gptq,",
            id="a composite model states it for all parts",
        ),
        pytest.param(
            {"max_position_embeddings": 32},
            {},
            "policy.max_total_sequence_length",
            "32 positions",
            id="rows beyond the positions [huggingface/open-r1#645]",
        ),
        pytest.param(
            {}, {"score.weight": (2, 4)}, "policy.model_name", "2 labels", id="two labels [OpenRLHF/OpenRLHF#1039]"
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_named(tmp_path, fields, shapes, key, says):
    found = problems(model(tmp_path / "m", fields, shapes), has_scalar_head=True)
    assert found.keys() == {key}
    assert re.search(says, found[key].reason)
    assert found[key].got == (64 if key == "policy.max_total_sequence_length" else str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("fields", "overrides", "longest_row"),
    [
        pytest.param({}, {}, 64, id="rows of full length"),
        pytest.param({"auto_map": {"AutoConfig": "c.C"}}, {}, 64, id="a type that transformers has"),
        pytest.param({"model_type": "qwen2_5_vl_text"}, {}, 64, id="a type whose folder has another name"),
        pytest.param({"architectures": ["Qwen3ForSequenceClassification"]}, {}, 64, id="a classifier has the head"),
        pytest.param({}, {"max_position_embeddings": 128}, 128, id="positions extended"),
        pytest.param({}, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 128, id="positions scaled"),
    ],
)
def test_a_model_that_can_be_trained_is_not(tmp_path, fields, overrides, longest_row):
    config = model(tmp_path / "m", fields, {"score.weight": (1, 4)}, overrides)
    assert problems(config, longest_row=longest_row, has_scalar_head=True) == {}


CODE = {
    "model_type": "novel",
    "auto_map": {"AutoConfig": "c.NovelConfig", "AutoModelForCausalLM": "c.NovelForCausalLM"},
}


def test_code_of_a_model_is_trusted_by_its_digest(tmp_path):
    folder = tmp_path / "m"
    config = model(folder, CODE)
    (folder / "c.py").write_text("class NovelConfig: ...\n")
    asked = problems(config)["policy.model_name"].remedy
    assert "read its code (c.py), and set policy.trust_remote_code=sha256:" in asked
    digest = asked.partition("policy.trust_remote_code=")[2].split()[0]
    trusting = config.model_copy(update={"trust_remote_code": digest})
    assert problems(trusting) == {}
    (folder / "c.py").write_text("class NovelConfig: 'another'\n")
    assert re.search(r"digest of its code \(c.py\) is sha256:", problems(trusting)["policy.trust_remote_code"].reason)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "has no effect, because transformers has the type 'qwen3'"),
        ({"model_type": "novel"}, "names no AutoConfig and no AutoModelForCausalLM in auto_map"),
        (CODE | {"auto_map": {**CODE["auto_map"], "AutoConfig": "who/else--c.C"}}, r"\(who/else--c.C\) is in another"),
    ],
)
def test_trust_that_runs_no_code_of_the_folder_is_refused(tmp_path, fields, says):
    config = model(tmp_path / "m", fields).model_copy(update={"trust_remote_code": f"sha256:{0:064x}"})
    assert re.search(says, problems(config)["policy.trust_remote_code"].reason)


def test_a_classifier_is_no_language_model(tmp_path):
    found = problems(model(tmp_path / "m", {"architectures": ["Qwen3ForSequenceClassification"]}))
    assert "Qwen3ForSequenceClassification" in found["policy.model_name"].reason


def test_a_download_of_the_hub_is_checked_as_a_folder_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--org--name"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots").mkdir()
    config = model(stored / "snapshots" / "abc", {"quantization_config": {"quant_method": "awq"}})
    named = config.model_copy(update={"model_name": "org/name"})
    problem = problems(named)["policy.model_name"]
    assert problem.got == "org/name"
    assert " awq," in problem.reason


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    config = model(tmp_path / "m")
    check_tokenizer(SimpleNamespace(get_vocab=lambda: {"a": 15}), config)
    with pytest.raises(ConfigError, match=r"16.*16 rows \(vocab_size\).*policy\.tokenizer\.name"):
        check_tokenizer(SimpleNamespace(get_vocab=lambda: {"a": 3, "b": 16}), config)


def test_a_folder_with_one_file_and_an_index_of_others_is_refused(tmp_path):
    write_weights(tmp_path / "model.safetensors", {"a": (1,)})
    write_weights(tmp_path / "model-00001-of-00001.safetensors", {"a": (1,)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    [problem] = weight_file_problems(tmp_path)
    assert "there may be two models" in problem
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert list(weight_file_problems(tmp_path)) == []


def test_a_model_that_only_scores_has_a_head_in_its_files(tmp_path):
    def found(name, shapes):
        limits = {"longest_row": 100, "length_key": "judges.a.max_total_sequence_length"}
        needs = {"has_scalar_head": True, "needs_scalar_head": True}
        return {
            each.key: each
            for each in model_problems("judges.a", model(tmp_path / name, None, shapes), **limits, **needs)
        }

    without, complete = found("without", {}), found("complete", {"score.weight": (1, 4)})
    assert without["judges.a.model_name"].reason == "is not a reward model: its files have no score.weight"
    assert list(complete) == ["judges.a.max_total_sequence_length"]
    assert "exceeds the 64 positions" in complete["judges.a.max_total_sequence_length"].reason
