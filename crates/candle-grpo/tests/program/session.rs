//! Configured runs in a custom program.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_core::Device;
use candle_grpo::config::{Document, RunConfig};
use candle_grpo::run::{
    Progress, RunPrompts, RunSession, Session, Start, load_model, load_policy_on_ranks,
};
use candle_grpo::train::progress::NoProgress;
use candle_grpo::train::rollout::{Deliver, GenerationBatch, LocalGenerator, PolicyWeights};
use candle_grpo::train::{Generator, RewardConfig};

use candle_grpo_test_support::on_ranks;

use crate::support::{CONFIG, folder, short_config};

/// Counts calls to the generator that it wraps.
struct Counting {
    local: LocalGenerator,
    completions: AtomicUsize,
    versions: Mutex<Vec<u64>>,
}

impl Generator for Counting {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let seeds = batch.prompts.iter().map(|prompt| prompt.seeds.len());
        self.completions.fetch_add(seeds.sum(), Ordering::SeqCst);
        self.local.generate(batch, deliver)
    }

    fn weights_changed(
        &self,
        weights: &PolicyWeights<'_>,
        progress: &dyn candle_grpo::train::Progress,
    ) -> Result<()> {
        self.versions.lock().unwrap().push(weights.version);
        self.local.weights_changed(weights, progress)
    }
}

/// It samples the completions for steps and evaluations.
#[test]
fn a_session_takes_any_generator() -> Result<()> {
    let folder = folder("");
    let run = |name: &str, custom: bool| -> Result<(Vec<u8>, Option<Arc<Counting>>)> {
        let path = |name: &str| folder.path().join(name).display().to_string();
        let config = CONFIG
            .replace("model: model", &format!("model: {}", path("model")))
            .replace("data.jsonl", &path("data.jsonl"))
            .replace("run_dir: run", &format!("run_dir: {}", path(name)))
            .replace("max_steps: 12", "max_steps: 4");
        let config = RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), &config)?)?;
        let pretrained = load_model(&config.model)?;
        let (_, prompts) = RunPrompts::read(&config, &pretrained)?;
        let reward = RewardConfig::build(&config.rewards, &Device::Cpu)?;
        let generator = custom.then(|| {
            let local = LocalGenerator::new(&pretrained.model, &pretrained.parameters);
            Arc::new(Counting {
                local: local.unwrap(),
                completions: AtomicUsize::new(0),
                versions: Mutex::default(),
            })
        });
        let progress = Arc::new(NoProgress);
        let start = Start::New;
        let mut session = match &generator {
            Some(generator) => {
                let generator = Arc::clone(generator) as Arc<dyn Generator>;
                Session::with_generator(
                    config, pretrained, prompts, reward, start, progress, generator,
                )?
            }
            None => Session::new(config, pretrained, prompts, reward, start, progress)?,
        };
        while session.advance()? != Progress::Finished {}
        let weights = session
            .path()
            .join("checkpoints/step-000004/model.safetensors");
        Ok((fs::read(weights)?, generator))
    };
    let (local, _) = run("local", false)?;
    let (custom, generator) = run("custom", true)?;
    assert!(local == custom);
    let generator = generator.unwrap();
    // Four steps of 16 completions, and evaluations of 16 before the first and after the last.
    assert_eq!(generator.completions.load(Ordering::SeqCst), 6 * 16);
    assert_eq!(*generator.versions.lock().unwrap(), [0, 1, 2, 3, 4]);
    Ok(())
}

/// In bf16, where ranks divide the f32 weights while they read them: the run has the same first
/// weights on any number of ranks.
#[test]
fn a_session_of_ranks_goes_on_with_other_ranks() {
    let folder = folder("");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let run = |world_size: usize, sharding: &str, steps: usize, start: Start| {
        let config = short_config(steps)
            .replace("model: model", &format!("model: {}", path("model")))
            .replace("data.jsonl", &path("data.jsonl"))
            .replace("run_dir: run", &format!("run_dir: {}", path("run")))
            + &format!("training: {{sharding: {sharding}, compute_dtype: bf16}}\n");
        let ranks = on_ranks(world_size, |collective| -> Result<()> {
            let document = Document::from_yaml(Path::new("run.yaml"), &config)?;
            let config = RunConfig::new(&document)?;
            let pretrained = load_policy_on_ranks(&config, &collective)?;
            let divides = sharding == "resident" && world_size > 1;
            assert_eq!(pretrained.parameters.is_divided(), divides);
            let (_, prompts) = RunPrompts::read(&config, &pretrained)?;
            let reward = RewardConfig::build(&config.rewards, &Device::Cpu)?;
            let progress = Arc::new(NoProgress);
            let mut session = Session::on_ranks(
                config, pretrained, prompts, reward, start, progress, collective,
            )?;
            while session.advance()? != Progress::Finished {}
            assert_eq!(session.trainer().steps(), steps);
            Ok(())
        });
        ranks.into_iter().collect::<Result<()>>().unwrap();
    };
    run(3, "resident", 2, Start::New);
    run(1, "none", 4, Start::Resume);
    run(2, "optimizer", 6, Start::Resume);
    run(2, "resident", 8, Start::Resume);
}
