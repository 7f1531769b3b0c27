"""Times a training step of a model with the dimensions of SmolLM2-135M beside PyTorch with transformers.

Each side is a separate process that runs one step per input line: forward and backward of 8 sequences of 128 tokens in f32, with
the log-prob of the next token at every position. The sides alternate. Reports medians and the peak resident memory of each
process. Writes training.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

LAYERS, SEQUENCES, LENGTH = 30, 8, 128


def worker():
    """Runs the side of PyTorch."""
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=LAYERS,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
            tie_word_embeddings=True, rope_theta=1e5,
        )
    ).float()
    ids = torch.randint(49152, (SEQUENCES, LENGTH))
    for _ in sys.stdin:
        start = time.perf_counter()
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        (-log_probs.mean()).backward()
        print((time.perf_counter() - start) * 1e3, flush=True)


class Side:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args} ended")
        return float(answer)

    def peak_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?", help="our program, training-system or training-mimalloc")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker()
    if not args.program:
        parser.error("program: missing")

    ours = Side([args.program, "--serve", "--layers", str(LAYERS), "--sequences", str(SEQUENCES), "--length", str(LENGTH)])
    theirs = Side([sys.executable, __file__, "--worker"])
    ours.step(), theirs.step()
    pairs = [(ours.step(), theirs.step()) for _ in range(args.rounds)]
    tokens = SEQUENCES * LENGTH
    row = {
        "op": "training_step",
        "shape": f"{SEQUENCES} x {LENGTH} tokens, {LAYERS} layers of SmolLM2-135M",
        "dtype": "f32",
        "device": "cpu",
        "peer": "transformers",
        "ours_ms": statistics.median(a for a, _ in pairs),
        "peer_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "ours_tokens_per_s": tokens / statistics.median(a for a, _ in pairs) * 1e3,
        "peer_tokens_per_s": tokens / statistics.median(b for _, b in pairs) * 1e3,
        "ours_resident_mib": ours.peak_mib(),
        "peer_resident_mib": theirs.peak_mib(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training.json").write_text(json.dumps([row], indent=2) + "\n")
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
