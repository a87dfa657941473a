"""The rest of an interrupted completion is read as the uninterrupted one would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.testing.torch.reference_model import write_reference_model
from rl_vllm.engine.arguments import sampling_params
from rl_vllm.patches.continued_text import continue_texts, continued_detokenizer

STOPS = ["never", "what is", "é", "is 4", "1+", " +"]
PIECES = ["what", " is", " 4", "1", "+", " + ", "é", "ever", "n", "日本", "<|im_end|>", " ?"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder: Path = write_reference_model(tmp_path_factory.mktemp("model"), seed=1)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def request_of(prompt: list[int], num_sampled: int = 0, *, stop: list[str]) -> EngineCoreRequest:
    params = VllmSamplingParams(
        stop=stop, skip_special_tokens=False, extra_args={"num_sampled": num_sampled} if num_sampled else None
    )
    return EngineCoreRequest(
        request_id="7",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="7",
    )


def found_stops(detokenizer: IncrementalDetokenizer, tokens: list[int]) -> list[str | None]:
    """What each token says, up to the first stop string."""
    found: list[str | None] = []
    for token in tokens:
        found.append(detokenizer.update([token], False))
        if found[-1]:
            break
    return found


@pytest.mark.parametrize("kind", [FastIncrementalDetokenizer, SlowIncrementalDetokenizer])
@given(st.lists(st.sampled_from(PIECES), min_size=2, max_size=8), st.data())
def test_a_stop_string_is_found_wherever_the_interruption_was(
    tokenizer: PreTrainedTokenizerFast, kind: Any, pieces: list[str], data: st.DataObject
) -> None:
    prompt = tokenizer.encode("what is 4 ?", add_special_tokens=False)
    sampled = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    stop = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        # the slow one is for tokenizers of other libraries, but reads this one too
        patch.setattr(IncrementalDetokenizer, "from_new_request", classmethod(lambda cls, t, request: kind(t, request)))
        whole = found_stops(IncrementalDetokenizer.from_new_request(tokenizer, request_of(prompt, stop=stop)), sampled)
        cut = data.draw(st.integers(1, max(1, len(whole) - 1)))
        if cut == len(whole):
            return
        request = request_of([*prompt, *sampled[:cut]], cut, stop=stop)
        rest = continued_detokenizer(tokenizer, request, cut)
        assert rest.num_output_tokens() == 0
        assert found_stops(rest, sampled[cut:]) == whole[cut:]
    assert rest.output_token_ids == sampled[cut : len(whole)]
    assert request.prompt_token_ids == [*prompt, *sampled[:cut]]


@pytest.mark.parametrize("kind", [FastIncrementalDetokenizer, SlowIncrementalDetokenizer])
def test_vllm_looks_for_stop_strings_only_in_the_tokens_of_a_request(
    tokenizer: PreTrainedTokenizerFast, kind: Any
) -> None:
    """Once this fails, requests need not be continued any longer."""
    *before, last = tokenizer.encode("what is", add_special_tokens=False)
    whole = kind(tokenizer, request_of(tokenizer.encode("4 ? "), stop=["what is"]))
    assert found_stops(whole, [*before, last])[-1] == "what is"
    rest = kind(tokenizer, request_of([*tokenizer.encode("4 ? "), *before], stop=["what is"]))
    assert found_stops(rest, [last]) == [None]


@pytest.mark.parametrize("continues", [True, False])
def test_only_requests_for_the_rest_of_a_completion_are_continued(
    tokenizer: PreTrainedTokenizerFast, *, continues: bool
) -> None:
    processor = OutputProcessor(tokenizer, log_stats=False)
    continue_texts(processor)
    *before, last = tokenizer.encode("what is", add_special_tokens=False)
    assert before
    row = [*tokenizer.encode("4 ? ", add_special_tokens=False), *before]
    processor.add_request(request_of(row, len(before) if continues else 0, stop=["what is"]), None)
    detokenizer = processor.request_states["7"].detokenizer
    assert detokenizer is not None
    assert found_stops(detokenizer, [last]) == ["what is" if continues else None]


def test_the_rest_of_a_completion_has_a_seed_of_its_own() -> None:
    prompt = GenerationRequest(token_ids=None, sampling=SamplingParams(4, stop_strings=("x",)), seed=2**70 + 5)  # type: ignore[arg-type]
    first = sampling_params(prompt, max_tokens=4)
    assert (first.seed, first.extra_args) == ((2**70 + 5) % 2**63, None)
    rests = [GenerationRequest(prompt.token_ids, prompt.sampling, prompt.seed, num) for num in (1, 2, 1)]
    params = [sampling_params(rest, max_tokens=4) for rest in rests]
    seeds = [each.seed for each in params]
    assert seeds[0] == seeds[2]
    assert len({first.seed, *seeds}) == 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert [each.extra_args for each in params] == [{"num_sampled": count} for count in (1, 2, 1)]
