//! `grpo chat`.

use std::borrow::Cow;
use std::io::{self, BufRead, IsTerminal, Write, stdin};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_grpo::config::ModelConfig;
use candle_grpo::train::model::Chat;
use candle_grpo::train::{Interrupted, Pretrained, Progress, Prompt, Sampler, SamplingConfig};
use serde_json::{Map, Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};
use tokenizers::Tokenizer;

use super::console::Console;
use super::exit::{Exit, warn};
use super::load;
use super::sample::{Distribution, object};

#[derive(clap::Args)]
pub(super) struct ChatArguments {
    /// The model: a Hugging Face directory, a GGUF file, a run directory (its best checkpoint), or
    /// a Hugging Face hub name. It needs a chat template.
    model: PathBuf,
    /// The system message before the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Chat template variables as a JSON object, such as {"enable_thinking": false}.
    #[arg(long, value_name = "JSON", value_parser = object)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// The maximum answer length in tokens.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    max_new_tokens: usize,
    #[command(flatten)]
    distribution: Distribution,
    /// The random seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Only log warnings.
    #[arg(short, long)]
    quiet: bool,
}

const HELP: &str = "/reset starts a new conversation, /exit quits, Ctrl-C ends an answer.";

/// Answers the lines on standard input as one conversation.
pub(super) fn chat(arguments: &ChatArguments) -> Result<(), Exit> {
    let base = SamplingConfig {
        max_new_tokens: arguments.max_new_tokens,
        seed: arguments.seed,
        ..SamplingConfig::default()
    };
    // Wrong options are errors before the model is loaded.
    arguments.distribution.apply(base.clone(), false)?;
    let console = Console::new(arguments.quiet);
    let mut model = load::model(&ModelConfig {
        path: load::model_file(&arguments.model, &console)?,
        ..ModelConfig::default()
    })?;
    // A conversation has one length for all its turns.
    model.model = model.model.for_rows_of(0);
    if model.chat_template.is_none() {
        let message = "the model has no chat template; grpo sample continues a text";
        return Err(Exit::Model(message.to_owned()));
    }
    if let Some(variables) = &arguments.chat_template_kwargs {
        load::set_variables(&mut model, variables)?;
    }
    let sampling = arguments.distribution.of_model(&model, base, false)?;
    let answer = Arc::new(Answer::new(model.tokenizer.clone()));
    answer.handle_interrupts();
    let sampler = load_sampler(&model, sampling, &answer)?;
    let system = arguments.system.iter();
    let system: Vec<Value> = system.map(|text| message("system", text)).collect();
    let mut conversation = Conversation {
        model,
        sampler,
        answer,
        messages: system.clone(),
        turns: 0,
    };
    let is_terminal = stdin().is_terminal();
    if is_terminal && !arguments.quiet {
        tracing::info!("{HELP}");
    }
    let mut lines = stdin().lock();
    loop {
        if is_terminal {
            eprint_prompt();
        }
        let mut line = Vec::new();
        conversation.answer.is_idle.store(true, Ordering::SeqCst);
        let read = lines.read_until(b'\n', &mut line);
        conversation.answer.is_idle.store(false, Ordering::SeqCst);
        let read = read.map_err(|error| Exit::Data(format!("standard input: {error}")))?;
        let line = String::from_utf8_lossy(&line);
        if matches!(line, Cow::Owned(_)) {
            warn("the line is not UTF-8: the model sees \u{fffd} for each character that is not");
        }
        match line.trim() {
            _ if read == 0 => return Ok(()),
            "" => {}
            "/exit" => return Ok(()),
            "/reset" => conversation.messages.clone_from(&system),
            "/help" => warn(HELP),
            text => match conversation.ask(text) {
                Ok(()) => {}
                // The user can say something else. A script cannot.
                Err(Exit::Config(message)) if is_terminal => warn(&message),
                Err(exit) => return Err(exit),
            },
        }
    }
}

/// Prints a prompt mark on stderr, so that stdout only has answers.
fn eprint_prompt() {
    let mut out = io::stderr();
    // A closed stderr does not end the conversation.
    let _ = write!(out, "> ").and_then(|()| out.flush());
}

fn load_sampler(
    model: &Pretrained,
    sampling: SamplingConfig,
    answer: &Arc<Answer>,
) -> Result<Sampler, Exit> {
    let sampler = model.sampler(sampling);
    let sampler = sampler.map_err(|error| Exit::Model(format!("{error:#}")))?;
    let progress: Arc<dyn Progress> = Arc::<Answer>::clone(answer);
    Ok(sampler.with_progress(progress))
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// A model, and the messages so far.
struct Conversation {
    model: Pretrained,
    sampler: Sampler,
    answer: Arc<Answer>,
    messages: Vec<Value>,
    /// The number of answers, which selects their random numbers.
    turns: u64,
}

impl Conversation {
    /// Prints the answer to a message as it is sampled. After an error the message is forgotten.
    fn ask(&mut self, text: &str) -> Result<(), Exit> {
        self.messages.push(message("user", text));
        match self.answer_last() {
            Ok(text) => {
                self.messages.push(message("assistant", &text));
                self.turns += 1;
                Ok(())
            }
            Err(exit) => {
                self.messages.pop();
                Err(exit)
            }
        }
    }

    /// Samples and prints the answer to the last message. Ctrl-C ends it early.
    fn answer_last(&self) -> Result<String, Exit> {
        let wrong = |error: anyhow::Error| Exit::Config(format!("{error:#}"));
        let chat = Chat::new(&self.messages).generation_prompt();
        let text = match &self.model.chat_template {
            Some(template) => template.render(&chat).map_err(wrong)?,
            None => return Err(Exit::Model("the model has no chat template".to_owned())),
        };
        let prompt = Prompt::new(0, &text, Value::Null, &self.model.tokenizer).map_err(wrong)?;
        let (length, positions) = (prompt.tokens.len(), self.model.model.longest_row());
        if length >= positions {
            return Err(Exit::Config(format!(
                "the conversation has {length} tokens, must be below the model's {positions} positions; /reset starts a new one"
            )));
        }
        let sampling = self.sampler.config().clone();
        let max_new_tokens = sampling.max_new_tokens.min(positions - length);
        let sampling = SamplingConfig {
            max_new_tokens,
            ..sampling
        };
        let sampler = self.sampler.clone().with_config(sampling).map_err(wrong)?;
        self.answer.begin();
        let drawn = sampler.sample(&[&prompt], 1, self.turns);
        let text = self.answer.end()?;
        match drawn {
            Err(error) if !error.is::<Interrupted>() => Err(Exit::Run(format!("{error:#}"))),
            _ => Ok(text),
        }
    }
}

/// Prints an answer as it is sampled, and ends it at Ctrl-C.
struct Answer {
    tokenizer: Tokenizer,
    shown: Mutex<Shown>,
    /// Set by Ctrl-C.
    stop: Arc<AtomicBool>,
    /// True while the program reads its input: Ctrl-C then quits.
    is_idle: Arc<AtomicBool>,
}

#[derive(Default)]
struct Shown {
    /// The printed text.
    text: String,
    /// A standard output error.
    error: Option<io::Error>,
}

impl Answer {
    fn new(tokenizer: Tokenizer) -> Self {
        Self {
            tokenizer,
            shown: Mutex::default(),
            stop: Arc::default(),
            is_idle: Arc::default(),
        }
    }

    fn handle_interrupts(&self) {
        let registered = register_conditional_shutdown(SIGINT, 130, Arc::clone(&self.is_idle))
            .and_then(|_| register(SIGINT, Arc::clone(&self.stop)));
        if let Err(error) = registered {
            tracing::warn!("Ctrl-C will quit at once: {error}");
        }
    }

    fn begin(&self) {
        self.stop.store(false, Ordering::SeqCst);
        *self.shown() = Shown::default();
    }

    /// Ends the line, and returns the answer.
    fn end(&self) -> io::Result<String> {
        let shown = std::mem::take(&mut *self.shown());
        if let Some(error) = shown.error {
            return Err(error);
        }
        let mut out = io::stdout().lock();
        writeln!(out)?;
        out.flush()?;
        Ok(shown.text)
    }

    fn shown(&self) -> std::sync::MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for Answer {
    fn drawn(&self, _: usize, tokens: &[u32]) {
        let Ok(text) = self.tokenizer.decode(tokens, true) else {
            return;
        };
        // The last character may have more bytes in the next token.
        let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let mut shown = self.shown();
        let Some(new) = text.strip_prefix(shown.text.as_str()) else {
            return;
        };
        let mut out = io::stdout().lock();
        match write!(out, "{new}").and_then(|()| out.flush()) {
            Ok(()) => shown.text = text.to_owned(),
            Err(error) => shown.error = Some(error),
        }
    }

    fn is_canceled(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.shown().error.is_some()
    }
}
