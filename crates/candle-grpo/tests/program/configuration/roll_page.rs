//! The GRPO example in ROLL's documentation as the algorithm section, and the effect that each key
//! has.

use std::path::Path;

use candle_core::{Device, Result, Tensor, Var};
use candle_grpo::config::{ConfigError, Document, RunConfig};
use candle_grpo::core::advantage::{Baseline, KlPenalty};
use candle_grpo::core::rewards::NormLevel;
use candle_grpo::core::selection::SampleFilter;
use candle_grpo::core::{GroupAdvantage, Kl, KlEstimator, Scale, TokenAdvantage};
use candle_grpo::loss::{Aggregation, Clip, PolicyBatch, Recipe, StepTotals, Surrogate};
use candle_grpo::train::TrainConfig;
use rstest::rstest;
use serde_json::{Value, json};

/// The page's keys, in its order and notation.
const PAGE: &str = r#"
  # grpo
  rollout_batch_size: 64 # prompt
  num_return_sequences_in_group: 8
  prompt_length: 2048
  response_length: 4096

  adv_estimator: "grpo"
  ppo_epochs: 1
  use_kl_loss: true
  kl_loss_coef: 0.001
  loss_agg_mode: "seq-mean-token-mean"

  # ppo related
  # advantage
  whiten_advantages: true
  advantage_clip: 2.0
  dual_clip_loss: true

  # clip
  reward_clip: 10
"#;

/// The end in one version.
const NORM_KEYS: &str = r#"
  # normalize
  reward_norm: null
  reward_shift: false
  reward_scale: false

  # reward
  add_token_level_kl: false
"#;

/// The end in another version.
const TYPE_KEYS: &str = r#"
  # normalize
  norm_mean_type: ~
  norm_std_type: ~

  # reward
  add_token_level_kl: false
"#;

fn run(algorithm: &str) -> std::result::Result<RunConfig, ConfigError> {
    let text = format!(
        "model: m\ndata: {{train: d.jsonl}}\nrewards: [{{kind: json}}]\nalgorithm:\n{algorithm}"
    );
    RunConfig::new(&Document::from_yaml(Path::new("page.yaml"), &text)?)
}

fn page(ending: &str) -> String {
    format!("{PAGE}{ending}")
}

/// The settings with the page's `from` replaced by `to`.
fn with(from: &str, to: &str) -> TrainConfig {
    let page = page(NORM_KEYS);
    assert_eq!(page.matches(from).count(), 1, "{from}");
    run(&page.replace(from, to)).unwrap().train
}

fn tokens(train: &TrainConfig) -> TokenAdvantage {
    train.recipe.advantage.pipeline().tokens.unwrap()
}

fn group(train: &TrainConfig) -> GroupAdvantage {
    assert_eq!(train.recipe.reward_shaping, Default::default());
    train.recipe.advantage.pipeline().sequence.unwrap()
}

fn clip(train: &TrainConfig) -> Clip {
    match &train.recipe.policy_loss.surrogate {
        Surrogate::Clip(clip) => *clip,
        other => panic!("{other:?}"),
    }
}

#[rstest]
#[case(NORM_KEYS)]
#[case(TYPE_KEYS)]
fn the_page_is_accepted_as_it_stands(#[case] ending: &str) {
    let run = run(&page(ending)).unwrap();
    assert_eq!(run.max_prompt_tokens, 2048);
    let train = run.train;
    assert_eq!(train.prompts_per_step, 64);
    assert_eq!(train.num_generations, 8);
    assert_eq!(train.sampling.max_new_tokens, 4096);
    assert_eq!(train.epochs, 1);
    assert_eq!(train.recipe, Recipe::roll());
    assert!(train.critic.is_none() && train.reward_kl.is_none() && train.sample_filters.is_empty());
}

#[test]
fn keys_of_sizes_set_the_sizes() {
    assert_eq!(
        with("rollout_batch_size: 64", "rollout_batch_size: 5").prompts_per_step,
        5
    );
    let group = with("sequences_in_group: 8", "sequences_in_group: 4");
    assert_eq!(group.num_generations, 4);
    let length = with("response_length: 4096", "response_length: 100");
    assert_eq!(length.sampling.max_new_tokens, 100);
    assert_eq!(with("ppo_epochs: 1", "ppo_epochs: 3").epochs, 3);
    let short = page(NORM_KEYS).replace("prompt_length: 2048", "prompt_length: 7");
    assert_eq!(run(&short).unwrap().max_prompt_tokens, 7);
}

#[test]
fn adv_estimator_sets_the_returns_and_the_critic() {
    let grpo = group(&run("  adv_estimator: grpo\n").unwrap().train);
    assert_eq!(grpo, GroupAdvantage::grpo());
    let reinforce = with("\"grpo\"", "reinforce");
    assert!(reinforce.recipe.advantage.pipeline().sequence.is_none());
    assert_eq!(reinforce.recipe.reward_shaping.norm.mean, NormLevel::None);
    assert_eq!(reinforce.recipe.reward_shaping.norm.std, NormLevel::None);
    assert_eq!(tokens(&reinforce).lambda, None);
    let gae = with(
        "\"grpo\"",
        "gae\n  lambd: 0.9\n  gamma: 0.8\n  value_clip: 0.5",
    );
    assert_eq!((tokens(&gae).lambda, tokens(&gae).gamma), (Some(0.9), 0.8));
    assert_eq!(gae.critic.unwrap().value_loss.clip, Some(0.5));
}

#[test]
fn use_kl_loss_turns_the_kl_on_with_its_coefficient() {
    assert_eq!(
        with("use_kl_loss: true", "use_kl_loss: false")
            .recipe
            .policy_loss
            .kl,
        None
    );
    let kl = with("kl_loss_coef: 0.001", "kl_loss_coef: 0.5")
        .recipe
        .policy_loss
        .kl
        .unwrap();
    assert_eq!(kl.coef, 0.5);
    assert_eq!(
        (kl.kl.estimator, kl.kl.value_clamp),
        (KlEstimator::K3, Some(10.))
    );
}

#[rstest]
#[case("token-mean", Aggregation::TokenMean)]
#[case("seq-mean-token-sum", Aggregation::SeqMeanTokenSum)]
#[case("seq-mean-token-sum-norm", Aggregation::SeqMeanTokenSumNorm { length: 4096. })]
fn loss_agg_mode_sets_the_aggregation(#[case] name: &str, #[case] expected: Aggregation) {
    let train = with("\"seq-mean-token-mean\"", name);
    assert_eq!(train.recipe.policy_loss.aggregation, expected);
}

#[test]
fn whiten_advantages_and_advantage_clip_shape_the_advantage() {
    assert!(
        !tokens(&with("whiten_advantages: true", "whiten_advantages: false")).whiten_advantages
    );
    assert_eq!(
        tokens(&with("advantage_clip: 2.0", "advantage_clip: 3")).advantage_clip,
        Some(3.)
    );
    assert_eq!(
        tokens(&with("advantage_clip: 2.0", "advantage_clip: ~")).advantage_clip,
        None
    );
}

#[test]
fn dual_clip_loss_follows_the_clip_width() {
    assert_eq!(
        clip(&with("dual_clip_loss: true", "dual_clip_loss: false")).dual_clip,
        None
    );
    // ROLL's constant is 1 + 2 * pg_clip.
    let wider = clip(&with(
        "dual_clip_loss: true",
        "dual_clip_loss: true\n  pg_clip: 0.3",
    ));
    assert_eq!(
        (wider.low, wider.high, wider.dual_clip),
        (0.3, 0.3, Some(1.6))
    );
    // A negative advantage never meets the upper width, so a wide one is valid.
    let wide_above = clip(&with(
        "dual_clip_loss: true",
        "dual_clip_loss: true\n  use_pg_clip_range: true\n  pg_clip_low: 0.2\n  pg_clip_high: 1.5",
    ));
    assert_eq!(
        (wide_above.low, wide_above.high, wide_above.dual_clip),
        (0.2, 1.5, Some(1.4))
    );
}

#[test]
fn reward_clip_clips_normalized_rewards() {
    let clip = |to: &str| group(&with("reward_clip: 10", to)).clip;
    assert_eq!(clip("reward_clip: 5"), Some([-5., 5.]));
    assert_eq!(clip(""), None);
    let reinforce = run("  adv_estimator: reinforce\n  reward_clip: 5\n").unwrap();
    assert_eq!(reinforce.train.recipe.reward_shaping.clip, Some(5.));
}

#[rstest]
#[case("batch", NormLevel::Batch)]
#[case("running", NormLevel::Running)]
fn reward_norm_of_another_level_shapes_the_rewards(#[case] name: &str, #[case] level: NormLevel) {
    let keys = format!("  reward_norm: {name}\n");
    for recipe in [
        with("reward_norm: null", &format!("reward_norm: {name}")).recipe,
        run(&format!("  preset: roll\n{keys}"))
            .unwrap()
            .train
            .recipe,
    ] {
        let shaping = recipe.reward_shaping;
        assert_eq!((shaping.norm.mean, shaping.norm.std), (level, level));
        let clip = shaping
            .clip
            .map(|clip| [-clip, clip])
            .or(shaping.clip_range);
        assert_eq!(
            clip,
            Some([-10., 10.]),
            "the clip comes after the normalization"
        );
        assert!(recipe.advantage.pipeline().sequence.is_none());
    }
}

#[rstest]
#[case("  reward_norm: group\n", Scale::Group)]
#[case("  reward_shift: true\n", Scale::None)]
#[case("  norm_std_type: batch\n", Scale::Batch)]
#[case("  norm_std_type: none\n", Scale::None)]
fn levels_around_the_mean_of_the_group_are_the_scale_of_its_advantage(
    #[case] keys: &str,
    #[case] scale: Scale,
) {
    for base in ["", "  adv_estimator: grpo\n", "  preset: roll\n"] {
        let group = group(&run(&format!("{base}{keys}")).unwrap().train);
        assert_eq!(group.baseline, Baseline::GroupMean);
        assert_eq!(group.scale, scale, "{base}{keys}");
    }
}

#[test]
fn reward_scale_only_divides_by_the_deviation() {
    let norm = with("reward_scale: false", "reward_scale: true")
        .recipe
        .reward_shaping
        .norm;
    assert_eq!((norm.mean, norm.std), (NormLevel::None, NormLevel::Group));
}

#[test]
fn norm_types_set_one_moment_each() {
    let page = page(TYPE_KEYS).replace("norm_std_type: ~", "norm_std_type: running");
    let norm = run(&page).unwrap().train.recipe.reward_shaping.norm;
    assert_eq!(
        (norm.mean, norm.std),
        (NormLevel::Group, NormLevel::Running)
    );
}

#[test]
fn add_token_level_kl_turns_the_penalty_on() {
    let train = with(
        "add_token_level_kl: false",
        "add_token_level_kl: true\n  kl_penalty: mse\n  init_kl_coef: 0.1\n  target_kl: 0.5\n  kl_horizon: 100",
    );
    let kl = Kl {
        value_clamp: Some(10.),
        ..Kl::new(KlEstimator::K2)
    };
    assert_eq!(tokens(&train).kl_penalty, Some(KlPenalty { coef: 0.1, kl }));
    // The clip of rewards bounds those of tokens too.
    assert_eq!(tokens(&train).token_reward_clip, Some(10.));
    let controller = serde_json::to_value(train.reward_kl).unwrap();
    assert_eq!(
        controller,
        json!({"kind": "adaptive", "coef": 0.1, "target": 0.5, "horizon": 100.})
    );
}

#[rstest]
#[case("pg_clip: 0.1", "/surrogate/clip/low", json!(0.1))]
#[case("pg_clip: 0.1", "/surrogate/clip/high", json!(0.1))]
#[case("use_pg_clip_range: true\n  pg_clip_high: 0.28", "/surrogate/clip/low", json!(0.2))]
#[case("use_pg_clip_range: true\n  pg_clip_high: 0.28", "/surrogate/clip/high", json!(0.28))]
#[case("use_pg_clip_range: true\n  pg_clip_low: 0.1", "/surrogate/clip/low", json!(0.1))]
#[case("importance_sampling: seq", "/importance_level", json!("sequence"))]
#[case("entropy_loss_coef: 0.01", "/entropy_coef", json!(0.01))]
#[case("rl_loss_coef: 0.5", "/loss_coef", json!(0.5))]
#[case("pg_variant: ppo", "/surrogate/clip/low", json!(0.2))]
#[case("pg_variant: vanilla", "/surrogate", json!("policy_gradient"))]
#[case("pg_variant: tis\n  tis_lower_bound: 0.1", "/surrogate/detached_weight/ratio_min", json!(0.1))]
#[case("pg_variant: tis\n  tis_upper_bound: 2", "/surrogate/detached_weight/ratio_max", json!(2.))]
#[case("pg_variant: topr\n  topr_positive_weight: 2", "/surrogate/topr/positive_weight", json!(2.))]
#[case("pg_variant: topr\n  topr_negative_weight: 0.5", "/surrogate/topr/negative_weight", json!(0.5))]
#[case("pg_variant: cispo\n  cispo_epsilon_low: 0.5", "/surrogate/detached_weight/ratio_min", json!(0.5))]
#[case("pg_variant: cispo\n  cispo_epsilon_high: 0.5", "/surrogate/detached_weight/ratio_max", json!(1.5))]
#[case("pg_variant: kimi15\n  kimi15_tau: 0.2", "/surrogate/squared_log_ratio/coef", json!(0.2))]
fn each_key_of_the_loss_sets_its_option(
    #[case] keys: &str,
    #[case] place: &str,
    #[case] expected: Value,
) {
    let loss = run(&format!("  {keys}\n"))
        .unwrap()
        .train
        .recipe
        .policy_loss;
    let loss = serde_json::to_value(loss).unwrap();
    assert_eq!(loss.pointer(place), Some(&expected), "{loss}");
}

/// `-sg[clip(r, 1 - low, 1 + high)] A lp`, and 0 where `r > 1 + high` with `A > 0` or
/// `r < 1 - low` with `A < 0`.
#[test]
fn the_unified_mask_of_cispo_has_the_bounds_of_its_weight() -> Result<()> {
    let keys = "  pg_variant: cispo\n  cispo_epsilon_low: 0.3\n  cispo_epsilon_high: 0.5\n  cispo_use_unified_mask: true\n  loss_agg_mode: token-mean\n";
    let loss = run(keys).unwrap().train.recipe.policy_loss;
    // Between the widths of PPO's clip and these, inside, and outside on both sides.
    let ratios = [1.4f64, 0.75, 1.6, 1.6, 0.6, 0.6];
    let advantages = [1f64, -1., 1., -1., 1., -1.];
    let weights = [1.4, 0.75, 0., 1.5, 0.7, 0.];

    let device = Device::Cpu;
    let shape = (ratios.len(), 1);
    let column = |values: &[f64]| Tensor::from_slice(values, shape, &device);
    let log_probs = Var::from_tensor(&column(&[-1.; 6])?)?;
    let old = column(&ratios.map(|ratio| -1. - ratio.ln()))?;
    let mask = Tensor::ones(shape, candle_core::DType::U8, &device)?;
    let targets = column(&advantages)?;
    let batch = PolicyBatch::new(&log_probs, &targets, &mask).old_log_probs(&old);
    let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
    let gradients = output.loss.backward()?;
    let gradient = gradients.get(&log_probs).expect("the loss has a gradient");
    let gradient = gradient.flatten_all()?.to_vec1::<f64>()?;
    for (i, gradient) in gradient.iter().enumerate() {
        let expected = -weights[i] * advantages[i] / 6.;
        assert!((gradient - expected).abs() < 1e-12, "token {i}: {gradient}");
    }
    Ok(())
}

#[test]
fn mask_keys_become_sample_filters() {
    let train = run(
        "  response_length: 50\n  max_len_mask: true\n  difficulty_mask: true\n  difficulty_low_threshold: 0.1\n  error_max_len_clip: true\n  error_max_len_threshold: 20\n",
    )
    .unwrap()
    .train;
    assert_eq!(
        train.sample_filters,
        [
            SampleFilter::ShorterThan { length: 50 },
            SampleFilter::Difficulty { low: 0.1, high: 1. },
            SampleFilter::ShortErrors { length: 20 },
        ]
    );
}

#[test]
fn switches_that_are_off_turn_their_keys_off() {
    let train = run(
        "  whiten_rewards: true\n  gamma: 0.5\n  use_kl_loss: false\n  kl_loss_coef: 0.1\n  add_token_level_kl: false\n  init_kl_coef: 0.2\n  use_pg_clip_range: false\n  pg_clip_low: 0.1\n  difficulty_mask: false\n  difficulty_low_threshold: 0.1\n  error_max_len_clip: false\n  error_max_len_threshold: 7\n  max_len_mask: false\n",
    )
    .unwrap()
    .train;
    assert!(tokens(&train).whiten_rewards);
    assert_eq!(tokens(&train).gamma, 0.5);
    assert_eq!(train.recipe.policy_loss.kl, None);
    assert_eq!(clip(&train), Clip::symmetric(0.2));
    assert!(train.sample_filters.is_empty());
}

#[rstest]
#[case(
    "reward_shift: true\n  reward_scale: true",
    "algorithm.reward_scale: true, must be false"
)]
#[case(
    "adv_estimator: reinforce\n  reward_shift: true",
    "algorithm.reward_shift: true, needs reward_norm"
)]
#[case(
    "reward_norm: batch\n  norm_mean_type: group",
    "algorithm.norm_mean_type: given together"
)]
#[case(
    "lambd: 0.9",
    "algorithm.lambd: given, but has no effect without adv_estimator: gae"
)]
#[case(
    "kl_loss_coef: 0.1",
    "algorithm.kl_loss_coef: given, but has no effect without use_kl_loss: true"
)]
#[case(
    "init_kl_coef: 0.1",
    "algorithm.init_kl_coef: given, but has no effect without add_token_level_kl: true"
)]
#[case("pg_clip_low: 0.1", "without use_pg_clip_range: true")]
#[case(
    "use_pg_clip_range: true\n  pg_clip_high: 0.28\n  pg_clip: 0.1",
    "algorithm.pg_clip: given, but has no effect without use_pg_clip_range: false, or dual_clip_loss"
)]
#[case(
    "pg_variant: cispo\n  cispo_use_unified_mask: true\n  pg_clip: 0.3",
    "algorithm.pg_clip: given, but has no effect without a loss that clips"
)]
#[case(
    "pg_variant: vanilla\n  dual_clip_loss: true",
    "algorithm.dual_clip_loss: given, but has no effect"
)]
#[case("tis_upper_bound: 2", "without pg_variant: tis")]
#[case(
    "reward_clip: 0",
    "algorithm.reward_clip: 0, must be positive and finite"
)]
#[case(
    "adv_estimator: reinforce\n  reward_clip: -1",
    "algorithm.reward_clip: -1, must be positive and finite"
)]
#[case("adv_estimator: gigpo", "\"gigpo\", must be one of")]
#[case("adv_estimator: grop", "did you mean `grpo`?")]
#[case("adv_estimator: rloo", "(here it is `preset: rloo`)")]
fn a_key_without_effect_or_with_a_wrong_value_is_an_error(#[case] keys: &str, #[case] words: &str) {
    let error = run(&format!("  {keys}\n")).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}
