//! Resumes a run where it ended, and interrupts it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{
    self, digest, max_difference, model, parameters, parts, pretrained, prompts, tokenizer,
    trainer, trainer_of, without_seconds,
};
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::NormLevel;
use candle_grpo_core::schedule::Decay;
use candle_grpo_core::selection::{GroupFilter, ScoreResampling};
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Advantages};
use candle_grpo_loss::{AdaptiveEntropy, KlLoss, Recipe};
use candle_grpo_nn::optim::MasterWeights;
use candle_grpo_nn::{LoraConfig, Parameters};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::{LearningRateSchedule, ReferenceRefresh};
use candle_grpo_train::progress::Phase;
use candle_grpo_train::{
    ComputeDType, CriticConfig, Interrupted, NotFinite, Progress, Sample, TrainConfig, Trainer,
    TrainerParts,
};
use rstest::rstest;

fn config() -> TrainConfig {
    let mut config = common::config();
    config.recipe.policy_loss.kl = None;
    config.optimizer.learning_rate = 1e-2;
    config
}

/// Skipped prompts, rewards normalized by earlier steps, a changing learning rate.
fn dynamic() -> TrainConfig {
    let mut config = config();
    config.recipe = Recipe::dapo(8, 2);
    config.recipe.group_filter = Some(GroupFilter::default());
    config.recipe.reward_shaping.norm.mean = NormLevel::Running;
    config.recipe.reward_shaping.norm.std = NormLevel::Running;
    config.schedule = LearningRateSchedule {
        warmup_steps: 3,
        decay_until: Some(7),
        decay: Decay::Cosine,
        min_lr_ratio: 0.1,
    };
    config.epochs = 2;
    config.mini_batch_size = Some(7);
    config
}

fn adapters() -> TrainConfig {
    let mut config = config();
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.05));
    config.adapters = Some(LoraConfig::all_linear(4, 8.));
    config
}

fn kept_reference() -> TrainConfig {
    let mut config = config();
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.05));
    config
}

fn moving_reference() -> TrainConfig {
    let mut config = kept_reference();
    config.reference_refresh = Some(ReferenceRefresh {
        every_steps: 1,
        alpha: 0.5,
    });
    config
}

fn controllers() -> TrainConfig {
    let mut config = config();
    config.recipe = Recipe::reinforce_plus_plus(0.5);
    config.reward_kl = Some(KlController::adaptive(0.2, 0.1, 100.).unwrap());
    config.adaptive_entropy = Some(AdaptiveEntropy {
        target: 10.,
        delta: 0.01,
        ..AdaptiveEntropy::default()
    });
    config
}

fn critic() -> TrainConfig {
    let mut config = config();
    config.recipe.advantage = AdvantageName::Gae.into();
    config.critic = Some(CriticConfig {
        warmup_steps: 1,
        ..CriticConfig::default()
    });
    config
}

/// Half precision, and random choices other than completions.
fn chosen() -> TrainConfig {
    let mut config = kept_reference();
    config.compute_dtype = ComputeDType::Bf16;
    config.top_entropy = Some(0.5);
    config.resampling = Some(ScoreResampling::Power(1.));
    config
}

/// Weights without an f32 master, whose rounding is random.
fn rounded() -> TrainConfig {
    let mut config = config();
    config.compute_dtype = ComputeDType::Bf16;
    config.optimizer.master_weights = MasterWeights::Bf16;
    config
}

fn save(trainer: &Trainer, folder: &Path) {
    trainer
        .write_checkpoint(folder, &pretrained(), ComputeDType::F32)
        .unwrap();
}

fn assert_equal(a: &Parameters, b: &Parameters) {
    assert_eq!(a.len(), b.len());
    for (name, x) in a.iter() {
        assert_eq!(max_difference(x, b.get(name).unwrap()), 0., "{name}");
    }
}

/// Whatever a run remembers from step to step.
#[rstest]
#[case::dynamic(dynamic())]
#[case::adapters(adapters())]
#[case::kept_reference(kept_reference())]
#[case::moving_reference(moving_reference())]
#[case::controllers(controllers())]
#[case::critic(critic())]
#[case::chosen(chosen())]
#[case::rounded(rounded())]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one(#[case] config: TrainConfig) {
    let folder = tempfile::tempdir().unwrap();
    let mut whole = trainer(digest, config.clone());
    let mut expected = Vec::new();
    for step in 1..=5 {
        expected.push(without_seconds(whole.step().unwrap()));
        if step == 2 {
            save(&whole, folder.path());
        }
    }
    let mut resumed = trainer(digest, config);
    resumed.load_state(folder.path()).unwrap();
    assert_eq!(resumed.steps(), 2);
    for expected in &expected[2..] {
        assert_eq!(&without_seconds(resumed.step().unwrap()), expected);
    }
    assert_eq!(resumed.state(), whole.state());
    let (a, b) = (resumed.policy_parameters(), whole.policy_parameters());
    assert_equal(&a.unwrap(), &b.unwrap());
    let moved = whole.policy_parameters().unwrap();
    let start = parameters();
    assert!(
        moved
            .iter()
            .any(|(name, x)| max_difference(x, start.get(name).unwrap()) > 0.)
    );
}

#[rstest]
#[case::other_adapters(adapters(), kept_reference())]
#[case::no_reference(kept_reference(), config())]
#[case::no_critic(critic(), config())]
#[case::a_critic(config(), critic())]
#[case::other_rank(adapters(), TrainConfig { adapters: Some(LoraConfig::all_linear(2, 8.)), ..adapters() })]
#[case::other_scale(adapters(), TrainConfig { adapters: Some(LoraConfig::all_linear(4, 9.)), ..adapters() })]
#[case::no_controller(controllers(), TrainConfig { reward_kl: None, ..controllers() })]
fn a_run_of_another_kind_is_not_resumed(#[case] saved: TrainConfig, #[case] now: TrainConfig) {
    let folder = tempfile::tempdir().unwrap();
    save(&trainer(digest, saved), folder.path());
    assert!(trainer(digest, now).load_state(folder.path()).is_err());
}

#[test]
fn adapters_of_other_weights_are_not_resumed() {
    let folder = tempfile::tempdir().unwrap();
    save(&trainer(digest, adapters()), folder.path());
    let other = Parameters::init(&model(), 4, device()).unwrap();
    let prompts = prompts(&["abc"]);
    let mut other = Trainer::new(TrainerParts::new(
        model(),
        other,
        tokenizer(),
        prompts,
        digest,
        adapters(),
    ))
    .unwrap();
    let error = format!("{:#}", other.load_state(folder.path()).unwrap_err());
    assert!(
        error.contains("only a run with the first model can go on"),
        "{error}"
    );
}

#[test]
fn a_missing_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    save(&trainer(digest, config()), folder.path());
    fs::remove_file(folder.path().join("optimizer.safetensors")).unwrap();
    let error = trainer(digest, config())
        .load_state(folder.path())
        .unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("optimizer.safetensors"), "{error}");
}

/// Cancels after a given number of calls to `advance`.
#[derive(Default)]
struct Impatient {
    seen: AtomicUsize,
    patience: usize,
}

impl Progress for Impatient {
    fn begin(&self, _: Phase, units: usize) {
        assert!(units > 0);
    }

    fn advance(&self, _: usize, _: usize) {
        self.seen.fetch_add(1, Ordering::SeqCst);
    }

    fn is_canceled(&self) -> bool {
        self.seen.load(Ordering::SeqCst) >= self.patience
    }
}

/// Wherever it is stopped: while it samples, or before and within the passes in its only update.
#[test]
fn an_interrupted_step_leaves_everything_as_it_was() {
    let mut undisturbed = trainer(digest, dynamic_with_one_update());
    undisturbed.step().unwrap();
    undisturbed.step().unwrap();
    let mut interrupted = 0;
    for patience in 0..40 {
        let progress = Arc::new(Impatient {
            patience,
            ..Impatient::default()
        });
        let mut trainer = trainer_of(TrainerParts {
            progress,
            ..parts(digest, dynamic_with_one_update())
        });
        let Err(error) = trainer.step() else {
            break;
        };
        assert!(error.is::<Interrupted>(), "{error:#}");
        interrupted += 1;
        assert_equal(trainer.actor().parameters(), &parameters());
        assert_eq!(trainer.steps(), 0);
        trainer.set_progress(Arc::new(candle_grpo_train::progress::NoProgress));
        trainer.step().unwrap();
        trainer.step().unwrap();
        assert_equal(
            trainer.actor().parameters(),
            undisturbed.actor().parameters(),
        );
    }
    // Once per token in the longest completion, for scores, and for the micro-batches.
    assert!((10..40).contains(&interrupted), "{interrupted}");
}

fn dynamic_with_one_update() -> TrainConfig {
    TrainConfig {
        epochs: 1,
        mini_batch_size: None,
        ..dynamic()
    }
}

/// A cancellation after the first of several updates lets the step run to completion.
#[test]
fn a_step_that_has_changed_weights_runs_to_completion() {
    let whole = {
        let mut trainer = trainer(digest, dynamic());
        trainer.step().unwrap();
        trainer
    };
    for patience in 0..40 {
        let progress = Arc::new(Impatient {
            patience,
            ..Impatient::default()
        });
        let mut trainer = trainer_of(TrainerParts {
            progress: progress.clone(),
            ..parts(digest, dynamic())
        });
        match trainer.step() {
            Err(error) => {
                assert!(error.is::<Interrupted>());
                assert_equal(trainer.actor().parameters(), &parameters());
            }
            Ok(_) => {
                assert_equal(trainer.actor().parameters(), whole.actor().parameters());
                assert!(progress.is_canceled(), "it was never asked to stop");
                return;
            }
        }
    }
    panic!("no step was made");
}

/// Advantages that are NaN.
struct Broken;

impl AdvantageEstimator for Broken {
    fn estimate(&self, batch: &AdvantageBatch) -> candle_core::Result<Advantages> {
        let mut advantages = AdvantagePipeline::grpo().estimate(batch)?;
        advantages.advantages = (advantages.advantages / 0.)?;
        Ok(advantages)
    }
}

#[rstest]
#[case::gradient(false, "gradient of lm_head.weight")]
#[case::advantages(true, "advantages")]
fn nothing_is_learned_from_what_is_not_finite(#[case] broken: bool, #[case] expected: &str) {
    let mut config = config();
    config.recipe = Recipe::dr_grpo(8.);
    let prompts = prompts(&["abc", "d", "ee", "ca", "b"]);
    // Gradients whose squares exceed the f32 range.
    let reward = |sample: &Sample| 1e30 * digest(sample).signum();
    let mut parts = TrainerParts::new(model(), parameters(), tokenizer(), prompts, reward, config);
    if broken {
        parts.estimator = Some(Box::new(Broken));
    }
    let mut trainer = trainer_of(parts);
    let error = trainer.step().unwrap_err();
    let named = error.downcast_ref::<NotFinite>().expect("not finite");
    assert_eq!(named.tensor(), expected);
    assert_equal(trainer.actor().parameters(), &parameters());
    assert_eq!(trainer.steps(), 0);
}

/// Fails in the second of two updates.
#[test]
fn half_a_step_is_neither_continued_nor_saved() {
    let mut config = config();
    config.epochs = 2;
    // Weights so large after one update that the next finds no finite gradient.
    config.optimizer.learning_rate = 1e30;
    let mut trainer = trainer(digest, config.clone());
    let error = trainer.step().unwrap_err();
    assert!(!error.is::<Interrupted>());
    assert_eq!(trainer.steps(), 0);
    let folder = tempfile::tempdir().unwrap();
    for error in [
        trainer.step().unwrap_err(),
        trainer.save_state(folder.path()).unwrap_err(),
    ] {
        let error = error.to_string();
        assert_eq!(
            error,
            "step 1: failed after it had changed weights, resume from a checkpoint"
        );
    }
    save(&self::trainer(digest, config), folder.path());
    trainer.load_state(folder.path()).unwrap();
    assert_equal(trainer.actor().parameters(), &parameters());
}
