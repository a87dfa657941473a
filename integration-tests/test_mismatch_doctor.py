"""Faults planted one at a time into a real generator, and the cause that `rl doctor mismatch` finds first."""

import asyncio
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_algos.rollouts.mismatch import MismatchCase, MismatchGap, MismatchRows, OlderWeights, TriedChange, ranked
from rl_algos.tiny_model import make_tokenizer
from rl_algos.torch.mismatch_changes import examine
from rl_core.data.ragged import Ragged
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.testing.exhaustive import exhaustive
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig
from rl_vllm.config import VllmConfig
from rl_vllm.generator import VllmGenerator

pytestmark = exhaustive

ENGINES = {"hf": (HFGenerator, HFConfig), "vllm": (VllmGenerator, VllmConfig)}
QUESTIONS = [f"what is {first} and {first * 7 % 13}?" for first in range(20, 44)]
SAMPLING = SamplingParams(max_new_tokens=12)


def write_model(folder, *, has_experts=False, tied=False):
    """Write a tiny model with peaked predictions, norms that are not 1 and a tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if has_experts:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense, tied = write_model(folder / "dense"), write_model(folder / "tied", tied=True)
    older = changed(dense, weights=drifted, name="older")
    return {"dense": dense, "tied": tied, "experts": write_model(folder / "experts", has_experts=True), "older": older}


def changed(model, edit=lambda config: None, weights=lambda tensors: None, name="changed"):
    """Write a copy of a model with another config or other weights."""
    folder = model.with_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    weights(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def drifted(tensors):
    random = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.02 * torch.randn(tensor.shape, generator=random)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, models):
    """Return a function that samples with an engine. The engine of the dense model is kept until another is needed."""
    kind, settings = ENGINES[request.param]
    held = {}
    with asyncio.Runner() as runner:

        def close():
            for generator in held.values():
                runner.run(generator.close())
            held.clear()

        def generated(folder, suffix="", sampling=SAMPLING, alter=None):
            if folder not in held or alter is not None:
                # An engine of vLLM that is closed ends the process groups of all others in its process.
                close()
                model = ModelConfig(model_name=str(folder), max_total_sequence_length=128, precision="float32")
                held[folder] = kind(GenerationConfig(), settings(), model, Placement("cpu"))
                runner.run(held[folder].start())
            if alter is not None:
                alter(held[folder])
            rows = runner.run(sampled(held[folder], suffix, sampling))
            if folder != models["dense"] or alter is not None:
                close()
            return rows

        generated.name = request.param
        yield generated
        close()


async def sampled(generator, suffix, sampling):
    """Sample rows with a real engine; `suffix` is added to its prompts and not recorded."""
    tokenizer = make_tokenizer()
    prompts = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    added = tokenizer.encode(suffix, add_special_tokens=False)

    requests = [GenerationRequest(np.array([*each, *added], np.int32), sampling, 7) for each in prompts]
    completions = await asyncio.gather(*map(generator.generate, requests))
    columns = {"tokens": [], "mask": [], "generation": []}
    for prompt, completion in zip(prompts, completions, strict=True):
        none = np.zeros(len(prompt), np.float32)
        columns["tokens"].append(np.array([*prompt, *completion.token_ids], np.int32))
        columns["mask"].append(np.array([*none, *np.ones(len(completion.token_ids))], np.uint8))
        columns["generation"].append(np.concatenate([none, completion.logprobs], dtype=np.float32))
    return MismatchRows(**{name: Ragged.from_rows(rows) for name, rows in columns.items()})


def causes(tmp_path, model, rows, **case):
    """Return the gap and the causes, the first one first."""
    rows.write(tmp_path / "rows.npz")
    answers = list(examine(MismatchCase(str(model), str(tmp_path / "rows.npz"), **case).as_json()))
    gap = MismatchGap(**answers[0]["gap"])
    return gap, ranked(gap, [TriedChange(**each["attempt"]) for each in answers[1:] if "attempt" in each])


def theta(config):
    config["rope_parameters"]["rope_theta"] = 70000.0


def scaling(config):
    config["rope_parameters"] = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}


def head_in_bfloat16(generator):
    head = generator._engine.model.module.get_output_embeddings()

    def half(module, inputs, output):
        return torch.nn.functional.linear(inputs[0].bfloat16(), module.weight.bfloat16()).float()

    head.register_forward_hook(half)


def tie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def one_layer_of(older):
    def edit(tensors):
        held = load_file(older / "model.safetensors")
        tensors.update({name: held[name] for name in tensors if ".layers.1." in name})

    return edit


PLANTED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "filter of one",
    "trailing space",
    "stale adapter",
    "stale weights",
    "one stale layer",
    "rope theta",
    "rope scaling",
    "norm epsilon",
    "experts per token",
    "weights of experts",
    "tied head",
    "dtype of head",
)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_planted_fault_is_found_first(tmp_path, models, engine, fault):
    dense, experts, older = models["dense"], models["experts"], models["older"]
    model, served, how, case = dense, dense, {}, {}
    expected = {"filter of one": "top_p", "trailing space": "prompt"}.get(fault, fault.replace(" ", "_"))
    before = (OlderWeights("the weights before step 4", str(older)),)
    if fault in ("temperature", "top_p", "top_k", "min_p"):
        value = {"temperature": 0.75, "top_p": 0.87, "top_k": 9, "min_p": 0.05}[fault]
        how = {"sampling": replace(SAMPLING, **{fault: value})}
    elif fault == "filter of one":
        case = {"top_p": 0.85}
    elif fault == "trailing space":
        how = {"suffix": " "}
    elif fault in ("stale adapter", "stale weights"):
        served, case = older, {"older": before, "has_adapters": fault == "stale adapter"}
        expected = "adapter" if fault == "stale adapter" else "stale"
    elif fault == "one stale layer":
        served, case, expected = changed(dense, weights=one_layer_of(older)), {"older": before}, "stale_part"
    elif fault in ("rope theta", "rope scaling", "norm epsilon"):
        edits = {"rope theta": theta, "rope scaling": scaling, "norm epsilon": lambda c: c.update(rms_norm_eps=2e-3)}
        served = changed(dense, edits[fault])
    elif fault in ("experts per token", "weights of experts"):
        field = {"num_experts_per_tok": 3} if fault == "experts per token" else {"norm_topk_prob": False}
        model, served, expected = experts, changed(experts, lambda config: config.update(field)), "router"
    elif fault == "tied head":
        served = changed(dense, weights=tie)
    else:
        if engine.name == "vllm":
            pytest.skip("its head has the dtype of its model")
        how, expected = {"alter": head_in_bfloat16}, "head_dtype"
    gap, (first, *others) = causes(tmp_path, model, engine(served, **how), **case)
    assert first.cause == expected, (gap, first, others[:4])
    assert first.closed > 0.8


def test_engines_without_a_fault_have_no_gap(tmp_path, models, engine):
    gap, _ = causes(tmp_path, models["dense"], engine(models["dense"]))
    assert gap.mean < 1e-5
