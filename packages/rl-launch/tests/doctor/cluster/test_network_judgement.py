"""Findings on networks that are made up."""

import pytest
from surveys import READINGS, TEN_GIGABITS, survey

from rl_core.devices import CPU
from rl_launch.doctor.cluster.judgement import all_reduce, bandwidth, ports
from rl_launch.doctor.cluster.survey import AllReduce

HEALTHY = survey(4).rates


def slowed(factor, slow):
    return {pair: rate * factor if slow(pair) else rate for pair, rate in HEALTHY.items()}


def test_a_slow_node_is_named_with_its_rate():
    first, rest = bandwidth(survey(4, rates=slowed(0.01, lambda pair: "n3" in pair)))
    assert (first.name, first.status) == ("bandwidth of n3", "warning")
    assert first.found == "sends at 0.09 Gbit/s, the median of the cluster is 9 Gbit/s"
    assert rest.status == "ok"


def test_a_slow_pair_is_named_as_a_pair():
    first, _ = bandwidth(survey(4, rates=slowed(0.1, lambda pair: pair == ("n1", "n3"))))
    assert first.name == "bandwidth from n1 to n3"
    assert first.found == "0.9 Gbit/s, the median of the cluster is 9 Gbit/s"


def test_a_network_below_its_promise_is_named_unless_one_connection_cannot_reach_that():
    slow = dict.fromkeys(HEALTHY, 0.2 * TEN_GIGABITS)
    assert [each.status for each in bandwidth(survey(4, rates=slow))] == ["warning"]
    fast = {"node": "n0", "readings": {"ethernet_bytes_per_s": 100 * TEN_GIGABITS}}
    assert [each.status for each in bandwidth(survey(1, rates=slow, **fast))] == ["ok"]
    (unknown,) = bandwidth(survey(1, rates=slow, node="n0", readings={"ethernet_bytes_per_s": None}))
    assert unknown.found.endswith("the interfaces promise no rate")


def test_connections_that_are_refused_are_named_by_direction():
    broken = {("n0", "n1"): "Connection refused"}
    (said,) = ports(survey(4, broken=broken))
    assert (said.name, said.status, said.found) == ("ports from n0 to n1", "missing", "Connection refused")
    rates = {pair: 0.0 if pair in broken else rate for pair, rate in HEALTHY.items()}
    assert [each.name for each in bandwidth(survey(4, rates=rates, broken=broken))] == ["bandwidth"]


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        ({}, "InfiniBand promises 400 Gbit/s"),
        ({"node": "n0", "readings": {"infiniband_bytes_per_s": {}}}, "Ethernet promises 10 Gbit/s"),
        ({"device": CPU, "ranks_per_node": 1}, "Ethernet promises 10 Gbit/s"),
    ],
)
def test_the_all_reduce_stands_beside_the_rate_of_its_slowest_link(changed, promise):
    (said,) = all_reduce(survey(2, **changed, all_reduce=AllReduce(16, 2, 2**28, 0.012)))
    assert said.found.endswith(promise)


def test_the_all_reduce_of_one_node_stands_beside_nvlink():
    (said,) = all_reduce(survey(1, all_reduce=AllReduce(8, 1, 2**28, 0.001)))
    assert said.found.endswith("NVLink promises 3600 Gbit/s")
    assert READINGS.gpus.gpus[0].nvlink_bytes_per_s == 450e9


def test_an_all_reduce_far_below_infiniband_and_one_that_fails_have_a_remedy():
    (slow,) = all_reduce(survey(2, all_reduce=AllReduce(16, 2, 2**28, 0.5)))
    assert slow.status == "warning"
    assert "NCCL_DEBUG=INFO" in slow.remedy
    failed = AllReduce(16, 2, 2**28, None, {"n1": "NCCL error: no such device"})
    (said,) = all_reduce(survey(2, all_reduce=failed))
    assert (said.name, said.status) == ("all-reduce on n1", "missing")
    (skipped,) = all_reduce(survey(2, all_reduce=AllReduce(skipped="there is only one rank")))
    assert (skipped.status, skipped.found) == ("ok", "not measured: there is only one rank")
