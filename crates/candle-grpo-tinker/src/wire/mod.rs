//! Tinker's messages: JSON and protobuf.

pub(crate) mod answer;
mod datum;
pub(crate) mod proto;
pub(crate) mod request;

pub(crate) use datum::Datum;
