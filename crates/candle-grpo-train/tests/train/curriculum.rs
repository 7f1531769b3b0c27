//! Chooses prompts by how well the policy solves them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use candle_grpo_core::selection::{DifficultyPools, GroupFilter};
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::{Recipe, RolloutCorrection};
use candle_grpo_test_support::{on_ranks, stay_on_cpu};
use candle_grpo_train::{
    ComputeDType, Prompt, Sample, StepMetrics, TrainConfig, Trainer, TrainerParts,
};
use rstest::rstest;
use serde_json::json;

use crate::common::{
    self, digest, model, parameters, pretrained, prompts, tokenizer, trainer_of, without_seconds,
};

/// [`digest`] rewards are from -1 to 1, and their means near 0.
fn pools() -> DifficultyPools {
    DifficultyPools {
        thresholds: vec![-0.1, 0.1, 1.],
        weights: vec![0.2, 5., 0.2],
        unseen_weight: 1.,
    }
}

fn config() -> TrainConfig {
    let mut config = common::config();
    config.optimizer.learning_rate = 1e-2;
    config
}

/// Samples the completions for up to n later steps while the policy trains.
fn ahead(max_staleness: usize) -> TrainConfig {
    let mut config = config();
    config.rollout.max_staleness = max_staleness;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    config
}

/// Samples more prompts in place of groups without spread.
fn filtered() -> TrainConfig {
    let mut config = config();
    config.recipe = Recipe::dapo(8, 2);
    config.recipe.group_filter = Some(GroupFilter::default());
    config
}

/// The samples' rows, in the order in which they are scored.
type Rows = Arc<Mutex<Vec<usize>>>;

/// A trainer with ten prompts, and the rows that it samples.
fn trainer(config: TrainConfig, reward: fn(&Sample) -> f32) -> (Trainer, Rows) {
    let (parts, rows) = parts_of(ten_prompts(), config, reward);
    (trainer_of(parts), rows)
}

/// Prompts for rows 0 to 9.
fn ten_prompts() -> Vec<Prompt> {
    prompts(&["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab"])
}

fn parts_of(
    prompts: Vec<Prompt>,
    config: TrainConfig,
    reward: fn(&Sample) -> f32,
) -> (TrainerParts, Rows) {
    let rows = Rows::default();
    let seen = Arc::clone(&rows);
    let reward = move |sample: &Sample| {
        let row = sample.columns["row"].as_u64().unwrap() as usize;
        seen.lock().unwrap().push(row);
        reward(sample)
    };
    let parts = TrainerParts {
        curriculum: Some(pools()),
        ..TrainerParts::new(model(), parameters(), tokenizer(), prompts, reward, config)
    };
    (parts, rows)
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<StepMetrics> {
    let step = |_| without_seconds(trainer.step().unwrap());
    (0..count).map(step).collect()
}

/// Each step's prompts: groups of four samples, three groups per step.
fn prompts_of_steps(rows: &Rows) -> Vec<Vec<usize>> {
    let rows = rows.lock().unwrap();
    let groups: Vec<usize> = rows.chunks(4).map(|group| group[0]).collect();
    groups.chunks(3).map(<[usize]>::to_vec).collect()
}

#[test]
fn the_scores_of_prompts_are_the_means_of_their_latest_groups() {
    fn length(sample: &Sample) -> f32 {
        sample.completion_tokens.len() as f32 / 8.
    }
    let (mut trainer, rows) = trainer(config(), length);
    let metrics = steps(&mut trainer, 4);
    let seen: BTreeSet<usize> = rows.lock().unwrap().iter().copied().collect();
    let scores = serde_json::to_value(&trainer.state().task_scores).unwrap();
    let recorded: BTreeSet<usize> = scores
        .as_object()
        .unwrap()
        .keys()
        .map(|row| row.parse().unwrap())
        .collect();
    assert_eq!(recorded, seen);
    for metrics in &metrics {
        let count = |name: &str| metrics.policy[name];
        let pools = (0..3).map(|pool| count(&format!("curriculum_pool_{pool}")));
        assert_eq!(pools.sum::<f64>() + count("curriculum_unseen"), 10.);
    }
    let unseen = metrics[3].policy["curriculum_unseen"];
    assert_eq!(unseen, (10 - seen.len()) as f64);
    // The mean of the only group for each prompt in the first step.
    assert_eq!(metrics[0].policy["curriculum_unseen"], 7.);
}

/// Ten prompts are enough for six groups at once.
#[test]
fn a_step_starts_no_prompt_that_is_unfinished() {
    let mut config = config();
    config.rollout.partial = true;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection::default());
    let (mut trainer, _) = trainer(config, digest);
    for _ in 0..8 {
        trainer.step().unwrap();
        let groups = trainer.state().unfinished_groups.iter();
        let rows: Vec<usize> = groups.map(|group| group.row).collect();
        let distinct: BTreeSet<usize> = rows.iter().copied().collect();
        assert_eq!(distinct.len(), rows.len(), "{rows:?}");
    }
}

#[test]
fn a_step_has_no_prompt_twice() {
    let (mut trainer, rows) = trainer(config(), digest);
    steps(&mut trainer, 6);
    for step in prompts_of_steps(&rows) {
        let different: BTreeSet<&usize> = step.iter().collect();
        assert_eq!(different.len(), 3, "{step:?}");
    }
}

#[test]
fn prompts_of_a_pool_with_a_small_weight_come_seldom() {
    // Rows 0 to 4 are always solved, the others never.
    fn solved(sample: &Sample) -> f32 {
        let row = sample.columns["row"].as_u64().unwrap();
        f32::from(u8::from(row < 5))
    }
    let (parts, rows) = parts_of(ten_prompts(), config(), solved);
    let pools = DifficultyPools {
        thresholds: vec![0.5, 1.],
        weights: vec![10., 0.1],
        unseen_weight: 1.,
    };
    let mut trainer = trainer_of(TrainerParts {
        curriculum: Some(pools),
        ..parts
    });
    steps(&mut trainer, 40);
    let rows = rows.lock().unwrap();
    let late = &rows[rows.len() / 2..];
    let of_solved = late.iter().filter(|row| **row < 5).count();
    // Each sampled prompt is a solved one with a chance of at most 0.5 / 30.5.
    assert!((of_solved as f64) < 0.1 * late.len() as f64, "{of_solved}");
}

#[rstest]
#[case::plain(config())]
#[case::more_rounds(filtered())]
fn a_resumed_run_is_bit_identical(#[case] config: TrainConfig) {
    let (mut whole, whole_rows) = trainer(config.clone(), digest);
    let expected = steps(&mut whole, 7);
    let (mut first, first_rows) = trainer(config.clone(), digest);
    steps(&mut first, 3);
    let (second, second_rows) = trainer(config, digest);
    let mut second = common::resumed(&first, second);
    assert_eq!(steps(&mut second, 4), expected[3..]);
    assert_eq!(second.state(), whole.state());
    let rows = |rows: &Rows| rows.lock().unwrap().clone();
    let resumed = [rows(&first_rows), rows(&second_rows)].concat();
    assert_eq!(resumed, rows(&whole_rows));
}

/// Rows 0 to 4 are always solved, the others never.
fn first_five(sample: &Sample) -> f32 {
    f32::from(u8::from(sample.columns["row"].as_u64().unwrap() < 5))
}

#[rstest]
#[case::in_reverse(|prompts: &mut Vec<Prompt>| prompts.reverse())]
#[case::without_one(|prompts: &mut Vec<Prompt>| drop(prompts.remove(2)))]
#[case::with_one_before(|prompts: &mut Vec<Prompt>| {
    let new = Prompt { columns: json!({"row": 4, "new": true}), ..prompts[0].clone() };
    prompts.insert(0, new);
})]
#[case::with_an_equal_one(|prompts: &mut Vec<Prompt>| prompts.insert(0, prompts[9].clone()))]
fn scores_stay_with_their_rows_when_a_run_resumes_with_other_rows(
    #[case] change: fn(&mut Vec<Prompt>),
) {
    let unsolved_only = DifficultyPools {
        thresholds: vec![0.5, 1.],
        weights: vec![1., 0.],
        unseen_weight: 1e6,
    };
    let (first, _) = parts_of(ten_prompts(), config(), first_five);
    let mut first = trainer_of(TrainerParts {
        curriculum: Some(unsolved_only.clone()),
        ..first
    });
    // Rows without a score come before all others.
    let metrics = steps(&mut first, 12);
    assert_eq!(metrics[11].policy["curriculum_unseen"], 0.);
    let folder = tempfile::tempdir().unwrap();
    first
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    let mut changed = ten_prompts();
    change(&mut changed);
    for (index, prompt) in changed.iter_mut().enumerate() {
        prompt.index = index as u64;
    }
    let added = changed.len().saturating_sub(10);
    let (second, rows) = parts_of(changed.clone(), config(), first_five);
    let mut second = trainer_of(TrainerParts {
        curriculum: Some(unsolved_only),
        ..second
    });
    second.load_state(folder.path()).unwrap();
    let scores = second.state().task_scores.clone().unwrap();
    assert_eq!(scores.tasks().count(), changed.len() - added);
    steps(&mut second, 6);
    let solved: BTreeSet<usize> = rows.lock().unwrap().iter().copied().collect();
    // Only the new row may be a solved one.
    let solved = solved
        .into_iter()
        .filter(|row| *row < 5)
        .collect::<Vec<_>>();
    assert!(
        solved.is_empty() || added == 1 && solved == [4],
        "{solved:?}"
    );
}

#[test]
fn a_run_cannot_begin_to_use_a_curriculum() {
    let without = common::trainer(digest, config());
    let folder = tempfile::tempdir().unwrap();
    without
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    let mut with = trainer(config(), digest).0;
    let error = format!("{:#}", with.load_state(folder.path()).unwrap_err());
    assert!(
        error.contains("curriculum: a run cannot begin to use it"),
        "{error}"
    );
    // A checkpoint from before curricula existed has no such key.
    let path = folder.path().join("trainer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut state: serde_json::Value = serde_json::from_str(&text).unwrap();
    state["state"]
        .as_object_mut()
        .unwrap()
        .remove("task_scores");
    std::fs::write(&path, state.to_string()).unwrap();
    let mut without = common::trainer(digest, config());
    without.load_state(folder.path()).unwrap();
}

#[rstest]
#[case::plain(config())]
#[case::ahead(ahead(1))]
fn all_ranks_draw_the_prompts_of_one_rank(#[case] config: TrainConfig) {
    stay_on_cpu();
    // Rewards do not depend on rounding.
    fn coarse(sample: &Sample) -> f32 {
        let row = sample.columns["row"].as_u64().unwrap();
        f32::from(u8::from(row.is_multiple_of(3))) - f32::from(u8::from(row % 3 == 1))
    }
    let scores = |trainer: &mut Trainer| {
        for _ in 0..5 {
            trainer.step().unwrap();
        }
        trainer.finish().unwrap();
        (trainer.state().task_scores.clone(), trainer.state().visited)
    };
    let build = || TrainerParts {
        last_step: 5,
        ..parts_of(ten_prompts(), config.clone(), coarse).0
    };
    let alone = scores(&mut trainer_of(build()));
    for world_size in [2, 3] {
        let ranks = on_ranks(world_size, |collective| {
            scores(&mut trainer_of(TrainerParts {
                collective,
                ..build()
            }))
        });
        for rank in ranks {
            assert_eq!(rank, alone);
        }
    }
}

#[rstest]
fn prompts_that_are_drawn_ahead_depend_on_the_step_alone(#[values(1, 2)] max_staleness: usize) {
    stay_on_cpu();
    let run = || {
        let (parts, rows) = parts_of(ten_prompts(), ahead(max_staleness), digest);
        let mut trainer = trainer_of(TrainerParts {
            last_step: 12,
            ..parts
        });
        let metrics = steps(&mut trainer, 12);
        trainer.finish().unwrap();
        (metrics, prompts_of_steps(&rows))
    };
    let (metrics, prompts) = run();
    assert_eq!(run(), (metrics, prompts.clone()));
    // Steps that are requested before the first one ends are sampled without scores, as in a run
    // with other rewards.
    fn other(_: &Sample) -> f32 {
        1.
    }
    let (parts, rows) = parts_of(ten_prompts(), ahead(max_staleness), other);
    let mut trainer = trainer_of(TrainerParts {
        last_step: 12,
        ..parts
    });
    steps(&mut trainer, 12);
    trainer.finish().unwrap();
    let others = prompts_of_steps(&rows);
    assert_eq!(others[..=max_staleness], prompts[..=max_staleness]);
    assert_ne!(others, prompts);
}
