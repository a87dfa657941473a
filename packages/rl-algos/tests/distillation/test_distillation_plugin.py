import pytest

from rl_algos.distillation.algorithm import Distillation, OfflineDistillation, check_heads, check_k, sends_hidden
from rl_algos.distillation.plugin import OFFLINE, PLUGIN
from rl_algos.distillation.teachers import teacher_of
from rl_core.algorithm import implementation_of
from rl_core.config import assemble, load, resolve
from rl_core.errors import ConfigError
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import ALGORITHMS, plugin

POLICY = assemble("Policy", {"generation": GenerationConfig}, base=ModelConfig)
ENVIRONMENTS = assemble("Environments", {})
TEACHERS = assemble("Teachers", {"math": ModelConfig, "sums": ModelConfig})


def root(algorithm, *, several=False):
    models = {"teachers": TEACHERS} if several else {"teacher": ModelConfig}
    sections = {key: kind if isinstance(kind, type) else kind(None) for key, kind in algorithm.sections.items()}
    return assemble("Root", {**sections, "policy": POLICY, "env": ENVIRONMENTS, **models})


def config(tmp_path, algorithm, *overrides, several=False):
    path = tmp_path / "a.yaml"
    teachers = "teachers: {math: {model_name: a}, sums: {model_name: b}}" if several else "teacher: {model_name: a}"
    batch_size = 32
    path.write_text(f"policy: {{model_name: tiny, train_global_batch_size: {batch_size}}}\n{teachers}\n")
    train = "data.train={dataset_name: arithmetic}"
    return resolve(load(str(path), [train, *overrides], search=[]), root(algorithm, several=several)).config


def problems(algorithm, config):
    return {problem.key: problem for check in algorithm.checks for problem in check(config)}


@pytest.mark.parametrize("algorithm", [PLUGIN, OFFLINE], ids=lambda algorithm: algorithm.name)
def test_the_entry_points_lead_to_the_loop(algorithm):
    assert plugin(ALGORITHMS, algorithm.name) is algorithm
    assert isinstance(implementation_of(algorithm), Distillation if algorithm is PLUGIN else OfflineDistillation)


@pytest.mark.parametrize("algorithm", [PLUGIN, OFFLINE], ids=lambda algorithm: algorithm.name)
def test_the_student_trains_and_teachers_do_not(tmp_path, algorithm):
    plain = config(tmp_path, algorithm)
    assert problems(algorithm, plain) == {}
    needs = algorithm.models(plain)
    assert list(needs) == ["policy", "teacher"]
    assert needs["policy"].spec.trains
    assert needs["teacher"].section == "teacher"
    assert needs["teacher"].spec.role == "teacher"
    assert not needs["teacher"].spec.trains


def test_several_teachers_have_a_section_and_a_role_each(tmp_path):
    def sections(**written):
        return PLUGIN.model_keys(lambda key: written.get(key, ()))

    assert sections() == ("policy",)
    assert sections(teacher=("model_name",)) == ("policy", "teacher")
    assert sections(teachers=("math", "sums")) == ("policy", "teachers.math", "teachers.sums")
    assert sections(teachers=("math",), teacher=("model_name",)) == ("policy", "teacher", "teachers.math")
    needs = PLUGIN.models(config(tmp_path, PLUGIN, several=True))
    found = {role: need.section for role, need in needs.items() if role != "policy"}
    assert found == {"teacher_math": "teachers.math", "teacher_sums": "teachers.sums"}


def test_rows_go_to_the_teacher_of_their_environment_or_dataset_or_to_the_one_for_all_others():
    roles = ("teacher", "teacher_math", "teacher_sums")
    assert teacher_of(roles, "math", "sums") == "teacher_math"
    assert teacher_of(roles, "chess", "sums") == "teacher_sums"
    assert teacher_of(roles, "chess", "moves") == "teacher"
    assert teacher_of(roles[1:], "chess", "moves") == ""


@pytest.mark.parametrize(
    ("algorithm", "override", "key"),
    [
        (PLUGIN, "loss_fn={kl_type: forward, mixed_kl_weight: 0.3}", "loss_fn.mixed_kl_weight"),
        (OFFLINE, "loss_fn={jensen_shannon_beta: 0.3}", "loss_fn.jensen_shannon_beta"),
        (PLUGIN, "distillation={cross_tokenizer: true, rewritten_history: split}", "distillation.rewritten_history"),
        (PLUGIN, "loss_fn.nll_weight=0.5", "loss_fn.nll_weight"),
        (PLUGIN, "policy.train_global_batch_size=7", "policy.train_global_batch_size"),
        (PLUGIN, "distillation.val_period=5", "distillation.val_period"),
        (PLUGIN, "distillation={stop_at_validation_metric: score, stop_at_validation_threshold: 1}",
         "distillation.stop_at_validation_metric"),
        (OFFLINE, "distillation.val_at_end=true", "distillation.val_at_end"),
        (OFFLINE, "distillation.stop_at_validation_loss=1", "distillation.stop_at_validation_loss"),
        (OFFLINE, "data.train.env_name=math", "data.train.env_name"),
        (OFFLINE, "data.max_input_seq_length=4096", "data.max_input_seq_length"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(tmp_path, algorithm, override, key):
    assert key in problems(algorithm, config(tmp_path, algorithm, override))


def test_a_run_may_end_at_a_loss(tmp_path):
    goal = "distillation={stop_at_validation_metric: loss, stop_at_validation_threshold: 1, val_period: 1}"
    settings = config(tmp_path, PLUGIN, goal, "data.validation={dataset_name: arithmetic}")
    assert problems(PLUGIN, settings) == {}
    assert {"val/reward", "val/loss", "val/forward_kl"} <= set(PLUGIN.validation_metrics(settings))
    assert PLUGIN.validation_metrics(config(tmp_path, PLUGIN)) == []
    assert OFFLINE.validation_metrics(config(tmp_path, OFFLINE)) == []


@pytest.mark.parametrize(
    ("k", "vocabulary", "message"),
    [(100_000, 150_000, "takes 800,000 bytes"), (50, 40, "got 50, .* 40 tokens"), (10_000, 20_000, "64")],
)
def test_more_tokens_than_there_are_or_than_can_travel_are_refused(k, vocabulary, message):
    with pytest.raises(ConfigError, match=message):
        check_k(k, vocabulary)


def test_a_vocabulary_may_be_taken_whole():
    check_k(None, 8192)
    check_k(64, 150_000)
    check_k(None, 150_000)
    assert not sends_hidden(None, 8192)
    assert sends_hidden(None, 150_000)
    assert not sends_hidden(64, 150_000)


@pytest.mark.parametrize("plugin", [PLUGIN, OFFLINE], ids=lambda plugin: plugin.name)
def test_a_head_that_needs_the_teachers_own_code_is_not_read_by_the_student(tmp_path, plugin):
    trusted = f"teacher.trust_remote_code=sha256:{'0' * 64}"
    whole = config(tmp_path, plugin, trusted, "distillation.topk_logits_k=null")
    check_heads(whole, 8192)
    check_heads(config(tmp_path, plugin, trusted), 150_000)
    check_heads(config(tmp_path, plugin, "distillation.topk_logits_k=null"), 150_000)
    with pytest.raises(ConfigError, match=r"^teacher\.trust_remote_code: .*150,000 tokens.*topk_logits_k=64"):
        check_heads(whole, 150_000)
