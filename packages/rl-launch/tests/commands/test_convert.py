"""Sources, refusals and the order of a conversion, on models of one number; real ones are in the integration tests."""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors_files import write_weights
from typer.testing import CliRunner

from rl_core.config import to_yaml
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigProblems, RLError
from rl_core.model import LOGPROBS, SCORES, SavedFile
from rl_launch.cli import app
from rl_launch.commands.conversion import convert, weight_files
from rl_launch.commands.conversion.convert import Probe, _made, to_checkpoint, to_hugging_face
from rl_launch.commands.conversion.source import checkpoint_of
from rl_launch.run_config.reading import read_model_plan, read_plan
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 32,
    }
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 32, "dtype": "float32"}))
    write_weights(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": (4, 4)})
    return folder


@pytest.fixture
def run_dir(tmp_path, model):
    """A run with a checkpoint."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_3"
    (checkpoint / "policy").mkdir(parents=True)
    (checkpoint / "policy" / "trainer.pt").write_text("state")
    written = [SavedFile("trainer.pt", 5, hashlib.sha256(b"state").hexdigest(), rank=0)]
    CheckpointManifest.of(checkpoint, 3, {}, written={"policy": written}).write(checkpoint)
    config = read_plan("sft-arithmetic").config
    policy = config.policy.model_copy(update={"model_name": str(model)})
    (folder / "config.yaml").write_text(to_yaml(config.model_copy(update={"policy": policy})))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "out"], "folder 'nothing' does not exist in "),
        (["model", "out"], "--to dtensor"),
        (["model", "model", "--to", "dtensor"], "model already exists"),
        (["run", "run/config.yaml"], "already exists"),
        (["run/checkpoints", "out"], "neither a checkpoint"),
        (["model", "out", "--to", "dtensr"], "dtensor?"),
        (["./elsewhere", "out", "--to", "dtensor"], 'got "./elsewhere"'),
        (["run", "out", "--to", "dtensor", "--adapter"], "run trained no adapters"),
        (["run/checkpoints/step_3/policy", "out"], "is a part of the checkpoint"),
        (["run/checkpoints/step_3/policy", "out", "--to", "dtensor"], "is a part of the checkpoint"),
        (["model", "out", "--to", "dtensor", "--verify-with", "nonesuch"], "nonesuch"),
        (
            ["model", "out", "--to", "dtensor", "--verify-with", "megatron", "--no-verify"],
            "--verify-with and --no-verify",
        ),
        (["model", "out", "policy.precission=float32", "--to", "dtensor"], "policy.precision?"),
        (
            ["model", "out", "--to", "dtensor", "policy.megatron_cfg.enabled=true"],
            "policy.megatron_cfg.enabled are both",
        ),
        (
            ["model", "out", "--to", "megatron", "policy.megatron_cfg.tensor_model_parallel_size=2"],
            "policy.megatron_cfg.tensor_model_parallel_size (command line): got 2",
        ),
        (["run", "out", "sft.sede=1"], "sft.seed?"),
        (["run", "out", "sft.seed=1"], "sft.seed: has no effect on the files"),
        (["run", "out", "policy.optimizer.kwargs.lr=1e-3"], "policy.optimizer.kwargs.lr: has no effect"),
        (["run", "out", "--to", "dtensor", "policy.max_grad_norm=1"], "policy.max_grad_norm: has no effect"),
        (["run", "out", "--adapter", "policy.precision=bfloat16"], "policy.precision has no effect on adapters"),
        (["run", "out", "--dtype", "bfloat16"], "--dtype has no effect without --quantize"),
        (["model", "out", "--quantize", "int4", "--dtype", "int8"], "--dtype: got 'int8'; allowed: float32"),
        (["run", "out", "--adapter"], "run trained no adapters"),
        (["model", "out", "--to", "dtensor", "--adapter"], "SOURCE is a model"),
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


def test_a_checkpoint_that_was_not_finished_is_refused_by_name(run_dir):
    (run_dir / "checkpoints" / "step_3" / "manifest.json").unlink()
    answer = CliRunner().invoke(app, ["convert", "run/checkpoints/step_3", "out"])
    assert answer.exit_code == 2
    assert "step_3 is damaged: it has no manifest.json, which is written last" in " ".join(answer.stderr.split())


def test_damaged_and_foreign_models_are_refused_by_name(model):
    arguments = ["convert", "model", "out", "--to", "dtensor"]
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 2
    assert "damaged: model.safetensors is truncated" in " ".join(answer.stderr.split())
    weights.rename(model / "pytorch_model.bin")
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 2
    assert "it is a model with pickled weights" in " ".join(answer.stderr.split())
    assert "`rl convert FOLDER NEW_FOLDER`" in " ".join(answer.stderr.split())
    (model / "config.json").unlink()
    answer = CliRunner().invoke(app, ["convert", "model", "out"])
    assert answer.exit_code == 2
    assert "model has no config.json" in " ".join(answer.stderr.split())


@pytest.fixture
def pickled(model, monkeypatch):
    """A folder with pickled weights; returns what is asked of the process that reads them, and its answer."""
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    seen = SimpleNamespace(calls=[], answer={"num_tensors": 1, "num_files": 1, "num_bytes": 4, "shared": ["a", "b"]})

    def run(command, **_):
        source, target, *arguments = command[3:]
        seen.calls.append((Path(source).relative_to(Path.cwd()), Path(target), *arguments))
        (Path(target) / "model.safetensors").write_text("weights")
        return SimpleNamespace(returncode=0, stdout=json.dumps(seen.answer))

    monkeypatch.setattr(weight_files, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(weight_files.DriverEnvs, "provided", lambda specs, mode: provided(seen, specs, mode))
    return seen


def provided(seen, specs, mode):
    seen.mode, seen.specs = mode, specs
    return SimpleNamespace(interpreters=dict.fromkeys(specs, "python"))


@pytest.mark.parametrize("to", [[], ["--to", "hf"]])
def test_pickled_weights_are_written_as_safetensors(pickled, tmp_path, to):
    answer = CliRunner().invoke(app, ["convert", "model", "out", *to, "cluster.worker_envs=shared"])
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout == "out\n"
    [(source, target)] = pickled.calls
    assert (str(source), target.parent, target.name) == ("model", tmp_path, ".out.converting")
    assert (tmp_path / "out/model.safetensors").read_text() == "weights"
    assert pickled.mode == "shared"
    assert "rl-dtensor" in str(pickled.specs["policy"].wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter"], "--adapter: model has pickled weights"),
        (["--verify-with", "megatron"], "--verify-with: model has pickled weights"),
        (["policy.precision=float32"], "policy.precision has no effect on a folder with pickled weights"),
        (["cluster.worker_envs=share"], "did you mean shared?"),
    ],
)
def test_what_has_no_effect_on_pickled_weights_is_refused(pickled, tmp_path, arguments, message):
    answer = CliRunner().invoke(app, ["convert", "model", "out", *arguments])
    assert answer.exit_code == 2
    assert message in " ".join(answer.stderr.split())
    assert not pickled.calls
    assert not (tmp_path / "out").exists()


def test_a_problem_of_pickled_weights_leaves_nothing(pickled, tmp_path):
    pickled.answer = {"problem": "pytorch_model.bin holds more than tensors"}
    answer = CliRunner().invoke(app, ["convert", "model", "out"])
    assert (answer.exit_code, "model: pytorch_model.bin holds more than tensors" in answer.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.fixture
def megatron(model, pickled):
    """A folder with checkpoints of Megatron-LM; otherwise as `pickled`."""
    saved = Path("saved")
    saved.mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("7")
    pickled.answer = {"num_tensors": 1, "num_files": 1, "num_bytes": 4, "source": "saved/iter_0000007"}
    return pickled


def test_a_checkpoint_of_megatron_is_written_with_the_config_of_a_model(megatron, tmp_path):
    answer = CliRunner().invoke(app, ["convert", "saved", "out", "policy.model_name=model"])
    assert (answer.exit_code, answer.stdout) == (0, "out\n"), answer.stderr
    [(source, target, model)] = megatron.calls
    assert (str(source), target.name, model) == ("saved", ".out.converting", str(tmp_path / "model"))
    assert (tmp_path / "out/model.safetensors").read_text() == "weights"
    assert "rl-megatron" in str(megatron.specs["policy"].wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "saved is a Megatron-LM checkpoint, which has no config and tokenizer of Hugging Face. Add policy.model_n",
        ),
        (["policy.model_name=model", "--adapter"], "--adapter: saved is a checkpoint of Megatron"),
        (["policy.model_name=model", "policy.precision=float32"], "policy.precision has no effect on a Megatron-LM"),
    ],
)
def test_a_checkpoint_of_megatron_needs_a_model_and_nothing_else(megatron, tmp_path, arguments, message):
    answer = CliRunner().invoke(app, ["convert", "saved", "out", *arguments])
    assert answer.exit_code == 2
    assert message in " ".join(answer.stderr.split())
    assert not megatron.calls
    assert not (tmp_path / "out").exists()


def test_a_model_is_quantised_where_torch_is(model, pickled, tmp_path):
    (model / "pytorch_model.bin").rename(model / "model.safetensors")
    pickled.answer = {
        "num_quantised": 2,
        "num_bytes": 4,
        "num_bytes_before": 8,
        "relative_error": 0.1,
        "dtype": "float32",
    }
    options = ["--quantize", "int4", "--group-size", "64", "--exclude", "o_proj", "--exclude", "model.layers.0"]
    answer = CliRunner().invoke(app, ["convert", "model", "out", *options])
    assert (answer.exit_code, answer.stdout) == (0, "out\n"), answer.stderr
    [(source, target, settings)] = pickled.calls
    assert (str(source), target.parent, target.name) == ("model", tmp_path, ".out.converting")
    excluded = ["o_proj", "model.layers.0"]
    assert json.loads(settings) == {"format": "int4", "group_size": 64, "exclude": excluded, "dtype": ""}
    assert (tmp_path / "out/model.safetensors").read_text() == "weights"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantize", "int3"], "--quantize: got 'int3'; allowed: int4, mxfp4, float8"),
        (["--quantize", "int4"], "--quantize: model is not a folder with a model in Hugging Face files"),
        (["--quantize", "mxfp4", "--group-size", "64"], "--group-size has no effect with --quantize mxfp4"),
        (["--quantize", "int4", "--to", "dtensor"], "--quantize cannot be combined with --to"),
        (["--exclude", "o_proj"], "--group-size and --exclude have no effect without --quantize"),
    ],
)
def test_a_quantisation_that_cannot_be_is_refused(pickled, tmp_path, arguments, message):
    answer = CliRunner().invoke(app, ["convert", "model", "out", *arguments])
    assert answer.exit_code == 2
    assert message in " ".join(answer.stderr.split())
    assert not pickled.calls
    assert not (tmp_path / "out").exists()


def test_a_run_directory_stands_for_its_newest_checkpoint(run_dir):
    checkpoint = run_dir / "checkpoints" / "step_3"
    assert checkpoint_of(run_dir) == checkpoint_of(checkpoint) == checkpoint


def test_devices_set_aside_for_generation_do_not_count(tmp_path):
    resources = "policy.generation.colocated.resources.gpus_per_node=1"
    overrides = ("policy.generation.colocated.enabled=false", resources, "cluster.cpu_ranks_per_node=1")
    with pytest.raises(ConfigProblems) as refused:
        read_plan("grpo-arithmetic", overrides)
    assert [each.key for each in refused.value.problems] == ["policy.generation.colocated.resources.gpus_per_node"]
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(read_plan("grpo-arithmetic").config))
    assert read_model_plan(path, overrides).config.cluster.cpu_ranks_per_node == 1


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


class NumberModel:
    """A model that is one number, which its files hold; it computes that number for every token.

    Args:
        spoils: whether its exports hold another number.
    """

    def __init__(self, source, *, spoils=False):
        file = Path(source.policy.model_name) / "number"
        if source.checkpoint is not None:
            file = source.checkpoint / "policy" / "trainer.pt"
        self._number = float(file.read_text()) + _adapter(source)
        self._spoils = spoils

    def infer(self, batch, reads):
        (read,) = reads
        tokens = batch.ragged("tokens")
        return Batch({read.name: tokens.like(np.full(len(tokens.values), self._number, np.float32))})

    def export(self, path, dtype=None):
        (Path(path) / "dtype").write_text(str(dtype))
        number = self._number + 1 if self._spoils else self._number
        (Path(path) / "number").write_text(str(number))
        (Path(path) / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 32}')

    def save(self, path):
        self._saved = f"{self._number}".encode()
        (Path(path) / "trainer.pt").write_bytes(self._saved)

    def finish_save(self):
        return [SavedFile("trainer.pt", len(self._saved), hashlib.sha256(self._saved).hexdigest(), rank=0)]


def _adapter(source):
    adapter = source.policy.lora_cfg.adapter
    return 0.0 if adapter is None else float((Path(adapter) / "number").read_text())


class Started:
    """The sources whose models are started, in order; those at the positions in `spoiled` export another number."""

    def __init__(self):
        self.sources = []
        self.spoiled = set()

    @contextmanager
    def cluster(self, target, sources):
        yield self._start

    @contextmanager
    def _start(self, source):
        self.sources.append(source)
        yield NumberModel(source, spoils=len(self.sources) - 1 in self.spoiled)


@pytest.fixture
def started(monkeypatch):
    made = Started()
    monkeypatch.setattr(convert, "_cluster", made.cluster)
    return made


def names_of(started):
    return [source.backend.name for source in started.sources]


@pytest.fixture
def number_run(run_dir, model):
    """A run whose checkpoint holds a number."""
    checkpoint = run_dir / "checkpoints" / "step_3"
    (checkpoint / "policy" / "trainer.pt").write_text("7.5")
    written = [SavedFile("trainer.pt", 3, hashlib.sha256(b"7.5").hexdigest(), rank=0)]
    CheckpointManifest.of(checkpoint, 3, {}, written={"policy": written}).write(checkpoint)
    (model / "number").write_text("2.5")
    return run_dir


@pytest.mark.parametrize(("overrides", "dtype"), [((), "None"), (("policy.precision=bfloat16",), "bfloat16")])
def test_a_precision_is_the_dtype_of_the_files(number_run, tmp_path, started, overrides, dtype):
    to_hugging_face(number_run, tmp_path / "out", overrides)
    assert (tmp_path / "out" / "dtype").read_text() == dtype
    if overrides:
        assert {source.policy.precision for source in started.sources} == {dtype}


def test_files_are_loaded_again_and_compared(number_run, started, tmp_path):
    to_hugging_face(number_run, tmp_path / "out")
    assert (tmp_path / "out" / "number").read_text() == "7.5"
    first, second = started.sources
    assert first.checkpoint == number_run / "checkpoints" / "step_3"
    assert second.checkpoint is None
    assert Path(second.policy.model_name).parent == tmp_path
    assert names_of(started) == ["dtensor", "dtensor"]


def test_files_that_compute_something_else_are_not_kept(number_run, started, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    started.spoiled.add(0)
    with pytest.raises(RLError, match=r"compute different logprobs than the source: the largest difference is 0\.13"):
        to_hugging_face(number_run, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
    to_hugging_face(number_run, tmp_path / "unverified", verify=False)
    assert len(started.sources) == 3


def test_another_backend_reads_the_files(number_run, started, tmp_path):
    to_hugging_face(number_run, tmp_path / "out", verify_with="megatron")
    assert names_of(started) == ["dtensor", "megatron"]
    to_checkpoint(str(tmp_path / "model"), tmp_path / "new", "megatron", verify_with="dtensor")
    assert names_of(started)[2:] == ["megatron", "dtensor", "megatron"]
    assert started.sources[3].checkpoint is None
    assert started.sources[4].checkpoint is not None


def test_a_checkpoint_becomes_one_of_another_backend(number_run, started, tmp_path):
    mesh = ["cluster.cpu_ranks_per_node=2", "policy.megatron_cfg.tensor_model_parallel_size=2"]
    to_checkpoint(str(number_run), tmp_path / "new", "megatron", [*mesh, "policy.dtensor_cfg.tensor_parallel_size=2"])
    assert names_of(started) == ["dtensor", "megatron", "megatron"]
    assert started.sources[0].policy.dtensor_cfg.tensor_parallel_size == 2
    assert started.sources[1].policy.megatron_cfg.tensor_model_parallel_size == 2
    assert (tmp_path / "new" / "policy" / "trainer.pt").read_text() == "7.5"
    # the config names the model that the run names, as the files in between are gone
    assert f"model_name: {tmp_path / 'model'}" in (tmp_path / "new" / "config.yaml").read_text()
    assert not list(tmp_path.glob(".new*"))
    to_hugging_face(tmp_path / "new", tmp_path / "back")
    assert (tmp_path / "back" / "number").read_text() == "7.5"
    assert names_of(started)[3:] == ["megatron", "megatron"]
    # its mesh need not fit this machine
    one_rank = ["cluster.cpu_ranks_per_node=1", "policy.megatron_cfg.tensor_model_parallel_size=1"]
    to_checkpoint(str(tmp_path / "new"), tmp_path / "other", "dtensor", one_rank)
    assert names_of(started)[5:] == ["megatron", "dtensor", "dtensor"]


def test_a_model_that_is_made_here_is_found_for_its_probe(started, model, tmp_path, monkeypatch):
    (model / "number").write_text("2.5")
    monkeypatch.setattr("rl_launch.model_files.local_models.tiny_model", lambda: model)
    monkeypatch.setattr(NumberModel, "__init__", lambda self, source, spoils: setattr(self, "_number", 2.5))
    to_checkpoint("tiny-arithmetic", tmp_path / "new", "dtensor")
    assert (tmp_path / "new" / "policy" / "trainer.pt").read_text() == "2.5"


@pytest.mark.parametrize("adapter", [False, True])
def test_an_adapter_becomes_a_checkpoint_merged_or_apart(number_run, started, tmp_path, adapter, monkeypatch):
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"base_model_name_or_path": str(tmp_path / "model"), "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shapes = {f"base_model.model.model.layers.0.mlp.up_proj.lora_{each}.weight": (2, 4) for each in "AB"}
    write_weights(folder / "adapter_model.safetensors", shapes)
    (folder / "number").write_text("0.25")

    def export_adapter(model, path):
        for file in folder.iterdir():
            (Path(path) / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(NumberModel, "export_adapter", export_adapter, raising=False)
    # the number of a checkpoint of adapters has theirs in it
    to_checkpoint(str(folder), tmp_path / "new", "megatron", adapter=adapter)
    assert names_of(started) == ["megatron"] * 3
    assert [source.policy.lora_cfg.enabled for source in started.sources] == [True, adapter, adapter]
    assert (tmp_path / "new" / "policy" / "trainer.pt").read_text() == "2.75"
    written = read_model_plan(tmp_path / "new" / "config.yaml").config.policy
    assert (written.model_name, written.lora_cfg.adapter) == (str(tmp_path / "model"), None)
    assert (written.lora_cfg.enabled, written.lora_cfg.dim == 2) == (adapter, adapter)


def test_a_probe_reads_scores_of_a_model_without_a_language_head():
    fields = {"text_config": {"vocab_size": 5, "max_position_embeddings": 8}}
    probe = Probe.of(fields, role="reward_model", precision="float32")
    assert probe.read == SCORES
    assert probe.batch.ragged("tokens").values.max() < 5
    assert probe.batch.lengths.tolist() == [8] * 4
    assert Probe.of(fields, role="critic", precision="float32", max_length=6).batch.lengths.tolist() == [6] * 4
    assert Probe.of(fields, role="policy", precision="float32").read == LOGPROBS


@pytest.mark.parametrize("after", [[-8.0, -1.0, np.nan], [-8.0, -1.0, -1.0001], [-8.0, -1.0]])
def test_a_probe_refuses_what_differs(after):
    probe = Probe(Batch({"tokens": Ragged.from_rows([np.arange(3, dtype=np.int32)])}), LOGPROBS, 1e-5)
    before = np.array([-8.0, -1.0, -1.0], np.float32)
    with pytest.raises(RLError, match="the files compute different logprobs"):
        probe.compare(before, np.array(after, np.float32), "the files")
    assert "agree" in probe.compare(before, before - np.float32([5e-5, 5e-6, 0]), "the files")
