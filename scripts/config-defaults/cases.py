"""Reads each config.json with transformers, as a case of the golden test of absent keys.

usage: cases.py OUT : writes OUT/config_defaults.json. For each family, a config.json with all keys, in the style of transformers 4 and of 5;
then without each key, with a null for each key, and with `model_type` alone. A file that transformers refuses is no case.
"""

import copy
import json
import sys
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING

# No value is a default of a family.
COMMON = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 640,
    "tie_word_embeddings": True,
}
ATTENTION, MLP = {"attention_bias": True}, {"mlp_bias": True}
HEAD = {"head_dim": 32}
WINDOWS = {"sliding_window": 99, "layer_types": ["full_attention"] * 5 + ["sliding_attention"]}
UNUSED = {"use_sliding_window": False, "sliding_window": 99, "max_window_layers": 3, "hidden_act": "silu"}
GEMMA = {
    **HEAD,
    **ATTENTION,
    **WINDOWS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 77,
    "final_logit_softcapping": 7.0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    # A width of heads that is `hidden_size / num_attention_heads`, as many factors as pairs.
    "llama": {"head_dim": 16, **ATTENTION, **MLP, "hidden_act": "silu"},
    "qwen2": UNUSED,
    "qwen3": {**HEAD, **ATTENTION, **UNUSED},
    "qwen3_5_text": {
        **HEAD,
        **ATTENTION,
        "layer_types": ["full_attention"] * 5 + ["linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 66,
        "linear_value_head_dim": 68,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 16,
        "full_attention_interval": 3,
    },
    "smollm3": {
        **ATTENTION,
        **MLP,
        **UNUSED,
        "tie_word_embeddings": False,
        "no_rope_layers": [0, 1, 1, 1, 1, 1],
        "no_rope_layer_interval": 3,
    },
    "mistral": {**HEAD, "sliding_window": 99},
    "granite": {
        **ATTENTION,
        **MLP,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 4.0,
        "attention_multiplier": 5.0,
    },
    "olmo2": ATTENTION,
    "gemma2": {**GEMMA, "attn_logit_softcapping": 9.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 3},
    "phi3": {"sliding_window": 99, "original_max_position_embeddings": 320},
    "qwen3_moe": {
        **HEAD,
        **ATTENTION,
        **UNUSED,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
    },
}
ORIGINAL = {"original_max_position_embeddings": 160}
ROTATIONS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, **ORIGINAL},
    "yarn": {"factor": 4.0, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.5, **ORIGINAL},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 3.0,
        "attention_factor": 1.5,
        **ORIGINAL,
    },
}


def full(family):
    """Yields (name, config.json) with all keys of a family."""
    base = {"model_type": family, **COMMON, **FAMILIES[family]}
    partial = {"partial_rotary_factor": 0.5} if family in ("phi3", "qwen3_5_text") else {}
    own_kinds = {"llama": list(ROTATIONS), "phi3": ["default", "longrope"]}
    kinds = own_kinds.get(family, ["default", "yarn"] if partial or family == "gemma3_text" else ["default"])
    for kind in kinds:
        rope = {"rope_type": kind, **copy.deepcopy(ROTATIONS[kind])}
        if family == "phi3" and kind == "longrope":
            rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        four = {"rope_theta": 777.0, **partial, "rope_scaling": rope}
        five = {"rope_parameters": {"rope_theta": 777.0, **partial, **rope}}
        if family == "gemma3_text":
            four["rope_local_base_freq"] = 99.0
            local = {"rope_type": "default", "rope_theta": 99.0}
            five["rope_parameters"] = {"full_attention": five["rope_parameters"], "sliding_attention": local}
        if kind == "default":
            del four["rope_scaling"]
        yield f"{family} {kind} 4", {**base, **four}
        yield f"{family} {kind} 5", {**base, **five}
    # Lists with an entry for each block follow from other keys.
    lists = [key for key, value in base.items() if isinstance(value, list)]
    if lists:
        yield f"{family} without lists", {key: value for key, value in base.items() if key not in lists}


def places(config, path=()):
    """Yields the path of each key."""
    for key, value in config.items():
        if path + (key,) != ("model_type",):
            yield path + (key,)
        if isinstance(value, dict):
            yield from places(value, path + (key,))


def changed(config, path, value=None, remove=False):
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return config


def rotation(rope, config, family):
    """Returns the fields of a rotation, with the defaults of transformers' functions for its frequencies."""
    kind = rope["rope_type"]
    fields = {"rope_type": kind}
    original = rope.get("original_max_position_embeddings")
    if kind == "default" and set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor"}:
        raise ValueError("transformers ignores keys with a warning; here they are an error")
    if kind == "linear":
        fields["factor"] = rope["factor"]
    elif kind == "llama3":
        names = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
        fields |= {name: rope[name] for name in names}
    elif kind in ("yarn", "longrope"):
        fields["factor"] = rope["factor"] if kind == "yarn" else rope.get("factor") or config.max_position_embeddings / original
        fields["original_max_position_embeddings"] = original
        fields["attention_factor"] = rope.get("attention_factor")
        if kind == "yarn":
            fields |= {"beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0}
        else:
            fields |= {name: rope[name] for name in ["short_factor", "long_factor"]}
    if any(value is None for key, value in fields.items() if key != "attention_factor"):
        raise ValueError("a null that no model can be made of")
    return fields


def expected(file):
    """Returns the fields of the decoder that transformers reads."""
    family = file["model_type"]
    config = CONFIG_MAPPING[family].from_dict(copy.deepcopy(file))
    get = lambda key: getattr(config, key, None)
    rope = config.rope_parameters
    fields = {key: get(key) for key in COMMON}
    if family == "gemma3_text":
        rope, local = rope["full_attention"], rope["sliding_attention"]
        if local["rope_type"] != "default":
            raise ValueError("a scaled local rotation")
        fields["rope_local_base_freq"] = local["rope_theta"]
    fields |= {
        "model_type": family,
        "head_dim": get("head_dim") or config.hidden_size // config.num_attention_heads,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rotation(rope, config, family),
    }
    own = set(FAMILIES[family]) - {"head_dim", "hidden_act", "hidden_activation", "use_sliding_window", "max_window_layers"}
    own -= {"full_attention_interval", "no_rope_layer_interval", "sliding_window_pattern", "original_max_position_embeddings"}
    if "use_sliding_window" in FAMILIES[family]:
        # A window that is not used.
        own -= {"sliding_window"}
    if family in ("phi3", "qwen3_5_text"):
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if family == "qwen3_moe":
        own -= {"decoder_sparse_step"}
        step, layers = config.decoder_sparse_step, range(config.num_hidden_layers)
        fields["mlp_only_layers"] = [x for x in layers if x in config.mlp_only_layers or (x + 1) % step]
        own -= {"mlp_only_layers"}
    fields |= {key: get(key) for key in sorted(own)}
    required = {*COMMON, "rope_theta", "rope_local_base_freq", "partial_rotary_factor"}
    if any(fields[key] is None for key in required & set(fields)):
        raise ValueError("a null that no model can be made of")
    return {key: value for key, value in fields.items() if value is not None}


def main():
    out = Path(sys.argv[1])
    cases, refused = [], 0

    def add(name, config, whole=None):
        nonlocal refused
        try:
            fields = expected(config)
        except Exception as error:
            if not name.endswith("null"):
                print(f"{name}: refused by transformers: {' '.join(str(error).split())[:150]}", file=sys.stderr)
            refused += 1
            return None
        if whole is None:
            cases.append({"name": name, "config": config, "expected": fields, "changes": []})
            return fields
        return fields

    for family in FAMILIES:
        add(f"{family} alone", {"model_type": family})
        for name, config in full(family):
            whole = add(name, config)
            if whole is None:
                raise SystemExit(f"{name}: the whole file is refused")
            changes = cases[-1]["changes"]
            for path in places(config):
                for how, options in {"absent": {"remove": True}, "null": {}}.items():
                    fields = add(f"{name} {'.'.join(path)} {how}", changed(config, path, **options), whole)
                    if fields is None:
                        continue
                    # The keys that differ from those of the whole file; null for those that are absent.
                    keys = sorted(set(whole) | set(fields))
                    differ = {key: fields.get(key) for key in keys if whole.get(key) != fields.get(key)}
                    changes.append({"path": list(path), "is_null": how == "null", "differ": differ})
    out.mkdir(parents=True, exist_ok=True)
    # A line for each whole file.
    text = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (out / "config_defaults.json").write_text(f"[\n{text}\n]\n")
    count = sum(1 + len(case["changes"]) for case in cases)
    print(f"{count} files of transformers {transformers.__version__}; it refuses {refused} others", file=sys.stderr)


if __name__ == "__main__":
    main()
