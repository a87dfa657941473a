"""Several runs side by side."""

import json
from statistics import stdev

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rl_launch.cli import app
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.show.comparison import compared_metrics, comparison_of, letter, show_comparison
from rl_launch.show.terminal import Curve, overlay

CONFIG = """\
algorithm: sft
run_dir: {path}
sft: {{seed: {seed}, max_num_steps: 3}}
policy: {{model_name: tiny, optimizer: {{kwargs: {{lr: {lr}}}}}}}
logger: {{tags: [{path}]}}
"""


@pytest.fixture
def make(tmp_path):
    def made(name, *, lr, seed, losses):
        path = tmp_path / name
        path.mkdir()
        (path / "run.json").write_text("{}")
        (path / "config.yaml").write_text(CONFIG.format(path=name, lr=lr, seed=seed))
        rows = [{"step": step, "val/loss": loss, "train/lr": lr} for step, loss in enumerate(losses, start=1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RunFolder(path)

    return made


@pytest.fixture
def runs(make):
    return [
        make("fast-1", lr=0.01, seed=1, losses=(4.0, 2.0, 3.0)),
        make("slow-1", lr=0.001, seed=1, losses=(4.0, 3.5)),
        make("fast-2", lr=0.01, seed=2, losses=(4.0, 3.0, 2.5)),
    ]


def printed(comparison, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show_comparison(comparison, console)
    return console.export_text()


def test_runs_that_differ_only_in_seeds_are_one_group_with_mean_and_deviation(runs):
    found = comparison_of(runs)
    assert (found.keys, found.seeds) == (("policy.optimizer.kwargs.lr",), ("sft.seed",))
    fast, slow = found.groups
    assert (fast.name, slow.name) == ("lr 0.01", "lr 0.001")
    assert fast.paths == (str(runs[0].path), str(runs[2].path))
    assert fast.seeds == ({"sft.seed": 1}, {"sft.seed": 2})
    last, best = fast.metrics["val/loss"]
    assert (last.mean, last.std, last.num_runs) == (2.75, pytest.approx(stdev([3.0, 2.5])), 2)
    assert (best.mean, best.std) == (2.25, pytest.approx(stdev([2.0, 2.5])))
    assert (slow.metrics["val/loss"][0].mean, slow.metrics["val/loss"][0].std) == (3.5, None)
    assert fast.series["val/loss"] == [(1, 4.0), (2, 2.5), (3, 2.75)]
    assert fast.metrics["train/lr"][1] is None


def test_the_mean_of_a_step_is_over_the_runs_that_recorded_it(make):
    [group] = comparison_of(
        [make("one", lr=1, seed=1, losses=(4.0, 2.0)), make("two", lr=1, seed=2, losses=(2.0,))]
    ).groups
    assert group.series["val/loss"] == [(1, 3.0), (2, 2.0)]


def test_a_comparison_says_what_differs_and_which_is_best(runs):
    text = printed(comparison_of(runs))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "3 runs that differ in policy.optimizer.kwargs.lr, over sft.seed"
    assert "b lr 0.001 3.5 3.5" in lines
    ranking = [line for line in lines if line.startswith(("a lr 0.01 2.75", "b lr 0.001 3.5"))]
    assert ranking == ["a lr 0.01 2.75 ± 0.35 2.25 ± 0.35", "b lr 0.001 3.5 3.5"]
    assert max(map(len, text.splitlines())) <= 80


def test_a_metric_that_each_run_has_once_is_compared_without_a_curve(make):
    runs = [make(f"lr-{lr}", lr=lr, seed=1, losses=(loss,)) for lr, loss in ((1, 3.0), (2, 2.0))]
    lines = [" ".join(line.split()) for line in printed(comparison_of(runs)).splitlines()]
    assert lines[-2:] == ["b lr 2 2 2", "a lr 1 3 3"]
    assert not any("step" in line for line in lines)


def test_runs_that_differ_in_nothing_but_seeds_are_all_one(make):
    runs = [make(f"seed-{seed}", lr=1, seed=seed, losses=(4.0, 2.0)) for seed in (1, 2)]
    text = printed(comparison_of(runs))
    assert text.startswith("2 runs that differ only in sft.seed\n")
    assert comparison_of(runs).groups[0].name == "all"


def test_many_keys_that_differ_have_a_line_each(make, tmp_path):
    first, second = (make(name, lr=lr, seed=1, losses=(1.0, 2.0)) for name, lr in (("x", 1), ("y", 2)))
    for run, value in ((first, 1), (second, 2)):
        keys = "".join(f"  k{number}: {value}\n" for number in range(5))
        with (run.path / "config.yaml").open("a") as file:
            file.write(f"grpo:\n{keys}")
    text = printed(comparison_of([first, second]))
    assert "2 runs that differ in 6 keys" in text
    assert any(line.split() == ["grpo.k3", "1", "2"] for line in text.splitlines())


def test_runs_without_steps_say_so(make):
    text = printed(comparison_of([make("x", lr=1, seed=1, losses=()), make("y", lr=1, seed=1, losses=())]))
    assert "2 runs with equal configs" in text
    assert "No steps are recorded yet" in text


def test_curves_in_one_chart_share_its_axes_and_end_in_their_letters():
    lines = overlay("loss", [Curve([(1, 0.0), (9, 1.0)], "a", "red"), Curve([(5, 4.0), (6, 4.0)], "b")], width=50)
    plot = [line.plain[9:] for line in lines[1:-1]]
    assert lines[1].plain.split()[0] == "4"
    assert plot[0].index("b") == pytest.approx(41 * 5 / 8, abs=1)
    assert "a" in plot[5]
    assert plot[5].endswith("a")
    assert lines[-1].plain.split() == ["1", "step", "9"]
    assert {len(line.plain) for line in lines} == {50}
    assert any(span.style == "red" for line in lines for span in line.spans)


def test_runs_with_rewards_are_compared_by_its_parts_and_not_by_losses(make):
    runs = [make(name, lr=1, seed=seed, losses=()) for seed, name in enumerate(("x", "y"))]
    names = ("train/loss", "policy/nll", "reward/mean", "val/reward", "reward/short", "reward/correct", "policy/kl")
    for run in runs:
        (run.path / "metrics.jsonl").write_text(json.dumps({"step": 1, **dict.fromkeys(names, 0.5)}) + "\n")
    found = compared_metrics(comparison_of(runs))
    assert found == ["reward/mean", "val/reward", "reward/short", "reward/correct", "policy/kl"]


def test_groups_have_letters():
    assert [letter(index) for index in (0, 25, 26, 51, 52)] == ["a", "z", "aa", "az", "ba"]


def test_the_command_compares_several_runs(runs):
    paths = [str(run.path) for run in runs]
    answer = CliRunner().invoke(app, ["show", *paths, "--json"])
    assert answer.exit_code == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["keys"] == ["policy.optimizer.kwargs.lr"]
    assert found["groups"][1]["metrics"]["val/loss"]["last"] == {"mean": 3.5, "std": None, "num_runs": 1}
    answer = CliRunner().invoke(app, ["show", *paths, "--step", "1"])
    assert answer.exit_code == 2
    assert "--step needs a single run, got 3" in answer.stderr


def test_the_command_draws_all_runs_into_one_image(runs, tmp_path):
    pytest.importorskip("matplotlib")
    answer = CliRunner().invoke(app, ["show", *(str(run.path) for run in runs), "--png", str(tmp_path / "plots")])
    assert answer.exit_code == 0, answer.output
    assert [path.name for path in sorted((tmp_path / "plots").iterdir())] == ["train.png", "val.png"]
