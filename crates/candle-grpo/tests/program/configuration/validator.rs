//! A validator of JSON schemas.

use std::borrow::Cow;

use boon::{Compiler, ErrorKind, SchemaIndex, Schemas, ValidationError};
use serde_json::Value;

/// A compiled schema.
pub(super) struct Validator {
    schemas: Schemas,
    index: SchemaIndex,
}

impl Validator {
    pub(super) fn new(schema: &Value) -> Self {
        let url = "mem:///schema.json";
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.add_resource(url, schema.clone()).unwrap();
        let index = compiler.compile(url, &mut schemas).unwrap();
        Self { schemas, index }
    }

    /// Returns why `value` does not fit; `None` if it does.
    pub(super) fn problem(&self, value: &Value) -> Option<String> {
        let error = self.schemas.validate(value, self.index).err()?;
        Some(format!("{error:#}"))
    }

    /// Returns the names of the keys in `value` that the schema does not have.
    pub(super) fn unknown_keys(&self, value: &Value) -> Vec<String> {
        let mut keys = Vec::new();
        if let Err(error) = self.schemas.validate(value, self.index) {
            add_unknown_keys(&error, &mut keys);
        }
        keys
    }
}

fn add_unknown_keys(error: &ValidationError<'_, '_>, keys: &mut Vec<String>) {
    if let ErrorKind::AdditionalProperties { got } = &error.kind {
        keys.extend(got.iter().cloned().map(Cow::into_owned));
    }
    for cause in &error.causes {
        add_unknown_keys(cause, keys);
    }
}
