//! The loop over turns.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use anyhow::{Result, bail};
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_test_support::{WATCHDOG, cases, on_ranks, stay_on_cpu};
use candle_grpo_train::environment::{
    Append, Environment, EnvironmentFactory, EnvironmentLimits, EpisodeEnd, EpisodeStart,
    Observation, Step, Turn,
};
use candle_grpo_train::rollout::{Deliver, GenerationBatch, LocalGenerator};
use candle_grpo_train::run::StepRecord as _;
use candle_grpo_train::{
    ComputeDType, FinishReason, Generator, Interrupted, Progress, Rollout, Sample, SamplingConfig,
    TrainConfig, Trainer, TrainerParts, WeightedRewards, evaluate,
};
use proptest::prelude::*;
use rstest::rstest;

use super::{echo, environments, limited};
use crate::common::{
    self, END, config, model, parameters, pretrained, prompts, sampler, sampling, tokenizer,
    without_seconds,
};

fn long() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 20,
        ..sampling()
    }
}

fn play(texts: &[&str], generations: usize) -> Vec<Rollout> {
    let prompts = prompts(texts);
    let prompts: Vec<_> = prompts.iter().collect();
    sampler(long())
        .with_environments(environments(echo(3)))
        .sample(&prompts, generations, 4)
        .unwrap()
}

#[test]
fn a_trajectory_has_the_turns_of_the_policy_and_the_tokens_between() {
    let de = [4, 5];
    for rollout in play(&["abc", "d"], 3) {
        let episode = rollout.episode.unwrap();
        assert_eq!(episode.turns.len(), 3);
        assert_eq!(episode.end, EpisodeEnd::Done);
        let completion = &rollout.completion;
        let written = completion.written.as_ref().unwrap();
        let mut expected = Vec::new();
        for (number, turn) in episode.turns.iter().enumerate() {
            let tokens = &completion.tokens[turn.tokens.clone()];
            assert!(tokens.len() == 2 || tokens.last() == Some(&END));
            assert!(written[turn.tokens.clone()].iter().all(|w| *w));
            let sum: f64 = tokens.iter().map(|&t| f64::from(t)).sum();
            assert_eq!(turn.reward, sum.sin());
            expected.extend(tokens);
            if number < 2 {
                expected.extend(de);
                let after = turn.tokens.end..turn.tokens.end + 2;
                assert_eq!(written[after.clone()], [false; 2]);
                assert_eq!(completion.drawn_log_probs[after.clone()], [0.; 2]);
                assert_eq!(completion.log_probs.as_ref().unwrap()[after], [0.; 2]);
            }
        }
        assert_eq!(completion.tokens, expected);
        completion.validate(6).unwrap();
        let letters = expected.len() - 4 - expected.iter().filter(|t| **t == END).count();
        // A token that is not a stop token ends no text.
        assert_eq!(episode.metrics["letters"], letters as f64);
    }
}

#[test]
fn each_turn_is_what_a_single_request_with_its_seed_draws() {
    stay_on_cpu();
    // A turn's log-probs depend on the tokens before it.
    for rollout in play(&["abc"], 2) {
        let turns = &rollout.episode.as_ref().unwrap().turns;
        for turn in turns {
            let before = &rollout.completion.tokens[..turn.tokens.start];
            let prompt = candle_grpo_train::Prompt {
                tokens: [&rollout.prompt_tokens, before].concat(),
                ..prompts(&["abc"]).remove(0)
            };
            let greedy = SamplingConfig {
                greedy: true,
                max_new_tokens: 1,
                ..sampling()
            };
            let expected = sampler(greedy).sample(&[&prompt], 1, 0).unwrap().remove(0);
            let first = rollout.completion.tokens[turn.tokens.start];
            let log_prob = rollout.completion.log_probs.as_ref().unwrap()[turn.tokens.start];
            let best = expected.completion.log_probs.unwrap()[0];
            if expected.completion.tokens[0] == first {
                assert_eq!(log_prob, best)
            } else {
                assert!(log_prob <= best)
            }
        }
    }
}

#[test]
fn turns_have_random_numbers_of_their_own() {
    // With a uniform policy, a turn depends only on its random numbers.
    let rollouts = play(&["abc"], 16);
    let first_tokens = |turn: usize| -> Vec<u32> {
        let first =
            |r: &Rollout| r.completion.tokens[r.episode.as_ref().unwrap().turns[turn].tokens.start];
        rollouts.iter().map(first).collect()
    };
    assert_ne!(first_tokens(1), first_tokens(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(6, 60)))]
    #[test]
    fn a_trajectory_is_bit_identical_in_any_batch(
        batch in 1usize..9, generations in 1usize..4, part in 0usize..3,
    ) {
        stay_on_cpu();
        let prompts = prompts(&["abc", "d", "ee"]);
        let all = play(&["abc", "d", "ee"], generations);
        let config = SamplingConfig { max_batch_size: batch, ..long() };
        let some = sampler(config)
            .with_environments(environments(echo(3)))
            .sample(&[&prompts[part]], generations, 4)
            .unwrap();
        let expected = &all[part * generations..(part + 1) * generations];
        prop_assert_eq!(&some[..], expected);
    }
}

#[rstest]
#[case::turns(EnvironmentLimits { max_turns: 2, max_turn_tokens: Some(2), ..EnvironmentLimits::default() }, 20, EpisodeEnd::MaxTurns)]
#[case::tokens(EnvironmentLimits { max_turn_tokens: Some(2), ..EnvironmentLimits::default() }, 9, EpisodeEnd::MaxTokens)]
#[case::seconds(EnvironmentLimits { max_turn_tokens: Some(2), max_seconds: Some(1e-9), ..EnvironmentLimits::default() }, 20, EpisodeEnd::MaxSeconds)]
fn limits_end_trajectories(
    #[case] limits: EnvironmentLimits,
    #[case] max_new_tokens: usize,
    #[case] end: EpisodeEnd,
) {
    let sampler = sampler(SamplingConfig {
        max_new_tokens,
        ..sampling()
    });
    let sampler = sampler.with_environments(limited(echo(100), limits));
    let prompts = prompts(&["abc"]);
    for rollout in sampler.sample(&[&prompts[0]], 4, 0).unwrap() {
        let episode = rollout.episode.unwrap();
        let completion = rollout.completion;
        assert_eq!(episode.end, end);
        assert!(completion.tokens.len() <= max_new_tokens);
        // The last token is from the policy.
        assert!(completion.written.as_ref().is_none_or(|w| w[w.len() - 1]));
        match end {
            EpisodeEnd::MaxTurns => assert_eq!(episode.turns.len(), 2),
            EpisodeEnd::MaxSeconds => assert_eq!(episode.turns.len(), 1),
            EpisodeEnd::MaxTokens => {
                assert_eq!(completion.finish_reason, FinishReason::Length);
                // Two environment tokens and one policy token do not fit.
                assert!(completion.tokens.len() + 3 > max_new_tokens);
            }
            _ => unreachable!(),
        }
    }
}

/// Fails at the second turn of every second trajectory, or at each.
struct Fails {
    at: Option<usize>,
}

impl Environment for Fails {
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        if self.at == Some(turn.number) {
            bail!("broken pipe");
        }
        Ok(Step {
            reward: Some(1.),
            done: turn.number == 2,
            ..Step::go_on(Append::Text("e".to_owned()))
        })
    }
}

#[test]
fn a_failing_environment_ends_its_trajectory_only() {
    let started = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&started);
    let factory = move |start: &EpisodeStart<'_>| -> Result<Fails> {
        counter.fetch_add(1, Ordering::Relaxed);
        let at = (start.prompt.index == 1).then_some(1);
        Ok(Fails { at })
    };
    let limits = EnvironmentLimits {
        failure_reward: Some(-0.5),
        max_turn_tokens: Some(2),
        ..EnvironmentLimits::default()
    };
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let sampler = sampler(long()).with_environments(limited(factory, limits));
    let rollouts = sampler.sample(&prompts, 2, 0).unwrap();
    assert_eq!(started.load(Ordering::Relaxed), 4);
    for rollout in rollouts {
        let episode = rollout.episode.unwrap();
        if rollout.prompt_index == 1 {
            assert_eq!(episode.end, EpisodeEnd::Failed("broken pipe".to_owned()));
            assert_eq!(episode.turns.len(), 2);
            assert_eq!(episode.reward(), -0.5);
        } else {
            assert_eq!(
                (episode.end.clone(), episode.reward()),
                (EpisodeEnd::Done, 3.)
            );
        }
    }
    let failing = [prompts[1].clone()];
    let none = WeightedRewards::new();
    let error = evaluate(&sampler, &failing, 2, &none, &tokenizer(), 0).unwrap_err();
    assert_eq!(error.to_string(), ALL_FAILED.replace('N', "2"));
}

/// Scores for a failed, an unrewarded and a rewarded trajectory. A reward function adds 1.
#[rstest]
#[case::excluded(true, None, Some(0.), [None, Some(1.), Some(0.)])]
#[case::scored(true, Some(-2.), None, [Some(-2.), None, Some(0.)])]
#[case::excluded_without_rewards(false, None, None, [None, Some(1.), Some(1.)])]
#[case::scored_without_rewards(false, Some(-2.), None, [Some(-2.), Some(1.), Some(1.)])]
fn a_trajectory_without_a_reward_has_that_of_the_limits_or_no_score(
    #[case] gives_rewards: bool,
    #[case] failure_reward: Option<f64>,
    #[case] missing_reward: Option<f64>,
    #[case] expected: [Option<f32>; 3],
) {
    struct Ends(u64);
    struct Starts(bool);
    impl EnvironmentFactory for Starts {
        fn start(&self, start: &EpisodeStart<'_>) -> Result<Box<dyn Environment>> {
            let rewarded = if self.0 { 2 } else { 1 };
            Ok(Box::new(Ends(start.prompt.index.min(rewarded))))
        }

        fn gives_rewards(&self) -> bool {
            self.0
        }
    }
    impl Environment for Ends {
        fn step(&mut self, _: &Turn<'_>) -> Result<Step> {
            match self.0 {
                0 => bail!("broken pipe"),
                1 => Ok(Step {
                    done: true,
                    ..Step::default()
                }),
                _ => Ok(Step::done(-1.)),
            }
        }
    }
    let limits = EnvironmentLimits {
        failure_reward,
        missing_reward,
        ..EnvironmentLimits::default()
    };
    let prompts = prompts(&["abc", "d", "e"]);
    let sampler = sampler(long()).with_environments(limited(Starts(gives_rewards), limits));
    let one = WeightedRewards::new().with("one", 1., |_: &Sample| 1.);
    let found = evaluate(&sampler, &prompts, 1, &one, &tokenizer(), 0).unwrap();
    let rewards: Vec<_> = found.samples.iter().map(|sample| sample.reward).collect();
    assert_eq!(rewards, expected);
}

const ALL_FAILED: &str =
    "environment: failed in all N trajectories, in the first one with: broken pipe";

#[test]
fn a_step_fails_if_the_environments_of_all_ranks_do() {
    stay_on_cpu();
    let failing = |prompts: &'static [u64]| {
        let factory = move |start: &EpisodeStart<'_>| -> Result<Fails> {
            let at = prompts.contains(&start.prompt.index).then_some(0);
            Ok(Fails { at })
        };
        let environments = environments(factory);
        on_ranks(3, |collective| {
            let mut trainer = common::trainer_of(TrainerParts {
                collective,
                environments: Some(environments.clone()),
                ..common::parts(WeightedRewards::new(), training())
            });
            let metrics = trainer.step();
            metrics
                .map(without_seconds)
                .map_err(|error| format!("{error:#}"))
        })
    };
    for error in failing(&[0, 1, 2, 3, 4]) {
        assert_eq!(
            error.unwrap_err(),
            format!("step 1: {}", ALL_FAILED.replace('N', "12"))
        );
    }
    // All of one rank's may fail.
    let found = failing(&[0, 1, 2, 3]);
    assert!(found.iter().all(|metrics| metrics == &found[0]));
    match &found[0] {
        Ok(metrics) => assert!(metrics.environment["failed"] > 0.5, "{metrics:?}"),
        Err(error) => assert!(error.contains("12 trajectories"), "{error}"),
    }
}

#[test]
fn ranks_draw_the_trajectories_of_one_rank() {
    stay_on_cpu();
    let log = candle_grpo_train::run::RolloutLogConfig::default();
    let first = |trainer: &mut Trainer| {
        let metrics = trainer.step().unwrap();
        (metrics.environment, trainer.rollouts(&log).unwrap())
    };
    let parts = || TrainerParts {
        environments: Some(environments(echo(3))),
        ..common::parts(last_letters, training())
    };
    let alone = first(&mut common::trainer_of(parts()));
    for world_size in [2, 3] {
        let all = on_ranks(world_size, |collective| {
            first(&mut common::trainer_of(TrainerParts {
                collective,
                ..parts()
            }))
        });
        for (environment, records) in all {
            assert_eq!(environment, alone.0);
            for (found, expected) in records.iter().zip(&alone.1) {
                assert_eq!(found.turns, expected.turns);
                assert_eq!(found.rewards, expected.rewards);
            }
            assert_eq!(records.len(), alone.1.len());
        }
    }
}

/// Responds with the given step.
struct Answers(Step);

impl Environment for Answers {
    fn step(&mut self, _: &Turn<'_>) -> Result<Step> {
        Ok(self.0.clone())
    }
}

#[rstest]
#[case(Step::done(f64::NAN), "reward NaN")]
#[case(Step::done(1e300), "must be finite")]
#[case(Step::go_on(Append::Tokens(vec![6])), "tokens: Some(6), must be below the vocabulary size 6")]
#[case(Step::go_on(Append::Text("?".to_owned())), "the tokenizer has no token")]
#[case(Step::go_on(Append::user("a")), "the model has no chat template")]
fn wrong_answers_are_failures(#[case] step: Step, #[case] words: &str) {
    let factory = move |_: &EpisodeStart<'_>| -> Result<Answers> { Ok(Answers(step.clone())) };
    let sampler = sampler(long()).with_environments(environments(factory));
    let prompts = prompts(&["abc"]);
    let rollout = sampler.sample(&[&prompts[0]], 1, 0).unwrap().remove(0);
    let EpisodeEnd::Failed(message) = rollout.episode.unwrap().end else {
        panic!("no failure");
    };
    assert!(message.contains(words), "{message}");
}

/// Starts with a number of letters that depends on the seed, and returns the trajectory's number as
/// reward.
struct Begins {
    seed: u64,
    episode: u64,
}

impl Environment for Begins {
    fn reset(&mut self) -> Result<Observation> {
        Ok(Observation {
            append: Append::Text("a".repeat(1 + self.seed as usize % 7)),
            ..Observation::default()
        })
    }

    fn step(&mut self, _: &Turn<'_>) -> Result<Step> {
        Ok(Step::done(self.episode as f64 / (1u64 << 53) as f64))
    }
}

#[test]
fn the_trajectories_of_a_group_begin_in_the_same_state() {
    let draw = |stream: u64| {
        let factory = |start: &EpisodeStart<'_>| -> Result<Begins> {
            let (seed, episode) = (start.seed, start.episode);
            Ok(Begins { seed, episode })
        };
        let prompts = prompts(&["b", "b", "b", "b"]);
        let prompts: Vec<_> = prompts.iter().collect();
        let sampler = sampler(long()).with_environments(environments(factory));
        sampler.sample(&prompts, 4, stream).unwrap()
    };
    let (first, second) = (draw(0), draw(1));
    assert_eq!(first, draw(0));
    let mut episodes = Vec::new();
    let mut lengths = Vec::new();
    for group in first.chunks(4).chain(second.chunks(4)) {
        lengths.push(group[0].prompt_tokens.len());
        for rollout in group {
            assert_eq!(rollout.prompt_tokens, group[0].prompt_tokens);
            let (letter, rest) = rollout.prompt_tokens.split_first().unwrap();
            assert_eq!(*letter, 2);
            assert!(!rest.is_empty() && rest.iter().all(|&token| token == 1));
            episodes.push(rollout.episode.as_ref().unwrap().reward());
        }
    }
    // Other prompts and other steps start differently.
    assert!(
        lengths[..4].iter().any(|&length| length != lengths[0]),
        "{lengths:?}"
    );
    assert_ne!(lengths[..4], lengths[4..]);
    episodes.sort_by(f64::total_cmp);
    episodes.dedup();
    assert_eq!(episodes.len(), 32);
}

#[test]
fn a_greedy_baseline_begins_in_the_state_of_its_group() {
    let starts = Arc::new(Mutex::new(BTreeMap::<_, usize>::new()));
    let recorder = Arc::clone(&starts);
    let factory = move |start: &EpisodeStart<'_>| -> Result<Begins> {
        let (seed, episode) = (start.seed, start.episode);
        let mut starts = recorder.lock().unwrap();
        *starts.entry((start.prompt.index, seed)).or_default() += 1;
        Ok(Begins { seed, episode })
    };
    let mut config = training();
    config.recipe.advantage = AdvantageName::Remax.into();
    // The rewards are uniform in [0, 1), so half of the groups are sampled in later rounds.
    config.recipe.group_filter = Some(GroupFilter {
        mean_above: Some(0.5),
        ..GroupFilter::default()
    });
    config.max_sampling_batches = 10;
    let mut trainer = common::trainer_of(TrainerParts {
        environments: Some(environments(factory)),
        ..common::parts(WeightedRewards::new(), config)
    });
    let metrics = trainer.step().unwrap();
    assert!(metrics.sampled_groups > metrics.kept_groups, "{metrics:?}");
    let starts = starts.lock().unwrap();
    let with = |count: usize| starts.values().filter(|&&found| found == count).count();
    assert_eq!(with(5), metrics.kept_groups);
    assert_eq!(with(4), metrics.sampled_groups - metrics.kept_groups);
    assert_eq!(starts.len(), metrics.sampled_groups);
}

/// Counts units.
#[derive(Default)]
struct Units {
    units: AtomicUsize,
    canceled: bool,
}

impl Progress for Units {
    fn advance(&self, units: usize, _: usize) {
        self.units.fetch_add(units, Ordering::Relaxed);
    }

    fn is_canceled(&self) -> bool {
        self.canceled
    }
}

#[test]
fn progress_counts_trajectories_and_cancels() {
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let sampler = |progress: &Arc<Units>| {
        let sampler = sampler(long()).with_environments(environments(echo(3)));
        sampler.with_progress(progress.clone())
    };
    let progress = Arc::new(Units::default());
    sampler(&progress).sample(&prompts, 3, 0).unwrap();
    assert_eq!(progress.units.load(Ordering::Relaxed), 6);
    let progress = Arc::new(Units {
        canceled: true,
        ..Units::default()
    });
    let error = sampler(&progress).sample(&prompts, 3, 0).unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
}

/// An [`Echo`](super::Echo) that is counted while it exists.
struct Counted(
    super::Echo,
    Arc<AtomicUsize>,
    Arc<Mutex<Vec<(usize, usize)>>>,
);

impl Environment for Counted {
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        let alive = self.1.load(Ordering::SeqCst);
        self.2.lock().unwrap().push((turn.number, alive));
        self.0.step(turn)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn an_environment_ends_with_its_trajectory() {
    let (started, alive) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (own_alive, own_seen) = (alive.clone(), seen.clone());
    // Of three trajectories, the first ends after one turn, the second after two.
    let factory = move |_: &EpisodeStart<'_>| -> Result<Counted> {
        let turns = 1 + started.fetch_add(1, Ordering::SeqCst);
        own_alive.fetch_add(1, Ordering::SeqCst);
        let echo = super::Echo { turns };
        Ok(Counted(echo, own_alive.clone(), own_seen.clone()))
    };
    let prompts = prompts(&["abc"]);
    let sampler = sampler(long()).with_environments(environments(factory));
    sampler.sample(&[&prompts[0]], 3, 0).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1 + 2 + 3, "{seen:?}");
    let expected = |turn: usize| 3 - turn;
    assert!(
        seen.iter().all(|&(turn, alive)| alive <= expected(turn)),
        "{seen:?}"
    );
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

/// Records how many requests it gets at once.
struct Batches(LocalGenerator, Arc<Mutex<Vec<usize>>>);

impl Generator for Batches {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let seeds = batch.prompts.iter().map(|prompt| prompt.seeds.len());
        self.1.lock().unwrap().push(seeds.sum());
        self.0.generate(batch, deliver)
    }
}

#[test]
fn open_trajectories_are_drawn_together() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let local = LocalGenerator::new(&model(), &parameters()).unwrap();
    let generator = Arc::new(Batches(local, Arc::clone(&calls)));
    let factory = |start: &EpisodeStart<'_>| -> Result<super::Echo> {
        Ok(super::Echo {
            turns: 1 + start.prompt.index as usize,
        })
    };
    let prompts = prompts(&["abc", "d", "ee"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let sampler = sampler(long()).with_generator(generator);
    let sampler = sampler.with_environments(environments(factory));
    sampler.sample(&prompts, 2, 0).unwrap();
    assert_eq!(*calls.lock().unwrap(), [6, 4, 2]);
}

/// The last turn, and how many tokens the policy wrote.
fn last_letters(sample: &Sample) -> f32 {
    sample.completion.len() as f32 + 100. * sample.completion_tokens.len() as f32
}

#[test]
fn rewards_see_the_last_turn_and_what_the_policy_wrote() {
    let sampler = sampler(long()).with_environments(environments(echo(2)));
    let prompts = prompts(&["abc", "d"]);
    let evaluation = evaluate(&sampler, &prompts, 2, &last_letters, &tokenizer(), 0).unwrap();
    let all: Vec<_> = prompts.iter().collect();
    let rollouts = sampler.sample(&all, 2, 0).unwrap();
    for (sample, rollout) in evaluation.samples.iter().zip(&rollouts) {
        let episode = rollout.episode.as_ref().unwrap();
        let written: usize = episode.turns.iter().map(|turn| turn.tokens.len()).sum();
        let last = &rollout.completion.tokens[episode.turns[1].tokens.clone()];
        let letters = last.iter().filter(|&&token| token != END).count();
        let expected = letters as f64 + 100. * written as f64 + episode.reward();
        assert!((f64::from(sample.reward.unwrap()) - expected).abs() < 1e-4);
        assert_eq!(sample.response_length, written + 2);
        // All of the trajectory is shown.
        assert!(sample.completion.contains("de"), "{}", sample.completion);
    }
}

fn training() -> TrainConfig {
    let mut config = config();
    config.sampling = long();
    config.optimizer.learning_rate = 1e-2;
    config
}

#[test]
fn a_trainer_reports_turns_and_needs_no_reward_function() {
    let mut trainer = common::trainer_of(TrainerParts {
        environments: Some(environments(echo(3))),
        ..common::parts(WeightedRewards::new(), training())
    });
    let metrics = trainer.step().unwrap();
    assert!(metrics.grad_norm.unwrap() > 0.);
    assert_eq!(metrics.environment["turns"], 3.);
    assert_eq!(metrics.environment["failed"], 0.);
    let reward = metrics.environment["reward"];
    assert!((metrics.reward_mean - reward).abs() < 1e-6, "{metrics:?}");
    let scalars = metrics.scalars().unwrap();
    assert!(scalars.contains(&("environment/turns".to_owned(), 3.)));
}

#[test]
fn no_reward_at_all_is_an_error() {
    let mut trainer = common::trainer(WeightedRewards::new(), training());
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(error.contains("rewards: no components"), "{error}");
}

#[test]
fn a_resumed_run_with_an_environment_is_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = || {
        common::trainer_of(TrainerParts {
            environments: Some(environments(echo(3))),
            ..common::parts(last_letters, training())
        })
    };
    let mut whole = trainer();
    let mut expected = Vec::new();
    for step in 1..=4 {
        expected.push(without_seconds(whole.step().unwrap()));
        if step == 2 {
            let dtype = ComputeDType::F32;
            whole
                .write_checkpoint(folder.path(), &pretrained(), dtype)
                .unwrap();
        }
    }
    let mut resumed = trainer();
    resumed.load_state(folder.path()).unwrap();
    for expected in &expected[2..] {
        assert_eq!(&without_seconds(resumed.step().unwrap()), expected);
    }
}

#[test]
fn trajectories_can_be_drawn_ahead() {
    stay_on_cpu();
    let mut config = training();
    config.rollout.max_staleness = 1;
    config.recipe.policy_loss.rollout_correction = Some(Default::default());
    let mut trainer = common::trainer_of(TrainerParts {
        environments: Some(environments(echo(2))),
        ..common::parts(last_letters, config)
    });
    for _ in 0..3 {
        assert_eq!(trainer.step().unwrap().environment["turns"], 2.);
    }
}

#[test]
fn slow_environments_answer_at_the_same_time() {
    /// Responds once eight environments were asked.
    struct Slow(Arc<(Mutex<usize>, Condvar)>);
    impl Environment for Slow {
        fn step(&mut self, _: &Turn<'_>) -> Result<Step> {
            let (asked, changed) = &*self.0;
            let mut asked = asked.lock().unwrap();
            *asked += 1;
            changed.notify_all();
            let waited = changed.wait_timeout_while(asked, WATCHDOG, |asked| *asked < 8);
            assert!(!waited.unwrap().1.timed_out(), "one after the other");
            Ok(Step::done(0.))
        }
    }
    let asked = Arc::default();
    let factory = move |_: &EpisodeStart<'_>| -> Result<Slow> { Ok(Slow(Arc::clone(&asked))) };
    let sampler = sampler(long()).with_environments(environments(factory));
    let prompts = prompts(&["abc"]);
    sampler.sample(&[&prompts[0]], 8, 0).unwrap();
}

/// Says something about each turn but the first.
struct Comments;

impl Environment for Comments {
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        Ok(Step {
            done: turn.number == 2,
            feedback: (turn.number > 0).then(|| format!("turn {}", turn.number)),
            ..Step::default()
        })
    }
}

#[test]
fn the_feedback_of_all_turns_is_that_of_the_trajectory() {
    let factory = |_: &EpisodeStart<'_>| -> Result<Comments> { Ok(Comments) };
    let sampler = sampler(long()).with_environments(environments(factory));
    let prompts = prompts(&["abc"]);
    let rollout = sampler.sample(&[&prompts[0]], 1, 0).unwrap().remove(0);
    let feedback = rollout.episode.unwrap().feedback;
    assert_eq!(feedback.as_deref(), Some("turn 1\nturn 2"));
}
