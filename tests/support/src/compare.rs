//! Tensors as numbers, numbers against numbers, and errors as text.

use candle_core::{DType, Device, Result, Tensor};

/// The entries of a tensor of any shape, dtype and device.
pub fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    // There first: on CUDA Candle converts no empty tensors.
    let tensor = tensor.to_device(&Device::Cpu)?;
    tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

/// `tolerance` is absolute up to 1 and relative above.
///
/// # Panics
///
/// If the lengths differ, or an entry is further off than that.
#[track_caller]
pub fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!(
            (g - e).abs() <= tolerance * e.abs().max(1.),
            "[{i}] is {g}, expected {e}: {got:?} against {expected:?}"
        );
    }
}

/// The first line of an error: with a backtrace it has more.
///
/// # Panics
///
/// If there is none.
#[track_caller]
pub fn message<T>(result: Result<T>) -> String {
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
