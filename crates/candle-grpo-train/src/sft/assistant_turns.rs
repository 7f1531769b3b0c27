//! Finds the assistant's turns in a chat template's text.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use super::TrainOn;
use crate::ChatTemplate;
use crate::data::question::is_answer;
use crate::model::{ANSWER, Chat, EncodedChat, RenderedChat};

/// A conversation with answers.
pub(super) struct Answered<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) messages: &'a [Value],
    /// Number of messages that form the prompt. The answers follow.
    pub(super) prompt: usize,
    pub(super) tools: Option<&'a Value>,
    /// Template variables.
    pub(super) variables: Option<&'a Map<String, Value>>,
}

impl Answered<'_> {
    /// Renders the conversation to tokens, with a mask of those that train.
    ///
    /// The answers are the template's `{% generation %}` blocks. Without such blocks, an answer
    /// begins where the template ends when it renders the earlier messages and the generation
    /// prompt, just as for a policy that answers. It ends with the last stop token in what the
    /// template writes for it, or else with this text.
    ///
    /// # Errors
    ///
    /// Fails if there is no answer, or its position is ambiguous.
    pub(super) fn encode(
        &self,
        train_on: TrainOn,
        tokenizer: &Tokenizer,
        stop_token_ids: &[u32],
    ) -> Result<EncodedChat> {
        let mut rendered = self
            .template
            .render_with_assistant(&self.chat(self.messages))?;
        if train_on == TrainOn::All {
            rendered.assistant = std::iter::once(0..rendered.text.len()).collect();
            return rendered.encode(tokenizer);
        }
        let answers = (self.prompt..self.messages.len()).filter(|&i| is_answer(&self.messages[i]));
        let mut answers: Vec<usize> = answers.collect();
        ensure!(
            !answers.is_empty(),
            "no message of the assistant, must have one to train on"
        );
        let is_last_only = train_on == TrainOn::LastAnswer;
        if is_last_only {
            answers.drain(..answers.len() - 1);
        }
        if self.template.has_generation_blocks(&self.chat(&[])) {
            if is_last_only {
                let earlier = rendered.assistant.len().saturating_sub(1);
                rendered.assistant.drain(..earlier);
            } else if self.prompt > 0 {
                let before = self.before(self.prompt, &rendered)?;
                rendered.assistant.retain(|block| block.start >= before);
            }
            ensure!(
                !rendered.assistant.is_empty(),
                "chat template: writes no generation block for the messages of the assistant"
            );
            return rendered.encode(tokenizer);
        }
        let turns = answers.into_iter().map(|index| {
            self.turn(index, &rendered).with_context(|| {
                format!(
                    "message {index}: its place in the text of the chat template is not certain; give model.chat_template with generation blocks, or set data.train_on to last_answer or all"
                )
            })
        });
        rendered.assistant = turns.collect::<Result<_>>()?;
        let mut encoded = rendered.encode(tokenizer)?;
        end_with_stop_tokens(&mut encoded, stop_token_ids);
        Ok(encoded)
    }

    fn chat(&self, messages: &[Value]) -> Chat {
        Chat::new(messages).with_row(self.tools, self.variables)
    }

    fn render(&self, messages: &[Value]) -> Result<String> {
        self.template.render(&self.chat(messages))
    }

    /// Text length before the answer in message `index`.
    fn before(&self, index: usize, rendered: &RenderedChat) -> Result<usize> {
        let chat = self.chat(&self.messages[..index]).generation_prompt();
        let before = self.template.render(&chat)?;
        ensure!(
            rendered.text.starts_with(&before),
            "the template writes the messages before it differently than without it"
        );
        Ok(before.len())
    }

    /// Text range with the answer in message `index`, including its turn's end.
    fn turn(&self, index: usize, rendered: &RenderedChat) -> Result<Range<usize>> {
        let start = self.before(index, rendered)?;
        if let Ok(until) = self.render(&self.messages[..=index])
            && rendered.text.starts_with(&until)
            && until.len() >= start
        {
            return Ok(start..until.len());
        }
        // Some templates omit part of an answer once messages follow, such as its reasoning. What
        // they write after it is the same for any answer.
        let mut messages = self.messages.to_vec();
        messages[index] = json!({"role": messages[index]["role"], "content": ANSWER});
        let after = |messages| self.template.render_after_answer(&self.chat(messages));
        let rest = after(&messages)?;
        let end_of_turn = after(&messages[..=index])?;
        let rest_start = rendered.text.len().saturating_sub(rest.len());
        ensure!(
            rendered.text.ends_with(&rest) && rest.starts_with(&end_of_turn) && rest_start >= start,
            "the template writes the messages after it differently for another answer"
        );
        Ok(start..rest_start + end_of_turn.len())
    }
}

/// Ends each run in the mask at its last stop token, if it has one, because a policy that samples
/// it writes nothing after it.
fn end_with_stop_tokens(chat: &mut EncodedChat, stop_token_ids: &[u32]) {
    let mut is_after = true;
    let mut start_of_tail = None;
    for at in (0..chat.tokens.len()).rev() {
        if !chat.assistant_mask[at] {
            (is_after, start_of_tail) = (true, None);
            continue;
        }
        if !is_after {
            continue;
        }
        let end = *start_of_tail.get_or_insert(at + 1);
        if stop_token_ids.contains(&chat.tokens[at]) {
            chat.assistant_mask[at + 1..end].fill(false);
            is_after = false;
        }
    }
}
