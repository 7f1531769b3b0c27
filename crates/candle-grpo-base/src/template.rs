//! Text with placeholders for columns.

use anyhow::{Result, bail};
use candle_grpo_core::Invalid;
use serde_json::Value;

use crate::column::find;

/// Text in which `{column}` stands for a row's column. `{column.key}` stands for a key in the
/// column's object, or for a list entry, as in `{choices.0}`. Write `{{` and `}}` for braces.
///
/// ```
/// use candle_grpo_base::Template;
/// use serde_json::json;
///
/// let template = Template::new("What is {a} + {b}?")?;
/// assert_eq!(template.fill(&json!({"a": 2, "b": "three"}))?, "What is 2 + three?");
/// let error = template.fill(&json!({"a": 2})).unwrap_err().to_string();
/// assert_eq!(error, "column \"b\" of \"What is {a} + {b}?\": absent");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq)]
enum Part {
    Text(String),
    Column(String),
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    ///
    /// If a brace is not closed or was never opened.
    pub fn new(text: &str) -> Result<Self> {
        Self::parse("template", text)
    }

    /// Parses the template in the option `field`.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
    pub fn parse(field: &str, text: &str) -> Result<Self> {
        let wrong = |must: &str| Err(Invalid::new(field, format_args!("{text:?}"), must).into());
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                '{' | '}' if rest.peek() == Some(&c) => {
                    rest.next();
                    plain.push(c);
                }
                '{' => {
                    let mut name = String::new();
                    loop {
                        match rest.next() {
                            Some('}') => break,
                            Some(c) if c != '{' => name.push(c),
                            _ => {
                                return wrong("close each brace (two are one brace of the text)");
                            }
                        }
                    }
                    if name.is_empty() {
                        return wrong("contain a column name in each pair of braces");
                    }
                    parts.push(Part::Text(std::mem::take(&mut plain)));
                    parts.push(Part::Column(name));
                }
                '}' => return wrong("open each brace (two are one brace of the text)"),
                c => plain.push(c),
            }
        }
        parts.push(Part::Text(plain));
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }

    /// Returns whether the text has a placeholder for a column.
    pub fn has_column(&self, name: &str) -> bool {
        let is_column = |part: &Part| matches!(part, Part::Column(column) if column == name);
        self.parts.iter().any(is_column)
    }

    /// Fills in a row's columns.
    ///
    /// # Errors
    ///
    /// If a column is absent or null.
    pub fn fill(&self, columns: &Value) -> Result<String> {
        self.fill_with(&[], columns)
    }

    /// Fills in `texts` by name, and a row's columns for all other names. Braces in inserted text
    /// stay as they are.
    ///
    /// # Errors
    ///
    /// Same as [`Self::fill`].
    pub fn fill_with(&self, texts: &[(&str, &str)], columns: &Value) -> Result<String> {
        let mut filled = String::new();
        for part in &self.parts {
            match part {
                Part::Text(text) => filled.push_str(text),
                Part::Column(name) => match find(columns, name) {
                    _ if let Some((_, text)) = texts.iter().find(|(text, _)| text == name) => {
                        filled.push_str(text);
                    }
                    Some(Value::String(text)) => filled.push_str(text),
                    Some(Value::Null) => bail!("column {name:?} of {:?}: null", self.text),
                    Some(value) => filled.push_str(&value.to_string()),
                    None => bail!("column {name:?} of {:?}: absent", self.text),
                },
            }
        }
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn single_braces_are_columns_and_double_ones_are_text() {
        let fill = |text: &str| {
            Template::new(text)
                .unwrap()
                .fill(&json!({"a": 1, "b c": [2]}))
        };
        assert_eq!(fill("{a}{b c}{{a}}").unwrap(), "1[2]{a}");
        assert_eq!(fill("").unwrap(), "");
        let nested = json!({"a": {"b": {"c": 7}}, "a.d": 8});
        let filled = Template::new("{a.b.c} {a.d}").unwrap().fill(&nested);
        assert_eq!(filled.unwrap(), "7 8");
        let error = Template::new("{a}").unwrap().fill(&json!({"a": null}));
        assert_eq!(
            error.unwrap_err().to_string(),
            "column \"a\" of \"{a}\": null"
        );
        for text in ["{a", "a}", "{}", "{a{b}}"] {
            assert!(Template::new(text).is_err(), "{text:?}");
        }
    }
}
