//! Tests of `add_bias.cu` against the formula in f64 and the CPU path.

use std::ptr;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{add_bias, add_bias_gradient};
use candle_grpo_test_support::{noise, numbers};

/// Bytes of a row that a warp adds, as in the kernel.
const BYTES: usize = 4 * 32 * 16;

fn numbers_of<T: Kernels>(len: usize, seed: u64) -> Vec<T> {
    let numbers = noise(len, seed);
    numbers.iter().map(|x| T::from_f64(2.0 * x)).collect()
}

fn wide<T: Kernels>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Returns `x` followed by `behind` elements in memory.
fn buffer<T: Kernels>(x: &[T], behind: usize) -> Buffer<T> {
    let mut x = x.to_vec();
    x.resize(x.len() + behind, T::from_f64(f64::NAN));
    Buffer::new(&x)
}

/// Adds biases to `n` rows of up to three matrices with these numbers of columns. Each is followed
/// by `behind` elements in memory.
fn check_sums<T: Kernels>(
    n: usize,
    columns: &[usize],
    behind: usize,
    tolerance: f64,
) -> Result<()> {
    let seven = T::from_f64(7.0);
    let (mut expected, mut xs, mut biases) = (vec![], vec![], vec![]);
    for (seed, &columns) in (1..).zip(columns) {
        let (x, bias) = (
            numbers_of::<T>(n * columns, seed),
            numbers_of::<T>(columns, seed + 10),
        );
        let rows = wide(&x);
        let rows = rows.chunks(columns);
        let exact = rows.flat_map(|row| {
            row.iter()
                .zip(wide(&bias))
                .map(|(x, b)| x + b)
                .collect::<Vec<_>>()
        });
        let table = Tensor::from_slice(&x, (n, columns), &Device::Cpu)?;
        let row = Tensor::from_slice(&bias, columns, &Device::Cpu)?;
        expected.push(Expected {
            exact: exact.collect(),
            on_cpu: numbers(&add_bias(&[(&table, &row)])?[0])?,
        });
        xs.push(buffer(&x, behind));
        biases.push(buffer(&bias, behind));
    }
    let widest = columns.iter().copied().max().unwrap_or(0);
    let grid = Grid {
        grid: [
            n.div_ceil(8) as u32,
            (widest * size_of::<T>()).div_ceil(BYTES) as u32,
            columns.len() as u32,
        ],
        block: [32, 8, 1],
        shared_bytes: 0,
    };
    // A matrix that is absent has no blocks.
    let read = |buffers: &[Buffer<T>], index: usize| {
        buffers.get(index).map_or(ptr::null(), |x| x.as_ptr())
    };
    let width = |index: usize| columns.get(index).map_or(0, |&columns| columns as u32);
    for order in ORDERS {
        let lengths = columns.iter().map(|columns| n * columns + behind);
        let mut ys: Vec<_> = lengths.map(|len| Buffer::filled(seven, len)).collect();
        let mut write = ys.iter_mut();
        let mut y = || write.next().map_or(ptr::null_mut(), |y| y.as_mut_ptr());
        // SAFETY: x and y have n * columns elements, bias columns.
        unsafe {
            T::add_bias(
                grid,
                order,
                read(&xs, 0),
                read(&xs, 1),
                read(&xs, 2),
                read(&biases, 0),
                read(&biases, 1),
                read(&biases, 2),
                y(),
                y(),
                y(),
                n as u32,
                width(0),
                width(1),
                width(2),
            )
            .unwrap();
        }
        for (y, expected) in ys.iter().zip(&expected) {
            let (found, behind) = y.split_at(expected.exact.len());
            expected.assert_close(&wide(found), tolerance);
            assert!(behind.iter().all(|x| *x == seven));
        }
    }
    Ok(())
}

/// Adds the sum of `n` rows of a gradient to a sum.
fn check_gradient<T: Kernels>(n: usize, columns: usize) -> Result<()> {
    let (gradient, start) = (
        numbers_of::<T>(n * columns, 1),
        numbers_of::<f32>(columns, 2),
    );
    let mut exact = wide(&start);
    for row in wide(&gradient).chunks(columns) {
        exact.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    let on_cpu = Tensor::from_slice(&start, columns, &Device::Cpu)?;
    add_bias_gradient(
        &on_cpu,
        &Tensor::from_slice(&gradient, (n, columns), &Device::Cpu)?,
    )?;
    let expected = Expected {
        exact,
        on_cpu: numbers(&on_cpu.to_dtype(DType::F64)?)?,
    };
    let gradient = Buffer::new(&gradient);
    let grid = Grid {
        grid: [columns.div_ceil(32) as u32, 1, 1],
        block: [32, 32, 1],
        shared_bytes: 0,
    };
    for order in ORDERS {
        let mut sum = Buffer::new(&start);
        // SAFETY: the gradient has n * columns elements, the sum columns.
        unsafe {
            T::add_bias_gradient(
                grid,
                order,
                gradient.as_ptr(),
                sum.as_mut_ptr(),
                n as u64,
                columns as i32,
            )
            .unwrap();
        }
        expected.assert_close(&wide(&sum), 1e-5);
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    // Without whole packs of 16 bytes, with them, and with several slices of a row.
    for columns in [&[1][..], &[7, 40], &[72, 24, 8], &[24, 1032, 1029]] {
        for (n, behind) in [(1, 0), (8, 0), (19, 0), (9, 3)] {
            check_sums::<T>(n, columns, behind, tolerance)?;
        }
    }
    for (n, columns) in [(1, 1), (31, 33), (67, 96), (200, 5)] {
        check_gradient::<T>(n, columns)?;
    }
    Ok(())
}

each_dtype!(equals_the_formula_and_the_cpu_path: f32 1e-6, bf16 4e-3, f16 6e-4);
