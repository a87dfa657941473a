"""`rl doctor --cluster` as it is typed."""

import json

from rl_process import rl
from surveys import survey
from typer.testing import CliRunner

from rl_launch.cli import app
from rl_launch.doctor.cluster.examination import ClusterReport
from rl_launch.doctor.cluster.judgement import judged
from rl_launch.doctor.findings import Report


def test_a_cluster_that_does_not_answer_is_one_message():
    answer = rl("doctor", "--cluster", RAY_ADDRESS="127.0.0.1:1")
    assert answer.returncode == 2
    assert "RAY_ADDRESS is 127.0.0.1:1, but no Ray cluster answers there" in answer.stderr


def test_the_report_on_a_cluster_is_printed_and_decides_the_exit_code(monkeypatch):
    asked = []

    def examine_cluster(recipe, overrides, *, timeout_s):
        asked.append((recipe, list(overrides), timeout_s))
        found = survey(2, silent={"n1": "it was lost"})
        return ClusterReport(Report(recipe, "cuda", tuple(judged(found)), place="on this cluster"), found)

    monkeypatch.setattr("rl_launch.doctor.cluster.examination.examine_cluster", examine_cluster)
    command = ["doctor", "--cluster", "grpo-math-8b", "cluster.num_nodes=2", "--timeout=5"]
    plain, as_json = (CliRunner().invoke(app, [*command, *option]) for option in ((), ("--json",)))
    assert asked == [("grpo-math-8b", ["cluster.num_nodes=2"], 5.0)] * 2
    assert plain.exit_code == as_json.exit_code == 1
    *lines, verdict = plain.stdout.splitlines()
    assert verdict == "grpo-math-8b cannot run on this cluster: nodes, node n1."
    seen = json.loads(as_json.stdout)
    assert [each["name"] for each in seen["checks"]] == [line[9:].partition(":")[0] for line in lines]
    assert [node["problem"] for node in seen["nodes"]] == ["", "it was lost"]
