"""Sets of allowed tokens survive their way through a batch, and take few bytes."""

import numpy as np

from rl_core.token_filter import allowed_row, allowed_sets, packed_set

VOCAB = 151_936


def words(ids):
    is_allowed = np.zeros(VOCAB, bool)
    is_allowed[ids] = True
    return np.packbits(is_allowed, bitorder="little").view("<i4")


def test_rows_give_back_the_sets_of_their_tokens():
    rng = np.random.default_rng(0)
    one, many = np.array([5]), rng.permutation(VOCAB)[:100_000]
    sets = [b"", packed_set(words(one)), b"", packed_set(words(many)), packed_set(words(one))]
    rows = [allowed_row(sets), allowed_row([b""] * 3), allowed_row([packed_set(words(many))])]
    found, bits = allowed_sets(rows, [5, 3, 1])
    assert found.tolist() == [0, 1, 0, 2, 1, 0, 0, 0, 2], "a set of several rows is kept once"
    assert (bits[0] == 255).all()
    assert np.flatnonzero(np.unpackbits(bits[1], bitorder="little")).tolist() == [5]
    assert np.array_equal(np.flatnonzero(np.unpackbits(bits[2], bitorder="little")), np.sort(many))


def test_free_rows_take_no_bytes_and_nearly_empty_or_full_sets_few():
    assert not len(allowed_row([b""] * 100))
    assert allowed_sets([allowed_row([b""] * 4)], [4])[0].tolist() == [0] * 4
    most = np.delete(np.arange(VOCAB), [7, 90_000])
    assert max(len(packed_set(words(ids))) for ids in ([3, 500, 70_000], most)) < 300
    sets = [packed_set(words([3, 500])), packed_set(words(most))] * 500
    assert len(allowed_row(sets)) < 4 * 1000 + 600, "four bytes a token, and each set once"
