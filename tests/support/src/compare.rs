//! Compares tensors, numbers and error messages.

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};

/// Returns a tensor's entries, for any shape, dtype and device. Synchronizes with the device.
///
/// # Errors
///
/// Fails if the device cannot copy the tensor.
pub fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    // The copy comes first, because Candle cannot convert empty tensors on CUDA.
    let tensor = tensor.to_device(&Device::Cpu)?;
    tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

/// Returns the entries in the gradient for `variable`.
///
/// # Errors
///
/// Fails if the device cannot copy the gradient.
///
/// # Panics
///
/// Panics if the variable has no gradient.
#[track_caller]
pub fn gradient(gradients: &GradStore, variable: &Var) -> Result<Vec<f64>> {
    match gradients.get(variable) {
        Some(gradient) => numbers(gradient),
        None => panic!("a variable of shape {:?} has no gradient", variable.dims()),
    }
}

/// Compares two lists of numbers. `tolerance` is absolute for expected numbers up to 1, and
/// relative above.
///
/// # Panics
///
/// Panics if the lengths differ or if one entry differs by more than `tolerance`.
#[track_caller]
pub fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let near = i.saturating_sub(4)..(i + 5).min(got.len());
        assert!(
            (g - e).abs() <= tolerance * e.abs().max(1.),
            "[{i}] of {} is {g}, expected {e}; {near:?}: {:?} against {:?}",
            got.len(),
            &got[near.clone()],
            &expected[near.clone()]
        );
    }
}

/// Returns an error's first line, without its backtrace.
///
/// # Panics
///
/// Panics if the result is not an error.
#[track_caller]
pub fn message<T, E: std::fmt::Display>(result: std::result::Result<T, E>) -> String {
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
