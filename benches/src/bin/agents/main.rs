//! Agents beside built-in tools: the same conversations, with 64 trajectories at once.
//!
//! Each round plays them with built-in tools, with agents that are threads in this process, and
//! with one Python process per trajectory. All sample the same tokens, which is checked. Then a
//! policy that needs no time shows the server's time per request.

mod client;

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use candle_grpo_agents::Agents;
use candle_grpo_bench::{median, small_model};
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::environment::{
    AgentConfig, CallContext, EnvironmentLimits, Environments, Tool, ToolEnvironments, ToolFormat,
};
use candle_grpo_train::model::Chat;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{
    Completion, CompletionSeed, Play, PromptRequest, Rollout, Trajectories,
};
use candle_grpo_train::{ChatTemplate, FinishReason, Pretrained, Prompt, Sampler, SamplingConfig};
use clap::Parser;
use mimalloc::MiMalloc;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use client::Client;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Number of trajectories at once.
const EPISODES: usize = 64;

/// Number of prompts; each has a group of trajectories.
const PROMPTS: usize = 8;

/// Number of requests in a measurement of the server's time.
const REQUESTS: usize = 2048;

/// Maximum number of turns.
const TURNS: usize = 4;

/// Chat template for the characters that the policy writes.
const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}\n{% endfor %}";

const STOP: u32 = 0;

/// Times agents beside built-in tools
#[derive(Debug, Parser)]
struct Args {
    /// Rounds, whose medians are reported
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Leave out the agents that are Python processes
    #[arg(long)]
    no_python: bool,
}

/// Names for the kinds of trajectories.
const NAMES: [&str; 3] = [
    "built-in tools",
    "agents as threads",
    "a Python process each",
];

/// Counts the characters in a text.
struct Count;

impl Tool for Count {
    fn name(&self) -> &str {
        "count"
    }

    fn description(&self) -> &str {
        "Counts characters."
    }

    fn parameters(&self) -> Value {
        json!({"type": "object", "properties": {"text": {"type": "string"}}})
    }

    fn call(&self, call: &CallContext<'_>) -> Result<String> {
        let text = call.arguments["text"].as_str().unwrap_or_default();
        Ok(text.chars().count().to_string())
    }
}

/// The policy, and everything that both ways share.
struct Task {
    model: DecoderConfig,
    parameters: Parameters,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    prompts: Vec<Prompt>,
}

impl Task {
    fn new() -> Result<Self> {
        let Pretrained {
            model,
            parameters,
            tokenizer,
            ..
        } = small_model()?;
        let template = ChatTemplate::new(TEMPLATE)?;
        let schemas = json!(Self::tools()?.schemas());
        let prompt = |index: usize| {
            let question = format!("{index}*34=");
            let messages = vec![json!({"role": "user", "content": question})];
            let chat = Chat::new(&messages).tools(&schemas).generation_prompt();
            let text = template.render(&chat)?;
            let columns = json!({"question": question, "tools": schemas});
            let prompt = Prompt::new(index as u64, &text, columns, &tokenizer)?;
            Ok(prompt
                .with_messages(messages)
                .with_tools(Some(schemas.clone())))
        };
        Ok(Self {
            prompts: (0..PROMPTS).map(prompt).collect::<Result<_>>()?,
            model,
            parameters,
            tokenizer,
            template,
        })
    }

    /// A notation that a policy with random weights writes by chance.
    fn format() -> ToolFormat {
        let [tool, argument, before, after] = ["count", "text", "*", "="].map(str::to_owned);
        ToolFormat::Marks {
            tool,
            argument,
            before,
            after,
        }
    }

    fn tools() -> Result<ToolEnvironments> {
        ToolEnvironments::new(Self::format())?.with(Count)
    }

    fn limits() -> EnvironmentLimits {
        EnvironmentLimits {
            max_turns: TURNS,
            max_turn_tokens: Some(32),
            ..EnvironmentLimits::default()
        }
    }

    fn sampling() -> SamplingConfig {
        SamplingConfig {
            max_new_tokens: 512,
            stop_token_ids: vec![STOP],
            ..SamplingConfig::default()
        }
    }

    fn built_in(&self) -> Result<Environments> {
        let template = Some(&self.template);
        Environments::new(
            Self::tools()?,
            Self::limits(),
            &self.tokenizer,
            template,
            &[STOP],
        )
    }

    /// Agents in this process, or Python processes.
    fn agents(&self, command: &[&str], max_concurrent: usize) -> Result<Agents> {
        let config = AgentConfig {
            command: command.iter().map(|&word| word.to_owned()).collect(),
            folder: Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin/agents")),
            format: Self::format(),
            reports_rewards: false,
            max_concurrent,
            ..AgentConfig::default()
        };
        let template = Some(&self.template);
        Agents::new(config, Self::limits(), &self.tokenizer, template, &[STOP])
    }

    /// Samples with the model. Returns the rollouts and the seconds.
    fn sample(&self, trajectories: Arc<dyn Trajectories>) -> Result<(Vec<Rollout>, f64)> {
        let sampler = Sampler::new(&self.model, &self.parameters, Self::sampling())?
            .with_tokenizer(&self.tokenizer)
            .with_environments(trajectories);
        let prompts: Vec<&Prompt> = self.prompts.iter().collect();
        let start = Instant::now();
        let rollouts = sampler.sample(&prompts, EPISODES / PROMPTS, 0)?;
        Ok((rollouts, start.elapsed().as_secs_f64()))
    }

    /// Plays trajectories with a policy that needs no time: each answer is one call. Returns the
    /// seconds and the number of answers.
    fn serve(&self, agents: &Agents, episodes: usize) -> Result<(f64, usize)> {
        let prompt = &self.prompts[0];
        let seeds = (0..episodes as u64).map(|sample| CompletionSeed {
            seed: 0,
            stream: 0,
            prompt: 0,
            sample,
            turn: 0,
        });
        let request = PromptRequest {
            tokens: &prompt.tokens,
            seeds: seeds.collect(),
            max_new_tokens: 512,
        };
        let call = self.tokenizer.encode("*12=", false);
        let call = call.map_err(|error| anyhow!(error))?.get_ids().to_vec();
        let answer = Completion {
            drawn_log_probs: vec![0.; call.len()],
            log_probs: None,
            written: None,
            weight_versions: vec![0; call.len()],
            tokens: call,
            finish_reason: FinishReason::Length,
            experts: None,
        };
        let draw = |requests: &[PromptRequest<'_>], _: &[String]| {
            Ok(requests.iter().map(|_| answer.clone()).collect())
        };
        let start = Instant::now();
        let rollouts = agents.play(&Play {
            prompts: &[prompt],
            requests: &[request],
            vocab_size: self.model.vocab_size,
            sampling: &Self::sampling(),
            draw: &draw,
            progress: &NoProgress,
        })?;
        Ok((start.elapsed().as_secs_f64(), answers(&rollouts)))
    }
}

/// Number of answers.
fn answers(rollouts: &[Rollout]) -> usize {
    let episodes = rollouts
        .iter()
        .filter_map(|rollout| rollout.episode.as_ref());
    episodes.map(|episode| episode.turns.len()).sum()
}

/// Runs `run` with agents, of which `count` are threads in this process.
fn with_clients<T>(agents: Agents, count: usize, run: impl FnOnce(&Arc<Agents>) -> T) -> T {
    let agents = Arc::new(agents);
    thread::scope(|scope| {
        for _ in 0..count {
            let (address, key) = (agents.address(), agents.key().to_owned());
            // It ends with the server.
            scope.spawn(move || Client::connect(address).and_then(|client| client.play(&key)));
        }
        let result = run(&agents);
        drop(agents);
        result
    })
}

fn main() -> Result<()> {
    let args = Args::parse();
    let task = Task::new()?;
    let built_in: Arc<dyn Trajectories> = Arc::new(task.built_in()?);
    let python: Option<Arc<dyn Trajectories>> = if args.no_python {
        None
    } else {
        Some(Arc::new(
            task.agents(&["python3", "-S", "agent.py"], EPISODES)?,
        ))
    };
    let (expected, _) = task.sample(Arc::clone(&built_in))?;
    let requests = answers(&expected);
    let check = |name: &str, rollouts: &[Rollout]| {
        let tokens = |rollouts: &[Rollout]| -> Vec<Completion> {
            rollouts.iter().map(|r| r.completion.clone()).collect()
        };
        let same = tokens(rollouts) == tokens(&expected);
        ensure!(same, "{name}: other tokens than with built-in tools");
        Ok(())
    };
    let mut all: [Vec<f64>; 3] = Default::default();
    with_clients(task.agents(&[], EPISODES)?, EPISODES, |threads| {
        for _ in 0..args.rounds {
            let threads: Arc<dyn Trajectories> = threads.clone();
            let kinds = [Some(&built_in), Some(&threads), python.as_ref()];
            for ((kind, name), seconds) in kinds.into_iter().zip(NAMES).zip(&mut all) {
                if let Some(trajectories) = kind {
                    let (rollouts, took) = task.sample(Arc::clone(trajectories))?;
                    check(name, &rollouts)?;
                    seconds.push(took);
                }
            }
        }
        anyhow::Ok(())
    })?;
    println!(
        "{EPISODES} trajectories at once, {requests} requests, {} rounds",
        args.rounds
    );
    println!("| | trajectories per second | beside built-in tools | more time per request |");
    println!("| --- | ---: | ---: | ---: |");
    let built_in = median(all[0].clone());
    for (name, seconds) in NAMES.into_iter().zip(&all) {
        if seconds.is_empty() {
            continue;
        }
        let pairs = seconds.iter().zip(&all[0]);
        let ratio = median(pairs.map(|(took, built_in)| built_in / took));
        let more = (median(seconds.clone()) - built_in) / requests as f64 * 1e3;
        let rate = EPISODES as f64 / median(seconds.clone());
        println!("| {name} | {rate:.0} | {ratio:.2} | {more:.2} ms |");
    }
    println!("| server alone | milliseconds per request |");
    println!("| --- | ---: |");
    for (name, episodes) in [("64 trajectories at once", EPISODES), ("one at a time", 1)] {
        let count = REQUESTS / TURNS;
        let agents = task.agents(&[], episodes)?;
        let (took, answers) = with_clients(agents, episodes, |agents| task.serve(agents, count))?;
        println!("| {name} | {:.2} |", took / answers as f64 * 1e3);
    }
    Ok(())
}
