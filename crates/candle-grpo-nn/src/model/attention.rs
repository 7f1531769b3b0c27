//! Attention, a token mixer.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{HeadNorms, HeadTransform, PagedBatch, Scores, gate_heads};
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
    /// In the output of the query map, a gate for the attention output follows each head.
    has_gates: bool,
}

/// Query and key norms, applied before the rotation.
#[derive(Debug, Clone)]
struct QueryKeyNorms {
    query: RmsNorm,
    key: RmsNorm,
}

/// Forward-pass tensors that the backward pass needs.
pub(crate) struct AttentionRecord {
    /// Query and key before the head transform, if it has norms or gates.
    before_transform: Option<[Tensor; 2]>,
    /// Inputs to the attention operator.
    query_key_value: QueryKeyValue,
    mixed: Tensor,
    /// Log-sums from the attention operator, on CUDA.
    log_sums: Option<Tensor>,
    /// `mixed` with its gates, if there are any.
    gated: Option<Tensor>,
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
            has_gates: plan.output_gate,
        })
    }

    /// Returns whether decoding can read pages that rows share once.
    pub(crate) fn shares_reads(&self) -> bool {
        PagedBatch::can_share_reads(self.head_dim, &self.scores)
    }

    /// The head transform: norms, then the rotation.
    fn transform<'a>(&'a self, pass: &'a Pass) -> HeadTransform<'a> {
        HeadTransform {
            norms: self.norms.as_ref().map(QueryKeyNorms::operands),
            angles: self.rotation.map(|rotation| pass.angles[rotation].tables()),
            head_dim: Some(self.head_dim),
            has_gates: self.has_gates,
        }
    }
}

impl QueryKeyNorms {
    fn operands(&self) -> HeadNorms<'_> {
        let ((query, options), (key, _)) = (self.query.operands(), self.key.operands());
        HeadNorms {
            weights: [query, key],
            options,
        }
    }
}

impl Mixer for Attention {
    type Record = AttentionRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        let inputs = self.inputs.linear().iter_mut();
        inputs.chain([&mut self.output]).collect()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, AttentionRecord)> {
        let projected = self.inputs.forward(x, pass)?;
        let is_kept = self.norms.is_some() || self.has_gates;
        let before_transform = is_kept.then(|| [projected[0].clone(), projected[1].clone()]);
        let (query_key_value, mixed, log_sums) =
            pass.attend(self.layer, projected, &self.transform(pass), self.scores)?;
        let query = before_transform.as_ref().filter(|_| self.has_gates);
        let gated = query.map(|[query, _]| gate_heads(&mixed, query, self.head_dim));
        let gated = gated.transpose()?;
        let y = self
            .output
            .forward(gated.as_ref().unwrap_or(&mixed), pass)?;
        let record = AttentionRecord {
            before_transform,
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
            before_transform,
            query_key_value,
            mixed,
            log_sums,
            gated,
        } = record;
        let result = gated.as_ref().unwrap_or(&mixed);
        let of_gated = self
            .output
            .backward(result, gradient, None, (pass, &mut *sink))?;
        drop(gated);
        let heads = before_transform.as_ref().map(<[_; 2]>::each_ref);
        let of_mixed = match heads {
            Some([query, _]) if self.has_gates => gate_heads(&of_gated, query, self.head_dim)?,
            _ => of_gated.clone(),
        };
        let [of_query, of_key, of_value] = pass.attend_backward(
            &query_key_value,
            (&mixed, log_sums.as_ref()),
            &of_mixed,
            self.scores,
        )?;
        drop((query_key_value, of_mixed));
        let gates = self.has_gates.then_some([&of_gated, &mixed]);
        let found = self
            .transform(pass)
            .gradients(heads, [&of_query, &of_key], gates)?;
        drop((of_gated, mixed, of_query, of_key, before_transform));
        if let (Some(norms), Some([of_query, of_key])) = (&self.norms, found.weights) {
            norms.query.add_gradient(of_query, sink)?;
            norms.key.add_gradient(of_key, sink)?;
        }
        let [of_query, of_key] = found.heads;
        self.inputs
            .backward(x, &[of_query, of_key, of_value], (pass, sink))
    }
}
