//! Tests `log_prob` against its composed twin in f64, and tests masks, memory and infinities.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{LogProbOptions, composed, log_prob, log_prob_gradient, soft_cap};
use candle_grpo_test_support::{assert_close, cases, devices, message, noise_tensor, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::token_results::{derivatives, results, score, targets};
use crate::twin::{check_views, has_no_twin, noisy};

/// Returns the tolerances for the results and for the gradient, which has the logits' dtype.
fn tolerances(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F32 => (4e-6, 4e-6),
        DType::BF16 => (4e-6, 4e-3),
        _ => (4e-6, 1e-3),
    }
}

/// Compares `log_prob` with its twin. The logits have a shape and a layout.
fn check_against_f64(
    (logits, layout): (&Tensor, Layout),
    targets: &Tensor,
    temperature: f64,
    mask: Option<&Tensor>,
) -> Result<()> {
    let (close, gradient_close) = tolerances(logits.dtype());
    let device = targets.device();
    let values = layout.apply(logits)?.to_device(device)?;
    let options = LogProbOptions {
        mask,
        ..Default::default()
    };
    if has_no_twin(device, values.elem_count()) {
        for result in results(&log_prob(&values, targets, temperature, options)?) {
            assert_eq!(result.dims(), targets.dims());
        }
        return Ok(());
    }
    let exact = Var::from_tensor(&values.to_dtype(DType::F64)?)?;
    let fused = Var::from_tensor(&values)?;
    let expected = composed::log_prob(&exact, targets, temperature, options)?;
    let actual = log_prob(&fused, targets, temperature, options)?;
    for (actual, expected) in results(&actual).iter().zip(results(&expected)) {
        assert_eq!(actual.dtype(), DType::F32);
        assert_eq!(actual.dims(), targets.dims());
        assert_close(&numbers(actual)?, &numbers(&expected)?, close);
    }
    let (expected, actual) = (score(&expected)?.backward()?, score(&actual)?.backward()?);
    let (Some(expected), Some(actual)) = (expected.get(&exact), actual.get(&fused)) else {
        panic!("a gradient is missing");
    };
    assert_eq!(actual.dtype(), logits.dtype());
    assert_close(&numbers(actual)?, &numbers(expected)?, gradient_close);
    check_views(device, &[(logits, layout)], |views| {
        let tokens = log_prob(views[0], targets, temperature, options)?;
        Ok((results(&tokens).to_vec(), score(&tokens)?))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        outer in prop::collection::vec(0usize..4, 1..3),
        vocab in prop_oneof![Just(1usize), 2usize..40, 1000usize..1100, Just(2048), 2049usize..3000],
        temperature in 0.3f64..2.0,
        scale in prop_oneof![Just(0.0), 0.1f64..30.0],
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts()],
        masked in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let rows: usize = outer.iter().product();
        // The scale is for logits / temperature: its rounding in f32 bounds the error.
        let shape = [&outer[..], &[vocab]].concat();
        let logits = (noisy(&shape, seed, DType::F64)? * (scale * temperature))?.to_dtype(dtype)?;
        for device in devices() {
            let targets = targets(rows, vocab, seed, device)?.reshape(&outer[..])?;
            let targets = layouts[1].apply(&targets)?;
            let mask: Vec<u8> = (0..rows).map(|row| (seed >> row & 1) as u8).collect();
            let mask = layouts[2].apply(&Tensor::from_vec(mask, &outer[..], device)?)?;
            check_against_f64((&logits, layouts[0]), &targets, temperature, masked.then_some(&mask))?;
        }
    }
}

#[test]
fn nan_in_a_masked_row_has_no_effect() -> Result<()> {
    for device in devices() {
        let logits = Var::new(&[[1f32, 2., 3.], [f32::NAN, f32::INFINITY, 0.]], device)?;
        let targets = Tensor::new(&[1i64, -100], device)?;
        let mask = Tensor::new(&[1f32, 0.], device)?;
        for twin in [log_prob, composed::log_prob] {
            let tokens = twin(
                &logits,
                &targets,
                1.0,
                LogProbOptions {
                    mask: Some(&mask),
                    ..Default::default()
                },
            )?;
            for result in results(&tokens) {
                let result = result.to_vec1::<f32>()?;
                assert!(result[0].is_finite());
                assert_eq!(result[1], 0.0);
            }
            let gradients = score(&tokens)?.backward()?;
            let gradient = gradients
                .get(&logits)
                .expect("a gradient")
                .to_vec2::<f32>()?;
            assert!(gradient[0].iter().all(|g| g.is_finite() && *g != 0.0));
            assert_eq!(gradient[1], [0.0; 3]);
        }
    }
    Ok(())
}

#[test]
fn minus_infinity_has_probability_zero() -> Result<()> {
    for device in devices() {
        // More than one block of minus infinity, both before and after the other logits.
        let vocab = 3000;
        let mut row = vec![f32::NEG_INFINITY; vocab];
        row[1500..1504].copy_from_slice(&[0.5, -1.0, 2.0, 0.0]);
        let logits = Var::from_vec(row, (1, vocab), device)?;
        let targets = Tensor::new(&[1502u32], device)?;
        let tokens = log_prob(&logits, &targets, 1.0, LogProbOptions::default())?;
        let few = Var::new(&[[0.5f32, -1.0, 2.0, 0.0]], device)?;
        let expected = log_prob(
            &few,
            &Tensor::new(&[2u32], device)?,
            1.0,
            LogProbOptions::default(),
        )?;
        assert_close(
            &numbers(&tokens.log_probs)?,
            &numbers(&expected.log_probs)?,
            1e-6,
        );
        assert_close(
            &numbers(&tokens.entropy)?,
            &numbers(&expected.entropy)?,
            1e-6,
        );
        let gradients = score(&tokens)?.backward()?;
        let gradient = numbers(gradients.get(&logits).expect("a gradient"))?;
        let expected = score(&expected)?.backward()?;
        assert_close(
            &gradient[1500..1504],
            &numbers(expected.get(&few).expect("a gradient"))?,
            1e-6,
        );
        assert!(
            gradient[..1500]
                .iter()
                .chain(&gradient[1504..])
                .all(|g| *g == 0.0)
        );
    }
    Ok(())
}

#[rstest]
#[case(&[1.0, f32::NAN, 2.0])]
#[case(&[f32::NAN, f32::NAN, f32::NEG_INFINITY])]
#[case(&[1.0, f32::INFINITY, 2.0])]
#[case(&[f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY])]
fn a_row_that_is_no_distribution_gives_nan(#[case] row: &[f32]) -> Result<()> {
    for device in devices() {
        let logits = Tensor::from_slice(row, (1, 3), device)?;
        let tokens = log_prob(
            &logits,
            &Tensor::new(&[0u32], device)?,
            1.0,
            LogProbOptions::default(),
        )?;
        assert!(tokens.log_probs.to_vec1::<f32>()?[0].is_nan());
    }
    Ok(())
}

#[test]
fn nan_among_minus_infinity_is_not_lost_in_a_long_row() -> Result<()> {
    // A row's blocks are summed in sequence. The first block has only NaN and minus infinity.
    let mut row = vec![f32::NEG_INFINITY; 3000];
    (row[3], row[2900]) = (f32::NAN, 1.0);
    for device in devices() {
        let logits = Tensor::from_slice(&row, (1, 3000), device)?;
        let targets = Tensor::new(&[2900u32], device)?;
        let tokens = log_prob(&logits, &targets, 1.0, LogProbOptions::default())?;
        assert!(tokens.log_probs.to_vec1::<f32>()?[0].is_nan());
    }
    Ok(())
}

#[rstest]
fn the_backward_pass_without_a_graph_equals_that_of_the_graph(
    #[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(false, true)] gradient_into_logits: bool,
) -> Result<()> {
    for device in devices() {
        let logits = Var::from_tensor(&noise_tensor((2, 3, 1100), 4, dtype, device)?)?;
        let targets = Tensor::new(&[[5u32, 1099, 0], [1024, 1023, 77]], device)?;
        let mask = Tensor::new(&[[1u8, 1, 0], [1, 1, 1]], device)?;
        let options = LogProbOptions {
            mask: Some(&mask),
            ..Default::default()
        };
        let tokens = log_prob(&logits, &targets, 0.7, options)?;
        let expected = score(&tokens)?.backward()?;
        let derivatives = derivatives(&tokens)?;
        let view = logits.as_tensor().reshape(logits.dims())?;
        let options = LogProbOptions {
            gradient_into_logits,
            ..options
        };
        let gradient = log_prob_gradient(&view, &targets, 0.7, options, &tokens, &derivatives)?;
        assert_eq!((gradient.dims(), gradient.dtype()), (logits.dims(), dtype));
        let expected = numbers(expected.get(&logits).expect("a gradient"))?;
        assert_close(&numbers(&gradient)?, &expected, 1e-12);
        let overwritten = numbers(&logits)? == numbers(&gradient)?;
        assert_eq!(overwritten, gradient_into_logits && dtype != DType::F64);
    }
    Ok(())
}

#[rstest]
fn the_gradient_may_take_the_memory_of_the_logits(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    for device in devices() {
        let hidden = Var::from_tensor(&noise_tensor((7, 4), 1, dtype, device)?)?;
        let weight = noise_tensor((4, 1500), 2, dtype, device)?;
        let targets = Tensor::from_vec(vec![3u32, 9, 1400, 1023, 1024, 0, 1499], 7, device)?;
        let mask = Tensor::new(&[1u8, 1, 0, 1, 1, 1, 1], device)?;
        let run = |gradient_into_logits| -> Result<_> {
            let logits = hidden.matmul(&weight)?;
            let options = LogProbOptions {
                mask: Some(&mask),
                gradient_into_logits,
                logit_cap: None,
            };
            let gradients = score(&log_prob(&logits, &targets, 0.9, options)?)?.backward()?;
            Ok((
                numbers(gradients.get(&hidden).expect("a gradient"))?,
                logits,
            ))
        };
        let (apart, kept) = run(false)?;
        let (in_place, overwritten) = run(true)?;
        assert_eq!(apart, in_place);
        assert_ne!(numbers(&kept)?, numbers(&overwritten)?);
    }
    Ok(())
}

/// Log-probs from capped logits. A masked row with NaN has no effect.
#[rstest]
fn a_cap_of_the_logits_comes_before_the_temperature(
    #[values(DType::F32, DType::F64)] dtype: DType,
) -> Result<()> {
    for device in devices() {
        let values = (noise_tensor((3, 40), 3, dtype, device)? * 4.0)?;
        let targets = targets(3, 40, 5, device)?;
        let capped = Var::from_tensor(&values)?;
        let options = LogProbOptions {
            logit_cap: Some(2.5),
            ..Default::default()
        };
        let found = log_prob(&capped, &targets, 0.7, options)?;
        let plain = Var::from_tensor(&values)?;
        let logits = soft_cap(&plain, 2.5)?;
        let expected = log_prob(&logits, &targets, 0.7, LogProbOptions::default())?;
        for (found, expected) in results(&found).iter().zip(results(&expected)) {
            assert_close(&numbers(found)?, &numbers(&expected)?, 4e-6);
        }
        let (store, expected) = (score(&found)?.backward()?, score(&expected)?.backward()?);
        let gradient = numbers(store.get(&capped).expect("a gradient"))?;
        let expected = numbers(expected.get(&plain).expect("a gradient"))?;
        assert_close(&gradient, &expected, 4e-6);
        let alone = derivatives(&found)?;
        let alone = log_prob_gradient(&values, &targets, 0.7, options, &found, &alone)?;
        assert_close(&numbers(&alone)?, &gradient, 1e-6);

        let mask = Tensor::new(&[1u8, 0, 1], device)?;
        let nan = mask.unsqueeze(1)?.broadcast_as((3, 40))?;
        let nan = nan.where_cond(&values, &(values.zeros_like()? * f64::NAN)?)?;
        let nan = Var::from_tensor(&nan)?;
        let masked = LogProbOptions {
            mask: Some(&mask),
            ..options
        };
        let masked = log_prob(&nan, &targets, 0.7, masked)?;
        let store = score(&masked)?.backward()?;
        let gradient = numbers(store.get(&nan).expect("a gradient"))?;
        assert!(gradient.iter().all(|x| x.is_finite()));
        assert!(numbers(&masked.log_probs)?.iter().all(|x| x.is_finite()));
    }
    let logits = Tensor::zeros((1, 2), DType::F32, &Device::Cpu)?;
    let options = LogProbOptions {
        logit_cap: Some(0.0),
        ..Default::default()
    };
    let error = message(log_prob(
        &logits,
        &Tensor::new(&[0u32], &Device::Cpu)?,
        1.0,
        options,
    ));
    assert!(error.contains("logit_cap: 0, must be positive"), "{error}");
    Ok(())
}

/// Logits whose rows are not adjacent need a copy.
#[rstest]
fn the_gradient_never_overwrites_the_memory_of_a_view(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(
        Layout::Strided,
        Layout::Transposed,
        Layout::BroadcastFirst,
        Layout::BroadcastLast
    )]
    layout: Layout,
) -> Result<()> {
    for device in devices() {
        let values = noise_tensor((7, 1100), 3, dtype, device)?;
        let targets = targets(7, 1100, 5, device)?;
        let run = |gradient_into_logits| -> Result<_> {
            let variable = Var::from_tensor(&layout.memory(&values)?)?;
            let logits = layout.view(&variable, values.dims())?;
            let options = LogProbOptions {
                mask: None,
                gradient_into_logits,
                logit_cap: None,
            };
            let tokens = log_prob(&logits, &targets, 0.9, options)?;
            let store = score(&tokens)?.backward()?;
            assert_eq!(numbers(&variable)?, numbers(&layout.memory(&values)?)?);
            let gradient = numbers(store.get(&variable).expect("a gradient"))?;
            let alone = log_prob_gradient(&logits, &targets, 0.9, options, &tokens, &tokens)?;
            assert_eq!(numbers(&variable)?, numbers(&layout.memory(&values)?)?);
            Ok((numbers(&tokens.log_probs)?, gradient, numbers(&alone)?))
        };
        assert_eq!(run(true)?, run(false)?);
    }
    Ok(())
}

/// 49,152 columns. A bf16 sum would stop at 256.
#[test]
fn bf16_logits_of_a_whole_vocabulary_are_exact() -> Result<()> {
    for device in devices() {
        let logits = (noise_tensor((2, 49_152), 9, DType::BF16, device)? * 4.0)?;
        let targets = Tensor::new(&[17u32, 49_151], device)?;
        let expected = composed::log_prob(
            &logits.to_dtype(DType::F64)?,
            &targets,
            1.0,
            LogProbOptions::default(),
        )?;
        let actual = log_prob(&logits, &targets, 1.0, LogProbOptions::default())?;
        for (actual, expected) in results(&actual).iter().zip(results(&expected)) {
            for (actual, expected) in numbers(actual)?.iter().zip(numbers(&expected)?) {
                assert!(
                    (actual - expected).abs() < 1e-5,
                    "{actual}, expected {expected}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    // Ids are checked on the CPU only.
    let device = &Device::Cpu;
    let logits = Tensor::zeros((2, 5), DType::F32, device)?;
    let targets = Tensor::new(&[0u32, 4], device)?;
    let call = |logits: &Tensor, targets: &Tensor, temperature| {
        message(log_prob(
            logits,
            targets,
            temperature,
            LogProbOptions::default(),
        ))
    };
    assert!(call(&logits, &targets, 0.0).contains("temperature: 0.0, must be from 1e-6 to 1e6"));
    assert!(call(&logits, &Tensor::new(&[0u32, 5], device)?, 1.0).contains("token id 5"));
    assert!(call(&logits, &Tensor::new(&[0i64, -1], device)?, 1.0).contains("token id -1"));
    assert!(call(&logits, &Tensor::new(&[0u32], device)?, 1.0).contains("targets: shape [1]"));
    assert!(call(&logits, &Tensor::new(&[0f32, 1.], device)?, 1.0).contains("targets: F32"));
    assert!(call(&targets, &targets, 1.0).contains("logits: U32"));
    let empty = Tensor::zeros((2, 0), DType::F32, device)?;
    assert!(call(&empty, &targets, 1.0).contains("the vocabulary is empty"));
    let mask = Tensor::ones(3, DType::F32, device)?;
    let masked = LogProbOptions {
        mask: Some(&mask),
        ..Default::default()
    };
    assert!(message(log_prob(&logits, &targets, 1.0, masked)).contains("mask: shape [3]"));
    let variable = Var::from_tensor(&logits)?;
    let over = LogProbOptions {
        gradient_into_logits: true,
        ..Default::default()
    };
    assert!(message(log_prob(&variable, &targets, 1.0, over)).contains("gradient_into_logits"));
    let tokens = log_prob(&logits, &targets, 1.0, LogProbOptions::default())?;
    let overwritten = log_prob_gradient(&variable, &targets, 1.0, over, &tokens, &tokens);
    assert!(message(overwritten).contains("gradient_into_logits"));
    Ok(())
}

#[rstest]
fn the_gradient_of_no_rows_is_empty(
    #[values(false, true)] gradient_into_logits: bool,
    #[values(&[0, 3][..], &[2, 0, 3])] shape: &[usize],
) -> Result<()> {
    for device in devices() {
        let logits = Var::zeros(shape, DType::F32, device)?;
        // Not a variable. Candle returns an empty tensor unchanged from most operations.
        let inner = logits.flatten_all()?.reshape(shape)?;
        let targets = Tensor::zeros(&shape[..shape.len() - 1], DType::U32, device)?;
        let options = LogProbOptions {
            gradient_into_logits,
            ..Default::default()
        };
        let tokens = log_prob(&inner, &targets, 1.0, options)?;
        let store = tokens.log_probs.sum_all()?.backward()?;
        assert_eq!(store.get(&logits).expect("a gradient").dims(), shape);
        let alone = log_prob_gradient(&inner, &targets, 1.0, options, &tokens, &tokens)?;
        assert_eq!(alone.dims(), shape);
    }
    Ok(())
}
