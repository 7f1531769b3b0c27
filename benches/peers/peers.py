"""The peers' implementation of each case, as their users call it, compiled only where that is the default.

`peers.py DEVICE` reads lines OP<tab>SHAPE<tab>DTYPE<tab>DIRECTION, runs each case and prints MS<tab>PEAK_MIB, like the program of
candle-grpo with --serve.
"""

import sys
import time
from dataclasses import dataclass
from typing import Callable

# Number of runs per sample on a GPU. The host enqueues the next run while the GPU works.
RUNS_ON_A_GPU = 10


@dataclass
class Case:
    """A case with the op, shape, dtype and direction of a case of candle-grpo's benchmark."""

    op: str
    shape: str
    dtype: str
    peer: str
    # Creates the inputs and returns the timed function.
    prepare: Callable[[], Callable[[], None]]
    # The goal on a GPU: the largest share of the peer's time.
    goal: float = None
    # True if the goal includes less memory.
    less_memory: bool = False
    direction: str = "forward+backward"

    def line(self):
        return "\t".join([self.op, self.shape, self.dtype, self.direction])


def uniform(torch, device, *shape, scale=1.0, dtype="float32"):
    # In place, without copies of a large GPU tensor.
    x = torch.empty(shape, device=device, dtype=getattr(torch, dtype))
    return x.uniform_(-scale, scale).requires_grad_()


def log_prob(device, rows, vocab, dtype):
    import torch
    import torch.nn.functional as F

    logits = uniform(torch, device, rows, vocab, scale=8.0, dtype=dtype)
    targets = torch.randint(vocab, (rows, 1), device=device)

    def run():
        F.log_softmax(logits, -1).gather(1, targets).sum().backward()
        logits.grad = None

    return run


def linear_log_prob(device, rows, width, vocab):
    import torch
    import torch.nn.functional as F

    hidden = uniform(torch, device, rows, width)
    weight = uniform(torch, device, vocab, width, scale=0.3)
    targets = torch.randint(vocab, (rows, 1), device=device)

    def run():
        F.log_softmax(hidden @ weight.t(), -1).gather(1, targets).sum().backward()
        hidden.grad = weight.grad = None

    return run


def linear_policy_loss(device, batch, tokens, width, vocab, dtype):
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # Compilation needs a C++ compiler at run time on the CPU, and does not help there.
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=device == "cuda", use_ref_model=False)
    hidden = uniform(torch, device, batch, tokens, width, dtype=dtype)
    weight = uniform(torch, device, vocab, width, scale=0.3, dtype=dtype)
    targets = torch.randint(vocab, (batch, tokens), device=device)
    mask = torch.ones(batch, tokens, device=device)
    advantages = torch.randn(batch, device=device)

    def run():
        value, _ = loss(hidden, weight, targets, mask, advantages)
        value.backward()
        hidden.grad = weight.grad = None

    return run


def logits_policy_loss(device, batch, tokens, vocab, dtype):
    import torch
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    # One more position than targets: the last logits have no target.
    logits = uniform(torch, device, batch, tokens + 1, vocab, scale=8.0, dtype=dtype)
    targets = torch.randint(vocab, (batch, tokens), device=device)
    mask = torch.ones(batch, tokens, device=device)
    advantages = torch.randn(batch, device=device)
    old = torch.randn(batch, tokens, device=device) - 12

    def run():
        value, _ = triton_grpo_loss(
            logits, old, None, targets, advantages, mask, temperature=1.0, beta=0.0, inplace=True, reduce=True
        )
        value.backward()
        logits.grad = None

    return run


def through_a_graph(function, *inputs):
    def run():
        function(*inputs).sum().backward()
        for x in inputs:
            x.grad = None

    return run


def forward_alone(function, *inputs):
    inputs = [x.detach() for x in inputs]
    return lambda: function(*inputs)


def with_gradient(function, *inputs):
    """Both passes, with a gradient of the result that is there already."""
    import torch

    gradient = torch.ones_like(function(*inputs))

    def run():
        function(*inputs).backward(gradient)
        for x in inputs:
            x.grad = None

    return run


def liger_rms_norm(tokens, width, passes):
    import torch
    from liger_kernel.ops import LigerRMSNormFunction

    x, weight = (uniform(torch, "cuda", *shape, dtype="bfloat16") for shape in ((tokens, width), (width,)))
    # As the layer of Liger-Kernel for Llama calls it: not in place, because ours keeps the gradient.
    return passes(lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False), x, weight)


def liger_swiglu(tokens, width, passes):
    import torch
    from liger_kernel.ops import LigerSiLUMulFunction

    inputs = [uniform(torch, "cuda", tokens, width, dtype="bfloat16") for _ in range(2)]
    return passes(LigerSiLUMulFunction.apply, *inputs)


def rms_norm(tokens, width):
    import torch
    import torch.nn.functional as F

    x, weight = uniform(torch, "cpu", tokens, width), uniform(torch, "cpu", width)
    return through_a_graph(lambda x, weight: F.rms_norm(x, (width,), weight, 1e-5), x, weight)


def rope(tokens, heads, head_dim):
    import torch

    angles = torch.rand(tokens, 1, head_dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return through_a_graph(rotate, uniform(torch, "cpu", tokens, heads, head_dim))


def swiglu(tokens, width):
    import torch
    import torch.nn.functional as F

    inputs = [uniform(torch, "cpu", tokens, width) for _ in range(2)]
    return through_a_graph(lambda gate, up: F.silu(gate) * up, *inputs)


def attention(device, batch, positions, heads, kv_heads, head_dim, dtype="float32", passes=through_a_graph):
    import torch
    import torch.nn.functional as F

    inputs = [
        uniform(torch, device, batch, n, positions, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)
    ]
    return passes(lambda *inputs: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True), *inputs)


def causal_conv(batch, positions, channels, taps):
    import torch
    import torch.nn.functional as F

    x, weight = uniform(torch, "cpu", batch, channels, positions), uniform(torch, "cpu", channels, 1, taps)
    return through_a_graph(
        lambda x, weight: F.silu(F.conv1d(x, weight, padding=taps - 1, groups=channels)[..., :positions]), x, weight
    )


def gated_delta_rule(batch, positions, key_heads, value_heads, dim):
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    keys = key_heads * dim
    qkv = uniform(torch, "cpu", batch, positions, 2 * keys + value_heads * dim)
    g, beta = (torch.rand(batch, positions, value_heads) for _ in range(2))
    g, beta = (-g).requires_grad_(), beta.requires_grad_()

    def rule(qkv, g, beta):
        query, key, value = (x.unflatten(-1, (-1, dim)) for x in qkv.split([keys, keys, value_heads * dim], dim=-1))
        query, key = (x.repeat_interleave(value_heads // key_heads, dim=2) for x in (query, key))
        return torch_chunk_gated_delta_rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return through_a_graph(rule, qkv, g, beta)


def embedding(device, tokens, vocab, width, dtype="float32"):
    import torch
    import torch.nn.functional as F

    weight = uniform(torch, device, vocab, width, dtype=dtype)
    # There already, as in ours: the gradient is added to it.
    weight.grad = torch.zeros_like(weight)
    ids = torch.randint(vocab, (tokens,), device=device)

    def run():
        F.embedding(ids, weight).sum().backward()

    return run


def adamw(device, vocab, width):
    import torch

    parameter = uniform(torch, device, vocab, width, scale=0.1)
    parameter.grad = torch.full_like(parameter, 0.01)
    return torch.optim.AdamW([parameter], fused=True).step


def gradient_norm(device, vocab, width):
    import torch

    gradient = torch.empty(vocab, width, device=device).uniform_(-0.01, 0.01)

    def run():
        torch.nn.utils.get_total_norm([gradient])

    return run


def cpu_cases():
    def beside_pytorch(op, shape, prepare, direction="forward+backward"):
        return Case(op, shape, "f32", "PyTorch", prepare, direction=direction)

    def with_logits(rows, dtype, name):
        return Case("log_prob", f"[{rows}, 49152]", name, "PyTorch", lambda: log_prob("cpu", rows, 49152, dtype))

    yield with_logits(256, "float32", "f32")
    yield with_logits(256, "bfloat16", "bf16")
    yield with_logits(1024, "float32", "f32")
    yield Case(
        "linear_log_prob", "[1024, 576] x [49152, 576]", "f32", "PyTorch",
        lambda: linear_log_prob("cpu", 1024, 576, 49152),
    )
    yield Case(
        "linear_policy_loss", "[8, 128, 576] x [49152, 576]", "f32", "Liger-Kernel",
        lambda: linear_policy_loss("cpu", 8, 128, 576, 49152, "float32"),
    )
    # The layers of SmolLM2-135M on 8 sequences of 128 tokens.
    yield beside_pytorch("rms_norm", "[1024, 576], alone", lambda: rms_norm(1024, 576))
    yield beside_pytorch("rope", "[1024, 9 * 64], alone", lambda: rope(1024, 9, 64))
    yield beside_pytorch("swiglu", "[1024, 1536], alone", lambda: swiglu(1024, 1536))
    yield beside_pytorch(
        "attention", "[8, 128], 9 and 3 heads of 64, alone", lambda: attention("cpu", 8, 128, 9, 3, 64)
    )
    # The linear attention of Qwen3.5-4B.
    yield beside_pytorch("causal_conv", "[8, 128, 8192], 4 taps, alone", lambda: causal_conv(8, 128, 8192, 4))
    yield Case(
        "gated_delta_rule", "[8, 128], 16 and 32 heads of 128, alone", "f32", "transformers",
        lambda: gated_delta_rule(8, 128, 16, 32, 128),
    )
    yield beside_pytorch(
        "embedding", "[1024] of [49152, 576], alone", lambda: embedding("cpu", 1024, 49152, 576)
    )
    yield beside_pytorch("adamw", "[49152, 576]", lambda: adamw("cpu", 49152, 576), "forward")
    yield beside_pytorch("gradient_norm", "[49152, 576]", lambda: gradient_norm("cpu", 49152, 576), "forward")


def cuda_cases():
    for vocab in (49152, 128256, 151936):
        yield Case(
            "log_prob/policy_loss", f"[8, 512, {vocab}]", "bf16", "Liger-Kernel (Triton)",
            lambda vocab=vocab: logits_policy_loss("cuda", 8, 512, vocab, "bfloat16"), goal=0.9,
        )
    yield Case(
        "log_prob/copy", "[4096, 151936]", "bf16", "PyTorch", lambda: log_prob("cuda", 4096, 151936, "bfloat16")
    )
    yield Case(
        "linear_policy_loss", "[8, 512, 4096] x [128256, 4096]", "bf16", "Liger-Kernel",
        lambda: linear_policy_loss("cuda", 8, 512, 4096, 128256, "bfloat16"), goal=0.9, less_memory=True,
    )
    # The layers of Llama 3 8B on 4 sequences of 2,048 tokens.
    ways = [("", "forward", forward_alone), (", alone", "forward+backward", with_gradient)]
    for how, direction, passes in ways:
        yield Case(
            "rms_norm", "[8192, 4096]" + how, "bf16", "Liger-Kernel", lambda passes=passes: liger_rms_norm(8192, 4096, passes),
            direction=direction,
        )
        yield Case(
            "swiglu", "[8192, 14336]" + how, "bf16", "Liger-Kernel", lambda passes=passes: liger_swiglu(8192, 14336, passes),
            direction=direction,
        )
        yield Case(
            "attention", "[4, 2048], 32 and 8 heads of 128" + how, "bf16", "PyTorch",
            lambda passes=passes: attention("cuda", 4, 2048, 32, 8, 128, "bfloat16", passes), direction=direction,
        )
    yield Case(
        "embedding", "[8192] of [128256, 4096], alone", "bf16", "PyTorch",
        lambda: embedding("cuda", 8192, 128256, 4096, "bfloat16"),
    )
    yield Case("adamw", "[128256, 4096]", "f32", "PyTorch", lambda: adamw("cuda", 128256, 4096), direction="forward")
    yield Case(
        "gradient_norm", "[128256, 4096]", "f32", "PyTorch", lambda: gradient_norm("cuda", 128256, 4096),
        direction="forward",
    )


def cases(device):
    return {"cpu": cpu_cases, "cuda": cuda_cases}[device]()


def sample(run, device):
    """Returns milliseconds and, on a GPU, the peak of memory beyond the memory before, in MiB."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3, float("nan")
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    for _ in range(RUNS_ON_A_GPU):
        run()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3 / RUNS_ON_A_GPU
    return ms, (torch.cuda.max_memory_allocated() - before) / 2**20


def serve(device):
    if device == "cpu":
        import torch

        torch.set_num_threads(2)
    by_line = {case.line(): case for case in cases(device)}
    run, prepared = None, None
    for line in sys.stdin:
        line = line.rstrip("\n")
        if line != prepared:
            # Frees the inputs of the previous case before the next ones are allocated.
            run = None
            if device == "cuda":
                import torch

                torch.cuda.empty_cache()
            run, prepared = by_line[line].prepare(), line
        print("%f\t%f" % sample(run, device), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
