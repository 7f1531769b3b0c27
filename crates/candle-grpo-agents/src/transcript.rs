//! The tree of sampled answers in an episode.

use std::collections::HashMap;
use std::ops::Range;

use anyhow::Result;
use candle_grpo_train::Completion;
use candle_grpo_train::environment::Conversation;
use candle_grpo_train::rollout::CompletionBuilder;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::message::Message;
use crate::request::{Input, Refusal, Request};

/// Marks turn numbers that derive from tokens, for the random numbers.
const OF_TOKENS: u64 = 1 << 63;

/// An episode's rows. Each sampled token is in exactly one row as a response, and is never encoded
/// again.
#[derive(Debug, Default)]
pub(crate) struct Transcript {
    rows: Vec<Row>,
    answers: Vec<Drawn>,
    /// Number of drafts with the same tokens, by their digest.
    drafts: HashMap<[u8; 32], u64>,
}

/// A row: a prompt, and answers with context between them.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) tokens: CompletionBuilder,
    /// Answers, as ranges in the completion.
    pub(crate) turns: Vec<Range<usize>>,
    /// The role that the policy plays in it.
    pub(crate) role: Option<String>,
    /// True if the row's prompt is the episode's.
    is_main: bool,
}

/// An answer.
#[derive(Debug)]
struct Drawn {
    id: String,
    row: usize,
    /// Number of tokens in the row up to the answer's end.
    end: usize,
    /// True if its row continues after it.
    is_continued: bool,
    said: Said,
}

/// A conversation up to an answer.
#[derive(Debug, Clone)]
pub(crate) enum Said {
    Chat {
        messages: Vec<Message>,
        tools: Option<Value>,
        has_instructions: bool,
    },
    Text(String),
    Tokens,
}

/// An answer to sample.
#[derive(Debug)]
pub(crate) struct Draft {
    /// Answer whose row continues; absent: a new row begins.
    continued: Option<usize>,
    /// Tokens to continue.
    pub(crate) tokens: Vec<u32>,
    /// Turn number for the random numbers.
    pub(crate) turn: u64,
    said: Said,
    role: Option<String>,
    /// Digest over the role and the tokens.
    pub(crate) digest: [u8; 32],
}

/// An episode's conversions and prompt.
#[derive(Clone, Copy)]
pub(crate) struct Setting<'a> {
    pub(crate) conversation: &'a Conversation,
    /// Chat template variables.
    pub(crate) variables: &'a Map<String, Value>,
    /// The episode's prompt tokens.
    pub(crate) prompt: &'a [u32],
}

impl Transcript {
    /// Places a request. A request that extends an earlier question and its answer continues the
    /// answer's row. If another request has already done so, it starts a branch: a row whose prompt
    /// contains everything sampled up to there. So does a request in another role. Any other
    /// request begins its own row.
    pub(crate) fn draft(
        &mut self,
        request: &Request,
        setting: Setting<'_>,
    ) -> Result<Draft, Refusal> {
        let role = &request.role;
        let (from, tokens, said) = match &request.input {
            Input::Chat {
                messages,
                tools,
                has_instructions,
                previous,
            } => {
                let has_instructions = *has_instructions;
                let messages = match previous {
                    None => messages.clone(),
                    Some(id) => self.continued(id, messages, has_instructions)?,
                };
                let (from, tokens) = self.chat(&messages, tools.as_ref(), setting)?;
                let said = Said::Chat {
                    messages,
                    tools: tools.clone(),
                    has_instructions,
                };
                (from, tokens, said)
            }
            Input::Text(text) => self.text(text, setting)?,
            Input::Tokens(tokens) => {
                let from = self
                    .answers
                    .iter()
                    .enumerate()
                    .filter(|(_, answer)| tokens.starts_with(self.tokens_up_to(answer)));
                let from = from.max_by_key(|(_, answer)| (answer.end, !answer.is_continued));
                (from.map(|(at, _)| at), tokens.clone(), Said::Tokens)
            }
        };
        let continues =
            |answer: &Drawn| !answer.is_continued && self.rows[answer.row].role == *role;
        let continued = from.filter(|&at| continues(&self.answers[at]));
        let digest = match role {
            None => digest(&tokens),
            Some(role) => Sha256::new()
                .chain_update(digest(&tokens))
                .chain_update(role)
                .finalize()
                .into(),
        };
        let earlier = self.drafts.entry(digest).or_default();
        let number = *earlier;
        *earlier += 1;
        let main = match continued {
            Some(at) => {
                let answer = &mut self.answers[at];
                answer.is_continued = true;
                let row = &self.rows[answer.row];
                row.is_main.then_some(row.turns.len() as u64)
            }
            None => {
                let is_first = from.is_none() && number == 0 && role.is_none();
                (is_first && tokens == setting.prompt).then_some(0)
            }
        };
        Ok(Draft {
            continued,
            turn: main.unwrap_or_else(|| OF_TOKENS | of_tokens(&digest, number)),
            tokens,
            said,
            role: role.clone(),
            digest,
        })
    }

    /// Takes back a draft that was not sampled.
    pub(crate) fn abandon(&mut self, draft: Draft) {
        if let Some(at) = draft.continued {
            self.answers[at].is_continued = false;
        }
        if let Some(drafts) = self.drafts.get_mut(&draft.digest) {
            *drafts -= 1;
        }
    }

    /// Returns the row's number of response tokens before the answer to `draft`.
    pub(crate) fn response_len(&self, draft: &Draft) -> usize {
        match draft.continued {
            Some(at) => {
                let row = &self.rows[self.answers[at].row];
                draft.tokens.len() - row.tokens.prompt_len()
            }
            None => 0,
        }
    }

    /// Records the answer to a draft: the sampled completion, and the message for the agent.
    pub(crate) fn record(
        &mut self,
        draft: Draft,
        drawn: &Completion,
        message: Message,
        id: &str,
        conversation: &Conversation,
    ) -> Result<()> {
        let at = match draft.continued {
            Some(at) => {
                let at = self.answers[at].row;
                let row = &mut self.rows[at];
                let context = &draft.tokens[row.tokens.tokens().len()..];
                row.tokens.append(context);
                at
            }
            None => {
                self.rows.push(Row {
                    tokens: CompletionBuilder::new(draft.tokens),
                    turns: Vec::new(),
                    role: draft.role,
                    is_main: draft.turn == 0,
                });
                self.rows.len() - 1
            }
        };
        let row = &mut self.rows[at];
        row.turns.push(row.tokens.push(drawn));
        let said = match draft.said {
            Said::Chat {
                mut messages,
                tools,
                has_instructions,
            } => {
                messages.push(message);
                Said::Chat {
                    messages,
                    tools,
                    has_instructions,
                }
            }
            Said::Text(question) => Said::Text(question + &conversation.text(&drawn.tokens)?),
            Said::Tokens => Said::Tokens,
        };
        self.answers.push(Drawn {
            id: id.to_owned(),
            row: at,
            end: row.tokens.tokens().len(),
            is_continued: false,
            said,
        });
        Ok(())
    }

    /// Returns the rows. The last one contains the last answer.
    pub(crate) fn into_rows(mut self) -> Vec<Row> {
        if let Some(last) = self.answers.last() {
            let row = self.rows.remove(last.row);
            self.rows.push(row);
        }
        self.rows
    }

    /// Returns the number of answers.
    pub(crate) fn answers(&self) -> usize {
        self.answers.len()
    }

    fn tokens_up_to(&self, answer: &Drawn) -> &[u32] {
        &self.rows[answer.row].tokens.tokens()[..answer.end]
    }

    /// Returns the answer that a conversation extends, and the conversation's tokens.
    fn chat(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        setting: Setting<'_>,
    ) -> Result<(Option<usize>, Vec<u32>), Refusal> {
        let extended = |answer: &Drawn| match &answer.said {
            Said::Chat {
                messages: said,
                tools: known,
                ..
            } => {
                let mut pairs = said.iter().zip(messages);
                let fits = said.len() <= messages.len() && known.as_ref() == tools;
                (fits && pairs.all(|(a, b)| a.says(b))).then_some(said.len())
            }
            _ => None,
        };
        let answers = self.answers.iter().enumerate();
        let extended = answers.filter_map(|(at, answer)| {
            let length = extended(answer)?;
            // Among equal answers, take the first whose row does not continue yet.
            Some((length, !answer.is_continued, usize::MAX - at))
        });
        let from = extended.max();
        let values = |messages: &[Message]| -> Vec<Value> {
            messages.iter().map(Message::to_value).collect()
        };
        let (conversation, variables) = (setting.conversation, setting.variables);
        let Some((length, _, from_end)) = from else {
            let whole = conversation.whole(&values(messages), tools, variables);
            return Ok((None, whole.map_err(not_rendered)?));
        };
        let at = usize::MAX - from_end;
        let before = self.tokens_up_to(&self.answers[at]);
        let (tail, has_tools) = (values(&messages[length..]), tools.is_some());
        let last = before.last().copied();
        let after = conversation.after(&tail, has_tools, variables, last);
        Ok((Some(at), [before, &after.map_err(not_rendered)?].concat()))
    }

    /// Appends `messages` to an earlier answer's conversation.
    fn continued(
        &self,
        id: &str,
        messages: &[Message],
        has_instructions: bool,
    ) -> Result<Vec<Message>, Refusal> {
        let answer = self.answers.iter().find(|answer| answer.id == id);
        let Some(Said::Chat {
            messages: said,
            has_instructions: had_instructions,
            ..
        }) = answer.map(|answer| &answer.said)
        else {
            let must = "be the id of a response of this episode";
            let name = "previous_response_id";
            return Err(Refusal::invalid(name, id, must));
        };
        // Instructions apply to one response.
        let before = &said[usize::from(*had_instructions)..];
        let (instructions, after) = messages.split_at(usize::from(has_instructions));
        Ok([instructions, before, after].concat())
    }

    /// Returns the answer that a text extends, the text's tokens, and the text.
    fn text(
        &self,
        text: &str,
        setting: Setting<'_>,
    ) -> Result<(Option<usize>, Vec<u32>, Said), Refusal> {
        let conversation = setting.conversation;
        let answers = self.answers.iter().enumerate();
        let extended = answers.filter_map(|(at, answer)| match &answer.said {
            Said::Text(said) if text.starts_with(said.as_str()) => {
                Some((said.len(), !answer.is_continued, usize::MAX - at))
            }
            _ => None,
        });
        let said = Said::Text(text.to_owned());
        let Some((length, _, from_end)) = extended.max() else {
            let tokens = conversation.markup(text, true);
            return Ok((None, tokens.map_err(not_encoded)?, said));
        };
        let at = usize::MAX - from_end;
        let before = self.tokens_up_to(&self.answers[at]);
        let after = conversation.markup(&text[length..], false);
        let after = after.map_err(not_encoded)?;
        Ok(match before.split_last() {
            // The text includes the token that ended the answer, or continues without it.
            Some((&last, before_end)) if conversation.is_stop(last) => match after.split_first() {
                Some((&first, rest)) if first == last => (Some(at), [before, rest].concat(), said),
                _ => (None, [before_end, &after].concat(), said),
            },
            _ => (Some(at), [before, &after].concat(), said),
        })
    }
}

fn not_rendered(error: anyhow::Error) -> Refusal {
    Refusal::new(400, "invalid_value", format!("messages: {error:#}"))
}

fn not_encoded(error: anyhow::Error) -> Refusal {
    Refusal::new(400, "invalid_value", format!("prompt: {error:#}"))
}

/// SHA-256 over tokens.
pub(crate) fn digest<'a>(tokens: impl IntoIterator<Item = &'a u32>) -> [u8; 32] {
    let mut digest = Sha256::new();
    for token in tokens {
        digest.update(token.to_le_bytes());
    }
    digest.finalize().into()
}

/// Derives a number from tokens and the count of earlier drafts with the same tokens. It does not
/// depend on the order in which requests arrive.
fn of_tokens(digest: &[u8; 32], number: u64) -> u64 {
    let digest = Sha256::new()
        .chain_update(digest)
        .chain_update(number.to_le_bytes());
    first_64_bits(&digest.finalize())
}

pub(crate) fn first_64_bits(digest: &[u8]) -> u64 {
    let first = digest.iter().take(8);
    first.fold(0, |number, &byte| number << 8 | u64::from(byte))
}
