"""Recipes of tools, programs and a game, and the warm-ups that start them: their rows fit their models and limits."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_algos.data.examples import load_examples
from rl_algos.grpo.loop import GRPO
from rl_algos.sft.data import prepare_examples
from rl_algos.tiny_model import UNKNOWN, make_tokenizer
from rl_core.environments.instance import instance_of, tools_of
from rl_launch.model_files.local_models import MADE_HERE, TINY, TINY_VISION, WARMED_UP
from rl_launch.run_config.reading import read_plan

ON_CPU = ["cluster.device=cpu"]
TOKENIZER = make_tokenizer()
PUZZLE_ANSWER = "That is not a possible move: write up, down, left or right.\n1 2\n3 _"
TINY_RECIPES = {
    # recipe: environments, most turns, the longest answer of an environment
    "grpo-tools-tiny": ({"text_tools"}, 2, "<result>\n9801\n</result>"),
    "search-r1-tiny": ({"text_tools"}, 2, "<result>\nbab\n99\n</result>"),
    "grpo-code-tiny": ({"code"}, 1, ""),
    "grpo-sliding-puzzle-tiny": ({"sliding_puzzle"}, 4, PUZZLE_ANSWER),
    "grpo-self-play-tiny": ({"nim"}, 8, "8"),
    "grpo-proposer-tiny": ({"proposed_sums"}, 1, ""),
}
WARM_UPS = {
    # recipe: the learned texts of a row, for whichever operands
    "sft-tools-tiny": r"(<calculator>(\d+\*\d+)</calculator><\|end\|>\d+|\d+)<\|end\|>",
    "sft-search-tiny": r"(<search>([a-z]{3})</search><\|end\|>\d+|\d+)<\|end\|>",
    "sft-code-tiny": r"```python\nprint\(\d+[*+]\d+\)\n```<\|end\|>",
    "sft-sliding-puzzle-tiny": r"((up|down|left|right)<\|end\|>){1,4}",
    "sft-nim-tiny": r"([123]<\|end\|>){1,8}",
    "sft-proposer-tiny": r"\d+(\+\d+)?<\|end\|>",
}


def num_tokens(text):
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("recipe", TINY_RECIPES)
def test_every_turn_of_a_tiny_recipe_fits(recipe):
    environments, turns, answer = TINY_RECIPES[recipe]
    config = read_plan(recipe, ON_CPU).config
    algorithm = GRPO()
    data = algorithm.prepare(config, TOKENIZER, algorithm.load(config))
    assert data.environments == environments
    assert config.grpo.max_rollout_turns == turns
    prompts = [*data.train.take(64), *data.validation]
    assert UNKNOWN not in TOKENIZER.decode(prompts[0].token_ids)
    between = num_tokens(f"<|end|><|user|>{answer}<|end|><|assistant|>")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    whole = longest + turns * config.policy.generation.max_new_tokens + (turns - 1) * between
    assert whole <= config.policy.max_total_sequence_length


@pytest.mark.parametrize("recipe", WARM_UPS)
def test_a_warm_up_learns_how_its_environment_is_answered(recipe):
    config = read_plan(recipe, [*ON_CPU, "data.train.settings.size=32"]).config
    rows = prepare_examples(config, TOKENIZER, load_examples(config)).train.take(32)
    for row in rows:
        assert re.fullmatch(WARM_UPS[recipe], TOKENIZER.decode(row.tokens[row.loss_mask == 1]))
        assert UNKNOWN not in TOKENIZER.decode(row.tokens)


def test_every_warmed_up_model_comes_from_the_tiny_one_and_starts_a_recipe():
    assert {TINY, TINY_VISION, *WARMED_UP} == MADE_HERE
    for recipe in WARMED_UP.values():
        begins = {"sft-vlm-tiny": TINY_VISION, "rm-tiny": "tiny-arithmetic-sft"}.get(recipe, TINY)
        assert read_plan(recipe, ON_CPU).config.policy.model_name == begins
    recipes = (*TINY_RECIPES, "mcp-tools-tiny", "textarena-tiny")
    started = {read_plan(recipe, ON_CPU).config.policy.model_name for recipe in recipes}
    others = {"tiny-arithmetic-sft", "tiny-hints-sft", "tiny-vision-sft", "tiny-arithmetic-rm"}
    assert started == set(WARMED_UP) - others


def test_the_policy_of_grpo_tools_is_shown_python():
    config = read_plan("grpo-tools").config
    [tool] = tools_of(instance_of(config.env, "text_tools"))
    assert tool["function"]["name"] == "python"
    assert config.env.text_tools.max_calls < config.grpo.max_rollout_turns


def test_the_agent_of_grpo_agent_is_scored_by_the_environment_and_has_calls_for_all_of_its_turns():
    config = read_plan("grpo-agent").config
    agent = config.grpo.agent
    assert agent.needs_environment
    assert {each.env_name for each in config.data.train_datasets} == {"math"}
    module, _, name = agent.run.partition(":")
    found = find_spec(module)
    assert f"async def {name}(" in Path(found.origin).read_text()
    [turns] = re.findall(r"MAX_TURNS = (\d+)", Path(found.origin).read_text())
    assert int(turns) <= agent.max_calls


def test_the_policy_of_search_r1_begins_each_turn_with_a_search_or_the_answer():
    config = read_plan("search-r1-7b").config
    environment = config.env.text_tools
    assert config.policy.generation.stop_strings == ["</search>"]
    assert environment.max_calls < config.grpo.max_rollout_turns
    # Calls and results of the authors: `<search>`, `<information>`; observations are masked unless they are learned.
    assert (environment.tools, environment.result_tag) == (["search"], "information")
    assert config.loss_fn.observation_nll_weight == 0


def test_turns_allow_every_move_of_the_tiny_puzzles():
    config = read_plan("grpo-sliding-puzzle-tiny", ON_CPU).config
    moves = config.env.sliding_puzzle.max_moves
    assert moves <= config.grpo.max_rollout_turns
    assert all(each.settings["max_moves"] < moves for each in config.data.train_datasets)


def test_grpo_code_runs_programs_in_a_sandbox_of_the_strongest_kind():
    config = read_plan("grpo-code").config
    assert config.env.code.sandbox.isolation == "namespaces"
    assert {each.processor for each in config.data.train_datasets} == {"apps"}
