//! Judge options.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_grpo_core::validate::{at_least_one, check, finite};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::score::{JudgeScore, ScoreReader};
use crate::OnFailure;
use candle_grpo_base::Template;
use candle_grpo_base::check_server_url;
use candle_grpo_base::within;

/// Placeholders in a prompt that are not columns.
pub(super) const PROMPT: &str = "prompt";
pub(super) const COMPLETION: &str = "completion";
/// Request fields that have options, or that a judge needs as they are.
const FIXED: [&str; 6] = [
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "stream",
    "n",
];
const MAX_INFLIGHT: usize = 4096;

/// Options for a language model that scores completions, see `JudgeReward`.
///
/// ```
/// use candle_grpo_rewards::JudgeConfig;
///
/// let config: JudgeConfig = serde_json::from_str(
///     r#"{"url": "http://localhost:8000/v1", "model": "judge",
///         "prompt": "Is {completion} a good answer to {prompt}?",
///         "score": {"words": {"yes": 1, "no": 0}}}"#,
/// )?;
/// config.validate()?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct JudgeConfig {
    /// Server URL up to `/v1`. The server must support OpenAI's chat completions API.
    pub url: String,
    /// Model name.
    pub model: String,
    /// Environment variable with the API key. Absent: no key is sent.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// Message to the model: a text with the placeholders `{completion}`, `{prompt}`, and the
    /// row's columns by name. To write a brace, double it.
    pub prompt: String,
    /// System message, a text without placeholders. Absent: none is sent.
    #[serde(default)]
    pub system: Option<String>,
    /// Where the score is in the reply.
    pub score: JudgeScore,
    /// Maximum reply length in tokens; null: the server's default.
    #[serde(default = "max_tokens")]
    pub max_tokens: Option<usize>,
    /// Temperature for replies; null: the server's default.
    #[serde(default = "temperature")]
    pub temperature: Option<f64>,
    /// Additional fields for each request, such as `top_p` or `response_format`.
    #[serde(default)]
    pub extra_body: Map<String, Value>,
    /// Treatment for a completion without an answer, or with a reply that has no score: `exclude`
    /// or `score`.
    #[serde(default = "exclude")]
    pub on_failure: OnFailure,
    /// Score for such a completion, if `on_failure` is `score`.
    #[serde(default)]
    pub failure_score: f32,
    /// Number of consecutive completions that may fail. One more ends the run.
    #[serde(default = "max_failures")]
    pub max_failures: usize,
    /// Maximum concurrent requests.
    #[serde(default = "max_inflight")]
    pub max_inflight: usize,
    /// Maximum retries for a failed request.
    #[serde(default = "max_retries")]
    pub max_retries: usize,
    /// Pause before the first retry, in seconds. It doubles with each retry, up to 60. The server
    /// can set another pause with `Retry-After`, also up to 60.
    #[serde(default = "retry_pause")]
    pub retry_pause: f64,
    /// Maximum time for one request, in seconds.
    #[serde(default = "request_timeout")]
    pub request_timeout: f64,
    /// Directory that caches replies, for any number of runs. A reply's key is the SHA-256 hash
    /// over the URL and the whole request. Absent: replies are not cached.
    #[serde(default)]
    pub cache: Option<PathBuf>,
    /// Maximum number of requests since the program started, including retries. Cached replies do
    /// not count.
    #[serde(default)]
    pub max_requests: Option<u64>,
    /// Number of request and reply tokens since the program started, after which no further
    /// request is sent. Requests in flight can exceed it.
    #[serde(default)]
    pub max_tokens_total: Option<u64>,
    /// Behavior once `max_requests` or `max_tokens_total` is reached: `stop` ends the run with
    /// a checkpoint, `exclude` leaves completions without a score.
    #[serde(default)]
    pub on_budget: OnBudget,
}

/// Behavior once a budget is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnBudget {
    /// The run ends with [`BudgetExhausted`] and a checkpoint.
    #[default]
    Stop,
    /// Completions have no score from this reward.
    Exclude,
}

/// The error for a reward that has used up its requests or tokens. A run saves its steps before it
/// ends with this error.
///
/// ```
/// use candle_grpo_rewards::BudgetExhausted;
///
/// let error = anyhow::Error::new(BudgetExhausted).context("step 3");
/// assert!(error.is::<BudgetExhausted>());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetExhausted;

impl fmt::Display for BudgetExhausted {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(
            "max_requests or max_tokens_total: reached, must be greater to score more completions",
        )
    }
}

impl Error for BudgetExhausted {}

fn max_tokens() -> Option<usize> {
    Some(512)
}

fn temperature() -> Option<f64> {
    Some(0.)
}

fn exclude() -> OnFailure {
    OnFailure::Exclude
}

fn max_failures() -> usize {
    32
}

fn max_inflight() -> usize {
    16
}

fn max_retries() -> usize {
    5
}

fn retry_pause() -> f64 {
    0.5
}

fn request_timeout() -> f64 {
    120.
}

impl JudgeConfig {
    /// Checks the options. Sends no request, and reads no environment variable: see
    /// [`Self::check_files`].
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn validate(&self) -> Result<()> {
        self.check_url()?;
        check(!self.model.is_empty(), "model", "\"\"", "be a name")?;
        let prompt = self.template()?;
        let must = "have the placeholder {completion}";
        let value = format_args!("{:?}", self.prompt);
        check(prompt.has_column(COMPLETION), "prompt", value, must)?;
        self.reader()?;
        if let Some(tokens) = self.max_tokens {
            at_least_one("max_tokens", tokens)?;
        }
        if let Some(temperature) = self.temperature {
            let valid = (0. ..=1e3).contains(&temperature);
            check(valid, "temperature", temperature, "be from 0 to 1000")?;
        }
        for field in FIXED {
            let free = !self.extra_body.contains_key(field);
            let must = match field {
                "max_tokens" | "temperature" | "model" => "be given as an option of the judge",
                _ => "be absent: the judge sets it",
            };
            check(free, &format!("extra_body.{field}"), "given", must)?;
        }
        finite("failure_score", self.failure_score.into())?;
        at_least_one("max_inflight", self.max_inflight)?;
        let valid = self.max_inflight <= MAX_INFLIGHT;
        let must = "be at most 4096: each takes a thread";
        check(valid, "max_inflight", self.max_inflight, must)?;
        let valid = (0. ..=60.).contains(&self.retry_pause);
        check(
            valid,
            "retry_pause",
            self.retry_pause,
            "be from 0 to 60 seconds",
        )?;
        let valid = self.request_timeout > 0. && self.request_timeout <= 1e6;
        let must = "be above 0 and at most 1e6 seconds";
        check(valid, "request_timeout", self.request_timeout, must)?;
        for (field, max) in [
            ("max_requests", self.max_requests),
            ("max_tokens_total", self.max_tokens_total),
        ] {
            check(max != Some(0), field, 0, "be at least 1")?;
        }
        let cache = self.cache.as_deref();
        let named = cache.is_none_or(|folder| !folder.as_os_str().is_empty());
        Ok(check(named, "cache", "\"\"", "be the path of a directory")?)
    }

    fn check_url(&self) -> Result<()> {
        check_server_url("url", &self.url)?;
        let value = format_args!("{:?}", self.url);
        let plain = !self.url.contains(['?', '#']);
        check(plain, "url", value, "have no query")?;
        // It would appear in messages, so this message omits it.
        let must = "have no name and password: give api_key_env";
        check(!self.url.contains('@'), "url", "with an @", must)?;
        let root = self.url.trim_end_matches('/');
        let is_root = !root.ends_with("/completions");
        let must = "end before /chat/completions";
        Ok(check(is_root, "url", value, must)?)
    }

    /// Checks that the key exists, if the judge needs one, and that the cache can be a directory.
    /// Sends no request.
    ///
    /// # Errors
    ///
    /// Fails if the environment variable is not set, or if the cache is not a directory.
    pub fn check_files(&self) -> Result<()> {
        #[cfg(feature = "judge")]
        if let Some(variable) = &self.api_key_env {
            candle_grpo_hub::http::api_key(variable)?;
        }
        if let Some(folder) = &self.cache {
            let valid = folder.is_dir() || !folder.exists();
            check(
                valid,
                "cache",
                folder.display(),
                "be a directory, or absent",
            )?;
        }
        Ok(())
    }

    /// Checks that a row has the prompt's columns.
    ///
    /// # Errors
    ///
    /// Fails if a column is absent or null.
    pub fn check_row(&self, columns: &Value) -> Result<()> {
        let texts = [(PROMPT, ""), (COMPLETION, "")];
        let filled = self.template()?.fill_with(&texts, columns);
        filled.map(drop).context("prompt")
    }

    pub(super) fn template(&self) -> Result<Template> {
        Template::parse("prompt", &self.prompt)
    }

    pub(super) fn reader(&self) -> Result<ScoreReader> {
        let reader = self.score.reader();
        reader.map_err(|error| within("score", error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn error(key: &str, value: Value) -> String {
        let mut options = json!({"url": "http://a/v1", "model": "m", "prompt": "{completion}?",
            "score": {"json": "score"}});
        options[key] = value;
        let config: JudgeConfig = serde_json::from_value(options).unwrap();
        config.validate().unwrap_err().to_string()
    }

    #[rstest]
    #[case("url", json!("localhost:8000"), "must begin with http:// or https://")]
    #[case("url", json!("http://a/v1?key=secret"), "must have no query")]
    #[case("url", json!("http://a/v1/chat/completions/"), "must end before /chat/completions")]
    #[case("model", json!(""), "must be a name")]
    #[case("prompt", json!("Is it good?"), "must have the placeholder {completion}")]
    #[case("prompt", json!("{completion"), "must close each brace")]
    #[case("score", json!({"regex": "a"}), "score.regex: \"a\", must have a group")]
    #[case("max_tokens", json!(0), "must be at least 1")]
    #[case("temperature", json!(-1), "must be from 0 to 1000")]
    #[case("extra_body", json!({"temperature": 1}), "must be given as an option")]
    #[case("extra_body", json!({"stream": true}), "extra_body.stream: given, must be absent")]
    #[case("max_inflight", json!(0), "must be at least 1")]
    #[case("max_inflight", json!(5000), "must be at most 4096")]
    #[case("request_timeout", json!(0), "must be above 0")]
    #[case("retry_pause", json!(61), "must be from 0 to 60")]
    #[case("max_requests", json!(0), "must be at least 1")]
    #[case("cache", json!(""), "must be the path of a directory")]
    fn each_option_is_checked(#[case] key: &str, #[case] value: Value, #[case] words: &str) {
        let error = error(key, value);
        assert!(error.starts_with(key) && error.contains(words), "{error}");
    }

    #[test]
    fn a_password_in_the_url_is_not_in_the_message() {
        let error = error("url", json!("http://me:secret@a/v1"));
        assert!(
            error.contains("api_key_env") && !error.contains("secret"),
            "{error}"
        );
    }

    #[test]
    fn columns_of_the_prompt_are_checked() {
        let options = json!({"url": "http://a/v1", "model": "m", "score": {"json": "score"},
            "prompt": "{completion} {prompt} {rubric}"});
        let config: JudgeConfig = serde_json::from_value(options).unwrap();
        config.check_row(&json!({"rubric": ["a"]})).unwrap();
        let error = config.check_row(&json!({"rubrik": 1})).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("column \"rubric\"") && error.ends_with("absent"),
            "{error}"
        );
    }
}
