//! Training of agents: programs of their own that call the policy over HTTP.
//!
//! [`Agents`] runs an HTTP server with the APIs of OpenAI and Anthropic, and plays one episode for
//! each trajectory. Each episode has a base URL and a key of its own. Its agent is a process that
//! the server starts, or a program that asks for episodes. Whatever draws completions is behind the
//! server: the model in this process, or inference servers.
//!
//! The server keeps the tokens that the policy drew, with log-probs and versions of the weights. A
//! request whose messages extend an earlier request and its answer continues the recorded tokens:
//! only the messages after the answer are encoded. Any other request begins a row of its own. Each
//! drawn token trains in exactly one row.
//!
//! | path | method |
//! | --- | --- |
//! | `/s/{id}/v1/chat/completions`, `/s/{id}/v1/completions`, `/s/{id}/v1/responses` | POST, as OpenAI has them, also as streams |
//! | `/s/{id}/v1/messages` | POST, as Anthropic has it, also as a stream |
//! | `/s/{id}/v1/models` | GET |
//! | `/s/{id}/reward` | POST `{"value": number or null, "done": bool, "metrics": {...}}` |
//! | `/episodes` | POST, with the key of the run: an episode for an agent that starts by itself |

#![warn(clippy::missing_errors_doc)]

mod agents;
mod bell;
mod dialect;
mod endpoint;
mod episode;
mod game;
mod key;
mod message;
mod request;
mod transcript;

pub use agents::Agents;

/// Runs the code of the README as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
