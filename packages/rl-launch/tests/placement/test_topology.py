import pytest

from rl_core.devices import CPU, CUDA, REHEARSAL
from rl_core.errors import NOT_GIVEN
from rl_core.model_config import ColocatedConfig, ColocatedResources
from rl_launch.placement.topology import (
    Claim,
    Devices,
    colocated_problems,
    plan,
    replica_bound_problems,
    topology_problems,
    weight_sync_problems,
)

SHARED = ColocatedConfig()


def apart(gpus=None, nodes=None):
    return ColocatedConfig(enabled=False, resources=ColocatedResources(gpus_per_node=gpus, num_nodes=nodes))


def policy(ranks=1):
    return Claim("policy", "policy", ranks, SHARED)


def teacher(colocated=SHARED, ranks=1):
    return Claim("teacher", "distillation.teacher", ranks, colocated)


def generation(colocated=SHARED, ranks=2):
    return Claim("generation", "policy.generation", ranks, colocated)


def make(*claims, num_nodes=1, ranks=8, device=CUDA, sync="auto", encoding="full", bounds=(None, None)):
    return plan(
        claims,
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        device=device,
        weight_sync=sync,
        weight_sync_encoding=encoding,
        **dict(zip(("min_replicas", "max_replicas"), bounds, strict=False)),
    )


def test_colocated_generation_has_the_policys_devices():
    topology = make(policy(), generation(), num_nodes=2)
    assert topology.devices("policy") == topology.devices("generation") == Devices(2, 8)
    assert topology.engines_per_node == 4
    assert topology.takes_turns("policy")
    assert topology.takes_turns("generation")
    assert topology.transport_of("policy") == "ipc"


def test_on_one_node_separate_generation_takes_devices_from_the_policy():
    topology = make(policy(), generation(apart(gpus=2)))
    assert (topology.devices("policy"), topology.devices("generation")) == (Devices(1, 6), Devices(1, 2))
    assert not topology.takes_turns("policy")
    assert topology.transport_of("policy") == "collective"


def test_on_several_nodes_separate_generation_takes_whole_nodes():
    topology = make(policy(), generation(apart(nodes=1)), num_nodes=4)
    assert (topology.devices("policy"), topology.devices("generation")) == (Devices(3, 8), Devices(1, 8))


def test_cores_are_not_divided_among_replicas():
    topology = make(policy(), generation(ranks=1), device=CPU, ranks=2)
    assert topology.engines_per_node == 1
    assert not topology.takes_turns("policy")
    assert topology.transport_of("policy") == "ipc"


def test_models_share_devices_or_have_their_own():
    topology = make(policy(), teacher(), generation(apart(gpus=2)))
    assert topology.sharing == ("policy", "teacher")
    assert topology.takes_turns("teacher")
    assert not topology.takes_turns("generation")
    topology = make(policy(), teacher(apart(gpus=3)), generation(apart(gpus=2)))
    assert [topology.devices(name).count for name in topology.claims] == [3, 3, 2]
    assert not any(topology.takes_turns(name) for name in topology.claims)
    topology = make(policy(), teacher(apart(nodes=2, gpus=4)), generation(), num_nodes=4)
    assert [topology.devices(name) for name in topology.claims] == [Devices(2, 8), Devices(2, 4), Devices(2, 8)]


def test_a_rehearsal_has_the_topology_of_gpus():
    for claims, num_nodes in (
        ((policy(), generation()), 2),
        ((policy(), generation(apart(gpus=2))), 1),
        ((policy(), teacher(), generation(apart(nodes=1))), 4),
    ):
        rehearsed, real = (make(*claims, num_nodes=num_nodes, device=device) for device in (REHEARSAL, CUDA))
        assert (rehearsed.transport_of("policy"), rehearsed.engines_per_node) == (
            real.transport_of("policy"),
            real.engines_per_node,
        )
        for claim in claims:
            assert rehearsed.takes_turns(claim.name) == real.takes_turns(claim.name)


def test_an_algorithm_without_generation_uses_every_device():
    topology = make(policy(), num_nodes=2, ranks=4)
    assert topology.devices("policy") == Devices(2, 4)
    assert not topology.takes_turns("policy")


@pytest.mark.parametrize(
    ("topology", "key", "got", "shown"),
    [
        (
            make(policy(), generation(apart(gpus=8))),
            "policy.generation.colocated.resources.gpus_per_node",
            8,
            ["cluster.gpus_per_node"],
        ),
        (
            make(policy(), generation(apart()), ranks=1),
            "policy.generation.colocated.resources.gpus_per_node",
            NOT_GIVEN,
            ["cluster.gpus_per_node=2", "policy.generation.colocated.resources.gpus_per_node=1"],
        ),
        (
            make(policy(), teacher(apart(gpus=12))),
            "distillation.teacher.colocated.resources.gpus_per_node",
            12,
            ["cluster.gpus_per_node"],
        ),
        (make(policy(ranks=3), generation()), "policy", NOT_GIVEN, ["policy", "3 ranks", "ranks, 8"]),
        (make(policy(), teacher(apart(gpus=3), ranks=2)), "distillation.teacher", NOT_GIVEN, ["ranks, 3", "2 ranks"]),
        (
            make(Claim("policy", "policy", 3, SHARED, {"policy.x_cfg.tensor_parallel_size": 3}), generation()),
            "policy.x_cfg.tensor_parallel_size",
            3,
            ["3 ranks, which does not divide"],
        ),
        (
            make(policy(), Claim("generation", "policy.generation", 16, SHARED, {"a.tp_size": 8, "a.pp_size": 2})),
            "a.tp_size",
            8,
            ["16 ranks (tp_size 8 x pp_size 2)"],
        ),
        (make(policy(), generation(ranks=3)), "policy.generation", NOT_GIVEN, ["8 GPUs", "3 GPUs"]),
        (
            make(policy(), Claim("generation", "policy.generation", 16, SHARED, spans_nodes=False), num_nodes=2),
            "policy.generation",
            NOT_GIVEN,
            ["16 ranks", "cannot span nodes with this backend", "cluster.gpus_per_node"],
        ),
        (
            make(policy(), generation(ranks=16), num_nodes=3),
            "policy.generation",
            NOT_GIVEN,
            ["16 ranks", "3 nodes of generation with 8 GPUs", "product is 8 times a divisor of 3"],
        ),
        (make(policy(), generation(ranks=12), num_nodes=2), "policy.generation", NOT_GIVEN, ["12 ranks", "2 nodes"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused(topology, key, got, shown):
    (problem,) = topology_problems(topology)
    assert (problem.key, problem.got) == (key, got)
    assert [each for each in shown if each not in f"{problem.reason} {problem.remedy}"] == []


@pytest.mark.parametrize(
    ("topology", "nodes", "replicas", "resources", "per_node"),
    [
        (make(policy(), generation(ranks=16), num_nodes=4), 2, 2, 8, 1),
        (make(policy(), generation(apart(nodes=4), ranks=32), num_nodes=8), 4, 1, 8, 1),
        (make(policy(), generation(apart(nodes=2, gpus=4), ranks=8), num_nodes=4), 2, 1, 4, 1),
        (make(policy(), generation(ranks=2), num_nodes=2), 1, 8, 2, 4),
        (make(policy(), generation(ranks=2), num_nodes=2, ranks=1, device=REHEARSAL), 2, 1, 1, 1),
        (make(policy(), generation(ranks=2), num_nodes=2, ranks=1, device=CPU), 1, 2, 1, 1),
    ],
)
def test_a_replica_larger_than_a_node_has_whole_nodes(topology, nodes, replicas, resources, per_node):
    assert list(topology_problems(topology)) == []
    assert (topology.replica_nodes, topology.num_replicas) == (nodes, replicas)
    assert (topology.replica_resources, topology.engines_per_node) == (resources, per_node)


@pytest.mark.parametrize(
    ("topology", "got", "allowed"),
    [
        (make(policy(), generation(), sync="ipc", device=CPU, num_nodes=2), "ipc", "auto, collective, disk"),
        (make(policy(), generation(apart(gpus=2)), sync="ipc"), "ipc", "auto, collective, disk"),
        (make(policy(), generation(), sync="collective"), "collective", "auto, ipc, disk"),
        (make(policy(), generation(), sync="collective", device=REHEARSAL), "collective", "auto, ipc, disk"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(topology, got, allowed):
    (problem,) = weight_sync_problems(topology)
    assert problem.key == "policy.generation.weight_sync"
    assert (problem.got, problem.allowed) == (got, allowed)


def test_the_encoding_parts_needs_ranks_that_send_to_one_another():
    (problem,) = weight_sync_problems(make(policy(), generation(), sync="disk", encoding="parts"))
    assert problem.key == "policy.generation.weight_sync_encoding"
    assert problem.got == "parts"
    for topology in (
        make(policy(), generation(), encoding="parts"),
        make(policy(), generation(apart(gpus=2)), encoding="parts"),
    ):
        assert list(weight_sync_problems(topology)) == []


def test_the_encoding_changes_needs_a_transport_over_the_network():
    (problem,) = weight_sync_problems(make(policy(), generation(), encoding="changes"))
    assert problem.key == "policy.generation.weight_sync_encoding"
    assert problem.got == "changes"
    for topology in (
        make(policy(), generation(apart(gpus=2)), encoding="changes"),
        make(policy(), generation(), sync="disk", encoding="changes"),
        make(policy(), generation(), num_nodes=2, encoding="changes"),
    ):
        assert list(weight_sync_problems(topology)) == []


@pytest.mark.parametrize(
    ("topology", "transport"),
    [
        (make(policy(), generation(), sync="ipc", num_nodes=2), "ipc"),
        (make(policy(), generation(), sync="ipc", device=CPU), "ipc"),
        (make(policy(), generation(), sync="collective", device=CPU), "collective"),
        (make(policy(), generation(apart(gpus=2)), sync="collective"), "collective"),
        (make(policy(), generation(), sync="disk"), "disk"),
        (make(policy(), generation(), sync="disk", device=CPU, num_nodes=2), "disk"),
    ],
)
def test_a_transport_that_works_is_taken_as_it_was_chosen(topology, transport):
    assert topology.transport_of("policy") == transport
    assert list(weight_sync_problems(topology)) == []


def test_own_devices_of_one_that_shares_the_policys_are_refused():
    given = ColocatedConfig(resources=ColocatedResources(gpus_per_node=2, num_nodes=1))
    for claim in (generation(given), teacher(given)):
        refused = list(colocated_problems([policy(), claim]))
        assert [problem.key for problem in refused] == [
            f"{claim.key}.colocated.resources.{name}" for name in ("num_nodes", "gpus_per_node")
        ]
        assert [problem.got for problem in refused] == [1, 2]
        assert all(f"{claim.key}.colocated.enabled=false" in problem.remedy for problem in refused)
    assert not list(colocated_problems([policy(), generation(apart(gpus=2)), teacher()]))


@pytest.mark.parametrize(
    ("bounds", "fewest", "most"), [((None, None), 2, 2), ((1, None), 1, 2), ((None, 3), 2, 3), ((1, 8), 1, 8)]
)
def test_bounds_of_the_number_of_replicas_default_to_those_at_the_start(bounds, fewest, most):
    topology = make(policy(), generation(apart(gpus=4)), bounds=bounds)
    assert list(replica_bound_problems(topology)) == []
    assert (topology.fewest_replicas, topology.num_replicas, topology.most_replicas) == (fewest, 2, most)
    assert topology.is_elastic == (bounds != (None, None))


@pytest.mark.parametrize(
    ("colocated", "bounds", "key", "got", "shown"),
    [
        (SHARED, (1, None), "min_replicas", 1, "policy.generation.colocated.enabled=false"),
        (SHARED, (None, 8), "max_replicas", 8, "policy.generation.colocated.enabled=false"),
        (apart(gpus=4), (3, 2), "min_replicas", 3, "max_replicas (2)"),
        (apart(gpus=4), (3, None), "min_replicas", 3, "2 replicas"),
        (apart(gpus=4), (None, 1), "max_replicas", 1, "2 replicas"),
    ],
)
def test_bounds_of_the_number_of_replicas_that_cannot_be_met_are_refused(colocated, bounds, key, got, shown):
    (problem,) = replica_bound_problems(make(policy(), generation(colocated), bounds=bounds))
    assert (problem.key, problem.got) == (f"policy.generation.{key}", got)
    assert shown in f"{problem.reason} {problem.remedy}"


@pytest.mark.parametrize("device", [CPU, CUDA, REHEARSAL])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_servers_take_no_device_of_the_run_and_read_weights_from_files(device, num_nodes):
    servers = Claim("generation", "policy.generation", 1, apart(), servers=3)
    topology = make(policy(), servers, num_nodes=num_nodes, device=device, bounds=(1, None))
    assert topology.devices("policy") == Devices(num_nodes, 8)
    assert (topology.num_replicas, topology.replica_resources, topology.replica_nodes) == (3, 0, 1)
    assert (topology.fewest_replicas, topology.most_replicas, topology.is_elastic) == (1, 3, True)
    assert (topology.transport_of("policy"), topology.takes_turns("policy")) == ("disk", False)
    assert topology.engines_per_node == 0
    for problems in (topology_problems, weight_sync_problems, replica_bound_problems):
        assert list(problems(topology)) == []
