import pytest

from rl_core.devices import CPU, CUDA, REHEARSAL
from rl_core.model_config import ColocatedConfig, ColocatedResources, GenerationConfig
from rl_launch.placement.topology import colocated_problems, plan, topology_problems, weight_sync_problems


def make(num_nodes=1, ranks=8, device=CUDA, replica_ranks=2, colocated=True, gpus=None, nodes=None, sync="auto"):
    resources = ColocatedResources(gpus_per_node=gpus, num_nodes=nodes)
    settings = GenerationConfig(colocated=ColocatedConfig(enabled=colocated, resources=resources), weight_sync=sync)
    return plan(
        num_nodes=num_nodes, ranks_per_node=ranks, device=device, generation=settings, replica_ranks=replica_ranks
    )


def test_colocated_generation_has_the_policys_devices():
    topology = make(num_nodes=2)
    assert (topology.policy_nodes, topology.policy_ranks) == (2, 8)
    assert (topology.generation_nodes, topology.generation_ranks) == (2, 8)
    assert topology.replicas_per_node == 4
    assert topology.shares_devices
    assert topology.transport == "ipc"


def test_on_one_node_separate_generation_takes_devices_from_the_policy():
    topology = make(colocated=False, gpus=2)
    assert (topology.policy_ranks, topology.generation_ranks) == (6, 2)
    assert not topology.shares_devices
    assert topology.transport == "collective"


def test_on_several_nodes_separate_generation_takes_whole_nodes():
    topology = make(num_nodes=4, colocated=False, nodes=1)
    assert (topology.policy_nodes, topology.generation_nodes, topology.generation_ranks) == (3, 1, 8)


def test_cores_are_not_divided_among_replicas():
    topology = make(device=CPU, ranks=2, replica_ranks=1)
    assert topology.replicas_per_node == 1
    assert not topology.shares_devices
    assert topology.transport == "ipc"


def test_a_rehearsal_has_the_topology_of_gpus():
    for settings in (
        {"num_nodes": 2},
        {"colocated": False, "gpus": 2},
        {"num_nodes": 4, "colocated": False, "nodes": 1},
    ):
        rehearsed, real = make(device=REHEARSAL, **settings), make(**settings)
        assert (rehearsed.transport, rehearsed.replicas_per_node) == (real.transport, real.replicas_per_node)
        assert rehearsed.shares_devices == real.shares_devices


def test_an_algorithm_without_generation_uses_every_device():
    topology = plan(num_nodes=2, ranks_per_node=4, device=CUDA, generation=None, replica_ranks=1)
    assert (topology.policy_nodes, topology.policy_ranks) == (2, 4)


@pytest.mark.parametrize(
    ("topology", "policy_ranks", "said"),
    [
        (make(colocated=False, gpus=8), 1, "leaves the policy no device"),
        (make(colocated=False, gpus=12), 1, "leaves the policy no device"),
        (make(), 3, "8 ranks are not a multiple of the 3"),
        (make(replica_ranks=3), 1, "8 GPUs per node cannot be divided into replicas of 3"),
        (
            make(num_nodes=2, replica_ranks=16),
            1,
            "16 ranks (tensor_parallel_size x pipeline_parallel_size) does not fit on a node, which has 8 GPUs",
        ),
    ],
)
def test_what_does_not_divide_is_named(topology, policy_ranks, said):
    problems = list(topology_problems(topology, policy_ranks))
    assert len(problems) == 1
    assert said in str(problems[0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sync": "ipc", "device": CPU, "num_nodes": 2}, "do not share memory"),
        ({"sync": "ipc", "colocated": False, "gpus": 2}, "do not share memory"),
        ({"sync": "collective"}, "one process per GPU"),
        ({"sync": "collective", "device": REHEARSAL}, "one process per GPU"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(settings, said):
    (problem,) = weight_sync_problems(make(**settings))
    assert problem.key == "policy.generation.weight_sync"
    assert said in problem.message


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ({"sync": "ipc", "num_nodes": 2}, "ipc"),
        ({"sync": "ipc", "device": CPU}, "ipc"),
        ({"sync": "collective", "device": CPU}, "collective"),
        ({"sync": "collective", "colocated": False, "gpus": 2}, "collective"),
        ({"sync": "disk"}, "disk"),
        ({"sync": "disk", "device": CPU, "num_nodes": 2}, "disk"),
    ],
)
def test_a_transport_that_works_is_taken_as_it_was_chosen(settings, transport):
    topology = make(**settings)
    assert topology.transport == transport
    assert list(weight_sync_problems(topology)) == []


def test_devices_for_generation_that_shares_the_policys_are_refused():
    resources = ColocatedResources(gpus_per_node=2, num_nodes=1)
    refused = list(colocated_problems(ColocatedConfig(resources=resources)))
    assert [problem.key for problem in refused] == [
        f"policy.generation.colocated.resources.{name}" for name in ("num_nodes", "gpus_per_node")
    ]
    assert all("enabled=false" in problem.message for problem in refused)
    assert not list(colocated_problems(ColocatedConfig(enabled=False, resources=resources)))
    assert not list(colocated_problems(ColocatedConfig()))
