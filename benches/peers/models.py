"""The models of the benchmarks."""

import json
from pathlib import Path

MODELS = Path(__file__).parents[1] / "models"


def config(name):
    """Returns the configuration of transformers for the file NAME.json of benches/models."""
    from transformers import AutoConfig

    values = json.loads((MODELS / f"{name}.json").read_text())
    return AutoConfig.for_model(**values, bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype="float32")
