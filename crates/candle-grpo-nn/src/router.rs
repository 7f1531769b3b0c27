//! Routes tokens to experts, and replays routing decisions.

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{expert_gates, route};

/// A mixture-of-experts router: picks the `top_k` experts with the largest logits, and computes
/// their gates.
///
/// If one engine samples and another trains, rounding makes them choose different experts for some
/// tokens, and their probability ratio drifts from 1. Replay combines the experts from one pass
/// with the gates from another. The sampling pass chooses, and the gates and their gradient come
/// from the current logits (rollout routing replay, R3, <https://arxiv.org/abs/2510.11370>, as in
/// ROLL, verl and twinkle). You can also replay a pass from before an update in one after it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_nn::model::Router;
///
/// let router = Router::new(2);
/// let drawn = router.route(&Tensor::new(&[[3f32, 1., 2., 0.]], &Device::Cpu)?)?;
/// assert_eq!(drawn.experts.to_vec2::<u32>()?, [[0, 2]]);
///
/// // The logits have changed: a new choice would include expert 1.
/// let now = router.replay(&Tensor::new(&[[3f32, 4., 3., 0.]], &Device::Cpu)?, &drawn.experts)?;
/// assert_eq!(now.gates.to_vec2::<f32>()?, [[0.5, 0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Router {
    top_k: usize,
    normalize: bool,
}

/// Each token's experts and gates.
#[derive(Debug, Clone)]
pub struct Routing {
    /// Expert indices, u32 `[N, top_k]`; [`Router::route`] puts the largest logit first.
    pub experts: Tensor,
    /// Factors for the outputs of these experts, `[N, top_k]`, differentiable; f64 for f64 logits,
    /// else f32.
    pub gates: Tensor,
}

impl Router {
    /// A router whose gates sum to 1: softmax over the chosen experts' logits (Mixtral, and Qwen
    /// with `norm_topk_prob`).
    pub fn new(top_k: usize) -> Self {
        Self {
            top_k,
            normalize: true,
        }
    }

    /// A router whose gates come from a softmax over all experts, so they sum to less than 1.
    pub fn over_all_experts(top_k: usize) -> Self {
        Self {
            top_k,
            normalize: false,
        }
    }

    pub(crate) fn top_k(&self) -> usize {
        self.top_k
    }

    /// Chooses the experts with the largest `logits` `[N, E]` for each of N tokens. The choice has
    /// no gradient.
    ///
    /// # Errors
    ///
    /// If `logits` has a different shape or an integer dtype, or `top_k` is not from 1 to E.
    pub fn route(&self, logits: &Tensor) -> Result<Routing> {
        self.replay(logits, &self.route_detached(logits)?.experts)
    }

    /// Like [`Self::route`], without a gradient for the gates.
    pub(crate) fn route_detached(&self, logits: &Tensor) -> Result<Routing> {
        let (experts, gates) = route(logits, self.top_k, self.normalize)?;
        Ok(Routing { experts, gates })
    }

    /// Computes the gates for `experts` `[N, top_k]`, chosen in another pass over the same tokens,
    /// from `logits` `[N, E]`. The gradient reaches the logits.
    ///
    /// # Errors
    ///
    /// If shapes or dtypes do not match. Expert indices must be below E, which only the CPU checks.
    pub fn replay(&self, logits: &Tensor, experts: &Tensor) -> Result<Routing> {
        let gates = expert_gates(logits, experts, self.top_k, self.normalize)?;
        Ok(Routing {
            experts: experts.contiguous()?,
            gates,
        })
    }
}

/// Routes all layers in one forward pass. It either records the chosen experts, or replays those
/// from another pass.
///
/// A model calls [`Self::route`] once per layer, in the same order in every pass.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_nn::model::{Router, RouterPass};
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
    /// Experts chosen so far; in a replay, those for all layers.
    experts: Vec<Tensor>,
    /// The next layer to replay; `None` if the pass records.
    next: Option<usize>,
}

impl RouterPass {
    /// A pass that chooses and records experts.
    pub fn recording() -> Self {
        Self {
            experts: Vec::new(),
            next: None,
        }
    }

    /// A pass that replays `experts` from another pass, u32 `[N, top_k]` per layer.
    pub fn replaying(experts: Vec<Tensor>) -> Self {
        Self {
            experts,
            next: Some(0),
        }
    }

    /// Routes the next layer, given its router's `logits` `[N, E]`.
    ///
    /// # Errors
    ///
    /// Same as [`Router::route`] and [`Router::replay`]. Also if there are more layers than
    /// recorded.
    pub fn route(&mut self, router: &Router, logits: &Tensor) -> Result<Routing> {
        let Some(layer) = self.next else {
            let routing = router.route(logits)?;
            self.experts.push(routing.experts.clone());
            return Ok(routing);
        };
        let Some(experts) = self.experts.get(layer) else {
            bail!(
                "layer: {layer}, must be below {}, the number of recorded layers",
                self.experts.len()
            );
        };
        let routing = router.replay(logits, experts)?;
        self.next = Some(layer + 1);
        Ok(routing)
    }

    /// The experts in all layers.
    pub fn into_experts(self) -> Vec<Tensor> {
        self.experts
    }
}
