//! JSON-RPC messages.

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_rewards::program::quoted;
use serde_json::{Map, Value, json};

/// A message from a server.
#[derive(Debug, PartialEq)]
pub(super) enum Message {
    /// The answer to the request with this id, which is null if the server could not read it.
    Response {
        id: Value,
        outcome: Result<Map<String, Value>, RpcError>,
    },
    Request {
        id: Value,
        method: String,
    },
    Notification,
}

/// An error in an answer.
#[derive(Debug, PartialEq)]
pub(super) struct RpcError {
    pub(super) code: i64,
    pub(super) message: String,
    pub(super) data: Value,
}

impl RpcError {
    pub(super) const METHOD_NOT_FOUND: i64 = -32601;
    pub(super) const INVALID_PARAMS: i64 = -32602;
    pub(super) const UNSUPPORTED_VERSION: i64 = -32022;
}

impl Message {
    pub(super) fn read(text: &str) -> Result<Self> {
        Self::parse(text).with_context(|| quoted(text))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut fields: Map<String, Value> =
            serde_json::from_str(text).context("must be a JSON object")?;
        let version = fields.remove("jsonrpc");
        ensure!(
            version.as_ref().and_then(Value::as_str) == Some("2.0"),
            "jsonrpc: {version:?}, must be \"2.0\""
        );
        let id = fields.remove("id");
        match (fields.remove("method"), id) {
            (Some(Value::String(method)), Some(id)) => Ok(Self::Request { id, method }),
            (Some(Value::String(_)), None) => Ok(Self::Notification),
            (Some(method), _) => bail!("method: {method}, must be a text"),
            (None, id) => {
                let outcome = outcome(&mut fields)?;
                let id = id.unwrap_or_default();
                Ok(Self::Response { id, outcome })
            }
        }
    }
}

fn outcome(fields: &mut Map<String, Value>) -> Result<Result<Map<String, Value>, RpcError>> {
    match (fields.remove("result"), fields.remove("error")) {
        (Some(Value::Object(result)), None) => Ok(Ok(result)),
        (Some(result), None) => bail!("result: {result}, must be an object"),
        (None, Some(mut error)) => {
            let code = error.get("code").and_then(Value::as_i64);
            let message = error.get("message").and_then(Value::as_str);
            Ok(Err(RpcError {
                code: code.context("error.code: must be an integer")?,
                message: message.context("error.message: must be a text")?.to_owned(),
                data: error.get_mut("data").map(Value::take).unwrap_or_default(),
            }))
        }
        _ => bail!("must have \"method\", \"result\" or \"error\""),
    }
}

pub(super) fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

pub(super) fn notification(method: &str) -> Value {
    json!({"jsonrpc": "2.0", "method": method})
}

/// Answers a server's request. Only `ping` is supported.
pub(super) fn answer(id: &Value, method: &str) -> Value {
    if method == "ping" {
        return json!({"jsonrpc": "2.0", "id": id, "result": {}});
    }
    let code = RpcError::METHOD_NOT_FOUND;
    let message = format!("{method:?} is not supported");
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
}
