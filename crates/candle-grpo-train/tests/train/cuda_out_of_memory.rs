//! A GPU without memory for an allocation: an error, or the same results, and never wrong values.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_nn::DecoderConfig;
use candle_grpo_test_support::{CudaCalls, device, with_failing_allocation};
use candle_grpo_train::{Progress, Prompt, Rollout, Sampler, SamplingConfig, TrainConfig, Trainer};

use crate::common::{self, digest, model, parameters_of, prompts, sampling, without_seconds};

/// Number of this thread's allocations so far. `None` without the emulated GPU.
fn allocations() -> Option<u64> {
    let calls = CudaCalls::now();
    if calls.is_none() {
        println!("skipped: no emulated GPU fails allocations");
    }
    Some(calls?.allocations)
}

/// `count` numbers up to `all`, at about equal distances.
fn spread(all: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| 1 + i * (all - 1) / (count - 1))
}

fn assert_out_of_memory(error: &anyhow::Error, number: u64) {
    let text = format!("{error:#}");
    assert!(
        text.contains("OUT_OF_MEMORY"),
        "allocation {number}: {text}"
    );
}

/// The number of allocations before each step, and the number of tokens sampled in it.
#[derive(Default)]
struct Steps(Mutex<Vec<(u64, usize)>>);

impl Progress for Steps {
    fn advance(&self, _ended: usize, sampled: usize) {
        let allocations = allocations().unwrap_or_default();
        self.0.lock().unwrap().push((allocations, sampled));
    }
}

/// The cache's first 64 pages suffice until the completions are 64 tokens long. Then it grows.
#[test]
fn sampling_goes_on_with_the_memory_that_the_cache_has() -> Result<()> {
    let Some(_) = allocations() else {
        return Ok(());
    };
    let model = DecoderConfig {
        max_position_embeddings: 128,
        ..model()
    };
    let parameters = parameters_of(&model, device());
    let prompts = prompts(&["abc", "d", "eeeee", "abcde"]);
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let config = SamplingConfig {
        max_new_tokens: 72,
        stop_token_ids: Vec::new(),
        ..sampling()
    };
    let steps = Arc::new(Steps::default());
    let sampler = Sampler::new(&model, &parameters, config)?;
    let sampler = sampler.with_progress(Arc::<Steps>::clone(&steps));
    let sample = || sampler.sample(&prompts, 3, 0);
    let taken = || std::mem::take(&mut *steps.0.lock().unwrap());
    // The first run also loads kernels.
    sample()?;
    taken();
    let start = allocations().unwrap_or_default();
    let free = sample()?;
    let counts = taken();
    let all = allocations().unwrap_or_default() - start;
    let of_steps = counts
        .windows(2)
        .map(|pair| (pair[1].0 - pair[0].0, pair[0].0 - start));
    // The step with the most allocations grows the cache, before it does anything else.
    let (_, growth) = of_steps.max().unwrap_or_default();

    let same = |limited: &[Rollout]| {
        free.iter().zip(limited).all(|(free, limited)| {
            let [free, limited] = [free, limited].map(|x| &x.completion);
            free.tokens == limited.tokens && free.log_probs == limited.log_probs
        })
    };
    let mut survived = 0;
    for number in spread(all, 24).chain(growth + 1..growth + 9) {
        let Some((result, has_failed)) = with_failing_allocation(number, sample) else {
            break;
        };
        let fewest = taken().iter().map(|&(_, sampled)| sampled).min();
        match result {
            Ok(rollouts) => {
                assert!(same(&rollouts), "allocation {number}");
                let is_limited = fewest < Some(12);
                assert_eq!(has_failed, is_limited, "allocation {number}: {fewest:?}");
                survived += usize::from(has_failed);
            }
            Err(error) => assert_out_of_memory(&error, number),
        }
    }
    // Keys and values in each of two layers.
    assert!(survived >= 4, "{survived}");
    Ok(())
}

/// After the error, the step can be repeated.
#[test]
fn a_step_that_runs_out_of_memory_leaves_the_policy_as_it_was() -> Result<()> {
    let Some(_) = allocations() else {
        return Ok(());
    };
    let trainer = || {
        common::trainer(
            digest,
            TrainConfig {
                epochs: 2,
                ..common::config()
            },
        )
    };
    let bits = |trainer: &Trainer| -> Result<Vec<(String, Vec<f32>)>> {
        let values = trainer.policy_parameters()?;
        let values = values
            .iter()
            .map(|(name, value)| Ok((name.to_owned(), value.flatten_all()?.to_vec1::<f32>()?)));
        let mut values = values.collect::<Result<Vec<_>>>()?;
        values.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(values)
    };
    let mut free = trainer();
    let start = allocations().unwrap_or_default();
    let metrics = without_seconds(free.step()?);
    let all = allocations().unwrap_or_default() - start;
    let weights = bits(&free)?;
    let mut failed = 0;
    for number in spread(all, 32) {
        let mut trainer = trainer();
        let before = bits(&trainer)?;
        let Some((result, has_failed)) = with_failing_allocation(number, || trainer.step()) else {
            break;
        };
        let again = match result {
            Ok(metrics) => metrics,
            Err(error) => {
                assert!(has_failed);
                failed += 1;
                assert_out_of_memory(&error, number);
                assert!(bits(&trainer)? == before, "allocation {number}");
                trainer.step()?
            }
        };
        assert_eq!(without_seconds(again), metrics, "allocation {number}");
        assert!(bits(&trainer)? == weights, "allocation {number}");
    }
    assert!(failed > 16, "{failed}");
    Ok(())
}
