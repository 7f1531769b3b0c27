//! Routing for all mixtures of experts in one pass: replay and load balancing.

use candle_core::{D, DType, Result, Tensor, bail};
use candle_grpo_kernels::arithmetic_dtype;

use crate::SequenceRanks;

/// Inputs to the routers in a pass.
#[derive(Clone, Copy, Default)]
pub(crate) struct Routes<'a> {
    /// Each token's experts, u32 `[N, routers * top_k]`, if they are replayed.
    pub(crate) replayed: Option<&'a Tensor>,
    /// For the backward pass.
    pub(crate) balance: Option<&'a BalanceGradient>,
}

/// Load balance across experts, over one pass and all mixtures of experts, see
/// [`Backward::balance_experts`](crate::Backward::balance_experts).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertBalance {
    /// Load-balancing loss: `top_k` if all experts have equal shares, and at most E.
    pub loss: f64,
    /// Tokens at the busiest expert, relative to equal shares: from 1 to `E / top_k`.
    pub max_load: f64,
}

/// A router's chosen experts, and its logits.
#[derive(Debug, Clone)]
pub(crate) struct RouterChoice {
    /// `[N, E]`
    pub(crate) logits: Tensor,
    /// u32 `[N, top_k]`
    pub(crate) chosen: Tensor,
}

/// Gradient of the load-balancing loss.
#[derive(Debug)]
pub(crate) struct BalanceGradient {
    /// Gradient with respect to each expert's probability, `[1, E]`.
    of_probs: Tensor,
    /// Factor for each token, `[N, 1]`.
    weights: Tensor,
}

impl Routes<'_> {
    /// Experts to replay in router `number`, which chooses `top_k`, u32 `[N, top_k]`.
    pub(crate) fn replayed(&self, number: usize, top_k: usize) -> Result<Option<Tensor>> {
        let of_router = |all: &Tensor| all.narrow(1, number * top_k, top_k)?.contiguous();
        self.replayed.map(of_router).transpose()
    }
}

impl BalanceGradient {
    /// Gradient with respect to one router's `logits` `[N, E]`.
    pub(crate) fn of_logits(&self, logits: &Tensor) -> Result<Tensor> {
        let probs = probs(logits)?;
        let of_probs = self.of_probs.to_dtype(probs.dtype())?;
        let mean = probs.broadcast_mul(&of_probs)?.sum_keepdim(D::Minus1)?;
        let centered = of_probs.broadcast_sub(&mean)?;
        (probs * centered)?.broadcast_mul(&self.weights.to_dtype(mean.dtype())?)
    }
}

/// Computes the expert balance in a pass, and `coef` times its loss gradient. `weights` says how
/// often each of the N tokens counts. If `ranks` divide the pass, the balance is that of all of
/// them.
///
/// If no token counts, both are absent.
pub(crate) fn balance(
    routers: &[RouterChoice],
    weights: &[f32],
    coef: f64,
    ranks: Option<&SequenceRanks>,
) -> Result<Option<(ExpertBalance, BalanceGradient)>> {
    let Some(first) = routers.first() else {
        return Ok(None);
    };
    let ((n, experts), top_k) = (first.logits.dims2()?, first.chosen.dim(1)?);
    if weights.len() != n {
        bail!(
            "weights: {} entries, must be {n}, one per row",
            weights.len()
        );
    }
    let own: f64 = weights.iter().copied().map(f64::from).sum();
    let sum = |own| match ranks {
        Some(ranks) => ranks.sum(own),
        None => Ok(own),
    };
    let total = sum(vec![own])?[0] * routers.len() as f64;
    if total == 0.0 {
        return Ok(None);
    }
    let device = first.logits.device();
    let column = Tensor::new(weights, device)?.unsqueeze(1)?;
    let (mut loads, mut mean_probs) = (vec![0f64; experts], vec![0f64; experts]);
    for RouterChoice { logits, chosen } in routers {
        for (chosen, &weight) in chosen.to_vec2::<u32>()?.iter().zip(weights) {
            for &expert in chosen {
                loads[expert as usize] += f64::from(weight) / total;
            }
        }
        let probs = probs(logits)?;
        let sums = probs
            .broadcast_mul(&column.to_dtype(probs.dtype())?)?
            .sum(0)?;
        let sums = sums.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        for (mean, sum) in mean_probs.iter_mut().zip(sums) {
            *mean += sum / total;
        }
    }
    let (loads, mean_probs) = (sum(loads)?, sum(mean_probs)?);
    let products = loads.iter().zip(&mean_probs);
    let busiest = loads.iter().copied().fold(0.0, f64::max);
    let found = ExpertBalance {
        loss: experts as f64 * products.map(|(load, prob)| load * prob).sum::<f64>(),
        max_load: busiest * experts as f64 / top_k as f64,
    };
    let of_probs = loads
        .iter()
        .map(|load| (coef * experts as f64 * load / total) as f32);
    let gradient = BalanceGradient {
        of_probs: Tensor::from_iter(of_probs, device)?.unsqueeze(0)?,
        weights: column,
    };
    Ok(Some((found, gradient)))
}

fn probs(logits: &Tensor) -> Result<Tensor> {
    let logits = logits.to_dtype(arithmetic_dtype(logits.dtype()))?;
    candle_nn::ops::softmax(&logits, D::Minus1)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// The loss as transformers writes it: averages one-hot choices and probabilities over the
    /// tokens in all layers, counting each token as often as its weight says.
    fn composed(logits: &[Var], chosen: &[Tensor], weights: &Tensor) -> Result<Tensor> {
        let logits: Vec<_> = logits.iter().map(Var::as_tensor).collect();
        let (logits, chosen) = (Tensor::cat(&logits, 0)?, Tensor::cat(chosen, 0)?);
        let weights = weights.repeat((chosen.dim(0)? / weights.dim(0)?, 1))?;
        let experts = logits.dim(1)?;
        let each = Tensor::arange(0u32, experts as u32, &Device::Cpu)?;
        let one_hot = chosen
            .unsqueeze(2)?
            .broadcast_eq(&each.reshape((1, 1, experts))?)?;
        let one_hot = one_hot.to_dtype(DType::F64)?.sum(1)?;
        let mean = |x: Tensor| -> Result<Tensor> {
            x.broadcast_mul(&weights)?
                .sum(0)?
                .broadcast_div(&weights.sum_all()?)
        };
        let probs = candle_nn::ops::softmax(&logits, 1)?;
        (mean(one_hot)? * mean(probs)?)?.sum_all()? * experts as f64
    }

    #[test]
    fn the_balance_equals_the_composed_formula() -> Result<()> {
        let wave = |phase: f64| -> Result<Var> {
            let x = Tensor::arange(0f64, 15.0, &Device::Cpu)?.affine(1.7, phase)?;
            Var::from_tensor(&(x.sin()? * 2.0)?.reshape((3, 5))?)
        };
        let logits = [wave(0.0)?, wave(1.0)?];
        let chosen = [[[0u32, 3], [1, 0], [0, 4]], [[2, 0], [0, 1], [3, 0]]];
        let chosen = chosen.map(|rows| Tensor::new(&rows, &Device::Cpu));
        let chosen = chosen.into_iter().collect::<Result<Vec<_>>>()?;
        let weights = [2f32, 0.0, 1.0];
        let column = Tensor::new(&[[2f64], [0.0], [1.0]], &Device::Cpu)?;
        let loss = composed(&logits, &chosen, &column)?;
        let store = loss.backward()?;
        let routers: Vec<_> = (logits.iter().zip(&chosen))
            .map(|(logits, chosen)| RouterChoice {
                logits: logits.as_detached_tensor(),
                chosen: chosen.clone(),
            })
            .collect();
        let (found, gradient) = balance(&routers, &weights, 0.5, None)?.expect("tokens that count");
        assert!((found.loss - loss.to_scalar::<f64>()?).abs() < 1e-12);
        // Every choice includes expert 0 as one of its two.
        assert!((found.max_load - 2.5).abs() < 1e-12);
        for logits in &logits {
            let expected = (store.get(logits).expect("a gradient") * 0.5)?;
            let own = gradient.of_logits(logits)?;
            let distance = (own - expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(distance < 1e-7, "{distance}");
        }
        assert!(balance(&routers, &[0.0; 3], 1.0, None)?.is_none());
        assert!(balance(&routers, &[1.0; 2], 1.0, None).is_err());
        Ok(())
    }
}
