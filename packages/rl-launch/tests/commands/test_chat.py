"""`rl chat` with a model that answers as the test says."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from rl_algos.rollouts.worker.chat import Chat
from rl_algos.rollouts.worker.dialogue import Dialogue
from rl_algos.tiny_model import make_tokenizer
from rl_core.config import load
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Rollout
from rl_launch.cli import app
from rl_launch.commands import chat as module
from rl_launch.commands.chat import AnswerFailed, ChatLoop, PoolAnswerer, chat_plan, system_prompt_of

TOKENIZER = make_tokenizer()


def ids(text):
    return np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)


class Model:
    """Answers with the texts of the test; an error is raised."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def __call__(self, tokens, messages):
        self.asked.append(TOKENIZER.decode(tokens.tolist()))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return ids(answer), not answer.endswith("<|end|>")


def conversed(model, *lines, system=""):
    said, noted = [], []
    loop = ChatLoop(Dialogue(TOKENIZER, Chat(TOKENIZER), system=system), model, said.append, noted.append)
    loop.run(lines)
    return said, noted


def test_turns_follow_one_another():
    model = Model("3<|end|>", "5<|end|>", "7<|end|>")
    said, noted = conversed(model, "1+2=\n", "\n", "2+3=\n", "/reset\n", "3+4=\n", "/quit\n", "9+9=\n")
    assert said == ["3", "5", "7"]
    assert noted == ["(the conversation is empty)"]
    assert [asked.count("<|user|>") for asked in model.asked] == [1, 2, 1]
    assert "1+2=<|end|><|assistant|>3<|end|>" in model.asked[1]


def test_commands():
    said, noted = conversed(Model("3<|end|>", "/x<|end|>"), "1+2=", "/raw", "/system", "/nothing", "//x", "/help")
    assert said == ["3", "/x"]
    assert noted[0].startswith("<|user|>1+2=<|end|>")
    assert noted[0].splitlines()[-1].endswith("tokens)")
    assert noted[1] == "(no system message)"
    assert "/nothing is not a command; commands: /reset" in noted[2]
    assert "/raw" in noted[3]


def test_an_answer_that_does_not_come_leaves_the_conversation():
    model = Model("3<|end|>", KeyboardInterrupt(), AnswerFailed("the prompt alone has 40 of at most 32 tokens"), "5")
    said, noted = conversed(model, "1+2=", "8+8=", "9+9=", "2+3=")
    assert said == ["3", "5"]
    assert noted[0] == "(interrupted; the conversation is unchanged)"
    assert noted[1].startswith("no answer: the prompt alone has 40 of at most 32 tokens. ")
    assert "cut off after 1 tokens" in noted[2]
    assert "8+8" not in model.asked[-1]
    assert "9+9" not in model.asked[-1]


def test_the_system_message_comes_first_until_it_is_replaced():
    model = Model("3<|end|>", "5<|end|>")
    _, noted = conversed(model, "1+2=", "/system be nice", "2+3=", "/system", system="be brief")
    assert model.asked[0].startswith("<|system|>be brief<|end|><|user|>1+2=")
    assert model.asked[1].startswith("<|system|>be nice<|end|><|user|>2+3=")
    assert noted[-1] == "be nice"


def test_what_the_template_refuses_is_told():
    tokenizer, noted = make_tokenizer(), []
    tokenizer.chat_template = "{{ raise_exception('no system message here') }}"
    loop = ChatLoop(Dialogue(tokenizer, Chat(tokenizer), system="be brief"), Model(), noted.append, noted.append)
    loop.run(["1+2="])
    assert noted == ["no answer: the chat template cannot render it: no system message here. Use /reset to start over"]


@pytest.fixture
def served(monkeypatch):
    """Serve a model of the test instead of starting one; returns what `serving` was given."""
    given = SimpleNamespace(model=Model("3<|end|>"))

    @contextmanager
    def serving(plan, *, num_turns, seed, **sampling):
        given.config, given.sampling, given.num_turns, given.seed = plan.config, sampling, num_turns, seed
        yield module.ServedModel(given.model, TOKENIZER, None, "tiny", 32)

    monkeypatch.setattr(module, "serving", serving)
    return given


def test_once_prints_the_answer_alone(served):
    done = CliRunner().invoke(
        app, ["chat", "tiny-arithmetic", "--once", "1+2=", "--temperature", "0.5", "--max-new-tokens", "4"]
    )
    assert (done.exit_code, done.stdout) == (0, "3\n")
    assert (served.sampling["temperature"], served.sampling["max_new_tokens"], served.num_turns) == (0.5, 4, 1)


def test_once_fails_without_an_answer(served):
    served.model = Model(AnswerFailed("the engine is gone"))
    done = CliRunner().invoke(app, ["chat", "tiny-arithmetic", "--once", "1+2="])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "error: the engine is gone" in done.stderr


def test_lines_of_a_pipe_are_answered(served):
    served.model = Model("3<|end|>", "5<|end|>")
    done = CliRunner().invoke(app, ["chat", "tiny-arithmetic"], input="1+2=\n2+3=\n")
    assert (done.exit_code, done.stdout, served.num_turns) == (0, "3\n5\n", 2)


def test_a_replica_of_one_copy_is_served(monkeypatch):
    run = chat_plan("grpo-arithmetic", ["policy.generation.backend=hf", "cluster.cpu_ranks_per_node=2"]).config
    assert (run.cluster.num_nodes, run.cluster.cpu_ranks_per_node) == (1, 1)
    assert run.policy.generation.backend == "hf"
    monkeypatch.setattr(module, "missing", lambda spec: ["vllm is not installed"])
    assert chat_plan("tiny-arithmetic", []).config.policy.generation.backend == "hf"
    assert chat_plan("tiny-arithmetic", ["policy.generation.backend=vllm"]).config.policy.generation.backend == "vllm"
    monkeypatch.setattr(module, "missing", lambda spec: [])
    assert chat_plan("tiny-arithmetic", []).config.policy.generation.backend == "vllm"


def test_the_system_message_is_that_of_the_training_data(tmp_path):
    (tmp_path / "brief.txt").write_text("Be brief.\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    written = f"data: {{train: {{data_path: x}}, default: {{system_prompt_file: {tmp_path}/brief.txt}}}}"
    (run / "config.yaml").write_text(written)
    assert load(run / "config.yaml").select("data.default.system_prompt_file")
    assert system_prompt_of(f"{run}:best") == "Be brief."
    assert system_prompt_of("tiny-arithmetic") == ""
    (tmp_path / "brief.txt").unlink()
    with pytest.raises(ConfigError, match="--system TEXT, or --system '' for none"):
        system_prompt_of(str(run))


class Pool:
    """Finishes groups in the order of the test."""

    def __init__(self, *order):
        self.order, self.tasks = list(order), []

    def submit(self, tasks):
        self.tasks += tasks
        return [len(self.tasks) - 1]

    def next_done(self):
        ticket = self.order.pop(0)
        task = self.tasks[ticket]
        if task.seeds == (2,):
            return ticket, RolloutGroup.of(task.prompt, [Rollout.failed(task.prompt, "out of memory")])
        tokens = np.append(task.prompt.token_ids, [90 + ticket, 1]).astype(np.int32)
        columns = Batch({"tokens": Ragged.from_rows([tokens], np.int32)})
        report = SimpleNamespace(status="ok")
        return ticket, SimpleNamespace(rollouts=[report], columns=columns)


def test_an_answer_that_was_not_waited_for_is_not_taken_for_a_later_one():
    pool = Pool(0, 1, 2)
    answer = PoolAnswerer(pool, SamplingParams(max_new_tokens=4))
    pool.submit([SimpleNamespace(prompt=SimpleNamespace(token_ids=np.array([5], np.int32)), seeds=(7,))])
    sampled, is_cut = answer(np.array([5, 6], np.int32), ())
    assert (sampled.tolist(), is_cut) == ([91, 1], False)
    with pytest.raises(AnswerFailed, match="out of memory"):
        PoolAnswerer(pool, SamplingParams(max_new_tokens=4), seed=2)(np.array([5], np.int32), ())
