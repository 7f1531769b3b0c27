//! Cache for keys, values and states.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, bail};
use candle_grpo_kernels::{DeltaStates, KeyValuePages, PAGE, PageSlot, PageSpan, with_room};

use crate::DecoderConfig;
use crate::config::architecture::TokenMixerPlan;
use crate::decoding::packed_weights::PackedWeights;
#[cfg(feature = "cuda")]
use crate::decoding::recorded_steps::RecordedSteps;

/// Number of pages in the first allocation.
const FIRST_PAGES: usize = 64;

/// Number of state slots in the first allocation.
const FIRST_SLOTS: usize = 8;

/// Number of pages to allocate when `taken` are in use.
pub(crate) fn pages_for(taken: usize) -> usize {
    match taken {
        0 => 0,
        _ => FIRST_PAGES * taken.div_ceil(FIRST_PAGES).next_power_of_two(),
    }
}

/// Like [`pages_for`], for slots that grow in place: up to a quarter more.
pub(crate) fn slots_in_place(taken: usize) -> usize {
    with_room(taken.max(FIRST_SLOTS), usize::MAX)
}

/// Like [`pages_for`], for pages that grow in place, in multiples of `block`: up to a quarter more.
pub(crate) fn pages_in_place(taken: usize, block: usize) -> usize {
    block * with_room(taken.div_ceil(block), usize::MAX)
}

/// Keys and values at past positions for many sequences, for
/// [`Decoder::next_logits`](crate::Decoder::next_logits).
///
/// They are stored in pages. A fork shares its origin's pages, so a group's prompt is computed and
/// stored once. When a sequence is removed, its pages are reused. When all pages are in use, more
/// are allocated, up to a limit ([`Self::limit_memory`]).
///
/// On CUDA, pages in f32, bf16 and f16 grow in place, by up to a quarter. Their memory is mapped to
/// addresses that are reserved for it, so growth copies nothing, and recorded steps stay valid. The
/// keys and the values in each layer take a multiple of 2 MiB. Their memory returns to the device
/// when the cache is dropped, after a wait for its work. On other devices, and on GPUs without
/// virtual memory management, the page count doubles, and all pages are copied.
///
/// Gated delta rule blocks have one fixed-size state per sequence. A fork copies it. On CUDA,
/// states grow in place as pages do.
#[derive(Debug)]
pub struct PagedCache {
    /// One per layer. Page and slot numbers are the same in all layers.
    layers: Vec<Layer>,
    /// Number of sequences that hold each page.
    holders: Vec<usize>,
    /// Pages that no sequence holds.
    free: Vec<usize>,
    /// True if any layer has states.
    has_states: bool,
    /// Number of state slots.
    slots: usize,
    /// Unused slots.
    free_slots: Vec<usize>,
    /// Number of pages by which memory grows, if pages grow in place. The page count is a
    /// multiple.
    block: Option<usize>,
    /// Bytes for a page, over all layers.
    page_bytes: usize,
    /// Maximum number of bytes.
    limit: Option<usize>,
    sequences: BTreeMap<usize, Sequence>,
    next_id: usize,
    on_cpu: bool,
    /// Weight copies, if enabled.
    pub(crate) packed_weights: Option<PackedWeights>,
    /// Recorded steps, if enabled.
    #[cfg(feature = "cuda")]
    pub(super) recorded: Option<RecordedSteps>,
}

/// A number for pages, and one for slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PagesAndSlots {
    pages: usize,
    slots: usize,
}

#[derive(Debug)]
enum Layer {
    Pages(KeyValuePages),
    States(DeltaStates),
}

/// Identifies a sequence in a [`PagedCache`] or another [`Decoding`](crate::Decoding). Ids are
/// never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(crate) usize);

#[derive(Debug, Clone, Default)]
struct Sequence {
    spans: Vec<PageSpan>,
    /// Number of spans from before the fork. Their pages may be shared and are no longer written.
    /// Later positions always start a new page, so that a result's bits do not depend on the
    /// number of forks.
    inherited: usize,
    len: usize,
    /// Slot for the sequence's states. `None` without positions or without layers that have
    /// states.
    slot: Option<usize>,
    /// Index of its adapters in a joined decoder.
    adapter: usize,
}

impl PagedCache {
    /// Creates an empty cache for a decoder with this configuration and with weights in `dtype` on
    /// `device`.
    pub fn new(config: &DecoderConfig, dtype: DType, device: &Device) -> Result<Self> {
        config.validate()?;
        let mut page_bytes = 0;
        let blocks = config.architecture().blocks;
        let layers = blocks.iter().map(|block| {
            Ok(match &block.tokens.mixer {
                TokenMixerPlan::GatedDelta(plan) => {
                    let states = DeltaStates::new(0, plan.heads, plan.taps, dtype, device)?;
                    Layer::States(states)
                }
                TokenMixerPlan::Attention(plan) => {
                    page_bytes += plan.page_bytes(dtype);
                    Layer::Pages(KeyValuePages::new(
                        0,
                        config.num_key_value_heads,
                        config.head_dim(),
                        dtype,
                        device,
                    )?)
                }
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let mut blocks = layers.iter().filter_map(|layer| match layer {
            Layer::Pages(pages) => Some(pages.pages_in_place()),
            Layer::States(_) => None,
        });
        let block = blocks.next().flatten();
        if !blocks.all(|other| other == block) {
            bail!("device: no addresses for the keys and values of all layers, must have some");
        }
        Ok(Self {
            has_states: layers.iter().any(|layer| layer.states().is_some()),
            layers,
            holders: Vec::new(),
            free: Vec::new(),
            slots: 0,
            free_slots: Vec::new(),
            block,
            page_bytes,
            limit: None,
            sequences: BTreeMap::new(),
            next_id: 0,
            on_cpu: device.is_cpu(),
            packed_weights: None,
            #[cfg(feature = "cuda")]
            recorded: None,
        })
    }

    /// On CUDA, records steps with one new token per sequence as CUDA graphs, and replays the
    /// recording for later steps of the same size. A small model decodes several times faster,
    /// because one driver call replaces hundreds.
    ///
    /// **No other thread may use the device during a call** to
    /// [`Decoder::next_logits`](crate::Decoder::next_logits) with this cache. Its operations would
    /// be recorded and run at the wrong time.
    ///
    /// Steps that wait for the device run without a recording: those of experts that need a wait
    /// ([`experts`] has limits, and experts with adapters or quantized weights do not use it).
    /// Other devices ignore this setting.
    ///
    /// [`experts`]: candle_grpo_kernels::experts()
    #[must_use]
    pub fn with_recorded_steps(mut self) -> Self {
        self.record_steps();
        self
    }

    /// Like [`Self::with_recorded_steps`], in place.
    pub(crate) fn record_steps(&mut self) {
        #[cfg(feature = "cuda")]
        {
            self.recorded.get_or_insert_default();
        }
    }

    /// On the CPU, makes later steps read weight copies in the order in which the processor
    /// multiplies them. Steps are up to 1.5 times as fast, and the results have the same bits.
    ///
    /// A weight is copied the first time a step uses it. All copies together take about two steps'
    /// time, and as much memory as the weights that have one ([`PackedWeight`]).
    ///
    /// **The weights must not change** afterward: later steps would mix old and new weights.
    ///
    /// [`PackedWeight`]: candle_grpo_kernels::PackedWeight
    ///
    /// ```
    /// use candle_core::{DType, Device, Result};
    /// use candle_grpo_nn::{Decoder, DecoderConfig, PagedCache, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let config = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
    /// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    /// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
    /// # let parameters = Parameters::init(&config, 7, &Device::Cpu)?;
    /// let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    /// let mut cache = PagedCache::new(&config, DType::F32, &Device::Cpu)?;
    /// cache.pack_weights();
    /// let sequence = cache.add();
    /// for token in [5, 6, 7] {
    ///     decoder.next_logits(&[(sequence, &[token])], &mut cache)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn pack_weights(&mut self) {
        if self.on_cpu {
            self.packed_weights.get_or_insert_default();
        }
    }

    /// Adds an empty sequence.
    pub fn add(&mut self) -> SequenceId {
        self.insert(Sequence::default())
    }

    /// Adds an empty sequence with the adapters of the decoder with this index in a [joined
    /// one](crate::Decoder::joined). Its forks have the same. [`Self::add`] has the index 0.
    pub fn add_with_adapter(&mut self, adapter: usize) -> SequenceId {
        self.insert(Sequence {
            adapter,
            ..Sequence::default()
        })
    }

    /// Adds a sequence that starts with all positions in `id` and shares their memory. States are
    /// copied.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let mut sequence = self.get(id)?.clone();
        sequence.inherited = sequence.spans.len();
        if let Some(from) = sequence.slot {
            let to = self.take_slot()?;
            for states in self.all_states() {
                states.copy(from, to)?;
            }
            sequence.slot = Some(to);
        }
        for span in &sequence.spans {
            self.holders[span.page] += 1;
        }
        Ok(self.insert(sequence))
    }

    /// Removes a sequence. Its forks remain.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        self.get(id)?;
        let sequence = self.sequences.remove(&id.0).unwrap_or_default();
        self.free_slots.extend(sequence.slot);
        for span in sequence.spans {
            self.holders[span.page] -= 1;
            if self.holders[span.page] == 0 {
                self.free.push(span.page);
            }
        }
        Ok(())
    }

    /// Removes all sequences, the limit, and the memory of the pages, for later sequences of the
    /// same decoder. Addresses and recorded steps remain. Returns false if pages or states do not
    /// grow in place.
    pub(crate) fn empty(&mut self) -> Result<bool> {
        if self.block.is_none() || !self.states_grow_in_place() {
            return Ok(false);
        }
        #[cfg(feature = "cuda")]
        if let Some(recorded) = &mut self.recorded {
            recorded.keep_latest()?;
        }
        self.sequences.clear();
        self.holders.clear();
        self.free.clear();
        self.free_slots.clear();
        self.slots = 0;
        self.limit = None;
        self.shrink(PagesAndSlots::default())?;
        Ok(true)
    }

    /// Number of positions in a sequence.
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.len)
    }

    /// Number of pages that sequences hold, with [`PAGE`] positions each.
    pub fn pages_in_use(&self) -> usize {
        self.holders.len() - self.free.len()
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// A layer's pages.
    pub(crate) fn pages(&self, layer: usize) -> Result<&KeyValuePages> {
        match &self.layers[layer] {
            Layer::Pages(pages) => Ok(pages),
            Layer::States(_) => bail!("cache: layer {layer} has states, must have pages"),
        }
    }

    /// A layer's states.
    pub(crate) fn states(&self, layer: usize) -> Result<&DeltaStates> {
        match self.layers[layer].states() {
            Some(states) => Ok(states),
            None => bail!("cache: layer {layer} has pages, must have states"),
        }
    }

    /// Slot for a sequence's states, if some layers have states and the sequence has positions.
    pub(crate) fn slot(&self, id: SequenceId) -> Result<Option<usize>> {
        Ok(self.get(id)?.slot)
    }

    /// Extends a sequence by `new` positions and returns the slots to write them to.
    pub(crate) fn extend(&mut self, id: SequenceId, new: usize) -> Result<Vec<PageSlot>> {
        if self.has_states && self.get(id)?.slot.is_none() {
            let slot = self.take_slot()?;
            for states in self.all_states() {
                states.clear(slot)?;
            }
            if let Some(sequence) = self.sequences.get_mut(&id.0) {
                sequence.slot = Some(slot);
            }
        }
        let mut slots = Vec::with_capacity(new);
        for _ in 0..new {
            let sequence = self.get(id)?;
            let full = match sequence.spans[sequence.inherited..].last() {
                None => true,
                Some(span) => span.len == PAGE,
            };
            let fresh = full.then(|| self.take_page()).transpose()?;
            let Some(sequence) = self.sequences.get_mut(&id.0) else {
                bail!("{id:?}: not in the cache");
            };
            if let Some(page) = fresh {
                sequence.spans.push(PageSpan { page, len: 0 });
            }
            if let Some(span) = sequence.spans.last_mut() {
                slots.push(PageSlot {
                    page: span.page,
                    position: span.len,
                });
                span.len += 1;
            }
            sequence.len += 1;
        }
        Ok(slots)
    }

    /// Index of a sequence's adapters.
    pub(crate) fn adapter(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.adapter)
    }

    pub(crate) fn spans(&self, id: SequenceId) -> Result<&[PageSpan]> {
        Ok(&self.get(id)?.spans)
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence> {
        match self.sequences.get(&id.0) {
            Some(sequence) => Ok(sequence),
            None => bail!("{id:?}: not in the cache, must be from this cache and not removed"),
        }
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = self.next_id;
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        SequenceId(id)
    }

    /// Sets the maximum number of bytes that pages and states take. By default there is none.
    ///
    /// With a limit, call [`Self::reserve`] before each step: a step beyond it fails.
    pub fn limit_memory(&mut self, bytes: usize) {
        self.limit = Some(bytes);
    }

    /// Reserves memory for more positions. Each entry has a sequence, or `None` for one that will
    /// be added or forked, and a number of positions. Returns false if the limit leaves no room
    /// for all of them.
    ///
    /// Without it, a full cache grows within a step. Unless it grows in place, it then copies its
    /// pages and records its steps again.
    ///
    /// # Errors
    ///
    /// If a sequence is not in the cache, or the device has not enough memory. The cache remains
    /// valid. Once the device has had too little for half of a growth, the cache does not grow any
    /// more.
    pub fn reserve(&mut self, positions: &[(Option<SequenceId>, usize)]) -> Result<bool> {
        let mut more = PagesAndSlots::default();
        for &(id, new) in positions {
            let (room, has_slot) = match id {
                None => (0, false),
                Some(id) => {
                    let sequence = self.get(id)?;
                    let last = sequence.spans[sequence.inherited..].last();
                    (
                        last.map_or(0, |span| PAGE - span.len),
                        sequence.slot.is_some(),
                    )
                }
            };
            more.pages += new.saturating_sub(room).div_ceil(PAGE);
            more.slots += usize::from(self.has_states && !has_slot);
        }
        self.make_room(more)
    }

    /// Makes this many pages and slots free. Returns false if the limit does not allow it.
    fn make_room(&mut self, more: PagesAndSlots) -> Result<bool> {
        let allocated = self.allocated();
        let block = self.block.unwrap_or(1);
        let needed = PagesAndSlots {
            pages: (self.pages_in_use() + more.pages).next_multiple_of(block),
            slots: self.slots - self.free_slots.len() + more.slots,
        };
        let mut wanted = allocated;
        if needed.slots > allocated.slots {
            wanted.slots = if self.states_grow_in_place() {
                slots_in_place(needed.slots)
            } else {
                needed.slots.next_power_of_two().max(FIRST_SLOTS)
            };
        }
        if needed.pages > allocated.pages {
            wanted.pages = match self.block {
                Some(block) => pages_in_place(needed.pages, block),
                None => pages_for(needed.pages),
            };
        }
        let least = PagesAndSlots {
            pages: needed.pages.max(allocated.pages),
            slots: needed.slots.max(allocated.slots),
        };
        if let Some(limit) = self.limit
            && self.bytes_of(wanted) > limit
        {
            let bytes = self.bytes_of(least);
            if bytes > limit {
                return Ok(least == allocated);
            }
            // Both take the same share of the rest.
            let share =
                |least: usize| (least as u128 * limit as u128 / bytes.max(1) as u128) as usize;
            wanted.pages = wanted.pages.min(share(least.pages) / block * block);
            wanted.slots = wanted.slots.min(share(least.slots));
            // Slots in place take whole mappings.
            while self.bytes_of(wanted) > limit && wanted.slots > least.slots {
                wanted.slots -= 1;
            }
        }
        let middle = PagesAndSlots {
            pages: wanted.pages.midpoint(least.pages) / block * block,
            slots: wanted.slots.midpoint(least.slots),
        };
        if self.grow(wanted).is_ok() || self.grow(middle).is_ok() {
            return Ok(true);
        }
        // The next growth would be as small, and steps need what is left.
        let grown = self.grow(least);
        self.limit = Some(self.bytes_of(self.allocated()));
        grown.map(|()| true)
    }

    /// The states of all layers that have some.
    fn all_states(&self) -> impl Iterator<Item = &DeltaStates> {
        self.layers.iter().filter_map(Layer::states)
    }

    fn states_grow_in_place(&self) -> bool {
        self.all_states().all(DeltaStates::grow_in_place)
    }

    fn allocated(&self) -> PagesAndSlots {
        PagesAndSlots {
            pages: self.holders.len(),
            slots: self.slots,
        }
    }

    /// Bytes for this many pages and slots.
    fn bytes_of(&self, count: PagesAndSlots) -> usize {
        let of_states: usize = self
            .all_states()
            .map(|states| states.bytes(count.slots))
            .sum();
        count.pages * self.page_bytes + of_states
    }

    fn grow(&mut self, wanted: PagesAndSlots) -> Result<()> {
        // Must precede the pages and the states that the recordings use.
        #[cfg(feature = "cuda")]
        if self.layers.iter().any(|layer| layer.moves(wanted))
            && let Some(recorded) = &mut self.recorded
        {
            recorded.discard();
        }
        let grown = self.layers.iter_mut().try_for_each(|layer| {
            // Earlier layers may already have more if a later one ran out of memory.
            match layer {
                Layer::Pages(pages) if pages.len() < wanted.pages => pages.grow(wanted.pages),
                Layer::States(states) if states.len() < wanted.slots => states.grow(wanted.slots),
                Layer::Pages(_) | Layer::States(_) => Ok(()),
            }
        });
        if grown.is_err() {
            // Their memory may be enough for a smaller growth.
            self.shrink(self.allocated())?;
        }
        grown?;
        // The lowest number is popped first.
        self.free.extend((self.holders.len()..wanted.pages).rev());
        self.holders.resize(wanted.pages, 0);
        self.free_slots.extend((self.slots..wanted.slots).rev());
        self.slots = wanted.slots;
        Ok(())
    }

    /// Returns the memory of pages and states that grow in place, beyond those `kept`.
    fn shrink(&mut self, kept: PagesAndSlots) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| match layer {
            Layer::Pages(own) if own.len() > kept.pages && own.pages_in_place().is_some() => {
                own.shrink(kept.pages)
            }
            Layer::States(own) if own.len() > kept.slots && own.grow_in_place() => {
                own.shrink(kept.slots)
            }
            Layer::Pages(_) | Layer::States(_) => Ok(()),
        })
    }

    fn take_page(&mut self) -> Result<usize> {
        if self.free.is_empty() {
            self.make_room(PagesAndSlots { pages: 1, slots: 0 })?;
        }
        let Some(page) = self.free.pop() else {
            bail!("cache: no free page, {}", self.full());
        };
        self.holders[page] = 1;
        Ok(page)
    }

    fn take_slot(&mut self) -> Result<usize> {
        if self.free_slots.is_empty() {
            self.make_room(PagesAndSlots { pages: 0, slots: 1 })?;
        }
        let Some(slot) = self.free_slots.pop() else {
            bail!("cache: no free state, {}", self.full());
        };
        Ok(slot)
    }

    /// Describes the limit.
    fn full(&self) -> String {
        let bytes = self.limit.unwrap_or_default();
        format!("must have room within its limit, which is {bytes} bytes")
    }
}

impl Layer {
    /// Returns whether growth to this size moves what is there.
    #[cfg(feature = "cuda")]
    fn moves(&self, wanted: PagesAndSlots) -> bool {
        match self {
            Self::Pages(pages) => pages.len() < wanted.pages && pages.pages_in_place().is_none(),
            Self::States(states) => states.len() < wanted.slots && !states.grow_in_place(),
        }
    }

    fn states(&self) -> Option<&DeltaStates> {
        match self {
            Self::Pages(_) => None,
            Self::States(states) => Some(states),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LayerType, ModelType};

    /// A page's bytes in [`cache`]: keys and values in f32, over all layers.
    fn page_bytes() -> usize {
        cache().page_bytes
    }

    fn cache() -> PagedCache {
        let config = serde_json::from_str(candle_grpo_test_support::TINY_DECODER);
        PagedCache::new(&config.unwrap(), DType::F32, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_fork_shares_pages_and_grows_in_its_own() {
        let mut cache = cache();
        let prompt = cache.add();
        cache.extend(prompt, PAGE + 3).unwrap();
        assert_eq!(cache.pages_in_use(), 2);
        let forks = [cache.fork(prompt).unwrap(), cache.fork(prompt).unwrap()];
        assert_eq!(cache.pages_in_use(), 2);
        cache.remove(prompt).unwrap();
        let slots = forks.map(|fork| cache.extend(fork, 1).unwrap()[0]);
        assert_ne!(slots[0].page, slots[1].page);
        assert_eq!(cache.pages_in_use(), 4);
        assert_eq!(cache.len(forks[0]).unwrap(), PAGE + 4);
        let lens: Vec<usize> = cache
            .spans(forks[0])
            .unwrap()
            .iter()
            .map(|s| s.len)
            .collect();
        assert_eq!(lens, [PAGE, 3, 1]);
        for fork in forks {
            cache.remove(fork).unwrap();
        }
        assert_eq!((cache.pages_in_use(), cache.sequences.len()), (0, 0));
    }

    #[test]
    fn pages_in_place_have_little_room() {
        for (taken, block, expected) in [
            (1, 64, 64),
            (64, 64, 64),
            (65, 64, 128),
            (8 * 64 + 1, 64, 10 * 64),
            (500, 512, 512),
            (33, 1, 40),
        ] {
            assert_eq!(pages_in_place(taken, block), expected, "{taken}");
        }
        for taken in 1..5000 {
            let (one, eight) = (pages_in_place(taken, 1), pages_in_place(taken, 8));
            assert!(one >= taken && 4 * (one - taken) < taken, "{taken}: {one}");
            assert!(
                eight >= taken && 4 * (eight - taken) < taken + 32,
                "{taken}: {eight}"
            );
        }
    }

    #[test]
    fn reserved_positions_need_no_growth() {
        let mut cache = cache();
        let first = cache.add();
        cache.extend(first, 3).unwrap();
        let lengths = [PAGE + 1, 1, FIRST_PAGES * PAGE];
        assert!(cache.reserve(&lengths.map(|new| (None, new))).unwrap());
        let pages = cache.holders.len();
        assert_eq!(pages, pages_for(4 + FIRST_PAGES));
        for length in lengths {
            let sequence = cache.add();
            cache.extend(sequence, length).unwrap();
        }
        assert_eq!(cache.pages_in_use(), 4 + FIRST_PAGES);
        assert!(cache.reserve(&[(None, PAGE); 3]).unwrap());
        assert_eq!(cache.holders.len(), pages);
    }

    #[test]
    fn a_limit_bounds_the_pages() {
        let mut cache = cache();
        cache.limit_memory((FIRST_PAGES + 3) * page_bytes() + 1);
        let first = cache.add();
        assert!(cache.reserve(&[(Some(first), 1)]).unwrap());
        assert_eq!(cache.holders.len(), FIRST_PAGES);
        cache.extend(first, 1).unwrap();
        // The rest of a page is free, and a fork may not write it.
        let all = (FIRST_PAGES + 2) * PAGE;
        assert!(
            cache
                .reserve(&[(Some(first), PAGE - 1), (None, all)])
                .unwrap()
        );
        assert_eq!(cache.holders.len(), FIRST_PAGES + 3);
        assert!(!cache.reserve(&[(Some(first), PAGE), (None, all)]).unwrap());
        assert!(!cache.reserve(&[(None, 1), (None, all)]).unwrap());
        let second = cache.add();
        cache.extend(second, all).unwrap();
        let error = cache.extend(second, 1).unwrap_err().to_string();
        assert!(error.contains("no free page"), "{error}");
        cache.extend(first, PAGE - 1).unwrap();
        cache.remove(second).unwrap();
        assert!(cache.reserve(&[(Some(first), PAGE), (None, PAGE)]).unwrap());
        assert_eq!(cache.holders.len(), FIRST_PAGES + 3);
    }

    #[test]
    fn sequences_have_a_slot_each_and_slots_are_reused() {
        let tiny: DecoderConfig =
            serde_json::from_str(candle_grpo_test_support::TINY_DECODER).unwrap();
        let mut layer_types = vec![LayerType::LinearAttention; tiny.num_hidden_layers];
        layer_types[0] = LayerType::FullAttention;
        let config = DecoderConfig {
            model_type: ModelType::Qwen3_5,
            layer_types,
            linear_conv_kernel_dim: Some(4),
            linear_key_head_dim: Some(3),
            linear_value_head_dim: Some(5),
            linear_num_key_heads: Some(2),
            linear_num_value_heads: Some(4),
            ..tiny
        };
        let mut cache = PagedCache::new(&config, DType::F32, &Device::Cpu).unwrap();
        let prompt = cache.add();
        assert_eq!(cache.slot(prompt).unwrap(), None);
        cache.extend(prompt, 3).unwrap();
        let mut slots = vec![cache.slot(prompt).unwrap().unwrap()];
        for _ in 0..FIRST_SLOTS {
            let fork = cache.fork(prompt).unwrap();
            slots.push(cache.slot(fork).unwrap().unwrap());
        }
        slots.sort_unstable();
        assert_eq!(slots, (0..=FIRST_SLOTS).collect::<Vec<_>>());
        assert_eq!(cache.states(1).unwrap().len(), 2 * FIRST_SLOTS);
        for _ in 0..5 * FIRST_SLOTS {
            let sequence = cache.add();
            cache.extend(sequence, 1).unwrap();
            cache.remove(sequence).unwrap();
        }
        assert_eq!(cache.slots, 2 * FIRST_SLOTS);
        assert!(cache.states(0).is_err() && cache.pages(1).is_err());
        // Sequences take 9 of 16 slots and 1 of 64 pages.
        let bytes = |pages, slots| cache.bytes_of(PagesAndSlots { pages, slots });
        let (pages, slots) = (bytes(1, 0), bytes(0, 1));
        cache.limit_memory(FIRST_PAGES * pages + 18 * slots + slots / 2);
        assert!(cache.reserve(&[(None, 1); 7]).unwrap());
        assert_eq!(cache.slots, 2 * FIRST_SLOTS);
        assert!(cache.reserve(&[(None, 1); 9]).unwrap());
        assert_eq!(cache.slots, 18);
        assert!(!cache.reserve(&[(None, 1); 10]).unwrap());
        // One that has a slot needs no other.
        assert!(cache.reserve(&[(Some(prompt), 1); 10]).unwrap());
        // Pages and slots take the same share of the rest.
        let mut cache = PagedCache::new(&config, DType::F32, &Device::Cpu).unwrap();
        cache.limit_memory(90 * pages + 10 * slots);
        assert!(cache.reserve(&[(None, 9 * PAGE); 9]).unwrap());
        assert_eq!((cache.holders.len(), cache.slots), (90, 10));
    }

    #[test]
    fn pages_of_removed_sequences_are_reused() {
        let mut cache = cache();
        for _ in 0..5 {
            let sequence = cache.add();
            cache.extend(sequence, FIRST_PAGES * PAGE).unwrap();
            cache.remove(sequence).unwrap();
        }
        assert_eq!(cache.holders.len(), FIRST_PAGES);
        let gone = cache.add();
        cache.remove(gone).unwrap();
        let error = cache.fork(gone).unwrap_err().to_string();
        assert!(error.contains("not in the cache"), "{error}");
    }
}
