//! Several teachers, each for its own rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_grpo_core::advantage::TeacherWeight;
use candle_grpo_core::inputs::Input;
use candle_grpo_core::{AdvantagePipeline, GroupAdvantage, Kl, KlEstimator, TokenAdvantage};
use candle_grpo_loss::{
    DistillationLoss, PolicyLoss, Recipe, Support, TeacherTerm, TeacherTermForm,
};
use candle_grpo_nn::optim::AdamWConfig;
use candle_grpo_test_support::{device, message, stay_on_cpu};
use candle_grpo_train::learn::step::{self, Needs, Passes, StepBatch, TaughtBy};
use candle_grpo_train::learn::{
    Models, Ranks, Reference, SelfTeacherConfig, Teacher, TeacherDistributions, TeacherPart,
    TrainerState,
};
use candle_grpo_train::run::RolloutLogConfig;
use candle_grpo_train::sequence::Batch;
use candle_grpo_train::{
    ComputeDType, Progress, Prompt, Sample, TokenBatch, TrainConfig, Trainer, TrainerParts,
    TrainingBatch,
};
use rstest::rstest;
use serde_json::json;

use crate::common::{
    self, assert_ranks_agree, digest, drawn_parameters, max_difference, model, parameters, parts,
    run, step_batch, tokenizer, trainer_of,
};
use crate::engines::log_distributions;

fn policy(seed: u64) -> Reference {
    let parameters = drawn_parameters(&model(), seed, device());
    Reference::new(&model(), &parameters, ComputeDType::F32).unwrap()
}

/// A teacher of all sequences at once, as those on servers are.
struct AtOnce(Reference);

impl Teacher for AtOnce {
    fn takes_micro_batches(&self) -> bool {
        false
    }

    fn log_probs(
        &self,
        batch: &TokenBatch,
        temperature: f64,
        _: &dyn Progress,
    ) -> anyhow::Result<Tensor> {
        self.0.log_probs(batch, temperature)
    }

    fn distributions(
        &self,
        batch: &TokenBatch,
        entries: Option<usize>,
        _: &dyn Progress,
    ) -> anyhow::Result<TeacherDistributions> {
        let log_probs = log_distributions(&self.0, batch)?;
        let ids = candle_grpo_kernels::top_k(&log_probs, entries.unwrap())?;
        let log_probs = log_probs.gather(&ids, 2)?;
        Ok(TeacherDistributions::TopK { ids, log_probs })
    }
}

/// Prompts whose column `source` is "a", "b", 3, absent, "a".
fn prompts() -> Vec<Prompt> {
    let columns = [
        json!({"source": "a"}),
        json!({"source": "b"}),
        json!({"source": 3}),
        json!({}),
        json!({"source": "a"}),
    ];
    let texts = ["abc", "d", "ee", "ca", "b"];
    let rows = texts.iter().zip(columns).enumerate();
    rows.map(|(i, (text, columns))| Prompt::new(i as u64, text, columns, &tokenizer()).unwrap())
        .collect()
}

fn by_source(teachers: Vec<(&str, TeacherPart)>) -> TeacherPart {
    let teachers = teachers.into_iter();
    TeacherPart::ByColumn {
        column: "source".to_owned(),
        teachers: teachers
            .map(|(name, part)| (name.to_owned(), part))
            .collect(),
    }
}

fn step_parts(config: &TrainConfig, teacher: TeacherPart) -> TrainerParts {
    TrainerParts {
        prompts: prompts(),
        teacher: Some(teacher),
        ..parts(digest, config.clone())
    }
}

/// All five prompts in a step of plain gradient descent: the change of the weights is the gradient.
fn config(recipe: Recipe) -> TrainConfig {
    TrainConfig {
        recipe,
        prompts_per_step: 5,
        max_grad_norm: 1e9,
        optimizer: AdamWConfig {
            learning_rate: 100.,
            beta1: 0.,
            beta2: 0.,
            // The step is gradient / (abs(gradient) + epsilon).
            epsilon: 1e3,
            weight_decay: 0.,
            ..AdamWConfig::default()
        },
        ..common::config()
    }
}

/// Only the teacher's term.
fn of_loss(form: TeacherTermForm) -> Recipe {
    Recipe {
        policy_loss: PolicyLoss {
            distillation: Some(TeacherTerm {
                form,
                ..TeacherTerm::new(1.)
            }),
            ..PolicyLoss::on_policy_distillation()
        },
        advantage: zero_advantage(TokenAdvantage::default()),
        ..Recipe::default()
    }
}

fn of_distributions(support: Support) -> Recipe {
    Recipe {
        distillation_loss: Some(DistillationLoss {
            support,
            ..DistillationLoss::default()
        }),
        ..Recipe::gkd()
    }
}

fn zero_advantage(tokens: TokenAdvantage) -> AdvantagePipeline {
    AdvantagePipeline::from(GroupAdvantage::grpo()).then(tokens)
}

fn nothing(_: &Sample) -> f32 {
    0.
}

/// The weights after a step, minus those before.
fn change(config: &TrainConfig, teacher: TeacherPart) -> BTreeMap<String, Tensor> {
    let mut trainer = trainer_of(TrainerParts {
        reward: Box::new(nothing),
        ..step_parts(config, teacher)
    });
    assert!(!trainer.step().unwrap().skipped);
    let before = parameters();
    let now = trainer.actor().parameters().iter();
    now.map(|(name, x)| {
        let before = before.get(name).unwrap().as_detached_tensor();
        (name.to_owned(), (x.as_detached_tensor() - before).unwrap())
    })
    .collect()
}

/// Two teachers by a column are two runs of one teacher on their rows, whose gradients add up.
#[rstest]
#[case::advantage(of_loss(TeacherTermForm::default()), false)]
#[case::loss(of_loss(TeacherTermForm::Loss { kl: Kl::new(KlEstimator::K2) }), false)]
#[case::on_servers(of_loss(TeacherTermForm::default()), true)]
#[case::distributions(of_distributions(Support::Vocabulary), false)]
#[case::entries(of_distributions(Support::Teacher { k: 3 }), true)]
fn two_teachers_are_two_runs_of_one_teacher_on_their_rows(
    #[case] recipe: Recipe,
    #[case] at_once: bool,
) {
    stay_on_cpu();
    let config = config(recipe);
    let first = || TeacherPart::other(policy(9));
    let second = || {
        if at_once {
            TeacherPart::other(AtOnce(policy(10)))
        } else {
            TeacherPart::other(policy(10))
        }
    };
    let both = change(&config, by_source(vec![("a", first()), ("b", second())]));
    let one = change(&config, by_source(vec![("a", first())]));
    let other = change(&config, by_source(vec![("b", second())]));
    let mut largest = 0f32;
    for (name, both) in &both {
        let sum = (&one[name] + &other[name]).unwrap();
        let zeros = sum.zeros_like().unwrap();
        let size = max_difference(&sum, &zeros);
        largest = largest.max(size);
        let difference = max_difference(both, &sum);
        assert!(
            difference <= 1e-3 * size + 1e-9,
            "{name}: {difference} of {size}"
        );
    }
    assert!(largest > 1e-4, "{largest}");
}

/// A micro-batch has the distributions of all teachers on servers, and rows of some of them.
#[test]
fn a_teacher_without_a_row_in_a_micro_batch_has_no_part_in_it() {
    let config = config(of_distributions(Support::Vocabulary));
    let models = Models::new(model(), parameters(), &config).unwrap();
    let tokens = step_batch(&models, &prompts(), &config).unwrap();
    let tokens = tokens.tokens();
    let totals = tokens.totals();
    let taught_by = |names: [&str; 2]| {
        let sequences = tokens.sequences().iter().enumerate();
        let sequences = sequences.map(|(i, sequence)| {
            let name = if i < 4 { names[0] } else { names[1] };
            sequence.clone().with_teacher(Some(name.into()))
        });
        let batch = Batch::new(sequences.collect()).unwrap();
        TokenBatch::of_batch(&batch, device()).unwrap()
    };
    let pass = |names: [&str; 2], given: &[&str]| {
        let tokens = taught_by(names);
        let zeros = Tensor::zeros(20, DType::F32, device()).unwrap();
        let mut batch = TrainingBatch::new(tokens.clone(), &zeros);
        for (name, seed) in given.iter().zip(9..) {
            let found = policy(seed).distributions(&tokens).unwrap();
            batch.teachers.insert((*name).to_owned(), found);
        }
        let mut actor = Models::new(model(), parameters(), &config).unwrap().actor;
        let metrics = actor.forward_backward(&batch, &totals).unwrap();
        let gradients = actor.gradients().iter();
        let copies = gradients.map(|(name, x)| (name.to_owned(), x.copy().unwrap()));
        (metrics, copies.collect::<BTreeMap<_, _>>())
    };
    let (metrics, alone) = pass(["a", "a"], &["a"]);
    let (found, gradients) = pass(["a", "a"], &["a", "b"]);
    assert_eq!(found, metrics);
    for (name, gradient) in &gradients {
        assert_eq!(max_difference(gradient, &alone[name]), 0., "{name}");
    }
    let (found, _) = pass(["a", "b"], &["a", "b"]);
    assert!(found.get("divergence/b").is_some());
}

/// A single teacher of some rows is one of all rows whose other sequences do not train.
#[rstest]
#[case::log_probs(of_loss(TeacherTermForm::default()))]
#[case::distributions(of_distributions(Support::Vocabulary))]
fn the_divergences_of_teachers_are_apart(#[case] recipe: Recipe) {
    stay_on_cpu();
    let config = config(recipe);
    let teachers = || {
        by_source(vec![
            ("a", TeacherPart::other(policy(9))),
            ("3", TeacherPart::other(policy(10))),
        ])
    };
    let step = |teacher: TeacherPart| {
        let mut trainer = trainer_of(step_parts(&config, teacher));
        trainer.step().unwrap().policy
    };
    let both = step(teachers());
    let metric = if config.recipe.distillation_loss.is_some() {
        "divergence"
    } else {
        "teacher_log_ratio"
    };
    let one = step(by_source(vec![("a", TeacherPart::other(policy(9)))]));
    let other = step(by_source(vec![("3", TeacherPart::other(policy(10)))]));
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-4 * b.abs(), "{a} {b}");
    close(both[&format!("{metric}/a")], one[metric]);
    close(both[&format!("{metric}/3")], other[metric]);
    let (low, high) = (
        one[metric].min(other[metric]),
        one[metric].max(other[metric]),
    );
    assert!(
        low < both[metric] && both[metric] < high,
        "{low} {high} {}",
        both[metric]
    );
}

/// The advantages of rows without a teacher do not change.
#[test]
fn a_row_without_a_teacher_keeps_its_advantage() {
    let advantage = |tokens: TokenAdvantage| {
        let recipe = Recipe {
            advantage: zero_advantage(tokens),
            ..Recipe::default()
        };
        let teacher = by_source(vec![("b", TeacherPart::other(policy(9)))]);
        let mut trainer = trainer_of(step_parts(&config(recipe), teacher));
        trainer.step().unwrap();
        let config = RolloutLogConfig {
            max_groups: 5,
            ..RolloutLogConfig::default()
        };
        let records = trainer.rollouts(&config).unwrap();
        records
            .iter()
            .map(|record| (record.prompt.clone(), record.advantage))
            .collect::<Vec<_>>()
    };
    let plain = advantage(TokenAdvantage::default());
    let weighted = advantage(TokenAdvantage {
        teacher_weight: Some(TeacherWeight::default()),
        ..TokenAdvantage::default()
    });
    assert_eq!(plain.len(), 20);
    for ((prompt, plain), (_, weighted)) in plain.iter().zip(&weighted) {
        assert_eq!(
            plain == weighted,
            prompt != "d",
            "{prompt}: {plain:?} {weighted:?}"
        );
    }
}

/// A step in which no row has a teacher learns nothing.
#[rstest]
#[case::log_probs(of_loss(TeacherTermForm::default()))]
#[case::distributions(of_distributions(Support::Vocabulary))]
fn a_step_without_a_teacher_is_skipped(#[case] recipe: Recipe) {
    let teacher = by_source(vec![("nobody", TeacherPart::other(policy(9)))]);
    let mut trainer = trainer_of(TrainerParts {
        reward: Box::new(nothing),
        ..step_parts(&config(recipe), teacher)
    });
    let metrics = trainer.step().unwrap();
    assert!(metrics.skipped);
    let changed = trainer.actor().parameters().iter();
    for (name, x) in changed {
        assert_eq!(
            max_difference(x, parameters().get(name).unwrap()),
            0.,
            "{name}"
        );
    }
}

/// Without a share in the loss, the advantages need not be 0.
#[test]
fn a_step_that_learns_from_teachers_alone_is_skipped_without_one() {
    let teacher = by_source(vec![("nobody", TeacherPart::other(policy(9)))]);
    let config = config(of_distributions(Support::Vocabulary));
    let mut trainer = trainer_of(step_parts(&config, teacher));
    let metrics = trainer.step().unwrap();
    let reason = metrics.skip_reason.as_deref();
    assert_eq!(reason, Some("no completion has a teacher"));
    let records = trainer.rollouts(&RolloutLogConfig::default()).unwrap();
    assert!(records.iter().any(|x| x.advantage.is_some_and(|a| a != 0.)));
}

/// A custom loop may have completions that no sampler has drawn.
#[rstest]
#[case::drawn(true, false)]
#[case::with_input(false, true)]
#[case::without(false, false)]
fn completions_without_log_probs_have_no_ratio_to_the_sampler(
    #[case] is_drawn: bool,
    #[case] has_input: bool,
) -> anyhow::Result<()> {
    let config = config(of_loss(TeacherTermForm::default()));
    let mut models = Models::new(model(), parameters(), &config)?;
    models.learn_from(&by_source(vec![("a", TeacherPart::other(policy(9)))]))?;
    let mut groups = step_batch(&models, &prompts(), &config)?.groups().clone();
    if !is_drawn {
        for rollout in &mut groups.rollouts {
            rollout.completion.log_probs = None;
            rollout.completion.drawn_log_probs = Vec::new();
        }
    }
    let taught_by = TaughtBy {
        name: "a".into(),
        ..TaughtBy::default()
    };
    let batch = StepBatch::new(groups, &config, device())?;
    let mut batch = batch.with_teachers(vec![Some(taught_by); 20])?;
    if has_input {
        let zeros = Tensor::zeros(batch.tokens().dims(), DType::F32, device())?;
        batch = batch.with_input(Input::RolloutLogProbs, zeros);
    }
    let ranks = Ranks::default();
    let passes = Passes::new(&config, &ranks)?;
    let mut state = TrainerState::new(&config);
    state.steps += 1;
    let needs = [Input::OldLogProbs, Input::TeacherLogProbs].into();
    step::signals(&mut batch, needs, &models, &config, passes)?;
    step::advantages(&mut batch, None, &config, &mut state)?;
    let found = step::update(Some(&batch), &mut models, None, &config, &mut state, passes)?;
    assert_eq!(found.updates, 1);
    let has_ratio = found.metrics.contains_key("teacher_log_ratio/a");
    assert_eq!(has_ratio, is_drawn || has_input);
    Ok(())
}

/// In a custom loop that does not give the teacher of each completion, all have the same one.
#[rstest]
#[case::log_probs(of_loss(TeacherTermForm::default()))]
#[case::distributions(of_distributions(Support::Vocabulary))]
fn a_completion_whose_teacher_is_not_given_is_named(#[case] recipe: Recipe) -> anyhow::Result<()> {
    let config = config(recipe);
    let mut models = Models::new(model(), parameters(), &config)?;
    models.learn_from(&by_source(vec![("a", TeacherPart::other(policy(9)))]))?;
    let batch = step_batch(&models, &prompts(), &config)?;
    let ranks = Ranks::default();
    let passes = Passes::new(&config, &ranks)?;
    let mut step = |mut batch: StepBatch| {
        let mut state = TrainerState::new(&config);
        state.steps += 1;
        let needs = Needs::new(&config, None).all();
        step::signals(&mut batch, needs, &models, &config, passes)?;
        step::advantages(&mut batch, None, &config, &mut state)?;
        step::update(Some(&batch), &mut models, None, &config, &mut state, passes)
    };
    let words = "sequence 0: its teacher is \"\", must be absent or one of [\"a\"]";
    assert_eq!(message(step(batch.clone())), words);
    let taught = |by: [Option<&str>; 20]| {
        batch.clone().with_teachers(by.map(|name| {
            name.map(|name| TaughtBy {
                name: name.into(),
                ..TaughtBy::default()
            })
        }))
    };
    let mut by = [None; 20];
    by[3] = Some("b");
    let words = "sequence 3: its teacher is \"b\", must be absent or one of [\"a\"]";
    assert_eq!(message(step(taught(by)?)), words);
    by[3] = Some("a");
    assert_eq!(step(taught(by)?)?.updates, 1);
    Ok(())
}

#[rstest]
#[case::log_probs(of_loss(TeacherTermForm::default()))]
#[case::distributions(of_distributions(Support::Teacher { k: 2 }))]
fn the_steps_of_ranks_are_those_of_one_rank(#[case] recipe: Recipe) {
    stay_on_cpu();
    let mut config = config(recipe);
    config.optimizer.epsilon = 1e-3;
    config.optimizer.learning_rate = 1e-2;
    let build = || {
        let own = SelfTeacherConfig {
            prompt: Some("{prompt}ab".to_owned()),
            ..SelfTeacherConfig::default()
        };
        let teachers = vec![
            ("a", TeacherPart::other(policy(9))),
            ("b", TeacherPart::other(AtOnce(policy(10)))),
            (
                "3",
                TeacherPart::Own {
                    config: own,
                    chat_template: None,
                },
            ),
        ];
        step_parts(&config, by_source(teachers))
    };
    assert_ranks_agree(&[2, 5], build, 3);
    run(&mut trainer_of(build()), 1);
}

#[test]
fn teachers_that_contradict_each_other_are_named() {
    let other = || TeacherPart::Other(Arc::new(policy(9)));
    let own = || TeacherPart::Own {
        config: SelfTeacherConfig {
            prompt: Some("a".to_owned()),
            ..SelfTeacherConfig::default()
        },
        chat_template: None,
    };
    let wrong = TeacherPart::Own {
        config: SelfTeacherConfig::default(),
        chat_template: None,
    };
    for (teacher, words) in [
        (
            by_source(vec![]),
            "teacher.teachers: none, must be at least one",
        ),
        (
            by_source(vec![("a", own()), ("b", own())]),
            "teacher.teachers: 2, must have the policy itself at most once",
        ),
        (
            by_source(vec![("a", by_source(vec![("b", other())]))]),
            "teacher.a: several teachers, must be one",
        ),
        (
            by_source(vec![("", other())]),
            "teacher: teachers: one has no name, must have one",
        ),
        (
            by_source(vec![("a", wrong)]),
            "teacher.a.prompt: absent, must be given",
        ),
    ] {
        let config = config(of_distributions(Support::Vocabulary));
        let mut models = Models::new(model(), parameters(), &config).unwrap();
        let found = models.learn_from(&teacher);
        // The settings of a teacher are those of a trainer.
        if !words.contains("prompt") {
            let error = format!("{:#}", found.unwrap_err());
            assert!(words.ends_with(&error), "{error}");
        }
        let error = format!(
            "{:#}",
            Trainer::new(step_parts(&config, teacher)).err().unwrap()
        );
        assert!(error.starts_with(words), "{error}");
    }
}
