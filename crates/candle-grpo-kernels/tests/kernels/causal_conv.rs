//! Tests `causal_conv` against a loop in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{PrefixTree, causal_conv, causal_conv_gradient, composed};
use candle_grpo_test_support::{assert_close, cases, devices, gradient, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::prefixes::prefixes;
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, check_gradient_alone, noisy};

/// Returns the results for a one-channel sequence.
fn expected(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let sums = (0..x.len()).map(|row| {
        let taps = weight.iter().rev().zip(x[..=row].iter().rev());
        taps.map(|(weight, x)| weight * x).sum::<f64>()
    });
    sums.map(|sum| sum / (1.0 + (-sum).exp())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        prefixes in prefixes(0usize..9),
        channels in prop_oneof![1usize..20, Just(300)],
        taps in 1usize..6,
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let tree = prefixes.tree()?;
        check_against_f64(
            &[
                (&noisy(&[prefixes.count(), channels], seed, dtype)?, layouts[0]),
                (&noisy(&[channels, taps], seed ^ 1, dtype)?, layouts[1]),
            ],
            4.0,
            |x| causal_conv(x[0], x[1], &tree),
            |x| composed::causal_conv(x[0], x[1], &tree),
        )?;
    }

    /// Rows that leak to the next sequence or from another branch change the results.
    #[test]
    fn each_sequence_equals_a_loop(
        prefixes in prefixes(0usize..9),
        channels in 1usize..4,
        taps in 1usize..6,
        seed in any::<u64>(),
    ) {
        for device in devices() {
            let x = noisy(&[prefixes.count(), channels], seed, DType::F32)?.to_device(device)?;
            let weight = noisy(&[channels, taps], seed ^ 1, DType::F32)?.to_device(device)?;
            let y = causal_conv(&x, &weight, &prefixes.tree()?)?;
            let (values, weights, results) = (numbers(&x)?, numbers(&weight)?, numbers(&y)?);
            for sequence in &prefixes.sequences {
                for channel in 0..channels {
                    let of_rows = |x: &[f64]| -> Vec<f64> {
                        sequence.iter().map(|&row| x[row as usize * channels + channel]).collect()
                    };
                    let weight = &weights[channel * taps..][..taps];
                    assert_close(&of_rows(&results), &expected(&of_rows(&values), weight), 1e-6);
                }
            }
        }
    }

    #[test]
    fn shared_prefixes_have_the_gradients_of_unshared_sequences(
        prefixes in prefixes(0usize..9),
        taps in 1usize..6,
        seed in any::<u64>(),
    ) {
        let x = Var::from_tensor(&noisy(&[prefixes.count(), 3], seed, DType::F32)?)?;
        let weight = Var::from_tensor(&noisy(&[3, taps], seed ^ 1, DType::F32)?)?;
        let of_result = noisy(&[prefixes.count(), 3], seed ^ 2, DType::F32)?;
        let (x_gradient, weight_gradient) =
            causal_conv_gradient(&x, &weight, &prefixes.tree()?, &of_result)?;
        let all = causal_conv(&prefixes.unshare(&x)?, &weight, &prefixes.unshared_tree()?)?;
        let first = Tensor::new(prefixes.first_positions(), &Device::Cpu)?;
        let store = (all.index_select(&first, 0)? * of_result)?.sum_all()?.backward()?;
        assert_close(&numbers(&x_gradient)?, &gradient(&store, &x)?, 4e-6);
        assert_close(&numbers(&weight_gradient)?, &gradient(&store, &weight)?, 4e-6);
    }
}

/// Each of the three rows before the branches adds nine gradients.
#[rstest]
fn a_prefix_may_have_many_branches(
    #[values(1, 2, 4, 5)] taps: usize,
    #[values(7, 8)] channels: usize,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    let mut count = 3;
    let sequences: Vec<Vec<u32>> = (0..9)
        .map(|branch| {
            let first = count;
            count += [1, 2, 12][branch % 3];
            (0..3).chain(first..count).collect()
        })
        .collect();
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let tree = PrefixTree::with_shared_rows(&lengths, &sequences.concat())?;
    check_against_f64(
        &[
            (
                &noisy(&[count as usize, channels], 1, dtype)?,
                Layout::Contiguous,
            ),
            (&noisy(&[channels, taps], 2, dtype)?, Layout::Contiguous),
        ],
        4.0,
        |x| causal_conv(x[0], x[1], &tree),
        |x| composed::causal_conv(x[0], x[1], &tree),
    )
}

#[test]
fn the_backward_pass_without_a_graph_is_bit_identical() -> Result<()> {
    let tree = PrefixTree::with_shared_rows(&[3, 4], &[0, 1, 2, 0, 1, 3, 4])?;
    check_gradient_alone(
        &[
            &noisy(&[5, 7], 1, DType::F32)?,
            &noisy(&[7, 4], 2, DType::F32)?,
        ],
        |x| causal_conv(x[0], x[1], &tree),
        |x, gradient| {
            let (x_gradient, weight_gradient) = causal_conv_gradient(x[0], x[1], &tree, gradient)?;
            Ok(vec![x_gradient, weight_gradient])
        },
    )
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let tree = PrefixTree::new(&[2])?;
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let (x, weight) = (zeros(&[2, 3], DType::F32)?, zeros(&[3, 4], DType::F32)?);
    let call = |x: &Tensor, weight: &Tensor| message(causal_conv(x, weight, &tree));
    assert!(call(&x.unsqueeze(0)?, &weight).contains("x: shape [1, 2, 3], must be [N, channels]"));
    assert!(call(&x, &x).contains("weight: shape [2, 3], must be [3, taps]"));
    assert!(call(&x, &zeros(&[3, 0], DType::F32)?).contains("weight: shape [3, 0]"));
    assert!(call(&x, &weight.to_dtype(DType::BF16)?).contains("weight: BF16"));
    assert!(call(&x.to_dtype(DType::U32)?, &weight).contains("x: U32"));
    let error = call(&zeros(&[3, 3], DType::F32)?, &weight);
    assert!(
        error.contains("x: 3 rows, must be the rows of tree, 2"),
        "{error}"
    );
    let error = message(causal_conv_gradient(&x, &weight, &tree, &weight));
    assert!(
        error.contains("gradient: shape [3, 4], must be that of x, [2, 3]"),
        "{error}"
    );
    Ok(())
}
