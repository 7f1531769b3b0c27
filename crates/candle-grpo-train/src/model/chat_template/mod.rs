//! Chat templates: messages to the text that a model was trained on.

mod chat;
mod generation;
mod python;

use std::io;
use std::ops::Range;

use anyhow::{Context, Result, anyhow, ensure};
use jiff::Zoned;
use jiff::civil::DateTime;
use jiff::fmt::strtime;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use tokenizers::Tokenizer;

use crate::SpecialTokens;
pub use chat::Chat;
use generation::Marks;

/// Instructions that one rendering may take: a message takes some hundreds.
const FUEL: u64 = 1_000_000;

/// The longest text of a chat, and of one value, in bytes: a million tokens take some 4 MiB.
const MAX_TEXT: usize = 16 << 20;

const NAME: &str = "chat_template";

/// A chat template, which is a Jinja template as Hugging Face transformers renders it.
///
/// It sees `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens (`bos_token`, `eos_token`, ...)
/// and the variables of the [`Chat`]; `raise_exception`, `strftime_now` and `tojson`, which writes as Python's
/// `json.dumps` does; Python's methods of strings and dicts; `{% break %}`, `{% continue %}` and
/// `{% generation %}` ... `{% endgeneration %}` around what the assistant says. Values are printed as Python prints them.
/// One difference is known: a loop over `none` is empty, where Python has an error.
///
/// A template is a program. One that does not end, or writes more than 16 MiB, is stopped with an error, but one that is made
/// to take all memory or the whole stack within does: load models from those whom you trust.
///
/// ```
/// use candle_grpo_train::{Chat, ChatTemplate};
/// use serde_json::json;
///
/// # fn main() -> anyhow::Result<()> {
/// let template = ChatTemplate::new(
///     "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}\
///      {% if add_generation_prompt %}<|assistant|>{% endif %}",
/// )?;
/// let chat = Chat::new(json!([{"role": "user", "content": "What is 17 + 25?"}])).generation_prompt();
/// assert_eq!(template.render(&chat)?, "<|user|>What is 17 + 25?\n<|assistant|>");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    /// `None` if there is no generation block.
    marks: Option<Marks>,
    special_tokens: Vec<(&'static str, String)>,
}

/// A chat as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// The bytes of the text within `{% generation %}` blocks: what the assistant said. Empty if the template has none.
    pub assistant: Vec<Range<usize>>,
}

/// A chat as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChat {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// For each token whether the assistant said it, see [`RenderedChat::assistant`].
    pub assistant_mask: Vec<bool>,
}

impl ChatTemplate {
    /// Errs if `source` is no Jinja template, with the line.
    pub fn new(source: &str) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_formatter(|out, _, value| {
            out.write_str(&python::str(value)?)?;
            Ok(())
        });
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", python::str);
        environment.add_filter("trim", python::trim);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("iterable", python::is_iterable);
        environment.add_function("raise_exception", |message: String| {
            Err::<Value, _>(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: &str| {
            strftime(Zoned::now().datetime(), format)
        });
        let marks = Marks::absent_from(source)?;
        let plain = marks.replace_tags(source)?;
        let marks = (plain != source).then_some(marks);
        environment
            .add_template_owned(NAME, plain)
            .map_err(readable)?;
        Ok(Self {
            source: source.to_owned(),
            environment,
            marks,
            special_tokens: Vec::new(),
        })
    }

    /// Hands the texts of these tokens to the template, as `bos_token`, `eos_token`, `unk_token` and `pad_token`.
    pub fn with_special_tokens(mut self, tokens: &SpecialTokens) -> Self {
        self.special_tokens = tokens
            .named()
            .map(|(name, token)| (name, token.text.clone()))
            .collect();
        self
    }

    /// Stops the clock that `strftime_now` reads: a template that prints the day then gives the same text on every day.
    ///
    /// `now` is a local time as in `2025-03-05T14:07:09`.
    pub fn with_clock_at(mut self, now: &str) -> Result<Self> {
        let now: DateTime = now
            .parse()
            .with_context(|| format!("now: {now:?}, must be as in 2025-03-05T14:07:09"))?;
        self.environment
            .add_function("strftime_now", move |format: &str| strftime(now, format));
        Ok(self)
    }

    /// The Jinja template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of `chat`.
    ///
    /// Errs with the message of `raise_exception` if the template calls it, and with the line if it does what cannot be
    /// done or goes on for ever.
    pub fn render(&self, chat: &Chat) -> Result<String> {
        Ok(self.render_with_assistant(chat)?.text)
    }

    /// The text of `chat`, and which of it the assistant said.
    pub fn render_with_assistant(&self, chat: &Chat) -> Result<RenderedChat> {
        let context = chat.context(&self.special_tokens);
        let template = self.environment.get_template(NAME).map_err(readable)?;
        let mut text = Bounded(Vec::new());
        template
            .render_captured_to(context, &mut text)
            .map_err(readable)?;
        let text = String::from_utf8(text.0)?;
        match &self.marks {
            Some(marks) => marks.take_out(&text),
            None => Ok(RenderedChat {
                text,
                assistant: Vec::new(),
            }),
        }
    }

    /// The tokens of the text of `chat`, without special tokens but those that the template writes.
    pub fn encode(&self, chat: &Chat, tokenizer: &Tokenizer) -> Result<EncodedChat> {
        let RenderedChat { text, assistant } = self.render_with_assistant(chat)?;
        let encoding = tokenizer
            .encode(text.as_str(), false)
            .map_err(|e| anyhow!("chat {text:?} cannot be encoded: {e}"))?;
        ensure!(!encoding.is_empty(), "chat {text:?} has no tokens");
        let said = |&(start, end): &(usize, usize)| {
            assistant
                .iter()
                .any(|block| start < block.end && block.start < end)
        };
        Ok(EncodedChat {
            tokens: encoding.get_ids().to_vec(),
            assistant_mask: encoding.get_offsets().iter().map(said).collect(),
        })
    }
}

/// A text of at most [`MAX_TEXT`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn strftime(now: DateTime, format: &str) -> Result<String, Error> {
    strtime::format(format, now).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: {error}"),
        )
    })
}

/// The innermost message, which is that of `raise_exception` if it was called, and the line.
fn readable(error: Error) -> anyhow::Error {
    let message = match error.detail() {
        // Nothing else of [`Bounded`] fails.
        _ if error.kind() == ErrorKind::WriteFailure => {
            format!("more than {} MiB of text", MAX_TEXT >> 20)
        }
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => anyhow!("chat template, line {line}: {message}"),
        None => anyhow!("chat template: {message}"),
    }
}
