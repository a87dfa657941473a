import pytest

from rl_launch.placement.bundles import NodeResources, PlacementError, PlacementTimeouts, Wait, lacking

FULL = {"GPU": 8.0, "CPU": 8.0}
SMALL = NodeResources("10.0.0.1", {"GPU": 4.0, "CPU": 64.0, "memory": 1e9})
LARGE = NodeResources("10.0.0.2", {"GPU": 8.0, "CPU": 64.0, "memory": 1e9})


@pytest.mark.parametrize(
    ("groups", "nodes", "lacks"),
    [
        ([FULL], [SMALL], True),
        ([FULL], [SMALL, LARGE], False),
        ([FULL, FULL], [SMALL, LARGE], True),
        ([FULL, {"GPU": 4.0, "CPU": 4.0}], [SMALL, LARGE], False),
        ([{"GPU": 4.0}] * 3, [SMALL, LARGE], False),
        ([{"GPU": 4.0}] * 4, [SMALL, LARGE], True),
        ([FULL, *[{"GPU": 1.0}] * 4], [SMALL, LARGE], False),
        ([FULL, *[{"GPU": 1.0}] * 12], [SMALL, LARGE], True),
        ([{"CPU": 2.0}], [], True),
        ([], [], False),
    ],
)
def test_groups_that_no_cluster_of_these_nodes_could_hold(groups, nodes, lacks):
    assert bool(lacking(groups, nodes)) == lacks


def test_what_a_fixed_cluster_does_not_have_is_refused_at_once_by_its_keys():
    wait = Wait([FULL, FULL], PlacementTimeouts(busy_s=300), keys="cluster.num_nodes and cluster.gpus_per_node")
    with pytest.raises(PlacementError) as refused:
        wait.check([SMALL, LARGE], 1, now=5.0)
    assert str(refused.value) == (
        "cluster.num_nodes and cluster.gpus_per_node request 2 x 8 GPU, 8 CPU, each on one node, but the cluster has "
        "10.0.0.1 with 4 GPU, 64 CPU; 10.0.0.2 with 8 GPU, 64 CPU: there is room for 1 of 2 groups of 8 GPU, 8 CPU. "
        "Lower cluster.num_nodes and cluster.gpus_per_node, or add nodes. If the cluster adds nodes automatically, set "
        "cluster.autoscaling=true."
    )


def test_nodes_that_may_join_are_waited_for(caplog):
    caplog.set_level("INFO")
    wait = Wait([FULL], PlacementTimeouts(busy_s=10, absent_s=60), keys="keys")
    for now in (0.0, 20.0, 59.0):
        wait.check([SMALL], 0, now)
    assert "waiting for devices after 20 s, 0 of 1 placed (there is room for 0 of 1 groups of 8 GPU" in caplog.text
    wait.check([SMALL, LARGE], 0, 61.0)
    with pytest.raises(PlacementError, match="not free within 10 s"):
        wait.check([SMALL, LARGE], 0, 71.0)
    wait.check([SMALL], 0, 80.0)
    with pytest.raises(PlacementError, match="after 60 s"):
        wait.check([SMALL], 0, 141.0)


def test_devices_in_use_are_waited_for_and_then_given_up():
    wait = Wait([FULL, FULL], PlacementTimeouts(busy_s=300), keys="keys")
    nodes = [LARGE, LARGE]
    wait.check(nodes, 1, 0.0)
    wait.check(nodes, 1, 299.0)
    with pytest.raises(PlacementError, match=r"1 of 2 were not free within 300 s \(cluster\.placement_timeout_s\)"):
        wait.check(nodes, 1, 300.0)
