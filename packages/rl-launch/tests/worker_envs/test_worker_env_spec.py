from dataclasses import replace

import pytest

from rl_algos.requirement import LOSSES
from rl_core.devices import CPU, CUDA
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.instance import EnvironmentInstance
from rl_core.model import ModelSpec
from rl_core.model_config import ColocatedConfig, GenerationConfig, ModelConfig, VisionConfig
from rl_core.plugins import GENERATORS, POLICIES, Requirement, algorithm_named, plugin
from rl_launch.backends import Backends, GenerationBackend, ModelBackend
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.role_envs import role_specs
from rl_launch.worker_envs.provision import homes
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, Wanted, worker_env

ENGINE = Requirement("rl_Dtensor", {"cpu": ("worker",), "cuda": ("worker", "flash")}, ("torch",))
MODEL = ModelConfig(model_name="any")
SHARED = ColocatedConfig()


def test_a_worker_needs_its_engine_ray_and_what_is_sent_to_it():
    spec = worker_env(ENGINE, "cpu", also=[LOSSES])
    assert spec.wanted == (
        Wanted("rl-dtensor", ("worker",)),
        Wanted("rl-algos", ("torch",)),
        Wanted("rl-core", ("ray",)),
    )
    assert set(spec.imports) == {"rl_algos", "torch", "ray"}
    assert spec.name == "rl-dtensor.worker"


def test_extras_follow_the_device():
    assert worker_env(ENGINE, "cuda").wanted[0] == Wanted("rl-dtensor", ("flash", "worker"))


def test_requirements_of_one_distribution_are_merged():
    both = worker_env(ENGINE, "cpu", also=[ROLLOUT_WORKER, LOSSES])
    assert both.wanted == worker_env(ENGINE, "cpu", also=[LOSSES]).wanted


def test_an_environment_serves_those_that_need_less_of_the_same_engine():
    trainer, generator = worker_env(ENGINE, "cpu", also=[LOSSES]), worker_env(ENGINE, "cpu", also=[ROLLOUT_WORKER])
    other = worker_env(Requirement("rl-envs"), "cpu")
    assert homes([generator, trainer, other]) == {generator: trainer, trainer: trainer, other: other}


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_generator_of_a_training_backend_shares_the_environment_of_its_trainer(backend):
    trainer = worker_env(plugin(POLICIES, backend).requirement, "cpu", also=[LOSSES])
    generator = worker_env(
        plugin(GENERATORS, {"dtensor": "hf"}.get(backend, backend)).requirement, "cpu", also=[ROLLOUT_WORKER]
    )
    assert generator == trainer


def test_an_engine_never_moves_into_the_environment_of_another():
    vllm = worker_env(Requirement("rl-vllm", {"cpu": ("cpu",)}), "cpu", also=[LOSSES])
    plain = worker_env(Requirement("rl-algos"), "cpu")
    assert not vllm.covers(plain)


@pytest.mark.parametrize(
    ("attention", "extras"), [("auto", ("worker",)), ("flash_attention_2", ("flash", "worker")), ("flex", ("worker",))]
)
def test_a_kernel_that_the_config_chooses_is_in_the_policys_environment(attention, extras):
    dtensor = plugin(POLICIES, "dtensor")
    policy = ModelBackend(
        dtensor, MODEL, dtensor.config(attention_backend=attention), "policy", ModelSpec(), ColocatedConfig()
    )
    specs = role_specs(Backends({"policy": policy}, requirements=(LOSSES,)), (), CUDA)
    assert specs["policy"].wanted[0] == Wanted("rl-dtensor", extras)
    assert "rl-algos" in {wanted.distribution for wanted in specs["policy"].wanted}


def test_an_algorithms_own_distribution_reaches_every_model_and_the_rollouts():
    theirs = Requirement("their-losses", {"cpu": ("torch",)}, ("their_losses", "torch"))
    dtensor, megatron = plugin(POLICIES, "dtensor"), plugin(POLICIES, "megatron")
    models = {
        "policy": ModelBackend(dtensor, MODEL, dtensor.config(), "policy", ModelSpec(), SHARED),
        "teacher": ModelBackend(
            megatron, MODEL, megatron.config(), "teacher", ModelSpec(trains=False), ColocatedConfig()
        ),
    }
    hf = plugin(GENERATORS, "hf")
    generation = GenerationBackend(hf, GenerationConfig(), hf.config(), "policy", MODEL)
    specs = role_specs(Backends(models, generation, (theirs,)), (), CPU)
    assert [specs[role].wanted[0].distribution for role in models] == ["rl-dtensor", "rl-megatron"]
    for role in models:
        assert Wanted("their-losses", ("torch",)) in specs[role].wanted
        assert "their_losses" in specs[role].imports
    assert Wanted("their-losses") in specs["generation"].wanted
    assert Wanted("rl-algos", ("torch",)) in specs["generation"].wanted


def test_the_package_of_a_loss_that_the_config_names_reaches_the_models(monkeypatch):
    theirs = Requirement("their-losses", imports=("their_losses",))
    config = read_plan("sft-arithmetic", []).config
    plain = RunPlan.of(config).backends
    algorithm = replace(algorithm_named(config.algorithm), further=lambda chosen: (theirs,) if chosen is config else ())
    monkeypatch.setattr("rl_launch.run_config.plan.algorithm_named", lambda name: algorithm)
    specs = role_specs(RunPlan.of(config).backends, (), CPU)
    assert Wanted("their-losses") in specs["policy"].wanted
    assert "their_losses" in specs["policy"].imports
    assert Wanted("their-losses") not in role_specs(plain, (), CPU)["policy"].wanted


@pytest.mark.parametrize("structured_output", ["ignore", "constrain"])
def test_rollouts_that_may_be_constrained_have_the_library_of_grammars(structured_output):
    overrides = [f"grpo.structured_output={structured_output}", "policy.generation.backend=hf"]
    specs = role_specs(RunPlan.of(read_plan("grpo-arithmetic", overrides).config).backends, (), CPU)
    has_it = structured_output == "constrain"
    assert ("grammar" in {extra for each in specs["generation"].wanted for extra in each.extras}) == has_it
    assert ("xgrammar" in specs["generation"].imports) == has_it


def test_workers_of_models_with_images_have_what_reads_them():
    model = ModelConfig(model_name="any", vision=VisionConfig(enabled=True))
    dtensor, vllm = plugin(POLICIES, "dtensor"), plugin(GENERATORS, "vllm")
    policy = ModelBackend(dtensor, model, dtensor.config(), "policy", ModelSpec(), SHARED)
    generation = GenerationBackend(vllm, GenerationConfig(), vllm.config(), "policy", model)
    instance = EnvironmentInstance("screen", "any:Environment", EnvironmentConfig(), Requirement("rl-envs"))
    specs = role_specs(Backends({"policy": policy}, generation), [instance], CPU)
    assert Wanted("rl-dtensor", ("vision", "worker")) in specs["policy"].wanted
    for role in ("policy", "generation", "env.screen"):
        assert Wanted("rl-core", ("ray", "vision")) in specs[role].wanted, role
        assert "PIL" in specs[role].imports
    plain = role_specs(Backends({"policy": replace(policy, config=MODEL)}), [instance], CPU)
    assert not any("vision" in wanted.extras for spec in plain.values() for wanted in spec.wanted)
