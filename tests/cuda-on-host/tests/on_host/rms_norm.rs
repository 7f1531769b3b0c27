//! Tests of `rms_norm.cu` against the formula in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, forward_and_backward};
use candle_grpo_kernels::{RmsNormOptions, rms_norm};
use candle_grpo_test_support::noise;

const EPSILON: f64 = 1e-3;

/// `n` rows of `width`, followed by `behind` elements in memory, and the shape of the launch:
/// threads of a row, rows of a block, blocks.
#[derive(Debug, Clone, Copy)]
struct Case {
    n: usize,
    width: usize,
    behind: usize,
    threads: u32,
    rows: u32,
    blocks: u32,
    is_offset: bool,
}

/// Returns y, dx and dweight.
fn formula(x: &[f64], factors: &[f64], gradient: &[f64]) -> [Vec<f64>; 3] {
    let width = factors.len();
    let (mut y, mut dx, mut dweight) = (vec![], vec![], vec![0.0; width]);
    for (x, gradient) in x.chunks(width).zip(gradient.chunks(width)) {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + EPSILON).sqrt();
        let inner: f64 = (0..width).map(|i| gradient[i] * factors[i] * x[i]).sum();
        for i in 0..width {
            y.push(x[i] * scale * factors[i]);
            dweight[i] += gradient[i] * x[i] * scale;
            dx.push(scale * gradient[i] * factors[i] - x[i] * scale.powi(3) * inner / width as f64);
        }
    }
    [y, dx, dweight]
}

fn check<T: Kernels>(case: Case, tolerance: f64) -> Result<()> {
    let Case { n, width, .. } = case;
    let numbers_of = |len: usize, seed| -> Vec<T> {
        noise(len, seed)
            .iter()
            .map(|x| T::from_f64(2.0 * x))
            .collect()
    };
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f64()).collect() };
    let (x, weight, gradient) = (
        numbers_of(n * width, 1),
        numbers_of(width, 2),
        numbers_of(n * width, 3),
    );
    let table = |x: &[T]| Tensor::from_slice(x, (n, width), &Device::Cpu);
    let inputs = [
        table(&x)?,
        Tensor::from_slice(&weight, width, &Device::Cpu)?,
    ];
    let options = RmsNormOptions {
        epsilon: EPSILON,
        is_offset: case.is_offset,
    };
    let offset = f64::from(u8::from(case.is_offset));
    let factors: Vec<f64> = wide(&weight).iter().map(|w| offset + w).collect();
    let expected = Expected::all(
        formula(&wide(&x), &factors, &wide(&gradient)),
        forward_and_backward(&inputs, &table(&gradient)?, |inputs| {
            rms_norm(&inputs[0], &inputs[1], options)
        })?,
    );
    let with_behind = |x: &[T]| {
        let mut x = x.to_vec();
        x.resize(x.len() + case.behind, T::from_f64(f64::NAN));
        Buffer::new(&x)
    };
    let (x, weight, gradient) = (
        with_behind(&x),
        with_behind(&weight),
        with_behind(&gradient),
    );
    let grid = |blocks, shared_bytes| Grid {
        grid: [blocks, 1, 1],
        block: [case.threads, case.rows, 1],
        shared_bytes,
    };
    let (n64, width32, epsilon) = (n as u64, width as i32, EPSILON as f32);

    for order in ORDERS {
        let seven = T::from_f64(7.0);
        let mut y = Buffer::filled(seven, n * width + case.behind);
        let mut dx = Buffer::filled(seven, n * width + case.behind);
        let mut partial = Buffer::filled(f32::NAN, case.blocks as usize * width);
        let mut dweight = Buffer::filled(seven, width);
        // SAFETY: the buffers have the sizes of n, width and the number of blocks.
        unsafe {
            T::rms_norm_forward(
                grid(case.blocks, 0),
                order,
                x.as_ptr(),
                weight.as_ptr(),
                y.as_mut_ptr(),
                n64,
                width32,
                epsilon,
                f32::from(u8::from(case.is_offset)),
            )
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
            T::rms_norm_backward(
                grid(case.blocks, 4 * width * case.rows as usize),
                order,
                x.as_ptr(),
                weight.as_ptr(),
                gradient.as_ptr(),
                dx.as_mut_ptr(),
                partial.as_mut_ptr(),
                n64,
                width32,
                epsilon,
                f32::from(u8::from(case.is_offset)),
            )
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
            let sums = Grid {
                grid: [width.div_ceil(32) as u32, 1, 1],
                block: [32, 32, 1],
                shared_bytes: 0,
            };
            T::column_sums(
                sums,
                order,
                partial.as_ptr(),
                dweight.as_mut_ptr(),
                case.blocks as i32,
                0,
                width32,
            )
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        }
        for (found, expected) in [&y, &dx, &dweight].into_iter().zip(&expected) {
            let (found, behind) = found.split_at(expected.exact.len());
            expected.assert_close(&wide(found), tolerance);
            assert!(behind.iter().all(|x| *x == seven), "{case:?}");
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    // The registers of 32 threads keep 1,024 elements of a row.
    for width in [1, 5, 64, 72, 128, 577, 1024, 1032] {
        for (threads, rows, blocks) in [
            (8, 32, 1),
            (16, 16, 2),
            (32, 8, 1),
            (32, 8, 3),
            (64, 4, 2),
            (256, 1, 5),
            (32, 8, 40),
        ] {
            // A part of a warp has the row of a head only.
            if threads < 32 && width > 128 {
                continue;
            }
            for (n, behind) in [(1, 0), (11, 0), (9, 3)] {
                let case = Case {
                    n,
                    width,
                    behind,
                    threads,
                    rows,
                    blocks,
                    // Both kinds, at each shape of the launch.
                    is_offset: n == 11,
                };
                check::<T>(case, tolerance)?;
            }
        }
    }
    Ok(())
}

each_dtype!(equals_the_formula_and_the_cpu_path: f32 1e-5, bf16 1e-2, f16 1.5e-3);
