//! Doc comments state each option's default.

use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::{AdvantagePipeline, RewardShaping};
use candle_grpo_loss::correction::{ImportanceWeight, ProximalPolicy, RolloutFilter};
use candle_grpo_loss::experimental::{FutureKl, GroupContrast, Vespo};
use candle_grpo_loss::surrogate::{
    ClipCov, DetachedWeight, DivergenceMask, GeometricMean, KlCov, Likelihood, SoftGate,
    SquaredLogRatio, Topr,
};
use candle_grpo_loss::{
    AdaptiveEntropy, Clip, DistillationLoss, EarlyWeight, Kl, KlLoss, PolicyLoss, PositiveNll,
    PreferenceLoss, Recipe, RolloutCorrection, StepTotals, Surrogate, TeacherTerm, TeacherTermForm,
    ValueLoss,
};
use candle_grpo_test_support::{
    assert_defaults_are_documented, defaults_of, other_fields, serialized,
};
use serde_json::json;

#[test]
fn each_option_states_its_default() -> serde_json::Result<()> {
    let mut defaults = defaults_of![
        AdaptiveEntropy,
        AdvantagePipeline,
        Clip,
        ClipCov,
        CoefSchedule,
        DetachedWeight,
        TeacherTermForm,
        DistillationLoss,
        DivergenceMask,
        EarlyWeight,
        FutureKl,
        GeometricMean,
        GroupContrast,
        ImportanceWeight,
        Kl,
        KlCov,
        Likelihood,
        PolicyLoss,
        PreferenceLoss,
        Recipe,
        RewardShaping,
        RolloutCorrection,
        SoftGate,
        SquaredLogRatio,
        StepTotals,
        Surrogate,
        Topr,
        ValueLoss,
        Vespo,
    ];
    let coef = json!({"coef": 1.0});
    let filter = json!({"statistic": "k1", "level": "token"});
    let advantage: TeacherTermForm = serde_json::from_value(json!({"advantage": {}}))?;
    let linear: ProximalPolicy = serde_json::from_value(json!({"linear": {}}))?;
    defaults.extend([
        (
            "Clip::asymmetric(0.2, 0.28)",
            serialized(&Clip::asymmetric(0.2, 0.28)),
        ),
        ("TeacherTerm", other_fields::<TeacherTerm>(coef.clone())),
        (
            "TeacherTermForm::Advantage",
            serialized(&advantage)["advantage"].clone(),
        ),
        ("KlLoss", other_fields::<KlLoss>(coef.clone())),
        ("PositiveNll", other_fields::<PositiveNll>(coef)),
        (
            "ProximalPolicy::Linear",
            serialized(&linear)["linear"].clone(),
        ),
        ("RolloutFilter", other_fields::<RolloutFilter>(filter)),
    ]);
    assert_defaults_are_documented(env!("CARGO_MANIFEST_DIR"), &defaults);
    Ok(())
}
