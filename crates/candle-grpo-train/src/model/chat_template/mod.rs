//! Chat templates, which convert messages to the text format of a model.

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

/// Maximum number of instructions of one rendering. A message takes some hundreds.
const FUEL: u64 = 1_000_000;

/// Maximum size of the text of a chat, and of one value, in bytes. A million tokens take about 4
/// MiB.
const MAX_TEXT: usize = 16 << 20;

/// The name of the template for chats without another one.
pub(crate) const DEFAULT: &str = "default";

/// The name of the template for chats with tools, if a model has one.
const TOOL_USE: &str = "tool_use";

/// A content that stands for an answer where a template is rendered. No template changes it.
pub(crate) const ANSWER: &str = "AnswerOfTheAssistant7316";

/// A chat template: a Jinja template, rendered as in Hugging Face transformers.
///
/// A template has access to:
///
/// - `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens (`bos_token`,
///   `eos_token`, ...) and the variables of the [`Chat`],
/// - `raise_exception`, `strftime_now`, and `tojson`, which writes like Python's `json.dumps`,
/// - Python's methods of strings and dicts, whose positions count characters,
/// - `{% break %}`, `{% continue %}`, and `{% generation %}` ... `{% endgeneration %}` around the
///   text of the assistant.
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
/// template can still exhaust memory or the stack, so load only models that you trust.
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
    /// The templates by name, [`DEFAULT`] among them.
    templates: BTreeMap<String, Source>,
    environment: Environment<'static>,
    /// The time of `strftime_now`; `None` for that of the rendering.
    clock: Option<DateTime>,
    special_tokens: Vec<(&'static str, String)>,
    variables: BTreeMap<String, Value>,
}

#[derive(Debug, Clone)]
struct Source {
    text: String,
    /// The markers of generation blocks, `None` without such blocks; or why the template is not
    /// valid.
    marks: Result<Option<Marks>, String>,
}

/// The text of a rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The rendered text.
    pub text: String,
    /// Byte ranges of the `{% generation %}` blocks, which the assistant wrote. Empty without such
    /// blocks.
    pub assistant: Vec<Range<usize>>,
}

/// The tokens of a rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChat {
    /// The token ids.
    pub tokens: Vec<u32>,
    /// True for each token that the assistant wrote, see [`RenderedChat::assistant`].
    pub assistant_mask: Vec<bool>,
}

impl ChatTemplate {
    /// Compiles a template. As in Jinja, all ends of lines in it are `\n`.
    ///
    /// # Errors
    ///
    /// Returns an error with the line if `source` is not a valid Jinja template.
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

    /// Adds a template by its name. `tool_use` is for chats with tools, and if it is not valid,
    /// these have its error. Others are not compiled, and only kept in [`Self::named`].
    ///
    /// # Errors
    ///
    /// As in [`Self::new`], for the name `default`.
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

    /// Compiles a template. Returns the markers of its generation blocks, if it has any.
    fn compile(&mut self, name: &str, text: &str) -> Result<Option<Marks>> {
        let marks = Marks::absent_from(text)?;
        let plain = marks.replace_tags(text)?;
        let has_blocks = plain != text;
        self.environment
            .add_template_owned(name.to_owned(), plain)
            .map_err(readable)?;
        Ok(has_blocks.then_some(marks))
    }

    /// Sets `bos_token`, `eos_token`, `unk_token` and `pad_token` to the texts of these tokens.
    pub fn with_special_tokens(mut self, tokens: &SpecialTokens) -> Self {
        self.special_tokens = tokens
            .named()
            .map(|(name, token)| (name, token.text.clone()))
            .collect();
        self
    }

    /// Sets more variables of all chats, for example `enable_thinking`. A [`Chat::variable`] comes
    /// first.
    pub fn with_variables<T: Serialize>(
        mut self,
        variables: impl IntoIterator<Item = (String, T)>,
    ) -> Self {
        let variables = variables.into_iter();
        let variables = variables.map(|(name, value)| (name, Value::from_serialize(value)));
        self.variables.extend(variables);
        self
    }

    /// Fixes the time of `strftime_now`, so that a template that prints the date is deterministic.
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

    /// Returns the time of [`Self::with_clock_at`], if it is fixed.
    pub fn clock(&self) -> Option<String> {
        self.clock.map(|clock| clock.to_string())
    }

    /// Returns the local time, for [`Self::with_clock_at`].
    pub fn local_time() -> String {
        Zoned::now().datetime().to_string()
    }

    /// Returns the Jinja source of the template for chats without tools.
    pub fn source(&self) -> &str {
        self.templates
            .get(DEFAULT)
            .map_or("", |source| &source.text)
    }

    /// Returns the names and sources of the other templates.
    pub fn named(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = self.templates.iter().filter(|(name, _)| *name != DEFAULT);
        named.map(|(name, source)| (name.as_str(), source.text.as_str()))
    }

    /// Returns whether one of the templates contains the name of a variable.
    pub fn has_variable(&self, name: &str) -> bool {
        let mut templates = self.templates.values();
        templates.any(|source| source.text.contains(name))
    }

    /// The template of `chat` and its name.
    fn template_of(&self, chat: &Chat) -> Option<(&String, &Source)> {
        let named = match chat.has_tools() {
            true => self.templates.get_key_value(TOOL_USE),
            false => None,
        };
        named.or_else(|| self.templates.get_key_value(DEFAULT))
    }

    /// Renders `chat` to text.
    ///
    /// # Errors
    ///
    /// Returns the message of `raise_exception` if the template calls it. Returns an error with the
    /// line for an invalid operation or an endless loop.
    pub fn render(&self, chat: &Chat) -> Result<String> {
        Ok(self.render_with_assistant(chat)?.text)
    }

    /// Renders `chat`, which has a message with the content [`ANSWER`], to the text after this
    /// content.
    ///
    /// # Errors
    ///
    /// As [`Self::render`], or if the template changes or leaves out the content.
    pub(crate) fn render_after_answer(&self, chat: &Chat) -> Result<String> {
        let text = self.render(chat)?;
        let (_, after) = text
            .split_once(ANSWER)
            .context("chat template: changes or leaves out the content of the assistant")?;
        Ok(after.to_owned())
    }

    /// Renders `chat` to text, with the ranges that the assistant wrote.
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

    /// Returns whether the template of `chat` marks the text of the assistant with
    /// `{% generation %}`.
    pub fn has_generation_blocks(&self, chat: &Chat) -> bool {
        let source = self.template_of(chat);
        source.is_some_and(|(_, source)| matches!(source.marks, Ok(Some(_))))
    }
}

impl RenderedChat {
    /// Encodes the text, without special tokens other than those in it. A token counts as written
    /// by the assistant if any of its bytes does.
    ///
    /// # Errors
    ///
    /// If the text has no tokens or the tokenizer cannot encode it.
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

/// A writer of at most [`MAX_TEXT`] bytes.
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

/// Returns an error with the line and the innermost message, for example of `raise_exception`.
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
