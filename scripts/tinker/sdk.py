"""Uses the client of Tinker against `grpo serve --tinker`: python sdk.py MODEL.

TINKER_BASE_URL and TINKER_API_KEY are those of the server. MODEL is its model name, a folder with a tokenizer.
"""

import sys

import tinker
from tinker import types


def datum(tokens, weights):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def policy_datum(tokens, log_probs, advantages):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": types.TensorData(data=log_probs, dtype="float32"),
            "advantages": types.TensorData(data=advantages, dtype="float32"),
        },
    )


def close(a, b, tolerance=1e-4):
    return all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


def fails(future, words):
    try:
        future.result()
    except Exception as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no error with {words!r}")


def main(model):
    service = tinker.ServiceClient()
    supported = tinker.RestClient().get_server_capabilities().result().supported_models
    assert [x.model_name for x in supported] == [model], supported

    clients = [service.create_lora_training_client(base_model=model, rank=8, seed=1) for _ in range(2)]
    client, twin = (x.result() for x in clients)
    assert client.get_info().lora_rank == 8
    tokenizer = client.get_tokenizer()
    text = tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome.")
    other = tokenizer.encode("One, two, three, four, five, six.")
    data = [datum(text, [0.0] * 4 + [1.0] * (len(text) - 4)), datum(other, [1.0] * len(other))]
    adam = types.AdamParams(learning_rate=1e-3)

    losses = []
    for _ in range(5):
        passes = [c.forward_backward(data, "cross_entropy") for c in (client, twin)]
        steps = [c.optim_step(adam) for c in (client, twin)]
        first, second = (x.result() for x in passes)
        assert [x["logprobs"].data for x in first.loss_fn_outputs] == [x["logprobs"].data for x in second.loss_fn_outputs]
        losses.append(first.metrics["loss:sum"])
        assert all(x.result().metrics["grad_norm"] > 0 for x in steps)
    assert losses[-1] < 0.8 * losses[0], losses
    weighted = -sum(
        w * x
        for output, example in zip(first.loss_fn_outputs, data, strict=True)
        for w, x in zip(example.loss_fn_inputs["weights"].data, output["logprobs"].data, strict=True)
    )
    assert abs(weighted - losses[-1]) < 1e-3 * abs(weighted), (weighted, losses[-1])

    # Policy losses: on-policy, the ratio is 1.
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(text[:6])
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    samples = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    again = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    assert [x.tokens for x in samples.sequences] == [x.tokens for x in again.sequences]
    assert all(x.stop_reason in ("stop", "length") and len(x.tokens) <= 8 for x in samples.sequences)
    sequence = samples.sequences[0]
    tokens = text[:6] + list(sequence.tokens)
    ahead = [0.0] * 5
    log_probs = ahead + list(sequence.logprobs)
    advantages = ahead + [0.5] * len(sequence.tokens)
    row = policy_datum(tokens, log_probs, advantages)
    expected = {"importance_sampling": -sum(advantages), "ppo": -sum(advantages)}
    expected["cispo"] = -sum(a * x for a, x in zip(advantages, log_probs, strict=True))
    for loss, value in expected.items():
        found = client.forward([row], loss).result()
        assert abs(found.metrics["loss:sum"] - value) < 1e-4, (loss, found.metrics, value)
        assert close(found.loss_fn_outputs[0]["logprobs"].data[5:], sequence.logprobs), loss
        client.forward_backward([row], loss).result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None and close(scored[6:], sequence.logprobs)

    # A custom loss: the client differentiates it, and sends weights of either sign.
    def custom(data, log_probs):
        loss = sum((x.exp() * 0.5 - x).sum() for x in log_probs)
        return loss, {"mine": float(loss.detach())}

    found = client.forward_backward_custom(data, custom).result()
    assert found.metrics["mine"] == found.metrics["loss:sum"], found.metrics
    client.optim_step(adam).result()

    # Saved weights.
    saved = client.save_state("first").result()
    resumed = service.create_training_client_from_state_with_optimizer(saved.path).result()
    for c in (client, resumed):
        c.forward_backward(data, "cross_entropy").result()
        c.optim_step(adam).result()
    scores = [c.forward(data, "cross_entropy").result().metrics["loss:sum"] for c in (client, resumed)]
    assert scores[0] == scores[1], scores
    named = client.save_weights_for_sampler("for-sampling").result()
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=["\n"])
    by_path = service.create_sampling_client(model_path=named.path).result().sample(prompt, 1, greedy).result()
    base = service.create_sampling_client(base_model=model).result().sample(prompt, 1, greedy).result()
    assert len(by_path.sequences) == len(base.sequences) == 1

    # Errors name what is wrong, and the next request has its turn.
    fails(client.forward_backward(data, "dro"), "loss_fn: dro, must be")
    fails(client.forward_backward([datum([1, 2, 10**6], [1.0] * 3)], "cross_entropy"), "must be below the vocabulary size")
    fails(client.save_state("first"), "must be a new name")
    fails(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4), topk_sample_logprobs=3), "topk_sample_logprobs")
    client.forward(data, "cross_entropy").result()
    service.close("success").result()
    print("sdk: passed")


if __name__ == "__main__":
    main(sys.argv[1])
