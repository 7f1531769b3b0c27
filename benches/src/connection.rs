//! An HTTP connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Time after which a connection is opened again, before the server closes it.
const IDLE: Duration = Duration::from_secs(30);

/// A connection to a server on this machine.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
    address: SocketAddr,
    /// When the last response came.
    used: Instant,
}

impl Connection {
    /// Connects to a server.
    ///
    /// # Errors
    ///
    /// Fails if nothing listens at `address`.
    pub fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
            address,
            used: Instant::now(),
        })
    }

    /// Posts a body. Returns the status and the response's body, or null if there is none.
    ///
    /// # Errors
    ///
    /// Fails if the server ends, or its response is not JSON.
    pub fn post(&mut self, path: &str, key: &str, body: &Value) -> Result<(u16, Value)> {
        if self.used.elapsed() > IDLE {
            *self = Self::open(self.address)?;
        }
        let (address, body) = (self.address, body.to_string());
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let status = self.line()?;
        let status = status.split(' ').nth(1).context("a status line")?.parse()?;
        let mut length = 0;
        loop {
            let line = self.line()?;
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
        self.used = Instant::now();
        let body = match length {
            0 => Value::Null,
            _ => serde_json::from_slice(&bytes)?,
        };
        Ok((status, body))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let length = self.stream.read_line(&mut line)?;
        ensure!(length > 0, "the server has ended");
        Ok(line)
    }
}
