//! The parts that all clients of HTTP servers share.

#[cfg(feature = "engines")]
mod client;
mod retry;

#[cfg(feature = "engines")]
pub(crate) use client::{JsonClient, Limits, RequestFailure, api_key};
pub(crate) use retry::{MAX_PAUSE, backoff, is_transient, pause, retry_after};
