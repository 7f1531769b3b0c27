//! Tools on MCP servers ([Model Context Protocol](https://modelcontextprotocol.io)).

mod config;
#[cfg(feature = "mcp")]
mod http;
#[cfg(feature = "mcp")]
mod message;
#[cfg(feature = "mcp")]
mod output;
#[cfg(feature = "mcp")]
mod server;
#[cfg(feature = "mcp")]
mod session;

pub use config::{McpServerConfig, McpServers};
