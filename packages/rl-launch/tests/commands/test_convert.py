"""What `rl convert` reads, and what it refuses before anything starts; conversions are in the integration tests."""

import hashlib
import json

import pytest
from typer.testing import CliRunner

from rl_core.config import to_yaml
from rl_core.errors import ConfigError
from rl_core.model import SavedFile
from rl_launch.cli import app
from rl_launch.commands.convert import _made, checkpoint_of
from rl_launch.root import read_config, read_model_config
from rl_launch.session.manifest import Manifest


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def run_dir(tmp_path, model):
    """A run with a checkpoint."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_3"
    (checkpoint / "policy").mkdir(parents=True)
    (checkpoint / "policy" / "trainer.pt").write_text("state")
    written = [SavedFile("trainer.pt", 5, hashlib.sha256(b"state").hexdigest(), rank=0)]
    Manifest.of(checkpoint, 3, {}, written={"policy": written}).write(checkpoint)
    config = read_config("sft-arithmetic").config
    policy = config.policy.model_copy(update={"model_name": str(model)})
    (folder / "config.yaml").write_text(to_yaml(config.model_copy(update={"policy": policy})))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "out"], "there is no folder 'nothing' in "),
        (["model", "out"], "--to dtensor"),
        (["model", "model", "--to", "dtensor"], "model exists already"),
        (["run", "run/config.yaml"], "exists already"),
        (["run/checkpoints", "out"], "neither a checkpoint"),
        (["model", "out", "--to", "dtensr"], "did you mean dtensor?"),
        (["./elsewhere", "out", "--to", "dtensor"], "there is no folder './elsewhere'"),
        (["run", "out", "--to", "dtensor"], "the folder 'run' has no config.json"),
        (["model", "out", "policy.precission=float32", "--to", "dtensor"], "did you mean policy.precision?"),
        (["model", "out", "--to", "dtensor", "policy.megatron_cfg.enabled=true"], "are both true"),
        (
            ["model", "out", "--to", "megatron", "policy.megatron_cfg.tensor_model_parallel_size=2"],
            "the policy's 1 ranks are not a multiple of the 2",
        ),
        (["run", "out", "sft.sede=1"], "did you mean sft.seed?"),
        (["run", "out", "--adapter"], "run trained no adapters"),
        (["model", "out", "--to", "dtensor", "--adapter"], "--adapter writes what a run has trained"),
    ],
)
def test_wrong_use_is_one_message_and_leaves_nothing(arguments, message, run_dir, model, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    answer = CliRunner().invoke(app, ["convert", *arguments])
    assert answer.exit_code == 2, answer.stderr
    assert answer.stderr.startswith("error: ")
    assert message in " ".join(answer.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_is_refused_by_name(run_dir):
    (run_dir / "checkpoints" / "step_3" / "policy" / "trainer.pt").write_text("stat")
    for source in ("run", "run/checkpoints/step_3"):
        answer = CliRunner().invoke(app, ["convert", source, "out"])
        assert answer.exit_code == 2
        assert "step_3" in answer.stderr
        assert "trainer.pt has 4 of 5 bytes" in answer.stderr


def test_a_run_directory_stands_for_its_newest_checkpoint(run_dir):
    checkpoint = run_dir / "checkpoints" / "step_3"
    assert checkpoint_of(run_dir) == checkpoint_of(checkpoint) == checkpoint


def test_devices_set_aside_for_generation_do_not_count(tmp_path):
    resources = "policy.generation.colocated.resources.gpus_per_node=1"
    overrides = ("policy.generation.colocated.enabled=false", resources, "cluster.cpu_ranks_per_node=1")
    with pytest.raises(ConfigError, match="leaves no device for policy"):
        read_config("grpo-arithmetic", overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(read_config("grpo-arithmetic").config))
    assert read_model_config(path, overrides).cluster.cpu_ranks_per_node == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_target_that_fails_half_way_leaves_nothing(error, tmp_path):
    with pytest.raises(error):
        _fail_half_way(tmp_path / "out", error)
    assert not list(tmp_path.iterdir())
    with _made(tmp_path / "out") as folder:
        (folder / "whole").write_text("whole")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/whole"]


def _fail_half_way(target, error):
    with _made(target) as folder:
        (folder / "half").write_text("half")
        raise error
