//! What the policy losses promise.

mod bad_input;
mod fixture;
mod gradients;
mod log_prob;
mod masks;
mod micro_batches;
mod presets;
mod published_values;
mod recipes;
mod step_wide;

use candle_core::{DType, Result, Tensor};

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (g - e).abs() <= tolerance * (1. + e.abs()),
            "[{i}] is {g}, expected {e}: {got:?} against {expected:?}"
        );
    }
}

/// The first line of an error: with a backtrace it has more.
#[track_caller]
fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("an error was expected"),
        Err(error) => error
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned(),
    }
}
