"""Plans of saves that are kept from one save to the next."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlanner

from rl_core.torch.training.save_plan import KeptSavePlanner


def save(folder, planner, **tensors):
    dcp.save(dict(tensors), checkpoint_id=folder, planner=planner, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def planned(monkeypatch):
    """How many whole plans were made."""
    made = []
    whole = KeptSavePlanner._create_global_plan
    monkeypatch.setattr(
        KeptSavePlanner, "_create_global_plan", lambda self, plans: made.append(len(plans)) or whole(self, plans)
    )
    return made


def test_a_second_save_of_the_same_tensors_needs_no_plan_and_has_its_own_values(tmp_path, planned):
    planner = KeptSavePlanner()
    for number in range(3):
        save(tmp_path / str(number), planner, weight=torch.randn(3, 2), moment=torch.randn(5))
    assert planned == [1]
    assert planner.is_kept


def test_other_tensors_are_planned_anew(tmp_path, planned):
    planner = KeptSavePlanner()
    save(tmp_path / "first", planner, weight=torch.randn(3, 2))
    save(tmp_path / "more", planner, weight=torch.randn(3, 2), moment=torch.randn(5))
    save(tmp_path / "larger", planner, weight=torch.randn(4, 2), moment=torch.randn(5))
    assert planned == [1, 1, 1]


def test_planners_share_nothing_and_leave_nothing(tmp_path, planned):
    planners = [KeptSavePlanner(), KeptSavePlanner()]
    for planner in planners:
        save(tmp_path / str(id(planner)), planner, weight=torch.randn(3, 2))
    assert planned == [1, 1]
    planners[0].forget()
    assert [planner.is_kept for planner in planners] == [False, True]
    planners[1].forget()
    kept = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    keys = {planner._cached_plans_key for planner in planners}
    assert not any(keys & plans.keys() for plans in kept)
