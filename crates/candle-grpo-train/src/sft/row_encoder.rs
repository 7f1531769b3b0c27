//! Encodes rows as tokens with weights.

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::assistant_turns::Answered;
use super::{SftDataConfig, TrainOn, Truncation};
use crate::ChatTemplate;
use crate::Pretrained;
use crate::Sequence;
use crate::data::chat_columns::{tools, variables};
use crate::data::dataset::template;
use crate::data::question::{Asking, message, text_messages};
use crate::data::rows::{kind, number};
use crate::data::{Question, Row, Template, plain_tokens};
use crate::model::EncodedChat;
use candle_grpo_base::column::column;

/// Default maximum row length.
const MAX_LENGTH: usize = 1024;

/// Rules that turn rows into examples.
pub(super) struct RowEncoder<'a> {
    config: &'a SftDataConfig,
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    stop_token_ids: &'a [u32],
    asking: Asking,
    completion: Option<Template>,
    text: Option<Template>,
    max_length: usize,
}

/// An encoded row.
pub(super) enum Encoded {
    /// Tokens to train on, and how many there were before truncation.
    Example { example: Sequence, tokens: usize },
    /// Length in tokens of a row that is too long.
    TooLong(usize),
    /// A row with weight 0.
    NoWeight,
}

impl<'a> RowEncoder<'a> {
    /// `template` is the model's chat template with the variables in `config`.
    pub(super) fn new(
        config: &'a SftDataConfig,
        model: &'a Pretrained,
        template: Option<&'a ChatTemplate>,
    ) -> Result<Self> {
        let text = |field, text: &Option<String>| self::template(field, text.as_deref());
        Ok(Self {
            tokenizer: &model.tokenizer,
            template,
            stop_token_ids: &model.special_tokens.stop_token_ids,
            asking: Asking {
                prompt: text("prompt", &config.prompt)?,
                system: config.system.clone(),
                chat: config.chat,
                cut_answer: false,
            },
            completion: text("completion", &config.completion)?,
            text: text("text", &config.text)?,
            max_length: config.max_length(&model.model),
            config,
        })
    }

    /// Encodes a row.
    ///
    /// # Errors
    ///
    /// Fails if the row lacks such columns, they are malformed or empty, or nothing in it trains.
    /// The error names file, line and column.
    pub(super) fn encode(&self, row: &Row) -> Result<Encoded> {
        self.encode_columns(&row.columns)
            .with_context(|| row.place())
    }

    fn encode_columns(&self, columns: &Value) -> Result<Encoded> {
        let weight = self.weight(columns)?;
        let EncodedChat {
            mut tokens,
            assistant_mask: mut mask,
        } = self.tokens(columns)?;
        if weight == 0. {
            return Ok(Encoded::NoWeight);
        }
        // Nothing predicts the first token.
        mask[0] = false;
        ensure!(
            mask.contains(&true),
            "{} tokens, none of which trains; it must have one after its first token",
            tokens.len()
        );
        let length = tokens.len();
        if length > self.max_length {
            let drops = self.config.truncation == Truncation::Drop;
            if drops || !mask[..self.max_length].contains(&true) {
                return Ok(Encoded::TooLong(length));
            }
            tokens.truncate(self.max_length);
            mask.truncate(self.max_length);
        }
        let weights = mask.iter().map(|&trains| if trains { weight } else { 0. });
        Ok(Encoded::Example {
            example: Sequence::new(tokens, weights.collect())?,
            tokens: length,
        })
    }

    /// A row's weight.
    fn weight(&self, columns: &Value) -> Result<f32> {
        let Some(name) = &self.config.weight else {
            return Ok(1.);
        };
        let value = column(columns, name)?;
        let weight = number(value).map(|weight| weight as f32);
        match weight.filter(|&weight| weight >= 0. && weight.is_finite()) {
            Some(weight) => Ok(weight),
            None => bail!("column {name:?}: {value}, must be a number of at least 0"),
        }
    }

    fn tokens(&self, columns: &Value) -> Result<EncodedChat> {
        if let Some(text) = &self.text {
            return self.text_tokens(&text.fill(columns)?);
        }
        if let Some(name) = &self.config.messages {
            return self.conversation(name, column(columns, name)?, columns);
        }
        if self.asking.prompt.is_some() || self.completion.is_some() {
            return self.answer(columns);
        }
        for name in ["messages", "conversations"] {
            if let Some(messages) = columns.get(name) {
                return self.conversation(name, messages, columns);
            }
        }
        if columns.get("completion").is_some() {
            return self.answer(columns);
        }
        match columns.get("text") {
            Some(Value::String(text)) => self.text_tokens(text).context("column \"text\""),
            Some(other) => bail!("column \"text\": {}, must be a text", kind(other)),
            None => {
                let columns = columns.as_object().into_iter().flatten();
                let names: Vec<&String> = columns.map(|(name, _)| name).collect();
                bail!(
                    "no column \"messages\", \"completion\" or \"text\" among {names:?}: name those of a row with data.messages, with data.prompt and data.completion, or with data.text"
                )
            }
        }
    }

    /// Text that trains as a whole.
    fn text_tokens(&self, text: &str) -> Result<EncodedChat> {
        ensure!(!text.is_empty(), "the text is empty");
        let mut tokens = plain_tokens(text, self.tokenizer)?;
        self.append_eos(&mut tokens);
        Ok(EncodedChat {
            assistant_mask: vec![true; tokens.len()],
            tokens,
        })
    }

    fn conversation(&self, name: &str, messages: &Value, columns: &Value) -> Result<EncodedChat> {
        let Value::Array(messages) = messages else {
            bail!("column {name:?}: {}, must be messages", kind(messages));
        };
        self.asking.refuse_media(columns)?;
        let messages = self.asking.conversation(name, messages)?;
        self.chat(&messages, 0, columns)
            .with_context(|| format!("column {name:?}"))
    }

    /// A prompt and its completion.
    fn answer(&self, columns: &Value) -> Result<EncodedChat> {
        let filled;
        let completion = match &self.completion {
            Some(template) => {
                filled = Value::String(template.fill(columns)?);
                &filled
            }
            None => column(columns, "completion")?,
        };
        let prompt = match (&self.asking.prompt, columns.get("prompt")) {
            (None, Some(Value::Array(messages))) => {
                self.asking.refuse_media(columns)?;
                Question::Messages(self.asking.conversation("prompt", messages)?)
            }
            _ => self.asking.question_of_columns(columns)?,
        };
        let empty = "completion: empty, must have a text to train on";
        match (prompt, completion) {
            (Question::Text(prompt), Value::String(completion)) => {
                ensure!(!completion.is_empty(), empty);
                self.continuation(&prompt, completion)
            }
            (Question::Text(_), Value::Array(_)) => bail!(
                "column \"completion\": messages, but the prompt is a plain text; set data.chat to true"
            ),
            (Question::Messages(mut messages), Value::String(completion)) => {
                ensure!(!completion.is_empty(), empty);
                let prompt = messages.len();
                messages.push(message("assistant", completion));
                self.chat(&messages, prompt, columns)
            }
            (Question::Messages(mut messages), Value::Array(completion)) => {
                let prompt = messages.len();
                messages.extend(text_messages("completion", completion)?);
                self.chat(&messages, prompt, columns)
            }
            (_, other) => bail!(
                "column \"completion\": {}, must be a text or messages",
                kind(other)
            ),
        }
    }

    /// Text and its continuation, encoded separately, as for a policy that continues the text.
    fn continuation(&self, prompt: &str, completion: &str) -> Result<EncodedChat> {
        let mut tokens = plain_tokens(prompt, self.tokenizer).context("prompt")?;
        let read = match self.config.train_on {
            TrainOn::All => 0,
            TrainOn::Answers | TrainOn::LastAnswer => tokens.len(),
        };
        tokens.extend(self.encode_completion(completion).context("completion")?);
        self.append_eos(&mut tokens);
        Ok(EncodedChat {
            assistant_mask: (0..tokens.len()).map(|at| at >= read).collect(),
            tokens,
        })
    }

    fn chat(&self, messages: &[Value], prompt: usize, columns: &Value) -> Result<EncodedChat> {
        let template = self.template.context(
            "the model has no chat template: give model.chat_template, or set data.chat to false",
        )?;
        let tools = tools(columns, &self.config.tools)?;
        let conversation = Answered {
            template,
            messages,
            prompt,
            tools: tools.as_ref(),
            variables: variables(columns)?,
        };
        conversation.encode(self.config.train_on, self.tokenizer, self.stop_token_ids)
    }

    fn encode_completion(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, false);
        let encoding = encoding
            .map_err(|_| anyhow!("{text:?}, the tokenizer has no token for a part of it"))?;
        ensure!(!encoding.is_empty(), "{text:?} has no tokens");
        Ok(encoding.get_ids().to_vec())
    }

    fn append_eos(&self, tokens: &mut Vec<u32>) {
        let ends = tokens
            .last()
            .is_some_and(|last| self.stop_token_ids.contains(last));
        if self.config.append_eos && !ends {
            tokens.extend(self.stop_token_ids.first());
        }
    }
}

impl SftDataConfig {
    /// Returns the maximum row length in tokens for a model.
    pub(super) fn max_length(&self, model: &candle_grpo_nn::DecoderConfig) -> usize {
        let positions = model.max_position_embeddings;
        self.max_length.unwrap_or(MAX_LENGTH.min(positions))
    }
}
