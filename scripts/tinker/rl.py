"""Trains SmolLM2-135M-Instruct to add two-digit numbers, in a loop with Tinker's client: python rl.py MODEL [--seed N].

TINKER_BASE_URL and TINKER_API_KEY are those of the server. MODEL is its model name, a folder with a tokenizer. The sums and the prompt are
those of examples/addition-llm. The script fails unless the accuracy on held-out sums rises.
"""

import argparse
import json
import random
import re
from pathlib import Path

import tinker
from tinker import types

DATA = Path(__file__).parents[2] / "examples/addition-llm"
PROMPT = "<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n{a} + {b} ="
STOP = ["\n", ".", ","]


def read(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def reward(text, row):
    found = re.match(r"\s*(\d+)(?!\d)", text)
    return float(found is not None and int(found[1]) == row["sum"])


def datum(prompt, sequence, advantage):
    tokens = prompt + list(sequence.tokens)
    ahead = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": types.TensorData(data=ahead + list(sequence.logprobs), dtype="float32"),
            "advantages": types.TensorData(data=ahead + [advantage] * len(sequence.tokens), dtype="float32"),
        },
    )


def sample(sampler, tokenizer, rows, count, temperature, seed):
    """Returns the prompt, the samples and the rewards of each row."""
    prompts = [tokenizer.encode(PROMPT.format(**row)) for row in rows]
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            count,
            types.SamplingParams(max_tokens=5, stop=STOP, temperature=temperature, seed=seed + place),
        )
        for place, prompt in enumerate(prompts)
    ]
    groups = [future.result().sequences for future in futures]
    rewards = [
        [reward(tokenizer.decode(sequence.tokens), row) for sequence in group]
        for row, group in zip(rows, groups, strict=True)
    ]
    return list(zip(prompts, groups, rewards, strict=True))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def main(args):
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=args.model, rank=8, seed=args.seed).result()
    tokenizer = client.get_tokenizer()
    train, held_out = read("train.jsonl"), read("held_out.jsonl")
    random.Random(args.seed).shuffle(train)
    adam = types.AdamParams(learning_rate=args.learning_rate)

    def accuracy(sampler):
        return mean(rewards[0] for _, _, rewards in sample(sampler, tokenizer, held_out, 1, 0.0, 0))

    sampler = client.save_weights_and_get_sampling_client().result()
    before = accuracy(sampler)
    all_rewards = []
    for step in range(args.steps):
        rows = train[args.prompts * step : args.prompts * (step + 1)]
        seed = (args.seed * args.steps + step) * args.prompts
        drawn = sample(sampler, tokenizer, rows, args.samples, 1.0, seed)
        data = [
            datum(prompt, sequence, score - mean(rewards))
            for prompt, group, rewards in drawn
            if len(set(rewards)) > 1
            for sequence, score in zip(group, rewards, strict=True)
        ]
        if data:
            passed = client.forward_backward(data, "importance_sampling")
            stepped = client.optim_step(adam)
            passed.result(), stepped.result()
        sampler = client.save_weights_and_get_sampling_client().result()
        all_rewards.append(mean(score for _, _, rewards in drawn for score in rewards))
        print(f"step {step + 1}: reward {all_rewards[-1]:.3f}", flush=True)
    after = accuracy(sampler)
    fifth = max(1, args.steps // 5)
    first, last = mean(all_rewards[:fifth]), mean(all_rewards[-fifth:])
    print(f"seed {args.seed}: reward {first:.3f} -> {last:.3f}, held-out accuracy {before:.1%} -> {after:.1%}")
    service.close("success").result()
    assert after > before, (before, after)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    main(parser.parse_args())
