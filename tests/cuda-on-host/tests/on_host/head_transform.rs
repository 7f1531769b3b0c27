//! Tests of `head_transform.cu` against the plain operations in f64 and the CPU path.

use std::ptr;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{HeadNorms, HeadTransform, RmsNormOptions};
use candle_grpo_test_support::{noise, numbers};

const EPSILON: f64 = 1e-3;

/// `rows` of query and key heads, followed by `behind` elements in memory. The first `2 * pairs` of
/// `head_dim` elements rotate.
#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    heads: [usize; 2],
    head_dim: usize,
    pairs: usize,
    norms: bool,
    is_offset: bool,
    has_gates: bool,
    behind: usize,
}

impl Case {
    /// Elements from one query head to the next.
    fn query_step(&self) -> usize {
        self.head_dim * if self.has_gates { 2 } else { 1 }
    }

    /// Shapes: query, key, both weights, gradients of query, key and gated output, mixed output.
    fn shapes(&self) -> [Vec<usize>; 8] {
        let [heads, kv_heads] = self.heads;
        let vector = || vec![self.head_dim];
        let query = || vec![self.rows, heads * self.head_dim];
        let key = || vec![self.rows, kv_heads * self.head_dim];
        let projected = vec![self.rows, heads * self.query_step()];
        [
            projected,
            key(),
            vector(),
            vector(),
            query(),
            key(),
            query(),
            query(),
        ]
    }

    /// Returns the transformed heads, their gradients and those of the weights.
    fn expected(&self, inputs: &[Tensor], angles: [&Tensor; 2]) -> Result<Vec<Vec<f64>>> {
        let [
            query,
            key,
            query_weight,
            key_weight,
            of_query,
            of_key,
            of_gated,
            mixed,
        ] = inputs
        else {
            unreachable!()
        };
        let norms = HeadNorms {
            weights: [query_weight, key_weight],
            options: RmsNormOptions {
                epsilon: EPSILON,
                is_offset: self.is_offset,
            },
        };
        let transform = HeadTransform {
            norms: self.norms.then_some(norms),
            angles: (self.pairs > 0).then_some(angles),
            head_dim: Some(self.head_dim),
            has_gates: self.has_gates,
        };
        let heads = [query, key];
        let gated = self.has_gates.then_some([of_gated, mixed]);
        let gradients = transform.gradients(Some(heads), [of_query, of_key], gated)?;
        let [to_query, to_key] = transform.apply(heads)?;
        let mut all = vec![to_query, to_key];
        all.extend(gradients.heads);
        all.extend(gradients.weights.into_iter().flatten());
        all.iter().map(numbers).collect()
    }
}

fn check<T: Kernels>(case: Case, tolerance: f64) -> Result<()> {
    let Case {
        rows,
        pairs,
        behind,
        head_dim,
        ..
    } = case;
    let shapes = case.shapes();
    let values: Vec<Vec<T>> = shapes
        .iter()
        .enumerate()
        .map(|(salt, shape)| {
            let values = noise(shape.iter().product(), salt as u64);
            values
                .iter()
                .map(|x| T::from_f64(2.0 * x + 0.25 * x.signum()))
                .collect()
        })
        .collect();
    let tensors = values
        .iter()
        .zip(&shapes)
        .map(|(x, shape)| Tensor::from_slice(x, shape.as_slice(), &Device::Cpu))
        .collect::<Result<Vec<_>>>()?;
    let angles = [f64::cos, f64::sin].map(|of| -> Vec<f32> {
        noise(rows * pairs, 9)
            .iter()
            .map(|a| of(9.0 * a) as f32)
            .collect()
    });
    let [cos, sin] = angles
        .each_ref()
        .map(|x| Tensor::from_slice(x, (rows, pairs), &Device::Cpu));
    let (cos, sin) = (cos?, sin?);
    let wide = |x: &Tensor| x.to_dtype(DType::F64);
    let wide_tensors = tensors.iter().map(wide).collect::<Result<Vec<_>>>()?;
    let exact = case.expected(&wide_tensors, [&wide(&cos)?, &wide(&sin)?])?;
    let expected = Expected::all(exact, case.expected(&tensors, [&cos, &sin])?);

    let buffers: Vec<Buffer<T>> = values
        .into_iter()
        .map(|mut x| {
            x.resize(x.len() + behind, T::from_f64(f64::NAN));
            Buffer::new(&x)
        })
        .collect();
    let [cos, sin] = angles.each_ref().map(|x| Buffer::new(x));
    let optional = |is_given: bool, index: usize| {
        if is_given {
            buffers[index].as_ptr()
        } else {
            ptr::null()
        }
    };
    let all_heads = case.heads.map(|heads| rows * heads);
    for (threads, per_block) in [(4, 64), (16, 16), (32, 2)] {
        let grid = |blocks, shared_bytes| Grid {
            grid: [blocks, 1, 1],
            block: [threads, per_block as u32, 1],
            shared_bytes,
        };
        // Fewer blocks than heads, so that they loop.
        let blocks = all_heads.map(|heads| heads.div_ceil(2 * per_block));
        for order in ORDERS {
            let seven = T::from_f64(7.0);
            let filled = |index: usize| Buffer::filled(seven, buffers[index].len());
            let (mut to_query, mut to_key) = (filled(4), filled(5));
            let (mut of_query, mut of_key) = (filled(0), filled(1));
            let mut of_weights = Buffer::filled(seven, 2 * head_dim);
            let mut partial = Buffer::filled(f32::NAN, (blocks[0] + blocks[1]) * head_dim);
            let (rows, heads, kv_heads) = (rows as u32, case.heads[0] as u32, case.heads[1] as u32);
            let (query_step, head_dim) = (case.query_step() as i32, head_dim as i32);
            let (pairs, epsilon) = (pairs as i32, EPSILON as f32);
            // SAFETY: the buffers have the sizes of the rows, heads and blocks.
            unsafe {
                T::head_transform_forward(
                    grid((all_heads[0] + all_heads[1]).div_ceil(per_block) as u32, 0),
                    order,
                    buffers[0].as_ptr(),
                    optional(case.norms, 2),
                    buffers[1].as_ptr(),
                    optional(case.norms, 3),
                    cos.as_ptr(),
                    sin.as_ptr(),
                    to_query.as_mut_ptr(),
                    to_key.as_mut_ptr(),
                    rows,
                    heads,
                    kv_heads,
                    query_step,
                    head_dim,
                    pairs,
                    1.0,
                    epsilon,
                    f32::from(u8::from(case.is_offset)),
                )
                .unwrap_or_else(|error| panic!("{case:?}: {error}"));
                T::head_transform_backward(
                    grid(
                        (blocks[0] + blocks[1]) as u32,
                        4 * per_block * head_dim as usize,
                    ),
                    order,
                    buffers[0].as_ptr(),
                    optional(case.norms, 2),
                    buffers[4].as_ptr(),
                    buffers[1].as_ptr(),
                    optional(case.norms, 3),
                    buffers[5].as_ptr(),
                    cos.as_ptr(),
                    sin.as_ptr(),
                    optional(case.has_gates, 6),
                    optional(case.has_gates, 7),
                    of_query.as_mut_ptr(),
                    of_key.as_mut_ptr(),
                    if case.norms {
                        partial.as_mut_ptr()
                    } else {
                        ptr::null_mut()
                    },
                    rows,
                    heads,
                    kv_heads,
                    blocks[0] as u32,
                    query_step,
                    head_dim,
                    pairs,
                    epsilon,
                    f32::from(u8::from(case.is_offset)),
                )
                .unwrap_or_else(|error| panic!("{case:?}: {error}"));
                if case.norms {
                    let sums = Grid {
                        grid: [(head_dim as u32).div_ceil(32), 2, 1],
                        block: [32, 32, 1],
                        shared_bytes: 0,
                    };
                    T::column_sums(
                        sums,
                        order,
                        partial.as_ptr(),
                        of_weights.as_mut_ptr(),
                        blocks[0] as i32,
                        blocks[1] as i32,
                        head_dim,
                    )
                    .unwrap_or_else(|error| panic!("{case:?}: {error}"));
                }
            }
            let heads = [to_query, to_key, of_query, of_key];
            let heads = heads.iter().map(|found| {
                let (found, rest) = found.split_at(found.len() - behind);
                assert!(rest.iter().all(|y| *y == seven), "{case:?}");
                found
            });
            for (found, expected) in heads.chain(of_weights.chunks(case.head_dim)).zip(&expected) {
                let found: Vec<f64> = found.iter().map(|y| y.to_f64()).collect();
                expected.assert_close(&found, tolerance);
            }
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for (rows, heads, head_dim, pairs) in [
        (1, [1, 1], 2, 1),
        (5, [3, 1], 64, 32),
        (3, [9, 3], 10, 5),
        // A part rotates, in packs and not.
        (3, [3, 2], 64, 8),
        (2, [2, 1], 11, 3),
        // More elements than 4 threads load at a time.
        (7, [2, 1], 128, 64),
    ] {
        for (norms, is_offset, has_gates, behind) in [
            (false, false, false, 0),
            (true, false, false, 0),
            (true, true, true, 0),
            (true, true, true, 1),
            (false, false, true, 0),
        ] {
            let case = Case {
                rows,
                heads,
                head_dim,
                pairs,
                norms,
                is_offset,
                has_gates,
                behind,
            };
            check::<T>(case, tolerance)?;
        }
    }
    Ok(())
}

each_dtype!(equals_the_operations_and_the_cpu_path: f32 1e-5, bf16 2e-2, f16 3e-3);
