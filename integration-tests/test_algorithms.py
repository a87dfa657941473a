"""Every algorithm computes the same for any microbatches, packed or padded, on one rank or two and on either backend,
and goes on to the last bit after everything it started was killed.
"""

import math
import shutil
from dataclasses import dataclass

import pytest
from runs import Run, assert_same, assert_tokens_are_those_of_rollouts, last_kept_step, lines_of, steps_of
from safetensors.numpy import load_file, save_file

from rl_algos.dpo.loss import LOSSES
from rl_algos.tiny_model import make_tiny_model
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_launch.recipes import recipe_names
from rl_launch.run_config.reading import read_raw

REWARD = '''
def score(response):
    """An untrained model answers nothing right: the share of its characters that are digits."""
    return sum(character.isdigit() for character in response) / 8
'''

COMMON = (
    "cluster.cpu_ranks_per_node=1",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=16",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "checkpointing.metric_name=null",
    "logger.tensorboard_enabled=false",
    "logger.token_level=all",
)
PACKED = (
    "cluster.cpu_ranks_per_node=2",
    "policy.sequence_packing={enabled: true, train_mb_tokens: 48, logprob_mb_tokens: 64}",
)
MEGATRON = ("cluster.cpu_ranks_per_node=2", "policy.megatron_cfg.enabled=true", "policy.train_micro_batch_size=3")
WHOLE_PAIRS = ("policy.train_micro_batch_size=4",)

CRITIC_ON_MEGATRON = (
    *PACKED,
    "value.megatron_cfg={enabled: true, tensor_model_parallel_size: 2}",
    "value.sequence_packing={enabled: true, train_mb_tokens: 48, logprob_mb_tokens: 64}",
)
CRITIC_ON_DTENSOR = (*MEGATRON, "value.dtensor_cfg.tensor_parallel_size=2", "value.train_micro_batch_size=5")
TEACHER_ON_MEGATRON = (*PACKED, "teacher.megatron_cfg={enabled: true, tensor_model_parallel_size: 2}")
TEACHER_ON_DTENSOR = (*MEGATRON, "teacher.dtensor_cfg.tensor_parallel_size=2")

FIGURES = (
    "train/loss",
    "train/grad_norm",
    "train/num_tokens",
    "train/forward_kl",
    "train/margin",
    "train/reverse_kl",
    "critic/loss",
    "critic/grad_norm",
    "critic/value_mean",
    "reward/mean",
    "val/loss",
)
"""Metrics that do not depend on how rows and models lie; each run has some of them."""

ACCURACY = "train/accuracy"
OPINIONS = ("train/margin", "train/reward_desirable")
"""Metrics that are zero while the policy prefers nothing, and rounding decides the ties that the accuracy counts."""


@dataclass(frozen=True)
class Family:
    """A recipe, changed so that it takes four small steps.

    Args:
        recipe: of the algorithm.
        settings: that change it.
        layouts: others than the plain one, by name; of the families of `KILLED` the first is killed.
        tolerance: of figures against those of the plain layout.
        saved: roles of the models in its checkpoints.
    """

    recipe: str
    settings: tuple[str, ...]
    layouts: dict[str, tuple[str, ...]]
    tolerance: float = 1e-4
    saved: tuple[str, ...] = ("policy",)


def small_rollouts(section, num_steps):
    """Settings of few rollouts, with a reward that an untrained model earns."""
    return (*few_rollouts(section, num_steps), "data.train.env_name=reward.py:score")


def few_rollouts(section, num_steps):
    """Settings of few rollouts in the environments of the recipe."""
    smaller = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": num_steps, "val_period": 0}
    return (
        "policy.model_name=tiny-arithmetic",
        "policy.generation.backend=hf",
        "data.validation=null",
        *(f"{section}.{key}={value}" for key, value in smaller.items()),
    )


FAMILIES = {
    "sft": Family(
        "sft-arithmetic",
        ("sft.max_num_steps=4", "sft.val_period=4", "sft.val_batches=1"),
        {"packed on two ranks": PACKED, "megatron on two ranks": MEGATRON},
    ),
    "grpo": Family(
        "grpo-arithmetic",
        (*small_rollouts("grpo", 4), "loss_fn.kl.weight=0.01"),
        {"packed on two ranks": PACKED, "megatron on two ranks": MEGATRON},
        tolerance=1e-3,
    ),
    "ppo": Family(
        "ppo-tiny",
        (
            *small_rollouts("ppo", 4),
            "ppo.critic_warmup_steps=0",
            "value.train_global_batch_size=16",
            "value.train_micro_batch_size=16",
        ),
        {"its critic on megatron": CRITIC_ON_MEGATRON, "its critic on dtensor": CRITIC_ON_DTENSOR},
        tolerance=1e-3,
        saved=("policy", "critic"),
    ),
    "luffy": Family(
        "grpo-arithmetic",
        (*small_rollouts("grpo", 4), "grpo.demonstrations.share=0.4", "loss_fn.demonstrations=shaped"),
        {"packed on two ranks": PACKED, "megatron on two ranks": MEGATRON},
        tolerance=1e-3,
    ),
    "chord": Family(
        "grpo-arithmetic",
        (
            *small_rollouts("grpo", 4),
            "grpo.demonstrations.dataset={dataset_name: arithmetic, settings: {max_operand: 9}}",
            "grpo.demonstrations.rows_per_step=7",
            "loss_fn.demonstrations={name: nll, weight: 0.5, by_probability: true, decay_steps: 4}",
        ),
        {"packed on two ranks": PACKED, "megatron on two ranks": MEGATRON},
        tolerance=1e-3,
    ),
    "dpo": Family(
        "dpo-tiny",
        ("policy.model_name=tiny-arithmetic", "dpo.max_num_steps=4", "dpo.val_period=4", "dpo.val_batches=1"),
        {"packed on two ranks": PACKED, "megatron on two ranks": (*MEGATRON, *WHOLE_PAIRS)},
    ),
    "kto": Family(
        "dpo-tiny",
        ("policy.model_name=tiny-arithmetic", "dpo.loss=kto", "dpo.max_num_steps=4", "dpo.val_period=0"),
        {"packed on two ranks": PACKED},
    ),
    "several preference losses": Family(
        "dpo-tiny",
        (
            "policy.model_name=tiny-arithmetic",
            "dpo.loss=nca",
            "dpo.added_losses={aot: {weight: 0.5}}",
            "dpo.ld_alpha=0.5",
            "dpo.max_num_steps=4",
            "dpo.val_period=0",
        ),
        {"packed on two ranks": PACKED, "megatron on two ranks": (*MEGATRON, *WHOLE_PAIRS)},
    ),
    "weighed preferences": Family(
        "dpo-tiny",
        ("policy.model_name=tiny-arithmetic", "dpo.weigh_by_policy=true", "dpo.max_num_steps=4", "dpo.val_period=0"),
        {"packed on two ranks": PACKED, "megatron on two ranks": (*MEGATRON, *WHOLE_PAIRS)},
    ),
    "online dpo": Family(
        "online-dpo-tiny",
        small_rollouts("online_dpo", 4),
        {"packed on two ranks": PACKED, "megatron on two ranks": (*MEGATRON, *WHOLE_PAIRS)},
        tolerance=1e-3,
    ),
    "rm": Family(
        "rm-tiny",
        ("policy.model_name=tiny-arithmetic", "rm.max_num_steps=4", "rm.val_period=4", "rm.val_batches=1"),
        {"packed on two ranks": PACKED, "megatron on two ranks": (*MEGATRON, *WHOLE_PAIRS)},
    ),
    "distillation": Family(
        "distill-tiny",
        (*small_rollouts("distillation", 4), "teacher.model_name=TEACHER"),
        {"its teacher on megatron": TEACHER_ON_MEGATRON, "its teacher on dtensor": TEACHER_ON_DTENSOR},
        tolerance=1e-3,
    ),
    "offline distillation": Family(
        "distill-offline-tiny",
        (
            "distillation.max_num_steps=4",
            "distillation.val_period=4",
            "distillation.val_batches=1",
            "teacher.model_name=TEACHER",
        ),
        {"its teacher on megatron": TEACHER_ON_MEGATRON, "its teacher on dtensor": TEACHER_ON_DTENSOR},
    ),
}

OF_AGENTS = {"grpo-self-play-tiny": "first", "grpo-proposer-tiny": "proposer"}
"""An agent that every play has, by recipe."""

IN_ENVIRONMENTS = (
    "grpo-multi-env-tiny",
    "grpo-sliding-puzzle-tiny",
    "grpo-tools-tiny",
    "search-r1-tiny",
    "mcp-tools-tiny",
    "textarena-tiny",
    *OF_AGENTS,
)
"""Recipes of environments that need no sandbox, which take steps in these rather than with a reward of the tests."""

OF_SERVERS = ("openenv-tiny", "nemo-gym-tiny")
"""Recipes of environments behind a server, which `test_served_environments` has."""

OF_IMAGES = ("grpo-clevr-count-tiny", "grpo-vlm-geometry-tiny")
"""Recipes of vision-language models, which have a model of their own."""

TINY_GRPO = [name for name in recipe_names() if name.endswith("-tiny") and read_raw(name).select("algorithm") == "grpo"]
VARIANTS = [
    name
    for name in TINY_GRPO
    if name not in (*IN_ENVIRONMENTS, *OF_SERVERS, *OF_IMAGES) and read_raw(name).select("grpo.agent") is None
]
"""Recipes of losses and estimators, whose values the tests of rl-algos compare with closed forms; `test_conversations`
and `test_code_agents` have the recipes of agents."""

KILLED = ("ppo", "luffy", "chord", "dpo", "kto", "online dpo", "rm", "distillation", "offline distillation")
"""Families whose checkpoints hold something else than those of the runs that `test_faults` kills."""

UNDISTURBED = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]
"""Layouts whose runs nothing happens to."""

AT_FIRST = {"dpo": math.log(2), "robust-dpo": math.log(2), "ipo": 25.0, "hinge": 1.0, "kto": 0.5}
AT_FIRST |= {"nca": 2 * math.log(2), "bco": 2 * math.log(2), "sppo": 50.0, "apo-zero": 1.0, "apo-down": 1.0}
AT_FIRST |= {"aot": math.log(2), "aot-unpaired": math.log(2), "discopop": (math.log(2) + 1) / 2}
"""Losses of the first step, when policy and reference are equal; of those that have a reference, with beta 0.1."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Paths in place of words of the settings."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "reward.py").write_text(REWARD)
    make_teacher(folder / "teacher")
    return {"reward.py": str(folder / "reward.py"), "TEACHER": str(folder / "teacher")}


def make_teacher(folder):
    """A model of another size than the student with opinions of its own: all logits of a new one are multiplied."""
    make_tiny_model(folder, seed=1, hidden_size=64, num_layers=2)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def arguments_of(places):
    """From the name of a family to the arguments of its plain run: one rank, its rows padded in one microbatch."""
    return lambda name: (FAMILIES[name].recipe, *settings_with(places, FAMILIES[name].settings))


def settings_with(places, settings):
    found = [*COMMON, *settings]
    for word, path in places.items():
        found = [text.replace(word, path) for text in found]
    return found


@pytest.fixture(scope="module")
def plain(driver, arguments_of, tmp_path_factory):
    """From the name of a family to the steps of its plain run."""
    found = {}

    def steps(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name) / "run"
            driver.train(folder, *arguments_of(name))
            assert_tokens_are_those_of_rollouts(folder)
            found[name] = steps_of(folder)
        return found[name]

    return steps


# tests of rl-algos add up each loss over microbatches, those of the backends compare losses of each kind of read and
# total over ranks, meshes and packed rows, and `test_backends` compares SFT and GRPO
@exhaustive
@pytest.mark.parametrize(("name", "layout"), UNDISTURBED)
def test_steps_are_those_of_one_rank_and_one_microbatch(name, layout, driver, arguments_of, plain, tmp_path):
    family = FAMILIES[name]
    driver.train(tmp_path / "run", *arguments_of(name), *family.layouts[layout])
    assert_as_plain(tmp_path / "run", plain(name), family)


def assert_as_plain(folder, expected, family):
    figures = [figure for figure in FIGURES if all(figure in line for line in expected)]
    assert {"train/loss", "train/grad_norm"} <= set(figures)
    assert len(expected) == 4
    found = steps_of(folder)
    assert_same(found, expected, figures, family.tolerance)
    if all(ACCURACY in line for line in expected):
        decided = [i for i, line in enumerate(expected) if not prefers_nothing(line, family.tolerance)]
        assert decided
        assert_same([found[i] for i in decided], [expected[i] for i in decided], (ACCURACY,), family.tolerance)


def prefers_nothing(line, tolerance):
    return any(name in line and abs(line[name]) <= tolerance for name in OPINIONS)


def test_policy_and_critic_train(plain):
    steps = plain("ppo")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["train/grad_norm"] > 0 and line["critic/grad_norm"] > 0 for line in steps)
    # a new critic values everything at 0, and the loss of few rollouts is noise
    assert steps[0]["critic/value_mean"] == 0
    assert all(abs(line["critic/value_mean"]) > 1e-3 for line in steps[1:])


@pytest.mark.parametrize("name", partly_exhaustive(["distillation", "offline distillation"], always=["distillation"]))
def test_a_teacher_is_learned_from(name, plain):
    steps = plain(name)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]


@exhaustive
@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_goes_on_to_the_last_bit_and_to_the_steps_of_one_rank(name, driver, arguments_of, plain, tmp_path):
    family = FAMILIES[name]
    arguments = (*arguments_of(name), *next(iter(family.layouts.values())))
    run = Run.start(tmp_path / "run", *arguments)
    run.await_step(3)
    run.kill_all()
    killed, undisturbed = lines_of(run.folder), unclocked(run.folder)
    # whatever it had saved since, so that the third step is always made again
    shutil.rmtree(run.folder / "checkpoints" / "step_4", ignore_errors=True)
    driver.train(run.folder, *arguments)
    assert last_kept_step(run.folder, killed) == 2
    assert unclocked(run.folder)[: len(undisturbed)] == undisturbed
    assert_as_plain(run.folder, plain(name), family)
    folders = {entry.name for entry in (run.folder / "checkpoints" / "step_4").iterdir()}
    assert folders >= set(family.saved)


@exhaustive
@pytest.mark.parametrize("recipe", VARIANTS)
def test_the_recipe_of_a_variant_takes_steps(recipe, driver, places, tmp_path):
    driver.train(tmp_path / "run", recipe, *settings_with(places, small_rollouts("grpo", 2)))
    steps = steps_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert math.isfinite(line["train/loss"])
        assert line["train/grad_norm"] > 0
        assert line["mismatch/max"] < 1e-3


@exhaustive
@pytest.mark.parametrize("recipe", IN_ENVIRONMENTS)
def test_the_recipe_of_an_environment_takes_steps(recipe, driver, warm_model, tmp_path):
    # a model that ends its turns, for a turn that is cut off ends its rollout
    driver.train(tmp_path / "run", recipe, *COMMON, *few_rollouts("grpo", 2), f"policy.model_name={warm_model}")
    assert_tokens_are_those_of_rollouts(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert math.isfinite(line["train/loss"])
        assert line["rollout/failed"] == 0
        if recipe in OF_AGENTS:
            assert line[f"agent/{OF_AGENTS[recipe]}/rollouts"] > 0
        else:
            assert (line["rollout/turns"] > 1) == (recipe in ("grpo-sliding-puzzle-tiny", "textarena-tiny"))
        assert line["mismatch/max"] < 1e-3


@exhaustive
@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in FAMILIES])
def test_every_preference_loss_takes_steps(loss, driver, tmp_path):
    settings = ("policy.model_name=tiny-arithmetic", f"dpo.loss={loss}", "dpo.max_num_steps=2", "dpo.val_period=0")
    driver.train(tmp_path / "run", "dpo-tiny", *COMMON, *settings, "checkpointing.enabled=false")
    steps = steps_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert math.isfinite(line["train/loss"])
        assert line["train/grad_norm"] > 0
    if loss in AT_FIRST:
        assert_first_step(loss, steps)


@pytest.mark.parametrize("loss", partly_exhaustive([name for name in LOSSES if name in FAMILIES], always=["dpo"]))
def test_a_preference_loss_starts_from_the_reference(loss, plain):
    assert_first_step(loss, plain(loss))


def assert_first_step(loss, steps):
    assert steps[0]["train/loss"] == pytest.approx(AT_FIRST[loss], abs=1e-5)


def unclocked(folder):
    """All metrics but those that depend on the clock."""
    return [{name: value for name, value in line.items() if not is_clocked(name)} for line in lines_of(folder)]


def is_clocked(name):
    return name.startswith("time/") or name.endswith(("_per_second", "/mfu"))
