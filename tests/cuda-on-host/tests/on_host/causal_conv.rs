//! Tests of `causal_conv.cu` against the composed twin in f64 and the CPU path.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{PrefixTree, causal_conv, composed};
use candle_grpo_test_support::{noise, numbers};

use crate::branches::{ROWS, SEGMENTS, before, segment_of, tree};

fn elements<T: Kernels>(len: usize, seed: u64) -> Buffer<T> {
    let numbers = noise(len, seed);
    Buffer::new(&numbers.into_iter().map(T::from_f64).collect::<Vec<_>>())
}

fn wide<T: Kernels>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

fn check_tree<T: Kernels>(channels: usize, taps: usize, tolerance: f64) -> Result<()> {
    let table = |x: &[T], rows, columns| Tensor::from_slice(x, (rows, columns), &Device::Cpu);
    let (x, gradient) = (
        elements::<T>(ROWS * channels, 1),
        elements::<T>(ROWS * channels, 2),
    );
    let weight = elements::<T>(channels * taps, 3);
    let tree = tree()?;
    let expected = Expected::from_twin(
        &[table(&x, ROWS, channels)?, table(&weight, channels, taps)?],
        &table(&gradient, ROWS, channels)?,
        |x| composed::causal_conv(&x[0], &x[1], &tree),
        |x| causal_conv(&x[0], &x[1], &tree),
    )?;
    let (before, segments) = (Buffer::new(&before()), Buffer::new(SEGMENTS));
    let segment_of = Buffer::new(&segment_of());
    let (n, channels32, taps32) = (ROWS as u64, channels as i32, taps as i32);
    let grid = |grid| Grid {
        grid,
        block: [32, 4, 1],
        shared_bytes: 0,
    };
    let columns = channels.div_ceil(128) as u32;
    for order in ORDERS {
        let [mut y, mut of_x] =
            [(); 2].map(|()| Buffer::filled(T::from_f64(f64::NAN), ROWS * channels));
        let mut of_weight = Buffer::filled(T::from_f64(f64::NAN), channels * taps);
        let mut parts = Buffer::filled(f32::NAN, 2 * channels * taps);
        // SAFETY: the buffers have the rows of the tree, and two parts of 4 * 13 rows and of 28.
        unsafe {
            T::causal_conv_forward(
                grid([columns, 2, 1]),
                order,
                x.as_ptr(),
                weight.as_ptr(),
                before.as_ptr(),
                segments.as_ptr(),
                segment_of.as_ptr(),
                y.as_mut_ptr(),
                n,
                13,
                channels32,
                taps32,
            )
            .unwrap();
            T::causal_conv_backward(
                grid([columns, 2, taps.div_ceil(4) as u32]),
                order,
                x.as_ptr(),
                weight.as_ptr(),
                gradient.as_ptr(),
                before.as_ptr(),
                segments.as_ptr(),
                segment_of.as_ptr(),
                of_x.as_mut_ptr(),
                parts.as_mut_ptr(),
                n,
                13,
                channels32,
                taps32,
            )
            .unwrap();
            if (2..=4).contains(&taps) {
                T::causal_conv_of_last_rows(
                    grid([SEGMENTS.len() as u32 / 6 - 1, columns, 1]),
                    order,
                    x.as_ptr(),
                    weight.as_ptr(),
                    gradient.as_ptr(),
                    before.as_ptr(),
                    segments.as_ptr(),
                    of_x.as_mut_ptr(),
                    channels32,
                    taps32,
                )
                .unwrap();
            }
            T::causal_conv_of_weight(
                Grid::new((channels * taps).div_ceil(256) as u32, 256),
                order,
                parts.as_ptr(),
                of_weight.as_mut_ptr(),
                2,
                channels32,
                taps32,
            )
            .unwrap();
        }
        let found = [wide(&y), wide(&of_x), wide(&of_weight)];
        for (found, expected) in found.iter().zip(&expected) {
            expected.assert_close(found, tolerance);
        }
    }
    Ok(())
}

/// Rows of two sequences, in one pass and in two.
fn check_steps<T: Kernels>(channels: usize, taps: usize, tolerance: f64) -> Result<()> {
    let x = elements::<T>(7 * channels, 1);
    let weight = elements::<T>(channels * taps, 3);
    let tree = PrefixTree::new(&[5, 2])?;
    let x_tensor = Tensor::from_slice(&x, (7, channels), &Device::Cpu)?;
    let weight_tensor = Tensor::from_slice(&weight, (channels, taps), &Device::Cpu)?;
    let [x_wide, weight_wide] = [&x_tensor, &weight_tensor].map(|x| x.to_dtype(DType::F64));
    let expected = Expected {
        exact: numbers(&composed::causal_conv(&x_wide?, &weight_wide?, &tree)?)?,
        on_cpu: numbers(&causal_conv(&x_tensor, &weight_tensor, &tree)?)?,
    };
    for order in ORDERS {
        let run = |passes: &[&[[u32; 3]]]| {
            let mut windows = Buffer::filled(0f32, 3 * (taps - 1) * channels);
            let mut y = Buffer::filled(T::from_f64(f64::NAN), 7 * channels);
            for pass in passes {
                let sequences = Buffer::new(pass.as_flattened());
                // SAFETY: the sequences have rows of the buffers and slots of the windows.
                unsafe {
                    T::causal_conv_step(
                        Grid {
                            grid: [pass.len() as u32, channels.div_ceil(256) as u32, 1],
                            block: [256, 1, 1],
                            shared_bytes: 0,
                        },
                        order,
                        x.as_ptr(),
                        weight.as_ptr(),
                        sequences.as_ptr(),
                        windows.as_mut_ptr(),
                        y.as_mut_ptr(),
                        channels as i32,
                        taps as i32,
                    )
                    .unwrap();
                }
            }
            (wide(&y), windows.to_vec())
        };
        let (y, windows) = run(&[&[[2, 0, 5], [0, 5, 2]]]);
        expected.assert_close(&y, tolerance);
        assert_eq!(run(&[&[[2, 0, 3]], &[[0, 5, 2], [2, 3, 2]]]), (y, windows));
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    // More taps than the rows of a segment, and than all rows before a row.
    for (channels, taps) in [
        (1, 1),
        (33, 4),
        (300, 4),
        (132, 2),
        (8, 3),
        (130, 5),
        (3, 45),
    ] {
        check_tree::<T>(channels, taps, tolerance)?;
        check_steps::<T>(channels, taps, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_twin_and_the_cpu_path: f32 4e-6, bf16 8e-3, f16 1e-3);
