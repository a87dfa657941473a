from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.rollouts.generation import SamplingParams
from rl_core.testing.torch.reference_model import processed_logprobs as definition
from rl_core.torch.generation.row import StopText, draw, processed_logprobs, uniforms

SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(deadline=None)
@given(st.lists(SAMPLING, min_size=1, max_size=5), st.integers(0, 1000))
def test_logprobs_are_those_of_the_definition_row_by_row(sampling: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(sampling), 60, generator=torch.Generator().manual_seed(seed)) * 3
    found = processed_logprobs(logits, sampling).double().numpy()
    expected = np.stack(
        [definition(row, params) for row, params in zip(logits.double().numpy(), sampling, strict=True)]
    )
    np.testing.assert_allclose(np.exp(found), np.exp(expected), atol=1e-6)


@settings(deadline=None)
@given(st.lists(SAMPLING, min_size=1, max_size=5), st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1 - 2**-53]))
def test_a_drawn_token_is_one_that_the_filters_keep(sampling: list[SamplingParams], seed: int, uniform: float) -> None:
    logits = torch.randn(len(sampling), 60, generator=torch.Generator().manual_seed(seed)) * 3
    tokens, logprobs = draw(logits, sampling, [uniform] * len(sampling))
    expected = processed_logprobs(logits, sampling)
    assert torch.isfinite(logprobs).all()
    assert torch.equal(logprobs, expected.gather(1, tokens[:, None])[:, 0])
    for row, params in enumerate(sampling):
        if params.temperature == 0:
            assert tokens[row] == logits[row].argmax()


def test_a_quantile_picks_the_token_at_which_the_distribution_passes_it() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    picked = [int(draw(logits, [SamplingParams(1)], [u])[0]) for u in (0.0, 0.05, 0.15, 0.45, 0.95)]
    assert picked == [0, 0, 1, 2, 3]


def test_uniforms_follow_from_the_seed_alone() -> None:
    assert uniforms(5, 3).tolist() == uniforms(5, 9)[:3].tolist()
    assert uniforms(5, 3).tolist() != uniforms(6, 3).tolist()
    assert uniforms(-1, 3).shape == (3,)


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")
"""Without the character that decoders write for a part of another one."""


@settings(deadline=None)
@given(st.text(CHARACTERS, max_size=12), st.text(CHARACTERS, min_size=1, max_size=3), st.text(CHARACTERS, max_size=6))
def test_a_stop_string_is_found_at_its_last_byte_and_never_in_the_prompt(before: str, stop: str, after: str) -> None:
    text = (before + stop + after).encode()
    stop_text = StopText(Bytes(), (stop,), np.frombuffer(stop.encode() * 2, np.uint8).astype(np.int32))
    ends = [end for end, token in enumerate(text, start=1) if stop_text.append(token)]
    assert ends[0] == text.index(stop.encode()) + len(stop.encode())
