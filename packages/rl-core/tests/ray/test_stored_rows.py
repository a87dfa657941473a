"""Groups of which only the reports have come back."""

from __future__ import annotations

import numpy as np

from rl_core.errors import FailureOrigin
from rl_core.ray.rows import stored_groups
from rl_core.rollouts.group import GroupReport, RolloutReports
from rl_core.rollouts.rollout import Prompt, Rollout, WeightSpan


def test_the_rows_of_a_group_are_those_of_all_segments_of_its_rollouts() -> None:
    prompts = [Prompt(f"p{number}", (), np.arange(2, dtype=np.int32), "game") for number in range(2)]
    split = Rollout(
        prompt_id="p0",
        tokens=np.arange(9, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=np.uint8),
        generation_logprobs=np.zeros(9, dtype=np.float32),
        spans=(WeightSpan(0, 4),),
        turns=(),
        rewards={"reward": 1.0},
        stop_reason="stop",
        segments=(4, 5),
    )
    own = [[split, Rollout.failed(prompts[0], "x")], [Rollout.failed(prompts[1], "x")]]
    reports = [
        GroupReport(RolloutReports.of(prompt.id, rollouts), ("tokens", "loss_mask"), ("record",))
        for prompt, rollouts in zip(prompts, own, strict=True)
    ]
    origin = FailureOrigin("rollout", 0, "node", "rolling out")
    first, second = stored_groups(prompts, reports, object(), object(), origin)  # type: ignore[arg-type]
    assert first.columns.lengths.tolist() == [4, 5, 2]
    assert second.columns.lengths.tolist() == [2]
    assert second.columns.columns["tokens"].rows.row.tolist() == [3]  # type: ignore[union-attr]
    assert first.records.columns["record"].rows.row.tolist() == [0, 2]  # type: ignore[union-attr]
