"""Judges in runs: all kinds at once, in training, validation and `rl eval`, kills while rollouts are judged, and
a budget that is spent.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import safetensors.numpy
from runs import Run, lines_of, rollouts_of

from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli.failure import UNFINISHED

RESPONSE = re.compile(r"<response [^\n>]*>\n?(.*?)\n?</response", re.DOTALL)
NUM_TOKENS = 60
"""Tokens of an answer, as the endpoint reports them."""

CONFIG = """
defaults: grpo-arithmetic
policy:
  model_name: tiny-arithmetic
  generation: {{backend: hf, val_temperature: 1.0}}
  train_global_batch_size: 12
  train_micro_batch_size: 12
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 3, max_num_steps: 4, val_period: 4, max_val_samples: 4}}
judges:
  outside: {{kind: endpoint, base_url: "{url}", model: "{model}", limits: {{concurrent: 4}}}}
{judges}
data: {{train: {{env_name: judged}}, validation: {{env_name: judged}}}}
env:
  judged:
    type: math
    max_batch: 4
    rewards:
      nice: {{judge: outside, rubric: "Is it nice?", weight: 0.5}}
{rewards}
checkpointing: {{save_period: 1, keep_top_k: null, metric_name: null}}
cluster: {{device: cpu, cpu_ranks_per_node: 1}}
"""
GRADED = """
import asyncio

FORM = {"enum": [0, 1, 2, 3]}


async def score(response, itself, older, fixed):
    judges = (itself, older, fixed)
    values = await asyncio.gather(*(judge.ask(f"Rate: {response}", FORM) for judge in judges))
    return {"reward": sum(values), **{name: value for name, value in zip(("own", "old", "that"), values)}}


async def asked(response, outside):
    return (await outside.ask(f"<response x>{response}</response x>", {"type": "object"}))["score"]
"""


def scripted(response: str) -> float:
    """The score of a response, which follows from its text."""
    return int(hashlib.sha256(response.strip().encode()).hexdigest()[:4], 16) / 65536


class ScriptedEndpoint:
    """An endpoint whose verdicts follow from the responses, and which counts the questions that it has answered.

    Attributes:
        seconds: Time that an answer takes.
    """

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.num_asked, self.seconds = 0, 0.0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                endpoint.num_asked += 1
                time.sleep(endpoint.seconds)
                content = json.loads(body)["messages"][-1]["content"]
                verdict = json.dumps({"reason": "so", "score": scripted(RESPONSE.findall(content)[-1])})
                choice = {"message": {"role": "assistant", "content": verdict}, "finish_reason": "stop"}
                answer = json.dumps({"choices": [choice], "usage": {"total_tokens": NUM_TOKENS}}).encode()
                with suppress(ConnectionError):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                    endpoint.answered[hashlib.sha256(body).hexdigest()] += 1

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def await_questions(self, number: int, run: Run) -> None:
        """Wait until the endpoint has been asked that often."""
        while self.num_asked < number:
            assert run.process.poll() is None, run.output
            time.sleep(0.02)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def endpoint():
    made = ScriptedEndpoint()
    yield made
    made.close()


def written(folder: Path, endpoint: ScriptedEndpoint, judges: str = "", rewards: str = "") -> str:
    """Return the path of a config with these judges. No verdict of its endpoint is in the cache."""
    folder.mkdir(exist_ok=True)
    (folder / "graded.py").write_text(GRADED)
    path = folder / "judged.yaml"
    model = f"scripted-{uuid.uuid4()}"
    path.write_text(CONFIG.format(url=endpoint.url, model=model, judges=judges, rewards=rewards))
    return str(path)


def assert_scored(records) -> None:
    """Assert that the endpoint's reward of each rollout is the score of its text, and a part of its reward."""
    for record in records:
        text = record["turns"][-1]["text"]
        assert record["status"] != "failed", record["failure"]
        assert record["rewards"]["nice"] == pytest.approx(scripted(text))
        (verdict,) = [each for each in record["verdicts"] if each["judge"] == "outside"]
        assert verdict["value"] == pytest.approx(scripted(text))


def rewards_of(folder: Path) -> dict:
    """Rewards of the rollouts of every step."""
    return {
        step: sorted(
            (record["prompt_id"], record["index"], record["turns"][-1]["text"], *record["rewards"].items())
            for record in records
        )
        for step, records in rollouts_of(folder).items()
    }


def reward_model(folder: Path) -> str:
    """Return a tiny reward model with random weights."""
    from rl_launch.model_files.local_models import untrained_model

    shutil.copytree(untrained_model("tiny-arithmetic"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (path,) = folder.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(path)
    tensors.pop("lm_head.weight", None)
    embedding = next(tensor for name, tensor in tensors.items() if "embed_tokens" in name)
    tensors["score.weight"] = embedding[5:6].copy()
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


@exhaustive
def test_judges_of_all_kinds_give_the_same_rewards_in_training_validation_and_evaluation(rl, endpoint, tmp_path):
    judges = f"""
  itself: {{kind: generator, model_name: policy, max_new_tokens: 8}}
  older: {{kind: generator, model_name: policy, update_every: 2, max_new_tokens: 8, max_total_sequence_length: 64}}
  fixed: {{kind: generator, model_name: tiny-arithmetic, max_new_tokens: 8, max_total_sequence_length: 64}}
  helpful: {{kind: reward_model, model_name: {reward_model(tmp_path / "rm")}, max_total_sequence_length: 256}}
"""
    rewards = "      graded: graded.py:score\n      score: {judge: helpful, weight: 0.1}\n"
    config = written(tmp_path / "config", endpoint, judges, rewards)
    folder = tmp_path / "run"
    assert rl("train", config, f"run_dir={folder}", "policy.max_total_sequence_length=64").code == 0
    trained, validated = rollouts_of(folder), lines_of_file(folder / "rollouts" / "val_4.jsonl")
    for records in (*trained.values(), validated):
        assert_scored(records)
        for record in records:
            own = record["rewards"]
            parts = own["graded"] + 0.5 * own["nice"] + 0.1 * own["score"] + record["info"]["accuracy"]
            assert own["reward"] == pytest.approx(parts, abs=1e-6)
    # Older versions of the policy judge as they did when their version was taken.
    # An earlier run of this test may have left their verdicts in the cache.
    assert all(row["judge/older/requests"] + row["judge/older/cached"] == 12 for row in lines_of(folder))
    place = tmp_path / "eval"
    evaluated = rl("eval", f"{folder}:4", f"run_dir={place}")
    assert evaluated.code == 0, evaluated.output
    found = {(each["prompt_id"], each["index"]): each["rewards"] for each in lines_of_file(place / "rollouts.jsonl")}
    expected = {(each["prompt_id"], each["index"]): each["rewards"] for each in validated}
    same = ("nice", "score")
    assert found.keys() == expected.keys()
    for key, own in expected.items():
        assert [found[key][name] for name in same] == [own[name] for name in same]


MARGIN = """
async def margin(messages, answer, helpful):
    best = [*messages[:-1], {"role": "assistant", "content": answer}]
    return await helpful.score(messages) - await helpful.score(best)


async def whole(messages, helpful):
    return await helpful.score(messages)
"""


@exhaustive
def test_functions_ask_a_reward_model_in_both_placements_and_in_validation(rl, tmp_path):
    (tmp_path / "graded.py").write_text(MARGIN)
    model = reward_model(tmp_path / "rm")
    path, found = tmp_path / "scored.yaml", {}
    for placement in ("{enabled: true}", "{enabled: false, resources: {gpus_per_node: 1}}"):
        judge = f"  helpful: {{kind: reward_model, model_name: {model}, max_total_sequence_length: 64"
        judges = f"{judge}, precision: float32, colocated: {placement}}}\n"
        rewards = "      margin: graded.py:margin\n      whole: graded.py:whole\n      score: {judge: helpful}\n"
        config = CONFIG.format(url="http://127.0.0.1:1/v1", model="none", judges=judges, rewards=rewards)
        lines = (line for line in config.splitlines() if "outside" not in line and "nice" not in line)
        path.write_text("\n".join(lines).replace("cpu_ranks_per_node: 1", "cpu_ranks_per_node: 2"))
        folder = tmp_path / f"run-{len(found)}"
        trained = rl("train", str(path), f"run_dir={folder}", "policy.generation.colocated.enabled=true")
        assert trained.code == 0, trained.output
        records = [each for step in rollouts_of(folder).values() for each in step]
        validated = lines_of_file(folder / "rollouts" / "val_4.jsonl")
        for record in (*records, *validated):
            own = record["rewards"]
            assert own["whole"] == pytest.approx(own["score"], abs=1e-5)
            scores = [each["value"] for each in record["verdicts"] if each["judge"] == "helpful"]
            assert own["margin"] == scores[0] - scores[1]
            assert "conversation" not in record["info"]
        both = [*records, *validated]
        found[placement] = {
            (each["prompt_id"], each["index"], each["turns"][-1]["text"]): each["rewards"] for each in both
        }
    first, second = found.values()
    assert first.keys() == second.keys()
    for key, own in first.items():
        assert own["score"] == second[key]["score"]
        # A row that is computed alone may round otherwise on another number of ranks.
        assert own == pytest.approx(second[key], abs=1e-6)


def lines_of_file(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def with_log(run: Run, name: str) -> psutil.Process:
    """Return the process of a run whose output goes to a log."""
    for process in run.processes():
        with suppress(psutil.Error):
            if any(Path(file.path).name == name for file in process.open_files()):
                return process
    raise AssertionError(f"no process writes to {name}")


VICTIMS = {"judges": "judges.log", "replica": "rollout-worker-0.log", "environment": "environment-judged.log"}


@exhaustive
@pytest.mark.parametrize("victim", ["driver", *VICTIMS])
def test_a_kill_while_rollouts_are_judged_changes_no_reward_and_asks_nothing_twice(endpoint, tmp_path, victim):
    rewards = "      asked: graded.py:asked\n"
    whole = Run.start(tmp_path / "whole", written(tmp_path / "config", endpoint, rewards=rewards))
    whole.finish()
    expected, num_asked = rewards_of(whole.folder), endpoint.num_asked
    endpoint.answered.clear()
    endpoint.seconds = 0.3
    config = written(tmp_path / "other", endpoint, rewards=rewards)
    run = Run.start(tmp_path / "run", config)
    endpoint.await_questions(num_asked + 15, run)
    if victim == "driver":
        run.kill_all()
        run = Run.start(run.folder, config)
    else:
        with run.paused():
            with_log(run, VICTIMS[victim]).kill()
    run.finish()
    assert rewards_of(run.folder) == expected
    # Only requests that were under way at the kill may have been answered to nobody.
    repeated = sum(count - 1 for count in endpoint.answered.values())
    assert repeated <= 4, endpoint.answered


@exhaustive
def test_a_spent_budget_ends_a_run_that_a_larger_one_resumes_with_the_same_rewards(endpoint, tmp_path):
    whole = Run.start(tmp_path / "whole", written(tmp_path / "config", endpoint))
    whole.finish()
    num_questions = len(endpoint.answered)
    endpoint.answered.clear()
    config = written(tmp_path / "other", endpoint)
    # An upper bound is reserved before each request, so that some of the budget may be left.
    limit = "judges.outside.limits.max_total_tokens"
    run = Run.start(tmp_path / "run", config, f"{limit}={num_questions // 2 * NUM_TOKENS}")
    run.finish(code=UNFINISHED)
    assert f"{limit}" in run.output
    assert sum(endpoint.answered.values()) * NUM_TOKENS <= num_questions // 2 * NUM_TOKENS
    state = json.loads((run.folder / "state.json").read_text())
    assert state["status"] == "interrupted"
    resumed = Run.start(run.folder, config, f"{limit}=10000000")
    resumed.finish()
    assert rewards_of(run.folder) == rewards_of(whole.folder)
    assert max(endpoint.answered.values()) == 1


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        ("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"),
        (
            "cluster.cpu_ranks_per_node=2",
            "policy.generation.colocated.enabled=false",
            "policy.generation.colocated.resources.gpus_per_node=1",
            "loss_fn.importance.high=2",
            "grpo.async_grpo.enabled=true",
            "grpo.async_grpo.max_trajectory_age_steps=1",
        ),
    ],
    ids=["dynamic sampling", "asynchronous"],
)
def test_every_prompt_is_judged_and_trained_once(endpoint, tmp_path, settings):
    config = written(tmp_path / "config", endpoint)
    endpoint.seconds = 0.1
    run = Run.start(tmp_path / "run", config, *settings, "grpo.val_period=0")
    run.finish()
    every = [record for records in rollouts_of(run.folder).values() for record in records]
    assert_scored(every)
    drawn = Counter((record["prompt_id"], record["index"]) for record in every)
    assert max(drawn.values()) == 1
    assert max(endpoint.answered.values()) == 1
