//! The keys that a shell script sets: Hydra's and verl's `a.b=c`, and OpenRLHF's `--a.b c`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::document::LONGEST_PATH;
use super::openrlhf::is_old;

/// Returns a script's keys with their values and lines.
///
/// Leaves out comments, other words, and keys longer than [`LONGEST_PATH`]. Inserts variables that
/// the script sets; others stay as written.
pub(in super::super) fn of(script: &str) -> Vec<(&str, Value, usize)> {
    let mut keys: Vec<(&str, Value, usize)> = Vec::new();
    let variables = variables(script);
    let scalar = |text: &str| scalar(&substituted(text, &variables));
    // The option, such as --train.batch_size, that the next words are values of.
    let mut is_option = false;
    for (index, line) in script.lines().enumerate() {
        let words = line.split_whitespace();
        for word in words.take_while(|word| !word.starts_with('#')) {
            // Quotes of the shell may stand around a word.
            let word = word.trim_matches(['"', '\'']);
            if let Some(option) = word.strip_prefix("--") {
                let (path, value) = option.split_once('=').unwrap_or((option, ""));
                is_option = is_path(path) && (path.contains('.') || is_old(path));
                if is_option {
                    let value = match value {
                        "" => Value::Bool(true),
                        value => scalar(value),
                    };
                    keys.push((path, value, index + 1));
                }
                continue;
            }
            // Hydra adds a key with `+`.
            let assigned = word.trim_start_matches('+').split_once('=');
            match assigned.filter(|(path, _)| path.contains('.') && is_path(path)) {
                Some((path, value)) => {
                    is_option = false;
                    keys.push((path, scalar(value), index + 1));
                }
                None if word == "\\" => {}
                None if is_option => add(keys.last_mut(), scalar(word)),
                None => {}
            }
        }
    }
    keys
}

/// Returns the variables that a script sets, such as `N=8` or `export N=8`.
fn variables(script: &str) -> BTreeMap<&str, &str> {
    let assigned = script.lines().filter_map(|line| {
        let line = line.trim();
        let line = line.strip_prefix("export ").unwrap_or(line);
        let (name, value) = line.split_once('=')?;
        let is_name = is_path(name) && !name.contains('.');
        let value = value.split_whitespace().next().unwrap_or_default();
        is_name.then_some((name, value.trim_matches(['"', '\''])))
    });
    assigned.collect()
}

/// Returns a text that is one variable as its value, or else as it is. `${NAME:-VALUE}` has a
/// default.
fn substituted(text: &str, variables: &BTreeMap<&str, &str>) -> String {
    let inner = text.trim_matches(['"', '\'']);
    let Some(name) = inner.strip_prefix('$') else {
        return text.to_owned();
    };
    let braced = name
        .strip_prefix('{')
        .and_then(|name| name.strip_suffix('}'));
    let (name, default) = match braced.unwrap_or(name).split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (braced.unwrap_or(name), None),
    };
    let value = variables.get(name).copied().or(default);
    value.map_or(text.to_owned(), |value| {
        // The value of a variable may be a default, too: N=${N:-8}.
        match value
            .strip_prefix("${")
            .and_then(|rest| rest.split_once(":-"))
        {
            Some((_, default)) => default.trim_end_matches('}').to_owned(),
            None => value.to_owned(),
        }
    })
}

/// Adds another value to an option.
fn add(option: Option<&mut (&str, Value, usize)>, more: Value) {
    if let Some((_, value, _)) = option {
        *value = match std::mem::take(value) {
            Value::Bool(true) => more,
            Value::Array(mut items) => {
                items.push(more);
                Value::Array(items)
            }
            first => Value::Array(vec![first, more]),
        };
    }
}

/// Returns whether `path` is names with dots between them.
fn is_path(path: &str) -> bool {
    let is_name = |name: &str| {
        let rest = name.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '_');
        rest.len() < name.len() && rest.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    path.len() <= LONGEST_PATH && path.split('.').all(is_name)
}

fn scalar(text: &str) -> Value {
    let text = text.trim_matches(['"', '\'']);
    match text {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        text => match serde_json::from_str::<Value>(text) {
            Ok(value) if !value.is_object() && !value.is_array() => value,
            _ => Value::String(text.to_owned()),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Document;

    #[test]
    fn a_script_is_a_tree_of_its_overrides() {
        let script = "set -x\nexport A.B\n# data.seed=3\npython3 -m verl.trainer.main_ppo \\\n    algorithm.adv_estimator=grpo \\\n    data.train_files=\"$HOME/train.parquet\" +trainer.val_only=True x=1 \\\n    actor_rollout_ref.actor.optim.lr=1e-6 'data.sizes=[1,2]' data.a-b=1 trainer.val_only.more=2 $@ # data.seed=1\n";
        let read = |script: &str| Document::from_script(Path::new("run.sh"), script);
        let long = format!("{}=1", ["a"; LONGEST_PATH].join("."));
        assert!(read(&long).is_err());
        let document = read(script).unwrap();
        assert_eq!(
            document.value,
            serde_json::json!({
                "algorithm": {"adv_estimator": "grpo"},
                "data": {"train_files": "$HOME/train.parquet", "sizes": "[1,2]"},
                "trainer": {"val_only": true},
                "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}},
            })
        );
        let lines = [
            ("algorithm.adv_estimator", 5),
            ("data.train_files", 6),
            ("trainer.val_only", 6),
            ("actor_rollout_ref.actor.optim.lr", 7),
            ("data.sizes", 7),
            ("data", 6),
        ];
        for (path, line) in lines {
            assert_eq!(document.line_of(path), Some(line), "{path}");
        }
    }

    #[test]
    fn a_script_has_options_and_variables() {
        let script = "N=8\nexport K=${K:-grpo}\nray start --head --port 1\npython3 -m m a.k=$K a.n=${N} a.m=$M a.d=${D:-2} \\\n  --train.batch_size 128 --algo.kl.use_loss \\\n  --actor.eps_clip_low_high 0.2 0.27 --rollout_batch_size 4\n";
        let document = Document::from_script(Path::new("run.sh"), script).unwrap();
        assert_eq!(
            document.value,
            serde_json::json!({
                "a": {"k": "grpo", "n": 8, "m": "$M", "d": 2},
                "train": {"batch_size": 128},
                "algo": {"kl": {"use_loss": true}},
                "actor": {"eps_clip_low_high": [0.2, 0.27]},
                "rollout_batch_size": 4,
            })
        );
    }
}
