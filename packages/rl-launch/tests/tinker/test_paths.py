"""Every path that the client knows is served, or refused by name in the form of the API's errors."""

import re
from pathlib import Path as FilePath

import pytest
import tinker
from raw_client import RawClient, forward_backward
from test_learning import CYCLE

from rl_launch.tinker.api import PATHS


def known_to_the_client():
    """Return the paths in the sources of the installed client, with `*` for their parts."""
    found = set()
    for file in FilePath(tinker.__file__).parent.rglob("*.py"):
        if not file.name.endswith("_test.py"):
            for path in re.findall(r"\"/api/v1/([^\"\s]+)\"", file.read_text(encoding="utf-8")):
                found.add(re.sub(r"\{[^}]*\}", "*", path))
    return found


def test_all_paths_of_the_client_are_in_the_table():
    ours = {re.sub(r"\{[^}]*\}", "*", path.template) for path in PATHS}
    assert known_to_the_client() - ours == set()
    # The only paths that are ours are those for operators and health, which the client's command line asks.
    assert ours - known_to_the_client() == {"status"}


def test_no_path_is_hidden_by_another():
    for path in PATHS:
        asked = "/api/v1/" + re.sub(
            r"\{checkpoint\}", "weights/x", re.sub(r"\{(session|run|sampler)\}", "abc", path.template)
        )
        matching = [each for each in PATHS if each.method == path.method and each.pattern.fullmatch(asked)]
        assert matching[0] is path


def test_each_path_works_or_is_refused_by_name(serve):
    client = RawClient(serve().url)
    session = client.session()
    model = client.model(session)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    adam = {"learning_rate": 0.1}
    version = {"sdk_version": "0.38.0"}
    path = f"tinker://{model}/weights/one"
    sampler = f"{session}:sample:0"
    sample = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    checkpoint = {"run": model, "checkpoint": "weights/one"}
    served = [
        ("GET", "healthz", None),
        ("POST", "client/config", version),
        ("POST", "client/dynamic_config", version),
        ("GET", "get_server_capabilities", None),
        ("POST", "telemetry", {"events": []}),
        ("GET", "auth/apikey/me", None),
        ("GET", "status", None),
        ("POST", "create_session", {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0"}),
        ("POST", "session_heartbeat", {"session_id": session}),
        ("POST", "sessions/search", {"session_id": session}),
        ("GET", "sessions", None),
        ("GET", "sessions/{session}", None),
        ("POST", "create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny/bigram",
                                  "lora_config": {"rank": 4}}),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "forward_backward", forward_backward(model, 1, [CYCLE])),
        ("POST", "optim_step", {"model_id": model, "seq_id": 2, "adam_params": adam}),
        ("POST", "save_weights", {"model_id": model, "seq_id": 3, "path": "one"}),
        ("POST", "load_weights", {"model_id": model, "seq_id": 4, "path": path, "optimizer": True}),
        ("POST", "save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "two"}),
        ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}),
        ("POST", "join_sampling_session", {"sampling_session_id": sampler}),
        ("GET", "samplers/{sampler}", None),
        ("POST", "asample", {**sample, "seq_id": 1}),
        ("POST", "retrieve_future", {"request_id": f"{model}:1"}),
        ("POST", "retrieve_futures", {"target": {"sampling_session_id": sampler}}),
        ("POST", "cancel_future", {"request_id": f"{sampler}:1"}),
        ("GET", "training_runs", None),
        ("GET", "training_runs/{run}", None),
        ("GET", "training_runs/{run}/checkpoints", None),
        ("GET", "checkpoints", None),
        ("POST", "weights_info", {"tinker_path": path}),
        ("PUT", "training_runs/{run}/checkpoints/{checkpoint}/ttl", {"ttl_seconds": 3600}),
        ("DELETE", "training_runs/{run}/checkpoints/{checkpoint}", None),
    ]  # fmt: skip
    parts = {"session": session, "sampler": sampler, **checkpoint}
    for method, template, body in served:
        status, answer = client.send(method, template.format(**parts), body)
        assert status == 200, (template, answer)
        if isinstance(answer, dict) and "request_id" in answer:
            result = client.result(answer)
            assert isinstance(result, bytes) or "error" not in result, (template, result)
    refused = client.post("save_weights_external", {"model_id": model, "seq_id": 6, "path": "three"})[1]
    assert "save_weights_external is not served" in client.result(refused)["error"]
    assert client.send("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 200
    assert client.post("session_heartbeat", {"session_id": session})[0] == 410
    reasons = {(path.method, path.template): path for path in PATHS if path.answer is None}
    for (method, template), refusal in reasons.items():
        status, answer = client.send(method, template.format(**parts), {} if method in ("POST", "PUT") else None)
        assert status == 404
        assert answer["error"] == f"{template} is not served: {refusal.reason}"
        assert answer["category"] == "user"
    tried = {(method, template) for method, template, _ in served} | set(reasons)
    tried |= {("POST", "save_weights_external"), ("POST", "sessions/{session}/finish")}
    assert tried == {(path.method, path.template) for path in PATHS}
    assert client.send("GET", "no/such/path")[0] == 404
    assert client.send("GET", "asample")[0] == 405


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topk_prompt_logprobs", 2),
        ("topk_sample_logprobs", 2),
        ("prompt_alt_tokens_k", 1),
        ("record_stability_info", True),
        ("target_prompt_logprobs", {"data": [1], "dtype": "int64", "shape": [1, 1]}),
    ],
)
def test_fields_of_samples_that_are_not_served_are_refused_by_name(serve, field, value):
    client = RawClient(serve().url)
    session = client.session()
    given = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/bigram"}
    sampler = client.post("create_sampling_session", given)[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    status, answer = client.post("asample", {**sample, field: value})
    assert status == 400
    assert f"{field} is not served" in answer["error"]


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ({"rank": 0, "train_unembed": False}, "rank must be at least 1"),
        ({"rank": 4, "train_attn": False, "train_mlp": False}, "train_attn or train_mlp"),
        ({"rank": 4}, "train_unembed is True"),
    ],
)
def test_models_that_cannot_be_made_are_refused_by_name(serve, lora, problem):
    client = RawClient(serve(refuse_unembed=True).url)
    given = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny/bigram", "lora_config": lora}
    status, answer = client.post("create_model", given)
    assert status == 400
    assert problem in answer["error"]
    dimuon = {**given, "lora_config": {"rank": 4, "train_unembed": False}, "optimizer_config": {"type": "dimuon"}}
    assert "'dimuon' is not served" in client.post("create_model", dimuon)[1]["error"]
    other = {**given, "base_model": "org/other"}
    assert "served: tiny/bigram" in client.post("create_model", other)[1]["error"]
    large = client.post("create_model", {**given, "lora_config": {"rank": 99, "train_unembed": False}})[1]
    assert "at most 8" in client.result(large)["error"]


@pytest.mark.parametrize(
    ("loss", "settings", "problem"),
    [
        ("stable_reinforce", {}, "stable_reinforce' is not served"),
        ("custom", {}, "forward_backward_custom"),
        ("no_such", {}, "there is no such loss"),
        ("cross_entropy", {"beta": 1.0}, "is not a setting of cross_entropy"),
        ("ppo", {"beta": 1.0}, "it has clip_low_threshold, clip_high_threshold"),
        ("ppo", {}, "loss_fn_inputs['logprobs'] is missing"),
        ("clip-cov", {}, "there is no such loss"),
        ("sapo", {"tau_positive": -1.0}, "tau_positive"),
    ],
)
def test_losses_that_are_not_served_are_refused_by_name(serve, loss, settings, problem):
    client = RawClient(serve().url)
    model = client.model(client.session())
    body = forward_backward(model, 1, [CYCLE], loss, loss_fn_config=settings)
    assert problem in client.result(client.post("forward_backward", body)[1])["error"]
