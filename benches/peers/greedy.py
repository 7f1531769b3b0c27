"""Records the greedy completions of 20 prompts by Hugging Face transformers: tests/golden/models/smollm2_greedy.json.

    make model
    python benches/peers/greedy.py target/models/SmolLM2-135M-Instruct > tests/golden/models/smollm2_greedy.json

f32 on the CPU, one prompt at a time. A completion ends where the two largest logits differ by less than 0.01, because rounding may
select the other token there.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 24
SMALLEST_LEAD = 0.01

TEXTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 2, 3, 4,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\n",
    "Crème brûlée is a dessert",
    "Q: What is 3 + 4?\nA:",
    "{\"name\": \"Ada\", \"age\":",
]
QUESTIONS = [
    "What is 17 + 25?",
    "Name a word that contains the letter z.",
    "Write JSON with keys \"name\" and \"age\": Ada is 36 years old.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "List two animals that can fly.",
    "Is the sun a star? Answer yes or no.",
    "What comes after Tuesday?",
    "Explain gravity in one sentence.",
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many in all?",
]


def main():
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    prompts = TEXTS + [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    cases = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        row, past, greedy = torch.tensor([ids]), None, []
        while len(greedy) < NEW_TOKENS:
            output = model(row, past_key_values=past, use_cache=True)
            past, best = output.past_key_values, output.logits[0, -1].topk(2)
            if best.values[0] - best.values[1] < SMALLEST_LEAD:
                break
            token = best.indices[0].item()
            greedy.append(token)
            if token == model.generation_config.eos_token_id[0]:
                break
            row = best.indices[None, :1]
        cases.append({"prompt": prompt, "ids": ids, "greedy": greedy})
        print(f"{len(greedy):2} tokens: {tokenizer.decode(greedy)!r}", file=sys.stderr)
    print("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]")


main()
