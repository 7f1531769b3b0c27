//! Decoding steps that a GPU runs with one driver call.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{PageSlot, PagedRow, Recording, StepInputs, StepSize, StepTables};

use crate::model::pass::{Context, Pass};
use crate::model::routes::Routes;
use crate::{Decoder, PagedCache};

/// A cache's recordings.
#[derive(Debug, Default)]
pub(super) struct RecordedSteps {
    steps: HashMap<StepSize, Step>,
    /// The decoder for all steps. The recordings use its weights.
    decoder: Option<Decoder>,
}

#[derive(Debug)]
enum Step {
    /// Seen once. The first step of each size runs unrecorded and loads its kernels.
    Seen,
    /// Cannot be recorded.
    Refused,
    Recorded(Box<RecordedStep>),
}

#[derive(Debug)]
struct RecordedStep {
    inputs: StepInputs,
    /// Hidden states `[rows, H]`.
    hidden: Tensor,
    recording: Recording,
}

/// A step with one new token per sequence.
pub(super) struct NewTokens<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) positions: &'a [u32],
    pub(super) slots: &'a [PageSlot],
    pub(super) rows: &'a [PagedRow<'a>],
}

impl RecordedSteps {
    /// Discards all recordings, because they use the cache's previous pages. Those that grow in
    /// place stay.
    pub(super) fn discard(&mut self) {
        for step in self.steps.values_mut() {
            *step = Step::Seen;
        }
    }

    /// Computes a step's hidden states `[N, H]` after the final norm. `None` if the step must run
    /// unrecorded.
    pub(super) fn hidden(
        &mut self,
        decoder: &Decoder,
        cache: &PagedCache,
        new: &NewTokens,
    ) -> Result<Option<Tensor>> {
        if decoder.expert_choices() > 0 || decoder.has_states() || decoder.num_adapters() > 1 {
            return Ok(None);
        }
        if !self
            .decoder
            .as_ref()
            .is_some_and(|own| own.is_clone_of(decoder))
        {
            self.steps.clear();
            self.decoder = Some(decoder.clone());
        }
        let n = new.rows.len();
        // Extra rows repeat the last one, so that fewer sizes occur. They write the same values to
        // its slot, up to rounding in their products.
        let more = padded(n) - n;
        let tokens = repeat_last(new.tokens, more);
        let positions = repeat_last(new.positions, more);
        let slots = repeat_last(new.slots, more);
        let rows = repeat_last(new.rows, more);

        let tables = StepTables::new(&tokens, &positions, &slots, &rows)?;
        let step = match self.steps.entry(tables.size()) {
            Entry::Vacant(place) => {
                place.insert(Step::Seen);
                return Ok(None);
            }
            Entry::Occupied(place) => place.into_mut(),
        };
        if let Step::Seen = step {
            let recorded = RecordedStep::new(decoder, cache, tables.size(), &slots, &rows);
            *step = recorded.map_or(Step::Refused, |step| Step::Recorded(Box::new(step)));
        }
        let Step::Recorded(step) = step else {
            return Ok(None);
        };
        step.inputs.set(tables)?;
        // SAFETY: the decoder, the inputs and the result are kept. The cache discards the steps
        // when it replaces the pages, and others stay where they are.
        #[allow(unsafe_code)]
        unsafe {
            step.recording.run()?;
        }
        step.hidden.narrow(0, 0, n).map(Some)
    }
}

impl RecordedStep {
    fn new(
        decoder: &Decoder,
        cache: &PagedCache,
        size: StepSize,
        slots: &[PageSlot],
        rows: &[PagedRow],
    ) -> Result<Self> {
        let weight = decoder.output_weight();
        let device = weight.device();
        let inputs = StepInputs::new(size, device)?;
        let width = decoder.config().hidden_size;
        let hidden = Tensor::zeros((rows.len(), width), weight.dtype(), device)?;
        let (tokens, positions) = (inputs.tokens()?, inputs.positions()?);
        let batch = &inputs.batch(slots, rows)?;
        let operations = || {
            let pass = Pass {
                angles: &decoder.angles(&positions)?,
                context: Context::Cache {
                    cache,
                    batch,
                    slots: &[],
                },
                routes: Routes::default(),
                adapters: &[],
            };
            let (x, change, _) = decoder.run_blocks(decoder.embed(&tokens)?.detach(), &pass)?;
            let result = decoder.norm(&x, change.as_ref())?.detach();
            hidden.slice_set(&result, 0, 0)
        };
        // SAFETY: all tensors from the pass are dropped with it.
        #[allow(unsafe_code)]
        let recording = unsafe { Recording::record(device, operations)? };
        Ok(Self {
            inputs,
            hidden,
            recording,
        })
    }
}

/// Rounds the number of rows up, by less than a quarter.
fn padded(n: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 8).clamp(1, 16))
}

fn repeat_last<T: Copy>(all: &[T], more: usize) -> Vec<T> {
    let mut all = all.to_vec();
    if let Some(&last) = all.last() {
        all.resize(all.len() + more, last);
    }
    all
}
