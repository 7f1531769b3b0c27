//! Keys of servers.

use std::{env, fmt};

use anyhow::Result;
use candle_grpo_core::validate::check;
use sha2::{Digest, Sha256};

use crate::secrets::hide_from_programs;

/// A key, compared in constant time.
#[derive(Clone)]
pub struct Key(String);

impl Key {
    /// Reads the key in an environment variable, which programs do not inherit.
    ///
    /// # Errors
    ///
    /// Fails if the variable has no key that fits into a header.
    pub fn from_variable(variable: &str) -> Result<Self> {
        hide_from_programs(variable);
        let key = env::var(variable).unwrap_or_default();
        let is_header = key.bytes().all(|byte| byte.is_ascii_graphic());
        let must = "be the name of an environment variable with visible ASCII characters";
        check(!key.is_empty() && is_header, "api_key_env", variable, must)?;
        Ok(Self(key))
    }

    /// Returns a key with 128 random bits.
    pub fn random() -> Self {
        Self(format!("grpo-{}", random_id()))
    }

    /// Returns the key.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns true if this is the key. It compares digests, which differ at positions that do not
    /// depend on where the keys differ.
    pub fn is(&self, given: &[u8]) -> bool {
        Sha256::digest(given) == Sha256::digest(self.0.as_bytes())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Returns 128 bits from the thread's secure generator, in hexadecimal digits.
pub fn random_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::hidden_variables;

    #[test]
    fn a_variable_without_a_key_is_named_and_not_inherited() {
        let name = "CANDLE_GRPO_TEST_WITHOUT_A_KEY";
        let error = Key::from_variable(name).unwrap_err().to_string();
        let start = format!("api_key_env: {name}, must be the name of an environment variable");
        assert!(error.starts_with(&start), "{error}");
        assert!(hidden_variables().iter().any(|hidden| *hidden == name));
    }
}
