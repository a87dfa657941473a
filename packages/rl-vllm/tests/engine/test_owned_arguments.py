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
def test_speculative_decoding_is_set_by_its_own_section(arguments):
    with pytest.raises(ValidationError, match=r"set here.*Set `vllm_cfg\.speculation`"):
        VllmConfig(vllm_kwargs=arguments)
