"""Requests of the API, one by one, as bytes."""

import json
import time
import urllib.error
import urllib.request

import numpy as np
from tinker.proto import tinker_public_pb2 as pb


class RawClient:
    """Sends requests of one tenant; answers are status and object, or bytes of protobuf."""

    def __init__(self, url, key="tml-test"):
        self.url, self.key = url, key

    def send(self, method, path, body=None, **headers):
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=data, method=method)
        for name, value in {"X-API-Key": self.key, "Content-Type": "application/json", **headers}.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, media, content = answer.status, answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError as error:
            status, media, content = error.code, error.headers.get_content_type(), error.read()
        return status, content if media == "application/x-protobuf" else json.loads(content)

    def post(self, path, body, **headers):
        return self.send("POST", path, body, **headers)

    def session(self):
        given = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        return self.post("create_session", given)[1]["session_id"]

    def model(self, session, number=0, **lora):
        given = {"session_id": session, "model_seq_id": number, "base_model": "tiny/bigram"}
        status, promise = self.post("create_model", {**given, "lora_config": {"rank": 4, "seed": 3, **lora}})
        assert status == 200, promise
        return self.result(promise)["model_id"]

    def result(self, promise):
        """Wait for the result of a promise."""
        for _ in range(100):
            status, answer = self.post("retrieve_future", {"request_id": promise["request_id"]})
            if status != 408:
                assert status == 200, answer
                return answer
            time.sleep(0.01)
        raise AssertionError("no result")

    def optim_step(self, model, seq, **adam):
        return self.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": adam})


def forward_backward(model, seq, rows, loss="cross_entropy", **settings):
    """Return the body of a pass over rows of tokens, all of whose targets count."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss, **settings)
    for tokens in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], dtype=np.int32).tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = pb.DTYPE_INT64, np.array(tokens[1:], dtype=np.int64).tobytes()
        targets.shape.append(len(tokens) - 1)
    return message.SerializeToString()


def passed(answer):
    """Return the message of an answer to a pass."""
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(answer)
    return message
