"""What the endpoint serves, read by prometheus-client's own parser."""

import math
import re
import socket
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from rl_core.callback import RunEnd
from rl_core.errors import ConfigError
from rl_core.usage.process import ProcessUsage
from rl_launch.monitoring.prometheus import PrometheusEndpoint, exported_name
from rl_launch.monitoring.quantities import readings_of_engine, readings_of_process
from rl_launch.monitoring.readings import Readings
from rl_launch.session.config import LoggerConfig
from rl_launch.session.observer import ObservedRun


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.fixture
def config():
    return LoggerConfig(prometheus_port=free_port())


@pytest.fixture
def readings():
    return Readings()


@pytest.fixture
def endpoint(config, readings, tmp_path):
    endpoint = PrometheusEndpoint(config, readings)
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 4))
    yield endpoint
    endpoint.close()


def scraped(config, accept="text/plain", parse=plain):
    """Values by name and labels, without the label `run`, which all of them have."""
    address = f"http://127.0.0.1:{config.prometheus_port}/metrics"
    request = urllib.request.Request(address, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    found = {}
    for family in parse(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "my run"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("reward/mean", "rl_reward_mean"),
        ("val/pass@4", "rl_val_pass_4"),
        ("dataset/gsm8k-hard/reward", "rl_dataset_gsm8k_hard_reward"),
        ("eval/päd/mean", "rl_eval_p_d_mean"),
        ("4/4", "rl_4_4"),
    ],
)
def test_a_metric_has_one_name_that_prometheus_accepts(metric, name):
    assert exported_name(metric) == name
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name)


@pytest.mark.parametrize(
    ("accept", "parse"), [("text/plain", plain), ("application/openmetrics-text; version=1.0.0", openmetrics)]
)
def test_a_scrape_has_the_last_step_the_state_and_the_newest_readings(config, endpoint, readings, accept, parse):
    endpoint.start(10, [])
    endpoint.end_step(5, {"reward/mean": 0.5, "val/reward": 0.7, "system/policy-0/cpu_cores": 1.0})
    endpoint.end_step(6, {"reward/mean": float("nan")})
    endpoint.saved(6)
    process = {"worker": "policy-0", "role": "policy", "rank": "0"}
    readings.add(readings_of_process("policy-0", process, ProcessUsage(2.5, 100, None)))
    readings.add(readings_of_engine("rollout-worker-1", {"replica": "1"}, {"num_sampled": 12, "kv_cache_usage": 0.5}))
    found = scraped(config, accept, parse)
    assert math.isnan(found["rl_reward_mean", ()])
    # steps without a validation keep the value of the last one
    assert found["rl_val_reward", ()] == 0.7
    assert (found["rl_step", ()], found["rl_max_steps", ()], found["rl_checkpoint_step", ()]) == (6, 10, 6)
    assert found["rl_run_starts_total", ()] == 1
    assert found["rl_run_dir_size_bytes", ()] > found["rl_run_dir_free_bytes", ()] > 0
    assert found["rl_worker_cpu_cores", tuple(sorted(process.items()))] == 2.5
    assert found["rl_engine_sampled_tokens_total", (("replica", "1"),)] == 12
    assert found["rl_engine_kv_cache_usage_ratio", (("replica", "1"),)] == 0.5
    # metrics of the step that have labelled readings are not exported twice
    assert not [name for name, _ in found if name.startswith("rl_system")]


def test_a_restored_run_is_counted(config, endpoint, tmp_path):
    endpoint.end(RunEnd("failed", "a worker died", 4, 10, {}))
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 4))
    assert scraped(config)["rl_run_starts_total", ()] == 2


def test_of_metrics_with_one_name_the_first_is_exported_and_the_other_is_reported_once(config, endpoint, caplog):
    for step in (5, 6):
        endpoint.end_step(step, {"val/pass@4": 0.25, "val/pass_4": 0.75})
    assert scraped(config)["rl_val_pass_4", ()] == 0.25
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "val/pass_4 is not exported to Prometheus: its name there is that of val/pass@4"
    ]


def test_the_endpoint_is_on_the_loopback_interface_only(endpoint):
    assert endpoint._server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_one_message_with_the_key_and_the_remedy(config, endpoint, readings):
    with pytest.raises(ConfigError, match=rf"logger\.prometheus_port: port {config.prometheus_port} .* in use.*Choose"):
        PrometheusEndpoint(config, readings)


def test_an_address_of_another_machine_is_one_message(readings):
    config = LoggerConfig(prometheus_port=free_port(), prometheus_host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"logger\.prometheus_host: .*192\.0\.2\.1 cannot be opened"):
        PrometheusEndpoint(config, readings)


def test_a_port_is_free_again_when_the_endpoint_is_closed(config, readings):
    PrometheusEndpoint(config, readings).close()
    PrometheusEndpoint(config, readings).close()


def test_every_alert_says_what_it_found_and_what_to_look_at():
    import rl_launch.monitoring

    rules = Path(rl_launch.monitoring.__file__).parent / "files" / "prometheus_rules.yaml"
    alerts = [rule for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]]
    assert len(alerts) >= 6
    for alert in alerts:
        assert {"summary", "description"} <= set(alert["annotations"])
        assert alert["labels"]["severity"] in {"warning", "critical"}
