"""Exported weights are what transformers and safetensors expect of them."""

import json

import pytest
import torch
from export_cases import numbered, write
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.training.export import complete_generation_config, export_dtype, padding_token


def test_little_is_one_file_that_reads_back(pool, tmp_path):
    outcomes = pool.run(write, [(str(tmp_path), [0], None, 2**20)] * 2)
    assert outcomes == [(["model.safetensors"], ""), ([], "")]
    assert not (tmp_path / "model.safetensors.index.json").exists()
    with WeightFiles.of(tmp_path).open() as weights:
        assert all(torch.equal(weights.read(name, ()), tensor) for name, tensor in numbered().items())


@pytest.mark.parametrize(
    ("config", "precision", "dtype"),
    [
        ({"dtype": "bfloat16"}, "float32", "float32"),
        ({"dtype": "float16"}, "bfloat16", "float16"),
        ({"torch_dtype": "torch.float32"}, "bfloat16", "float32"),
        pytest.param({}, "bfloat16", "bfloat16", id="as it is computed [marin-community/levanter#610]"),
    ],
)
def test_weights_keep_the_dtype_of_their_source_unless_they_are_computed_in_float32(tmp_path, config, precision, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert export_dtype(tmp_path, precision) == dtype


@pytest.mark.parametrize(("holders", "num_written"), [([0], [3, 0]), ([0, 1], [2, 1]), ([1, 0], [1, 2])])
def test_the_ranks_that_get_weights_take_turns_to_write_them(pool, tmp_path, holders, num_written):
    outcomes = pool.run(write, [(str(tmp_path), holders, None)] * 2)
    assert [len(written) for written, _ in outcomes] == num_written
    assert sorted(name for written, _ in outcomes for name in written) == [
        f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)
    ]
    assert [error for _, error in outcomes] == ["", ""]
    with WeightFiles.of(tmp_path).open() as weights:
        assert all(torch.equal(weights.read(name, ()), tensor) for name, tensor in numbered().items())


def test_a_file_that_cannot_be_written_is_told_on_every_rank(pool, tmp_path):
    (_, first), (_, second) = pool.run(write, [(str(tmp_path), [0, 1], 1)] * 2)
    assert first == "PeerFailed: rank 1 failed: OSError: [Errno 28] No space left on device"
    assert second == "OSError: [Errno 28] No space left on device"
    assert not (tmp_path / "model.safetensors.index.json").exists()


OWN, ENDING = {"pad_token": "<pad>", "eos_token": "<end>"}, {"pad_token": "<end>", "eos_token": "<end>"}
TURNS = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% if message.role == 'assistant' %}{{ '<turn>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("tokens", "fields", "padding"),
    [
        pytest.param(OWN, {}, 1, id="its own [sbintuitions/flexeval#108]"),
        pytest.param(OWN, {"pad_token_id": 2, "eos_token_id": 2}, 1, id="its own, where the model has the end"),
        pytest.param({"eos_token": "<end>"}, {}, None, id="none [allenai/reward-bench#115]"),
        pytest.param({"eos_token": "<end>"}, {"pad_token_id": 1}, 1, id="none, where the model has one"),
        pytest.param({"eos_token": "<end>"}, {"pad_token_id": 2}, None, id="none, where the model has the end"),
        pytest.param(ENDING, {}, None, id="one that also ends rows"),
        pytest.param(ENDING, {"pad_token_id": 2}, None, id="one that also ends rows, as in the model"),
        pytest.param(ENDING, {"pad_token_id": 1}, None, id="one that also ends rows, not as in the model"),
        pytest.param(OWN, {"eos_token_id": [2, 1]}, None, id="one of several ends of the model"),
        pytest.param(
            {"pad_token": "<turn>", "eos_token": "<end>", "chat_template": TURNS}, {}, None, id="end of a turn"
        ),
        pytest.param(OWN, {"vocab_size": 1}, None, id="one that the model does not have"),
        pytest.param(None, {"pad_token_id": 1, "eos_token_id": 2}, 1, id="no tokenizer"),
        pytest.param(None, {"pad_token_id": 2, "eos_token_id": 2}, None, id="no tokenizer, and the end"),
    ],
)
def test_a_scalar_head_is_exported_with_the_token_that_rows_are_padded_with(tmp_path, tokens, fields, padding):
    if tokens is not None:
        vocabulary = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<end>": 2, "<turn>": 3}))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, **tokens)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
        tokenizer.save_pretrained(tmp_path)
    assert padding_token(tmp_path, fields) == padding


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("model", "generation", "template", "expected"),
    [
        pytest.param(
            {"eos_token_id": 1, "pad_token_id": 1}, None, CHATML, {"eos_token_id": [1, 3], "pad_token_id": 1}, id="base"
        ),
        pytest.param(
            {}, {"eos_token_id": 1, "top_p": 0.8}, CHATML, {"eos_token_id": [1, 3], "top_p": 0.8}, id="one end"
        ),
        pytest.param({}, {"eos_token_id": [3, 1]}, CHATML, {"eos_token_id": [3, 1]}, id="both known"),
        pytest.param({"eos_token_id": 1}, None, None, None, id="no template"),
        pytest.param({}, {"do_sample": True}, None, {"do_sample": True, "eos_token_id": [1]}, id="none known"),
    ],
)
def test_an_export_stops_where_the_policy_was_taught_to(tmp_path, model, generation, template, expected):
    vocabulary = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<|endoftext|>", chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model))
    path = tmp_path / "generation_config.json"
    if generation is not None:
        path.write_text(json.dumps(generation))
    complete_generation_config(tmp_path)
    assert (json.loads(path.read_text()) if path.exists() else None) == expected
