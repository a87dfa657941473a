"""Clocks of other machines, as answers give them."""

from rl_launch.runtime.process_spans import Clocks

S = 10**9


def test_processes_of_the_drivers_machine_share_its_clock():
    clocks = Clocks("here")
    clocks.note("here", 5 * S, 100 * S, 200 * S)
    assert clocks.offset("here") == 0


def test_the_quickest_answer_gives_the_estimate_and_bounds_its_error():
    clocks, ahead = Clocks("here"), 1000 * S
    for sent, there, back in [(0, 3 * S, 1 * S), (10 * S, S // 100, S // 50), (20 * S, 1 * S, 5 * S)]:
        clocks.note("there", sent + there + ahead, sent, sent + there + back)
    assert abs(clocks.offset("there") + ahead) <= (S // 100 + S // 50) // 2


def test_an_old_estimate_is_replaced_because_clocks_drift():
    clocks = Clocks("here")
    clocks.note("there", 10, 0, 20)
    clocks.note("there", 700 * S, 700 * S, 701 * S)
    assert clocks.offset("there") == S // 2
