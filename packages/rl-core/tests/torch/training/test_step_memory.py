"""A training step is planned by the memory of the rank that has the least, and compared with its peak."""

import logging

import pytest
import torch
import torch.distributed as dist
from memory_cases import GB, Step

from rl_core.devices import CPU, REHEARSAL, DeviceMemory
from rl_core.torch.training.memory import COMMUNICATORS, GAPS, MeasuredRank, PhasePeaks, planned_step, table
from rl_core.torch.training.recompute import ActivationMemory, LayerActivations, RecomputePlan

CARD = DeviceMemory(total=80 * GB, free=60 * GB, own=10 * GB, peak=0)
SLEEPER = CARD._replace(free=50 * GB)
"""On this card an engine holds 10 GB more in its sleep."""


def run(pool, *cases):
    """The room of the plan, and the log of rank 0."""
    (rooms, messages), (other_rooms, other_messages) = pool.run("memory_cases:step", [(case,) for case in cases])
    assert rooms == other_rooms
    assert not other_messages
    return rooms, messages


def test_the_rank_with_the_least_memory_decides(pool):
    rooms, messages = run(pool, Step(CARD, 12 * GB), Step(SLEEPER, 13 * GB))
    available = 60 * GB
    assert rooms == [available - round(GAPS * available) - COMMUNICATORS]
    assert [level for level, _ in messages] == [logging.INFO, logging.INFO]
    assert messages[0][1].splitlines() == [
        "recompute=auto: no layer recomputed. Memory of rank 1, which has the least available, in GB:",
        "  device                                         80.00",
        "  held by others, contexts and communicators    -20.00",
        "  weights                                        -4.00",
        "  activations                                    -6.00",
        "  gaps between tensors                           -6.00",
        "  communicators that connect later               -1.07",
        "  left                                           42.93",
    ]
    assert messages[1][1] == (
        "the tensors of the first training step took up to 13.0 GB (rank 1), 10.0 GB were planned, and 47.0 GB were "
        "left"
    )


def test_a_plan_that_does_not_fit_is_reported_before_the_step_with_a_remedy(pool):
    _, messages = run(pool, Step(CARD, 12 * GB, needed=70 * GB), Step(CARD, 12 * GB, needed=70 * GB))
    level, text = messages[1]
    assert level == logging.WARNING
    assert text.startswith("training steps need 8.1 GB more than rank 0 has available")
    assert "train_mb_tokens" in text


@pytest.mark.parametrize(("peak", "connected", "warns"), [(62, 0, False), (64, 0, True), (62, 2, True)])
def test_a_step_that_takes_the_reserve_warns_once(pool, peak, connected, warns):
    """Rank 1 is the fullest; what its communicators have taken is left to nobody."""
    _, messages = run(pool, Step(CARD, GB), Step(CARD, peak * GB, connected * GB))
    assert [level == logging.WARNING for level, _ in messages] == [False, warns]
    assert f"took up to {peak}.0 GB (rank 1)" in messages[1][1]
    assert ("recompute=full" in messages[1][1]) == warns


@pytest.mark.parametrize("device", [CPU, REHEARSAL])
def test_a_device_without_its_own_memory_has_no_plan(device):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with planned_step(lambda room: pytest.fail("nothing was measured"), device, dist.group.WORLD):
            pass
    finally:
        dist.destroy_process_group()


def test_the_lines_of_a_table_add_up():
    parts = {"weights": 7 * GB, "logits": GB // 2}
    found = table(MeasuredRank(3, SLEEPER, SLEEPER.available), parts)
    numbers = [float(line.split()[-1]) for line in found.splitlines()[1:]]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1])


LAYERS = [LayerActivations(none=10, selective=4, full=1)] * 4
PLANS = [RecomputePlan(0, number) for number in range(5)] + [RecomputePlan(number, 4 - number) for number in range(5)]


@pytest.mark.parametrize(
    ("room", "plan"),
    [
        (400, RecomputePlan()),
        (399, RecomputePlan(0, 2)),
        (260, RecomputePlan(0, 4)),
        (259, RecomputePlan(1, 3)),
        (140, RecomputePlan(4, 0)),
        (0, RecomputePlan(4, 0)),
    ],
)
def test_no_more_is_recomputed_than_must_be(room, plan):
    assert ActivationMemory(LAYERS, tokens=10, passes=1).choose(PLANS, room) == plan


def test_a_decision_is_explained_by_its_alternatives():
    memory = ActivationMemory([LayerActivations(2 * GB, GB, GB // 4)] * 4, tokens=2, passes=1.5)
    assert memory.in_words(RecomputePlan(1, 2)) == (
        "1 in full and 2 selectively of 4 layers recomputed: activations of 1.5 microbatches of 2 tokens take 16.8 GB, "
        "24.0 GB without recomputation and 7.0 GB with full recomputation"
    )


def test_the_peak_of_a_phase_is_what_its_tensors_took_even_if_they_are_freed():
    size, peaks = 2**28, PhasePeaks(CPU)
    for _ in range(2):
        with peaks.of("training"):
            torch.ones(size // 4)
    with pytest.raises(ValueError, match="mid-phase"), peaks.of("logprobs"):
        raise ValueError("mid-phase")
    found = peaks.take()
    assert found["training"] == pytest.approx(size, rel=0.1)
    assert found["logprobs"] < size / 4
    assert peaks.take() == {}
