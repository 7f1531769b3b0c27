//! Trajectories in which the policy plays several roles.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use candle_core::Device;
use candle_grpo_core::AdvantagePipeline;
use candle_grpo_core::advantage::RoleBaselines;
use candle_grpo_core::rewards::CostPenalty;
use candle_grpo_loss::PositiveNll;
use candle_grpo_train::environment::{
    Environment, Episode, EpisodeEnd, EpisodeStart, EpisodeTurn, Observation, Step, Turn,
};
use candle_grpo_train::learn::TrainerState;
use candle_grpo_train::learn::step::{self, RolloutGroups, StepBatch};
use candle_grpo_train::rollout::{Play, PromptRequest, Row, Trajectories};
use candle_grpo_train::{
    Completion, ErrorKind, FinishReason, Prompt, Rollout, TrainConfig, TrainerParts,
    WeightedRewards,
};
use rstest::rstest;

use super::environments;
use crate::common::{config, parts, prompts, sampling, tokenizer, trainer_of};

/// A trajectory with rows in these roles, and the reward of each.
type Roles<'a> = (&'a [&'a str], &'a [(&'a str, f64)], f64);

fn completion(length: usize) -> Completion {
    Completion {
        tokens: vec![1; length],
        drawn_log_probs: vec![-1.; length],
        log_probs: None,
        written: None,
        weight_versions: vec![0; length],
        finish_reason: FinishReason::StopToken,
        experts: None,
    }
}

fn trajectory((rows, rewards, reward): &Roles<'_>) -> Rollout {
    let row = |(at, role): (usize, &&str)| Row {
        prompt_tokens: vec![2; at + 1],
        completion: completion(at + 1),
        role: (!role.is_empty()).then(|| (*role).to_owned()),
    };
    let mut branches: Vec<Row> = rows.iter().enumerate().map(row).collect();
    let last = branches.pop().unwrap();
    let rewards = rewards.iter();
    let rewards = rewards.map(|(role, reward)| ((*role).to_owned(), *reward));
    Rollout {
        prompt_index: 0,
        sample_index: 0,
        prompt_tokens: last.prompt_tokens,
        role: last.role,
        episode: Some(Episode {
            turns: vec![EpisodeTurn {
                tokens: 0..last.completion.tokens.len(),
                reward: if reward.is_nan() { 0. } else { *reward },
                state: 0,
            }],
            end: EpisodeEnd::Done,
            gives_rewards: true,
            excluded: reward.is_nan(),
            unrewarded: false,
            metrics: BTreeMap::new(),
            feedback: None,
            role_rewards: rewards.collect(),
        }),
        completion: last.completion,
        branches,
    }
}

/// The advantages of all rows, in groups of two trajectories.
fn advantages(
    all: &[Roles<'_>],
    config: &TrainConfig,
    state: &mut TrainerState,
) -> Result<(Vec<f32>, StepBatch)> {
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<&Prompt> = prompts.iter().take(all.len() / 2).collect();
    let mut groups = RolloutGroups {
        num_generations: 2,
        rows: (0..prompts.len()).collect(),
        rollouts: all.iter().map(trajectory).collect(),
        scores: Vec::new(),
        components: Vec::new(),
        greedy_scores: None,
    };
    let none = WeightedRewards::new();
    step::score(&mut groups, &prompts, &none, &sampling(), &tokenizer())?;
    let mut batch = StepBatch::new(groups, config, &Device::Cpu)?;
    step::advantages(&mut batch, None, config, state)?;
    let found = batch.advantages().unwrap().to_vec1()?;
    Ok((found, batch))
}

fn centered() -> TrainConfig {
    let mut config = config();
    config.recipe.advantage = AdvantagePipeline::dr_grpo();
    config
}

const BOTH: &[&str] = &["a", "b"];

#[test]
fn roles_are_compared_with_themselves() {
    let config = centered();
    let all: [Roles<'_>; 4] = [
        (BOTH, &[("a", 1.), ("b", 0.)], 0.5),
        (BOTH, &[("a", 0.), ("b", 4.)], 2.),
        // Two rows of one role, and none of the other.
        (&["a", "a"], &[("a", 2.)], 7.),
        (&["b", "a"], &[("a", 4.), ("b", 5.)], 7.),
    ];
    let (found, batch) = advantages(&all, &config, &mut TrainerState::new(&config)).unwrap();
    // The only one of its role in a group has no advantage.
    assert_eq!(found, [0.5, -2., -0.5, 2., -1., -1., 0., 1.]);
    let means: Vec<f32> = batch
        .mean_advantages()
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    // Over the tokens of a trajectory's rows: one of the first, two of the second.
    let mean = |first: f32, second: f32| (first + 2. * second) / 3.;
    assert_eq!(means, [mean(0.5, -2.), mean(-0.5, 2.), -1., mean(0., 1.)]);
    let metrics = batch.metrics();
    let mean = |name: &str| metrics.get(&format!("role_reward/{name}")).unwrap();
    assert_eq!((mean("a"), mean("b")), (7. / 4., 3.));
}

#[test]
fn a_role_without_a_reward_of_its_own_has_that_of_its_trajectory() {
    let config = centered();
    let all: [Roles<'_>; 2] = [(BOTH, &[("a", 1.)], 3.), (BOTH, &[("a", 0.)], 1.)];
    let (found, _) = advantages(&all, &config, &mut TrainerState::new(&config)).unwrap();
    assert_eq!(found, [0.5, 1., -0.5, -1.]);
    // Rows without a role are compared with each other.
    let all: [Roles<'_>; 2] = [(&["a", ""], &[("a", 1.)], 3.), (&["a", ""], &[], 1.)];
    let (found, _) = advantages(&all, &config, &mut TrainerState::new(&config)).unwrap();
    assert_eq!(found, [0., 1., 0., -1.]);
}

#[test]
fn an_excluded_trajectory_has_no_role() {
    let config = centered();
    let all: [Roles<'_>; 4] = [
        (BOTH, &[("a", 9.)], f64::NAN),
        (BOTH, &[("a", 1.)], 1.),
        (BOTH, &[("a", 1.)], 1.),
        (BOTH, &[("a", 2.)], 1.),
    ];
    let (found, batch) = advantages(&all, &config, &mut TrainerState::new(&config)).unwrap();
    assert_eq!(found, [0., 0., 0., 0., -0.5, 0., 0.5, 0.]);
    assert_eq!(batch.metrics().get("role_reward/a"), Some(4. / 3.));
}

#[test]
fn a_baseline_is_the_moving_average_of_its_role() {
    let mut config = config();
    config.role_baselines = Some(RoleBaselines::new(0.5).unwrap());
    let mut state = TrainerState::new(&config);
    let all: [Roles<'_>; 2] = [
        (BOTH, &[("a", 1.), ("b", -1.)], 0.),
        (BOTH, &[("a", 1.), ("b", -3.)], f64::NAN),
    ];
    let (found, batch) = advantages(&all, &config, &mut state).unwrap();
    assert_eq!(found, [1., -1., 0., 0.]);
    assert_eq!(batch.metrics().get("role_baseline/b"), Some(-0.5));
    // The state continues in the next step, also through a checkpoint.
    let mut state: TrainerState =
        serde_json::from_value(serde_json::to_value(&state).unwrap()).unwrap();
    let all: [Roles<'_>; 2] = [
        (BOTH, &[("a", 1.), ("b", -1.)], 0.),
        (BOTH, &[("a", 0.), ("b", 1.)], 0.),
    ];
    let (found, _) = advantages(&all, &config, &mut state).unwrap();
    assert_eq!(found, [0.5, -0.5, -0.75, 1.75]);
    // Without roles, all trajectories have one average.
    let all: [Roles<'_>; 2] = [(&[""], &[], 2.), (&[""], &[], 2.)];
    let mut state = TrainerState::new(&config);
    let (found, batch) = advantages(&all, &config, &mut state).unwrap();
    assert_eq!(found, [2., 1.]);
    assert_eq!(batch.metrics().get("role_baseline"), Some(1.5));
}

#[rstest]
#[case::decay(r#"{"decay": 1.5}"#, "role_baselines.decay: 1.5, must be from 0 to 1")]
#[case::key(r#"{"decay": 0.5, "rate": 1}"#, "unknown field `rate`")]
fn wrong_baselines_are_refused(#[case] options: &str, #[case] words: &str) {
    let read = || -> Result<()> {
        let config = TrainConfig {
            role_baselines: Some(serde_json::from_str(options)?),
            ..config()
        };
        config.validate()
    };
    let error = format!("{:#}", read().unwrap_err());
    assert!(error.contains(words), "{error}");
}

#[test]
fn advantages_of_turns_refuse_roles() {
    let mut config = config();
    config.turn_advantage = serde_json::from_str(r#"{"step_returns": {}}"#).unwrap();
    let all: [Roles<'_>; 2] = [(&["a"], &[], 2.), (&["b"], &[], 1.)];
    let error = advantages(&all, &config, &mut TrainerState::new(&config)).unwrap_err();
    let kind = ErrorKind::of(&error);
    assert!(matches!(kind, ErrorKind::Invalid(_)));
    assert_eq!(
        format!("{error:#}"),
        "turn_advantage: given, must be absent, as rows have roles"
    );
}

/// Scores and turns are those of the whole trajectory.
#[rstest]
#[case::positive(
    |config: &mut TrainConfig| config.recipe.policy_loss.positive_nll = Some(PositiveNll { coef: 0.1, score_above: 0. }),
    "recipe.policy_loss.positive_nll"
)]
#[case::turns(
    |config: &mut TrainConfig| {
        let penalty = CostPenalty { output_tokens: 0., input_tokens: 0., turns: 0.1 };
        config.recipe.length_penalty = Some(penalty);
    },
    "recipe.length_penalty.turns"
)]
fn settings_that_read_trajectories_refuse_roles(
    #[case] set: fn(&mut TrainConfig),
    #[case] field: &str,
) {
    let mut config = centered();
    set(&mut config);
    let all: [Roles<'_>; 2] = [(BOTH, &[], 2.), (BOTH, &[], 1.)];
    let error = advantages(&all, &config, &mut TrainerState::new(&config)).unwrap_err();
    let kind = ErrorKind::of(&error);
    assert!(
        matches!(kind, ErrorKind::Invalid(invalid) if invalid.field == field),
        "{kind:?}"
    );
    // Without roles, they are as before.
    let all: [Roles<'_>; 2] = [(&[""], &[], 2.), (&[""], &[], 1.)];
    advantages(&all, &config, &mut TrainerState::new(&config)).unwrap();
}

#[test]
fn baselines_refuse_an_advantage_with_inputs() {
    let mut config = config();
    config.role_baselines = Some(RoleBaselines::new(0.5).unwrap());
    config.validate().unwrap();
    config.recipe.advantage = AdvantagePipeline::remax();
    let error = config.validate().unwrap_err().to_string();
    let words = "role_baselines: given, must be absent with a recipe.advantage that needs";
    assert!(error.starts_with(words), "{error}");
}

/// An environment that plays the policy's opponent: the policy is the first or the second player.
struct Opponent(u64);

impl Environment for Opponent {
    fn reset(&mut self) -> Result<Observation> {
        Ok(Observation {
            role: Some(
                if self.0.is_multiple_of(2) {
                    "first"
                } else {
                    "second"
                }
                .to_owned(),
            ),
            ..Observation::default()
        })
    }

    fn step(&mut self, _: &Turn<'_>) -> Result<Step> {
        Ok(Step::done((self.0 % 2) as f64))
    }
}

#[test]
fn an_environment_names_the_role_at_the_start() {
    let start = |start: &EpisodeStart<'_>| -> Result<Opponent> { Ok(Opponent(start.episode)) };
    let mut trainer = trainer_of(TrainerParts {
        environments: Some(environments(start)),
        ..parts(WeightedRewards::new(), config())
    });
    let metrics = trainer.step().unwrap();
    // Each role has one reward, so it has no signal, although trajectories differ.
    assert!(metrics.reward_std > 0.);
    assert_eq!(metrics.updates, 0, "{metrics:?}");
}

/// Trajectories with two rows, each in a role with another prompt and the reverse reward.
struct Rivals;

const LETTERS: [(&str, u32); 2] = [("a", 1), ("b", 2)];

impl Trajectories for Rivals {
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>> {
        let seeds = play.prompts.iter().zip(play.requests);
        let seeds =
            seeds.flat_map(|(prompt, request)| request.seeds.iter().map(|seed| (*prompt, *seed)));
        let seeds: Vec<_> = seeds.collect();
        let prompts: Vec<Vec<u32>> = LETTERS
            .iter()
            .flat_map(|(_, letter)| {
                let with = |(prompt, _): &(&Prompt, _)| [&prompt.tokens[..], &[*letter]].concat();
                seeds.iter().map(with).collect::<Vec<_>>()
            })
            .collect();
        let requests: Vec<PromptRequest<'_>> = prompts
            .iter()
            .zip(seeds.iter().cycle())
            .map(|(tokens, (_, seed))| PromptRequest {
                tokens,
                seeds: vec![*seed],
                max_new_tokens: play.sampling.max_new_tokens,
            })
            .collect();
        let drawn = (play.draw)(&requests, &[])?;
        let (firsts, seconds) = drawn.split_at(seeds.len());
        let (first_prompts, second_prompts) = prompts.split_at(seeds.len());
        let pairs = firsts.iter().zip(seconds).zip(&seeds).enumerate();
        let all = pairs.map(|(at, ((first, second), (prompt, seed)))| {
            let excess = |completion: &Completion| {
                let one = |&token: &u32| match token {
                    3 => 1.,
                    4 => -1.,
                    _ => 0.,
                };
                completion.tokens.iter().map(one).sum::<f64>() / completion.tokens.len() as f64
            };
            let rewards = [excess(first), -excess(second)];
            let names = LETTERS.iter().map(|(name, _)| (*name).to_owned());
            Rollout {
                prompt_index: prompt.index,
                sample_index: seed.sample as usize,
                prompt_tokens: second_prompts[at].clone(),
                completion: second.clone(),
                role: Some("b".to_owned()),
                episode: Some(Episode {
                    turns: vec![EpisodeTurn {
                        tokens: 0..second.tokens.len(),
                        reward: rewards.iter().sum(),
                        state: 0,
                    }],
                    end: EpisodeEnd::Done,
                    gives_rewards: true,
                    excluded: false,
                    unrewarded: false,
                    metrics: BTreeMap::new(),
                    feedback: None,
                    role_rewards: names.zip(rewards).collect(),
                }),
                branches: vec![Row {
                    prompt_tokens: first_prompts[at].clone(),
                    completion: first.clone(),
                    role: Some("a".to_owned()),
                }],
            }
        });
        Ok(all.collect())
    }

    fn gives_rewards(&self) -> bool {
        true
    }
}

#[rstest]
#[case::groups(None)]
#[case::baselines(Some(RoleBaselines::new(0.9).unwrap()))]
fn each_role_learns_its_own_reward(#[case] role_baselines: Option<RoleBaselines>) {
    let mut config = TrainConfig {
        role_baselines,
        num_generations: 8,
        ..config()
    };
    config.optimizer.learning_rate = 5e-3;
    let mut trainer = trainer_of(TrainerParts {
        environments: Some(Arc::new(Rivals)),
        ..parts(WeightedRewards::new(), config)
    });
    let steps = (0..30).map(|_| trainer.step().unwrap());
    let rewards: Vec<[f64; 2]> = steps
        .map(|metrics| {
            let reward = |role: &str| metrics.policy[&format!("role_reward/{role}")];
            [reward("a"), reward("b")]
        })
        .collect();
    let mean = |part: &[[f64; 2]], role: usize| {
        part.iter().map(|rewards| rewards[role]).sum::<f64>() / part.len() as f64
    };
    let (first, last) = (&rewards[..5], &rewards[25..]);
    for role in 0..2 {
        let (before, after) = (mean(first, role), mean(last, role));
        assert!(after > before + 0.05, "{role}: {before} {after}");
    }
}
