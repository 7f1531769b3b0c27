//! The server over real HTTP.

mod engine;
mod learning;
mod losses;
mod malformed;
mod recovery;
mod requests;
mod running;
mod sampling;
mod sessions;
mod steps;
