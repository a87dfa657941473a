"""`rl judge agree`, and `rl env check` of rewards by judges."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from rl_launch.cli import app

KEY = "sk-key-of-the-judge-0123456789"
CONFIG = """
defaults: grpo-arithmetic
judges:
  outside: {kind: endpoint, base_url: "URL", model: m, api_key: "${oc.env:JUDGE_KEY}", max_tries: 1}
  own: {kind: generator, model_name: policy}
env:
  sums:
    type: math
    rewards: REWARDS
data: {train: {env_name: sums}}
"""


class Judge(BaseHTTPRequestHandler):
    """Gives longer responses more, and none to a rubric that asks for it."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        user = body["messages"][-1]["content"]
        found = re.findall(r"<response(?: \d+)? [0-9a-f]{16}>\n(.*?)\n</response", user, re.DOTALL)
        self.server.asked.append(body)
        if "free text" in user:
            text = str(len(user))
        elif "nothing" in user:
            text = "no"
        elif len(found) > 1:
            order = sorted(range(len(found)), key=lambda each: -len(found[each]))
            text = json.dumps({"reason": "", "ranks": [order.index(each) + 1 for each in range(len(found))]})
        else:
            text = json.dumps({"reason": "", "score": 0.5 if "same" in user else min(len(found[0]) / 100, 1.0)})
        answer = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {"total_tokens": 9}}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Write no log."""


@pytest.fixture
def judge(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JUDGE_KEY", KEY)
    yield server
    server.shutdown()
    server.server_close()


def write(folder, judge, rewards):
    url = f"http://127.0.0.1:{judge.server_port}/v1"
    text = CONFIG.replace("URL", url).replace("REWARDS", json.dumps(rewards))
    (folder / "recipe.yaml").write_text(text)


def run(*words):
    return CliRunner().invoke(app, [*words])


def test_each_reward_by_a_judge_is_tried_on_two_answers_and_those_of_the_user(tmp_path, judge):
    expected = {
        "right": ({"judge": "outside"}, "ok    judge       right: 0.17 for 'The answer is 22.', 0.14 for"),
        "ranks": ({"judge": "outside", "form": "ranking"}, "ok    judge       ranks: 0.5 for 'The answer is 22.', 0"),
        "alike": ({"judge": "outside", "rubric": "The same."}, "warn  judge       alike is the same for different"),
        "mute": ({"judge": "outside", "rubric": "nothing"}, "FAIL  judge       mute: judge outside: its answer"),
        "gold": ({"judge": "outside", "rubric": "{gold}"}, "gold: judge outside: the row does not have the field"),
        "own": ({"judge": "own"}, "-     judge       own: judges.own is a generator, which needs a run"),
    }
    write(tmp_path, judge, {name: reward for name, (reward, _) in expected.items()})
    found = run("env", "check", "recipe.yaml", "--response", "a" * 50)
    assert found.exit_code == 1
    assert [said for _, said in expected.values() if said not in found.output] == []
    assert "0.5 for 'aaaa" in found.output
    assert KEY not in found.output


def test_a_function_that_asks_a_judge_is_checked_with_it(tmp_path, judge):
    (tmp_path / "reward.py").write_text(
        "async def score(response: str, outside) -> float:\n"
        "    return float(await outside.ask(f'free text: {response}')) / 100\n"
    )
    write(tmp_path, judge, {"right": "reward.py:score"})
    found = run("env", "check", "recipe.yaml")
    assert found.exit_code == 0, found.output
    assert "ok    repeats" in found.output
    # The cache answers when the conversations are played again.
    assert len(judge.asked) == len({json.dumps(each) for each in judge.asked})


def test_a_function_that_asks_a_reward_model_is_left_out_of_the_check(tmp_path, judge):
    (tmp_path / "reward.py").write_text(
        "async def score(messages, helpful):\n    return await helpful.score(messages)\n"
    )
    write(tmp_path, judge, {"right": "reward.py:score", "format": "rl_core:thinking_format"})
    text = (tmp_path / "recipe.yaml").read_text()
    added = "  helpful: {kind: reward_model, model_name: tiny-arithmetic-rm}\nenv:\n"
    (tmp_path / "recipe.yaml").write_text(text.replace("env:\n", added, 1))
    found = run("env", "check", "recipe.yaml")
    assert found.exit_code == 0, found.output
    assert "-     judge       right asks a reward model, which needs a run" in found.output
    assert judge.asked == []


def test_agreement_with_labels_of_people(tmp_path, judge):
    write(tmp_path, judge, {"right": {"judge": "outside"}, "better": {"judge": "outside", "form": "ranking"}})
    rows = [("aaaa", "a"), ("bbb", "bb"), ("c", "ccccc"), ("dddd", "dd")]
    lines = [json.dumps({"prompt": "?", "chosen": chosen, "rejected": rejected}) for chosen, rejected in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    found = run("judge", "agree", "pairs.jsonl", "recipe.yaml", "--reward", "sums.better")
    assert found.exit_code == 0, found.output
    first, *lines = found.output.splitlines()
    assert first == "env.sums.rewards.better: 4 rows with a verdict, 0 without"
    assert [line.split()[:2] for line in lines] == [
        ["accuracy", "0.750"],
        ["kappa", "0.500"],
        ["length_bias", "0.250"],
        ["order_changes", "0.000"],
        ["first_bias", "0.000"],
    ]
    num_asked = len(judge.asked)
    again = json.loads(run("judge", "agree", "pairs.jsonl", "recipe.yaml", "--reward", "sums.better", "--json").output)
    assert len(judge.asked) == num_asked
    assert (again["schema"], again["num_rows"], again["accuracy"]["value"]) == (1, 4, 0.75)


@pytest.mark.parametrize(
    ("rewards", "words", "said"),
    [
        ({"right": "rl_core:length_penalty"}, (), "recipe.yaml has no reward by a judge"),
        ({"a": {"judge": "outside"}, "b": {"judge": "outside"}}, (), "Pass one with --reward: sums.a, sums.b"),
        ({"a": {"judge": "outside"}}, ("--reward", "b"), "--reward: got b; allowed: sums.a"),
        ({"a": {"judge": "own"}}, (), "judges.own is a generator, which needs the engines of a run"),
        ({"a": {"judge": "outside"}}, (), "none.jsonl cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(tmp_path, judge, rewards, words, said):
    write(tmp_path, judge, rewards)
    found = run("judge", "agree", "none.jsonl", "recipe.yaml", *words)
    assert found.exit_code == 2, found.output
    assert said in " ".join(found.output.split())
    assert judge.asked == []


def test_a_key_is_in_no_text_that_a_command_prints(tmp_path, judge):
    write(tmp_path, judge, {"right": {"judge": "outside"}})
    shown = run("config", "show", "recipe.yaml")
    assert "api_key: ${oc.env:JUDGE_KEY}" in shown.output
    wrong = run("config", "show", "recipe.yaml", "judges.outside.limits.concurrent=0", "judges.outside.base_url=x")
    assert wrong.exit_code == 2
    assert KEY not in shown.output + wrong.output
