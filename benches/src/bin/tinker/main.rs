//! A training loop through Tinker's API beside the same loop without a server, and the requests of
//! 16 sessions: as fast as they come, and those of 16 models together beside one after the other.
//!
//! A step samples groups, scores them, and makes one policy-gradient update of LoRA adapters. Both
//! loops alternate and sample the same tokens, which is checked.

mod direct;
mod remote;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::Device;
use candle_grpo_bench::{median, small_model};
use candle_grpo_tinker::{TinkerConfig, TinkerServer};
use candle_grpo_train::Pretrained;
use candle_grpo_train::learn::TargetRow;
use clap::Parser;
use mimalloc::MiMalloc;
use serde_json::Value;

use direct::Direct;
use remote::{Client, MODEL};

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Number of prompts in a step.
const PROMPTS: usize = 8;

/// Number of samples for each prompt.
const GROUP: usize = 8;

/// Number of tokens in a sample.
const TOKENS: usize = 32;

/// Rank of the adapters.
const RANK: usize = 8;

/// Seed of the adapters.
const SEED: u64 = 1;

/// Learning rate.
const LEARNING_RATE: f64 = 1e-3;

/// Number of tokens in a training pass.
const MICRO_BATCH_TOKENS: usize = 4096;

/// Number of sessions that send requests at the same time.
const SESSIONS: usize = 16;

/// Number of requests of each session in a measurement.
const REQUESTS: u64 = 64;

/// Times a loop through Tinker's API beside the same loop without a server
#[derive(Debug, Parser)]
struct Args {
    /// Steps of each loop, whose medians are reported
    #[arg(long, default_value_t = 15)]
    steps: u64,
    /// Train this model instead of one with 0.3 million parameters: a Hugging Face directory
    #[arg(long)]
    model: Option<PathBuf>,
}

/// A sample: its tokens and their log-probs.
#[derive(Debug, Clone, Default, PartialEq)]
struct Drawn {
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
}

/// The prompts of a step.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |at: u32| vec![1, 2 + at, 3, 2 + at, 4, 5, 6, 7];
    (0..PROMPTS as u32).map(prompt).collect()
}

/// Seed of a prompt's samples.
fn seed(step: u64, prompt: usize) -> u64 {
    step * PROMPTS as u64 + prompt as u64
}

/// The share of even tokens.
fn reward(tokens: &[u32]) -> f32 {
    let even = tokens.iter().filter(|&&token| token % 2 == 0).count();
    even as f32 / tokens.len() as f32
}

/// Returns a prompt's samples as rows. The advantage is the reward less the mean of the group.
fn rows(prompt: &[u32], group: &[Drawn]) -> Vec<TargetRow> {
    let rewards: Vec<f32> = group.iter().map(|drawn| reward(&drawn.tokens)).collect();
    let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
    let rows = group.iter().zip(rewards).map(|(drawn, reward)| {
        let tokens = [prompt, &drawn.tokens].concat();
        let ahead = vec![0.; prompt.len() - 1];
        let advantages = vec![reward - mean; drawn.tokens.len()];
        TargetRow {
            targets: tokens[1..].to_vec(),
            tokens: tokens[..tokens.len() - 1].to_vec(),
            advantages: [&ahead[..], &advantages].concat(),
            rollout_log_probs: Some([&ahead[..], &drawn.log_probs].concat()),
        }
    });
    rows.collect()
}

fn timed<T>(run: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    let result = run()?;
    Ok((result, start.elapsed().as_secs_f64()))
}

/// Alternates the steps of both loops. Returns the seconds of each.
fn loops(pretrained: &Pretrained, address: SocketAddr, steps: u64) -> Result<[Vec<f64>; 2]> {
    let mut direct = Direct::new(pretrained)?;
    let mut client = Client::new(address)?;
    let mut all: [Vec<f64>; 2] = Default::default();
    for step in 0..=steps {
        let (expected, alone) = timed(|| direct.step(step))?;
        let (found, through) = timed(|| client.step(step))?;
        ensure!(
            found == expected,
            "step {step}: other samples than without a server"
        );
        // The first step fills caches.
        if step > 0 {
            all[0].push(alone);
            all[1].push(through);
        }
    }
    Ok(all)
}

/// Sends requests of all sessions, each after the result before it. Returns requests per second.
fn requests(
    clients: &mut [Client],
    send: impl Fn(&mut Client, u64) -> Result<()> + Sync,
) -> Result<f64> {
    let count = clients.len() as u64 * REQUESTS;
    let (_, seconds) = timed(|| {
        thread::scope(|scope| {
            let threads: Vec<_> = clients
                .iter_mut()
                .map(|client| scope.spawn(|| (0..REQUESTS).try_for_each(|at| send(client, at))))
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| match thread.join() {
                    Ok(sent) => sent,
                    Err(_) => anyhow::bail!("a session has panicked"),
                })
        })
    })?;
    Ok(count as f64 / seconds)
}

/// Prints a row of the table of requests that share passes.
fn report(name: &str, [apart, joined]: [f64; 2]) {
    let relative = joined / apart;
    println!(
        "| {name} | {:.1} | {:.1} | {relative:.2} |",
        1e3 * apart,
        1e3 * joined
    );
}

/// Sends one request of each session, and waits for the results: first one after the other, then
/// all together, which share passes. Returns the medians of both in seconds.
fn together(
    clients: &mut [Client],
    rounds: u64,
    send: impl Fn(&mut Client, u64) -> Result<Value>,
) -> Result<[f64; 2]> {
    let mut all: [Vec<f64>; 2] = Default::default();
    for round in 0..=rounds {
        let (_, apart) = timed(|| {
            clients.iter_mut().try_for_each(|client| {
                let promise = send(client, 2 * round)?;
                client.result(&promise).map(|_| ())
            })
        })?;
        let (_, joined) = timed(|| {
            let promises = clients.iter_mut();
            let promises = promises.map(|client| send(client, 2 * round + 1));
            let promises: Vec<Value> = promises.collect::<Result<_>>()?;
            let mut waiting = clients.iter_mut().zip(&promises);
            waiting.try_for_each(|(client, promise)| client.result(promise).map(|_| ()))
        })?;
        // The first round loads the models.
        if round > 0 {
            all[0].push(apart);
            all[1].push(joined);
        }
    }
    Ok(all.map(median))
}

fn main() -> Result<()> {
    let args = Args::parse();
    let pretrained = match &args.model {
        Some(folder) => Pretrained::load(folder, &Device::Cpu)?,
        None => small_model()?,
    };
    let folder = tempfile::tempdir()?;
    let config = TinkerConfig {
        micro_batch_tokens: MICRO_BATCH_TOKENS,
        max_batch_size: PROMPTS * GROUP,
        max_loaded_models: SESSIONS + 1,
        ..TinkerConfig::new(folder.path(), MODEL)
    };
    let server = TinkerServer::start(config, pretrained.clone())?;
    let address = server.address();

    let all = loops(&pretrained, address, args.steps)?;
    println!(
        "{PROMPTS} prompts, {GROUP} samples each, {TOKENS} tokens, {} steps",
        args.steps
    );
    println!("| loop | milliseconds per step | relative |");
    println!("| --- | ---: | ---: |");
    let ratios = all[1].iter().zip(&all[0]);
    let ratio = median(ratios.map(|(through, alone)| through / alone));
    let [alone, through] = all.map(|seconds| median(seconds) * 1e3);
    println!("| without a server | {alone:.1} | 1.00 |");
    println!("| through the API | {through:.1} | {ratio:.2} |");

    let clients = (0..SESSIONS).map(|_| Client::new(address));
    let mut clients: Vec<Client> = clients.collect::<Result<_>>()?;
    println!("| {SESSIONS} sessions | requests per second |");
    println!("| --- | ---: |");
    let rate = requests(&mut clients, |client, _| client.heartbeat())?;
    println!("| `session_heartbeat` | {rate:.0} |");
    let rate = requests(&mut clients, |client, _| client.forward())?;
    println!("| `forward` of one example, with its result | {rate:.0} |");
    let rate = requests(&mut clients, Client::sample_one)?;
    println!("| `asample` of one token, with its result | {rate:.0} |");

    println!(
        "| {SESSIONS} models, a request each | one after the other, ms | together, ms | relative |"
    );
    println!("| --- | ---: | ---: | ---: |");
    for tokens in [8, 32, 64] {
        let times = together(&mut clients, args.steps, |client, _| {
            client.promise_pass(tokens)
        })?;
        report(&format!("`forward_backward` of {tokens} tokens"), times);
    }
    clients.iter_mut().try_for_each(Client::save)?;
    let times = together(&mut clients, args.steps, Client::promise_samples)?;
    report(&format!("`asample` of {TOKENS} tokens"), times);
    Ok(())
}
