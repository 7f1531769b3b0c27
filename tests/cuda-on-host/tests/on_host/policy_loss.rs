//! Tests of `policy_loss.cu` against the CPU path, which the tests of the loss compare with
//! formulas.

use candle_core::{Device, Result, Tensor, Var};
use candle_grpo_cuda_on_host::{
    Buffer, Grid, ORDERS, policy_loss_backward, policy_loss_forward, policy_loss_merge,
};
use candle_grpo_kernels::{
    Divisor, EntropyBonus, KlEstimate, KlSlope, KlTerm, PolicyStatistic, PolicyTerms,
    RatioSurrogate, TokenShare, policy_loss,
};
use candle_grpo_test_support::{assert_close, noise, numbers};

const COUNT: usize = PolicyStatistic::COUNT;

/// Checks a loss with all terms, or with none that is optional.
fn check(rows: usize, tokens: usize, has_all: bool) -> Result<()> {
    let n = rows * tokens;
    let random = |seed: u64, low: f64, high: f64| -> Vec<f32> {
        let between = |x: &f64| (low + (high - low) * (x + 1.0) / 2.0) as f32;
        noise(n, seed).iter().map(between).collect()
    };
    // A sequence of the mask is empty.
    let mask: Vec<u8> = random(1, 0.0, 1.0)
        .iter()
        .enumerate()
        .map(|(i, x)| u8::from(*x < 0.8 && i / tokens != 1))
        .collect();
    let inside = |values: Vec<f32>| -> Vec<f32> {
        let kept = values.iter().zip(&mask);
        kept.map(|(x, m)| if *m == 0 { f32::NAN } else { *x })
            .collect()
    };
    let flags = |seed| -> Vec<u8> {
        let values = random(seed, 0.0, 1.0);
        values.iter().map(|x| u8::from(*x < 0.7)).collect()
    };
    let [
        log_probs,
        old,
        reference,
        entropy,
        advantages,
        weights,
        token_weights,
    ] = [
        (2, -3.0),
        (3, -3.0),
        (4, -3.0),
        (5, 0.0),
        (6, -1.5),
        (7, 0.2),
        (8, 0.2),
    ]
    .map(|(seed, low)| inside(random(seed, low, low + 2.0)));
    let (policy_mask, entropy_mask) = (flags(9), flags(10));
    let sample_weights: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
    let prompt_tokens: Vec<f32> = (0..rows).map(|row| 40.0 + row as f32).collect();
    let [scale, entropy_scale] = [0.3, if has_all { 0.05 } else { 0.0 }];

    let per_token = |x: &[f32]| Tensor::from_slice(x, (rows, tokens), &Device::Cpu);
    let of_flags = |x: &[u8]| Tensor::from_slice(x, (rows, tokens), &Device::Cpu);
    let variables = [
        Var::from_tensor(&per_token(&log_probs)?)?,
        Var::from_tensor(&per_token(&entropy)?)?,
    ];
    let (old_tensor, reference_tensor) = (per_token(&old)?, per_token(&reference)?);
    let (weights_tensor, token_weights_tensor) = (per_token(&weights)?, per_token(&token_weights)?);
    let (mask_tensor, policy_mask_tensor, entropy_mask_tensor) = (
        of_flags(&mask)?,
        of_flags(&policy_mask)?,
        of_flags(&entropy_mask)?,
    );
    let column = Tensor::from_slice(&sample_weights, (rows, 1), &Device::Cpu)?;
    let prompts = Tensor::from_slice(&prompt_tokens, rows, &Device::Cpu)?;
    // Advantages per token with all terms, otherwise one per sequence.
    let advantages_tensor = if has_all {
        per_token(&advantages)?
    } else {
        column.clone()
    };
    let kl = |estimate, slope, times_ratio| KlTerm {
        coef: 0.2,
        estimate,
        slope,
        log_ratio_clamp: Some(1.5),
        value_clamp: Some(0.8),
        times_ratio,
    };
    let surrogate = RatioSurrogate::DetachedWeight {
        min: Some(0.5),
        max: Some(1.2),
        drop: Some((0.6, 1.3)),
    };
    let share = TokenShare {
        scale,
        divisor: Divisor::Length,
    };
    let mut terms = PolicyTerms {
        log_ratio_clamp: Some(0.9),
        ..PolicyTerms::new(&mask_tensor, &advantages_tensor, surrogate, share)
    };
    if has_all {
        terms = PolicyTerms {
            old_log_probs: Some(&old_tensor),
            factors: [Some(&weights_tensor), Some(&column)],
            policy_mask: Some(&policy_mask_tensor),
            token_weights: Some(&token_weights_tensor),
            surrogate: RatioSurrogate::Clip {
                low: 0.8,
                high: 1.2,
                delta: Some(1.9),
                dual_clip: Some(1.6),
            },
            kl: Some((kl(KlEstimate::K3, KlSlope::Own, true), &reference_tensor)),
            old_kl: Some(kl(
                KlEstimate::K2,
                KlSlope::WeightedLogRatio { max: 1.5 },
                false,
            )),
            entropy: Some(&variables[1]),
            entropy_bonus: Some(EntropyBonus {
                mask: Some(&entropy_mask_tensor),
                share: TokenShare {
                    scale: entropy_scale,
                    divisor: Divisor::PromptTokens,
                },
            }),
            prompt_tokens: Some(&prompts),
            ..terms
        };
    }
    let (loss, statistics) = policy_loss(&variables[0], &terms)?;
    let store = loss.affine(0.5, 0.0)?.backward()?;
    let (loss, statistics) = (numbers(&loss)?, numbers(&statistics)?);
    let gradients = variables
        .iter()
        .map(|x| store.get(x).map_or(Ok(vec![0.0; n]), numbers))
        .collect::<Result<Vec<_>>>()?;
    assert!(gradients[0].iter().any(|x| *x != 0.0));

    let floats = [
        &log_probs,
        &old,
        &reference,
        &entropy,
        &advantages,
        &weights,
        &sample_weights,
        &token_weights,
        &prompt_tokens,
    ]
    .map(|x| Buffer::new(x));
    let bytes = [&mask, &policy_mask, &entropy_mask].map(|x| Buffer::new(x));
    let pointer = |x: &Buffer<f32>| {
        if has_all {
            x.as_ptr()
        } else {
            std::ptr::null()
        }
    };
    let byte_pointer = |x: &Buffer<u8>| {
        if has_all {
            x.as_ptr()
        } else {
            std::ptr::null()
        }
    };
    let chunks = tokens.div_ceil(1024);
    let infinity = f32::INFINITY;
    // Estimate, slope and factor.
    let [kl_form, old_kl_form] = if has_all {
        [3 | 1 << 8, 2 | 2 << 4]
    } else {
        [0, 0]
    };
    let bounds = if has_all {
        (0, [0.8, 1.2, 1.9, 1.6, -infinity, infinity])
    } else {
        (1, [0.5, 1.2, infinity, infinity, 0.6, 1.3])
    };
    let (surrogate, [low, high, delta, dual_clip, drop_low, drop_high]) = bounds;
    for order in ORDERS {
        let [
            mut of_log_probs,
            mut of_entropy,
            mut log_prob_gradient,
            mut entropy_gradient,
        ] = [(); 4].map(|()| Buffer::filled(f32::NAN, n));
        let mut parts = Buffer::filled(f64::NAN, rows * chunks * COUNT);
        let mut found = Buffer::filled(f64::NAN, COUNT);
        let mut found_loss = Buffer::filled(f32::NAN, 1);
        let upstream = Buffer::new(&[0.5f32]);
        // SAFETY: the buffers have an element for each token, or for each sequence.
        unsafe {
            policy_loss_forward(
                Grid::new((rows * chunks) as u32, 256),
                order,
                floats[0].as_ptr(),
                pointer(&floats[1]),
                pointer(&floats[2]),
                pointer(&floats[3]),
                floats[if has_all { 4 } else { 6 }].as_ptr(),
                pointer(&floats[5]),
                pointer(&floats[6]),
                pointer(&floats[7]),
                pointer(&floats[8]),
                bytes[0].as_ptr(),
                byte_pointer(&bytes[1]),
                byte_pointer(&bytes[2]),
                of_log_probs.as_mut_ptr(),
                if has_all {
                    of_entropy.as_mut_ptr()
                } else {
                    std::ptr::null_mut()
                },
                parts.as_mut_ptr(),
                tokens as u32,
                chunks as u32,
                // Advantages and the first factors per token.
                if has_all { 0b011 } else { 0 },
                surrogate,
                low,
                high,
                delta,
                dual_clip,
                drop_low,
                drop_high,
                0.9,
                kl_form,
                0.2,
                1.5,
                0.8,
                infinity,
                old_kl_form,
                0.2,
                1.5,
                0.8,
                1.5f32.ln(),
                1,
                scale,
                if has_all { 2 } else { 0 },
                entropy_scale,
            )
            .unwrap();
            policy_loss_merge(
                Grid::new(1, 32 * COUNT as u32),
                order,
                parts.as_ptr(),
                found.as_mut_ptr(),
                found_loss.as_mut_ptr(),
                (rows * chunks) as u32,
            )
            .unwrap();
            policy_loss_backward(
                Grid::new(n.div_ceil(256) as u32, 256),
                order,
                of_log_probs.as_ptr(),
                pointer(&of_entropy),
                upstream.as_ptr(),
                log_prob_gradient.as_mut_ptr(),
                if has_all {
                    entropy_gradient.as_mut_ptr()
                } else {
                    std::ptr::null_mut()
                },
                n as u64,
            )
            .unwrap();
        }
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        assert_close(&found, &statistics, 1e-6);
        assert_close(&wide(&found_loss), &loss, 1e-6);
        assert_close(&wide(&log_prob_gradient), &gradients[0], 1e-6);
        if has_all {
            assert_close(&wide(&entropy_gradient), &gradients[1], 1e-6);
        }
    }
    Ok(())
}

#[test]
fn equals_the_cpu_path() -> Result<()> {
    for (rows, tokens) in [(1, 1), (3, 7), (4, 300), (2, 2500)] {
        for has_all in [false, true] {
            check(rows, tokens, has_all)?;
        }
    }
    Ok(())
}
