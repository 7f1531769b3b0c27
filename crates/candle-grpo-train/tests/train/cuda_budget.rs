//! CUDA driver calls per pass and per step, as counted by the emulated GPU.

use candle_grpo_loss::{KlLoss, PolicyLoss, Recipe};
use candle_grpo_nn::DecoderConfig;
use candle_grpo_test_support::{CudaCalls, device};
use candle_grpo_train::learn::step::{self, Needs, Passes, RolloutGroups, StepBatch};
use candle_grpo_train::learn::{Models, OldLogProbs, Ranks, TrainerState};
use candle_grpo_train::{Prompt, Sampler, SamplingConfig, TrainConfig};

use crate::common::{
    config, digest, model, parameters, parameters_of, prompts, sampling, tokenizer,
};

/// Counts the calls in `run`. `None` without the emulation.
fn calls<T>(run: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, Option<CudaCalls>)> {
    let before = CudaCalls::now();
    let result = run()?;
    let calls = CudaCalls::now().zip(before);
    Ok((result, calls.map(|(after, before)| after - before)))
}

/// Two prompts with four completions each, which always fill their length.
fn groups(models: &Models, config: &TrainConfig) -> anyhow::Result<RolloutGroups> {
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let sampler = models.sampler(config.sampling.clone())?;
    let mut groups = step::collect(&sampler, &prompts, config.num_generations, 1)?;
    step::score(
        &mut groups,
        &prompts,
        &digest,
        &config.sampling,
        &tokenizer(),
    )?;
    Ok(groups)
}

/// The calls in the passes before an update, in the advantages, and in an update with micro-batches
/// of `size` completions.
fn of_step(size: usize) -> anyhow::Result<Option<[CudaCalls; 3]>> {
    let policy_loss = PolicyLoss {
        kl: Some(KlLoss::k3(0.1)),
        ..PolicyLoss::grpo()
    };
    let config = TrainConfig {
        prompts_per_step: 2,
        micro_batch_size: size,
        old_log_probs: OldLogProbs::Recompute,
        recipe: Recipe {
            policy_loss,
            ..Recipe::grpo()
        },
        sampling: SamplingConfig {
            stop_token_ids: Vec::new(),
            ..sampling()
        },
        ..config()
    };
    let mut models = Models::new(model(), parameters(), &config)?;
    let mut state = TrainerState::new(&config);
    let groups = groups(&models, &config)?;
    let needs = Needs::new(&config, None).all();
    let ranks = Ranks::default();
    let passes = Passes::new(&config, &ranks).unwrap();
    let mut found = None;
    // The first step also loads kernels.
    for _ in 0..2 {
        state.steps += 1;
        let mut batch = StepBatch::new(groups.clone(), &config, device())?;
        let signals = || step::signals(&mut batch, needs, &models, &config, passes);
        let ((), signals) = calls(signals)?;
        let advantages = || step::advantages(&mut batch, None, &config, &mut state);
        let ((), advantages) = calls(advantages)?;
        let batch = Some(&batch);
        let update = || step::update(batch, &mut models, None, &config, &mut state, passes);
        let (updates, update) = calls(update)?;
        assert_eq!(updates.updates, 1);
        found = signals.zip(advantages).zip(update);
    }
    Ok(found.map(|((signals, advantages), update)| [signals, advantages, update]))
}

#[test]
fn a_step_and_its_passes_keep_their_budgets_of_driver_calls() -> anyhow::Result<()> {
    let (Some(two), Some(four)) = (of_step(4)?, of_step(2)?) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let [signals, advantages, update] = two;
    let [of_signals, of_advantages, of_update] = [0, 1, 2].map(|i| four[i] - two[i]);
    println!("signals: {signals:?}, advantages: {advantages:?}, update: {update:?}");
    println!("two more micro-batches: {of_signals:?} and {of_update:?}");
    // Tokens are on the host already. The output layer reads the response mask: one copy in each of
    // the two passes, for the policy and the reference.
    assert_eq!(signals.copies_to_host, 2 * 2, "{signals:?}");
    assert_eq!(of_signals.copies_to_host, 2 * 2, "{of_signals:?}");
    assert_eq!(advantages.copies_to_host, 0, "{advantages:?}");
    assert_eq!(of_advantages.copies_to_host, 0, "{of_advantages:?}");
    // Each micro-batch also reads its loss and its metrics, and the update the gradient norm.
    assert_eq!(of_update.copies_to_host, 2 * 3, "{of_update:?}");
    assert_eq!(update.copies_to_host, 2 * 3 + 1, "{update:?}");
    Ok(())
}

/// The launches to sample one token for each of four prompts with this number of characters.
fn launches_of_prompts(length: usize) -> anyhow::Result<Option<u64>> {
    let model = DecoderConfig {
        max_position_embeddings: 256,
        ..model()
    };
    let texts = ["a", "b", "c", "d"].map(|letter| letter.repeat(length));
    let prompts = prompts(&texts.each_ref().map(String::as_str));
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    assert!(prompts.iter().all(|prompt| prompt.tokens.len() >= length));
    let config = SamplingConfig {
        max_new_tokens: 1,
        ..sampling()
    };
    let sampler = Sampler::new(&model, &parameters_of(&model, device()), config)?;
    let sample = || sampler.sample(&prompts, 2, 0);
    // The first call also loads kernels.
    sample()?;
    Ok(calls(sample)?.1.map(|calls| calls.launches))
}

/// The CPU would divide the longer ones.
#[test]
fn prompts_are_computed_in_one_pass() -> anyhow::Result<()> {
    let (Some(short), Some(long)) = (launches_of_prompts(20)?, launches_of_prompts(200)?) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    assert_eq!(short, long);
    Ok(())
}
