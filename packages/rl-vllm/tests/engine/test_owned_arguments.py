"""Engine arguments that are refused give a reason that is true of every value."""

import pytest
from pydantic import ValidationError

from rl_vllm.config import VllmConfig


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config": {"model": "small", "num_speculative_tokens": 4}},
        {"spec_method": "ngram"},
    ],
)
def test_speculative_decoding_is_refused_whether_or_not_there_is_a_draft_model(arguments):
    with pytest.raises(ValidationError, match="speculative decoding, with a draft model or n-grams, is not supported"):
        VllmConfig(vllm_kwargs=arguments)
