//! Tests for advantages, rewards, selection and trajectories.

mod bad_input;
mod documentation;
mod estimator_invariances;
mod estimators;
mod gigpo;
mod group_advantage;
mod invariances;
mod masks;
mod metrics;
mod needs;
mod newer_estimators;
mod penalties;
mod shaping;

use candle_core::{Device, Tensor};

/// Compares two lists with a relative tolerance of 1e-6, for `prop_assert!`.
fn close(a: &[f64], b: &[f64]) -> bool {
    let near = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-6 * (1. + x.abs());
    a.len() == b.len() && a.iter().zip(b).all(near)
}

fn tensor(values: &[f32], device: &Device) -> Tensor {
    Tensor::new(values, device).expect("a tensor of floats")
}
