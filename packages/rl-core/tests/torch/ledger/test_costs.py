"""Costs add up, and a part can be taken from a whole."""

from ledger.costs import Collective, Costs, Traffic, Work

GATHER, REDUCE = Collective("all_gather", 8, 8), Collective("all_reduce", 8, 64)
ONE = Costs(Work(1, 10), 100, Work(2, 20), Work(1, 5), Work(4, 8), 1, {"item": 1}, {GATHER: Traffic(1, 7)}, 50)
OTHER = Costs(Work(3, 30), 300, Work(4, 40), Work(), Work(), 0, {"nonzero": 2}, {REDUCE: Traffic(2, 9)}, 40)


def test_one_after_another_takes_the_memory_of_the_larger():
    both = ONE + OTHER
    assert (both.products, both.flops, both.other, both.sharding) == (Work(4, 40), 400, Work(6, 60), Work(1, 5))
    assert both.waits == {"item": 1, "nonzero": 2}
    assert both.num_waits == 3
    assert both.collectives == {GATHER: Traffic(1, 7), REDUCE: Traffic(2, 9)}
    assert both.peak_bytes == 50


def test_what_a_whole_has_in_excess_of_a_part():
    rest = (ONE + OTHER) - ONE
    assert (rest.products, rest.flops, rest.other, rest.sharding) == (OTHER.products, 300, OTHER.other, Work())
    assert rest.waits == OTHER.waits
    assert rest.collectives == OTHER.collectives


def test_traffic_of_a_name_is_over_all_groups():
    assert (ONE + ONE + OTHER).traffic("all_gather") == Traffic(2, 14)
    assert ONE.traffic("broadcast") == Traffic()


def test_launches_are_those_of_all_kernels_and_collectives():
    assert ONE.num_launches == 1 + 2 + 1 + 4 + 1
    assert (ONE + OTHER).num_launches == ONE.num_launches + OTHER.num_launches
