"""Every alert by promtool's own evaluation: when it fires, and when it must not."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import rl_launch.monitoring

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (a part of Prometheus: apt install prometheus)"
)

RULES = Path(rl_launch.monitoring.__path__[0]) / "files" / "prometheus_rules.yaml"
GIVEN = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule["alert"] for rule in GIVEN]
MINUTES = 120
GONE = "_"
"""No sample, as when the endpoint does not answer."""


def each_minute(*parts):
    """Values of two hours, from pairs of a value, or several in turn, and a number of minutes; the last one stays."""
    values = []
    for value, count in parts:
        turns = value if isinstance(value, list) else [value]
        values += [turns[minute % len(turns)] for minute in range(count)]
    return [*values, *[values[-1]] * (MINUTES - len(values))]


def always(value):
    return each_minute((value, 1))


def until(minute, values):
    """The same values, until the endpoint is gone."""
    return [*values[:minute], "stale", *[GONE] * (MINUTES - minute - 1)]


MOVING = [60 * minute for minute in range(MINUTES)]
GIGABYTE = 10**9
REPLICA = 'rl_worker_restarts_total{role="rollout-worker", replica="1", worker="rollout-worker-1"}'
GPUS = [f'rl_gpu_utilization_ratio{{gpu="{gpu}"}}' for gpu in range(2)]

HEALTHY = {
    "rl_step": [minute // 2 for minute in range(MINUTES)],
    "rl_max_steps": always(1000),
    "rl_run_state": always(0),
    "rl_run_starts_total": always(1),
    "rl_last_step_timestamp_seconds": MOVING,
    "rl_time_step": always(60),
    "rl_reward_mean": always(0.5),
    "rl_train_loss": always(-0.1),
    "rl_train_skipped_steps": always(0),
    "rl_rollout_failed": always(0),
    "rl_non_finite_rewards_total": always(0),
    "rl_non_finite_losses_total": always(0),
    "rl_skipped_updates_total": always(0),
    "rl_failed_rollouts_total": always(0),
    REPLICA: always(0),
    "rl_run_dir_free_bytes": always(300 * GIGABYTE),
    "rl_run_dir_size_bytes": always(1000 * GIGABYTE),
    'rl_node_memory_used_bytes{node="node0"}': always(50 * GIGABYTE),
    'rl_node_memory_bytes{node="node0"}': always(100 * GIGABYTE),
    **{gpu: each_minute(([0.9, 0.8, 0.2], MINUTES)) for gpu in GPUS},
}
"""Series of two hours in which nothing is wrong, by their names in the endpoint."""

FREE, SAVED, USED = "rl_run_dir_free_bytes", "rl_checkpoint_bytes", 'rl_node_memory_used_bytes{node="node0"}'


def gone(minute, **changed):
    """The healthy series until a minute, and no series after it."""
    return {name: until(minute, values) for name, values in {**HEALTHY, **changed}.items()}


FIRES = {
    "no step for an hour": ("RunMakesNoProgress", {"rl_last_step_timestamp_seconds": always(0)}, 60),
    "no step in ten times its usual time": (
        "RunMakesNoProgress",
        {"rl_last_step_timestamp_seconds": [min(each, 3600) for each in MOVING], "rl_time_step": always(300)},
        60 + 40,
    ),
    "no first step": (
        "RunMakesNoProgress",
        {"rl_last_step_timestamp_seconds": always(0), "rl_time_step": always(GONE), "rl_step": always(0)},
        40,
    ),
    "a driver that was killed": ("DriverIsGone", gone(30), 35),
    "the same, hours later": ("DriverIsGone", gone(30), 119),
    "a driver that was killed before its first step": ("DriverIsGone", gone(5, rl_step=always(0)), 20),
    "an interrupted run whose endpoint closed unread": (
        "DriverIsGone",
        gone(30, rl_last_step_timestamp_seconds=MOVING),
        60,
    ),
    "an interrupted run that nobody resumes": ("DriverIsGone", gone(31, rl_run_state=each_minute((0, 30), (2, 1))), 60),
    "a run that failed": ("RunFailed", gone(31, rl_run_state=each_minute((0, 30), (3, 1))), 35),
    "a run that failed and whose endpoint is open": ("RunFailed", {"rl_run_state": each_minute((0, 30), (3, 1))}, 35),
    "a reward that is not finite between two scrapes": (
        "RewardIsNotFinite",
        {"rl_non_finite_rewards_total": each_minute((0, 50), (1, 1))},
        55,
    ),
    "a reward that is not finite": ("RewardIsNotFinite", {"rl_reward_mean": each_minute((0.5, 50), ("NaN", 1))}, 51),
    "an infinite reward": ("RewardIsNotFinite", {"rl_reward_mean": each_minute((0.5, 50), ("-Inf", 1))}, 51),
    "a loss that is not finite between two scrapes": (
        "LossIsNotFinite",
        {"rl_non_finite_losses_total": each_minute((0, 50), (1, 1))},
        55,
    ),
    "a loss that is not finite": ("LossIsNotFinite", {"rl_train_loss": each_minute((0.5, 50), ("NaN", 1))}, 51),
    "an infinite loss": ("LossIsNotFinite", {"rl_train_loss": each_minute((0.5, 50), ("+Inf", 1))}, 51),
    "updates skipped between two scrapes": (
        "OptimizerStepsAreSkipped",
        {"rl_skipped_updates_total": each_minute((0, 50), (2, 1))},
        60,
    ),
    "updates skipped in every other minute": (
        "OptimizerStepsAreSkipped",
        {"rl_train_skipped_steps": each_minute(([0, 1], MINUTES))},
        110,
    ),
    "rollouts that failed between two scrapes": (
        "RolloutsFail",
        {"rl_failed_rollouts_total": each_minute((0, 50), (3, 1))},
        60,
    ),
    "rollouts that fail in every other minute": (
        "RolloutsFail",
        {"rl_rollout_failed": each_minute(([0, 3], MINUTES))},
        110,
    ),
    "a replica that restarts twice": ("ReplicaRestarts", {REPLICA: each_minute((0, 40), (1, 10), (2, 1))}, 59),
    "a restored run": ("RunWasRestored", {"rl_run_starts_total": each_minute((1, 50), (2, 1))}, 60),
    "little room": ("RunDirectoryIsAlmostFull", {FREE: always(30 * GIGABYTE)}, 10),
    "little room of a small disk": (
        "RunDirectoryIsAlmostFull",
        {FREE: always(10 * GIGABYTE), "rl_run_dir_size_bytes": always(100 * GIGABYTE)},
        10,
    ),
    "little room for a moment": (
        "RunDirectoryIsAlmostFull",
        {FREE: each_minute(([300 * GIGABYTE] * 6 + [5 * GIGABYTE], MINUTES))},
        110,
    ),
    "room for less than one and a half checkpoints of a large model": (
        "RunDirectoryIsAlmostFull",
        {
            FREE: always(1400 * GIGABYTE),
            "rl_run_dir_size_bytes": always(5000 * GIGABYTE),
            SAVED: always(988 * GIGABYTE),
        },
        10,
    ),
    "almost no room, with checkpoints of a tiny model": (
        "RunDirectoryIsAlmostFull",
        {FREE: always(0.9 * GIGABYTE), SAVED: always(0.01 * GIGABYTE)},
        10,
    ),
    "little memory": ("NodeMemoryIsAlmostFull", {USED: always(98 * GIGABYTE)}, 10),
    "little memory in every other minute": (
        "NodeMemoryIsAlmostFull",
        {USED: each_minute(([50 * GIGABYTE, 97 * GIGABYTE], MINUTES))},
        110,
    ),
    "idle GPUs": ("GpusAreIdle", dict.fromkeys(GPUS, each_minute((0.9, 30), (0, 1))), 30 + 40),
    "GPUs that work for one minute of thirty": (
        "GpusAreIdle",
        dict.fromkeys(GPUS, each_minute(([0.2, *[0] * 29], MINUTES))),
        110,
    ),
}
"""Faults: the alert, what differs from the healthy series, and a minute at which it must fire."""

FINISHED = gone(31, rl_run_state=each_minute((0, 30), (1, 1)))
SILENT = {
    "steps that take long": (
        "RunMakesNoProgress",
        {"rl_last_step_timestamp_seconds": [each // 1800 * 1800 for each in MOVING], "rl_time_step": always(1800)},
    ),
    "a long first step": (
        "RunMakesNoProgress",
        {
            "rl_last_step_timestamp_seconds": each_minute((0, 25))[:25] + MOVING[25:],
            "rl_time_step": [*[GONE] * 25, *[1500] * (MINUTES - 25)],
        },
    ),
    "a run that has ended, with its endpoint open": (
        "RunMakesNoProgress",
        {
            "rl_last_step_timestamp_seconds": [min(each, 1800) for each in MOVING],
            "rl_run_state": each_minute((0, 30), (1, 1)),
        },
    ),
    "a run that finished": ("DriverIsGone", FINISHED),
    "a run that failed, which another alert is for": (
        "DriverIsGone",
        gone(31, rl_run_state=each_minute((0, 30), (3, 1))),
    ),
    "an interrupted run that is resumed soon": (
        "DriverIsGone",
        {
            "rl_step": [*[3] * 30, "stale", GONE, *[3] * (MINUTES - 32)],
            "rl_run_state": [*[0] * 29, 2, "stale", GONE, *[0] * (MINUTES - 32)],
        },
    ),
    "a scrape that was missed": ("DriverIsGone", {"rl_step": [*[3] * 30, "stale", *[4] * (MINUTES - 31)]}),
    "a run that finished is no failure": ("RunFailed", FINISHED),
    "a run that was restored after it failed": ("RunFailed", {"rl_run_state": each_minute((0, 30), (3, 1), (0, 1))}),
    "no reward yet": ("RewardIsNotFinite", {"rl_reward_mean": always(GONE)}),
    "a large loss": ("LossIsNotFinite", {"rl_train_loss": always(1e30)}),
    "no update yet": ("OptimizerStepsAreSkipped", {"rl_train_skipped_steps": always(GONE)}),
    "a driver that starts again after failures": (
        "RolloutsFail",
        {"rl_failed_rollouts_total": each_minute((GONE, 30), (0, 1))},
    ),
    "a replica that restarts once": ("ReplicaRestarts", {REPLICA: each_minute((0, 40), (1, 1))}),
    "a policy that was restored": (
        "ReplicaRestarts",
        {'rl_worker_restarts_total{role="policy", rank="0"}': each_minute((0, 40), (1, 5), (2, 1))},
    ),
    "a first start": ("RunWasRestored", {"rl_run_starts_total": each_minute((GONE, 20), (1, 1))}),
    "enough room": ("RunDirectoryIsAlmostFull", {FREE: always(60 * GIGABYTE)}),
    "room for two checkpoints": ("RunDirectoryIsAlmostFull", {SAVED: always(150 * GIGABYTE)}),
    "a small share of a large file system, with small checkpoints": (
        "RunDirectoryIsAlmostFull",
        {FREE: always(18 * GIGABYTE), SAVED: always(7 * GIGABYTE)},
    ),
    "enough memory": ("NodeMemoryIsAlmostFull", {USED: always(94 * GIGABYTE)}),
    "GPUs that wait a while": ("GpusAreIdle", dict.fromkeys(GPUS, each_minute(([0.9, *[0] * 9], MINUTES)))),
    "one GPU of two": ("GpusAreIdle", {GPUS[0]: always(0)}),
}
"""What an alert must not fire on: the alert, and what differs from the healthy series."""


@needs_promtool
def test_prometheus_accepts_the_rules():
    subprocess.run(["promtool", "check", "rules", RULES], check=True)


def test_every_alert_says_what_it_found_and_what_to_look_at():
    for rule in GIVEN:
        assert {"summary", "description"} <= set(rule["annotations"])
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_every_alert_is_shown_to_fire_and_to_stay_silent():
    assert {alert for alert, *_ in FIRES.values()} == set(ALERTS)
    assert {alert for alert, _ in SILENT.values()} == set(ALERTS)


@needs_promtool
@pytest.mark.parametrize("fault", FIRES)
def test_an_alert_fires_on_what_it_is_for(fault, tmp_path):
    alert, changed, minute = FIRES[fault]
    _evaluate(tmp_path, HEALTHY | changed, {alert: {minute: True}})


@needs_promtool
@pytest.mark.parametrize("state", SILENT)
def test_an_alert_is_silent_on_what_only_resembles_it(state, tmp_path):
    alert, changed = SILENT[state]
    _evaluate(tmp_path, HEALTHY | changed, {alert: dict.fromkeys(range(1, MINUTES, 2), False)})


@needs_promtool
@pytest.mark.parametrize("series", [HEALTHY, FINISHED], ids=["healthy", "finished"])
def test_no_alert_fires_on_a_run_without_a_fault(series, tmp_path):
    _evaluate(tmp_path, series, {alert: dict.fromkeys(range(1, MINUTES, 7), False) for alert in ALERTS})


@needs_promtool
@pytest.mark.parametrize(("state", "severity", "other"), [(0, "critical", "warning"), (2, "warning", "critical")])
def test_only_a_driver_that_did_not_report_its_end_is_critical(state, severity, other, tmp_path):
    series = gone(31, rl_run_state=each_minute((0, 30), (state, 1)))
    _evaluate(tmp_path, series, {"DriverIsGone": {60: True}}, severity)
    _evaluate(tmp_path, series, {"DriverIsGone": {60: False}}, other)


def _evaluate(folder, series, expected, severity=".+"):
    """Have promtool compare which alerts of a severity fire on series, with what is expected by alert and minute."""
    firing = f'alertstate="firing", severity=~"{severity}", run="mine"'
    test = {
        "interval": "1m",
        "input_series": [
            {"series": _with_run(name), "values": " ".join(map(str, values))} for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", {firing}}}) or vector(0)',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": float(fires)}],
            }
            for alert, minutes in expected.items()
            for minute, fires in minutes.items()
        ],
    }
    path = folder / "test.yaml"
    settings = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(yaml.safe_dump(settings))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _with_run(series):
    """A series with the labels that a scrape has."""
    name, _, labels = series.partition("{")
    return f'{name}{{run="mine", job="rl", instance="here"{", " + labels if labels else "}"}'
