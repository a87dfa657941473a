"""Configs of NeMo RL become recipes that this project's own checks accept."""

import pytest
from foreign_files import NEMO_RL, changed, written

from rl_algos.policy_gradient.config import RENAMED
from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.foreign_keys.table import Kind, flattened, table
from rl_launch.run_config.reading import read_plan


def imported(folder, values=NEMO_RL, **changes):
    return import_config(written(folder, changed(values, **changes)), "nemo-rl")


def answer(found, key):
    return next(each for each in found.answers if each.key == key)


def test_a_recipe_is_valid_and_every_key_has_an_answer(tmp_path):
    found = imported(tmp_path)
    assert found.features == {}
    assert {each.key for each in found.answers} == set(flattened(NEMO_RL))
    config = read_plan(found.recipe).config
    assert config.algorithm == "grpo"
    assert config.policy.optimizer.kwargs == {"lr": 3e-7, "weight_decay": 0.1}
    assert config.grpo.use_leave_one_out_baseline  # true in NeMo RL, false here
    assert config.grpo.seed == 7
    assert config.policy.generation.max_new_tokens == 768  # leaves room for a prompt
    assert config.policy.sequence_packing.train_mb_tokens == 4096  # ${mul:...}
    assert config.policy.generation.vllm_cfg.max_num_seqs == 64
    assert config.data.train.dataset_name == "nvidia/OpenMathInstruct-2"
    assert config.checkpointing.metric_name == "val:reward"
    assert config.run_dir == "results/here"
    assert config.cluster.gpus_per_node == 8


def test_schedules_count_optimizer_steps(tmp_path):
    # 256 rollouts and 64 rows of an update: four updates a step
    recipe = imported(tmp_path).recipe
    assert recipe["policy"]["scheduler"][0]["kwargs"]["total_iters"] == 40


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("grpo.val_batch_size", Kind.NOT_NEEDED, "batches automatically"),
        ("policy.megatron_cfg.tensor_model_parallel_size", Kind.NOT_NEEDED, "trains with dtensor_cfg"),
        ("policy.generation.vllm_kwargs.max_num_seqs", Kind.RENAMED, "policy.generation.vllm_cfg.max_num_seqs"),
        ("checkpointing.checkpoint_dir", Kind.RENAMED, "run_dir"),
        ("policy.max_total_sequence_length", Kind.SAME, "policy.max_total_sequence_length"),
        ("policy.generation.max_new_tokens", Kind.FOLLOWS, "768"),
        ("loss_fn.truncated_importance_sampling_type", Kind.NOT_NEEDED, "use_importance_sampling_correction is false"),
    ],
)
def test_answers_say_what_became_of_a_key(tmp_path, key, kind, words):
    found = answer(imported(tmp_path), key)
    assert found.kind is kind
    assert words in found.text


def test_a_template_of_null_is_the_plain_text_of_the_messages(tmp_path):
    found = imported(tmp_path, policy__tokenizer={"name": "org/model", "chat_template": None})
    assert found.recipe["policy"]["tokenizer"]["chat_template"].startswith("{% for message in messages %}")


def test_multiple_choice_is_an_answer_format_of_math(tmp_path):
    found = imported(tmp_path, env={"math": {"num_workers": 8, "verifier_type": "english_multichoice"}})
    assert found.recipe["env"]["math"]["answer_format"] == "choice"


def test_the_monitoring_of_gpus_is_that_of_all_machines_and_workers(tmp_path):
    found = imported(tmp_path, logger__gpu_monitoring={"collection_interval": 5, "flush_interval": 10})
    logger = read_plan(found.recipe).config.logger
    assert logger.monitoring_enabled
    assert logger.monitoring.period_s == 5.0
    assert answer(found, "logger.gpu_monitoring.flush_interval").kind is Kind.NOT_NEEDED


def test_rollouts_in_8_bits_keep_their_layers_in_bfloat16(tmp_path):
    changes = {
        "policy__generation__vllm_cfg__precision": "fp8",
        "policy__generation__vllm_cfg__num_first_layers_in_bf16": 1,
        "policy__generation__vllm_cfg__num_last_layers_in_bf16": 2,
        "policy__generation__vllm_cfg__quantization_ignored_layer_kws": ["o_proj"],
    }
    found = imported(tmp_path, **changes)
    assert found.features == {}
    config = read_plan(found.recipe).config
    quantization = config.policy.generation.vllm_cfg.quantization
    assert quantization.method == "fp8_per_block"
    assert (quantization.num_first_layers_in_bf16, quantization.num_last_layers_in_bf16) == (1, 2)
    assert quantization.ignored_layers == ["*o_proj*"]
    assert config.loss_fn.allow_uncorrected_precision


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [("windowed", None), ("weight_fifo", None), ("in_order", "in_order"), ("ready_first", "ready_first")],
)
def test_the_sampler_of_an_asynchronous_run_is_kept(tmp_path, sampler, expected):
    ages = {"max_lookahead_versions": 2, "max_staleness_versions": 2}
    values = changed(NEMO_RL, async_rl={"sampler": {"name": sampler, **ages}})
    del values["grpo"]["async_grpo"]
    changes = {
        "policy__generation__colocated": {"enabled": False, "resources": {"gpus_per_node": 4}},
        "loss_fn__use_importance_sampling_correction": True,
    }
    found = imported(tmp_path, values, **changes)
    assert found.features == {}
    settings = read_plan(found.recipe).config.grpo.async_grpo
    assert (settings.max_trajectory_age_steps, settings.sampler) == (2, expected)


def test_an_unknown_sampler_is_refused(tmp_path):
    found = imported(tmp_path, async_rl={"sampler": {"name": "newest_first"}})
    assert set(found.features) == {"another choice of groups (async_rl.sampler newest_first)"}


def test_features_that_are_not_offered_are_refused_together(tmp_path):
    found = imported(
        tmp_path,
        policy__quant_cfg="q.yaml",
        data__train={"dataset_name": "avqa"},
        grpo__invalid_tool_call_advantage=-5.0,
    )
    assert set(found.features) == {
        "quantisation-aware training (policy.quant_cfg)",
        "image, video or audio models",
        "advantages set for malformed turns (grpo.invalid_tool_call_advantage)",
    }


def test_a_feature_that_is_off_is_not_refused(tmp_path):
    found = imported(
        tmp_path, policy__draft={"enabled": False, "model_name": "a/b"}, grpo__invalid_tool_call_advantage=None
    )
    assert found.features == {}
    assert answer(found, "policy.draft.model_name").kind is Kind.NOT_NEEDED


def test_an_unknown_key_that_asks_for_something_is_refused_and_an_empty_one_reported(tmp_path):
    found = imported(tmp_path, policy__brand_new=3, policy__other_new=None)
    assert found.features == {"NeMo RL keys that are not known here": ["policy.brand_new"]}
    assert "not known here" in answer(found, "policy.other_new").text


def test_files_beside_it_are_inherited_from(tmp_path):
    written(tmp_path, NEMO_RL, "base.yaml")
    child = written(
        tmp_path, {"defaults": "./base.yaml", "policy": {"megatron_cfg": {"enabled": False}, "model_name": "x/y"}}
    )
    recipe = import_config(child, "nemo-rl").recipe
    assert recipe["policy"]["model_name"] == "x/y"
    assert recipe["policy"]["optimizer"]["kwargs"]["lr"] == 3e-7


def test_a_section_may_replace_the_inherited_one(tmp_path):
    written(tmp_path, NEMO_RL, "base.yaml")
    optimizer = {"_override_": True, "name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}
    child = written(tmp_path, {"defaults": ["base.yaml"], "policy": {"optimizer": optimizer}})
    assert import_config(child, "nemo-rl").recipe["policy"]["optimizer"] == {
        "name": "torch.optim.SGD",
        "kwargs": {"lr": 0.1},
    }


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"inherits from \./gone.yaml, and there is no file"):
        import_config(written(tmp_path, {"defaults": "./gone.yaml"}), "nemo-rl")


def test_parents_in_a_circle_are_refused(tmp_path):
    written(tmp_path, {"defaults": "b.yaml"}, "a.yaml")
    written(tmp_path, {"defaults": "a.yaml"}, "b.yaml")
    with pytest.raises(ConfigError, match="circular `defaults`"):
        import_config(tmp_path / "a.yaml", "nemo-rl")


def megatron(**changes):
    section = {
        "enabled": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
        "apply_rope_fusion": True,
        "moe_token_dispatcher_type": "allgather",
        "optimizer": {
            "optimizer": "adam",
            "lr": 2.0e-6,
            "min_lr": 2.0e-7,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "clip_grad": 0.5,
            "params_dtype": "float32",
        },
        "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 10, "lr_warmup_init": 2.0e-7},
        **changes,
    }
    return {"policy__megatron_cfg": section, "policy__dtensor_cfg__enabled": False}


def test_the_optimizer_of_megatron_is_that_of_torch(tmp_path):
    found = imported(tmp_path, **megatron(), policy__train_global_batch_size=256)
    assert found.features == {}
    policy = read_plan(found.recipe).config.policy
    assert policy.optimizer.kwargs == {"lr": 2e-6, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}
    assert policy.max_grad_norm == 0.5
    (warmup,) = policy.scheduler
    assert warmup.kwargs == {"start_factor": pytest.approx(0.1), "end_factor": 1.0, "total_iters": 10}
    assert policy.megatron_cfg.moe_token_dispatcher_type == "alltoall"
    assert policy.megatron_cfg.megatron_kwargs == {"apply_rope_fusion": True}
    assert policy.megatron_cfg.expert_tensor_parallel_size is None


@pytest.mark.parametrize(
    ("given", "recompute", "modules"),
    [
        ({"activation_checkpointing": False, "recompute_granularity": "full"}, "none", None),
        ({"activation_checkpointing": True, "recompute_modules": ["mlp"]}, "full", None),
        (
            {"activation_checkpointing": True, "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            "selective",
            ["mlp"],
        ),
    ],
)
def test_recomputation_by_megatron_is_one_key(tmp_path, given, recompute, modules):
    found = read_plan(imported(tmp_path, **megatron(**given)).recipe).config.policy.megatron_cfg
    assert (found.recompute, found.recompute_modules) == (recompute, modules)


def test_fusions_that_are_turned_off_stay_off(tmp_path):
    section = megatron(apply_rope_fusion=False, moe_permute_fusion=False, gradient_accumulation_fusion=False)
    kwargs = read_plan(imported(tmp_path, **section).recipe).config.policy.megatron_cfg.megatron_kwargs
    assert kwargs == {"apply_rope_fusion": False, "moe_permute_fusion": False}


def test_other_fields_of_megatron_are_passed_on_or_refused_by_name(tmp_path):
    found = imported(tmp_path, **megatron(cp_comm_type="p2p", context_parallel_size=2, moe_z_loss_coeff=0.1))
    assert found.recipe["policy"]["megatron_cfg"]["megatron_kwargs"]["cp_comm_type"] == "p2p"
    (feature,) = found.features
    assert "moe_z_loss_coeff: cannot be set here: padding would count in this loss" in feature


def test_distillation_takes_filters_of_sampling(tmp_path):
    teacher = {"model_name": "a/b", "max_total_sequence_length": 1024}
    values = {key: value for key, value in NEMO_RL.items() if key not in ("grpo", "loss_fn")}
    values |= {
        "distillation": {**NEMO_RL["grpo"], "num_generations_per_prompt": 2, "topk_logits_k": 64},
        "loss_fn": {"kl_type": "reverse"},
        "teacher": teacher,
    }
    del values["distillation"]["adv_estimator"]
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        del values["distillation"][key]
    values = changed(values, data__train__seed=1)
    assert imported(tmp_path, values).features == {}
    found = imported(tmp_path, values, policy__generation__top_p=0.9)
    assert found.features == {}
    assert found.recipe["policy"]["generation"]["top_p"] == 0.9


def test_earlier_releases_wrote_one_dataset(tmp_path):
    data = {
        "dataset_name": "OpenMathInstruct-2",
        "prompt_file": "cot.txt",
        "max_input_seq_length": 512,
        "env_name": "math",
    }
    found = imported(tmp_path, {**NEMO_RL, "data": data})
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert config.data.train.dataset_name == "nvidia/OpenMathInstruct-2"
    assert config.data.default.prompt_file == "cot.txt"
    assert answer(found, "data.dataset_name").kind is Kind.FOLLOWS


def test_megatron_decays_neither_norms_nor_biases(tmp_path):
    optimizer = megatron()["policy__megatron_cfg"]["optimizer"]
    for decay in (0.1, 0.0):
        found = imported(tmp_path, **megatron(optimizer={**optimizer, "weight_decay": decay})).recipe
        assert read_plan(found).config.policy.optimizer.decay_norms_and_biases == (decay == 0)


def test_muon_of_megatron_steps_as_here(tmp_path):
    optimizer = {"optimizer": "muon", "lr": 1e-3, "weight_decay": 0.1, "muon_momentum": 0.9, "adam_beta2": 0.95}
    recipe = imported(tmp_path, **megatron(optimizer=optimizer)).recipe
    found = read_plan(recipe).config.policy.optimizer
    assert found.name == "torch.optim.Muon"
    kwargs = found.kwargs
    rows, columns = 64, 256
    # Megatron's own scale is the root of the longer side, and only scales the direction.
    assert kwargs["lr"] * 0.2 * max(rows, columns) ** 0.5 == pytest.approx(1e-3 * max(rows, columns) ** 0.5)
    assert kwargs["lr"] * kwargs["weight_decay"] == pytest.approx(1e-3 * 0.1)
    assert (kwargs["momentum"], kwargs["nesterov"], kwargs["adjust_lr_fn"]) == (0.9, False, "match_rms_adamw")
    assert kwargs["adamw"] == {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}
    unit = imported(tmp_path, **megatron(optimizer={**optimizer, "muon_scale_mode": "unit_rms_norm"}))
    assert any("scale mode unit_rms_norm" in feature for feature in unit.features)


def test_a_gradient_that_is_not_clipped_stays_so(tmp_path):
    optimizer = megatron()["policy__megatron_cfg"]["optimizer"]
    recipe = imported(tmp_path, **megatron(optimizer={**optimizer, "clip_grad": 0.0})).recipe
    assert read_plan(recipe).config.policy.max_grad_norm is None


def test_a_balancing_loss_of_unknown_weight_is_refused_for_experts_alone(tmp_path):
    dense = imported(tmp_path, **megatron(moe_router_load_balancing_type="aux_loss"))
    assert dense.features == {}
    assert any("moe_aux_loss_coeff" in note for note in dense.notes)
    experts = imported(tmp_path, **megatron(moe_router_load_balancing_type="aux_loss", expert_model_parallel_size=4))
    assert any("balancing loss" in feature for feature in experts.features)


def test_preferences_count_rows_where_nemo_rl_counts_pairs(tmp_path):
    values = {
        **{key: NEMO_RL[key] for key in ("policy", "checkpointing", "cluster", "logger")},
        "dpo": {
            "max_num_epochs": 1,
            "max_num_steps": 150,
            "val_period": 25,
            "val_micro_batch_size": 1,
            "reference_policy_kl_penalty": 0.05,
            "sft_loss_weight": 0,
        },
        "data": {
            "train": {"dataset_name": "HelpSteer3", "split": "train"},
            "validation": {"dataset_name": "HelpSteer3", "split": "validation"},
        },
    }
    found = imported(tmp_path, values, checkpointing__metric_name="val:validation-default_loss")
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert config.policy.train_micro_batch_size == 4
    assert config.policy.train_global_batch_size == 64
    assert config.dpo.reference_policy_kl_penalty == 0.05
    assert config.checkpointing.metric_name == "val:loss"
    assert answer(found, "policy.generation.temperature").kind is Kind.NOT_NEEDED


def test_repeated_validation_rows_become_several_rollouts(tmp_path):
    found = imported(tmp_path, data__validation={"dataset_name": "AIME2024", "repeat": 16}, grpo__max_val_samples=480)
    config = read_plan(found.recipe).config
    assert (config.grpo.val_num_generations_per_prompt, config.grpo.max_val_samples) == (16, 30)


def test_variables_of_the_environment_stay_variables(tmp_path):
    found = imported(tmp_path, data__train={"data_path": "${oc.env:DATA_HOME}/rows.jsonl", "input_key": "question"})
    assert found.features == {}
    assert found.recipe["data"]["train"]["data_path"] == "${oc.env:DATA_HOME}/rows.jsonl"
    assert "policy" in found.recipe
    assert any("DATA_HOME" in note for note in found.notes)


def test_datasets_of_images_turn_vision_on(tmp_path):
    found = imported(
        tmp_path,
        data__train={"dataset_name": "clevr-cogent", "split": "train"},
        data__validation={"dataset_name": "clevr-cogent", "split": "valA"},
        data__default={"env_name": "clevr-cogent", "processor": "vlm_hf_data_processor"},
        env__clevr_cogent={"reward_functions": [{"name": "format", "weight": 0.2}]},
        policy__dtensor_cfg__automodel_kwargs={"freeze_config": {"freeze_vision_tower": True}},
        policy__generation__vllm_kwargs={"limit_mm_per_prompt": {"image": 2}},
    )
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert (config.policy.vision.enabled, config.policy.vision.max_images) == (True, 2)
    assert (config.policy.vision.tower, config.policy.vision.projector) == ("frozen", "trained")
    assert config.data.validation.dataset_name == "MMInstruction/Clevr_CoGenT_ValA"
    assert any("write the rewards of clevr-cogent" in note for note in found.notes)


def test_megatron_trains_with_images(tmp_path):
    found = imported(tmp_path, **megatron(), data__train={"dataset_name": "geometry3k"})
    assert found.features == {}
    policy = read_plan(found.recipe).config.policy
    assert policy.megatron_cfg.enabled
    assert policy.megatron_cfg.tensor_model_parallel_size == 2
    assert policy.optimizer.kwargs["lr"] == 2e-6
    assert (policy.vision.enabled, policy.vision.tower, policy.vision.projector) == (True, "trained", "trained")


@pytest.mark.parametrize(
    "changes",
    [
        {"policy__generation__vllm_kwargs": {"language_model_only": True}},
        {"policy__dtensor_cfg__automodel_kwargs": {"freeze_config": {"freeze_vision_tower": True}}},
        {"policy__dtensor_cfg__automodel_kwargs": {"freeze_config": {"freeze_audio_tower": True}}},
        {"policy__generation__vllm_kwargs": {"limit_mm_per_prompt": {"image": 0, "video": 0}}},
        {"policy__dtensor_cfg__enabled": False, "policy__megatron_cfg": {"enabled": True, "freeze_vision_model": True}},
    ],
)
def test_the_text_of_a_model_of_images_comes_over(tmp_path, changes):
    found = imported(tmp_path, **changes)
    assert found.features == {}
    assert not read_plan(found.recipe).config.policy.vision.enabled


def test_a_frozen_language_model_is_refused(tmp_path):
    frozen = {"freeze_config": {"freeze_language_model": True}}
    found = imported(tmp_path, policy__dtensor_cfg__automodel_kwargs=frozen)
    assert list(found.features) == ["a language model that is not trained (freeze_language_model)"]


@pytest.mark.parametrize(
    ("backend", "section"),
    [("sglang", {"sglang_cfg": {"tp_size": 2}}), ("trtllm", {"trtllm_cfg": {"tensor_parallel_size": 2}})],
)
def test_vllm_generates_in_the_place_of_other_engines(tmp_path, backend, section):
    generation = {**NEMO_RL["policy"]["generation"], "backend": backend, **section}
    found = imported(tmp_path, policy__generation=generation)
    assert found.features == {}
    config = read_plan(found.recipe).config.policy.generation
    assert (config.backend, config.vllm_cfg.tensor_parallel_size) == ("vllm", 2)
    assert any(note.startswith("policy.generation.backend: vllm, in the place of ") for note in found.notes)


def test_a_replica_over_several_nodes_comes_over_with_its_sizes(tmp_path):
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 16}
    found = imported(
        tmp_path,
        cluster__num_nodes=2,
        **{f"policy__generation__vllm_cfg__{name}": size for name, size in sizes.items()},
    )
    assert found.features == {}
    written = read_plan(found.recipe).config.policy.generation.vllm_cfg
    assert (written.tensor_parallel_size, written.data_parallel_size, written.num_ranks) == (2, 8, 16)


def test_fused_adam_is_the_adam_of_torch(tmp_path):
    optimizer = {
        "name": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "kwargs": {"lr": 1e-6, "weight_decay": 0.1, "master_weights": True, "exp_avg_dtype": "torch.bfloat16"},
    }
    found = imported(tmp_path, policy__optimizer=optimizer)
    assert found.features == {}
    chosen = read_plan(found.recipe).config.policy.optimizer
    assert (chosen.name, chosen.kwargs) == ("torch.optim.AdamW", {"lr": 1e-6, "weight_decay": 0.1})


@pytest.mark.parametrize("name", ["bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit"])
def test_adamw_in_8_bits_is_the_one_of_this_project(tmp_path, name):
    found = imported(tmp_path, policy__optimizer={"name": name, "kwargs": {"lr": 1e-6, "weight_decay": 0.1}})
    assert found.features == {}
    chosen = read_plan(found.recipe).config.policy.optimizer
    assert (chosen.name, chosen.kwargs) == ("rl_core.torch.EightBitAdamW", {"lr": 1e-6, "weight_decay": 0.1})


@pytest.mark.parametrize("detaches", [True, False])
def test_layers_that_draft_are_left_out_if_the_policy_does_not_depend_on_them(tmp_path, detaches):
    drafting = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3, "mtp_detach_heads": detaches}
    found = imported(tmp_path, **megatron(**drafting))
    assert bool(found.features) is not detaches
    assert any("policy.megatron_cfg.mtp_*" in note for note in found.notes) is detaches


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_fn__use_importance_sampling_correction": True},
        {"policy__train_global_batch_size": 128},
        {
            "grpo__async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
            "loss_fn__use_importance_sampling_correction": True,
        },
    ],
)
def test_a_recipe_holds_only_what_differs(tmp_path, changes):
    recipe = imported(tmp_path, **changes).recipe
    assert "seed" not in recipe["grpo"] or recipe["grpo"]["seed"] == 7
    assert "dual_clip" not in str(recipe)
    assert "normalize_rewards" not in recipe["grpo"]
    assert len(flattened(recipe)) < 45


def test_a_reward_model_is_an_environment(tmp_path):
    found = imported(
        tmp_path,
        data__default={"env_name": "reward_model"},
        env__reward_model={"model_name": "a/b", "max_model_len": 2048, "dtensor_cfg": {"enabled": True}},
    )
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert (config.env.reward_model.model, config.env.reward_model.max_length) == ("a/b", 2048)


def test_sliding_puzzles_have_a_dataset_here(tmp_path):
    puzzle = {"cfg": {"game_config": {"size": 3, "shuffle_moves": 4}, "max_moves": 30}}
    values = {**NEMO_RL, "data": {"shuffle": True, "add_system_prompt": False}, "env": {"sliding_puzzle_game": puzzle}}
    found = imported(tmp_path, values, grpo__max_rollout_turns=30)
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert config.data.train.settings["max_moves"] == 4
    assert (config.env.sliding_puzzle.max_moves, config.grpo.max_rollout_turns) == (30, 30)


def test_minus_one_is_no_limit(tmp_path):
    found = imported(tmp_path, grpo__max_num_steps=-1, grpo__max_val_samples=-1)
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert (config.grpo.max_num_steps, config.grpo.max_val_samples) == (1_000_000, None)


def test_evaluations_are_recipes_of_rl_eval(tmp_path):
    values = {
        "eval": {"metric": "pass@k", "num_tests_per_prompt": 4, "seed": 1, "k_value": 2, "save_path": None},
        "generation": {
            "backend": "vllm",
            "model_name": "Qwen/Qwen2.5-0.5B",
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": "${generation.vllm_cfg.max_model_len}",
            "vllm_cfg": {"max_model_len": 2048, "tensor_parallel_size": 1, "precision": "bfloat16"},
        },
        "tokenizer": {"name": "${generation.model_name}", "chat_template": "default"},
        "data": {"dataset_name": "AIME2024", "prompt_file": None, "repeat": 1},
        "env": {"math": {"num_workers": 8}},
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    }
    found = imported(tmp_path, values)
    assert found.features == {}
    config = read_plan(found.recipe).config
    assert (config.algorithm, config.eval.tasks, config.eval.num_samples, config.eval.k) == (
        "evaluation",
        ["aime_2024"],
        4,
        [2],
    )


LOSS = {
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k2",
    "kl_input_clamp_value": None,
    "kl_output_clamp_value": 5.0,
    "ratio_clip_min": 0.1,
    "ratio_clip_max": 0.3,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": True,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 5.0,
    "truncated_importance_sampling_ratio_min": 0.2,
    "token_level_loss": True,
}


@pytest.mark.parametrize(
    ("switches", "surrogate", "aggregation"),
    [
        ({}, {"name": "clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": None}, "token-mean"),
        (
            {"sequence_level_importance_ratios": True, "token_level_loss": False},
            {"name": "gspo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": None},
            "sequence-mean",
        ),
        ({"use_cispo": True}, {"name": "cispo", "clip_low": 0.1, "clip_high": 0.3}, "token-mean"),
        ({"disable_ppo_ratio": True}, {"name": "reinforce"}, "token-mean"),
    ],
)
def test_the_loss_has_the_same_terms(tmp_path, switches, surrogate, aggregation):
    found = imported(tmp_path, {**NEMO_RL, "loss_fn": {**LOSS, **switches}})
    assert found.features == {}
    loss = read_plan(found.recipe).config.loss_fn
    assert loss.surrogate.model_dump() == surrogate
    assert loss.aggregation.name == aggregation
    assert (loss.kl.weight, loss.kl.estimator, loss.kl.input_clamp, loss.kl.output_clamp) == (0.01, "k2", None, 5.0)
    assert loss.kl.from_generation
    assert (loss.importance.truncation, loss.importance.low, loss.importance.high) == ("icepop", 0.2, 5.0)
    assert {each.key for each in found.answers} >= {f"loss_fn.{key}" for key in {**LOSS, **switches}}


def test_two_policy_losses_at_once_are_refused(tmp_path):
    found = imported(tmp_path, {**NEMO_RL, "loss_fn": {**LOSS, "use_cispo": True, "disable_ppo_ratio": True}})
    assert list(found.features) == ["two policy losses at once: use_cispo and disable_ppo_ratio"]


def test_keys_of_the_loss_are_what_an_earlier_version_of_this_project_calls_them():
    for key, now in RENAMED.items():
        rule = table("nemo-rl").rule(f"loss_fn.{key}")
        if rule is not None and rule.kind is Kind.RENAMED:
            assert rule.text == f"loss_fn.{getattr(now, 'now', now)}"
