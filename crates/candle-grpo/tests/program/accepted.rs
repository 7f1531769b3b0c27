//! Whatever `grpo check` accepts starts to train.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use candle_core::Device;
use candle_grpo::config::{Document, Preset, RunConfig};
use candle_grpo::run::{Progress, RunPrompts, RunSession, Session, Start, load_model};
use candle_grpo::train::progress::NoProgress;
use candle_grpo::train::{NotFinite, Pretrained, RewardConfig};
use candle_grpo_test_support::words;
use serde_json::{Value, json};

use crate::mutation::mutated;
use crate::support::folder;
use crate::teacher::needs_teacher;

/// Returns choices that look random and are the same in each run.
fn chooser(seed: u64) -> impl FnMut(usize) -> usize {
    let mut words = words(seed);
    move |below| (words.next().unwrap() % below as u64) as usize
}

fn document(value: &Value) -> Document {
    Document::from_yaml(Path::new("run.yaml"), &value.to_string()).unwrap()
}

/// Returns the configurations to change, one for each preset, each with what it comes to.
fn bases(folder: &Path) -> Vec<(Value, Value)> {
    let rows =
        ["abc", "d", "ee", "ca", "b", "cd"].map(|prompt| json!({"prompt": prompt, "answer": 1}));
    let rows = rows.map(|row| row.to_string()).join("\n");
    fs::write(folder.join("data.jsonl"), rows).unwrap();
    let presets = Preset::ALL.into_iter().map(Some);
    let base = |preset: Option<Preset>| {
        let mut base = json!({
            "model": folder.join("model"),
            "data": {"train": folder.join("data.jsonl"), "held_out_rows": 2},
            "rewards": [
                {"kind": "regex", "pattern": "^[ab]"},
                {"kind": "length", "max_length": 4, "buffer": 2},
                {"kind": "repetition", "weight": 0.1},
                {"kind": "ensemble", "judges": [{"kind": "numeric"}, {"kind": "exact"}, {"kind": "json"}]},
            ],
            "preset": preset,
            "prompts_per_step": 2,
            "num_generations": 3,
            "sampling": {"max_new_tokens": 4},
            "max_sampling_batches": 2,
            "evaluation": {"every_steps": null},
            "checkpoint": {"every_steps": null, "keep_best": false},
            "max_steps": 1,
            "run_dir": folder.join("run"),
        });
        if needs_teacher(preset) {
            base["teacher"] = json!({"model": folder.join("model")});
        }
        let run = RunConfig::new(&document(&base)).unwrap();
        (base, run.to_value().unwrap())
    };
    presets.chain([None]).map(base).collect()
}

/// Returns whether a step takes too long or too much memory for a test.
fn is_expensive(run: &RunConfig) -> bool {
    let train = &run.train;
    let completions = train.prompts_per_step.saturating_mul(train.num_generations);
    let passes = train
        .epochs
        .saturating_mul(train.max_sampling_batches.min(4));
    let rank = train.adapters.as_ref().map_or(1, |adapters| adapters.rank);
    completions.saturating_mul(passes) > 200 || rank > 200
}

/// Makes one step, and refuses what `grpo check` refuses first.
fn step(run: RunConfig, pretrained: Pretrained) -> Option<anyhow::Result<()>> {
    run.check_files().ok()?;
    let (_, prompts) = RunPrompts::read(&run, &pretrained).ok()?;
    let train = || -> anyhow::Result<()> {
        let reward = RewardConfig::build(&run.rewards, &Device::Cpu)?;
        let progress = Arc::new(NoProgress);
        let mut session = Session::new(run, pretrained, prompts, reward, Start::New, progress)?;
        loop {
            match session.advance()? {
                Progress::Step(_) | Progress::Finished => return Ok(()),
                _ => {}
            }
        }
    };
    Some(train())
}

#[test]
fn an_accepted_configuration_starts_to_train() {
    let folder = folder("");
    let bases = bases(folder.path());
    let model = bases[0].0["model"].as_str().unwrap().to_owned();
    let mut choose = chooser(7);
    let (mut refused, mut trained) = (0, 0);
    let mut failures: BTreeMap<String, String> = BTreeMap::new();
    while trained < 150 {
        let (base, effective) = &bases[choose(bases.len())];
        let changed = mutated(base, effective, &mut choose);
        let mut run = match RunConfig::new(&document(&changed)) {
            Ok(run) if !is_expensive(&run) => run,
            Ok(_) => continue,
            Err(_) => {
                refused += 1;
                continue;
            }
        };
        run.run_dir = folder.path().join(format!("run-{trained}-{refused}"));
        run.model.path = model.clone().into();
        run.model.chat_template = None;
        // The job has one process.
        run.train.sequence_ranks = 1;
        let pretrained = load_model(&run.model).unwrap();
        match step(run, pretrained) {
            None => refused += 1,
            Some(Ok(())) => trained += 1,
            // A loss may overflow: the step was computed.
            Some(Err(error)) if error.is::<NotFinite>() => trained += 1,
            Some(Err(error)) => {
                trained += 1;
                failures.insert(format!("{error:#}"), changed.to_string());
            }
        }
    }
    assert!(refused > 50, "only {refused} configurations were refused");
    assert!(failures.is_empty(), "{failures:#?}");
}

/// The property that `make fuzz TARGET=check` tests for longer.
#[test]
fn a_changed_configuration_is_refused_or_reads_as_itself() {
    let folder = folder("");
    let bases = bases(folder.path());
    let mut choose = chooser(11);
    let mut accepted = 0;
    for _ in 0..1500 {
        let (base, effective) = &bases[choose(bases.len())];
        let changed = mutated(base, effective, &mut choose);
        match RunConfig::new(&document(&changed)) {
            Err(error) => assert!(error.to_string().starts_with("run.yaml"), "{error}"),
            Ok(run) => {
                accepted += 1;
                let text = run.to_yaml().unwrap();
                let again = Document::from_yaml(Path::new("again.yaml"), &text).unwrap();
                let again = RunConfig::new(&again)
                    .unwrap_or_else(|error| panic!("{error}\n{text}\nof {changed}"));
                assert_eq!(again.to_yaml().unwrap(), text);
            }
        }
    }
    assert!(
        accepted > 100,
        "only {accepted} configurations were accepted"
    );
}
