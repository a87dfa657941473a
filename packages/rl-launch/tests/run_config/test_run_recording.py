import pytest
import yaml

from rl_core.config import WhenChanged, load, resolve, tree_to_yaml
from rl_core.errors import ConfigError, ConfigProblems, RunDirectoryError
from rl_launch.run_config.reading import RunRecording, read_plan, recorded_environments
from rl_launch.run_config.root_types import type_of
from rl_launch.run_session import RunDirectory
from rl_launch.run_session.directory.recording import changes_since, kept

MEGATRON = "policy.megatron_cfg.enabled=true"


def config(*overrides, recipe="grpo-arithmetic"):
    return read_plan(recipe, overrides).config


def record(path, settings, *environments):
    directory = RunDirectory(path, RunRecording(environments))
    directory.open(settings)
    directory.close()
    return path / "config.yaml"


def changes(path, settings):
    recording = RunRecording(recorded_environments(path))
    return {each.change.key: each.rule for each in changes_since(path, settings, recording)}


def test_only_what_the_run_uses_is_kept(tmp_path):
    tree = yaml.safe_load(record(tmp_path, config(), "math").read_text())
    assert list(tree["env"]) == ["math"]
    assert [key for key in tree["policy"] if key in ("dtensor_cfg", "megatron_cfg")] == ["dtensor_cfg"]
    assert tree["policy"]["dtensor_cfg"]["enabled"] is True
    assert [key for key in tree["policy"]["generation"] if key.endswith("_cfg")] == ["vllm_cfg"]


def test_what_is_kept_reads_back_to_the_same_run(tmp_path):
    path = record(tmp_path, config(MEGATRON, "policy.generation.backend=hf"), "math")
    assert changes(path, config(MEGATRON, "policy.generation.backend=hf")) == {}
    again = resolve(load(path), type_of(load(path), of_run=True)).config
    assert kept(again, RunRecording(["math"])) == yaml.safe_load(path.read_text())


def test_settings_of_what_is_not_used_are_no_difference(tmp_path):
    path = record(tmp_path, config(), "math")
    megatron = "policy.megatron_cfg={enabled: false, tensor_model_parallel_size: 2}"
    other = config(megatron, "env.reasoning_gym.format_reward=0.5")
    assert changes(path, other) == {}


@pytest.mark.parametrize("rewards", ["{a: rewards.py:a}", "[rewards.py:a]"])
def test_an_environment_of_rewards_alone_is_the_users_own(tmp_path, monkeypatch, rewards):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def a(response):\n    return 1.0\n")
    own = config(f"env.mine.rewards={rewards}", "data.default.env_name=mine")
    assert changes(record(tmp_path / "run", own, "mine"), own) == {}


def test_naming_the_default_backend_is_no_difference(tmp_path):
    assert changes(record(tmp_path, config(), "math"), config("policy.dtensor_cfg.enabled=true")) == {}


@pytest.mark.parametrize(("before", "after"), [([], [MEGATRON]), ([MEGATRON], [])])
def test_another_training_backend_needs_a_new_run(tmp_path, before, after):
    found = changes(record(tmp_path, config(*before), "math"), config(*after))
    assert set(found.values()) == {WhenChanged.NEW_RUN}
    assert set(found) == {"policy.dtensor_cfg.enabled", "policy.megatron_cfg.enabled"}


def test_another_engine_needs_a_branch(tmp_path):
    found = changes(record(tmp_path, config(), "math"), config("policy.generation.backend=hf"))
    assert found["policy.generation.backend"] is WhenChanged.BRANCH


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("policy.train_micro_batch_size=8", WhenChanged.RESUME),
        ("policy.logprob_batch_size=8", WhenChanged.RESUME),
        ("policy.sequence_packing.enabled=true", WhenChanged.RESUME),
        ("policy.dtensor_cfg.tensor_parallel_size=2", WhenChanged.RESUME),
        ("policy.dtensor_cfg.recompute=full", WhenChanged.RESUME),
        ("policy.generation.vllm_cfg.max_num_seqs=8", WhenChanged.RESUME),
        ("cluster.cpu_ranks_per_node=4", WhenChanged.RESUME),
        ("logger.tensorboard_enabled=false", WhenChanged.RESUME),
        ("checkpointing.save_period=1", WhenChanged.RESUME),
        ("env.math.num_workers=1", WhenChanged.RESUME),
        ("data.num_workers=1", WhenChanged.RESUME),
        ("grpo.val_period=1", WhenChanged.RESUME),
        ("run_dir=elsewhere", WhenChanged.RESUME),
        ("grpo.max_num_steps=100", WhenChanged.GOAL),
        ("policy.optimizer.kwargs.lr=0.1", WhenChanged.BRANCH),
        ("policy.precision=bfloat16", WhenChanged.BRANCH),
        ("policy.train_global_batch_size=64", WhenChanged.BRANCH),
        ("loss_fn.surrogate.clip_high=0.3", WhenChanged.BRANCH),
        ("grpo.seed=1", WhenChanged.BRANCH),
        ("grpo.num_prompts_per_step=128", WhenChanged.BRANCH),
        ("env.math.format_reward=0.5", WhenChanged.BRANCH),
        ("data.train.settings.max_operand=9", WhenChanged.BRANCH),
        ("policy.model_name=tiny-arithmetic", WhenChanged.NEW_RUN),
        ("policy.lora_cfg.enabled=true", WhenChanged.NEW_RUN),
        ("policy.optimizer.name=torch.optim.Adam", WhenChanged.NEW_RUN),
        ("policy.hf_config_overrides={hidden_size: 8}", WhenChanged.NEW_RUN),
    ],
)
def test_each_key_of_a_run_has_its_rule(tmp_path_factory, override, rule):
    path = tmp_path_factory.getbasetemp() / "recorded" / "config.yaml"
    if not path.exists():
        record(path.parent, config(), "math")
    found = changes(path, config(override))
    assert rule in found.values()
    assert set(found) == {override.partition("={")[0].partition("=")[0]} or "{" in override


def test_an_environment_that_is_not_installed_is_named(tmp_path):
    path = record(tmp_path, config(), "math")
    tree = yaml.safe_load(path.read_text())
    path.write_text(tree_to_yaml({**tree, "env": {**tree["env"], "asks_prompt": {"num_workers": 2}}}))
    said = r"'asks_prompt' is not installed, .* \S*config.yaml "
    with pytest.raises(ConfigError, match=said):
        read_plan(tmp_path)
    with pytest.raises(RunDirectoryError, match=said):
        RunDirectory(tmp_path, RunRecording()).open(config())
    # by its type, a user's own is always there
    path.write_text(tree_to_yaml(tree))
    assert read_plan(tmp_path).config.algorithm == "grpo"


OF_VERSION_0_1 = """\
algorithm: grpo
policy:
  model_name: tiny-arithmetic
  dtensor_cfg: {activation_checkpointing: false, recompute_granularity: full}
  tokenizer: {name: null}
loss_fn: {surrogate: {name: null}, ratio_clip_max: 0.3, use_cispo: true, aggregation: null, token_level_loss: true}
data: {train: {dataset_name: arithmetic}}
"""


@pytest.mark.parametrize("beside", ["run.json", "plan.json", "eval.json"])
@pytest.mark.parametrize("name", ["", "config.yaml"])
def test_a_recorded_config_of_an_earlier_version_is_read_under_the_keys_of_this_one(tmp_path, caplog, beside, name):
    (tmp_path / "config.yaml").write_text(OF_VERSION_0_1)
    (tmp_path / beside).write_text('{"versions": {"rl-launch": "0.1.0"}}')
    for _ in range(2):
        config = read_plan(str(tmp_path / name), ["loss_fn.surrogate.clip_low=0.1"]).config
    surrogate = config.loss_fn.surrogate
    assert (surrogate.name, surrogate.clip_low, surrogate.clip_high) == ("cispo", 0.1, 0.3)
    assert config.policy.dtensor_cfg.recompute == "none"
    assert config.policy.tokenizer.split_special_tokens == "none"
    version = "version 0.1.0" if beside == "run.json" else "an earlier version"
    said = f"{tmp_path} was written by {version}; 5 keys are read under their new names"
    assert [record.getMessage() for record in caplog.records].count(said) == 1


def test_a_recipe_with_keys_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text(OF_VERSION_0_1)
    with pytest.raises(ConfigProblems, match=r"5 keys are those of an earlier .*rl config upgrade \S+mine\.yaml"):
        read_plan(str(tmp_path / "mine.yaml"))


def test_an_environment_that_only_rows_name_is_kept_with_its_settings(tmp_path):
    path = record(tmp_path, config(), "math", "nim")
    assert set(yaml.safe_load(path.read_text())["env"]) == {"math", "nim"}
    assert changes(path, config()) == {}
