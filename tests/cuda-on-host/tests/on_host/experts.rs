//! Tests of `experts.cu` against the formula in f64.

use candle_core::Result;
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_test_support::{assert_close, noise, token_ids};

/// Threads per block, and columns in a fragment.
const THREADS: u32 = 128;
const COLUMNS: usize = 16;
const THREADS_OF_SUM: usize = 256;

struct Sizes {
    n: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    width: usize,
}

/// A result for each pair, as the sum over a row's pairs.
fn formula(
    sizes: &Sizes,
    x: &[f64],
    weights: &[[Vec<f64>; 3]],
    chosen: &[u32],
    gates: &[f32],
) -> Vec<f64> {
    let &Sizes {
        n,
        top_k,
        hidden,
        width,
        ..
    } = sizes;
    let map = |weight: &[f64], x: &[f64]| -> Vec<f64> {
        let rows = weight.chunks(x.len());
        rows.map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum())
            .collect()
    };
    let mut y = vec![0.0; n * hidden];
    for (pair, (&expert, &gate)) in chosen.iter().zip(gates).enumerate() {
        let row = pair / top_k;
        let [of_gate, up, down] = &weights[expert as usize];
        let x = &x[row * hidden..(row + 1) * hidden];
        let inner = map(of_gate, x).into_iter().zip(map(up, x));
        let inner: Vec<f64> = inner.map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect();
        assert_eq!(inner.len(), width);
        let y = &mut y[row * hidden..(row + 1) * hidden];
        for (y, part) in y.iter_mut().zip(map(down, &inner)) {
            *y += f64::from(gate) * part;
        }
    }
    y
}

/// Checks weights and rows that start `offset` elements after an aligned address.
fn check<T: Kernels>(sizes: &Sizes, offset: usize, tolerance: f64) -> Result<()> {
    let &Sizes {
        n,
        top_k,
        experts,
        hidden,
        width,
    } = sizes;
    let pairs = n * top_k;
    let numbers = |len: usize, seed: u64, scale: f64| -> Vec<T> {
        noise(len, seed)
            .iter()
            .map(|x| T::from_f64(scale * x))
            .collect()
    };
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f64()).collect() };
    let buffer = |numbers: &[T]| {
        let mut all = vec![T::from_f64(f64::NAN); offset];
        all.extend_from_slice(numbers);
        Buffer::new(&all)
    };
    let x = numbers(n * hidden, 1, 1.7);
    let weights: Vec<[Vec<T>; 3]> = (0..experts as u64)
        .map(|expert| {
            let weight = |map: u64, inputs: usize| {
                let scale = (3.0 / inputs as f64).sqrt();
                numbers(hidden * width, 2 + 3 * expert + map, scale)
            };
            [weight(0, hidden), weight(1, hidden), weight(2, width)]
        })
        .collect();
    let first = token_ids(n, experts, 5);
    let chosen: Vec<u32> = (0..pairs)
        .map(|pair| (first[pair / top_k] + (pair % top_k) as u32) % experts as u32)
        .collect();
    let gates: Vec<f32> = noise(pairs, 6).into_iter().map(|x| x as f32).collect();
    let wide_weights: Vec<_> = weights
        .iter()
        .map(|maps| maps.each_ref().map(|x| wide(x)))
        .collect();
    let expected = formula(sizes, &wide(&x), &wide_weights, &chosen, &gates);

    let x = buffer(&x);
    let weights: Vec<[Buffer<T>; 3]> = weights
        .iter()
        .map(|maps| maps.each_ref().map(|x| buffer(x)))
        .collect();
    let addresses: Vec<u64> = (0..3)
        .flat_map(|map| {
            weights
                .iter()
                .map(move |maps| maps[map][offset..].as_ptr() as u64)
        })
        .collect();
    let (table, gates) = (Buffer::new(&addresses), Buffer::new(&gates));
    let chosen = Buffer::new(&chosen);
    let grid = |columns: usize, per_block: usize| Grid {
        grid: [
            columns.div_ceil(per_block) as u32,
            pairs.min(experts) as u32,
            1,
        ],
        block: [THREADS, 1, 1],
        shared_bytes: 2 * pairs,
    };
    for order in ORDERS {
        let mut inner = Buffer::filled(T::from_f64(f64::NAN), pairs * width);
        let mut parts = Buffer::filled(f32::NAN, pairs * hidden);
        let mut y = Buffer::filled(T::from_f64(f64::NAN), n * hidden);
        // SAFETY: the buffers have these sizes, and the table has the address of each weight.
        unsafe {
            T::experts_gate_up(
                grid(width, COLUMNS),
                order,
                x[offset..].as_ptr(),
                table.as_ptr(),
                chosen.as_ptr(),
                inner.as_mut_ptr(),
                pairs as u32,
                top_k as u32,
                experts as u32,
                hidden as i32,
                width as i32,
            )
            .unwrap();
            T::experts_down(
                grid(hidden, 2 * COLUMNS),
                order,
                inner.as_ptr(),
                table.as_ptr(),
                chosen.as_ptr(),
                parts.as_mut_ptr(),
                pairs as u32,
                experts as u32,
                hidden as i32,
                width as i32,
            )
            .unwrap();
            T::experts_sum(
                Grid::new(
                    (n * hidden).div_ceil(THREADS_OF_SUM) as u32,
                    THREADS_OF_SUM as u32,
                ),
                order,
                parts.as_ptr(),
                chosen.as_ptr(),
                gates.as_ptr(),
                y.as_mut_ptr(),
                n as u64,
                top_k as u32,
                experts as u32,
                hidden as u32,
            )
            .unwrap();
        }
        assert_close(&wide(&y), &expected, tolerance);
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for [n, top_k, experts, hidden, width] in [
        [1, 1, 1, 1, 1],
        [3, 2, 20, 48, 40],
        [40, 2, 3, 72, 32],
        [5, 3, 3, 35, 19],
        // Each warp has several chunks of the depth.
        [2, 2, 3, 1104, 24],
    ] {
        let sizes = Sizes {
            n,
            top_k,
            experts,
            hidden,
            width,
        };
        check::<T>(&sizes, 0, tolerance)?;
        check::<T>(&sizes, 1, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_formula: f32 8e-6, bf16 2.4e-2, f16 3e-3);
