//! Verdicts of the reward `math` for JSON lines: `{"answer": ..., "reference": ..., "decimals": 6}`
//! on standard input, `true` or `false` for each on standard output. `scripts/math-verify`

use std::io::{self, BufRead, Write};

use anyhow::{Context, Result};
use candle_grpo_train::rewards::MathReward;
use serde_json::Value;

fn main() -> Result<()> {
    let mut out = io::stdout().lock();
    for (number, line) in io::stdin().lock().lines().enumerate() {
        let row: Value =
            serde_json::from_str(&line?).with_context(|| format!("line {}", number + 1))?;
        let answer = row["answer"].as_str().context("answer: must be a text")?;
        let mut reward = MathReward {
            column: "reference".to_owned(),
            ..MathReward::default()
        };
        if let Some(decimals) = row["decimals"].as_u64() {
            reward.decimals = u32::try_from(decimals)?;
        }
        reward.validate()?;
        writeln!(out, "{}", reward.matches(answer, &row)?)?;
    }
    Ok(())
}
