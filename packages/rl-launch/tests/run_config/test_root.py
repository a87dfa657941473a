import json
import pickle

import pytest
from safetensors_files import write_weights

from rl_algos.data.config import DatasetConfig
from rl_core.config import (
    all_keys,
    as_written,
    changed_as_written,
    explain,
    load,
    plain,
    resolve,
    to_yaml,
    tree_to_yaml,
)
from rl_core.devices import CPU
from rl_core.errors import ConfigError
from rl_core.facts.model_code import code_digest
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.testing.exhaustive import partly_exhaustive
from rl_launch.commands.train import with_local_models
from rl_launch.recipes import RECIPES
from rl_launch.root_config import POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan, read_raw
from rl_launch.run_config.root_types import type_of

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
ON_CPU = ["cluster.device=cpu"]


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_is_valid_on_a_machine_with_its_devices_and_short(recipe, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert read_plan(recipe).config.policy.model_name
    assert len((RECIPES / f"{recipe}.yaml").read_text().splitlines()) <= 30


@pytest.mark.parametrize(
    "key",
    [
        "policy.dtensor_cfg.float8.recipe=tensorwise",
        "policy.dtensor_cfg.qat.group_size=64",
        "policy.dynamic_batching.train_mb_tokens=64",
        "policy.lora_cfg.dim=16",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "grpo.curriculum.window=9",
    ],
)
def test_keys_of_a_section_that_nobody_switched_on_are_refused(key):
    name = key.partition("=")[0]
    section = name.rpartition(".")[0]
    with pytest.raises(ConfigError) as refused:
        read_plan("grpo-arithmetic", [*ON_CPU, key])
    assert str(refused.value).count(name) == 1
    assert f"has no effect without {section}.enabled=true" in str(refused.value)


def test_keys_of_a_section_that_are_read_although_it_is_off_are_left_to_their_own_checks():
    keys = ("grpo.async_grpo.max_trajectory_age_steps=2", "grpo.async_grpo.sampler=ready_first")
    over_sampling = ("grpo.over_sampling_ratio=1.5", "loss_fn.importance.high=2.0")
    settings = read_plan("grpo-arithmetic", [*ON_CPU, *over_sampling, *keys]).config.grpo
    assert (settings.max_staleness, settings.sampler) == (2, "ready_first")
    with pytest.raises(ConfigError, match=r"without grpo\.async_grpo\.enabled=true or grpo\.over_sampling_ratio"):
        read_plan("grpo-arithmetic", [*ON_CPU, *keys])
    with pytest.raises(ConfigError, match=r"grpo\.over_sampling_ratio allows rollouts that are 1 steps old"):
        read_plan("grpo-arithmetic", [*ON_CPU, "grpo.over_sampling_ratio=1.5"])


BY_HF = "policy.generation.backend=hf"
BY_MEGATRON = "policy.megatron_cfg.enabled=true"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            [BY_HF, "policy.generation.vllm_cfg.speculation.method=ngram"],
            "vllm_cfg.speculation .*Set .*backend=vllm, or",
        ),
        ([BY_HF, "policy.generation.vllm_cfg.enforce_eager=true"], f"with {BY_HF}"),
        ([BY_MEGATRON, "policy.dtensor_cfg.tensor_parallel_size=2"], f"with {BY_MEGATRON}.*Set policy.dtensor_cfg.ena"),
    ],
)
def test_keys_of_a_backend_are_refused_where_another_is_chosen(keys, says):
    with pytest.raises(ConfigError, match=rf"has no effect {says}" if says.startswith("with") else says):
        read_plan("grpo-math-1b", [*ON_CPU, *keys])


def test_keys_of_a_recipes_backend_stay_when_another_is_chosen_over_them(tmp_path):
    """`rl train RECIPE policy.generation.backend=hf` is how a backend is changed."""
    (tmp_path / "own.yaml").write_text(
        "defaults: grpo-math-1b\npolicy: {generation: {backend: vllm, vllm_cfg: {enforce_eager: true}}}\n"
    )
    (tmp_path / "over.yaml").write_text("defaults: own.yaml\npolicy: {generation: {backend: hf}}\n")
    (tmp_path / "wrong.yaml").write_text("defaults: over.yaml\npolicy: {generation: {vllm_cfg: {max_num_seqs: 8}}}\n")
    for source, overrides in ((tmp_path / "own.yaml", [BY_HF]), (tmp_path / "over.yaml", [])):
        assert read_plan(source, [*ON_CPU, *overrides]).config.policy.generation.backend == "hf"
    with pytest.raises(ConfigError, match=r"vllm_cfg\.max_num_seqs .*wrong\.yaml:2.*has no effect") as refused:
        read_plan(tmp_path / "wrong.yaml", ON_CPU)
    assert "enforce_eager" not in str(refused.value)


def test_a_printed_config_reads_back_to_the_same_run(tmp_path):
    """Sections of backends that the run does not use are left out of it."""
    for keys in ([BY_HF], [BY_MEGATRON]):
        plan = read_plan("grpo-math-1b", [*ON_CPU, *keys])
        for tree in (as_written(plan.root), changed_as_written(plan.root)):
            (tmp_path / "printed.yaml").write_text(tree_to_yaml(plan.without_unused(tree)))
            again = read_plan(tmp_path / "printed.yaml", [])
            assert again.without_unused(as_written(again.root)) == plan.without_unused(as_written(plan.root))


def test_an_unknown_key_of_such_a_section_is_named_as_that():
    with pytest.raises(ConfigError, match=r"policy\.lora_cfg\.dimm.*policy\.lora_cfg\.dim\?"):
        read_plan("grpo-arithmetic", [*ON_CPU, "policy.lora_cfg.dimm=16"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.lora_cfg.dim=16", "policy.lora_cfg.enabled=false"],
        ["policy.megatron_cfg={enabled: false, fp8_cfg: {fp8: e4m3}}"],
        ["policy.lora_cfg.dim=8"],  # as it is by default
        ["policy.dtensor_cfg.compile=false"],  # the backend that trains if none is enabled
        ["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg={enabled: false, recompute: full}"],
    ],
)
def test_a_section_that_is_switched_off_keeps_its_keys(overrides):
    assert read_plan("grpo-arithmetic", [*ON_CPU, *overrides])


OF_EACH_ALGORITHM = [
    "distill-offline-tiny",
    "distill-tiny",
    "dpo-tiny",
    "grpo-arithmetic",
    "grpo-math-8b",
    "grpo-multi-env-tiny",
    "grpo-self-play-tiny",
    "ppo-tiny",
    "rm-tiny",
    "sft-arithmetic",
]
"""Recipes with every kind of section; `tests/commands/test_schema.py` reads all."""


@pytest.mark.parametrize("recipe", partly_exhaustive(NAMES, always=OF_EACH_ALGORITHM))
def test_a_resolved_config_loads_back_to_itself(recipe, tmp_path):
    config = read_plan(recipe).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert to_yaml(read_plan(tmp_path).config) == to_yaml(config)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("sft-arithmetic", ["data.validation=null"]), ("dpo-tiny", ["dpo.loss=simpo"]), ("dpo-tiny", ["dpo.loss=kto"])],
)
def test_keys_that_have_no_effect_load_back_at_their_defaults(recipe, overrides, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(read_plan(recipe, overrides).config))
    assert read_plan(tmp_path).config.policy.model_name


@pytest.mark.parametrize(
    "recipe",
    ["grpo-math-8b", "ppo-tiny", "sft-arithmetic", "dpo-tiny", "rm-tiny", "distill-tiny", "distill-offline-tiny"],
)
def test_one_key_turns_validation_off(recipe, tmp_path):
    config = read_plan(recipe, ["data.validation=null"]).config
    assert config.checkpointing.metric_name is None
    (tmp_path / "mine.yaml").write_text(f"defaults: {recipe}\ndata: {{validation: null}}\n")
    assert to_yaml(read_plan(tmp_path / "mine.yaml").config) == to_yaml(config)


def test_keys_of_validation_that_are_written_where_it_is_turned_off_are_refused(tmp_path):
    off = "data: {validation: null}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: grpo-arithmetic\ngrpo: {{val_period: 3}}\n{off}")
    with pytest.raises(ConfigError, match=r"grpo\.val_period \(.*mine\.yaml:2\): .*data\.validation"):
        read_plan(tmp_path / "mine.yaml")
    (tmp_path / "off.yaml").write_text(f"defaults: grpo-arithmetic\n{off}")
    (tmp_path / "over.yaml").write_text("defaults: off.yaml\ngrpo: {val_at_end: true}\n")
    with pytest.raises(ConfigError, match=r"grpo\.val_at_end \(.*over\.yaml:2\): .*data\.validation"):
        read_plan(tmp_path / "over.yaml")


def test_validation_on_held_out_rows_stays_on():
    overrides = ["data.validation=null", "data.train.split_validation_size=0.1"]
    config = read_plan("grpo-arithmetic", overrides).config
    assert config.grpo.val_period == read_plan("grpo-arithmetic").config.grpo.val_period
    assert config.checkpointing.metric_name is not None


def test_a_dataset_is_swapped_by_one_key():
    config = read_plan("grpo-math-1b", ["data.train.data_path=rows.jsonl", "data.validation=null"]).config
    assert config.data.train == DatasetConfig(data_path="rows.jsonl")
    config = read_plan("sft-arithmetic", ["data.train.split=train", "data.train.data_path=rows.jsonl"]).config
    assert config.data.train == DatasetConfig(data_path="rows.jsonl", split="train")


def test_an_inherited_recipe_keeps_what_it_does_not_say():
    small, large = read_plan("grpo-math-1b").config, read_plan("grpo-math-8b").config
    assert large.data == small.data.model_copy(update={"max_input_seq_length": 1024})
    assert large.cluster.gpus_per_node == 8
    assert large.policy.optimizer.kwargs["weight_decay"] == small.policy.optimizer.kwargs["weight_decay"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.num_promts_per_step=4"], r"grpo.num_promts_per_step .* grpo.num_prompts_per_step\?"),
        (
            ["policy.generation.vllm_cfg.max_model_lenn=9"],
            r"max_model_lenn .* policy.generation.vllm_cfg.max_model_len\?",
        ),
        (["grpo.num_samples=4"], "grpo.num_samples .* grpo.num_generations_per_prompt"),
        (["grpo.val_batches=4"], "grpo.val_batches .* grpo.max_val_samples"),
        (["eval.num_generations_per_prompt=4"], "eval.num_generations_per_prompt .* eval.num_samples"),
        (["eval.max_val_samples=4"], "eval.max_val_samples .* eval.max_prompts"),
        (["env.math.deadline_s=-1"], r"env.math.deadline_s \(command line\): got -1"),
        (["cluster.device=tpu"], "cluster.device .*allowed: .*auto, cuda, cpu"),
        (["algorithm=grop"], "algorithm .*grpo"),
        (["algorithm=null"], "algorithm .*grpo, .*sft"),
        (["policy.train_global_batch_size=100"], "train_global_batch_size .*512"),
        (["policy.generation.backend=vlm"], r"policy.generation.backend .*vllm\?"),
        (["policy.generation.vllm_cfg.max_model_len=6"], "vllm_cfg.max_model_len .*6.*max_new_tokens"),
        (
            ["policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=true"],
            "policy .*policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled",
        ),
        (["policy.dtensor_cfg.enabled=false"], "policy .*policy.dtensor_cfg.enabled=true"),
        (
            ["policy.generation.colocated.enabled=false", "cluster.cpu_ranks_per_node=1"],
            "policy.generation.colocated.resources.gpus_per_node .*cluster.cpu_ranks_per_node=2",
        ),
        (
            ["checkpointing.export_period=15"],
            r"export_period .*15: must be a multiple of checkpointing.save_period \(12\)",
        ),
        (["checkpointing.save_period=0", "checkpointing.export_period=5"], "export_period .*5: must be 0, as"),
        (
            [
                "checkpointing.export_period=0",
                "checkpointing.push_to=hf://me/m",
                "checkpointing.push_checkpoints=every",
            ],
            "export_period .*cannot be combined with checkpointing.push_checkpoints=every",
        ),
        (["checkpointing.checkpoint_must_save_by=4h"], "checkpoint_must_save_by .*4h.*DD:HH:MM:SS"),
        (
            ["policy.generation.colocated.resources.num_nodes=1"],
            "num_nodes .*got 1: .*policy.generation.colocated.enabled=false",
        ),
        (["checkpointing.metric_name=val:acuracy"], r"metric_name .*got \"val:acuracy\": .*val/accuracy\?"),
    ],
)
def test_what_cannot_run_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_plan("grpo-arithmetic", [*ON_CPU, *overrides])


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ([], "dtensor"),
        (["policy.dtensor_cfg.enabled=true"], "dtensor"),
        (["policy.megatron_cfg.enabled=true"], "megatron"),
        (["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"], "megatron"),
        (["policy.megatron_cfg.enabled=false"], "dtensor"),
    ],
)
def test_the_training_backend(overrides, chosen):
    raw = read_raw("sft-arithmetic", overrides)
    backends = RunPlan.of(resolve(raw, type_of(raw, of_run=True)).config).backends
    assert backends.models[POLICY].plugin.name == chosen
    assert backends.generation is None


TASKS = ("eval.tasks=[gsm8k]", "eval.period=5", "policy.generation.backend=hf")


@pytest.mark.parametrize("recipe", ["sft-arithmetic", "dpo-tiny", "distill-offline-tiny"])
def test_a_run_on_given_rows_has_an_engine_only_if_it_scores_tasks(recipe):
    plain_run, scoring = read_plan(recipe), read_plan(recipe, TASKS)
    assert plain_run.backends.generation is None
    assert scoring.backends.generation is not None
    assert scoring.backends.generation.plugin.name == "hf"
    assert not hasattr(plain_run.config.policy, "generation")
    # Its recorded config is the config of the same run.
    again = read_plan(scoring.without_unused(plain(scoring.root)))
    assert plain(again.root) == plain(scoring.root)
    assert again.plugin.generates


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("sft-arithmetic", TASKS[2:], "policy.generation .*Add them with eval.tasks and eval.period"),
        ("sft-arithmetic", ["env.math.format_reward=1"], "env .*generates only to score tasks"),
        ("sft-arithmetic", TASKS[:1], "eval.period .*must be set"),
        ("sft-arithmetic", TASKS[1:], "eval.tasks .*must not be empty"),
        ("rm-tiny", TASKS[:2], "the model of rm generates nothing.*data.validation"),
    ],
)
def test_tasks_of_a_run_on_given_rows_are_asked_for_as_a_whole(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_plan(recipe, overrides)


def test_settings_for_workers_are_of_types_that_every_worker_has():
    config = read_plan("grpo-arithmetic", [*ON_CPU, "policy.generation.max_new_tokens=7"]).config
    backends = RunPlan.of(config).backends
    assert backends.generation is not None
    policy = backends.models[POLICY]
    assert type(policy.config) is ModelConfig
    assert type(backends.generation.config) is GenerationConfig
    assert type(backends.generation.backend) is backends.generation.plugin.config
    assert backends.generation.config.max_new_tokens == 7
    assert ModelConfig.model_validate(policy.config.model_dump()) == policy.config
    sent = pickle.dumps((policy.config, policy.backend))
    assert b"vllm" not in sent
    assert pickle.loads(sent) == (policy.config, policy.backend)


def test_an_algorithm_that_generates_nothing_has_no_settings_for_it():
    with pytest.raises(ConfigError, match=r"policy.generation"):
        read_plan("sft-arithmetic", ["policy.generation.temperature=0.5"])


def folder_with(tmp_path, **fields):
    """A folder that passes for a model's, as far as the config looks."""
    write_weights(tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4, **fields}))
    return f"policy.model_name={tmp_path}"


HF, MEGATRON = "policy.generation.backend=hf", "policy.generation.backend=megatron"
REPLAY = "policy.dtensor_cfg.moe_router_replay=true"


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("grpo-arithmetic", [REPLAY], "dtensor_cfg.moe_router_replay .*got true: .*vllm.*moe_router_replay=false"),
        ("grpo-arithmetic", [REPLAY, HF, {}], "dtensor_cfg.moe_router_replay .*got true: .* has no experts"),
        (
            "grpo-arithmetic",
            ["policy.megatron_cfg.enabled=true", "policy.megatron_cfg.moe_router_replay=true", MEGATRON, {}],
            "megatron_cfg.moe_router_replay .*got true: .* has no experts",
        ),
        ("sft-arithmetic", [REPLAY], "dtensor_cfg.moe_router_replay .*got true: .* rollouts"),
    ],
)
def test_a_replay_of_routing_that_there_is_not_is_refused(recipe, overrides, message, tmp_path):
    given = [folder_with(tmp_path, **each) if isinstance(each, dict) else each for each in overrides]
    with pytest.raises(ConfigError, match=message):
        read_plan(recipe, [*ON_CPU, *given])


EXACT = "policy.generation.exact=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "vllm here: .*batch-invariant.*CPUs"),
        ([HF, "policy.precision=bfloat16"], "dtensor here: .*policy.precision=float32"),
        ([HF, "policy.lora_cfg.enabled=true"], "dtensor here: .*policy.lora_cfg.enabled=false"),
        ([HF, "policy.dtensor_cfg.compile=true"], "dtensor here: .*dtensor_cfg.compile=true"),
        ([HF, "policy.dtensor_cfg.attention_backend=sdpa"], "dtensor here: .*attention_backend=sdpa"),
        ([HF, "policy.generation.hf_cfg.attn_implementation=eager"], "hf here: .*attn_implementation=eager"),
        ([HF, {"num_experts": 8}], "dtensor here: .*experts"),
        ([HF, "grpo.async_grpo.enabled=true"], "older"),
        ([HF, "policy.megatron_cfg.enabled=true"], "megatron here: .*Use dtensor"),
    ],
)
def test_exact_generation_is_refused_with_what_computes_other_bits(overrides, message, tmp_path):
    given = [folder_with(tmp_path, **each) if isinstance(each, dict) else each for each in overrides]
    with pytest.raises(ConfigError, match=rf"policy.generation.exact .*got true: .*{message}"):
        read_plan("grpo-arithmetic", [*ON_CPU, EXACT, *given])


def test_exact_generation_is_for_algorithms_that_read_logprobs_before_the_update():
    read_plan("grpo-arithmetic", [*ON_CPU, EXACT, HF])
    with pytest.raises(ConfigError, match=r"policy.generation.exact .*GRPO or PPO"):
        read_plan("distill-tiny", [*ON_CPU, EXACT, HF])


ADAPTERS = ["policy.lora_cfg.enabled=true", "policy.generation.lora_sync=adapter"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.generation.lora_sync=adapter"], r"lora_sync .*got \"adapter\": .*policy.lora_cfg.enabled=true"),
        ([*ADAPTERS, HF], r"lora_sync .*got \"adapter\": .*generation.backend=hf"),
        ([*ADAPTERS, "policy.lora_cfg.dim=600"], "lora_sync .*512.*lora_cfg.dim.*600"),
        (
            [*ADAPTERS, "policy.generation.weight_sync_encoding=changes", "policy.generation.weight_sync=disk"],
            r"weight_sync_encoding .*: got \"changes\": .*lora_sync=adapter",
        ),
        (
            [*ADAPTERS, "policy.generation.weight_sync_encoding=parts"],
            r"weight_sync_encoding .*: got \"parts\": .*small enough to be sent whole",
        ),
    ],
)
def test_adapters_that_the_generator_does_not_apply_are_refused(overrides, message):
    assert read_plan("grpo-arithmetic", [*ON_CPU, *ADAPTERS]).config.policy.generation.lora_sync == "adapter"
    with pytest.raises(ConfigError, match=message):
        read_plan("grpo-arithmetic", [*ON_CPU, *overrides])


@pytest.fixture
def small(tmp_path):
    """A folder that passes for a draft model's."""
    folder = tmp_path / "small"
    folder.mkdir()
    folder_with(folder, vocab_size=103, max_position_embeddings=1024)
    return folder


def drafting(folder):
    return f"policy.generation.vllm_cfg.speculation={{method: draft_model, model: {folder}}}"


def test_a_drafter_that_trains_has_a_section_like_the_policy_and_is_exported(small):
    short = "drafter.max_total_sequence_length=32"
    plan = read_plan("grpo-arithmetic", [*ON_CPU, drafting(small), f"drafter.model_name={small}", short])
    need = plan.plugin.models(plan.config)["drafter"]
    assert (need.section, need.spec.trains, need.exported) == ("drafter", True, True)
    assert "drafter" in plan.backends.topology(1, 1, CPU).claims


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"drafter .*trains a draft model, but the generator .*vllm.* drafts with none.*method: draft_model"),
        (["policy.generation.vllm_cfg.speculation={method: ngram}"], "drafter .*drafts with none"),
        ([HF], "drafter .*hf.* drafts with none"),
        (["{other}"], "drafter.model_name .*got .*the generator drafts with .*other"),
        (["{small}", "drafter.max_total_sequence_length=16"], r"drafter.max_total_sequence_length .*at least .*\(32\)"),
        (["{small}", "drafter.train_global_batch_size=100"], "drafter.train_global_batch_size .*must divide"),
    ],
    ids=str,
)
def test_a_drafter_that_the_generator_does_not_draft_with_is_refused(overrides, message, small, tmp_path):
    (tmp_path / "other").mkdir()
    folder_with(tmp_path / "other", vocab_size=103)
    named = {"{small}": drafting(small), "{other}": drafting(tmp_path / "other")}
    given = [named.get(each, each) for each in overrides]
    with pytest.raises(ConfigError, match=message):
        read_plan("grpo-arithmetic", [*ON_CPU, f"drafter.model_name={small}", *given])


def test_an_algorithm_that_generates_nothing_trains_no_drafter():
    with pytest.raises(ConfigError, match="drafter"):
        read_plan("sft-arithmetic", [*ON_CPU, "drafter.model_name=small"])


def headed(folder):
    return f"policy.generation.vllm_cfg.speculation={{method: eagle3, model: {folder}}}"


def test_a_draft_head_trains_in_the_processes_of_the_policy(small):
    plan = read_plan("grpo-arithmetic", [*ON_CPU, headed(small), f"policy.draft_head.model_name={small}"])
    head = plan.backends.models["policy"].config.draft_head
    assert (head.model_name, head.num_tokens, head.optimizer.kwargs["lr"]) == (str(small), 3, 1e-4)
    assert list(plan.backends.models) == ["policy"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"policy.draft_head .*trains a draft head, but the generator .*vllm.* drafts with none.*method: eagle3"),
        (["{draft_model}"], "policy.draft_head .*drafts with none"),
        ([HF], "policy.draft_head .*hf.* drafts with none"),
        (["{other}"], "policy.draft_head.model_name .*got .*the generator drafts with .*other"),
        (["{head}", "policy.draft_head.num_tokens=0"], "num_tokens"),
        (["{head}", "policy.draft_head.optimizer.kwargs.rate=1"], "draft_head.optimizer.kwargs.rate .*not an argument"),
        (["{head}", "policy.dtensor_cfg.tensor_parallel_size=2"], "tensor_parallel_size .*must be 1 with draft_head"),
        (["{head}", "policy.dtensor_cfg.context_parallel_size=2"], "context_parallel_size .*must be 1"),
        (["{head}", "policy.dtensor_cfg.pipeline_parallel_size=2"], "pipeline_parallel_size .*must be 1"),
        (["{head}", "policy.lora_cfg.enabled=true"], "lora_cfg.enabled .*not been verified with draft_head"),
        (["{head}", "policy.vision.enabled=true"], "vision.enabled .*not supported with draft_head"),
        (["{head}", "policy.megatron_cfg.enabled=true"], "draft_head .*not supported by the training backend megatron"),
        (["{head}", "drafter.model_name={small}"], "policy.draft_head .*drafter trains a draft model.*one of the two"),
    ],
    ids=str,
)
def test_a_draft_head_that_cannot_train_is_refused(overrides, message, small, tmp_path):
    (tmp_path / "other").mkdir()
    folder_with(tmp_path / "other", vocab_size=103)
    named = {"{head}": headed(small), "{draft_model}": drafting(small), "{other}": headed(tmp_path / "other")}
    given = [named.get(each, each.replace("{small}", str(small))) for each in overrides]
    with pytest.raises(ConfigError, match=message):
        read_plan("grpo-arithmetic", [*ON_CPU, f"policy.draft_head.model_name={small}", *given])


def test_only_the_policy_trains_a_draft_head(small):
    given = [headed(small), f"value.draft_head.model_name={small}"]
    with pytest.raises(ConfigError, match=r"value.draft_head .*generation serves only the policy"):
        read_plan("ppo-tiny", given)


def test_an_algorithm_that_generates_nothing_trains_no_head(small):
    with pytest.raises(ConfigError, match=r"policy.draft_head .*this algorithm has no generator"):
        read_plan("sft-arithmetic", [*ON_CPU, f"policy.draft_head.model_name={small}"])


IMAGES = "policy.vision.enabled=true"


@pytest.mark.parametrize(
    ("overrides", "config", "message"),
    [
        ([MEGATRON], {}, r"policy.generation.backend .*got \"megatron\": .*images"),
        ([HF], {"model_type": "llava", "image_token_index": 5}, "generation.backend=hf .* this one is a llava"),
        (
            ["policy.megatron_cfg.enabled=true", HF],
            {"model_type": "gemma3", "image_token_index": 5},
            "policy.vision.enabled .*not supported for gemma3 models",
        ),
        ([], {"model_type": "llama", "image_token_id": None}, "policy.vision.enabled .*needs a vision-language model"),
        ([], {"model_type": "gemma3", "image_token_index": 5}, "on cpu vLLM's attention"),
        ([], {"model_type": "llava", "image_token_index": 5}, "models of the type llava"),
        (["policy.generation.vllm_cfg.speculation={method: ngram}"], {}, "speculative decoding .*images"),
        ([*ADAPTERS], {}, "lora_sync .*vision.enabled"),
    ],
)
def test_images_that_a_backend_does_not_take_are_refused(overrides, config, message, tmp_path):
    stored = {"model_type": "qwen2_5_vl", "image_token_id": 5, **config}
    with pytest.raises(ConfigError, match=message):
        read_plan("grpo-arithmetic", [*ON_CPU, IMAGES, folder_with(tmp_path, **stored), *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"policy.generation.backend .*got \"vllm\": runs no code that comes with a model, .*Set hf"),
        (
            [HF, "policy.megatron_cfg.enabled=true"],
            r"policy.trust_remote_code .*training backend megatron.*Use dtensor",
        ),
        ([HF, "policy.dtensor_cfg.tensor_parallel_size=2"], r"tensor_parallel_size .*trust_remote_code.*Set it to 1"),
        ([HF, "policy.trust_remote_code=true"], r"policy.trust_remote_code"),
    ],
)
def test_code_of_a_model_that_nobody_could_run_is_refused(overrides, message, tmp_path):
    (tmp_path / "c.py").write_text("")
    classes = {"AutoConfig": "c.NovelConfig", "AutoModelForCausalLM": "c.NovelForCausalLM"}
    stored = folder_with(tmp_path, model_type="novel", auto_map=classes)
    trust = f"policy.trust_remote_code={code_digest(tmp_path)}"
    with pytest.raises(ConfigError, match=message):
        read_plan("grpo-arithmetic", [*ON_CPU, stored, trust, *overrides])


def test_a_run_sends_what_the_config_says():
    changes = ["policy.generation.weight_sync=disk", "policy.generation.weight_sync_encoding=changes"]
    topology = read_plan("grpo-arithmetic", [*ON_CPU, *changes]).backends.topology(1, 2, CPU)
    assert (topology.transport_of("policy"), topology.weight_sync_encoding) == ("disk", "changes")


@pytest.mark.parametrize("generator", [HF, MEGATRON])
def test_the_generator_reports_the_routing_that_is_replayed(generator, tmp_path):
    experts = folder_with(tmp_path, num_experts=8)
    found = read_plan("grpo-arithmetic", [*ON_CPU, REPLAY, generator, experts]).backends
    assert found.models[POLICY].replays_routing
    assert found.generation.reports_routing
    plain = read_plan("grpo-arithmetic", [*ON_CPU, generator]).backends
    assert not plain.models[POLICY].replays_routing
    assert not plain.generation.reports_routing


ALGORITHM = """
from typing import Annotated

from rl_core.config import Config, WhenChanged
from rl_core.model import ModelSpec
from rl_core.plugins import AlgorithmPlugin, ModelNeed


class MineConfig(Config):
    max_num_steps: Annotated[int, WhenChanged.GOAL] = 3


PLUGIN = AlgorithmPlugin(
    name="mine",
    sections={"mine": MineConfig},
    implementation="mine.py:Mine",
    generates=False,
    models=lambda config: {"policy": ModelNeed("policy", ModelSpec())},
)
"""


def recipe_of_a_file(folder, name):
    (folder / "mine.py").write_text(ALGORITHM)
    recipe = folder / "run.yaml"
    recipe.write_text(
        f"algorithm: mine.py:{name}\npolicy: {{model_name: tiny-arithmetic}}\nmine: {{max_num_steps: 5}}\n"
    )
    return recipe


def test_an_algorithm_in_a_file_beside_the_recipe_brings_its_sections(tmp_path):
    plan = read_plan(recipe_of_a_file(tmp_path, "PLUGIN"), ON_CPU)
    config = plan.config
    assert config.algorithm == f"{tmp_path}/mine.py:PLUGIN"
    assert config.mine.max_num_steps == 5
    assert list(plan.backends.models) == ["policy"]
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "config.yaml").write_text(to_yaml(config))
    assert to_yaml(read_plan(tmp_path / "kept").config) == to_yaml(config)


def test_a_wrong_name_in_the_file_of_an_algorithm_is_refused_with_the_place_and_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm \(\S*run.yaml:1\): .*'PLUGING'.* PLUGIN\?"):
        read_plan(recipe_of_a_file(tmp_path, "PLUGING"), ON_CPU)


def test_models_that_users_name_have_sections_of_their_own():
    override = "teachers={sums: {model_name: tiny-arithmetic, megatron_cfg: {enabled: true}}}"
    plan = read_plan("distill-tiny", [*ON_CPU, override])
    config = plan.config
    assert plan.model_sections == ("policy", "teacher", "teachers.sums")
    assert config.teachers.sums.model_name == "tiny-arithmetic"
    models = plan.backends.models
    assert {role: model.plugin.name for role, model in models.items()} == {
        "policy": "dtensor",
        "teacher": "dtensor",
        "teacher_sums": "megatron",
    }
    assert read_plan("distill-tiny", ON_CPU).model_sections == ("policy", "teacher")
    with pytest.raises(ConfigError, match=r"teachers\.sums\.modelname"):
        read_plan("distill-tiny", [*ON_CPU, "teachers={sums: {modelname: tiny-arithmetic}}"])


def test_judges_of_each_kind_have_the_sections_of_their_kind_and_only_reward_models_are_models():
    judges = (
        "judges={rm: {kind: reward_model, model_name: tiny-arithmetic, megatron_cfg: {enabled: true}}, "
        "own: {kind: generator, model_name: policy}, out: {kind: endpoint, base_url: 'http://x/v1', model: m}}"
    )
    plan = read_plan("grpo-arithmetic", [*ON_CPU, judges])
    assert plan.model_sections == ("policy", "judges.rm")
    assert plan.config.judges.rm.kind == "reward_model"
    assert plan.config.judges.rm.megatron_cfg.enabled
    assert plan.config.judges.out.limits.concurrent == 32
    assert {role: model.plugin.name for role, model in plan.backends.models.items()} == {
        "policy": "dtensor",
        "judge_rm": "megatron",
    }
    with pytest.raises(ConfigError, match=r"judges\.rm\.limits"):
        read_plan("grpo-arithmetic", [*ON_CPU, judges, "judges.rm.limits.concurrent=1"])
    with pytest.raises(ConfigError, match=r"judges\.critic\.kind .*is not a kind of judges; allowed: reward_"):
        read_plan("grpo-arithmetic", [*ON_CPU, "judges={critic: {kind: oracle}}"])


@pytest.mark.parametrize(
    ("algorithm", "written", "section", "lr", "rows"),
    [
        ("sft", {}, "policy", 2e-5, 64),
        ("sft", {"policy": {"lora_cfg": {"enabled": True}}}, "policy", 2e-4, 64),
        ("dpo", {}, "policy", 5e-7, 128),
        ("rm", {}, "policy", 5e-6, 64),
        ("grpo", {}, "policy", 1e-6, 512),
        ("grpo", {"grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}}, "policy", 1e-6, 32),
        ("grpo", {"prompts": 4, "grpo": {"num_prompts_per_step": "${prompts}"}}, "policy", 1e-6, 64),
        # wrong values are reported when they are read
        ("grpo", {"grpo": {"num_prompts_per_step": "eight"}}, "policy", 1e-6, 512),
        ("grpo", {"grpo": 3, "policy": {"lora_cfg": None}}, "policy", 1e-6, 512),
        ("ppo", {"ppo": {"num_prompts_per_step": 64}}, "value", 1e-5, 16),
        ("ppo", {"ppo": {"num_prompts_per_step": 7}}, "policy", 1e-6, 7),
        ("ppo", {"ppo": {"num_prompts_per_step": 64}, "drafter": {"model_name": "m"}}, "drafter", 1e-5, 16),
        ("distillation", {"distillation": {"num_prompts_per_step": 8}}, "policy", 1e-5, 8),
    ],
)
def test_what_a_model_trains_with_by_default_is_that_of_the_algorithm(algorithm, written, section, lr, rows):
    kind = type_of(load({"algorithm": algorithm, **written}))
    for key, default in ((f"{section}.optimizer.kwargs.lr", lr), (f"{section}.train_global_batch_size", rows)):
        assert explain(kind, key).default == default
    model = kind.model_fields[section].annotation(model_name="m", optimizer={"name": "torch.optim.Adam"})
    assert pickle.loads(pickle.dumps(model)).optimizer.kwargs["lr"] == lr
    # what a key means and allows is as for every model
    assert explain(kind, f"{section}.train_global_batch_size").type == "int > 0"
    assert explain(kind, f"{section}.train_global_batch_size").doc.startswith("Number of rows")


def test_a_plan_keeps_variables_of_the_environment_as_they_were_written(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hf_secret_value")
    override = "cluster.env_vars={HF_TOKEN: '${oc.env:MY_TOKEN}'}"
    plan = read_plan("sft-arithmetic", [*ON_CPU, override])
    assert plan.config.cluster.env_vars == {"HF_TOKEN": "hf_secret_value"}
    for written in (to_yaml(plan.root), to_yaml(with_local_models(plan).root)):
        assert "hf_secret_value" not in written
        assert "oc.env:MY_TOKEN" in written


def test_a_run_has_the_environments_that_its_data_names_and_those_that_are_written():
    assert list(type(read_plan("grpo-math-1b").config.env).model_fields) == ["math"]
    written = read_plan("grpo-math-1b", ["env.code.deadline_s=3"]).config.env
    assert set(type(written).model_fields) == {"math", "code"}
    assert written.code.deadline_s == 3
    # the rows of a dataset name the environment of the same name
    assert list(type(read_plan("grpo-sliding-puzzle").config.env).model_fields) == ["sliding_puzzle"]
    assert "env.code.deadline_s" in set(all_keys(type_of(read_raw("grpo-math-1b")), {}))
