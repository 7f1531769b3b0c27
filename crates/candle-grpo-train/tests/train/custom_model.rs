//! A custom `LanguageModel` in the whole trainer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Result, Tensor, Var};
use candle_grpo_core::advantage::KlPenalty;
use candle_grpo_core::inputs::Input;
use candle_grpo_core::{GroupAdvantage, Kl, KlEstimator};
use candle_grpo_loss::KlLoss;
use candle_grpo_nn::{
    Decoding, LanguageModel, LoraConfig, ModelConfig, PackedTokens, Parameters, SequenceStates,
};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::step::{self, Needs, Passes, StepBatch};
use candle_grpo_train::learn::{Models, OldLogProbs, Ranks, ReferenceRefresh, rollout_log_probs};
use candle_grpo_train::rollout::Engine;
use candle_grpo_train::run::Checkpoints;
use candle_grpo_train::{
    ComputeDType, CriticConfig, Prompt, Sample, Sampler, StepMetrics, TokenBatch, TrainConfig,
    Trainer, TrainerParts, evaluate,
};
use candle_nn::{Linear, Module, VarBuilder, linear_no_bias};
use rstest::rstest;
use serde::Serialize;

use crate::common::{
    config, digest, max_difference, prompts, sampling, tokenizer, without_seconds,
};

const WIDTH: usize = 8;
const VOCABULARY: usize = 6;

/// A token depends on the mean over the tokens so far.
#[derive(Clone, Serialize)]
struct MeanConfig {
    positions: usize,
    scale: f64,
}

#[derive(Clone)]
struct MeanModel {
    scale: f64,
    embedding: Tensor,
    inner: Linear,
    output: Tensor,
}

impl ModelConfig for MeanConfig {
    type Model = MeanModel;

    fn build(&self, vb: VarBuilder) -> Result<MeanModel> {
        Ok(MeanModel {
            scale: self.scale,
            embedding: vb.get((VOCABULARY, WIDTH), "embedding")?,
            inner: linear_no_bias(WIDTH, WIDTH, vb.pp("inner"))?,
            output: vb.get((VOCABULARY, WIDTH), "output")?,
        })
    }

    fn vocab_size(&self) -> usize {
        VOCABULARY
    }

    fn max_positions(&self) -> usize {
        self.positions
    }
}

impl MeanModel {
    /// Hidden states `[.., W]` from sums of embeddings `[.., W]` over as many tokens.
    fn hidden(&self, sums: &Tensor, tokens: &Tensor) -> Result<Tensor> {
        let means = sums.broadcast_div(tokens)?;
        (self.inner.forward(&means)?.tanh()? + means)? * self.scale
    }
}

impl LanguageModel for MeanModel {
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        let ids = tokens.right_padded()?;
        let (batch, length) = ids.dims2()?;
        let x = self.embedding.index_select(&ids.flatten_all()?, 0)?;
        let sums = x.reshape((batch, length, WIDTH))?.cumsum(1)?;
        let counts = Tensor::arange(1u32, 1 + length as u32, ids.device())?;
        let counts = counts.to_dtype(DType::F32)?.reshape((1, length, 1))?;
        tokens.rows_of(&self.hidden(&sums, &counts)?)
    }

    fn output_weight(&self) -> &Tensor {
        &self.output
    }

    fn output_name(&self) -> &str {
        "output"
    }
}

/// The same model, computing only a sequence's new tokens.
#[derive(Clone, Serialize)]
struct CachedConfig(MeanConfig);

#[derive(Clone)]
struct CachedModel(MeanModel);

/// The sum `[1, W]` of the embeddings so far, and how many there are.
type Sum = (Option<Tensor>, usize);

impl ModelConfig for CachedConfig {
    type Model = CachedModel;

    fn build(&self, vb: VarBuilder) -> Result<CachedModel> {
        Ok(CachedModel(self.0.build(vb)?))
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    fn max_positions(&self) -> usize {
        self.0.max_positions()
    }
}

impl LanguageModel for CachedModel {
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        self.0.hidden_states(tokens)
    }

    fn output_weight(&self) -> &Tensor {
        self.0.output_weight()
    }

    fn output_name(&self) -> &str {
        self.0.output_name()
    }

    fn decoding(&self) -> Result<Box<dyn Decoding + '_>> {
        let model = &self.0;
        let step = move |new: &mut [(Sum, &[u32])]| {
            let mut hidden = Vec::new();
            for ((sum, count), tokens) in new {
                let ids = Tensor::new(*tokens, model.output.device())?;
                let mut total = model.embedding.index_select(&ids, 0)?.sum_keepdim(0)?;
                if let Some(before) = sum.as_ref() {
                    total = (total + before)?;
                }
                *count += tokens.len();
                let all = Tensor::new(*count as f32, model.output.device())?;
                hidden.push(model.hidden(&total, &all)?);
                *sum = Some(total);
            }
            Tensor::cat(&hidden, 0)?.matmul(&model.output.t()?)
        };
        Ok(Box::new(SequenceStates::new(step)))
    }
}

/// The same model, which counts its passes.
#[derive(Clone, Serialize)]
struct CountedConfig {
    model: MeanConfig,
    #[serde(skip)]
    passes: Arc<AtomicUsize>,
}

#[derive(Clone)]
struct CountedModel {
    model: MeanModel,
    passes: Arc<AtomicUsize>,
}

impl ModelConfig for CountedConfig {
    type Model = CountedModel;

    fn build(&self, vb: VarBuilder) -> Result<CountedModel> {
        Ok(CountedModel {
            model: self.model.build(vb)?,
            passes: Arc::clone(&self.passes),
        })
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn max_positions(&self) -> usize {
        self.model.max_positions()
    }
}

impl LanguageModel for CountedModel {
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor> {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.model.hidden_states(tokens)
    }

    fn output_weight(&self) -> &Tensor {
        self.model.output_weight()
    }

    fn output_name(&self) -> &str {
        self.model.output_name()
    }
}

fn mean() -> MeanConfig {
    MeanConfig {
        positions: 16,
        scale: 2.,
    }
}

fn parameters() -> Parameters {
    let variable = |name: &str, rows: usize, phase: f64| {
        let x = Tensor::arange(0f32, (rows * WIDTH) as f32, device()).unwrap();
        let x = ((x * 1.7).unwrap() + phase).unwrap().sin().unwrap();
        let x = x.reshape((rows, WIDTH)).unwrap();
        (name.to_owned(), Var::from_tensor(&x).unwrap())
    };
    let variables = [
        variable("embedding", VOCABULARY, 0.),
        variable("inner.weight", WIDTH, 1.),
        variable("output", VOCABULARY, 2.),
    ];
    Parameters::from_variables(variables, device()).unwrap()
}

fn try_trainer<C: ModelConfig>(model: C, config: TrainConfig) -> anyhow::Result<Trainer<C>> {
    let prompts = prompts(&["abc", "d", "ee", "ca", "b"]);
    Trainer::new(TrainerParts::new(
        model,
        parameters(),
        tokenizer(),
        prompts,
        digest,
        config,
    ))
}

fn trainer<C: ModelConfig>(model: C, config: TrainConfig) -> Trainer<C> {
    try_trainer(model, config).unwrap()
}

fn reward<C: ModelConfig>(trainer: &Trainer<C>) -> f64 {
    let sampler = trainer.sampler(sampling()).unwrap();
    let (reward, tokenizer) = (trainer.reward(), trainer.tokenizer());
    let evaluation = evaluate(&sampler, trainer.prompts(), 2, reward, tokenizer, 0);
    evaluation.unwrap().reward_mean()
}

fn with_reference(refresh: bool) -> TrainConfig {
    let mut config = config();
    config.optimizer.learning_rate = 1e-2;
    config.epochs = 2;
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.05));
    config.reference_refresh = refresh.then_some(ReferenceRefresh {
        every_steps: 1,
        alpha: 0.5,
    });
    config
}

/// The passes before an update, with a penalty in the advantages that needs the old log-probs.
#[rstest]
#[case::of_both(OldLogProbs::Recompute, Some(0.5), 1)]
#[case::of_log_probs(OldLogProbs::Recompute, None, 1)]
#[case::of_entropies(OldLogProbs::Sampler, Some(0.5), 1)]
#[case::of_none(OldLogProbs::Sampler, None, 0)]
fn log_probs_and_entropies_come_from_one_pass(
    #[case] old_log_probs: OldLogProbs,
    #[case] top_entropy: Option<f64>,
    #[case] expected: usize,
) -> anyhow::Result<()> {
    let counted = Arc::new(AtomicUsize::new(0));
    let model = CountedConfig {
        model: mean(),
        passes: Arc::clone(&counted),
    };
    let mut config = TrainConfig {
        old_log_probs,
        top_entropy,
        micro_batch_size: 64,
        ..config()
    };
    let penalty = KlPenalty {
        coef: 0.1,
        kl: Kl::new(KlEstimator::K1),
    };
    let group = GroupAdvantage {
        kl_penalty: Some(penalty),
        ..GroupAdvantage::grpo()
    };
    config.recipe.advantage = group.into();
    let models = Models::new(model, parameters(), &config)?;
    let prompts = prompts(&["abc", "d"]);
    let of_step: Vec<&Prompt> = prompts.iter().collect();
    let sampler = models.sampler(config.sampling.clone())?;
    let mut groups = step::collect(&sampler, &of_step, config.num_generations, 1)?;
    let reward = |sample: &Sample| sample.completion_tokens.len() as f32;
    step::score(
        &mut groups,
        &of_step,
        &reward,
        &config.sampling,
        &tokenizer(),
    )?;
    let mut batch = StepBatch::new(groups, &config, device())?;
    let (ranks, needs) = (Ranks::default(), Needs::new(&config, None));
    let passes = Passes::new(&config, &ranks)?;
    let before = counted.load(Ordering::Relaxed);
    step::signals(&mut batch, needs.advantage, &models, &config, passes)?;
    step::signals(&mut batch, needs.all(), &models, &config, passes)?;
    // The reference is another model with the same counter.
    let passes = counted.load(Ordering::Relaxed) - before - 1;
    assert_eq!(passes, expected);
    let (actor, tokens) = (&models.actor, batch.tokens());
    let bits = |x: &Tensor| x.to_vec2::<f32>();
    if old_log_probs == OldLogProbs::Recompute {
        let old = batch.input(Input::OldLogProbs).unwrap();
        assert_eq!(bits(old)?, bits(&actor.log_probs(tokens)?)?);
    }
    let entropy = batch.input(Input::Entropy);
    assert_eq!(entropy.is_some(), top_entropy.is_some());
    if let Some(entropy) = entropy {
        assert_eq!(bits(entropy)?, bits(&actor.entropy(tokens)?)?);
    }
    Ok(())
}

#[rstest]
#[case::kept_reference(with_reference(false))]
#[case::moving_reference(with_reference(true))]
fn a_custom_model_resumes_bit_identically(#[case] config: TrainConfig) {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let mut whole = trainer(CachedConfig(mean()), config.clone());
    let mut expected: Vec<StepMetrics> = Vec::new();
    for step in 1..=4 {
        expected.push(without_seconds(whole.step().unwrap()));
        if step == 2 {
            let write = |folder: &_| whole.write_custom_checkpoint(folder);
            checkpoints.write(step, write).unwrap();
        }
    }
    let mut resumed = trainer(CachedConfig(mean()), config);
    let latest = checkpoints.latest().unwrap().checkpoint.unwrap();
    resumed.load_state(&latest.path).unwrap();
    assert_eq!(resumed.steps(), 2);
    for expected in &expected[2..] {
        assert_eq!(&without_seconds(resumed.step().unwrap()), expected);
    }
    assert_eq!(reward(&resumed), reward(&whole));
    let (now, then) = (resumed.policy_parameters(), whole.policy_parameters());
    let (now, then) = (now.unwrap(), then.unwrap());
    for (name, start) in parameters().iter() {
        assert_eq!(
            max_difference(now.get(name).unwrap(), then.get(name).unwrap()),
            0.
        );
        assert!(max_difference(now.get(name).unwrap(), start) > 0., "{name}");
    }
}

#[test]
fn completions_of_a_custom_model_are_drawn_ahead_from_copies_of_its_weights() {
    let step_2 = |max_staleness: usize| {
        let mut config = with_reference(false);
        config.recipe.policy_loss.rollout_correction = Some(Default::default());
        config.rollout.max_staleness = max_staleness;
        let mut trainer = trainer(mean(), config);
        trainer.step().unwrap();
        let metrics = trainer.step().unwrap();
        trainer.finish().unwrap();
        (
            metrics.reward_mean,
            metrics.policy.get("staleness_max").copied(),
        )
    };
    if device().is_cpu() {
        let (reward, staleness) = step_2(1);
        assert_eq!((reward, staleness), step_2(1));
        assert_eq!(staleness, Some(1.));
        assert_ne!(reward, step_2(0).0);
    }
}

#[test]
fn a_cache_draws_the_tokens_of_full_passes() {
    let prompts = prompts(&["abc", "d", "ee"]);
    let prompts: Vec<_> = prompts.iter().collect();
    let full = Sampler::new(&mean(), &parameters(), sampling()).unwrap();
    let cached = Sampler::new(&CachedConfig(mean()), &parameters(), sampling()).unwrap();
    let full = full.sample(&prompts, 4, 0).unwrap();
    let cached = cached.sample(&prompts, 4, 0).unwrap();
    let tokens = |rollouts: &[candle_grpo_train::Rollout]| -> Vec<Vec<u32>> {
        let tokens = rollouts.iter().map(|x| x.completion.tokens.clone());
        tokens.collect()
    };
    assert_eq!(tokens(&full), tokens(&cached));
    let actor = trainer(mean(), config());
    let batch = TokenBatch::from_rollouts(&full, device()).unwrap();
    let mask = batch.response_mask().to_dtype(DType::F32).unwrap();
    let log_probs = (actor.actor().log_probs(&batch).unwrap() * mask).unwrap();
    for rollouts in [&full, &cached] {
        let recorded = rollout_log_probs(rollouts, device()).unwrap();
        assert!(max_difference(&recorded, &log_probs) < 2e-5);
    }
}

#[rstest]
#[case("adapters: given", TrainConfig { adapters: Some(LoraConfig::all_linear(2, 4.)), ..config() })]
#[case("compute_dtype: bf16", TrainConfig { compute_dtype: ComputeDType::Bf16, ..config() })]
#[case(
    "activation_checkpointing: true",
    TrainConfig { activation_checkpointing: true.into(), ..config() }
)]
#[case("activation_offloading: true", TrainConfig { activation_offloading: true, ..config() })]
#[case("router_aux_loss_coef: 0.1", TrainConfig { router_aux_loss_coef: 0.1, ..config() })]
#[case("router_replay: true", TrainConfig { router_replay: true, ..config() })]
#[case("critic: given", with_critic())]
#[case("rollout.dtype: bf16", with_rollout(|rollout| rollout.dtype = Some(ComputeDType::Bf16)))]
#[case("rollout.engine: vllm", with_rollout(|rollout| {
    (rollout.engine, rollout.base_url) = (Engine::Vllm, vec!["http://a".to_owned()]);
}))]
fn what_a_custom_model_lacks_is_an_error_at_once(
    #[case] message: &str,
    #[case] config: TrainConfig,
) {
    let error = try_trainer(mean(), config).err().unwrap().to_string();
    assert!(error.starts_with(message), "{error}");
}

fn with_critic() -> TrainConfig {
    let mut config = config();
    config.recipe.advantage = candle_grpo_core::advantage::AdvantageName::Gae.into();
    config.critic = Some(CriticConfig::default());
    config
}

fn with_rollout(
    change: impl FnOnce(&mut candle_grpo_train::rollout::RolloutConfig),
) -> TrainConfig {
    let mut config = config();
    change(&mut config.rollout);
    config
}

#[test]
fn another_model_does_not_resume() {
    let folder = tempfile::tempdir().unwrap();
    let whole = trainer(mean(), config());
    whole.write_custom_checkpoint(folder.path()).unwrap();
    let other = MeanConfig {
        scale: 1.,
        ..mean()
    };
    let error = trainer(other, config())
        .load_state(folder.path())
        .unwrap_err();
    let error = format!("{error:#}");
    let expected = r#"config.json: the run began with the model {"positions":16,"scale":2.0}, and would go on with {"positions":16,"scale":1.0}"#;
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_decoder_has_the_checkpoint_of_its_family() {
    let folder = tempfile::tempdir().unwrap();
    let decoder = crate::common::trainer(digest, config());
    let error = decoder.write_custom_checkpoint(folder.path()).unwrap_err();
    let expected = "model: a decoder, must be saved by write_checkpoint";
    assert!(error.to_string().starts_with(expected), "{error}");
}
