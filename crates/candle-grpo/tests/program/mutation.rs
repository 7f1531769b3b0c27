//! Valid configurations with some keys changed, for the fuzzer and the tests.

use serde_json::{Map, Value, json};

/// Returns a number below its argument: the next choice.
pub(crate) type Choose<'a> = &'a mut dyn FnMut(usize) -> usize;

/// The `algorithm` keys that stay absent in an effective configuration.
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

/// Returns a number, often near `current`, sometimes at or beyond a bound.
fn number(current: Option<f64>, choose: Choose<'_>) -> Value {
    let near = [0.5, 0.9, 1.1, 2.];
    match (choose(4), current) {
        (0, Some(x)) if x.fract() == 0. && x.abs() < 1e9 => json!(x as i64 + 1),
        (0, _) => json!([0.1, 0.3, 1.5, 0.99][choose(4)]),
        (1, Some(x)) => json!(x * near[choose(4)]),
        (1 | 2, _) => json!([1, 2, 3, 4][choose(4)]),
        _ => {
            let bounds = [
                json!(0),
                json!(-1),
                json!(-0.5),
                json!(1e-30),
                json!(1e9),
                json!(1e30),
                json!(1e300),
                json!(-1e300),
                json!(65_536),
                json!(100_000),
                json!(1_000_000_000),
                json!(1u64 << 53),
                json!(u64::MAX),
                json!(i64::MIN),
            ];
            bounds[choose(bounds.len())].clone()
        }
    }
}

/// Names that keys take.
const NAMES: &[&str] = &[
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
    "seq-mean-token-mean",
    "prompt-mean-token-mean",
    "seq-mean-token-sum-norm",
    "sampler",
    "current",
    "recompute",
    "bf16",
    "all",
    "zero",
    "raw",
    "error",
    "policy_gradient",
    "",
];

/// Returns a value with another type.
fn other(choose: Choose<'_>) -> Value {
    let values = [
        Value::Null,
        json!([]),
        json!({}),
        json!({"rank": 2, "alpha": 4.0, "target_modules": ["q_proj"]}),
        json!({"rank": 100_000_000}),
        json!({"rank": 0, "alpha": 4.0}),
        json!({"rank": 2, "alpha": 4.0, "target_modules": ["no_such_map"]}),
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
    ];
    values[choose(values.len())].clone()
}

/// Returns another value for a key, mostly with the same type.
fn value(current: Option<&Value>, choose: Choose<'_>) -> Value {
    let name = |choose: Choose<'_>| json!(NAMES[choose(NAMES.len())]);
    match (choose(8), current) {
        (0, _) => other(choose),
        (1, None | Some(Value::Null | Value::String(_))) => name(choose),
        (_, Some(Value::Bool(on))) => json!(!on),
        (1..4, Some(Value::Array(items))) if !items.is_empty() => {
            let mut items = items.clone();
            match choose(2) {
                0 => drop(items.remove(choose(items.len()))),
                _ => items.push(items[choose(items.len())].clone()),
            }
            Value::Array(items)
        }
        (_, Some(Value::String(_))) => name(choose),
        (_, Some(Value::Number(x))) => number(x.as_f64(), choose),
        _ => match choose(3) {
            0 => json!(choose(2) == 0),
            1 => name(choose),
            _ => number(None, choose),
        },
    }
}

/// Returns the paths to all keys and items in `value`. An index stands for an item.
fn paths(value: &Value, path: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    let mut descend = |step: String, value: &Value| {
        path.push(step);
        all.push(path.clone());
        paths(value, path, all);
        path.pop();
    };
    match value {
        Value::Object(map) => map
            .iter()
            .for_each(|(key, value)| descend(key.clone(), value)),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(i, value)| descend(i.to_string(), value));
        }
        _ => {}
    }
}

/// Returns the value at `path`.
fn get<'a>(value: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(value, |value, step| match value {
        Value::Array(items) => items.get(step.parse::<usize>().ok()?),
        value => value.get(step),
    })
}

/// Sets the value at `path`. A list that `value` lacks is first copied from `effective`.
fn set(value: &mut Value, effective: &Value, path: &[String], new: Value) {
    let [step, rest @ ..] = path else {
        *value = new;
        return;
    };
    if let (Value::Array(items), Ok(index)) = (effective, step.parse::<usize>()) {
        if !value.is_array() {
            *value = effective.clone();
        }
        if let (Some(item), Some(effective)) = (value.get_mut(index), items.get(index)) {
            set(item, effective, rest, new);
        }
        return;
    }
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let below = effective.get(step).unwrap_or(&Value::Null);
    set(&mut value[step.as_str()], below, rest, new);
}

/// Returns `base`, whose effective configuration is `effective`, with one key or item changed.
pub(crate) fn mutated(base: &Value, effective: &Value, choose: Choose<'_>) -> Value {
    let mut all = Vec::new();
    paths(effective, &mut Vec::new(), &mut all);
    let absent = ALGORITHM.iter();
    all.extend(absent.map(|key| vec!["algorithm".to_owned(), (*key).to_owned()]));
    let path = &all[choose(all.len())];
    let new = value(get(effective, path), choose);
    let mut changed = base.clone();
    set(&mut changed, effective, path, new);
    changed
}
