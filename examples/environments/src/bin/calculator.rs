//! A tiny policy learns to use a calculator to multiply two-digit numbers.
//!
//! It warms up on examples, most of which answer at once. Then GRPO trains it twice from the same
//! weights: with the tool, and without it. The only reward is whether the answer is correct.

use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_grpo_example_environments::{
    Args, END, HeldOut, adamw, bar, on_one_thread, policy, step, train, train_config,
};
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::Sequence;
use candle_grpo_train::data::ShuffledOrder;
use candle_grpo_train::environment::{
    CallContext, EnvironmentLimits, Environments, Tool, ToolEnvironments, ToolFormat,
};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::sft::{SftConfig, SftParts, SftSchedule, SftTrainer};
use candle_grpo_train::{Prompt, Sample, SamplingConfig, Trainer, TrainerParts};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

/// Number of problems that are never used for training.
const HELD_OUT: usize = 500;
/// One in this many warm-up examples calls the tool.
const TOOL_EXAMPLES: usize = 5;

/// Multiplies two numbers.
struct Calculator;

impl Tool for Calculator {
    fn name(&self) -> &str {
        "calculator"
    }

    fn description(&self) -> &str {
        "Multiplies two numbers."
    }

    fn parameters(&self) -> Value {
        json!({"type": "object", "properties": {"expression": {"type": "string"}}})
    }

    fn call(&self, call: &CallContext<'_>) -> Result<String> {
        let expression = call.arguments["expression"].as_str().unwrap_or_default();
        let factors = expression.split_once('*');
        let number = |text: &str| text.parse::<u64>().ok();
        let product = factors.and_then(|(a, b)| number(a)?.checked_mul(number(b)?));
        // The policy reads digits only.
        Ok(product.unwrap_or(0).to_string())
    }
}

fn main() -> Result<()> {
    on_one_thread(run)
}

fn run(args: &Args) -> Result<()> {
    let (warm_up_steps, steps) = if args.short { (300, 40) } else { (400, 150) };
    let tokenizer = character_tokenizer("0123456789*=[]>")?;
    let problems = problems(args.seed, &tokenizer)?;
    let (held_out, training) = problems.split_at(HELD_OUT);
    let (model, parameters) = policy(tokenizer.get_vocab_size(true), 64, args.seed)?;
    let examples = examples(training, &tokenizer)?;
    warm_up(&model, &parameters, examples, warm_up_steps, args.seed)?;

    let calls = ToolFormat::Marks {
        tool: "calculator".to_owned(),
        argument: "expression".to_owned(),
        before: "[".to_owned(),
        after: "]".to_owned(),
    };
    let tools = ToolEnvironments::new(calls)?
        .with(Calculator)?
        .with_output_marks("", ">");
    let limits = EnvironmentLimits {
        max_turns: 3,
        max_turn_tokens: Some(8),
        ..EnvironmentLimits::default()
    };
    let environments = Arc::new(Environments::new(tools, limits, &tokenizer, None, &[END])?);
    let sampling = SamplingConfig {
        max_new_tokens: 24,
        stop_token_ids: vec![END],
        stop_strings: vec!["]".to_owned()],
        seed: args.seed,
        ..SamplingConfig::default()
    };
    let held_out = HeldOut {
        prompts: held_out,
        samples: 1,
        reward: &is_right,
        tokenizer: &tokenizer,
        sampling: sampling.clone(),
    };
    let config = train_config(32, steps, 1e-3, sampling);
    let trainer = |environments| {
        let start =
            Parameters::from_tensors(&model, parameters.frozen_copy()?, &candle_core::Device::Cpu)?;
        let (model, tokenizer, config) = (model.clone(), tokenizer.clone(), config.clone());
        let training = training.to_vec();
        Trainer::new(TrainerParts {
            environments,
            ..TrainerParts::new(model, start, tokenizer, training, is_right, config)
        })
    };

    let mut without = trainer(None)?;
    let mut with = trainer(Some(environments.clone()))?;
    let before = held_out.measure(with.actor(), Some(&environments))?;
    let before_without = held_out.measure(without.actor(), None)?;
    train(args, "without-tool", &mut without, steps)?;
    train(args, "with-tool", &mut with, steps)?;
    let after = held_out.measure(with.actor(), Some(&environments))?;
    let after_without = held_out.measure(without.actor(), None)?;

    println!("correct of {HELD_OUT} held-out problems  before GRPO  after");
    let row = |name: &str, before: f64, after: f64| {
        println!("{name:32}{:9.1} %{:7.1} %", 100. * before, 100. * after);
    };
    row("without the tool", before_without, after_without);
    row("with the tool", before, after);
    let goal = if args.short { before + 0.2 } else { 0.8 };
    ensure!(
        after >= goal && after_without < 0.4,
        "with the tool {after:.3} of the answers are correct, must be at least {goal:.3}; without it {after_without:.3}, must be below 0.4"
    );
    Ok(())
}

/// All four-digit products of two-digit numbers, in random order.
fn problems(seed: u64, tokenizer: &Tokenizer) -> Result<Vec<Prompt>> {
    let all: Vec<(u32, u32)> = (32..100)
        .flat_map(|a| (32..100).map(move |b| (a, b)))
        .collect();
    let order = ShuffledOrder::new(all.len(), seed)?.slice(0, all.len());
    let problem = |i: usize| {
        let (a, b) = all[i];
        let columns = json!({ "answer": (a * b).to_string() });
        Prompt::new(i as u64, &format!("{a}*{b}="), columns, tokenizer)
    };
    order.into_iter().map(problem).collect()
}

/// Examples for the warm-up: the answer at once or, for some problems, the two turns of a call.
fn examples(problems: &[Prompt], tokenizer: &Tokenizer) -> Result<Vec<Sequence>> {
    let tokens = |text: &str| -> Result<Vec<u32>> {
        Ok(Prompt::new(0, text, json!(null), tokenizer)?.tokens)
    };
    let mut examples = Vec::new();
    for (i, problem) in problems.iter().enumerate() {
        let answer = problem.columns["answer"].as_str().unwrap_or_default();
        let prompt = problem.tokens.clone();
        let last = [tokens(answer)?, vec![END]].concat();
        if i.is_multiple_of(TOOL_EXAMPLES) {
            let call = tokens(&format!("[{}]", problem.text.trim_end_matches('=')))?;
            let output = tokens(&format!("{answer}>"))?;
            let after_call = [&prompt[..], &call, &output].concat();
            examples.push(Sequence::of_answer(&after_call, &last)?);
            examples.push(Sequence::of_answer(&prompt, &call)?);
        } else {
            examples.push(Sequence::of_answer(&prompt, &last)?);
        }
    }
    Ok(examples)
}

fn warm_up(
    model: &DecoderConfig,
    parameters: &Parameters,
    examples: Vec<Sequence>,
    steps: usize,
    seed: u64,
) -> Result<()> {
    let config = SftConfig {
        max_steps: Some(steps),
        batch_size: 128,
        optimizer: adamw(3e-3),
        schedule: SftSchedule {
            decay: None,
            ..SftSchedule::default()
        },
        seed,
        ..SftConfig::default()
    };
    let bar = bar("warm-up", steps)?;
    let parts = SftParts::new(model.clone(), parameters.clone(), examples, config);
    let mut trainer = SftTrainer::new(parts)?;
    for _ in 0..steps {
        step(&bar, format!("loss {:.2}", trainer.step()?.loss));
    }
    bar.abandon();
    println!();
    Ok(())
}

/// 1 for the correct answer, 0 for any other.
fn is_right(sample: &Sample) -> f32 {
    f32::from(u8::from(sample.columns["answer"] == sample.completion))
}
