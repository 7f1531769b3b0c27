//! Tests of `route.cu` against the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_kernels::route;
use candle_grpo_test_support::noise;

/// Rows per block.
const WARPS: usize = 4;

fn check<T: Kernels>(
    (n, experts, top_k): (usize, usize, usize),
    normalize: bool,
    tolerance: f32,
) -> Result<()> {
    // Many logits are equal.
    let numbers: Vec<T> = noise(n * experts, experts as u64)
        .iter()
        .map(|x| T::from_f64((8.0 * x).round()))
        .collect();
    let table = Tensor::from_slice(&numbers, (n, experts), &Device::Cpu)?;
    let (chosen, gates) = route(&table, top_k, normalize)?;
    let (chosen, gates) = (
        chosen.flatten_all()?.to_vec1::<u32>()?,
        gates.flatten_all()?.to_vec1::<f32>()?,
    );
    let logits = Buffer::new(&numbers);
    for order in ORDERS {
        let mut found = Buffer::filled(7u32, n * top_k);
        let mut found_gates = Buffer::filled(7f32, n * top_k);
        // SAFETY: the buffers have a row of this size for each of n rows.
        unsafe {
            T::route(
                Grid::new(n.div_ceil(WARPS) as u32, 32 * WARPS as u32),
                order,
                logits.as_ptr(),
                found.as_mut_ptr(),
                found_gates.as_mut_ptr(),
                n as u32,
                experts as u32,
                top_k as u32,
                u32::from(normalize),
            )
            .unwrap();
        }
        assert_eq!(found[..], chosen);
        for (found, expected) in found_gates.iter().zip(&gates) {
            assert!((found - expected).abs() < tolerance, "{found}, {expected}");
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f32) -> Result<()> {
    for sizes in [(1, 1, 1), (3, 5, 2), (4, 33, 33), (9, 128, 8), (2, 80, 70)] {
        check::<T>(sizes, true, tolerance)?;
        check::<T>(sizes, false, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_cpu_path: f32 1e-6, bf16 1e-6, f16 1e-6);
