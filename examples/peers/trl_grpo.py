"""Trains with TRL using a configuration file of candle-grpo, and writes the files of `grpo train`: metrics.jsonl with one line per
step, and evaluations.jsonl.

The seconds exclude the evaluations between steps.
"""

import json
import sys
import time
from pathlib import Path

import torch
import yaml
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def is_right(completions, answer, **_):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def share_right(model, tokenizer, problems, max_new_tokens):
    """Counts correct answers, one per problem, sampled at temperature 1."""
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.eval()
    prompts = tokenizer(list(problems["prompt"]), return_tensors="pt")
    tokens = model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, generation_config=config)
    model.train()
    answers = tokenizer.batch_decode(tokens[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(map(str.__eq__, answers, problems["answer"])) / len(answers)


def grpo_config(run):
    optimizer, sampling = run["optimizer"], run["sampling"]
    completions = run["prompts_per_step"] * run["num_generations"]
    # The preset equals TRL's defaults, which are repeated here.
    assert run["preset"] == "trl"
    return GRPOConfig(
        output_dir=f"{run['run_dir']}/trl",
        seed=run["seed"],
        max_steps=run["max_steps"],
        # One update per step, from all of its completions.
        per_device_train_batch_size=run["micro_batch_size"],
        gradient_accumulation_steps=completions // run["micro_batch_size"],
        num_iterations=1,
        num_generations=run["num_generations"],
        max_completion_length=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        loss_type="dapo",
        epsilon=0.2,
        beta=0.0,
        scale_rewards="group",
        learning_rate=float(optimizer["learning_rate"]),
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=float(optimizer["epsilon"]),
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=run["max_grad_norm"],
        lr_scheduler_type="constant",
        # f32, without recomputation and without intermediate checkpoints.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )


class RunFiles(TrainerCallback):
    """Writes the lines of metrics.jsonl and evaluations.jsonl."""

    def __init__(self, run, evaluate):
        self.every_steps = run["evaluation"]["every_steps"]
        self.metrics = open(f"{run['run_dir']}/metrics.jsonl", "w")
        self.evaluations = open(f"{run['run_dir']}/evaluations.jsonl", "w")
        self.evaluate = evaluate
        self.began = None

    def on_train_begin(self, args, state, control, model, **_):
        if self.every_steps:
            self.append_evaluation(0, model)
        self.began = time.perf_counter()

    # Logging is the last action of a step.
    def on_log(self, args, state, control, logs, model, **_):
        if "reward" not in logs:
            return
        line = {
            "step": state.global_step,
            "reward_mean": logs["reward"],
            "grad_norm": logs["grad_norm"],
            "entropy": logs["entropy"],
            "response_length": logs["completions/mean_length"],
            "seconds": {"step": time.perf_counter() - self.began},
        }
        print(json.dumps(line), file=self.metrics, flush=True)
        if self.every_steps and state.global_step % self.every_steps == 0:
            self.append_evaluation(state.global_step, model)
        self.began = time.perf_counter()

    def append_evaluation(self, step, model):
        line = {"step": step, "reward_mean": self.evaluate(model)}
        print(json.dumps(line), file=self.evaluations, flush=True)


def main():
    run = yaml.safe_load(Path(sys.argv[1]).read_text())
    torch.set_num_threads(run["threads"])
    Path(run["run_dir"]).mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(run["model"])
    held_out = load_dataset("json", data_files=run["data"]["held_out"], split="train")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(run["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=is_right,
        args=grpo_config(run),
        train_dataset=load_dataset("json", data_files=run["data"]["train"], split="train"),
    )
    length = run["sampling"]["max_new_tokens"]
    trainer.add_callback(RunFiles(run, lambda model: share_right(model, tokenizer, held_out, length)))
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
