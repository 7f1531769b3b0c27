//! From rows of data to what the policy is asked.

use anyhow::{Context, Result, ensure};
use candle_grpo_train::{Chat, Dataset, Pretrained, Prompt, Question, Row};

use crate::config::RunConfig;

/// The prompts of a run.
pub struct RunPrompts {
    /// Those to train on.
    pub train: Vec<Prompt>,
    /// Those to evaluate on; there may be none.
    pub held_out: Vec<Prompt>,
}

impl RunPrompts {
    /// The prompts of both parts of `dataset`: see [`prompts`].
    pub fn new(config: &RunConfig, dataset: &Dataset, pretrained: &Pretrained) -> Result<Self> {
        let of = |rows| prompts(dataset, rows, pretrained, config.max_prompt_tokens);
        Ok(Self {
            train: of(&dataset.train)?,
            held_out: of(&dataset.held_out)?,
        })
    }
}

/// The prompts of `rows`, in their order, without those of more than `max_prompt_tokens` tokens.
///
/// A conversation becomes text by the chat template of the model, which asks for an answer; what the data say that the answer begins with
/// comes after.
///
/// Errs with file and line if a row is a conversation and the model has no chat template, or the template does not know what
/// to do with it; and if no prompt is left.
pub fn prompts(
    dataset: &Dataset,
    rows: &[Row],
    pretrained: &Pretrained,
    max_prompt_tokens: usize,
) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        let text = text(dataset, row, pretrained).with_context(|| row.place())?;
        let columns = row.columns.clone();
        let prompt = Prompt::new(index as u64, &text, columns, &pretrained.tokenizer);
        prompts.push(prompt.with_context(|| row.place())?);
    }
    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max();
    prompts.retain(|prompt| prompt.tokens.len() <= max_prompt_tokens);
    ensure!(
        !prompts.is_empty() || rows.is_empty(),
        "prompt_length: {max_prompt_tokens} tokens, all {} prompts are longer",
        rows.len()
    );
    let left_out = rows.len() - prompts.len();
    if left_out > 0 {
        tracing::warn!(
            "{left_out} of {} prompts have more than {max_prompt_tokens} tokens, up to {}, and are left out",
            rows.len(),
            longest.unwrap_or(0)
        );
    }
    Ok(prompts)
}

fn text(dataset: &Dataset, row: &Row, pretrained: &Pretrained) -> Result<String> {
    let question = match dataset.question(row)? {
        Question::Text(text) => text,
        Question::Messages(messages) => {
            let template = pretrained.chat_template.as_ref().context(
                "the model has no chat template: give model.chat_template, or set data.chat to false",
            )?;
            template.render(&Chat::new(messages).generation_prompt())?
        }
    };
    Ok(question + &dataset.prefill(row)?)
}
