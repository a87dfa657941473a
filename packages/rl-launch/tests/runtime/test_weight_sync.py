"""The order of a weight sync and what makes it refuse, with a policy and replicas that only remember tensors."""

import itertools
from functools import partial

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.errors import (
    FailureOrigin,
    GeneratorError,
    PeerFailed,
    RLError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
    WorkerStalled,
)
from rl_core.rollouts.delivery import Taken
from rl_core.weights import Manifest, TensorSpec
from rl_launch.placement.residency import Tenant, TenantResidency
from rl_launch.runtime import weight_sync, weight_transfer
from rl_launch.runtime.weight_sync import Canary, WeightSync
from rl_launch.runtime.weight_transfer import WeightTransfer, joined

MANIFEST = (TensorSpec("embed", (2,), "float32"), TensorSpec("norm", (1,), "float32"))
FACTORS = (TensorSpec("q.lora_A.weight", (1, 2), "float32"), TensorSpec("q.lora_B.weight", (2, 1), "float32"))


class Policy:
    def __init__(self, events):
        self.events, self.digests, self.revision = events, [["all"], []], 0
        self.failure = None
        self.holds_parts = False
        self.transports = []
        self.forms = []

    def start_infer(self, batch, reads):
        self.begun_after = list(self.events)

        def finish():
            self.awaited_after = list(self.events)
            tokens = batch.ragged("tokens")
            return Batch({"logprobs": tokens.like(np.full(len(tokens.values), -1.0, np.float32))})

        return finish

    def manifest(self, version, form):
        self.events.append("manifest")
        if form == "merged":
            return Manifest(version, MANIFEST, is_held_in_parts=self.holds_parts)
        return Manifest(version, FACTORS if form == "adapter" else (*MANIFEST, *FACTORS), num_factors=len(FACTORS))

    def start_send(self, manifest, transport):
        self.events.append(f"send {manifest.version} to {transport.num_receivers}")
        self.forms.append(manifest.form)
        self.transports.append(transport)
        return [self.failure or self.digests[0], self.digests[1]], [
            FailureOrigin("policy", rank, "here", "send") for rank in (0, 1)
        ]

    def interrupt_send(self, transport, reason):
        self.events.append(f"interrupt: {reason}")

    def write_stacks(self):
        self.events.append("stacks")
        return "2 of 2 ranks wrote their stacks"

    def offload(self, parts):
        self.events.append(f"offload {parts[0]}")


class Replica:
    num_ranks = 2

    def __init__(self, events, *, received="all", score=-1.0, broken_attempts=99):
        self.events, self.received, self.score, self.broken_attempts = events, received, score, broken_attempts
        self.num_starts = 1
        self.first_ranks, self.in_flight, self.targets = [], [], []
        self.failure = None

    def call(self, method, *args):
        self.events.append(method)
        if method == "score_canary":
            return self._scores(args[0])
        assert method == "take_over"
        manifest, delivery = args
        self.targets.append(manifest.target)
        self.first_ranks.append(delivery.first_rank)
        self.in_flight.append(delivery.in_flight)
        if self.failure:
            return self.failure
        received, self.broken_attempts = self.received if self.broken_attempts > 0 else "all", self.broken_attempts - 1
        return Taken([received, "all"], [] if delivery.takes_turns else self._scores(delivery.canary))

    def generator(self, method, *args):
        self.events.append(method)

    def _scores(self, rows):
        return [np.full(len(row), self.score, np.float32) for row in rows]

    def origin(self, phase):
        return FailureOrigin("rollout worker", 0, "here", phase)


@pytest.fixture
def events(monkeypatch):
    """Calls are answered at once: an error that is returned is one that was raised."""

    def settle(refs, origins, timeout_s, *, grace_s, on_failure):
        failures = [ref for ref in refs if isinstance(ref, RLError)]
        if failures:
            on_failure(failures[0])
        return ([], failures) if failures else (list(refs), [])

    monkeypatch.setattr(weight_sync, "gather", lambda refs, origins, timeout=None: list(refs))
    monkeypatch.setattr(weight_transfer, "settle", settle)
    monkeypatch.setattr(weight_transfer.ray, "put", lambda value: value)
    return []


def way_of(model, target="policy", *, residency=None, kind="ipc", tenant="", encoding="full"):
    addresses = itertools.count(1)
    return WeightTransfer(
        model,
        target,
        kind=kind,
        meet=lambda: f"{target}:{next(addresses)}",
        residency=residency,
        gives_way=residency is not None,
        bucket_bytes=2**20,
        tenant=tenant,
        encoding=encoding,
    )


def make_sync(events, residency=None, kind="ipc", **settings):
    way = way_of(Policy(events), residency=residency, kind=kind)
    return WeightSync(way, canary=Canary.of(50, precision="float32"), residency=residency, **settings)


def test_a_version_is_served_only_after_transfer_and_commit(events):
    sync, replica = make_sync(events), Replica(events)
    sync.send(sync.publish(), [replica])
    assert events == ["manifest", "send 1 to 2", "take_over", "resume"]
    assert replica.in_flight == [False]


def test_a_version_that_is_sent_in_flight_interrupts_requests_in_every_attempt(events):
    sync, replica = make_sync(events), Replica(events, received="other", broken_attempts=1)
    sync.send(sync.publish(), [replica], in_flight=True)
    assert replica.in_flight == [True, True]


@pytest.mark.parametrize("shares_devices", [False, True])
def test_the_policy_begins_to_score_the_canary_before_anyone_takes_memory_and_is_not_waited_for(events, shares_devices):
    residency = TenantResidency()
    residency.join("policy", Tenant(lambda: None, lambda: None), present=True)
    sync = make_sync(events, residency if shares_devices else None)
    sync.send(sync.publish(), [Replica(events)])
    assert sync._policy.model.begun_after == []
    assert sync._policy.model.awaited_after[-1] == "take_over"


def test_on_shared_devices_memory_is_freed_before_it_is_taken(events):
    residency = TenantResidency()
    residency.join("policy", Tenant(lambda: None, lambda: None), present=True)
    sync = make_sync(events, residency)
    sync.send(sync.publish(), [Replica(events)])
    assert events == [
        "offload optimizer",
        "manifest",
        "send 1 to 1",
        "take_over",
        "offload parameters",
        "score_canary",
        "resume",
    ]
    assert residency.resident == "generation"


def test_a_policy_that_is_away_is_brought_in_before_anything_is_sent(events):
    residency = TenantResidency()
    residency.join("policy", Tenant(lambda: events.append("leave"), lambda: events.append("enter")))
    sync = make_sync(events, residency)
    sync.send(sync.publish(), [Replica(events)])
    assert events[:2] == ["enter", "offload optimizer"]


def test_every_engine_rank_of_every_replica_is_a_receiver_of_its_own(events):
    replicas = [Replica(events), Replica(events)]
    sync = make_sync(events)
    sync.send(sync.publish(), replicas)
    assert [replica.first_ranks for replica in replicas] == [[1], [3]]


def test_what_arrives_broken_twice_is_refused_and_never_served(events):
    sync = make_sync(events)
    with pytest.raises(WeightSyncError, match=r"rank 0 received weights with digest other;.* version 1 were all"):
        sync.send(sync.publish(), [Replica(events, received="other")])
    assert "resume" not in events


def test_ranks_of_the_policy_that_send_different_weights_are_refused(events):
    sync = make_sync(events)
    sync._policy.model.digests = [["all"], ["other"]]
    with pytest.raises(WeightSyncError, match="sent as version 1 were all, other"):
        sync.send(sync.publish(), [Replica(events)])


def test_what_arrives_broken_once_is_sent_again_over_another_connection(events):
    sync = make_sync(events)
    sync.send(sync.publish(), [Replica(events, received="other", broken_attempts=1)])
    assert events.count("take_over") == 2
    assert events.count("resume") == 1
    first, second = sync._policy.model.transports
    assert first.address != second.address


def test_all_transfers_share_a_connection_and_the_manifest_until_a_replica_is_started_anew(events):
    sync, replica = make_sync(events), Replica(events)
    for _ in range(3):
        sync.send(sync.publish(), [replica])
    assert len(set(sync._policy.model.transports)) == 1
    assert events.count("manifest") == 1
    assert [event for event in events if event.startswith("send")] == ["send 1 to 2", "send 2 to 2", "send 3 to 2"]
    replica.num_starts += 1
    sync.send(sync.publish(), [replica])
    sync.send(sync.publish(), [replica])
    assert len(set(sync._policy.model.transports)) == 2


@pytest.mark.parametrize(
    ("encoding", "kind", "every_rank_sends", "sends_changes"),
    [
        ("full", "collective", False, False),
        ("parts", "collective", True, False),
        ("changes", "collective", True, True),
        ("changes", "disk", False, True),
    ],
)
def test_all_ranks_send_if_they_hold_parts_and_the_encoding_has_it(
    events, encoding, kind, every_rank_sends, sends_changes
):
    for holds_parts in (True, False):
        policy = Policy(events)
        policy.holds_parts = holds_parts
        way = way_of(policy, kind=kind, encoding=encoding)
        way.send(way.manifest("merged", 1), [Replica(events), Replica(events)])
        (transport,) = policy.transports
        assert transport.every_rank_sends == (every_rank_sends and holds_parts)
        assert transport.sends_changes == sends_changes
        assert transport.num_receivers == 4


def test_adapters_travel_alone_once_a_replica_has_the_weights_that_they_sit_on(events):
    sync, replica = make_sync(events, sends_adapters=True), Replica(events)
    for _ in range(3):
        sync.send(sync.publish(), [replica])
    assert sync._policy.model.forms == ["factored", "adapter", "adapter"]
    assert events.count("manifest") == 2
    replica.num_starts += 1
    for _ in range(2):
        sync.send(sync.publish(), [replica])
    assert sync._policy.model.forms[3:] == ["factored", "adapter"]


@pytest.mark.parametrize("failing", [{"received": "other"}, {"score": -2.0}], ids=["transfer", "canary"])
def test_after_a_failure_the_weights_are_sent_again_with_their_adapters(events, failing):
    sync, replica = make_sync(events, sends_adapters=True), Replica(events)
    sync.send(sync.publish(), [replica])
    vars(replica).update(failing)
    with pytest.raises(WeightSyncError):
        sync.send(sync.publish(), [replica])
    vars(replica).update(received="all", score=-1.0)
    sync.send(sync.publish(), [replica])
    assert sync._policy.model.forms == ["factored", "adapter", "factored", "factored"]


def test_weights_on_disk_are_written_before_a_replica_is_paused(events, monkeypatch):
    settled = []
    settle = weight_transfer.settle

    def noting(refs, *args, **kwargs):
        settled.append((len(refs), "take_over" in events))
        return settle(refs, *args, **kwargs)

    monkeypatch.setattr(weight_transfer, "settle", noting)
    sync = make_sync(events, kind="disk")
    sync.send(sync.publish(), [Replica(events)])
    assert settled[0] == (2, False)


def test_an_engine_that_computes_something_else_is_refused(events):
    sync = make_sync(events)
    with pytest.raises(WeightSyncError, match=r"weight version 1 differ from the policy's by 0.1"):
        sync.send(sync.publish(), [Replica(events, score=-1.1)])
    assert "resume" not in events


def test_logprobs_that_are_no_numbers_are_refused(events):
    sync = make_sync(events)
    with pytest.raises(WeightSyncError, match="differ from the policy's by nan"):
        sync.send(sync.publish(), [Replica(events, score=np.nan)])


def test_restored_weights_are_published_under_the_version_they_had(events):
    sync = make_sync(events)
    sync.publish()
    last = sync.publish()
    resumed = make_sync(events)
    resumed.restore(sync.state())
    assert resumed.publish().version == last.version


def test_weights_that_the_policy_no_longer_has_are_not_sent(events):
    sync = make_sync(events)
    update = sync.publish()
    sync._policy.model.revision += 1
    with pytest.raises(WeightSyncError, match="version 1 is stale"):
        sync.send(update, [Replica(events)])
    assert events == []
    sync.send(sync.publish(), [Replica(events)])


def test_an_earlier_version_is_not_sent_in_the_place_of_a_later_one(events):
    sync = make_sync(events)
    update = sync.publish()
    sync.publish()
    with pytest.raises(WeightSyncError, match="version 1 is stale"):
        sync.send(update, [Replica(events)])


def test_when_a_receiver_fails_the_sender_is_interrupted_and_both_are_reported(events):
    sync, replica = make_sync(events), Replica(events)
    replica.failure = GeneratorError("the engine died: out of memory")
    sync._policy.model.failure = WeightSyncError("lost receiver rank 1 during bucket 3")
    with pytest.raises(GeneratorError, match=r"^the engine died: out of memory; besides: lost receiver rank 1"):
        sync.send(sync.publish(), [replica])
    (interruption,) = [event for event in events if event.startswith("interrupt")]
    assert "the engine died: out of memory" in interruption
    assert "resume" not in events


def test_a_transfer_that_stalls_leaves_the_stacks_of_the_sender(events):
    sync, replica = make_sync(events), Replica(events)
    replica.failure = WorkerStalled("no answer within 1200 s", replica.origin("weight sync (take over)"))
    with pytest.raises(WorkerStalled, match=r"rollout worker rank 0 .*no answer"):
        sync.send(sync.publish(), [replica])
    assert "stacks" in events


def with_drafter(events, residency=None):
    drafter = Policy([])
    drafter.events = events
    sync = make_sync(events, residency, drafter=way_of(drafter, "drafter", residency=residency))
    return sync, drafter


def test_a_draft_model_follows_the_policy_before_anything_is_served(events):
    sync, replica = with_drafter(events)[0], Replica(events)
    for _ in range(2):
        sync.send(sync.publish(), [replica])
    transfer = ["take_over", "send {} to 2", "take_over", "resume"]
    sent = [event.format(version) for version in (1, 2) for event in ["send {} to 2", *transfer]]
    assert [event for event in events if event != "manifest"] == sent
    assert events.count("manifest") == 2
    assert replica.targets == ["policy", "drafter"] * 2


def test_a_draft_model_takes_its_turn_between_the_policy_and_the_replicas(events):
    residency = TenantResidency()
    for name in ("policy", "drafter"):
        leave, enter = (partial(events.append, f"{name} {event}") for event in ("leaves", "enters"))
        residency.join(name, Tenant(leave, enter), present=name == "policy")
    sync, _ = with_drafter(events, residency)
    sync.send(sync.publish(), [Replica(events)])
    of_policy, of_drafter = events[: events.index("policy leaves")], events[events.index("policy leaves") :]
    assert of_policy[-2:] == ["take_over", "offload parameters"]
    assert of_drafter == [
        "policy leaves",
        "drafter enters",
        "offload optimizer",
        "manifest",
        "send 1 to 1",
        "take_over",
        "offload parameters",
        "score_canary",
        "resume",
    ]
    assert residency.resident == "generation"


def test_a_draft_head_is_sent_before_its_policy_leaves_the_devices(events):
    residency = TenantResidency()
    leave, enter = (partial(events.append, f"policy {event}") for event in ("leaves", "enters"))
    residency.join("policy", Tenant(leave, enter), present=True)
    head = Policy([])
    head.events = events
    drafter = way_of(head, "drafter", residency=residency, tenant="policy")
    sync, replica = make_sync(events, residency, drafter=drafter), Replica(events)
    sync.send(sync.publish(), [replica])
    assert replica.targets == ["policy", "drafter"]
    sent = [event for event in events if event.startswith(("send", "offload parameters", "policy"))]
    assert sent == ["send 1 to 1", "send 1 to 1", "offload parameters"]


def test_weights_of_a_draft_model_that_arrive_broken_are_sent_again_and_never_served(events):
    sync, drafter = with_drafter(events)
    drafter.digests = [["of another model"], []]
    with pytest.raises(WeightSyncError, match="sent as version 1 were of another model"):
        sync.send(sync.publish(), [Replica(events)])
    assert events.count("take_over") == 4
    assert "resume" not in events


ORIGIN = FailureOrigin("policy", 1, "here", "weight sync (send)")


def test_a_death_is_the_cause_whoever_noticed_it_first():
    noticed, died = WeightSyncError("lost receiver rank 2"), WorkerDied("the process ended: killed", ORIGIN)
    error = joined([noticed, died])
    assert type(error) is WorkerDied
    assert error.origin == ORIGIN
    assert str(error).endswith("the process ended: killed; besides: lost receiver rank 2")


def test_a_failure_is_named_before_those_that_repeat_it():
    repeated = PeerFailed("policy rank 0 failed: WeightSyncError: missing norm")
    error = joined([repeated, WeightSyncError("missing norm", ("norm",))])
    assert type(error) is WeightSyncError
    assert (str(error), error.tensors) == ("missing norm", ("norm",))
    first, second = WorkerError("KeyError", "norm", "its traceback", ORIGIN), WeightSyncError("lost the sender")
    error = joined([first, second])
    assert (type(error), error.traceback) == (WorkerError, "its traceback")
    assert str(error).endswith("KeyError: norm; besides: lost the sender")
