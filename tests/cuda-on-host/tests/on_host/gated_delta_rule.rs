//! Tests of `gated_delta_rule.cu` against the composed twin in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{DeltaHeads, PrefixTree, composed, gated_delta_rule};
use candle_grpo_test_support::noise;

use crate::branches::{CHUNKS, LEVELS, ROWS, SEGMENTS, tree};

/// Two slices of value columns of the forward pass, three of a step, of which the last is not full.
const HEADS: DeltaHeads = DeltaHeads {
    key_heads: 1,
    value_heads: 2,
    key_dim: 5,
    value_dim: 70,
};
const WIDTH: usize = 150;
const VALUES: usize = 140;
const STATE: usize = 5 * 70;

struct Inputs<T: Kernels> {
    qkv: Buffer<T>,
    g: Buffer<f32>,
    beta: Buffer<f32>,
}

impl<T: Kernels> Inputs<T> {
    fn new(rows: usize) -> Self {
        let gates = |seed| noise(rows * HEADS.value_heads, seed).into_iter();
        let g: Vec<f32> = gates(2).map(|x| -(x * x) as f32).collect();
        let beta: Vec<f32> = gates(3).map(|x| (x + 1.0) as f32 * 0.5).collect();
        Self {
            qkv: elements(rows * WIDTH, 1),
            g: Buffer::new(&g),
            beta: Buffer::new(&beta),
        }
    }

    fn tensors(&self) -> Result<[Tensor; 3]> {
        let rows = self.qkv.len() / WIDTH;
        let gate = |x: &[f32]| Tensor::from_slice(x, (rows, HEADS.value_heads), &Device::Cpu);
        let qkv = Tensor::from_slice(&self.qkv, (rows, WIDTH), &Device::Cpu)?;
        Ok([qkv, gate(&self.g)?, gate(&self.beta)?])
    }
}

fn elements<T: Kernels>(len: usize, seed: u64) -> Buffer<T> {
    let numbers = noise(len, seed);
    Buffer::new(&numbers.into_iter().map(T::from_f64).collect::<Vec<_>>())
}

fn wide<T: Kernels>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

fn grid(blocks: u32, slices: u32, floats: usize) -> Grid {
    Grid {
        grid: [blocks, HEADS.value_heads as u32, slices],
        block: [256, 1, 1],
        shared_bytes: 4 * floats,
    }
}

fn check_tree<T: Kernels>(tolerance: f64) -> Result<()> {
    let inputs = Inputs::<T>::new(ROWS);
    let gradient = elements::<T>(ROWS * VALUES, 4);
    let tree = tree()?;
    let expected = Expected::from_twin(
        &inputs.tensors()?,
        &Tensor::from_slice(&gradient, (ROWS, VALUES), &Device::Cpu)?,
        |x| composed::gated_delta_rule(&x[0], &x[1], &x[2], HEADS, &tree),
        |x| gated_delta_rule(&x[0], &x[1], &x[2], HEADS, &tree),
    )?;
    let segments = Buffer::new(SEGMENTS);
    let (key_heads, value_heads) = (HEADS.key_heads as i32, HEADS.value_heads as i32);
    let (key_dim, value_dim) = (HEADS.key_dim as i32, HEADS.value_dim as i32);
    let (keys, heads) = (HEADS.key_dim + 1, HEADS.value_heads);
    for order in ORDERS {
        let nan = |len| Buffer::filled(f32::NAN, len);
        let [mut o, mut of_qkv] =
            [VALUES, WIDTH].map(|width| Buffer::filled(T::from_f64(f64::NAN), ROWS * width));
        let [mut errors, mut changes] = [(); 2].map(|()| nan(ROWS * VALUES));
        let [mut states, mut records, mut state_gradients] =
            [4, CHUNKS, 4].map(|slots| nan(slots * heads * STATE));
        let mut key_gradients = nan(ROWS * heads * 2 * HEADS.key_dim);
        let [mut of_g, mut of_beta] = [(); 2].map(|()| nan(ROWS * heads));
        let mut forward = |level: (u32, u32), advance| {
            let is_record = advance == 1;
            // SAFETY: the buffers have the rows of the tree, a state for each segment or chunk, and
            // the shared memory of the kernel.
            unsafe {
                T::gated_delta_rule_forward(
                    grid(level.1, 2, 64 * (keys + 33 + 65)),
                    order,
                    inputs.qkv.as_ptr(),
                    inputs.g.as_ptr(),
                    inputs.beta.as_ptr(),
                    segments.as_ptr(),
                    if is_record { &mut records } else { &mut states }.as_mut_ptr(),
                    if is_record {
                        std::ptr::null_mut()
                    } else {
                        o.as_mut_ptr()
                    },
                    if is_record {
                        errors.as_mut_ptr()
                    } else {
                        std::ptr::null_mut()
                    },
                    if is_record {
                        changes.as_mut_ptr()
                    } else {
                        std::ptr::null_mut()
                    },
                    level.0,
                    advance,
                    key_heads,
                    value_heads,
                    key_dim,
                    value_dim,
                )
                .unwrap();
            }
        };
        for advance in [0, 1] {
            LEVELS.into_iter().for_each(|level| forward(level, advance));
        }
        for (first, count) in LEVELS.into_iter().rev() {
            // SAFETY: as above.
            unsafe {
                T::gated_delta_rule_backward(
                    grid(count, 1, 64 * (keys + HEADS.value_dim + 1 + 66) + 32 * 33),
                    order,
                    inputs.qkv.as_ptr(),
                    inputs.g.as_ptr(),
                    inputs.beta.as_ptr(),
                    gradient.as_ptr(),
                    segments.as_ptr(),
                    records.as_ptr(),
                    errors.as_ptr(),
                    changes.as_ptr(),
                    state_gradients.as_mut_ptr(),
                    key_gradients.as_mut_ptr(),
                    of_qkv.as_mut_ptr(),
                    of_g.as_mut_ptr(),
                    of_beta.as_mut_ptr(),
                    first,
                    key_heads,
                    value_heads,
                    key_dim,
                    value_dim,
                )
                .unwrap();
            }
        }
        // SAFETY: a warp has each key and query.
        unsafe {
            T::gated_delta_rule_keys(
                Grid::new((ROWS * 2 * HEADS.key_heads).div_ceil(8) as u32, 256),
                order,
                inputs.qkv.as_ptr(),
                key_gradients.as_ptr(),
                of_qkv.as_mut_ptr(),
                ROWS as u64,
                key_heads,
                value_heads,
                key_dim,
                value_dim,
            )
            .unwrap();
        }
        let found = [wide(&o), wide(&of_qkv), wide(&of_g), wide(&of_beta)];
        for (found, expected) in found.iter().zip(&expected) {
            expected.assert_close(found, tolerance);
        }
    }
    Ok(())
}

/// Rows of two sequences, in one pass and in two.
fn check_steps<T: Kernels>(tolerance: f64) -> Result<()> {
    let inputs = Inputs::<T>::new(7);
    let tree = PrefixTree::new(&[5, 2])?;
    let [qkv, g, beta] = inputs.tensors()?;
    let [wide_qkv, wide_g, wide_beta] =
        [&qkv, &g, &beta].map(|x| x.to_dtype(candle_core::DType::F64));
    let exact = composed::gated_delta_rule(&wide_qkv?, &wide_g?, &wide_beta?, HEADS, &tree)?;
    let on_cpu = gated_delta_rule(&qkv, &g, &beta, HEADS, &tree)?;
    let expected = Expected {
        exact: candle_grpo_test_support::numbers(&exact)?,
        on_cpu: candle_grpo_test_support::numbers(&on_cpu)?,
    };
    for order in ORDERS {
        let run = |passes: &[&[[u32; 3]]]| {
            let mut states = Buffer::filled(0f32, 3 * HEADS.value_heads * STATE);
            let mut o = Buffer::filled(T::from_f64(f64::NAN), 7 * VALUES);
            for pass in passes {
                let sequences = Buffer::new(pass.as_flattened());
                // SAFETY: the sequences have rows of the buffers and slots of the states.
                unsafe {
                    T::gated_delta_rule_step(
                        grid(pass.len() as u32, 3, HEADS.key_dim * 34 + 256),
                        order,
                        inputs.qkv.as_ptr(),
                        inputs.g.as_ptr(),
                        inputs.beta.as_ptr(),
                        sequences.as_ptr(),
                        states.as_mut_ptr(),
                        o.as_mut_ptr(),
                        HEADS.key_heads as i32,
                        HEADS.value_heads as i32,
                        HEADS.key_dim as i32,
                        HEADS.value_dim as i32,
                    )
                    .unwrap();
                }
            }
            (wide(&o), states.to_vec())
        };
        let (o, states) = run(&[&[[2, 0, 5], [0, 5, 2]]]);
        expected.assert_close(&o, tolerance);
        assert_eq!(run(&[&[[2, 0, 3]], &[[0, 5, 2], [2, 3, 2]]]), (o, states));
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    check_tree::<T>(tolerance)?;
    check_steps::<T>(tolerance)
}

each_dtype!(equals_the_twin_and_the_cpu_path: f32 1e-5, bf16 8e-3, f16 1e-3);
