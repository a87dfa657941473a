"""Ranks join a mesh whole or not at all."""


def test_a_rank_that_cannot_make_its_groups_leaves_those_it_has_and_may_join_again(ranks):
    assert ranks.run("mesh_cases:fail_half_way", [()] * 2) == [("too many open files", False)] * 2
    assert ranks.run("mesh_cases:join", [()] * 2) == [2, 2]
