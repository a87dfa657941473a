"""Sweeps, with training that only notes what it is asked to do."""

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rl_core.config import WhenChanged, keys_when_changed, to_yaml
from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_launch.cli import app
from rl_launch.commands import sweep as module
from rl_launch.commands.start import run_of
from rl_launch.commands.sweep import run_names, run_sweep, split_values, sweep_of
from rl_launch.commands.train import TrainOutcome
from rl_launch.run_config.reading import RunRecording
from rl_launch.run_session import RunDirectory
from rl_launch.run_session.directory.run_state import Best, RunState

KEYS = ("policy.optimizer.kwargs.lr=1e-3,1e-4", "sft.seed=1,2", "sft.max_num_steps=2")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1, 2", ["1", "2"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"a,b"', ['"a,b"']),
        ("it's,that's", ["it's", "that's"]),
        ("${oc.env:A,b},c", ["${oc.env:A,b}", "c"]),
        ("['a]',1],2", ["['a]',1]", "2"]),
        ("", [""]),
        ("a,", ["a", ""]),
    ],
)
def test_values_are_separated_by_commas_that_nothing_encloses(text, values):
    assert split_values(text) == values


def test_the_runs_are_those_of_rl_train_with_the_same_keys(tmp_path):
    found = sweep_of("sft-arithmetic", [*KEYS, f"run_dir={tmp_path}"])
    assert found.keys == ("policy.optimizer.kwargs.lr", "sft.seed")
    assert [run.run_dir.name for run in found.runs] == [
        "lr-1e-3_seed-1",
        "lr-1e-3_seed-2",
        "lr-1e-4_seed-1",
        "lr-1e-4_seed-2",
    ]
    alone = run_of(
        "sft-arithmetic",
        [
            "policy.optimizer.kwargs.lr=1e-4",
            "sft.seed=1",
            "sft.max_num_steps=2",
            f"run_dir={tmp_path / 'lr-1e-4_seed-1'}",
        ],
    )
    assert to_yaml(found.runs[2].plan.root) == to_yaml(alone.plan.root)
    assert found.runs[2].run_dir == alone.run_dir


def test_lists_and_quoted_text_are_single_values(tmp_path):
    found = sweep_of("sft-arithmetic", ["logger.tags=[a,b],[c]", "logger.notes='one, two'", f"run_dir={tmp_path}"])
    assert [run.plan.config.logger.tags for run in found.runs] == [["a", "b"], ["c"]]
    assert {run.plan.config.logger.notes for run in found.runs} == {"one, two"}
    assert [run.run_dir.name for run in found.runs] == ["tags-a-b", "tags-c"]


def test_the_folder_is_the_given_one_or_that_of_the_file_or_one_that_the_same_command_finds_again(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: sft-arithmetic\nrun_dir: {tmp_path / 'configured'}\n")
    assert sweep_of(str(file), KEYS).folder == tmp_path / "configured"
    assert sweep_of(str(file), [*KEYS, "run_dir=~/x"]).folder == Path.home() / "x"
    assert sweep_of("sft-arithmetic", KEYS).folder == Path("runs/sft-arithmetic-sweep")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft.max_num_steps=2"], "no key has several values"),
        (["sft.seed=[1,2]"], "no key has several values"),
        (["sft.seed=1,1"], "sft.seed=1,1"),
        (["sft.seed=1,"], "a value is empty"),
        (["sft.seed=1,2", "sft.seed=3"], "sft.seed is set twice"),
        (["sft.seed=1,2", "run_dir=a,b"], "give one folder"),
        (["sft.sede=1,2"], r"sft\.sede .*sft\.seed\?"),
        (["sft.seed=1,x", "sft.max_num_steps=1,-1"], r"seed-1_max_num_steps--1: .*\nseed-x_max_num_steps-1: "),
        (["sft.seed=1,2", "sft.max_num_steps"], "an override is written key=value"),
    ],
)
def test_wrong_sweeps_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of("sft-arithmetic", overrides)


def test_runs_of_a_sweep_are_not_pushed_over_each_other(tmp_path):
    keys = [*KEYS, f"run_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"checkpointing\.push_to: several runs .* would push to hf://me/model"):
        sweep_of("sft-arithmetic", [*keys, "checkpointing.push_to=hf://me/model"])
    places = "checkpointing.push_to=hf://me/a,hf://me/b"
    assert len(sweep_of("sft-arithmetic", ["sft.max_num_steps=2", places, f"run_dir={tmp_path}"]).runs) == 2


def test_folders_have_short_names_that_differ():
    names = run_names(["a.b", "c"], [["/data/x/model", "'one, two'"], ["-data-x-model", "one-two"], ["", "x" * 99]])
    assert names == ["b-data-x-model_c-one-two", "b-data-x-model_c-one-two-2", f"b-empty_c-{'x' * 40}"]


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that were made, and of the Rays that were started; `at` fails or stops a run."""
    noted = SimpleNamespace(runs=[], rays=[], at={})

    class Ray:
        def __enter__(self):
            noted.rays.append("started")

        def __exit__(self, *error):
            noted.rays.append("ended")

    def train(plan, *, run_dir, title):
        noted.runs.append(run_dir.name)
        ending = noted.at.get(run_dir.name, TrainOutcome({}))
        if isinstance(ending, BaseException):
            raise ending
        directory = RunDirectory(run_dir, RunRecording())
        directory.open(plan.root)
        directory.close()
        status = "finished" if ending.stop_signal is None else "interrupted"
        best = Best("val/loss", 2.0, 1)
        goals = keys_when_changed(plan.root, WhenChanged.GOAL)
        RunState(status, 2 if status == "finished" else 1, 2, goals=goals, best=best).write(run_dir)
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "val/loss": 2.0}\n{"step": 2, "val/loss": 3.0}\n')
        return ending

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr("rl_launch.cluster.virtual_cluster.VirtualCluster.of", lambda *_: Ray())
    return noted


def swept(tmp_path, *overrides):
    keys = ["checkpointing.enabled=false", "sft.max_num_steps=2", f"run_dir={tmp_path / 'sweep'}", *overrides]
    return CliRunner().invoke(app, ["sweep", "sft-arithmetic", *keys], env={"COLUMNS": "100"})


def test_all_runs_are_made_in_one_ray_and_listed(tmp_path, trained):
    answer = swept(tmp_path, "policy.optimizer.kwargs.lr=1e-3,1e-4", "sft.seed=1,2")
    assert answer.exit_code == 0, answer.output
    assert trained.runs == ["lr-1e-3_seed-1", "lr-1e-3_seed-2", "lr-1e-4_seed-1", "lr-1e-4_seed-2"]
    assert trained.rays == ["started", "ended"]
    lines = answer.stdout.splitlines()
    assert lines[0].split() == ["run", "lr", "seed", "val/loss", "val/loss:best", "state", "step", "age"]
    assert ["lr-1e-4_seed-2", "0.0001", "2", "3", "2", "finished", "2/2"] in [line.split()[:7] for line in lines]


def test_a_sweep_that_is_finished_starts_nothing_and_one_with_more_values_makes_those(tmp_path, trained):
    swept(tmp_path, "sft.seed=1,2")
    del trained.runs[:], trained.rays[:]
    answer = swept(tmp_path, "sft.seed=1,2")
    assert (answer.exit_code, trained.runs, trained.rays) == (0, [], [])
    assert "seed-2" in answer.stdout
    swept(tmp_path, "sft.seed=1,2,3")
    assert trained.runs == ["seed-3"]


def test_after_a_run_that_fails_the_others_are_made_in_another_ray(tmp_path, trained):
    trained.at["seed-1"] = RLError("rank 0 is gone")
    answer = swept(tmp_path, "sft.seed=1,2")
    assert answer.exit_code == 1
    assert trained.runs == ["seed-1", "seed-2"]
    assert trained.rays == ["started", "ended", "started", "ended"]
    assert "error: seed-1: rank 0 is gone" in answer.stderr
    assert "seed-2" in answer.stdout
    del trained.at["seed-1"], trained.runs[:]
    assert swept(tmp_path, "sft.seed=1,2").exit_code == 0
    assert trained.runs == ["seed-1"]


def test_a_mistake_of_the_user_in_one_run_costs_neither_the_others_nor_ray(tmp_path, trained):
    trained.at["seed-1"] = ConfigError("no such dataset")
    answer = swept(tmp_path, "sft.seed=1,2")
    assert answer.exit_code == 1
    assert trained.rays == ["started", "ended"]
    assert "error: seed-1: no such dataset" in answer.stderr


def test_a_signal_ends_the_run_and_the_sweep_which_goes_on_there(tmp_path, trained, caplog):
    trained.at["seed-2"] = TrainOutcome({}, signal.SIGTERM)
    with caplog.at_level(logging.WARNING, "rl_launch"):
        answer = swept(tmp_path, "sft.seed=1,2,3")
    assert answer.exit_code == 128 + signal.SIGTERM
    assert trained.runs == ["seed-1", "seed-2"]
    assert "seed-2 interrupted\n\nTo go on, run the same command again." in answer.stdout
    del trained.at["seed-2"], trained.runs[:]
    assert swept(tmp_path, "sft.seed=1,2,3").exit_code == 0
    assert trained.runs == ["seed-2", "seed-3"]


def test_sigterm_between_runs_ends_ray(tmp_path, trained, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    found = sweep_of("sft-arithmetic", ["sft.seed=1,2", f"run_dir={tmp_path / 'sweep'}"])
    monkeypatch.setattr(module, "train", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        run_sweep(found, lambda error, _: str(error))
    assert ended.value.code == 128 + signal.SIGTERM
    assert trained.rays == ["started", "ended"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_cluster_section_gets_another_ray(tmp_path, trained):
    swept(tmp_path, "cluster.cpu_ranks_per_node=1,2", "sft.seed=1,2")
    assert trained.rays == ["started", "ended", "started", "ended"]


def test_a_folder_that_is_taken_is_refused_before_anything_starts(tmp_path, trained):
    swept(tmp_path, "sft.seed=1,2")
    del trained.runs[:], trained.rays[:]
    answer = swept(tmp_path, "sft.seed=3,1", "sft.learn=last")
    assert answer.exit_code == 2
    assert "a run with another config" in answer.stderr
    assert (trained.runs, trained.rays) == ([], [])
    with pytest.raises(RunDirectoryError):
        run_sweep(
            sweep_of(
                "sft-arithmetic",
                [
                    "checkpointing.enabled=false",
                    "sft.seed=1,3",
                    "policy.precision=bfloat16",
                    f"run_dir={tmp_path / 'sweep'}",
                ],
            ),
            lambda error, _: str(error),
        )


LORA = ("policy.lora_cfg.use_rslora=false", "policy.lora_cfg.max_adapters=2", "sft.max_num_steps=2")


def test_runs_that_share_a_base_are_made_together(tmp_path, trained, monkeypatch):
    made = []

    def together(runs, folder, explained):
        made.append([run.name for run in runs])
        return ({"lr-1_dim-2_precision-float32": "it broke"}, None) if len(made) == 1 else ({}, None)

    monkeypatch.setattr(module, "train_together", together)
    keys = ["policy.optimizer.kwargs.lr=1,2", "policy.lora_cfg.dim=2,4", "policy.precision=float32,bfloat16"]
    found = sweep_of("sft-lora-tiny", [*LORA, *keys, f"run_dir={tmp_path}"])
    failures, stopped = run_sweep(found, lambda error, _: str(error))
    assert [[name.rpartition("-")[2] for name in names] for names in made] == [["float32"] * 4, ["bfloat16"] * 4]
    assert (failures, stopped) == ({"lr-1_dim-2_precision-float32": "it broke"}, None)
    assert trained.runs == []


def test_a_base_that_does_not_start_fails_its_runs_and_no_others(tmp_path, trained, monkeypatch):
    def refused(runs, folder, explained):
        raise ConfigError("too little memory")

    monkeypatch.setattr(module, "train_together", refused)
    keys = ["policy.lora_cfg.max_adapters=1,2", "sft.seed=1,2", "policy.lora_cfg.use_rslora=false"]
    found = sweep_of("sft-lora-tiny", [*keys, f"run_dir={tmp_path}"])
    failures, _ = run_sweep(found, lambda error, _: str(error))
    assert failures == dict.fromkeys(["max_adapters-2_seed-1", "max_adapters-2_seed-2"], "too little memory")
    assert trained.runs == ["max_adapters-1_seed-1", "max_adapters-1_seed-2"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("grpo-arithmetic", r"only runs that learn from given rows.* grpo has rollouts. Remove this key"),
        ("rm-tiny", "rm trains a head that its runs do not share"),
    ],
)
def test_algorithms_that_cannot_share_a_base_are_refused(tmp_path, recipe, message):
    keys = ["policy.lora_cfg.enabled=true", "policy.lora_cfg.max_adapters=2", "policy.precision=float32,bfloat16"]
    with pytest.raises(ConfigError, match=message):
        sweep_of(recipe, [*keys, f"run_dir={tmp_path}"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "guardrails.big={metric: train/grad_norm, above: 9, action: skip_step}",
            r"guardrails\.big\.action: skip_step",
        ),
        ("profiling.steps=[1,2]", r"profiling\.steps: the processes of the model are shared"),
    ],
)
def test_settings_that_act_on_a_shared_model_are_refused(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of("sft-lora-tiny", [*LORA, setting, "sft.seed=1,2", f"run_dir={tmp_path}"])
