//! What the advantage functions and the shaping of rewards promise.

mod bad_input;
mod estimator_invariances;
mod estimators;
mod group_advantage;
mod invariances;
mod penalties;
mod shaping;

use candle_core::{DType, Device, Result, Tensor};

fn tensor(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).expect("a tensor of floats")
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (g - e).abs() <= tolerance,
            "[{i}] is {g}, expected {e}: {got:?}"
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
