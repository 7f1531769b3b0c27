//! A batch's episodes in play.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use candle_grpo_base::Interrupted;
use candle_grpo_base::clock::running_time;
use candle_grpo_train::environment::{Episode as Outcome, EpisodeEnd, EpisodeTurn};
use candle_grpo_train::rollout::{
    CompletionBuilder, CompletionSeed, Play, PromptRequest, Row, Trajectories,
};
use candle_grpo_train::{Completion, FinishReason, Prompt, Rollout};
use sha2::{Digest, Sha256};

use crate::agents::Agents;
use crate::episode::Episode;
use crate::message::{ASSISTANT, Call, Message};
use crate::process::Process;
use crate::request::{Answer, DrawnToken, End, Refusal, Request};
use crate::transcript::{Draft, Setting, Transcript, digest, first_64_bits};
use candle_grpo_base::server::random_id;

/// Interval between checks on processes and time limits.
const POLL: Duration = Duration::from_millis(20);

/// Time in which further requests join a batch, as long as they arrive.
const GATHER: Duration = Duration::from_millis(2);

/// Maximum number of waits for [`GATHER`].
const MOST_GATHERED: usize = 16;

/// Maximum number of starts for an agent that ends before its first request.
const MAX_STARTS: usize = 2;

/// Time limit for an agent to end after it has reported that it is done.
const END_GRACE: Duration = Duration::from_secs(5);

/// A batch's episodes.
pub(crate) struct Game<'a> {
    agents: &'a Agents,
    play: Play<'a>,
    /// Episodes that have not begun, in reverse order, with their positions.
    left: Vec<(usize, &'a Prompt, CompletionSeed)>,
    running: Vec<Running<'a>>,
    ended: Vec<Option<Rollout>>,
}

/// An episode in play. It closes when dropped.
struct Running<'a> {
    place: usize,
    prompt: &'a Prompt,
    seed: CompletionSeed,
    agents: &'a Agents,
    episode: Arc<Episode>,
    process: Option<Process>,
    starts: usize,
    began: Duration,
    /// Time at which the agent reported that it is done.
    done: Option<Duration>,
    transcript: Transcript,
    /// Number of answers, including those being sampled.
    answers: usize,
    /// Limit for which a request was refused.
    limit: Option<EpisodeEnd>,
}

/// A request to sample.
struct Turn {
    /// Episode's index among the running ones.
    episode: usize,
    place: usize,
    request: Arc<Request>,
    draft: Draft,
    max_new_tokens: usize,
}

impl<'a> Game<'a> {
    pub(crate) fn new(agents: &'a Agents, play: &Play<'a>) -> Self {
        let seeds = play.prompts.iter().zip(play.requests);
        let all = seeds.flat_map(|(&prompt, request)| {
            let seeds = request.seeds.iter();
            seeds.map(move |seed| (prompt, *seed))
        });
        let all = all.enumerate();
        let mut left: Vec<_> = all.map(|(at, (prompt, seed))| (at, prompt, seed)).collect();
        left.reverse();
        Self {
            agents,
            play: *play,
            ended: left.iter().map(|_| None).collect(),
            left,
            running: Vec::new(),
        }
    }

    /// Plays all episodes.
    pub(crate) fn play(mut self) -> Result<Vec<Rollout>> {
        loop {
            if self.play.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            self.start()?;
            self.restart_workers()?;
            self.end()?;
            if self.running.is_empty() && self.left.is_empty() {
                return Ok(self.ended.into_iter().flatten().collect());
            }
            let turns = self.turns();
            if !turns.is_empty() {
                self.draw(turns)?;
                continue;
            }
            if self.agents.bell.wait(POLL) {
                let more = || self.agents.bell.wait(GATHER);
                (0..MOST_GATHERED).take_while(|_| more()).for_each(drop);
            }
        }
    }

    /// Starts episodes up to the limit.
    fn start(&mut self) -> Result<()> {
        while self.running.len() < self.agents.config.max_concurrent
            && let Some((place, prompt, seed)) = self.left.pop()
        {
            self.running
                .push(Running::start(self.agents, place, prompt, seed)?);
        }
        Ok(())
    }

    /// Restarts workers that have ended, and fails their episodes.
    fn restart_workers(&self) -> Result<()> {
        let Some(workers) = &self.agents.workers else {
            return Ok(());
        };
        let episodes = || self.running.iter().map(|running| &running.episode);
        let mut workers = workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.restart(
            |number| episodes().any(|episode| episode.is_with(number)),
            |number, message| {
                let lost = episodes().filter(|episode| episode.is_with(number));
                lost.for_each(|episode| episode.fail(message.to_owned()));
            },
        )
    }

    /// Removes the episodes that have ended.
    fn end(&mut self) -> Result<()> {
        let mut at = 0;
        while at < self.running.len() {
            match self.running[at].check()? {
                None => at += 1,
                Some(end) => {
                    let ended = self.running.swap_remove(at);
                    let place = ended.place;
                    self.ended[place] = Some(ended.into_rollout(end));
                    self.play.progress.advance(1, 0);
                }
            }
        }
        Ok(())
    }

    /// Returns a turn for each waiting request. Refuses those that cannot be sampled.
    fn turns(&mut self) -> Vec<Turn> {
        let mut turns = Vec::new();
        for (number, running) in self.running.iter_mut().enumerate() {
            for (place, request) in running.episode.take_waiting() {
                self.agents.warn_of_settings(&request, self.play.sampling);
                match running.draft(&request, &self.play) {
                    Ok((draft, max_new_tokens)) => turns.push(Turn {
                        episode: number,
                        place,
                        request,
                        draft,
                        max_new_tokens,
                    }),
                    Err(refusal) => running.episode.answer(place, Err(refusal)),
                }
            }
        }
        turns
    }

    /// Samples turns, those with equal stop strings in one batch, and answers them.
    fn draw(&mut self, turns: Vec<Turn>) -> Result<()> {
        let mut batches: BTreeMap<Vec<String>, Vec<Turn>> = BTreeMap::new();
        for turn in turns {
            let batch = batches.entry(turn.request.stop.clone()).or_default();
            batch.push(turn);
        }
        for (stop, turns) in batches {
            let request = |turn: &'_ Turn| CompletionSeed {
                turn: turn.draft.turn,
                ..self.running[turn.episode].seed
            };
            let seeds: Vec<CompletionSeed> = turns.iter().map(request).collect();
            let requests = turns.iter().zip(seeds).map(|(turn, seed)| PromptRequest {
                tokens: &turn.draft.tokens,
                seeds: vec![seed],
                max_new_tokens: turn.max_new_tokens,
            });
            let requests: Vec<PromptRequest<'_>> = requests.collect();
            let completions = (self.play.draw)(&requests, &stop)?;
            drop(requests);
            for (turn, completion) in turns.into_iter().zip(completions) {
                let running = &mut self.running[turn.episode];
                let answer = running.record(turn.draft, &turn.request, &completion)?;
                running.episode.answer(turn.place, Ok(Arc::new(answer)));
            }
        }
        Ok(())
    }
}

impl<'a> Running<'a> {
    fn start(
        agents: &'a Agents,
        place: usize,
        prompt: &'a Prompt,
        seed: CompletionSeed,
    ) -> Result<Self> {
        let config = &agents.config;
        let episode = Arc::new(Episode::new(
            random_id(),
            prompt.columns.clone(),
            config,
            Arc::clone(&agents.bell),
        ));
        let is_offered = config.command.is_empty() || agents.workers.is_some();
        agents.endpoint.episodes().open(&episode, is_offered);
        let mut running = Self {
            place,
            prompt,
            seed,
            agents,
            episode,
            process: None,
            starts: 0,
            began: running_time(),
            done: None,
            transcript: Transcript::default(),
            answers: 0,
            limit: None,
        };
        if !is_offered {
            running.start_process()?;
        }
        Ok(running)
    }

    /// Starts the agent's process.
    fn start_process(&mut self) -> Result<()> {
        let agents = self.agents;
        let url = agents.endpoint.episodes().url(&self.episode);
        let key = self.episode.key.text();
        let variables = [
            ("OPENAI_BASE_URL", format!("{url}/v1")),
            ("OPENAI_API_KEY", key.to_owned()),
            ("ANTHROPIC_BASE_URL", url.clone()),
            ("ANTHROPIC_API_KEY", key.to_owned()),
            ("GRPO_EPISODE_URL", url),
        ];
        let line = format!("{}\n", self.episode.row);
        let program = agents.config.program();
        let entrances = agents.endpoint.entrances();
        let process = Process::start(program, entrances, line.into_bytes(), &variables)?;
        self.process = Some(process);
        self.starts += 1;
        self.episode.begin(0);
        Ok(())
    }

    /// Returns the reason for the episode's end, if it has ended.
    fn check(&mut self) -> Result<Option<EpisodeEnd>> {
        let (report, failure) = self.episode.so_far();
        if let Some(failure) = failure {
            return Ok(Some(EpisodeEnd::Failed(self.with_output(failure))));
        }
        let status = match &mut self.process {
            Some(process) => process.status()?,
            None => None,
        };
        if report.is_done {
            let done = *self.done.get_or_insert_with(running_time);
            let has_time = running_time().saturating_sub(done) < END_GRACE;
            let runs = self.process.is_some() && status.is_none();
            return Ok((!runs || !has_time).then(|| self.ended()));
        }
        if let Some(status) = status {
            if status.success() {
                return Ok(Some(self.ended()));
            }
            if let Some(limit) = self.limit.clone() {
                return Ok(Some(limit));
            }
            // No sampled text can be the cause.
            if self.episode.received() == 0 && self.starts < MAX_STARTS {
                self.start_process()?;
                return Ok(None);
            }
            let message = format!("the agent ended ({status})");
            return Ok(Some(EpisodeEnd::Failed(self.with_output(message))));
        }
        let seconds = self.agents.config.time_limit_seconds;
        let idle = self.episode.idle().unwrap_or_default();
        if idle.as_secs_f64() < seconds {
            return Ok(None);
        }
        let message = format!("the agent sent no request within {seconds} seconds");
        Ok(Some(EpisodeEnd::Failed(self.with_output(message))))
    }

    /// End reason for an agent that has ended by itself.
    fn ended(&self) -> EpisodeEnd {
        self.limit.clone().unwrap_or(EpisodeEnd::Done)
    }

    /// Appends the tail of the process's output to a message.
    fn with_output(&mut self, message: String) -> String {
        match self.process.take().map(Process::end) {
            None => message,
            Some(output) if output.is_empty() => format!("{message}; it wrote nothing to stderr"),
            Some(output) => format!("{message}; its stderr ends with:\n{output}"),
        }
    }

    /// Drafts a request's turn, and returns the maximum length of its answer.
    fn draft(&mut self, request: &Request, play: &Play<'_>) -> Result<(Draft, usize), Refusal> {
        let limits = &self.agents.limits;
        if self.answers >= limits.max_turns {
            self.limit = Some(EpisodeEnd::MaxTurns);
            let message = format!("the episode has had {} answers, max_turns", self.answers);
            return Err(Refusal::new(400, "limit_reached", message));
        }
        let seconds = (running_time() - self.began).as_secs_f64();
        if limits.max_seconds.is_some_and(|limit| seconds >= limit) {
            self.limit = Some(EpisodeEnd::MaxSeconds);
            let message = "the episode has taken max_seconds";
            return Err(Refusal::new(400, "limit_reached", message));
        }
        let setting = Setting {
            conversation: &self.agents.conversation,
            variables: &self.prompt.variables,
            prompt: &self.prompt.tokens,
        };
        let draft = self.transcript.draft(request, setting)?;
        match self.room(&draft, request, play) {
            Ok(room) => {
                self.answers += 1;
                // The agent has recovered from the limit.
                self.limit = None;
                Ok((draft, room))
            }
            Err(refusal) => {
                self.transcript.abandon(draft);
                Err(refusal)
            }
        }
    }

    /// Maximum length of the answer to a draft.
    fn room(
        &mut self,
        draft: &Draft,
        request: &Request,
        play: &Play<'_>,
    ) -> Result<usize, Refusal> {
        let unknown = draft.tokens.iter();
        let unknown = unknown.copied().find(|&id| id as usize >= play.vocab_size);
        if let Some(id) = unknown {
            let must = format!("be below {}, the number of tokens", play.vocab_size);
            return Err(Refusal::invalid("prompt", format!("token {id}"), &must));
        }
        if draft.tokens.is_empty() {
            let must = "have at least one token";
            return Err(Refusal::invalid("prompt", "empty", must));
        }
        let length = draft.tokens.len();
        let longest = self.agents.config.max_prompt_tokens.unwrap_or(usize::MAX);
        let most = play.sampling.max_new_tokens;
        let left = most.saturating_sub(self.transcript.response_len(draft));
        if length > longest || left == 0 {
            self.limit = Some(EpisodeEnd::MaxTokens);
            let message = match left {
                0 => format!("the row has had {most} response tokens, max_new_tokens"),
                _ => format!("the prompt has {length} tokens, more than {longest}"),
            };
            return Err(Refusal::new(400, "context_length_exceeded", message));
        }
        let longest = self.agents.limits.max_turn_tokens.unwrap_or(usize::MAX);
        let asked = request.max_tokens.unwrap_or(usize::MAX);
        Ok(left.min(longest).min(asked))
    }

    /// Records the sampled completion, and returns the answer for the agent.
    fn record(&mut self, draft: Draft, request: &Request, drawn: &Completion) -> Result<Answer> {
        let conversation = &self.agents.conversation;
        let prompt_tokens = draft.tokens.len();
        let id = answer_id(&draft);
        let mut text = conversation.text(&drawn.tokens)?;
        let mut end = match drawn.finish_reason {
            FinishReason::StopToken | FinishReason::StopString => End::Stop,
            FinishReason::Length => End::Length,
        };
        if drawn.finish_reason == FinishReason::StopString {
            let found = request.stop.iter();
            let found = found.filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
            if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
                text.truncate(at);
                end = End::StopString(stop.clone());
            }
        }
        let mut message = Message::new(ASSISTANT, text);
        if request.parses_calls {
            self.take_calls(&mut message, &id);
        }
        if !message.calls.is_empty() && end == End::Stop {
            end = End::Calls;
        }
        let tokens = if request.log_probs {
            self.drawn_tokens(drawn)?
        } else {
            Vec::new()
        };
        self.transcript
            .record(draft, drawn, message.clone(), &id, conversation)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Answer {
            id,
            created: now.unwrap_or_default().as_secs(),
            message,
            end,
            prompt_tokens,
            drawn: drawn.tokens.len(),
            tokens,
        })
    }

    /// Moves the tool calls out of a text, if all are valid.
    fn take_calls(&self, message: &mut Message, id: &str) {
        let format = &self.agents.config.format;
        let calls: Result<Vec<_>, _> = format.calls(&message.content).into_iter().collect();
        let calls = calls.unwrap_or_default();
        if calls.is_empty() {
            return;
        }
        let calls = calls.into_iter().enumerate();
        message.calls = calls
            .map(|(at, call)| Call {
                id: call_id(id, at),
                name: call.name,
                arguments: call.arguments,
            })
            .collect();
        message.content = format.text_before_calls(&message.content).to_owned();
    }

    fn drawn_tokens(&self, drawn: &Completion) -> Result<Vec<DrawnToken>> {
        let log_probs = drawn.log_probs.as_ref().unwrap_or(&drawn.drawn_log_probs);
        let tokens = drawn.tokens.iter().zip(log_probs);
        tokens
            .map(|(&token, &log_prob)| {
                Ok(DrawnToken {
                    text: self.agents.conversation.decode(&[token])?,
                    log_prob,
                })
            })
            .collect()
    }

    fn into_rollout(mut self, mut end: EpisodeEnd) -> Rollout {
        let report = self.episode.close();
        self.process = None;
        let of_roles = &report.role_rewards;
        let reward = report.reward.unwrap_or_else(|| {
            let mean = of_roles.values().sum::<f64>() / of_roles.len() as f64;
            (!of_roles.is_empty()).then_some(mean)
        });
        let is_reported = report.reward.is_some() || reward.is_some();
        let unrewarded = self.agents.config.reports_rewards && !is_reported;
        let transcript = std::mem::take(&mut self.transcript);
        if transcript.answers() == 0 && !matches!(end, EpisodeEnd::Failed(_)) {
            end = EpisodeEnd::Failed(format!("the agent ended without an answer ({end:?})"));
        } else if unrewarded && end == EpisodeEnd::Done {
            end = EpisodeEnd::Failed("the agent ended without a reward".to_owned());
        }
        if let EpisodeEnd::Failed(message) = &end {
            tracing::warn!(
                "agent of prompt {}, trajectory {}: {message}",
                self.seed.prompt,
                self.seed.sample
            );
        }
        let mut metrics = report.metrics;
        let count = |count: usize| count as f64;
        metrics.insert("answers".to_owned(), count(transcript.answers()));
        metrics.insert("requests".to_owned(), count(self.episode.received()));
        let mut rows = transcript.into_rows();
        metrics.insert("rows".to_owned(), count(rows.len()));
        let (main, ranges, role) = match rows.pop() {
            Some(row) => (row.tokens.into_parts(), row.turns, row.role),
            None => {
                let row = CompletionBuilder::without_turns(self.prompt.tokens.clone());
                (row.into_parts(), std::iter::once(0..1).collect(), None)
            }
        };
        let mut turns: Vec<EpisodeTurn> = ranges
            .into_iter()
            .map(|tokens| EpisodeTurn {
                state: state(&main, tokens.start),
                tokens,
                reward: 0.,
            })
            .collect();
        if let Some(last) = turns.last_mut() {
            last.reward = reward.unwrap_or(0.);
        }
        let episode = Outcome {
            turns,
            end,
            gives_rewards: self.agents.gives_rewards(),
            excluded: report.reward == Some(None),
            unrewarded,
            metrics,
            feedback: report.feedback,
            role_rewards: report.role_rewards,
        };
        let (prompt_tokens, completion) = main;
        let branches = rows.into_iter().map(|row| {
            let (prompt_tokens, completion) = row.tokens.into_parts();
            Row {
                prompt_tokens,
                completion,
                role: row.role,
            }
        });
        Rollout {
            prompt_index: self.prompt.index,
            sample_index: self.seed.sample as usize,
            prompt_tokens,
            completion,
            role,
            episode: Some(self.agents.limits.settle(episode)),
            branches: branches.collect(),
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.episode.close();
        self.agents.endpoint.episodes().remove(&self.episode.id);
    }
}

/// First 64 bits in the digest over the tokens before a turn.
fn state((prompt, completion): &(Vec<u32>, Completion), start: usize) -> u64 {
    let tokens = prompt.iter().chain(&completion.tokens[..start]);
    first_64_bits(&digest(tokens))
}

/// Id for a draft's answer, which derives from the tokens and their count.
fn answer_id(draft: &Draft) -> String {
    let digest = Sha256::new()
        .chain_update(draft.digest)
        .chain_update(draft.turn.to_le_bytes())
        .finalize();
    let bytes = digest.iter().take(12);
    bytes.map(|byte| format!("{byte:02x}")).collect()
}

/// Call id: nine letters and digits, which all chat templates accept.
fn call_id(answer: &str, at: usize) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let digest = Sha256::digest(format!("{answer}/{at}"));
    let mut number = first_64_bits(&digest);
    let mut id = String::with_capacity(9);
    for _ in 0..9 {
        id.push(char::from(DIGITS[(number % 36) as usize]));
        number /= 36;
    }
    id
}
