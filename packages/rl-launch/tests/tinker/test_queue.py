"""Requests act once and in order, whatever is sent again, ends or fails."""

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tinker
from bigram_host import BigramHost, hosting
from raw_client import RawClient, forward_backward, passed
from test_learning import CYCLE, datum, supervised
from tinker import types

ADAM = {"learning_rate": 0.1, "eps": 1e-8}


def losses_alone(serve, steps, folder="alone"):
    """Return the losses of a program that nothing disturbs."""
    return supervised(serve(folder=folder).client().create_lora_training_client("tiny/bigram", 4, 7).result(), steps)


def test_a_request_that_is_sent_again_acts_once_and_has_the_same_answer(serve):
    served = serve()
    client = RawClient(served.url)
    model = client.model(client.session())
    body = forward_backward(model, 1, [CYCLE])
    promises = [client.post("forward_backward", body) for _ in range(3)]
    assert promises[0] == promises[1] == promises[2]
    answers = [client.result(promises[0][1]) for _ in range(2)]
    assert answers[0] == answers[1]
    for _ in range(3):
        first = client.result(client.optim_step(model, 2, **ADAM)[1])
    once = client.result(client.post("forward_backward", forward_backward(model, 3, [CYCLE]))[1])
    other = serve(folder="other")
    client = RawClient(other.url)
    model = client.model(client.session())
    client.result(client.post("forward_backward", forward_backward(model, 1, [CYCLE]))[1])
    assert client.result(client.optim_step(model, 2, **ADAM)[1]) == first
    undisturbed = client.result(client.post("forward_backward", forward_backward(model, 3, [CYCLE]))[1])
    assert passed(once).metrics["loss:sum"] == passed(undisturbed).metrics["loss:sum"]


def test_requests_act_in_the_order_of_their_numbers(serve):
    client = RawClient(serve().url)
    model = client.model(client.session())
    stepped = client.optim_step(model, 3, **ADAM)[1]
    second = client.post("forward_backward", forward_backward(model, 2, [CYCLE]))[1]
    time.sleep(0.2)
    first = client.post("forward_backward", forward_backward(model, 1, [CYCLE]))[1]
    assert "grad_norm" in client.result(stepped)["metrics"]
    values = [passed(client.result(each)).metrics["loss:sum"] for each in (first, second)]
    assert values[0] == values[1] == pytest.approx(8 * np.log(12), rel=1e-6)
    status, answer = client.post("forward_backward", forward_backward(model, 3, [CYCLE]))
    assert status == 400
    assert "optim_step, not forward_backward" in answer["error"]


def test_passes_of_several_models_that_wait_together_are_computed_together(serve):
    begun, going = threading.Event(), threading.Event()

    class Slow(BigramHost):
        def accumulate(self, works):
            begun.set()
            assert going.wait(30)
            return super().accumulate(works)

    @contextmanager
    def slow():
        yield Slow()

    served = serve(make=slow)
    client = RawClient(served.url)
    session = client.session()
    models = [client.model(session, number, seed=number) for number in range(4)]
    first = client.post("forward_backward", forward_backward(models[0], 1, [CYCLE]))[1]
    assert begun.wait(30)
    others = [client.post("forward_backward", forward_backward(each, 1, [CYCLE[::-1]]))[1] for each in models[1:]]
    going.set()
    for promise in (first, *others):
        assert passed(client.result(promise)).metrics["loss:sum"] > 0
    assert served.hosts[0].num_together == [1, 3]


def test_more_models_than_slots_take_turns_and_learn_as_each_alone(serve):
    expected = losses_alone(serve, 8)

    @contextmanager
    def few():
        yield BigramHost(num_slots=2)

    served = serve(make=few)
    service = served.client()
    trainings = [service.create_lora_training_client("tiny/bigram", 4, 7).result() for _ in range(5)]
    found = [[] for _ in trainings]
    for _ in range(8):
        passes = [each.forward_backward([datum(CYCLE, weights=np.ones(8))], "cross_entropy") for each in trainings]
        adam = types.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
        steps = [each.optim_step(adam) for each in trainings]
        for losses, answer, step in zip(found, passes, steps, strict=True):
            losses.append(answer.result().metrics["loss:sum"])
            step.result()
    assert all(losses == expected for losses in found)
    assert len(served.hosts[0].adapters) <= 2


def test_a_host_that_fails_is_built_again_and_only_a_request_that_fails_twice_is_refused(serve):
    failing = {"left": 0, "poison": 0}

    class Frail(BigramHost):
        def accumulate(self, works):
            if failing["left"]:
                failing["left"] -= 1
                raise RuntimeError("a rank has died")
            if any(11 in work.batch.ragged("tokens").values for work in works) and failing["poison"]:
                raise RuntimeError("out of memory")
            return super().accumulate(works)

    @contextmanager
    def frail():
        yield Frail()

    expected = losses_alone(serve, 6)
    served = serve(make=frail)
    service = served.client()
    training, other = (service.create_lora_training_client("tiny/bigram", 4, 7).result() for _ in range(2))
    assert supervised(training, 2) == expected[:2]
    failing["left"] = 1
    assert supervised(training, 2) == expected[2:4]
    assert len(served.hosts) == 2
    failing["poison"] = 1
    with pytest.raises(tinker.RequestFailedError, match=r"failed twice.*out of memory") as caught:
        other.forward_backward([datum([1, 11, 2], weights=np.ones(2))], "cross_entropy").result()
    assert caught.value.category is types.RequestErrorCategory.Server
    assert supervised(training, 2) == expected[4:]


def test_a_server_that_is_closed_continues_with_its_models_and_checkpoints(serve):
    expected = losses_alone(serve, 8)
    first = serve(folder="kept")
    client = RawClient(first.url)
    model = client.model(client.session(), seed=7)
    losses = []
    for step in range(8):
        if step == 4:
            saved = client.post("save_weights", {"model_id": model, "seq_id": 9, "path": "middle"})[1]
            path = client.result(saved)["path"]
            first.close()
            first.close = lambda: None
            client = RawClient(serve(folder="kept").url)
        seq = 2 * step + 1 + (step >= 4)
        rows = client.post("forward_backward", forward_backward(model, seq, [CYCLE]))[1]
        adam = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        client.result(client.optim_step(model, seq + 1, **adam)[1])
        losses.append(passed(client.result(rows)).metrics["loss:sum"])
    assert losses == expected
    assert client.post("weights_info", {"tinker_path": path})[1]["lora_rank"] == 4


class KilledServer:
    """A server in a process of its own, at one port, that is killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder
        self.start()

    def start(self) -> None:
        program = [sys.executable, Path(__file__).with_name("bigram_host.py"), self.folder / "queue", str(self.port)]
        self._process = subprocess.Popen([*program, self.folder / "calls"], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline()

    def num_steps(self) -> int:
        calls = self.folder / "calls"
        return calls.read_text().count("apply") if calls.exists() else 0

    def end(self, number=signal.SIGKILL) -> int:
        self._process.send_signal(number)
        return self._process.wait(30)


def killed(server, times, seed):
    """Kill and start the server in a thread, until it was done this often, each time soon after a step has begun."""
    draws = random.Random(seed)

    def run():
        for _ in range(times):
            made = server.num_steps()
            while server.num_steps() == made:
                time.sleep(0.005)
            time.sleep(draws.uniform(0.0, 0.1))
            server.end()
            server.start()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_no_step_is_lost_or_taken_twice_when_the_server_is_killed(serve, tmp_path, times):
    steps = 6 * times
    expected = losses_alone(serve, steps)
    server = KilledServer(tmp_path)
    try:
        service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.port}", api_key="tml-test")
        training = service.create_lora_training_client("tiny/bigram", 4, 7).result()
        losses, thread = [], killed(server, times, seed=times)
        while len(losses) < steps or thread.is_alive():
            losses += supervised(training, 4)
        thread.join()
        assert losses[:steps] == expected
        # Steps are made again to restore models, and not all of them.
        assert server.num_steps() <= len(losses) + times * 2 * 3
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.end()


def test_a_sampler_never_answers_from_other_weights(serve):
    served = serve(folder="sampled")
    service = served.client()
    training = service.create_lora_training_client("tiny/bigram", 4, 7).result()
    supervised(training, 3)
    path = training.save_weights_for_sampler("named").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    params, prompt = types.SamplingParams(max_tokens=2, seed=1), types.ModelInput.from_ints([1])
    first = sampler.sample(prompt, 1, params).result().sequences[0]
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == first.tokens
    (table,) = (served.server._store.folder / "checkpoints").rglob("table.npy")
    np.save(table, np.zeros((12, 12)))
    again = service.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.RequestFailedError, match="have been replaced"):
        again.sample(prompt, 1, params).result()


def test_idle_models_move_to_the_disk_and_come_back(serve):
    expected = losses_alone(serve, 6)
    served = serve(idle_adapter_s=0.3)
    client = RawClient(served.url)
    model = client.model(client.session(), seed=7)

    def step(number):
        answer = client.post("forward_backward", forward_backward(model, 2 * number + 1, [CYCLE]))[1]
        adam = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        client.result(client.optim_step(model, 2 * number + 2, **adam)[1])
        return passed(client.result(answer)).metrics["loss:sum"]

    losses = [step(number) for number in range(3)]
    deadline = time.monotonic() + 30
    while served.hosts[0].adapters and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not served.hosts[0].adapters
    assert losses + [step(number) for number in range(3, 6)] == expected


def test_hosting_is_left_when_the_server_ends(serve):
    left = []

    @contextmanager
    def noted():
        with hosting() as host:
            yield host
        left.append(host)

    served = serve(make=noted)
    served.close()
    served.close = lambda: None
    assert left == served.hosts
