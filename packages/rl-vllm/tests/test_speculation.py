"""Speculative decoding gives the tokens and logprobs of the model alone, whatever its drafter proposes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from spoilable_generator import SpoilableGenerator
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import RequestRefused
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams, ThinkingBudget
from rl_core.rollouts.grammar import TokenGrammars
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.rollout import Completion, Thinking
from rl_core.rollouts.speculation import SpeculationCounts
from rl_core.rollouts.thinking import generate_turn
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.generator import GREEDY_JSON, OpenThoughts, are_allowed
from rl_core.testing.torch.reference_model import processed_logprobs, write_reference_model
from rl_core.testing.torch.weight_sender import SenderProcess
from rl_core.testing.weights import Bench, model_config, prompt
from rl_vllm import VllmConfig
from rl_vllm.config import SpeculationConfig

AWAITING = Placement("cpu", awaits_weights=True)
"""As in a run: the engine has no weights at first, and only its drafter is loaded from files."""

TOLERANCE = 1e-4
BINS = 25


def write_drafter(folder: Path, target: Path) -> Path:
    """A model near another, so that it proposes tokens that are accepted and tokens that are not."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.03)
    model.save_pretrained(folder)
    return folder


def write_eagle_head(folder: Path, target: Path) -> Path:
    """An EAGLE-3 head that knows which token follows which: its attention finds the last token again, and its own
    output layer maps that token's embedding to what the model predicts after it."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = model.config
    width, vocabulary = config.hidden_size, config.vocab_size
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        normalised = embedding / (embedding.square().mean(1, keepdim=True) + config.rms_norm_eps).sqrt()
        following = model(torch.arange(vocabulary)[:, None]).logits[:, 0]
        head = torch.linalg.lstsq(normalised, following).solution.T.contiguous()
    ones, zeros, eye = torch.ones(width), torch.zeros(width, width), torch.eye(width)
    of_embedding = torch.cat([eye, zeros], 1)
    layer = {
        "input_layernorm.weight": ones,
        "hidden_norm.weight": ones,
        "post_attention_layernorm.weight": ones,
        "self_attn.q_proj.weight": 30 * of_embedding,
        "self_attn.k_proj.weight": of_embedding,
        "self_attn.v_proj.weight": of_embedding,
        "self_attn.o_proj.weight": eye,
        "mlp.gate_proj.weight": zeros,
        "mlp.up_proj.weight": zeros,
        "mlp.down_proj.weight": zeros,
    }
    weights = {f"midlayer.{name}": weight.clone() for name, weight in layer.items()}
    weights |= {"fc.weight": torch.zeros(width, 2 * width), "norm.weight": ones.clone(), "lm_head.weight": head}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    (folder / "config.json").write_text(json.dumps(written))
    return folder


OF_FAMILY = {
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 32},
    # the only widths that vLLM has latent attention for on a CPU
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}


def write_mixture(folder: Path, *, seed: int, family: str = "glm4_moe") -> Path:
    """A model without its layer for multi-token prediction, and the tokenizer of `write_reference_model`."""
    write_reference_model(folder, seed=seed)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=2,
        initializer_range=0.15,
        **OF_FAMILY[family],
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def write_mtp_layer(folder: Path, target: Path) -> Path:
    """A layer for multi-token prediction that knows which token follows which: its first map takes a token's embedding
    to near what the model predicts after it from, and its decoder layer adds little."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = model.config
    width, number = config.hidden_size, config.num_hidden_layers
    weights = {name: 0.01 * tensor for name, tensor in load_file(target / "model.safetensors").items()}
    last = f"model.layers.{number - 1}."
    layer = {name.removeprefix(last): tensor for name, tensor in weights.items() if name.startswith(last)}
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        normed = embedding / (embedding.square().mean(1, keepdim=True) + config.rms_norm_eps).sqrt()
        ids = torch.arange(config.vocab_size)[:, None]
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][:, 0]
        layer["eh_proj.weight"] = torch.cat(
            [torch.linalg.lstsq(normed, hidden).solution.T, torch.zeros(width, width)], 1
        )
    ones = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    layer |= {f"{name}.weight": torch.ones(width) for name in ones}
    layer["embed_tokens.weight"] = embedding.detach()
    layer["shared_head.head.weight"] = model.get_output_embeddings().weight.detach()
    folder.mkdir(exist_ok=True)
    save_file({f"model.layers.{number}.{name}": each.clone() for name, each in layer.items()}, folder / WEIGHTS)
    written = {**config.to_dict(), "architectures": [type(model).__name__], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


WEIGHTS = "model.safetensors"


def chance_of_uniform(drawn: np.ndarray) -> float:
    """Chance that equally likely bins are as uneven as these counts or more: Pearson's chi-squared test."""
    expected = drawn.sum() / len(drawn)
    statistic = ((drawn - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(drawn) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, torch.tensor(statistic, dtype=torch.float64) / 2))


DRAFTERS = {"draft_model": write_drafter, "eagle3": write_eagle_head, "mtp": write_mtp_layer}


class SpeculationBench(Bench):
    """A started generator with the models it is sent, and the counts of its drafts."""

    fewest_accepted = 5
    """Drafts that are accepted at least in a test of sampled tokens."""

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*map(self.generator.generate, requests))

        return self.runner.run(together())

    def counts(self) -> SpeculationCounts:
        found = SpeculationCounts.of_health(self.runner.run(self.generator.health()))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def _interpreted() -> Iterator[None]:
    """Look up n-grams in Python: compiling it takes longer than all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_DISABLE_JIT", "1")
        yield


@pytest.fixture(
    scope="module", params=partly_exhaustive(["ngram", "draft_model", "eagle3", "mtp"], always=["draft_model"])
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _interpreted: None
) -> Iterator[SpeculationBench]:
    write_model = write_mixture if request.param == "mtp" else write_reference_model
    target = write_model(tmp_path_factory.mktemp("target"), seed=0)
    if request.param == "ngram":
        speculation = SpeculationConfig(method="ngram", prompt_lookup_min=1)
    else:
        drafter = DRAFTERS[request.param](tmp_path_factory.mktemp("drafter"), target)
        speculation = SpeculationConfig(method=request.param, model=str(drafter))
    backend = VllmConfig(kv_cache_gib=0.25, speculation=speculation)
    generator = SpoilableGenerator(GenerationConfig(), backend, model_config(target), AWAITING)
    other = write_model(tmp_path_factory.mktemp("other"), seed=1)
    sender = SenderProcess()
    bench = SpeculationBench(generator, target, other, sender)
    if request.param in ("eagle3", "mtp"):
        # the head only knows which token follows which
        bench.fewest_accepted = 1
    bench.senders["drafter"] = SenderProcess()
    bench.runner.run(bench.sync(target))
    try:
        yield bench
    finally:
        bench.runner.run(generator.close())
        bench.runner.close()
        for each in bench.senders.values():
            each.close()


def test_greedy_tokens_are_those_of_the_model_alone(bench: SpeculationBench) -> None:
    requests = [GenerationRequest(prompt(length), SamplingParams(24, temperature=0), 0) for length in (7, 40)]
    for request, completion in zip(requests, bench.generate(requests), strict=True):
        assert completion.token_ids.tolist() == bench.reference.greedy(request.token_ids, 24)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(16, temperature=0.7), SamplingParams(16, top_k=20, top_p=0.9)], ids=str
)
def test_tokens_are_drawn_from_the_model_and_have_its_logprobs(
    bench: SpeculationBench, sampling: SamplingParams
) -> None:
    before = bench.counts()
    # what the model continues with is in the row, so that n-grams are found and accepted
    tokens = np.array([*prompt(9), *bench.reference.greedy(prompt(9), 80), *prompt(9)], np.int32)
    requests = [GenerationRequest(tokens, sampling, seed) for seed in range(64)]
    uniform, random = [], np.random.default_rng(0)
    for completion in bench.generate(requests):
        logits = bench.reference.logits([*tokens, *completion.token_ids])[len(tokens) - 1 : -1]
        for row, token, logprob in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            expected = processed_logprobs(row, sampling)
            assert abs(logprob - expected[token]) < TOLERANCE
            likely = np.exp(expected)
            # the place of the token's share among those of the tokens from the most likely one
            uniform.append(likely[likely > likely[token]].sum() + random.random() * likely[token])
    drawn, _ = np.histogram(uniform, BINS, (0.0, 1.0))
    assert chance_of_uniform(drawn) > 1e-4
    counts = bench.counts().since(before)
    # accepted drafts and refused ones are among what was compared
    assert counts.num_accepted[0] >= bench.fewest_accepted
    assert counts.num_drafts - counts.num_accepted[0] >= 20


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(bench: SpeculationBench) -> None:
    requests = [GenerationRequest(np.tile(prompt(9, seed), 2), SamplingParams(24), seed) for seed in range(8)]
    together = bench.generate(requests)
    for index in (0, 5):
        assert bench.generate([requests[index]])[0].token_ids.tolist() == together[index].token_ids.tolist()


def test_every_token_and_draft_is_counted(bench: SpeculationBench) -> None:
    before = bench.counts()
    num_tokens = sum(
        len(each.token_ids)
        for each in bench.generate([GenerationRequest(prompt(9, i), SamplingParams(40), i) for i in range(8)])
    )
    counts = bench.counts().since(before)
    assert counts.num_tokens == num_tokens == 320
    assert counts.num_draft_tokens <= 3 * counts.num_drafts
    assert list(counts.num_accepted) == sorted(counts.num_accepted, reverse=True)
    # a completion that ends within a draft has an accepted token, and not one more, in its last step
    assert num_tokens <= counts.num_steps + sum(counts.num_accepted) <= num_tokens + 8


def test_what_is_drafted_past_the_end_of_a_completion_is_not_counted(bench: SpeculationBench) -> None:
    before = bench.counts()
    requests = [GenerationRequest(prompt(9, seed), SamplingParams(2, temperature=0), seed) for seed in range(8)]
    assert all(len(each.token_ids) == 2 for each in bench.generate(requests))
    counts = bench.counts().since(before)
    # the prompt gives the first token, so one draft of three is verified for the second, which ends the completion
    assert counts.num_accepted[1:] == (0,) * (len(counts.num_accepted) - 1)
    assert sum(counts.num_accepted) <= counts.num_draft_tokens <= 3 * 8 - 2 * sum(counts.num_accepted)


def test_tokens_after_thoughts_that_were_closed_have_the_logprobs_of_the_model(bench: SpeculationBench) -> None:
    sampling = SamplingParams(40, temperature=0.8, top_k=20)
    limited = replace(sampling, thinking=ThinkingBudget(13))
    requests = [GenerationRequest(prompt(5 + seed), limited, seed) for seed in range(6)]

    async def together() -> list[Completion]:
        turns = [generate_turn(bench.generator.generate, request, OpenThoughts()) for request in requests]
        return await asyncio.gather(*turns)

    for request, completion in zip(requests, bench.runner.run(together()), strict=True):
        assert (len(completion.token_ids), completion.thinking) == (40, Thinking(13, 3, is_cut=True))
        expected = bench.reference.completion_logprobs(request.token_ids, completion.token_ids, sampling)
        is_sampled = completion.sampled_mask > 0
        assert abs(completion.logprobs - expected)[is_sampled].max() < TOLERANCE


def test_a_grammar_limits_drafts_and_logprobs_are_over_the_allowed_tokens(bench: SpeculationBench) -> None:
    end = bench.reference.tokenizer.eos_token_id
    sampling = replace(GREEDY_JSON, temperature=0.8, stop_token_ids=(end,))
    requests = [GenerationRequest(prompt(5 + seed), sampling, seed) for seed in range(8)]
    grammars = TokenGrammars(bench.reference.tokenizer)
    for request, completion in zip(requests, bench.generate(requests), strict=True):
        tokens = completion.token_ids
        is_allowed = are_allowed(grammars.sets(sampling.grammar, sampling.stop_token_ids, tokens))
        expected = bench.reference.nearest_logprobs(
            completion.logprobs, request.token_ids, tokens, sampling, is_allowed
        )
        assert abs(completion.logprobs - expected).max() < TOLERANCE
        assert tokens[-1] == end


def test_a_request_with_min_p_is_refused(bench: SpeculationBench) -> None:
    with pytest.raises(RequestRefused, match="min_p"):
        bench.generate([GenerationRequest(prompt(4), SamplingParams(4, min_p=0.1), 0)])


@pytest.mark.parametrize("num_updates", partly_exhaustive([6, 50], always=[6]))
def test_updates_in_flight_leave_every_token_with_the_logprob_of_its_weights(
    bench: SpeculationBench, num_updates: int
) -> None:
    folders: dict[int, Path] = {}
    sampling = SamplingParams(min(240, 24 * num_updates))
    requests = [GenerationRequest(prompt(3 + seed), sampling, seed) for seed in range(3)]

    async def updating() -> list[Completion]:
        folders[await bench.sync(bench.first)] = bench.first
        tasks = [asyncio.create_task(generate_whole(bench.generator.generate, request)) for request in requests]
        for update in range(num_updates):
            sampled = (await bench.generator.health())["num_sampled"]
            while not all(task.done() for task in tasks) and (
                (await bench.generator.health())["num_sampled"] < sampled + 12
            ):
                await asyncio.sleep(0.002)
            folder = bench.first if update % 2 else bench.second
            folders[await bench.sync(folder, mode="interrupt")] = folder
        return await asyncio.gather(*tasks)

    num_spans = 0
    for request, completion in zip(requests, bench.runner.run(updating()), strict=True):
        start = 0
        for span in completion.spans:
            tokens = np.concatenate([request.token_ids, completion.token_ids[: start + span.num_tokens]])
            logits = bench.references[folders[span.version]].logits(tokens.tolist())
            for place in range(start, start + span.num_tokens):
                expected = processed_logprobs(logits[len(request.token_ids) + place - 1], request.sampling)
                assert abs(completion.logprobs[place] - expected[completion.token_ids[place]]) < TOLERANCE
            start += span.num_tokens
        num_spans += len(completion.spans)
    assert num_spans >= num_updates
    bench.runner.run(bench.sync(bench.first))


@pytest.mark.parametrize("bench", ["ngram", "draft_model"], indirect=True)
def test_a_drafter_that_is_left_behind_costs_acceptance_alone(bench: SpeculationBench) -> None:
    tokens = np.array([*prompt(9), *bench.reference.greedy(prompt(9), 80), *prompt(9)], np.int32)
    request = GenerationRequest(tokens, SamplingParams(48, temperature=0), 0)

    def acceptance() -> float:
        before = bench.counts()
        (completion,) = bench.generate([request])
        reference = bench.references[bench.second if is_stale else bench.first]
        assert completion.token_ids.tolist() == reference.greedy(tokens, 48)
        counts = bench.counts().since(before)
        return sum(counts.num_accepted) / max(counts.num_draft_tokens, 1)

    is_stale = False
    near = acceptance()
    bench.runner.run(bench.sync(bench.second))
    is_stale = True
    far = acceptance()
    bench.runner.run(bench.sync(bench.first))
    assert far < near


@pytest.mark.parametrize("bench", ["draft_model"], indirect=True)
def test_a_drafter_that_is_sent_the_weights_of_the_model_drafts_what_it_samples(bench: SpeculationBench) -> None:
    request = GenerationRequest(prompt(9), SamplingParams(48, temperature=0), 0)

    def acceptance() -> float:
        before = bench.counts()
        (completion,) = bench.generate([request])
        assert completion.token_ids.tolist() == bench.references[served].greedy(prompt(9), 48)
        counts = bench.counts().since(before)
        return sum(counts.num_accepted) / counts.num_draft_tokens

    served = bench.second
    bench.runner.run(bench.sync(bench.second))
    stale = acceptance()
    bench.runner.run(bench.sync(bench.second, target="drafter"))
    assert stale < acceptance() == 1
    served = bench.first
    for target in ("policy", "drafter"):
        bench.runner.run(bench.sync(bench.first, target=target))
    assert acceptance() == 1


@pytest.mark.parametrize("kind", partly_exhaustive(["own", "shared", "reduced", *OF_FAMILY], always=["own"]))
def test_a_head_that_is_sent_drafts_with_its_new_weights(kind: str, tmp_path: Path) -> None:
    method, write_model = "eagle3", write_reference_model
    if kind in OF_FAMILY:
        method, write_model = "mtp", partial(write_mixture, family=kind)
    target, other = (write_model(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second")))
    stale, trained = (DRAFTERS[method](tmp_path / f"head of {folder.name}", folder) for folder in (target, other))
    for folder in (stale, trained):
        if method == "mtp":
            remove_layers_of_the_model(folder)
        else:
            change_output_layer(folder, kind)
    backend = VllmConfig(kv_cache_gib=0.25, speculation=SpeculationConfig(method=method, model=str(stale)))
    generator = SpoilableGenerator(GenerationConfig(), backend, model_config(target), AWAITING)
    bench = SpeculationBench(generator, target, other, SenderProcess())
    bench.senders["drafter"] = SenderProcess()
    # the head finds the token that comes after its last one, and knows which follows
    requests = [
        GenerationRequest(np.array([token, *prompt(5)], np.int32), SamplingParams(24, temperature=0), 0)
        for token in range(2, 34)
    ]

    def acceptance() -> float:
        before = bench.counts()
        for request, completion in zip(requests, bench.generate(requests), strict=True):
            assert completion.token_ids.tolist() == bench.references[other].greedy(request.token_ids, 24)
        counts = bench.counts().since(before)
        return counts.num_accepted[0] / counts.num_drafts

    try:
        bench.runner.run(bench.sync(other))
        before = acceptance()
        bench.runner.run(bench.sync(trained, target="drafter"))
        after = acceptance()
        if kind != "shared":  # which drafts with the layer of the model already
            assert after > before
        bench.runner.run(bench.sync(other))
        bench.runner.run(bench.sync(trained, target="drafter"))
        assert acceptance() == after
    finally:
        bench.runner.run(generator.close())
        bench.runner.close()
        for each in bench.senders.values():
            each.close()


def remove_layers_of_the_model(folder: Path) -> None:
    """Leave what a trainer sends and exports of a layer for multi-token prediction."""
    weights = load_file(folder / WEIGHTS)
    own = {name: each for name, each in weights.items() if not name.endswith(("embed_tokens.weight", "head.weight"))}
    save_file(own, folder / WEIGHTS)


def change_output_layer(folder: Path, kind: str) -> None:
    """Remove the output layer of a head, or reduce it to every other token of the vocabulary."""
    weights, path = load_file(folder / "model.safetensors"), folder / "config.json"
    head = weights.pop("lm_head.weight")
    config = json.loads(path.read_text())
    if kind == "own":
        weights["lm_head.weight"] = head
    elif kind == "reduced":
        ids = torch.arange(0, len(head), 2)
        weights |= {"lm_head.weight": head[ids].clone(), "d2t": ids - torch.arange(len(ids))}
        config["draft_vocab_size"] = len(ids)
    save_file(weights, folder / "model.safetensors")
    path.write_text(json.dumps(config))
