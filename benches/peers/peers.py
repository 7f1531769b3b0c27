"""What the peers do for each case: the usual way of their users, compiled only where that is their default."""

from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

torch.set_num_threads(2)


@dataclass
class Case:
    """A case that our benchmark program has under the same op, shape, dtype and direction."""

    op: str
    shape: str
    dtype: str
    direction: str
    peer: str
    prepare: Callable[[], Callable[[], None]]


def log_prob(rows, vocab, dtype):
    logits = (torch.rand(rows, vocab) * 16 - 8).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows, 1))

    def run():
        logits.grad = None
        F.log_softmax(logits, -1).gather(1, targets).sum().backward()

    return run


def linear_log_prob(rows, width, vocab):
    hidden = (torch.rand(rows, width) * 2 - 1).requires_grad_()
    weight = ((torch.rand(vocab, width) * 2 - 1) * 0.3).requires_grad_()
    targets = torch.randint(vocab, (rows, 1))

    def run():
        hidden.grad = weight.grad = None
        F.log_softmax(hidden @ weight.t(), -1).gather(1, targets).sum().backward()

    return run


def linear_policy_loss(batch, tokens, width, vocab):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # Compiled, it needs a C++ compiler at run time and gains nothing on the CPU.
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
    hidden = (torch.rand(batch, tokens, width) * 2 - 1).requires_grad_()
    weight = ((torch.rand(vocab, width) * 2 - 1) * 0.3).requires_grad_()
    targets = torch.randint(vocab, (batch, tokens))
    mask = torch.ones(batch, tokens)
    advantages = torch.randn(batch)

    def run():
        hidden.grad = weight.grad = None
        value, _ = loss(hidden, weight, targets, mask, advantages)
        value.backward()

    return run


def adamw(sizes):
    parameters = [torch.nn.Parameter(torch.rand(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    return optimizer.step


def cases():
    both = "forward+backward"
    yield Case("log_prob", "[256, 49152]", "f32", both, "PyTorch", lambda: log_prob(256, 49152, torch.float32))
    yield Case("log_prob", "[256, 49152]", "bf16", both, "PyTorch", lambda: log_prob(256, 49152, torch.bfloat16))
    yield Case("log_prob", "[1024, 49152]", "f32", both, "PyTorch", lambda: log_prob(1024, 49152, torch.float32))
    yield Case(
        "linear_log_prob", "[1024, 576] x [49152, 576]", "f32", both, "PyTorch",
        lambda: linear_log_prob(1024, 576, 49152),
    )
    yield Case(
        "linear_policy_loss", "[8, 128, 576] x [49152, 576]", "f32", both, "Liger-Kernel",
        lambda: linear_policy_loss(8, 128, 576, 49152),
    )
