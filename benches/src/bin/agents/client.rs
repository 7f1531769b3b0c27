//! An agent that is a thread: it calls tools until a turn has no call.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// A connection to the server.
pub(crate) struct Client {
    stream: BufReader<TcpStream>,
    address: SocketAddr,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
            address,
        })
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

    /// Returns the body of the response, or null if there is none.
    fn post(&mut self, path: &str, key: &str, body: &Value) -> Result<Value> {
        let (address, body) = (self.address, body.to_string());
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let mut length = 0;
        loop {
            let mut line = String::new();
            ensure!(
                self.stream.read_line(&mut line)? > 0,
                "the server has ended"
            );
            if line == "\r\n" {
                break;
            }
            let line = line.to_ascii_lowercase();
            if let Some(number) = line.strip_prefix("content-length:") {
                length = number.trim().parse()?;
            }
        }
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(match length {
            0 => Value::Null,
            _ => serde_json::from_slice(&bytes)?,
        })
    }
}
