//! Checks that a step provides every input that a part of an algorithm needs.

use std::sync::{Arc, Mutex};

use crate::common::{
    self, digest, max_difference, model, parameters, parts, prompts, sampling, share_of_a,
    tokenizer, trainer, trainer_of,
};
use candle_core::{Tensor, bail};
use candle_grpo_core::advantage::{AdvantageName, KlPenalty};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::{CostPenalty, OverlongPenalty};
use candle_grpo_core::selection::{GroupFilter, SampleFilter, ScoreResampling};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Advantages, RewardShaping,
    TokenAdvantage,
};
use candle_grpo_loss::correction::{FilterLevel, FilterStatistic, ImportanceWeight, RolloutFilter};
use candle_grpo_loss::surrogate::{
    Clip, ClipCov, KlCov, PositiveIf, Surrogate, SurrogateInputs, TokenLoss, TokenLosses, Topr,
};
use candle_grpo_loss::{
    AdaptiveEntropy, Aggregation, EntropyTokens, KlLoss, PolicyLoss, PositiveNll, Recipe,
    RolloutCorrection, experimental,
};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::step::Needs;
use candle_grpo_train::learn::{
    OldLogProbs, Reference, ReferenceRefresh, Teacher, TeacherPart, TokenWeight,
};
use candle_grpo_train::{
    ComputeDType, Progress, Prompt, RewardFunction, Sample, SamplingConfig, StepMetrics,
    TokenBatch, TrainConfig, TrainerParts, WeightedRewards, evaluate,
};
use rstest::rstest;
use serde_json::json;

fn config(recipe: Recipe) -> TrainConfig {
    TrainConfig {
        recipe,
        ..common::config()
    }
}

fn with_loss(policy_loss: PolicyLoss) -> TrainConfig {
    config(Recipe {
        policy_loss,
        ..Recipe::default()
    })
}

fn with_advantage(advantage: impl Into<AdvantagePipeline>) -> TrainConfig {
    config(Recipe {
        advantage: advantage.into(),
        ..Recipe::default()
    })
}

#[rstest]
fn every_published_recipe_trains(
    #[values(
        Recipe::grpo(),
        Recipe::dapo(8, 4),
        Recipe::dr_grpo(8.),
        experimental::recipe::lite_ppo(),
        Recipe::gspo(),
        experimental::recipe::luspo(),
        Recipe::gmpo(),
        Recipe::cispo(),
        Recipe::sapo(),
        experimental::recipe::vespo(),
        Recipe::gpg(),
        Recipe::rloo(),
        Recipe::reinforce_plus_plus(0.01),
        Recipe::reinforce_plus_plus_baseline(),
        Recipe::trl(),
        Recipe::verl(),
        Recipe::roll(),
        Recipe::twinkle(),
        Recipe::openrlhf(),
        Recipe::prime_rl(),
        experimental::recipe::fipo(),
        experimental::recipe::m2po(),
        Recipe::gkd()
    )]
    recipe: Recipe,
) {
    let config = TrainConfig {
        epochs: 2,
        mini_batch_size: Some(7),
        ..config(recipe)
    };
    let teacher = candle_grpo_nn::Parameters::init(&model(), 9, device()).unwrap();
    let teacher = Reference::new(&model(), &teacher, ComputeDType::F32).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher)),
        ..parts(share_of_a, config)
    });
    let metrics = trainer.step().unwrap();
    assert!(!metrics.skipped);
    let norm = metrics.grad_norm.unwrap();
    assert!(norm > 0. && norm.is_finite());
    let moved = trainer
        .actor()
        .parameters()
        .iter()
        .any(|(name, x)| max_difference(x, parameters().get(name).unwrap()) > 0.);
    assert!(moved);
}

#[rstest]
fn every_named_advantage_without_a_critic_trains(
    #[values(
        r#"{"name": "opo"}"#,
        r#"{"name": "max_rl"}"#,
        r#"{"name": "pass_at_k"}"#,
        r#"{"name": "gdpo"}"#,
        r#"{"name": "remax"}"#,
        r#"{"name": "optimal_token_baseline"}"#,
        r#"{"name": "multi_turn_optimal_token_baseline"}"#,
        r#"{"name": "reinforce"}"#,
        r#"{"name": "reinforce_baseline"}"#,
        r#"{"name": "flash_reinforce"}"#
    )]
    name: &str,
) {
    let advantage: AdvantagePipeline = serde_json::from_str(name).unwrap();
    let metrics = trainer(share_of_a, with_advantage(advantage))
        .step()
        .unwrap();
    assert!(!metrics.skipped && metrics.grad_norm.unwrap() > 0.);
}

/// Samples whose score is above 0.1, over all tokens.
#[rstest]
#[case(PolicyLoss { positive_nll: Some(PositiveNll { coef: 0.1, score_above: 0.1 }), ..PolicyLoss::default() }, "positive_nll_fraction")]
#[case(
    PolicyLoss {
        surrogate: Topr { positive_if: PositiveIf::ScoreAbove(0.1), ..Topr::default() }.into(),
        ..PolicyLoss::default()
    },
    "positive_fraction"
)]
fn losses_that_need_scores_get_them(#[case] policy_loss: PolicyLoss, #[case] figure: &str) {
    let counts = Arc::new(Mutex::new((0, 0)));
    let reward = {
        let counts = counts.clone();
        move |sample: &Sample| {
            let score = share_of_a(sample);
            let tokens = sample.completion_tokens.len();
            let mut counts = counts.lock().unwrap();
            counts.0 += if score > 0.1 { tokens } else { 0 };
            counts.1 += tokens;
            score
        }
    };
    // Shaping must not reach what asks whether a sample was right.
    let mut config = with_loss(policy_loss);
    config.recipe.reward_shaping = RewardShaping {
        shift: -5.,
        ..RewardShaping::default()
    };
    let metrics = trainer(reward, config).step().unwrap();
    let (positive, all) = *counts.lock().unwrap();
    assert!(positive > 0 && positive < all);
    let expected = positive as f64 / all as f64;
    assert!((metrics.policy[figure] - expected).abs() < 1e-6);
}

/// PPO's clip, written outside the library.
#[derive(Debug)]
struct CustomClip {
    width: f64,
}

impl TokenLoss for CustomClip {
    fn per_token(&self, inputs: &SurrogateInputs) -> candle_core::Result<TokenLosses> {
        let ratio = inputs.log_ratio.exp()?;
        let clipped = ratio.clamp(1. - self.width, 1. + self.width)?.detach();
        let loss = (ratio * inputs.advantages)?.neg()?;
        let clipped_loss = (clipped * inputs.advantages)?.neg()?;
        let is_clipped = clipped_loss.gt(&loss)?;
        Ok(TokenLosses {
            loss: is_clipped.where_cond(&clipped_loss, &loss)?,
            flags: vec![("clip_fraction", is_clipped)],
        })
    }
}

#[test]
fn a_custom_surrogate_trains_as_the_built_in_one() {
    let trained = |surrogate: Surrogate| {
        let mut config = with_loss(PolicyLoss {
            surrogate,
            ..PolicyLoss::default()
        });
        config.epochs = 3;
        let mut trainer = trainer(share_of_a, config);
        let metrics: Vec<StepMetrics> = (0..3).map(|_| trainer.step().unwrap()).collect();
        (trainer.policy_parameters().unwrap(), metrics)
    };
    let (built_in, expected) = trained(Clip::symmetric(0.001).into());
    let (custom, metrics) = trained(Surrogate::custom(CustomClip { width: 0.001 }));
    let initial = parameters();
    for (name, weight) in built_in.iter() {
        // The built-in one is an operator, whose sums are rounded differently.
        let distance = max_difference(weight, custom.get(name).unwrap());
        assert!(distance < 1e-6, "{name}: {distance}");
        assert!(
            max_difference(weight, initial.get(name).unwrap()) > 0.,
            "{name}"
        );
    }
    assert!(
        metrics
            .iter()
            .any(|metrics| metrics.policy["clip_fraction"] > 0.)
    );
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs().max(1.);
    for (metrics, expected) in metrics.iter().zip(&expected) {
        assert!(near(
            metrics.grad_norm.unwrap(),
            expected.grad_norm.unwrap()
        ));
        for (name, value) in &metrics.policy {
            assert!(near(*value, expected.policy[name]), "{name}: {value}");
        }
    }
}

#[rstest]
#[case(ClipCov { ratio: 0.2, lower: 0., upper: 100., ..ClipCov::default() }.into())]
#[case(KlCov { ratio: 0.2, coef: 1. }.into())]
fn tokens_of_high_covariance_are_selected_from_the_whole_optimizer_step(
    #[case] surrogate: Surrogate,
) {
    let policy_loss = PolicyLoss {
        surrogate,
        ..PolicyLoss::default()
    };
    let config = with_loss(policy_loss);
    let metrics = trainer(share_of_a, config).step().unwrap();
    let tokens = (metrics.response_length * 12.).round();
    let selected = metrics.policy["selected_fraction"] * tokens;
    // A share of each micro-batch would be rounded down in each.
    assert!(
        (selected - (0.2 * tokens).floor()).abs() < 1e-3,
        "{selected} of {tokens}"
    );
}

#[test]
fn a_mean_over_prompts_counts_those_of_the_optimizer_step() {
    let gradient = |aggregation, config: fn(&mut TrainConfig)| {
        let mut settings = with_loss(PolicyLoss {
            aggregation,
            ..PolicyLoss::default()
        });
        config(&mut settings);
        trainer(share_of_a, settings)
            .step()
            .unwrap()
            .grad_norm
            .unwrap()
    };
    // With one prompt its mean is that over all tokens.
    let one_prompt: fn(&mut TrainConfig) = |config| config.prompts_per_step = 1;
    let by_prompt = gradient(Aggregation::PromptMeanTokenMean, one_prompt);
    let by_token = gradient(Aggregation::TokenMean, one_prompt);
    assert!(
        (by_prompt / by_token - 1.).abs() < 1e-5,
        "{by_prompt} {by_token}"
    );
    let three = gradient(Aggregation::PromptMeanTokenMean, |_| ());
    let by_token = gradient(Aggregation::TokenMean, |_| ());
    assert!((three / by_token - 1.).abs() > 1e-3, "{three} {by_token}");
}

#[test]
fn the_rollout_is_corrected_for() {
    let correction = |filters: Vec<RolloutFilter>| {
        with_loss(PolicyLoss {
            rollout_correction: Some(RolloutCorrection {
                weight: Some(ImportanceWeight::truncated(2.)),
                filters,
                ..RolloutCorrection::default()
            }),
            ..PolicyLoss::default()
        })
    };
    let metrics = trainer(share_of_a, correction(vec![])).step().unwrap();
    // The sampler is the policy up to rounding.
    assert!((metrics.policy["rollout_weight_mean"] - 1.).abs() < 1e-4);
    assert!(metrics.grad_norm.unwrap() > 1e-3);

    let reject_all = RolloutFilter {
        statistic: FilterStatistic::LogRatio,
        level: FilterLevel::Token,
        min: Some(1.),
        max: None,
    };
    let metrics = trainer(share_of_a, correction(vec![reject_all]))
        .step()
        .unwrap();
    assert_eq!(metrics.policy["rollout_rejected_fraction"], 1.);
    assert_eq!(metrics.grad_norm, Some(0.));

    let config = TrainConfig {
        old_log_probs: OldLogProbs::Sampler,
        ..correction(vec![])
    };
    let error = config.validate().unwrap_err().to_string();
    assert!(
        error.starts_with("old_log_probs: sampler, must be auto or recompute"),
        "{error}"
    );
}

type Seen = Arc<Mutex<Vec<Option<Vec<f32>>>>>;

/// Returns the rewards as advantages, and keeps its inputs.
struct Spy {
    seen: Seen,
    of: fn(&AdvantageBatch) -> Option<Tensor>,
}

impl AdvantageEstimator for Spy {
    fn estimate(&self, batch: &AdvantageBatch) -> candle_core::Result<Advantages> {
        let seen = (self.of)(batch).map(|x| {
            x.flatten_all()?
                .to_dtype(candle_core::DType::F32)?
                .to_vec1::<f32>()
        });
        self.seen.lock().unwrap().push(seen.transpose()?);
        let rewards = batch.sequence_rewards()?.values;
        let sums = match rewards.rank() {
            2 => rewards.sum(1)?,
            _ => rewards,
        };
        Ok(Advantages::new(sums.to_dtype(candle_core::DType::F32)?))
    }
}

fn spied(
    reward: impl RewardFunction + 'static,
    config: TrainConfig,
    of: fn(&AdvantageBatch) -> Option<Tensor>,
) -> Option<Vec<f32>> {
    let seen = Seen::default();
    let spy = Spy {
        seen: seen.clone(),
        of,
    };
    let mut trainer = trainer_of(TrainerParts {
        estimator: Some(Box::new(spy)),
        ..parts(reward, config)
    });
    trainer.step().unwrap();
    let [seen] = seen
        .lock()
        .unwrap()
        .drain(..)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    seen
}

#[test]
fn components_of_rewards_stay_apart() {
    let rewards = || {
        WeightedRewards::new()
            .with("one", 1., |_: &Sample| 1.)
            .with("a", 2., share_of_a)
    };
    let seen = spied(rewards(), config(Recipe::default()), |batch| {
        batch.rewards.clone()
    })
    .unwrap();
    assert_eq!(seen.len(), 24);
    assert!(
        seen.chunks(2)
            .all(|both| both[0] == 1. && (0. ..=2.).contains(&both[1]))
    );
    // Shaping adds them up.
    let mut shaped = config(Recipe::default());
    shaped.recipe.reward_shaping.shift = 1.;
    let sums = spied(rewards(), shaped.clone(), |batch| batch.rewards.clone()).unwrap();
    for (both, sum) in seen.chunks(2).zip(&sums) {
        assert!((both[0] + both[1] + 1. - sum).abs() < 1e-6);
    }
    // An option that has no effect here leaves them apart.
    let mut unused = config(Recipe::default());
    unused.recipe.reward_shaping.norm.epsilon = 0.5;
    unused.recipe.reward_shaping.norm.ddof = 0;
    let apart = spied(rewards(), unused, |batch| batch.rewards.clone());
    assert_eq!(apart.unwrap(), seen);
    shaped.recipe.advantage = AdvantageName::Gdpo.into();
    let error = shaped.validate().unwrap_err().to_string();
    assert!(
        error.starts_with("recipe.advantage: takes the components"),
        "{error}"
    );
}

/// Pulls the policy toward the reference.
#[derive(Debug)]
struct TowardReference;

impl TokenLoss for TowardReference {
    fn per_token(&self, inputs: &SurrogateInputs) -> candle_core::Result<TokenLosses> {
        let reference = inputs.get(Input::RefLogProbs)?;
        Ok(TokenLosses {
            loss: (inputs.log_probs - reference)?.sqr()?,
            flags: vec![("reference_log_prob", reference.clone())],
        })
    }

    fn needs(&self) -> Inputs {
        Input::RefLogProbs.into()
    }
}

/// A completion's log-prob under the reference.
struct ReferenceScore;

impl AdvantageEstimator for ReferenceScore {
    fn estimate(&self, batch: &AdvantageBatch) -> candle_core::Result<Advantages> {
        let Some(reference) = &batch.ref_log_probs else {
            bail!("ref_log_probs: absent");
        };
        Ok(Advantages::new(reference.sum(1)?))
    }

    fn needs(&self) -> Inputs {
        Input::RefLogProbs.into()
    }
}

/// No KL term in the recipe asks for a reference.
#[test]
fn a_custom_loss_and_a_custom_estimator_get_the_inputs_that_they_declare() {
    let surrogate = Surrogate::custom(TowardReference);
    let config = with_loss(PolicyLoss {
        surrogate,
        ..PolicyLoss::default()
    });
    let metrics = trainer(share_of_a, config).step().unwrap();
    // Before the first update the reference is the policy.
    let difference = metrics.policy["reference_log_prob"] - metrics.policy["log_prob"];
    assert!(difference.abs() < 1e-6, "{difference}");

    let mut trainer = trainer_of(TrainerParts {
        estimator: Some(Box::new(ReferenceScore)),
        ..parts(|_: &Sample| 1., with_loss(PolicyLoss::default()))
    });
    let metrics = trainer.step().unwrap();
    assert!(!metrics.skipped && metrics.grad_norm.unwrap() > 0.);
}

#[test]
fn tokens_weigh_what_their_text_does() {
    let grad_norm = |weights: &[(&str, f64)]| {
        let weights = weights.iter().map(|(pattern, weight)| TokenWeight {
            pattern: (*pattern).to_owned(),
            weight: *weight,
        });
        let mut trainer = trainer_of(parts(
            digest,
            TrainConfig {
                token_weights: weights.collect(),
                ..with_loss(PolicyLoss::default())
            },
        ));
        trainer.step().unwrap().grad_norm.unwrap()
    };
    let all = grad_norm(&[]);
    assert_eq!(grad_norm(&[("(?s).*", 1.)]), all);
    let half = grad_norm(&[("(?s).*", 0.5)]);
    assert!((half / all - 0.5).abs() < 1e-5, "{half} {all}");
    assert_eq!(grad_norm(&[("(?s).*", 0.)]), 0.);
    // The gradients of the tokens "a" and of the others add up, so neither is longer than their
    // sum.
    let (only, others) = (
        grad_norm(&[("(?s).*", 0.), ("a", 1.)]),
        grad_norm(&[("a", 0.)]),
    );
    assert!(only > 0. && others > 0. && all < only + others + 1e-6);
    assert!((only - all).abs() > 1e-4 && (others - all).abs() > 1e-4);
    let config = TrainConfig {
        token_weights: vec![TokenWeight {
            pattern: "(".to_owned(),
            weight: 1.,
        }],
        ..common::config()
    };
    let error = config.validate().unwrap_err().to_string();
    assert!(
        error.starts_with("token_weights[0].pattern: \"(\", must be a regular expression"),
        "{error}"
    );
}

/// GRPO's advantages, times the hundreds of each score over their mean.
struct Hundreds;

impl AdvantageEstimator for Hundreds {
    fn estimate(&self, batch: &AdvantageBatch) -> candle_core::Result<Advantages> {
        let weights = (batch.sequence_rewards()?.values / 100.)?.round()?;
        let weights = weights.broadcast_div(&weights.mean_all()?)?;
        let advantages = AdvantagePipeline::grpo().estimate(batch)?.advantages;
        let weights = weights.to_dtype(advantages.dtype())?;
        Ok(Advantages::new((advantages * weights)?))
    }
}

#[test]
fn the_weight_of_a_row_is_a_factor_of_its_advantages() {
    let of_row = |sample: &Sample| sample.columns["weight"].as_f64().unwrap() as f32;
    let step = |weights: [f64; 3], column: Option<&str>, estimator| {
        let rows = ["abc", "d", "ee"].into_iter().zip(weights).enumerate();
        let prompts = rows.map(|(i, (text, weight))| {
            Prompt::new(i as u64, text, json!({"weight": weight}), &tokenizer()).unwrap()
        });
        let config = TrainConfig {
            sample_weight_column: column.map(str::to_owned),
            ..with_loss(PolicyLoss::default())
        };
        let reward = move |sample: &Sample| 100. * of_row(sample) + digest(sample);
        let mut trainer = trainer_of(TrainerParts {
            prompts: prompts.collect(),
            estimator,
            ..parts(reward, config)
        });
        trainer.step().map(|metrics| metrics.grad_norm.unwrap())
    };
    let hundreds = || -> Option<Box<dyn AdvantageEstimator>> { Some(Box::new(Hundreds)) };
    let (weights, column) = ([1., 2., 5.], Some("weight"));
    let weighted = step(weights, column, None).unwrap();
    let expected = step(weights, None, hundreds()).unwrap();
    assert!(
        (weighted / expected - 1.).abs() < 1e-5,
        "{weighted} and {expected}"
    );
    let plain = step(weights, None, None).unwrap();
    assert!(
        (weighted / plain - 1.).abs() > 1e-3,
        "{weighted} and {plain}"
    );
    let equal = |column| step([2.; 3], column, None).unwrap();
    assert_eq!(equal(column), equal(None));
    for (weights, column, found) in [
        (weights, "other", "column \"other\": null"),
        ([1., 0., 1.], "weight", "column \"weight\": 0.0"),
    ] {
        let error = format!("{:#}", step(weights, Some(column), None).unwrap_err());
        let expected = format!("{found}, must be a positive number (sample_weight_column)");
        assert!(error.contains(&expected), "{error}");
    }
}

/// Advantages of a shape that no step has.
struct OfShape(Vec<usize>);

impl AdvantageEstimator for OfShape {
    fn estimate(&self, _: &AdvantageBatch) -> candle_core::Result<Advantages> {
        Ok(Advantages::new(Tensor::ones(
            self.0.as_slice(),
            candle_core::DType::F32,
            device(),
        )?))
    }
}

#[rstest]
#[case::sequences(vec![11])]
#[case::tokens(vec![12, 100])]
#[case::both(vec![5, 2])]
fn advantages_of_another_shape_are_named(#[case] shape: Vec<usize>) {
    let mut trainer = trainer_of(TrainerParts {
        estimator: Some(Box::new(OfShape(shape))),
        ..parts(digest, with_loss(PolicyLoss::default()))
    });
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(error.starts_with("step 1: advantages: "), "{error}");
}

#[test]
fn greedy_answers_are_the_baseline_of_remax() {
    let mut config = with_advantage(AdvantageName::Remax);
    config.prompts_per_step = 5;
    let seen = spied(digest, config.clone(), |batch| {
        batch.reward_baselines.clone()
    })
    .unwrap();
    let trainer = trainer(digest, config);
    let sampler = trainer
        .actor()
        .sampler(SamplingConfig {
            greedy: true,
            ..sampling()
        })
        .unwrap();
    let all = prompts(&["abc", "d", "ee", "ca", "b"]);
    let greedy = evaluate(&sampler, &all, 1, &digest, &tokenizer(), 0).unwrap();
    let mut expected: Vec<f32> = greedy
        .samples
        .iter()
        .flat_map(|sample| [sample.reward.unwrap(); 4])
        .collect();
    let mut seen = seen;
    // The order of the prompts is shuffled.
    expected.sort_by(f32::total_cmp);
    seen.sort_by(f32::total_cmp);
    assert_eq!(seen, expected);
    assert!(seen[0] < seen[19]);
}

#[test]
fn a_custom_estimator_gets_log_probs_and_mask() {
    let mut config = with_loss(PolicyLoss {
        kl: Some(KlLoss::k3(0.1)),
        ..PolicyLoss::default()
    });
    let get: fn(&AdvantageBatch) -> Option<Tensor> = |batch| {
        let difference = (batch.old_log_probs.as_ref()? - batch.ref_log_probs.as_ref()?).ok()?;
        assert!(batch.response_mask.is_some());
        Some(difference)
    };
    let difference = spied(share_of_a, config.clone(), get).unwrap();
    assert!(difference.iter().all(|&x| x == 0.));
    config.recipe.policy_loss.kl = None;
    assert_eq!(spied(share_of_a, config, get), None);
}

#[test]
fn long_completions_are_penalized() {
    let config = config(Recipe {
        overlong: Some(OverlongPenalty::new(3, 2)),
        ..Recipe::default()
    });
    let length = |sample: &Sample| sample.completion_tokens.len() as f32;
    let seen = spied(length, config, |batch| batch.rewards.clone()).unwrap();
    for reward in &seen {
        let valid = [
            (1., 0.),
            (2., 0.5),
            (3., 1.),
            (4., 1.),
            (5., 1.),
            (6., 1.),
            (7., 1.),
            (8., 1.),
        ];
        assert!(
            valid
                .iter()
                .any(|(length, penalty)| length - penalty == *reward)
        );
    }
    assert!(seen.contains(&7.), "some completions have all 8 tokens");
}

#[test]
fn length_is_penalized_relative_to_the_group() {
    let config = config(Recipe {
        length_penalty: Some(CostPenalty {
            output_tokens: 0.5,
            ..CostPenalty::default()
        }),
        ..Recipe::default()
    });
    let seen = spied(|_: &Sample| 1., config, |batch| batch.rewards.clone()).unwrap();
    assert!(seen.iter().all(|reward| (0.5..1.).contains(reward)));
    // The longest completion of each of three groups of four.
    for group in seen.chunks(4) {
        assert!(group.contains(&0.5), "{group:?}");
    }
}

#[test]
fn a_loss_distills_without_a_reward() {
    let config = with_loss(PolicyLoss::on_policy_distillation());
    let nothing = |_: &Sample| 0.;
    let error = trainer(nothing, config.clone()).step().unwrap_err();
    assert!(
        format!("{error:#}").contains("teacher_log_probs: absent"),
        "{error:#}"
    );
    let teacher = candle_grpo_nn::Parameters::init(&model(), 9, device()).unwrap();
    let teacher = Reference::new(&model(), &teacher, ComputeDType::F32).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher)),
        ..parts(nothing, config)
    });
    let metrics = trainer.step().unwrap();
    assert!(!metrics.skipped && metrics.grad_norm.unwrap() > 0.);
    assert!(metrics.policy["distillation_gap_abs"] > 0.1);
}

/// Another crate's teacher, which records the number of sequences in each call.
struct Noting(Reference, Mutex<Vec<usize>>);

impl Teacher for Noting {
    fn log_probs(
        &self,
        batch: &TokenBatch,
        temperature: f64,
        _: &dyn Progress,
    ) -> anyhow::Result<Tensor> {
        self.1.lock().unwrap().push(batch.dims().0);
        self.0.log_probs(batch, temperature)
    }
}

#[test]
fn a_teacher_has_the_micro_batches_of_the_policy() {
    let config = with_loss(PolicyLoss::on_policy_distillation());
    let teacher = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let teacher = Arc::new(Noting(teacher, Mutex::default()));
    let shared: Arc<dyn Teacher> = Arc::clone(&teacher) as _;
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::Other(shared)),
        ..parts(digest, config)
    });
    trainer.step().unwrap();
    // Twelve completions in micro-batches of five.
    assert_eq!(*teacher.1.lock().unwrap(), [5, 5, 2]);
}

#[test]
fn a_loss_of_a_group_needs_whole_groups() {
    let config = with_loss(experimental::policy_loss::real());
    let error = config.validate().unwrap_err();
    assert!(
        format!("{error:#}").contains("micro_batch_size: 5, must hold whole groups"),
        "{error:#}"
    );
    let config = TrainConfig {
        micro_batch_size: 4,
        ..config
    };
    let metrics = trainer(share_of_a, config).step().unwrap();
    assert!(metrics.grad_norm.unwrap() > 0.);
    assert!(metrics.policy["positive_fraction"] > 0.);
}

#[test]
fn a_teacher_is_learned_from() {
    let pipeline = AdvantagePipeline::from(TokenAdvantage {
        distillation: Some(KlPenalty {
            coef: 1.,
            ..KlPenalty::default()
        }),
        ..TokenAdvantage::default()
    });
    let config = with_advantage(pipeline);
    let nothing = |_: &Sample| 0.;
    let error = trainer(nothing, config.clone()).step().unwrap_err();
    assert!(
        format!("{error:#}").contains("teacher_log_probs: absent"),
        "{error:#}"
    );
    let teacher = candle_grpo_nn::Parameters::init(&model(), 9, device()).unwrap();
    let teacher = Reference::new(&model(), &teacher, ComputeDType::F32).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher)),
        ..parts(nothing, config)
    });
    let metrics = trainer.step().unwrap();
    assert!(!metrics.skipped && metrics.policy["teacher_kl"] > 0.1);
}

/// One prompt in five has a signal.
fn only_abc(sample: &Sample) -> f32 {
    match sample.prompt {
        "abc" => digest(sample),
        _ => 1.,
    }
}

#[test]
fn groups_without_a_signal_are_sampled_again() {
    let mut config = config(Recipe {
        group_filter: Some(GroupFilter::default()),
        ..Recipe::default()
    });
    config.prompts_per_step = 2;
    config.max_sampling_batches = 20;
    let metrics = trainer(only_abc, config.clone()).step().unwrap();
    assert_eq!(metrics.kept_groups, 2);
    // One in five, so it takes at least six to find two.
    assert!(metrics.sampled_groups >= 6, "{}", metrics.sampled_groups);
    let share = 1. - 2. / metrics.sampled_groups as f64;
    assert!((metrics.constant_groups - share).abs() < 1e-12);

    config.max_sampling_batches = 1;
    let mut trainer = trainer(only_abc, config);
    let steps: Vec<_> = (0..5).map(|_| trainer.step().unwrap()).collect();
    assert!(steps.iter().all(|m| m.sampled_groups == 2));
    // Ten places, each of the five prompts twice: two groups teach.
    assert_eq!(steps.iter().map(|m| m.kept_groups).sum::<usize>(), 2);
    assert_eq!(
        trainer.skipped_steps(),
        steps.iter().filter(|m| m.kept_groups == 0).count()
    );
    let skipped = steps.iter().find(|m| m.skipped).unwrap();
    let reason = skipped.skip_reason.as_deref();
    assert_eq!(reason, Some("all 2 groups filtered (group_filter)"));
}

#[test]
fn a_prompt_that_is_sampled_again_in_a_step_gets_other_completions() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let reward = {
        let seen = seen.clone();
        move |sample: &Sample| {
            if sample.prompt == "abc" {
                seen.lock().unwrap().push(sample.completion_tokens.to_vec());
            }
            only_abc(sample)
        }
    };
    let mut config = config(Recipe {
        group_filter: Some(GroupFilter::default()),
        ..Recipe::default()
    });
    config.prompts_per_step = 2;
    config.num_generations = 8;
    trainer(reward, config).step().unwrap();
    let seen = seen.lock().unwrap();
    assert_ne!(seen[..8], seen[8..16]);
}

#[test]
fn filtered_completions_leave_loss_and_denominators() {
    let mut config = with_loss(PolicyLoss::default());
    config.sample_filters = vec![SampleFilter::NotTruncated {}];
    let metrics = trainer(share_of_a, config.clone()).step().unwrap();
    assert!(!metrics.skipped && metrics.truncated > 0. && metrics.truncated < 1.);
    let mut all = config.clone();
    all.sample_filters = Vec::new();
    let whole = trainer(share_of_a, all).step().unwrap();
    assert_ne!(metrics.grad_norm, whole.grad_norm);

    config
        .sample_filters
        .push(SampleFilter::ShorterThan { length: 1 });
    let completions = config.prompts_per_step * config.num_generations;
    let skipped = trainer(share_of_a, config).step().unwrap();
    assert!(skipped.skipped && skipped.updates == 0);
    let reason = format!("all {completions} completions filtered (not_truncated, shorter_than)");
    assert_eq!(skipped.skip_reason, Some(reason));
}

#[test]
fn updates_and_mini_batches_without_tokens_are_counted() {
    let mut config = with_loss(PolicyLoss::default());
    config.mini_batch_size = Some(1);
    config.epochs = 2;
    let mini_batches = config.epochs * config.prompts_per_step * config.num_generations;
    let all = trainer(share_of_a, config.clone()).step().unwrap();
    assert_eq!((all.updates, all.skipped_mini_batches), (mini_batches, 0));

    config.sample_filters = vec![SampleFilter::NotTruncated {}];
    let some = trainer(share_of_a, config).step().unwrap();
    let truncated = (some.truncated * mini_batches as f64).round() as usize;
    assert!(truncated > 0);
    assert_eq!(some.skipped_mini_batches, truncated);
    assert_eq!(some.updates, mini_batches - truncated);
}

#[test]
fn a_single_update_needs_no_forward_pass_before_it() {
    let gradient = |old_log_probs| {
        let config = TrainConfig {
            old_log_probs,
            ..with_loss(PolicyLoss::default())
        };
        let mut trainer = trainer(share_of_a, config);
        trainer.step().unwrap().grad_norm.unwrap()
    };
    let current = gradient(OldLogProbs::Current);
    let recomputed = gradient(OldLogProbs::Recompute);
    assert!((current / recomputed - 1.).abs() < 1e-5);
    assert_eq!(gradient(OldLogProbs::Auto), current);

    let current = TrainConfig {
        old_log_probs: OldLogProbs::Current,
        ..config(Recipe::grpo())
    };
    current.validate().unwrap();
    for (bad, words) in [
        (
            TrainConfig {
                epochs: 2,
                ..current.clone()
            },
            "with several updates a step",
        ),
        (
            TrainConfig {
                mini_batch_size: Some(6),
                ..current.clone()
            },
            "with several updates a step",
        ),
        (
            TrainConfig {
                recipe: Recipe::reinforce_plus_plus(0.1),
                ..current.clone()
            },
            "with a recipe.advantage that needs them",
        ),
    ] {
        let error = bad.validate().unwrap_err().to_string();
        assert!(
            error.starts_with("old_log_probs: current") && error.contains(words),
            "{error}"
        );
    }
}

#[rstest]
#[case::single_update(false, |_: &mut TrainConfig| {})]
#[case::epochs(true, |config: &mut TrainConfig| config.epochs = 2)]
#[case::mini_batches(true, |config: &mut TrainConfig| config.mini_batch_size = Some(6))]
#[case::correction(true, |config: &mut TrainConfig| {
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection::default());
})]
#[case::advantage(true, |config: &mut TrainConfig| config.recipe = Recipe::reinforce_plus_plus(0.1))]
#[case::given(true, |config: &mut TrainConfig| config.old_log_probs = OldLogProbs::Recompute)]
#[case::sampler(true, |config: &mut TrainConfig| config.old_log_probs = OldLogProbs::Sampler)]
fn a_pass_before_the_update_runs_where_its_result_differs(
    #[case] expected: bool,
    #[case] change: fn(&mut TrainConfig),
) {
    let mut config = config(Recipe::grpo());
    change(&mut config);
    config.validate().unwrap();
    let needs = Needs::new(&config, None);
    assert_eq!(needs.all().contains(Input::OldLogProbs), expected);
}

#[test]
fn controllers_change_their_coefficients() {
    let mut config = config(Recipe::reinforce_plus_plus(0.5));
    config.reward_kl = Some(KlController::adaptive(0.2, 0.1, 100.).unwrap());
    config.adaptive_entropy = Some(AdaptiveEntropy {
        target: 10.,
        delta: 0.01,
        ..AdaptiveEntropy::default()
    });
    let mut trainer = trainer(share_of_a, config.clone());
    let first = trainer.step().unwrap();
    assert_eq!(first.policy["reward_kl_coef"], 0.2);
    // The policy is still the reference: the divergence is 0, an error of -0.2 in 12 samples of
    // 100.
    let second = trainer.step().unwrap();
    assert!((second.policy["reward_kl_coef"] - 0.2 * (1. - 0.2 * 0.12)).abs() < 1e-9);
    assert_eq!(trainer.actor().config().policy_loss.entropy_coef, 0.01);

    config.recipe.policy_loss.entropy_coef = 0.1;
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with("adaptive_entropy: "), "{error}");
    config.adaptive_entropy = None;
    config.recipe.advantage = AdvantagePipeline::default();
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with("reward_kl: "), "{error}");
}

#[test]
fn the_reference_follows_the_policy() {
    let mut config = config(Recipe::grpo());
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.04));
    config.optimizer.learning_rate = 1e-2;
    config.reference_refresh = Some(ReferenceRefresh {
        every_steps: 2,
        alpha: 1.,
    });
    let mut trainer = trainer(share_of_a, config.clone());
    let kl: Vec<f64> = (0..5)
        .map(|_| trainer.step().unwrap().policy["kl"])
        .collect();
    // Steps 1, 3 and 5 begin where the reference is.
    for (i, kl) in kl.iter().enumerate() {
        assert_eq!(*kl == 0., i % 2 == 0, "step {}: {kl}", i + 1);
    }

    for (refresh, words) in [
        (
            ReferenceRefresh {
                every_steps: 0,
                alpha: 1.,
            },
            "reference_refresh.every_steps: 0",
        ),
        (
            ReferenceRefresh {
                every_steps: 1,
                alpha: 2.,
            },
            "reference_refresh.alpha: 2",
        ),
    ] {
        config.reference_refresh = Some(refresh);
        let error = format!("{:#}", config.validate().unwrap_err());
        assert!(error.starts_with(words), "{error}");
    }
    config.recipe.policy_loss.kl = None;
    config.reference_refresh = Some(ReferenceRefresh {
        every_steps: 2,
        alpha: 1.,
    });
    let error = config.validate().unwrap_err().to_string();
    assert!(
        error.contains("no KL term in recipe needs a reference"),
        "{error}"
    );
}

#[test]
fn the_policy_term_may_count_on_tokens_of_high_entropy_only() {
    let gradient = |top_entropy| {
        let config = TrainConfig {
            top_entropy,
            ..with_loss(PolicyLoss::default())
        };
        let metrics = trainer(share_of_a, config).step().unwrap();
        metrics.grad_norm.unwrap()
    };
    assert_eq!(gradient(Some(1.)), gradient(None));
    assert!((gradient(Some(0.2)) / gradient(None) - 1.).abs() > 1e-3);
    let config = TrainConfig {
        top_entropy: Some(1.5),
        ..config(Recipe::default())
    };
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with("top_entropy: 1.5, must be"), "{error}");
}

#[test]
fn the_entropy_bonus_may_be_a_mean_over_the_tokens_of_high_entropy() {
    let bonus = |entropy_tokens| PolicyLoss {
        loss_coef: 0.,
        entropy_coef: 1.,
        entropy_tokens,
        ..PolicyLoss::dapo()
    };
    let gradient = |entropy_tokens, top_entropy| {
        let config = TrainConfig {
            top_entropy,
            ..with_loss(bonus(entropy_tokens))
        };
        let metrics = trainer(share_of_a, config).step().unwrap();
        metrics.grad_norm.unwrap()
    };
    let all = gradient(EntropyTokens::All, None);
    assert_eq!(gradient(EntropyTokens::All, Some(0.2)), all);
    let whole = gradient(EntropyTokens::TopEntropy, Some(1.));
    assert!((whole / all - 1.).abs() < 1e-5, "{whole} and {all}");
    let top = gradient(EntropyTokens::TopEntropy, Some(0.2));
    assert!((top / all - 1.).abs() > 1e-3, "{top} and {all}");
    let error = with_loss(bonus(EntropyTokens::TopEntropy)).validate();
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("recipe.policy_loss.entropy_tokens: top_entropy, must be all"),
        "{error}"
    );
}

/// One completion has a nonzero score, so it is sampled at every position.
#[test]
fn completions_with_informative_scores_are_drawn_more_often() {
    let calls = Arc::new(Mutex::new(0));
    let reward = move |_: &Sample| {
        let mut calls = calls.lock().unwrap();
        *calls += 1;
        f32::from(u8::from(*calls == 6))
    };
    let mut config = with_loss(PolicyLoss {
        positive_nll: Some(PositiveNll {
            coef: 0.1,
            score_above: 0.5,
        }),
        aggregation: Aggregation::PromptMeanTokenMean,
        ..PolicyLoss::default()
    });
    config.resampling = Some(ScoreResampling::default());
    let metrics = trainer(reward.clone(), config.clone()).step().unwrap();
    assert_eq!(metrics.policy["positive_nll_fraction"], 1.);

    config.resampling = Some(ScoreResampling::Power(-1.));
    let error = config.validate().unwrap_err().to_string();
    assert!(
        error.starts_with("resampling.power: -1, must be"),
        "{error}"
    );
}
