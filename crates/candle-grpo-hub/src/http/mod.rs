//! Parts shared by all HTTP clients.

mod client;
mod retry;

pub use client::{JsonClient, Limits, RequestFailure, api_key};
pub(crate) use client::{message_of, redacted};
pub use retry::{MAX_PAUSE, backoff, is_transient, pause, retry_after};
pub use ureq::Body;
pub use ureq::http::{Method, Response, header};
