//! A server's answer in OpenAI's chat completions API.

use std::fmt;

use serde_json::Value;

use crate::ScoreFailure;
use candle_grpo_hub::http::RequestFailure;

/// Maximum answer length in bytes.
pub(super) const MAX_ANSWER: u64 = 8 << 20;

/// An answer.
#[derive(Debug, PartialEq)]
pub(super) struct Answer {
    /// The assistant's text; empty if there is none.
    pub(super) reply: String,
    /// Tokens in request and reply, if the server reports them.
    pub(super) tokens: Option<u64>,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    Request(RequestFailure),
    /// The body does not follow the API.
    Malformed(String),
}

impl Failure {
    /// Returns whether the same request may succeed later.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Request(failure) => failure.is_transient(),
            Self::Malformed(_) => true,
        }
    }

    pub(super) fn of_score(&self) -> ScoreFailure {
        match self {
            Self::Request(RequestFailure::Timeout(_)) => ScoreFailure::Timeout,
            _ => ScoreFailure::Crash,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(failure) => failure.fmt(f),
            Self::Malformed(message) => f.write_str(message),
        }
    }
}

/// Parses an answer's body.
pub(super) fn parse(body: &str) -> Result<Answer, Failure> {
    let malformed = |message: &str| Failure::Malformed(message.to_owned());
    let answer: Value = serde_json::from_str(body)
        .map_err(|_| malformed("the answer is not JSON, must be a chat completion"))?;
    let message = answer.pointer("/choices/0/message").ok_or_else(|| {
        malformed("choices[0].message: absent, the answer must be a chat completion")
    })?;
    let reply = match &message["content"] {
        Value::String(text) => text.clone(),
        // The reply ended while the model was still reasoning.
        Value::Null => String::new(),
        _ => return Err(malformed("choices[0].message.content: must be a text")),
    };
    let usage = &answer["usage"];
    let of = |name: &str| usage[name].as_u64();
    let sum = || Some(of("prompt_tokens")?.saturating_add(of("completion_tokens")?));
    Ok(Answer {
        reply,
        tokens: of("total_tokens").or_else(sum),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_total_or_the_sum() {
        let tokens = |usage: &str| {
            let body = format!(r#"{{"choices": [{{"message": {{}}}}], "usage": {usage}}}"#);
            parse(&body).unwrap().tokens
        };
        assert_eq!(tokens(r#"{"total_tokens": 7}"#), Some(7));
        assert_eq!(
            tokens(r#"{"prompt_tokens": 2, "completion_tokens": 3}"#),
            Some(5)
        );
        assert_eq!(tokens(r#"{"prompt_tokens": 2}"#), None);
        assert_eq!(tokens("null"), None);
    }

    #[test]
    fn another_answer_is_named() {
        for (body, words) in [
            ("<html>", "the answer is not JSON"),
            ("{}", "choices[0].message: absent"),
            (r#"{"choices": []}"#, "choices[0].message: absent"),
            (
                r#"{"choices": [{"message": {"content": 7}}]}"#,
                "content: must be a text",
            ),
        ] {
            let error = parse(body).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
