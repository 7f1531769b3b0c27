//! The configurations that docs/algorithms.md shows are ones, and the dependencies of the README.

use candle_core::{Error, Result};
use candle_grpo_core::trajectories::Gigpo;
use candle_grpo_core::{
    AdvantageConfig, AdvantageRange, CoefSchedule, CosineLength, CostPenalty, DifficultyPools,
    DynamicSampling, GroupAdvantage, Kl, KlController, OverlongPenalty, RepetitionPenalty,
    RewardShaping, SampleFilter, ScoreEnsemble, ScoreResampling, TokenAdvantage, Whitening,
};
use candle_grpo_loss::rollout::ProximalPolicy;
use candle_grpo_loss::{
    AdaptiveEntropy, Aggregation, DistillationLoss, KlLoss, PolicyLoss, Recipe, RolloutCorrection,
    Surrogate, ValueLoss,
};
use serde::de::DeserializeOwned;

use crate::presets::presets;

/// A configuration of the page.
struct Shown {
    /// The first cell of its row.
    name: String,
    /// The type that it is said to be of.
    of: String,
    text: String,
}

/// Returns the text between the first two backticks.
fn quoted(text: &str) -> Option<&str> {
    text.split('`').nth(1)
}

/// A column headed "Configuration" holds them; that head names their type or, where it does not,
/// the first name of the row.
fn shown() -> Result<Vec<Shown>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/algorithms.md");
    let page = std::fs::read_to_string(path).map_err(Error::wrap)?;
    let mut found = Vec::new();
    let mut column: Option<(usize, Option<String>)> = None;
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let Some(at) = cells.iter().position(|c| c.starts_with("Configuration")) {
            column = Some((at, quoted(cells[at]).map(str::to_owned)));
        } else if !line.starts_with('|') {
            column = None;
        } else if let Some((at, of)) = &column {
            let first = quoted(cells[1]).unwrap_or_default();
            let of = of
                .clone()
                .unwrap_or_else(|| first.split("::").next().unwrap_or_default().to_owned());
            let texts = cells[*at].split('`').skip(1).step_by(2);
            found.extend(
                texts
                    .filter(|t| t.starts_with(['{', '"']))
                    .map(|text| Shown {
                        name: first.to_owned(),
                        of: of.clone(),
                        text: text.to_owned(),
                    }),
            );
        }
    }
    Ok(found)
}

fn read<T: DeserializeOwned>(text: &str) -> serde_json::Result<()> {
    serde_json::from_str::<T>(text).map(|_| ())
}

#[test]
fn each_configuration_is_read_as_the_type_that_it_is_shown_for() -> Result<()> {
    let shown = shown()?;
    assert!(shown.len() > 150, "{} configurations", shown.len());
    for Shown { name, of, text } in &shown {
        let result = match of.as_str() {
            "AdaptiveEntropy" => read::<AdaptiveEntropy>(text),
            "AdvantageConfig" => read::<AdvantageConfig>(text),
            "Aggregation" => read::<Aggregation>(text),
            "AdvantageRange" => read::<AdvantageRange>(text),
            "CoefSchedule" => read::<CoefSchedule>(text),
            "CosineLength" => read::<CosineLength>(text),
            "CostPenalty" => read::<CostPenalty>(text),
            "DifficultyPools" => read::<DifficultyPools>(text),
            "DistillationLoss" => read::<DistillationLoss>(text),
            "DynamicSampling" => read::<DynamicSampling>(text),
            "Gigpo" => read::<Gigpo>(text),
            "GroupAdvantage" => read::<GroupAdvantage>(text),
            "Kl" => read::<Kl>(text),
            "KlController" => read::<KlController>(text),
            "KlLoss" => read::<KlLoss>(text),
            "OverlongPenalty" => read::<OverlongPenalty>(text),
            "PolicyLoss" => read::<PolicyLoss>(text),
            "ProximalPolicy" => read::<ProximalPolicy>(text),
            "Recipe" => read::<Recipe>(text),
            "RepetitionPenalty" => read::<RepetitionPenalty>(text),
            "RewardShaping" => read::<RewardShaping>(text),
            "RolloutCorrection" => read::<RolloutCorrection>(text),
            "SampleFilter" => read::<SampleFilter>(text),
            "ScoreEnsemble" => read::<ScoreEnsemble>(text),
            "ScoreResampling" => read::<ScoreResampling>(text),
            "Surrogate" => read::<Surrogate>(text),
            "TokenAdvantage" => read::<TokenAdvantage>(text),
            "ValueLoss" => read::<ValueLoss>(text),
            "Whitening" => read::<Whitening>(text),
            other => panic!("{name}: a configuration of {other}, which this test does not know"),
        };
        if let Err(error) = result {
            panic!("{name}: {text} is no {of}: {error}");
        }
    }
    Ok(())
}

#[test]
fn each_preset_is_the_configuration_that_is_shown() -> Result<()> {
    let shown = shown()?;
    for (name, preset) in presets() {
        let row = shown.iter().find(|row| {
            let constructor = row.name.strip_prefix("PolicyLoss::");
            constructor.is_some_and(|c| c.split('(').next() == Some(name))
        });
        let Some(row) = row else {
            panic!("{name} is not documented");
        };
        let read: PolicyLoss = serde_json::from_str(&row.text).map_err(Error::wrap)?;
        // Numbers that the caller chooses may differ.
        let chosen = ["dr_grpo", "deepseek_v3_2"];
        assert!(
            read == preset || chosen.contains(&name),
            "{name}: {}",
            row.text
        );
    }
    Ok(())
}

/// The README names the version of Candle that the crates use, and forwards the feature to each
/// dependency.
#[test]
fn the_dependencies_of_the_readme_are_those_of_the_crates() -> Result<()> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let read = |path: &str| std::fs::read_to_string(format!("{root}/{path}")).map_err(Error::wrap);
    let (readme, workspace) = (read("README.md")?, read("Cargo.toml")?);
    let block = readme
        .split("```toml")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let (dependencies, features) = block
        .and_then(|block| block.split_once("[features]"))
        .expect("dependencies and features");
    let mut forwarded = Vec::new();
    for line in dependencies.lines().filter(|line| line.contains('=')) {
        let (name, version) = line.split_once(" = ").expect("a name and a version");
        match name.starts_with("candle-grpo") {
            true => assert!(read(&format!("crates/{name}/Cargo.toml"))?.contains("\ncuda = [")),
            false => assert!(
                workspace.contains(&format!("\n{name} = {version}\n")),
                "{line}"
            ),
        }
        forwarded.push(format!("\"{name}/cuda\""));
    }
    let feature = format!("cuda = [{}]", forwarded.join(", "));
    assert_eq!(features.trim(), feature);
    Ok(())
}
