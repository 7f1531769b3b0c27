//! Constraints on the text of completions.

use anyhow::Result;
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The form of a completion's text, which the engine enforces by masking tokens.
///
/// ```
/// use candle_grpo_train::rollout::StructuredOutputs;
///
/// let read = |text: &str| serde_json::from_str::<StructuredOutputs>(text);
/// let answer = read(r#"{"regex": "[0-9]{1,3}"}"#)?;
/// assert_eq!(answer, StructuredOutputs::Regex("[0-9]{1,3}".to_owned()));
/// assert!(read(r#"{"choice": ["yes", "no"]}"#)?.validate().is_ok());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StructuredOutputs {
    /// A match for a regular expression, in the engine's syntax.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A JSON value that a JSON schema accepts.
    Json(Map<String, Value>),
    /// A sentence of a context-free grammar in the engine's EBNF notation.
    Grammar(String),
}

impl StructuredOutputs {
    /// Checks the constraint, except for the syntax of its text, which the engine checks.
    ///
    /// # Errors
    ///
    /// Fails if the constraint or one of its choices is empty.
    pub fn validate(&self) -> Result<()> {
        let text = |name: &str, text: &str| {
            check(
                !text.is_empty(),
                name,
                "\"\"",
                "have at least one character",
            )
        };
        match self {
            Self::Regex(regex) => text("regex", regex)?,
            Self::Grammar(grammar) => text("grammar", grammar)?,
            Self::Json(schema) => {
                let must = "be a JSON schema with at least one key";
                check(!schema.is_empty(), "json", "{}", must)?;
            }
            Self::Choice(choices) => {
                let must = "have at least one text";
                check(!choices.is_empty(), "choice", "[]", must)?;
                for (at, choice) in choices.iter().enumerate() {
                    text(&format!("choice[{at}]"), choice)?;
                }
            }
        }
        Ok(())
    }
}
