"""Reads what `grpo convert` writes with transformers and llama-cpp-python, and compares the likeliest tokens.

    scripts/readers/compare.py target/debug/grpo target/models/SmolLM2-135M-Instruct

`scripts/test-readers` calls it. A short run trains adapters, and `grpo convert` merges them. The library of each format then reads the
prompt and the completion of `grpo sample`, and computes its likeliest token at each position. Where they differ, the library must find
the other token almost as likely: products are rounded differently. llama.cpp also rounds the activations before Q8_0 to 8 bits, by
instructions that depend on the processor. So transformers reads the files, too: it dequantizes them and rounds no activations.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from llama_cpp import GGML_TYPE_F32, Llama
from transformers import AutoModelForCausalLM, AutoTokenizer

RUN = """
model: {model}
data: {{train: train.jsonl, chat: false, prompt: "{{question}}"}}
rewards: [{{kind: regex, pattern: "[0-9]"}}]
prompts_per_step: 4
num_generations: 8
sampling: {{max_new_tokens: 8}}
adapters: {{rank: 8, alpha: 16}}
optimizer: {{learning_rate: 1e-3}}
max_steps: 2
run_dir: run
"""
QUESTIONS = ["The capital of France is", "63 + 14 =", "Once upon a time", "Water boils at", "The opposite of hot is", "def add(a, b):"]
NEW_TOKENS = 32


def run(*arguments, **options):
    """Runs the program and returns what it printed."""
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


def completions(grpo, model):
    """The tokens of the greedy completion of each question."""
    arguments = ["--raw", "--temperature", "0", "--max-new-tokens", NEW_TOKENS, "--json", "--quiet"]
    answers = [json.loads(run(grpo, "sample", model, question, *arguments)) for question in QUESTIONS]
    return [answer["tokens"] for answer in answers]


def of_transformers(folder, prompts, answers, gguf_file=None):
    """The logits of transformers before each token of the answers, from a folder or from a GGUF file in it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, gguf_file=gguf_file)
    for prompt, answer in zip(prompts, answers):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        yield logits[len(prompt) - 1:-1]


def of_llama(file, prompts, answers):
    """The logits of llama.cpp before each token of the answers."""
    model = Llama(str(file), n_ctx=256, logits_all=True, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, flash_attn=False, verbose=False)
    for question, prompt, answer in zip(QUESTIONS, prompts, answers):
        own = model.tokenize(question.encode(), add_bos=False, special=True)
        assert own == prompt, f"{file.name}: the tokens of {question!r} are {own}, not {prompt}"
        model.reset()
        model.eval(prompt + answer)
        yield torch.tensor(model.scores[len(prompt) - 1:len(prompt) + len(answer) - 1])


def compare(name, logits, answers, margin):
    """Counts the positions where a library has the same likeliest token."""
    same = count = 0
    worst = 0.0
    for found, answer in zip(logits, answers):
        log_probs = torch.log_softmax(found.float(), -1)
        taken = log_probs[range(len(answer)), answer]
        missing = log_probs.max(-1).values - taken
        same += int((missing == 0).sum())
        count += len(answer)
        worst = max(worst, float(missing.max()))
    print(f"{name}: {same} of {count} likeliest tokens are equal; the others are at most {worst:.4f} nats below")
    if worst > margin:
        sys.exit(f"{name}: a token of grpo is {worst} nats below the likeliest one, must be at most {margin}")


def main(grpo, model):
    grpo, model = Path(grpo).resolve(), Path(model).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "run.yaml").write_text(RUN.format(model=model))
        (folder / "train.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in QUESTIONS))
        run(grpo, "train", "run.yaml", "--quiet", cwd=folder)
        merged = folder / "merged"
        run(grpo, "convert", folder / "run", merged, "--merge")
        answers = completions(grpo, merged)
        tokenizer = AutoTokenizer.from_pretrained(merged)
        prompts = [tokenizer(question, add_special_tokens=False).input_ids for question in QUESTIONS]
        compare("transformers, f32", of_transformers(merged, prompts, answers), answers, 1e-3)
        for dtype, margin in [("f16", 0.02), ("q8_0", 0.5)]:
            file = folder / f"{dtype}.gguf"
            run(grpo, "convert", folder / "run", file, "--dtype", dtype)
            answers = completions(grpo, file)
            dequantized = of_transformers(folder, prompts, answers, gguf_file=file.name)
            compare(f"transformers, {dtype}", dequantized, answers, 1e-3)
            compare(f"llama.cpp, {dtype}", of_llama(file, prompts, answers), answers, margin)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
