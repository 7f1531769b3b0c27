//! Typed fields in JSON objects.

use serde_json::{Map, Value};

use crate::request::Refusal;

/// An object, with its name for error messages.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Path to the object, empty for the body.
    path: &'a str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, path: &'a str) -> Result<Self, Refusal> {
        match value {
            Value::Object(object) => Ok(Self { object, path }),
            other => {
                let name = if path.is_empty() { "body" } else { path };
                Err(Refusal::invalid(name, other, "be a JSON object"))
            }
        }
    }

    /// Path to a field.
    pub(super) fn path(&self, name: &str) -> String {
        match self.path {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }

    /// Returns a field, unless it is absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn invalid(&self, name: &str, must: &str) -> Refusal {
        let value = self.object.get(name).cloned();
        let value = value.map_or("absent".to_owned(), |value| value.to_string());
        Refusal::invalid(&self.path(name), value, must)
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, Refusal> {
        self.typed(name, Value::as_str, "be a text")
    }

    /// Returns a required text field.
    pub(super) fn required_text(&self, name: &str) -> Result<&'a str, Refusal> {
        let text = self.text(name)?;
        text.ok_or_else(|| self.invalid(name, "be a text"))
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, Refusal> {
        self.typed(name, Value::as_array, "be a list")
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool, Refusal> {
        let flag = self.typed(name, Value::as_bool, "be true or false")?;
        Ok(flag.unwrap_or(false))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, Refusal> {
        self.typed(name, Value::as_f64, "be a number")
    }

    /// Returns a count, which must be at least 1.
    pub(super) fn count(&self, name: &str) -> Result<Option<usize>, Refusal> {
        let read = |value: &Value| {
            let count = value.as_u64().filter(|&count| count > 0)?;
            Some(usize::try_from(count).unwrap_or(usize::MAX))
        };
        self.typed(name, read, "be a whole number of at least 1")
    }

    fn typed<T>(
        &self,
        name: &str,
        read: impl Fn(&'a Value) -> Option<T>,
        must: &str,
    ) -> Result<Option<T>, Refusal> {
        let value = self.get(name);
        let read = |value| read(value).ok_or_else(|| self.invalid(name, must));
        value.map(read).transpose()
    }

    /// Stop strings: one text or a list.
    pub(super) fn stop_strings(&self, name: &str) -> Result<Vec<String>, Refusal> {
        const MOST: usize = 16;
        let must = "be a text that is not empty, or a list of at most 16 of them";
        let texts: Option<Vec<String>> = match self.get(name) {
            None => Some(Vec::new()),
            Some(Value::String(text)) => Some(vec![text.clone()]),
            Some(Value::Array(all)) => {
                let all = all.iter();
                all.map(|text| text.as_str().map(str::to_owned)).collect()
            }
            Some(_) => None,
        };
        let valid =
            |texts: &Vec<String>| texts.len() <= MOST && !texts.iter().any(String::is_empty);
        texts.filter(valid).ok_or_else(|| self.invalid(name, must))
    }

    /// Returns the numbers that are present among these fields.
    pub(super) fn numbers(
        &self,
        names: &[&'static str],
    ) -> Result<Vec<(&'static str, f64)>, Refusal> {
        let mut numbers = Vec::new();
        for &name in names {
            numbers.extend(self.number(name)?.map(|number| (name, number)));
        }
        Ok(numbers)
    }

    /// Refuses a field that has another value than `allowed`, because it would have no effect.
    /// Absent and null are always allowed.
    pub(super) fn refuse(&self, name: &str, allowed: &[Value], must: &str) -> Result<(), Refusal> {
        match self.get(name) {
            Some(value) if !allowed.contains(value) => Err(self.invalid(name, must)),
            _ => Ok(()),
        }
    }
}

/// Joins a message's text: one string, or parts with these types, each with a `text`.
pub(super) fn content_text(value: &Value, types: &[&str], path: &str) -> Result<String, Refusal> {
    let parts = match value {
        Value::Null => return Ok(String::new()),
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => {
            return Err(Refusal::invalid(
                path,
                other,
                "be a text or a list of parts",
            ));
        }
    };
    let mut text = String::new();
    for (at, part) in parts.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let fields = Fields::new(part, &path)?;
        let kind = fields.required_text("type")?;
        if !types.contains(&kind) {
            let must = format!("be one of {}: only text is supported", types.join(", "));
            return Err(fields.invalid("type", &must));
        }
        text += fields.required_text(if kind == "refusal" { "refusal" } else { "text" })?;
    }
    Ok(text)
}
