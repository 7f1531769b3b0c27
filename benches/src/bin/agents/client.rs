//! An agent that is a thread: it calls tools until a turn has no call.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use candle_grpo_bench::Connection;
use serde_json::{Value, json};

/// An agent with its connection.
pub(crate) struct Client(Connection);

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Result<Self> {
        Connection::open(address).map(Self)
    }

    /// Plays episodes until the server ends.
    pub(crate) fn play(mut self, key: &str) -> Result<()> {
        loop {
            let episode = self.post("/episodes", key, &Value::Null)?;
            if !episode.is_null() {
                self.episode(&episode)?;
            }
        }
    }

    fn episode(&mut self, episode: &Value) -> Result<()> {
        let text = |name: &str| episode[name].as_str().context("a text");
        let (id, key, row) = (text("id")?, text("api_key")?, &episode["row"]);
        let mut messages = vec![json!({"role": "user", "content": row["question"]})];
        loop {
            let body = json!({"messages": messages, "tools": row["tools"]});
            let answer = self.post(&format!("/s/{id}/v1/chat/completions"), key, &body)?;
            let message = &answer["choices"][0]["message"];
            let calls = message["tool_calls"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            if calls.is_empty() {
                break;
            }
            messages.push(message.clone());
            for call in calls {
                let arguments = call["function"]["arguments"].as_str().unwrap_or("null");
                let arguments: Value = serde_json::from_str(arguments)?;
                let text = arguments["text"].as_str().unwrap_or_default();
                let output = text.chars().count().to_string();
                messages
                    .push(json!({"role": "tool", "tool_call_id": call["id"], "content": output}));
            }
        }
        self.post(&format!("/s/{id}/reward"), key, &json!({"done": true}))?;
        Ok(())
    }

    fn post(&mut self, path: &str, key: &str, body: &Value) -> Result<Value> {
        let (_, body) = self.0.post(path, key, body)?;
        Ok(body)
    }
}
