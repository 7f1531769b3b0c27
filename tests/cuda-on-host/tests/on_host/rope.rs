//! Tests of `rope.cu` against the formula in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, forward_and_backward};
use candle_grpo_kernels::rope;
use candle_grpo_test_support::{noise, numbers};

/// Returns the results of both passes for `heads` heads in each row of `x`. The gradient is the
/// inverse rotation.
fn both_passes<T: Kernels>(
    x: &[T],
    heads: usize,
    [cos, sin]: [&Tensor; 2],
) -> Result<Vec<Expected>> {
    let (rows, pairs) = cos.dims2()?;
    let table = Tensor::from_slice(x, (rows, heads * 2 * pairs), &Device::Cpu)?;
    let on_cpu = forward_and_backward(std::slice::from_ref(&table), &table, |inputs| {
        rope(&inputs[0], cos, sin)
    })?;
    let (cos, sin) = (numbers(cos)?, numbers(sin)?);
    let exact = [1.0, -1.0].map(|sign| {
        let mut exact = vec![0.0; x.len()];
        let from = x.chunks(2 * pairs);
        for (head, (from, to)) in from.zip(exact.chunks_mut(2 * pairs)).enumerate() {
            for i in 0..pairs {
                let angle = head / heads * pairs + i;
                let (a, b) = (from[i].to_f64(), from[pairs + i].to_f64());
                let (c, s) = (cos[angle], sign * sin[angle]);
                to[i] = a * c - b * s;
                to[pairs + i] = b * c + a * s;
            }
        }
        exact
    });
    Ok(Expected::all(exact, on_cpu))
}

/// Checks `rows` of these heads of queries and of keys, `2 * pairs` elements each, followed by
/// `behind` others in memory.
fn check<T: Kernels>(
    rows: usize,
    heads: [usize; 2],
    pairs: usize,
    behind: usize,
    tolerance: f64,
) -> Result<()> {
    let angles: Vec<f64> = noise(rows * pairs, 2).iter().map(|a| 9.0 * a).collect();
    let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
    let table = |x: &[f32]| Tensor::from_slice(x, (rows, pairs), &Device::Cpu);
    let tables = [table(&cos)?, table(&sin)?];
    let x = heads.map(|heads| -> Vec<T> {
        let x = noise(rows * heads * 2 * pairs, heads as u64);
        x.iter().map(|x| T::from_f64(*x)).collect()
    });
    let expected = [
        both_passes(&x[0], heads[0], tables.each_ref())?,
        both_passes(&x[1], heads[1], tables.each_ref())?,
    ];
    let [query, key] = x.map(|mut x| {
        x.resize(x.len() + behind, T::from_f64(f64::NAN));
        Buffer::new(&x)
    });
    let (cos, sin) = (Buffer::new(&cos), Buffer::new(&sin));

    for (pass, sign) in [1.0f32, -1.0].into_iter().enumerate() {
        for (threads, per_block) in [(4, 64), (1, 256), (6, 2), (32, 8)] {
            let all_heads = rows * (heads[0] + heads[1]);
            let grid = Grid {
                grid: [all_heads.div_ceil(per_block) as u32, 1, 1],
                block: [threads, per_block as u32, 1],
                shared_bytes: 0,
            };
            for order in ORDERS {
                let seven = T::from_f64(7.0);
                let mut rotated_query = Buffer::filled(seven, query.len());
                let mut rotated_key = Buffer::filled(seven, key.len());
                // SAFETY: queries and keys have rows * heads * 2 * pairs elements, cos and sin
                // rows * pairs.
                unsafe {
                    T::rope(
                        grid,
                        order,
                        query.as_ptr(),
                        key.as_ptr(),
                        cos.as_ptr(),
                        sin.as_ptr(),
                        rotated_query.as_mut_ptr(),
                        rotated_key.as_mut_ptr(),
                        rows as u32,
                        heads[0] as u32,
                        heads[1] as u32,
                        pairs as i32,
                        sign,
                    )
                }
                .unwrap();
                for (rotated, expected) in [rotated_query, rotated_key].iter().zip(&expected) {
                    let (found, rest) = rotated.split_at(rotated.len() - behind);
                    let found: Vec<f64> = found.iter().map(|y| y.to_f64()).collect();
                    expected[pass].assert_close(&found, tolerance);
                    assert!(rest.iter().all(|y| *y == seven));
                }
            }
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for (rows, heads, pairs) in [
        (1, [1, 1], 1),
        (5, [3, 1], 32),
        (7, [2, 2], 8),
        (3, [9, 3], 5),
        (2, [3, 2], 48),
        // More pairs than 32 threads load at a time.
        (2, [2, 1], 264),
    ] {
        check::<T>(rows, heads, pairs, 0, tolerance)?;
        check::<T>(rows, heads, pairs, 1, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_formula_and_the_cpu_path: f32 1e-6, bf16 4e-3, f16 6e-4);
