"""The models of the benchmarks."""

import json
from pathlib import Path

MODELS = Path(__file__).parents[1] / "models"


def models(device, only=""):
    """Returns the name and the file of each model of that device whose name contains `only`."""
    folder = MODELS / "cuda" if device == "cuda" else MODELS
    return [(file.stem, file) for file in sorted(folder.glob("*.json")) if only in file.stem]


def config(name):
    """Returns the configuration of transformers for the model of that name."""
    from transformers import AutoConfig

    [file] = MODELS.rglob(f"{name}.json")
    values = json.loads(file.read_text())
    return AutoConfig.for_model(**values, bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype="float32")
