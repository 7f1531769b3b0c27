//! Tests `draw_tokens` against sorted tokens in f64.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{Draw, DrawOptions, DrawnToken, LogProbOptions, draw_tokens, log_prob};
use candle_grpo_test_support::{cases, devices, message, noise, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::layouts;
use crate::strategies::dtypes;

const OFF: DrawOptions = DrawOptions {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    greedy: false,
};

/// The logarithms of 0.4, 0.1, 0.3, 0.15, 0.05, plus 1.
const LOGITS: [f32; 5] = [
    0.083_709_27,
    -1.302_585_1,
    -0.203_972_8,
    -0.897_12,
    -1.995_732_3,
];

fn draw(
    logits: &[f32],
    uniforms: &[f64],
    options: &DrawOptions,
    device: &Device,
) -> Vec<Option<DrawnToken>> {
    let logits = Tensor::from_slice(logits, (1, logits.len()), device).unwrap();
    let draws: Vec<Draw> = uniforms
        .iter()
        .map(|&uniform| Draw { row: 0, uniform })
        .collect();
    draw_tokens(&logits, &draws, options).unwrap()
}

#[rstest]
fn the_log_prob_on_the_cpu_is_bit_identical_to_that_of_training(
    #[values(7, 513, 3000)] vocab: usize,
    #[values(1.0, 0.7)] temperature: f64,
) -> Result<()> {
    let logits: Vec<f32> = noise(vocab, 3).iter().map(|x| 9.0 * *x as f32).collect();
    let options = DrawOptions { temperature, ..OFF };
    let uniforms = [0.1, 0.5, 0.9];
    let drawn = draw(&logits, &uniforms, &options, &Device::Cpu);
    let logits = Tensor::from_slice(&logits, (1, 1, vocab), &Device::Cpu)?;
    for drawn in drawn.into_iter().flatten() {
        let target = Tensor::new(&[[drawn.token]], &Device::Cpu)?;
        let trained = log_prob(&logits, &target, temperature, LogProbOptions::default())?;
        let trained = trained.log_probs.to_vec2::<f32>()?[0][0];
        assert_eq!(drawn.log_prob.to_bits(), trained.to_bits());
        assert_eq!(drawn.drawn_log_prob.to_bits(), trained.to_bits());
    }
    Ok(())
}

/// Returns the tokens that can be sampled, in order.
fn kept(logits: &[f32], options: &DrawOptions, device: &Device) -> Vec<u32> {
    let grid: Vec<f64> = (0..40).map(|i| (f64::from(i) + 0.5) / 40.0).collect();
    let mut tokens: Vec<u32> = draw(logits, &grid, options, device)
        .into_iter()
        .map(|drawn| drawn.unwrap().token)
        .collect();
    tokens.dedup();
    tokens
}

#[rstest]
#[case(OFF, &[0, 1, 2, 3, 4])]
#[case(DrawOptions { top_k: 2, ..OFF }, &[0, 2])]
#[case(DrawOptions { top_k: 9, ..OFF }, &[0, 2, 3, 1, 4])]
#[case(DrawOptions { top_p: 0.69, ..OFF }, &[0, 2])]
#[case(DrawOptions { top_p: 0.71, ..OFF }, &[0, 2, 3])]
#[case(DrawOptions { top_p: 1e-9, ..OFF }, &[0])]
#[case(DrawOptions { min_p: 0.36, ..OFF }, &[0, 2, 3])]
#[case(DrawOptions { min_p: 1.0, ..OFF }, &[0])]
// 0.4 and 0.3 are 0.82 of what top_k leaves.
#[case(DrawOptions { top_k: 3, top_p: 0.82, ..OFF }, &[0, 2])]
#[case(DrawOptions { top_k: 3, top_p: 0.83, ..OFF }, &[0, 2, 3])]
#[case(DrawOptions { top_k: 3, top_p: 0.83, min_p: 0.5, ..OFF }, &[0, 2])]
// transformers: 0.4, 0.3 and 0.15 are the first to reach 0.8; vLLM would stop at 0.4 + 0.3 of 0.85.
#[case(DrawOptions { top_p: 0.8, min_p: 0.3, ..OFF }, &[0, 2, 3])]
#[case(DrawOptions { greedy: true, top_k: 3, ..OFF }, &[0])]
fn the_tokens_are_those_of_the_definitions(#[case] options: DrawOptions, #[case] expected: &[u32]) {
    for device in devices() {
        assert_eq!(kept(&LOGITS, &options, device), expected);
    }
}

#[test]
fn ties_at_the_kth_are_kept_and_equals_are_taken_in_order() {
    let logits = [1f32, 2., 1., 1., f32::NEG_INFINITY];
    for device in devices() {
        let kept = |options| kept(&logits, &options, device);
        assert_eq!(kept(DrawOptions { top_k: 2, ..OFF }), [1, 0, 2, 3]);
        assert_eq!(kept(DrawOptions { top_p: 0.6, ..OFF }), [1, 0]);
        assert_eq!(kept(DrawOptions { min_p: 1e-9, ..OFF }), [1, 0, 2, 3]);
        assert_eq!(kept(OFF), [0, 1, 2, 3]);
        let equals = [3f32; 4];
        let greedy = DrawOptions {
            greedy: true,
            ..OFF
        };
        let drawn = draw(&equals, &[0.9], &greedy, device)[0].unwrap();
        assert_eq!((drawn.token, drawn.drawn_log_prob), (0, 0.0));
        assert!((drawn.log_prob - 0.25f32.ln()).abs() < 1e-6);
    }
}

#[test]
fn a_number_counts_in_its_whole_precision() {
    for device in devices() {
        // Equal weights are exact, so the boundaries are 1/3 and 2/3.
        let numbers = [1.0, 2.0].map(|x| [x / 3.0 - 1e-9, x / 3.0 + 1e-9]);
        let drawn = draw(&[0.0; 3], numbers.as_flattened(), &OFF, device);
        let tokens: Vec<u32> = drawn.into_iter().map(|x| x.unwrap().token).collect();
        assert_eq!(tokens, [0, 1, 1, 2]);
    }
}

#[test]
fn frequencies_are_the_probabilities_in_the_tails_too() {
    // From 0.83 down to 2e-5.
    let logits: [f32; 8] = [4.0, 1.0, -6.5, 2.0, -3.0, 0.0, -1.0, -5.0];
    let points = 1_000_000;
    let grid: Vec<f64> = (0..points)
        .map(|i| (f64::from(i) + 0.5) / f64::from(points))
        .collect();
    for options in [
        OFF,
        DrawOptions {
            temperature: 0.7,
            ..OFF
        },
        DrawOptions {
            temperature: 2.5,
            top_k: 6,
            ..OFF
        },
    ] {
        let mut counts = [0u32; 8];
        let mut log_probs = [0f32; 8];
        for drawn in draw(&logits, &grid, &options, &Device::Cpu)
            .into_iter()
            .flatten()
        {
            counts[drawn.token as usize] += 1;
            log_probs[drawn.token as usize] = drawn.drawn_log_prob;
        }
        for (count, log_prob) in counts.iter().zip(log_probs) {
            let expected = f64::from(log_prob).exp() * f64::from(points);
            assert!(
                *count == 0 || (f64::from(*count) - expected).abs() < 1.5,
                "{counts:?}"
            );
        }
        assert_eq!(
            counts.iter().filter(|count| **count == 0).count(),
            if options.top_k > 0 { 2 } else { 0 }
        );
    }
}

/// The kept tokens in order, with their weights.
fn sorted(logits: &[f64], options: &DrawOptions) -> Vec<(u32, f64)> {
    let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut all: Vec<(u32, f64)> = (0..)
        .zip(logits)
        .map(|(token, x)| (token, ((x - greatest) / options.temperature).exp()))
        .collect();
    if options.top_k == 0 && options.top_p == 1.0 && options.min_p == 0.0 {
        return all;
    }
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    if (1..all.len()).contains(&options.top_k) {
        let kth = all[options.top_k - 1].1;
        all.retain(|(_, weight)| *weight >= kth);
    }
    let total: f64 = all.iter().map(|(_, weight)| weight).sum();
    let mut before = 0.0;
    all.retain(|(_, weight)| {
        let is_kept = options.top_p == 1.0 || before < options.top_p * total;
        before += weight;
        is_kept
    });
    all.retain(|(_, weight)| *weight >= options.min_p);
    all
}

fn options() -> impl Strategy<Value = DrawOptions> {
    (
        0.3f64..3.0,
        prop_oneof![Just(0usize), 1usize..40, Just(100_000)],
        prop_oneof![Just(1.0), 0.01f64..1.0],
        prop_oneof![Just(0.0), 0.0f64..0.5],
    )
        .prop_map(|(temperature, top_k, top_p, min_p)| DrawOptions {
            temperature,
            top_k,
            top_p,
            min_p,
            greedy: false,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]

    #[test]
    fn a_draw_is_that_of_sorted_tokens(
        rows in 1usize..4,
        vocab in prop_oneof![1usize..50, 500usize..3000, 4000usize..10_000],
        spread in 0.1f64..6.0,
        options in options(),
        dtype in dtypes(),
        layout in layouts(),
        seed in any::<u64>(),
        uniforms in proptest::collection::vec((0usize..3, 0.0f64..1.0), 1..8),
    ) {
        let logits: Vec<f64> = noise(rows * vocab, seed).iter().map(|x| spread * x).collect();
        let logits = Tensor::from_vec(logits, (rows, vocab), &Device::Cpu)?.to_dtype(dtype)?;
        let logits = layout.apply(&logits)?;
        let draws: Vec<Draw> = uniforms.iter().map(|&(row, uniform)| Draw { row: row % rows, uniform }).collect();
        for device in devices() {
            let drawn = draw_tokens(&logits.to_device(device)?, &draws, &options)?;
            for (draw, drawn) in draws.iter().zip(drawn) {
                let row = numbers(&logits.get(draw.row)?)?;
                let drawn = drawn.expect("finite logits");
                let all: f64 = sorted(&row, &DrawOptions { temperature: options.temperature, ..OFF }).iter().map(|x| x.1).sum();
                let greatest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let log_weight = (row[drawn.token as usize] - greatest) / options.temperature;
                prop_assert!((f64::from(drawn.log_prob) - (log_weight - all.ln())).abs() < 1e-5);
                // Rounding at the boundary of a filter or a token may change the result.
                let results: Vec<Vec<(u32, f64)>> = [-1e-5, 0.0, 1e-5]
                    .iter()
                    .map(|change| sorted(&row, &DrawOptions {
                        top_p: if options.top_p == 1.0 { 1.0 } else { options.top_p + change },
                        min_p: if options.min_p == 0.0 { 0.0 } else { (options.min_p + change).max(0.0) },
                        ..options
                    }))
                    .collect();
                if results[0].len() != results[2].len() {
                    continue;
                }
                let total: f64 = results[1].iter().map(|x| x.1).sum();
                let mut before = 0.0;
                let mut is_found = false;
                for &(token, weight) in &results[1] {
                    let range = before - 1e-5 * total..=before + weight + 1e-5 * total;
                    is_found |= token == drawn.token && range.contains(&(draw.uniform * total));
                    before += weight;
                }
                prop_assert!(is_found, "{draw:?} drew {drawn:?}");
                prop_assert!((f64::from(drawn.drawn_log_prob) - (log_weight - total.ln())).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn impossible_tokens_are_never_drawn() {
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
    let last = 1.0 - f64::EPSILON / 2.0;
    for device in devices() {
        for options in [
            OFF,
            DrawOptions { top_k: 2, ..OFF },
            DrawOptions { top_p: 0.9, ..OFF },
        ] {
            for drawn in draw(&logits, &[0.0, 0.5, last], &options, device) {
                let drawn = drawn.unwrap();
                assert_eq!(
                    (drawn.token, drawn.log_prob, drawn.drawn_log_prob),
                    (1, 0.0, 0.0)
                );
            }
        }
    }
}

/// Weights that are 0 beside the greatest one, although they are not beside others in their part of
/// the row.
#[test]
fn tokens_whose_weights_underflow_are_never_drawn() {
    let mut logits = vec![f32::NEG_INFINITY; 8192];
    logits[512..1024].fill(-120.);
    logits[1024] = -50.;
    logits[4096] = 0.;
    for device in devices() {
        let drawn = draw(&logits, &[0.0, 0.5], &OFF, device);
        let tokens = drawn.iter().map(|drawn| drawn.unwrap().token);
        assert_eq!(tokens.collect::<Vec<_>>(), [1024, 4096]);
    }
}

#[test]
fn a_row_without_a_distribution_draws_nothing() {
    for device in devices() {
        for logits in [
            [0.0, f32::NAN],
            [f32::INFINITY, 0.0],
            [f32::NEG_INFINITY; 2],
        ] {
            assert_eq!(draw(&logits, &[0.5], &OFF, device), [None]);
        }
    }
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let with =
        |row, uniform, options| message(draw_tokens(&logits, &[Draw { row, uniform }], &options));
    assert!(with(2, 0.0, OFF).contains("draws[0]: row 2, must be below 2"));
    assert!(with(0, 1.0, OFF).contains("draws[0]: uniform 1, must be at least 0 and below 1"));
    assert!(with(0, f64::NAN, OFF).contains("draws[0]: uniform NaN"));
    assert!(
        with(
            0,
            0.0,
            DrawOptions {
                temperature: 0.0,
                ..OFF
            }
        )
        .contains("temperature: 0")
    );
    assert!(
        with(0, 0.0, DrawOptions { top_p: 0.0, ..OFF })
            .contains("top_p: 0, must be above 0 and at most 1")
    );
    assert!(
        with(0, 0.0, DrawOptions { min_p: 1.5, ..OFF })
            .contains("min_p: 1.5, must be at least 0 and at most 1")
    );
    let error = message(draw_tokens(&logits.get(0)?, &[], &OFF));
    assert!(
        error.contains("logits: shape [3], must be [N, V]"),
        "{error}"
    );
    assert_eq!(draw_tokens(&logits, &[], &OFF)?, []);
    Ok(())
}
