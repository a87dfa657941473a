import pytest
from pydantic import ValidationError

from rl_core.model_config import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    local_hf_config,
)


def problems_of(build):
    """Return the problems with which a config is refused."""
    with pytest.raises(ValidationError) as refused:
        build()
    return [problem for error in refused.value.errors() for problem in error["ctx"]["error"].problems]


def test_a_class_is_named_with_its_module():
    assert OptimizerConfig(name="torch.optim.SGD").name == "torch.optim.SGD"
    assert SchedulerConfig().name is None
    for wrong in ("AdamW", "torch.optim.", "torch optim.AdamW"):
        (problem,) = problems_of(lambda wrong=wrong: OptimizerConfig(name=wrong))
        assert problem.got == wrong
        assert "torch.optim.AdamW" in problem.allowed
    (problem,) = problems_of(lambda: SchedulerConfig(name="cosine"))
    assert problem.got == "cosine"
    assert "torch.optim.lr_scheduler.LinearLR" in problem.allowed


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", None), ("lr", "fast"), ("lr", float("nan")), ("weight_decay", -0.1), ("weight_decay", True)],
)
def test_an_argument_that_is_not_a_number_from_0_on_is_refused(name, value):
    (problem,) = problems_of(lambda: ModelConfig(model_name="m", optimizer=OptimizerConfig(kwargs={name: value})))
    assert problem.key == f"optimizer.kwargs.{name}"
    assert problem.got is value or problem.got == value


def test_other_classes_judge_their_arguments_themselves():
    optimizer = OptimizerConfig(name="transformers.Adafactor", kwargs={"lr": None})
    assert ModelConfig(model_name="m", optimizer=optimizer)
    assert ModelConfig(model_name="m", optimizer=OptimizerConfig(kwargs={"lr": 0}))


def test_a_template_is_written_out_or_read_from_its_file(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert TokenizerConfig().template_text() is None
    assert TokenizerConfig(chat_template="{{ x }}").template_text() == "{{ x }}"
    assert TokenizerConfig(chat_template=str(tmp_path / "chat.jinja")).template_text() == "{{ messages }}"
    with pytest.raises(ValueError, match=r"neither a Jinja template .* nor a file that can be read"):
        TokenizerConfig(chat_template="none.jinja").template_text()


def test_a_models_config_is_read_with_its_overrides_where_it_is_on_this_machine(tmp_path):
    model = ModelConfig(model_name=str(tmp_path), hf_config_overrides={"num_hidden_layers": 2})
    assert local_hf_config(model) == {}
    (tmp_path / "config.json").write_text("{")
    assert local_hf_config(model) == {}
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 8}')
    assert local_hf_config(model) == {"num_hidden_layers": 2, "hidden_size": 8}


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR"}


@pytest.mark.parametrize(
    ("settings", "key", "mentions"),
    [
        ({"dynamic_batching": {"enabled": True}}, "dynamic_batching.enabled", ["sequence_packing.enabled=false"]),
        (
            {"sequence_packing": {"enabled": False, "shared_prefixes": True}},
            "sequence_packing.shared_prefixes",
            ["sequence_packing.enabled=true", "auto or false"],
        ),
        ({"scheduler": [LINEAR, LINEAR]}, "scheduler", ["2 schedules", "0 milestones", "1 milestones"]),
        ({"scheduler": [LINEAR, {"milestones": [2]}]}, "scheduler", ["[[2]]", " 1"]),
        (
            {"lora_cfg": {"enabled": True, "target_modules": ["q_proj"]}},
            "lora_cfg.target_modules",
            ["match_all_linear=false", "remove this key"],
        ),
        (
            {"lora_cfg": {"enabled": True, "dropout": 0.1, "target_parameters": ["experts.down_proj"]}},
            "lora_cfg.dropout",
            ["dropout=0", "target_parameters"],
        ),
        ({"lora_cfg": {"adapter": "folder"}}, "lora_cfg.adapter", ["lora_cfg.enabled=true"]),
        ({"vision": {"tower": "trained"}}, "vision.tower", ["vision.enabled=true"]),
        ({"vision": {"enabled": True, "tower": "adapters"}}, "vision.tower", ["lora_cfg.enabled", "trained"]),
        (
            {"vision": {"enabled": True, "projector": "trained"}, "lora_cfg": {"enabled": True}},
            "vision.projector",
            ["lora_cfg.enabled=false", "adapters"],
        ),
        (
            {"vision": {"enabled": True, "min_pixels": 9, "max_pixels": 4}},
            "vision.min_pixels",
            ["more than max_pixels", "4"],
        ),
        ({"hf_config_overrides": {"rope_theta": 1e6}}, "hf_config_overrides.rope_theta", ["rope_parameters: {"]),
        *(
            (
                {"hf_config_overrides": {name: value}},
                f"hf_config_overrides.{name}",
                ["has no effect", "Remove this key"],
            )
            for name, value in {"output_router_logits": True, "dtype": "float32", "use_cache": True}.items()
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, key, mentions):
    (problem,) = problems_of(lambda: ModelConfig(model_name="m", **settings))
    assert problem.key == key
    assert all(mention in f"{problem.reason}. {problem.remedy}" for mention in mentions), problem
    assert problem.is_unused == ("has no effect" in problem.reason)
    if key == "lora_cfg.dropout":
        assert problem.got == 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": [LINEAR, LINEAR, {"milestones": [3]}]},
        {"scheduler": [LINEAR]},
        {"dynamic_batching": {"enabled": True}, "sequence_packing": {"enabled": False}},
        {"lora_cfg": {"enabled": True, "target_modules": ["q_proj"], "match_all_linear": False}},
        {"lora_cfg": {"enabled": False, "target_modules": ["q_proj"]}},
    ],
)
def test_settings_that_agree_are_taken(settings):
    assert ModelConfig(model_name="m", **settings)


def test_adapters_are_scaled_by_their_rank_or_its_root():
    assert LoraConfig(dim=16, alpha=8).scale == 8 / 16
    assert LoraConfig(dim=16, alpha=8, use_rslora=True).scale == 8 / 4


@pytest.mark.parametrize(
    ("lora", "key", "reason"),
    [
        ({"use_dora": True, "target_parameters": ["experts.down_proj"]}, "use_dora", "is for linear layers"),
        ({"init": "pissa", "target_parameters": ["experts.down_proj"]}, "init", "is for linear layers"),
        ({"init": "pissa", "adapter": "folder"}, "init", "with lora_cfg.adapter"),
        ({"init": "pissa", "base_quantization": "nf4"}, "init", "quantised rest of the weights"),
        ({"enabled": False, "base_quantization": "nf4"}, "base_quantization", "with lora_cfg.enabled=false"),
        ({"enabled": False, "max_adapters": 2}, "max_adapters", "with lora_cfg.enabled=false"),
        ({"max_adapters": 2, "use_dora": True}, "use_dora", "with several adapters"),
        ({"max_adapters": 2, "rank_pattern": {"q_proj": 2}}, "rank_pattern", "with several adapters"),
    ],
)
def test_variants_that_do_not_apply_are_refused_by_name(lora, key, reason):
    given = {"model_name": "m", "lora_cfg": {"enabled": True, **lora}}
    (problem,) = problems_of(lambda: ModelConfig.model_validate(given))
    assert problem.key == f"lora_cfg.{key}"
    assert reason in problem.message


def test_a_pattern_that_is_not_a_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"'q_proj\(' is not a regular expression"):
        LoraConfig(rank_pattern={"q_proj(": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["*.mlp"], "lora_cfg": {"enabled": True}}, "freeze.*because only adapters train"),
        ({"train_only": ["*.mlp"], "lora_cfg": {"enabled": True}}, "train_only.*because only adapters train"),
        ({"optimizer": {"lr_scales": {"*": -1.0}}}, "greater than or equal to 0|0 or more|at least 0"),
        (
            {
                "optimizer": {"lr_scales": {"*.mlp": 2.0}},
                "scheduler": [{"name": "torch.optim.lr_scheduler.OneCycleLR", "kwargs": {"max_lr": 1.0}}],
            },
            "cannot be combined with optimizer.lr_scales",
        ),
    ],
)
def test_patterns_that_would_have_no_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(model_name="m", **settings)


def test_null_removes_an_argument_that_a_recipe_sets_for_another_class() -> None:
    kwargs = {"lr": 1e-3, "betas": None}
    optimizer = OptimizerConfig.model_validate({"name": "torch.optim.Muon", "kwargs": kwargs})
    assert optimizer.kwargs == {"lr": 1e-3}
    schedule = SchedulerConfig.model_validate(
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": None}}
    )
    assert schedule.kwargs == {}
