//! Tests downloads and the cache.

#![cfg(feature = "client")]

mod downloads;
