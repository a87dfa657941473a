"""Reads from parts of a vocabulary and of rows are those of whole ones, in float64."""

import pytest
import split_cases
from split_cases import Case

from rl_core.token_filter import TokenFilter
from rl_core.torch.heads.logprobs import LogitTransform

CASES = {
    "padded head": Case(),
    "an even split": Case(vocab=12),
    "a rank without rows": Case(vocab=6, rows_per_rank=6),
    "softcap": Case(transform=LogitTransform(scale=2.0, softcap=1.5)),
    "k of more than one rank's rows": Case(k=9),
    "k of the first ids": Case(below=8),
    "k of one rank's ids": Case(below=5),
    "no topk, no bias": Case(k=0, has_bias=False),
    "one chunk": Case(chunk_size=100),
    "the caller sums the gradient": Case(sums_hidden_grad=False),
    "top-k": Case(k=0, token_filter=TokenFilter(top_k=4)),
    "top-p": Case(k=0, token_filter=TokenFilter(top_p=0.7)),
    "min-p, and a rank without rows": Case(k=0, vocab=6, rows_per_rank=6, token_filter=TokenFilter(min_p=0.1)),
    "all filters": Case(
        k=0, transform=LogitTransform(scale=2.0, softcap=1.5), token_filter=TokenFilter(top_k=9, top_p=0.9, min_p=0.01)
    ),
    "allowed tokens": Case(k=0, token_filter=TokenFilter(allowed=True)),
    "allowed tokens, and a rank without rows": Case(
        k=0, vocab=6, rows_per_rank=6, token_filter=TokenFilter(top_p=0.9, allowed=True)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_split_vocabulary_reads_as_a_whole_one(pool, name):
    for errors in pool.run(split_cases.vocabulary, [(CASES[name],)] * 2):
        assert set(errors) >= {"logprobs", "entropy", "collision", "grad_hidden"}
        assert ("logprobs_at" in errors) == (CASES[name].token_filter is None)
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("shares_vocabulary", [False, True])
def test_split_rows_read_as_whole_ones(pool, shares_vocabulary):
    for errors in pool.run(split_cases.rows, [(shares_vocabulary,)] * 2):
        assert max(errors.values()) < 1e-12, errors
