from dataclasses import replace
from types import SimpleNamespace

import pytest
from scripted import NEEDS, make_plan, make_task

from rl_core.config import assemble
from rl_core.environments.config import EnvironmentConfig
from rl_core.user_code import FromFile
from rl_launch.evaluation.folder import identity_of
from rl_launch.run_config.reading import read_plan

PLAN = make_plan(make_task(2))


def digests(env=None, **needs):
    generation = SimpleNamespace(backend="hf")
    policy = SimpleNamespace(model_name="m", precision="float32", hf_config_overrides={}, generation=generation)
    return identity_of(SimpleNamespace(policy=policy, env=env), replace(PLAN, needs=replace(NEEDS, **needs)))


def differing(first, second):
    return {name for name in first if first[name] != second[name]}


@pytest.mark.parametrize(
    "needs", [{"program": "other:Program"}, {"program_args": {"max_turns": 2}}, {"max_seconds": 5}]
)
def test_another_program_other_arguments_and_another_time_are_another_evaluation(needs):
    assert differing(digests(), digests(**needs)) == {"turns"}


def test_a_program_in_a_file_is_known_by_its_text(tmp_path):
    path, elsewhere = tmp_path / "agent.py", tmp_path / "same.py"
    for each in (path, elsewhere):
        each.write_text("class Agent: ...\n")
    first = digests(program=FromFile.read(f"{path}:Agent"))
    assert not differing(first, digests(program=FromFile.read(f"{elsewhere}:Agent")))
    path.write_text("class Agent: pass\n")
    assert differing(first, digests(program=FromFile.read(f"{path}:Agent"))) == {"turns"}


def test_a_reward_with_another_text_is_another_environment(tmp_path):
    path = tmp_path / "rewards.py"
    environments = assemble("Environments", {"mine": EnvironmentConfig})

    def of(text):
        path.write_text(text)
        env = environments(mine=EnvironmentConfig(rewards={"right": f"{path}:right"}))
        return digests(env, environments=frozenset({"mine"}))

    first = of("def right(completion): return 1.0\n")
    assert not differing(first, of("def right(completion): return 1.0\n"))
    assert differing(first, of("def right(completion): return 0.0\n")) == {"environments"}


def test_other_judges_and_rubrics_are_another_evaluation_and_another_key_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "first")
    rubric = tmp_path / "rubric.md"
    rubric.write_text("Is it right?")
    config = tmp_path / "judged.yaml"

    def judged(*overrides):
        config.write_text(
            "defaults: grpo-arithmetic\n"
            "judges: {critic: {kind: endpoint, base_url: http://127.0.0.1:1/v1, model: one, "
            "api_key: '${oc.env:JUDGE_KEY}'}}\n"
            f"env: {{sums: {{rewards: {{right: {{judge: critic, rubric: {rubric}}}}}}}}}\n"
        )
        return identity_of(read_plan(config, overrides).config, PLAN)

    first = judged()
    monkeypatch.setenv("JUDGE_KEY", "second")
    assert not differing(first, judged("judges.critic.limits.concurrent=1"))
    assert differing(first, judged("judges.critic.model=two")) == {"judges"}
    rubric.write_text("Is it wrong?")
    assert differing(first, judged()) == {"judges"}
    assert "judges" not in digests()
