//! Tests `attention` against its composed twin in f64, and tests masks.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    CausalAttention, Scores, Sequences, attention, attention_gradient, composed,
};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, check_gradient_alone, noisy};

/// Compares `attention` with its twin. Query, key and value have shapes and layouts.
fn check(
    inputs: [(&Tensor, Layout); 3],
    mask: &Tensor,
    head_dim: usize,
    scores: Scores,
    loosened: f64,
) -> Result<()> {
    let on = |x: &[&Tensor]| mask.to_device(x[0].device());
    check_against_f64(
        &inputs,
        loosened,
        |x| attention(x[0], x[1], x[2], &on(x)?, head_dim, scores),
        |x| composed::attention(x[0], x[1], x[2], &on(x)?, head_dim, scores),
    )
}

fn check_packed(lengths: &[usize]) -> Result<()> {
    let rows = lengths.iter().sum();
    let query = noisy(&[rows, 12], 1, DType::F32)?;
    let key = noisy(&[rows, 6], 2, DType::F32)?;
    let value = noisy(&[rows, 6], 3, DType::F32)?;
    check_against_f64(
        &[&query, &key, &value].map(|x| (x, Layout::Contiguous)),
        2.0,
        |x| attention(x[0], x[1], x[2], Sequences::Packed(lengths), 3, 0.7),
        |x| composed::attention(x[0], x[1], x[2], Sequences::Packed(lengths), 3, 0.7),
    )
}

/// All combinations of window and cap. The cap bends the scores.
fn scores() -> impl Strategy<Value = Scores> {
    let window = prop_oneof![1usize..20, 30usize..120, Just(usize::MAX)];
    let (window, cap) = (prop::option::of(window), prop::option::of(0.3f64..3.0));
    (window, cap).prop_map(|(window, cap)| Scores {
        scale: 0.7,
        window,
        cap,
    })
}

/// Keys 1, 2 and 3 and query 1, with a unit matrix as values, so that each result row is the
/// weights.
#[rstest]
#[case::all(None, None, [1., 2., 3.])]
#[case::window(Some(2), None, [f64::NEG_INFINITY, 2., 3.])]
#[case::own_position(Some(1), None, [f64::NEG_INFINITY, f64::NEG_INFINITY, 3.])]
#[case::cap(None, Some(2.), [2. * 0.5f64.tanh(), 2. * 1f64.tanh(), 2. * 1.5f64.tanh()])]
fn the_weights_are_the_softmax_of_the_scores(
    #[case] window: Option<usize>,
    #[case] cap: Option<f64>,
    #[case] expected: [f64; 3],
) -> Result<()> {
    let total: f64 = expected.iter().map(|score| score.exp()).sum();
    let expected = expected.map(|score| score.exp() / total);
    for device in devices() {
        for dtype in [DType::F32, DType::F64] {
            let query = Tensor::new(&[[1f32, 0., 0.]; 3], device)?.to_dtype(dtype)?;
            let key = Tensor::new(&[[1f32, 9., 9.], [2., 9., 9.], [3., 9., 9.]], device)?;
            let value = Tensor::eye(3, dtype, device)?;
            let scores = Scores {
                scale: 1.0,
                window,
                cap,
            };
            let (key, sequences) = (key.to_dtype(dtype)?, Sequences::Packed(&[3]));
            let y = attention(&query, &key, &value, sequences, 3, scores)?;
            assert_close(&numbers(&y.get(2)?)?, &expected, 1e-6);
        }
    }
    Ok(())
}

/// Returns a random mask with padding at about a third of the positions.
fn gaps(batch: usize, total: usize, seed: u64) -> Result<Tensor> {
    noisy(&[batch, total], seed, DType::F32)?.ge(-0.3f32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 256)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        batch in 0usize..4,
        new in prop_oneof![0usize..4, 30usize..40, Just(100)],
        past in prop_oneof![Just(0usize), 1usize..20],
        kv_heads in 1usize..3,
        group in 1usize..4,
        head_dim in prop_oneof![1usize..10, Just(16)],
        scores in scores(),
        padded in any::<bool>(),
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let total = new + past.max(usize::from(new == 0));
        let width = kv_heads * head_dim;
        let mask = if padded {
            gaps(batch, total, seed)?
        } else {
            Tensor::ones((batch, total), DType::U8, &Device::Cpu)?
        };
        let key = noisy(&[batch, total, width], seed ^ 1, dtype)?;
        let value = noisy(&[batch, total, width], seed ^ 2, dtype)?;
        let query = noisy(&[batch, new, width * group], seed ^ 3, dtype)?;
        let inputs = [(&query, layouts[0]), (&key, layouts[1]), (&value, layouts[2])];
        check(inputs, &layouts[3].apply(&mask)?, head_dim, scores, 2.0)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    /// Packed sequences and single sequences give bit-identical results.
    #[test]
    fn packed_sequences_do_not_influence_each_other(
        lengths in prop::collection::vec(prop_oneof![1usize..9, 90usize..120], 1..5),
        kv_heads in 1usize..3,
        group in 1usize..4,
        scores in scores(),
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        let head_dim = 4;
        let (rows, width) = (lengths.iter().sum::<usize>(), kv_heads * head_dim);
        for device in devices() {
            let noise = |width: usize, seed| noisy(&[rows, width], seed, dtype)?.to_device(device);
            let (query, gradient) = (noise(width * group, seed)?, noise(width * group, seed ^ 3)?);
            let (key, value) = (noise(width, seed ^ 1)?, noise(width, seed ^ 2)?);
            let packed = Sequences::Packed(&lengths);
            let y = attention(&query, &key, &value, packed, head_dim, scores)?;
            let gradients = attention_gradient(&query, &key, &value, packed, head_dim, scores, &gradient)?;

            let mut first = 0;
            for &length in &lengths {
                let rows = |x: &Tensor| x.narrow(0, first, length);
                let all = Tensor::ones((1, length), DType::U8, device)?;
                let (query, key, value) = (rows(&query)?, rows(&key)?, rows(&value)?);
                let alone = attention(&query, &key, &value, &all, head_dim, scores)?;
                assert_eq!(numbers(&rows(&y)?)?, numbers(&alone)?);
                let alone =
                    attention_gradient(&query, &key, &value, &all, head_dim, scores, &rows(&gradient)?)?;
                for (together, alone) in gradients.iter().zip(&alone) {
                    assert_eq!(numbers(&rows(together)?)?, numbers(alone)?);
                }
                first += length;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    /// The ends of sequences have the bits of each end alone, and on the CPU those of the whole
    /// sequence.
    #[test]
    fn continued_sequences_have_the_bits_of_whole_ones(
        ends in prop::collection::vec(
            (prop_oneof![1usize..9, 90usize..120], prop_oneof![Just(0usize), 1usize..150]),
            1..4,
        ),
        kv_heads in 1usize..3,
        group in 1usize..4,
        scores in scores(),
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        let head_dim = 4;
        let width = kv_heads * head_dim;
        let ends: Vec<(usize, usize)> = ends.iter().map(|&(new, past)| (new, new + past)).collect();
        let queries: usize = ends.iter().map(|end| end.0).sum();
        let keys: usize = ends.iter().map(|end| end.1).sum();
        for device in devices() {
            let noise = |rows: usize, width: usize, seed| noisy(&[rows, width], seed, dtype)?.to_device(device);
            // Whole sequences have queries at all positions.
            let all = noise(keys, width * group, seed)?;
            let (key, value) = (noise(keys, width, seed ^ 1)?, noise(keys, width, seed ^ 2)?);
            let gradient = noise(queries, width * group, seed ^ 3)?;
            let mut first = 0;
            let mut query = Vec::new();
            for &(new, total) in &ends {
                query.push(all.narrow(0, first + total - new, new)?);
                first += total;
            }
            let query = Tensor::cat(&query, 0)?;
            let continued = Sequences::Continued(&ends);
            let y = attention(&query, &key, &value, continued, head_dim, scores)?;
            let gradients =
                attention_gradient(&query, &key, &value, continued, head_dim, scores, &gradient)?;

            let (mut first, mut first_key) = (0, 0);
            for &(new, total) in &ends {
                let queries = |x: &Tensor| x.narrow(0, first, new);
                let keys = |x: &Tensor| x.narrow(0, first_key, total);
                let ones = Tensor::ones((1, total), DType::U8, device)?;
                let (query, key, value) = (queries(&query)?, keys(&key)?, keys(&value)?);
                let alone = attention(&query, &key, &value, &ones, head_dim, scores)?;
                assert_eq!(numbers(&queries(&y)?)?, numbers(&alone)?);
                if device.is_cpu() {
                    let whole = attention(&keys(&all)?, &key, &value, &ones, head_dim, scores)?;
                    let end = whole.narrow(0, total - new, new)?;
                    assert_eq!(numbers(&queries(&y)?)?, numbers(&end)?);
                }
                let [of_query, of_key, of_value] = attention_gradient(
                    &query, &key, &value, &ones, head_dim, scores, &queries(&gradient)?,
                )?;
                assert_eq!(numbers(&queries(&gradients[0])?)?, numbers(&of_query)?);
                assert_eq!(numbers(&keys(&gradients[1])?)?, numbers(&of_key)?);
                assert_eq!(numbers(&keys(&gradients[2])?)?, numbers(&of_value)?);
                first += new;
                first_key += total;
            }
        }
    }
}

#[test]
fn continued_sequences_equal_the_composed_twin() -> Result<()> {
    let ends = [(3, 3), (1, 9), (4, 10)];
    let query = noisy(&[8, 12], 1, DType::F32)?;
    let (key, value) = (
        noisy(&[22, 6], 2, DType::F32)?,
        noisy(&[22, 6], 3, DType::F32)?,
    );
    check_against_f64(
        &[&query, &key, &value].map(|x| (x, Layout::Contiguous)),
        2.0,
        |x| attention(x[0], x[1], x[2], Sequences::Continued(&ends), 3, 0.7),
        |x| composed::attention(x[0], x[1], x[2], Sequences::Continued(&ends), 3, 0.7),
    )
}

#[test]
fn an_error_names_ends_that_do_not_fit() -> Result<()> {
    let x = Tensor::zeros((5, 4), DType::F32, &Device::Cpu)?;
    let call = |ends: &[(usize, usize)]| {
        message(attention(&x, &x, &x, Sequences::Continued(ends), 2, 1.0))
    };
    assert!(call(&[]).contains("query: 5 positions, must be the sum of those in ends, []"));
    assert!(call(&[(5, 5), (0, 1)]).contains("ends[1]: (0, 1), must be at least one query"));
    assert!(call(&[(5, 4)]).contains("ends[0]: (5, 4), must be"));
    assert!(call(&[(2, 5)]).contains("query: 5 positions, must be the sum of those in ends, [2]"));
    assert!(call(&[(5, 6)]).contains("key: 5 positions, must be the sum of those in ends, [6]"));
    Ok(())
}

#[test]
fn packed_sequences_equal_the_composed_twin() -> Result<()> {
    check_packed(&[3, 1, 10])
}

/// More tasks than cores, so that tasks reuse buffers.
#[test]
fn many_packed_sequences_equal_the_composed_twin() -> Result<()> {
    check_packed(&(0..60).map(|at| 1 + at % 4).collect::<Vec<_>>())
}

#[test]
fn the_backward_pass_without_a_graph_is_bit_identical() -> Result<()> {
    let (query, key) = (
        noisy(&[2, 5, 12], 1, DType::F32)?,
        noisy(&[2, 7, 6], 2, DType::F32)?,
    );
    let value = noisy(&[2, 7, 6], 3, DType::F32)?;
    let mask = gaps(2, 7, 4)?;
    check_gradient_alone(
        &[&query, &key, &value],
        |x| attention(x[0], x[1], x[2], &mask.to_device(x[0].device())?, 3, 0.7),
        |x, gradient| {
            let mask = mask.to_device(x[0].device())?;
            let [a, b, c] = attention_gradient(x[0], x[1], x[2], &mask, 3, 0.7, gradient)?;
            Ok(vec![a, b, c])
        },
    )
}

/// One operator for calls with different sizes and dtypes.
#[test]
fn a_kept_forward_pass_gives_bit_identical_gradients() -> Result<()> {
    for device in devices() {
        let mask = Tensor::ones((2, 7), DType::U8, device)?;
        let padded = CausalAttention::new(&mask, 3, 0.7);
        let packed = CausalAttention::new(Sequences::Packed(&[9, 5]), 3, 0.7);
        for (operator, sequences, new, dtype) in [
            (&padded, Sequences::Padded(&mask), 7, DType::F32),
            (&padded, Sequences::Padded(&mask), 5, DType::F32),
            (&packed, Sequences::Packed(&[9, 5]), 7, DType::BF16),
            (&packed, Sequences::Packed(&[9, 5]), 7, DType::F32),
            (&packed, Sequences::Packed(&[9, 5]), 7, DType::F64),
        ] {
            let noise = |rows: usize, width: usize, seed| {
                noisy(&[2 * rows, width], seed, DType::F32)?
                    .to_device(device)?
                    .to_dtype(dtype)
            };
            let (query, gradient) = (noise(new, 12, 1)?, noise(new, 12, 4)?);
            let (key, value) = (noise(7, 6, 2)?, noise(7, 6, 3)?);
            let (y, log_sums) = operator.forward([&query, &key, &value])?;
            assert_eq!(
                log_sums.is_some(),
                device.is_cuda() && dtype != DType::F64,
                "only the CUDA kernels need log-sums"
            );
            let alone = attention(&query, &key, &value, sequences, 3, 0.7)?;
            assert_eq!(numbers(&y)?, numbers(&alone)?);
            let forward = log_sums.as_ref().map(|log_sums| (&y, log_sums));
            let kept = operator.backward([&query, &key, &value], forward, &gradient)?;
            let again = attention_gradient(&query, &key, &value, sequences, 3, 0.7, &gradient)?;
            for (kept, again) in kept.iter().zip(&again) {
                assert_eq!(numbers(kept)?, numbers(again)?);
            }
        }
    }
    Ok(())
}

#[test]
fn an_error_names_a_forward_pass_of_other_tensors() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (x, log_sums) = (zeros(&[5, 4])?, zeros(&[10])?);
    let operator = CausalAttention::new(Sequences::Packed(&[2, 3]), 2, 1.0);
    let call = |y: &Tensor, log_sums: &Tensor| {
        message(operator.backward([&x, &x, &x], Some((y, log_sums)), &x))
    };
    assert!(
        call(&zeros(&[4, 4])?, &log_sums).contains("y: [4, 4] of F32, must be contiguous [5, 4]")
    );
    let short = zeros(&[9])?;
    assert!(call(&x, &short).contains("log_sums: [9] of F32, must be [10] of f32"));
    operator
        .backward([&x, &x, &x], Some((&x, &log_sums)), &x)
        .map(drop)
}

#[test]
fn an_error_names_lengths_that_do_not_fit() -> Result<()> {
    let x = Tensor::zeros((5, 4), DType::F32, &Device::Cpu)?;
    let call =
        |lengths: &[usize]| message(attention(&x, &x, &x, Sequences::Packed(lengths), 2, 1.0));
    assert!(call(&[]).contains("lengths: none"));
    assert!(call(&[5, 0]).contains("lengths[1]: 0, must be at least 1"));
    assert!(call(&[2, 2]).contains("query: 5 positions, must be the sum of lengths, [2, 2]"));
    assert!(call(&[usize::MAX, 6]).contains("query: 5 positions"));
    let short = x.narrow(0, 0, 4)?;
    let lengths = Sequences::Packed(&[5]);
    assert!(message(attention(&x, &short, &short, lengths, 2, 1.0)).contains("key: 4 positions"));
    let gradient = attention_gradient(&x, &x, &x, lengths, 2, 1.0, &short);
    assert!(message(gradient).contains("gradient: shape [4, 4], must be that of query, [5, 4]"));
    Ok(())
}

#[rstest]
fn inputs_may_be_flat_rows(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let (query, key) = (noisy(&[14, 12], 1, dtype)?, noisy(&[14, 6], 2, dtype)?);
    let value = noisy(&[14, 6], 3, dtype)?;
    let mask = gaps(2, 7, 4)?.to_dtype(DType::F32)?;
    let inputs = [&query, &key, &value].map(|x| (x, Layout::Transposed));
    check(inputs, &mask, 3, 0.7.into(), 2.0)
}

#[test]
fn nan_at_padding_has_no_effect() -> Result<()> {
    for device in devices() {
        let shape = [2, 40, 8];
        let mask = gaps(2, 40, 9)?.to_device(device)?;
        let hidden = mask.eq(0u8)?.unsqueeze(2)?.broadcast_as(&shape)?;
        let spoil = |x: &Tensor| {
            let nan = Tensor::new(f32::NAN, device)?.broadcast_as(&shape)?;
            hidden.where_cond(&nan, x)
        };
        let inputs = [1, 2, 3].map(|seed| noisy(&shape, seed, DType::F32));
        let slope = noisy(&shape, 4, DType::F32)?.to_device(device)?;
        for fused in [true, false] {
            let run = |spoiled: bool| -> Result<_> {
                let spoil = |x: &Tensor| if spoiled { spoil(x) } else { Ok(x.clone()) };
                let mut variables = Vec::new();
                for input in &inputs {
                    let input = input.as_ref().expect("noise").to_device(device)?;
                    variables.push(Var::from_tensor(&spoil(&input)?)?);
                }
                let (query, key, value) = (&variables[0], &variables[1], &variables[2]);
                let y = if fused {
                    attention(query, key, value, &mask, 4, 0.5)?
                } else {
                    composed::attention(query, key, value, &mask, 4, 0.5)?
                };
                // The result gradient is NaN at padding too.
                let gradients = (&y * spoil(&slope)?)?.sum_all()?.backward()?;
                let mut results = vec![numbers(&y)?];
                for variable in &variables {
                    results.push(numbers(gradients.get(variable).expect("a gradient"))?);
                }
                Ok(results)
            };
            let (spoiled, clean) = (run(true)?, run(false)?);
            assert_eq!(spoiled, clean);
            let padding = hidden.flatten_all()?.to_vec1::<u8>()?;
            for result in &spoiled {
                let at_padding = result
                    .iter()
                    .zip(&padding)
                    .filter(|(_, hidden)| **hidden == 1);
                assert!(
                    at_padding.clone().count() > 0 && at_padding.clone().all(|(x, _)| *x == 0.0)
                );
                assert!(result.iter().filter(|x| **x != 0.0).count() > result.len() / 3);
            }
        }
    }
    Ok(())
}

#[test]
fn one_new_position_after_others_equals_the_last_of_all() -> Result<()> {
    for device in devices() {
        let mask = gaps(3, 50, 5)?.to_device(device)?;
        let noise = |seed| noisy(&[3, 50, 8], seed, DType::F32)?.to_device(device);
        let (query, key, value) = (noise(1)?, noise(2)?, noise(3)?);
        let whole = attention(&query, &key, &value, &mask, 4, 0.5)?;
        let last = attention(&query.narrow(1, 49, 1)?, &key, &value, &mask, 4, 0.5)?;
        assert_close(&numbers(&last)?, &numbers(&whole.narrow(1, 49, 1)?)?, 1e-6);
    }
    Ok(())
}

/// CUDA has kernels for heads up to 64, 128 and 256 wide.
#[rstest]
fn heads_of_every_width_equal_the_composed_twin(
    #[values(64, 80, 96, 128, 144, 256, 260)] head_dim: usize,
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let (new, total) = (70, 75);
    let query = noisy(&[2, new, 2 * head_dim], 1, dtype)?;
    let key = noisy(&[2, total, head_dim], 2, dtype)?;
    let value = noisy(&[2, total, head_dim], 3, dtype)?;
    let mask = gaps(2, total, 4)?;
    let inputs = [&query, &key, &value].map(|x| (x, Layout::Contiguous));
    check(inputs, &mask, head_dim, 0.1.into(), 4.0)
}

#[test]
fn large_scores_do_not_overflow() -> Result<()> {
    let x = (noisy(&[1, 20, 4], 1, DType::F32)? * 1e3)?;
    let value = noisy(&[1, 20, 4], 2, DType::F32)?;
    let mask = Tensor::ones((1, 20), DType::U8, &Device::Cpu)?;
    let inputs = [&x, &x, &value].map(|x| (x, Layout::Contiguous));
    // With queries and keys at 1000, the rounding error in a score gradient is multiplied.
    check(inputs, &mask, 4, 0.7.into(), 200.0)
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (query, key, mask) = (zeros(&[2, 3, 8])?, zeros(&[2, 5, 4])?, zeros(&[2, 5])?);
    let call = |query: &Tensor, key: &Tensor, value: &Tensor, mask: &Tensor| {
        message(attention(query, key, value, mask, 2, 1.0))
    };
    assert!(call(&query, &key, &key, &key).contains("mask: shape [2, 5, 4], must be [B, T]"));
    assert!(call(&query, &key, &key, &zeros(&[0, 5])?).contains("query: 6 positions"));
    assert!(call(&query, &key, &key, &zeros(&[2, 0])?).contains("mask: shape [2, 0]"));
    assert!(call(&query, &key, &key, &zeros(&[2, 6])?).contains("key: 10 positions"));
    assert!(call(&zeros(&[2, 6, 8])?, &key, &key, &mask).contains("query: 12 positions"));
    assert!(call(&zeros(&[2, 3, 6])?, &key, &key, &mask).contains("query: 3 heads"));
    assert!(call(&zeros(&[2, 3, 7])?, &key, &key, &mask).contains("multiple of head_dim, 2"));
    assert!(call(&query, &key, &zeros(&[2, 4, 5])?, &mask).contains("value: shape [2, 4, 5]"));
    let half = key.to_dtype(DType::BF16)?;
    assert!(call(&query, &half, &key, &mask).contains("key: BF16"));
    let no_heads = attention(&query, &key, &key, &mask, 0, 1.0);
    assert!(message(no_heads).contains("head_dim, 0"));
    for (scores, words) in [
        (
            Scores {
                window: Some(0),
                ..1.0.into()
            },
            "window: 0, must be at least 1",
        ),
        (
            Scores {
                cap: Some(-1.0),
                ..1.0.into()
            },
            "cap: -1, must be positive",
        ),
    ] {
        let error = message(attention(&query, &key, &key, &mask, 2, scores));
        assert!(error.contains(words), "{error}");
    }
    let no_scale = attention(&query, &key, &key, &mask, 2, f64::NAN);
    assert!(message(no_scale).contains("scale: NaN"));
    Ok(())
}
