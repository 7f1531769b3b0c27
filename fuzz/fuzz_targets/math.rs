//! Answers for the reward `math`: the first line is the reference, the rest the completion.
#![no_main]

use candle_grpo_train::rewards::MathReward;
use libfuzzer_sys::fuzz_target;
use serde_json::json;

fuzz_target!(|input: &str| {
    let (reference, completion) = input.split_once('\n').unwrap_or((input, input));
    let reward = MathReward::default();
    let _ = reward.matches(completion, &json!({"answer": reference}));
});
