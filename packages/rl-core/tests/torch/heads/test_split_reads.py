"""Reads from parts of a vocabulary and of rows are those of whole ones, in float64."""

import pytest
import split_cases
from split_cases import Case

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
}


@pytest.mark.parametrize("name", CASES)
def test_a_split_vocabulary_reads_as_a_whole_one(pool, name):
    for errors in pool.run(split_cases.vocabulary, [(CASES[name],)] * 2):
        assert set(errors) >= {"logprobs", "entropy", "logprobs_at", "grad_hidden"}
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("shares_vocabulary", [False, True])
def test_split_rows_read_as_whole_ones(pool, shares_vocabulary):
    for errors in pool.run(split_cases.rows, [(shares_vocabulary,)] * 2):
        assert max(errors.values()) < 1e-12, errors
