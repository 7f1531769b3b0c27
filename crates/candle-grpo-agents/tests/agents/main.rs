//! Agents over real HTTP, with scripted and random answers from the policy.

mod client;
mod dialects;
mod drawer;
mod endpoint;
mod engines;
mod faults;
mod fuzz;
mod processes;
mod real_clients;
mod repeats;
mod roles;
mod same_bits;
mod transcripts;
mod verifiers;
mod workers;
