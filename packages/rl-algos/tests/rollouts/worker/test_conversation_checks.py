import logging
from types import SimpleNamespace

import pytest
from chat_tokenizers import tokenizer_of

from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.worker.conversation_checks import check_conversations
from rl_algos.tiny_model import make_tokenizer
from rl_core.errors import ConfigError
from rl_core.model_config import GenerationConfig, TokenizerConfig

TOOLS = {"game": [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]}


def check(tokenizer, tools=(), tool_format=None, stop_strings=(), **settings):
    generation = GenerationConfig(stop_strings=list(stop_strings))
    policy = SimpleNamespace(tokenizer=TokenizerConfig(tool_format=tool_format), generation=generation)
    return check_conversations(policy, GRPOConfig(**settings), tokenizer, dict(tools))


def test_the_ends_of_a_turn_are_those_of_the_template():
    tokenizer = tokenizer_of("gemma3")
    assert check(tokenizer).sampled == tuple(tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]))


@pytest.mark.parametrize(
    ("behind", "stop_strings", "is_told"),
    [
        pytest.param("<|im_end|>\\n", (), True, id="marks of ChatML in a tokenizer without them"),
        pytest.param("<|im_end|>\\n", ("<|im_end|>",), False, id="a stop string is configured"),
        pytest.param("<|im_end|>\\n", ("###",), True, id="another stop string is configured"),
        pytest.param("<|end|>\\n", (), False, id="a special token"),
        pytest.param("\\n", (), False, id="only white space"),
        pytest.param(" </turn><|end|>", (), False, id="text and then a special token"),
    ],
)
def test_a_turn_that_ends_with_plain_text_is_told_with_the_remedy(caplog, behind, stop_strings, is_told):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '" + behind + "' }}{% endfor %}"
    with caplog.at_level(logging.WARNING):
        check(tokenizer, stop_strings=stop_strings)
    assert ("Set policy.generation.stop_strings: ['<|im_end|>']" in caplog.text) == is_told


def test_penalties_that_no_turn_or_every_turn_would_get_are_refused():
    calls = {"reward_shaping": {"enabled": True, "invalid_tool_call_penalty": 0.5}}
    thoughts = {"reward_shaping": {"enabled": True, "malformed_thinking_penalty": 0.5}}
    check(tokenizer_of("llama3_1"), TOOLS, max_rollout_turns=2, **calls)
    check(tokenizer_of("llama3_1"), **thoughts)
    with pytest.raises(ConfigError, match=r"invalid_tool_call_penalty: got 0\.5, but no environment .* has tools"):
        check(tokenizer_of("llama3_1"), **calls)
    with pytest.raises(ConfigError, match=r"malformed_thinking_penalty: got 0\.5, but .* a channel"):
        check(tokenizer_of("gpt_oss"), **thoughts)


def test_a_template_that_rewrites_turns_needs_a_decision_if_there_are_several():
    tokenizer = tokenizer_of("qwen3")
    check(tokenizer)
    check(tokenizer, max_rollout_turns=2, rewritten_history="keep")
    check(tokenizer, max_rollout_turns=2, rewritten_history="split")
    with pytest.raises(ConfigError, match=r"grpo.rewritten_history: .* `keep` .* `split`"):
        check(tokenizer, max_rollout_turns=2)


def test_a_template_that_cannot_be_continued_may_be_rendered_anew():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content[-1:] if m.role == 'assistant' else m.content }}<|end|>"
        "{% if m.role == 'assistant' and m.tool_calls %}{{ raise_exception('no calls here') }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    check(tokenizer, max_rollout_turns=2, rewritten_history="split")
    with pytest.raises(ConfigError, match=r"policy.tokenizer.chat_template: .* after an assistant turn"):
        check(tokenizer, max_rollout_turns=2, rewritten_history="keep")
    with pytest.raises(ConfigError, match=r"policy.tokenizer.chat_template: no calls here"):
        check(tokenizer, TOOLS, "hermes", max_rollout_turns=2, rewritten_history="split")


def test_a_program_of_ones_own_decides_itself():
    check(tokenizer_of("qwen3"), max_rollout_turns=2, rollout_program="agent.py:Agent")


def test_a_template_that_only_appends_needs_none():
    check(tokenizer_of("qwen2_5"), TOOLS, max_rollout_turns=2)
    check(make_tokenizer(), max_rollout_turns=2)


def test_tools_need_a_second_turn():
    with pytest.raises(ConfigError, match=r"grpo.max_rollout_turns: the environment game has tools"):
        check(tokenizer_of("qwen2_5"), TOOLS)


def test_tools_need_a_format_that_the_template_or_the_config_tells(caplog):
    with pytest.raises(ConfigError, match=r"policy.tokenizer.tool_format: .*hermes"):
        check(make_tokenizer(), TOOLS, max_rollout_turns=2)
    with caplog.at_level(logging.WARNING):
        check(make_tokenizer(), TOOLS, "hermes", max_rollout_turns=2)
    assert "does not show the tools of game" in caplog.text


def test_a_template_that_leaves_out_results_is_refused():
    with pytest.raises(ConfigError, match=r"policy.tokenizer.chat_template: .* an observation \(tool\)"):
        check(tokenizer_of("phi3"), TOOLS, "hermes", max_rollout_turns=2)
