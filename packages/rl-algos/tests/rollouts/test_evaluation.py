import json
from dataclasses import replace

import pytest
from chat_tokenizers import tokenizer_of

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.sources.hub_datasets import DATASETS, with_known
from rl_algos.evaluation.config import EvaluationConfig, TaskConfig
from rl_algos.evaluation.tasks import TASKS, task_named, task_of
from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.algorithm import VALIDATION, EvaluationOnly, RolloutAlgorithm, RolloutEvaluation
from rl_algos.rollouts.checks import evaluation_problems, task_problems
from rl_algos.rollouts.config import AgentConfig
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.plugin import training_problems
from rl_algos.rollouts.setup import source_of, validation_sampling
from rl_algos.rollouts.worker.programs import PROGRAMS
from rl_core.config import Config, assemble
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import ConfigError, DataError
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.user_code import FromFile

POLICY = assemble("Policy", {"generation": GenerationConfig}, base=ModelConfig)
ENVIRONMENTS = assemble("Environments", {"math": EnvironmentConfig})
SECTIONS = {"eval": EvaluationConfig, "policy": POLICY, "env": ENVIRONMENTS}


def score(completion, answer):
    """The environment of the prompts here: rl-envs, which has the one named math, is not installed for these tests."""
    return float(completion == answer)


class Base(Config):
    algorithm: str = "grpo"


def evaluation_of(config):
    return RolloutEvaluation(config, RolloutAlgorithm().load)


def make_config(*, data=None, grpo=None, total=40, **settings):
    """A resolved root, of a run if it has data."""
    of_run = {"grpo": GRPOConfig, "data": DataConfig} if data else {}
    root = assemble("Root", {**SECTIONS, **of_run}, base=Base)
    policy = POLICY(
        model_name="m", max_total_sequence_length=total, generation=GenerationConfig(max_new_tokens=8, temperature=1.0)
    )
    given = {"grpo": grpo or GRPOConfig(), "data": data} if data else {}
    return root(
        algorithm="grpo" if data else "evaluation",
        eval=EvaluationConfig(**settings),
        policy=policy,
        env=ENVIRONMENTS(math=EnvironmentConfig(type=f"{__file__}:score")),
        **given,
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"messages": f"{i}+{i}=", "answer": str(2 * i), "environment": "math"} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mine(file, **settings):
    return TaskConfig(name="mine", dataset=DatasetConfig(data_path=str(file)), **settings)


def prepared_data(config, tokenizer):
    algorithm = RolloutAlgorithm()
    return algorithm.prepare(config, tokenizer, algorithm.load(config))


def problems_of_tasks(**settings):
    config = make_config(**settings)
    return task_problems(config.eval, config.grpo)


class OnePool:
    """Keeps the tasks that it is given."""

    def submit(self, tasks):
        self.tasks = list(tasks)
        raise StopIteration


def test_validation_data_gets_the_rollouts_of_the_runs_own_validation(file, tokenizer):
    dataset = DatasetConfig(data_path=str(file))
    data = DataConfig(train=DatasetConfig(data_path="/nowhere.jsonl"), validation=dataset)
    grpo = GRPOConfig(seed=7, max_val_samples=4, val_num_generations_per_prompt=3, max_rollout_turns=2)
    config = make_config(data=data, grpo=grpo)
    plan = evaluation_of(config).plan(tokenizer)
    (task,) = plan.tasks
    assert (task.name, task.num_samples, len(task.groups)) == (VALIDATION, 3, 4)
    pool = OnePool()
    source = PacedRolloutSource(
        pool, NoPrompts(), sampling=task.groups[0].sampling, num_generations=8, seed=7, section="grpo"
    )
    sampling = validation_sampling(config.policy.generation, (tokenizer.eos_token_id,))
    with pytest.raises(StopIteration):
        source.evaluate([group.prompt for group in task.groups], sampling, num_generations=3)
    assert [(g.prompt.id, g.sampling, g.seeds) for g in task.groups] == [
        (g.prompt.id, g.sampling, g.seeds) for g in pool.tasks
    ]
    assert plan.needs.program_args == {"max_turns": 2, "max_tokens": 40, "structured_output": "refuse"}
    assert plan.needs.environments == {"math"}
    assert plan.scoring.k == (1, 2, 3)


class NoPrompts:
    """A stream without prompts."""

    def state(self):
        return {}


@pytest.mark.parametrize("has_validation", [False, True])
def test_rows_that_were_held_out_are_the_validation_data(file, tokenizer, has_validation):
    training = [
        DatasetConfig(data_path=str(file), split_validation_size=2.0),
        DatasetConfig(data_path="/nowhere.jsonl"),
    ]
    validation = DatasetConfig(data_path=str(file)) if has_validation else None
    of_run = DataConfig(train=training[0], validation=validation)
    expected = prepared_data(make_config(data=of_run), tokenizer).validation
    data = of_run.model_copy(update={"train": training})
    (task,) = evaluation_of(make_config(data=data)).plan(tokenizer).tasks
    assert [group.prompt.id for group in task.groups] == [prompt.id for prompt in expected]
    assert len(task.groups) == (7 if has_validation else 2)


def test_a_run_without_validation_data_names_both_kinds(file):
    with pytest.raises(ConfigError, match=r"data\.validation, or split_validation_size"):
        evaluation_of(make_config(data=DataConfig(train=DatasetConfig(data_path=str(file)))))


def test_a_run_is_evaluated_with_the_program_the_time_and_the_stop_tokens_of_its_training(file, tmp_path):
    tokenizer = tokenizer_of("gemma3")
    agent = tmp_path / "agent.py"
    agent.write_text("class Agent: ...\n")
    dataset = DatasetConfig(data_path=str(file))
    config = make_config(
        data=DataConfig(train=dataset, validation=dataset),
        grpo=GRPOConfig(rollout_program=f"{agent}:Agent", max_rollout_s=5, max_rollout_turns=3),
        total=4000,
    )
    prepared = prepared_data(config, tokenizer)
    plan = evaluation_of(config).plan(tokenizer)
    # nothing is trained, so rewards are told of no steps, and no weights travel that prompts would prove
    assert plan.needs == replace(RolloutAlgorithm().rollouts(config, prepared), max_steps=1, sample_prompts=())
    assert isinstance(plan.needs.program, FromFile)
    assert plan.needs.max_seconds == 5
    (task,) = plan.tasks
    assert task.groups[0].sampling == validation_sampling(config.policy.generation, prepared.stop_token_ids)
    ends = tuple(tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]))
    assert task.groups[0].sampling.stop_token_ids == ends


def test_a_model_without_a_run_stops_where_its_template_ends_a_turn(file):
    tokenizer = tokenizer_of("gemma3")
    plan = evaluation_of(make_config(tasks=[mine(file)], total=4000)).plan(tokenizer)
    ends = tuple(tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]))
    assert plan.tasks[0].groups[0].sampling.stop_token_ids == ends
    assert plan.needs.program == PROGRAMS["multi_turn"]
    assert plan.needs.max_seconds is None


@pytest.mark.parametrize("place", [None, "process", "environment"])
def test_the_first_rows_are_tried_on_their_environment_unless_it_runs_the_agent_of_the_run(file, place):
    of_model = evaluation_of(make_config(tasks=[mine(file)])).attempts()
    places = [f"{file}, line 1", f"{file}, line 2"]
    assert sorted({attempt.place for attempt in of_model["math"]}) == places
    agent = None if place is None else AgentConfig(command=["python", "agent.py"], reward="environment", place=place)
    data = DataConfig(train=DatasetConfig(data_path=str(file)))
    run = make_config(data=data, grpo=GRPOConfig(agent=agent), tasks=[mine(file)])
    assert evaluation_of(run).attempts() == ({} if place == "environment" else of_model)


TOOL = '''
def look_up(name: str) -> str:
    """Look up a name."""
    return name

class Game:
    tools = [look_up]
'''


def test_prompts_of_tasks_show_the_tools_of_their_environment(file, tmp_path):
    tokenizer = tokenizer_of("qwen2_5")
    (tmp_path / "game.py").write_text(TOOL)
    dataset = DatasetConfig(data_path=str(file), env_name=f"{tmp_path}/game.py:Game")
    task = TaskConfig(name="game", dataset=dataset)
    plan = evaluation_of(make_config(tasks=[task], max_turns=2, total=4000)).plan(tokenizer)
    prompt = plan.tasks[0].groups[0].prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["look_up"]
    assert '"name": "look_up"' in tokenizer.decode(prompt.token_ids)
    with pytest.raises(ConfigError, match=r"eval.max_turns: the environment .* has tools"):
        evaluation_of(make_config(tasks=[task], total=4000)).plan(tokenizer)


def test_problems_without_an_answer_are_left_out_of_tasks_as_of_training(tmp_path, tokenizer):
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": f"{i}+1?", "solution": "see", "answer": answer} for i, answer in enumerate(["1", "proof", "3"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(data_path=str(path), processor="math_problem", env_name="math")
    task = TaskConfig(name="problems", dataset=dataset)
    (planned,) = evaluation_of(make_config(tasks=[task], total=400)).plan(tokenizer).tasks
    assert [group.prompt.id.rpartition(":")[2] for group in planned.groups] == ["0", "2"]


def test_tasks_have_settings_of_their_own_over_those_of_the_evaluation(file, tokenizer):
    config = make_config(
        tasks=[mine(file, temperature=0.5, num_samples=4, max_prompts=2, max_new_tokens=5)],
        num_samples=2,
        temperature=0.9,
        top_p=0.8,
    )
    (task,) = evaluation_of(config).plan(tokenizer).tasks
    sampling = task.groups[0].sampling
    assert (task.num_samples, len(task.groups), len(task.groups[0].seeds)) == (4, 2, 4)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.5, 0.8, 5)


def test_a_task_gets_the_same_seeds_beside_others_and_with_more_samples(file, tokenizer):
    other = TaskConfig(name="other", dataset=DatasetConfig(data_path=str(file)))
    alone = evaluation_of(make_config(tasks=[mine(file)])).plan(tokenizer).tasks[0]
    beside = evaluation_of(make_config(tasks=[other, mine(file)], num_samples=4)).plan(tokenizer).tasks[1]
    assert [group.seeds[:1] for group in beside.groups] == [group.seeds for group in alone.groups]


def test_prompts_that_leave_no_room_are_refused_and_counted(file, tokenizer):
    with file.open("a") as opened:
        opened.write(json.dumps({"messages": "1" * 60, "answer": "0", "environment": "math"}) + "\n")
    (task,) = evaluation_of(make_config(tasks=[mine(file)])).plan(tokenizer).tasks
    assert len(task.groups) == 5
    ((prompt, reason),) = task.refused
    assert prompt.id.endswith(":5")
    assert reason.startswith(f"context overflow: the prompt has {len(prompt.token_ids)} tokens, and 32 leave room")
    # the others have the seeds that they have without it
    assert evaluation_of(make_config(tasks=[mine(file, max_prompts=5)])).plan(tokenizer).tasks[0].groups[4].seeds == (
        task.groups[4].seeds
    )


def test_an_evaluation_without_a_prompt_that_fits_is_refused(file, tokenizer):
    with pytest.raises(ConfigError, match="no prompt leaves room for a completion: context overflow"):
        evaluation_of(make_config(tasks=[mine(file)], total=10)).plan(tokenizer)
    with pytest.raises(ConfigError, match="8 new tokens leave no room for a prompt of task mine"):
        evaluation_of(make_config(tasks=[mine(file)], total=8)).plan(tokenizer)


def test_without_tasks_and_validation_data_there_is_nothing_to_score(file):
    with pytest.raises(ConfigError, match=r"eval.tasks: .*--tasks gsm8k"):
        evaluation_of(make_config())
    with pytest.raises(ConfigError, match=r"eval.tasks: mine "):
        evaluation_of(make_config(tasks=[mine(file), mine(file)]))


def test_a_row_of_an_unknown_environment_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": "?", "environment": "mth"}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: no environment 'mth'"):
        evaluation_of(make_config(tasks=[mine(path)]))


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"num_samples": 2}, "eval.num_samples"), ({"k": [3], "num_samples": 2, "temperature": 1}, "eval.k")],
)
def test_settings_that_contradict_one_another_are_found(settings, key):
    assert [problem.key for problem in evaluation_problems(make_config(**settings))] == [key]
    assert not list(evaluation_problems(make_config(num_samples=2, temperature=0.5, k=[1, 2])))


def test_tasks_of_a_run_that_trains_get_the_rollouts_of_rl_eval(file, tokenizer):
    dataset = DatasetConfig(data_path=str(file))
    config = make_config(
        data=DataConfig(train=dataset), grpo=GRPOConfig(seed=7), tasks=[mine(file, num_samples=3)], period=1
    )
    with file.open("r+") as opened:
        rows = opened.read()
        opened.seek(0)
        opened.write(json.dumps({"messages": "1" * 60, "answer": "0", "environment": "math"}) + "\n" + rows)
    (task,) = evaluation_of(config).plan(tokenizer).tasks
    assert (len(task.groups), len(task.refused)) == (5, 1)
    pool = OnePool()
    source = source_of(
        config.grpo, config.policy.generation, RolloutData(NoPrompts(), [], tokenizer.eos_token_id), pool
    )
    with pytest.raises(StopIteration):
        source.evaluate([group.prompt for group in task.groups], task.groups[0].sampling, num_generations=3)
    assert [(g.prompt.id, g.sampling, g.seeds) for g in pool.tasks] == [
        (g.prompt.id, g.sampling, g.seeds) for g in task.groups
    ]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"period": 5}, "eval.tasks"),
        ({"at_end": True, "tasks": ["gsm8k"], "max_turns": 2}, "eval.max_turns"),
        ({"at_start": True, "tasks": ["gsm8k"], "seed": 3}, "eval.seed"),
    ],
)
def test_settings_that_a_run_cannot_score_tasks_with_as_it_trains_are_found(file, settings, key):
    data = DataConfig(train=DatasetConfig(data_path=str(file)))
    assert [problem.key for problem in problems_of_tasks(data=data, **settings)] == [key]
    fine = {"tasks": ["gsm8k"], "max_turns": 1, "seed": 42}
    assert not list(problems_of_tasks(data=data, period=5, **fine))
    assert not list(problems_of_tasks(data=data))


@pytest.mark.parametrize(("key", "value"), [("period", 1), ("at_start", True), ("at_end", True)])
def test_an_evaluation_without_a_run_refuses_the_keys_of_training(key, value):
    assert [problem.key for problem in training_problems(make_config(**{key: value}))] == [f"eval.{key}"]
    assert not list(training_problems(make_config()))


ON_TRAIN = ("aime", "aime_2024", "gpqa", "ifeval")
SCORED_BY = {"humaneval_plus": "code", "mbpp_plus": "code", "ifeval": "instructions"}


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"livecodebench"}))
def test_data_of_named_tasks_has_known_columns_the_split_to_evaluate_on_and_a_verifier(name):
    known = with_known(task_named(name).dataset, "validation", of_preferences=False)
    assert (known.processor, known.env_name) == (DATASETS[known.dataset_name].processor, SCORED_BY.get(name, "math"))
    assert known.split == ("train" if name in ON_TRAIN else "test")


def test_tasks_by_name():
    assert task_named("gsm8k").dataset == TASKS["gsm8k"]
    assert task_named("reasoning_gym/chain_sum").dataset.settings["task"] == "chain_sum"
    assert task_named("arithmetic").dataset.dataset_name == "arithmetic"
    assert task_named("someone/something").dataset.dataset_name == "someone/something"
    part = task_named("math_500/5").dataset
    assert (part.dataset_name, part.where) == ("HuggingFaceH4/MATH-500", {"level": "5"})
    assert task_named("livecodebench/hard").dataset.processor == "livecodebench"
    assert task_named("aime/1999").dataset.where == {"Year": "1999"}
    with pytest.raises(ConfigError, match="'gsm8' is not a task; did you mean gsm8k"):
        task_named("gsm8")


def as_task(given, data=None, **settings):
    return task_of(given, EvaluationConfig(**settings), data)


@pytest.mark.parametrize(
    ("given", "name", "path"),
    [
        ("sums.jsonl", "sums", "sums.jsonl"),
        ("held.out/sums.jsonl.gz", "sums", "held.out/sums.jsonl.gz"),
        ("mine=sums.parquet", "mine", "sums.parquet"),
        ("mine=s3://bucket/sums", "mine", "s3://bucket/sums"),
    ],
)
def test_a_file_is_a_task_with_its_name(given, name, path):
    task = as_task(given)
    assert (task.name, task.dataset.data_path, task.dataset.dataset_name) == (name, path, None)


def test_a_folder_that_exists_is_a_task_and_others_are_names_on_the_hub(file):
    assert as_task(str(file.parent)).dataset.data_path == str(file.parent)
    assert as_task("someone/something").dataset.dataset_name == "someone/something"


def test_a_file_is_read_and_scored_as_the_runs_own_rows_are(file):
    own = {"env_name": "math", "input_key": "q", "system_prompt_file": "system.txt"}
    data = DataConfig(train=DatasetConfig(data_path="a.jsonl", **own), validation=None)
    dataset = as_task("sums.jsonl", data).dataset
    assert {key: getattr(dataset, key) for key in own} == own
    assert (
        as_task("sums.jsonl", data, default={"env_name": "other", "input_key": "question"}).dataset.env_name == "other"
    )
    several = DataConfig(train=[DatasetConfig(data_path=name, env_name=name) for name in ("a", "b")])
    assert as_task("sums.jsonl", several).dataset.env_name is None
    hub = DataConfig(train=DatasetConfig(dataset_name="someone/problems", **own))
    found = as_task("sums.jsonl", hub).dataset
    assert (found.env_name, found.input_key) == ("math", None)


@pytest.mark.parametrize(
    ("tasks", "default", "key"),
    [
        (["gsm8k"], {"env_name": "math"}, "eval.default.env_name"),
        ([], {"columns": {"answer": "gold"}}, "eval.default.columns"),
        (["sums.jsonl"], {"subset": "main"}, "eval.default.subset"),
    ],
)
def test_settings_of_files_that_have_no_effect_are_refused(tasks, default, key):
    (problem,) = evaluation_problems(make_config(tasks=tasks, default=default))
    assert (problem.key, problem.is_unused) == (key, True)
    assert not list(evaluation_problems(make_config(tasks=["gsm8k", "sums.jsonl"], default={"env_name": "math"})))


def test_a_file_that_is_not_there_is_reported_before_any_row_is_read(file):
    missing = make_config(tasks=[str(file), f"{file}.parquet", "gsm"])
    problems = list(EvaluationOnly().evaluation_problems(missing))
    assert [problem.key for problem in problems] == ["eval.tasks[1]", "eval.tasks[2]"]
    assert "no data at" in problems[0].message
    assert "problems.jsonl, with eval.default.env_name" in problems[1].message


def test_rows_of_a_file_are_rolled_out_and_those_that_nothing_scores_are_refused(file, tokenizer):
    [task] = evaluation_of(make_config(tasks=[str(file)], num_samples=2, temperature=0.5)).plan(tokenizer).tasks
    assert (task.name, len(task.groups), task.num_samples) == ("sums", 5, 2)
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"q": "1+1=", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"line 2: no column 'messages'.*\(as eval.default.KEY=VALUE\)"):
        evaluation_of(make_config(tasks=[str(file)]))
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"line 1: .*no environment .*; set eval\.default\.env_name"):
        evaluation_of(make_config(tasks=[str(file)]))
    evaluation_of(make_config(tasks=[str(file)], default={"env_name": "math"}))
    file.write_text('{"prompt": "1+1=", "answer": NaN}\n')
    with pytest.raises(DataError, match="line 1: its answer is nan"):
        evaluation_of(make_config(tasks=[str(file)], default={"env_name": "math"}))
