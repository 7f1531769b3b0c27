//! Clients of inference servers, against servers in this process.

mod fake_server;
mod fake_sglang;
mod fake_vllm;
mod fakes;
mod served_policy;
