import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_algos.tiny_model import CHARACTERS, make_tiny_model, make_tokenizer
from rl_algos.tokenizer import load_tokenizer
from rl_core.model_config import TokenizerConfig


def test_files_follow_from_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(tmp_path / name, seed=seed, num_layers=1)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert a.keys() == b.keys() == c.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_weights_are_initialised_as_transformers_does(tmp_path):
    make_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        if tensor.ndim == 1:
            assert np.all(tensor == 1)
        else:
            assert abs(tensor.mean()) < 1e-3
            assert tensor.std() == pytest.approx(0.02, rel=0.05), name
    assert 0.5e6 < sum(tensor.size for tensor in tensors.values()) < 0.8e6


def test_characters_are_tokens_and_text_survives(tokenizer):
    assert len(tokenizer("1234+5=", add_special_tokens=False)["input_ids"]) == 7
    assert tokenizer.decode(tokenizer(CHARACTERS)["input_ids"]) == CHARACTERS
    assert tokenizer.decode(tokenizer("a  b , c .")["input_ids"]) == "a  b , c ."
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.decode(tokenizer("4<|end|>")["input_ids"], skip_special_tokens=True) == "4"


def test_the_tokenizer_is_the_same_after_saving(tmp_path, tokenizer):
    make_tiny_model(tmp_path, num_layers=1)
    loaded = load_tokenizer(TokenizerConfig(), str(tmp_path))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (
        len(loaded),
        loaded.eos_token_id,
        loaded.pad_token_id,
    )


def test_a_small_vocabulary_may_be_chosen():
    tokenizer = make_tokenizer("0123456789+=")
    assert len(tokenizer) == 7 + 12
    assert tokenizer("1+a")["input_ids"][2] == tokenizer.unk_token_id


@pytest.mark.parametrize("sizes", [{"hidden_size": 100, "num_heads": 3}, {"num_heads": 4, "num_key_value_heads": 3}])
def test_sizes_that_do_not_fit_are_refused(tmp_path, sizes):
    with pytest.raises(ValueError, match="must be a multiple"):
        make_tiny_model(tmp_path, **sizes)


def test_repeated_characters_are_refused():
    with pytest.raises(ValueError, match=r"characters .*'00'"):
        make_tokenizer("00")


def test_transformers_loads_it_whole(tmp_path):
    import torch
    from transformers import Qwen3ForCausalLM

    make_tiny_model(tmp_path)
    model, report = Qwen3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.dtype == torch.float32
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == {name for name, _ in model.named_parameters()}
    tokens = load_tokenizer(TokenizerConfig(), str(tmp_path))("12+34=", return_tensors="pt")
    logits = model(**tokens).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0
