//! The policy loss of surrogates per token, with its derivatives and metrics.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::sync::{Arc, OnceLock};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, DType, Device, Layout, Result, Shape, Tensor, bail,
};

use crate::cpu::slice;
use crate::{check, path};

/// Terms for [`policy_loss`]: tensors, and the options of each term as numbers.
///
/// B sequences with T tokens. Per-token tensors are `[B, T]`; tensors that may have one value per
/// sequence are `[B, T]` or `[B, 1]`. Numbers may have any dtype, and are computed in f32. Masks
/// are u8; nonzero entries are selected.
#[derive(Debug, Clone)]
pub struct PolicyTerms<'a> {
    /// Tokens that count, `[B, T]`. Values at other positions are not read.
    pub mask: &'a Tensor,
    /// Log-probs under the old policy, `[B, T]`. If absent, they are those of the policy.
    pub old_log_probs: Option<&'a Tensor>,
    /// Advantages, `[B, T]` or `[B, 1]`.
    pub advantages: &'a Tensor,
    /// Factors for the surrogate, `[B, T]` or `[B, 1]` each: importance weights, and weights of
    /// samples.
    pub factors: [Option<&'a Tensor>; 2],
    /// Tokens in the surrogate's term, `[B, T]`. If absent, all are.
    pub policy_mask: Option<&'a Tensor>,
    /// Factors for the surrogate and the KL terms, `[B, T]`.
    pub token_weights: Option<&'a Tensor>,
    /// The bound c: log-ratios are clamped to `[-c, c]` before `exp`.
    pub log_ratio_clamp: Option<f64>,
    /// The surrogate.
    pub surrogate: RatioSurrogate,
    /// A KL term, and the reference's log-probs `[B, T]`.
    pub kl: Option<(KlTerm, &'a Tensor)>,
    /// A KL term to the old policy.
    pub old_kl: Option<KlTerm>,
    /// Each token's share in the surrogate's term and the KL terms.
    pub share: TokenShare,
    /// Entropy `[B, T]`, for the statistics and the bonus.
    pub entropy: Option<&'a Tensor>,
    /// The bonus that is subtracted.
    pub entropy_bonus: Option<EntropyBonus<'a>>,
    /// Number of tokens for each sequence's prompt, `[B]`, for [`Divisor::PromptTokens`].
    pub prompt_tokens: Option<&'a Tensor>,
}

/// One token's loss, given its ratio r, advantage A and log-prob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RatioSurrogate {
    /// `-min(min(r, delta) A, clip(r, low, high) A)`. With a negative advantage, it is at most
    /// `-dual_clip A`.
    Clip {
        /// Smallest ratio.
        low: f64,
        /// Largest ratio.
        high: f64,
        /// Largest ratio in the unclipped term.
        delta: Option<f64>,
        /// Largest ratio with a negative advantage.
        dual_clip: Option<f64>,
    },
    /// `-sg[clip(r, min, max)] A log_prob`.
    DetachedWeight {
        /// Smallest weight.
        min: Option<f64>,
        /// Largest weight.
        max: Option<f64>,
        /// Drops tokens with a negative advantage and a ratio below the first number, and those
        /// with a positive advantage and a ratio above the second one.
        drop: Option<(f64, f64)>,
    },
    /// `-A log_prob`.
    PolicyGradient,
}

/// A KL term.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlTerm {
    /// Coefficient.
    pub coef: f64,
    /// Estimate from the log-ratio d to the reference.
    pub estimate: KlEstimate,
    /// Derivative of the estimate.
    pub slope: KlSlope,
    /// Bound for d, positive and negative.
    pub log_ratio_clamp: Option<f64>,
    /// Bound for the estimate, positive and negative.
    pub value_clamp: Option<f64>,
    /// Multiplies the estimate by the ratio to the old policy.
    pub times_ratio: bool,
}

/// An estimate of a divergence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KlEstimate {
    /// `d`
    K1,
    /// `d^2 / 2`
    K2,
    /// `exp(-d) + d - 1`
    K3,
    /// `|d|`
    Abs,
}

/// The derivative of a [`KlEstimate`] by the log-prob.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KlSlope {
    /// Its own.
    Own,
    /// `d`
    LogRatio,
    /// `min(r, max) d` with the ratio r to the old policy, which is not clamped.
    WeightedLogRatio {
        /// Largest weight.
        max: f64,
    },
}

/// A token's share in a sum over all tokens: `scale / divisor`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenShare {
    /// The factor for all tokens.
    pub scale: f64,
    /// The divisor, at least 1.
    pub divisor: Divisor,
}

/// The divisor of a [`TokenShare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisor {
    /// 1
    One,
    /// The number of tokens in the sequence's mask.
    Length,
    /// [`PolicyTerms::prompt_tokens`].
    PromptTokens,
}

/// The entropy bonus.
#[derive(Debug, Clone, Copy)]
pub struct EntropyBonus<'a> {
    /// Tokens in the bonus, `[B, T]`. If absent, all are.
    pub mask: Option<&'a Tensor>,
    /// Each token's share.
    pub share: TokenShare,
}

/// A number over all tokens in the mask, at this index in the statistics of [`policy_loss`]: a sum
/// unless the name says otherwise.
///
/// `d` is the clamped log-ratio to the old policy. A term that is absent has 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum PolicyStatistic {
    /// Number of tokens.
    Tokens,
    /// `exp(d)`
    Ratio,
    /// Largest `exp(d)`, minus infinity without tokens.
    RatioMax,
    /// Smallest `exp(d)`, infinity without tokens.
    RatioMin,
    /// `-d`
    K1,
    /// `|d|`
    Abs,
    /// `d^2 / 2`
    K2,
    /// `exp(d) - 1 - d`
    K3,
    /// Largest `exp(d) - 1 - d`, minus infinity without tokens.
    K3Max,
    /// Log-prob.
    LogProb,
    /// Log-prob under the old policy.
    OldLogProb,
    /// Number of tokens at the lower bound: clipped with a negative advantage, or with the smallest
    /// weight.
    ClippedLow,
    /// Number of tokens at the upper bound: clipped with a positive advantage, or with the largest
    /// weight.
    ClippedHigh,
    /// Number of tokens at a bound.
    Clipped,
    /// Number of tokens that the dual clip changes.
    DualClipped,
    /// Number of tokens that the surrogate drops.
    Dropped,
    /// Estimate of the KL term, without its coefficient.
    Kl,
    /// Estimate of the KL term to the old policy, without its coefficient.
    OldKl,
    /// Entropy.
    Entropy,
    /// The loss.
    Loss,
}

impl PolicyStatistic {
    /// Number of statistics.
    pub const COUNT: usize = Self::Loss as usize + 1;
}

impl<'a> PolicyTerms<'a> {
    /// The surrogate's term alone, of the policy that sampled the tokens.
    pub fn new(
        mask: &'a Tensor,
        advantages: &'a Tensor,
        surrogate: RatioSurrogate,
        share: TokenShare,
    ) -> Self {
        Self {
            mask,
            old_log_probs: None,
            advantages,
            factors: [None, None],
            policy_mask: None,
            token_weights: None,
            log_ratio_clamp: None,
            surrogate,
            kl: None,
            old_kl: None,
            share,
            entropy: None,
            entropy_bonus: None,
            prompt_tokens: None,
        }
    }

    /// Returns whether [`policy_loss`] supports log-probs with this dtype on this device.
    pub fn are_supported(dtype: DType, device: &Device) -> bool {
        path::fuses(dtype, device)
    }
}

/// Computes a policy loss and its derivatives in one pass. Returns the loss, a scalar with gradient
/// by `log_probs` and [`PolicyTerms::entropy`], and the statistics in f64, detached:
/// `[PolicyStatistic::COUNT]`.
///
/// It is the fused path of `PolicyLoss::compute` in `candle-grpo-loss`, whose composed path is its
/// twin. All sums are in f64 and in a fixed order. The backward pass multiplies the derivatives by
/// the loss's gradient. On CUDA this takes two launches forward and one backward.
///
/// # Shapes
///
/// `log_probs`: `[B, T]`, f32, bf16 or f16. [`PolicyTerms`] lists the others.
///
/// # Errors
///
/// Fails if shapes, dtypes or devices do not match, or if a divisor lacks its numbers.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_grpo_kernels::{
///     Divisor, PolicyStatistic, PolicyTerms, RatioSurrogate, TokenShare, policy_loss,
/// };
///
/// let log_probs = Var::new(&[[-1f32, -3.]], &Device::Cpu)?;
/// let mask = Tensor::new(&[[1u8, 0]], &Device::Cpu)?;
/// let advantages = Tensor::new(&[[2f32]], &Device::Cpu)?;
/// let share = TokenShare { scale: 0.5, divisor: Divisor::Length };
/// let terms = PolicyTerms::new(&mask, &advantages, RatioSurrogate::PolicyGradient, share);
/// let (loss, statistics) = policy_loss(&log_probs, &terms)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 1.);
/// let gradients = loss.backward()?;
/// let gradient = gradients.get(&log_probs).expect("a gradient");
/// assert_eq!(gradient.to_vec2::<f32>()?, [[-1., 0.]]);
/// assert_eq!(statistics.to_vec1::<f64>()?[PolicyStatistic::LogProb as usize], -1.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn policy_loss(log_probs: &Tensor, terms: &PolicyTerms) -> Result<(Tensor, Tensor)> {
    let arguments = Arguments::new(log_probs, terms)?;
    let kept = arguments.kept.clone();
    let log_probs = log_probs.to_dtype(DType::F32)?.contiguous()?;
    let loss = match terms.entropy.filter(|_| terms.entropy_bonus.is_some()) {
        Some(entropy) => {
            let entropy = entropy.to_dtype(DType::F32)?.contiguous()?;
            log_probs.apply_op2(&entropy, arguments)?
        }
        None => log_probs.apply_op1(arguments)?,
    };
    match kept.get() {
        Some(kept) => Ok((loss, kept.statistics.clone())),
        None => bail!("policy_loss: the forward pass did not run"),
    }
}

/// Checked arguments: contiguous f32 tensors and u8 masks, detached.
struct Arguments {
    rows: usize,
    tokens: usize,
    mask: Tensor,
    old_log_probs: Option<Tensor>,
    ref_log_probs: Option<Tensor>,
    entropy: Option<Tensor>,
    advantages: Tensor,
    factors: [Option<Tensor>; 2],
    token_weights: Option<Tensor>,
    prompt_tokens: Option<Tensor>,
    policy_mask: Option<Tensor>,
    entropy_mask: Option<Tensor>,
    numbers: Numbers,
    /// Results of the forward pass, for the caller and the backward pass.
    kept: Arc<OnceLock<Kept>>,
}

struct Kept {
    /// f64 `[PolicyStatistic::COUNT]`.
    statistics: Tensor,
    /// Derivative of the loss by each log-prob, f32 `[B, T]`.
    of_log_probs: Tensor,
    /// Derivative by each entropy, if there is a bonus.
    of_entropy: Option<Tensor>,
}

/// The options as numbers. A bound that is absent is infinite.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    /// 0: clip, 1: detached weight, 2: policy gradient.
    surrogate: u32,
    low: f32,
    high: f32,
    delta: f32,
    dual_clip: f32,
    drop_low: f32,
    drop_high: f32,
    log_ratio_clamp: f32,
    kl: KlNumbers,
    old_kl: KlNumbers,
    /// 0: 1, 1: length, 2: prompt tokens.
    divisor: u32,
    scale: f64,
    entropy_divisor: u32,
    /// 0 without a bonus.
    entropy_scale: f64,
}

#[derive(Debug, Clone, Copy)]
struct KlNumbers {
    /// 0: no term, 1: k1, 2: k2, 3: k3, 4: the absolute value.
    estimate: u32,
    /// 0: its own, 1: the log-ratio, 2: the weighted log-ratio.
    slope: u32,
    /// 1 if the estimate is multiplied by the ratio.
    times_ratio: u32,
    coef: f32,
    log_ratio_clamp: f32,
    value_clamp: f32,
    /// Logarithm of the largest weight.
    max_log_weight: f32,
}

impl KlNumbers {
    fn new(term: Option<&KlTerm>) -> Self {
        let Some(term) = term else {
            return Self {
                estimate: 0,
                slope: 0,
                times_ratio: 0,
                coef: 0.0,
                log_ratio_clamp: f32::INFINITY,
                value_clamp: f32::INFINITY,
                max_log_weight: f32::INFINITY,
            };
        };
        let (slope, max_log_weight) = match term.slope {
            KlSlope::Own => (0, f32::INFINITY),
            KlSlope::LogRatio => (1, f32::INFINITY),
            KlSlope::WeightedLogRatio { max } => (2, max.ln() as f32),
        };
        Self {
            estimate: match term.estimate {
                KlEstimate::K1 => 1,
                KlEstimate::K2 => 2,
                KlEstimate::K3 => 3,
                KlEstimate::Abs => 4,
            },
            slope,
            times_ratio: u32::from(term.times_ratio),
            coef: term.coef as f32,
            log_ratio_clamp: or_infinite(term.log_ratio_clamp),
            value_clamp: or_infinite(term.value_clamp),
            max_log_weight,
        }
    }
}

impl Numbers {
    fn new(terms: &PolicyTerms) -> Self {
        let none = f32::INFINITY;
        let mut numbers = Self {
            surrogate: 2,
            low: -none,
            high: none,
            delta: none,
            dual_clip: none,
            drop_low: -none,
            drop_high: none,
            log_ratio_clamp: or_infinite(terms.log_ratio_clamp),
            kl: KlNumbers::new(terms.kl.as_ref().map(|(term, _)| term)),
            old_kl: KlNumbers::new(terms.old_kl.as_ref()),
            divisor: terms.share.divisor.number(),
            scale: terms.share.scale,
            entropy_divisor: Divisor::One.number(),
            entropy_scale: 0.0,
        };
        match terms.surrogate {
            RatioSurrogate::Clip {
                low,
                high,
                delta,
                dual_clip,
            } => {
                numbers.surrogate = 0;
                (numbers.low, numbers.high) = (low as f32, high as f32);
                numbers.delta = or_infinite(delta);
                numbers.dual_clip = or_infinite(dual_clip);
            }
            RatioSurrogate::DetachedWeight { min, max, drop } => {
                numbers.surrogate = 1;
                numbers.low = min.map_or(-none, |min| min as f32);
                numbers.high = or_infinite(max);
                if let Some((low, high)) = drop {
                    (numbers.drop_low, numbers.drop_high) = (low as f32, high as f32);
                }
            }
            RatioSurrogate::PolicyGradient => {}
        }
        if let Some(bonus) = &terms.entropy_bonus {
            numbers.entropy_divisor = bonus.share.divisor.number();
            numbers.entropy_scale = bonus.share.scale;
        }
        numbers
    }
}

fn or_infinite(bound: Option<f64>) -> f32 {
    bound.map_or(f32::INFINITY, |bound| bound as f32)
}

impl Divisor {
    fn number(self) -> u32 {
        match self {
            Self::One => 0,
            Self::Length => 1,
            Self::PromptTokens => 2,
        }
    }
}

impl Arguments {
    fn new(log_probs: &Tensor, terms: &PolicyTerms) -> Result<Self> {
        check::one_stream(log_probs.device())?;
        let &[rows, tokens] = log_probs.dims() else {
            bail!("log_probs: shape {:?}, must be [B, T]", log_probs.dims());
        };
        if !path::is_fused(log_probs) {
            bail!(
                "log_probs: {:?} on {:?}, must be f32, bf16 or f16 on the CPU or CUDA",
                log_probs.dtype(),
                log_probs.device().location()
            );
        }
        if rows == 0 || tokens == 0 {
            bail!("log_probs: shape [{rows}, {tokens}], must have a sequence and a token");
        }
        let bonus = terms.entropy_bonus.as_ref();
        if bonus.is_some() && terms.entropy.is_none() {
            bail!("entropy: absent, an entropy bonus needs it");
        }
        let divisors = [Some(terms.share), bonus.map(|bonus| bonus.share)];
        let by_prompt = |share: TokenShare| share.divisor == Divisor::PromptTokens;
        if divisors.into_iter().flatten().any(by_prompt) && terms.prompt_tokens.is_none() {
            bail!("prompt_tokens: absent, a mean over prompts needs them");
        }
        let to_f32 = |name: &str, x: &Tensor, shapes: &[&[usize]]| {
            checked(name, x, log_probs, shapes)?.to_dtype(DType::F32)
        };
        let (per_token, column) = ([rows, tokens], [rows, 1]);
        let of_tokens =
            |name: &str, x: Option<&Tensor>| x.map(|x| to_f32(name, x, &[&per_token])).transpose();
        let either = |name: &str, x: &Tensor| to_f32(name, x, &[&per_token, &column]);
        let flags = |name: &str, x: &Tensor| {
            if x.dtype() != DType::U8 {
                bail!("{name}: {:?}, must be u8", x.dtype());
            }
            checked(name, x, log_probs, &[&per_token])
        };
        let optional_flags = |name: &str, x: Option<&Tensor>| x.map(|x| flags(name, x)).transpose();
        let [first, second] = terms.factors;
        Ok(Self {
            rows,
            tokens,
            mask: flags("mask", terms.mask)?,
            old_log_probs: of_tokens("old_log_probs", terms.old_log_probs)?,
            ref_log_probs: of_tokens("kl", terms.kl.map(|(_, reference)| reference))?,
            entropy: of_tokens("entropy", terms.entropy)?,
            advantages: either("advantages", terms.advantages)?,
            factors: [
                first.map(|x| either("factors", x)).transpose()?,
                second.map(|x| either("factors", x)).transpose()?,
            ],
            token_weights: of_tokens("token_weights", terms.token_weights)?,
            prompt_tokens: terms
                .prompt_tokens
                .map(|x| to_f32("prompt_tokens", x, &[&[rows]]))
                .transpose()?,
            policy_mask: optional_flags("policy_mask", terms.policy_mask)?,
            entropy_mask: optional_flags("entropy_mask", bonus.and_then(|bonus| bonus.mask))?,
            numbers: Numbers::new(terms),
            kept: Arc::default(),
        })
    }

    fn on_cpu(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let log_probs = &storage.as_slice::<f32>()?[slice::range(layout)?];
        let (loss, kept) = cpu::forward(log_probs, self)?;
        self.keep(kept)?;
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (loss, kept) = cuda::forward(storage, layout, self)?;
        self.keep(kept)?;
        Ok((loss, Shape::from(())))
    }

    fn keep(&self, kept: Kept) -> Result<()> {
        match self.kept.set(kept) {
            Ok(()) => Ok(()),
            Err(_) => bail!("policy_loss: the forward pass ran twice"),
        }
    }

    /// Returns the gradients by log-probs and entropy, given that by the loss.
    fn gradients(&self, gradient: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Some(kept) = self.kept.get() else {
            bail!("policy_loss: the forward pass did not run");
        };
        #[cfg(feature = "cuda")]
        if gradient.device().is_cuda() {
            return cuda::backward(kept, gradient);
        }
        cpu::backward(kept, gradient)
    }
}

/// Returns `x`, contiguous and detached, if it has one of the shapes and the device of `log_probs`.
fn checked(name: &str, x: &Tensor, log_probs: &Tensor, shapes: &[&[usize]]) -> Result<Tensor> {
    if !shapes.contains(&x.dims()) {
        let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
        bail!(
            "{name}: shape {:?}, must be {}",
            x.dims(),
            shapes.join(" or ")
        );
    }
    check::same_device(&[("log_probs", log_probs), (name, x)])?;
    x.detach().contiguous()
}

impl CustomOp1 for Arguments {
    fn name(&self) -> &'static str {
        "policy_loss"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu(storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.on_cuda(storage, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.gradients(gradient).map(|(first, _)| Some(first))
    }
}

impl CustomOp2 for Arguments {
    fn name(&self) -> &'static str {
        "policy_loss"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_cpu(storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
        _: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        self.on_cuda(storage, layout)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (of_log_probs, of_entropy) = self.gradients(gradient)?;
        Ok((Some(of_log_probs), of_entropy))
    }
}
