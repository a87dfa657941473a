"""A tensor-parallel replica in processes of its own, as a run places one: on one node, and over two logical nodes.

One engine of each kind for all tests: its front imports vLLM, and so does each of its processes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from rl_core.devices import CPU, REHEARSAL
from rl_core.devices.device import hold_port
from rl_core.errors import GeneratorError, WeightSyncError
from rl_core.fork_server.server import import_all
from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.selfcheck.rank_pool import preload
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import ReferenceModel, write_reference_model
from rl_core.testing.torch.weight_sender import Fault, SenderProcess, manifest_of
from rl_core.testing.weights import SYNC_TIMEOUT_S, _address, model_config, prompt
from rl_core.weights import Transport
from rl_vllm import PLUGIN, VllmConfig, VllmGenerator
from rl_vllm.follower import VllmFollower

# `test_generator` has an engine with tensor-parallel ranks that are sent weights
pytestmark = exhaustive

START_S = 600.0
GPUS = ("4", "7")
LOST = "the engine's process died: node 2 of 2 (127.0.0.1) of the replica: VllmWorker-1 was killed"
PLACEMENT = Placement("rehearsal", shares_devices=True, awaits_weights=True)
BACKEND = VllmConfig(kv_cache_gib=0.25, tensor_parallel_size=2)
REQUEST = GenerationRequest(prompt(5), SamplingParams(4), 0)


@dataclass
class Front:
    """The process in front of an engine.

    Args:
        pipe: Its end of the tests' connection.
        num_nodes: Number of nodes of the replica.
        problem: Why it could not be forked with vLLM imported; empty if it could.
        engine: Processes of its engine on its node.
        followers: Processes on its other node.
    """

    process: BaseProcess
    pipe: Connection
    num_nodes: int
    problem: str
    engine: list[psutil.Process]
    followers: list[psutil.Process]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first, second = (write_reference_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in (1, 2))
    return first, second


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def front(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Front]:
    with started(request.param, folders) as found:
        yield found


@contextmanager
def started(num_nodes: int, folders: tuple[Path, Path]) -> Iterator[Front]:
    """A replica over one or two nodes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with hold_port() as held:
        meeting = Place(*held.getsockname())
        process = context.Process(target=_serve, args=(theirs, num_nodes, meeting, *folders))
        process.start()
        others = [context.Process(target=_follow, args=(meeting, folders[0]))] if num_nodes == 2 else []
        for each in others:
            each.start()
        theirs.close()
        try:
            problem, engine = _received(ours), [psutil.Process(pid) for pid in _received(ours)]
            followers = [child for each in others for child in psutil.Process(each.pid).children(recursive=True)]
            yield Front(process, ours, num_nodes, problem, engine, followers)
        finally:
            for each in (process, *others):
                each.kill()
                each.join()


def test_a_fork_server_can_import_what_a_replica_on_cpu_does(front: Front) -> None:
    assert front.problem == ""


def test_it_takes_turns_in_a_rehearsal(front: Front) -> None:
    """As colocated on two GPUs: every policy rank sends to the engine rank on its own, and sleep drops the weights."""
    front.pipe.send("take turns")
    failure = _received(front.pipe)
    assert not failure, failure


def test_zy_a_lost_rank_of_another_node_ends_the_replica(front: Front) -> None:
    if front.num_nodes == 1:
        pytest.skip("there is no other node")
    _rank_of(front).kill()
    front.pipe.send("fail")
    failure = str(_received(front.pipe))
    assert LOST in failure
    _assert_ended(front.engine)


def test_zz_no_engine_outlives_a_killed_process_in_front(front: Front) -> None:
    """Last: it leaves no engine behind. Over two nodes most processes have ended with the lost rank."""
    if front.num_nodes == 1:
        assert len(front.engine) >= 3
        assert all(process.is_running() for process in front.engine)
    front.process.kill()
    _assert_ended([*front.engine, *front.followers])


@pytest.mark.parametrize("phase", ["beginning", "joining", "transfer", "commit"])
def test_zzz_a_rank_of_another_node_that_is_killed_in_a_weight_sync_ends_the_replica(
    phase: str, folders: tuple[Path, Path]
) -> None:
    """Its sender fails soon as well, if it is in the transfer."""
    with started(2, folders) as front:
        front.pipe.send(Lose(phase, _rank_of(front).pid))
        failure, of_sender = _received(front.pipe)
        assert LOST in failure
        assert ("lost receiver rank 2" in of_sender) == (phase == "transfer"), of_sender
        _assert_ended(front.engine)


def _rank_of(front: Front) -> psutil.Process:
    """Return the process of the rank on the other node."""
    (rank,) = [each for each in front.followers if "VLLM" in " ".join(each.cmdline())]
    return rank


def _assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, 60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _received(pipe: Connection) -> Any:
    assert pipe.poll(START_S), "the process in front of the engine does not answer"
    return pipe.recv()


class Lose(NamedTuple):
    """An order to the process in front: kill a rank in a phase of a weight sync."""

    phase: str
    pid: int


class Place(NamedTuple):
    """Where the nodes of a replica meet."""

    address: str
    port: int


def _follow(meeting: Place, folder: Path) -> None:
    _prepare()
    placement = replace(PLACEMENT, gpus=GPUS[1:], node=1, num_nodes=2)
    follower = VllmFollower(GenerationConfig(), BACKEND, model_config(folder), placement, meeting)
    asyncio.run(follower.start())
    threading.Event().wait()


def _prepare() -> str:
    preloaded = PLUGIN.preload_of(VllmConfig(), CPU)
    os.environ.update(preloaded.variables, CUDA_VISIBLE_DEVICES="")
    return import_all(preloaded.modules)


def _serve(pipe: Connection, num_nodes: int, meeting: Place, first: Path, second: Path) -> None:
    try:
        _hold_replica(pipe, num_nodes, meeting, first, second)
    except BaseException:  # noqa: BLE001  # printed at once: a process that ends waits for its engine first
        traceback.print_exc()
        os._exit(1)


def _hold_replica(pipe: Connection, num_nodes: int, meeting: Place, first: Path, second: Path) -> None:
    pipe.send(_prepare())
    # of the processes that send weights
    preload("rl_core.testing.torch.weight_sender")
    placement = replace(PLACEMENT, gpus=GPUS[: 2 // num_nodes], num_nodes=num_nodes)
    if num_nodes > 1:
        placement = replace(placement, meeting=tuple(meeting))
    generator = VllmGenerator(GenerationConfig(), BACKEND, model_config(first), placement)
    with asyncio.Runner() as runner:
        runner.run(generator.start())
        pipe.send([process.pid for process in generator._running()._processes])
        while act := pipe.recv():
            if isinstance(act, Lose):
                pipe.send(runner.run(_lose(generator, second, act)))
                continue
            try:
                runner.run(_take_turns(generator, first, second) if act == "take turns" else _fail(generator))
                pipe.send("")
            except Exception:  # noqa: BLE001  # becomes the failure of the test
                pipe.send(traceback.format_exc())


async def _fail(generator: VllmGenerator) -> None:
    """Generate until the engine has noticed that it is dead, which raises."""
    async with asyncio.timeout(60):
        while True:
            await generator.health()
            await generator.generate(REQUEST)


async def _lose(generator: VllmGenerator, folder: Path, lose: Lose) -> tuple[str, str]:
    """Return what the generator raised, and what the sender of the lost rank raised; empty for nothing."""
    senders = [SenderProcess(REHEARSAL, (gpu,)) for gpu in GPUS]
    manifest = manifest_of(folder, 1)
    transport = Transport("ipc", _address(), 1, timeout_s=SYNC_TIMEOUT_S, every_rank_sends=True)
    faults = [Fault(), Fault(stop_at=manifest.tensors[-1].name if lose.phase == "transfer" else "")]
    failures, sending = [], []
    try:
        await generator.wake(("weights",))
        if lose.phase == "beginning":
            psutil.Process(lose.pid).kill()
        await generator.begin(manifest)
        receiving = asyncio.create_task(_receive(generator, transport))
        # Without its sender, the rank waits for it.
        for sender, fault in list(zip(senders, faults, strict=True))[: 1 if lose.phase == "joining" else 2]:
            sending.append(sender.send(folder, manifest, transport, fault))
        if lose.phase == "joining":
            await asyncio.wrap_future(sending[0])
            psutil.Process(lose.pid).kill()
        if lose.phase == "transfer":
            with ExitStack() as stack:
                # The call to receive is sent meanwhile, and without it no sender begins.
                await asyncio.to_thread(stack.enter_context, senders[1].stopped())
                psutil.Process(lose.pid).kill()
        await receiving
        if lose.phase == "commit":
            psutil.Process(lose.pid).kill()
        await generator.commit(1)
    except GeneratorError as error:
        failures.append(str(error))
    try:
        await asyncio.gather(*map(asyncio.wrap_future, sending[1:]))
    except WeightSyncError as error:
        failures.append(str(error))
    for sender in senders:
        sender.close()
    return failures[0], failures[1] if len(failures) > 1 else ""


async def _receive(generator: VllmGenerator, transport: Transport) -> None:
    await generator.receive(transport, 1)


async def _take_turns(generator: VllmGenerator, first: Path, second: Path) -> None:
    senders = [SenderProcess(REHEARSAL, (gpu,)) for gpu in GPUS]

    async def is_asleep() -> bool:
        return bool(await generator._running().ask("is_sleeping"))

    async def sync(folder: Path, version: int) -> None:
        manifest = manifest_of(folder, version)
        transport = Transport("ipc", _address(), 1, timeout_s=SYNC_TIMEOUT_S, every_rank_sends=True)
        await generator.pause()
        await generator.wake(("weights",))
        await generator.begin(manifest)
        sending = [sender.send(folder, manifest, transport, Fault()) for sender in senders]
        received = await generator.receive(transport, 1)
        sent = await asyncio.gather(*map(asyncio.wrap_future, sending))
        assert [[digest] for digest in received] == sent
        assert len(set(received)) == 2, "each rank is sent the parts that it keeps"
        await generator.commit(version)
        assert await is_asleep()
        await generator.wake(("kv_cache",))
        assert not await is_asleep()
        await generator.resume()

    async def check_serves(folder: Path) -> None:
        reference = ReferenceModel(folder)
        np.testing.assert_allclose(await generator.score(prompt(20)), reference.score(prompt(20)), atol=1e-4)
        found = await generator.generate(REQUEST)
        expected = reference.completion_logprobs(REQUEST.token_ids, found.token_ids)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)

    try:
        with pytest.raises(GeneratorError, match="no weights have been sent"):
            await generator.generate(REQUEST)
        assert not await generator.sleep()
        assert await is_asleep()
        await sync(second, 1)
        await check_serves(second)
        assert not await generator.sleep()
        await generator.wake()
        with pytest.raises(GeneratorError, match="dropped in sleep"):
            await generator.generate(REQUEST)
        assert not await generator.sleep()
        await generator.wake(("weights",))
        assert not await generator.sleep(), "also after a weight sync that broke off"
        await sync(first, 2)
        await check_serves(first)
    finally:
        for sender in senders:
            sender.close()
