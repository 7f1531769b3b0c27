//! An HTTP client, and agents that run in this process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::{Value, json};

/// A reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) text: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("{self:?}"))
    }

    /// Data in server-sent events, without `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let lines = self.text.lines();
        let data = lines.filter_map(|line| line.strip_prefix("data: "));
        let data = data.filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

/// Opens a connection and sends a request.
pub(crate) fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    // The server may refuse the head and close.
    let _ = stream.write_all(body);
    stream
}

/// Reads the reply to a request.
pub(crate) fn receive(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    // A server that closes early may reset the connection after its reply.
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    Reply {
        status: status.unwrap_or(0),
        head: head.to_owned(),
        text: body.to_owned(),
    }
}

/// An episode, as seen by its agent.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pub(crate) address: SocketAddr,
    pub(crate) path: String,
    pub(crate) key: String,
    pub(crate) row: Value,
}

impl Client {
    /// Requests an episode.
    pub(crate) fn new(address: SocketAddr, run_key: &str) -> Self {
        let bearer = format!("Bearer {run_key}");
        let headers = [("Authorization", bearer.as_str())];
        let reply = loop {
            let reply = receive(send(address, "POST", "/episodes", &headers, b""));
            // There was none yet.
            if reply.status != 204 {
                break reply;
            }
        };
        assert_eq!(reply.status, 200, "{reply:?}");
        let episode = reply.json();
        let text = |name: &str| episode[name].as_str().unwrap().to_owned();
        let start = format!("http://{address}");
        let url = text("base_url");
        let path = url
            .strip_prefix(&start)
            .unwrap()
            .strip_suffix("/v1")
            .unwrap();
        Self {
            address,
            path: path.to_owned(),
            key: text("api_key"),
            row: episode["row"].clone(),
        }
    }

    pub(crate) fn begin(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> TcpStream {
        let bearer = format!("Bearer {}", self.key);
        let mut all = vec![("Authorization", bearer.as_str())];
        all.extend(headers);
        let path = format!("{}{path}", self.path);
        send(
            self.address,
            "POST",
            &path,
            &all,
            body.to_string().as_bytes(),
        )
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        receive(self.begin(path, &[], body))
    }

    /// Waits until the server has answered a request, and so has received those before it.
    pub(crate) fn wait_for_server(&self) {
        let bearer = format!("Bearer {}", self.key);
        let path = format!("{}/v1/models", self.path);
        let headers = [("Authorization", bearer.as_str())];
        let reply = receive(send(self.address, "GET", &path, &headers, b""));
        assert_eq!(reply.status, 200, "{reply:?}");
    }

    /// The policy's answer to a chat, or the error.
    pub(crate) fn chat(&self, body: Value) -> Value {
        self.post("/v1/chat/completions", &body).json()
    }

    /// Text in the answer to messages.
    pub(crate) fn say(&self, messages: &Value) -> String {
        let answer = self.chat(json!({"model": "any", "messages": messages}));
        let content = answer["choices"][0]["message"]["content"].as_str();
        content.unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    pub(crate) fn done(&self, reward: Value) {
        let reply = self.post("/reward", &json!({"value": reward, "done": true}));
        assert_eq!(reply.status, 200, "{reply:?}");
    }
}
