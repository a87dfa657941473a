"""The dashboard, the alert rules and the page on monitoring name only what an endpoint serves."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from document_checks import ROOT
from test_metrics_glossary import documented

import rl_launch.monitoring
from rl_launch.monitoring import quantities
from rl_launch.monitoring.prometheus import RUN_METRICS, exported_name
from rl_launch.monitoring.quantities import Quantity

FILES = Path(rl_launch.monitoring.__path__[0]) / "files"
RULES = FILES / "prometheus_rules.yaml"
_NAME = re.compile(r"\brl_[a-z0-9_]+\b")


def dashboard_expressions():
    panels = json.loads((FILES / "grafana_dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rule_expressions():
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def of_readings():
    found = [each for each in vars(quantities).values() if isinstance(each, Quantity)]
    return {f"{each.exported}_total" if each.kind == "counter" else each.exported for each in found}


def served():
    """Names of all metrics that an endpoint may serve."""
    return {exported_name(name) for name in documented() if "<" not in name} | of_readings() | set(RUN_METRICS)


@pytest.mark.parametrize("expressions", [dashboard_expressions, rule_expressions])
def test_every_expression_names_metrics_that_are_served(expressions):
    named = {name for expression in expressions() for name in _NAME.findall(expression)}
    # a prefix in a regular expression
    assert named - {"rl_time_"} - served() == set()
    assert len(expressions()) >= 10


def test_every_reading_and_every_metric_of_the_run_is_on_the_page():
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert {name for name in of_readings() | set(RUN_METRICS) if f"`{name}`" not in page} == set()


def test_every_recorded_reading_is_in_the_glossary():
    names = {each.recorded for each in vars(quantities).values() if isinstance(each, Quantity) and each.recorded}
    listed = {name.rpartition("/")[2] for name in documented() if name.startswith("system/")}
    assert {f"{prefix}{name}" for name in names for prefix in ("", "max_")} - listed == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not installed")
def test_prometheus_accepts_the_rules():
    subprocess.run(["promtool", "check", "rules", RULES], check=True)


HEALTHY = {
    "rl_last_step_timestamp_seconds": "0+60x60",
    "rl_time_step": "100x60",
    "rl_reward_mean": "0.5x60",
    "rl_train_loss": "0.5x60",
    "rl_train_skipped_steps": "0x60",
    "rl_rollout_failed": "0x60",
    "rl_worker_restarts_total": "0x60",
    "rl_run_starts_total": "1x60",
    "rl_run_dir_free_bytes": "300e9x60",
    "rl_run_dir_size_bytes": "1e12x60",
    "rl_node_memory_used_bytes": "50x60",
    "rl_node_memory_bytes": "100x60",
    "rl_gpu_utilization_ratio": "0.9x60",
}
"""Series of an hour in which nothing is wrong, as values times a number of minutes."""

_REPLICA = 'role="rollout-worker", replica="1", worker="rollout-worker-1"'


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Prometheus is not installed")
@pytest.mark.parametrize(
    ("alert", "series"),
    [
        # one step at 0 s that took 100 s, and none since
        ("RunMakesNoProgress", {"rl_last_step_timestamp_seconds": "0x60", "rl_time_step": "100x60"}),
        ("RewardIsNotFinite", {"rl_reward_mean": "0.5x50 NaNx10"}),
        ("LossIsNotFinite", {"rl_train_loss": "0.5x50 +Infx10"}),
        ("OptimizerStepsAreSkipped", {"rl_train_skipped_steps": "1x60"}),
        ("RolloutsFail", {"rl_rollout_failed": "3x60"}),
        ("ReplicaRestarts", {f"rl_worker_restarts_total{{{_REPLICA}}}": "0x40 1x10 2x10"}),
        ("RunWasRestored", {"rl_run_starts_total": "1x50 2x10"}),
        ("RunDirectoryIsAlmostFull", {"rl_run_dir_free_bytes": "30e9x60", "rl_run_dir_size_bytes": "1e12x60"}),
        ("NodeMemoryIsAlmostFull", {"rl_node_memory_used_bytes": "98x60", "rl_node_memory_bytes": "100x60"}),
        ("GpusAreIdle", {'rl_gpu_utilization_ratio{gpu="0"}': "0x60", 'rl_gpu_utilization_ratio{gpu="1"}': "0x60"}),
    ],
)
def test_an_alert_fires_on_what_it_is_for_and_not_on_a_run_without_it(tmp_path, alert, series):
    for name, firing in (("faulty", True), ("healthy", False)):
        given = series if firing else {key: HEALTHY[key.partition("{")[0]] for key in series}
        test = {
            "interval": "1m",
            "input_series": [
                {"series": _with_run(key), "values": " ".join(_expanded(part) for part in values.split())}
                for key, values in given.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing", run="mine"}}) or vector(0)',
                    "eval_time": "59m",
                    "exp_samples": [{"labels": "{}", "value": float(firing)}],
                }
            ],
        }
        path = tmp_path / f"{name}.yaml"
        settings = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
        path.write_text(yaml.safe_dump(settings))
        subprocess.run(["promtool", "test", "rules", path], check=True)


def _with_run(series):
    """A series with the labels that a scrape has."""
    name, _, labels = series.partition("{")
    return f'{name}{{run="mine", job="rl", instance="here"{", " + labels if labels else "}"}'


def _expanded(part):
    """Values in promtool's notation: `0.5x60` is 60 times 0.5."""
    value, _, count = part.rpartition("x")
    return part if "+" in value[1:] else f"{value}+0x{count}" if value[-1].isdigit() else " ".join([value] * int(count))
