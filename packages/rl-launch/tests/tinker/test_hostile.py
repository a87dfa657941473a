"""Strangers, broken bodies and slow readers harm only themselves."""

import asyncio
import socket
import threading
import time

import numpy as np
import pytest
import tinker
import zstandard
from raw_client import RawClient, forward_backward, passed
from test_learning import CYCLE, datum, supervised
from tinker import types
from tinker.proto import tinker_public_pb2 as pb


@pytest.mark.parametrize(
    "body", [b"\xff" * 50, b"{}", b"", pb.ForwardBackwardRequest(model_id="x").SerializeToString()]
)
def test_a_body_that_is_not_a_pass_is_one_clear_error(serve, body):
    status, answer = RawClient(serve().url).post("forward_backward", body, Content_Type="application/x-protobuf")
    assert status == 400
    assert "ForwardBackwardRequest" in answer["error"]


def broken(change):
    """Return a message of one row, changed."""
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(forward_backward("m", 1, [CYCLE]))
    change(message.data[0])
    return message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.model_input[0].encoded_text.__setattr__("tokens", b"abc"), "not a multiple of 4"),
        (lambda d: d.model_input[0].image.__setattr__("data", b"abc"), "images cannot be trained on"),
        (lambda d: d.model_input[0].encoded_text.__setattr__("tokens", np.full(8, 99, np.int32).tobytes()), "id 99"),
        (lambda d: d.model_input[0].encoded_text.__setattr__("tokens", bytes(4 * 100)), "100 tokens; 1 to 63"),
        (lambda d: d.loss_fn_inputs["target_tokens"].shape.__setitem__(0, 7), "8 values for the shape"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(
            pb.Tensor(dtype=1, dense=np.ones(8, np.float32).tobytes())), "must be integers"),
        (lambda d: d.loss_fn_inputs["target_tokens"].__setattr__("dtype", 4), "must be float32 or int64"),
        (lambda d: d.loss_fn_inputs.pop("target_tokens"), "is missing"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(
            pb.Tensor(dtype=1, dense=np.full(8, np.nan, np.float32).tobytes())), "not finite"),
        (lambda d: d.loss_fn_inputs["weights"].CopyFrom(
            pb.Tensor(dtype=1, dense=np.ones(3, np.float32).tobytes())), "has the shape [3]"),
        (lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dtype=2, shape=[8, 1], sparse_csr=pb.SparseCsr(
            values=bytes(8), crow_indices=bytes(72), col_indices=np.array([5]).tobytes()))), "indices outside"),
    ],
)  # fmt: skip
def test_a_pass_with_broken_data_names_what_is_wrong(serve, change, problem):
    client = RawClient(serve().url)
    message = broken(change)
    message.model_id = client.model(client.session())
    promise = client.post("forward_backward", message.SerializeToString())[1]
    assert problem in client.result(promise)["error"]
    # Its number has passed, so the model goes on.
    good = client.post("forward_backward", forward_backward(message.model_id, 2, [CYCLE]))[1]
    assert passed(client.result(good)).metrics["loss:sum"] > 0


def test_a_compressed_pass_is_the_same_and_a_bomb_is_refused(serve):
    client = RawClient(serve(max_body_mb=1).url)
    model = client.model(client.session())
    packed = zstandard.ZstdCompressor().compress
    promise = client.post("forward_backward", packed(forward_backward(model, 1, [CYCLE])), Content_Encoding="zstd")[1]
    assert passed(client.result(promise)).metrics["loss:sum"] == pytest.approx(8 * np.log(12), rel=1e-6)
    status, answer = client.post("forward_backward", packed(bytes(2**24)), Content_Encoding="zstd")
    assert status == 413
    assert "tinker.max_body_mb" in answer["error"]
    assert client.post("forward_backward", b"no zstd", Content_Encoding="zstd")[0] == 400
    assert client.post("forward_backward", b"x", Content_Encoding="gzip")[0] == 415
    assert client.post("forward_backward", bytes(2**20 + 1))[0] == 413


def test_a_tenant_with_too_many_requests_is_told_to_wait_and_its_program_goes_on(serve):
    served = serve(max_queued=2)
    client = RawClient(served.url)
    model = client.model(client.session())
    # These wait for the first, which is taken although the queue is full.
    promises = [client.post("forward_backward", forward_backward(model, seq, [CYCLE])) for seq in (2, 3, 4)]
    assert [status for status, _ in promises] == [200, 200, 429]
    assert "tinker.max_queued" in promises[2][1]["error"]
    first = client.post("forward_backward", forward_backward(model, 1, [CYCLE]))[1]
    for promise in (first, promises[0][1], promises[1][1]):
        client.result(promise)
    assert client.post("forward_backward", forward_backward(model, 4, [CYCLE]))[0] == 200
    # The published client waits by itself.
    service = served.client()
    training = service.create_lora_training_client("tiny/bigram", 4, 7).result()
    assert supervised(training, 3)[-1] < 8 * np.log(12)
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=2)
    futures = [sampler.sample(types.ModelInput.from_ints([1]), 1, params) for _ in range(6)]
    assert all(len(future.result().sequences) == 1 for future in futures)


def test_a_page_of_another_name_is_refused(serve):
    served = serve()
    status, answer = RawClient(served.url).send("GET", "healthz", Host="evil.example")
    assert status == 403
    assert "evil.example" in answer["error"]


def test_slow_and_broken_connections_do_not_hold_others_up(serve):
    served = serve()
    host, port = served.url.removeprefix("http://").split(":")
    held = []
    for number in range(60):
        connection = socket.create_connection((host, int(port)))
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {host}\r\nX-API-Key: tml-slow\r\n"
        connection.sendall(f"{head}Content-Length: 9000000\r\n\r\n".encode() if number % 2 else head.encode())
        held.append(connection)
    begun = time.monotonic()
    service = served.client()
    training = service.create_lora_training_client("tiny/bigram", 4, 7).result()
    losses = supervised(training, 3)
    assert losses[-1] < losses[0]
    for connection in held:
        connection.close()
    assert time.monotonic() > begun


def test_many_clients_at_once_each_learn(serve):
    served = serve()
    expected = supervised(served.client().create_lora_training_client("tiny/bigram", 4, 7).result(), 4)
    found = {}

    def learn(number):
        client = served.client(user_metadata={"number": str(number)})
        found[number] = supervised(client.create_lora_training_client("tiny/bigram", 4, 7).result(), 4)

    threads = [threading.Thread(target=learn, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(12), expected)


def test_a_sample_that_nobody_waits_for_ends(serve):
    served = serve()
    host = served.hosts[0]

    async def never(*_args, **_settings):
        await asyncio.Event().wait()

    host.sample = never
    client = RawClient(served.url)
    session = client.session()
    given = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/bigram"}
    sampler = client.post("create_sampling_session", given)[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    promise = client.post("asample", sample)[1]
    assert client.post("cancel_future", {"request_id": promise["request_id"]})[0] == 200
    assert "cancelled" in client.result(promise)["error"]


def test_a_datum_with_images_is_refused_by_the_published_client_too(serve):
    service = serve().client()
    training = service.create_lora_training_client("tiny/bigram", 4, 7).result()
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    given = datum([1, 2, 3, 4], weights=np.ones(3))
    chunks = types.ModelInput(chunks=[image])
    with pytest.raises(tinker.RequestFailedError, match="images cannot be trained on"):
        training.forward_backward(
            [types.Datum(model_input=chunks, loss_fn_inputs=given.loss_fn_inputs)], "cross_entropy"
        ).result()
