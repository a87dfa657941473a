"""Programs of the published client learn: supervised, by policy gradients, and from a checkpoint."""

import numpy as np
import pytest
import tinker
from tinker import types

CYCLE = [1, 2, 3, 4, 5, 6, 7, 8, 9]
ADAM = types.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


def datum(tokens, **inputs):
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}
    targets = np.asarray(tokens[1:], dtype=np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": targets, **arrays}
    )


def supervised(training, steps, data=None):
    data = data or [datum(CYCLE, weights=np.ones(len(CYCLE) - 1))]
    losses = []
    for _ in range(steps):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert "grad_norm" in stepped.result().metrics
    return losses


def test_a_supervised_program_learns_and_samples_what_it_learned(serve):
    service = serve().client()
    training = service.create_lora_training_client(base_model="tiny/bigram", rank=4, seed=7).result()
    losses = supervised(training, 40)
    assert losses[0] == pytest.approx(8 * np.log(12), rel=1e-5)
    assert losses[-1] < 0.1
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1])
    found = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=5, temperature=0.0)).result()
    assert [sequence.tokens for sequence in found.sequences] == [[2, 3, 4, 5, 6]] * 2
    assert found.sequences[0].stop_reason == "length"
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(CYCLE)).result()
    assert logprobs[0] is None
    assert sum(logprobs[1:]) == pytest.approx(-losses[-1], abs=0.1)
    # The sampler keeps its weights while the model goes on.
    backwards = [datum(CYCLE[::-1], weights=np.ones(len(CYCLE) - 1))]
    supervised(training, 30, backwards)
    assert sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3, temperature=0.0)).result().sequences[
        0
    ].tokens == [2, 3, 4]
    assert service.get_server_capabilities().supported_models[0].model_name == "tiny/bigram"


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_a_program_of_policy_gradients_learns(serve, loss):
    service = serve().client()
    training = service.create_lora_training_client(base_model="tiny/bigram", rank=4, seed=1).result()
    rewards = []
    for step in range(12):
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=step, stop=[])
        found = sampler.sample(types.ModelInput.from_ints([1]), 32, params).result()
        own = np.array([sum(token == 5 for token in each.tokens) for each in found.sequences], dtype=float)
        rewards.append(own.mean())
        data = [
            datum([1, *each.tokens], logprobs=each.logprobs, advantages=np.full(len(each.tokens), advantage))
            for each, advantage in zip(found.sequences, (own - own.mean()) / 4, strict=True)
        ]
        passed = training.forward_backward(data, loss)
        training.optim_step(ADAM).result()
        assert len(passed.result().loss_fn_outputs) == 32
    assert rewards[-1] > rewards[0] + 1


def test_gradients_are_sums_over_requests_and_forward_adds_none(serve):
    service = serve().client()
    settings = {"base_model": "tiny/bigram", "rank": 4, "seed": 3}
    whole, parts = (service.create_lora_training_client(**settings).result() for _ in range(2))
    first, second = datum(CYCLE, weights=np.ones(8)), datum(CYCLE[::-1], weights=np.full(8, 0.5))
    whole.forward_backward([first, second], "cross_entropy").result()
    for each in (first, second):
        parts.forward_backward([each], "cross_entropy").result()
        parts.forward([first], "cross_entropy").result()
    norms = [client.optim_step(ADAM).result().metrics["grad_norm"] for client in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    outputs = [client.forward([second], "cross_entropy").result().loss_fn_outputs[0] for client in (whole, parts)]
    assert outputs[0]["logprobs"].tolist() == outputs[1]["logprobs"].tolist()


def test_several_targets_of_a_position_are_learned_as_a_distribution(serve):
    service = serve().client()
    training = service.create_lora_training_client(base_model="tiny/bigram", rank=4, seed=3).result()
    inputs = {"target_tokens": np.array([[2, 3]]), "weights": np.array([[0.25, 0.75]], dtype=np.float32)}
    data = [types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs=inputs)]
    supervised(training, 150, data)
    found = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    assert found.shape == [1, 2]
    assert np.exp(found.to_numpy()) == pytest.approx(np.array([[0.25, 0.75]]), abs=0.02)


def test_a_checkpoint_continues_with_and_without_its_optimizer(serve):
    service = serve().client()
    training = service.create_lora_training_client(base_model="tiny/bigram", rank=4, seed=3).result()
    supervised(training, 5)
    path = training.save_state("after-5").result().path
    expected = supervised(training, 5)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert supervised(resumed, 5) == pytest.approx(expected, rel=1e-6)
    fresh = service.create_training_client_from_state(path).result()
    losses = supervised(fresh, 5)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses[-1] != pytest.approx(expected[-1], rel=1e-3)
    assert resumed.get_info().lora_rank == 4


def test_a_failed_request_names_its_problem_and_the_program_goes_on(serve):
    service = serve().client()
    training = service.create_lora_training_client(base_model="tiny/bigram", rank=4, seed=3).result()
    with pytest.raises(tinker.RequestFailedError, match="id 99"):
        training.forward_backward([datum([1, 99], weights=[1.0])], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        training.optim_step(ADAM).result()
    assert supervised(training, 3)[-1] < 8 * np.log(12)
