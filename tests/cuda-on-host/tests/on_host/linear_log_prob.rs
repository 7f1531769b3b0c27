//! Tests of `linear_log_prob.cu` against the composed twin in f64 and the CPU path. Candle computes
//! the matrix products, which are cuBLAS products on a GPU.

use std::ops::Range;

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, linear_log_prob_tile};
use candle_grpo_kernels::{LogProbOptions, TokenLogProbs, composed, linear_log_prob};
use candle_grpo_test_support::{noise, numbers};

use crate::token_rows::{THREADS, stacked};

const TEMPERATURE: f64 = 0.8;
const N: usize = 5;
const WIDTH: usize = 6;
const VOCAB: usize = 700;

/// The first and the last column of each tile, and the target of a masked row.
const TARGETS: [u32; N] = [100, 255, 256, 699, 3];
const MASK: [u8; N] = [1, 1, 1, 1, 0];

type Operator =
    fn(&Tensor, &Tensor, Option<&Tensor>, &Tensor, f64, LogProbOptions) -> Result<TokenLogProbs>;

fn table(x: &[f64], shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(DType::F32)
}

/// Returns the packed results and the gradient of the logits, computed in tiles between `bounds`.
fn run(logits: &[f32], packed_gradient: &[f32], bounds: &[usize], order: u32) -> [Vec<f64>; 2] {
    let tile = |columns: &Range<usize>| {
        let rows = logits.chunks(VOCAB);
        let tile: Vec<f32> = rows.flat_map(|row| row[columns.clone()].to_vec()).collect();
        Buffer::new(&tile)
    };
    let tiles: Vec<Range<usize>> = bounds.windows(2).map(|ends| ends[0]..ends[1]).collect();
    let (targets, mask) = (Buffer::new(&TARGETS), Buffer::new(&MASK));
    let packed_gradient = Buffer::new(packed_gradient);
    let mut packed = Buffer::filled(f32::NAN, 3 * N);
    let mut state = Buffer::filled(f32::NAN, 4 * N);
    let grid = Grid::new(N as u32, THREADS);
    let inverse_temperature = (1.0 / TEMPERATURE) as f32;
    for columns in &tiles {
        // SAFETY: the tile has N rows of these columns, and the other buffers the sizes of N.
        unsafe {
            linear_log_prob_tile(
                grid,
                order,
                tile(columns).as_ptr(),
                targets.as_ptr(),
                mask.as_ptr(),
                state.as_mut_ptr(),
                packed.as_mut_ptr(),
                N as u64,
                columns.len() as u64,
                columns.start as u32,
                VOCAB as u64,
                inverse_temperature,
            )
        }
        .unwrap();
    }
    let mut gradient = vec![0f64; N * VOCAB];
    for columns in &tiles {
        let mut logits = tile(columns);
        let memory = logits.as_mut_ptr();
        // SAFETY: as above. The gradient replaces the logits.
        unsafe {
            f32::linear_log_prob_gradient(
                grid,
                order,
                memory,
                targets.as_ptr(),
                mask.as_ptr(),
                packed.as_ptr(),
                packed_gradient.as_ptr(),
                memory,
                N as u64,
                columns.len() as u64,
                columns.start as u32,
                inverse_temperature,
            )
        }
        .unwrap();
        for (i, x) in logits.iter().enumerate() {
            let (row, column) = (i / columns.len(), i % columns.len());
            gradient[row * VOCAB + columns.start + column] = f64::from(*x);
        }
    }
    [packed.iter().map(|x| f64::from(*x)).collect(), gradient]
}

#[test]
fn tiles_are_the_twin_and_the_cpu_path() -> Result<()> {
    let twice = |len, seed| -> Vec<f64> { noise(len, seed).iter().map(|x| 2.0 * x).collect() };
    let hidden = table(&twice(N * WIDTH, 1), (N, WIDTH))?;
    let weight = table(&twice(VOCAB * WIDTH, 2), (VOCAB, WIDTH))?;
    // The first tile has no part in the distribution.
    let mut bias = noise(VOCAB, 3);
    bias[..100].fill(f64::NEG_INFINITY);
    let bias = table(&bias, VOCAB)?;
    let packed_gradient = table(&noise(3 * N, 4), (3, N))?;
    let targets = Tensor::new(&TARGETS, &Device::Cpu)?;
    let mask = Tensor::new(&MASK, &Device::Cpu)?;
    let options = LogProbOptions {
        mask: Some(&mask),
        ..Default::default()
    };
    let packed = |operator: Operator, x: &[Var]| {
        let bias = Some(x[2].as_tensor());
        stacked(operator(
            &x[0],
            &x[1],
            bias,
            &targets,
            TEMPERATURE,
            options,
        )?)
    };
    let expected = Expected::from_twin(
        &[hidden.clone(), weight.clone(), bias.clone()],
        &packed_gradient,
        |x| packed(composed::linear_log_prob, x),
        |x| packed(linear_log_prob, x),
    )?;

    let [hidden, weight] = [hidden, weight].map(|x| x.to_dtype(DType::F64));
    let (hidden, weight) = (hidden?, weight?);
    let logits = hidden
        .matmul(&weight.t()?)?
        .broadcast_add(&bias.to_dtype(DType::F64)?)?;
    let mut logits: Vec<f32> = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    // A masked row may be NaN.
    logits[4 * VOCAB..].fill(f32::NAN);
    let packed_gradient = packed_gradient.flatten_all()?.to_vec1()?;
    for bounds in [&[0, 100, 256, 512, 699, VOCAB][..], &[0, VOCAB]] {
        for order in ORDERS {
            let [packed, gradient] = run(&logits, &packed_gradient, bounds, order);
            let gradient = Tensor::from_vec(gradient, (N, VOCAB), &Device::Cpu)?;
            let found = [
                packed,
                numbers(&gradient.matmul(&weight)?)?,
                numbers(&gradient.t()?.matmul(&hidden)?)?,
                numbers(&gradient.sum(0)?)?,
            ];
            for (found, expected) in found.iter().zip(&expected) {
                expected.assert_close(found, 3e-6);
            }
        }
    }
    Ok(())
}
