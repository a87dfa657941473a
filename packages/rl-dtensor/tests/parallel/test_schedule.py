"""Pipeline schedules run every pass once, in an order that can be."""

import pytest

from rl_dtensor.training.pipeline import Action, forward_only, one_forward_one_backward

SHAPES = [(1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 6), (2, 2, 4), (4, 2, 8), (2, 3, 2)]


def run(orders, size, num_chunks, num_microbatches):
    """Advance each rank while what its next pass needs is there; how far each got, and most kept activations."""
    last = size * num_chunks - 1
    done, place, kept, most = set(), [0] * size, [0] * size, [0] * size
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                action = order[place[rank]]
                stage = action.chunk * size + rank
                forward, backward = ("forward", stage, action.microbatch), ("backward", stage, action.microbatch)
                if action.kind == "forward":
                    needed = stage == 0 or ("forward", stage - 1, action.microbatch) in done
                else:
                    needed = forward in done and (stage == last or ("backward", stage + 1, action.microbatch) in done)
                if not needed:
                    break
                done.add(forward if action.kind == "forward" else backward)
                kept[rank] += 1 if action.kind == "forward" else -1
                most[rank] = max(most[rank], kept[rank])
                place[rank] += 1
                moved = True
    return place, most, done


@pytest.mark.parametrize(("size", "num_chunks", "num_microbatches"), SHAPES)
def test_every_pass_runs_once_and_no_rank_waits_for_ever(size, num_chunks, num_microbatches):
    orders = [list(one_forward_one_backward(rank, size, num_chunks, num_microbatches)) for rank in range(size)]
    place, most, done = run(orders, size, num_chunks, num_microbatches)
    assert place == [len(order) for order in orders]
    assert len(done) == 2 * size * num_chunks * num_microbatches
    if num_chunks == 1:
        assert most == [min(size - rank, num_microbatches) for rank in range(size)]


@pytest.mark.parametrize(("size", "num_chunks", "num_microbatches"), SHAPES)
def test_forward_passes_come_in_the_same_order_on_every_rank(size, num_chunks, num_microbatches):
    orders = [list(forward_only(rank, size, num_chunks, num_microbatches)) for rank in range(size)]
    assert all(order == orders[0] for order in orders)
    trained = list(one_forward_one_backward(0, size, num_chunks, num_microbatches))
    assert [action for action in trained if action.kind == "forward"] == orders[0]
    assert set(orders[0]) == {
        Action("forward", chunk, index) for chunk in range(num_chunks) for index in range(num_microbatches)
    }
