//! The task: the answer to `37+58=` is `95`.

use anyhow::Result;
use candle_grpo_train::Sequence;
use candle_grpo_train::data::ShuffledOrder;
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::{Prompt, Sample};
use serde_json::json;
use tokenizers::Tokenizer;

/// Number of held-out problems, on which the policy never trains.
const HELD_OUT: usize = 1000;

/// Characters in problems and answers.
const ALPHABET: &str = "0123456789+=";

/// Number of tokens: one per character, and [`END`].
pub(crate) const VOCABULARY: usize = ALPHABET.len() + 1;

/// The token that ends an answer.
pub(crate) const END: u32 = 0;

/// All sums of two two-digit numbers, split randomly into training and held-out problems.
pub(crate) struct Task {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) training: Vec<Prompt>,
    pub(crate) held_out: Vec<Prompt>,
}

impl Task {
    pub(crate) fn new(seed: u64) -> Result<Self> {
        let tokenizer = character_tokenizer(ALPHABET)?;
        let problems: Vec<(u32, u32)> = (10..100)
            .flat_map(|a| (10..100).map(move |b| (a, b)))
            .collect();
        let order = ShuffledOrder::new(problems.len(), seed)?.slice(0, problems.len());
        let prompts = order
            .into_iter()
            .map(|i| {
                let (a, b) = problems[i];
                let columns = json!({ "answer": (a + b).to_string() });
                Prompt::new(i as u64, &format!("{a}+{b}="), columns, &tokenizer)
            })
            .collect::<Result<Vec<_>>>()?;
        let (held_out, training) = prompts.split_at(HELD_OUT);
        Ok(Self {
            training: training.to_vec(),
            held_out: held_out.to_vec(),
            tokenizer,
        })
    }

    /// The training problems with their answers, for the warm-up.
    pub(crate) fn examples(&self) -> Result<Vec<Sequence>> {
        self.training
            .iter()
            .map(|prompt| {
                let answer =
                    Prompt::new(prompt.index, answer(prompt), json!(null), &self.tokenizer)?;
                let answer = [answer.tokens.as_slice(), &[END]].concat();
                Sequence::of_answer(&prompt.tokens, &answer)
            })
            .collect()
    }
}

/// Returns the correct answer.
pub(crate) fn answer(prompt: &Prompt) -> &str {
    prompt.columns["answer"].as_str().unwrap_or_default()
}

/// The only training reward: 1 for the correct answer, 0 for any other.
pub(crate) fn is_right(sample: &Sample) -> f32 {
    f32::from(u8::from(sample.columns["answer"] == sample.completion))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_train::FinishReason;
    use std::collections::HashSet;

    #[test]
    fn every_sum_is_in_one_of_the_two_parts() {
        let task = Task::new(3).unwrap();
        assert_eq!((task.training.len(), task.held_out.len()), (7100, 1000));
        let all = task.training.iter().chain(&task.held_out);
        assert_eq!(
            all.map(|p| p.text.as_str()).collect::<HashSet<_>>().len(),
            8100
        );
    }

    #[test]
    fn examples_end_with_the_right_answer() {
        let task = Task::new(0).unwrap();
        for (example, prompt) in task
            .examples()
            .unwrap()
            .iter()
            .zip(&task.training)
            .take(100)
        {
            let (answer, end) = example.tokens().split_at(example.tokens().len() - 1);
            assert_eq!(end, [END]);
            let (question, sum) = answer.split_at(prompt.tokens.len());
            assert_eq!(question, prompt.tokens);
            assert_eq!(example.num_trained_tokens(), sum.len() + 1);
            let sum: u32 = task.tokenizer.decode(sum, true).unwrap().parse().unwrap();
            let terms = prompt.text.trim_end_matches('=').split('+');
            assert_eq!(sum, terms.map(|t| t.parse::<u32>().unwrap()).sum::<u32>());
        }
    }

    #[test]
    fn only_the_right_answer_is_rewarded() {
        let task = Task::new(0).unwrap();
        let prompt = &task.training[0];
        let reward = |completion: &str| {
            is_right(&Sample {
                prompt: &prompt.text,
                messages: &[],
                completion,
                prompt_tokens: &[],
                completion_tokens: &[],
                finish_reason: FinishReason::StopToken,
                columns: &prompt.columns,
                group: 0,
            })
        };
        assert_eq!(reward(answer(prompt)), 1.);
        for wrong in [
            "",
            "0",
            &format!("{}0", answer(prompt)),
            &format!("0{}", answer(prompt)),
        ] {
            assert_eq!(reward(wrong), 0.);
        }
    }
}
