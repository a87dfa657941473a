"""Weights on disk are those that are trained, and trained weights are those that are exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, TokenizerConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import read_weights, write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch

FACTORY = "dtensor_factories:build"
MODEL_FILE = "model.safetensors"


def open_model(ranks, folder, num_ranks=1, spec=None, **settings):
    config = ModelConfig(model_name=str(folder), **{"precision": "float32", **settings})
    return PooledModel(ranks, FACTORY, config, spec or ModelSpec(), num_ranks)


def rewrite(folder, change):
    tensors = load_file(folder / MODEL_FILE)
    change(tensors)
    save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})


def logprobs(ranks, folder, num_ranks=1):
    with open_model(ranks, folder, num_ranks) as model:
        return model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values


def test_weights_in_several_files_are_found(ranks, tmp_path):
    folder = write_tiny_model(tmp_path, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    expected = Oracle(folder).infer(make_batch(), [LOGPROBS])["logprobs"]
    assert logprobs(ranks, folder, num_ranks=2) == pytest.approx(expected, abs=1e-5)


def test_a_tied_head_may_be_on_disk_under_any_of_its_names(ranks, tmp_path):
    folder = write_tiny_model(tmp_path)
    expected = logprobs(ranks, folder)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert (logprobs(ranks, folder) == expected).all()
    rewrite(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert (logprobs(ranks, folder) == expected).all()


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def in_row(index, added):
    """A change to the head of a tied model, which is stored apart: one row of it."""

    def change(tensors):
        head = tensors[EMBEDDING].clone()
        head[index] += added
        tensors[LM_HEAD] = head

    return change


HEADS = {
    "equal [vllm-project/vllm#51665]": (in_row(0, 0.0), True),
    "wider and equal": (lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].double()}), True),
    "other first row [huggingface/transformers#42612]": (in_row(0, 1.0), False),
    "other last row": (in_row(-1, 1.0), False),
    "one row a little different": (in_row(50, 1e-3), False),
}
"""A change to the files, and whether the head is tied with it."""
HEAD_CASES = [(head, num_ranks) for num_ranks in (1, 2) for head in HEADS]
ON_TWO_RANKS = ("equal [vllm-project/vllm#51665]", "other last row")
"""Those that are also held on two ranks."""


@pytest.mark.parametrize(
    ("head", "num_ranks"),
    partly_exhaustive(HEAD_CASES, always=[case for case in HEAD_CASES if case[1] == 1 or case[0] in ON_TWO_RANKS]),
)
def test_a_head_that_the_files_hold_apart_is_tied_as_in_transformers(ranks, tmp_path, head, num_ranks):
    change, is_tied = HEADS[head]
    folder = write_tiny_model(tmp_path / "model")
    rewrite(folder, change)
    with open_model(ranks, folder, num_ranks) as model:
        found = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        manifest = model.manifest(1)
        model.export(str(tmp_path / "export"))
    assert found == pytest.approx(Oracle(folder).infer(make_batch(), [LOGPROBS])["logprobs"], abs=1e-5)
    assert dict(manifest.tied) == ({LM_HEAD: EMBEDDING} if is_tied else {})
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] == is_tied
    source, exported = load_file(folder / MODEL_FILE), read_weights(tmp_path / "export")
    assert all(exported[name].equal(tensor.float()) for name, tensor in source.items())


def test_experts_of_4_bits_are_those_that_they_stand_for(ranks, tmp_path):
    exact = write_tiny_model(tmp_path / "exact", "gpt_oss", num_local_experts=4, hidden_size=64, intermediate_size=32)
    published = shutil.copytree(exact, tmp_path / "published")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    draw = torch.Generator().manual_seed(1)

    def quantise(tensors):
        for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
            experts, inputs, outputs = tensors.pop(name).shape
            groups = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), generator=draw, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 123, groups, generator=draw, dtype=torch.uint8)

    def dequantise(tensors):
        for name, packed in load_file(published / MODEL_FILE).items():
            if name.endswith("_blocks"):
                weight = name.removesuffix("_blocks")
                scales = load_file(published / MODEL_FILE)[f"{weight}_scales"]
                tensors[weight] = mxfp4.convert_moe_packed_tensors(packed, scales).float()

    rewrite(published, quantise)
    rewrite(exact, dequantise)
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    settings = ModelConfig(model_name=str(published), precision="float32", sequence_packing={"enabled": False})
    with PooledModel(ranks, FACTORY, settings, ModelSpec(), 2, expert_parallel_size=2) as model:
        found = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        model.export(str(tmp_path / "exported"))
    assert found == pytest.approx(Oracle(exact).infer(make_batch(), [LOGPROBS])["logprobs"], abs=1e-5)
    weights = load_file(exact / MODEL_FILE)
    assert all(tensor.equal(weights[name]) for name, tensor in load_file(tmp_path / "exported" / MODEL_FILE).items())
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "missing model.norm.weight; unexpected none"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(2)}), "missing none; unexpected model.extra"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}), r"model.norm.weight has shape \(2,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(ranks, tmp_path, change, message):
    folder = write_tiny_model(tmp_path)
    rewrite(folder, change)
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folder, num_ranks=2)


def quantise(name, dtype):
    """A change by which a weight is stored in a dtype that stands for something else."""
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            quantise("model.norm.weight", torch.int8),
            "model.norm.weight is stored as I8",
            id="8-bit integers [meta-llama/llama-cookbook#548]",
        ),
        pytest.param(quantise("model.norm.weight", torch.uint8), "is stored as U8: it is quantised", id="packed bytes"),
        pytest.param(
            quantise("model.norm.weight", torch.int32), "is stored as I32: it is quantised", id="packed words"
        ),
        pytest.param(
            quantise("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn),
            "is stored as F8_E4M3: it is quantised",
            id="8-bit floats without scales [ml-explore/mlx-lm#1865]",
        ),
        pytest.param(
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.up_proj.qweight": tensors.pop("model.layers.0.mlp.up_proj.weight").int()}
            ),
            r"unexpected model.layers.0.mlp.up_proj.qweight. model.layers.0.mlp.up_proj.qweight is stored as I32",
            id="packed words under a name of their own",
        ),
    ],
)
def test_values_that_stand_for_others_are_refused(ranks, tmp_path, change, message):
    folder = write_tiny_model(tmp_path)
    rewrite(folder, change)
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folder)


@pytest.mark.parametrize("role", ["reward_model", "critic"])
def test_a_classifier_of_several_labels_is_no_reward_model(ranks, tmp_path, role):
    folder = write_tiny_model(tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 32)}))
    with pytest.raises(WorkerError, match=r"score.weight has shape \(2, 32\): this classifier has 2 labels"):
        open_model(ranks, folder, spec=ModelSpec(role=role))


def test_a_folder_without_safetensors_says_so(ranks, tmp_path):
    folder = write_tiny_model(tmp_path)
    (folder / MODEL_FILE).unlink()
    with pytest.raises(WorkerError, match=r"neither model\.safetensors nor"):
        open_model(ranks, folder)


def test_a_path_that_does_not_exist_is_no_hub_name(ranks, tmp_path):
    with pytest.raises(WorkerError, match="is not a folder"):
        open_model(ranks, tmp_path / "nowhere", num_ranks=1)


def test_overrides_reach_the_model_and_its_export(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    overrides = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    with open_model(ranks, folder, hf_config_overrides=overrides) as model:
        found = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        model.export(str(tmp_path / "export"))
    assert found == pytest.approx(Oracle(tmp_path / "export").infer(make_batch(), [LOGPROBS])["logprobs"], abs=1e-5)
    assert abs(found - logprobs(ranks, folder)).max() > 1e-3


def test_overrides_of_no_field_are_named(ranks, tmp_path):
    with pytest.raises(WorkerError, match=r"\['rope_tehta'\] are not fields of a Qwen3Config"):
        open_model(ranks, write_tiny_model(tmp_path), hf_config_overrides={"rope_tehta": 1.0})


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        pytest.param("bfloat16", torch.bfloat16, id="bfloat16 [meta-llama/llama-cookbook#289]"),
        ("float32", torch.float32),
    ],
)
def test_an_export_has_the_dtype_of_its_source_unless_all_is_float32(ranks, tmp_path, precision, expected):
    folder = write_tiny_model(tmp_path / "model", dtype="bfloat16")
    with open_model(ranks, folder, num_ranks=2, precision=precision) as model:
        model.export(str(tmp_path / "export"))
    exported, source = read_weights(tmp_path / "export"), read_weights(folder)
    assert {tensor.dtype for tensor in exported.values()} == {expected}
    assert all(exported[name].to(tensor.dtype).equal(tensor) for name, tensor in source.items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_an_export_does_not_repeat_how_its_source_is_quantised(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with open_model(ranks, folder) as model:
        model.export(str(tmp_path / "export"))
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())


def test_tokenizer_files_come_from_the_tokenizer(ranks, tmp_path):
    folder, other = write_tiny_model(tmp_path / "model"), tmp_path / "tokenizer"
    for place, word in ((folder, "model's"), (other, "other")):
        vocabulary = Tokenizer(models.WordLevel({word: 0}))
        PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(place)
    (folder / "generation_config.json").write_text("{}")
    for tokenizer, source in ((None, folder), (str(other), other)):
        target = tmp_path / "exports" / source.name
        with open_model(ranks, folder, tokenizer=TokenizerConfig(name=tokenizer)) as model:
            model.export(str(target))
        assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert (target / "generation_config.json").read_text() == "{}"


def test_an_export_is_split_over_files_with_an_index(ranks, tmp_path, monkeypatch):
    folder = write_tiny_model(tmp_path / "model")
    ranks.run("dtensor_factories:limit_file_bytes", [(20_000,)] * 2)
    try:
        with open_model(ranks, folder, num_ranks=2) as model:
            model.export(str(tmp_path / "export"))
    finally:
        ranks.run("dtensor_factories:limit_file_bytes", [(2 * 2**30,)] * 2)
    assert (tmp_path / "export" / "model.safetensors.index.json").is_file()
    exported = read_weights(tmp_path / "export")
    assert all(exported[name].equal(tensor) for name, tensor in read_weights(folder).items())


def test_new_heads_depend_on_the_seed_alone(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    heads = []
    for index, (num_ranks, seed) in enumerate([(1, 0), (2, 0), (1, 1)]):
        path = tmp_path / str(index)
        with open_model(ranks, folder, num_ranks, ModelSpec(role="reward_model", seed=seed)) as model:
            model.export(str(path))
        heads.append(load_file(path / MODEL_FILE)["score.weight"])
    assert heads[0].equal(heads[1])
    assert not heads[0].equal(heads[2])
