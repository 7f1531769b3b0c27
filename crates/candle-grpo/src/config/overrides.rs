//! The keys that a shell script sets, as those of verl and Hydra do: `python3 -m main a.b=c`.

use serde_json::{Map, Value};

use super::document::LONGEST_PATH;

/// A key with dots, its value, and its line.
type Override<'a> = (&'a str, &'a str, usize);

/// Returns the keys of a script as a tree, and the line of each.
///
/// Comments, words of another form and keys longer than [`LONGEST_PATH`] are left out. A variable
/// of the shell stays as it is written.
pub(super) fn read(script: &str) -> (Value, Vec<(String, usize)>) {
    let mut tree = Value::Object(Map::new());
    let mut lines = Vec::new();
    for (path, value, line) in overrides(script) {
        if insert(&mut tree, path, scalar(value)) {
            lines.push((path.to_owned(), line));
        }
    }
    (tree, lines)
}

fn overrides(script: &str) -> impl Iterator<Item = Override<'_>> {
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
            is_path.then_some((path, value, index + 1))
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

/// Sets the value at a path, unless a part of the path has a value already. A section that it
/// replaces is lost.
fn insert(tree: &mut Value, path: &str, value: Value) -> bool {
    let mut place = tree;
    for key in path.split('.') {
        let Value::Object(map) = place else {
            return false;
        };
        place = map.entry(key).or_insert_with(|| Value::Object(Map::new()));
    }
    *place = value;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_a_tree_of_its_overrides() {
        let script = "set -x\nexport A.B\n# data.seed=3\npython3 -m verl.trainer.main_ppo \\\n    algorithm.adv_estimator=grpo \\\n    data.train_files=\"$HOME/train.parquet\" +trainer.val_only=True x=1 \\\n    actor_rollout_ref.actor.optim.lr=1e-6 'data.sizes=[1,2]' data.a-b=1 trainer.val_only.more=2 $@ # data.seed=1\n";
        let long = format!("{}=1", ["a"; LONGEST_PATH].join("."));
        assert_eq!(read(&long).1, []);
        let (tree, lines) = read(script);
        assert_eq!(
            tree,
            serde_json::json!({
                "algorithm": {"adv_estimator": "grpo"},
                "data": {"train_files": "$HOME/train.parquet", "sizes": "[1,2]"},
                "trainer": {"val_only": true},
                "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}},
            })
        );
        let lines: Vec<(&str, usize)> = lines.iter().map(|(path, line)| (&**path, *line)).collect();
        assert_eq!(
            lines,
            [
                ("algorithm.adv_estimator", 5),
                ("data.train_files", 6),
                ("trainer.val_only", 6),
                ("actor_rollout_ref.actor.optim.lr", 7),
                ("data.sizes", 7),
            ]
        );
    }
}
