//! The policy's weights in this process, for servers that receive them from its memory.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_nn::{CheckpointForm, DecoderConfig, Export, Lora, Parameters};

use crate::rollout::PolicyWeights;

/// One version of the policy's weights. They share the memory of the policy, which changes them in
/// place while it trains. So they can only be read while a call to the generator
/// [lends](Self::lend) them: the policy does not train meanwhile.
pub(super) struct LiveWeights {
    version: u64,
    model: DecoderConfig,
    parameters: Parameters,
    adapters: Option<Lora>,
    form: Option<CheckpointForm>,
    dtype: DType,
    /// Held by the thread that computes with the weights, on a GPU: threads share its handles.
    turn: Mutex<()>,
    uses: Mutex<Uses>,
    /// Notified after each reader.
    has_read: Condvar,
}

#[derive(Default)]
struct Uses {
    /// Number of calls that lend the weights.
    lenders: usize,
    /// Number of readers. One may begin within another, because a thread that computes may take
    /// other work meanwhile.
    readers: usize,
}

/// A weight as a server receives it.
pub(super) struct Listed {
    /// Name in the served checkpoint.
    pub(super) name: String,
    /// The parameter's name.
    parameter: String,
    pub(super) shape: Vec<usize>,
    /// Size in bytes.
    pub(super) bytes: usize,
}

impl LiveWeights {
    /// Shares `weights`, for a server whose checkpoint has the `form`. The server receives them in
    /// `dtype`.
    pub(super) fn new(
        weights: &PolicyWeights<'_>,
        form: Option<CheckpointForm>,
        dtype: DType,
    ) -> Self {
        Self {
            version: weights.version,
            model: weights.model.clone(),
            parameters: weights.parameters.clone(),
            adapters: weights.adapters.cloned(),
            form,
            dtype,
            turn: Mutex::default(),
            uses: Mutex::default(),
            has_read: Condvar::new(),
        }
    }

    /// Lends the weights until the result is dropped, which waits for readers.
    pub(super) fn lend(self: &Arc<Self>) -> Lent {
        self.uses().lenders += 1;
        Lent(Arc::clone(self))
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        // No code panics while it holds the lock.
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the weights, for a caller that lends them.
    pub(super) fn weights(&self) -> PolicyWeights<'_> {
        PolicyWeights {
            version: self.version,
            model: &self.model,
            parameters: &self.parameters,
            adapters: self.adapters.as_ref(),
        }
    }

    /// Waits until no other thread computes with the weights, if they are on a GPU. On the CPU,
    /// threads compute at the same time, and a thread may take the work of another one meanwhile.
    pub(super) fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        let is_on_gpu = !self.parameters.device().is_cpu();
        is_on_gpu.then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the dtype in which servers receive the weights.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Lists the weights, with adapters merged and without an output layer that is tied to the
    /// embedding.
    pub(super) fn list(&self) -> Result<Vec<Listed>> {
        let export = self.export();
        let listed = |name: &str| {
            let shape = export.shape(name)?;
            Ok(Listed {
                name: match &self.form {
                    Some(form) => form.name(name),
                    None => name.to_owned(),
                },
                parameter: name.to_owned(),
                bytes: shape.elem_count() * self.dtype.size_in_bytes(),
                shape: shape.into_dims(),
            })
        };
        export.names().map(listed).collect()
    }

    /// Computes the weights in `listed`, and calls `read` with them.
    ///
    /// # Errors
    ///
    /// Fails if no call lends the weights, or if `read` fails.
    pub(super) fn read(
        &self,
        listed: &[Listed],
        read: impl FnOnce(&[Tensor]) -> Result<()>,
    ) -> Result<()> {
        let _reader = Reader::begin(self)?;
        let _turn = self.turn();
        let export = self.export();
        let tensors = listed.iter().map(|weight| {
            let tensor = export.tensor(&weight.parameter)?;
            tensor.contiguous()
        });
        read(&tensors.collect::<Result<Vec<_>>>()?)
    }

    fn export(&self) -> Export<'_> {
        self.weights().export().in_dtype(self.dtype)
    }
}

impl fmt::Debug for LiveWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LiveWeights({:?})", self.export())
    }
}

/// A call that lends the weights.
pub(super) struct Lent(Arc<LiveWeights>);

impl Drop for Lent {
    fn drop(&mut self) {
        let mut uses = self.0.uses();
        uses.lenders -= 1;
        let is_read = |uses: &mut Uses| uses.lenders == 0 && uses.readers > 0;
        drop(self.0.has_read.wait_while(uses, is_read));
    }
}

/// A reader, until it is dropped.
struct Reader<'a>(&'a LiveWeights);

impl<'a> Reader<'a> {
    fn begin(weights: &'a LiveWeights) -> Result<Self> {
        let mut uses = weights.uses();
        if uses.lenders == 0 {
            bail!("the policy trains, and has other weights");
        }
        uses.readers += 1;
        Ok(Self(weights))
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.uses().readers -= 1;
        self.0.has_read.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use std::sync::mpsc::channel;
    use std::thread;

    fn live() -> Arc<LiveWeights> {
        let model = DecoderConfig {
            vocab_size: 11,
            hidden_size: 8,
            intermediate_size: 16,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            max_position_embeddings: 8,
            tie_word_embeddings: true,
            ..DecoderConfig::default()
        };
        let parameters = Parameters::init(&model, 1, &Device::Cpu).unwrap();
        let weights = PolicyWeights {
            version: 1,
            model: &model,
            parameters: &parameters,
            adapters: None,
        };
        Arc::new(LiveWeights::new(&weights, None, DType::BF16))
    }

    #[test]
    fn weights_are_read_only_while_a_call_lends_them() {
        let live = live();
        let listed = live.list().unwrap();
        let read = || live.read(&listed[..1], |_| Ok(()));
        assert!(read().is_err());
        let lent = [live.lend(), live.lend()];
        // A reader within another one.
        live.read(&listed, |tensors| {
            for (tensor, listed) in tensors.iter().zip(&listed) {
                assert_eq!(tensor.dtype(), DType::BF16);
                assert_eq!(tensor.dims(), listed.shape);
                assert_eq!(tensor.elem_count() * 2, listed.bytes);
            }
            read()
        })
        .unwrap();
        let [first, second] = lent;
        drop(first);
        read().unwrap();
        drop(second);
        let error = read().unwrap_err().to_string();
        assert!(error.starts_with("the policy trains"), "{error}");
    }

    #[test]
    fn the_end_of_a_call_waits_for_readers() {
        let live = live();
        let listed = live.list().unwrap();
        let lent = live.lend();
        let (begun, has_begun) = channel();
        thread::scope(|scope| {
            // A failed assertion drops `end`, which ends the reader, too.
            let (end, ended) = channel();
            let (shared, listed) = (&live, &listed);
            let reading = scope.spawn(move || {
                shared.read(listed, |_| {
                    begun.send(()).unwrap();
                    ended.recv().unwrap();
                    Ok(())
                })
            });
            has_begun.recv().unwrap();
            let dropping = scope.spawn(|| drop(lent));
            // No reader begins from now on, once the call has ended.
            while live.uses().lenders > 0 {
                thread::yield_now();
            }
            assert!(live.read(listed, |_| Ok(())).is_err());
            assert!(!dropping.is_finished());
            end.send(()).unwrap();
            dropping.join().unwrap();
            reading.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_tied_output_layer_is_not_listed() {
        let names: Vec<String> = live().list().unwrap().into_iter().map(|w| w.name).collect();
        assert!(names.contains(&"model.embed_tokens.weight".to_owned()));
        assert!(!names.contains(&"lm_head.weight".to_owned()));
    }
}
