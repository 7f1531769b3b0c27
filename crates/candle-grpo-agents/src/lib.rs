//! Samples episodes from your own agents: programs that call the policy over HTTP.
//!
//! Choose this crate if your agent already exists, in any language, and uses an OpenAI or Anthropic
//! client or plain requests. If you write the tools in Rust, start with
//! [`Environments`](candle_grpo_train::environment::Environments), which needs no server.
//!
//! [`Agents`] runs an HTTP server with the OpenAI and Anthropic APIs, and plays one episode per
//! trajectory. Each episode has its own base URL and key. Its agent is either a process that the
//! server starts, or a program that requests episodes. Behind the server, the model in this process
//! samples, or inference servers do.
//!
//! The server records the sampled tokens with their log-probs and weight versions. If a request's
//! messages extend an earlier request and its answer, the recorded tokens continue: only the
//! messages after the answer are encoded. Any other request begins its own row. Each sampled token
//! is a response token in exactly one row.
//!
//! A [`Sampler`](candle_grpo_train::Sampler) samples with [`Agents`], and a
//! [`Trainer`](candle_grpo_train::Trainer) trains on their episodes: pass them as
//! [`TrainerParts::environments`](candle_grpo_train::TrainerParts::environments).
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
mod message;
mod process;
mod request;
mod transcript;
mod workers;

pub use agents::Agents;

/// Runs the README's code as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
