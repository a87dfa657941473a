"""Ranks that send weights agree a few times in a transfer, and a failure of one still ends it on all."""

import pytest
from publishing_cases import NUM_TENSORS, send

LOST = "WeightSyncError: a receiver is gone"


def test_the_number_of_agreements_is_the_logarithm_of_the_number_of_buckets(pool):
    found = pool.run(send, [(None, 0)] * 2)
    doublings = NUM_TENSORS.bit_length()  # after 1, 2, 4 ... 256 buckets
    assert found == [("", NUM_TENSORS, NUM_TENSORS, doublings + 2)] * 2


@pytest.mark.parametrize(("fails_at", "noticed_at"), [(0, 1), (5, 8), (290, NUM_TENSORS)])
def test_a_failure_ends_the_transfer_on_all_ranks_before_twice_as_much_is_brought_together(pool, fails_at, noticed_at):
    (error, *mine), (peers_error, *peers) = pool.run(send, [(0, fails_at)] * 2)
    assert (error, peers_error) == (LOST, f"PeerFailed: rank 0 failed: {LOST}")
    assert mine[:2] == [noticed_at, fails_at]
    assert peers[:2] == [noticed_at, noticed_at]
    assert mine[2] == peers[2]
