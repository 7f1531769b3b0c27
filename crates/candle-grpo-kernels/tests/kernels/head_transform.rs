//! Tests `HeadTransform` and `gate_heads` against autograd over plain operations in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    HeadNorms, HeadTransform, RmsNormOptions, gate_heads, rms_norm, rope, rope_gradient,
};
use candle_grpo_test_support::{assert_close, cases, devices, gradient, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{noisy, rounding};

/// Heads `[rows, heads * head_dim]` of queries, with their gates if there are any, and of keys, and
/// weights of their norms.
struct Inputs {
    query: Tensor,
    key: Tensor,
    weights: [Tensor; 2],
    angles: [Tensor; 2],
    /// Attention output before the gates.
    mixed: Tensor,
}

#[derive(Debug, Clone, Copy)]
struct Options {
    norms: Option<RmsNormOptions>,
    rotates: bool,
    head_dim: usize,
    has_gates: bool,
}

impl Inputs {
    /// All tensors on a device, in a dtype.
    fn to(&self, dtype: DType, device: &Device) -> Result<Self> {
        let to = |x: &Tensor| x.to_device(device)?.to_dtype(dtype);
        let wide = candle_grpo_kernels::arithmetic_dtype(dtype);
        let angles = |x: &Tensor| x.to_dtype(wide)?.to_device(device);
        Ok(Self {
            query: to(&self.query)?,
            key: to(&self.key)?,
            weights: [to(&self.weights[0])?, to(&self.weights[1])?],
            angles: [angles(&self.angles[0])?, angles(&self.angles[1])?],
            mixed: to(&self.mixed)?,
        })
    }

    /// All tensors as variables but the angles.
    fn variables(&self) -> Result<[Var; 5]> {
        Ok([
            Var::from_tensor(&self.query)?,
            Var::from_tensor(&self.key)?,
            Var::from_tensor(&self.weights[0])?,
            Var::from_tensor(&self.weights[1])?,
            Var::from_tensor(&self.mixed)?,
        ])
    }

    fn transform<'a>(&'a self, weights: [&'a Tensor; 2], options: Options) -> HeadTransform<'a> {
        HeadTransform {
            norms: options.norms.map(|options| HeadNorms { weights, options }),
            angles: options.rotates.then(|| self.angles.each_ref()),
            head_dim: Some(options.head_dim),
            has_gates: options.has_gates,
        }
    }
}

/// Returns the transformed heads in f64 and the gated output, and the gradients with respect to all
/// variables for those with respect to these results.
fn expected(
    inputs: &Inputs,
    options: Options,
    [of_query, of_key, of_gated]: [&Tensor; 3],
) -> Result<[Vec<Vec<f64>>; 2]> {
    let inputs = inputs.to(DType::F64, &Device::Cpu)?;
    let variables = inputs.variables()?;
    let Options { head_dim, .. } = options;
    let rows = inputs.key.dim(0)?;
    let part = |x: &Tensor, from, len| x.narrow(2, from, len)?.contiguous()?.reshape((rows, ()));
    let one = |x: &Tensor, weight: &Tensor| -> Result<Tensor> {
        let mut heads = x.reshape((rows, (), head_dim))?;
        if let Some(norm) = options.norms {
            heads = rms_norm(&heads, weight, norm)?;
        }
        if !options.rotates {
            return heads.reshape((rows, ()));
        }
        let width = 2 * inputs.angles[0].dim(1)?;
        let first = part(&heads, 0, width)?;
        let first = rope(&first, &inputs.angles[0], &inputs.angles[1])?;
        let rest = heads.narrow(2, width, head_dim - width)?;
        Tensor::cat(&[&first.reshape((rows, (), width))?, &rest], 2)?.reshape((rows, ()))
    };
    let wide = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    let mut query = variables[0].as_tensor().clone();
    let mut gated = None;
    if options.has_gates {
        let pairs = query.reshape((rows, (), 2 * head_dim))?;
        let gates = part(&pairs, head_dim, head_dim)?;
        query = part(&pairs, 0, head_dim)?;
        let sigmoid = ((gates.neg()?.exp()? + 1.0)?).recip()?;
        gated = Some((variables[4].as_tensor() * sigmoid)?);
    }
    let results = [
        one(&query, &variables[2])?,
        one(&variables[1], &variables[3])?,
    ];
    let mut score = ((&results[0] * wide(of_query)?)?.sum_all()?
        + (&results[1] * wide(of_key)?)?.sum_all()?)?;
    let mut found: Vec<_> = results.iter().map(numbers).collect::<Result<_>>()?;
    if let Some(gated) = gated {
        score = (score + (&gated * wide(of_gated)?)?.sum_all()?)?;
        found.push(numbers(&gated)?);
    }
    let store = score.backward()?;
    let gradients = variables.iter().map(|variable| match store.get(variable) {
        Some(_) => gradient(&store, variable),
        None => Ok(Vec::new()),
    });
    Ok([found, gradients.collect::<Result<_>>()?])
}

/// Row and head counts, widths and layouts.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    kv_heads: usize,
    group: usize,
    pairs: usize,
    layouts: [Layout; 3],
    seed: u64,
}

/// Compares results and gradients on every device with plain operations in f64.
fn check(sizes: Sizes, options: Options, dtype: DType) -> Result<()> {
    let Sizes {
        rows,
        kv_heads,
        group,
        pairs,
        layouts,
        seed,
    } = sizes;
    let Options {
        norms,
        head_dim,
        has_gates,
        ..
    } = options;
    let noise = |shape: &[usize], salt: u64, dtype| noisy(shape, seed ^ salt, dtype);
    // Not near 0, where the derivative of a norm is huge.
    let input = |layout: usize, width: usize, salt| -> Result<Tensor> {
        let x = noise(&[rows, width], salt, dtype)?;
        layouts[layout].apply(&((&x * 3.0)? + (x.sign()? * 0.5)?)?)
    };
    let parts = if has_gates { 2 } else { 1 };
    let query_width = kv_heads * group * head_dim;
    let on_cpu = Inputs {
        query: input(0, parts * query_width, 1)?,
        key: input(1, kv_heads * head_dim, 2)?,
        weights: [noise(&[head_dim], 3, dtype)?, noise(&[head_dim], 4, dtype)?],
        angles: [
            noise(&[rows, pairs], 5, DType::F32)?,
            noise(&[rows, pairs], 6, DType::F32)?,
        ],
        mixed: noise(&[rows, query_width], 7, dtype)?,
    };
    let gradients = [
        layouts[2].apply(&noise(&[rows, query_width], 8, dtype)?)?,
        noise(&[rows, kv_heads * head_dim], 9, dtype)?,
        noise(&[rows, query_width], 10, dtype)?,
    ];
    let [results, of_inputs] = expected(&on_cpu, options, gradients.each_ref())?;
    for device in devices() {
        let inputs = on_cpu.to(dtype, device)?;
        let [of_query, of_key, of_gated] = {
            let [a, b, c] = gradients.each_ref().map(|x| x.to_device(device));
            [a?, b?, c?]
        };
        let transform = inputs.transform(inputs.weights.each_ref(), options);
        let heads = [&inputs.query, &inputs.key];
        let mut found = transform.apply(heads)?.to_vec();
        if has_gates {
            found.push(gate_heads(&inputs.mixed, &inputs.query, head_dim)?);
        }
        assert_eq!(found.len(), results.len());
        for (found, expected) in found.iter().zip(&results) {
            assert!(!found.track_op() && found.dtype() == dtype);
            assert_close(&numbers(found)?, expected, 3.0 * rounding(dtype));
        }

        let gated = has_gates.then_some([&of_gated, &inputs.mixed]);
        let is_kept = has_gates || norms.is_some();
        let alone = transform.gradients(is_kept.then_some(heads), [&of_query, &of_key], gated)?;
        assert_eq!(alone.weights.is_some(), norms.is_some());
        let all = alone.heads.iter().chain(alone.weights.iter().flatten());
        // The sums over all heads have a larger error.
        let tolerances = [8.0, 8.0, 24.0, 24.0].map(|times| times * rounding(dtype));
        for ((found, expected), tolerance) in all.zip(&of_inputs).zip(tolerances) {
            assert!(!found.track_op() && found.dtype() == dtype);
            assert_close(&numbers(found)?, expected, tolerance);
        }
        if has_gates {
            let of_mixed = gate_heads(&of_gated, &inputs.query, head_dim)?;
            assert_close(&numbers(&of_mixed)?, &of_inputs[4], 3.0 * rounding(dtype));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(32, 256)))]
    #[test]
    fn results_and_gradients_equal_those_of_plain_operations_in_f64(
        // More heads than a kernel block has.
        rows in prop_oneof![4 => 1usize..6, 1 => Just(90)],
        kv_heads in 1usize..3,
        group in 1usize..4,
        (pairs, rest) in prop_oneof![
            4 => (1usize..20, prop_oneof![Just(0usize), 1usize..9]),
            // A multiple of a pack, as in models.
            4 => prop_oneof![Just((32, 0)), Just((64, 0)), Just((8, 48)), Just((16, 8)), Just((32, 192))],
            // More pairs than a head's threads load at a time.
            1 => Just((264, 0)),
        ],
        norms in prop::option::of(any::<bool>()),
        rotates in any::<bool>(),
        has_gates in any::<bool>(),
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let options = Options {
            norms: norms.map(|is_offset| RmsNormOptions { epsilon: 1e-3, is_offset }),
            rotates,
            head_dim: 2 * pairs + rest,
            has_gates,
        };
        check(Sizes { rows, kv_heads, group, pairs, layouts, seed }, options, dtype)?;
    }
}

/// Heads that are loaded in packs, as those of Qwen3 and Qwen3.5, and element by element.
#[rstest]
fn heads_of_each_kind_equal_plain_operations(
    #[values((64, 0), (32, 192), (5, 1))] (pairs, rest): (usize, usize),
    #[values(None, Some(false), Some(true))] norms: Option<bool>,
    #[values(false, true)] has_gates: bool,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    let options = Options {
        norms: norms.map(|is_offset| RmsNormOptions {
            epsilon: 1e-3,
            is_offset,
        }),
        rotates: true,
        head_dim: 2 * pairs + rest,
        has_gates,
    };
    let sizes = Sizes {
        rows: 5,
        kv_heads: 2,
        group: 2,
        pairs,
        layouts: [Layout::Contiguous; 3],
        seed: 3,
    };
    check(sizes, options, dtype)
}

/// In a graph, the operators run one after the other.
#[test]
fn a_graph_reaches_all_arguments() -> Result<()> {
    let (rows, head_dim) = (3, 8);
    for device in devices() {
        let noise = |shape: &[usize], seed| noisy(shape, seed, DType::F32)?.to_device(device);
        let inputs = Inputs {
            query: noise(&[rows, 4 * head_dim], 1)?,
            key: noise(&[rows, head_dim], 2)?,
            weights: [noise(&[head_dim], 3)?, noise(&[head_dim], 4)?],
            angles: [noise(&[rows, 2], 5)?, noise(&[rows, 2], 6)?],
            mixed: noise(&[rows, 2 * head_dim], 7)?,
        };
        let variables = inputs.variables()?;
        let options = Options {
            norms: Some(1e-5.into()),
            rotates: true,
            head_dim,
            has_gates: true,
        };
        let weights = [variables[2].as_tensor(), variables[3].as_tensor()];
        let transform = inputs.transform(weights, options);
        let [query, key] = transform.apply([&variables[0], &variables[1]])?;
        let gated = gate_heads(&variables[4], &variables[0], head_dim)?;
        let score = ((query.sqr()?.sum_all()? + key.sum_all()?)? + gated.sum_all()?)?;
        let store = score.backward()?;
        let alone = transform.gradients(
            Some([&inputs.query, &inputs.key]),
            [&(query * 2.0)?, &key.ones_like()?],
            Some([&inputs.mixed.ones_like()?, &inputs.mixed]),
        )?;
        let all = alone.heads.iter().chain(alone.weights.iter().flatten());
        for (found, variable) in all.zip(&variables) {
            assert_close(&numbers(found)?, &gradient(&store, variable)?, 2e-5);
        }
    }
    Ok(())
}

#[test]
fn no_rows_have_no_gradients() -> Result<()> {
    for device in devices() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::BF16, device);
        let weight = zeros(&[8])?;
        let transform = HeadTransform {
            norms: Some(HeadNorms {
                weights: [&weight, &weight],
                options: 1e-5.into(),
            }),
            angles: None,
            head_dim: Some(8),
            has_gates: false,
        };
        let (query, key) = (zeros(&[0, 16])?, zeros(&[0, 8])?);
        let heads = transform.apply([&query, &key])?;
        assert_eq!(
            (heads[0].dims(), heads[1].dims()),
            (query.dims(), key.dims())
        );
        let found = transform.gradients(Some([&query, &key]), heads.each_ref(), None)?;
        for of_weight in found.weights.iter().flatten() {
            assert_eq!(numbers(of_weight)?, [0.0; 8]);
        }
    }
    Ok(())
}

/// A head has `2 * pairs + rest` elements, and the first `2 * pairs` rotate.
#[test]
fn the_rest_of_a_head_does_not_rotate() -> Result<()> {
    let (rows, heads, pairs, rest) = (5, 3, 2, 3);
    let head_dim = 2 * pairs + rest;
    for device in devices() {
        let noise = |shape: &[usize], seed| noisy(shape, seed, DType::F32)?.to_device(device);
        let (cos, sin) = (noise(&[rows, pairs], 1)?, noise(&[rows, pairs], 2)?);
        let (query, key) = (
            noise(&[rows, heads * head_dim], 3)?,
            noise(&[rows, head_dim], 4)?,
        );
        let transform = HeadTransform {
            angles: Some([&cos, &sin]),
            head_dim: Some(head_dim),
            ..Default::default()
        };
        let rotated = transform.apply([&query, &key])?;
        let back = transform.gradients(None, [&query, &key], None)?.heads;
        for (i, x) in [&query, &key].into_iter().enumerate() {
            for (found, rotate) in [(&rotated[i], false), (&back[i], true)] {
                for head in 0..x.dim(1)? / head_dim {
                    let part = |x: &Tensor, from, len| x.narrow(1, head * head_dim + from, len);
                    let first = part(x, 0, 2 * pairs)?;
                    let expected = if rotate {
                        rope_gradient(&cos, &sin, &first)?
                    } else {
                        rope(&first, &cos, &sin)?
                    };
                    assert_eq!(numbers(&part(found, 0, 2 * pairs)?)?, numbers(&expected)?);
                    assert_eq!(
                        numbers(&part(found, 2 * pairs, rest)?)?,
                        numbers(&part(x, 2 * pairs, rest)?)?
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    for device in devices() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
        let (x, wide, angles, weight) = (
            zeros(&[5, 6])?,
            zeros(&[5, 12])?,
            zeros(&[5, 2])?,
            zeros(&[4])?,
        );
        let rotation = HeadTransform {
            angles: Some([&angles, &angles]),
            ..Default::default()
        };
        let call = |transform: &HeadTransform| message(transform.apply([&x, &x]));
        let head_dim = |head_dim, has_gates| HeadTransform {
            head_dim,
            has_gates,
            ..rotation
        };
        let error = call(&head_dim(Some(3), false));
        assert!(error.contains("head_dim: 3, must be at least"), "{error}");
        let error = call(&head_dim(None, true));
        assert!(
            error.contains("head_dim: None, must be positive"),
            "{error}"
        );
        let norms = HeadTransform {
            norms: Some(HeadNorms {
                weights: [&weight, &weight],
                options: 0.0.into(),
            }),
            ..Default::default()
        };
        let error = message(norms.apply([&wide, &wide]));
        assert!(error.contains("epsilon: 0, must be positive"), "{error}");
        let error = message(norms.gradients(None, [&wide, &wide], None));
        assert!(error.contains("heads: None, must be given"), "{error}");
        let error = message(rotation.gradients(None, [&x, &x], Some([&x, &x])));
        assert!(error.contains("gated: must be given with gates"), "{error}");

        let gate = |x: &Tensor, query: &Tensor, head_dim| message(gate_heads(x, query, head_dim));
        assert!(gate(&x, &wide, 4).contains("head_dim: 4, must be positive and divide"));
        assert!(gate(&x, &x, 3).contains("query: shape [5, 6], must be [5, 12]"));
        assert!(gate(&x, &wide.to_dtype(DType::BF16)?, 3).contains("query: BF16"));
        assert!(gate(&weight, &wide, 2).contains("x: shape [4], must be [N, heads * head_dim]"));
    }
    Ok(())
}
