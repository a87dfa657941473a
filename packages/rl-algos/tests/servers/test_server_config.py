"""What servers cannot do is refused when the config is read."""

from types import SimpleNamespace

import pytest
from problem_fields import assert_fields

from rl_algos.grpo.config import GRPOConfig, TrainedAgentConfig
from rl_algos.judges.config import GeneratorJudgeConfig
from rl_algos.servers.config import ServerConfig, server_problems
from rl_core.config import assemble, load, resolve
from rl_core.errors import ConfigError
from rl_core.model_config import ColocatedConfig, ColocatedResources, GenerationConfig

URLS = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
APART = ColocatedConfig(enabled=False)


def found(server=None, config=None, **generation):
    settings = {"colocated": APART, "backend": "server", **generation}
    section = SimpleNamespace(
        **vars(GenerationConfig(**settings)), server_cfg=ServerConfig(**(server or {"urls": URLS}))
    )
    root = SimpleNamespace(algorithm="grpo", grpo=GRPOConfig(), **(config or {}))
    return list(server_problems(SimpleNamespace(generation=section), root))


def test_a_whole_config_has_no_problem():
    assert found() == []
    assert found(top_p=0.9, min_replicas=2, weight_sync="disk") == []


@pytest.mark.parametrize(
    ("key", "settings", "fields"),
    [
        ("server_cfg.urls", {"server": {"urls": []}}, {"mentions": ["is empty"]}),
        ("colocated.enabled", {"colocated": ColocatedConfig()}, {"got": True, "remedy": "Set it to false"}),
        (
            "colocated.resources.num_nodes",
            {"colocated": ColocatedConfig(enabled=False, resources=ColocatedResources(num_nodes=2))},
            {"is_unused": True},
        ),
        ("weight_sync", {"weight_sync": "collective"}, {"got": "collective", "allowed": "auto, disk"}),
        ("weight_sync_encoding", {"weight_sync_encoding": "changes"}, {"got": "changes", "allowed": "full"}),
        ("max_replicas", {"max_replicas": 4}, {"is_unused": True, "mentions": ["server_cfg.urls"]}),
        ("min_replicas", {"min_replicas": 3}, {"got": 3, "mentions": ["server_cfg.urls (2)"]}),
        ("temperature", {"temperature": 0.001}, {"got": 0.001, "allowed": "at least 0.01"}),
        ("top_p", {"server": {"urls": URLS, "engine": "sglang"}, "top_p": 0.9}, {"got": 0.9, "mentions": ["vllm"]}),
        ("top_k", {"server": {"urls": URLS, "engine": "sglang"}, "top_k": 9}, {"got": 9}),
        ("min_p", {"server": {"urls": URLS, "engine": "sglang"}, "min_p": 0.1}, {"got": 0.1}),
        (
            "backend",
            {"config": {"judges": {"critic": GeneratorJudgeConfig(kind="generator", model_name="other")}}},
            {"mentions": ["judges.critic", "kind: endpoint"]},
        ),
    ],
)
def test_a_setting_that_servers_do_not_have_is_refused(key, settings, fields):
    (problem,) = found(**settings)
    assert_fields(problem, f"generation.{key}", fields)


def test_an_opponent_needs_an_engine_of_the_run():
    grpo = SimpleNamespace(agents=SimpleNamespace(white=TrainedAgentConfig(opponent={"update_every": 4})))
    section = SimpleNamespace(**vars(GenerationConfig(colocated=APART)), server_cfg=ServerConfig(urls=URLS))
    (problem,) = server_problems(SimpleNamespace(generation=section), SimpleNamespace(algorithm="grpo", grpo=grpo))
    assert_fields(problem, "generation.backend", {"mentions": ["grpo.agents.white.opponent"]})


@pytest.mark.parametrize(
    ("settings", "key", "mentions"),
    [
        ({"urls": ["10.0.0.1:8000"]}, "urls.0", "is not an address"),
        ({"urls": ["http://[::1"]}, "urls.0", "is not an address"),
        ({"urls": ["http://user:secret@host:1"]}, "urls.0", "must not contain a key"),
        ({"urls": ["http://host:1/?key=secret"]}, "urls.0", "must not contain a key"),
        ({"urls": ["http://host:1", "http://host:1/"]}, "urls.1", "is there twice"),
        ({"urls": URLS, "api_key_env": "sk-secret!"}, "api_key_env", "is not the name of an environment variable"),
    ],
)
def test_addresses_and_keys_are_checked_without_showing_a_key(settings, key, mentions):
    with pytest.raises(ConfigError) as caught:
        resolve(load({"server": settings}), assemble("Root", {"server": ServerConfig}))
    assert f"server.{key}" in str(caught.value)
    assert mentions in str(caught.value)
    assert "secret" not in str(caught.value)
