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

/// The other tests run on every device there is; this one says which.
#[test]
#[cfg_attr(not(feature = "cuda"), ignore = "built without the feature cuda")]
fn cuda_is_present_or_skipped() -> std::io::Result<()> {
    candle_grpo_test_support::say_whether_on_cuda()
}
