"""The endpoint, the dashboard and the rules with a real Prometheus, where it is installed."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
from test_metrics_glossary import documented
from test_monitoring import RULES, dashboard_expressions

from rl_core.usage.meter import GpuUsage, MachineUsage, ProcessUsage
from rl_launch.monitoring.prometheus import PrometheusEndpoint
from rl_launch.monitoring.quantities import (
    HEALTH,
    PROCESS,
    WORKER_RESTARTS,
    SystemReading,
    SystemReadings,
    readings_of,
    readings_of_machine,
)
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.observer import ObservedRun

pytestmark = [
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not installed"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

WAIT_S = 60
GIB = 2**30
POLICY = {"worker": "policy-0", "role": "policy", "rank": "0"}
REPLICA = {"worker": "rollout-worker-0", "role": "rollout-worker", "replica": "0"}


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def read(readings, number):
    """Everything that can be read, with counters that increase."""
    gpu = GpuUsage(0, "GPU-0", 0.9, 70 * GIB, 80 * GIB, 650.0, 62.0)
    readings.add(readings_of_machine("node0", MachineUsage(0.5, GIB, 8 * GIB, GIB, (gpu,)), ()))
    readings.add(readings_of(PROCESS, "policy-0", POLICY, vars(ProcessUsage(1.5, GIB, 40 * GIB))))
    health = {"num_running": 5, "num_waiting": 2, "kv_cache_usage": 0.4, "weight_version": 3}
    counters = {"num_sampled": 1000 * number, "num_draft_tokens": 100 * number, "num_accepted_tokens": 70 * number}
    readings.add(readings_of(HEALTH, "rollout-worker-0", REPLICA, health | counters))
    readings.add([SystemReading(WORKER_RESTARTS, "rollout-worker-0", REPLICA, number)])


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """An endpoint with every metric of the glossary, and what it reads."""
    pytest.importorskip("prometheus_client")
    readings = SystemReadings()
    config = LoggerConfig(prometheus_port=free_port())
    endpoint = PrometheusEndpoint(config, readings)
    endpoint.begin(ObservedRun("my run", tmp_path_factory.mktemp("run"), {}, 0))
    endpoint.start(10, [])
    endpoint.end_step(1, {name: 1.0 for name in documented() if "<" not in name})
    endpoint.saved(1)
    read(readings, 1)
    yield config.prometheus_port, readings
    endpoint.close()


@pytest.fixture(scope="module")
def query(endpoint, tmp_path_factory):
    """Asks a Prometheus that scrapes the endpoint and evaluates the rules."""
    port, readings = endpoint
    folder, own = tmp_path_factory.mktemp("prometheus"), free_port()
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "rl", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
        "rule_files": [str(RULES)],
    }
    (folder / "prometheus.yml").write_text(json.dumps(settings))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=log
        )

    def ask(path, **parameters):
        address = f"http://127.0.0.1:{own}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as response:
            return json.load(response)["data"]

    def sampled():
        try:
            return ask("query", query="rate(rl_engine_accepted_tokens_total[30s]) > 0")["result"]
        except OSError:
            return []

    end, number = time.monotonic() + WAIT_S, 1
    while not sampled():
        assert time.monotonic() < end, (folder / "log").read_text()
        number += 1
        read(readings, number)
        time.sleep(0.2)
    yield ask
    server.terminate()
    server.wait(WAIT_S)


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_every_expression_of_the_dashboard_has_an_answer(query, expression):
    written = expression.replace("$__rate_interval", "30s").replace("$run", ".*")
    assert query("query", query=written)["result"], expression


def test_every_rule_is_evaluated_and_none_that_should_not_fire_does(query):
    end = time.monotonic() + WAIT_S
    while True:
        rules = [rule for group in query("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        assert time.monotonic() < end
        time.sleep(0.2)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert {rule["name"] for rule in rules if rule["state"] == "firing"} <= {
        "OptimizerStepsAreSkipped",
        "ReplicaRestarts",
        "RolloutsFail",
    }


def test_prometheus_finds_no_fault_with_the_names(endpoint):
    port, _ = endpoint
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read()
    subprocess.run(["promtool", "check", "metrics"], input=text, check=True)
