//! The division of a batch into micro-batches, which the ranks share.

use std::cmp::Reverse;
use std::collections::HashMap;

use anyhow::Result;
use candle_core::Tensor;

use super::Example;
use super::models::ensure_not_canceled;
use super::response_forward::{ReadTokens, read_by_sequence};
use crate::ranks::Ranks;
use crate::{Progress, TokenBatch, TrainingBatch};

/// The bound of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MicroBatchSize {
    /// A number of sequences.
    Sequences(usize),
    /// A number of tokens that the model reads. A shared prompt counts once.
    Tokens(usize),
}

impl MicroBatchSize {
    /// Returns the indices of the sequences of each micro-batch of each rank.
    fn of_ranks(self, batch: &TokenBatch, ranks: &Ranks) -> Result<Vec<Vec<Vec<usize>>>> {
        let (total, _) = batch.dims()?;
        let world_size = ranks.collective().world_size();
        let whole = match self {
            Self::Sequences(size) => {
                let sequences: Vec<usize> = (0..total).collect();
                match total.div_ceil(size) < world_size {
                    false => sequences.chunks(size).map(<[usize]>::to_vec).collect(),
                    // Parts of one micro-batch each, so that every rank has some work.
                    true => {
                        let parts = (0..world_size).map(|rank| ranks.share_of(rank, total));
                        parts.map(|part| sequences[part].to_vec()).collect()
                    }
                }
            }
            Self::Tokens(bound) => by_tokens(&read_by_sequence(batch)?, bound, world_size),
        };
        let of_rank = |rank| {
            let own = whole[ranks.share_of(rank, whole.len())].iter();
            own.filter(|part| !part.is_empty()).cloned().collect()
        };
        Ok((0..world_size).map(of_rank).collect())
    }

    /// Returns the micro-batches of this rank. A rank without one receives the first sequence with
    /// a mask of zeros, so that it takes part in the sum of the gradients.
    pub(super) fn of_rank(
        self,
        batch: &TrainingBatch,
        ranks: &Ranks,
    ) -> Result<Vec<TrainingBatch>> {
        let mut all = self.of_ranks(&batch.tokens, ranks)?;
        let own = all.swap_remove(ranks.collective().rank());
        if own.is_empty() {
            let mut masked = batch.select(&[0])?;
            masked.tokens.response_mask = masked.tokens.response_mask.zeros_like()?;
            masked.policy.response_mask = masked.tokens.response_mask.clone();
            return Ok(vec![masked]);
        }
        own.iter()
            .map(|sequences| batch.select(sequences))
            .collect()
    }
}

/// Divides examples into micro-batches of at most `bound` tokens or one example, the longest first.
/// There are at least `parts` of them, or one for each example.
pub(crate) fn examples_by_tokens(
    examples: &[&Example],
    bound: usize,
    parts: usize,
) -> Vec<Vec<usize>> {
    let sequences = examples.iter().map(|example| ReadTokens {
        ids: example.read_tokens().to_vec(),
        columns: Vec::new(),
        prompt_len: 0,
        experts: Vec::new(),
    });
    by_tokens(&sequences.collect::<Vec<_>>(), bound, parts)
}

/// Divides sequences into micro-batches of at most `bound` tokens or one sequence. There are at
/// least `parts` of them, or one for each sequence.
///
/// The longest sequences come first, so that too little memory is an error early in a step.
/// Sequences with a common prompt are side by side, as a micro-batch computes it once. With
/// replayed experts, it does so up to the first token that has others.
fn by_tokens(sequences: &[ReadTokens], bound: usize, parts: usize) -> Vec<Vec<usize>> {
    let mut longest: HashMap<&[u32], usize> = HashMap::new();
    for sequence in sequences {
        let of_prompt = longest.entry(sequence.prompt()).or_default();
        *of_prompt = (*of_prompt).max(sequence.ids.len());
    }
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&index| {
        let sequence = &sequences[index];
        let prompt = sequence.prompt();
        (
            Reverse(longest[prompt]),
            prompt,
            Reverse(sequence.ids.len()),
            index,
        )
    });
    let mut micro_batches: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0;
    for index in order {
        let sequence = &sequences[index];
        let last = micro_batches.last().into_iter().flatten();
        let shared = last.map(|&other| sequence.shared_prompt(&sequences[other]));
        let more = sequence.ids.len() - shared.max().unwrap_or(0);
        match micro_batches.last_mut() {
            Some(last) if tokens + more <= bound => {
                last.push(index);
                tokens += more;
            }
            _ => {
                micro_batches.push(vec![index]);
                tokens = sequence.ids.len();
            }
        }
    }
    while micro_batches.len() < parts.min(sequences.len()) {
        let largest =
            (0..micro_batches.len()).max_by_key(|&at| (micro_batches[at].len(), Reverse(at)));
        let Some(at) = largest else { break };
        let half = micro_batches[at].len() / 2;
        let rest = micro_batches[at].split_off(half);
        micro_batches.insert(at + 1, rest);
    }
    micro_batches
}

/// Forward passes of a model over a batch, in micro-batches that the ranks share.
#[derive(Clone, Copy)]
pub(super) struct MicroBatches<'a> {
    pub(super) size: MicroBatchSize,
    pub(super) progress: &'a dyn Progress,
    pub(super) ranks: &'a Ranks,
}

impl MicroBatches<'_> {
    /// All sequences of a rank in one micro-batch.
    pub(super) fn at_once(self) -> Self {
        Self {
            size: MicroBatchSize::Sequences(usize::MAX),
            ..self
        }
    }

    /// Concatenates `forward` `[B, T]` of all micro-batches of `tokens`, in the order of `tokens`.
    ///
    /// # Errors
    ///
    /// If `forward` fails, or with [`Interrupted`](crate::Interrupted) if the progress cancels.
    pub(super) fn map(
        self,
        tokens: &TokenBatch,
        forward: impl Fn(&TokenBatch) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (_, width) = tokens.dims()?;
        self.map_to(tokens, width, forward)
    }

    /// [`Self::map`] with `forward` `[B, width]`.
    pub(super) fn map_to(
        self,
        tokens: &TokenBatch,
        width: usize,
        forward: impl Fn(&TokenBatch) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (total, _) = tokens.dims()?;
        let all = self.size.of_ranks(tokens, self.ranks)?;
        let pieces = all[self.ranks.collective().rank()].iter().map(|own| {
            ensure_not_canceled(self.progress)?;
            forward(&tokens.select(own)?)
        });
        let pieces = pieces.collect::<Result<Vec<_>>>()?;
        let device = tokens.targets.device();
        let rows = match self.ranks.is_alone() {
            true => Tensor::cat(&pieces, 0)?,
            false => self.ranks.gather_rows(&pieces, width, device)?,
        };
        let order = all.concat().concat();
        if order.is_sorted() {
            return Ok(rows);
        }
        let mut places = vec![0u32; total];
        for (place, index) in order.into_iter().enumerate() {
            places[index] = place as u32;
        }
        Ok(rows.index_select(&Tensor::new(places, device)?, 0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_grpo_nn::PackedTokens;
    use proptest::prelude::*;

    fn sequence(prompt: &[u32], response: usize) -> ReadTokens {
        ReadTokens {
            ids: [prompt, &vec![0; response]].concat(),
            columns: (0..prompt.len() + response).collect(),
            prompt_len: prompt.len(),
            experts: Vec::new(),
        }
    }

    /// The same sequence, whose tokens have one expert each: another one from `token` on.
    fn with_experts(sequence: ReadTokens, token: usize, expert: u16) -> ReadTokens {
        let experts = (0..sequence.ids.len()).map(|at| if at < token { 0 } else { expert });
        ReadTokens {
            experts: experts.collect(),
            ..sequence
        }
    }

    /// The number of tokens of the prompt, and of others.
    fn lengths(sequence: &ReadTokens) -> (usize, usize) {
        let prompt = sequence.prompt().len();
        (prompt, sequence.ids.len() - prompt)
    }

    #[test]
    fn the_longest_sequences_come_first_with_their_prompt_once() {
        let sequences = [
            sequence(&[1, 2], 1),
            sequence(&[3, 4, 5], 4),
            sequence(&[1, 2], 2),
            sequence(&[3, 4, 5], 6),
            sequence(&[6], 30),
        ];
        // 31 tokens alone, then 3 + 6 + 4, and 2 + 2 + 1.
        assert_eq!(by_tokens(&sequences, 18, 1), [vec![4], vec![3, 1, 2, 0]]);
        assert_eq!(
            by_tokens(&sequences, 17, 1),
            [vec![4], vec![3, 1, 2], vec![0]]
        );
        assert_eq!(
            by_tokens(&sequences, 13, 1),
            [vec![4], vec![3, 1], vec![2, 0]]
        );
        assert_eq!(
            by_tokens(&sequences, 11, 1),
            [vec![4], vec![3], vec![1, 2], vec![0]]
        );
        // Every rank has a part.
        assert_eq!(
            by_tokens(&sequences, 99, 3),
            [vec![4, 3], vec![1], vec![2, 0]]
        );
        assert_eq!(by_tokens(&sequences, 99, 9).len(), 5);
    }

    #[test]
    fn a_prompt_counts_again_from_the_first_token_with_other_experts() {
        let sequences = [(9, 0), (2, 1), (9, 0), (2, 2), (2, 1)]
            .map(|(token, expert)| with_experts(sequence(&[1, 2, 3, 4], 1), token, expert));
        // 5 tokens, then 3 after two of the prompt that are shared, 1, 3 and 1.
        for (bound, expected) in [
            (13, vec![vec![0, 1, 2, 3, 4]]),
            (12, vec![vec![0, 1, 2, 3], vec![4]]),
            (11, vec![vec![0, 1, 2], vec![3, 4]]),
            (8, vec![vec![0, 1], vec![2, 3], vec![4]]),
            (7, vec![vec![0], vec![1], vec![2], vec![3], vec![4]]),
        ] {
            assert_eq!(by_tokens(&sequences, bound, 1), expected, "{bound}");
        }
    }

    proptest! {
        #[test]
        fn the_tokens_of_a_pass_are_within_the_bound(
            shapes in proptest::collection::vec((0u32..3, 0usize..6, 0usize..6, 0u16..3), 1..20),
            bound in 1usize..40,
            replays in proptest::bool::ANY,
        ) {
            let sequences = shapes.iter().map(|&(prompt, response, token, expert)| {
                let sequence = sequence(&vec![prompt; 3 + prompt as usize], response);
                match replays {
                    true => with_experts(sequence, token, expert),
                    false => sequence,
                }
            });
            let sequences: Vec<_> = sequences.collect();
            for part in by_tokens(&sequences, bound, 1) {
                let ids: Vec<_> = part.iter().map(|&at| sequences[at].ids.clone()).collect();
                let experts: Vec<_> = part.iter().map(|&at| sequences[at].experts.clone()).collect();
                let packed = match replays {
                    true => PackedTokens::replaying(&ids, &experts, &Device::Cpu),
                    false => PackedTokens::sharing_prefixes(&ids, &Device::Cpu),
                };
                let tokens = packed.unwrap().ids().dim(0).unwrap();
                prop_assert!(part.len() == 1 || tokens <= bound, "{} of {}", tokens, bound);
            }
        }

        #[test]
        fn each_sequence_is_in_one_micro_batch_within_the_bound(
            shapes in proptest::collection::vec((0u32..4, 0usize..20), 1..30),
            bound in 1usize..60,
            parts in 1usize..6,
        ) {
            let sequences: Vec<_> = shapes
                .iter()
                .map(|&(prompt, response)| sequence(&vec![prompt; 1 + prompt as usize], response))
                .collect();
            let micro_batches = by_tokens(&sequences, bound, parts);
            prop_assert!(micro_batches.len() >= parts.min(sequences.len()));
            let mut all = micro_batches.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sequences.len()).collect::<Vec<_>>());
            for part in &micro_batches {
                let mut prompts: Vec<_> = part.iter().map(|&at| sequences[at].prompt()).collect();
                prompts.sort();
                prompts.dedup();
                let tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum::<usize>()
                    + part.iter().map(|&at| lengths(&sequences[at]).1).sum::<usize>();
                prop_assert!(part.len() == 1 || tokens <= bound, "{} of {}", tokens, bound);
            }
        }
    }

    /// The tokens that are planned are those that a pass reads.
    #[test]
    fn the_tokens_of_a_plan_are_those_of_a_pass() -> Result<()> {
        let pairs: [(&[u32], &[u32]); 4] = [
            (&[1, 2, 3], &[4, 5]),
            (&[7], &[8, 9, 1, 2]),
            (&[1, 2, 3], &[6, 5, 4]),
            (&[7], &[1]),
        ];
        let batch = TokenBatch::new(&pairs, &Device::Cpu)?;
        let sequences = read_by_sequence(&batch)?;
        let found: Vec<_> = sequences.iter().map(lengths).collect();
        assert_eq!(found, [(3, 1), (1, 3), (3, 2), (1, 0)]);
        let micro_batches = MicroBatches {
            size: MicroBatchSize::Tokens(6),
            progress: &crate::progress::NoProgress,
            ranks: &Ranks::default(),
        };
        // The result is in the order of the batch.
        let targets = micro_batches.map(&batch, |piece| Ok(piece.targets.clone()))?;
        assert_eq!(targets.to_vec2::<u32>()?, batch.targets.to_vec2::<u32>()?);
        Ok(())
    }
}
