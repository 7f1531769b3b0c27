//! Samples completions while the policy trains.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use anyhow::{Result, bail, ensure};
use candle_core::Device;
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Advantages};
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::{Recipe, RolloutCorrection};
use candle_grpo_nn::{LoraConfig, Parameters};
use candle_grpo_test_support::{WATCHDOG, cases, device};
use candle_grpo_train::data::ShuffledOrder;
use candle_grpo_train::progress::{NoProgress, Phase};
use candle_grpo_train::rewards::Score;
use candle_grpo_train::rollout::{Deliver, Engine, GenerationBatch, LocalGenerator, PolicyWeights};
use candle_grpo_train::{
    ComputeDType, Generator, Interrupted, Progress, RewardFunction, Sample, Sampler, StepMetrics,
    TrainConfig, Trainer, TrainerParts,
};
use rstest::rstest;

use crate::common::{
    self, digest, parts, pretrained, prompts, sampling, share_of_a, trainer, trainer_of,
    without_seconds,
};

fn config(max_staleness: usize) -> TrainConfig {
    let mut config = common::config();
    config.optimizer.learning_rate = 1e-2;
    config.rollout.max_staleness = max_staleness;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    config
}

/// A call to [`Generator::generate`].
#[derive(Debug, Clone, PartialEq)]
struct Draw {
    stream: u64,
    version: u64,
    prompts: Vec<u64>,
}

type Before = dyn Fn(u64, &dyn Progress) -> Result<()> + Send + Sync;
type Stamp = dyn Fn(u64, u64) -> u64 + Send + Sync;

/// Samples on the CPU from a copy of the weights that it received last, and records its calls.
struct Recorder {
    inner: Mutex<Option<(u64, LocalGenerator)>>,
    draws: Mutex<Vec<Draw>>,
    /// Weight versions that it received.
    received: Mutex<Vec<u64>>,
    /// Receives each call's stream before it samples.
    before: Box<Before>,
    /// Weight version that a stream's completions carry.
    stamp: Box<Stamp>,
}

impl Recorder {
    fn new(before: impl Fn(u64, &dyn Progress) -> Result<()> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::unshared(before))
    }

    fn unshared(before: impl Fn(u64, &dyn Progress) -> Result<()> + Send + Sync + 'static) -> Self {
        Self {
            inner: Mutex::default(),
            draws: Mutex::default(),
            received: Mutex::default(),
            before: Box::new(before),
            stamp: Box::new(|_, version| version),
        }
    }

    fn plain() -> Arc<Self> {
        Self::new(|_, _| Ok(()))
    }

    fn draws(&self) -> Vec<Draw> {
        self.draws.lock().unwrap().clone()
    }

    /// The weight version for each stream.
    fn versions(&self) -> Vec<(u64, u64)> {
        let draws = self.draws();
        draws
            .iter()
            .map(|draw| (draw.stream, draw.version))
            .collect()
    }
}

impl Generator for Recorder {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let stream = batch.prompts[0].seeds[0].stream;
        (self.before)(stream, batch.progress)?;
        let inner = self.inner.try_lock().expect("one thread at a time");
        let (version, local) = inner.as_ref().expect("weights before the first draw");
        self.draws.lock().unwrap().push(Draw {
            stream,
            version: *version,
            prompts: batch.prompts.iter().map(|p| p.seeds[0].prompt).collect(),
        });
        local.generate(batch, &mut |place, mut completion| {
            completion
                .weight_versions
                .fill((self.stamp)(stream, *version));
            deliver(place, completion)
        })
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, _: &dyn Progress) -> Result<()> {
        let parameters = weights.parameters.copy_to(&Device::Cpu)?;
        let adapters = weights
            .adapters
            .map(|adapters| adapters.copy_to(&Device::Cpu));
        let adapters = adapters.transpose()?;
        let copy = PolicyWeights {
            version: weights.version,
            model: weights.model,
            parameters: &parameters,
            adapters: adapters.as_ref(),
        };
        let local = LocalGenerator::detached(&copy, ComputeDType::F32)?;
        self.received.lock().unwrap().push(weights.version);
        let mut inner = self.inner.try_lock().expect("one thread at a time");
        *inner = Some((weights.version, local));
        Ok(())
    }
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<StepMetrics> {
    (0..count).map(|_| trainer.step().unwrap()).collect()
}

fn staleness_max(metrics: &StepMetrics) -> f64 {
    metrics.policy["staleness_max"]
}

/// Metrics that do not depend on the sampling thread.
fn of_training(metrics: Vec<StepMetrics>) -> Vec<StepMetrics> {
    let of_training = |metrics: StepMetrics| {
        let mut metrics = without_seconds(metrics);
        for name in [
            "staleness_mean",
            "staleness_max",
            "regenerated_groups",
            "rollout_sample_share",
        ] {
            metrics.policy.remove(name);
        }
        metrics
    };
    metrics.into_iter().map(of_training).collect()
}

fn weights_of(trainer: &Trainer) -> BTreeMap<String, Vec<f32>> {
    values_of(&trainer.policy_parameters().unwrap())
}

fn values_of(parameters: &Parameters) -> BTreeMap<String, Vec<f32>> {
    let values = parameters.iter().map(|(name, x)| {
        let values = x.flatten_all().unwrap().to_vec1().unwrap();
        (name.to_owned(), values)
    });
    values.collect()
}

#[test]
fn a_run_that_draws_and_trains_in_turn_has_no_other_metrics() {
    let metrics = steps(&mut trainer(digest, config(0)), 2);
    let line = serde_json::to_value(&metrics[1]).unwrap();
    let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
    for absent in ["staleness", "regenerated", "sample_share"] {
        assert!(!keys.iter().any(|key| key.contains(absent)), "{keys:?}");
    }
    let seconds: Vec<&String> = line["seconds"].as_object().unwrap().keys().collect();
    assert_eq!(seconds, ["sample", "score", "train"]);
}

fn filtered(mut config: TrainConfig) -> TrainConfig {
    let max_staleness = config.rollout.max_staleness;
    let correction = config.recipe.policy_loss.rollout_correction.take();
    config.recipe = Recipe::dapo(8, 2);
    config.recipe.group_filter = Some(GroupFilter::default());
    config.recipe.policy_loss.rollout_correction = correction;
    config.rollout.max_staleness = max_staleness;
    config
}

fn with_greedy_scores(mut config: TrainConfig) -> TrainConfig {
    config.recipe.advantage = AdvantageName::Remax.into();
    config
}

fn with_adapters(mut config: TrainConfig) -> TrainConfig {
    config.adapters = Some(LoraConfig::all_linear(4, 8.));
    config
}

fn in_bf16(mut config: TrainConfig) -> TrainConfig {
    config.compute_dtype = ComputeDType::Bf16;
    config
}

/// A reward that is equal for some groups.
fn coarse(sample: &Sample) -> f32 {
    f32::from(u8::from(sample.completion_tokens.len() > 4))
}

/// With learning rate 0, the weights always equal those in the synchronous run, so prompts, seeds,
/// rounds, scores and filters must be equal too. The threads yield at random.
#[rstest]
fn with_frozen_weights_a_run_that_draws_ahead_is_the_synchronous_one(
    #[values(1, 2, 5)] max_staleness: usize,
    #[values(config, |n| filtered(config(n)), |n| with_greedy_scores(config(n)))]
    config: fn(usize) -> TrainConfig,
) {
    let frozen = |max_staleness| {
        let mut config = config(max_staleness);
        config.optimizer.learning_rate = 0.;
        config
    };
    let recorder = Recorder::plain();
    let mut synchronous = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        ..parts(coarse, frozen(0))
    });
    let expected = of_training(steps(&mut synchronous, 8));
    let expected_draws = recorder.draws();
    for seed in 0..u64::from(cases(1, 8)) {
        let pauses = Arc::new(AtomicU64::new(seed));
        let pause = move || {
            let random = pauses.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst);
            for _ in 0..(random >> 32) % 200 {
                std::thread::yield_now();
            }
        };
        let before_draw = pause.clone();
        let recorder = Recorder::new(move |_, _| {
            before_draw();
            Ok(())
        });
        let reward = move |sample: &Sample| {
            if sample.columns["row"] == 0 {
                pause();
            }
            coarse(sample)
        };
        let mut ahead = trainer_of(TrainerParts {
            generator: Some(recorder.clone()),
            last_step: 8,
            ..parts(reward, frozen(max_staleness))
        });
        let metrics = of_training(steps(&mut ahead, 8));
        // A GPU may sum in another order.
        if device().is_cpu() {
            assert_eq!(metrics, expected);
        }
        ahead.finish().unwrap();
        let draws = recorder.draws();
        assert_eq!(draws.len(), expected_draws.len());
        for (draw, expected) in draws.iter().zip(&expected_draws) {
            assert_eq!(
                (draw.stream, &draw.prompts),
                (expected.stream, &expected.prompts)
            );
        }
        assert_eq!(ahead.state(), synchronous.state());
    }
}

#[rstest]
#[case::one(1, 1, &[0, 0, 1, 2, 3, 4])]
#[case::two(2, 1, &[0, 0, 0, 1, 2, 3])]
#[case::every_second_version(2, 2, &[0, 0, 0, 2, 2, 4])]
#[case::every_second_version_without_a_queue(1, 2, &[0, 0, 2, 2, 4, 4])]
fn each_step_is_drawn_with_the_weights_that_the_staleness_allows(
    #[case] max_staleness: usize,
    #[case] weight_sync_steps: usize,
    #[case] expected: &[u64],
) {
    let mut config = config(max_staleness);
    config.rollout.weight_sync_steps = weight_sync_steps;
    let recorder = Recorder::plain();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        last_step: expected.len(),
        ..parts(digest, config)
    });
    let metrics = steps(&mut trainer, expected.len());
    assert!(metrics.iter().all(|m| !m.skipped));
    let versions: Vec<(u64, u64)> = (1..).zip(expected.iter().copied()).collect();
    assert_eq!(recorder.versions(), versions);
    for (metrics, (step, drawn)) in metrics.iter().zip(versions) {
        let staleness = (step - 1 - drawn) as f64;
        assert_eq!(staleness_max(metrics), staleness);
        assert_eq!(metrics.policy["staleness_mean"], staleness);
        assert_eq!(metrics.policy["regenerated_groups"], 0.);
        let share = metrics.policy["rollout_sample_share"];
        assert!(share > 0. && share <= 1., "{share}");
        assert!(metrics.seconds.wait.is_some() && metrics.seconds.idle.is_some());
        assert!(metrics.policy.contains_key("rollout_kl"));
    }
}

/// GRPO's advantages, after one message from the thread that samples the next step and one to it.
struct Rendezvous {
    drawing: Mutex<Receiver<u64>>,
    training: Sender<()>,
}

impl AdvantageEstimator for Rendezvous {
    fn estimate(&self, batch: &AdvantageBatch) -> candle_core::Result<Advantages> {
        let drawing = self.drawing.lock().unwrap();
        assert_eq!(drawing.recv_timeout(WATCHDOG).unwrap(), 2);
        self.training.send(()).unwrap();
        AdvantagePipeline::grpo().estimate(batch)
    }
}

#[test]
fn completions_of_the_next_step_are_drawn_while_the_policy_trains() {
    let (drawing, drawn) = channel();
    let (training, trained) = channel();
    let (drawing, trained) = (Mutex::new(drawing), Mutex::new(trained));
    let recorder = Recorder::new(move |stream, _| {
        if stream == 2 {
            drawing.lock().unwrap().send(stream)?;
            trained.lock().unwrap().recv_timeout(WATCHDOG)?;
        }
        Ok(())
    });
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder),
        estimator: Some(Box::new(Rendezvous {
            drawing: Mutex::new(drawn),
            training,
        })),
        last_step: 2,
        ..parts(digest, config(1))
    });
    assert!(!trainer.step().unwrap().skipped);
}

#[rstest]
#[case(1)]
#[case(3)]
fn the_mean_reward_rises(#[case] max_staleness: usize) {
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Recorder::plain()),
        ..parts(share_of_a, config(max_staleness))
    });
    let metrics = steps(&mut trainer, 60);
    let mean =
        |part: &[StepMetrics]| part.iter().map(|m| m.reward_mean).sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&metrics[..5]), mean(&metrics[55..]));
    assert!(last > first + 0.3, "from {first} to {last}");
}

/// The policy in this process samples from a copy, whose values equal those in another generator's.
#[rstest]
#[case::all_weights(config(1))]
#[case::adapters(with_adapters(config(2)))]
#[case::bf16(in_bf16(config(1)))]
fn the_policy_in_this_process_draws_from_a_copy(#[case] config: TrainConfig) {
    if !device().is_cpu() {
        let error = trainer(digest, config).step().unwrap_err();
        assert!(format!("{error:#}").contains("must be 0 with engine local on a GPU"));
        return;
    }
    let run = || {
        let mut local = trainer(digest, config.clone());
        (of_training(steps(&mut local, 6)), weights_of(&local))
    };
    let (metrics, weights) = run();
    assert_eq!(run(), (metrics.clone(), weights.clone()));
    assert!(metrics.iter().all(|m| !m.skipped));
    if config.compute_dtype == ComputeDType::F32 {
        let mut other = trainer_of(TrainerParts {
            generator: Some(Recorder::plain()),
            ..parts(digest, config)
        });
        assert_eq!(of_training(steps(&mut other, 6)), metrics);
        assert_eq!(weights_of(&other), weights);
    }
}

/// Largest absolute difference between two sets of values.
fn distance(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> f32 {
    assert!(a.keys().eq(b.keys()));
    let pairs = a.values().flatten().zip(b.values().flatten());
    pairs.fold(0., |most, (a, b)| most.max((a - b).abs()))
}

/// Delays the transfer for version 1 until it is released, and records every version's weights.
struct Late {
    inner: Arc<Recorder>,
    released: Mutex<Receiver<()>>,
    received: Mutex<BTreeMap<u64, BTreeMap<String, Vec<f32>>>>,
}

impl Generator for Late {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.inner.generate(batch, deliver)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        if weights.version == 1 {
            self.released.lock().unwrap().recv_timeout(WATCHDOG)?;
        }
        let values = values_of(&weights.merged()?);
        self.received
            .lock()
            .unwrap()
            .insert(weights.version, values);
        self.inner.weights_changed(weights, progress)
    }
}

#[rstest]
#[case::parameters(config(1))]
#[case::adapters(with_adapters(config(1)))]
fn a_later_update_does_not_change_weights_in_transfer(#[case] config: TrainConfig) {
    let (release, released) = channel();
    let late = Arc::new(Late {
        inner: Recorder::plain(),
        released: Mutex::new(released),
        received: Mutex::default(),
    });
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(late.clone()),
        last_step: 3,
        ..parts(digest, config)
    });
    steps(&mut trainer, 1);
    let first = weights_of(&trainer);
    steps(&mut trainer, 1);
    let second = weights_of(&trainer);
    release.send(()).unwrap();
    steps(&mut trainer, 1);
    let received = late.received.lock().unwrap();
    // The weights in transfer are in main memory, where products are rounded differently.
    let rounding = if device().is_cpu() { 0. } else { 1e-6 };
    assert!(distance(&received[&1], &first) <= rounding);
    assert!(distance(&second, &first) > 1e-5);
}

#[test]
fn greedy_baselines_are_those_of_the_kept_groups() {
    let mut config = with_greedy_scores(config(0));
    config.recipe.group_filter = Some(GroupFilter::default());
    config.prompts_per_step = 5;
    config.max_sampling_batches = 1;
    let recorder = Recorder::plain();
    // The first group has equal rewards.
    let order = ShuffledOrder::new(5, config.sampling.seed).unwrap();
    let dropped = order.slice(0, 1)[0];
    let reward = move |sample: &Sample| {
        if sample.columns["row"] == dropped {
            0.5
        } else {
            digest(sample)
        }
    };
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        ..parts(reward, config)
    });
    assert_eq!(steps(&mut trainer, 1)[0].kept_groups, 4);
    let draws = recorder.draws();
    assert_eq!(draws[1].prompts, draws[0].prompts[1..]);
}

/// Fails, panics or is canceled in the given stream, once.
fn once(stream: u64, fault: fn(&dyn Progress) -> Result<()>) -> Arc<Recorder> {
    let failed = AtomicBool::new(false);
    Recorder::new(move |now, progress| {
        if now == stream && !failed.swap(true, Ordering::SeqCst) {
            fault(progress)
        } else {
            Ok(())
        }
    })
}

fn panic_in_engine(_: &dyn Progress) -> Result<()> {
    panic!("engine on fire")
}

#[rstest]
#[case::error(|_: &dyn Progress| bail!("engine: no answer"), "step 3: engine: no answer")]
#[case::panic(
    panic_in_engine,
    "step 3: rollouts: the thread panicked: engine on fire"
)]
fn an_error_of_the_generator_is_that_of_the_step_which_needs_it(
    #[case] fault: fn(&dyn Progress) -> Result<()>,
    #[case] expected: &str,
) {
    let recorder = once(3, fault);
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        ..parts(digest, config(2))
    });
    steps(&mut trainer, 2);
    let error = trainer.step().unwrap_err();
    assert_eq!(format!("{error:#}"), expected);
    assert_eq!(trainer.steps(), 2);
    // The step is repeated with the same prompts and the weights of now.
    let metrics = trainer.step().unwrap();
    assert_eq!((metrics.step, staleness_max(&metrics)), (3, 0.));
    let order = ShuffledOrder::new(5, sampling().seed).unwrap();
    let third = order
        .slice(6, 3)
        .into_iter()
        .map(|row| row as u64)
        .collect();
    assert!(recorder.draws().contains(&Draw {
        stream: 3,
        version: 2,
        prompts: third
    }));
    assert_eq!(trainer.step().unwrap().step, 4);
}

/// Fails or panics at the first completion of the third step.
struct Faulty {
    calls: AtomicUsize,
    panics: bool,
}

impl RewardFunction for Faulty {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        assert!(call != 2 || !self.panics, "no judge");
        ensure!(call != 2, "judge: no answer");
        Ok(samples.iter().map(|sample| digest(sample).into()).collect())
    }
}

#[rstest]
#[case(false, "step 3: judge: no answer")]
#[case(true, "step 3: rollouts: the thread panicked: no judge")]
fn an_error_of_the_reward_is_that_of_the_step_which_needs_it(
    #[case] panics: bool,
    #[case] expected: &str,
) {
    let faulty = Faulty {
        calls: AtomicUsize::new(0),
        panics,
    };
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Recorder::plain()),
        ..parts(faulty, config(1))
    });
    steps(&mut trainer, 2);
    assert_eq!(format!("{:#}", trainer.step().unwrap_err()), expected);
    assert_eq!(trainer.step().unwrap().step, 3);
}

/// Weights that cannot be loaded fail the step, and are passed again in the next one.
#[test]
fn weights_that_were_not_taken_are_passed_again() {
    struct Unreachable(Arc<Recorder>, AtomicBool);
    impl Generator for Unreachable {
        fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
            self.0.generate(batch, deliver)
        }
        fn weights_changed(
            &self,
            weights: &PolicyWeights<'_>,
            progress: &dyn Progress,
        ) -> Result<()> {
            let failed = weights.version == 1 && !self.1.swap(true, Ordering::SeqCst);
            ensure!(!failed, "engine: no answer");
            self.0.weights_changed(weights, progress)
        }
    }
    let recorder = Recorder::plain();
    let generator = Unreachable(recorder.clone(), AtomicBool::new(false));
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(generator)),
        ..parts(digest, config(1))
    });
    steps(&mut trainer, 2);
    let error = trainer.step().unwrap_err();
    assert_eq!(format!("{error:#}"), "step 3: engine: no answer");
    assert_eq!(staleness_max(&trainer.step().unwrap()), 0.);
}

/// A generator whose first transfer for version 1 lasts until it is canceled.
struct SlowTransfer {
    inner: Arc<Recorder>,
    started: Mutex<Option<Sender<()>>>,
}

impl Generator for SlowTransfer {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.inner.generate(batch, deliver)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        if weights.version == 1
            && let Some(started) = self.started.lock().unwrap().take()
        {
            started.send(())?;
            wait_for_cancel(progress)?;
        }
        self.inner.weights_changed(weights, progress)
    }
}

/// GRPO's advantages, except for an error in the second step, after a message from the transfer.
struct FailsDuringTransfer {
    steps: AtomicUsize,
    transfer: Mutex<Receiver<()>>,
}

impl AdvantageEstimator for FailsDuringTransfer {
    fn estimate(&self, batch: &AdvantageBatch) -> candle_core::Result<Advantages> {
        if self.steps.fetch_add(1, Ordering::SeqCst) == 1 {
            let transfer = self.transfer.lock().unwrap();
            transfer.recv_timeout(WATCHDOG).unwrap();
            candle_core::bail!("no advantages");
        }
        AdvantagePipeline::grpo().estimate(batch)
    }
}

#[test]
fn an_error_of_the_training_ends_a_transfer_of_weights() {
    let (started, transfer) = channel();
    let inner = Recorder::plain();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(SlowTransfer {
            inner: inner.clone(),
            started: Mutex::new(Some(started)),
        })),
        estimator: Some(Box::new(FailsDuringTransfer {
            steps: AtomicUsize::new(0),
            transfer: Mutex::new(transfer),
        })),
        ..parts(digest, config(1))
    });
    trainer.step().unwrap();
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(error.contains("no advantages"), "{error}");
    assert!(inner.versions().iter().all(|&(_, version)| version == 0));
    // The weights are passed again.
    let metrics = trainer.step().unwrap();
    assert_eq!((metrics.step, staleness_max(&metrics)), (2, 0.));
}

/// Cancels once it is set.
#[derive(Default)]
struct Stop(AtomicBool);

impl Progress for Stop {
    fn begin(&self, phase: Phase, _: usize) {
        // The thread that draws ahead does not report its phases.
        assert!(matches!(phase, Phase::Learn), "{phase:?}");
    }

    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// An engine that does not answer, but checks whether it is canceled.
fn wait_for_cancel(progress: &dyn Progress) -> Result<()> {
    while !progress.is_canceled() {
        std::thread::yield_now();
    }
    Err(Interrupted.into())
}

#[test]
fn a_canceled_step_ends_and_can_be_repeated() {
    let stop = Arc::new(Stop::default());
    let recorder = Recorder::new({
        let (stop, waited) = (stop.clone(), AtomicBool::new(false));
        move |stream, progress| {
            if stream == 2 && !waited.swap(true, Ordering::SeqCst) {
                stop.0.store(true, Ordering::SeqCst);
                wait_for_cancel(progress)?;
            }
            Ok(())
        }
    });
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder),
        progress: stop.clone(),
        ..parts(digest, config(1))
    });
    // The request to stop may come before or after the update of the first step.
    let mut first = 1;
    if let Err(error) = trainer.step() {
        assert!(error.is::<Interrupted>(), "{error:#}");
        first = 0;
    }
    let error = trainer.step().unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
    assert_eq!(trainer.steps(), first);
    stop.0.store(false, Ordering::SeqCst);
    assert_eq!(trainer.step().unwrap().step, first + 1);
}

#[test]
fn the_end_of_the_trainer_ends_the_thread() {
    let (drawing, drawn) = channel();
    let drawing = Mutex::new(drawing);
    let recorder = Recorder::new(move |stream, progress| {
        if stream == 1 {
            return Ok(());
        }
        drawing.lock().unwrap().send(stream)?;
        wait_for_cancel(progress)
    });
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        ..parts(digest, config(1))
    });
    trainer.step().unwrap();
    assert_eq!(drawn.recv_timeout(WATCHDOG).unwrap(), 2);
    drop(trainer);
    assert_eq!(Arc::strong_count(&recorder), 1);
}

#[test]
fn the_end_of_the_trainer_ends_a_thread_that_waits_for_an_evaluation() {
    let (evaluate, evaluation) = channel();
    let evaluation = Mutex::new(evaluation);
    let recorder = Recorder::new(move |stream, _| {
        // The evaluation begins before most of the steps are drawn.
        if stream == 3 {
            evaluation.lock().unwrap().recv_timeout(WATCHDOG)?;
        }
        Ok(())
    });
    let (ended, end) = channel();
    let own = recorder.clone();
    let run = std::thread::spawn(move || {
        let mut trainer = trainer_of(TrainerParts {
            generator: Some(own),
            ..parts(digest, config(200))
        });
        trainer.step().unwrap();
        evaluate.send(()).unwrap();
        drop(trainer.sampler(sampling()).unwrap());
        // The thread scores what it has drawn, and finds the generator reserved. It ends wherever
        // it is.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        drop(trainer);
        ended.send(()).unwrap();
    });
    end.recv_timeout(WATCHDOG).unwrap();
    run.join().unwrap();
    assert!(recorder.draws().len() < 200);
    assert_eq!(Arc::strong_count(&recorder), 1);
}

#[test]
fn a_finished_run_has_drawn_its_last_step_and_none_after_it() {
    struct Counted(Arc<AtomicUsize>);
    impl RewardFunction for Counted {
        fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
            Ok(samples.iter().map(|sample| digest(sample).into()).collect())
        }
        fn finish(&self) -> Result<()> {
            self.0.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }
    let finished = Arc::new(AtomicUsize::new(0));
    let recorder = Recorder::plain();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        last_step: 4,
        ..parts(Counted(finished.clone()), config(2))
    });
    steps(&mut trainer, 4);
    trainer.finish().unwrap();
    assert_eq!(finished.load(Ordering::SeqCst), 1);
    let streams: Vec<u64> = recorder.draws().iter().map(|draw| draw.stream).collect();
    assert_eq!(streams, [1, 2, 3, 4]);
}

/// A checkpoint has the state after the trained steps: completions that were sampled ahead are
/// sampled again, from the same prompts.
#[rstest]
#[case(config(1))]
#[case(filtered(config(2)))]
fn a_resumed_run_draws_the_same_prompts_in_the_same_order(#[case] mut config: TrainConfig) {
    // The groups that the filter drops depend on the weights.
    config.optimizer.learning_rate = 0.;
    let folder = tempfile::tempdir().unwrap();
    let recorder = Recorder::plain();
    let mut whole = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        last_step: 6,
        ..parts(coarse, config.clone())
    });
    steps(&mut whole, 3);
    whole
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    steps(&mut whole, 3);
    let again = Recorder::plain();
    let mut resumed = trainer_of(TrainerParts {
        generator: Some(again.clone()),
        last_step: 6,
        ..parts(coarse, config)
    });
    resumed.load_state(folder.path()).unwrap();
    let metrics = steps(&mut resumed, 3);
    assert_eq!(metrics[0].policy.get("staleness_max").unwrap_or(&0.), &0.);
    let prompts_after = |recorder: &Recorder| -> Vec<(u64, Vec<u64>)> {
        let draws = recorder.draws().into_iter();
        let later = draws.filter(|draw| draw.stream & 0xffff_ffff > 3);
        later.map(|draw| (draw.stream, draw.prompts)).collect()
    };
    assert_eq!(prompts_after(&again), prompts_after(&recorder));
    assert_eq!(again.draws().len(), prompts_after(&again).len());
    assert_eq!(resumed.state(), whole.state());
}

/// In the fourth step, the generator returns older completions than requested.
#[test]
fn groups_that_are_too_old_are_drawn_again() {
    let mut recorder = Recorder::unshared(|_, _| Ok(()));
    recorder.stamp = Box::new(|stream, version| if stream == 4 { 0 } else { version });
    let recorder = Arc::new(recorder);
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        last_step: 6,
        ..parts(digest, config(1))
    });
    let metrics = steps(&mut trainer, 6);
    let regenerated: Vec<_> = metrics
        .iter()
        .map(|m| m.policy["regenerated_groups"])
        .collect();
    assert_eq!(regenerated, [0., 0., 0., 3., 0., 0.]);
    assert_eq!(staleness_max(&metrics[3]), 0.);
    let draws = recorder.draws();
    let of_step = |step: u64| draws.iter().filter(move |d| d.stream & 0xffff_ffff == step);
    let [first, second] = of_step(4).collect::<Vec<_>>()[..] else {
        panic!("{draws:?}");
    };
    assert_eq!((second.version, &second.prompts), (3, &first.prompts));
    assert_ne!(second.stream, first.stream);
    // Later steps have the prompts of their place.
    let order = ShuffledOrder::new(5, sampling().seed).unwrap();
    for step in 1..=6 {
        let rows = order.slice(3 * (step as usize - 1), 3);
        let rows: Vec<u64> = rows.into_iter().map(|row| row as u64).collect();
        assert!(of_step(step).all(|draw| draw.prompts == rows));
    }
}

#[test]
fn a_generator_that_stays_too_old_is_an_error() {
    let mut recorder = Recorder::unshared(|_, _| Ok(()));
    recorder.stamp = Box::new(|_, _| 0);
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(recorder)),
        ..parts(digest, config(1))
    });
    steps(&mut trainer, 2);
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(
        error.starts_with("step 3: generator: drew prompt "),
        "{error}"
    );
    assert!(
        error.ends_with(
            "with weights that lack 2 updates, must be at most 1 (rollout.max_staleness)"
        ),
        "{error}"
    );
    assert_eq!(trainer.steps(), 2);
}

/// The third step changes nothing, so the generator has the weights for the fourth, whose
/// completions are too old.
#[test]
fn weights_are_passed_again_to_a_generator_that_draws_with_older_ones() {
    let drawn = Arc::new(AtomicU64::new(0));
    let mut recorder = Recorder::unshared({
        let drawn = drawn.clone();
        move |stream, _| {
            drawn.store(stream, Ordering::SeqCst);
            Ok(())
        }
    });
    recorder.stamp = Box::new(|stream, version| if stream == 4 { 0 } else { version });
    let recorder = Arc::new(recorder);
    let reward = move |sample: &Sample| match drawn.load(Ordering::SeqCst) {
        3 => 0.5,
        _ => digest(sample),
    };
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        last_step: 4,
        ..parts(reward, config(1))
    });
    let metrics = steps(&mut trainer, 4);
    let skipped: Vec<bool> = metrics.iter().map(|m| m.skipped).collect();
    assert_eq!(skipped, [false, false, true, false]);
    assert_eq!(metrics[3].policy["regenerated_groups"], 3.);
    assert_eq!(*recorder.received.lock().unwrap(), [0, 1, 2, 2]);
}

/// Number of units in an evaluation.
#[derive(Default)]
struct Units(AtomicUsize);

impl Progress for Units {
    fn advance(&self, units: usize, _: usize) {
        self.0.fetch_add(units, Ordering::SeqCst);
    }
}

#[test]
fn an_evaluation_reports_its_progress() {
    let units = Arc::new(Units::default());
    let trainer = trainer_of(TrainerParts {
        generator: Some(Recorder::plain()),
        progress: units.clone(),
        ..parts(digest, config(1))
    });
    let sampler = trainer.sampler(sampling()).unwrap();
    sampler.sample(&[&prompts(&["abc"])[0]], 3, 0).unwrap();
    assert_eq!(units.0.load(Ordering::SeqCst), 3);
}

/// An evaluation between steps samples from the current weights, while the thread samples later
/// steps from older ones.
#[test]
fn an_evaluation_draws_from_the_current_weights() {
    let recorder = Recorder::plain();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder.clone()),
        ..parts(digest, config(2))
    });
    let prompts = prompts(&["abc"]);
    for steps in 0..5 {
        let sampler = trainer.sampler(sampling()).unwrap();
        for stream in [1 << 40, 1 << 41] {
            for rollout in sampler.sample(&[&prompts[0]], 3, stream).unwrap() {
                let versions = rollout.completion.weight_versions;
                assert!(
                    versions.iter().all(|&version| version == steps),
                    "{versions:?}"
                );
            }
        }
        let metrics = trainer.step().unwrap();
        assert!(!metrics.skipped && staleness_max(&metrics) <= 2.);
    }
}

#[test]
fn weights_that_the_caller_changes_reach_the_generator() {
    let recorder = Recorder::plain();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(recorder),
        ..parts(digest, config(1))
    });
    steps(&mut trainer, 2);
    let zero = |x: &candle_core::Var| x.set(&x.zeros_like().unwrap()).unwrap();
    let actor = trainer.actor_mut();
    actor.parameters().iter().for_each(|(_, x)| zero(x));
    // All tokens are equally likely now.
    let metrics = trainer.step().unwrap();
    assert_eq!(staleness_max(&metrics), 0.);
    let (least, most) = (
        &metrics.policy["rollout_weight_min"],
        &metrics.policy["rollout_weight_max"],
    );
    assert!(
        (least - 1.).abs() < 1e-5 && (most - 1.).abs() < 1e-5,
        "{least} {most}"
    );
}

#[test]
fn a_generator_that_shares_the_weights_is_refused() {
    let sharing = trainer(digest, config(0)).sampler(sampling()).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(sharing.generator().clone()),
        ..parts(digest, config(1))
    });
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert_eq!(
        error,
        "step 1: rollout.max_staleness: 1, must be 0 with a generator that shares the weights of the policy"
    );
}

#[test]
fn older_weights_need_a_correction() {
    let mut config = config(2);
    config.recipe.policy_loss.rollout_correction = None;
    let error = config.validate().unwrap_err().to_string();
    assert_eq!(
        error,
        "rollout.max_staleness: 2, must be 0 without recipe.policy_loss.rollout_correction, which corrects for older weights"
    );
}

#[test]
fn a_detached_generator_keeps_its_weights_until_it_receives_others() {
    let mut trainer = trainer(digest, config(0));
    let weights = |trainer: &Trainer, version| {
        let generator = LocalGenerator::detached(
            &PolicyWeights {
                version,
                model: trainer.actor().model(),
                parameters: trainer.actor().parameters(),
                adapters: None,
            },
            ComputeDType::F32,
        );
        generator.unwrap()
    };
    let detached = Arc::new(weights(&trainer, 7));
    let log_probs = |generator: Arc<LocalGenerator>| {
        let sampler = Sampler::from_generator(generator, 6, sampling()).unwrap();
        let rollouts = sampler.sample(&[&prompts(&["abc"])[0]], 2, 0).unwrap();
        rollouts
            .into_iter()
            .map(|r| r.completion)
            .collect::<Vec<_>>()
    };
    let before = log_probs(detached.clone());
    assert!(
        before
            .iter()
            .all(|c| c.weight_versions.iter().all(|&v| v == 7))
    );
    trainer.step().unwrap();
    assert_eq!(log_probs(detached.clone()), before);
    let now = log_probs(Arc::new(weights(&trainer, 8)));
    assert_ne!(now, before);
    let changed = PolicyWeights {
        version: 8,
        model: trainer.actor().model(),
        parameters: trainer.actor().parameters(),
        adapters: None,
    };
    detached.weights_changed(&changed, &NoProgress).unwrap();
    assert_eq!(log_probs(detached), now);
}

/// The policy samples in another dtype than it trains in, from each step's weights.
#[rstest]
#[case::in_turn(0)]
#[case::ahead(1)]
fn the_policy_draws_in_its_own_dtype(#[case] max_staleness: usize) {
    let mut config = config(max_staleness);
    config.rollout.dtype = Some(ComputeDType::Bf16);
    let mut trainer = trainer(digest, config);
    let in_dtype = |trainer: &Trainer, dtype| {
        let weights = PolicyWeights {
            version: 0,
            model: trainer.actor().model(),
            parameters: trainer.actor().parameters(),
            adapters: None,
        };
        let generator = Arc::new(LocalGenerator::in_dtype(&weights, dtype).unwrap());
        Sampler::from_generator(generator, 6, sampling()).unwrap()
    };
    let draw = |sampler: &Sampler| {
        let rollouts = sampler.sample(&[&prompts(&["abc"])[0]], 4, 0).unwrap();
        let log_probs = rollouts.into_iter().map(|r| r.completion.log_probs);
        log_probs.collect::<Vec<_>>()
    };
    let mut earlier = Vec::new();
    for _ in 0..2 {
        let drawn = draw(&trainer.sampler(sampling()).unwrap());
        assert_ne!(drawn, earlier);
        assert_eq!(drawn, draw(&in_dtype(&trainer, ComputeDType::Bf16)));
        assert_ne!(drawn, draw(&in_dtype(&trainer, ComputeDType::F32)));
        earlier = drawn;
        let metrics = trainer.step().unwrap();
        assert!(!metrics.skipped);
    }
}

#[test]
fn only_a_policy_in_this_process_that_trains_in_f32_draws_in_another_dtype() {
    let mut config = config(0);
    config.compute_dtype = ComputeDType::Bf16;
    config.rollout.dtype = Some(ComputeDType::F32);
    assert_eq!(
        config.validate().unwrap_err().to_string(),
        "rollout.dtype: f32, must be absent or compute_dtype, unless that is f32"
    );
    config.rollout.dtype = Some(ComputeDType::Bf16);
    config.validate().unwrap();
    config.rollout.engine = candle_grpo_train::rollout::Engine::Vllm;
    assert_eq!(
        config.validate().unwrap_err().to_string(),
        "rollout.dtype: bf16, must be absent with engine vllm, which has its own"
    );
}

/// A server receives each step's weights while the policy trains.
#[cfg(feature = "engines")]
#[rstest]
#[case::all_weights(config(1))]
#[case::adapters(with_adapters(config(1)))]
fn a_server_draws_ahead(#[case] mut config: TrainConfig) {
    use candle_grpo_train::rollout::Engine;
    use candle_grpo_train::rollout::engine::ServerGenerator;

    use crate::engines::{LogProbs, fake_vllm, served};

    let server = fake_vllm::start(served(LogProbs::Temperature));
    let folder = tempfile::tempdir().unwrap();
    config.rollout.engine = Engine::Vllm;
    config.rollout.base_url = vec![server.url()];
    let (rollout, sampling) = (&config.rollout, &config.sampling);
    let generator = ServerGenerator::new(rollout, sampling, 6, folder.path()).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(generator)),
        last_step: 5,
        ..parts(digest, config)
    });
    for step in 1..=5u64 {
        let metrics = trainer.step().unwrap();
        let expected = if step == 1 { 0. } else { 1. };
        assert_eq!(staleness_max(&metrics), expected);
        assert_eq!(metrics.policy["regenerated_groups"], 0.);
        let sampler = trainer.sampler(common::sampling()).unwrap();
        for rollout in sampler.sample(&[&prompts(&["abc"])[0]], 2, 0).unwrap() {
            let versions = rollout.completion.weight_versions;
            assert!(
                versions.iter().all(|&version| version == step),
                "{versions:?}"
            );
        }
    }
}

/// Keeps the parameters that it receives, as an engine that may send them again does.
struct Keeps {
    recorder: Arc<Recorder>,
    kept: Mutex<Vec<Kept>>,
}

/// Parameters that a generator has received, with their version and their values then.
type Kept = (u64, Parameters, BTreeMap<String, Vec<f32>>);

impl Generator for Keeps {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.recorder.generate(batch, deliver)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        let (parameters, values) = (weights.parameters.clone(), values_of(weights.parameters));
        let mut kept = self.kept.lock().unwrap();
        kept.push((weights.version, parameters, values));
        self.recorder.weights_changed(weights, progress)
    }
}

/// The policy trains while an engine still has the weights of an evaluation.
#[test]
fn weights_that_an_engine_keeps_do_not_change() {
    let keeps = Arc::new(Keeps {
        recorder: Recorder::plain(),
        kept: Mutex::default(),
    });
    let mut config = config(1);
    config.rollout.engine = Engine::Vllm;
    config.rollout.base_url = vec!["http://127.0.0.1:1".to_owned()];
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(keeps.clone()),
        ..parts(digest, config)
    });
    for _ in 0..3 {
        drop(trainer.sampler(sampling()).unwrap());
        trainer.step().unwrap();
    }
    let kept = keeps.kept.lock().unwrap();
    assert!(kept.len() >= 3);
    for (version, parameters, values) in kept.iter() {
        assert!(values_of(parameters) == *values, "version {version}");
    }
}
