from types import SimpleNamespace

import pytest
from file_loss import path_of
from problem_fields import MENTIONS, assert_fields

from rl_algos.data.config import DataConfig
from rl_algos.dpo import algorithm
from rl_algos.dpo.loss import LOSSES, preference_loss_of
from rl_algos.dpo.plugin import PLUGIN, dpo_section
from rl_algos.losses.preference import BCO, CPO, DPO, IPO, ORPO, AddedTerm, KTOLoss, PreferenceLoss, SimPO
from rl_core.algorithm import implementation_of
from rl_core.config import ProblemError
from rl_core.model_config import ModelConfig
from rl_core.plugins import ALGORITHMS, plugin

HELD_OUT = {"validation": [{"data_path": "b.jsonl"}, {"data_path": "c.jsonl"}]}


def config(loss=None, *, data=(), batch_size=8, **dpo):
    written = {**dpo, **({} if loss is None else {"loss": loss})}
    return SimpleNamespace(
        dpo=dpo_section(written).model_validate(written),
        data=DataConfig.model_validate({"train": {"data_path": "a.jsonl"}, **dict(data)}),
        policy=ModelConfig(model_name="tiny", train_global_batch_size=batch_size),
    )


def problems(config):
    return {problem.key: problem for check in PLUGIN.checks for problem in check(config)}


def test_the_entry_point_leads_to_the_loop():
    assert plugin(ALGORITHMS, "dpo") is PLUGIN
    assert isinstance(implementation_of(PLUGIN), algorithm.DPO)


@pytest.mark.parametrize(
    ("loss", "keys", "expected"),
    [
        (None, {}, PreferenceLoss(DPO(beta=0.1))),
        ("dpo", {"reference_policy_kl_penalty": 0.3}, PreferenceLoss(DPO(beta=0.3))),
        ({"name": "dpo", "label_smoothing": 0.2}, {}, PreferenceLoss(DPO(label_smoothing=0.2))),
        (
            "dpo",
            {"preference_average_log_probs": True, "sft_loss_weight": 0.5, "preference_loss_weight": 2.0},
            PreferenceLoss(DPO(), weight=2.0, average_logprobs=True, sft_weight=0.5, sft_average_logprobs=True),
        ),
        (
            {"name": "simpo", "gamma": 0.5},
            {},
            PreferenceLoss(SimPO(gamma=0.5), average_logprobs=True, sft_average_logprobs=True),
        ),
        ("cpo", {}, PreferenceLoss(CPO(), sft_weight=1.0)),
        (
            "orpo",
            {},
            PreferenceLoss(ORPO(), weight=0.1, average_logprobs=True, sft_weight=1.0, sft_average_logprobs=True),
        ),
        ({"name": "kto", "desirable_weight": 1.3}, {}, KTOLoss(beta=0.1, desirable_weight=1.3)),
        ({"name": "kto", "reference_point": "zero"}, {"batch_size": 1}, KTOLoss(reference_point="zero")),
        (
            "dpo",
            {"added_losses": {"bco": {"weight": 0.2}, "ipo": {"weight": 1, "average_log_probs": True}}},
            PreferenceLoss(DPO(), added=(AddedTerm(BCO(), 0.2), AddedTerm(IPO(), 1.0, True))),
        ),
        (
            {"name": "dpo", "margin_weight": 0.5},
            {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.3, "ld_alpha": 0.4, "weigh_by_policy": True},
            PreferenceLoss(
                DPO(margin_weight=0.5), divergence="alpha_divergence", alpha=0.3, ld_alpha=0.4, weighs_by_policy=True
            ),
        ),
    ],
)
def test_a_loss_is_chosen_by_name_with_its_settings(loss, keys, expected):
    chosen = config(loss, **keys)
    assert preference_loss_of(chosen.dpo) == expected
    assert problems(chosen) == {}


@pytest.mark.parametrize("name", LOSSES)
def test_a_reference_is_kept_if_the_loss_compares_with_it(name):
    chosen = config(name)
    spec = PLUGIN.models(chosen)["policy"].spec
    assert spec.keeps_reference == ("ref_logprobs" in preference_loss_of(chosen.dpo).columns)
    assert spec.trains


@pytest.mark.parametrize(
    ("loss", "keys", "key"),
    [
        ("simpo", {"reference_policy_kl_penalty": 0.2}, "dpo.reference_policy_kl_penalty"),
        ("orpo", {"cache_reference_logprobs": True}, "dpo.cache_reference_logprobs"),
        ("dpo", {"preference_loss_weight": 0.0}, "dpo.preference_loss_weight"),
        ("dpo", {"sft_average_log_probs": True}, "dpo.sft_average_log_probs"),
        ("kto", {"sft_loss_weight": 0.1}, "dpo.sft_loss_weight"),
        ("kto", {"preference_average_log_probs": True}, "dpo.preference_average_log_probs"),
        ("kto", {"pairing": "all"}, "dpo.pairing"),
        ("kto", {"batch_size": 1}, "policy.train_global_batch_size"),
        ("kto", {"weigh_by_policy": True}, "dpo.weigh_by_policy"),
        ("simpo", {"ld_alpha": 0.5}, "dpo.ld_alpha"),
        ("orpo", {"added_losses": {"bco": {"weight": 1}}}, "dpo.added_losses"),
        ("nca", {"f_divergence": "forward_kl"}, "dpo.f_divergence"),
        ("dpo", {"f_divergence": "forward_kl", "added_losses": {"bco": {"weight": 1}}}, "dpo.f_divergence"),
        ("dpo", {"f_divergence_alpha": 0.3}, "dpo.f_divergence_alpha"),
        ("aot", {"weigh_by_policy": True}, "dpo.weigh_by_policy"),
        ("aot", {"preference_average_log_probs": True}, "dpo.preference_average_log_probs"),
        (
            "dpo",
            {"added_losses": {"aot": {"weight": 1, "average_log_probs": True}}},
            "dpo.added_losses.aot.average_log_probs",
        ),
        ("aot-unpaired", {"added_losses": {"bco": {"weight": 1}}}, "dpo.added_losses"),
        ("dpo", {"added_losses": {"exo": {"weight": 1, "label_smoothing": 0.0}}}, "dpo.added_losses.exo"),
        ({"name": "dpo", "label_smoothing": 0.7}, {}, "dpo.loss"),
        ({"name": "simpo", "beta": 0.0}, {}, "dpo.loss"),
        ("dpo", {"val_period": 5}, "dpo.val_period"),
        ("dpo", {"data": {"default": {"output_key": "answer"}}}, "data.default.output_key"),
        ("dpo", {"data": {"default": {"env_name": "math"}}}, "data.default.env_name"),
    ],
)
def test_settings_that_contradict_the_loss_are_refused(loss, keys, key):
    assert list(problems(config(loss, **keys))) == [key]


def test_an_unknown_loss_names_those_there_are():
    with pytest.raises(ProblemError) as raised:
        dpo_section({"loss": "simp"})
    [problem] = raised.value.problems
    assert_fields(problem, "loss.name", {"got": "simp", "remedy": "Did you mean simpo?"})
    assert problem.allowed.startswith(", ".join(LOSSES))
    assert "package.module:Class or file.py:Class" in problem.allowed


@pytest.mark.parametrize(("name", "because"), [("simpo", "cannot be added"), ("bcoo", "is not a loss")])
def test_a_loss_that_cannot_be_added_is_refused_by_name(name, because):
    with pytest.raises(ProblemError, match=because) as raised:
        dpo_section({"added_losses": {name: {"weight": 1}}})
    [problem] = raised.value.problems
    assert problem.key == "added_losses"
    assert problem.got == name


def test_an_added_loss_has_a_metric_in_validations_too():
    names = PLUGIN.validation_metrics(config("dpo", data=HELD_OUT, added_losses={"bco": {"weight": 1}}))
    assert {"val/preference_loss_bco", "val/c.jsonl/preference_loss_bco"} <= set(names)


def test_the_path_of_a_class_is_a_loss_with_its_fields_as_keys(tmp_path):
    chosen = config({"name": path_of(tmp_path, "Pairs"), "target": 0.25})
    assert preference_loss_of(chosen.dpo).target == 0.25
    assert PLUGIN.models(chosen)["policy"].spec.keeps_reference
    assert problems(chosen) == {}
    judged = config(path_of(tmp_path, "Judged"), data=HELD_OUT)
    assert not PLUGIN.models(judged)["policy"].spec.keeps_reference
    assert problems(judged) == {}
    assert PLUGIN.validation_metrics(judged) is None  # they are its own


@pytest.mark.parametrize(
    ("name", "keys", "key", "unused", "mentions"),
    [
        ("Pairs", {"reference_policy_kl_penalty": 0.2}, "dpo.reference_policy_kl_penalty", True, ["field", "class"]),
        ("Pairs", {"sft_loss_weight": 0.2}, "dpo.sft_loss_weight", True, [":Pairs"]),
        ("Judged", {"cache_reference_logprobs": True}, "dpo.cache_reference_logprobs", True, ["reference policy"]),
        ("Judged", {"pairing": "all"}, "dpo.pairing", True, ["single"]),
        ("Strange", {}, "dpo.loss.name", False, ["advantages"]),
        ("Torn", {}, "dpo.loss.name", False, ["is_chosen", "verdict"]),
        ("Hot", {}, "dpo.loss.name", False, ["0.5", "temperature 1"]),
    ],
)
def test_settings_that_a_loss_of_a_file_does_not_read_are_refused(tmp_path, name, keys, key, unused, mentions):
    path = path_of(tmp_path, name)
    (problem,) = problems(config(path, **keys)).values()
    assert_fields(problem, key, {"is_unused": unused, MENTIONS: mentions})
    assert unused or problem.got == path
    if name == "Strange":
        assert all(column in problem.allowed for column in ("loss_mask", "ref_logprobs", "pair", "verdict"))


def test_a_loss_of_a_file_that_cannot_be_made_is_refused(tmp_path):
    chosen = config({"name": path_of(tmp_path, "Pairs"), "target": -1.0})
    assert "target must not be negative, got -1.0" in problems(chosen)["dpo.loss"].reason
    assert not PLUGIN.models(chosen)["policy"].spec.keeps_reference
    for name, says in (("Plain", r":Plain .*dataclass"), ("Pear", "'Pear'")):
        with pytest.raises(ProblemError, match=says):
            dpo_section({"loss": path_of(tmp_path, name)})
    with pytest.raises(ProblemError, match="absent"):
        dpo_section({"loss": "absent.package:Loss"})


@pytest.mark.parametrize(("name", "unit"), [("dpo", "num_pairs"), ("kto", "num_responses")])
def test_what_a_validation_records_is_known_beforehand(name, unit):
    assert PLUGIN.validation_metrics(config(name)) == []
    names = PLUGIN.validation_metrics(config(name, data=HELD_OUT))
    assert {"val/loss", "val/accuracy", f"val/{unit}", "val/b.jsonl/accuracy", "val/c.jsonl/loss"} <= set(names)
