//! A model whose weights ranks divide.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

use candle_core::{Error, Result, bail};

use crate::Parameters;
use crate::optim::reduction::{Pending, Reduction};
use crate::weights::divided_weights::{DividedWeights, Gathering, Held};

/// The weights of a decoder that ranks divide
/// ([`Sharding::Full`](crate::optim::Sharding::Full)), in the parts that a pass gathers one after
/// the other.
///
/// A pass over the decoder gathers the weights of each block while the block before it runs, and
/// frees them after it. A caller that reads the output layer's weight, or that samples, must hold
/// it meanwhile. All ranks must make the same calls in the same order.
#[derive(Clone)]
pub struct DividedModel {
    weights: Arc<DividedWeights>,
    pub(crate) embedding: Arc<[String]>,
    pub(crate) blocks: Vec<Arc<[String]>>,
    pub(crate) norm: Arc<[String]>,
    output: Arc<[String]>,
    all: Arc<[String]>,
}

impl DividedModel {
    /// Creates the parts of a decoder with these numbers of blocks and names of embedding and
    /// output layer. `None` if ranks do not divide `parameters`.
    pub(crate) fn new(
        parameters: &Parameters,
        num_blocks: usize,
        [embedding, output]: [&str; 2],
    ) -> Option<Self> {
        let weights = Arc::clone(parameters.divided_weights()?);
        let names = weights.names();
        let select = |is_part: &dyn Fn(&str) -> bool| -> Arc<[String]> {
            let part = names.iter().filter(|name| is_part(name));
            part.cloned().collect()
        };
        let blocks = (0..num_blocks).map(|number| {
            let prefix = format!("model.layers.{number}.");
            select(&|name| name.starts_with(&prefix))
        });
        Some(Self {
            embedding: select(&|name| name == embedding),
            blocks: blocks.collect(),
            norm: select(&|name| {
                !name.starts_with("model.layers.") && name != embedding && name != output
            }),
            output: select(&|name| name == output),
            all: names.iter().cloned().collect(),
            weights,
        })
    }

    /// Gathers the weights of a part.
    pub(crate) fn hold(&self, part: &Arc<[String]>) -> Result<Held> {
        self.weights.hold(part)
    }

    /// Gathers the weight of the output layer.
    ///
    /// # Errors
    ///
    /// If there is not enough memory, or another rank has ended.
    pub fn hold_output(&self) -> Result<Held> {
        self.hold(&self.output)
    }

    /// Gathers all weights, to sample.
    ///
    /// # Errors
    ///
    /// Same as [`Self::hold_output`].
    pub fn hold_all(&self) -> Result<Held> {
        self.hold(&self.all)
    }

    /// Gathers the weights of the blocks in order, for a pass over them. `None` if all weights are
    /// held.
    pub(crate) fn ahead(&self) -> Result<Option<Ahead<'_>>> {
        if self.weights.are_held() {
            return Ok(None);
        }
        if self.weights.is_asynchronous() {
            return Ok(Some(Ahead::InTurn(Parts::forward(self))));
        }
        // One part is gathered while another computes.
        let (results, received) = sync_channel(0);
        let all = self.clone();
        let gather = move || {
            for part in &all.blocks {
                let held = all.hold(part);
                let has_failed = held.is_err();
                if results.send(held).is_err() || has_failed {
                    break;
                }
            }
        };
        let thread = Builder::new().name("weights".to_owned()).spawn(gather);
        Ok(Some(Ahead::Thread(GatheringThread {
            received: Some(received),
            thread: Some(thread.map_err(Error::wrap)?),
        })))
    }

    /// Returns a number that changes with the addresses of the weights.
    #[cfg(feature = "cuda")]
    pub(crate) fn gathers(&self) -> u64 {
        self.weights.gathers()
    }

    /// Checks that all weights are held.
    pub(crate) fn ensure_held(&self) -> Result<()> {
        if !self.weights.are_held() {
            bail!("weights: divided between ranks, must be held to sample: see DividedModel");
        }
        Ok(())
    }
}

/// Gathers the weights of each block while the one before computes.
pub(crate) enum Ahead<'a> {
    /// The device does so.
    InTurn(Parts<'a>),
    /// A thread waits for the operations.
    Thread(GatheringThread),
}

impl Ahead<'_> {
    /// Waits for the weights of the next block. Those of the one before must have been dropped.
    pub(crate) fn next(&mut self) -> Result<Held> {
        match self {
            // A forward pass has no sums to be in order with.
            Self::InTurn(parts) => parts.next(None),
            Self::Thread(thread) => thread.next(),
        }
    }
}

/// A thread that gathers the weights of one block after the other.
pub(crate) struct GatheringThread {
    received: Option<Receiver<Result<Held>>>,
    thread: Option<JoinHandle<()>>,
}

impl GatheringThread {
    fn next(&self) -> Result<Held> {
        let next = self.received.as_ref().map(Receiver::recv);
        match next {
            Some(Ok(held)) => held,
            _ => bail!("weights: the thread that gathers them has ended"),
        }
    }
}

/// Waits for the end of an operation, which must not overlap with the next one.
impl Drop for GatheringThread {
    fn drop(&mut self) {
        self.received = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The parts of a decoder in the order in which a pass needs them. Each is gathered while the one
/// before computes, in order with the sums of gradients.
pub(crate) struct Parts<'a> {
    all: &'a DividedModel,
    /// From the last one.
    left: Vec<Arc<[String]>>,
    pending: Option<Pending<Gathering>>,
}

impl<'a> Parts<'a> {
    /// The blocks.
    fn forward(all: &'a DividedModel) -> Self {
        Self::new(all, all.blocks.iter().rev().cloned().collect())
    }

    /// The final norm, and the blocks from the last one.
    pub(crate) fn backward(all: &'a DividedModel) -> Self {
        let mut left = all.blocks.clone();
        left.push(Arc::clone(&all.norm));
        Self::new(all, left)
    }

    fn new(all: &'a DividedModel, left: Vec<Arc<[String]>>) -> Self {
        Self {
            all,
            left,
            pending: None,
        }
    }

    /// Waits for the weights of the next part, and begins to gather those of the part after it. The
    /// weights of the part before must have been dropped: their memory is reused. Gathers are in
    /// order with the sums of `reduction`.
    pub(crate) fn next(&mut self, mut reduction: Option<&mut Reduction>) -> Result<Held> {
        let pending = match self.pending.take() {
            Some(pending) => Some(pending),
            None => self.start(reduction.as_deref_mut())?,
        };
        let Some(pending) = pending else {
            bail!("weights: no part is left to gather");
        };
        let gathering = match &mut reduction {
            Some(reduction) => reduction.wait(pending),
            None => pending
                .wait()
                .unwrap_or_else(|| bail!("weights: the thread that gathers them has ended")),
        };
        let held = gathering?.finish()?;
        self.pending = self.start(reduction)?;
        Ok(held)
    }

    fn start(&mut self, reduction: Option<&mut Reduction>) -> Result<Option<Pending<Gathering>>> {
        let Some(part) = self.left.pop() else {
            return Ok(None);
        };
        let all = self.all.clone();
        let gather = move || all.weights.start(&part);
        Ok(Some(match reduction {
            Some(reduction) => reduction.start_call(gather)?,
            None => Pending::of(gather),
        }))
    }
}

impl fmt::Debug for DividedModel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "DividedModel({} blocks)", self.blocks.len())
    }
}
