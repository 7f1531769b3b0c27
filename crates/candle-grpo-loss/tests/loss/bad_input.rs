//! Bad input gives an error that names the argument, its value and the requirement.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::Kl;
use candle_grpo_core::kl::KlGradient;
use candle_grpo_loss::correction::{FilterLevel, FilterStatistic, ImportanceWeight, RolloutFilter};
use candle_grpo_loss::experimental::{self, FutureKl, GroupContrast, Vespo};
use candle_grpo_loss::surrogate::{
    ClipCov, DetachedWeight, DivergenceMask, GeometricMean, KlCov, PositiveIf, SoftGate,
    SquaredLogRatio, Topr,
};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, ImportanceLevel, KlLoss, LogProbOptions, Mask, OldPolicy,
    PaddedTokens, PolicyBatch, PolicyLoss, PositiveNll, RolloutCorrection, StepTotals, Surrogate,
    TeacherTerm, linear_log_prob, log_prob,
};
use candle_grpo_test_support::{devices, gradient, message};
use rstest::rstest;

fn zeros(shape: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(shape, DType::F32, device).expect("a tensor of zeros")
}

fn variable(values: &Tensor) -> Var {
    Var::from_tensor(values).expect("a variable")
}

/// GRPO with its paper's KL loss.
fn with_kl() -> PolicyLoss {
    PolicyLoss {
        kl: Some(KlLoss::k3(0.04)),
        ..PolicyLoss::grpo()
    }
}

fn six_tokens() -> StepTotals {
    StepTotals {
        tokens: 6.,
        sequences: 2.,
        rows: 2.,
        ..Default::default()
    }
}

fn compute(loss: &PolicyLoss, log_probs: &Tensor, advantages: &Tensor, mask: &Tensor) -> String {
    let log_probs = variable(log_probs);
    let batch = PolicyBatch::new(&log_probs, advantages, mask);
    message(loss.compute(&batch, &six_tokens()))
}

#[test]
fn a_tensor_on_another_device_is_an_error_that_names_it() {
    for device in devices().filter(|device| device.is_cuda()) {
        let (x, mask) = (zeros(&[2, 3], device), zeros(&[2, 3], device));
        let error = compute(
            &PolicyLoss::grpo(),
            &x,
            &zeros(&[2, 3], &Device::Cpu),
            &mask,
        );
        let expected = "advantages: on Cpu, must be on that of response_mask, Cuda { gpu_id: 0 }";
        assert_eq!(error, expected);
    }
}

#[test]
fn sequences_that_cannot_be_padded_are_named() -> Result<()> {
    let (none, some): (&[u32], &[u32]) = (&[], &[1, 2]);
    for device in devices() {
        let padded = |pairs: &[(&[u32], &[u32])]| PaddedTokens::new(pairs, device);
        let must = "must have at least one";
        assert!(message(padded(&[])).contains(must));
        let error = message(padded(&[(some, some), (none, some)]));
        assert!(
            error.starts_with("sequence 1: 0 prompt tokens and 2 response tokens"),
            "{error}"
        );
        let error = message(padded(&[(some, none)]));
        assert!(
            error.starts_with("sequence 0: 2 prompt tokens and 0 response tokens"),
            "{error}"
        );

        // One output for each input, and not for each token.
        let tokens = padded(&[(some, some), (some, &[3])])?;
        let outputs = Tensor::arange(0u32, 6, device)?.reshape((2, 3, 1))?;
        // The response has two tokens, and the input before each of them predicts it.
        assert_eq!(
            tokens.predicting(&outputs)?.to_vec3::<u32>()?,
            [[[1], [2]], [[4], [5]]]
        );
        assert_eq!(
            message(tokens.predicting(&zeros(&[2, 4, 5], device))),
            "outputs: shape [2, 4, 5], must be [2, 3, ..], one for each of input_ids"
        );
        assert!(message(tokens.predicting(&zeros(&[2], device))).starts_with("outputs: shape [2]"));
        assert!(tokens.narrow(1, 2).is_err());
    }
    Ok(())
}

#[test]
fn detached_log_probs_are_an_error() -> Result<()> {
    for device in devices() {
        let (advantages, mask) = (zeros(&[2], device), zeros(&[2, 3], device).ones_like()?);
        let variable = variable(&zeros(&[2, 3], device));
        for detached in [
            zeros(&[2, 3], device),
            variable.detach(),
            (variable.detach() * 2.)?,
        ] {
            let batch = PolicyBatch::new(&detached, &advantages, &mask);
            assert_eq!(
                message(PolicyLoss::grpo().compute(&batch, &six_tokens())),
                "log_probs: detached, must be computed from the variables of the policy, or the loss has no gradient (for the value alone, pass a Var)"
            );
        }
        let batch = PolicyBatch::new(&(variable.as_tensor() * 2.)?, &advantages, &mask);
        PolicyLoss::grpo().compute(&batch, &six_tokens())?;
    }
    Ok(())
}

/// Advantages are computed on the CPU from rewards in host memory.
#[test]
fn one_advantage_per_sequence_may_be_on_the_cpu() -> Result<()> {
    for device in devices() {
        let log_probs = Var::from_tensor(&(zeros(&[2, 3], device) - 1.)?)?;
        let mask = log_probs.ones_like()?;
        let loss = |advantages: &Tensor| -> Result<(f32, Vec<f64>)> {
            let batch = PolicyBatch::new(&log_probs, advantages, &mask);
            let loss = PolicyLoss::grpo().compute(&batch, &six_tokens())?.loss;
            let gradient = gradient(&loss.backward()?, &log_probs)?;
            Ok((loss.to_scalar()?, gradient))
        };
        let advantages = Tensor::new(&[0.5f32, -2.], &Device::Cpu)?;
        let expected = loss(&advantages.to_device(device)?)?;
        assert_eq!(loss(&advantages)?, expected);
        assert_eq!(loss(&advantages.unsqueeze(1)?)?, expected);
    }
    Ok(())
}

#[test]
fn a_wrong_shape_is_an_error_that_names_the_tensor() {
    for device in devices() {
        let (x, mask) = (
            zeros(&[2, 3], device),
            zeros(&[2, 3], device).ones_like().expect("ones"),
        );
        let loss = PolicyLoss::dapo();
        assert_eq!(
            compute(&loss, &zeros(&[2, 4], device), &zeros(&[2], device), &mask),
            "log_probs: shape [2, 4], must be that of response_mask, [2, 3]"
        );
        assert_eq!(
            compute(&loss, &x, &zeros(&[3], device), &mask),
            "advantages: shape [3], must be [2] or [2, 3]"
        );
        assert_eq!(
            compute(&loss, &x, &zeros(&[2], device), &zeros(&[6], device)),
            "response_mask: shape [6], must be [B, T]"
        );
        assert!(
            compute(
                &loss,
                &zeros(&[0, 3], device),
                &zeros(&[0], device),
                &zeros(&[0, 3], device)
            )
            .contains("is empty")
        );
        let wrong = zeros(&[3, 2], device);
        let advantages = zeros(&[2], device);
        let batch = PolicyBatch::new(&variable(&x), &advantages, &mask);
        let totals = six_tokens();
        for (name, batch) in [
            ("old_log_probs", batch.clone().old_log_probs(&wrong)),
            ("ref_log_probs", batch.clone().ref_log_probs(&wrong)),
            ("entropy", batch.clone().entropy(&wrong)),
            ("entropy_mask", batch.clone().entropy_mask(&wrong)),
            ("teacher_mask", batch.clone().teacher_mask(&wrong)),
            (
                "importance_weights",
                batch.clone().importance_weights(&wrong),
            ),
            ("sample_weights", batch.clone().sample_weights(&wrong)),
        ] {
            let message = message(with_kl().compute(&batch, &totals).and_then(|_| {
                // Only a loss without a KL gets here without a reference.
                loss.compute(&batch, &totals)
            }));
            assert!(
                message.starts_with(&format!("{name}: shape [3, 2], must be"))
                    || (name != "ref_log_probs" && message.starts_with("ref_log_probs: absent")),
                "{message}"
            );
        }
    }
}

#[test]
fn a_term_without_its_input_is_an_error() {
    for device in devices() {
        let (x, mask) = (
            zeros(&[2, 3], device),
            zeros(&[2, 3], device).ones_like().expect("ones"),
        );
        assert_eq!(
            compute(&with_kl(), &x, &zeros(&[2], device), &mask),
            "ref_log_probs: absent, a KL loss needs the log-probs of the reference policy (or set kl to none)"
        );
        let bonus = PolicyLoss {
            entropy_coef: 0.1,
            ..PolicyLoss::dapo()
        };
        assert!(compute(&bonus, &x, &zeros(&[2], device), &mask).starts_with("entropy: absent"));
    }
}

#[test]
fn a_step_without_a_valid_token_is_an_error() -> Result<()> {
    for device in devices() {
        let (x, response_mask) = (zeros(&[2, 3], device), zeros(&[2, 3], device));
        let none = StepTotals::count(&response_mask)?;
        assert_eq!((none.tokens, none.sequences, none.rows), (0., 0., 2.));
        let mask = Mask::new(&response_mask)?;
        let expected = "totals: StepTotals { tokens: 0.0";
        for aggregation in [
            Aggregation::TokenMean,
            Aggregation::TokenSum,
            Aggregation::SeqMeanTokenMean,
        ] {
            assert!(message(aggregation.apply(&x, &mask, &none)).starts_with(expected));
        }
        let advantages = zeros(&[2], device);
        let batch = PolicyBatch::new(&variable(&x), &advantages, &response_mask);
        assert!(message(PolicyLoss::dapo().compute(&batch, &none)).starts_with(expected));
        // One micro-batch without tokens is fine if another has some.
        let others = StepTotals::count(&x.ones_like()?)?;
        let output = PolicyLoss::dapo().compute(&batch, &(none + others))?;
        assert_eq!(output.loss.to_scalar::<f32>()?, 0.);
    }
    Ok(())
}

#[rstest]
#[case(PolicyLoss { surrogate: Surrogate::Clip(Clip::symmetric(1.5)), ..Default::default() }, "surrogate.clip.low: 1.5, must be from 0 to 1")]
#[case(PolicyLoss { surrogate: Surrogate::Clip(Clip::asymmetric(0.2, f64::NAN)), ..Default::default() }, "surrogate.clip.high: NaN, must be")]
#[case(
    PolicyLoss { surrogate: Surrogate::Clip(Clip { dual_clip: Some(1.), ..Clip::symmetric(0.2) }), ..Default::default() },
    "surrogate.clip.dual_clip: 1, must be a finite ratio above 1"
)]
#[case(
    PolicyLoss { surrogate: Surrogate::Clip(Clip { delta: Some(0.), ..Clip::symmetric(0.2) }), ..Default::default() },
    "surrogate.clip.delta: 0, must be positive"
)]
#[case(PolicyLoss { log_ratio_clamp: Some(-1.), ..Default::default() }, "log_ratio_clamp: -1, must be positive")]
#[case(PolicyLoss { entropy_coef: -0.1, ..Default::default() }, "entropy_coef: -0.1, must be finite and at least 0")]
#[case(PolicyLoss { loss_coef: f64::INFINITY, ..Default::default() }, "loss_coef: inf, must be finite and at least 0")]
#[case(PolicyLoss { kl: Some(KlLoss::k3(-1.)), ..Default::default() }, "kl.coef: -1, must be finite and at least 0")]
#[case(
    PolicyLoss { kl: Some(KlLoss::new(1., Kl { value_clamp: Some(0.), ..Default::default() })), ..Default::default() },
    "kl.value_clamp: 0, must be positive"
)]
#[case(PolicyLoss::dr_grpo(0.), "aggregation.length: 0, must be positive")]
#[case(
    PolicyLoss {
        kl: Some(KlLoss {
            bias_correction: BiasCorrection::Token,
            ..KlLoss::new(1., Kl { gradient: KlGradient::StraightThrough, ..Default::default() })
        }),
        ..Default::default()
    },
    "kl.bias_correction: token, must be off with a gradient other than direct"
)]
#[case(
    with(DetachedWeight::at_most(0.2)),
    "surrogate.detached_weight.ratio_max: 0.2, must be an absolute ratio of at least 1"
)]
#[case(with(DetachedWeight { ratio_min: Some(1.2), ..Default::default() }), "surrogate.detached_weight.ratio_min: 1.2")]
#[case(with(Topr { negative_weight: -1., ..Default::default() }), "surrogate.topr.negative_weight: -1, must be finite and at least 0")]
#[case(with(SoftGate { tau_pos: 0., tau_neg: 1. }), "surrogate.soft_gate.tau_pos: 0, must be positive")]
#[case(with(Vespo { lambda_neg: 0., ..Default::default() }), "surrogate.vespo.lambda_neg: 0, must be positive")]
#[case(with(GeometricMean { low: -0.1, high: 0.1 }), "surrogate.geometric_mean.low: -0.1, must be finite and at least 0")]
#[case(with(SquaredLogRatio { coef: f64::NAN }), "surrogate.squared_log_ratio.coef: NaN, must be finite and at least 0")]
#[case(with(FutureKl { half_life: 0., ..Default::default() }), "surrogate.future_kl.half_life: 0, must be positive")]
#[case(with(FutureKl { clip: Clip::symmetric(-1.), ..Default::default() }), "surrogate.future_kl.clip.low: -1")]
#[case(with(GroupContrast { tau: 0. }), "surrogate.group_contrast.tau: 0, must be positive")]
#[case(
    PolicyLoss { distillation: Some(TeacherTerm::new(f64::NAN)), ..Default::default() },
    "distillation.coef: NaN, must be finite"
)]
#[case(
    PolicyLoss { old_kl: Some(KlLoss::k3(-1.)), ..Default::default() },
    "old_kl.coef: -1, must be finite and at least 0"
)]
#[case(
    PolicyLoss { rollout_correction: Some(RolloutCorrection::m2po(0.)), ..Default::default() },
    "rollout_correction.second_moment: 0, must be positive"
)]
#[case(with(DivergenceMask { ratio_max: Some(0.), ..Default::default() }), "surrogate.divergence_mask.ratio_max: 0, must be positive")]
#[case(with(ClipCov { lower: 5., upper: 1., ..Default::default() }), "surrogate.clip_cov.lower: 5, must be below clip_cov.upper, 1")]
#[case(with(KlCov { ratio: 0., ..Default::default() }), "surrogate.kl_cov.ratio: 0, must be above 0")]
#[case(
    PolicyLoss { importance_level: ImportanceLevel::Sequence, ..experimental::policy_loss::vespo() },
    "importance_level: sequence, must be token with a surrogate that reduces over the sequence"
)]
#[case(PolicyLoss { off_policy_threshold: Some(f64::NAN), ..Default::default() }, "off_policy_threshold: NaN")]
#[case(
    PolicyLoss { positive_nll: Some(PositiveNll { coef: -1., score_above: 0. }), ..Default::default() },
    "positive_nll.coef: -1, must be finite and at least 0"
)]
#[case(
    PolicyLoss {
        rollout_correction: Some(RolloutCorrection {
            weight: Some(ImportanceWeight::icepop(2., 1.)),
            ..Default::default()
        }),
        ..Default::default()
    },
    "rollout_correction.weight.min: 2, must be at most rollout_correction.weight.max, 1"
)]
fn an_invalid_option_is_an_error_of_validate_and_compute(
    #[case] loss: PolicyLoss,
    #[case] expected: &str,
) {
    for device in devices() {
        let got = message(loss.validate());
        assert!(got.starts_with(expected), "{got}");
        let (x, mask) = (
            zeros(&[2, 3], device),
            zeros(&[2, 3], device).ones_like().expect("ones"),
        );
        assert_eq!(
            compute(&loss, &x, &zeros(&[2], device), &mask),
            got,
            "compute validates"
        );
    }
}

fn with(surrogate: impl Into<Surrogate>) -> PolicyLoss {
    PolicyLoss {
        surrogate: surrogate.into(),
        ..Default::default()
    }
}

/// A sequence ratio goes together with a weight for each token only if you ask for it.
#[rstest]
fn ratios_of_sequences_are_not_weighted_by_length(
    #[values(
        ImportanceLevel::Sequence,
        ImportanceLevel::SequenceToken,
        ImportanceLevel::SequenceProduct
    )]
    importance_level: ImportanceLevel,
    #[values(
        (Aggregation::TokenMean, "token-mean"),
        (Aggregation::TokenSum, "token-sum"),
        (Aggregation::PromptMeanTokenMean, "prompt-mean-token-mean"),
        (Aggregation::SeqMeanTokenSumNorm { length: 3. }, "given")
    )]
    (aggregation, name): (Aggregation, &str),
) -> Result<()> {
    let refused = PolicyLoss {
        importance_level,
        aggregation,
        ..Default::default()
    };
    let expected = format!(
        "aggregation: {name}, must not weight sequences by their length with an importance level of the sequence"
    );
    let got = message(refused.validate());
    assert!(got.starts_with(&expected), "{got}");
    PolicyLoss {
        allow_length_weighting: true,
        ..refused.clone()
    }
    .validate()?;
    PolicyLoss {
        importance_level: ImportanceLevel::Segment,
        ..refused.clone()
    }
    .validate()?;
    for aggregation in [Aggregation::SeqMeanTokenMean, Aggregation::SeqMeanTokenSum] {
        PolicyLoss {
            aggregation,
            ..refused.clone()
        }
        .validate()?;
    }
    Ok(())
}

/// Each loss needs an input in addition to log-probs and advantages.
#[rstest]
#[case(PolicyLoss::clip_cov(), "selected_tokens: absent, clip_cov needs")]
#[case(PolicyLoss::kl_cov(), "selected_tokens: absent, kl_cov needs")]
#[case(
    with(Topr { positive_if: PositiveIf::ScoreAbove(0.), ..Default::default() }),
    "scores: absent, topr"
)]
#[case(
    PolicyLoss { positive_nll: Some(PositiveNll { coef: 1., score_above: 0. }), ..Default::default() },
    "scores: absent, a positive likelihood term"
)]
#[case(
    PolicyLoss { aggregation: Aggregation::PromptMeanTokenMean, ..Default::default() },
    "prompt_tokens: absent"
)]
#[case(
    PolicyLoss {
        rollout_correction: Some(RolloutCorrection {
            weight: Some(ImportanceWeight::truncated(2.)),
            ..Default::default()
        }),
        ..Default::default()
    },
    "importance_weights: absent, the configured rollout_correction"
)]
fn a_missing_input_is_an_error(#[case] loss: PolicyLoss, #[case] expected: &str) {
    for device in devices() {
        let (x, mask) = (
            zeros(&[2, 3], device),
            zeros(&[2, 3], device).ones_like().expect("ones"),
        );
        let got = compute(&loss, &x, &zeros(&[2], device), &mask);
        assert!(got.starts_with(expected), "{got}");
    }
}

/// The ratio to the rollout already corrects for it. A second correction is an error.
#[test]
fn a_correction_cannot_be_applied_twice() {
    for device in devices() {
        let (x, mask) = (
            zeros(&[2, 3], device),
            zeros(&[2, 3], device).ones_like().expect("ones"),
        );
        let advantages = zeros(&[2], device);
        let totals = six_tokens();
        let batch = PolicyBatch::new(&variable(&x), &advantages, &mask)
            .old_policy(OldPolicy::Rollout(x.clone()));
        let configured = PolicyLoss {
            rollout_correction: Some(RolloutCorrection {
                weight: Some(ImportanceWeight::truncated(2.)),
                ..Default::default()
            }),
            ..Default::default()
        };
        assert!(PolicyLoss::dapo().compute(&batch, &totals).is_ok());
        let got = message(configured.compute(&batch, &totals));
        assert!(
            got.starts_with("rollout_correction: configured together with OldPolicy::Rollout"),
            "{got}"
        );
        let weighted = batch.importance_weights(&mask);
        let got = message(PolicyLoss::dapo().compute(&weighted, &totals));
        assert!(
            got.starts_with("importance_weights: given together with OldPolicy::Rollout"),
            "{got}"
        );
    }
}

/// Configured filters must be applied.
#[test]
fn configured_filters_need_their_mask() -> Result<()> {
    for device in devices() {
        let (x, mask) = (zeros(&[2, 3], device), zeros(&[2, 3], device).ones_like()?);
        let filter = RolloutFilter {
            statistic: FilterStatistic::K3,
            level: FilterLevel::Token,
            min: None,
            max: Some(0.1),
        };
        let loss = PolicyLoss {
            rollout_correction: Some(RolloutCorrection {
                filters: vec![filter],
                ..Default::default()
            }),
            ..Default::default()
        };
        let got = compute(&loss, &x, &zeros(&[2], device), &mask);
        assert!(got.starts_with("policy_mask: absent"), "{got}");
        let advantages = zeros(&[2], device);
        let batch = PolicyBatch::new(&variable(&x), &advantages, &mask).policy_mask(&mask);
        loss.compute(&batch, &StepTotals::count(&mask)?)?;
    }
    Ok(())
}

#[test]
fn log_probs_are_floats() {
    for device in devices() {
        let ids = Tensor::zeros((2, 3), DType::U32, device).expect("ids");
        let mask = zeros(&[2, 3], device).ones_like().expect("ones");
        let got = compute(&PolicyLoss::dapo(), &ids, &zeros(&[2], device), &mask);
        assert_eq!(got, "log_probs: U32, must be of a float dtype");
    }
}

#[test]
fn invalid_hidden_states_and_weights_are_errors() -> Result<()> {
    for device in devices() {
        let targets = Tensor::new(&[0u32, 1], device)?;
        let error = |hidden: &[usize], weight: &[usize], bias: Option<&Tensor>| {
            message(linear_log_prob(
                &zeros(hidden, device),
                &zeros(weight, device),
                bias,
                &targets,
                1.,
                LogProbOptions::default(),
            ))
        };
        assert_eq!(
            error(&[2, 4], &[5], None),
            "weight: shape [5], must be [V, H]"
        );
        assert!(
            error(&[2, 3], &[5, 4], None).starts_with("hidden: shape [2, 3], the last dimension")
        );
        assert_eq!(
            error(&[2, 4], &[5, 4], Some(&zeros(&[4], device))),
            "bias: shape [4], must be [5]"
        );
    }
    Ok(())
}

/// On the CPU only: checking ids on a GPU would need a transfer.
#[test]
fn a_token_id_out_of_range_is_an_error() -> Result<()> {
    let logits = zeros(&[2, 5], &Device::Cpu);
    let error =
        |targets: Tensor| message(log_prob(&logits, &targets, 1., LogProbOptions::default()));
    assert_eq!(
        error(Tensor::new(&[0u32, 5], &Device::Cpu)?),
        "targets: token id 5 is out of range, must be below 5"
    );
    assert!(error(Tensor::new(&[0i64, -1], &Device::Cpu)?).contains("token id -1 is out of range"));
    assert!(error(Tensor::new(&[0u32, u32::MAX], &Device::Cpu)?).contains("token id 4294967295"));
    Ok(())
}

#[test]
fn invalid_logits_and_targets_are_errors() -> Result<()> {
    for device in devices() {
        let (logits, targets) = (zeros(&[2, 5], device), Tensor::new(&[0u32, 4], device)?);
        for temperature in [0., -1., 1e-300, 1e300, f64::NAN, f64::INFINITY] {
            let message = message(log_prob(
                &logits,
                &targets,
                temperature,
                LogProbOptions::default(),
            ));
            assert_eq!(
                message,
                format!("temperature: {temperature:?}, must be from 1e-6 to 1e6")
            );
        }
        let error = |logits: &Tensor, targets: &Tensor| {
            message(log_prob(logits, targets, 1., LogProbOptions::default()))
        };
        assert_eq!(
            error(&logits, &Tensor::new(&[0f32, 1.], device)?),
            "targets: F32, must be of an integer dtype"
        );
        assert_eq!(
            error(&logits, &Tensor::new(&[0u32], device)?),
            "targets: shape [1], must be that of logits without the last dimension, [2]"
        );
        assert_eq!(
            error(&logits.to_dtype(DType::U32)?, &targets),
            "logits: U32, must be of a float dtype"
        );
        assert!(error(&zeros(&[2, 0], device), &targets).contains("the vocabulary is empty"));
        assert!(error(&Tensor::new(1f32, device)?, &targets).contains("a scalar"));
    }
    Ok(())
}
