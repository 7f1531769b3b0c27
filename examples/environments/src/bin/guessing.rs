//! A tiny policy learns a game with three turns from random weights: it guesses a number from 1 to
//! 7, and the environment says whether the number is higher or lower.
//!
//! A policy that ignores the answers guesses at most three numbers out of seven, so it wins at most
//! 3/7 of the games. Binary search wins all, and 6/7 from a first guess of 3 or 5.

use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_grpo_example_environments::{
    Args, END, HeldOut, on_one_thread, policy, train, train_config,
};
use candle_grpo_train::environment::{
    Append, Environment, EnvironmentLimits, Environments, EpisodeStart, Step, Turn,
};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::{Prompt, SamplingConfig, Trainer, TrainerParts, WeightedRewards};
use serde_json::json;

/// The largest number.
const NUMBERS: u64 = 7;
const TURNS: usize = 3;

/// Fraction of games that the best policy wins without reading the answers.
const BLIND: f64 = TURNS as f64 / NUMBERS as f64;

/// The environment for one game.
struct Guessing {
    number: u64,
}

impl Environment for Guessing {
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        let answer = match turn.text.parse::<u64>() {
            Ok(guess) if guess == self.number => return Ok(Step::done(1.)),
            Ok(guess) if guess < self.number => "higher",
            Ok(_) => "lower",
            Err(_) => "invalid",
        };
        // One character of each word is a token.
        Ok(Step::go_on(Append::Text(answer[..1].to_owned())))
    }
}

fn main() -> Result<()> {
    on_one_thread(run)
}

fn run(args: &Args) -> Result<()> {
    let steps = if args.short { 60 } else { 300 };
    let tokenizer = character_tokenizer("1234567hli?")?;
    let (model, parameters) = policy(tokenizer.get_vocab_size(true), 32, args.seed)?;
    // A row for each number. The policy does not see its columns.
    let prompts = (1..=NUMBERS)
        .map(|number| Prompt::new(number, "?", json!({ "number": number }), &tokenizer))
        .collect::<Result<Vec<_>>>()?;
    let start = |start: &EpisodeStart<'_>| -> Result<Guessing> {
        let number = start.prompt.columns["number"].as_u64().unwrap_or(1);
        Ok(Guessing { number })
    };
    let limits = EnvironmentLimits {
        max_turns: TURNS,
        max_turn_tokens: Some(1),
        ..EnvironmentLimits::default()
    };
    let environments = Environments::new(start, limits, &tokenizer, None, &[END])?;
    let environments = Arc::new(environments);
    let sampling = SamplingConfig {
        // Three guesses and two answers.
        max_new_tokens: 2 * TURNS - 1,
        stop_token_ids: vec![END],
        seed: args.seed,
        ..SamplingConfig::default()
    };

    let config = train_config(56, steps, 3e-3, sampling.clone());
    let train_prompts = prompts.clone();
    // The environment gives all rewards.
    let no_others = WeightedRewards::new();
    let vocabulary = tokenizer.clone();
    let mut trainer = Trainer::new(TrainerParts {
        environments: Some(environments.clone()),
        ..TrainerParts::new(
            model,
            parameters,
            vocabulary,
            train_prompts,
            no_others,
            config,
        )
    })?;
    let held_out = HeldOut {
        prompts: &prompts,
        samples: 100,
        reward: &WeightedRewards::new(),
        tokenizer: &tokenizer,
        sampling,
    };
    let before = held_out.measure(trainer.actor(), Some(&environments))?;
    train(args, "guessing", &mut trainer, steps)?;
    let after = held_out.measure(trainer.actor(), Some(&environments))?;

    let goal = 0.75;
    println!(
        "700 games    won before {:.1} %, after {:.1} %",
        100. * before,
        100. * after
    );
    println!(
        "             without reading the answers at most {:.1} %",
        100. * BLIND
    );
    ensure!(
        after > BLIND && after >= goal,
        "won {after:.3} of the games, must be at least {goal:.3}"
    );
    Ok(())
}
