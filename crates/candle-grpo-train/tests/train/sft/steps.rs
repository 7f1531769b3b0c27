//! Supervised training steps.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;
use candle_grpo_core::schedule::Decay;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{LoraConfig, Parameters};
use candle_grpo_test_support::{device, on_ranks, stay_on_cpu};
use candle_grpo_train::Sequence;
use candle_grpo_train::data::MixedOrder;
use candle_grpo_train::learn::MemoryPlan;
use candle_grpo_train::sft::{SftConfig, SftMetrics, SftParts, SftSchedule, SftTrainer};
use candle_grpo_train::{ComputeDType, Interrupted, Progress};
use rstest::rstest;

use crate::common::{
    END, assert_records_close, model, model_with_experts, parameters_of, pretrained,
};

/// Eleven rows of 3 to 7 tokens.
fn examples() -> Vec<Sequence> {
    let row = |i: u32| {
        let prompt: Vec<u32> = (0..1 + i % 3).map(|j| 1 + (i + j) % 5).collect();
        let answer: Vec<u32> = (0..1 + i % 4).map(|j| 1 + (2 * i + j) % 5).collect();
        Sequence::of_answer(&prompt, &[answer.as_slice(), &[END]].concat()).unwrap()
    };
    (0..11).map(row).collect()
}

fn config() -> SftConfig {
    let mut config = SftConfig {
        batch_size: 4,
        micro_batch_tokens: 9,
        epochs: 2.,
        schedule: SftSchedule {
            warmup_steps: 2,
            decay: Some(Decay::Cosine),
            min_lr_ratio: 0.1,
        },
        seed: 5,
        ..SftConfig::default()
    };
    config.optimizer.learning_rate = 1e-2;
    // A larger epsilon than usual. Otherwise, if a weight's gradient is near 0, its update depends
    // on how that gradient is rounded.
    config.optimizer.epsilon = 1e-3;
    config
}

fn parts(config: SftConfig) -> SftParts {
    let parameters = parameters_of(&model(), device());
    SftParts::new(model(), parameters, examples(), config)
}

fn trainer(config: SftConfig) -> SftTrainer {
    SftTrainer::new(parts(config)).unwrap()
}

fn without_time(metrics: SftMetrics) -> SftMetrics {
    SftMetrics {
        seconds: Default::default(),
        tokens_per_second: 0.,
        ..metrics
    }
}

fn run(trainer: &mut SftTrainer, steps: usize) -> Vec<SftMetrics> {
    let steps = (0..steps).map(|_| without_time(trainer.step().unwrap()));
    steps.collect()
}

fn weights(trainer: &SftTrainer) -> Vec<(String, Vec<f32>)> {
    let flat = |(name, x): (&str, &candle_core::Var)| {
        (name.to_owned(), x.flatten_all().unwrap().to_vec1().unwrap())
    };
    let parameters = trainer.policy_parameters().unwrap();
    parameters.iter().map(flat).collect()
}

/// Compares all metrics except the number of passes.
fn assert_close(found: &[SftMetrics], expected: &[SftMetrics]) {
    let compared = |metrics: &[SftMetrics]| -> Vec<SftMetrics> {
        let without_passes = metrics.iter().map(|metrics| SftMetrics {
            micro_batches: 0,
            ..metrics.clone()
        });
        without_passes.collect()
    };
    assert_records_close(&compared(found), &compared(expected));
}

fn assert_weights_close(found: &SftTrainer, expected: &SftTrainer) {
    for ((name, found), (_, expected)) in weights(found).iter().zip(weights(expected)) {
        for (found, expected) in found.iter().zip(expected) {
            let close = (found - expected).abs() <= 2e-5 * (1. + expected.abs());
            assert!(close, "{name}: {found}, must be {expected}");
        }
    }
}

#[test]
fn training_learns_its_examples() {
    let parameters = Parameters::init(&model(), 0, device()).unwrap();
    let examples = vec![
        Sequence::of_answer(&[1, 2], &[3, END]).unwrap(),
        Sequence::of_answer(&[2], &[4, 5, END]).unwrap(),
    ];
    let mut config = SftConfig {
        max_steps: Some(200),
        batch_size: 2,
        ..SftConfig::default()
    };
    config.optimizer.learning_rate = 1e-2;
    let parts = SftParts::new(model(), parameters, examples, config);
    let mut trainer = SftTrainer::new(parts).unwrap();
    let first = trainer.step().unwrap();
    assert!((first.loss - 6f64.ln()).abs() < 0.1, "{}", first.loss);
    assert!((first.entropy - 6f64.ln()).abs() < 0.1, "{}", first.entropy);
    let mut last = first;
    while trainer.steps() < 200 {
        last = trainer.step().unwrap();
    }
    assert!(last.loss < 0.05, "{}", last.loss);
    assert_eq!(last.token_accuracy, 1.);
    let over = trainer.step().unwrap_err();
    assert_eq!(
        format!("{over:#}"),
        "step 201: the run is over after 200 steps"
    );
}

#[test]
fn epochs_visit_every_row_and_end_with_a_smaller_step() {
    let mut trainer = trainer(config());
    // 22 rows in steps of 4.
    assert_eq!(trainer.last_step(), 6);
    let metrics = run(&mut trainer, 6);
    let rows: Vec<usize> = metrics.iter().map(|line| line.rows).collect();
    assert_eq!(rows, [4, 4, 4, 4, 4, 2]);
    let trained = examples()
        .iter()
        .map(Sequence::num_trained_tokens)
        .sum::<usize>();
    assert_eq!(metrics[5].total_trained_tokens, 2 * trained);
    assert_eq!(metrics[5].epoch, 2.);
    // Warm-up in two steps, then p = (s - 2) / 5 of half a cosine above a tenth.
    let rates: Vec<f64> = metrics
        .iter()
        .map(|line| line.learning_rate / 1e-2)
        .collect();
    let cosine = |p: f64| 0.1 + 0.9 * (1. + (std::f64::consts::PI * p).cos()) / 2.;
    let expected = [0.5, 1., cosine(0.2), cosine(0.4), cosine(0.6), cosine(0.8)];
    for (rate, expected) in rates.into_iter().zip(expected) {
        assert!(
            (rate - expected).abs() < 1e-12,
            "{rate}, must be {expected}"
        );
    }
}

#[rstest]
#[case(1)]
#[case(13)]
#[case(1000)]
fn a_step_does_not_depend_on_its_micro_batches(#[case] micro_batch_tokens: usize) {
    let mut expected = trainer(config());
    let metrics = run(&mut expected, 6);
    let mut other = trainer(SftConfig {
        micro_batch_tokens,
        ..config()
    });
    let found = run(&mut other, 6);
    assert_close(&found, &metrics);
    assert_weights_close(&other, &expected);
    let batches = match micro_batch_tokens {
        1 => 4,
        1000 => 1,
        _ => found[0].micro_batches,
    };
    assert_eq!(found[0].micro_batches, batches);
}

#[test]
fn the_loss_of_a_step_is_the_mean_over_all_its_tokens() {
    let weight = |example: &Sequence| example.total_weight();
    let rows = examples();
    let mut trainer = trainer(SftConfig {
        batch_size: rows.len(),
        ..config()
    });
    let single = rows.iter().map(|row| {
        let sums = trainer
            .actor()
            .likelihood(std::slice::from_ref(row))
            .unwrap();
        (sums.loss, sums.weight)
    });
    let (losses, weights): (Vec<f64>, Vec<f64>) = single.unzip();
    assert_eq!(weights, rows.iter().map(weight).collect::<Vec<_>>());
    let expected = losses.iter().sum::<f64>() / weights.iter().sum::<f64>();
    let held_out = trainer.evaluate(&rows).unwrap().evaluation();
    let metrics = trainer.step().unwrap();
    assert!((metrics.loss - expected).abs() < 1e-6, "{expected}");
    assert!((held_out["loss"] - expected).abs() < 1e-6);
    assert!((held_out["perplexity"] - expected.exp()).abs() < 1e-5);
    assert_eq!(held_out["token_accuracy"], metrics.token_accuracy);
}

#[rstest]
#[case::all_weights(config())]
#[case::adapters(SftConfig { adapters: Some(LoraConfig::all_linear(2, 4.)), ..config() })]
#[case::bf16(SftConfig { compute_dtype: ComputeDType::Bf16, ..config() })]
fn a_resumed_run_is_bit_identical(#[case] config: SftConfig) {
    let mut whole = trainer(config.clone());
    let expected = run(&mut whole, 6);
    let folder = tempfile::tempdir().unwrap();
    let mut first = trainer(config.clone());
    let mut found = run(&mut first, 3);
    save(&first, folder.path());
    drop(first);
    let mut second = trainer(config);
    second.load_state(folder.path()).unwrap();
    assert_eq!(second.steps(), 3);
    found.extend(run(&mut second, 3));
    assert_eq!(found, expected);
    assert_eq!(weights(&second), weights(&whole));
}

#[test]
fn a_checkpoint_has_the_given_sum_of_the_initial_weights() {
    let sum = "a".repeat(64);
    let adapters = Some(LoraConfig::all_linear(2, 4.));
    let mut trainer = SftTrainer::new(SftParts {
        parameters_sha256: Some(sum.clone()),
        ..parts(SftConfig {
            adapters,
            ..config()
        })
    })
    .unwrap();
    run(&mut trainer, 1);
    let folder = tempfile::tempdir().unwrap();
    save(&trainer, folder.path());
    let state = std::fs::read(folder.path().join("trainer.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    assert_eq!(state["base_sha256"], sum);
}

fn save(trainer: &SftTrainer, folder: &Path) {
    trainer
        .write_checkpoint(folder, &pretrained(), ComputeDType::F32)
        .unwrap();
}

#[rstest]
#[case::all_weights(config())]
#[case::adapters(SftConfig { adapters: Some(LoraConfig::all_linear(2, 4.)), ..config() })]
#[case::divided_optimizer(SftConfig { sharding: Sharding::Optimizer, ..config() })]
#[case::divided_weights(SftConfig { sharding: Sharding::Resident, ..config() })]
#[case::fewer_rows_than_ranks(SftConfig { batch_size: 2, max_steps: Some(6), ..config() })]
fn the_steps_of_ranks_are_those_of_one_rank(#[case] config: SftConfig) {
    stay_on_cpu();
    let mut alone = trainer(config.clone());
    let expected = run(&mut alone, 6);
    let loss = alone.evaluate(&examples()).unwrap().mean_loss();
    for world_size in [2, 3] {
        let ranks = on_ranks(world_size, |collective| {
            let parts = parts(config.clone());
            let mut trainer = SftTrainer::new(SftParts {
                collective,
                ..parts
            })
            .unwrap();
            let metrics = run(&mut trainer, 6);
            trainer.ensure_equal_ranks().unwrap();
            let loss = trainer.evaluate(&examples()).unwrap().mean_loss();
            (metrics, loss, weights(&trainer), trainer)
        });
        for (metrics, of_rank, bits, trainer) in &ranks {
            assert_eq!(metrics, &ranks[0].0);
            assert_eq!(bits, &ranks[0].2);
            assert_close(metrics, &expected);
            assert!((of_rank - loss).abs() < 1e-4, "{of_rank}, must be {loss}");
            assert_weights_close(trainer, &alone);
        }
    }
}

/// Their weights are compared in checkpoints.
#[rstest]
#[case::all_weights(None)]
#[case::adapters(Some(LoraConfig::all_linear(2, 4.)))]
fn ranks_that_divide_all_weights_have_the_steps_of_one_rank(#[case] adapters: Option<LoraConfig>) {
    stay_on_cpu();
    let config = SftConfig {
        adapters,
        sharding: Sharding::Full,
        ..config()
    };
    let mut alone = trainer(config.clone());
    let expected = run(&mut alone, 6);
    let loss = alone.evaluate(&examples()).unwrap().mean_loss();
    for world_size in [2, 3, 5] {
        let ranks = on_ranks(world_size, |collective| {
            let mut trainer = SftTrainer::new(SftParts {
                collective,
                ..parts(config.clone())
            })
            .unwrap();
            assert!(trainer.actor().parameters().is_full());
            let metrics = run(&mut trainer, 6);
            trainer.ensure_equal_ranks().unwrap();
            let loss = trainer.evaluate(&examples()).unwrap().mean_loss();
            (metrics, loss)
        });
        for (metrics, of_rank) in &ranks {
            assert_eq!(metrics, &ranks[0].0);
            assert_close(metrics, &expected);
            assert!((of_rank - loss).abs() < 1e-4, "{of_rank}, must be {loss}");
        }
    }
}

#[test]
fn experts_report_the_balance_of_a_step() {
    let model = model_with_experts();
    let build = |micro_batch_tokens| {
        let config = SftConfig {
            router_aux_loss_coef: 0.1,
            micro_batch_tokens,
            ..config()
        };
        let parameters = parameters_of(&model, device());
        SftTrainer::new(SftParts::new(model.clone(), parameters, examples(), config))
    };
    let metrics = build(1000).unwrap().step().unwrap();
    let balance = metrics.router_aux_loss.unwrap();
    assert!((1. ..=4.).contains(&balance), "{balance}");
    assert!(trainer(config()).step().unwrap().router_aux_loss.is_none());
}

/// Cancels after it was asked a number of times.
struct Stop(AtomicUsize);

impl Progress for Stop {
    fn is_canceled(&self) -> bool {
        self.0.fetch_sub(1, Ordering::SeqCst) == 1
    }
}

#[test]
fn a_canceled_step_changes_nothing() {
    let mut expected = trainer(config());
    let metrics = run(&mut expected, 6);
    for question in 1..=3 {
        let stop = Stop(AtomicUsize::new(question));
        let progress = Arc::new(stop);
        let mut canceled = SftTrainer::new(SftParts {
            progress,
            ..parts(config())
        })
        .unwrap();
        let error = canceled.step().unwrap_err();
        assert!(error.is::<Interrupted>(), "{error:#}");
        assert_eq!(canceled.steps(), 0);
        assert_eq!(run(&mut canceled, 6), metrics);
        assert_eq!(weights(&canceled), weights(&expected));
    }
}

#[test]
fn rows_come_in_the_given_order() {
    let sources: Vec<usize> = (0..11).map(|row| usize::from(row > 0)).collect();
    let order = MixedOrder::new(&sources, &[1., 0.], 0).unwrap();
    let with_order = |order| {
        let order = Some(order);
        SftTrainer::new(SftParts {
            order,
            ..parts(config())
        })
    };
    let mut trainer = with_order(order).unwrap();
    let loss = trainer.actor().likelihood(&examples()[..1]).unwrap();
    let metrics = trainer.step().unwrap();
    assert!((metrics.loss - loss.mean_loss()).abs() < 1e-6);
    let order = MixedOrder::single(3, 0).unwrap();
    let error = with_order(order).err().unwrap();
    assert!(
        error.to_string().starts_with("order: 3 rows, must be 11"),
        "{error}"
    );
}

#[rstest]
#[case(SftConfig { batch_size: 0, ..config() }, "batch_size: 0, must be at least 1")]
#[case(SftConfig { micro_batch_tokens: 0, ..config() }, "micro_batch_tokens: 0, must be at least 1")]
#[case(SftConfig { epochs: 0., ..config() }, "epochs: 0, must be positive and finite")]
#[case(SftConfig { max_grad_norm: f64::NAN, ..config() }, "max_grad_norm: NaN, must be positive")]
#[case(
    SftConfig { schedule: SftSchedule { warmup_steps: 7, ..config().schedule }, ..config() },
    "schedule.warmup_steps: 7, must be at most 6, the steps of the run"
)]
#[case(
    SftConfig { schedule: SftSchedule { decay: None, min_lr_ratio: 0.5, warmup_steps: 0 }, ..config() },
    "schedule.min_lr_ratio: 0.5, must be 0 without a decay"
)]
fn settings_that_are_not_valid_are_errors(#[case] config: SftConfig, #[case] expected: &str) {
    let parameters = Parameters::init(&model(), 0, &Device::Cpu).unwrap();
    let error = SftTrainer::new(SftParts::new(model(), parameters, examples(), config));
    let error = error.err().unwrap().to_string();
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn no_examples_are_an_error() {
    let parameters = Parameters::init(&model(), 0, &Device::Cpu).unwrap();
    let error = SftTrainer::new(SftParts::new(model(), parameters, Vec::new(), config()));
    assert_eq!(
        error.err().unwrap().to_string(),
        "examples: none, must be at least one"
    );
}

#[test]
fn the_memory_of_a_pass_is_bounded_by_its_tokens_and_the_longest_row() {
    let plan = |micro_batch_tokens, longest| {
        let config = SftConfig {
            micro_batch_tokens,
            batch_size: 100,
            ..config()
        };
        MemoryPlan::supervised(&model(), &config, longest, 1).unwrap()
    };
    assert_eq!(plan(100, 10).sampling, 0);
    assert!(plan(200, 10).activations > plan(100, 10).activations);
    assert_eq!(plan(100, 300).activations, plan(300, 10).activations);
    assert!(plan(100, 10).peak() >= plan(100, 10).weights + plan(100, 10).optimizer);
}
