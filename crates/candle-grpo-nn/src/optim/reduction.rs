//! Sums of gradients over all ranks, while the backward pass still runs.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use candle_core::{Error, Result, Tensor, bail};

use super::shard::Shard;

/// The size of a bucket in elements, at least: 25 MiB of f32, as in PyTorch's
/// `DistributedDataParallel`. Fewer calls spend less time on latency, and more of them overlap with
/// the backward pass.
const BUCKET: usize = 25 << 18;

/// A thread that sums buckets of gradients over all ranks, in place and in order.
///
/// The buckets depend on the names and shapes only, so they are the same on all ranks.
#[derive(Debug)]
pub(super) struct Reduction {
    buckets: Option<Sender<Vec<Tensor>>>,
    thread: Option<JoinHandle<Result<()>>>,
    /// The next bucket, and its number of elements.
    bucket: Vec<Tensor>,
    elements: usize,
    added: BTreeSet<String>,
}

impl Reduction {
    /// Starts the thread. With `scatter` a rank receives the sums of its part only.
    pub(super) fn start(shard: Shard, scatter: bool) -> Result<Self> {
        let (buckets, received) = channel();
        let thread = Builder::new()
            .name("gradients".to_owned())
            .spawn(move || reduce(&shard, scatter, &received))
            .map_err(Error::wrap)?;
        Ok(Self {
            buckets: Some(buckets),
            thread: Some(thread),
            bucket: Vec::new(),
            elements: 0,
            added: BTreeSet::new(),
        })
    }

    /// Adds a gradient to the next bucket, unless it has been added. It must not be used until
    /// [`Self::finish`].
    pub(super) fn add(&mut self, name: &str, gradient: &Tensor) -> Result<()> {
        if self.added.insert(name.to_owned()) {
            self.elements += gradient.elem_count();
            self.bucket.push(gradient.clone());
            if self.elements >= BUCKET {
                self.send()?;
            }
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        self.elements = 0;
        let bucket = std::mem::take(&mut self.bucket);
        match &self.buckets {
            Some(buckets) if buckets.send(bucket).is_ok() => Ok(()),
            _ => self.join(),
        }
    }

    /// Waits for the sums of all buckets.
    pub(super) fn finish(mut self) -> Result<()> {
        if !self.bucket.is_empty() {
            self.send()?;
        }
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        self.buckets = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => bail!("gradients: the thread that sums them panicked"),
            None => bail!("gradients: the thread that sums them has ended"),
        }
    }
}

/// Dropping it waits for the bucket that is being summed.
impl Drop for Reduction {
    fn drop(&mut self) {
        if self.thread.is_some() {
            let _ = self.join();
        }
    }
}

fn reduce(shard: &Shard, scatter: bool, buckets: &Receiver<Vec<Tensor>>) -> Result<()> {
    let collective = &shard.0;
    while let Ok(bucket) = buckets.recv() {
        if scatter {
            shard.start_reduce_scatter_sum(&bucket)?
        } else {
            collective.start_all_reduce_sum(&bucket.iter().collect::<Vec<_>>())?
        }
    }
    collective.finish()
}
