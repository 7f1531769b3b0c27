//! The choices of multiple-choice questions, in one form for all suites.

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_train::data::Row;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::config::ChoicesConfig;

/// Maximum number of choices: one per letter.
const MOST: usize = 26;

/// Adds the columns `choices`, a list of texts, and `lettered_choices`, a text with a line such as
/// `A) Paris` for each. If the right choice has a column of its own, adds its number as `answer`.
///
/// # Errors
///
/// Fails with file and line if a column is absent or is no text, or the right choice is also a
/// wrong one.
pub(super) fn add(config: &ChoicesConfig, row: &mut Row) -> Result<()> {
    let (choices, right) = read(config, row).with_context(|| row.place())?;
    let lines = choices.iter().zip('A'..='Z');
    let lines: Vec<String> = lines
        .map(|(text, letter)| format!("{letter}) {text}"))
        .collect();
    let columns = &mut row.columns;
    columns["lettered_choices"] = lines.join("\n").into();
    columns["choices"] = json!(choices);
    if let Some(right) = right {
        columns["answer"] = right.into();
    }
    Ok(())
}

/// The choices, and the right one's number if it has a column of its own.
fn read(config: &ChoicesConfig, row: &Row) -> Result<(Vec<String>, Option<usize>)> {
    let text = |column: &str, value: &Value| match value.as_str() {
        Some(text) if !text.trim().is_empty() => Ok(text.trim().to_owned()),
        _ => bail!("column {column:?}: {value}, must be a text that is not empty"),
    };
    let column = |name: &str| {
        let value = row.columns.get(name);
        value.with_context(|| format!("column {name:?}: absent"))
    };
    let choices = match &config.column {
        Some(name) => {
            let value = column(name)?;
            let list = value.as_array();
            let list =
                list.with_context(|| format!("column {name:?}: {value}, must be a list of texts"))?;
            list.iter()
                .map(|value| text(name, value))
                .collect::<Result<Vec<_>>>()?
        }
        None => {
            let all = config.right.iter().chain(&config.wrong);
            all.map(|name| text(name, column(name)?))
                .collect::<Result<Vec<_>>>()?
        }
    };
    ensure!(
        (2..=MOST).contains(&choices.len()),
        "choices: {}, must be from 2 to {MOST}",
        choices.len()
    );
    let Some(right) = &config.right else {
        return Ok((choices, None));
    };
    ensure!(
        !choices[1..].contains(&choices[0]),
        "column {right:?}: {:?}, must differ from all wrong choices",
        choices[0]
    );
    let (shuffled, right) = shuffled(choices);
    Ok((shuffled, Some(right)))
}

/// The choices in an order that depends on their texts alone, and the place of the first one. So a
/// question has the same order in any file.
fn shuffled(choices: Vec<String>) -> (Vec<String>, usize) {
    let right = choices[0].clone();
    let mut sorted = choices;
    sorted.sort();
    let all = sorted.iter().fold(Sha256::new(), |digest, text| {
        digest
            .chain_update(text.len().to_le_bytes())
            .chain_update(text)
    });
    sorted.sort_by_key(|text| all.clone().chain_update(text).finalize());
    let place = sorted.iter().position(|text| *text == right);
    (sorted, place.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn row(columns: Value) -> Row {
        Row {
            file: Path::new("rows.jsonl").into(),
            line: 3,
            columns,
        }
    }

    fn apart() -> ChoicesConfig {
        let config = json!({"right": "good", "wrong": ["bad", "worse"]});
        serde_json::from_value(config).unwrap()
    }

    #[test]
    fn listed_choices_keep_their_order() {
        let config = serde_json::from_value(json!({"column": "options"})).unwrap();
        let mut row = row(json!({"options": ["b ", "a", "c"], "answer": "B"}));
        add(&config, &mut row).unwrap();
        assert_eq!(row.columns["choices"], json!(["b", "a", "c"]));
        assert_eq!(row.columns["lettered_choices"], "A) b\nB) a\nC) c");
        assert_eq!(row.columns["answer"], "B");
    }

    #[test]
    fn the_right_choice_is_at_any_place() {
        let mut places = [0; 3];
        for number in 0..300 {
            let mut row = row(json!({"good": format!("{number}"), "bad": "x", "worse": "y"}));
            add(&apart(), &mut row).unwrap();
            let answer = row.columns["answer"].as_u64().unwrap() as usize;
            assert_eq!(row.columns["choices"][answer], json!(format!("{number}")));
            places[answer] += 1;
            // The order of the wrong columns has no effect.
            let mut other =
                self::row(json!({"good": format!("{number}"), "bad": "y", "worse": "x"}));
            add(&apart(), &mut other).unwrap();
            assert_eq!(row.columns["choices"], other.columns["choices"]);
        }
        assert!(places.iter().all(|&count| count > 70), "{places:?}");
    }

    #[test]
    fn rows_without_choices_are_named() {
        for (columns, words) in [
            (
                json!({"good": "a", "bad": "b"}),
                "rows.jsonl:3: column \"worse\": absent",
            ),
            (
                json!({"good": "a", "bad": 1, "worse": "c"}),
                "column \"bad\": 1, must be a text",
            ),
            (
                json!({"good": "a", "bad": "b", "worse": "a"}),
                "column \"good\": \"a\", must differ from all wrong choices",
            ),
        ] {
            let error = add(&apart(), &mut row(columns)).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(words), "{error}");
        }
        let config = serde_json::from_value(json!({"column": "options"})).unwrap();
        for (options, words) in [
            (json!("a"), "must be a list of texts"),
            (json!(["a"]), "choices: 1, must be from 2 to 26"),
        ] {
            let error = add(&config, &mut row(json!({"options": options}))).unwrap_err();
            assert!(format!("{error:#}").contains(words), "{error:#}");
        }
    }
}
