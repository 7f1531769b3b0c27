//! Doc comments state each option's default.

use candle_grpo_core::advantage::{
    DEFAULT_EPSILON, KlPenalty, OptimalTokenBaseline, SingletonGroup, TeacherWeight, Whitening,
};
use candle_grpo_core::rewards::{
    CosineLength, CostPenalty, OverlongPenalty, RepetitionPenalty, RewardNorm, RunningState,
};
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::selection::{
    AdvantageRange, DifficultyPools, DynamicSampling, GroupFilter, ScoreResampling,
};
use candle_grpo_core::trajectories::Gigpo;
use candle_grpo_core::{AdvantagePipeline, GroupAdvantage, Kl, RewardShaping, TokenAdvantage};
use candle_grpo_test_support::{
    assert_defaults_are_documented, defaults_of, other_fields, serialized,
};
use serde_json::json;

#[test]
fn each_option_states_its_default() {
    let mut defaults = defaults_of![
        AdvantagePipeline,
        AdvantageRange,
        CoefSchedule,
        CosineLength,
        CostPenalty,
        DifficultyPools,
        DynamicSampling,
        Gigpo,
        GroupAdvantage,
        GroupFilter,
        Kl,
        KlPenalty,
        OptimalTokenBaseline,
        RepetitionPenalty,
        RewardNorm,
        RewardShaping,
        RunningState,
        ScoreResampling,
        TeacherWeight,
        TokenAdvantage,
        Whitening,
    ];
    defaults.insert("DEFAULT_EPSILON", json!(DEFAULT_EPSILON));
    defaults.insert(
        "OverlongPenalty",
        other_fields::<OverlongPenalty>(json!({"max_length": 2, "buffer": 1})),
    );
    defaults.insert(
        "GroupAdvantage { single_sample: SingletonGroup::Zero, ..Default::default() }",
        serialized(&GroupAdvantage {
            single_sample: SingletonGroup::Zero,
            ..Default::default()
        }),
    );
    // It borrows tensors, so serde does not write it.
    let absent = json!({"output_tokens": null, "input_tokens": null, "turns": null});
    defaults.insert("Costs", absent);
    assert_defaults_are_documented(env!("CARGO_MANIFEST_DIR"), &defaults);
}
