//! Checked input to a forward pass over whole sequences.

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_grpo_kernels::{CausalAttention, PrefixTree, Sequences};

use crate::model::adapter_rows::{AdapterRows, adapter_rows};
use crate::model::pass::{Context, Pass, StateRows};
use crate::model::rope::RopeAngles;
use crate::model::routes::Routes;
use crate::packing::divided_rows::{KeyExchange, SequenceRanks};
use crate::packing::shared_rows::SharedRows;
use crate::{Decoder, PackedTokens};

/// Tokens, their positions and their sequence boundaries.
pub(crate) struct Input {
    /// `[N]`, those of the rows that this rank computes.
    pub(crate) ids: Tensor,
    angles: Vec<RopeAngles>,
    attention: CausalAttention,
    shared: Option<SharedRows>,
    exchange: Option<KeyExchange>,
    ranks: Option<SequenceRanks>,
    states: Option<StateRows>,
    /// Experts to replay, u32 `[N, expert_choices]`.
    experts: Option<Tensor>,
    /// Rows for each of a joined decoder's adapters.
    adapters: Vec<AdapterRows>,
}

impl Input {
    /// `ids` and `attention_mask` are `[B, S]`.
    pub(crate) fn padded(decoder: &Decoder, ids: &Tensor, attention_mask: &Tensor) -> Result<Self> {
        check_padded(decoder, ids, attention_mask)?;
        let real = attention_mask
            .to_dtype(DType::F32)?
            .ne(0f32)?
            .to_dtype(DType::F32)?;
        let positions = (real.cumsum(1)? - 1.0)?.maximum(0.0)?;
        let real = real.to_dtype(DType::U8)?;
        let states = || {
            let (batch, length) = ids.dims2()?;
            Ok::<_, Error>(StateRows {
                tree: PrefixTree::new(&vec![length; batch])?,
                real: Some(real.reshape(((), 1))?),
            })
        };
        Ok(Self {
            ids: ids.flatten_all()?,
            angles: decoder.angles(&positions)?,
            attention: attention(decoder, Sequences::Padded(&real)),
            shared: None,
            exchange: None,
            ranks: None,
            states: decoder.has_states().then(states).transpose()?,
            experts: None,
            adapters: Vec::new(),
        })
    }

    pub(crate) fn packed(decoder: &Decoder, tokens: &PackedTokens) -> Result<Self> {
        let (parts, adapters) = (tokens.parts().len(), decoder.num_adapters());
        if parts != adapters {
            bail!("tokens: {parts} parts, must be {adapters}, one for each joined decoder");
        }
        let limit = decoder.config().max_position_embeddings;
        let lengths = tokens.lengths();
        if let Some(sequence) = lengths.iter().position(|&length| length > limit) {
            bail!(
                "tokens: {} positions in sequence {sequence}, must be at most max_position_embeddings, which is {limit}",
                lengths[sequence]
            );
        }
        check_ids(decoder, "tokens", tokens.ids())?;
        if let Some(experts) = tokens.experts()
            && experts.dim(1)? != decoder.expert_choices()
        {
            bail!(
                "tokens: {} experts of each token, must be {}, those of all routers",
                experts.dim(1)?,
                decoder.expert_choices()
            );
        }
        let positions: Vec<f32> = lengths
            .iter()
            .flat_map(|&length| (0..length).map(|position| position as f32))
            .collect();
        let (first, rows) = (tokens.first_tokens(), tokens.computed_rows());
        let positions = rows
            .iter()
            .map(|&row| positions[first[row as usize] as usize]);
        let positions: Vec<f32> = positions.collect();
        let device = tokens.ids().device();
        let positions = Tensor::new(positions, device)?;
        let exchange = KeyExchange::new(tokens)?;
        if exchange.is_some() && decoder.has_states() {
            bail!(
                "tokens: divided between ranks, must be whole for a decoder with a gated delta rule, whose states follow one another"
            );
        }
        if exchange.is_some() && adapters > 1 {
            bail!("tokens: divided between ranks, must be whole for a joined decoder");
        }
        let computed = |all: &Tensor| match &exchange {
            Some(_) => all.index_select(&Tensor::new(rows.as_slice(), device)?, 0),
            None => Ok(all.clone()),
        };
        let (attention, shared) = match &exchange {
            Some(exchange) => (
                attention(decoder, Sequences::Continued(exchange.ends())),
                None,
            ),
            None => (
                attention(decoder, Sequences::Packed(lengths)),
                SharedRows::new(tokens)?,
            ),
        };
        let states = || {
            let tree = match tokens.shared_rows() {
                Some(rows) => PrefixTree::with_shared_rows(lengths, rows)?,
                None => PrefixTree::new(lengths)?,
            };
            Ok::<_, Error>(StateRows { tree, real: None })
        };
        Ok(Self {
            ids: computed(tokens.ids())?,
            angles: decoder.angles(&positions)?,
            attention,
            shared,
            states: decoder.has_states().then(states).transpose()?,
            experts: tokens.experts().map(computed).transpose()?,
            adapters: match adapters {
                1 => Vec::new(),
                _ => adapter_rows(tokens.parts().iter().copied().enumerate()),
            },
            ranks: tokens.ranks().cloned(),
            exchange,
        })
    }

    /// The ranks that divide the pass, if any.
    pub(crate) fn ranks(&self) -> Option<&SequenceRanks> {
        self.ranks.as_ref()
    }

    pub(crate) fn pass(&self) -> Pass<'_> {
        Pass {
            angles: &self.angles,
            context: Context::Sequences {
                attention: &self.attention,
                shared: self.shared.as_ref(),
                exchange: self.exchange.as_ref(),
                states: self.states.as_ref(),
            },
            routes: Routes {
                replayed: self.experts.as_ref(),
                balance: None,
            },
            adapters: &self.adapters,
        }
    }
}

/// Attention within whole sequences. Each block scores on its own.
pub(crate) fn attention(decoder: &Decoder, sequences: Sequences) -> CausalAttention {
    let head_dim = decoder.config().head_dim();
    CausalAttention::new(sequences, head_dim, 1.0)
}

fn check_padded(decoder: &Decoder, ids: &Tensor, attention_mask: &Tensor) -> Result<()> {
    if decoder.num_adapters() > 1 {
        let number = decoder.num_adapters();
        bail!("decoder: {number} joined ones, must be one to read padded tokens");
    }
    let &[batch, length] = ids.dims() else {
        bail!("input_ids: shape {:?}, must be [B, S]", ids.dims());
    };
    if batch == 0 || length == 0 {
        bail!(
            "input_ids: shape {:?}, must have at least one row and one position",
            ids.dims()
        );
    }
    let limit = decoder.config().max_position_embeddings;
    if length > limit {
        bail!(
            "input_ids: {length} positions, must be at most max_position_embeddings, which is {limit}"
        );
    }
    if attention_mask.dims() != [batch, length] {
        bail!(
            "attention_mask: shape {:?}, must be [{batch}, {length}]",
            attention_mask.dims()
        );
    }
    check_device(decoder, "attention_mask", attention_mask)?;
    check_ids(decoder, "input_ids", ids)
}

/// Checks token ids `[N]` or `[B, S]`.
fn check_ids(decoder: &Decoder, name: &str, ids: &Tensor) -> Result<()> {
    if ids.dtype() != DType::U32 {
        bail!("{name}: dtype {:?}, must be u32", ids.dtype());
    }
    check_device(decoder, name, ids)?;
    if matches!(ids.device(), Device::Cpu) {
        let vocab_size = decoder.config().vocab_size;
        let values = ids.flatten_all()?.to_vec1::<u32>()?;
        if let Some(at) = values.iter().position(|&id| id as usize >= vocab_size) {
            let place = match *ids.dims() {
                [_, columns] => format!("{}, {}", at / columns, at % columns),
                _ => at.to_string(),
            };
            bail!(
                "{name}[{place}]: {}, must be below vocab_size, which is {vocab_size}",
                values[at]
            );
        }
    }
    Ok(())
}

fn check_device(decoder: &Decoder, name: &str, tensor: &Tensor) -> Result<()> {
    let device = decoder.output_weight().device();
    if !tensor.device().same_device(device) {
        bail!(
            "{name}: on {:?}, must be on the device of the weights, {:?}",
            tensor.device().location(),
            device.location()
        );
    }
    Ok(())
}
