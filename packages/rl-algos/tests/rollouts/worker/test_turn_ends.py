"""Tokens at which a turn ends: of the template, of the generation config, and tokens that are not special."""

import json

import numpy as np
import pytest
from chat_tokenizers import tokenizer_of
from tokenizers import AddedToken

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.tiny_model import make_tokenizer
from rl_algos.tokenizer import load_tokenizer
from rl_algos.turn_ends import find_turn_ends
from rl_core.errors import ConfigError
from rl_core.model_config import TokenizerConfig


def loaded(tmp_path, family, **files):
    """A tokenizer as it is loaded from a folder with these JSON files; ids are given as tokens."""
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(tmp_path)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps({"eos_token_id": ids(tokenizer, content)})
        (tmp_path / f"{name}.json").write_text(text)
    return load_tokenizer(TokenizerConfig(), str(tmp_path))


def ids(tokenizer, tokens):
    if isinstance(tokens, list):
        return [ids(tokenizer, token) for token in tokens]
    return tokenizer.convert_tokens_to_ids(tokens) if isinstance(tokens, str) else tokens


GENERATION = "generation_config"


@pytest.mark.parametrize(
    ("family", "files", "expected"),
    [
        pytest.param("qwen2_5", {}, ["<|im_end|>"], id="no file"),
        pytest.param(
            "llama3_1",
            {GENERATION: ["<|eom_id|>", "<|eot_id|>", "<|begin_of_text|>"]},
            ["<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>"],
            id="a list of ids, the tokenizer's own first [vllm-project/vllm#4180]",
        ),
        pytest.param(
            "gemma3",
            {GENERATION: ["<eos>"]},
            ["<eos>", "<end_of_turn>"],
            id="the template adds its own [Blaizzy/mlx-vlm#2112]",
        ),
        pytest.param(
            "phi3", {GENERATION: ["<|user|>", 99999]}, ["<|endoftext|>", "<|end|>", "<|user|>"], id="no token"
        ),
        pytest.param("phi3", {GENERATION: ["<|user|>", "a"]}, ["<|endoftext|>", "<|end|>", "<|user|>"], id="a letter"),
        pytest.param(
            "qwen3",
            {"config": ["<|im_start|>"]},
            ["<|im_end|>", "<|im_start|>"],
            id="of config.json [Blaizzy/mlx-vlm#309]",
        ),
        pytest.param(
            "qwen3",
            {GENERATION: [], "config": ["<|im_start|>"]},
            ["<|im_end|>"],
            id="generation_config.json comes first",
        ),
        pytest.param(
            "qwen3", {GENERATION: "{}", "config": ["<|im_start|>"]}, ["<|im_end|>", "<|im_start|>"], id="empty"
        ),
    ],
)
def test_a_turn_ends_at_the_special_tokens_of_the_generation_config_too(tmp_path, family, files, expected):
    tokenizer = loaded(tmp_path, family, **files)
    ends = find_turn_ends(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(ends.sampled)) == expected
    assert set(ends.marks) == set(expected)


def test_one_id_is_as_good_as_a_list(tmp_path):
    number = tokenizer_of("phi3").convert_tokens_to_ids("<|user|>")
    tokenizer = loaded(tmp_path, "phi3", generation_config=json.dumps({"eos_token_id": number}))
    assert number in find_turn_ends(tokenizer).sampled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("{", r"generation_config.json is not a JSON object", id="cut off"),
        pytest.param("[1]", r"generation_config.json is not a JSON object", id="a list"),
        pytest.param('{"eos_token_id": "</s>"}', r"must be an integer or a list of integers, got '</s>'", id="a token"),
        pytest.param('{"eos_token_id": [1, null]}', r"must be an integer or a list of integers", id="null in a list"),
        pytest.param('{"eos_token_id": true}', r"must be an integer or a list of integers, got True", id="a bool"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path, text, says):
    with pytest.raises(ConfigError, match=rf"policy.model_name: .*{says}"):
        loaded(tmp_path, "phi3", generation_config=text)


def test_a_token_that_is_not_special_ends_a_turn_as_well():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = find_turn_ends(tokenizer)
    assert (ends.sampled, ends.plain) == ((tokenizer.eos_token_id, end), "")
    sampled = np.array([*tokenizer.encode("yo", add_special_tokens=False), end], np.int32)
    assert Chat(tokenizer).read(sampled).text == "yo"
