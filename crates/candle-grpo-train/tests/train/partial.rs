//! Completions that are sampled over several calls and steps.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::Result;
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::{PolicyLoss, Recipe, RolloutCorrection};
use candle_grpo_nn::{Decoder, DecoderConfig, Parameters};
use candle_grpo_test_support::{device, on_ranks};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::progress::{NoProgress, Phase};
use candle_grpo_train::rollout::{
    CompletionSeed, CompletionState, Deliver, GenerationBatch, LocalGenerator, Partial,
    PolicyWeights, PromptRequest, UnfinishedCompletion,
};
use candle_grpo_train::{
    Actor, Completion, ComputeDType, FinishReason, Generator, Progress, Sample, SamplingConfig,
    StepMetrics, TokenBatch, TrainConfig, TrainerParts,
};
use rstest::rstest;

use crate::common::{
    self, actor_config, digest, model, model_with_experts, model_with_states, parameters_of, parts,
    pretrained, prompts, sampling, share_of_a, trainer, trainer_of, try_trainer, without_seconds,
};

/// Three of up to six groups with four completions train in a step.
fn config() -> TrainConfig {
    let mut config = common::config();
    config.optimizer.learning_rate = 1e-2;
    config.sampling.max_new_tokens = 20;
    config.rollout.partial = true;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    config
}

/// Samples all completions, in calls that end after `steps` tokens of one each.
fn in_parts(
    generator: &LocalGenerator,
    batch: &GenerationBatch<'_>,
    steps: usize,
) -> Vec<Completion> {
    let total: usize = batch.prompts.iter().map(|prompt| prompt.seeds.len()).sum();
    let mut ended: Vec<Option<Completion>> = vec![None; total];
    let mut begun: Vec<Option<Completion>> = vec![None; total];
    while ended.iter().any(Option::is_none) {
        let places: Vec<usize> = (0..total).filter(|&place| ended[place].is_none()).collect();
        let mut left = places.iter().copied().peekable();
        let mut first = 0;
        let mut requests = Vec::new();
        for prompt in batch.prompts {
            let all = first..first + prompt.seeds.len();
            let mut seeds = Vec::new();
            while let Some(place) = left.next_if(|place| all.contains(place)) {
                seeds.push(prompt.seeds[place - first]);
            }
            first = all.end;
            if !seeds.is_empty() {
                requests.push(PromptRequest {
                    seeds,
                    ..prompt.clone()
                });
            }
        }
        let asked = AtomicUsize::new(0);
        let unfinished = Mutex::new(Vec::new());
        let known: Vec<Option<Completion>> =
            places.iter().map(|&place| begun[place].clone()).collect();
        let partial = Partial {
            begun: &known,
            is_enough: &|| asked.fetch_add(1, Ordering::Relaxed) > steps,
            unfinished: &|place, completion| {
                unfinished.lock().unwrap().push((place, completion));
                Ok(())
            },
        };
        let batch = GenerationBatch {
            prompts: &requests,
            partial: Some(partial),
            ..*batch
        };
        generator
            .generate(&batch, &mut |place, completion| {
                assert!(ended[places[place]].replace(completion).is_none());
                Ok(())
            })
            .unwrap();
        for (place, completion) in unfinished.into_inner().unwrap() {
            begun[places[place]] = Some(completion);
        }
    }
    ended.into_iter().flatten().collect()
}

/// The same weights sample the same bits, wherever a call ends.
#[rstest]
#[case::dense(model(), |_: &mut SamplingConfig| ())]
#[case::greedy(model(), |sampling: &mut SamplingConfig| sampling.greedy = true)]
#[case::truncated(model(), |sampling: &mut SamplingConfig| sampling.top_p = 0.7)]
#[case::few_at_once(model(), |sampling: &mut SamplingConfig| sampling.max_batch_size = 3)]
#[case::stop_strings(model(), |sampling: &mut SamplingConfig| sampling.stop_strings = vec!["ab".to_owned(), "dd".to_owned()])]
#[case::experts(model_with_experts(), |_: &mut SamplingConfig| ())]
#[case::states(model_with_states(), |_: &mut SamplingConfig| ())]
fn a_continued_completion_has_the_bits_of_one_that_was_never_interrupted(
    #[case] model: DecoderConfig,
    #[case] change: fn(&mut SamplingConfig),
    #[values(1, 3)] steps: usize,
) {
    let mut sampling = SamplingConfig {
        max_new_tokens: 12,
        ..sampling()
    };
    change(&mut sampling);
    let parameters = parameters_of(&model, device());
    let generator = LocalGenerator::new(&model, &parameters).unwrap();
    let prompts = prompts(&["abc", "d", "eeeee"]);
    let requests: Vec<PromptRequest<'_>> = prompts
        .iter()
        .map(|prompt| PromptRequest {
            tokens: &prompt.tokens,
            seeds: (0..5)
                .map(|sample| CompletionSeed {
                    seed: 3,
                    stream: 1,
                    prompt: prompt.index,
                    sample,
                    turn: 0,
                })
                .collect(),
            max_new_tokens: sampling.max_new_tokens,
        })
        .collect();
    let tokenizer = character_tokenizer("abcde").unwrap();
    let decode = move |tokens: &[u32]| Ok(tokenizer.decode(tokens, false).unwrap());
    let batch = GenerationBatch {
        prompts: &requests,
        sampling: &sampling,
        decode: Some(&decode),
        progress: &NoProgress,
        records_experts: true,
        partial: None,
    };
    let mut whole: Vec<Option<Completion>> = vec![None; 15];
    generator
        .generate(&batch, &mut |place, completion| {
            whole[place] = Some(completion);
            Ok(())
        })
        .unwrap();
    let whole: Vec<Completion> = whole.into_iter().flatten().collect();
    assert!(whole.iter().any(|completion| completion.tokens.len() > 4));
    if !sampling.stop_strings.is_empty() {
        let ended = |completion: &&Completion| {
            completion.finish_reason == FinishReason::StopString && completion.tokens.len() > 2
        };
        assert!(whole.iter().any(|completion| ended(&completion)));
    }
    assert_eq!(in_parts(&generator, &batch, steps), whole);
}

/// The beginnings of completions that a generator cannot continue.
#[test]
fn completions_that_cannot_be_continued_are_named() {
    let generator = LocalGenerator::new(&model(), &parameters_of(&model(), device())).unwrap();
    let prompts = prompts(&["abc"]);
    let seed = CompletionSeed {
        seed: 0,
        stream: 0,
        prompt: 0,
        sample: 0,
        turn: 0,
    };
    let sampling = sampling();
    let requests = [PromptRequest {
        tokens: &prompts[0].tokens,
        seeds: vec![seed; 2],
        max_new_tokens: sampling.max_new_tokens,
    }];
    let good = Completion {
        tokens: vec![1; 3],
        drawn_log_probs: vec![-1.; 3],
        log_probs: Some(vec![-1.; 3]),
        written: None,
        weight_versions: vec![0; 3],
        finish_reason: FinishReason::Length,
        experts: None,
    };
    let error = |change: fn(&mut Completion)| {
        let mut changed = good.clone();
        change(&mut changed);
        let begun = [None, Some(changed)];
        let partial = Partial {
            begun: &begun,
            is_enough: &|| false,
            unfinished: &|_, _| Ok(()),
        };
        let batch = GenerationBatch {
            prompts: &requests,
            sampling: &sampling,
            decode: None,
            progress: &NoProgress,
            records_experts: false,
            partial: Some(partial),
        };
        let generated = generator.generate(&batch, &mut |_, _| Ok(()));
        generated.map_err(|error| format!("{error:#}")).err()
    };
    assert_eq!(error(|_| ()), None);
    let must = "begun[1]: no log_probs, must have them";
    assert_eq!(error(|c| c.log_probs = None).as_deref(), Some(must));
    let long = |c: &mut Completion| {
        c.tokens = vec![1; 8];
        c.drawn_log_probs = vec![-1.; 8];
        c.log_probs = Some(vec![-1.; 8]);
        c.weight_versions = vec![0; 8];
    };
    let must = "begun[1]: 8 tokens, must be fewer than 8";
    assert_eq!(error(long).as_deref(), Some(must));
    let unknown = error(|c| c.tokens[1] = 99).unwrap();
    assert!(
        unknown.starts_with("begun[1]: tokens: 99 at 1"),
        "{unknown}"
    );
}

/// Samples from copies of the weights, and remembers them and the completions of all versions.
#[derive(Default)]
struct Versions {
    /// The weights of the versions that it received.
    weights: Mutex<BTreeMap<u64, Parameters>>,
    /// Completions that have ended, with their prompts' tokens.
    ended: Mutex<Vec<(CompletionSeed, Vec<u32>, Completion)>>,
    /// True if it does not end calls early.
    is_whole: bool,
    /// The stream that waits for the weights of version 1 after three tokens of each completion.
    waiting_stream: Option<u64>,
}

impl Generator for Versions {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let weights = self.weights.lock().unwrap();
        let (&version, parameters) = weights.last_key_value().unwrap();
        let model = model();
        let weights = PolicyWeights {
            version,
            model: &model,
            parameters,
            adapters: None,
        };
        let generator = LocalGenerator::in_dtype(&weights, ComputeDType::F32)?;
        let requests = batch.prompts.iter();
        let places: Vec<(CompletionSeed, &[u32])> = requests
            .flat_map(|request| request.seeds.iter().map(|&seed| (seed, request.tokens)))
            .collect();
        let mut streams = places.iter().map(|(seed, _)| seed.stream);
        let waits = version == 0 && streams.any(|stream| self.waiting_stream == Some(stream));
        let asked = AtomicUsize::new(0);
        let is_enough_now = || batch.partial.is_some_and(|partial| (partial.is_enough)());
        let is_enough = || is_enough_now() || waits && asked.fetch_add(1, Ordering::Relaxed) >= 3;
        let progress = batch.progress;
        let partial = batch.partial.filter(|_| !self.is_whole);
        let partial = partial.map(|partial| Partial {
            is_enough: &is_enough,
            ..partial
        });
        let part = GenerationBatch { partial, ..*batch };
        generator.generate(&part, &mut |place, completion| {
            let (seed, prompt) = places[place];
            let mut ended = self.ended.lock().unwrap();
            ended.push((seed, prompt.to_vec(), completion.clone()));
            drop(ended);
            deliver(place, completion)
        })?;
        while waits && !is_enough_now() {
            assert!(!progress.is_canceled(), "the weights never arrived");
            thread::yield_now();
        }
        Ok(())
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, _: &dyn Progress) -> Result<()> {
        let mut all = self.weights.lock().unwrap();
        assert!(
            all.last_key_value()
                .is_none_or(|(last, _)| *last < weights.version)
        );
        all.insert(weights.version, weights.parameters.copy_to(device())?);
        Ok(())
    }
}

fn run(config: &TrainConfig, generator: &Arc<Versions>, steps: usize) -> Vec<StepMetrics> {
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::<Versions>::clone(generator)),
        ..parts(digest, config.clone())
    });
    (0..steps).map(|_| trainer.step().unwrap()).collect()
}

/// Checks that each token has the version that sampled it, and that version's log-prob. Returns the
/// number of completions with several versions.
fn count_mixed(generator: &Versions) -> usize {
    let weights = generator.weights.lock().unwrap();
    let actors: BTreeMap<u64, Actor<Decoder>> = weights
        .iter()
        .map(|(&version, parameters)| {
            let config = actor_config(PolicyLoss::default());
            let actor = Actor::new(model(), parameters.clone(), config);
            (version, actor.unwrap())
        })
        .collect();
    let ended = generator.ended.lock().unwrap();
    let mut mixed = 0;
    for (_, prompt, completion) in ended.iter() {
        let pair = [(prompt.as_slice(), completion.tokens.as_slice())];
        let batch = TokenBatch::new(&pair, device()).unwrap();
        let expected: BTreeMap<u64, Vec<f32>> = actors
            .iter()
            .map(|(&version, actor)| {
                let log_probs = actor.log_probs(&batch).unwrap();
                (version, log_probs.flatten_all().unwrap().to_vec1().unwrap())
            })
            .collect();
        let versions = &completion.weight_versions;
        assert!(versions.is_sorted(), "{versions:?}");
        mixed += usize::from(versions.first() != versions.last());
        for (at, &version) in versions.iter().enumerate() {
            let (found, right) = (completion.drawn_log_probs[at], expected[&version][at]);
            assert!(
                (found - right).abs() < 1e-4,
                "{at}: {found}, must be {right}"
            );
        }
    }
    mixed
}

#[test]
fn tokens_have_the_version_and_log_prob_of_the_weights_that_sampled_them() {
    let generator = Arc::new(Versions::default());
    let metrics = run(&config(), &generator, 6);
    let mixed = count_mixed(&generator);
    assert!(mixed > 5, "{mixed}");
    let maxima: Vec<f64> = metrics.iter().map(|m| m.policy["staleness_max"]).collect();
    assert_eq!(maxima[0], 0.);
    assert!(maxima.contains(&1.), "{maxima:?}");
}

/// Groups are continued while the policy trains.
#[test]
fn partial_rollouts_may_be_sampled_ahead() {
    let mut config = config();
    (
        config.rollout.max_staleness,
        config.rollout.max_continuations,
    ) = (1, 2);
    let generator = Arc::new(Versions::default());
    let metrics = run(&config, &generator, 6);
    let mixed = count_mixed(&generator);
    assert!(mixed > 5, "{mixed}");
    let maxima: Vec<f64> = metrics.iter().map(|m| m.policy["staleness_max"]).collect();
    assert_eq!(maxima[..2], [0., 1.]);
    assert!(maxima.contains(&2.), "{maxima:?}");
    assert!(maxima.iter().all(|&age| age <= 3.), "{maxima:?}");
    for metrics in &metrics {
        assert_eq!(metrics.policy["regenerated_groups"], 0.);
        assert_eq!(metrics.policy["unfinished_groups"], 3.);
    }
}

/// A checkpoint has the groups after its step, and not those of the steps that are sampled ahead.
#[test]
fn a_resumed_run_continues_the_groups_of_its_checkpoint() {
    let mut config = config();
    config.rollout.max_staleness = 1;
    let folder = tempfile::tempdir().unwrap();
    let mut before = trainer(digest, config.clone());
    before.step().unwrap();
    before.step().unwrap();
    let groups = before.state().unfinished_groups.clone();
    let begun: Vec<(CompletionSeed, Vec<u32>)> = groups
        .iter()
        .flat_map(|group| &group.completions)
        .filter_map(|completion| match &completion.state {
            CompletionState::Begun(begun) => Some((completion.seed, begun.tokens.clone())),
            _ => None,
        })
        .collect();
    assert!(!begun.is_empty());
    before
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    drop(before);
    let generator = Arc::new(Versions::default());
    let mut after = trainer_of(TrainerParts {
        generator: Some(Arc::<Versions>::clone(&generator)),
        ..parts(digest, config)
    });
    after.load_state(folder.path()).unwrap();
    assert_eq!(after.state().unfinished_groups, groups);
    after.step().unwrap();
    after.step().unwrap();
    drop(after);
    let ended = generator.ended.lock().unwrap();
    for (seed, tokens) in begun {
        let completion = ended.iter().find(|(other, ..)| *other == seed);
        let (_, _, completion) = completion.unwrap();
        assert_eq!(completion.tokens[..tokens.len()], tokens);
        assert!(
            completion.weight_versions[tokens.len()..]
                .iter()
                .all(|&version| version >= 2)
        );
    }
}

#[rstest]
#[case::whole(false)]
#[case::partial(true)]
fn weights_arrive_while_completions_are_in_flight(#[case] partial: bool) {
    let mut config = config();
    config.rollout.partial = partial;
    (
        config.rollout.max_staleness,
        config.rollout.in_flight_updates,
    ) = (1, true);
    let generator = Arc::new(Versions {
        waiting_stream: Some(2),
        ..Versions::default()
    });
    let metrics = run(&config, &generator, 3);
    let mixed = count_mixed(&generator);
    assert!(mixed > 5, "{mixed}");
    let second = &metrics[1].policy;
    assert_eq!(second["staleness_max"], 1.);
    assert!(second["staleness_mean"] > 0. && second["staleness_mean"] < 0.9);
    let ended = generator.ended.lock().unwrap();
    let second = ended.iter().filter(|(seed, ..)| seed.stream == 2);
    for (_, _, completion) in second {
        let versions = completion.weight_versions.iter();
        let expected = versions.clone().enumerate();
        let expected = expected.map(|(at, version)| if at < 3 { 0 } else { *version.max(&1) });
        assert!(versions.copied().eq(expected), "{completion:?}");
    }
}

/// Updates that change nothing change no completion.
#[test]
fn updates_in_flight_leave_the_completions_of_fixed_weights_as_they_are() {
    let mut config = config();
    config.optimizer.learning_rate = 0.;
    config.rollout.partial = false;
    config.rollout.max_staleness = 1;
    let completions = |config: &TrainConfig, waiting_stream: Option<u64>| {
        let generator = Arc::new(Versions {
            waiting_stream,
            ..Versions::default()
        });
        run(config, &generator, 4);
        let ended = generator.ended.lock().unwrap();
        let trained = ended.iter().filter(|(seed, ..)| seed.stream <= 4);
        let named: BTreeMap<_, _> = trained
            .map(|(seed, _, completion)| {
                let name = (seed.stream, seed.prompt, seed.sample);
                let log_probs = completion.drawn_log_probs.iter().map(|x| x.to_bits());
                (
                    name,
                    (completion.tokens.clone(), log_probs.collect::<Vec<_>>()),
                )
            })
            .collect();
        named
    };
    let expected = completions(&config, None);
    assert_eq!(expected.len(), 4 * 3 * 4);
    config.rollout.in_flight_updates = true;
    assert_eq!(completions(&config, Some(2)), expected);
}

/// With fixed weights, a completion has the bits of one that was sampled within its step. It may
/// train in another one.
#[test]
fn fixed_weights_sample_the_completions_of_whole_steps() {
    let mut config = config();
    config.optimizer.learning_rate = 0.;
    let completions = |is_whole: bool| {
        let generator = Arc::new(Versions {
            is_whole,
            ..Versions::default()
        });
        let metrics = run(&config, &generator, 8);
        let ended = generator.ended.lock().unwrap();
        let named: BTreeMap<_, _> = ended
            .iter()
            .map(|(seed, _, completion)| {
                let name = (seed.stream, seed.prompt, seed.sample);
                let log_probs: Vec<u32> = completion
                    .drawn_log_probs
                    .iter()
                    .map(|x| x.to_bits())
                    .collect();
                (name, (completion.tokens.clone(), log_probs))
            })
            .collect();
        assert_eq!(named.len(), ended.len(), "each completion ends once");
        (named, metrics)
    };
    let (partial, metrics) = completions(false);
    let (whole, _) = completions(true);
    let mut compared = 0;
    for (name, completion) in &partial {
        if let Some(other) = whole.get(name) {
            assert_eq!(completion, other, "{name:?}");
            compared += 1;
        }
    }
    assert!(compared >= 3 * 4 * 6, "{compared} of {}", partial.len());
    // The first step leaves three of six groups, and each later one starts three.
    assert!(metrics.iter().all(|m| m.policy["unfinished_groups"] == 3.));
}

#[rstest]
#[case::plain(|_: &mut TrainConfig| ())]
#[case::filtered(|config: &mut TrainConfig| {
    let correction = config.recipe.policy_loss.rollout_correction.take();
    config.recipe = Recipe::dapo(20, 4);
    config.recipe.policy_loss.rollout_correction = correction;
    config.recipe.group_filter = Some(GroupFilter::default());
})]
#[case::few_in_flight(|config: &mut TrainConfig| config.rollout.prompts_in_flight = Some(5))]
#[case::short_lived(|config: &mut TrainConfig| config.rollout.max_continuations = 1)]
fn a_resumed_run_continues_the_same_groups(#[case] change: fn(&mut TrainConfig)) {
    let mut config = config();
    change(&mut config);
    let folder = tempfile::tempdir().unwrap();
    let mut whole = trainer(share_of_a, config.clone());
    let (mut expected, mut saved) = (Vec::new(), None);
    for step in 1..=6 {
        expected.push(without_seconds(whole.step().unwrap()));
        let metrics = &expected[step - 1].policy;
        let bound = config.rollout.max_continuations as f64;
        assert!(
            metrics.get("staleness_max").is_none_or(|max| *max <= bound),
            "{metrics:?}"
        );
        let groups = whole.state().unfinished_groups.iter();
        let is_begun = |c: &UnfinishedCompletion| matches!(c.state, CompletionState::Begun(_));
        if saved.is_none() && groups.flat_map(|group| &group.completions).any(is_begun) {
            let written = whole.write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32);
            written.unwrap();
            // A line for each group, apart from the rest of the state.
            let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
            let lines = text("unfinished_groups.jsonl").lines().count();
            assert_eq!(lines, whole.state().unfinished_groups.len());
            assert!(!text("trainer.json").contains("drawn_log_probs"));
            saved = Some(step);
        }
    }
    let saved = saved.unwrap();
    assert!(saved < 5);
    let mut resumed = trainer(share_of_a, config.clone());
    resumed.load_state(folder.path()).unwrap();
    for expected in &expected[saved..] {
        assert_eq!(&without_seconds(resumed.step().unwrap()), expected);
    }
    assert_eq!(resumed.state(), whole.state());
    // Without the setting, the groups are dropped.
    config.rollout.partial = false;
    config.rollout.prompts_in_flight = None;
    let mut ended = trainer(share_of_a, config);
    ended.load_state(folder.path()).unwrap();
    assert_eq!(ended.state().unfinished_groups, []);
    ended.step().unwrap();
}

/// Counts the passes that sample.
#[derive(Default)]
struct Passes {
    samples: AtomicBool,
    count: AtomicUsize,
}

impl Progress for Passes {
    fn begin(&self, phase: Phase, _: usize) {
        self.samples
            .store(phase == Phase::Sample, Ordering::Relaxed);
    }

    fn advance(&self, _: usize, _: usize) {
        let samples = self.samples.load(Ordering::Relaxed);
        self.count
            .fetch_add(usize::from(samples), Ordering::Relaxed);
    }
}

/// Long completions run beside those of the next step.
#[test]
fn fewer_passes_sample_the_completions_of_as_many_steps() {
    let passes = |partial: bool| {
        let mut config = config();
        config.rollout.partial = partial;
        let passes = Arc::new(Passes::default());
        let mut trainer = trainer_of(TrainerParts {
            progress: Arc::<Passes>::clone(&passes),
            ..parts(digest, config)
        });
        common::run(&mut trainer, 10);
        passes.count.load(Ordering::Relaxed)
    };
    let (plain, partial) = (passes(false), passes(true));
    assert!(partial * 3 < plain * 2, "{partial} {plain}");
}

/// A step that failed after it had sampled is repeated with the same groups.
#[test]
fn a_failed_step_leaves_the_groups_of_the_step_before() {
    let calls = Arc::new(AtomicUsize::new(0));
    let fails_in = |call: usize| {
        let calls = Arc::clone(&calls);
        calls.store(0, Ordering::Relaxed);
        // A reward is called for each of 12 completions of a step.
        move |sample: &Sample| {
            let number = calls.fetch_add(1, Ordering::Relaxed);
            if number == call {
                f32::NAN
            } else {
                digest(sample)
            }
        }
    };
    let mut whole = trainer(fails_in(usize::MAX), config());
    let expected = common::run(&mut whole, 4);
    let mut trainer = trainer(fails_in(30), config());
    let mut found = common::run(&mut trainer, 2);
    let before = trainer.state().clone();
    assert!(!before.unfinished_groups.is_empty());
    trainer.step().unwrap_err();
    assert_eq!(*trainer.state(), before);
    found.extend(common::run(&mut trainer, 2));
    assert_eq!(found, expected);
}

/// Groups follow their prompts if rows are added, and are lost with them.
#[test]
fn groups_follow_their_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let mut before = trainer(digest, config());
    before.step().unwrap();
    let rows: Vec<usize> = before
        .state()
        .unfinished_groups
        .iter()
        .map(|g| g.row)
        .collect();
    before
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    let mut parts = parts(digest, config());
    // The first of them is removed, and the others move.
    parts.prompts.remove(rows[0]);
    let mut after = trainer_of(parts);
    after.load_state(folder.path()).unwrap();
    let kept: Vec<usize> = after
        .state()
        .unfinished_groups
        .iter()
        .map(|g| g.row)
        .collect();
    let expected = rows.iter().filter(|&&row| row != rows[0]);
    let expected: Vec<usize> = expected
        .map(|&row| row - usize::from(row > rows[0]))
        .collect();
    assert_eq!(kept, expected);
    assert!(kept.len() < rows.len());
    after.step().unwrap();
}

/// A generator that cannot end a call early gives the same kind of steps.
#[test]
fn a_generator_may_sample_all_completions_to_their_end() {
    let generator = Arc::new(Versions {
        is_whole: true,
        ..Versions::default()
    });
    let metrics = run(&config(), &generator, 4);
    assert!(metrics.iter().all(|m| m.policy["staleness_max"] <= 1.));
    let ended = generator.ended.lock().unwrap();
    // Of six groups in steps 1 and 3. The others train on what is left.
    assert_eq!(ended.len(), 2 * 6 * 4);
    for (_, _, completion) in ended.iter() {
        let versions = &completion.weight_versions;
        assert!(versions.iter().all(|version| *version == versions[0]));
    }
}

/// Samples the groups that started last first, so that the oldest ones would wait forever.
struct NewestFirst;

impl Generator for NewestFirst {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let partial = batch.partial.unwrap();
        let total: usize = batch.prompts.iter().map(|prompt| prompt.seeds.len()).sum();
        for place in (0..total).rev() {
            if (partial.is_enough)() {
                break;
            }
            let completion = Completion {
                tokens: vec![1 + place as u32 % 3, 0],
                drawn_log_probs: vec![-1.; 2],
                log_probs: Some(vec![-1.; 2]),
                written: None,
                weight_versions: vec![0; 2],
                finish_reason: FinishReason::StopToken,
                experts: None,
            };
            deliver(place, completion)?;
        }
        Ok(())
    }
}

#[test]
fn groups_are_continued_in_a_bounded_number_of_steps() {
    for max_continuations in [1, 2] {
        let mut config = config();
        config.rollout.max_continuations = max_continuations;
        let mut trainer = trainer_of(TrainerParts {
            generator: Some(Arc::new(NewestFirst)),
            ..parts(digest, config)
        });
        let mut oldest = 0;
        for step in 1..=6 {
            trainer.step().unwrap();
            let groups = trainer.state().unfinished_groups.iter();
            let ages = groups.map(|group| step - group.step);
            oldest = oldest.max(ages.max().unwrap());
        }
        assert_eq!(oldest, max_continuations - 1);
    }
}

#[rstest]
#[case(|c: &mut TrainConfig| c.rollout.in_flight_updates = true, "rollout.in_flight_updates: true, must be false with max_staleness 0, which updates no weights while it samples")]
#[case(|c: &mut TrainConfig| c.rollout.max_continuations = 0, "rollout.max_continuations: 0, must be at least 1")]
#[case(|c: &mut TrainConfig| c.rollout.prompts_in_flight = Some(2), "rollout.prompts_in_flight: 2, must be from prompts_per_step, 3, to twice as many")]
#[case(|c: &mut TrainConfig| c.rollout.prompts_in_flight = Some(7), "rollout.prompts_in_flight: 7, must be from prompts_per_step, 3, to twice as many")]
#[case(|c: &mut TrainConfig| (c.rollout.partial, c.rollout.prompts_in_flight) = (false, Some(4)), "rollout.prompts_in_flight: 4, must be absent unless partial is true")]
#[case(|c: &mut TrainConfig| c.recipe.policy_loss.rollout_correction = None, "rollout.partial: true, must be false without recipe.policy_loss.rollout_correction, which corrects for older weights")]
fn settings_that_do_not_fit_are_named(#[case] change: fn(&mut TrainConfig), #[case] words: &str) {
    let mut config = config();
    change(&mut config);
    let error = try_trainer(digest, config).err().unwrap();
    assert_eq!(format!("{error:#}"), words);
}

#[test]
fn several_ranks_are_refused() {
    let errors = on_ranks(2, |collective| {
        let parts = TrainerParts {
            collective,
            ..parts(|sample: &Sample| digest(sample), config())
        };
        candle_grpo_train::Trainer::new(parts)
            .err()
            .unwrap()
            .to_string()
    });
    let must =
        "rollout.partial: true, must be false with 2 processes, each of which ends its own part";
    assert_eq!(errors, [must; 2]);
}
