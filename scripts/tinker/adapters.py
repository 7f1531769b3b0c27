"""Reads saved weights of `grpo serve --tinker` with PEFT and transformers: python adapters.py MODEL FOLDER.

MODEL is the model name of the server, a Hugging Face directory, and FOLDER the directory of the server. A few steps train adapters. Both
libraries then compute the log-probs of some texts with the saved weights, which must be those of the server.
"""

import sys
from pathlib import Path

import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

TEXTS = ["The capital of France is Paris. The capital of Italy is Rome.", "One, two, three, four, five, six."]


def log_probs(model, tokens):
    """The log-prob of each token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def difference(model, texts, expected):
    """The largest difference between the log-probs of a model and the expected ones."""
    found = [log_probs(model, tokens) for tokens in texts]
    return max(float((a - torch.tensor(b)).abs().max()) for a, b in zip(found, expected, strict=True))


def main(name, folder):
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=name, rank=8, seed=2).result()
    tokenizer = client.get_tokenizer()
    texts = [tokenizer.encode(text) for text in TEXTS]
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})
        for tokens in texts
    ]
    for _ in range(3):
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    expected = [output["logprobs"].data for output in outputs]
    paths = [client.save_state("readers").result().path, client.save_weights_for_sampler("readers").result().path]
    service.close("success").result()

    def base():
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    assert difference(base(), texts, expected) > 0.1, "the adapters change nothing"
    for path in paths:
        model, _, rest = path.removeprefix("tinker://").partition("/")
        session, _, number = model.partition(":train:")
        saved = folder / "sessions" / session / "models" / number / rest
        peft = PeftModel.from_pretrained(base(), saved)
        transformers = base()
        transformers.load_adapter(str(saved))
        for library, model in [("PEFT", peft), ("transformers", transformers), ("merged", peft.merge_and_unload())]:
            found = difference(model, texts, expected)
            assert found < 1e-3, (library, path, found)
    print("adapters: passed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
