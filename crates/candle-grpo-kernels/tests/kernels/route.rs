//! Tests `route` against a sort in f64.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{composed, expert_gates, route};
use candle_grpo_test_support::{CudaCalls, assert_close, cases, device, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::noisy;

/// Returns a row's experts and gates. NaN is the smallest.
fn expected(logits: &[f64], top_k: usize, normalize: bool) -> (Vec<u32>, Vec<f64>) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let key = |i: usize| {
        if logits[i].is_nan() {
            (0, 0.0)
        } else {
            (1, logits[i])
        }
    };
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).expect("no NaN"));
    order.truncate(top_k);
    let weight = |i: &usize| (logits[*i] - logits[order[0]]).exp();
    let all: Vec<usize> = (0..logits.len()).collect();
    let sum: f64 = if normalize { &order } else { &all }
        .iter()
        .map(weight)
        .sum();
    let gates = order.iter().map(|i| weight(i) / sum).collect();
    (order.iter().map(|&i| i as u32).collect(), gates)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 256)))]
    #[test]
    fn the_largest_logits_are_chosen_in_order(
        tokens in 1usize..10,
        (experts, top_k) in prop_oneof![1usize..12, 30usize..140]
            .prop_flat_map(|experts| (Just(experts), 1..=experts)),
        // With few levels, many logits are equal.
        levels in prop_oneof![Just(2.0), Just(1000.0)],
        normalize in any::<bool>(),
        dtype in dtypes(),
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        let logits = ((noisy(&[tokens, experts], seed, DType::F64)? * levels)?.round()? / (levels / 8.0))?;
        let logits = logits.to_dtype(dtype)?;
        for device in devices() {
            let logits = layout.apply(&logits)?.to_device(device)?;
            let values = numbers(&logits)?;
            let rows = values.chunks(experts).map(|row| expected(row, top_k, normalize));
            let (chosen, gates): (Vec<_>, Vec<_>) = rows.unzip();
            let found = route(&logits, top_k, normalize)?;
            prop_assert_eq!(found.0.to_vec2::<u32>()?, chosen);
            prop_assert_eq!(found.1.dtype(), DType::F32);
            assert_close(&numbers(&found.1)?, &gates.concat(), 2e-6);
            let again = expert_gates(&logits, &found.0, top_k, normalize)?;
            assert_close(&numbers(&again)?, &gates.concat(), 2e-6);
        }
    }
}

#[test]
fn the_twin_chooses_the_same() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F64] {
            // No two logits are equal.
            let logits = noisy(&[5, 30], 3, dtype)?.to_device(device)?;
            for normalize in [false, true] {
                let (found, twin) = (
                    route(&logits, 4, normalize)?,
                    composed::route(&logits, 4, normalize)?,
                );
                assert_eq!(found.0.to_vec2::<u32>()?, twin.0.to_vec2::<u32>()?);
                assert_eq!(twin.1.dtype(), dtype);
                assert_close(&numbers(&found.1)?, &numbers(&twin.1)?, 2e-6);
            }
        }
    }
    Ok(())
}

/// An expert out of range would be an address out of range.
#[test]
fn logits_that_are_not_finite_give_different_experts() -> Result<()> {
    for device in devices().filter(|device| device.is_cuda()) {
        let infinity = f32::INFINITY;
        for (logits, expected) in [
            ([f32::NAN; 4], [0, 1, 2, 3]),
            ([f32::NAN, 1.0, f32::NAN, -infinity], [1, 3, 0, 2]),
            ([-infinity, infinity, 0.0, -0.0], [1, 2, 3, 0]),
            ([infinity; 4], [0, 1, 2, 3]),
        ] {
            for normalize in [false, true] {
                let logits = Tensor::new(&[logits], device)?;
                let (chosen, _) = route(&logits, 4, normalize)?;
                assert_eq!(chosen.to_vec2::<u32>()?, [expected]);
            }
        }
    }
    Ok(())
}

#[rstest]
fn one_launch_routes_all_rows(#[values(DType::F32, DType::BF16)] dtype: DType) -> Result<()> {
    let logits = noisy(&[70, 33], 1, dtype)?.to_device(device())?;
    let before = CudaCalls::now();
    route(&logits, 5, true)?;
    let Some((after, before)) = CudaCalls::now().zip(before) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let calls = after - before;
    assert_eq!(
        (calls.launches, calls.copies_to_host, calls.waits),
        (1, 0, 0)
    );
    Ok(())
}

#[test]
fn wrong_arguments_are_errors() -> Result<()> {
    let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    for top_k in [0, 4] {
        let error = message(route(&logits, top_k, true));
        assert!(
            error.contains(&format!("top_k, which is {top_k}")),
            "{error}"
        );
    }
    let integers = logits.to_dtype(DType::U8)?;
    assert!(message(route(&integers, 1, true)).contains("logits: [2, 3] of U8"));
    assert!(message(route(&logits.get(0)?, 1, true)).contains("logits: [3] of F32"));
    let chosen = Tensor::new(&[[0u32], [3]], &Device::Cpu)?;
    let error = message(expert_gates(&logits, &chosen, 1, true));
    assert!(error.contains("experts: 3, must be below 3"), "{error}");
    let error = message(expert_gates(&logits, &chosen, 2, true));
    assert!(error.contains("must be [2, 2] of U32"), "{error}");
    Ok(())
}
