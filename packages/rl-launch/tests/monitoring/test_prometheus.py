"""What the endpoint serves, read by prometheus-client's own parser."""

import math
import re
import socket
import time
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from rl_core.errors import ConfigError
from rl_core.run import RunEnd
from rl_core.usage.meter import ProcessUsage
from rl_launch.monitoring.prometheus import PrometheusEndpoint, exported_name
from rl_launch.monitoring.quantities import HEALTH, PROCESS, SystemReadings, readings_of
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.config import LoggerConfig
from rl_launch.run_session.observer import ObservedRun


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.fixture
def config():
    return LoggerConfig(prometheus_port=free_port())


@pytest.fixture
def readings():
    return SystemReadings()


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
    readings.add(readings_of(PROCESS, "policy-0", process, vars(ProcessUsage(2.5, 100, None))))
    readings.add(readings_of(HEALTH, "rollout-worker-1", {"replica": "1"}, {"num_sampled": 12, "kv_cache_usage": 0.5}))
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


def test_the_size_of_the_newest_checkpoint_is_known_after_a_save_and_after_a_resume(config, endpoint, tmp_path):
    assert ("rl_checkpoint_bytes", ()) not in scraped(config)
    for step, size in ((1, 100), (2, 300)):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        CheckpointManifest(step, {}, {"policy/rank_0": (size, None), "hf/model.safetensors": (7, None)}).write(folder)
        endpoint.saved(step)
        assert scraped(config)["rl_checkpoint_bytes", ()] == size + 7
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 2))
    assert scraped(config)["rl_checkpoint_bytes", ()] == 307


def test_a_restored_run_is_counted(config, endpoint, tmp_path):
    endpoint.end(RunEnd("failed", "a worker died", 4, 10, {}))
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 4))
    assert scraped(config)["rl_run_starts_total", ()] == 2


def test_what_happens_between_two_scrapes_is_counted(config, endpoint):
    totals = {f"rl_{name}_total" for name in ("failed_rollouts", "skipped_updates", "non_finite_rewards")}
    assert {scraped(config)[name, ()] for name in totals} == {0}
    endpoint.end_step(5, {"rollout/failed": 3, "train/skipped_steps": 1, "reward/mean": float("nan")})
    endpoint.end_step(6, {"rollout/failed": 2, "train/skipped_steps": 1, "reward/mean": 0.5, "train/loss": 1.0})
    endpoint.end_step(7, {"reward/mean": float("inf"), "train/loss": 1e30})
    found = scraped(config)
    assert found["rl_failed_rollouts_total", ()] == 5
    assert found["rl_skipped_updates_total", ()] == 2
    assert found["rl_non_finite_rewards_total", ()] == 2
    assert found["rl_non_finite_losses_total", ()] == 0


@pytest.mark.parametrize(("status", "state"), [("finished", 1), ("interrupted", 2), ("failed", 3)])
def test_the_state_is_that_of_the_end_until_the_run_begins_again(status, state, config, endpoint, tmp_path):
    assert scraped(config)["rl_run_state", ()] == 0
    endpoint.end(RunEnd(status, "", 4, 10, {}))
    assert scraped(config)["rl_run_state", ()] == state
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 4))
    assert scraped(config)["rl_run_state", ()] == 0


class Clock:
    """A clock and a wait that a test turns on, in place of those of the endpoint."""

    def __init__(self, monkeypatch, endpoint):
        self.now, self.waits = 1000.0, []
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        monkeypatch.setattr("rl_launch.monitoring.prometheus.time", clock)
        monkeypatch.setattr(endpoint._end_is_read, "wait", self.waits.append)


@pytest.mark.parametrize(
    ("status", "period", "waits"),
    [
        ("finished", 15.0, [22.5 - 5]),
        ("failed", 15.0, [22.5 - 5]),
        ("finished", 600.0, [60.0]),
        # a job that is ended by a signal has little time
        ("interrupted", 15.0, []),
    ],
)
def test_the_end_of_a_run_is_there_for_one_more_scrape(status, period, waits, config, readings, tmp_path, monkeypatch):
    endpoint = PrometheusEndpoint(config, readings)
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 4))
    clock = Clock(monkeypatch, endpoint)
    for _ in range(2):
        clock.now += period
        scraped(config)
    clock.now += 5
    endpoint.end(RunEnd(status, "", 4, 10, {}))
    endpoint.close()
    assert clock.waits == waits


@pytest.mark.parametrize("scrapes_after", [0, 1])
def test_nothing_is_waited_for_if_nobody_reads_or_the_end_was_read(
    scrapes_after, config, readings, tmp_path, monkeypatch
):
    endpoint = PrometheusEndpoint(config, readings)
    endpoint.begin(ObservedRun("my run", tmp_path, {}, 4))
    clock = Clock(monkeypatch, endpoint)
    scraped(config)
    clock.now += 15
    if scrapes_after:
        scraped(config)
    endpoint.end(RunEnd("finished", "", 4, 10, {}))
    for _ in range(scrapes_after):
        scraped(config)
    endpoint.close()
    assert clock.waits == []


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
