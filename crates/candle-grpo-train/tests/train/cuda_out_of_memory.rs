//! A GPU without memory for an allocation: an error, or the same results, and never wrong values.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_nn::DecoderConfig;
use candle_grpo_nn::optim::StateMemory;
use candle_grpo_test_support::{CudaCalls, device, is_long, with_failing_allocations};
use candle_grpo_train::{Progress, Prompt, Rollout, Sampler, SamplingConfig, TrainConfig, Trainer};
use rstest::rstest;

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

/// The cache's first pages are enough for most tokens of the completions. Then it grows.
#[test]
fn sampling_goes_on_with_the_memory_that_the_cache_has() -> Result<()> {
    let Some(_) = allocations() else {
        return Ok(());
    };
    let model = DecoderConfig {
        max_position_embeddings: 128,
        num_attention_heads: 2,
        num_key_value_heads: 2,
        // Rows of larger heads share the pages of their prompt, so the last bits of a row depend on
        // the rows beside it.
        head_dim: Some(model().head_dim()),
        ..model()
    };
    let parameters = parameters_of(&model, device());
    let prompts = prompts(&["abc", "d", "eeeee", "abcde"]);
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let config = SamplingConfig {
        max_new_tokens: 80,
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
    // A growth tries twice to allocate. With two failures, the cache grows by less. With four, it
    // grows by what is needed now, and by no more, which may be enough. With six, completions are
    // suspended.
    for failures in [2, 4, 6] {
        let mut survived = 0;
        let numbers = spread(all, if is_long() { 64 } else { 2 });
        for number in numbers.chain(growth + 1..growth + 9) {
            let Some((result, failed)) = with_failing_allocations(number - 1, failures, sample)
            else {
                break;
            };
            let fewest = taken().iter().map(|&(_, sampled)| sampled).min();
            match result {
                Ok(rollouts) => {
                    assert!(same(&rollouts), "allocation {number}");
                    let is_limited = fewest < Some(free.len());
                    if failed != 4 {
                        assert_eq!(failed == 6, is_limited, "allocation {number}: {fewest:?}");
                    }
                    survived += usize::from(failed == failures);
                }
                Err(error) => assert_out_of_memory(&error, number),
            }
        }
        // Keys and values in each of two layers.
        assert!(survived >= 4, "{failures} failures: {survived}");
    }
    Ok(())
}

/// After the error, the step can be repeated, unless it had changed weights. Then the trainer
/// refuses to go on.
#[rstest]
#[case::on_the_device(StateMemory::Device, false)]
#[case::optimizer_in_main_memory(StateMemory::Host, false)]
#[case::inputs_in_main_memory(StateMemory::Device, true)]
fn a_step_that_runs_out_of_memory_can_be_repeated_or_ends_the_run(
    #[case] memory: StateMemory,
    #[case] offloading: bool,
) -> Result<()> {
    let Some(_) = allocations() else {
        return Ok(());
    };
    let trainer = || {
        let epochs = 2;
        let mut config = TrainConfig {
            epochs,
            ..common::config()
        };
        config.optimizer.memory = memory;
        config.activation_offloading = offloading;
        config.activation_checkpointing = offloading.into();
        common::trainer(digest, config)
    };
    let bits = |trainer: &Trainer| -> Result<BTreeMap<String, Vec<f32>>> {
        let values = trainer.policy_parameters()?;
        let values = values
            .iter()
            .map(|(name, value)| Ok((name.to_owned(), value.flatten_all()?.to_vec1::<f32>()?)));
        values.collect()
    };
    let mut free = trainer();
    let start = allocations().unwrap_or_default();
    let metrics = without_seconds(free.step()?);
    let all = allocations().unwrap_or_default() - start;
    let weights = bits(&free)?;
    let (mut repeated, mut ended) = (0, 0);
    for number in spread(all, if is_long() { 256 } else { 12 }) {
        let mut trainer = trainer();
        let before = bits(&trainer)?;
        let step = || trainer.step();
        let Some((result, failed)) = with_failing_allocations(number - 1, 1, step) else {
            break;
        };
        let has_failed = failed > 0;
        let result = match result {
            Ok(metrics) => Ok(metrics),
            Err(error) => {
                assert!(has_failed);
                assert_out_of_memory(&error, number);
                let is_unchanged = bits(&trainer)? == before;
                let again = trainer.step();
                assert!(is_unchanged || again.is_err(), "allocation {number}");
                again
            }
        };
        match result {
            Ok(again) => {
                repeated += usize::from(has_failed);
                assert_eq!(without_seconds(again), metrics, "allocation {number}");
                assert!(bits(&trainer)? == weights, "allocation {number}");
            }
            Err(error) => {
                ended += 1;
                let words = "step 1: failed after it had changed weights, resume from a checkpoint";
                assert_eq!(error.to_string(), words, "allocation {number}");
            }
        }
    }
    // The second epoch is a third of the step.
    assert!(repeated > 4 && ended > 1, "{repeated} {ended}");
    Ok(())
}
