//! Training completions for people to read.

use candle_grpo_train::run::{
    RolloutLogConfig, RolloutRecord, RolloutTurn, StepRecord as _, StoppedRun, TurnRole,
};
use candle_grpo_train::{RunDir, StepMetrics, TrainConfig, Trainer, TrainerParts, WeightedRewards};
use serde_json::json;

use super::{echo, environments};
use crate::common::{self, config, digest, parts, share_of_a, trainer, trainer_of};

fn every() -> RolloutLogConfig {
    RolloutLogConfig {
        every_steps: Some(1),
        max_groups: 2,
        max_chars: 4000,
    }
}

fn records(trainer: &mut Trainer) -> Vec<RolloutRecord> {
    trainer.step().unwrap();
    trainer.rollouts(&every()).unwrap()
}

#[test]
fn records_have_texts_rewards_and_the_advantages_of_grpo() {
    let weighted = WeightedRewards::new()
        .with("a", 1., share_of_a)
        .with("digest", 0.5, digest);
    let mut trainer = trainer(weighted, config());
    assert!(trainer.rollouts(&every()).unwrap().is_empty());
    let records = records(&mut trainer);
    assert_eq!(records.len(), 2 * 4);
    for (number, group) in records.chunks(4).enumerate() {
        let rewards: Vec<f64> = group.iter().map(|r| f64::from(r.reward.unwrap())).collect();
        let mean = rewards.iter().sum::<f64>() / 4.;
        let squares: f64 = rewards.iter().map(|r| (r - mean).powi(2)).sum();
        let std = (squares / 3.).sqrt();
        for (i, (record, reward)) in group.iter().zip(&rewards).enumerate() {
            assert_eq!((record.step, record.group), (1, number));
            assert_eq!(record.sample_index, i);
            assert_eq!(record.prompt_index, group[0].prompt_index);
            assert!(["abc", "d", "ee", "ca", "b"].contains(&record.prompt.as_str()));
            assert!(record.turns.is_empty());
            let sum: f32 = record.rewards.values().map(|r| r.unwrap()).sum();
            assert!((f64::from(sum) - reward).abs() < 1e-5, "{record:?}");
            let a = record.completion.matches('a').count() as f32 / record.response_length as f32;
            assert!(
                (record.rewards["a"].unwrap() - a).abs() < 1e-6,
                "{record:?}"
            );
            let advantage = f64::from(record.advantage.unwrap());
            let expected = (reward - mean) / (std + 1e-6);
            assert!(
                (advantage - expected).abs() < 1e-3,
                "{advantage} {expected}"
            );
        }
    }
}

#[test]
fn a_record_of_a_trajectory_has_its_turns() {
    let mut config = config();
    config.sampling.max_new_tokens = 20;
    let mut trainer = trainer_of(TrainerParts {
        environments: Some(environments(echo(3))),
        ..parts(WeightedRewards::new(), config)
    });
    for record in records(&mut trainer) {
        let roles: Vec<TurnRole> = record.turns.iter().map(|turn| turn.role).collect();
        let (policy, environment) = (TurnRole::Policy, TurnRole::Environment);
        assert_eq!(roles, [policy, environment, policy, environment, policy]);
        assert_eq!(record.turns[1].text, "de");
        assert_eq!(record.turns[1].reward, None);
        let rewards = record.turns.iter().filter_map(|turn| turn.reward);
        let sum = rewards.sum::<f64>() as f32;
        assert!((record.reward.unwrap() - sum).abs() < 1e-5);
        assert_eq!(record.rewards["environment"], record.reward);
        assert_eq!(record.turns[4].text.replace("<eos>", ""), record.completion);
    }
}

#[test]
fn a_dropped_group_has_no_advantage_and_a_long_text_is_cut() {
    let config = TrainConfig {
        max_sampling_batches: 1,
        ..config()
    };
    let config: TrainConfig = {
        let mut config = config;
        config.recipe.group_filter = Some(Default::default());
        config
    };
    // Only one of the prompts has rewards that differ.
    let reward = |sample: &candle_grpo_train::Sample| match sample.prompt {
        "abc" | "d" => digest(sample),
        _ => 0.,
    };
    let mut trainer = trainer(reward, config);
    let log = RolloutLogConfig {
        max_groups: 100,
        max_chars: 1,
        ..every()
    };
    let (mut dropped, mut kept) = (0, 0);
    for _ in 0..3 {
        trainer.step().unwrap();
        for record in trainer.rollouts(&log).unwrap() {
            assert!(record.completion.trim_end_matches(" ...").chars().count() <= 1);
            match record.prompt.as_str() {
                "a ..." | "d" => kept += usize::from(record.advantage.is_some()),
                _ => {
                    assert_eq!(record.advantage, None);
                    dropped += 1;
                }
            }
        }
    }
    assert!(dropped > 0 && kept > 0, "{dropped} {kept}");
}

fn record(step: usize) -> RolloutRecord {
    RolloutRecord {
        step,
        group: 0,
        prompt_index: 7,
        sample_index: 1,
        prompt: "a".to_owned(),
        completion: "b".to_owned(),
        turns: vec![RolloutTurn {
            role: TurnRole::Policy,
            text: "b".to_owned(),
            reward: None,
        }],
        role: None,
        after: None,
        branches: Vec::new(),
        end: None,
        reward: None,
        rewards: [("a".to_owned(), None)].into(),
        role_rewards: [].into(),
        advantage: Some(0.5),
        finish_reason: candle_grpo_train::FinishReason::Length,
        response_length: 1,
    }
}

#[test]
fn a_resumed_run_has_the_records_of_earlier_steps_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let mut run = RunDir::create(&path, &json!({})).unwrap();
    for step in 1..=4 {
        run.append_rollouts(&[record(step), record(step)]).unwrap();
        let metrics = candle_grpo_train::StepMetrics {
            step,
            ..Default::default()
        };
        run.append_metrics(&metrics).unwrap();
    }
    drop(run);
    let file = path.join("rollouts.jsonl");
    let whole = std::fs::read_to_string(&file).unwrap();
    // A kill in the middle of a line.
    std::fs::write(&file, format!("{whole}{{\"step\": 5, \"gro")).unwrap();
    let stopped = StoppedRun::<StepMetrics>::open(&path).unwrap();
    drop(stopped.resume(&json!({}), 2).unwrap());
    let lines: Vec<RolloutRecord> = candle_grpo_train::data::read_json_lines(&file).unwrap();
    assert_eq!(lines, [record(1), record(1), record(2), record(2)]);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(whole.starts_with(&text) && text.ends_with('\n'));
}

#[test]
fn components_have_means_and_standard_deviations() {
    let weighted = WeightedRewards::new().with("a", 1., share_of_a).with(
        "a",
        2.,
        |_: &candle_grpo_train::Sample| 0.25,
    );
    let mut trainer = trainer(weighted, common::config());
    let metrics = trainer.step().unwrap();
    let names: Vec<&str> = metrics.rewards.keys().map(String::as_str).collect();
    assert_eq!(names, ["a", "a-2"]);
    let constant = metrics.rewards["a-2"];
    assert_eq!((constant.mean, constant.std), (0.5, 0.));
    let sum = metrics.rewards["a"].mean + constant.mean;
    assert!((sum - metrics.reward_mean).abs() < 1e-6);
    assert!((metrics.rewards["a"].std - metrics.reward_std).abs() < 1e-6);
    let scalars = metrics.scalars().unwrap();
    assert!(scalars.contains(&("rewards/a-2/mean".to_owned(), 0.5)));
    assert!(scalars.iter().any(|(name, _)| name == "rewards/a/std"));
}
