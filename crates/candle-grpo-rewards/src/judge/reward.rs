//! The judge reward.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::answer::{Answer, Failure, MAX_ANSWER, parse};
use super::cache::{ReplyCache, key};
use super::config::{BudgetExhausted, COMPLETION, JudgeConfig, OnBudget, PROMPT};
use super::limits::{Admission, RequestLimits};
use super::score::ScoreReader;
use crate::program::quoted;
use crate::{Interrupted, Progress, RewardFunction, Sample};
use crate::{RewardRequests, Score, ScoreFailure, Scores};
use candle_grpo_base::Template;
use candle_grpo_base::progress::NoProgress;
use candle_grpo_base::workers::Workers;
use candle_grpo_hub::http::{
    JsonClient, Limits, MAX_PAUSE, RequestFailure, api_key, backoff, pause,
};

/// A score from a language model, behind any server that supports OpenAI's chat completions API.
///
/// Use a judge if no program can check the answer. Set [`JudgeConfig::cache`], so that a resumed
/// run does not pay twice, and [`JudgeConfig::max_requests`], so that it cannot exceed your budget.
///
/// The model receives [`JudgeConfig::prompt`], and [`JudgeConfig::score`] reads the score in its
/// reply. A failed request is retried. If a completion still has no answer, or the reply has no
/// score, [`JudgeConfig::on_failure`] applies. Equal requests in a batch are sent once.
///
/// A batch needs at most `ceil(samples / max_inflight) * (max_retries + 1) * (request_timeout +
/// 60)` seconds, or less if the progress cancels it. Requests to `https://` servers use the proxy
/// in the environment.
///
/// ```no_run
/// use candle_grpo_rewards::{JudgeConfig, JudgeReward};
///
/// let config: JudgeConfig = serde_json::from_str(
///     r#"{"url": "http://localhost:8000/v1", "model": "judge",
///         "prompt": "Rate from 1 to 5, as in \"Score: 3\":\n{completion}",
///         "score": {"regex": "Score: (\\d)", "scale": [1, 5]}}"#,
/// )?;
/// let reward = JudgeReward::new(config)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct JudgeReward {
    judge: Arc<Judge>,
    prompt: Template,
    reader: ScoreReader,
    progress: Arc<dyn Progress>,
    health: Mutex<Health>,
}

/// The part that a judge's threads share.
struct Judge {
    config: JudgeConfig,
    /// URL for requests.
    url: String,
    client: JsonClient,
    cache: Option<ReplyCache>,
    limits: RequestLimits,
    has_warned: AtomicBool,
}

/// Failures so far.
#[derive(Default)]
struct Health {
    /// Since the last score.
    in_a_row: usize,
    has_scored: bool,
}

/// A request, and the samples that it scores.
struct Job {
    number: usize,
    key: String,
    body: String,
}

/// Result of a [`Job`].
struct Done {
    number: usize,
    outcome: Outcome,
    requests: RewardRequests,
}

enum Outcome {
    Reply(String),
    Failed(ScoreFailure, String),
    OverBudget,
}

impl JudgeReward {
    /// Creates a judge. Sends no request.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, or if the key's environment variable is not set.
    pub fn new(config: JudgeConfig) -> Result<Self> {
        config.validate()?;
        config.check_files()?;
        let api_key = config.api_key_env.as_deref().map(api_key).transpose()?;
        let url = format!("{}/chat/completions", config.url.trim_end_matches('/'));
        Ok(Self {
            prompt: config.template()?,
            reader: config.reader()?,
            progress: Arc::new(NoProgress),
            health: Mutex::default(),
            judge: Arc::new(Judge {
                // Unencrypted servers are in the same network.
                client: JsonClient::new(api_key, url.starts_with("https://")),
                cache: config.cache.as_deref().map(ReplyCache::new),
                limits: RequestLimits::new(
                    config.max_inflight,
                    config.max_requests,
                    config.max_tokens_total,
                ),
                has_warned: AtomicBool::new(false),
                url,
                config,
            }),
        })
    }

    /// Returns the request body for `sample`.
    fn body(&self, sample: &Sample) -> Result<String> {
        let prompt = prompt_of(sample);
        let texts = [(PROMPT, prompt.as_str()), (COMPLETION, sample.completion)];
        let prompt = self.prompt.fill_with(&texts, sample.columns);
        let config = &self.judge.config;
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let system = config.system.iter().map(|text| message("system", text));
        let user = message("user", &prompt.context("prompt")?);
        let messages: Vec<Value> = system.chain([user]).collect();
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(config.model));
        body.insert("messages".to_owned(), json!(messages));
        if let Some(tokens) = config.max_tokens {
            body.insert("max_tokens".to_owned(), json!(tokens));
        }
        if let Some(temperature) = config.temperature {
            body.insert("temperature".to_owned(), json!(temperature));
        }
        body.insert("stream".to_owned(), json!(false));
        body.extend(config.extra_body.clone());
        Ok(Value::Object(body).to_string())
    }

    /// Returns the requests for `samples`, and each sample's request number.
    fn jobs(&self, samples: &[Sample]) -> Result<(Vec<Job>, Vec<usize>)> {
        let mut jobs = Vec::new();
        let mut numbers = HashMap::new();
        let mut of_samples = Vec::with_capacity(samples.len());
        for sample in samples {
            let body = self.body(sample)?;
            let key = key(&self.judge.url, &body);
            let number = *numbers.entry(key.clone()).or_insert(jobs.len());
            if number == jobs.len() {
                jobs.push(Job { number, key, body });
            }
            of_samples.push(number);
        }
        Ok((jobs, of_samples))
    }

    fn ask(&self, samples: &[Sample]) -> Result<Scores> {
        let (jobs, of_samples) = self.jobs(samples)?;
        let mut scores = vec![Score::NONE; jobs.len()];
        let mut replies = vec![None; jobs.len()];
        let mut requests = RewardRequests::default();
        let judge = Arc::clone(&self.judge);
        let work = move |job: Job, stop: &AtomicBool| judge.complete(&job, stop);
        let mut left = jobs.len();
        let workers = Workers::start("judge", self.judge.config.max_inflight, jobs, work)?;
        let mut last_error = None;
        while left > 0 {
            if self.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            let Some(done) = workers.next()? else {
                continue;
            };
            left -= 1;
            requests += done.requests;
            if let Outcome::Reply(reply) = &done.outcome {
                replies[done.number] = Some(reply.clone());
            }
            scores[done.number] = self.score_of(done.outcome, &mut last_error)?;
        }
        if let Some(error) = last_error
            && !self.health().has_scored
        {
            bail!("failed with every completion so far, the last: {error}");
        }
        let feedback = of_samples.iter().map(|&number| replies[number].clone());
        let scores = of_samples.iter().map(|&number| scores[number]);
        let scores = Scores::new(scores.collect(), samples)?;
        let scores = scores.with_feedback(feedback.collect())?;
        Ok(scores.with_requests(requests))
    }

    fn score_of(&self, outcome: Outcome, last_error: &mut Option<String>) -> Result<Score> {
        let mut health = self.health();
        let (failure, error) = match outcome {
            Outcome::OverBudget => return Ok(Score::NONE),
            Outcome::Failed(failure, error) => (failure, error),
            Outcome::Reply(reply) => match self.reader.read(&reply) {
                Some(score) => {
                    *health = Health {
                        in_a_row: 0,
                        has_scored: true,
                    };
                    return Ok(score.into());
                }
                None => {
                    let error = format!("{}: a reply without a score", quoted(&reply));
                    (ScoreFailure::Unscorable, error)
                }
            },
        };
        let config = &self.judge.config;
        health.in_a_row += 1;
        ensure!(
            health.in_a_row <= config.max_failures,
            "{} completions in a row failed, the last: {error}",
            health.in_a_row
        );
        tracing::debug!("judge: {error}");
        *last_error = Some(error);
        Ok(config.on_failure.score(config.failure_score, failure))
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        // No code panics while it holds the lock.
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RewardFunction for JudgeReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(self.scores(samples)?.iter_scores().collect())
    }

    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        let scores = self.ask(samples);
        scores.with_context(|| format!("judge {}", self.judge.url))
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.progress = progress;
    }
}

impl Judge {
    /// Returns the reply to a request, from the cache or the server, or `None` if the caller stops.
    fn complete(&self, job: &Job, stop: &AtomicBool) -> Result<Option<Done>> {
        let mut requests = RewardRequests::default();
        let cached = self.cache.as_ref().and_then(|cache| cache.read(&job.key));
        let outcome = match cached {
            Some(reply) => {
                requests.cache_hits = 1;
                Some(Outcome::Reply(reply))
            }
            None => self.request(job, stop, &mut requests)?,
        };
        Ok(outcome.map(|outcome| Done {
            number: job.number,
            outcome,
            requests,
        }))
    }

    fn request(
        &self,
        job: &Job,
        stop: &AtomicBool,
        requests: &mut RewardRequests,
    ) -> Result<Option<Outcome>> {
        let mut tries = 0;
        loop {
            let permit = match self.limits.acquire(stop) {
                Admission::Granted(permit) => permit,
                Admission::Stopped => return Ok(None),
                Admission::Exhausted => return self.over_budget().map(Some),
            };
            let begun = Instant::now();
            let answer = self.send(&job.body);
            let mut sent = RewardRequests {
                requests: 1,
                failures: usize::from(answer.is_err()),
                mean_latency: begun.elapsed().as_secs_f64(),
                ..RewardRequests::default()
            };
            let failure = match answer {
                Ok(Answer { reply, tokens }) => {
                    let tokens = self.counted(tokens)?;
                    permit.count_tokens(tokens);
                    drop(permit);
                    sent.tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
                    *requests += sent;
                    let reply = self.client.redact(&reply);
                    if let Some(cache) = &self.cache {
                        cache.write(&job.key, &reply);
                    }
                    return Ok(Some(Outcome::Reply(reply)));
                }
                Err(failure) => failure,
            };
            drop(permit);
            *requests += sent;
            tries += 1;
            if let Failure::Request(RequestFailure::Status {
                status: 401 | 404, ..
            }) = failure
            {
                bail!("{failure}");
            }
            if tries > self.config.max_retries || !failure.is_transient() {
                let error = format!("failed {tries} times: {failure}");
                return Ok(Some(Outcome::Failed(failure.of_score(), error)));
            }
            let duration = self.pause_after(&failure, tries);
            if !pause(duration, || stop.load(Ordering::Acquire)) {
                return Ok(None);
            }
        }
    }

    fn send(&self, body: &str) -> Result<Answer, Failure> {
        let limits = Limits {
            time: Duration::from_secs_f64(self.config.request_timeout),
            bytes: MAX_ANSWER,
        };
        let answer = self.client.send(&self.url, Some(body.to_owned()), limits);
        parse(&answer.map_err(Failure::Request)?)
    }

    /// Returns the pause after a request's failure number `tries`.
    fn pause_after(&self, failure: &Failure, tries: usize) -> Duration {
        let asked = match failure {
            Failure::Request(RequestFailure::Status { retry_after, .. }) => *retry_after,
            _ => None,
        };
        let first = Duration::from_secs_f64(self.config.retry_pause);
        asked
            .unwrap_or_else(|| backoff(first, tries, MAX_PAUSE))
            .min(MAX_PAUSE)
    }

    /// Returns an answer's tokens, which a token budget needs.
    fn counted(&self, tokens: Option<u64>) -> Result<u64> {
        ensure!(
            tokens.is_some() || self.config.max_tokens_total.is_none(),
            "max_tokens_total: given, must be absent for a server that reports no usage"
        );
        Ok(tokens.unwrap_or(0))
    }

    fn over_budget(&self) -> Result<Outcome> {
        if self.config.on_budget == OnBudget::Stop {
            return Err(BudgetExhausted.into());
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("judge {}: {BudgetExhausted}", self.url);
        }
        Ok(Outcome::OverBudget)
    }
}

/// Returns the prompt as text. A conversation becomes its messages' contents, with roles if there
/// are several.
fn prompt_of(sample: &Sample) -> String {
    let content = |message: &Value| match &message["content"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match sample.messages {
        [] => sample.prompt.to_owned(),
        [message] => content(message),
        messages => {
            let with_role = |message: &Value| {
                let role = message["role"].as_str().unwrap_or_default();
                format!("{role}: {}", content(message))
            };
            let messages: Vec<String> = messages.iter().map(with_role).collect();
            messages.join("\n\n")
        }
    }
}
