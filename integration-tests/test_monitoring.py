"""The dashboard, the alert rules and the page on monitoring name only what an endpoint serves."""

import json
import re
from pathlib import Path

import pytest
import yaml
from document_checks import ROOT
from test_metrics_glossary import documented

import rl_launch.monitoring
from rl_launch.monitoring.prometheus import RUN_METRICS, exported_name
from rl_launch.monitoring.quantities import QUANTITIES

FILES = Path(rl_launch.monitoring.__path__[0]) / "files"
RULES = FILES / "prometheus_rules.yaml"
_NAME = re.compile(r"\brl_[a-z0-9_]+\b")


def dashboard_expressions():
    panels = json.loads((FILES / "grafana_dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rule_expressions():
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def of_readings():
    return {f"{each.exported}_total" if each.kind == "counter" else each.exported for each in QUANTITIES}


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
    names = {each.recorded for each in QUANTITIES if each.recorded}
    listed = {name.rpartition("/")[2] for name in documented() if name.startswith("system/")}
    assert {f"{prefix}{name}" for name in names for prefix in ("", "max_")} - listed == set()
