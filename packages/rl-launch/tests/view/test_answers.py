"""Answers to the requests of a page."""

import pytest
from made_runs import add_step, made_evaluation, made_run, made_server, rollout

from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_launch.view import logs, rollouts
from rl_launch.view.answers import ANSWERS
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.parameters import Parameters


@pytest.fixture
def root(tmp_path):
    made_run(tmp_path / "runs" / "one")
    made_run(tmp_path / "runs" / "two", 2, lr=0.002)
    made_evaluation(tmp_path / "runs" / "evals" / "a", 0.0)
    made_evaluation(tmp_path / "runs" / "evals" / "b", 1.0)
    return tmp_path / "runs"


def ask(root, request, /, **given):
    values = {
        key: [str(each) for each in (value if isinstance(value, list) else [value])] for key, value in given.items()
    }
    return ANSWERS[request](PageCatalog([root]), Parameters(values))


def test_runs_are_listed_with_the_keys_in_which_they_differ(root):
    found = ask(root, "runs")

    assert {run["id"]: run["values"] for run in found["runs"]} == {
        "one": {"policy.optimizer.kwargs.lr": 0.001},
        "two": {"policy.optimizer.kwargs.lr": 0.002},
    }
    assert {each["id"] for each in found["others"]} == {"evals/a", "evals/b"}
    assert found["runs"][0]["labels"]["tags"] == ("first",)


def test_a_run_that_appears_is_listed(root, monkeypatch):
    monkeypatch.setattr("rl_launch.view.catalog._RESCAN_S", 0.0)
    catalog = PageCatalog([root])
    made_run(root / "three")
    assert "three" in {run["id"] for run in ANSWERS["runs"](catalog, Parameters({}))["runs"]}


def test_a_file_of_rollouts_can_be_opened_by_itself(root):
    file = root / "evals" / "a" / "rollouts.jsonl"
    found = ask(file, "rollouts", id="rollouts.jsonl", kind="file", first=0)
    assert found["count"] == 4


def test_rollouts_are_those_of_the_newest_step_unless_others_are_asked_for(root):
    assert {row["step"] for row in ask(root, "rollouts", id="one")["rows"]} == {3}
    found = ask(root, "rollouts", id="one", first=1, last=3, limit=5)
    assert [row["step"] for row in found["rows"]] == [3, 3, 3, 3, 2]
    assert (found["count"], found["next"]) == (12, 5)


def test_rollouts_are_found_by_text_and_by_conditions(root):
    add_step(root / "one", 4, [rollout("p", 0, "The ANSWER is Tee", 1.0), rollout("p", 1, "coffee", 0.0)])

    def found(**given):
        return [row["response"] for row in ask(root, "rollouts", id="one", first=1, last=4, **given)["rows"]]

    assert found(text="answer is tee") == ["The ANSWER is Tee"]
    assert found(where=["response=cof*"]) == ["coffee"]
    assert found(where=["rewards.format>0", "response=cof*"]) == ["coffee"]
    assert found(where=["format>0", "answer=12", "response=cof*"]) == ["coffee"]
    assert found(text="be brief", limit=3) != []
    assert found(text="nowhere") == []


def test_a_search_continues_where_it_stopped(root, monkeypatch):
    monkeypatch.setattr(rollouts, "MAX_SCANNED", 4)
    monkeypatch.setattr(rollouts, "MAX_ROWS", 2)
    add_step(root / "one", 4, [rollout("p", 0, "needle", 1.0)])
    offset, rows = 0, []
    while offset is not None:
        page = ask(root, "rollouts", id="one", first=1, last=4, text="needle", offset=offset, limit=2)
        rows, offset = rows + page["rows"], page["next"]
    assert [row["step"] for row in rows] == [4]


def test_a_rollout_comes_with_its_group_and_the_same_prompt_at_other_steps(root):
    ask(root, "rollouts", id="one", first=1, last=3)
    found = ask(root, "rollout", id="one", kind="step", step=3, row=1)
    assert found["record"]["turns"][0]["text"] == "answer 1 of step 3"
    assert [member["position"] for member in found["group"]] == [0, 1]


def test_long_texts_are_cut_and_the_raw_line_is_not(root, monkeypatch):
    monkeypatch.setattr("rl_launch.view.rollouts.MAX_CHARACTERS", 100)
    add_step(root / "one", 4, [rollout("p", 0, "x" * 1000, 1.0)])
    catalog, given = PageCatalog([root]), Parameters({"id": ["one"], "kind": ["step"], "step": ["4"], "row": ["0"]})

    shown = ANSWERS["rollout"](catalog, given)["record"]["turns"][0]["text"]

    assert shown.startswith("x" * 100 + "\n...")
    assert b"x" * 1000 in rollouts.raw_rollout(catalog, given)


def test_advice_names_metrics_and_rollouts_that_show_it(root):
    add_step(root / "one", 4, [rollout("p", 0, "x", None)], **{"rollout/failed": 1.0})
    found = ask(root, "report", id="one")["advice"][0]
    assert (found["metrics"], found["where"]) == (("rollout/failed",), ("status=failed",))
    rows = ask(root, "rollouts", id="one", first=1, last=4, where=list(found["where"]))["rows"]
    assert [row["step"] for row in rows] == [4]


def test_a_timeline_has_the_time_of_every_phase(root):
    found = ask(root, "timeline", id="one")
    assert found["steps"] == [[1, 1], [2, 2], [3, 3]]
    assert found["columns"]["time/generation"] == [2.0, 2.0, 2.0]
    assert [(event["level"], event["step"]) for event in found["events"]] == [("warning", 2)]
    assert ask(root, "timeline", id="one", points=1)["steps"] == [[1, 3]]


def test_a_value_of_the_config_has_its_origin(root):
    found = {each["key"]: each for each in ask(root, "config", id="one", other="two")["values"]}
    assert found["policy.optimizer.kwargs.lr"] == {
        "key": "policy.optimizer.kwargs.lr", "value": 0.001, "origin": "config.yaml:2", "other": 0.002
    }  # fmt: skip


def test_evaluations_are_compared(root):
    found = ask(root, "evaluations", first="evals/a", second="evals/b")
    assert [each["tasks"]["sums"]["estimates"]["mean"]["value"] for each in found["evaluations"]] == [0.0, 1.0]
    assert found["comparison"]["sums"]["num_better"] == 2


def test_servers_are_listed_with_their_tenants(root):
    made_server(root / "served")
    (found,) = ask(root, "servers")["servers"]
    assert (found["id"], found["base_model"], found["problem"]) == ("served", "Qwen/Qwen3-8B", "")
    assert {each["name"]: each["steps"] for each in found["tenants"]} == {"ada": 4, "bob": 8}
    assert [line["steps"] for line in found["over_time"]] == [{"ada": n, "bob": 2 * n} for n in range(5)]
    (root / "served" / "status.json").write_text("{")
    (found,) = ask(root, "servers")["servers"]
    assert "cannot be read" in found["problem"]


def test_a_log_is_followed_and_starts_over(root):
    log = root / "one" / "logs" / "worker.log"
    log.write_text("first\n")
    part = ask(root, "log", id="one", name="worker.log")
    with log.open("a") as file:
        file.write("second\n")
    assert ask(root, "log", id="one", name="worker.log", start=part["end"])["text"] == "second\n"
    log.write_text("new\n")
    again = ask(root, "log", id="one", name="worker.log", start=part["end"] + 100)
    assert (again["text"], again["has_started_over"]) == ("new\n", True)


def test_a_large_log_is_shown_from_a_line_near_its_end(root, monkeypatch):
    monkeypatch.setattr(logs, "MAX_BYTES", 25)
    (root / "one" / "logs" / "worker.log").write_text("".join(f"line {number:04}\n" for number in range(100)))
    assert ask(root, "log", id="one", name="worker.log")["text"] == "line 0098\nline 0099\n"


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", "", "..", "nothing.log"])
def test_only_logs_of_the_run_are_read(root, name):
    with pytest.raises(RunDirectoryError, match="no log"):
        ask(root, "log", id="one", name=name)


def test_a_link_out_of_the_logs_is_not_a_log(root):
    (root / "one" / "logs" / "link.log").symlink_to("/etc/hostname")
    assert {each["name"] for each in ask(root, "logs", id="one")["logs"]} == {"driver.log"}


@pytest.mark.parametrize("id", ["../one", "/", "nothing", ""])
def test_only_entries_of_the_catalog_are_read(root, id):
    with pytest.raises(RunDirectoryError, match="there is no run"):
        ask(root, "run", id=id)


@pytest.mark.parametrize(
    "given", [{"first": "x"}, {"limit": 10**6}, {"min_reward": "nan"}, {"kind": "other"}, {"where": "nonsense"}]
)
def test_wrong_parameters_are_refused(root, given):
    with pytest.raises((ConfigError, RLError)):
        ask(root, "rollouts", id="one", **given)
