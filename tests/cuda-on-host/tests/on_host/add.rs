//! Tests of `add.cu` against the sum in f64.

use candle_core::Result;
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_test_support::noise;

/// Checks `n` elements, `before` elements after an aligned address.
fn check<T: Kernels>(n: usize, before: usize, tolerance: f64) {
    let buffer = |seed| -> Buffer<T> {
        let numbers = noise(before + n, seed);
        Buffer::new(&numbers.iter().map(|x| T::from_f64(*x)).collect::<Vec<_>>())
    };
    let (a, b) = (buffer(1), buffer(2));
    let per_block = 256 * 2 * 16 / size_of::<T>();
    let grid = Grid::new(n.div_ceil(per_block) as u32, 256);
    for order in ORDERS {
        let seven = T::from_f64(7.0);
        let mut sum = Buffer::filled(seven, before + n + 3);
        // SAFETY: the buffers have n elements after the first ones.
        unsafe {
            T::add_forward(
                grid,
                order,
                a.as_ptr().add(before),
                b.as_ptr().add(before),
                sum.as_mut_ptr().add(before),
                n as u64,
            )
            .unwrap();
        }
        for (i, sum) in sum.iter().enumerate() {
            let expected = match i.checked_sub(before) {
                Some(place) if place < n => a[i].to_f64() + b[i].to_f64(),
                _ => 7.0,
            };
            let error = (sum.to_f64() - expected).abs();
            assert!(error <= tolerance * expected.abs(), "{i} of {n}: {error}");
        }
    }
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for n in [1, 8, 513, 4096, 8192, 20_003] {
        check::<T>(n, 0, tolerance);
        check::<T>(n, 1, tolerance);
    }
    Ok(())
}

each_dtype!(equals_the_sum: f32 6e-8, bf16 4e-3, f16 5e-4);
