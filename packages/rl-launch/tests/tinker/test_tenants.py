"""Tenants see and use only what is theirs, within their quotas."""

import hashlib

import pytest
from raw_client import RawClient, forward_backward, passed
from test_learning import CYCLE

from rl_core.errors import ConfigError
from rl_launch.root_config import TinkerConfig
from rl_launch.tinker.server import check_exposure
from rl_launch.tinker.tenants import Tenants

ADAM = {"learning_rate": 0.1, "eps": 1e-8}


def keys_file(folder, **quotas):
    lines = [
        f"{name}: {{sha256: {hashlib.sha256(f'tml-{name}'.encode()).hexdigest()}{more}}}\n"
        for name, more in {"ada": "", "bob": "", **quotas}.items()
    ]
    path = folder / "keys.yaml"
    path.write_text("".join(lines))
    return str(path)


def test_a_key_opens_nothing_of_another_tenant(serve, tmp_path):
    served = serve(keys_file=keys_file(tmp_path))
    ada, bob = (RawClient(served.url, f"tml-{name}") for name in ("ada", "bob"))
    session = ada.session()
    model = ada.model(session)
    promise = ada.post("forward_backward", forward_backward(model, 1, [CYCLE]))[1]
    ada.result(promise)
    path = ada.result(ada.post("save_weights", {"model_id": model, "seq_id": 2, "path": "kept"})[1])["path"]
    sampler = ada.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    )[1]["sampling_session_id"]
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    own = bob.session()
    checkpoint = f"training_runs/{model}/checkpoints/weights/kept"
    target = {"target": {"sampling_session_id": sampler}}
    asked = [
        ("POST", "forward_backward", forward_backward(model, 3, [CYCLE])),
        ("POST", "optim_step", {"model_id": model, "seq_id": 3, "adam_params": ADAM}),
        ("POST", "save_weights", {"model_id": model, "seq_id": 3, "path": "taken"}),
        ("POST", "save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "taken"}),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "load_weights", {"session_id": own, "model_seq_id": 0, "path": path, "optimizer": True}),
        ("POST", "create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny/bigram",
                                  "lora_config": {"rank": 4}}),
        ("POST", "weights_info", {"tinker_path": path}),
        ("POST", "create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}),
        ("POST", "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1,
                                             "base_model": "tiny/bigram"}),
        ("POST", "join_sampling_session", {"sampling_session_id": sampler}),
        ("POST", "asample", {**sample, "sampling_session_id": sampler, "seq_id": 1}),
        ("GET", f"samplers/{sampler}", None),
        ("POST", "retrieve_future", {"request_id": promise["request_id"]}),
        ("POST", "retrieve_futures", target),
        ("POST", "cancel_future", {"request_id": promise["request_id"]}),
        ("POST", "session_heartbeat", {"session_id": session}),
        ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
        ("GET", f"sessions/{session}", None),
        ("GET", f"training_runs/{model}", None),
        ("GET", f"training_runs/{model}/checkpoints", None),
        ("DELETE", checkpoint, None),
        ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 3600}),
    ]  # fmt: skip
    for method, where, body in asked:
        status, answer = bob.send(method, where, body)
        assert status == 404, (where, answer)
        assert "does not exist" in answer["error"]
    assert bob.send("GET", "training_runs")[1]["training_runs"] == []
    assert bob.send("GET", "checkpoints")[1]["checkpoints"] == []
    assert bob.send("GET", "sessions")[1]["sessions"] == [own]
    assert list(bob.send("GET", "status")[1]["tenants"]) == ["bob"]
    # Nothing of it has changed anything.
    assert ada.send("GET", checkpoint.rpartition("/weights")[0])[1]["checkpoints"][0]["tinker_path"] == path
    assert ada.result(ada.optim_step(model, 3, **ADAM)[1])["metrics"]["grad_norm"] > 0
    for key in ("", "tml-eve"):
        status, answer = RawClient(served.url, key).send("GET", "training_runs")
        assert status == 401


def test_three_tenants_with_other_settings_learn_as_each_alone(serve, tmp_path):
    path = keys_file(tmp_path, cy="")
    names, ranks, rates = ("ada", "bob", "cy"), (2, 4, 8), (0.02, 0.1, 0.3)

    def learn(clients):
        models = [each.model(each.session(), rank=rank, seed=rank) for each, rank in zip(clients, ranks, strict=True)]
        losses = [[] for _ in clients]
        for step in range(6):
            rows = [CYCLE[: 4 + 2 * number] for number in range(3)]
            promises = [
                client.post("forward_backward", forward_backward(model, 2 * step + 1, [row]))[1]
                for client, model, row in zip(clients, models, rows, strict=True)
            ]
            for number, (client, promise) in enumerate(zip(clients, promises, strict=True)):
                losses[number].append(passed(client.result(promise)).metrics["loss:sum"])
                adam = {"learning_rate": rates[number], "eps": 1e-8}
                client.result(client.optim_step(models[number], 2 * step + 2, **adam)[1])
        return losses

    together = serve(keys_file=path)
    found = learn([RawClient(together.url, f"tml-{name}") for name in names])
    alone = learn([RawClient(serve(keys_file=path, folder=name).url, f"tml-{name}") for name in names])
    assert found == alone


def test_quotas_bound_a_tenant_and_only_it(serve, tmp_path):
    served = serve(keys_file=keys_file(tmp_path, cy=", models: 1, steps: 1, tokens: 20, storage_gb: 0.000000001"))
    cy, ada = RawClient(served.url, "tml-cy"), RawClient(served.url, "tml-ada")
    session = cy.session()
    model = cy.model(session)
    given = {"session_id": session, "model_seq_id": 1, "base_model": "tiny/bigram", "lora_config": {"rank": 4}}
    assert "quota of models" in cy.post("create_model", given)[1]["error"]
    for seq in (1, 3):
        cy.result(cy.post("forward_backward", forward_backward(model, seq, [CYCLE]))[1])
        answer = cy.result(cy.optim_step(model, seq + 1, **ADAM)[1])
    assert "quota of steps" in answer["error"]
    assert answer["category"] == "user"
    assert "quota of tokens" in cy.result(cy.post("forward_backward", forward_backward(model, 5, [CYCLE]))[1])["error"]
    saved = [
        cy.result(cy.post("save_weights", {"model_id": model, "seq_id": 6 + n, "path": f"c{n}"})[1]) for n in (0, 1)
    ]
    assert "path" in saved[0]
    assert "quota of storage" in saved[1]["error"]
    other = ada.model(ada.session())
    ada.result(ada.post("forward_backward", forward_backward(other, 1, [CYCLE]))[1])
    assert "metrics" in ada.result(ada.optim_step(other, 2, **ADAM)[1])


def test_a_server_without_keys_is_not_reached_from_elsewhere():
    with pytest.raises(ConfigError, match=r"tinker\.keys_file"):
        check_exposure(TinkerConfig(host="0.0.0.0"))
    assert check_exposure(TinkerConfig(host="0.0.0.0", keys_file="keys.yaml")) is None
    with pytest.raises(ConfigError, match="tls_key belong together"):
        check_exposure(TinkerConfig(tls_cert="cert.pem"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be a mapping"),
        ("ada: {sha256: abc}", "ada: sha256"),
        ("ada: {models: 3}", "sha256: Field required"),
        (f"ada: {{sha256: {'0' * 64}, gpus: 3}}", "ada: gpus"),
        (f"ada: {{sha256: {'0' * 64}}}\nbob: {{sha256: {'0' * 64}}}", "ada and bob have the same key"),
        ("a b: {}", "cannot be the name"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_by_name(tmp_path, text, problem):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        Tenants.read(str(path))
