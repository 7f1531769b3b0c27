//! Trajectories with branches.

use std::sync::Arc;

use anyhow::Result;
use candle_grpo_loss::{Aggregation, PolicyLoss, Recipe};
use candle_grpo_train::environment::{Environments, EpisodeTurn};
use candle_grpo_train::learn::{
    OldLogProbs, Reference, StepReturns, TeacherPart, TokenWeight, TurnAdvantage,
};
use candle_grpo_train::rollout::{Play, Row, Trajectories};
use candle_grpo_train::run::{BranchPlace, RolloutLogConfig, RolloutRecord, TurnRole};
use candle_grpo_train::{
    Completion, ComputeDType, ErrorKind, Rollout, StepMetrics, TrainConfig, Trainer, TrainerParts,
    WeightedRewards, evaluate,
};
use rstest::rstest;

use super::{echo, environments};
use crate::common::{config, model, parameters, parts, prompts, sampling, tokenizer, trainer_of};

/// Environments whose turns are rows of their own, as if each had a conversation of its own.
struct Apart(Arc<Environments>);

impl Trajectories for Apart {
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>> {
        Ok(self.0.play(play)?.into_iter().map(apart).collect())
    }

    fn gives_rewards(&self) -> bool {
        self.0.gives_rewards()
    }
}

fn apart(whole: Rollout) -> Rollout {
    let mut episode = whole.episode.unwrap();
    let all = &whole.completion;
    let row = |turn: &EpisodeTurn| {
        let tokens = turn.tokens.clone();
        Row {
            prompt_tokens: [&whole.prompt_tokens, &all.tokens[..tokens.start]].concat(),
            completion: Completion {
                tokens: all.tokens[tokens.clone()].to_vec(),
                drawn_log_probs: all.drawn_log_probs[tokens.clone()].to_vec(),
                log_probs: (all.log_probs.as_ref()).map(|all| all[tokens.clone()].to_vec()),
                written: None,
                weight_versions: all.weight_versions[tokens].to_vec(),
                finish_reason: all.finish_reason,
                experts: None,
            },
            role: None,
        }
    };
    let mut branches: Vec<Row> = episode.turns.iter().map(row).collect();
    let last = branches.pop().unwrap();
    let reward = episode.reward();
    let mut turn = episode.turns.pop().unwrap();
    turn.tokens = 0..last.completion.tokens.len();
    turn.reward = reward;
    episode.turns = vec![turn];
    Rollout {
        prompt_tokens: last.prompt_tokens,
        completion: last.completion,
        episode: Some(episode),
        branches,
        ..whole
    }
}

fn trainer(environments: Arc<dyn Trajectories>, mut config: TrainConfig) -> Trainer {
    config.sampling.max_new_tokens = 20;
    config.optimizer.learning_rate = 1e-3;
    trainer_of(TrainerParts {
        environments: Some(environments),
        ..parts(WeightedRewards::new(), config)
    })
}

fn with_loss(aggregation: Aggregation) -> TrainConfig {
    let mut config = config();
    config.recipe.policy_loss = PolicyLoss {
        aggregation,
        ..PolicyLoss::grpo()
    };
    config
}

fn in_mini_batches() -> TrainConfig {
    TrainConfig {
        mini_batch_size: Some(4),
        ..with_loss(Aggregation::SeqMeanTokenMean)
    }
}

#[rstest]
#[case::mean_of_tokens(with_loss(Aggregation::TokenMean))]
#[case::mean_of_sequences(with_loss(Aggregation::SeqMeanTokenMean))]
#[case::sum_of_tokens(with_loss(Aggregation::SeqMeanTokenSum))]
#[case::mean_of_prompts(with_loss(Aggregation::PromptMeanTokenMean))]
#[case::mini_batches(in_mini_batches())]
#[case::weights_of_tokens(with_token_weights())]
#[case::advantages_of_tokens(reinforce_plus_plus())]
#[case::probabilities_of_tokens(with_advantage(
    r#"{"name": "multi_turn_optimal_token_baseline"}"#
))]
fn branches_train_as_one_sequence_does(#[case] config: TrainConfig) {
    let together = environments(echo(3));
    let found = |environments: Arc<dyn Trajectories>| {
        let mut trainer = trainer(environments, config.clone());
        let metrics = trainer.step().unwrap();
        let records = trainer.rollouts(&RolloutLogConfig::default()).unwrap();
        let advantages = records.iter().map(|record| record.advantage.unwrap());
        (metrics, advantages.collect::<Vec<f32>>())
    };
    let (expected, advantages) = found(together.clone());
    let (metrics, of_branches) = found(Arc::new(Apart(together)));
    assert!(advantages.iter().any(|&advantage| advantage.abs() > 0.1));
    let close = |a: f64, b: f64| (a - b).abs() < 1e-3 * (1e-3 + b.abs());
    for (found, expected) in of_branches.iter().zip(&advantages) {
        assert!(close((*found).into(), (*expected).into()));
    }
    let norm = |metrics: &StepMetrics| metrics.grad_norm.unwrap();
    assert!(
        close(norm(&metrics), norm(&expected)),
        "{} {}",
        norm(&metrics),
        norm(&expected)
    );
    assert_eq!(metrics.updates, expected.updates);
    assert_eq!(metrics.reward_mean, expected.reward_mean);
}

fn with_token_weights() -> TrainConfig {
    let (pattern, weight) = ("a".to_owned(), 0.25);
    TrainConfig {
        token_weights: vec![TokenWeight { pattern, weight }],
        ..with_loss(Aggregation::SeqMeanTokenMean)
    }
}

fn with_advantage(name: &str) -> TrainConfig {
    let mut config = with_loss(Aggregation::TokenMean);
    config.recipe.advantage = serde_json::from_str(name).unwrap();
    config
}

fn reinforce_plus_plus() -> TrainConfig {
    let mut config = config();
    config.recipe = Recipe::reinforce_plus_plus(0.5);
    config
}

#[test]
fn advantages_of_turns_refuse_branches() {
    let mut config = config();
    config.turn_advantage = Some(TurnAdvantage::StepReturns(StepReturns::default()));
    let environments = Arc::new(Apart(environments(echo(3))));
    let error = trainer(environments, config).step().unwrap_err();
    assert_invalid(&error, "turn_advantage");
    let error = format!("{error:#}");
    let words = "turn_advantage: given, must be absent, as trajectory 0 of prompt";
    assert!(error.contains(words), "{error}");
}

fn assert_invalid(error: &anyhow::Error, field: &str) {
    let kind = ErrorKind::of(error);
    assert!(
        matches!(kind, ErrorKind::Invalid(invalid) if invalid.field == field),
        "{kind:?}"
    );
}

#[rstest]
#[case::group(
    r#"{"surrogate": {"group_contrast": {}}}"#,
    "recipe.policy_loss.surrogate: compares the sequences of a group, must be another one for trajectories with branches"
)]
#[case::aggregation(
    r#"{"distillation": {"coef": 1, "form": {"gated": {"beta": 1}}, "aggregation": "token-mean"}}"#,
    "recipe.policy_loss.distillation.aggregation: token-mean, must be absent for trajectories with branches"
)]
fn losses_that_take_each_row_for_a_sequence_are_named(#[case] loss: &str, #[case] words: &str) {
    let mut config = config();
    config.micro_batch_size = config.num_generations;
    config.recipe.policy_loss = serde_json::from_str(loss).unwrap();
    let teacher = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        environments: Some(Arc::new(Apart(environments(echo(3))))),
        teacher: Some(TeacherPart::other(teacher)),
        ..parts(WeightedRewards::new(), config)
    });
    let error = trainer.step().unwrap_err();
    assert_invalid(&error, words.split(':').next().unwrap());
    let error = format!("{error:#}");
    assert!(error.contains(words), "{error}");
}

/// [`Apart`], with a source of the branches that does not compute the log-probs of the policy.
struct WithoutLogProbs(Apart);

impl Trajectories for WithoutLogProbs {
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>> {
        let mut rollouts = self.0.play(play)?;
        for row in rollouts
            .iter_mut()
            .flat_map(|rollout| &mut rollout.branches)
        {
            row.completion.log_probs = None;
        }
        Ok(rollouts)
    }

    fn gives_rewards(&self) -> bool {
        self.0.gives_rewards()
    }
}

#[test]
fn old_log_probs_of_the_sampler_must_be_there_for_branches() {
    let config = || TrainConfig {
        old_log_probs: OldLogProbs::Sampler,
        ..config()
    };
    let apart = || Apart(environments(echo(3)));
    trainer(Arc::new(apart()), config()).step().unwrap();
    let mut trainer = trainer(Arc::new(WithoutLogProbs(apart())), config());
    let error = format!("{:#}", trainer.step().unwrap_err());
    let words = "old_log_probs: Sampler, must be Recompute";
    assert!(error.contains(words), "{error}");
}

#[test]
fn an_evaluation_counts_the_tokens_of_branches() {
    let environments = environments(echo(3));
    let sampler = trainer(environments.clone(), config())
        .actor()
        .sampler(sampling());
    let sampler = sampler
        .unwrap()
        .with_environments(Arc::new(Apart(environments)));
    let prompts = prompts(&["abc", "d"]);
    let rollouts = sampler
        .sample(&prompts.iter().collect::<Vec<_>>(), 2, 0)
        .unwrap();
    let tokens = |rollout: &Rollout| rollout.rows().map(|(_, row)| row.tokens.len()).sum();
    let expected: Vec<usize> = rollouts.iter().map(tokens).collect();
    let rewards = WeightedRewards::new();
    let found = evaluate(&sampler, &prompts, 2, &rewards, &tokenizer(), 0).unwrap();
    let found = found.samples.iter().map(|sample| sample.response_length);
    assert_eq!(found.collect::<Vec<usize>>(), expected);
    assert!(rollouts.iter().any(|rollout| !rollout.branches.is_empty()));
}

#[test]
fn records_place_branches_after_the_turns_that_they_continue() {
    let mut trainer = trainer(Arc::new(Apart(environments(echo(3)))), config());
    trainer.step().unwrap();
    let records = trainer.rollouts(&RolloutLogConfig::default()).unwrap();
    let place = |row, turns| Some(BranchPlace { row, turns });
    for record in &records {
        let RolloutRecord {
            after,
            branches,
            turns,
            ..
        } = record;
        assert_eq!((*after, branches.len()), (place(2, 1), 2));
        assert_eq!(branches[0].after, None);
        assert_eq!(branches[1].after, place(1, 1));
        let roles = [TurnRole::Environment, TurnRole::Policy];
        for row in [turns, &branches[0].turns, &branches[1].turns] {
            assert!(row.iter().map(|turn| turn.role).eq(roles), "{row:?}");
        }
        // The text that the environment wrote, and not the prompt before it.
        assert_eq!(
            (turns[0].text.as_str(), branches[1].turns[0].text.as_str()),
            ("de", "de")
        );
        assert!(turns[1].reward.is_some() && branches[1].turns[1].reward.is_none());
    }
}
