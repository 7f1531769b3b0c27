//! What the advantage functions and the shaping of rewards promise.

mod bad_input;
mod estimator_invariances;
mod estimators;
mod gigpo;
mod group_advantage;
mod invariances;
mod penalties;
mod shaping;

use candle_core::{Device, Tensor};

fn tensor(values: &[f32], device: &Device) -> Tensor {
    Tensor::new(values, device).expect("a tensor of floats")
}
