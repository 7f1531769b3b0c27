//! Distillation from a teacher's distributions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Tensor};
use candle_grpo_kernels::top_k;
use candle_grpo_loss::{DistillationLoss, KlLoss, PolicyLoss, Recipe, StepTotals, Support, Tail};
use candle_grpo_nn::{AdamWConfig, LoraConfig, Parameters};
use candle_grpo_test_support::{device, stay_on_cpu};
use candle_grpo_train::learn::{
    MemoryPlan, Reference, ReferenceRefresh, Teacher, TeacherDistributions, TeacherPart,
};
use candle_grpo_train::{
    Actor, ActorConfig, ComputeDType, NotFinite, Progress, Sample, StepMetrics, TokenBatch,
    TrainConfig, TrainerParts, TrainingBatch,
};
use rstest::rstest;

use crate::common::{
    self, actor_config, assert_ranks_agree, assert_records_close, digest, drawn_parameters,
    max_difference, model, parameters, parts, run, trainer_of, try_trainer, with_mask,
};
use crate::engines::log_distributions;

fn nothing(_: &Sample) -> f32 {
    0.
}

/// A model with other weights than the policy.
fn teacher() -> Reference {
    let parameters = drawn_parameters(&model(), 9, device());
    Reference::new(&model(), &parameters, ComputeDType::F32).unwrap()
}

/// Another teacher's k most likely entries, for all sequences on a rank at once. Counts its calls.
struct Best(Reference, usize, AtomicUsize);

fn best(k: usize) -> Best {
    Best(teacher(), k, AtomicUsize::new(0))
}

impl Teacher for Best {
    fn takes_micro_batches(&self) -> bool {
        false
    }

    fn log_probs(&self, _: &TokenBatch, _: f64, _: &dyn Progress) -> anyhow::Result<Tensor> {
        anyhow::bail!("no log-probs are asked for")
    }

    fn distributions(
        &self,
        batch: &TokenBatch,
        entries: Option<usize>,
        _: &dyn Progress,
    ) -> anyhow::Result<TeacherDistributions> {
        self.2.fetch_add(1, Ordering::Relaxed);
        assert_eq!(entries, Some(self.1));
        let log_probs = log_distributions(&self.0, batch)?;
        let ids = top_k(&log_probs, self.1)?;
        let log_probs = log_probs.gather(&ids, 2)?;
        Ok(TeacherDistributions::TopK { ids, log_probs })
    }
}

fn best_of(k: usize) -> DistillationLoss {
    DistillationLoss {
        support: Support::Teacher { k },
        ..DistillationLoss::default()
    }
}

fn config(loss: DistillationLoss) -> TrainConfig {
    let recipe = Recipe {
        distillation_loss: Some(loss),
        ..Recipe::gkd()
    };
    let mut config = common::config();
    config.recipe = recipe;
    config.optimizer = AdamWConfig {
        learning_rate: 1e-2,
        epsilon: 1e-3,
        ..AdamWConfig::default()
    };
    config
}

fn actor(parameters: Parameters, policy_loss: PolicyLoss, loss: Option<DistillationLoss>) -> Actor {
    let config = ActorConfig {
        distillation_loss: loss,
        ..actor_config(policy_loss)
    };
    Actor::new(model(), parameters, config).unwrap()
}

/// Sequences with several lengths and the teacher's distributions. One has no token that counts.
fn batch() -> TrainingBatch {
    let pairs: [(&[u32], &[u32]); 4] = [
        (&[1, 2, 3], &[4, 5, 0]),
        (&[4], &[1, 1, 2, 3, 5]),
        (&[2, 2], &[3]),
        (&[5, 1], &[2, 4, 1, 3]),
    ];
    let mut mask = pairs.map(|(_, response)| vec![1; response.len()]);
    mask[1] = vec![1, 0, 1, 0, 0];
    mask[2] = vec![0];
    let tokens = with_mask(&pairs, &mask);
    let distributions = teacher().distributions(&tokens).unwrap();
    let advantages = Tensor::new(&[1f32, -0.5, 0.3, 0.2], device()).unwrap();
    let mut batch = TrainingBatch::new(tokens, &advantages);
    batch.teachers.insert(String::new(), distributions);
    batch
}

#[rstest]
#[case::forward(DistillationLoss::default())]
#[case::jensen_shannon(DistillationLoss { beta: 0.5, coef: 2., ..DistillationLoss::default() })]
#[case::reverse(DistillationLoss { beta: 1., ..DistillationLoss::default() })]
#[case::bucket(best_of(2))]
#[case::student(DistillationLoss {
    beta: 1.,
    support: Support::Student { k: 3 },
    tail: Tail::Renormalize,
    temperature: 0.8,
    ..DistillationLoss::default()
})]
fn the_gradient_is_the_finite_difference_of_the_divergence(#[case] loss: DistillationLoss) {
    stay_on_cpu();
    let alone = PolicyLoss {
        loss_coef: 0.,
        ..PolicyLoss::gpg()
    };
    let batch = batch();
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    let compute = |parameters: Parameters| {
        let mut actor = actor(parameters, alone.clone(), Some(loss));
        let metrics = actor.forward_backward(&batch, &totals).unwrap();
        (loss.coef * metrics.get("divergence").unwrap(), actor)
    };
    let (_, whole) = compute(parameters());
    for (name, gradient) in whole.gradients().iter() {
        let gradient: Vec<f32> = gradient.flatten_all().unwrap().to_vec1().unwrap();
        let largest =
            (0..gradient.len()).max_by(|&a, &b| gradient[a].abs().total_cmp(&gradient[b].abs()));
        let at = largest.unwrap();
        let moved = |by: f32| {
            let mut tensors = parameters().frozen_copy().unwrap();
            let tensor = tensors.get_mut(name).unwrap();
            let shape = tensor.shape().clone();
            let mut values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            values[at] += by;
            *tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            compute(Parameters::from_tensors(&model(), tensors, &Device::Cpu).unwrap()).0
        };
        let difference = (moved(4e-3) - moved(-4e-3)) / 8e-3;
        let found = f64::from(gradient[at]);
        assert!(
            (found - difference).abs() < 2e-2 * difference.abs() + 1e-4,
            "{name}: {found}, must be {difference}"
        );
    }
}

/// The loss terms add up, in any micro-batches.
#[rstest]
fn the_gradient_is_added_to_that_of_the_policy(#[values(1, 3, 4)] size: usize) {
    let gradients = |policy_loss: PolicyLoss, loss: Option<DistillationLoss>, size: usize| {
        let mut actor = actor(parameters(), policy_loss, loss);
        let batch = batch();
        let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
        for piece in batch.split(size).unwrap() {
            actor.forward_backward(&piece, &totals).unwrap();
        }
        let gradients = actor.gradients().iter();
        let copies = gradients.map(|(name, x)| (name.to_owned(), x.copy().unwrap()));
        copies.collect::<Vec<_>>()
    };
    let loss = Some(best_of(3));
    let alone = PolicyLoss {
        loss_coef: 0.,
        ..PolicyLoss::dapo()
    };
    let policy = gradients(PolicyLoss::dapo(), None, 4);
    let divergence = gradients(alone, loss, 4);
    let both = gradients(PolicyLoss::dapo(), loss, size);
    assert_eq!(policy.len(), both.len());
    for (((name, a), (_, b)), (_, sum)) in policy.iter().zip(&divergence).zip(&both) {
        let difference = max_difference(sum, &(a + b).unwrap());
        let zeros = b.zeros_like().unwrap();
        assert!(max_difference(b, &zeros) > 1e-4, "{name}");
        assert!(difference < 1e-5, "{name}: {difference}");
    }
}

#[rstest]
#[case::jensen_shannon(Recipe::gkd().distillation_loss.unwrap())]
#[case::top_k_forward(best_of(2))]
#[case::reverse(DistillationLoss { beta: 1., ..DistillationLoss::default() })]
fn the_policy_approaches_the_teacher_without_a_reward(#[case] loss: DistillationLoss) {
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher())),
        ..parts(nothing, config(loss))
    });
    let metrics = run(&mut trainer, 30);
    assert!(metrics.iter().all(|metrics| !metrics.skipped));
    let mean = |steps: &[StepMetrics]| {
        let all = steps.iter().map(|step| step.policy["divergence"]);
        all.sum::<f64>() / steps.len() as f64
    };
    let (first, last) = (mean(&metrics[..5]), mean(&metrics[25..]));
    assert!(last < 0.5 * first, "{first} {last}");
    let is_part = loss.support != Support::Vocabulary;
    for name in ["student_mass", "teacher_mass"] {
        assert_eq!(metrics[0].policy.contains_key(name), is_part);
    }
}

#[test]
fn the_best_entries_teach_what_their_distribution_does() {
    let loss = best_of(3);
    let mut whole = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher())),
        ..parts(digest, config(loss))
    });
    let mut best = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(best(3))),
        ..parts(digest, config(loss))
    });
    assert_records_close(&run(&mut best, 4), &run(&mut whole, 4));
}

/// Before the first update, so that a failure or a cancel leaves the weights as they are.
#[test]
fn a_teacher_of_all_sequences_is_asked_once_in_a_step() {
    let config = TrainConfig {
        epochs: 3,
        mini_batch_size: Some(5),
        ..config(best_of(2))
    };
    let teacher = Arc::new(best(2));
    let shared: Arc<dyn Teacher> = Arc::clone(&teacher) as _;
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::Other(shared)),
        ..parts(digest, config)
    });
    run(&mut trainer, 2);
    assert_eq!(teacher.2.load(Ordering::Relaxed), 2);
}

#[rstest]
#[case::hidden(false, DistillationLoss { beta: 0.3, ..DistillationLoss::default() })]
#[case::best(true, best_of(2))]
fn the_steps_of_ranks_are_those_of_one_rank(#[case] best: bool, #[case] loss: DistillationLoss) {
    stay_on_cpu();
    let build = || {
        let mut config = config(loss);
        config.recipe.policy_loss.loss_coef = 1.;
        let teacher: Arc<dyn Teacher> = if best {
            Arc::new(self::best(2))
        } else {
            Arc::new(teacher())
        };
        TrainerParts {
            teacher: Some(TeacherPart::Other(teacher)),
            ..parts(digest, config)
        }
    };
    // With more ranks than micro-batches some have no sequence.
    assert_ranks_agree(&[2, 5], build, 4);
}

#[rstest]
#[case::adapters(TrainConfig { adapters: Some(LoraConfig::all_linear(2, 4.)), ..config(best_of(2)) })]
#[case::bf16(TrainConfig { compute_dtype: ComputeDType::Bf16, ..config(best_of(2)) })]
#[case::adapters_in_bf16(TrainConfig {
    adapters: Some(LoraConfig::all_linear(2, 4.)),
    compute_dtype: ComputeDType::Bf16,
    ..config(DistillationLoss::default())
})]
#[case::adapters_in_f16(TrainConfig {
    adapters: Some(LoraConfig::all_linear(2, 4.)),
    compute_dtype: ComputeDType::F16,
    ..config(best_of(2))
})]
#[case::epochs(TrainConfig { epochs: 2, mini_batch_size: Some(5), ..config(best_of(2)) })]
fn every_form_of_a_policy_learns_from_distributions(#[case] config: TrainConfig) {
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher())),
        ..parts(nothing, config)
    });
    let metrics = run(&mut trainer, 12);
    let divergence = |step: usize| metrics[step].policy["divergence"];
    assert!(
        divergence(11) < divergence(0),
        "{} {}",
        divergence(0),
        divergence(11)
    );
}

/// Models in one family differ in their vocabulary padding.
#[test]
fn a_teacher_may_have_more_rows_than_the_policy() {
    let mut batch = batch();
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    let divergence = |batch: &TrainingBatch| {
        let loss = Some(DistillationLoss::default());
        let mut actor = actor(parameters(), PolicyLoss::gpg(), loss);
        let metrics = actor.forward_backward(batch, &totals);
        metrics.map(|metrics| metrics.get("divergence").unwrap())
    };
    let expected = divergence(&batch).unwrap();
    let Some(TeacherDistributions::Hidden { weight, .. }) = batch.teachers.get_mut("") else {
        panic!("no hidden states");
    };
    let narrow = weight.narrow(0, 0, 3).unwrap();
    *weight = Tensor::cat(&[&*weight, &narrow], 0).unwrap();
    assert_eq!(divergence(&batch).unwrap(), expected);
    let Some(TeacherDistributions::Hidden { weight, .. }) = batch.teachers.get_mut("") else {
        panic!("no hidden states");
    };
    *weight = narrow;
    let error = divergence(&batch).unwrap_err().to_string();
    assert_eq!(
        error,
        "teacher: 3 logits, must be at least 6, those of the policy"
    );
}

/// A fixed reference has its weights in the compute dtype only; one that follows the policy is f32
/// beside that.
#[test]
fn the_plan_of_memory_has_the_reference() {
    let numbers: usize = parameters().iter().map(|(_, x)| x.elem_count()).sum();
    for (dtype, fixed, follows) in [(ComputeDType::F32, 4, 4), (ComputeDType::Bf16, 2, 6)] {
        let mut config = TrainConfig {
            compute_dtype: dtype,
            ..common::config()
        };
        let reference =
            |config: &TrainConfig| MemoryPlan::new(&model(), config, 3, 0).unwrap().reference;
        assert_eq!(reference(&config), 0);
        config.recipe.policy_loss.kl = Some(KlLoss::k3(0.04));
        assert_eq!(reference(&config), fixed * numbers);
        config.reference_refresh = Some(ReferenceRefresh {
            every_steps: 2,
            alpha: 0.5,
        });
        assert_eq!(reference(&config), follows * numbers);
    }
}

#[test]
fn the_plan_of_memory_has_the_teacher() {
    let plan = |config: &TrainConfig| MemoryPlan::new(&model(), config, 3, 0).unwrap();
    let (alone, distilled) = (plan(&common::config()), plan(&config(best_of(2))));
    assert!(distilled.training > alone.training);
    assert_eq!((alone.teacher, distilled.teacher), (0, 0));
    let numbers: usize = parameters().iter().map(|(_, x)| x.elem_count()).sum();
    for (dtype, bytes) in [(ComputeDType::F32, 4), (ComputeDType::Bf16, 2)] {
        let config = TrainConfig {
            compute_dtype: dtype,
            ..config(best_of(2))
        };
        let with = distilled.with_teacher(&model(), &config, 1);
        assert_eq!(with.teacher, bytes * numbers);
        assert_eq!(with.peak(), distilled.peak() + with.teacher);
    }
}

#[test]
fn a_teacher_that_is_not_finite_is_named() {
    let mut batch = batch();
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    let compute = |batch: &TrainingBatch| {
        let loss = Some(DistillationLoss::default());
        let mut actor = actor(parameters(), PolicyLoss::gpg(), loss);
        actor.forward_backward(batch, &totals).map(|_| ())
    };
    // The third sequence has no token that counts.
    for (row, is_used) in [(2, false), (0, true)] {
        let Some(TeacherDistributions::Hidden { hidden, .. }) = batch.teachers.get_mut("") else {
            panic!("no hidden states");
        };
        let mut rows: Vec<Tensor> = (0..4).map(|i| hidden.get(i).unwrap()).collect();
        rows[row] = (&rows[row] * f64::NAN).unwrap();
        *hidden = Tensor::stack(&rows, 0).unwrap();
        match compute(&batch) {
            Ok(()) => assert!(!is_used),
            Err(error) => {
                assert!(is_used, "{error:#}");
                let error = error.downcast::<NotFinite>().unwrap();
                assert_eq!(error.tensor(), "teacher.hidden");
            }
        }
    }
}

/// Another crate's teacher, which has no distributions.
struct LogProbsOnly;

impl Teacher for LogProbsOnly {
    fn log_probs(&self, batch: &TokenBatch, _: f64, _: &dyn Progress) -> anyhow::Result<Tensor> {
        Ok(batch.response_mask().zeros_like()?)
    }
}

/// A teacher for all sequences, whose function makes the distributions from a batch.
struct Other(fn(&TokenBatch) -> TeacherDistributions);

impl Teacher for Other {
    fn takes_micro_batches(&self) -> bool {
        false
    }

    fn log_probs(&self, batch: &TokenBatch, _: f64, _: &dyn Progress) -> anyhow::Result<Tensor> {
        Ok(batch.response_mask().zeros_like()?)
    }

    fn distributions(
        &self,
        batch: &TokenBatch,
        _: Option<usize>,
        _: &dyn Progress,
    ) -> anyhow::Result<TeacherDistributions> {
        Ok(self.0(batch))
    }
}

#[rstest]
// One entry for each token.
#[case(
    |batch: &TokenBatch| TeacherDistributions::TopK {
        ids: batch.targets().unsqueeze(2).unwrap(),
        log_probs: batch.targets().zeros_like().unwrap().unsqueeze(2).unwrap(),
    },
    "teacher.ids: shape"
)]
#[case(
    |batch: &TokenBatch| TeacherDistributions::Hidden {
        hidden: batch.targets().unsqueeze(2).unwrap(),
        weight: batch.targets().clone(),
        logit_cap: None,
    },
    "teacher: whole distributions, must be the most likely entries"
)]
fn wrong_distributions_of_a_teacher_of_all_sequences_are_named(
    #[case] make: fn(&TokenBatch) -> TeacherDistributions,
    #[case] words: &str,
) {
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(Other(make))),
        ..parts(nothing, config(best_of(2)))
    });
    let text = format!("{:#}", trainer.step().unwrap_err());
    assert!(text.contains(words), "{text}");
}

#[test]
fn what_a_teacher_of_all_sequences_cannot_give_is_named() {
    let loss = DistillationLoss::default();
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(best(2))),
        ..parts(nothing, config(loss))
    });
    let text = format!("{:#}", trainer.step().unwrap_err());
    let words = "recipe.distillation_loss.support: Vocabulary, must be teacher";
    assert!(text.contains(words), "{text}");
}

#[test]
fn what_is_missing_is_named() {
    let error = try_trainer(nothing, config(best_of(2))).err().unwrap();
    let text = format!("{error:#}");
    assert!(text.contains("teacher: none, must be given"), "{text}");
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(LogProbsOnly)),
        ..parts(nothing, config(best_of(2)))
    });
    let error = trainer.step();
    let text = format!("{:#}", error.unwrap_err());
    assert!(
        text.contains("teacher: gives log-probs of tokens only, must give distributions"),
        "{text}"
    );

    let batch = batch();
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    let compute = |teacher: Option<TeacherDistributions>| {
        let loss = Some(DistillationLoss::default());
        let mut actor = actor(parameters(), PolicyLoss::gpg(), loss);
        let mut batch = batch.clone();
        let teacher = teacher.map(|teacher| (String::new(), teacher));
        batch.teachers = teacher.into_iter().collect();
        actor
            .forward_backward(&batch, &totals)
            .unwrap_err()
            .to_string()
    };
    let text = compute(None);
    assert_eq!(
        text,
        "teacher: absent, must be given with a distillation_loss"
    );
    let ids = Tensor::zeros((4, 5, 2), candle_core::DType::U32, device()).unwrap();
    let log_probs = Tensor::zeros((4, 4, 2), candle_core::DType::F32, device()).unwrap();
    let text = compute(Some(TeacherDistributions::TopK {
        ids: ids.clone(),
        log_probs,
    }));
    assert!(
        text.starts_with("teacher.log_probs: shape [4, 4, 2], must be [4, 5, 2]"),
        "{text}"
    );
    let text = compute(Some(TeacherDistributions::TopK {
        ids: (&ids + 6f64).unwrap(),
        log_probs: Tensor::zeros((4, 5, 2), candle_core::DType::F32, device()).unwrap(),
    }));
    assert!(
        text.starts_with(
            "distillation_loss.support: Vocabulary, must be the entries of the teacher"
        ),
        "{text}"
    );
}
