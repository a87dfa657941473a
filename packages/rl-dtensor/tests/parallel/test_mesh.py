"""Ranks join a mesh whole or not at all."""

import pytest


def test_a_rank_that_cannot_make_its_groups_leaves_those_it_has_and_may_join_again(ranks):
    assert ranks.run("mesh_cases:fail_half_way", [()] * 2) == [("too many open files", False)] * 2
    assert ranks.run("mesh_cases:join", [()] * 2) == [2, 2]


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
