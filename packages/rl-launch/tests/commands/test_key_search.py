"""Keys found by name and by description."""

import pytest

from rl_launch.commands.explain import search


def keys(found):
    return [each.explanation.key for each in found]


def test_the_whole_last_name_comes_before_a_part_of_it_and_that_before_a_description():
    found = search("temperature")
    assert "policy.generation.temperature" in keys(found[0])
    assert all(key.endswith(".temperature") for key in keys(found[0]))
    assert "policy.generation.val_temperature" in keys(found[1])
    assert keys(search("packing")[0]) == ["policy.sequence_packing"]


@pytest.mark.parametrize("text", ["Learning-Rate", "rates learning", "learning_rate"])
def test_case_order_plural_and_separators_do_not_matter(text):
    assert keys(search(text)[0]) == keys(search("learning rate")[0])


def test_keys_of_the_same_meaning_are_one_result():
    found = [{each.explanation.key, *each.also} for each in search("deadline_s")[0]]
    assert any({"env.math.deadline_s", "env.match.deadline_s"} <= keys for keys in found)
    (rate,) = search("lr", "ppo-math-1b", ["policy.optimizer.kwargs.lr=1e-5", "value.optimizer.kwargs.lr=1e-5"])[0]
    assert rate.explanation.value == 1e-5
    assert rate.also == ("value.optimizer.kwargs.lr",)


def test_defaults_of_algorithms_are_results_of_their_own():
    first, second = search("num_prompts_per_step")[0]
    assert (first.explanation.default, "grpo.num_prompts_per_step" in first.also) == (32, True)
    assert (second.explanation.key, second.explanation.default) == ("ppo.num_prompts_per_step", 512)
    assert second.condition == "algorithm: ppo"
    rates = {each.condition: each.explanation.default for each in search("lr")[0]}
    assert rates["algorithm: dpo or online_dpo"] == 5e-7
    assert rates["algorithm: offline_distillation or sft"] == 2e-5


def test_settings_of_datasets_are_found():
    found, *_ = search("max_operand")[0]
    assert found.explanation.key == "data.train.settings.max_operand"
    assert "data.train.dataset_name: arithmetic or arithmetic_preference" in found.condition
    assert not found.also
    (chosen,) = search("max_operand", "grpo-arithmetic")[0]
    assert (chosen.explanation.value, chosen.also) == (49, ("data.validation.settings.max_operand",))


def test_an_algorithm_has_only_its_own_keys():
    assert keys(search("max_num_steps", "sft-arithmetic")[0]) == ["sft.max_num_steps"]


def test_nothing_is_found_by_nothing():
    assert search("") == search("?!")
    assert not search("")[0]
