//! Estimators declare the inputs without which they fail.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_core::advantage::{Baseline, KlPenalty, TeacherWeight, TokenBaseline};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, GroupAdvantage, TokenAdvantage,
    experimental,
};
use rstest::rstest;

/// Two groups of two sequences, with every input.
fn full() -> Result<AdvantageBatch> {
    let device = &Device::Cpu;
    let tokens = Tensor::ones((4, 3), DType::F32, device)?;
    let rewards = Tensor::new(&[1f32, 0., 0., 1.], device)?;
    Ok(AdvantageBatch::new(&rewards, 2)
        .response_mask(&tokens)
        .reward_baselines(&rewards)
        .values(&tokens)
        .old_log_probs(&tokens.neg()?)
        .rollout_log_probs(&tokens.neg()?)
        .ref_log_probs(&tokens.neg()?)
        .teacher_log_probs(&tokens.neg()?)
        .teacher_mask(&tokens)
        .entropy(&tokens)
        .sum_of_squared_probs(&tokens)
        .importance_weights(&tokens))
}

fn without(input: Input) -> Result<AdvantageBatch> {
    let mut batch = full()?;
    let field = match input {
        Input::OldLogProbs => &mut batch.old_log_probs,
        Input::RolloutLogProbs => &mut batch.rollout_log_probs,
        Input::RefLogProbs => &mut batch.ref_log_probs,
        Input::TeacherLogProbs => &mut batch.teacher_log_probs,
        Input::TeacherMask => &mut batch.teacher_mask,
        Input::Values => &mut batch.values,
        Input::Entropy => &mut batch.entropy,
        Input::SumOfSquaredProbs => &mut batch.sum_of_squared_probs,
        Input::RewardBaselines => &mut batch.reward_baselines,
        other => panic!("{other}: no input of an advantage"),
    };
    *field = None;
    Ok(batch)
}

#[rstest]
#[case(AdvantagePipeline::grpo())]
#[case(AdvantagePipeline::rloo())]
#[case(experimental::flash_reinforce())]
#[case(AdvantagePipeline::reinforce_plus_plus())]
#[case(AdvantagePipeline::remax())]
#[case(AdvantagePipeline::gae(1., 0.95))]
#[case(AdvantagePipeline::optimal_token_baseline())]
#[case(GroupAdvantage::centered(Baseline::Given).into())]
#[case(GroupAdvantage { kl_penalty: Some(KlPenalty::default()), ..Default::default() }.into())]
#[case(TokenAdvantage { kl_penalty: Some(KlPenalty::default()), ..Default::default() }.into())]
#[case(TokenAdvantage { distillation: Some(KlPenalty::default()), ..Default::default() }.into())]
#[case(TokenAdvantage { teacher_weight: Some(TeacherWeight::default()), ..Default::default() }.into())]
#[case(
    AdvantagePipeline::from(GroupAdvantage::centered(Baseline::Given))
        .then(TokenAdvantage { lambda: Some(1.), ..Default::default() })
)]
fn an_estimator_fails_without_an_input_exactly_if_it_declares_it(
    #[case] estimator: AdvantagePipeline,
) -> Result<()> {
    estimator.estimate(&full()?)?;
    let inputs = Input::ALL.iter().copied();
    for input in inputs.filter(|&input| AdvantageBatch::accepts(input)) {
        if input == Input::ImportanceWeights {
            // They are 1 if absent.
            continue;
        }
        match estimator.estimate(&without(input)?) {
            Ok(_) => assert!(!estimator.needs().contains(input), "{input}"),
            Err(error) => {
                assert!(estimator.needs().contains(input), "{error}");
                assert!(
                    error.to_string().starts_with(&format!("{input}: absent")),
                    "{error}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn only_the_optimal_baseline_needs_importance_weights() {
    let optimal = AdvantagePipeline::optimal_token_baseline();
    assert!(optimal.needs().contains(Input::ImportanceWeights));
    let given = TokenAdvantage {
        baseline: TokenBaseline::Given,
        ..TokenAdvantage::default()
    };
    assert_eq!(given.needs(), Inputs::from(Input::RewardBaselines));
}
