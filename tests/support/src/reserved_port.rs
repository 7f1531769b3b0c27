//! A port for a server that a test starts.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Binds a socket without listening. Its options allow another one to be bound to the same port.
const RESERVE: &str = "
import socket, sys
reserved = socket.socket()
reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
reserved.bind(('', 0))
print(reserved.getsockname()[1], flush=True)
sys.stdin.read()
";

/// A port that no other program gets while this value lives. A program started by the test can
/// listen on it, if its socket has `SO_REUSEADDR` or `SO_REUSEPORT`, like those of servers.
///
/// The standard library cannot bind a socket without listening, so a Python process holds it.
pub struct ReservedPort {
    number: u16,
    python: Child,
}

impl ReservedPort {
    /// Reserves a port that is free on all addresses.
    ///
    /// # Panics
    ///
    /// If there is no free port, or no `python3`.
    pub fn new() -> Self {
        let mut python = Command::new("python3")
            .args(["-c", RESERVE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut line = String::new();
        if let Some(stdout) = python.stdout.take() {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        Self {
            number: line.trim().parse().expect("a free port"),
            python,
        }
    }

    /// The port number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

impl Default for ReservedPort {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for ReservedPort {
    fn drop(&mut self) {
        let _ = self.python.kill();
        let _ = self.python.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_server_can_listen_at_a_reserved_port() {
        let port = ReservedPort::new();
        let address = (Ipv4Addr::LOCALHOST, port.number());
        assert!(TcpStream::connect(address).is_err());
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port.number())).unwrap();
        TcpStream::connect(address).unwrap();
        drop(listener);
        // A machine may not have IPv6.
        if let Ok(listener) = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port.number())) {
            TcpStream::connect(address).unwrap();
            drop(listener);
        }
    }

    #[test]
    fn nobody_who_asks_for_a_free_port_receives_a_reserved_one() {
        let ports = [ReservedPort::new(), ReservedPort::new()];
        assert_ne!(ports[0].number(), ports[1].number());
        let free = |_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let others: Vec<TcpListener> = (0..100).map(free).collect();
        for other in others {
            let other = other.local_addr().unwrap().port();
            assert!(ports.iter().all(|port| port.number() != other));
        }
    }
}
