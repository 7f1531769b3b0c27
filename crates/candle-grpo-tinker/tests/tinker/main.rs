//! The server over real HTTP.

mod learning;
mod losses;
mod malformed;
mod recovery;
mod requests;
mod running;
mod sampling;
mod sessions;
mod steps;
