"""Fenced blocks of responses."""

from rl_envs.fences import fenced_blocks


def test_a_fence_behind_a_mark_of_a_list_begins_a_block_and_one_behind_text_does_not() -> None:
    assert list(fenced_blocks("- ~~~py\nx")) == [("py", "x\n")]
    assert list(fenced_blocks("- 3~~~py\nx")) == []
