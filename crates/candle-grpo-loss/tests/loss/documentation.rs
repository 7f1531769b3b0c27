//! Tests for the documentation: configurations in docs/algorithms.md, preset counts, imports in
//! examples, and dependencies in the README.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Error, Result};
use candle_grpo_core::advantage::Whitening;
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::{
    CosineLength, CostPenalty, OverlongPenalty, RepetitionPenalty, ScoreEnsemble,
};
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::selection::{
    AdvantageRange, DifficultyPools, DynamicSampling, SampleFilter, ScoreResampling,
};
use candle_grpo_core::trajectories::Gigpo;
use candle_grpo_core::{AdvantagePipeline, GroupAdvantage, Kl, RewardShaping, TokenAdvantage};
use candle_grpo_loss::correction::ProximalPolicy;
use candle_grpo_loss::{
    AdaptiveEntropy, Aggregation, DistillationLoss, KlLoss, PolicyLoss, Recipe, RolloutCorrection,
    Surrogate, ValueLoss,
};
use serde::de::DeserializeOwned;

use crate::presets::presets;

/// A configuration on the page.
struct Shown {
    /// The first cell in its row.
    name: String,
    /// The type that the page names for it.
    of: String,
    text: String,
}

/// Returns the text between the first two backticks.
fn quoted(text: &str) -> Option<&str> {
    text.split('`').nth(1)
}

/// Finds configurations in columns headed "Configuration". The heading names their type or, if it
/// does not, the row's first name.
fn shown() -> Result<Vec<Shown>> {
    let page = text("docs/algorithms.md")?;
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
            "AdvantagePipeline" => read::<AdvantagePipeline>(text),
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
            let experimental = row.name.strip_prefix("experimental::policy_loss::");
            let constructor = constructor.or(experimental);
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

/// Returns the text in one of the repository's files.
fn text(path: &str) -> Result<String> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::fs::read_to_string(format!("{root}/{path}")).map_err(Error::wrap)
}

/// Constructors, presets and page rows are one list, and each page states its length.
#[test]
fn each_page_counts_the_presets_of_one_list() -> Result<()> {
    let constructors = |stable: &str, experimental: &str| -> Result<BTreeSet<String>> {
        let folder = "crates/candle-grpo-loss/src";
        let source = text(&format!("{folder}/{stable}"))?;
        let experimental = text(&format!("{folder}/experimental/{experimental}"))?;
        let functions = source
            .lines()
            .chain(experimental.lines())
            .filter_map(|line| {
                let (name, rest) = line.trim().strip_prefix("pub fn ")?.split_once('(')?;
                let constructs = ["Self", "PolicyLoss", "Recipe"].map(|x| format!("-> {x} {{"));
                let constructs = constructs.iter().any(|end| rest.ends_with(end));
                constructs.then(|| name.to_owned())
            });
        Ok(functions.collect())
    };
    let page = text("docs/algorithms.md")?;
    let rows = |owner: &str, module: &str| -> BTreeSet<String> {
        let starts = [
            format!("| `{owner}::"),
            format!("| `experimental::{module}::"),
        ];
        let cells = page
            .lines()
            .filter_map(|line| starts.iter().find_map(|start| line.strip_prefix(start)));
        let names = cells.filter_map(|cell| cell.split(['(', '`']).next());
        names.map(str::to_owned).collect()
    };
    let losses = constructors("policy_loss/presets.rs", "policy_loss.rs")?;
    assert_eq!(losses, rows("PolicyLoss", "policy_loss"));
    let tested = presets().into_iter().map(|(name, _)| name.to_owned());
    assert_eq!(losses, tested.collect());
    let recipes = constructors("recipe.rs", "recipe.rs")?;
    assert_eq!(recipes, rows("Recipe", "recipe"));
    // The key `preset` of a configuration file.
    let configuration = text("docs/configuration.md")?;
    let table = configuration.split_once("<!-- presets -->\n");
    let table = table.and_then(|(_, rest)| rest.split_once("\n\n"));
    let rows = table.map_or("", |(rows, _)| rows).lines();
    let named = rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next());
    assert_eq!(named.map(str::to_owned).collect::<BTreeSet<_>>(), recipes);
    let estimators = page
        .split_once("### By name")
        .and_then(|(_, rest)| rest.split_once("###"))
        .map(|(section, _)| {
            section
                .lines()
                .filter(|line| line.starts_with("| `"))
                .count()
                - 1
        });
    let estimators = estimators.expect("the section");
    let (losses, recipes) = (losses.len(), recipes.len());
    for (path, sentence) in [
        ("README.md", format!("**{recipes} presets,")),
        ("README.md", format!("[{losses} losses]")),
        ("README.md", format!("[{estimators} advantage estimators]")),
        ("docs/algorithms.md", format!("Each of the {losses} losses")),
        ("docs/algorithms.md", format!("Each of the {recipes} rows")),
        ("docs/algorithms.md", format!("{estimators} estimators")),
        (
            "crates/candle-grpo-loss/README.md",
            format!("**{losses} losses"),
        ),
        (
            "crates/candle-grpo-core/README.md",
            format!("**{estimators} published estimators"),
        ),
    ] {
        assert!(text(path)?.contains(&sentence), "{path}: {sentence}");
    }
    Ok(())
}

/// Users may paste examples from a single crate: they import no other crate in this project, and
/// re-exports link to their own crate's page.
#[test]
fn examples_import_their_own_crate_only() -> Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    for name in ["core", "kernels", "loss"] {
        let folder = root.join(format!("crates/candle-grpo-{name}"));
        let mut sources = vec![folder.join("README.md")];
        let mut folders = vec![folder.join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).map_err(Error::wrap)? {
                let path = entry.map_err(Error::wrap)?.path();
                if path.is_dir() {
                    folders.push(path)
                } else {
                    sources.push(path)
                }
            }
        }
        for path in sources {
            let source = std::fs::read_to_string(&path).map_err(Error::wrap)?;
            let is_page = path.extension().is_some_and(|x| x == "md");
            let mut previous = "";
            for line in source.lines().map(str::trim) {
                let shown = line
                    .strip_prefix("///")
                    .or_else(|| line.strip_prefix("//!"))
                    .or_else(|| is_page.then_some(line));
                let shown = shown.map(|text| text.trim().trim_start_matches("# "));
                if let Some(import) = shown.and_then(|text| text.strip_prefix("use candle_grpo_")) {
                    assert!(import.starts_with(name), "{path:?}: {line}");
                }
                if line.starts_with("pub use candle_grpo_") {
                    assert_eq!(previous, "#[doc(no_inline)]", "{path:?}: {line}");
                }
                previous = line;
            }
        }
    }
    Ok(())
}

/// The README names the Candle version that the crates use, and forwards the feature to each
/// dependency.
#[test]
fn the_dependencies_of_the_readme_are_those_of_the_crates() -> Result<()> {
    let (readme, workspace) = (text("README.md")?, text("Cargo.toml")?);
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
        if name.starts_with("candle-grpo") {
            assert!(text(&format!("crates/{name}/Cargo.toml"))?.contains("\ncuda = ["))
        } else {
            assert!(
                workspace.contains(&format!("\n{name} = {version}\n")),
                "{line}"
            )
        }
        forwarded.push(format!("\"{name}/cuda\""));
    }
    let feature = format!("cuda = [{}]", forwarded.join(", "));
    assert_eq!(features.trim(), feature);
    Ok(())
}
