"""Groups shared out among replicas, and replicas that die, hang, refuse or forget; Ray's calls are plain ones."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from rl_core.data.batch import RemoteRows
from rl_core.errors import (
    FailureOrigin,
    GeneratorError,
    RLError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
    WorkerStalled,
)
from rl_core.ray.rows import StoredRows
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Prompt
from rl_launch.placement.residency import Tenant, TenantResidency
from rl_launch.run_session.stop import StepAbandoned
from rl_launch.runtime import replica as replica_module
from rl_launch.runtime import replica_group, rollout_pool
from rl_launch.runtime.replica import FinishedCall, ProgressWatch
from rl_launch.runtime.replica_group import MAX_DEATHS
from rl_launch.runtime.rollout_pool import MAX_ROLLOUTS, GroupDispatch, ReplicaPool, RolloutLimit

SAMPLING = SamplingParams(4)


def tasks(count, *, num_rollouts=2):
    prompts = [Prompt(f"p{i}", (), np.array([i], np.int32), "game") for i in range(count)]
    return [RolloutTask(prompt, SAMPLING, tuple(range(num_rollouts))) for prompt in prompts]


class Call:
    """A call under way; `answer` is run when its result is asked for."""

    def __init__(self, answer):
        self.answer = answer


class Replica:
    """Finishes groups one at a time; `fails` maps how many groups it has finished to the error that ends it then."""

    names = itertools.count()

    def __init__(self, index=0, *, fails=(), starts=(), keeps_weights=True, hangs=False):
        self.index, self.fails, self.starts = index, list(fails), list(starts)
        self.keeps_weights, self.hangs = keeps_weights, hangs
        self.failure = None
        self.shares, self.finished_prompts, self.events, self.pauses = [], [], [], []
        self.under_way, self.held = [], set()
        self.num_sampled = self.num_untaken = 0
        self.num_starts = 1
        self.log = f"rollout-worker-{index}.log"

    def origin(self, phase):
        return FailureOrigin("rollout worker", self.index, "here", phase)

    def begin(self, numbered):
        self.shares.append([task.prompt.id for _, task in numbered])
        self.under_way += numbered

    def finished(self):
        asked_of = self.num_starts

        def finish():
            if self.num_starts != asked_of:
                raise WorkerDied("the process ended: killed", self.origin("rollouts"))
            return self._finish()

        call = Call(finish)
        call.late = lambda: (
            self.num_starts == asked_of and (self.hangs or (self.failure is None and self._next() is None))
        )
        return FinishedCall(call, f"columns of {self.index}", f"records of {self.index}")

    def _next(self):
        """The first group that is not `held`."""
        return next((each for each in self.under_way if each[1].prompt.id not in self.held), None)

    def _finish(self):
        number, task = self._next() or self.under_way[0]
        report = self._group(task)
        self.under_way.remove((number, task))
        return [(number, report)]

    def _group(self, task):
        if self.failure is None and self.fails and len(self.finished_prompts) == self.fails[0][0]:
            _, self.failure = self.fails.pop(0)
        if self.failure is not None:
            raise self.failure
        self.finished_prompts.append(task.prompt.id)
        return f"group of {task.prompt.id}"

    def call(self, method, *args):
        def answer():
            if self.failure is not None:
                raise self.failure
            return self.num_untaken if method == "num_untaken" else {"num_requests": 1, "num_sampled": self.num_sampled}

        return Call(answer)

    def generator(self, method, *args):
        def answer():
            if self.failure is not None:
                raise self.failure
            self.events.append(method)
            self.pauses += args if method == "pause" else ()
            return self.keeps_weights if method == "sleep" else None

        return Call(answer)

    def write_stacks(self):
        self.events.append("stacks")

    def kill(self):
        self.hangs = False
        self.failure = self.failure or WorkerDied("the process ended: killed", self.origin("rollouts"))

    def begin_start(self):
        self.num_starts += 1

        def finish():
            self.events.append("start")
            self.under_way = []
            if self.starts and (failure := self.starts.pop(0)):
                raise failure
            self.failure = None

        return finish


class Update:
    """A `WeightUpdate` with a script: `fails` are the errors of its first transfers; `receivers` had it, in order."""

    def __init__(self, version, residency=None, *, fails=()):
        self.version, self.residency, self.fails, self.receivers = version, residency, list(fails), []
        self.in_flight = []


class Sender:
    """Sends updates to replicas as their script says."""

    def send(self, update, replicas, *, in_flight=False):
        update.in_flight.append(in_flight)
        if update.residency:
            with update.residency.hold("policy"):
                pass
        update.receivers.append([replica.index for replica in replicas])
        failure = update.fails.pop(0) if update.fails else None
        failure = failure or next((replica.failure for replica in replicas if replica.failure), None)
        if failure:
            raise failure
        if update.residency:
            update.residency.hand_over("generation")


@pytest.fixture(autouse=True)
def plain_calls(monkeypatch):
    """Calls are answered one at a time, the oldest first; those of a replica that hangs never."""

    def wait(refs, timeout_s=None):
        able = [ref for ref in refs if not getattr(ref, "late", lambda: False)()]
        return able[:1]

    def outcomes(refs, origins):
        for ref in refs:
            try:
                yield ref.answer()
            except RLError as error:
                yield error

    for module in (rollout_pool, replica_module):
        monkeypatch.setattr(module, "wait", wait)
    monkeypatch.setattr(rollout_pool, "outcomes", outcomes)
    monkeypatch.setattr(rollout_pool, "stored_groups", lambda prompts, reports, columns, records, origin: reports)
    for module in (rollout_pool, replica_group, replica_module):
        monkeypatch.setattr(module, "fetch", lambda ref, origin, timeout_s=None: ref.answer())


def make_pool(replicas, residency=None, *, sender=None):
    return ReplicaPool(replicas, residency, stall_timeout_s=600, weights=sender or Sender())


def run(pool, submitted):
    """Groups in the order of their tasks."""
    tickets = pool.submit(submitted)
    done = dict(pool.next_done() for _ in tickets)
    return [done[ticket] for ticket in tickets]


def groups(count):
    return [f"group of p{i}" for i in range(count)]


def test_one_replica_gets_all_groups_at_once_and_in_order():
    replica = Replica()
    assert run(make_pool([replica]), tasks(6)) == groups(6)
    assert replica.shares == [["p0", "p1", "p2", "p3", "p4", "p5"]]


def test_several_replicas_share_evenly_and_answers_keep_the_order_of_the_tasks():
    replicas = [Replica(0), Replica(1), Replica(2)]
    assert run(make_pool(replicas), tasks(7)) == groups(7)
    assert [replica.shares for replica in replicas] == [[["p0", "p3", "p6"]], [["p1", "p4"]], [["p2", "p5"]]]


def test_what_is_too_much_at_a_time_goes_to_whoever_is_free(monkeypatch):
    monkeypatch.setattr(rollout_pool, "MAX_ROLLOUTS", 4)
    replicas = [Replica(0), Replica(1)]
    assert run(make_pool(replicas), tasks(10)) == groups(10)
    assert [replica.shares[0] for replica in replicas] == [["p0", "p2"], ["p1", "p3"]]
    assert all(len(share) == 1 for replica in replicas for share in replica.shares[1:])


FULL = {"kv_cache_usage": 0.99, "num_waiting": 3}
PREEMPTS = {"kv_cache_usage": 0.7, "num_waiting": 0, "num_preempted": 5}
ROOM = {"kv_cache_usage": 0.5, "num_waiting": 0}


@pytest.mark.parametrize("crowded", [FULL, PREEMPTS])
def test_the_limit_of_rollouts_falls_by_a_factor_and_rises_by_a_number(crowded):
    limit = RolloutLimit()
    limit.observe(crowded, 256)
    assert limit.value == 192
    limit.observe({**FULL, "num_preempted": 9}, 200)  # rollouts are not taken back, so there are still more
    assert limit.value == 192
    room = {**ROOM, "num_preempted": 9}
    limit.observe(room, 100)  # nothing shows that more would have room
    assert limit.value == 192
    limit.observe(room, 192)
    assert limit.value == 208
    limit.observe({**FULL, "num_preempted": 9}, 208)
    assert limit.value == 156
    for _ in range(100):
        limit.observe(room, limit.value)
    assert limit.value == MAX_ROLLOUTS


def test_a_replica_with_a_full_cache_gets_no_groups_until_it_has_room():
    dispatch, replicas = GroupDispatch(), [Replica(0), Replica(1)]
    dispatch.add(tasks(64, num_rollouts=8))
    dispatch.assign_waiting(replicas)
    assert [len(replica.under_way) for replica in replicas] == [32, 32]
    dispatch.observe(replicas[0], FULL)  # 256 rollouts are in progress: at most 192 from now on
    dispatch.end(replicas[0], [number for number, _ in replicas[0].under_way[:20]])
    dispatch.add(tasks(100, num_rollouts=8))
    dispatch.assign_waiting(replicas)
    assert [dispatch._load[replica] for replica in replicas] == [192, 960]
    assert len({number for replica in replicas for number, _ in replica.under_way}) == 164


def test_a_single_replica_holds_groups_back_only_after_its_cache_was_full():
    dispatch, replica = GroupDispatch(), Replica()
    dispatch.add(tasks(2000))
    dispatch.assign_waiting([replica])
    assert len(replica.under_way) == 2000
    dispatch.observe(replica, FULL)  # more are in progress than the limit; they are not taken back
    dispatch.end(replica, [number for number, _ in replica.under_way[:1600]])
    dispatch.observe(replica, FULL)
    dispatch.add(tasks(400))
    dispatch.assign_waiting([replica])
    assert len(replica.under_way) == 2000
    dispatch.give_up(replica)  # another process has its place
    dispatch.assign_waiting([replica])
    assert len(replica.under_way) == 2000 + 800


def test_reports_without_a_cache_leave_the_number_of_rollouts_alone():
    limit = RolloutLimit()
    limit.observe({"num_requests": 900, "num_sampled": 10}, 900)
    assert limit.value == MAX_ROLLOUTS


def test_the_pool_reads_the_load_of_its_replicas(monkeypatch):
    class Crowded(Replica):
        def call(self, method, *args):
            return Call(lambda: {"num_requests": 1, "num_sampled": 0, **FULL})

    pool = ReplicaPool([Crowded(0), Replica(1)], None, stall_timeout_s=600, weights=Sender())
    for replica in pool.replicas:
        replica.held = {f"p{i}" for i in range(8)}
    pool.submit(tasks(8))
    for watch in pool._watches.values():
        watch._asked_at -= 60
    pool._check_progress(pool._dispatch.busy)
    pool._check_progress(pool._dispatch.busy)
    assert [pool._dispatch._limits[replica].value for replica in pool.replicas] == [6, MAX_ROLLOUTS]


def test_urgent_groups_begin_before_others_that_wait(monkeypatch):
    monkeypatch.setattr(rollout_pool, "MAX_ROLLOUTS", 2)
    replicas = [Replica(0), Replica(1)]
    pool = make_pool(replicas)
    tickets = pool.submit(tasks(4))
    tickets += pool.submit([dataclasses.replace(task, is_urgent=True) for task in tasks(6)[4:]])
    assert len({pool.next_done()[0] for _ in tickets}) == 6
    assert [[prompt for share in replica.shares for prompt in share][1] for replica in replicas] == ["p4", "p5"]


def test_nothing_to_do_asks_nobody():
    assert run(make_pool([Replica()]), []) == []


def test_groups_come_in_the_order_in_which_they_end_with_the_tickets_they_were_given():
    late = Replica()
    pool = make_pool([late])
    first, second, third = pool.submit(tasks(3))
    late.held.add("p0")
    assert [pool.next_done(), pool.next_done()] == [(second, "group of p1"), (third, "group of p2")]
    late.held.clear()
    assert pool.next_done() == (first, "group of p0")
    assert first < second < third


def test_what_is_submitted_later_begins_at_once_on_the_replica_that_has_the_least_to_do():
    replicas = [Replica(0), Replica(1)]
    pool = make_pool(replicas)
    first, second, third = pool.submit(tasks(3))
    replicas[0].held |= {"p0", "p2"}
    assert pool.next_done() == (second, "group of p1")
    (later,) = pool.submit(tasks(4)[3:])
    assert [replica.shares for replica in replicas] == [[["p0", "p2"]], [["p1"], ["p3"]]]
    assert pool.next_done() == (later, "group of p3")
    replicas[0].held.clear()
    assert [pool.next_done()[0] for _ in range(2)] == [first, third]


def test_a_group_that_fails_runs_again_before_groups_that_were_submitted_later():
    replica = Replica(fails=[(1, WorkerDied("the process ended"))])
    pool = make_pool([replica])
    pool.submit(tasks(2))
    assert pool.next_done()[1] == "group of p0"
    pool.submit(tasks(3)[2:])
    assert [pool.next_done()[1] for _ in range(2)] == ["group of p1", "group of p2"]
    assert replica.shares == [["p0", "p1"], ["p2"], ["p1", "p2"]]


@pytest.mark.parametrize(
    "failure", [GeneratorError("the engine's process died"), WorkerDied("the process ended")], ids=["engine", "actor"]
)
def test_a_dead_replica_is_restarted_and_runs_what_is_missing_alone(failure):
    replica = Replica(fails=[(2, failure)])
    assert run(make_pool([replica]), tasks(5)) == groups(5)
    assert replica.shares == [["p0", "p1", "p2", "p3", "p4"], ["p2", "p3", "p4"]]
    assert replica.finished_prompts == ["p0", "p1", "p2", "p3", "p4"]
    assert replica.events == ["start"]


def test_the_others_finish_what_they_have_before_the_dead_are_replaced_together():
    failure = GeneratorError("the engine's process died")
    replicas = [Replica(0, fails=[(1, failure)]), Replica(1), Replica(2, fails=[(0, failure)])]
    update = Update(3)
    pool = make_pool(replicas)
    pool.adopt(update)
    assert run(pool, tasks(6)) == groups(6)
    assert replicas[1].finished_prompts[:2] == ["p1", "p4"]
    assert [replica.events for replica in replicas] == [["start"], [], ["start"]]
    assert update.receivers == [[0, 1, 2], [0, 1, 2]]


@pytest.fixture
def shared():
    """Devices that a policy shares with the pool, and who came and went."""
    events = []
    residency = TenantResidency()
    residency.join("policy", Tenant(lambda: events.append("policy leaves"), lambda: events.append("policy enters")))
    return residency, events


def test_on_shared_devices_a_restart_brings_weights_to_all(shared):
    residency, _ = shared
    replicas = [Replica(0, fails=[(1, WorkerDied("the process ended"))]), Replica(1)]
    update = Update(1, residency)
    pool = make_pool(replicas, residency)
    assert [replica.events for replica in replicas] == [["sleep"], ["sleep"]]
    pool.adopt(update)
    assert run(pool, tasks(4)) == groups(4)
    assert residency.resident == "generation"
    assert update.receivers == [[0, 1], [0, 1]]
    # the living one sleeps while the other starts, and neither is on the device when the policy sends
    assert [replica.events for replica in replicas] == [["sleep", "start", "sleep"], ["sleep", "sleep"]]


def test_weights_that_are_dropped_in_sleep_are_sent_again_before_anything_is_served(shared):
    residency, _ = shared
    replica = Replica(keeps_weights=False)
    update = Update(4, residency)
    pool = make_pool([replica], residency)
    pool.adopt(update)
    with residency.hold("policy"):  # a save takes the device
        pass
    assert run(pool, tasks(2)) == groups(2)
    assert update.receivers == [[0], [0]]
    run(pool, tasks(2))
    assert len(update.receivers) == 2


def test_weights_that_are_kept_in_sleep_are_not_sent_again(shared):
    residency, _ = shared
    update = Update(4, residency)
    pool = make_pool([Replica()], residency)
    pool.adopt(update)
    with residency.hold("policy"):
        pass
    run(pool, tasks(2))
    assert len(update.receivers) == 1


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_groups_that_a_step_leaves_in_progress_end_after_the_device_is_free_again(shared, keeps_weights):
    residency, _ = shared
    replicas = [Replica(0, keeps_weights=keeps_weights), Replica(1, keeps_weights=keeps_weights)]
    replicas[0].held = replicas[1].held = {"p2", "p3"}
    pool = make_pool(replicas, residency)
    update = Update(1, residency)
    pool.adopt(update)
    carried = pool.submit(tasks(4))
    first = [pool.next_done()[0] for _ in range(2)]
    assert first == carried[:2]
    with residency.hold("policy"):  # the policy trains
        pass
    pool.adopt(second := Update(2, residency), in_flight=True)
    with residency.hold("policy"):  # a checkpoint is saved
        pass
    further = pool.submit(tasks(6)[4:])
    replicas[0].held = replicas[1].held = set()
    assert {pool.next_done()[0] for _ in range(4)} == {*carried[2:], *further}
    assert second.in_flight == [True, *([] if keeps_weights else [False])]
    assert sorted(prompt for replica in replicas for prompt in replica.finished_prompts) == [f"p{i}" for i in range(6)]


def test_groups_in_progress_run_again_if_their_replica_died_while_another_had_the_device(shared):
    residency, _ = shared
    replicas = [Replica(0, keeps_weights=False), Replica(1, keeps_weights=False)]
    replicas[0].held = replicas[1].held = {"p2", "p3"}
    pool = make_pool(replicas, residency)
    pool.adopt(Update(1, residency))
    carried = pool.submit(tasks(4))
    assert [pool.next_done()[0] for _ in range(2)] == carried[:2]
    replicas[1].failure = WorkerDied("the process ended", replicas[1].origin("sleep"))
    with residency.hold("policy"):
        pass
    further = pool.submit(tasks(6)[4:])
    replicas[0].held = replicas[1].held = set()
    assert {pool.next_done()[0] for _ in range(4)} == {*carried[2:], *further}
    assert replicas[1].events.count("start") == 1
    assert sorted(prompt for replica in replicas for prompt in replica.finished_prompts) == [f"p{i}" for i in range(6)]


def test_one_that_died_while_another_had_the_device_is_replaced_before_it_is_needed(shared):
    residency, _ = shared
    replicas = [Replica(0), Replica(1)]
    update = Update(1, residency)
    pool = make_pool(replicas, residency)
    pool.adopt(update)
    replicas[1].failure = WorkerDied("the process ended", replicas[1].origin("sleep"))
    with residency.hold("policy"):
        pass
    assert run(pool, tasks(2)) == groups(2)
    assert replicas[1].events.count("start") == 1


def test_one_that_is_well_and_refuses_is_not_restarted():
    class Refusing(Replica):
        def _group(self, task):
            raise GeneratorError("the generator serves nothing")

    replica = Refusing()
    with pytest.raises(GeneratorError, match=r"rollout worker rank 0 on here .*serves nothing"):
        run(make_pool([replica]), tasks(2))
    assert replica.events == []


def test_a_foreign_error_of_a_group_is_raised_as_it_is():
    class Broken(Replica):
        def _group(self, task):
            raise WorkerError("KeyError", "no such environment", "", self.origin("rollouts"))

    with pytest.raises(WorkerError, match="no such environment"):
        run(make_pool([Broken()]), tasks(2))


def test_an_engine_that_dies_twice_in_the_same_way_before_it_finished_anything_ends_the_run_with_the_cause():
    failure = GeneratorError("Unsupported CPU attention configuration: head_dim=16")
    replica = Replica(fails=[(0, failure)] * 99)
    with pytest.raises(GeneratorError, match=r"rollout worker rank 0 on here .*: Unsupported .* head_dim=16$"):
        run(make_pool([replica]), tasks(2))
    assert replica.events == ["start"]


def test_a_process_that_dies_again_and_again_ends_the_run_with_its_last_cause():
    replica = Replica(fails=[(0, WorkerDied("the process ended: out of memory"))] * 99)
    with pytest.raises(WorkerDied, match=rf"died {MAX_DEATHS} times in a row .*the last time: .*out of memory"):
        run(make_pool([replica]), tasks(2))
    assert replica.events == ["start"] * (MAX_DEATHS - 1)


def test_deaths_with_finished_groups_between_them_do_not_add_up():
    count = 3 * MAX_DEATHS
    replica = Replica(fails=[(i, GeneratorError("an unlucky prompt")) for i in range(1, count)])
    assert run(make_pool([replica]), tasks(count)) == groups(count)


def test_replicas_that_die_together_count_as_one_death():
    replicas = [Replica(i, fails=[(0, WorkerDied("its node died"))]) for i in range(2 * MAX_DEATHS)]
    assert run(make_pool(replicas), tasks(40)) == groups(40)


def test_a_restart_that_fails_is_tried_again_and_one_that_fails_alike_ends_the_run():
    died, memory = WorkerDied("the process ended"), GeneratorError("no memory")
    replica = Replica(fails=[(0, died)], starts=[memory, None])
    assert run(make_pool([replica]), tasks(2)) == groups(2)
    replica = Replica(fails=[(0, died)], starts=[memory] * 99)
    with pytest.raises(GeneratorError, match="no memory"):
        run(make_pool([replica]), tasks(2))
    assert replica.events == ["start"] * 2


def test_a_death_during_weight_sync_is_mended_and_the_version_sent_to_all():
    replicas = [Replica(0), Replica(1)]
    replicas[1].failure = WorkerDied("the process ended", replicas[1].origin("weight sync"))
    update = Update(5)
    pool = make_pool(replicas)
    pool.adopt(update)
    assert update.receivers == [[0, 1]] * 2
    assert [replica.events for replica in replicas] == [[], ["start"]]


@pytest.mark.parametrize("in_flight", [False, True])
def test_groups_go_on_over_an_update(in_flight):
    replicas = [Replica(0), Replica(1)]
    pool = make_pool(replicas)
    tickets = pool.submit(tasks(4))
    done = dict([pool.next_done()])
    update = Update(2)
    for replica in replicas:
        replica.held |= {"p2", "p3"}
    pool.adopt(update, in_flight=in_flight)
    for replica in replicas:
        replica.held.clear()
    done |= dict(pool.next_done() for _ in range(3))
    assert [done[ticket] for ticket in tickets] == groups(4)
    assert [replica.shares for replica in replicas] == [[["p0", "p2"]], [["p1", "p3"]]]
    assert (update.in_flight, update.receivers) == ([in_flight], [[0, 1]])
    assert [replica.pauses for replica in replicas] == [["interrupt" if in_flight else "finish"]] * 2


class Draining(Replica):
    """Pauses when its longest completion has ended, after so many looks at its health."""

    def __init__(self, index=0, *, num_looks, samples=True):
        super().__init__(index)
        self.num_looks, self.samples = num_looks, samples

    def call(self, method, *args):
        if method == "health":
            self.num_looks -= 1
            self.num_sampled += self.samples
        return super().call(method, *args)

    def generator(self, method, *args):
        call = super().generator(method, *args)
        call.late = lambda: method == "pause" and self.failure is None and self.num_looks > 0
        return call


@pytest.fixture
def long_looks(monkeypatch):
    """100 s pass at each look; without progress a replica is lost after 600."""
    clock = itertools.count(0, 100)
    monkeypatch.setattr(rollout_pool, "ProgressWatch", functools.partial(ProgressWatch, clock=clock.__next__))
    return clock


def test_weights_are_sent_once_the_longest_completion_has_ended_however_long_it_takes(long_looks):
    replicas = [Replica(0), Draining(1, num_looks=200)]

    class LateSender(Sender):
        def send(self, update, receivers, *, in_flight=False):
            assert replicas[1].num_looks <= 0
            super().send(update, receivers, in_flight=in_flight)

    pool = make_pool(replicas, sender=LateSender())
    tickets = pool.submit(tasks(4))
    for replica in replicas:
        replica.held |= {"p2", "p3"}
    update = Update(2)
    pool.adopt(update)
    for replica in replicas:
        replica.held.clear()
    assert next(long_looks) > 10_000
    done = dict(pool.next_done() for _ in tickets)
    assert [done[ticket] for ticket in tickets] == groups(4)
    assert update.receivers == [[0, 1]]
    assert not any("start" in replica.events for replica in replicas)


def test_a_replica_that_hangs_before_an_update_is_replaced_and_gets_the_weights(long_looks):
    replicas = [Replica(0), Draining(1, num_looks=200, samples=False)]
    pool = make_pool(replicas)
    tickets = pool.submit(tasks(4))
    for replica in replicas:
        replica.held |= {"p0", "p1", "p2", "p3"}
    update = Update(2)
    pool.adopt(update)
    assert replicas[1].num_looks > 0
    for replica in replicas:
        replica.held.clear()
    done = dict(pool.next_done() for _ in tickets)
    assert [done[ticket] for ticket in tickets] == groups(4)
    assert [replica.events for replica in replicas] == [["pause"], ["stacks", "start"]]
    assert update.receivers == [[0, 1]]


def test_groups_of_a_replica_that_dies_during_an_update_run_again_and_no_others():
    replicas = [Replica(0), Replica(1)]
    pool = make_pool(replicas)
    tickets = pool.submit(tasks(4))
    replicas[0].held |= {"p0", "p2"}
    replicas[1].held |= {"p1", "p3"}
    # its calls are not answered before the update finds out
    replicas[1].hangs = True
    update = Update(2, fails=[WorkerDied("the process ended", replicas[1].origin("weight sync"))])
    pool.adopt(update, in_flight=True)
    for replica in replicas:
        replica.held.clear()
    done = dict(pool.next_done() for _ in tickets)
    assert [done[ticket] for ticket in tickets] == groups(4)
    assert [replica.events for replica in replicas] == [["pause"], ["pause", "start"]]
    assert replicas[0].finished_prompts == ["p0", "p2"]
    assert sorted(replicas[1].finished_prompts) == ["p1", "p3"]
    assert (update.in_flight, update.receivers) == ([True, True], [[0, 1], [0, 1]])


def test_groups_that_a_replica_had_finished_before_it_died_during_an_update_do_not_run_again():
    replica = Replica()
    pool = make_pool([replica])
    tickets = pool.submit(tasks(3))
    update = Update(2, fails=[WorkerDied("the process ended", replica.origin("weight sync"))])
    replica.held.add("p2")
    pool.adopt(update)
    replica.held.clear()
    done = dict(pool.next_done() for _ in tickets)
    assert [done[ticket] for ticket in tickets] == groups(3)
    assert replica.shares == [["p0", "p1", "p2"], ["p2"]]
    assert replica.finished_prompts == ["p0", "p1", "p2"]


def test_a_death_of_the_policy_during_weight_sync_is_not_taken_for_a_replicas():
    died = WorkerDied("the process ended", FailureOrigin("policy", 0, "here", "weight sync"))
    replica = Replica()
    with pytest.raises(WorkerDied, match="policy rank 0"):
        make_pool([replica]).adopt(Update(1, fails=[died]))
    assert replica.events == []


def test_weights_that_do_not_arrive_end_the_run():
    update = Update(1, fails=[WeightSyncError("missing: norm", ("norm",))])
    with pytest.raises(WeightSyncError, match="missing: norm"):
        make_pool([Replica()]).adopt(update)


def test_a_restarted_replica_is_not_given_weights_that_are_stale():
    replica = Replica(fails=[(1, WorkerDied("the process ended"))])
    update = Update(1)
    pool = make_pool([replica])
    pool.adopt(update)
    update.fails = [WeightSyncError("weight version 1 is stale")]
    with pytest.raises(WeightSyncError, match="version 1 is stale"):
        run(pool, tasks(3))
    assert "start" in replica.events


def test_a_replica_that_hangs_leaves_its_stacks_and_is_replaced(monkeypatch):
    clock = itertools.count(0, 100)
    monkeypatch.setattr(rollout_pool, "ProgressWatch", functools.partial(ProgressWatch, clock=clock.__next__))
    replica = Replica(hangs=True)
    assert run(make_pool([replica]), tasks(3)) == groups(3)
    assert replica.events == ["stacks", "start"]


class Writing(Replica):
    """Answers `write_rollouts` with what it was given."""

    def call(self, method, *args):
        if method != "write_rollouts":
            return super().call(method, *args)

        def answer():
            if self.failure is not None:
                raise self.failure
            self.events.append(args)

        return Call(answer)


def test_rollouts_are_written_by_a_living_worker_from_where_their_texts_lie():
    replicas = [Writing(0, fails=[(0, WorkerDied("the process ended"))]), Writing(1), Writing(2)]
    pool = make_pool(replicas)
    pool.submit(tasks(3))
    for _ in range(2):  # the first one is lost meanwhile
        pool.next_done()
    rows = RemoteRows.concat([RemoteRows.of(StoredRows(name, None), [4, 5]) for name in ("a", "b")])
    pool.write_rollouts("/run/rollouts/part", rows, [1.0, 2.0, 3.0, None])
    ((path, part, row, advantages, *stores),) = replicas[1].events
    assert (path, advantages, stores) == ("/run/rollouts/part", [1.0, 2.0, 3.0, None], ["a", "b"])
    assert (part.tolist(), row.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    replicas[1].failure = WorkerDied("the process ended")
    with pytest.raises(WorkerDied):
        pool.write_rollouts("/run/rollouts/part", rows, [])


class Idling(Replica):
    """Has been idle for a quarter of its 8 seconds; the second for all of them."""

    def call(self, method, *args):
        if method != "idle_time":
            return super().call(method, *args)

        def answer():
            if self.failure is not None:
                raise self.failure
            return (8.0 if self.index else 2.0), 8.0

        return Call(answer)


def test_the_idle_share_is_that_of_all_replicas_that_answer():
    replicas = [Idling(0), Idling(1)]
    pool = make_pool(replicas)
    assert pool.idle_share() == 10 / 16
    replicas[1].failure = WorkerDied("the process ended", replicas[1].origin("idle time"))
    assert pool.idle_share() == 2 / 8
    replicas[0].failure = replicas[1].failure
    assert pool.idle_share() is None


class Remembering(Replica):
    """Answers `turns` with one completion of each group that it has under way."""

    def call(self, method, *args):
        if method != "turns":
            return super().call(method, *args)

        def answer():
            if self.failure is not None:
                raise self.failure
            return {number: ({f"turn of {task.prompt.id}": None},) for number, task in self.under_way}

        return Call(answer)


def test_turns_of_the_groups_under_way_come_from_every_replica_that_answers(caplog):
    replicas = [Remembering(0), Remembering(1), Remembering(2)]
    pool = make_pool(replicas)
    assert pool.turns() == {}
    tickets = pool.submit(tasks(6))
    pool.next_done()
    found = {ticket: ({f"turn of p{index}": None},) for index, ticket in enumerate(tickets) if index}
    assert pool.turns() == found
    replicas[1].failure = WorkerDied("the process ended", replicas[1].origin("turns of rollouts"))
    assert pool.turns() == {ticket: turns for ticket, turns in found.items() if ticket not in (tickets[1], tickets[4])}
    assert "rollout worker rank 1" in caplog.text


def watch_of(replica):
    now = [0.0]
    return now, ProgressWatch(replica, timeout_s=100, period_s=10, clock=lambda: now[0])


def look_until(now, watch, end, *, every=5, each=lambda: None):
    while now[0] < end:
        now[0] += every
        each()
        watch.check()


def test_an_engine_that_samples_nothing_is_stalled():
    now, watch = watch_of(Replica())
    with pytest.raises(WorkerStalled, match=r"rollout worker rank 0 .*no progress for 100 s"):
        look_until(now, watch, 1000)
    assert 100 < now[0] <= 130


def test_an_engine_that_samples_is_not():
    replica = Replica()
    now, watch = watch_of(replica)

    def step():
        replica.num_sampled += 1

    look_until(now, watch, 1000, each=step)


def test_one_whose_rollouts_wait_for_their_environments_is_not():
    replica = Replica()
    replica.call = lambda method: Call(lambda: {"num_requests": 0, "num_sampled": 7})
    now, watch = watch_of(replica)
    look_until(now, watch, 1000)


def test_one_that_finishes_groups_is_not():
    now, watch = watch_of(Replica())
    look_until(now, watch, 1000, each=watch.note_progress)


def test_time_in_which_nobody_looks_does_not_count():
    now, watch = watch_of(Replica())
    look_until(now, watch, 50)
    now[0] += 1000
    look_until(now, watch, 1090)
    with pytest.raises(WorkerStalled):
        look_until(now, watch, 2000)


def test_one_that_does_not_answer_is(monkeypatch):
    monkeypatch.setattr(replica_module, "wait", lambda refs, timeout_s: [])
    now, watch = watch_of(Replica())
    with pytest.raises(WorkerStalled):
        look_until(now, watch, 1000)
    assert now[0] <= 130


def test_a_dead_engine_is_found_by_its_health():
    replica = Replica()
    replica.failure = GeneratorError("the engine died")
    now, watch = watch_of(replica)
    with pytest.raises(GeneratorError, match="the engine died"):
        look_until(now, watch, 1000)


class Joining:
    """`ElasticReplicas` whose replicas are ready when the test says so, `late` ones once they are waited for."""

    def __init__(self, least, *, late=()):
        self.least, self.ready, self.late, self.replaced = least, [], list(late), []

    def begin(self, num_present):
        self.num_present = num_present

    def replace(self, replica):
        self.replaced.append(replica)

    def take(self):
        ready, self.ready = self.ready, []
        return ready

    def await_any(self, num_present):
        self.num_present = num_present
        return [self.late.pop(0)]


def elastic_pool(replicas, joining):
    pool = ReplicaPool(replicas, None, stall_timeout_s=600, weights=Sender(), elastic=joining)
    assert joining.num_present == len(replicas)
    return pool


def dies(replica):
    return WorkerDied("the node is lost", replica.origin("rollouts"))


def test_a_replica_that_is_ready_joins_at_the_next_update_and_gets_groups():
    replicas, joining = [Replica(0)], Joining(1)
    pool = elastic_pool(replicas, joining)
    pool.adopt(Update(1))
    joining.ready = [Replica(1)]
    assert run(pool, tasks(2)) == groups(2)
    assert pool.num_replicas == 1
    update = Update(2)
    pool.adopt(update)
    assert (update.receivers, pool.num_replicas) == ([[0, 1]], 2)
    assert run(pool, tasks(4)) == groups(4)
    assert replicas[0].shares[-1] == ["p0", "p2"]


def test_a_run_goes_on_at_once_without_a_replica_that_died():
    replicas, joining = [Replica(0), Replica(1)], Joining(1)
    replicas[1].fails = [(1, dies(replicas[1]))]
    pool = elastic_pool(replicas, joining)
    pool.adopt(Update(1))
    assert run(pool, tasks(6)) == groups(6)
    assert joining.replaced == [replicas[1]]
    assert pool.num_replicas == 1
    assert replicas[1].num_starts == 1
    update = Update(2)
    pool.adopt(update)
    assert update.receivers == [[0]]


def test_below_the_least_number_a_run_waits_and_the_new_replica_gets_the_weights():
    replicas, late = [Replica(0), Replica(1)], Replica(2)
    replicas[1].fails = [(1, dies(replicas[1]))]
    joining = Joining(2, late=[late])
    pool = elastic_pool(replicas, joining)
    update = Update(1)
    pool.adopt(update)
    assert run(pool, tasks(6)) == groups(6)
    assert update.receivers == [[0, 1], [0, 2]]
    assert late.finished_prompts
    assert (joining.num_present, pool.num_replicas) == (1, 2)


def test_a_replica_that_dies_as_it_joins_holds_nothing_up():
    replicas, joining = [Replica(0)], Joining(1)
    pool = elastic_pool(replicas, joining)
    weak = Replica(1)
    weak.failure = dies(weak)
    joining.ready = [weak]
    update = Update(1)
    pool.adopt(update)
    assert (update.receivers, joining.replaced) == ([[0, 1], [0]], [weak])
    assert run(pool, tasks(2)) == groups(2)


def test_a_replica_that_dies_during_an_update_leaves_its_groups_to_the_others():
    replicas, joining = [Replica(0), Replica(1)], Joining(1)
    pool = elastic_pool(replicas, joining)
    pool.adopt(Update(1))
    tickets = pool.submit(tasks(4))
    replicas[1].failure = dies(replicas[1])
    pool.adopt(Update(2), in_flight=True)
    done = dict(pool.next_done() for _ in tickets)
    assert [done[ticket] for ticket in tickets] == groups(4)
    assert (joining.replaced, pool.num_replicas) == ([replicas[1]], 1)


def test_a_replica_that_computes_something_else_is_left_out_if_others_compute_as_the_policy():
    replicas, joining = [Replica(0), Replica(1)], Joining(1)
    pool = elastic_pool(replicas, joining)
    update = Update(1)
    wrong = replicas[1].origin("weight sync canary")
    update.fails = [WeightSyncError(f"{wrong}: logprobs differ from the policy's", origins=(wrong,))]
    pool.adopt(update)
    assert (update.receivers, joining.replaced) == ([[0, 1], [0]], [replicas[1]])
    assert run(pool, tasks(2)) == groups(2)
    update = Update(2)
    last = replicas[0].origin("weight sync canary")
    update.fails = [WeightSyncError("logprobs differ from the policy's", origins=(last,))]
    with pytest.raises(WeightSyncError, match="differ"):
        pool.adopt(update)


def test_rollouts_that_nobody_takes_are_waited_for_until_a_signal():
    replica = Replica()
    replica.held = {"p0"}
    pool = make_pool([replica])
    asked = []

    def is_asked_to_end():
        asked.append(1)
        if len(asked) == 3:
            replica.num_untaken = 1  # an agent that has ended without a word
        return len(asked) > 1

    pool.is_asked_to_end = is_asked_to_end
    pool.submit(tasks(1))
    with pytest.raises(StepAbandoned, match="1 rollouts that no agent has taken"):
        pool.next_done()
    assert len(asked) == 3
