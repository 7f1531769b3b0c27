//! Tests of the CUDA kernels on the CPU, and of the emulator.
#![allow(unsafe_code)]

mod adamw;
mod attention;
mod embedding;
mod gradient_norm;
mod host;
mod linear_log_prob;
mod log_prob;
mod rms_norm;
mod rope;
mod signatures;
mod swiglu;
mod token_rows;
