"""Ranks join a mesh whole or not at all."""

import pytest


def test_a_rank_that_cannot_make_its_groups_leaves_those_it_has_and_may_join_again(ranks):
    assert ranks.run("mesh_cases:fail_half_way", [()] * 2) == [("too many open files", False)] * 2
    assert ranks.run("mesh_cases:join", [()] * 2) == [2, 2]


def test_what_dtensor_has_cached_serves_the_next_mesh_that_is_alike_and_no_other(ranks):
    def num_worked_out(expert_parallel_size, num_groups):
        found = ranks.run("mesh_cases:add_up", [(expert_parallel_size, num_groups)] * 2)
        assert [total for total, _ in found] == [3 * (1 + 2)] * 2
        return max(count for _, count in found)

    assert num_worked_out(1, 1) > 0
    assert num_worked_out(1, 1) == 0
    assert num_worked_out(2, 1) == 0, "experts have a mesh of their own"
    assert num_worked_out(1, 2) > 0, "groups have other names"
    assert num_worked_out(1, 2) == 0
    assert num_worked_out(1, 1) > 0


@pytest.mark.parametrize(
    ("node_size", "expected"),
    [
        (4, [[[0, 1, 2, 3]]] * 4),
        (3, [[[0, 1, 2, 3]]] * 4),  # nodes have different numbers of ranks
        (2, [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]),
        (1, [[[0, 1, 2, 3]]] * 4),
    ],
)
def test_tokens_reach_experts_on_other_nodes_by_one_rank_of_each(ranks, node_size, expected):
    assert ranks.run("mesh_cases:exchange_groups", [(node_size,)] * 4) == expected
