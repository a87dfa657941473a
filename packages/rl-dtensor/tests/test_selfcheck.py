"""The self-check shrinks a family's config and tells right from wrong."""

from transformers import AutoConfig

from rl_dtensor.selfcheck import TOLERANCE, Case, Expected, Outcome, check_case, expect, shrink, write_tiny


def test_a_small_config_keeps_what_makes_the_family():
    small = shrink(AutoConfig.for_model("gemma3_text"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == len(small.layer_types) == 2
    assert (small.hidden_size, small.num_key_value_heads) == (32, 2)
    assert shrink(AutoConfig.for_model("phi")).num_key_value_heads == 4
    assert shrink(AutoConfig.for_model("mixtral")).num_local_experts == 4


def test_what_differs_is_off(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    expected = expect(folder, lora=False)
    case = Case("1", is_packed=True, lora=False)
    assert not check_case(ranks, folder, case, expected).is_off(TOLERANCE)
    name = next(iter(expected.weights))
    moved = Expected(expected.steps, {**expected.weights, name: expected.weights[name] + 1e-3})
    found = check_case(ranks, folder, case, moved)
    assert found.is_off(TOLERANCE)
    assert found.loss <= TOLERANCE < found.weights
    assert Outcome(case, loss=float("nan")).is_off(TOLERANCE)
    assert Outcome(case, inexact=("lm_head.weight",)).is_off(TOLERANCE)
