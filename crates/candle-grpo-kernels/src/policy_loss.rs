//! The policy loss of a micro-batch, its gradient and its figures from log-probs, in one pass.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, bail};

use crate::{check, cpu, path};

/// Over what the log-ratio of a token is averaged before it is exponentiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RatioLevel {
    /// Nothing: each token has its own ratio.
    Token,
    /// The sequence, whose tokens share the geometric mean of their ratios (GSPO, <https://arxiv.org/abs/2507.18071>).
    Sequence,
    /// The value of [`Self::Sequence`] with the gradient of each token (GSPO-token).
    SequenceToken,
    /// The sequence, whose tokens share the product of their ratios.
    SequenceProduct,
}

/// What one token scores. Bounds are absolute ratios; one that is infinite (below: 0) does not bound.
///
/// With the ratio r, the advantage A, and `sg` for a constant:
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenSurrogate {
    /// `-min(min(r, delta) A, clip(r, ratio_min, ratio_max) A)`, at most `-dual_clip A` where A is negative
    /// (PPO, <https://arxiv.org/abs/1707.06347>).
    Clip {
        /// The lower bound of the clip.
        ratio_min: f32,
        /// The upper bound of the clip.
        ratio_max: f32,
        /// The bound for negative advantages (<https://arxiv.org/abs/1912.09729>).
        dual_clip: f32,
        /// The bound of the unclipped term (<https://arxiv.org/abs/2505.07291>).
        delta: f32,
    },
    /// `-A log_prob`.
    PolicyGradient,
    /// `-sg[clip(r, ratio_min, ratio_max)] A log_prob` (CISPO, <https://arxiv.org/abs/2506.13585>), and 0 where r is above
    /// `drop_above` and A positive, or r below `drop_below` and A negative.
    DetachedWeight {
        /// The smallest weight.
        ratio_min: f32,
        /// The largest weight.
        ratio_max: f32,
        /// Tokens of negative advantage with a ratio below this are left out.
        drop_below: f32,
        /// Tokens of positive advantage with a ratio above this are left out.
        drop_above: f32,
    },
    /// `-w A log_prob` with the constant w: `positive_weight` where A is positive, else `negative_weight min(r, 1)` (TOPR,
    /// <https://arxiv.org/abs/2503.14286>).
    Topr {
        /// The weight of positive samples.
        positive_weight: f32,
        /// What multiplies the weight of the others.
        negative_weight: f32,
    },
    /// `-A (4 / tau) sigmoid(tau (r - 1))` (SAPO, <https://arxiv.org/abs/2511.20347>).
    SoftGate {
        /// tau where the advantage is positive.
        tau_pos: f32,
        /// tau elsewhere.
        tau_neg: f32,
    },
    /// `-A log_prob + (coef / 2) log(r)^2` (Kimi k1.5, <https://arxiv.org/abs/2501.12599>).
    SquaredLogRatio {
        /// The weight of the penalty.
        coef: f32,
    },
    /// `-sg[min(r, ratio_max)] A log_prob`, and 0 where the probability of the token has moved further than `high` (A positive,
    /// upwards) or `low` (A negative, downwards) (DPPO, <https://arxiv.org/abs/2602.04879>).
    DivergenceMask {
        /// Whether the measure is the KL between "this token" and "another one", or else their total variation.
        binary_kl: bool,
        /// The bound where the advantage is negative.
        low: f32,
        /// The bound where the advantage is positive.
        high: f32,
        /// The largest weight.
        ratio_max: f32,
    },
}

/// An estimate of the KL to the reference, with `d = log_probs - ref_log_probs`
/// (<http://joschu.net/blog/kl-approx.html>).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KlEstimate {
    /// `d`.
    K1,
    /// `d^2 / 2`.
    K2,
    /// `exp(-d) + d - 1`.
    K3,
    /// `|d|`.
    Abs,
}

/// The derivative of an estimate by the log-prob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KlSlope {
    /// That of the estimate; 0 beyond a clamp.
    Direct,
    /// `d`; 0 where it is infinite.
    StraightThrough,
    /// `min(exp(log_prob - old_log_prob), max) d`; 0 where d is infinite.
    ImportanceWeighted {
        /// The largest weight.
        max: f32,
    },
}

/// What multiplies an estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KlRatio {
    /// Nothing.
    One,
    /// The ratio of the token.
    Token,
    /// The ratio at the level of the loss.
    Level,
}

/// `coef * estimate`, added to the loss of each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlTerm {
    /// The weight of the term.
    pub coef: f32,
    /// Which estimate.
    pub estimate: KlEstimate,
    /// With which derivative.
    pub slope: KlSlope,
    /// `d` is clamped to plus and minus this in the estimate; infinite for no clamp.
    pub log_ratio_clamp: f32,
    /// The estimate is clamped to plus and minus this; infinite for no clamp.
    pub value_clamp: f32,
    /// What multiplies it.
    pub ratio: KlRatio,
}

/// What the loss of a token is divided by, besides [`PolicyLossOptions::denominator`].
#[derive(Debug, Clone, Copy)]
pub enum RowDivisor<'a> {
    /// Nothing.
    One,
    /// The number of tokens of its sequence.
    Length,
    /// A positive number for each sequence, `[B]`.
    Given(&'a Tensor),
}

/// How [`policy_loss`](policy_loss()) computes.
#[derive(Debug, Clone, Copy)]
pub struct PolicyLossOptions<'a> {
    /// The level of the ratio.
    pub level: RatioLevel,
    /// The log-ratio of a token, and its sum over a sequence, is clamped to plus and minus this, beyond which its gradient is
    /// 0; infinite for no clamp.
    pub log_ratio_clamp: f32,
    /// What a token scores.
    pub surrogate: TokenSurrogate,
    /// The KL to the reference.
    pub kl: Option<KlTerm>,
    /// What the loss of a token is divided by.
    pub row_divisor: RowDivisor<'a>,
    /// What the sum of all is divided by.
    pub denominator: f64,
}

/// The tensors of [`policy_loss`], of any float dtype: B sequences of T tokens. Only `log_probs` carries a gradient.
#[derive(Debug, Clone, Copy)]
pub struct PolicyLossTensors<'a> {
    /// Log-probs `[B, T]` under the policy.
    pub log_probs: &'a Tensor,
    /// Log-probs `[B, T]` under the policy that the ratio is taken against; absent: `log_probs`, as a constant.
    pub old_log_probs: Option<&'a Tensor>,
    /// Log-probs `[B, T]` under the reference; a KL term needs them.
    pub ref_log_probs: Option<&'a Tensor>,
    /// `[B]`, `[B, 1]` or `[B, T]`.
    pub advantages: &'a Tensor,
    /// Weights of the surrogate, `[B]`, `[B, 1]` or `[B, T]`: 0 drops it, whatever it is.
    pub weights: Option<&'a Tensor>,
    /// The entropy `[B, T]`, for its mean.
    pub entropy: Option<&'a Tensor>,
    /// The positions `[B, T]` that count, any dtype, 0 where a position is dropped: nothing of it reaches anything, NaN included.
    pub mask: &'a Tensor,
}

/// A figure over the positions that count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicySum {
    /// How many there are.
    Count,
    /// The sum of the ratio at its level.
    Ratio,
    /// The largest ratio.
    RatioMax,
    /// The smallest ratio.
    RatioMin,
    /// The largest ratio of a token.
    TokenRatioMax,
    /// The sum of -d, with the log-ratio d of the token.
    K1,
    /// The sum of |d|.
    Abs,
    /// The sum of `d^2 / 2`.
    K2,
    /// The sum of `exp(d) - 1 - d`.
    K3,
    /// The largest `exp(d) - 1 - d`.
    K3Max,
    /// The sum of the log-probs.
    LogProb,
    /// The sum of the old log-probs.
    OldLogProb,
    /// The sum of the KL estimates, without the coefficient.
    Kl,
    /// The sum of the entropies.
    Entropy,
    /// How many losses the bound changed.
    Clipped,
    /// How many losses a lower bound changed.
    ClippedLow,
    /// How many losses an upper bound changed.
    ClippedHigh,
    /// How many losses the dual clip changed.
    DualClipped,
    /// How many tokens [`TokenSurrogate::DetachedWeight`] left out.
    Dropped,
    /// How many tokens [`TokenSurrogate::Topr`] takes as positive.
    Positive,
    /// How many weights of [`TokenSurrogate::DivergenceMask`] were bounded.
    WeightBounded,
}

impl PolicySum {
    /// How many there are.
    pub(crate) const COUNT: usize = Self::WeightBounded as usize + 1;
}

/// What [`policy_loss`](policy_loss()) returns. All but the loss is without gradient, and 0 outside the mask.
#[derive(Debug, Clone)]
pub struct FusedPolicyLoss {
    /// A scalar of f32, with gradient.
    pub loss: Tensor,
    /// The surrogate of each token, before weights, f32 `[B, T]`.
    pub surrogate: Tensor,
    /// The surrogate times weights, f32 `[B, T]`.
    pub policy: Tensor,
    /// The KL estimate of each token, f32 `[B, T]`, if there is a KL term.
    pub kl: Option<Tensor>,
    /// The log-ratio at its level, f32 `[B, T]`.
    pub log_ratio: Tensor,
    /// 1 where the bound changed the loss, u8 `[B, T]`.
    pub clipped: Tensor,
    sums: Tensor,
}

impl FusedPolicyLoss {
    /// A figure over the positions that count, a scalar of f64 on the device.
    pub fn sum(&self, which: PolicySum) -> Result<Tensor> {
        self.sums.get(which as usize)
    }
}

/// Whether [`policy_loss`](policy_loss()) takes log-probs of this dtype and device. For all others there is the composed product of
/// candle-grpo-loss, which is the reference too.
pub fn policy_loss_is_fused(log_probs: &Tensor) -> bool {
    path::is_fused(log_probs)
}

/// The policy loss `sum(weight surrogate + coef kl) / (row_divisor denominator)` over the positions of the mask, with its
/// gradient and its figures, in one pass; the backward pass is one multiplication. Arithmetic in f32, sums in f64.
///
/// Errs on other shapes and dtypes, on a KL term without a reference, and where [`policy_loss_is_fused`] says no.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_grpo_kernels::{
///     PolicyLossOptions, PolicyLossTensors, PolicySum, RatioLevel, RowDivisor, TokenSurrogate, policy_loss,
/// };
///
/// let log_probs = Var::new(&[[-1f32, -0.5]], &Device::Cpu)?;
/// let tensors = PolicyLossTensors {
///     log_probs: &log_probs,
///     old_log_probs: Some(&Tensor::new(&[[-1f32, -2.]], &Device::Cpu)?),
///     ref_log_probs: None,
///     advantages: &Tensor::new(&[1f32], &Device::Cpu)?,
///     weights: None,
///     entropy: None,
///     mask: &Tensor::new(&[[1u8, 1]], &Device::Cpu)?,
/// };
/// let options = PolicyLossOptions {
///     level: RatioLevel::Token,
///     log_ratio_clamp: 20.,
///     surrogate: TokenSurrogate::Clip {
///         ratio_min: 0.8,
///         ratio_max: 1.2,
///         dual_clip: f32::INFINITY,
///         delta: f32::INFINITY,
///     },
///     kl: None,
///     row_divisor: RowDivisor::Length,
///     denominator: 1.,
/// };
/// let output = policy_loss(&tensors, &options)?;
/// assert!((output.loss.to_scalar::<f32>()? + (1. + 1.2) / 2.).abs() < 1e-6);
/// assert_eq!(output.sum(PolicySum::Clipped)?.to_scalar::<f64>()?, 1.);
/// let gradients = output.loss.backward()?;
/// assert_eq!(gradients.get(&log_probs).unwrap().to_vec2::<f32>()?, [[-0.5, 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn policy_loss(
    tensors: &PolicyLossTensors,
    options: &PolicyLossOptions,
) -> Result<FusedPolicyLoss> {
    let arguments = Arguments::new(tensors, options)?;
    let parts = forward(&arguments)?;
    let loss = arguments.log_probs.apply_op1(WithGradient {
        loss: parts.loss,
        gradient: parts.gradient,
    })?;
    Ok(FusedPolicyLoss {
        loss,
        surrogate: parts.surrogate,
        policy: parts.policy,
        kl: parts.kl,
        log_ratio: parts.log_ratio,
        clipped: parts.clipped,
        sums: parts.sums,
    })
}

fn forward(arguments: &Arguments) -> Result<Parts> {
    #[cfg(feature = "cuda")]
    if arguments.log_probs.device().is_cuda() {
        return crate::cuda::policy_loss::forward(arguments);
    }
    cpu::policy_loss::forward(arguments)
}

/// The arguments of [`policy_loss`], checked: contiguous, in f32, and detached but for `log_probs`.
pub(crate) struct Arguments<'a> {
    /// `[B, T]`
    pub(crate) log_probs: Tensor,
    /// `[B, T]`
    pub(crate) old_log_probs: Option<Tensor>,
    /// `[B, T]`
    pub(crate) ref_log_probs: Option<Tensor>,
    /// `[B]` or `[B, T]`
    pub(crate) advantages: Tensor,
    /// `[B]` or `[B, T]`
    pub(crate) weights: Option<Tensor>,
    /// `[B, T]`
    pub(crate) entropy: Option<Tensor>,
    /// `[B, T]` of u8.
    pub(crate) mask: Tensor,
    /// `[B]`
    pub(crate) row_divisors: Option<Tensor>,
    pub(crate) options: &'a PolicyLossOptions<'a>,
}

impl<'a> Arguments<'a> {
    fn new(tensors: &PolicyLossTensors, options: &'a PolicyLossOptions<'a>) -> Result<Self> {
        let log_probs = tensors.log_probs;
        check::float("log_probs", log_probs)?;
        let &[batch, tokens] = log_probs.dims() else {
            bail!("log_probs: shape {:?}, must be [B, T]", log_probs.dims());
        };
        if !policy_loss_is_fused(log_probs) {
            bail!(
                "log_probs: {:?} on {:?}, must be f32, bf16 or f16 on the CPU or CUDA",
                log_probs.dtype(),
                log_probs.device().location()
            );
        }
        check::positive("denominator", options.denominator)?;
        if options.log_ratio_clamp.is_nan() || options.log_ratio_clamp <= 0.0 {
            bail!(
                "log_ratio_clamp: {}, must be positive",
                options.log_ratio_clamp
            );
        }
        if options.kl.is_some() && tensors.ref_log_probs.is_none() {
            bail!("ref_log_probs: absent, must be given for a KL term");
        }
        let constant = |name: &str, x: &Tensor, shapes: &[&[usize]]| {
            if !shapes.contains(&x.dims()) {
                bail!("{name}: shape {:?}, must be one of {shapes:?}", x.dims());
            }
            check::same_device(&[("log_probs", log_probs), (name, x)])?;
            x.detach().to_dtype(DType::F32)?.contiguous()
        };
        let per_token: &[&[usize]] = &[&[batch, tokens]];
        let any: &[&[usize]] = &[&[batch, tokens], &[batch], &[batch, 1]];
        let optional = |name: &str, x: Option<&Tensor>, shapes: &[&[usize]]| {
            x.map(|x| constant(name, x, shapes)).transpose()
        };
        if tensors.mask.dims() != [batch, tokens] {
            bail!(
                "mask: shape {:?}, must be that of log_probs, {:?}",
                tensors.mask.dims(),
                log_probs.dims()
            );
        }
        check::same_device(&[("log_probs", log_probs), ("mask", tensors.mask)])?;
        let row_divisors = match options.row_divisor {
            RowDivisor::Given(x) => Some(constant("row_divisor", x, &[&[batch]])?),
            RowDivisor::One | RowDivisor::Length => None,
        };
        Ok(Self {
            log_probs: log_probs.to_dtype(DType::F32)?.contiguous()?,
            old_log_probs: optional("old_log_probs", tensors.old_log_probs, per_token)?,
            ref_log_probs: optional("ref_log_probs", tensors.ref_log_probs, per_token)?,
            advantages: constant("advantages", tensors.advantages, any)?,
            weights: optional("weights", tensors.weights, any)?,
            entropy: optional("entropy", tensors.entropy, per_token)?,
            mask: tensors.mask.detach().ne(0f64)?.contiguous()?,
            row_divisors,
            options,
        })
    }
}

/// What the one pass gives, without a graph.
pub(crate) struct Parts {
    /// A scalar of f32.
    pub(crate) loss: Tensor,
    /// Its gradient, f32 `[B, T]`.
    pub(crate) gradient: Tensor,
    pub(crate) surrogate: Tensor,
    pub(crate) policy: Tensor,
    /// If there is a KL term.
    pub(crate) kl: Option<Tensor>,
    pub(crate) log_ratio: Tensor,
    pub(crate) clipped: Tensor,
    /// f64, one for each [`PolicySum`].
    pub(crate) sums: Tensor,
}

/// Records a loss that is computed already, together with its gradient.
struct WithGradient {
    loss: Tensor,
    gradient: Tensor,
}

impl CustomOp1 for WithGradient {
    fn name(&self) -> &'static str {
        "policy_loss"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let (storage, layout) = self.loss.storage_and_layout();
        match &*storage {
            Storage::Cpu(loss) => Ok((loss.try_clone(layout)?, Shape::from(()))),
            _ => bail!("loss: not on the CPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (storage, layout) = self.loss.storage_and_layout();
        match &*storage {
            Storage::Cuda(loss) => Ok((loss.try_clone(layout)?, Shape::from(()))),
            _ => bail!("loss: not on the GPU"),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.gradient.broadcast_mul(gradient).map(Some)
    }
}
