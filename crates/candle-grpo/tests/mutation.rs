//! Valid configurations with some keys changed, for the fuzzer and the tests.

use serde_json::{Map, Value, json};

/// Returns a number below its argument: the next choice.
pub type Choose<'a> = &'a mut dyn FnMut(usize) -> usize;

/// The keys of `algorithm` that stay absent in an effective configuration.
const ALGORITHM: &[&str] = &[
    "adv_estimator",
    "gamma",
    "lambd",
    "whiten_rewards",
    "whiten_advantages",
    "advantage_clip",
    "advantage_epsilon",
    "advantage_scale",
    "value_clip",
    "reward_norm",
    "reward_shift",
    "reward_scale",
    "norm_mean_type",
    "norm_std_type",
    "reward_clip",
    "kl_coef",
    "add_token_level_kl",
    "kl_penalty",
    "init_kl_coef",
    "target_kl",
    "kl_horizon",
    "pg_variant",
    "pg_clip",
    "use_pg_clip_range",
    "pg_clip_low",
    "pg_clip_high",
    "dual_clip_loss",
    "tis_lower_bound",
    "tis_upper_bound",
    "topr_positive_weight",
    "topr_negative_weight",
    "cispo_epsilon_low",
    "cispo_epsilon_high",
    "cispo_use_unified_mask",
    "kimi15_tau",
    "importance_sampling",
    "use_kl_loss",
    "kl_loss_coef",
    "entropy_loss_coef",
    "rl_loss_coef",
    "loss_agg_mode",
    "max_len_mask",
    "difficulty_mask",
    "difficulty_low_threshold",
    "difficulty_high_threshold",
    "error_max_len_clip",
    "error_max_len_threshold",
];

/// Values that keys take, and values at and beyond their bounds.
fn values() -> Vec<Value> {
    let mut values = vec![Value::Null, json!(true), json!(false), json!([]), json!({})];
    values.extend([0u64, 1, 2, 3, 4, 7, 100, 65_536, 100_000, 1_000_000_000].map(Value::from));
    values.extend([u64::MAX, u64::MAX / 2, 1 << 53, 1 << 32].map(Value::from));
    values.extend([-1i64, i64::MIN].map(Value::from));
    values.extend(
        [
            0.5, 0.1, 1., 1.5, -0.5, 1e-30, 1e-9, 1e9, 1e30, 1e300, -1e300,
        ]
        .map(Value::from),
    );
    values.extend(
        [
            "",
            "grpo",
            "gae",
            "reinforce",
            "batch",
            "group",
            "running",
            "none",
            "token",
            "seq",
            "sequence",
            "ppo",
            "vanilla",
            "tis",
            "topr",
            "cispo",
            "kimi15",
            "k1",
            "k2",
            "k3",
            "abs",
            "mse",
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "prompt-mean-token-mean",
            "seq-mean-token-sum-norm",
            "sampler",
            "current",
            "recompute",
            "bf16",
            "f16",
            "all",
            "zero",
            "raw",
            "error",
            "policy_gradient",
        ]
        .map(Value::from),
    );
    values.extend([
        json!({"rank": 2, "alpha": 4.0, "target_modules": ["q_proj"]}),
        json!({"rank": 100_000_000}),
        json!({"rank": 0, "alpha": 4.0}),
        json!({"target_modules": ["no_such_map"]}),
        json!({"power": 1.5}),
        json!({"coef": 0.1}),
        json!({"name": "rloo"}),
        json!({"name": "opo"}),
        json!({"name": "gae"}),
        json!({"name": "reinforce_plus_plus"}),
        json!([0.5, 2.0]),
        json!(["ab", ""]),
        json!([1, 2]),
        json!([{"longer_than": 3}]),
        json!([{"difficulty": {"low": 0.1, "high": 0.9}}]),
        json!([{"difficulty": {"low": 2.0, "high": -1.0}}]),
    ]);
    values
}

/// Returns the paths of all keys in `value`.
fn paths(value: &Value, path: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    if let Value::Object(map) = value {
        for (key, value) in map {
            path.push(key.clone());
            all.push(path.clone());
            paths(value, path, all);
            path.pop();
        }
    }
}

fn set(value: &mut Value, path: &[String], new: Value) {
    match path {
        [] => *value = new,
        [key, rest @ ..] => {
            if !value.is_object() {
                *value = Value::Object(Map::new());
            }
            set(&mut value[key.as_str()], rest, new);
        }
    }
}

/// Returns `base`, whose effective configuration is `effective`, with up to three of its keys changed.
pub fn mutated(base: &Value, effective: &Value, choose: Choose<'_>) -> Value {
    let mut all = Vec::new();
    paths(effective, &mut Vec::new(), &mut all);
    let absent = ALGORITHM
        .iter()
        .map(|key| vec!["algorithm".to_owned(), (*key).to_owned()]);
    all.extend(absent);
    let values = values();
    let mut changed = base.clone();
    for _ in 0..1 + choose(3) {
        let path = &all[choose(all.len())];
        set(&mut changed, path, values[choose(values.len())].clone());
    }
    changed
}
