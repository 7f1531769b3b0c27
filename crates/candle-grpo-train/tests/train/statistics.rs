//! Intervals and paired tests for evaluations.
//!
//! The expected values were computed with statsmodels 0.15.0 (`proportion_confint`, `mcnemar`,
//! `DescrStatsW`) and scipy 1.17.1 (`ttest_rel`). The interval for McNemar's test follows Bonett
//! and Price's formula.

use candle_grpo_train::statistics::{IntervalMethod, PairedTest, compare_paired, mean, wilson};
use rstest::rstest;

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found} {expected}");
}

/// 1 for the first `ones` of `count` prompts, 0 for the others.
fn binary(ones: usize, count: usize) -> Vec<f64> {
    (0..count).map(|i| f64::from(u8::from(i < ones))).collect()
}

#[rstest]
#[case(0, 30, 0.0, 0.1135133931739688)]
#[case(1, 30, 0.005908590381612455, 0.16670390991409176)]
#[case(17, 30, 0.39197307000813597, 0.7262251442353348)]
#[case(541, 1319, 0.3839132088109801, 0.43692699965112514)]
#[case(30, 30, 0.8864866068260311, 1.0)]
fn the_interval_of_a_share_is_wilsons(
    #[case] ones: usize,
    #[case] count: usize,
    #[case] low: f64,
    #[case] high: f64,
) {
    let (found_low, found_high) = wilson(ones, count).unwrap();
    near(found_low, low);
    near(found_high, high);
    let estimate = mean(&binary(ones, count)).unwrap();
    assert_eq!(estimate.interval, IntervalMethod::Wilson);
    assert_eq!(
        (estimate.low, estimate.high),
        (Some(found_low), Some(found_high))
    );
}

#[test]
fn the_interval_of_shares_of_prompts_is_students() {
    let estimate = mean(&[0., 0.25, 0.5, 0.5, 1., 0.75, 0., 0.25]).unwrap();
    assert_eq!(estimate.interval, IntervalMethod::StudentT);
    near(estimate.value, 0.40625);
    near(estimate.standard_error.unwrap(), 0.12444071307827101);
    near(estimate.low.unwrap(), 0.11199447196962103);
    near(estimate.high.unwrap(), 0.7005055280303789);
    let one = mean(&[0.5]).unwrap();
    assert_eq!((one.low, one.high, one.standard_error), (None, None, None));
}

/// 0/1 values where `a_better` prompts are better with A and `b_better` with B.
fn discordant(a_better: usize, b_better: usize, prompts: usize) -> (Vec<f64>, Vec<f64>) {
    let value = |is_one: bool| f64::from(u8::from(is_one));
    (0..prompts)
        .map(|i| match i {
            i if i < a_better => (1., 0.),
            i if i < a_better + b_better => (0., 1.),
            i => (value(i % 2 == 0), value(i % 2 == 0)),
        })
        .unzip()
}

#[rstest]
#[case(0, 0, 1.0)]
#[case(3, 9, 0.14599609375)]
#[case(10, 25, 0.016673847800120715)]
#[case(40, 61, 0.046044066929342785)]
#[case(1, 0, 1.0)]
#[case(150, 150, 1.0)]
fn binary_values_are_compared_by_mcnemars_exact_test(
    #[case] a_better: usize,
    #[case] b_better: usize,
    #[case] p: f64,
) {
    let (a, b) = discordant(a_better, b_better, 400);
    let comparison = compare_paired(&a, &b).unwrap();
    assert_eq!(comparison.test, PairedTest::McnemarExact);
    assert_eq!(
        (comparison.a_better, comparison.b_better),
        (a_better, b_better)
    );
    near(comparison.p_value.unwrap(), p);
    near(
        comparison.difference,
        (b_better as f64 - a_better as f64) / 400.,
    );
    let swapped = compare_paired(&b, &a).unwrap();
    near(swapped.p_value.unwrap(), p);
    near(swapped.low.unwrap(), -comparison.high.unwrap());
}

#[rstest]
#[case(3, 9, 50, -0.02211330283317553, 0.2528825336024063)]
#[case(0, 0, 20, -0.12599125675906162, 0.12599125675906162)]
fn the_interval_beside_mcnemars_test_is_bonett_and_prices(
    #[case] a_better: usize,
    #[case] b_better: usize,
    #[case] prompts: usize,
    #[case] low: f64,
    #[case] high: f64,
) {
    let (a, b) = discordant(a_better, b_better, prompts);
    let comparison = compare_paired(&a, &b).unwrap();
    near(comparison.low.unwrap(), low);
    near(comparison.high.unwrap(), high);
}

#[test]
fn means_of_several_completions_are_compared_by_a_paired_t_test() {
    let a = [0.25, 0.5, 0., 1., 0.75, 0.5, 0.25, 0.];
    let b = [0.5, 0.75, 0., 1., 1., 0.25, 0.75, 0.25];
    let comparison = compare_paired(&a, &b).unwrap();
    assert_eq!(comparison.test, PairedTest::PairedT);
    near(comparison.p_value.unwrap(), 0.09497649243577527);
    near(comparison.difference, 0.15625);
    near(comparison.low.unwrap(), -0.035224996403396214);
    near(comparison.high.unwrap(), 0.3477249964033962);
    let same = compare_paired(&a, &a).unwrap();
    assert_eq!((same.p_value, same.difference), (Some(1.), 0.));
    let one = compare_paired(&[0.5], &[1.]).unwrap();
    assert_eq!((one.p_value, one.low), (None, None));
}

#[test]
fn wrong_values_are_named() {
    for (error, words) in [
        (mean(&[]).unwrap_err(), "values: none"),
        (mean(&[1.5]).unwrap_err(), "values: 1.5"),
        (mean(&[f64::NAN]).unwrap_err(), "values: NaN"),
        (wilson(0, 0).unwrap_err(), "count: 0"),
        (wilson(3, 2).unwrap_err(), "ones: 3"),
        (compare_paired(&[], &[]).unwrap_err(), "prompts: none"),
        (
            compare_paired(&[1.], &[1., 0.]).unwrap_err(),
            "1 of A and 2 of B",
        ),
        (compare_paired(&[1.], &[2.]).unwrap_err(), "values: 2"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}
