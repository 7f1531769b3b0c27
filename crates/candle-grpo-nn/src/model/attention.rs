//! Attention, a token mixer.

use candle_core::{Error, Result, Tensor};
use candle_grpo_kernels::{HeadNorms, HeadTransform, PagedBatch, Scores, sigmoid};
use candle_nn::VarBuilder;

use crate::config::architecture::{AttentionPlan, NormPlan};
use crate::model::block::Mixer;
use crate::model::linear::{Linear, Maps};
use crate::model::norm::RmsNorm;
use crate::model::pass::{Pass, QueryKeyValue};
use crate::optim::grad_sink::GradSink;

/// Grouped-query attention (Ainslie et al. 2023) with rotary positions.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    /// Block number.
    layer: usize,
    /// Query, key and value maps.
    inputs: Maps<3>,
    output: Linear,
    norms: Option<QueryKeyNorms>,
    /// Index of the rotation, if query and key rotate.
    rotation: Option<usize>,
    head_dim: usize,
    scores: Scores,
    /// The query map interleaves each head with a gate for its output.
    output_gate: bool,
}

/// Query and key norms, applied before the rotation.
#[derive(Debug, Clone)]
struct QueryKeyNorms {
    query: RmsNorm,
    key: RmsNorm,
}

/// Forward-pass tensors that the backward pass needs.
pub(crate) struct AttentionRecord {
    /// Query and key before [`QueryKeyNorms`], if there are any.
    before_norm: Option<(Tensor, Tensor)>,
    /// Inputs to the attention operator.
    query_key_value: QueryKeyValue,
    mixed: Tensor,
    /// Log-sums from the attention operator, on CUDA.
    log_sums: Option<Tensor>,
    /// Output gates before their sigmoid, and the gated output, if there are gates.
    gated: Option<[Tensor; 2]>,
}

impl Attention {
    pub(crate) fn new(plan: &AttentionPlan, layer: usize, vb: &VarBuilder) -> Result<Self> {
        let norms = |[query, key]: &[NormPlan; 2]| {
            Ok::<_, candle_core::Error>(QueryKeyNorms {
                query: RmsNorm::new(query, vb)?,
                key: RmsNorm::new(key, vb)?,
            })
        };
        Ok(Self {
            layer,
            inputs: Maps::new(&plan.inputs, vb)?,
            output: Linear::new(&plan.output, vb)?,
            norms: plan.norms.as_ref().map(norms).transpose()?,
            rotation: plan.rotation,
            head_dim: plan.head_dim,
            scores: plan.scores,
            output_gate: plan.output_gate,
        })
    }

    /// Returns whether decoding can read pages that rows share once.
    pub(crate) fn shares_reads(&self) -> bool {
        PagedBatch::can_share_reads(self.head_dim, &self.scores)
    }

    /// Splits each head in `[N, heads * 2 * head_dim]` into its first and second half.
    fn halves_of_heads(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let rows = x.dim(0)?;
        let heads = x.reshape((rows, (), 2, self.head_dim))?;
        let half = |index| {
            let half = heads.narrow(2, index, 1)?.contiguous()?;
            half.reshape((rows, ()))
        };
        Ok([half(0)?, half(1)?])
    }

    /// Inverts [`Self::halves_of_heads`].
    fn whole_heads(&self, halves: [&Tensor; 2]) -> Result<Tensor> {
        let rows = halves[0].dim(0)?;
        let heads = halves.map(|half| half.reshape((rows, (), 1, self.head_dim)));
        let [first, second] = heads;
        Tensor::cat(&[first?, second?], 2)?.reshape((rows, ()))
    }

    /// The head transform: `norms`, then the rotation.
    fn transform<'a>(&self, pass: &'a Pass, norms: Option<HeadNorms<'a>>) -> HeadTransform<'a> {
        HeadTransform {
            norms,
            angles: self.rotation.map(|rotation| pass.angles[rotation].tables()),
            head_dim: Some(self.head_dim),
        }
    }
}

impl QueryKeyNorms {
    /// The norms for the fused operator, which requires weights that are the factors.
    fn operands(&self) -> Option<HeadNorms<'_>> {
        let ((query, epsilon), (key, _)) = (self.query.weight()?, self.key.weight()?);
        Some(HeadNorms {
            weights: [query, key],
            epsilon,
        })
    }
}

impl Mixer for Attention {
    type Record = AttentionRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        let inputs = self.inputs.linear().iter_mut();
        inputs.chain([&mut self.output]).collect()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, AttentionRecord)> {
        let mut projected = self.inputs.forward(x, pass)?;
        let gate = self
            .output_gate
            .then(|| {
                let [query, gate] = self.halves_of_heads(&projected[0])?;
                projected[0] = query;
                Ok::<_, Error>(gate)
            })
            .transpose()?;
        let before_norm = self
            .norms
            .is_some()
            .then(|| (projected[0].clone(), projected[1].clone()));
        let operands = self.norms.as_ref().and_then(QueryKeyNorms::operands);
        if let (Some(norms), None) = (&self.norms, &operands) {
            projected[0] = norms.query.forward_heads(&projected[0])?;
            projected[1] = norms.key.forward_heads(&projected[1])?;
            if !pass.products().have_gradients() {
                projected = projected.map(|heads| heads.detach());
            }
        }
        let transform = self.transform(pass, operands);
        let (query_key_value, mixed, log_sums) =
            pass.attend(self.layer, projected, &transform, self.scores)?;
        let gated = gate.map(|gate| {
            let gated = (&mixed * sigmoid(&gate)?)?;
            Ok::<_, Error>([gate, gated])
        });
        let gated = gated.transpose()?;
        let result = gated.as_ref().map_or(&mixed, |[_, gated]| gated);
        let y = self.output.forward(result, pass)?;
        let record = AttentionRecord {
            before_norm,
            query_key_value,
            mixed,
            log_sums,
            gated,
        };
        Ok((y, record))
    }

    fn backward(
        &self,
        x: &Tensor,
        record: AttentionRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let AttentionRecord {
            before_norm,
            query_key_value,
            mixed,
            log_sums,
            gated,
        } = record;
        let result = gated.as_ref().map_or(&mixed, |[_, gated]| gated);
        let mut mixed_gradient =
            self.output
                .backward(result, gradient, None, (pass, &mut *sink))?;
        let mut gate_gradient = None;
        if let Some([gate, gated]) = gated {
            let sigmoid = sigmoid(&gate)?;
            // The derivative of s is s (1 - s).
            let slope = (gated * (1.0 - &sigmoid)?)?;
            gate_gradient = Some((&mixed_gradient * slope)?);
            mixed_gradient = (mixed_gradient * sigmoid)?;
        }
        let [mut query_gradient, mut key_gradient, value_gradient] = pass.attend_backward(
            &query_key_value,
            (&mixed, log_sums.as_ref()),
            &mixed_gradient,
            self.scores,
        )?;
        drop((query_key_value, mixed, mixed_gradient));
        [query_gradient, key_gradient] = self
            .transform(pass, None)
            .rotate_back([&query_gradient, &key_gradient])?;
        if let (Some(norms), Some((query, key))) = (&self.norms, before_norm) {
            query_gradient = norms.query.backward_heads(&query, &query_gradient, sink)?;
            key_gradient = norms.key.backward_heads(&key, &key_gradient, sink)?;
        }
        if let Some(gate_gradient) = gate_gradient {
            query_gradient = self.whole_heads([&query_gradient, &gate_gradient])?;
        }
        let gradients = [query_gradient, key_gradient, value_gradient];
        self.inputs.backward(x, &gradients, (pass, sink))
    }
}
