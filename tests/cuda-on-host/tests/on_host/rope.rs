//! Tests of `rope.cu` against the formula in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, forward_and_backward};
use candle_grpo_kernels::rope;
use candle_grpo_test_support::noise;

/// Checks `rows` of `heads` heads of `2 * pairs` elements, followed by `behind` others in memory.
fn check<T: Kernels>(
    rows: usize,
    heads: usize,
    pairs: usize,
    behind: usize,
    tolerance: f64,
) -> Result<()> {
    let n = rows * heads * 2 * pairs;
    let mut x: Vec<T> = noise(n, 1).iter().map(|x| T::from_f64(*x)).collect();
    let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    let table = Tensor::from_slice(&x, (rows, heads * 2 * pairs), &Device::Cpu)?;
    x.resize(n + behind, T::from_f64(f64::NAN));
    let x = Buffer::new(&x);
    let angles = noise(rows * pairs, 2);
    let cos: Vec<f32> = angles.iter().map(|a| (9.0 * a).cos() as f32).collect();
    let sin: Vec<f32> = angles.iter().map(|a| (9.0 * a).sin() as f32).collect();
    let angles_table = |x: &[f32]| Tensor::from_slice(x, (rows, pairs), &Device::Cpu);
    let (cos_table, sin_table) = (angles_table(&cos)?, angles_table(&sin)?);
    // The gradient is the inverse rotation.
    let on_cpu = forward_and_backward(std::slice::from_ref(&table), &table, |inputs| {
        rope(&inputs[0], &cos_table, &sin_table)
    })?;
    let (cos, sin) = (Buffer::new(&cos), Buffer::new(&sin));

    for (sign, on_cpu) in [1.0f32, -1.0].into_iter().zip(on_cpu) {
        let mut exact = vec![0.0; n];
        for (head, (from, to)) in wide
            .chunks(2 * pairs)
            .zip(exact.chunks_mut(2 * pairs))
            .enumerate()
        {
            for i in 0..pairs {
                let angle = head / heads * pairs + i;
                let (c, s) = (f64::from(cos[angle]), f64::from(sign * sin[angle]));
                to[i] = from[i] * c - from[pairs + i] * s;
                to[pairs + i] = from[pairs + i] * c + from[i] * s;
            }
        }
        let expected = Expected { exact, on_cpu };
        for (threads, per_block) in [(4, 64), (1, 256), (6, 2), (32, 8)] {
            let grid = Grid {
                grid: [(rows * heads).div_ceil(per_block) as u32, 1, 1],
                block: [threads, per_block as u32, 1],
                shared_bytes: 0,
            };
            for order in ORDERS {
                let mut y = Buffer::filled(T::from_f64(7.0), n + behind);
                // SAFETY: x and y have rows * heads * 2 * pairs elements, cos and sin rows * pairs.
                unsafe {
                    T::rope(
                        grid,
                        order,
                        x.as_ptr(),
                        cos.as_ptr(),
                        sin.as_ptr(),
                        y.as_mut_ptr(),
                        (rows * heads) as u32,
                        heads as u32,
                        pairs as i32,
                        sign,
                    )
                }
                .unwrap();
                let found: Vec<f64> = y.iter().map(|y| y.to_f64()).collect();
                expected.assert_close(&found[..n], tolerance);
                assert!(found[n..].iter().all(|y| *y == 7.0));
            }
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for (rows, heads, pairs) in [(1, 1, 1), (5, 3, 32), (7, 2, 8), (3, 9, 5), (2, 3, 48)] {
        check::<T>(rows, heads, pairs, 0, tolerance)?;
        check::<T>(rows, heads, pairs, 1, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_formula_and_the_cpu_path: f32 1e-6, bf16 4e-3, f16 6e-4);
