from types import SimpleNamespace

import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_examples
from rl_algos.distillation.algorithm import UNSCORED, Distillation, OfflineDistillation, teacher_tokenizer
from rl_algos.distillation.config import DistillationConfig, OfflineDistillationConfig
from rl_algos.distillation.teachers import check_teachers
from rl_algos.distillation.unscored import unscored
from rl_algos.tiny_model import make_tokenizer
from rl_core.config import assemble
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import ConfigError, DataError
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import resolve

POLICY = assemble("Policy", {"generation": GenerationConfig}, base=ModelConfig)
ENVIRONMENTS = assemble("Environments", {"math": EnvironmentConfig})
ALGORITHM = Distillation()
ROWS = ['{"messages": "1+1=", "answer": "2"}', '{"messages": "2+2=", "answer": "4", "environment": "math"}']


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS))
    return str(path)


def config(rows, *, section=DistillationConfig, teachers=None, **settings):
    data = DataConfig(train={"data_path": rows}, validation={"data_path": rows}, **settings.pop("data", {}))
    models = {"teacher": ModelConfig}
    if teachers is not None:
        models = {"teachers": assemble("Teachers", dict.fromkeys(teachers, ModelConfig))}
    sections = {"policy": POLICY, "data": DataConfig, "env": ENVIRONMENTS, "distillation": section}
    root = assemble("Root", {**sections, **models})
    model = {"model_name": "student", "max_total_sequence_length": 64}
    named = {"teacher": {"model_name": settings.pop("teacher", "student")}}
    if teachers is not None:
        named = {"teachers": {name: {"model_name": "student"} for name in teachers}}
    values = {"policy": {**model, "generation": {"max_new_tokens": 8}}, "env": {"math": {"type": UNSCORED}}, **named}
    return root(**values, data=data, distillation=section(**{"topk_logits_k": 8, **settings}))


def test_prompts_that_name_no_environment_are_not_scored(rows):
    (dataset,) = ALGORITHM.load(config(rows)).train
    assert [dataset.environment(row_id) for row_id in dataset.examples] == [UNSCORED, "math"]
    assert resolve(UNSCORED) is unscored
    assert unscored() == 0.0


def test_an_environment_that_does_not_exist_is_refused(rows, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": "1+1=", "environment": "reward.py:score"}')
    with pytest.raises(DataError, match=r"line 1.*reward\.py:score"):
        ALGORITHM.load(config(rows))


def test_prompts_and_the_size_of_the_vocabulary_are_prepared(rows, tokenizer):
    settings = config(rows)
    data = ALGORITHM.prepare(settings, tokenizer, ALGORITHM.load(settings))
    assert data.vocabulary == len(tokenizer)
    assert len(data.validation) == 2
    assert data.translator is None


def test_rows_without_a_teacher_are_refused(rows, tokenizer, tmp_path):
    settings = config(rows, teachers=["math"])
    with pytest.raises(DataError, match=r"no teacher: there are teachers\.math"):
        ALGORITHM.prepare(settings, tokenizer, ALGORITHM.load(settings))
    (tmp_path / "rows.jsonl").write_text(ROWS[1])
    assert ALGORITHM.prepare(settings, tokenizer, ALGORITHM.load(settings)).vocabulary == len(tokenizer)


def test_a_teacher_without_rows_is_refused(rows, tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROWS[1])
    settings = config(rows, teachers=["math", "maths"])
    with pytest.raises(DataError, match=r"teachers\.maths: no row has .* there are math, rows\.jsonl"):
        ALGORITHM.prepare(settings, tokenizer, ALGORITHM.load(settings))


def test_text_is_prepared_with_its_teacher(rows, tokenizer):
    settings = config(rows, section=OfflineDistillationConfig)
    data = OfflineDistillation().prepare(settings, tokenizer, load_examples(settings))
    row = data.train.take(1)[0]
    assert row.teacher == "teacher"
    assert row.row.loss_mask.sum() == 2
    assert data.vocabulary == len(tokenizer)


def test_a_teacher_to_whom_tokens_mean_something_else_is_refused(rows, tokenizer, tmp_path):
    make_tokenizer("0123").save_pretrained(str(tmp_path / "other"))
    with pytest.raises(
        ConfigError, match=r"teacher\.model_name: the tokenizer .* its token 7 is .*cross_tokenizer=true"
    ):
        check_teachers(config(rows, teacher=str(tmp_path / "other")), make_tokenizer("3210"))
    tokenizer.save_pretrained(str(tmp_path / "same"))
    check_teachers(config(rows, teacher=str(tmp_path / "same")), tokenizer)
    check_teachers(config(rows, teacher=str(tmp_path / "nothing")), tokenizer)


def test_a_teacher_may_have_more_tokens_than_the_student(rows, tmp_path):
    make_tokenizer("0123").save_pretrained(str(tmp_path / "more"))
    check_teachers(config(rows, teacher=str(tmp_path / "more")), make_tokenizer("012"))
    with pytest.raises(ConfigError, match="its token 11 is None"):
        check_teachers(config(rows, teacher=str(tmp_path / "more")), make_tokenizer("01234"))


def test_a_teacher_with_other_tokens_is_translated_to(rows, tokenizer, tmp_path):
    make_tokenizer("0123456789+=").save_pretrained(str(tmp_path / "other"))
    settings = config(rows, teacher=str(tmp_path / "other"), cross_tokenizer=True)
    translator = ALGORITHM.prepare(settings, tokenizer, ALGORITHM.load(settings)).translator
    prompt = translator.prompt([{"role": "user", "content": "1+1="}])
    response = translator.response(prompt, [*tokenizer("24")["input_ids"], tokenizer.eos_token_id])
    assert len(response.spans) == 3
    with pytest.raises(ConfigError, match="has no tokenizer files"):
        teacher_tokenizer(SimpleNamespace(teacher=ModelConfig(model_name=str(tmp_path))), "teacher")
