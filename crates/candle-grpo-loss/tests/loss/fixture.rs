//! A batch with five sequences, and losses that cover all combinations of options.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::experimental::{FutureKl, Vespo};
use candle_grpo_loss::surrogate::{
    ClipCov, DetachedWeight, Divergence, DivergenceMask, DropIf, GeometricMean, KlCov, Likelihood,
    MaskedValue, PositiveIf, SoftGate, SquaredLogRatio, SurrogateInputs, TokenLosses, Topr,
    UnifiedMask,
};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, EmptySequences, ImportanceLevel, KlLoss, MetricValues,
    PolicyBatch, PolicyLoss, PolicyLossOutput, PositiveNll, StepTotals, Surrogate, TeacherTerm,
    TeacherTermForm, TokenLoss,
};
use candle_grpo_test_support::{assert_close, noise, numbers};

/// Sequences and tokens.
pub(crate) const B: usize = 5;
pub(crate) const T: usize = 6;

/// A batch in f64 on the host, and the device for its tensors.
pub(crate) struct Fixture {
    pub(crate) log_probs: Vec<f64>,
    pub(crate) old_log_probs: Vec<f64>,
    pub(crate) ref_log_probs: Vec<f64>,
    pub(crate) entropy: Vec<f64>,
    pub(crate) teacher_log_probs: Vec<f64>,
    pub(crate) token_weights: Vec<f64>,
    pub(crate) advantages: Vec<f64>,
    pub(crate) importance_weights: Vec<f64>,
    pub(crate) sample_weights: Vec<f64>,
    pub(crate) scores: Vec<f64>,
    pub(crate) selected: Vec<u8>,
    pub(crate) mask: Vec<u8>,
    /// Where the tensors are.
    pub(crate) device: Device,
}

impl Fixture {
    /// Ragged sequences, one with a hole in the middle and one without any token.
    pub(crate) fn new(device: &Device) -> Self {
        let mut seed = 0;
        let mut vector = |low: f64, high: f64| -> Vec<f64> {
            seed += 1;
            let numbers = noise(B * T, seed).into_iter();
            numbers
                .map(|x| low + (high - low) * (x + 1.) / 2.)
                .collect()
        };
        let old_log_probs = vector(-3., -0.1);
        let drift = vector(-0.6, 0.6);
        let gap = vector(-0.8, 0.8);
        let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x + y).collect::<Vec<_>>();
        let lengths = [6, 3, 0, 5, 1];
        let mut mask: Vec<u8> = lengths
            .iter()
            .flat_map(|&n| (0..T).map(move |t| u8::from(t < n)))
            .collect();
        mask[3 * T + 2] = 0;
        Self {
            log_probs: sum(&old_log_probs, &drift),
            ref_log_probs: sum(&old_log_probs, &gap),
            entropy: vector(0.1, 3.),
            advantages: vec![1.3, -0.7, 0.4, -1.1, 0.9],
            importance_weights: vector(0.5, 1.5),
            teacher_log_probs: vector(-3., -0.1),
            token_weights: vec![1.; B * T],
            sample_weights: vec![0.5, 1.5, 1., 1.2, 0.8],
            scores: vec![1., 0., 1., 0., 0.],
            selected: (0..B * T).map(|i| u8::from(i % 4 == 1)).collect(),
            old_log_probs,
            mask,
            device: device.clone(),
        }
    }

    /// Computes the loss for some rows, as a function of `log_probs` and `entropy`.
    pub(crate) fn compute_rows(
        &self,
        loss: &PolicyLoss,
        rows: std::ops::Range<usize>,
        totals: &StepTotals,
        dtype: DType,
    ) -> Result<Computed> {
        let device = &self.device;
        let count = rows.len();
        let per_token = |x: &[f64]| {
            Tensor::from_slice(&x[rows.start * T..rows.end * T], (count, T), device)?
                .to_dtype(dtype)
        };
        let per_row =
            |x: &[f64]| Tensor::from_slice(&x[rows.clone()], count, device)?.to_dtype(dtype);
        let log_probs = Var::from_tensor(&per_token(&self.log_probs)?)?;
        let entropy = Var::from_tensor(&per_token(&self.entropy)?)?;
        let (old, reference) = (
            per_token(&self.old_log_probs)?,
            per_token(&self.ref_log_probs)?,
        );
        let (advantages, sample_weights) =
            (per_row(&self.advantages)?, per_row(&self.sample_weights)?);
        let importance_weights = per_token(&self.importance_weights)?;
        let scores = per_row(&self.scores)?;
        let flags =
            |x: &[u8]| Tensor::from_slice(&x[rows.start * T..rows.end * T], (count, T), device);
        let selected = flags(&self.selected)?;
        let teacher = per_token(&self.teacher_log_probs)?;
        let token_weights = per_token(&self.token_weights)?;
        let groups = per_row(&[0., 0., 1., 1., 1.])?;
        // Each row's count of tokens for its prompt: rows 0 and 1 share a prompt, and so do the
        // others.
        let prompt_tokens = Tensor::new(&[9f64, 9., 5., 5., 5.], device)?;
        let prompt_tokens = prompt_tokens.narrow(0, rows.start, count)?;
        let mask =
            Tensor::from_slice(&self.mask[rows.start * T..rows.end * T], (count, T), device)?;
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask)
            .old_log_probs(&old)
            .ref_log_probs(&reference)
            .entropy(&entropy)
            .importance_weights(&importance_weights)
            .sample_weights(&sample_weights)
            .scores(&scores)
            .selected_tokens(&selected)
            .prompt_tokens(&prompt_tokens)
            .teacher_log_probs(&teacher)
            .token_weights(&token_weights)
            .groups(&groups);
        let output = loss.compute(&batch, totals)?;
        let gradients = output.loss.backward()?;
        let gradient_of = |x: &Var| match gradients.get(x) {
            Some(g) => numbers(g),
            None => Ok(vec![0.; count * T]),
        };
        Ok(Computed {
            loss: numbers(&output.loss)?[0],
            log_probs: gradient_of(&log_probs)?,
            entropy: gradient_of(&entropy)?,
            output,
        })
    }

    pub(crate) fn compute(&self, loss: &PolicyLoss) -> Result<Computed> {
        self.compute_rows(loss, 0..B, &self.totals()?, DType::F64)
    }

    pub(crate) fn totals(&self) -> Result<StepTotals> {
        let counted = StepTotals::count(&Tensor::from_slice(&self.mask, (B, T), &self.device)?)?;
        Ok(counted.with_prompts(2.))
    }
}

/// Returns the same loss with its surrogate as a custom one, which has no fused path.
pub(crate) fn composed(loss: &PolicyLoss) -> PolicyLoss {
    #[derive(Debug)]
    struct Wrapped(Surrogate);

    impl TokenLoss for Wrapped {
        fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
            self.0.per_token(inputs)
        }
    }

    PolicyLoss {
        surrogate: Surrogate::custom(Wrapped(loss.surrogate.clone())),
        ..loss.clone()
    }
}

/// A loss and its gradients.
pub(crate) struct Computed {
    pub(crate) loss: f64,
    pub(crate) log_probs: Vec<f64>,
    pub(crate) entropy: Vec<f64>,
    pub(crate) output: PolicyLossOutput,
}

/// Compares loss and metrics.
pub(crate) fn assert_same_output(
    found: &PolicyLossOutput,
    expected: &PolicyLossOutput,
    tolerance: f64,
) -> Result<()> {
    assert_close(&numbers(&found.loss)?, &numbers(&expected.loss)?, tolerance);
    let (metrics, expected) = (found.metrics.to_host()?, expected.metrics.to_host()?);
    let names = |values: &MetricValues| -> Vec<String> {
        values.iter().map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(names(&metrics), names(&expected));
    for ((name, value), (_, expected)) in metrics.iter().zip(expected.iter()) {
        assert!(
            (value - expected).abs() <= tolerance * (1. + expected.abs()),
            "{name}: {value}, expected {expected}"
        );
    }
    Ok(())
}

pub(crate) fn aggregations() -> Vec<Aggregation> {
    vec![
        Aggregation::TokenMean,
        Aggregation::TokenSum,
        Aggregation::SeqMeanTokenSum,
        Aggregation::SeqMeanTokenMean,
        Aggregation::SeqMeanTokenSumNorm { length: 9. },
        Aggregation::PromptMeanTokenMean,
    ]
}

pub(crate) fn kl_losses() -> Vec<Option<KlLoss>> {
    let kl = |kl: Kl, bias_correction: BiasCorrection| {
        Some(KlLoss {
            bias_correction,
            ..KlLoss::new(0.3, kl)
        })
    };
    vec![
        None,
        kl(Kl::new(KlEstimator::K1), BiasCorrection::Off),
        kl(Kl::new(KlEstimator::K2), BiasCorrection::Off),
        kl(Kl::new(KlEstimator::K3), BiasCorrection::Off),
        kl(Kl::new(KlEstimator::Abs), BiasCorrection::Off),
        kl(Kl::new(KlEstimator::K3), BiasCorrection::Token),
        kl(
            Kl {
                value_clamp: Some(0.1),
                log_ratio_clamp: Some(0.5),
                ..Kl::default()
            },
            BiasCorrection::Off,
        ),
    ]
}

pub(crate) const LEVELS: [ImportanceLevel; 5] = [
    ImportanceLevel::Token,
    ImportanceLevel::Sequence,
    ImportanceLevel::SequenceToken,
    ImportanceLevel::SequenceProduct,
    ImportanceLevel::Segment,
];

/// [`kl_losses`], and every gradient that is not its value's derivative.
pub(crate) fn kls() -> Vec<Option<KlLoss>> {
    let mut kls = kl_losses();
    for (estimator, gradient, bias_correction) in [
        (
            KlEstimator::K1,
            KlGradient::StraightThrough,
            BiasCorrection::Off,
        ),
        (
            KlEstimator::K3,
            KlGradient::ImportanceWeighted { max: 1.1 },
            BiasCorrection::Off,
        ),
        (
            KlEstimator::K2,
            KlGradient::Direct,
            BiasCorrection::ImportanceLevel,
        ),
        (KlEstimator::Abs, KlGradient::Direct, BiasCorrection::Token),
    ] {
        let kl = Kl {
            gradient,
            ..Kl::new(estimator)
        };
        kls.push(Some(KlLoss {
            bias_correction,
            ..KlLoss::new(0.3, kl)
        }));
    }
    kls
}

/// Levels at which a loss's gradient is its value's derivative.
fn differentiable_levels() -> impl Iterator<Item = ImportanceLevel> {
    LEVELS
        .into_iter()
        .filter(|level| *level != ImportanceLevel::SequenceToken)
}

/// Surrogates whose gradient is their value's derivative.
pub(crate) fn differentiable_surrogates() -> Vec<Surrogate> {
    let clip = Clip::asymmetric(0.2, 0.28);
    vec![
        Surrogate::PolicyGradient,
        Surrogate::Clip(clip),
        Surrogate::Clip(Clip {
            dual_clip: Some(1.4),
            ..clip
        }),
        Surrogate::Clip(Clip {
            delta: Some(1.35),
            ..clip
        }),
        Surrogate::Clip(Clip {
            delta: Some(0.9),
            ..clip
        }),
        SoftGate {
            tau_pos: 0.7,
            tau_neg: 1.3,
        }
        .into(),
        SquaredLogRatio { coef: 0.3 }.into(),
        Likelihood::default().into(),
        KlCov {
            coef: 0.4,
            ..Default::default()
        }
        .into(),
        ClipCov {
            clip,
            ..Default::default()
        }
        .into(),
        GeometricMean {
            low: 0.2,
            high: 0.3,
        }
        .into(),
    ]
}

/// Surrogates with a constant weight, whose gradient is not their value's derivative.
pub(crate) fn detached_surrogates() -> Vec<Surrogate> {
    vec![
        DetachedWeight::at_most(1.2).into(),
        DetachedWeight {
            ratio_min: Some(0.9),
            ratio_max: Some(1.1),
            allow_max_below_one: false,
            unified_mask: Some(UnifiedMask {
                low: 0.1,
                high: 0.1,
            }),
        }
        .into(),
        Topr::default().into(),
        Topr {
            positive_weight: 0.8,
            negative_weight: 1.2,
            positive_if: PositiveIf::ScoreAbove(0.),
        }
        .into(),
        Vespo::default().into(),
        DivergenceMask {
            low: 0.04,
            high: 0.06,
            ..Default::default()
        }
        .into(),
        DivergenceMask {
            divergence: Divergence::BinaryKl,
            low: 0.01,
            high: 0.02,
            ratio_max: Some(1.2),
            ..Default::default()
        }
        .into(),
        DivergenceMask {
            drop_if: DropIf::Outside,
            value: MaskedValue::Ratio,
            low: 0.1,
            high: 0.1,
            ratio_max: None,
            ..Default::default()
        }
        .into(),
        FutureKl {
            half_life: 2.,
            high_only: false,
            safety_threshold: Some(1.2),
            ..Default::default()
        }
        .into(),
        Likelihood {
            uncertainty_weight: true,
        }
        .into(),
    ]
}

pub(crate) fn surrogates() -> Vec<Surrogate> {
    let mut surrogates = differentiable_surrogates();
    surrogates.extend(detached_surrogates());
    surrogates
}

pub(crate) fn is_of_tokens_only(surrogate: &Surrogate) -> bool {
    matches!(surrogate, Surrogate::GeometricMean(_) | Surrogate::Vespo(_))
}

/// Losses with differentiable and other surrogates.
pub(crate) fn all_losses() -> Vec<PolicyLoss> {
    let mut losses = losses_of(detached_surrogates());
    losses.extend(differentiable_losses());
    losses
}

/// Losses whose gradient is their value's derivative.
pub(crate) fn differentiable_losses() -> Vec<PolicyLoss> {
    losses_of(differentiable_surrogates())
}

/// A term whose gradient is its value's derivative.
fn distillation() -> TeacherTerm {
    TeacherTerm {
        form: TeacherTermForm::Loss {
            kl: Kl::new(KlEstimator::K2),
        },
        aggregation: Some(Aggregation::TokenMean),
        ..TeacherTerm::new(0.4)
    }
}

/// Every aggregation and KL, each with a different surrogate and level.
fn losses_of(surrogates: Vec<Surrogate>) -> Vec<PolicyLoss> {
    let mut losses = Vec::new();
    for surrogate in surrogates {
        for importance_level in differentiable_levels() {
            if importance_level != ImportanceLevel::Token && is_of_tokens_only(&surrogate) {
                continue;
            }
            let i = losses.len();
            let (aggregations, kls) = (aggregations(), kl_losses());
            losses.push(PolicyLoss {
                importance_level,
                surrogate: surrogate.clone(),
                loss_coef: 0.7,
                kl: kls[i % kls.len()],
                old_kl: (i % 6 == 5).then(|| KlLoss::new(0.2, Kl::new(KlEstimator::K2))),
                distillation: (i % 7 == 6).then(distillation),
                off_policy_threshold: (i % 4 == 3).then_some(0.05),
                positive_nll: (i % 5 == 4).then_some(PositiveNll {
                    coef: 0.2,
                    score_above: 0.5,
                }),
                entropy_coef: 0.05,
                entropy_aggregation: (i % 2 == 0).then_some(Aggregation::TokenMean),
                aggregation: aggregations[i % aggregations.len()],
                empty_sequences: if i % 3 == 0 {
                    EmptySequences::Include
                } else {
                    EmptySequences::Exclude
                },
                allow_length_weighting: true,
                ..Default::default()
            });
        }
    }
    // Gradients that are not the value's derivative have their own tests for the KL.
    debug_assert!(
        losses
            .iter()
            .all(|l| l.kl.is_none_or(|k| k.kl.gradient == KlGradient::Direct))
    );
    losses
}
