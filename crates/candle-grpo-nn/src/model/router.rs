//! Choosing experts, and choosing the same ones again.

use candle_core::{D, DType, Result, Tensor, bail};

use candle_grpo_kernels::arithmetic_dtype;

/// The router of a layer of a mixture of experts: the `top_k` experts with the largest logits, and how much each counts.
///
/// Where one engine draws completions and another trains on them, rounding makes them choose other experts for some
/// tokens, and the ratio of their probabilities is then no longer near 1. Replay takes the experts of one pass and the
/// gates of another: the choice is that of the pass that drew, while gates, and their gradient, come from the logits of
/// now (rollout routing replay, R3, <https://arxiv.org/abs/2510.11370>; ROLL, verl and twinkle have it). The passes may also
/// be those before and after an update.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_nn::Router;
///
/// let router = Router::new(2);
/// let drawn = router.route(&Tensor::new(&[[3f32, 1., 2., 0.]], &Device::Cpu)?)?;
/// assert_eq!(drawn.experts.to_vec2::<u32>()?, [[0, 2]]);
///
/// // The logits have moved, so that expert 1 would be chosen now.
/// let now = router.replay(&Tensor::new(&[[3f32, 4., 3., 0.]], &Device::Cpu)?, &drawn.experts)?;
/// assert_eq!(now.gates.to_vec2::<f32>()?, [[0.5, 0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Router {
    top_k: usize,
    normalize: bool,
}

/// The experts of each token and their gates.
#[derive(Debug, Clone)]
pub struct Routing {
    /// The numbers of the experts, u32 `[N, top_k]`; [`Router::route`] puts the largest logit first.
    pub experts: Tensor,
    /// What the output of each of these experts: multiplied by, `[N, top_k]`, differentiable; in f32 (f64 for f64 logits).
    pub gates: Tensor,
}

impl Router {
    /// Gates that add up to 1: the softmax over the logits of the chosen experts (Mixtral; `norm_topk_prob` in Qwen's
    /// models).
    pub fn new(top_k: usize) -> Self {
        Self {
            top_k,
            normalize: true,
        }
    }

    /// Gates that are the softmax over all experts, of which those of the chosen ones are used: they add up to less than 1.
    pub fn over_all_experts(top_k: usize) -> Self {
        Self {
            top_k,
            normalize: false,
        }
    }

    /// Chooses the experts with the largest `logits` `[N, E]` for each of N tokens. The choice has no gradient.
    ///
    /// Errs on other shapes and dtypes, and if `top_k` is not from 1 to E.
    pub fn route(&self, logits: &Tensor) -> Result<Routing> {
        self.check_logits(logits)?;
        let order = logits
            .detach()
            .contiguous()?
            .arg_sort_last_dim(false)?
            .narrow(D::Minus1, 0, self.top_k)?
            .contiguous()?;
        self.replay(logits, &order)
    }

    /// The gates that `logits` `[N, E]` give the `experts` `[N, top_k]` of another pass over the same tokens. The gradient
    /// reaches the logits.
    ///
    /// Errs on shapes and dtypes that do not fit. Numbers of experts must be below E; on the CPU this is checked.
    pub fn replay(&self, logits: &Tensor, experts: &Tensor) -> Result<Routing> {
        let (tokens, number) = self.check_logits(logits)?;
        if experts.dims() != [tokens, self.top_k] || experts.dtype() != DType::U32 {
            bail!(
                "experts: {:?} of {:?}, must be [{tokens}, {}] of U32",
                experts.dims(),
                experts.dtype(),
                self.top_k
            );
        }
        if experts.device().is_cpu() {
            let largest = experts.max_all()?.to_scalar::<u32>()?;
            if largest as usize >= number {
                bail!("experts: {largest}, must be below {number}, the number of experts");
            }
        }
        let logits = logits.to_dtype(arithmetic_dtype(logits.dtype()))?;
        let experts = experts.contiguous()?;
        let gates = if self.normalize {
            candle_nn::ops::softmax(
                &logits.contiguous()?.gather(&experts, D::Minus1)?,
                D::Minus1,
            )?
        } else {
            candle_nn::ops::softmax(&logits, D::Minus1)?
                .contiguous()?
                .gather(&experts, D::Minus1)?
        };
        Ok(Routing { experts, gates })
    }

    /// Returns N and E.
    fn check_logits(&self, logits: &Tensor) -> Result<(usize, usize)> {
        match *logits.dims() {
            [tokens, experts]
                if tokens > 0
                    && (1..=experts).contains(&self.top_k)
                    && logits.dtype().is_float() =>
            {
                Ok((tokens, experts))
            }
            _ => bail!(
                "logits: {:?} of {:?}, must be [N, E] of a floating-point type, with at least one token and E at least \
                 top_k, which is {} and must be at least 1",
                logits.dims(),
                logits.dtype(),
                self.top_k
            ),
        }
    }
}

/// Runs the routers of all layers of a pass: freely, keeping what they choose, or with what another pass chose.
///
/// A model asks it in every layer, in the same order in every pass.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_nn::{Router, RouterPass};
///
/// let router = Router::new(1);
/// let logits = [[[1f32, 2.]], [[4f32, 3.]]].map(|x| Tensor::new(&x, &Device::Cpu));
/// let [first, second] = logits;
///
/// let mut sampling = RouterPass::recording();
/// sampling.route(&router, first.as_ref().unwrap())?;
/// sampling.route(&router, second.as_ref().unwrap())?;
///
/// let mut training = RouterPass::replaying(sampling.into_experts());
/// let replayed = training.route(&router, &second.unwrap())?;
/// assert_eq!(replayed.experts.to_vec2::<u32>()?, [[1]]); // as the first layer did
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RouterPass {
    /// Of the layers so far, or of all layers if they are replayed.
    experts: Vec<Tensor>,
    /// The next layer to replay; absent: the pass records.
    next: Option<usize>,
}

impl RouterPass {
    /// A pass that chooses, and keeps what it chose.
    pub fn recording() -> Self {
        Self {
            experts: Vec::new(),
            next: None,
        }
    }

    /// A pass that uses the `experts` of another one, for each layer u32 `[N, top_k]`.
    pub fn replaying(experts: Vec<Tensor>) -> Self {
        Self {
            experts,
            next: Some(0),
        }
    }

    /// The routing of the next layer, whose router gives `logits` `[N, E]`.
    ///
    /// Errs as [`Router::route`] and [`Router::replay`] do, and if there are more layers than were recorded.
    pub fn route(&mut self, router: &Router, logits: &Tensor) -> Result<Routing> {
        let Some(layer) = self.next else {
            let routing = router.route(logits)?;
            self.experts.push(routing.experts.clone());
            return Ok(routing);
        };
        let Some(experts) = self.experts.get(layer) else {
            bail!(
                "the pass asks for layer {layer}, there are the experts of {} layers",
                self.experts.len()
            );
        };
        let routing = router.replay(logits, experts)?;
        self.next = Some(layer + 1);
        Ok(routing)
    }

    /// What the layers chose, or were told to.
    pub fn into_experts(self) -> Vec<Tensor> {
        self.experts
    }
}
