//! A decoder block.

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::add;
use candle_nn::VarBuilder;

use crate::config::architecture::{BlockPlan, ChannelPlan, SublayerPlan, TokenMixerPlan};
use crate::model::attention::{Attention, AttentionRecord};
use crate::model::experts::{Experts, ExpertsRecord};
use crate::model::gated_delta::{GatedDelta, GatedDeltaRecord};
use crate::model::linear::Linear;
use crate::model::mlp::{Mlp, MlpRecord};
use crate::model::norm::RmsNorm;
use crate::model::pass::Pass;
use crate::model::routes::RouterChoice;
use crate::optim::grad_sink::GradSink;

/// A block part that maps hidden states `[N, hidden]` to their change.
pub(crate) trait Mixer {
    /// Forward-pass tensors that the backward pass needs.
    type Record;

    /// The linear maps, in the same order in each mixer of this type.
    fn linear(&mut self) -> Vec<&mut Linear>;

    /// `[N, hidden]` to `[N, hidden]`.
    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Record)>;

    /// Returns the gradient with respect to `x`, given the output gradient.
    fn backward(
        &self,
        x: &Tensor,
        record: Self::Record,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor>;
}

/// A token mixer, then a channel mixer.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    tokens: Sublayer<TokenMixer>,
    mlp: Sublayer<Channel>,
}

/// Mixes tokens along a sequence.
#[derive(Debug, Clone)]
enum TokenMixer {
    Attention(Attention),
    GatedDelta(GatedDelta),
}

enum TokenMixerRecord {
    Attention(AttentionRecord),
    GatedDelta(GatedDeltaRecord),
}

/// Forward-pass tensors that the backward pass needs.
pub(crate) struct BlockRecord {
    tokens: SublayerRecord<TokenMixer>,
    mlp: SublayerRecord<Channel>,
}

/// A channel mixer.
#[derive(Debug, Clone)]
enum Channel {
    Mlp(Box<Mlp>),
    Experts(Experts),
}

enum ChannelRecord {
    Mlp(MlpRecord),
    Experts(ExpertsRecord),
}

/// `x + scale * after(mixer(before(x)))`.
#[derive(Debug, Clone)]
struct Sublayer<M> {
    before: Option<RmsNorm>,
    mixer: M,
    after: Option<RmsNorm>,
    scale: f64,
}

struct SublayerRecord<M: Mixer> {
    x: Tensor,
    /// Mixer input.
    input: Tensor,
    mixer: M::Record,
    /// Mixer output, if a norm follows.
    mixed: Option<Tensor>,
}

impl Block {
    /// `layer` and `router` number the block and its router within the decoder.
    pub(crate) fn new(
        plan: &BlockPlan,
        layer: usize,
        router: usize,
        vb: &VarBuilder,
    ) -> Result<Self> {
        let tokens = |plan: &_| TokenMixer::new(plan, layer, vb);
        Ok(Self {
            tokens: Sublayer::new(&plan.tokens, vb, tokens)?,
            mlp: Sublayer::new(&plan.mlp, vb, |plan| match plan {
                ChannelPlan::Mlp(plan) => Ok(Channel::Mlp(Box::new(Mlp::new(plan, vb)?))),
                ChannelPlan::Experts(plan) => Ok(Channel::Experts(Experts::new(plan, router, vb)?)),
            })?,
        })
    }

    /// The linear maps.
    pub(crate) fn linear(&mut self) -> Vec<&mut Linear> {
        let mut all = self.tokens.mixer.linear();
        all.extend(self.mlp.mixer.linear());
        all
    }

    /// Returns whether the token mixer has a recurrent state.
    pub(crate) fn has_state(&self) -> bool {
        matches!(self.tokens.mixer, TokenMixer::GatedDelta(_))
    }

    /// Returns whether the token mixer is an attention that can read pages that rows share once.
    pub(crate) fn shares_reads(&self) -> bool {
        matches!(&self.tokens.mixer, TokenMixer::Attention(attention) if attention.shares_reads())
    }

    /// Returns whether decoding steps with this number of rows only use the GPU's stream: there is
    /// no recurrent state, and experts need no wait.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_recordable(&self, rows: usize) -> bool {
        let waits = match &self.mlp.mixer {
            Channel::Mlp(_) => false,
            Channel::Experts(experts) => experts.grouped(rows).is_none(),
        };
        !waits
    }

    /// Prepares for weights whose addresses change.
    pub(crate) fn release_addresses(&mut self) {
        if let Channel::Experts(experts) = &mut self.mlp.mixer {
            experts.release_addresses();
        }
    }

    /// Maps `x`, `[N, hidden]`, to two tensors whose sum is the output. With `change`, the input is
    /// `x + change`. Each sum is fused with its norm.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<([Tensor; 2], BlockRecord)> {
        let (y, tokens) = self.tokens.forward(x, change, pass)?;
        let (y, mlp) = self.mlp.forward(&tokens.x, Some(&y), pass)?;
        Ok(([mlp.x.clone(), y], BlockRecord { tokens, mlp }))
    }

    /// Returns the gradient with respect to `x`, given the output gradient.
    pub(crate) fn backward(
        &self,
        record: BlockRecord,
        pass: &Pass,
        gradient: Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let gradient = self.mlp.backward(record.mlp, pass, gradient, sink)?;
        self.tokens.backward(record.tokens, pass, gradient, sink)
    }
}

impl TokenMixer {
    fn new(plan: &TokenMixerPlan, layer: usize, vb: &VarBuilder) -> Result<Self> {
        Ok(match plan {
            TokenMixerPlan::Attention(plan) => Self::Attention(Attention::new(plan, layer, vb)?),
            TokenMixerPlan::GatedDelta(plan) => Self::GatedDelta(GatedDelta::new(plan, layer, vb)?),
        })
    }
}

impl Mixer for TokenMixer {
    type Record = TokenMixerRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Attention(mixer) => mixer.linear(),
            Self::GatedDelta(mixer) => mixer.linear(),
        }
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, TokenMixerRecord)> {
        Ok(match self {
            Self::Attention(mixer) => {
                let (y, record) = mixer.forward(x, pass)?;
                (y, TokenMixerRecord::Attention(record))
            }
            Self::GatedDelta(mixer) => {
                let (y, record) = mixer.forward(x, pass)?;
                (y, TokenMixerRecord::GatedDelta(record))
            }
        })
    }

    fn backward(
        &self,
        x: &Tensor,
        record: TokenMixerRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        match (self, record) {
            (Self::Attention(mixer), TokenMixerRecord::Attention(record)) => {
                mixer.backward(x, record, pass, gradient, sink)
            }
            (Self::GatedDelta(mixer), TokenMixerRecord::GatedDelta(record)) => {
                mixer.backward(x, record, pass, gradient, sink)
            }
            _ => bail!("the record of a block is of another token mixer"),
        }
    }
}

impl Mixer for Channel {
    type Record = ChannelRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Mlp(mlp) => mlp.linear(),
            Self::Experts(experts) => experts.linear(),
        }
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, ChannelRecord)> {
        match self {
            Self::Mlp(mlp) => {
                let (y, record) = mlp.forward(x, pass)?;
                Ok((y, ChannelRecord::Mlp(record)))
            }
            Self::Experts(experts) => {
                let (y, record) = experts.forward(x, pass)?;
                Ok((y, ChannelRecord::Experts(record)))
            }
        }
    }

    fn backward(
        &self,
        x: &Tensor,
        record: ChannelRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        match (self, record) {
            (Self::Mlp(mlp), ChannelRecord::Mlp(record)) => {
                mlp.backward(x, record, pass, gradient, sink)
            }
            (Self::Experts(experts), ChannelRecord::Experts(record)) => {
                experts.backward(x, record, pass, gradient, sink)
            }
            _ => bail!("a record of another channel mixer"),
        }
    }
}

impl BlockRecord {
    /// The router's choice, if there is a router.
    pub(crate) fn router(&self) -> Option<&RouterChoice> {
        match &self.mlp.mixer {
            ChannelRecord::Experts(record) => Some(record.router()),
            ChannelRecord::Mlp(_) => None,
        }
    }

    /// The block input.
    pub(crate) fn into_input(self) -> Tensor {
        self.tokens.x
    }
}

impl<M: Mixer> Sublayer<M> {
    fn new<P>(
        plan: &SublayerPlan<P>,
        vb: &VarBuilder,
        mixer: impl FnOnce(&P) -> Result<M>,
    ) -> Result<Self> {
        let norm = |plan: &Option<_>| plan.as_ref().map(|plan| RmsNorm::new(plan, vb));
        Ok(Self {
            before: norm(&plan.before).transpose()?,
            mixer: mixer(&plan.mixer)?,
            after: norm(&plan.after).transpose()?,
            scale: plan.scale,
        })
    }

    /// Returns the change to the input `x + change`. The record contains the input.
    fn forward(
        &self,
        x: &Tensor,
        change: Option<&Tensor>,
        pass: &Pass,
    ) -> Result<(Tensor, SublayerRecord<M>)> {
        let (x, input) = match (&self.before, change) {
            (Some(before), change) => before.forward_sum(x, change)?,
            (None, Some(change)) => {
                let x = add(x, change)?;
                (x.clone(), x)
            }
            (None, None) => (x.clone(), x.clone()),
        };
        let (mixed, mixer) = self.mixer.forward(&input, pass)?;
        let (y, mixed) = match &self.after {
            Some(after) => (after.forward(&mixed)?, Some(mixed)),
            None => (mixed, None),
        };
        let record = SublayerRecord {
            x,
            input,
            mixer,
            mixed,
        };
        Ok((scaled(y, self.scale)?, record))
    }

    /// Returns the input gradient, given the gradient with respect to input plus change.
    fn backward(
        &self,
        record: SublayerRecord<M>,
        pass: &Pass,
        gradient: Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let SublayerRecord {
            x,
            input,
            mixer,
            mixed,
        } = record;
        let mut of_mixed = scaled(gradient.clone(), self.scale)?;
        if let (Some(after), Some(mixed)) = (&self.after, mixed) {
            of_mixed = after.backward(&mixed, &of_mixed, sink)?;
        }
        let of_input = self.mixer.backward(&input, mixer, pass, &of_mixed, sink)?;
        match &self.before {
            Some(before) => add(&gradient, &before.backward(&x, &of_input, sink)?),
            None => add(&gradient, &of_input),
        }
    }
}

/// `x * scale`.
pub(crate) fn scaled(x: Tensor, scale: f64) -> Result<Tensor> {
    if scale == 1.0 { Ok(x) } else { x * scale }
}
