//! Recipes: valid, unchanged by a configuration file, strict about unknown keys.

use candle_core::{Result, Tensor};
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline, RewardShaping};
use candle_grpo_loss::{Aggregation, Clip, PolicyLoss, Recipe, experimental};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use rstest::rstest;

fn recipes() -> Vec<(&'static str, Recipe)> {
    vec![
        ("grpo", Recipe::grpo()),
        ("dapo", Recipe::dapo(20_480, 4096)),
        ("dr_grpo", Recipe::dr_grpo(128.)),
        ("lite_ppo", experimental::recipe::lite_ppo()),
        ("gspo", Recipe::gspo()),
        ("luspo", experimental::recipe::luspo()),
        ("gmpo", Recipe::gmpo()),
        ("cispo", Recipe::cispo()),
        ("sapo", Recipe::sapo()),
        ("vespo", experimental::recipe::vespo()),
        ("gpg", Recipe::gpg()),
        ("rloo", Recipe::rloo()),
        ("reinforce_plus_plus", Recipe::reinforce_plus_plus(0.01)),
        (
            "reinforce_plus_plus_baseline",
            Recipe::reinforce_plus_plus_baseline(),
        ),
        ("trl", Recipe::trl()),
        ("verl", Recipe::verl()),
        ("roll", Recipe::roll()),
        ("twinkle", Recipe::twinkle()),
        ("openrlhf", Recipe::openrlhf()),
        ("prime_rl", Recipe::prime_rl()),
        ("fipo", experimental::recipe::fipo()),
        ("m2po", experimental::recipe::m2po()),
        ("gkd", Recipe::gkd()),
    ]
}

#[test]
fn each_term_of_a_teacher_is_found() {
    for (recipe, term) in [
        (
            r#"{"policy_loss": {"distillation": {"coef": 1.0}}}"#,
            Some("policy_loss.distillation"),
        ),
        (
            r#"{"advantage": {"name": "grpo", "tokens": {"distillation": {"coef": 1.0}}}}"#,
            Some("advantage.tokens.distillation"),
        ),
        (
            r#"{"advantage": {"name": "grpo", "tokens": {"teacher_weight": {"share": {"peak": 0.8}}}}}"#,
            Some("advantage.tokens.teacher_weight"),
        ),
        (r#"{"distillation_loss": {"beta": 0.5}}"#, None),
    ] {
        let recipe: Recipe = serde_json::from_str(recipe).unwrap();
        assert_eq!(recipe.teacher_log_probs_term(), term);
    }
}

#[test]
fn each_recipe_is_valid_survives_serde_and_gives_advantages() -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&[0f32, 1., 0., 1., 1., 0., 0., 0.], device)?;
        let mask = Tensor::ones((8, 3), candle_core::DType::U8, device)?;
        let log_probs = Tensor::full(-1f32, (8, 3), device)?;
        for (name, recipe) in recipes() {
            recipe.validate()?;
            let text = serde_json::to_string(&recipe).map_err(candle_core::Error::wrap)?;
            let read: Recipe = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
            assert_eq!(read, recipe, "{name}: {text}");
            let shaped = recipe.reward_shaping.apply(&rewards, 4, None)?.rewards;
            let batch = AdvantageBatch::new(&shaped, 4)
                .response_mask(&mask)
                .old_log_probs(&log_probs)
                .ref_log_probs(&log_probs);
            let advantages = numbers(&recipe.advantage.estimate(&batch)?.advantages)?;
            let success = advantages[advantages.len() / 2];
            assert!(success > 0. && advantages[0] < 0., "{name}: {advantages:?}");
        }
    }
    Ok(())
}

#[test]
fn the_default_recipe_is_grpo() {
    assert_eq!(Recipe::default(), Recipe::grpo());
}

/// The example in ROLL's documentation: normalized in the group, whitened over tokens, clipped
/// to 2.
#[test]
fn the_roll_recipe_whitens_and_clips() -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&[0f64, 0., 0., 0., 0., 0., 0., 1.], device)?;
        let mask = Tensor::ones((8, 1), candle_core::DType::U8, device)?;
        let batch = AdvantageBatch::new(&rewards, 8).response_mask(&mask);
        let advantages = numbers(&Recipe::roll().advantage.estimate(&batch)?.advantages)?;
        // (1 - 1/8) / sqrt(1/8) = 2.475 before the clip.
        assert_close(&advantages[7..], &[2.], 1e-12);
        assert_close(&advantages[..1], &[-0.125 / (0.125f64).sqrt()], 1e-5);
    }
    Ok(())
}

#[rstest]
#[case(
    Recipe { policy_loss: PolicyLoss { aggregation: Aggregation::TokenMean, ..PolicyLoss::gspo() }, ..Recipe::gspo() },
    "policy_loss.aggregation: token-mean, must not weight sequences by their length with an importance level of the sequence"
)]
#[case(
    Recipe { policy_loss: PolicyLoss { aggregation: Aggregation::TokenMean, ..PolicyLoss::gmpo() }, ..Recipe::gmpo() },
    "policy_loss.aggregation: token-mean, must not weight sequences by their length with the surrogate geometric_mean"
)]
#[case(
    Recipe { policy_loss: PolicyLoss::grpo(), ..Recipe::dr_grpo(8.) },
    "policy_loss.aggregation: seq-mean-token-mean, must be seq-mean-token-sum-norm with the advantage dr_grpo"
)]
#[case(Recipe { policy_loss: PolicyLoss::dr_grpo(0.), ..Recipe::grpo() }, "policy_loss.aggregation.length: 0")]
#[case(
    Recipe { policy_loss: PolicyLoss { surrogate: Clip::symmetric(1.5).into(), ..Default::default() }, ..Recipe::grpo() },
    "policy_loss.surrogate.clip.low: 1.5"
)]
#[case(
    Recipe { advantage: AdvantagePipeline { gamma: Some(7.), ..AdvantageName::Gae.into() }, ..Recipe::grpo() },
    "advantage.gamma: 7"
)]
#[case(
    Recipe { reward_shaping: RewardShaping { clip: Some(-1.), ..Default::default() }, ..Recipe::grpo() },
    "reward_shaping.clip: -1"
)]
#[case(Recipe::dapo(100, 0), "overlong.buffer: 0")]
#[case(
    Recipe {
        group_filter: Some(GroupFilter { mean_above: Some(1.), mean_below: Some(0.), ..Default::default() }),
        ..Recipe::grpo()
    },
    "group_filter.mean_above: 1, must be below mean_below, 0"
)]
fn a_forbidden_combination_is_an_error(#[case] recipe: Recipe, #[case] expected: &str) {
    let got = message(recipe.validate());
    assert!(got.starts_with(expected), "{got}");
}

#[rstest]
#[case(r#"{"polcy_loss": {}}"#, "unknown field `polcy_loss`")]
#[case(
    r#"{"policy_loss": {"surrogate": {"clip": {"hihg": 0.3}}}}"#,
    "unknown field `hihg`"
)]
#[case(
    r#"{"policy_loss": {"aggregation": "token_mean"}}"#,
    "unknown variant `token_mean`"
)]
#[case(r#"{"advantage": {"name": "rlo"}}"#, "rlo")]
#[case(r#"{"reward_shaping": {"clipp": 1}}"#, "unknown field `clipp`")]
fn an_unknown_key_is_an_error(#[case] text: &str, #[case] expected: &str) {
    let error = serde_json::from_str::<Recipe>(text)
        .expect_err("an unknown key")
        .to_string();
    assert!(error.contains(expected), "{error}");
}

/// Each row in the documentation's recipe table, `| name | configuration | source |`, matches its
/// constructor.
#[test]
fn the_documented_configurations_are_the_recipes() -> Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/algorithms.md");
    let text = std::fs::read_to_string(path).map_err(candle_core::Error::wrap)?;
    let mut missing = Vec::new();
    for (name, recipe) in recipes() {
        let row = text.lines().find(|line| {
            ["Recipe", "experimental::recipe"].iter().any(|owner| {
                let row = line.strip_prefix(&format!("| `{owner}::{name}"));
                row.is_some_and(|rest| rest.starts_with(['`', '(']))
            })
        });
        let Some(configuration) = row.and_then(|row| row.split('`').nth(3)) else {
            missing.push(name);
            continue;
        };
        let read: Recipe = serde_json::from_str(configuration).map_err(|error| {
            candle_core::Error::wrap(error).context(format!("{name}: {configuration}"))
        })?;
        // Numbers that the caller chooses may differ.
        let chosen = ["dapo", "dr_grpo", "reinforce_plus_plus"];
        assert!(
            read == recipe || chosen.contains(&name),
            "{name}: {configuration}"
        );
    }
    assert!(missing.is_empty(), "not documented: {missing:?}");
    Ok(())
}
