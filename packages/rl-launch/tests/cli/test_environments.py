"""`rl env run` and `rl env check` on environments in files and installed ones."""

import json
import os
import subprocess

import pytest
from rl_process import RL
from typer.testing import CliRunner

from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli import app

REWARDS = """
def brief(response: str, answer: str) -> float:
    return float(answer in response) - 0.25 * (len(response) > 10)


def boxed(response: str, answer: str) -> float:
    return float(response == "\\\\boxed{" + answer + "}")


def directed(response: str) -> float:
    return float(response == "go left")


def unnamed(response, /) -> float:
    return 1.0


def fragile(response: str, answer: str) -> float:
    return float(int(response) == int(answer))
"""

IMPORTS = "import nowhere\n\n\ndef score(response):\n    return 1.0\n"

GUESS = """
class Guess:
    def __init__(self, *, max_guesses: int = 3):
        self.max_guesses, self.count = max_guesses, 0

    def step(self, response: str, answer: str):
        self.count += 1
        if response == answer:
            return 1.0
        return 0.0 if self.count == self.max_guesses else "higher"
"""

TOOLS = '''
from rl_core.environments.tool_environment import ToolEnvironment


def price(item: str) -> int:
    """Look up a price."""
    return {"tea": 3}[item]


environment = ToolEnvironment([price], lambda response, answer: float(answer in response))
'''

ROWS = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(2)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in (("rewards.py", REWARDS), ("guess.py", GUESS), ("my_tools.py", TOOLS), ("imports.py", IMPORTS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rl(*arguments):
    return CliRunner().invoke(app, ["env", *arguments])


def run(*arguments, script=""):
    with open("script.txt", "w", encoding="utf-8") as file:
        file.write(script)
    return rl("run", *arguments, "--scripted", "script.txt")


def test_a_reward_function_scores_a_scripted_completion():
    answer = run("rewards.py:brief", "--data", "rows.jsonl", "--row", "2", script="The sum\nis 2.")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout == (
        "[user]\n1+1=\n[turn 1]\nThe sum\nis 2.\nreward 0.75\n[end] 1 turn, ended by the environment; reward 0.75\n"
    )


def test_a_conversation_of_several_turns_with_settings():
    row = ("--prompt", "Which number?", "--fields", '{"answer": "7"}')
    won = run("guess.py:Guess", *row, script="5\n.\n7\n")
    assert "[turn 1]\n5\nreward 0\n[user]\nhigher\n[turn 2]\n7\nreward 1\n[end] 2 turns" in won.stdout
    lost = run("guess.py:Guess", "max_guesses=1", *row, script="5")
    assert lost.stdout.endswith("[end] 1 turn, ended by the environment; reward 0\n")


def test_calls_of_tools_are_made_and_their_format_can_be_chosen():
    row = ("my_tools.py:environment", "--prompt", "What is tea?", "--fields", '{"answer": "3"}')
    hermes = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>\n.\nIt is 3.'
    answer = run(*row, script=hermes)
    assert "tool price(item: string): Look up a price.\n" in answer.stdout
    assert 'call of price: {"item": "tea"}\nreward 0\n[tool]\n3\n' in answer.stdout
    assert answer.stdout.endswith("ended by the environment; reward 1\n")
    llama = '{"name": "price", "parameters": {"item": "tea"}}\n.\nIt is 3.'
    assert "[tool]\n3\n" in run(*row, "--tool-format", "llama", script=llama).stdout


def test_the_record_is_that_of_a_run():
    answer = run("rewards.py:brief", "--data", "rows.jsonl", "--json", script="1")
    record = json.loads(answer.stdout)
    assert record["rewards"] == {"reward": 1.0}
    assert record["turns"][0]["text"] == "1"
    assert "[turn 1]" in answer.stderr


@pytest.mark.parametrize(
    ("script", "says"), [("", "the input ended before the conversation did"), ("x", "raised ValueError: invalid lit")]
)
def test_a_rollout_that_fails_says_why_and_exits_with_1(script, says):
    answer = run("rewards.py:fragile", "--data", "rows.jsonl", script=script)
    assert answer.exit_code == 1
    assert "[failed]\n" in answer.stdout
    assert says in answer.stdout


@exhaustive
def test_completions_come_by_a_pipe():
    done = subprocess.run(
        [*RL, "env", "run", "rewards.py:brief", "--data", "rows.jsonl"],
        input="It\nis 1.\n.\nnever read",
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[turn 1]\nIt\nis 1.\nreward 1\n" in done.stdout


def test_an_installed_environment_takes_rows_of_its_own_dataset():
    answer = run("sliding_puzzle", "--max-turns", "2", script="up\n.\ndown")
    assert "Slide the tiles" in answer.stdout
    assert "2 turns, cut off by a limit" in answer.stdout
    assert rl("check", "guess_number", "data.train.settings.size=3").exit_code == 0


def test_a_check_has_a_line_each_and_samples():
    answer = rl("check", "rewards.py:brief", "--data", "rows.jsonl")
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    names = ("start", "signature", "answers", "deadline", "rewards", "repeats", "state", "batches")
    assert [line.split()[:2] for line in lines[:8]] == [["ok", name] for name in names]
    assert "rows.jsonl, line 1: 'The answer is 1.'" in answer.stdout


def test_a_check_tries_the_answer_in_common_forms_and_the_users_own_response():
    found = json.loads(rl("check", "rewards.py:boxed", "--data", "rows.jsonl", "--json").stdout)
    earned = {each["response"]: each["rewards"]["reward"] for each in found["samples"][:5]}
    assert earned == {"The answer is 1.": 0.0, "1": 0.0, "": 0.0, "\\boxed{1}": 1.0, "<answer>1</answer>": 0.0}
    answer = rl("check", "rewards.py:boxed", "--data", "rows.jsonl")
    assert "  note: ask for this form in the prompt" in answer.stdout
    assert "remedy" not in answer.stdout
    answer = rl("check", "rewards.py:directed", "--data", "rows.jsonl")
    assert answer.exit_code == 0
    assert "warn  rewards" in answer.stdout
    assert "--response TEXT" in answer.stdout
    answer = rl("check", "rewards.py:directed", "--data", "rows.jsonl", "--response", "go left")
    assert "ok    rewards" in answer.stdout
    assert "rows.jsonl, line 1: 'go left'" in answer.stdout


def test_a_check_that_fails_exits_with_1_and_says_the_remedy():
    answer = rl("check", "rewards.py:fragile", "--data", "rows.jsonl")
    assert answer.exit_code == 1
    assert "FAIL  answers" in answer.stdout
    assert "remedy: a reward is a number for every response" in answer.stdout
    found = json.loads(rl("check", "rewards.py:fragile", "--data", "rows.jsonl", "--json").stdout)
    assert found["holds"] is False
    assert [check["name"] for check in found["checks"] if check["status"] == "failed"] == ["answers"]


WRONG = {
    "unknown": (("run", "mth", "--prompt", "x"), "'mth'"),
    "unknown function": (("check", "rewards.py:brif", "--prompt", "x"), " brief?"),
    "unknown module": (("check", "nowhere.to_be:found", "--prompt", "x"), "nowhere"),
    "no rows": (("run", "math"), "--data"),
    "fields": (("run", "math", "--prompt", "x", "--fields", "3"), "--fields: got 3"),
    "an answer that nobody can give": (
        ("check", "match", "--prompt", "x", "--fields", '{"answer": "a</think>"}'),
        "no response can match the answer 'a</think>'",
    ),
    "parameters by position": (
        ("run", "rewards.py:unnamed", "--prompt", "x", "--scripted", "rows.jsonl"),
        "cannot be built: it takes response by position only; remove the `/`",
    ),
    "missing import": (
        ("run", "imports.py:score", "--prompt", "x", "--scripted", "rows.jsonl"),
        "imports nowhere, which is not installed",
    ),
    "setting": (("run", "rewards.py:brief", "deadline=3", "--prompt", "x"), "env.brief.deadline_s?"),
    "row": (("run", "rewards.py:brief", "--data", "rows.jsonl", "--row", "3"), "--row: got 3, but the data has 2 rows"),
    "file": (("check", "math", "--data", "no.jsonl"), "no.jsonl"),
    "format": (("run", "math", "--prompt", "x", "--scripted", "rows.jsonl", "--tool-format", "foo"), "harmony"),
    "program": (("run", "math", "--prompt", "x", "--scripted", "rows.jsonl", "--program", "foo"), "multi_turn"),
    "script": (("run", "math", "--prompt", "x", "--scripted", "no.txt"), "no.txt cannot be read"),
    "two players": (("run", "math", "--prompt", "x", "--scripted", "a", "--model", "b"), "--model and --scripted"),
    "no model": (("run", "math", "--prompt", "x", "policy.model_name=x"), "policy.model_name"),
    "model": (("run", "math", "--prompt", "x", "--model", "/no/where"), 'policy.model_name (config): got "/no/where"'),
}


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG)
def test_wrong_use_is_one_message(arguments, says):
    answer = rl(*arguments)
    assert answer.exit_code == 2, answer.output
    assert answer.stderr.startswith("error: ")
    assert says in answer.stderr


def test_rows_that_a_run_would_refuse_are_refused_with_their_line_and_the_keys(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"q": "1+1=", "gold": "2"}\n')

    def refusal(*arguments):
        answer = CliRunner().invoke(app, ["env", "check", *arguments])
        assert answer.exit_code == 2
        return " ".join(answer.stderr.split())

    said = refusal("math", "--data", str(own))
    assert "own.jsonl, line 1: no column 'messages'; the columns are gold, q. Set `input_key`" in said
    assert "(as data.train.KEY=VALUE)" in said
    said = refusal("math", "--data", str(own), "data.train.input_key=q")
    assert "line 1: the environment math cannot score it" in said
    assert "set `output_key` to that column" in said
    own.write_text('{"prompt": "1+1=", "answer": NaN}\n')
    assert "line 1: its answer is nan" in refusal("rewards.py:brief", "--data", str(own))


def test_rewards_that_never_differ_come_with_what_the_code_looks_for():
    answer = rl("check", "rewards.py:directed", "--data", "rows.jsonl")
    assert "earn the same" in answer.output
    assert "rewards.py:11: == go left" in answer.output
    assert "looks for" not in rl("check", "rewards.py:brief", "--data", "rows.jsonl").output


def test_a_config_is_checked_with_its_environment_and_data(tmp_path):
    (tmp_path / "guess.yaml").write_text(
        "defaults: grpo-arithmetic\n"
        "env: {guess: {type: 'guess.py:Guess', max_guesses: 2}}\n"
        "data:\n"
        "  train: {data_path: rows.jsonl, env_name: guess}\n"
        "  validation: null\n"
    )
    answer = rl("check", "guess.yaml")
    assert answer.exit_code == 0, answer.output
    assert "up to 2 turns each" in answer.output
    both = rl("check", "guess.yaml", "--data", "rows.jsonl")
    assert "--data and --prompt" in both.output
    named_by_rows = rl("check", "grpo-arithmetic")
    assert named_by_rows.exit_code == 0, named_by_rows.output
    assert "The answer is" in named_by_rows.output
    (tmp_path / "sft.yaml").write_text("defaults: sft-arithmetic\n")
    assert "sft.yaml does not use an environment" in rl("check", "sft.yaml").output
