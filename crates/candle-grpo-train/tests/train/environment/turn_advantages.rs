//! Advantages of turns.

use candle_grpo_core::Scale;
use candle_grpo_core::trajectories::Gigpo;
use candle_grpo_train::learn::{StepReturns, TurnAdvantage};
use candle_grpo_train::{TrainConfig, TrainerParts, WeightedRewards};
use rstest::rstest;

use super::{echo, environments};
use crate::common::{self, config, sampling};

fn trained(advantage: TurnAdvantage) -> TrainConfig {
    let mut config = config();
    config.sampling.max_new_tokens = 20;
    config.turn_advantage = Some(advantage);
    config.optimizer.learning_rate = 1e-2;
    config
}

#[rstest]
#[case(TurnAdvantage::Gigpo(Gigpo::default()))]
#[case(TurnAdvantage::StepReturns(StepReturns::default()))]
fn a_policy_trains_with_advantages_of_turns(#[case] advantage: TurnAdvantage) {
    let mut trainer = common::trainer_of(TrainerParts {
        environments: Some(environments(echo(3))),
        ..common::parts(WeightedRewards::new(), trained(advantage))
    });
    let metrics = trainer.step().unwrap();
    assert!(metrics.grad_norm.unwrap() > 0.);
    // All trajectories of a prompt have the same states.
    assert!(metrics.policy["state_group_size"] >= 4., "{metrics:?}");
}

#[test]
fn a_completion_without_turns_is_an_error() {
    let advantage = TurnAdvantage::Gigpo(Gigpo::default());
    let mut trainer = common::trainer(common::share_of_a, trained(advantage));
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(error.contains("turn_advantage: given"), "{error}");
}

#[rstest]
#[case(|c: &mut TrainConfig| c.turn_advantage = Some(TurnAdvantage::Gigpo(Gigpo { gamma: 2., ..Gigpo::default() })), "turn_advantage.gigpo.gamma: 2")]
#[case(|c: &mut TrainConfig| c.recipe.overlong = Some(candle_grpo_core::rewards::OverlongPenalty::new(8, 2)), "turn_advantage: given, must be absent with")]
fn options_that_contradict_are_errors(#[case] spoil: fn(&mut TrainConfig), #[case] words: &str) {
    let mut config = trained(TurnAdvantage::StepReturns(StepReturns::default()));
    config.sampling = sampling();
    spoil(&mut config);
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}

#[test]
fn the_file_names_them() {
    let read: TurnAdvantage = serde_json::from_str(
        r#"{"step_returns": {"gamma": 0.5, "normalization": {"scale": "none"}}}"#,
    )
    .unwrap();
    let TurnAdvantage::StepReturns(returns) = read else {
        panic!("another one");
    };
    assert_eq!(
        (returns.gamma, returns.normalization.scale),
        (0.5, Scale::None)
    );
}
