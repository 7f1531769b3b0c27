//! Demonstrations that a teacher samples.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_loss::RolloutCorrection;
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_nn::Parameters;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_test_support::{device, stay_on_cpu};
use candle_grpo_train::data::MixedOrder;
use candle_grpo_train::learn::{
    DemonstrationConfig, DemonstrationPart, MemoryPlan, TeacherSamplesConfig,
};
use candle_grpo_train::rollout::{Deliver, GenerationBatch, LocalGenerator};
use candle_grpo_train::{
    CriticConfig, Generator, RewardFunction, Sample, Sequence, StepMetrics, TrainConfig, Trainer,
    TrainerParts,
};
use rstest::rstest;

use crate::common::{
    self, assert_ranks_agree, digest, drawn_parameters, model, resumed, run, share_of_a,
    trainer_of, without_seconds,
};

const TWO: TeacherSamplesConfig = TeacherSamplesConfig {
    samples_per_prompt: 2,
    temperature: None,
    top_p: None,
    max_new_tokens: None,
    min_reward: None,
};

fn demonstrations(share: f64, samples: TeacherSamplesConfig) -> DemonstrationConfig {
    DemonstrationConfig {
        coef: CoefSchedule::constant(share),
        micro_batch_tokens: 9,
        teacher_samples: Some(samples),
        ..DemonstrationConfig::default()
    }
}

fn config(share: f64, samples: TeacherSamplesConfig) -> TrainConfig {
    let mut config = TrainConfig {
        demonstrations: Some(demonstrations(share, samples)),
        ..common::config()
    };
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.epsilon = 1e-3;
    config
}

/// [`config`] with completions that are drawn one step ahead.
fn ahead(share: f64, samples: TeacherSamplesConfig) -> TrainConfig {
    let mut config = config(share, samples);
    config.rollout.max_staleness = 1;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    config
}

/// A teacher that records its completions, in the order of their places. It may fail in a call.
struct Teacher {
    inner: LocalGenerator,
    drawn: Mutex<Vec<Sequence>>,
    calls: AtomicUsize,
    failing_call: Option<usize>,
}

impl Teacher {
    fn new(seed: u64, failing_call: Option<usize>) -> Arc<Self> {
        let parameters = drawn_parameters(&model(), seed, device());
        Arc::new(Self {
            inner: LocalGenerator::new(&model(), &parameters).unwrap(),
            drawn: Mutex::default(),
            calls: AtomicUsize::new(0),
            failing_call,
        })
    }
}

impl Generator for Teacher {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        ensure!(self.failing_call != Some(call), "the teacher fails");
        let prompts = batch.prompts.iter();
        let prompts = prompts.flat_map(|prompt| prompt.seeds.iter().map(|_| prompt.tokens));
        let prompts: Vec<&[u32]> = prompts.collect();
        let mut drawn = vec![None; prompts.len()];
        self.inner.generate(batch, &mut |place, completion| {
            drawn[place] = Some(Sequence::of_answer(prompts[place], &completion.tokens)?);
            deliver(place, completion)
        })?;
        let drawn = drawn.into_iter().map(Option::unwrap);
        self.drawn.lock().unwrap().extend(drawn);
        Ok(())
    }
}

fn parts(
    reward: impl RewardFunction + 'static,
    config: TrainConfig,
    teacher: Arc<dyn Generator>,
) -> TrainerParts {
    TrainerParts {
        demonstrations: Some(DemonstrationPart::Teacher(teacher)),
        ..common::parts(reward, config)
    }
}

fn trainer(reward: impl RewardFunction + 'static, config: TrainConfig) -> Trainer {
    trainer_of(parts(reward, config, Teacher::new(7, None)))
}

/// No completion is better than another.
fn constant(_: &Sample) -> f32 {
    1.
}

fn weights(trainer: &Trainer) -> Vec<Vec<f32>> {
    let parameters: Parameters = trainer.policy_parameters().unwrap();
    let flat = |(_, x): (&str, &candle_core::Var)| x.flatten_all().unwrap().to_vec1().unwrap();
    parameters.iter().map(flat).collect()
}

/// The rows in an order that visits them as they are.
fn in_order(rows: &[Sequence]) -> DemonstrationPart {
    let order = MixedOrder::single(rows.len(), 5).unwrap();
    let mut placed = rows.to_vec();
    for (row, place) in rows.iter().zip(order.slice(0, rows.len())) {
        placed[place] = row.clone();
    }
    DemonstrationPart::Rows(placed, order)
}

#[rstest]
#[case::with_rewards(0.4, None, 6)]
#[case::alone(1., None, 6)]
#[case::mini_batches(0.4, Some(4), 2)]
fn an_update_is_that_of_the_same_completions_as_rows(
    #[case] share: f64,
    #[case] mini_batch_size: Option<usize>,
    #[case] batch_size: usize,
) {
    stay_on_cpu();
    let config = TrainConfig {
        mini_batch_size,
        ..config(share, TWO)
    };
    let teacher = Teacher::new(7, None);
    let mut sampled = trainer_of(parts(digest, config.clone(), teacher.clone()));
    let found = sampled.step().unwrap();
    let drawn = teacher.drawn.lock().unwrap().clone();
    assert_eq!(drawn.len(), 6);
    let mut given = trainer_of(TrainerParts {
        demonstrations: Some(in_order(&drawn)),
        ..common::parts(
            digest,
            TrainConfig {
                demonstrations: Some(DemonstrationConfig {
                    batch_size,
                    teacher_samples: None,
                    ..demonstrations(share, TWO)
                }),
                ..config
            },
        )
    });
    let expected = given.step().unwrap();
    assert_eq!(weights(&sampled), weights(&given));
    for name in ["coef", "loss", "token_accuracy"] {
        let name = format!("demonstration_{name}");
        assert_eq!(found.policy[&name], expected.policy[&name], "{name}");
    }
    let tokens: usize = drawn.iter().map(|row| row.response().len()).sum();
    assert_eq!(found.policy["demonstration_length"], tokens as f64 / 6.);
    assert!(!found.policy.contains_key("demonstration_reward"));
    if share == 1. {
        assert_eq!((found.sampled_groups, found.updates), (0, 1));
    } else {
        assert_eq!(found.reward_mean, expected.reward_mean);
    }
    assert_eq!(sampled.state().visited_demonstrations, 6);
}

#[test]
fn the_loss_depends_on_the_teacher() {
    stay_on_cpu();
    let loss = |seed| {
        let teacher = Teacher::new(seed, None);
        let mut trainer = trainer_of(parts(constant, config(1., TWO), teacher));
        trainer.step().unwrap().policy["demonstration_loss"]
    };
    assert_eq!(loss(7), loss(7));
    assert!((loss(7) - loss(8)).abs() > 1e-2, "{} {}", loss(7), loss(8));
}

/// The first updates of a policy that is its teacher would not change it much if it drew the same
/// completions.
#[test]
fn a_teacher_with_the_weights_of_the_policy_draws_other_completions() {
    let teacher = Teacher::new(3, None);
    let own = TeacherSamplesConfig {
        samples_per_prompt: 4,
        ..TWO
    };
    let mut trainer = trainer_of(parts(digest, config(0.5, own), teacher.clone()));
    trainer.step().unwrap();
    let log = trainer.rollouts(&Default::default()).unwrap();
    let decode = |row: &Sequence| common::tokenizer().decode(row.response(), true).unwrap();
    let teacher: Vec<String> = teacher.drawn.lock().unwrap().iter().map(decode).collect();
    let policy: Vec<String> = log.into_iter().map(|record| record.completion).collect();
    assert_eq!(teacher.len(), policy.len());
    assert_ne!(teacher, policy);
}

#[test]
fn a_prompt_has_other_samples_in_each_step() {
    let mut config = config(1., TWO);
    config.prompts_per_step = 5;
    let teacher = Teacher::new(7, None);
    let mut trainer = trainer_of(parts(constant, config, teacher.clone()));
    run(&mut trainer, 2);
    let drawn = teacher.drawn.lock().unwrap();
    let sorted = |rows: &[Sequence]| {
        let mut rows: Vec<Vec<u32>> = rows.iter().map(|row| row.tokens().to_vec()).collect();
        rows.sort();
        rows
    };
    let (first, second) = drawn.split_at(10);
    assert_ne!(sorted(first), sorted(second));
}

/// Without completions of the policy, there is one mini-batch.
#[rstest]
#[case::with_rewards(0.4, 6)]
#[case::alone(1., 2)]
fn each_epoch_visits_all_samples(#[case] share: f64, #[case] updates: usize) {
    let config = TrainConfig {
        mini_batch_size: Some(5),
        epochs: 2,
        ..config(share, TWO)
    };
    let mut trainer = trainer(digest, config);
    let metrics = trainer.step().unwrap();
    assert_eq!(metrics.updates, updates);
    assert_eq!(trainer.state().visited_demonstrations, 12);
}

#[test]
fn the_teacher_has_its_own_sampling_settings() {
    let samples = TeacherSamplesConfig {
        samples_per_prompt: 3,
        // The most likely token.
        temperature: Some(1e-6),
        max_new_tokens: Some(2),
        ..TWO
    };
    let teacher = Teacher::new(7, None);
    let mut trainer = trainer_of(parts(digest, config(0.4, samples), teacher.clone()));
    let metrics = trainer.step().unwrap();
    let drawn = teacher.drawn.lock().unwrap();
    assert_eq!(drawn.len(), 9);
    for group in drawn.chunks(3) {
        assert!(group.iter().all(|row| *row == group[0]));
        assert!(group[0].response().len() <= 2);
    }
    assert!(metrics.response_length > 2.);
    assert!(metrics.policy["demonstration_length"] <= 2.);
}

#[test]
fn completions_below_the_least_reward_do_not_train() {
    let reward = |least: f64| TeacherSamplesConfig {
        samples_per_prompt: 8,
        min_reward: Some(least),
        ..TWO
    };
    let teacher = Teacher::new(7, None);
    let mut trainer = trainer_of(parts(share_of_a, config(0.4, reward(0.3)), teacher.clone()));
    let metrics = trainer.step().unwrap();
    let scores = |row: &Sequence| {
        let a = row.response().iter().filter(|token| **token == 1).count();
        a as f64 / row.response().len() as f64
    };
    let scores: Vec<f64> = teacher.drawn.lock().unwrap().iter().map(scores).collect();
    let kept = scores.iter().filter(|score| **score >= 0.3).count();
    assert!((1..24).contains(&kept), "{kept}");
    assert_eq!(metrics.policy["demonstration_kept"], kept as f64 / 24.);
    let mean = scores.iter().sum::<f64>() / 24.;
    assert!((metrics.policy["demonstration_reward"] - mean).abs() < 1e-6);
    assert_eq!(trainer.state().visited_demonstrations, kept);
}

/// Without a sample, the loss has the rest of the share, and nothing at a share of 1.
#[test]
fn a_step_without_a_sample_that_trains_learns_from_rewards_alone() {
    let none = TeacherSamplesConfig {
        min_reward: Some(2.),
        ..TWO
    };
    let mut trainer = trainer(share_of_a, config(0.4, none));
    let start = weights(&trainer);
    let metrics = trainer.step().unwrap();
    assert_eq!((metrics.skipped, metrics.updates), (false, 1));
    assert_eq!(metrics.policy["demonstration_kept"], 0.);
    let plain = common::trainer(
        share_of_a,
        TrainConfig {
            demonstrations: None,
            ..config(0.4, none)
        },
    )
    .step()
    .unwrap();
    let (half, whole) = (metrics.grad_norm.unwrap(), plain.grad_norm.unwrap());
    assert!((half - 0.6 * whole).abs() < 1e-5 * whole, "{half} {whole}");
    assert_ne!(weights(&trainer), start);

    let mut trainer = self::trainer(share_of_a, config(1., none));
    let start = weights(&trainer);
    let metrics = trainer.step().unwrap();
    assert_eq!((metrics.skipped, metrics.updates), (true, 0));
    let reason = metrics.skip_reason.unwrap();
    let expected = "no sample of the teacher reaches demonstrations.teacher_samples.min_reward";
    assert_eq!(reason, expected);
    assert_eq!(weights(&trainer), start);
    assert_eq!(trainer.skipped_steps(), 1);
}

/// The critic learns from the completions of the policy.
#[rstest]
#[case::samples_alone(1., false, 0)]
#[case::with_rewards(0.5, false, 3)]
#[case::with_a_critic(1., true, 3)]
fn the_policy_draws_completions_if_anything_learns_from_them(
    #[case] share: f64,
    #[case] has_critic: bool,
    #[case] groups: usize,
) {
    let mut config = config(share, TWO);
    if has_critic {
        config.recipe.advantage = serde_json::from_str(r#"{"name": "gae"}"#).unwrap();
        config.critic = Some(CriticConfig::default());
    }
    let policy = Teacher::new(3, None);
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(policy.clone()),
        ..parts(digest, config, Teacher::new(7, None))
    });
    for _ in 0..2 {
        let metrics = trainer.step().unwrap();
        assert_eq!(metrics.sampled_groups, groups);
        assert_eq!((metrics.skipped, metrics.updates), (false, 1));
    }
    let calls = policy.calls.load(Ordering::SeqCst);
    assert_eq!(calls, if groups > 0 { 2 } else { 0 });
    assert_eq!(trainer.state().visited, 6);
}

#[test]
fn a_filtered_prompt_has_samples_as_well() {
    let mut config = config(0.5, TWO);
    // No group has a spread.
    config.recipe.group_filter = Some(GroupFilter::default());
    config.max_sampling_batches = 2;
    let teacher = Teacher::new(7, None);
    let mut trainer = trainer_of(parts(constant, config, teacher.clone()));
    let metrics = trainer.step().unwrap();
    assert_eq!((metrics.sampled_groups, metrics.kept_groups), (6, 0));
    assert!(!metrics.skipped);
    assert_eq!(teacher.drawn.lock().unwrap().len(), 12);
}

fn with_rejection() -> TeacherSamplesConfig {
    TeacherSamplesConfig {
        min_reward: Some(0.),
        ..TWO
    }
}

/// No sample trains.
fn unreachable() -> TeacherSamplesConfig {
    TeacherSamplesConfig {
        min_reward: Some(1e6),
        ..TWO
    }
}

#[rstest]
#[case::with_rewards(config(0.4, TWO))]
#[case::alone(config(1., TWO))]
#[case::rejection(config(0.4, with_rejection()))]
#[case::mini_batches(TrainConfig { mini_batch_size: Some(5), epochs: 2, ..config(0.4, TWO) })]
#[case::ahead(ahead(1., TWO))]
#[case::from_samples_to_rewards({
    let mut config = config(1., TWO);
    config.demonstrations.as_mut().unwrap().coef.decay_steps = Some(4);
    config
})]
fn a_resumed_run_is_bit_identical(#[case] config: TrainConfig) {
    stay_on_cpu();
    let mut whole = trainer(digest, config.clone());
    let expected = run(&mut whole, 6);
    assert!(
        expected
            .iter()
            .any(|step| step.policy.contains_key("demonstration_loss"))
    );
    let mut first = trainer(digest, config.clone());
    let mut found = run(&mut first, 3);
    let mut second = resumed(&first, trainer(digest, config));
    drop(first);
    found.extend(run(&mut second, 3));
    assert_eq!(found, expected);
    assert_eq!(weights(&second), weights(&whole));
}

#[rstest]
#[case::with_rewards(config(0.4, TWO), digest)]
#[case::alone(config(1., TWO), constant)]
#[case::rejection(config(0.4, with_rejection()), digest)]
#[case::without_samples(config(0.4, unreachable()), digest)]
#[case::without_samples_and_divided(
    TrainConfig { sharding: Sharding::Optimizer, ..config(0.4, unreachable()) },
    digest
)]
#[case::ahead(ahead(0.4, TWO), digest)]
#[case::ahead_alone(ahead(1., TWO), constant)]
#[case::divided(TrainConfig { sharding: Sharding::Full, ..config(0.4, TWO) }, digest)]
#[case::divided_alone(TrainConfig { sharding: Sharding::Full, ..config(1., TWO) }, constant)]
fn the_steps_of_ranks_are_those_of_one_rank(
    #[case] config: TrainConfig,
    #[case] reward: fn(&Sample) -> f32,
) {
    stay_on_cpu();
    let config = TrainConfig {
        // The gradients of every step are clipped.
        max_grad_norm: 0.01,
        ..config
    };
    let build = || parts(reward, config.clone(), Teacher::new(7, None));
    assert_ranks_agree(&[2, 4], build, 3);
}

#[rstest]
#[case::with_rewards(0.4)]
#[case::alone(1.)]
fn a_step_whose_teacher_fails_can_be_repeated(#[case] share: f64) {
    stay_on_cpu();
    let expected = run(&mut trainer(digest, config(share, TWO)), 3);
    let teacher = Teacher::new(7, Some(2));
    let mut trainer = trainer_of(parts(digest, config(share, TWO), teacher));
    let mut found = vec![without_seconds(trainer.step().unwrap())];
    let before = (weights(&trainer), trainer.state().clone());
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(error.starts_with("step 2: "), "{error}");
    assert!(error.ends_with("the teacher fails"), "{error}");
    assert_eq!((weights(&trainer), trainer.state().clone()), before);
    found.extend(run(&mut trainer, 2));
    assert_eq!(found, expected);
}

/// The teacher always answers alike, and all completions of the policy have the same reward.
#[rstest]
#[case::alone(1.)]
#[case::without_a_signal(0.5)]
fn the_policy_learns_to_answer_as_the_teacher(#[case] share: f64) {
    let samples = TeacherSamplesConfig {
        temperature: Some(1e-6),
        ..TWO
    };
    let mut config = config(share, samples);
    config.prompts_per_step = 5;
    config.optimizer.epsilon = 1e-8;
    let mut trainer = trainer(constant, config);
    let metrics = run(&mut trainer, 60);
    let mean = |name: &str, first: usize| {
        let steps = metrics[first..first + 5].iter();
        steps
            .map(|step: &StepMetrics| step.policy[name])
            .sum::<f64>()
            / 5.
    };
    let (first, last) = (
        mean("demonstration_loss", 0),
        mean("demonstration_loss", 55),
    );
    assert!(last < 0.5 * first, "{first} {last}");
    let name = "demonstration_token_accuracy";
    let (first, last) = (mean(name, 0), mean(name, 55));
    assert!(last > first + 0.2, "{first} {last}");
}

#[rstest]
#[case::share_of_zero(CoefSchedule::constant(0.))]
#[case::later(CoefSchedule { warmup_steps: 4, ..CoefSchedule::constant(0.5) })]
fn the_teacher_samples_nothing_without_a_share(#[case] coef: CoefSchedule) {
    let mut config = config(0.5, TWO);
    config.demonstrations.as_mut().unwrap().coef = coef;
    let expects = coef.at(1) > 0.;
    let teacher = Teacher::new(7, None);
    let mut trainer = trainer_of(parts(digest, config, teacher.clone()));
    let metrics = trainer.step().unwrap();
    assert_eq!(metrics.policy["demonstration_coef"], coef.at(1));
    assert_eq!(teacher.calls.load(Ordering::SeqCst), usize::from(expects));
    let has_length = metrics.policy.contains_key("demonstration_length");
    assert_eq!(has_length, expects);
}

#[rstest]
#[case(
    TeacherSamplesConfig { samples_per_prompt: 0, ..TWO },
    "demonstrations.teacher_samples.samples_per_prompt: 0, must be at least 1"
)]
#[case(
    TeacherSamplesConfig { temperature: Some(0.), ..TWO },
    "demonstrations.teacher_samples.temperature: 0.0, must be from 1e-6 to 1e6"
)]
#[case(
    TeacherSamplesConfig { top_p: Some(1.5), ..TWO },
    "demonstrations.teacher_samples.top_p: 1.5, must be"
)]
#[case(
    TeacherSamplesConfig { max_new_tokens: Some(0), ..TWO },
    "demonstrations.teacher_samples.max_new_tokens: 0, must be at least 1"
)]
#[case(
    TeacherSamplesConfig { min_reward: Some(f64::NAN), ..TWO },
    "demonstrations.teacher_samples.min_reward: NaN, must be finite"
)]
fn settings_that_are_not_valid_are_errors(
    #[case] samples: TeacherSamplesConfig,
    #[case] expected: &str,
) {
    let error = config(0.5, samples).validate().unwrap_err().to_string();
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn a_source_that_does_not_fit_the_settings_is_an_error() {
    let error = |config: TrainConfig, part: Option<DemonstrationPart>| {
        let trainer = Trainer::new(TrainerParts {
            demonstrations: part,
            ..common::parts(digest, config)
        });
        format!("{:#}", trainer.err().unwrap())
    };
    let mut both = config(0.5, TWO);
    both.demonstrations.as_mut().unwrap().batch_size = 4;
    assert_eq!(
        both.validate().unwrap_err().to_string(),
        "demonstrations.batch_size: 4, must be absent with teacher_samples, all of which train in each epoch"
    );
    let teacher = || Some(DemonstrationPart::Teacher(Teacher::new(7, None)));
    let rows = || {
        let row = Sequence::of_answer(&[1], &[2, 0]).unwrap();
        Some(in_order(&[row]))
    };
    let mut of_rows = config(0.5, TWO);
    of_rows.demonstrations.as_mut().unwrap().teacher_samples = None;
    for (config, part, expected) in [
        (
            config(0.5, TWO),
            None,
            "demonstrations: none, must be given",
        ),
        (
            config(0.5, TWO),
            rows(),
            "demonstrations: 1, must be a teacher, as the settings have teacher_samples",
        ),
        (
            of_rows,
            teacher(),
            "demonstrations: a teacher, must be rows, as the settings have no teacher_samples",
        ),
        (
            common::config(),
            teacher(),
            "demonstrations: a teacher, must be none, as the settings have no demonstrations",
        ),
    ] {
        let found = error(config, part);
        assert!(found.starts_with(expected), "{found}");
    }
}

#[test]
fn the_plan_of_memory_has_the_cache_of_the_teacher() {
    let samples = TeacherSamplesConfig {
        samples_per_prompt: 8,
        max_new_tokens: Some(400),
        ..TWO
    };
    let config = config(0.5, samples);
    let plan = MemoryPlan::new(&model(), &config, 3, 403).unwrap();
    let teacher = candle_grpo_nn::DecoderConfig {
        num_hidden_layers: 4 * model().num_hidden_layers,
        ..model()
    };
    let with = |config: &TrainConfig| plan.with_teacher_samples(&teacher, config, 3).unwrap();
    let found = with(&config);
    assert!(found.sampling > plan.sampling);
    assert!(found.packed >= plan.packed);
    let mut fewer = config.clone();
    fewer.demonstrations.as_mut().unwrap().teacher_samples = Some(TWO);
    assert!(with(&fewer).sampling < found.sampling);
    fewer.demonstrations = None;
    assert_eq!(with(&fewer), plan);
    // The samples of a step are the rows of an update.
    let few = MemoryPlan::new(&model(), &config, 3, 10).unwrap();
    assert!(plan.activations > few.activations);
}
