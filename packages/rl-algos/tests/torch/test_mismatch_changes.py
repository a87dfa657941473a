"""Faults planted into one side of a tiny model, and the cause that is found first."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, Qwen2ForCausalLM

from rl_algos.rollouts.mismatch import MismatchCase, MismatchGap, MismatchRows, OlderWeights, TriedChange, ranked
from rl_algos.tiny_model import make_tokenizer
from rl_algos.torch.mismatch import filtered_logprobs
from rl_algos.torch.mismatch_changes import examine
from rl_core.data.ragged import Ragged
from rl_core.rollouts.generation import SamplingParams
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import processed_logprobs

NUM_TOKENS = 10
QUESTIONS = [f"what is {first} and {first * 7 % 13}?" for first in range(12, 24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.25,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    made = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for tensor in made.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def changed(model, edit=lambda config: None, weights=lambda tensors: None):
    """Write a copy of the model with another config or other weights."""
    folder = model.with_name("changed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    weights(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def sampled(folder, suffix="", prefix_of=None, penalty=1.0, **sampling):
    """Sample rows from a model; `suffix` is added to the prompts and not recorded, `prefix_of` is the model that has
    computed keys and values of the prompts, and `penalty` is on the tokens that were there before."""
    tokenizer, random = make_tokenizer(), np.random.default_rng(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    older = prefix_of and AutoModelForCausalLM.from_pretrained(prefix_of, dtype=torch.float32)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, **sampling)
    columns = {"tokens": [], "mask": [], "generation": []}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        read = [*prompt, *tokenizer.encode(suffix, add_special_tokens=False)]
        own, cache, start = [], None, 0
        if older:
            cache, start = DynamicCache(config=model.config), len(read) - 1
            older(torch.tensor([read[:start]]), past_key_values=cache, use_cache=True)
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([read[start:]]), past_key_values=cache, use_cache=cache is not None).logits
            start = len(read) if cache is not None else 0
            scores = logits[0, -1].double().numpy()
            scores[read] = np.where(scores[read] > 0, scores[read] / penalty, scores[read] * penalty)
            logprobs = processed_logprobs(scores, params)
            token = int(random.choice(len(logprobs), p=np.exp(logprobs) / np.exp(logprobs).sum()))
            read.append(token)
            own.append(float(logprobs[token]))
        columns["tokens"].append(np.array([*prompt, *read[-NUM_TOKENS:]], np.int32))
        columns["mask"].append(np.array([0] * len(prompt) + [1] * NUM_TOKENS, np.uint8))
        columns["generation"].append(np.array([0.0] * len(prompt) + own, np.float32))
    return MismatchRows(**{name: Ragged.from_rows(rows) for name, rows in columns.items()})


def found(tmp_path, model, rows, **case):
    """Return the gap and the causes, the first one first."""
    rows.write(tmp_path / "rows.npz")
    answers = list(examine(MismatchCase(str(model), str(tmp_path / "rows.npz"), **case).as_json()))
    gap = MismatchGap(**answers[0]["gap"])
    return gap, ranked(gap, [TriedChange(**each["attempt"]) for each in answers[1:]])


def drifted(tensors):
    random = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.03 * torch.randn(tensor.shape, generator=random)


def without_biases(tensors):
    for name, tensor in tensors.items():
        if name.endswith("v_proj.bias"):
            tensors[name] = torch.zeros_like(tensor)


def with_other_theta(config):
    config["rope_parameters"]["rope_theta"] = 40000.0


def test_a_side_that_samples_at_another_temperature_is_found(tmp_path, model):
    gap, (first, *_) = found(tmp_path, model, sampled(model, temperature=0.7))
    assert (first.cause, first.detail) == ("temperature", "temperature 0.7 instead of 1")
    assert first.closed > 0.999
    assert gap.num_tokens == len(QUESTIONS) * NUM_TOKENS


def test_a_policy_that_is_off_is_told_from_a_generator_that_is_off(tmp_path, model):
    rows = sampled(model)
    rows = replace(rows, policy=scored(changed(model, with_other_theta), rows))
    gap, (first, *_) = found(tmp_path, model, rows)
    assert gap.side == "policy"
    assert (first.cause, first.side) == ("rope_theta", "policy")


@torch.no_grad()
def scored(folder, rows):
    """Return the logprobs of rows by a model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for row in rows.tokens:
        ids = torch.from_numpy(row.astype(np.int64))
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(np.append(0.0, logprobs.gather(1, ids[1:, None])[:, 0].numpy()).astype(np.float32))
    return Ragged.from_rows(found)


@exhaustive
def test_missing_biases_are_found(tmp_path, model):
    _, (first, *_) = found(tmp_path, model, sampled(changed(model, weights=without_biases)))
    assert (first.cause, first.detail) == ("missing", "v_proj.bias is missing")
    assert first.closed > 0.99


@exhaustive
def test_a_repetition_penalty_of_one_side_is_found(tmp_path, model):
    _, (first, *_) = found(tmp_path, model, sampled(model, penalty=1.25))
    assert (first.cause, first.detail) == ("penalty", "repetition_penalty 1.25 instead of 1")
    assert first.closed > 0.99


def test_a_template_with_a_trailing_space_is_found(tmp_path, model):
    _, (first, *_) = found(tmp_path, model, sampled(model, suffix=" "))
    assert (first.cause, first.detail) == ("prompt", "a prompt with ' ' after it")


@exhaustive
def test_a_prefix_cache_that_is_kept_over_a_weight_change_is_found(tmp_path, model):
    older = changed(model, weights=drifted)
    before = (OlderWeights("the weights before step 4", str(older)),)
    _, (first, *_) = found(tmp_path, model, sampled(model, prefix_of=older), older=before)
    assert first.cause == "prefix_cache"
    assert first.closed > 0.99


def test_filtered_logprobs_are_those_of_the_definition():
    logits = 3 * np.random.default_rng(0).standard_normal((6, 40))
    settings = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    expected = np.stack([processed_logprobs(row, SamplingParams(max_new_tokens=1, **settings)) for row in logits])
    ids = torch.from_numpy(expected.argmax(1))
    got = filtered_logprobs(torch.from_numpy(logits).float(), ids, **settings)
    np.testing.assert_allclose(got.numpy(), expected.max(1), atol=1e-5)
