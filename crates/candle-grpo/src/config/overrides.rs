//! The keys that a shell script sets, as those of verl and Hydra do: `python3 -m main a.b=c`.

use serde_json::Value;

use super::document::LONGEST_PATH;

/// Returns the keys of a script, their values and lines.
///
/// Comments, words of another form and keys longer than [`LONGEST_PATH`] are left out. A variable
/// of the shell stays as it is written.
pub(super) fn of(script: &str) -> impl Iterator<Item = (&str, Value, usize)> {
    let lines = script.lines().enumerate();
    lines.flat_map(|(index, line)| {
        let words = line.split_whitespace();
        let words = words.take_while(|word| !word.starts_with('#'));
        words.filter_map(move |word| {
            // Hydra adds a key with `+`, and quotes of the shell may stand around a word.
            let word = word.trim_matches(['"', '\'']).trim_start_matches('+');
            let (path, value) = word.split_once('=')?;
            let is_name = |name: &str| {
                let rest = name.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '_');
                rest.len() < name.len() && rest.chars().all(|c| c.is_alphanumeric() || c == '_')
            };
            let is_path = path.contains('.') && path.split('.').all(is_name);
            let is_path = is_path && path.len() <= LONGEST_PATH;
            is_path.then(|| (path, scalar(value), index + 1))
        })
    })
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
}
