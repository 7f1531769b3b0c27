//! Chat templates, which convert messages to a model's text format.

mod chat;
mod format;
mod generation;
mod python;
mod strings;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use anyhow::{Context, Result, anyhow, ensure};
use jiff::Zoned;
use jiff::civil::DateTime;
use jiff::fmt::strtime;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::model::SpecialTokens;
pub use chat::Chat;
use generation::Marks;

/// Maximum number of instructions per rendering. A message takes some hundreds.
const FUEL: u64 = 1_000_000;

/// Maximum size in bytes for a chat's text, and for a single value. A million tokens take about 4
/// MiB.
const MAX_TEXT: usize = 16 << 20;

/// Name of the default template.
pub(crate) const DEFAULT: &str = "default";

/// Name of the template for chats with tools, if the model has one.
const TOOL_USE: &str = "tool_use";

/// Content that stands for an answer when a template is rendered. No template changes it.
pub(crate) const ANSWER: &str = "AnswerOfTheAssistant7316";

/// A Jinja chat template, rendered as in Hugging Face transformers.
///
/// A template has access to:
///
/// - `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens (`bos_token`,
///   `eos_token`, ...) and the variables in the [`Chat`],
/// - `raise_exception`, `strftime_now`, and `tojson`, which writes like Python's `json.dumps`,
/// - Python string and dict methods, whose positions count characters,
/// - `{% break %}`, `{% continue %}`, and `{% generation %}` ... `{% endgeneration %}` around the
///   assistant's text.
///
/// Values print as in Python. These differences are known:
///
/// - A loop over `none` is empty, where Python raises an error.
/// - Texts have no operator `%`, for which there is the filter `format`.
/// - Tuples, ranges and the views of dicts print as lists.
/// - `~` writes texts in lists and dicts with double quotation marks, and numbers from 1e16 and
///   below 1e-4 without an exponent. `(x|string) ~ y` writes them as in Python.
/// - `and` and `or` between two literals, such as `[] and 'x'`, give `False` where Python gives the
///   first.
/// - Macros have no `varargs` and `kwargs`.
///
/// A template is a program. Endless loops and more than 16 MiB of output are errors. A malicious
/// template can still exhaust memory or the stack, so only load models that you trust.
///
/// ```
/// use candle_grpo_train::ChatTemplate;
/// use candle_grpo_train::model::Chat;
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
    /// Templates by name, including [`DEFAULT`].
    templates: BTreeMap<String, Source>,
    environment: Environment<'static>,
    /// Time for `strftime_now`; `None` means the time of rendering.
    clock: Option<DateTime>,
    special_tokens: Vec<(&'static str, String)>,
    variables: BTreeMap<String, Value>,
}

#[derive(Debug, Clone)]
struct Source {
    text: String,
    /// Markers for generation blocks, `None` without such blocks; or why the template is invalid.
    marks: Result<Option<Marks>, String>,
}

/// A rendered chat's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The rendered text.
    pub text: String,
    /// Byte ranges in `{% generation %}` blocks, which the assistant wrote. Empty without such
    /// blocks.
    pub assistant: Vec<Range<usize>>,
}

/// A rendered chat's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChat {
    /// The token ids.
    pub tokens: Vec<u32>,
    /// True for each token that the assistant wrote, see [`RenderedChat::assistant`].
    pub assistant_mask: Vec<bool>,
}

impl ChatTemplate {
    /// Compiles a template. As in Jinja, all line endings in it become `\n`.
    ///
    /// # Errors
    ///
    /// Fails if `source` is not a valid Jinja template, with the line.
    pub fn new(source: &str) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_formatter(|out, _, value| {
            out.write_str(&python::str(value)?)?;
            Ok(())
        });
        environment.set_unknown_method_callback(strings::method);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", python::str);
        environment.add_filter("trim", python::trim);
        environment.add_filter("capitalize", strings::capitalize_filter);
        environment.add_filter("center", strings::center);
        environment.add_filter("format", format::printf);
        environment.add_filter("pprint", python::repr_of);
        environment.add_filter("replace", strings::replace);
        environment.add_filter("round", strings::round);
        environment.add_filter("striptags", strings::strip_tags);
        environment.add_filter("title", strings::title_filter);
        environment.add_filter("urlencode", strings::url_encode);
        environment.add_filter("wordcount", strings::word_count);
        environment.add_test("number", python::is_number);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("iterable", python::is_iterable);
        environment.add_function("raise_exception", |message: String| {
            Err::<Value, _>(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: &str| {
            strftime(Zoned::now().datetime(), format)
        });
        let template = Self {
            templates: BTreeMap::new(),
            environment,
            clock: None,
            special_tokens: Vec::new(),
            variables: BTreeMap::new(),
        };
        template.with_named(DEFAULT, source)
    }

    /// Adds a template by name. `tool_use` is for chats with tools; if it is invalid, rendering
    /// these fails. Other templates are not compiled, only kept in [`Self::named`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`], for the name `default`.
    pub fn with_named(mut self, name: &str, source: &str) -> Result<Self> {
        let text = source.replace("\r\n", "\n").replace('\r', "\n");
        let marks = match name {
            DEFAULT => Ok(self.compile(name, &text)?),
            TOOL_USE => self.compile(name, &text).map_err(|error| error.to_string()),
            _ => Ok(None),
        };
        self.templates
            .insert(name.to_owned(), Source { text, marks });
        Ok(self)
    }

    /// Compiles a template. Returns its generation block markers, if it has any.
    fn compile(&mut self, name: &str, text: &str) -> Result<Option<Marks>> {
        let marks = Marks::absent_from(text)?;
        let plain = marks.replace_tags(text)?;
        let has_blocks = plain != text;
        self.environment
            .add_template_owned(name.to_owned(), plain)
            .map_err(readable)?;
        Ok(has_blocks.then_some(marks))
    }

    /// Sets `bos_token`, `eos_token`, `unk_token` and `pad_token` to these tokens' text.
    #[must_use]
    pub fn with_special_tokens(mut self, tokens: &SpecialTokens) -> Self {
        self.special_tokens = tokens
            .named()
            .map(|(name, token)| (name, token.text.clone()))
            .collect();
        self
    }

    /// Sets more variables for all chats, for example `enable_thinking`. A [`Chat::variable`] takes
    /// precedence.
    #[must_use]
    pub fn with_variables<T: Serialize>(
        mut self,
        variables: impl IntoIterator<Item = (String, T)>,
    ) -> Self {
        let variables = variables.into_iter();
        let variables = variables.map(|(name, value)| (name, Value::from_serialize(value)));
        self.variables.extend(variables);
        self
    }

    /// Fixes the time for `strftime_now`, so that a template that prints the date is deterministic.
    ///
    /// `now` is a local time such as `2025-03-05T14:07:09`.
    pub fn with_clock_at(mut self, now: &str) -> Result<Self> {
        let now: DateTime = now
            .parse()
            .with_context(|| format!("now: {now:?}, must be as in 2025-03-05T14:07:09"))?;
        self.environment
            .add_function("strftime_now", move |format: &str| strftime(now, format));
        self.clock = Some(now);
        Ok(self)
    }

    /// Returns the time set by [`Self::with_clock_at`], if any.
    pub fn clock(&self) -> Option<String> {
        self.clock.map(|clock| clock.to_string())
    }

    /// Returns the local time, for [`Self::with_clock_at`].
    pub fn local_time() -> String {
        Zoned::now().datetime().to_string()
    }

    /// Returns the Jinja source for chats without tools.
    pub fn source(&self) -> &str {
        self.templates
            .get(DEFAULT)
            .map_or("", |source| &source.text)
    }

    /// Returns the names and sources of all other templates.
    pub fn named(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = self.templates.iter().filter(|(name, _)| *name != DEFAULT);
        named.map(|(name, source)| (name.as_str(), source.text.as_str()))
    }

    /// Returns whether any template contains this variable name.
    pub fn has_variable(&self, name: &str) -> bool {
        let mut templates = self.templates.values();
        templates.any(|source| source.text.contains(name))
    }

    /// The template for `chat` and its name.
    fn template_of(&self, chat: &Chat) -> Option<(&String, &Source)> {
        let named = if chat.has_tools() {
            self.templates.get_key_value(TOOL_USE)
        } else {
            None
        };
        named.or_else(|| self.templates.get_key_value(DEFAULT))
    }

    /// Renders `chat` to text.
    ///
    /// # Errors
    ///
    /// Fails if the template calls `raise_exception`, with its message. Also for an invalid
    /// operation or an endless loop, with the line.
    pub fn render(&self, chat: &Chat) -> Result<String> {
        Ok(self.render_with_assistant(chat)?.text)
    }

    /// Renders `chat`, in which one message has the content [`ANSWER`], and returns the text after
    /// this content.
    ///
    /// # Errors
    ///
    /// Same as [`Self::render`]. Also if the template changes or omits the content.
    pub(crate) fn render_after_answer(&self, chat: &Chat) -> Result<String> {
        let text = self.render(chat)?;
        let (_, after) = text
            .split_once(ANSWER)
            .context("chat template: changes or leaves out the content of the assistant")?;
        Ok(after.to_owned())
    }

    /// Renders `chat` to text, with the ranges written by the assistant.
    pub fn render_with_assistant(&self, chat: &Chat) -> Result<RenderedChat> {
        let context = chat.context(&self.special_tokens, &self.variables);
        let (name, source) = self.template_of(chat).context("chat template: absent")?;
        let marks = source.marks.as_ref();
        let marks = marks.map_err(|error| anyhow!("{name}: {error}"))?;
        let template = self.environment.get_template(name).map_err(readable)?;
        let mut text = Bounded(Vec::new());
        template
            .render_captured_to(context, &mut text)
            .map_err(readable)?;
        let text = String::from_utf8(text.0)?;
        match marks {
            Some(marks) => marks.take_out(&text),
            None => Ok(RenderedChat {
                text,
                assistant: Vec::new(),
            }),
        }
    }

    /// Renders `chat` to tokens, without special tokens other than those in the template.
    pub fn encode(&self, chat: &Chat, tokenizer: &Tokenizer) -> Result<EncodedChat> {
        self.render_with_assistant(chat)?.encode(tokenizer)
    }

    /// Returns whether the template for `chat` marks the assistant's text with `{% generation %}`.
    pub fn has_generation_blocks(&self, chat: &Chat) -> bool {
        let source = self.template_of(chat);
        source.is_some_and(|(_, source)| matches!(source.marks, Ok(Some(_))))
    }
}

impl RenderedChat {
    /// Encodes the text, without special tokens other than those in it. A token counts as written
    /// by the assistant if any of its bytes was.
    ///
    /// # Errors
    ///
    /// Fails if the text has no tokens or the tokenizer cannot encode it.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<EncodedChat> {
        let Self { text, assistant } = self;
        let encoding = tokenizer
            .encode(text.as_str(), false)
            .map_err(|_| anyhow!("chat {text:?}, the tokenizer has no token for a part of it"))?;
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

/// A writer for at most [`MAX_TEXT`] bytes.
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

/// Returns an error with the line and the innermost message, for example from `raise_exception`.
fn readable(error: Error) -> anyhow::Error {
    let message = match error.detail() {
        // [`Bounded`] has no other error.
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
