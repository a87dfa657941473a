import pytest

from rl_launch.placement.residency import Tenant, TenantResidency


@pytest.fixture
def shared():
    events = []
    residency = TenantResidency()
    for name in ("policy", "generation"):
        residency.join(
            name, Tenant(lambda n=name: events.append(f"{n} leaves"), lambda n=name: events.append(f"{n} enters"))
        )
    return residency, events


def test_a_tenant_enters_when_first_held_and_stays(shared):
    residency, events = shared
    for _ in range(3):
        with residency.hold("policy"):
            assert residency.resident == "policy"
    assert events == ["policy enters"]


def test_one_leaves_before_the_other_enters(shared):
    residency, events = shared
    with residency.hold("policy"):
        pass
    with residency.hold("generation"):
        pass
    assert events == ["policy enters", "policy leaves", "generation enters"]


def test_a_hand_over_that_the_caller_made_moves_nothing(shared):
    residency, events = shared
    with residency.hold("policy"):
        pass
    residency.hand_over("generation")
    with residency.hold("generation"):
        pass
    assert events == ["policy enters"]


def test_a_tenant_that_cannot_enter_holds_nothing(shared):
    residency, _ = shared

    def refuse():
        raise RuntimeError("out of memory")

    residency.join("teacher", Tenant(lambda: None, refuse))
    with residency.hold("policy"):
        pass
    with pytest.raises(RuntimeError, match="out of memory"), residency.hold("teacher"):
        pass
    assert residency.resident is None
