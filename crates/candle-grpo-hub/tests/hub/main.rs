//! Tests downloads, the cache and uploads.

#![cfg(feature = "client")]

mod downloads;
mod uploads;
