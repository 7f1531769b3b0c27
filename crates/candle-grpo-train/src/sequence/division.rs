//! Divides sequences into forward passes.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::Sequence;

/// Divides sequences into parts with at most `bound` tokens for the model to read, or a single
/// sequence. There are at least `parts` parts, or one per sequence.
///
/// The longest sequences come first, so that a step runs out of memory early if at all. With
/// `shares_prompts`, sequences with a common prompt are side by side, because a pass computes it
/// once. With replayed experts, it does so up to the first token whose experts differ.
pub(crate) fn divide(
    sequences: &[Sequence],
    bound: usize,
    shares_prompts: bool,
    parts: usize,
) -> Vec<Vec<usize>> {
    let prompt = |index: usize| {
        if shares_prompts {
            sequences[index].prompt()
        } else {
            &[]
        }
    };
    let lengths: Vec<usize> = sequences.iter().map(|x| x.read_tokens().len()).collect();
    let mut longest: HashMap<&[u32], usize> = HashMap::new();
    for (index, &length) in lengths.iter().enumerate() {
        let of_prompt = longest.entry(prompt(index)).or_default();
        *of_prompt = (*of_prompt).max(length);
    }
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&index| {
        let prompt = prompt(index);
        (
            Reverse(longest[prompt]),
            prompt,
            Reverse(lengths[index]),
            index,
        )
    });
    let mut divided: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0;
    for index in order {
        let shared = |&other: &usize| {
            if shares_prompts {
                shared_prompt(&sequences[index], &sequences[other])
            } else {
                0
            }
        };
        let last = divided.last().into_iter().flatten();
        let more = lengths[index] - last.map(shared).max().unwrap_or(0);
        match divided.last_mut() {
            Some(last) if tokens + more <= bound => {
                last.push(index);
                tokens += more;
            }
            _ => {
                divided.push(vec![index]);
                tokens = lengths[index];
            }
        }
    }
    while divided.len() < parts.min(sequences.len()) {
        let largest = (0..divided.len()).max_by_key(|&at| (divided[at].len(), Reverse(at)));
        let Some(at) = largest else { break };
        let half = divided[at].len() / 2;
        let rest = divided[at].split_off(half);
        divided.insert(at + 1, rest);
    }
    divided
}

/// Counts the prompt tokens that a pass over both sequences computes once: those before the first
/// token with another id or other experts.
fn shared_prompt(own: &Sequence, other: &Sequence) -> usize {
    let experts = |sequence: &Sequence, token: usize| {
        let choices = sequence.expert_choices();
        let experts = sequence.experts().unwrap_or_default();
        experts[token * choices..(token + 1) * choices].to_vec()
    };
    let prompts = own.prompt().iter().zip(other.prompt()).enumerate();
    prompts
        .take_while(|&(token, (a, b))| a == b && experts(own, token) == experts(other, token))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_grpo_nn::PackedTokens;
    use proptest::prelude::*;

    /// Returns a sequence for which a model reads the prompt and `response` tokens.
    fn sequence(prompt: &[u32], response: usize) -> Sequence {
        Sequence::of_answer(prompt, &vec![0; response + 1]).unwrap()
    }

    /// Returns the same sequence with one expert per token, which differs from `token` on.
    fn with_experts(sequence: Sequence, token: usize, expert: u16) -> Sequence {
        let experts =
            (0..sequence.read_tokens().len()).map(|at| if at < token { 0 } else { expert });
        let experts = experts.collect();
        sequence.with_experts(experts).unwrap()
    }

    /// Counts the prompt tokens, and other tokens that a model reads.
    fn lengths(sequence: &Sequence) -> (usize, usize) {
        let prompt = sequence.prompt().len();
        (prompt, sequence.read_tokens().len() - prompt)
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
        let divide = |bound, parts| divide(&sequences, bound, true, parts);
        // 31 tokens alone, then 3 + 6 + 4, and 2 + 2 + 1.
        assert_eq!(divide(18, 1), [vec![4], vec![3, 1, 2, 0]]);
        assert_eq!(divide(17, 1), [vec![4], vec![3, 1, 2], vec![0]]);
        assert_eq!(divide(13, 1), [vec![4], vec![3, 1], vec![2, 0]]);
        assert_eq!(divide(11, 1), [vec![4], vec![3], vec![1, 2], vec![0]]);
        // Every rank has a part.
        assert_eq!(divide(99, 3), [vec![4, 3], vec![1], vec![2, 0]]);
        assert_eq!(divide(99, 9).len(), 5);
    }

    #[test]
    fn without_prompts_only_the_lengths_count() {
        let sequences = [
            sequence(&[1, 2], 1),
            sequence(&[3, 4, 5], 4),
            sequence(&[1, 2], 2),
            sequence(&[3, 4, 5], 6),
        ];
        // 9 + 7, and 4 + 3.
        assert_eq!(divide(&sequences, 16, false, 1), [vec![3, 1], vec![2, 0]]);
        assert_eq!(divide(&sequences, 15, false, 1), [vec![3], vec![1, 2, 0]]);
    }

    #[test]
    fn a_prompt_counts_again_from_the_first_token_with_other_experts() {
        let sequences = [(9, 0), (2, 1), (9, 0), (2, 2), (2, 1)]
            .map(|(token, expert)| with_experts(sequence(&[1, 2, 3, 4], 1), token, expert));
        // 5 tokens, then 3 after two shared prompt tokens, 1, 3 and 1.
        for (bound, expected) in [
            (13, vec![vec![0, 1, 2, 3, 4]]),
            (12, vec![vec![0, 1, 2, 3], vec![4]]),
            (11, vec![vec![0, 1, 2], vec![3, 4]]),
            (8, vec![vec![0, 1], vec![2, 3], vec![4]]),
            (7, vec![vec![0], vec![1], vec![2], vec![3], vec![4]]),
        ] {
            assert_eq!(divide(&sequences, bound, true, 1), expected, "{bound}");
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
                if replays {
                    with_experts(sequence, token, expert)
                } else {
                    sequence
                }
            });
            let sequences: Vec<_> = sequences.collect();
            for part in divide(&sequences, bound, true, 1) {
                let ids = part.iter().map(|&at| sequences[at].read_tokens().to_vec());
                let ids: Vec<_> = ids.collect();
                let experts = part.iter().filter_map(|&at| sequences[at].read_experts());
                let experts: Vec<_> = experts.map(<[u16]>::to_vec).collect();
                let packed = if replays {
                    PackedTokens::replaying(&ids, &experts, &Device::Cpu)
                } else {
                    PackedTokens::sharing_prefixes(&ids, &Device::Cpu)
                };
                let tokens = packed.unwrap().ids().dim(0).unwrap();
                prop_assert!(part.len() == 1 || tokens <= bound, "{} of {}", tokens, bound);
            }
        }

        #[test]
        fn each_sequence_is_in_one_part_within_the_bound(
            shapes in proptest::collection::vec((0u32..4, 0usize..20), 1..30),
            bound in 1usize..60,
            parts in 1usize..6,
        ) {
            let sequences: Vec<_> = shapes
                .iter()
                .map(|&(prompt, response)| sequence(&vec![prompt; 1 + prompt as usize], response))
                .collect();
            let divided = divide(&sequences, bound, true, parts);
            prop_assert!(divided.len() >= parts.min(sequences.len()));
            let mut all = divided.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sequences.len()).collect::<Vec<_>>());
            for part in &divided {
                let mut prompts: Vec<_> = part.iter().map(|&at| sequences[at].prompt()).collect();
                prompts.sort();
                prompts.dedup();
                let tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum::<usize>()
                    + part.iter().map(|&at| lengths(&sequences[at]).1).sum::<usize>();
                prop_assert!(part.len() == 1 || tokens <= bound, "{} of {}", tokens, bound);
            }
        }
    }
}
