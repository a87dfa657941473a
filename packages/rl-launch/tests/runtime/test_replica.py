"""Parts of a replica over nodes, as real actors: they are started, fail and end together."""

import textwrap
from contextlib import suppress

import pytest
import ray
from ray.exceptions import RayActorError

from rl_core.errors import GeneratorError
from rl_core.ray.host import AsyncWorkerHost
from rl_launch.runtime import replica
from rl_launch.runtime.processes import StartTimeouts
from rl_launch.runtime.replica import Follower, Replica

PARTS = """
    import asyncio
    from rl_core.errors import GeneratorError

    class First:
        def __init__(self, spec, environments, judges, meeting):
            self.meeting = meeting

        async def start(self):
            if self.meeting is not None:
                reader, self.writer = None, None
                met = asyncio.get_running_loop().create_future()
                server = await asyncio.start_server(lambda r, w: met.set_result(None), self.meeting.address,
                                                    self.meeting.port)
                await met
            return 4

    class Other:
        def __init__(self, fails, meeting):
            self.fails, self.meeting = fails, meeting

        async def start(self):
            if self.fails:
                raise GeneratorError("no memory left")
            while True:
                try:
                    self.connection = await asyncio.open_connection(self.meeting.address, self.meeting.port)
                    return
                except OSError:
                    await asyncio.sleep(0.05)
"""


@pytest.fixture
def start(machines, tmp_path, monkeypatch):
    (tmp_path / "parts_of_replica.py").write_text(textwrap.dedent(PARTS))
    monkeypatch.setattr(replica, "ROLLOUT_WORKER", "parts_of_replica:First")
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    return lambda: ray.remote(AsyncWorkerHost).options(num_cpus=0, runtime_env=environment).remote()


def replica_of(start, folder, *, fails=(False,)):
    followers = [
        Follower(start, "parts_of_replica:Other", (each,), f"{folder}/rollout-worker-3-node-{node}.log")
        for node, each in enumerate(fails, 1)
    ]
    timeouts = StartTimeouts(120, 120)
    return Replica(start, None, {}, index=3, logs=str(folder), timeouts=timeouts, followers=followers)


def assert_ended(actor):
    with suppress(RayActorError):
        while True:
            ray.get(actor.take_spans.remote(), timeout=60)


def test_the_parts_of_a_replica_meet_at_its_first_node_and_end_together(start, tmp_path):
    found = replica_of(start, tmp_path)
    found.begin_start()()
    assert found.num_ranks == 4
    assert [each.name for each in found.monitored] == ["rollout-worker-3", "rollout-worker-3-node-1"]
    assert [each.generates for each in found.monitored] == [True, False]
    assert found.node.count(", ") == 1
    actors = [each.actor for each in found.monitored]
    found.kill()
    for actor in actors:
        assert_ended(actor)
    found.begin_start()()
    assert found.num_starts == 2
    found.kill()


def test_a_part_that_does_not_start_is_named_although_the_first_still_waits(start, tmp_path):
    found = replica_of(start, tmp_path, fails=(True,))
    with pytest.raises(GeneratorError, match="no memory left"):
        found.begin_start()()
    found.kill()
