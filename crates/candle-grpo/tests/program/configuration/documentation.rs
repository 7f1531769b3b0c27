//! docs/configuration.md has a table for each section, made from its struct's comments and
//! defaults.
//!
//! `UPDATE_DOCS=1 cargo test --release -p candle-grpo documentation` rewrites the tables.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo::config::{Document, Import, Preset, RunConfig, SftEvaluationConfig, SftRunConfig};
use candle_grpo::core::rewards::CosineLength;
use candle_grpo::train::DatasetConfig;
use candle_grpo::train::environment::{
    EnvironmentKind, EnvironmentLimits, McpServerConfig, ProgramToolConfig,
};
use candle_grpo::train::learn::DemonstrationConfig;
use candle_grpo::train::rewards::{
    CodeLimits, ExactReward, F1Reward, InstructionsReward, JsonReward, JudgeConfig, JudgeScore,
    MathReward, MultipleChoiceReward, NumericReward, ProgramConfig, RewardKind, RewardModelConfig,
};
use candle_grpo::train::run::TrackerConfig;
use candle_grpo::train::sft::{SftConfig, SftDataConfig, SftSchedule};
use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A table: its section, the file and struct with the comments, and the defaults.
struct Table {
    section: &'static str,
    file: &'static str,
    name: &'static str,
    defaults: Value,
    /// Struct fields that are not keys.
    without: &'static [&'static str],
}

fn tables() -> Vec<Table> {
    let text = "model: m\ndata: {train: d, held_out: h}\nrewards: [{kind: json}]\nrun_dir: r\n";
    let document = Document::from_yaml(Path::new("x.yaml"), text).unwrap();
    let run = RunConfig::new(&document).unwrap().to_value().unwrap();
    let table = |section, file, name, defaults| Table {
        section,
        file,
        name,
        defaults,
        without: &[],
    };
    let of = |section: &str| run[section].clone();
    let kind = |options: Value| {
        serde_json::to_value(serde_json::from_value::<RewardKind>(options).unwrap()).unwrap()
    };
    let environment = |options: Value| {
        serde_json::to_value(serde_json::from_value::<EnvironmentKind>(options).unwrap()).unwrap()
    };
    let sections = "crates/candle-grpo/src/config/sections.rs";
    let rewards = "crates/candle-grpo-rewards/src/config.rs";
    vec![
        table("model", sections, "ModelConfig", Value::Null),
        table("teacher", sections, "TeacherConfig", Value::Null),
        table(
            "data",
            "crates/candle-grpo-train/src/data/dataset.rs",
            "DatasetConfig",
            serde_json::to_value(DatasetConfig::default()).unwrap(),
        ),
        table(
            "demonstrations",
            "crates/candle-grpo-train/src/learn/demonstrations.rs",
            "DemonstrationConfig",
            serde_json::to_value(DemonstrationConfig::default()).unwrap(),
        ),
        Table {
            without: &["kind"],
            ..table("rewards", rewards, "RewardConfig", json!({"weight": 1}))
        },
        table(
            "numeric",
            "crates/candle-grpo-rewards/src/numeric.rs",
            "NumericReward",
            serde_json::to_value(NumericReward::default()).unwrap(),
        ),
        table(
            "math",
            "crates/candle-grpo-rewards/src/math/mod.rs",
            "MathReward",
            serde_json::to_value(MathReward::default()).unwrap(),
        ),
        table(
            "exact",
            "crates/candle-grpo-rewards/src/exact.rs",
            "ExactReward",
            serde_json::to_value(ExactReward::default()).unwrap(),
        ),
        table(
            "multiple_choice",
            "crates/candle-grpo-rewards/src/multiple_choice.rs",
            "MultipleChoiceReward",
            serde_json::to_value(MultipleChoiceReward::default()).unwrap(),
        ),
        table(
            "f1",
            "crates/candle-grpo-rewards/src/f1.rs",
            "F1Reward",
            serde_json::to_value(F1Reward::default()).unwrap(),
        ),
        table(
            "instructions",
            "crates/candle-grpo-rewards/src/instructions/mod.rs",
            "InstructionsReward",
            serde_json::to_value(InstructionsReward::default()).unwrap(),
        ),
        table(
            "regex",
            "crates/candle-grpo-rewards/src/format.rs",
            "RegexOptions",
            kind(json!({"kind": "regex", "pattern": ""})),
        ),
        table(
            "tags",
            "crates/candle-grpo-rewards/src/format.rs",
            "TagsOptions",
            kind(json!({"kind": "tags", "tags": []})),
        ),
        table(
            "json",
            "crates/candle-grpo-rewards/src/json.rs",
            "JsonReward",
            serde_json::to_value(JsonReward::default()).unwrap(),
        ),
        table(
            "length",
            "crates/candle-grpo-core/src/rewards/overlong.rs",
            "OverlongPenalty",
            json!({"factor": 1, "unbounded": false}),
        ),
        table(
            "repetition",
            "crates/candle-grpo-core/src/rewards/repetition.rs",
            "RepetitionPenalty",
            kind(json!({"kind": "repetition"})),
        ),
        table("cosine", rewards, "CosineOptions", json!({"min_score": 1})),
        table(
            "scale",
            "crates/candle-grpo-core/src/rewards/cosine.rs",
            "CosineLength",
            serde_json::to_value(CosineLength::default()).unwrap(),
        ),
        table(
            "relative_length",
            rewards,
            "RelativeLengthOptions",
            json!({"min_score": 1}),
        ),
        table(
            "program",
            "crates/candle-grpo-rewards/src/program_reward/mod.rs",
            "ProgramConfig",
            {
                let config: ProgramConfig = serde_json::from_value(json!({"command": []})).unwrap();
                serde_json::to_value(config).unwrap()
            },
        ),
        table(
            "code",
            "crates/candle-grpo-rewards/src/code/mod.rs",
            "CodeConfig",
            {
                // They have a table.
                let mut options = kind(json!({"kind": "code"}));
                options["limits"] = Value::Null;
                options
            },
        ),
        table(
            "code limits",
            "crates/candle-grpo-rewards/src/code/limits.rs",
            "CodeLimits",
            serde_json::to_value(CodeLimits::default()).unwrap(),
        ),
        table(
            "reward_model",
            "crates/candle-grpo-train/src/rewards/reward_model.rs",
            "RewardModelConfig",
            serde_json::to_value(RewardModelConfig::new("")).unwrap(),
        ),
        table(
            "judge",
            "crates/candle-grpo-rewards/src/judge/config.rs",
            "JudgeConfig",
            {
                let config = json!({"url": "", "model": "", "prompt": "", "score": {}});
                let config: JudgeConfig = serde_json::from_value(config).unwrap();
                let mut defaults = serde_json::to_value(config).unwrap();
                defaults["score"] = Value::Null;
                defaults
            },
        ),
        table(
            "judge score",
            "crates/candle-grpo-rewards/src/judge/score.rs",
            "JudgeScore",
            serde_json::to_value(JudgeScore::default()).unwrap(),
        ),
        table(
            "ensemble",
            rewards,
            "EnsembleOptions",
            kind(json!({"kind": "ensemble", "judges": []})),
        ),
        table(
            "environment",
            "crates/candle-grpo-train/src/environment/config.rs",
            "EnvironmentConfig",
            Value::Null,
        ),
        table(
            "limits",
            "crates/candle-grpo-train/src/environment/environments.rs",
            "EnvironmentLimits",
            serde_json::to_value(EnvironmentLimits::default()).unwrap(),
        ),
        table(
            "environment program",
            "crates/candle-grpo-train/src/environment/program.rs",
            "ProgramEnvironmentConfig",
            environment(json!({"kind": "program", "command": []})),
        ),
        table(
            "environment tools",
            "crates/candle-grpo-train/src/environment/tools/config.rs",
            "ToolsConfig",
            environment(json!({"kind": "tools", "tools": []})),
        ),
        table(
            "environment agent",
            "crates/candle-grpo-train/src/environment/agent.rs",
            "AgentConfig",
            environment(json!({"kind": "agent"})),
        ),
        table(
            "tool",
            "crates/candle-grpo-train/src/environment/tools/program.rs",
            "ProgramToolConfig",
            {
                let config = json!({"name": "", "command": []});
                let config: ProgramToolConfig = serde_json::from_value(config).unwrap();
                serde_json::to_value(config).unwrap()
            },
        ),
        table(
            "mcp server",
            "crates/candle-grpo-train/src/environment/tools/mcp/config.rs",
            "McpServerConfig",
            {
                let config: McpServerConfig = serde_json::from_value(json!({"name": ""})).unwrap();
                serde_json::to_value(config).unwrap()
            },
        ),
        table(
            "algorithm",
            "crates/candle-grpo/src/config/algorithm.rs",
            "AlgorithmConfig",
            Value::Null,
        ),
        Table {
            without: &["seed", "greedy"],
            ..table(
                "sampling",
                "crates/candle-grpo-train/src/rollout/sampling_config.rs",
                "SamplingConfig",
                of("sampling"),
            )
        },
        table(
            "rollout",
            "crates/candle-grpo-train/src/rollout/config.rs",
            "RolloutConfig",
            of("rollout"),
        ),
        table(
            "optimizer",
            "crates/candle-grpo-nn/src/optim/adamw.rs",
            "AdamWConfig",
            of("optimizer"),
        ),
        table(
            "schedule",
            "crates/candle-grpo-train/src/learn/schedule.rs",
            "LearningRateSchedule",
            of("schedule"),
        ),
        Table {
            without: &["sampling", "rollout", "recipe", "optimizer", "schedule"],
            ..table(
                "trainer",
                "crates/candle-grpo-train/src/learn/train_config.rs",
                "TrainConfig",
                run.clone(),
            )
        },
        table("evaluation", sections, "EvaluationConfig", of("evaluation")),
        table("checkpoint", sections, "CheckpointConfig", of("checkpoint")),
        table(
            "rollout_log",
            "crates/candle-grpo-train/src/learn/rollout_log.rs",
            "RolloutLogConfig",
            of("rollout_log"),
        ),
        table(
            "trackers",
            "crates/candle-grpo-train/src/run/tracker.rs",
            "TrackerConfig",
            serde_json::to_value(TrackerConfig::new(Vec::new())).unwrap(),
        ),
        Table {
            without: &["name", "has_distribution"],
            ..table(
                "suites",
                "crates/candle-grpo/src/config/suite.rs",
                "SuiteConfig",
                Value::Null,
            )
        },
        Table {
            without: &["optimizer", "schedule", "epochs", "max_steps", "seed"],
            ..table(
                "sft",
                "crates/candle-grpo-train/src/sft/config.rs",
                "SftConfig",
                serde_json::to_value(SftConfig::default()).unwrap(),
            )
        },
        table(
            "sft data",
            "crates/candle-grpo-train/src/sft/data_config.rs",
            "SftDataConfig",
            serde_json::to_value(SftDataConfig::default()).unwrap(),
        ),
        table(
            "sft schedule",
            "crates/candle-grpo-train/src/sft/config.rs",
            "SftSchedule",
            serde_json::to_value(SftSchedule::default()).unwrap(),
        ),
        table(
            "sft evaluation",
            "crates/candle-grpo/src/config/sft.rs",
            "SftEvaluationConfig",
            serde_json::to_value(SftEvaluationConfig::default()).unwrap(),
        ),
    ]
}

/// Returns a struct's fields with their comments.
fn fields(source: &str, name: &str) -> Vec<(String, String)> {
    let start = [" {", "<"]
        .iter()
        .find_map(|after| source.find(&format!("pub struct {name}{after}")))
        .unwrap_or_else(|| panic!("{name}"));
    let mut fields = Vec::new();
    let mut comment = String::new();
    let mut is_key = true;
    for line in source[start..]
        .lines()
        .skip(1)
        .take_while(|line| *line != "}")
    {
        let line = line.trim();
        if let Some(words) = line.strip_prefix("///") {
            comment.push_str(words);
        } else if line == "#[serde(skip)]" {
            is_key = false;
        } else if let Some((field, _)) = line
            .strip_prefix("pub ")
            .and_then(|line| line.split_once(':'))
        {
            if is_key {
                fields.push((field.to_owned(), plain(comment.trim())));
            }
            comment.clear();
            is_key = true;
        }
    }
    fields
}

/// Returns a comment without rustdoc links.
fn plain(comment: &str) -> String {
    let mut text = comment.replace('|', "\\|");
    while let Some(start) = text.find("[`") {
        let Some(end) = text[start..].find("`]").map(|end| start + end) else {
            break;
        };
        let inside = text[start + 1..=end].to_owned();
        let mut rest = text[end + 2..].to_owned();
        if rest.starts_with('(') {
            rest = rest[rest.find(')').unwrap() + 1..].to_owned();
        }
        text = format!("{}{inside}{rest}", &text[..start]);
    }
    text.replace("`Self::", "`")
}

/// A comment without its last sentence, if that one states the default, which has a column.
fn without_default(comment: &str) -> &str {
    let is_value = |text: &str| !text.contains(' ') || text.starts_with('`');
    let start = comment.rfind("Default ").filter(|start| {
        let value = comment[start + "Default ".len()..].strip_suffix('.');
        value.is_some_and(is_value)
    });
    match start {
        Some(start) => comment[..start].trim_end(),
        None => comment
            .strip_suffix("Absent by default.")
            .or_else(|| comment.strip_suffix("Empty by default."))
            .map_or(comment, str::trim_end),
    }
}

fn render(table: &Table) -> String {
    let source = fs::read_to_string(root().join(table.file)).unwrap();
    let has_defaults = !table.defaults.is_null();
    let mut text = String::from(if has_defaults {
        "| key | default | |\n| --- | --- | --- |\n"
    } else {
        "| key | |\n| --- | --- |\n"
    });
    let fields = fields(&source, table.name);
    assert!(!fields.is_empty(), "{}", table.name);
    for (field, comment) in fields {
        if table.without.contains(&field.as_str()) {
            continue;
        }
        assert!(!comment.is_empty(), "{}.{field}", table.name);
        let default = match table.defaults.get(&field) {
            None | Some(Value::Null) => String::new(),
            Some(Value::Array(items)) if items.is_empty() => String::new(),
            Some(Value::Object(map)) if map.is_empty() => String::new(),
            Some(Value::String(default)) if default.is_empty() => String::new(),
            Some(Value::String(default)) => format!("`{}`", default.replace('\n', "\\n")),
            Some(default) => format!("`{default}`"),
        };
        text += &if has_defaults {
            let comment = without_default(&comment);
            format!("| `{field}` | {default} | {comment} |\n")
        } else {
            format!("| `{field}` | {comment} |\n")
        };
    }
    text
}

#[test]
fn each_kind_of_reward_has_a_section_and_a_table() {
    let text = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let tables: Vec<&str> = tables().iter().map(|table| table.section).collect();
    let kinds = RewardKind::NAMES;
    for kind in kinds {
        assert!(tables.contains(kind), "{kind}");
        assert!(text.contains(&format!("\n### kind: {kind}\n")), "{kind}");
    }
    let sections = text.matches("\n### kind: ").count();
    assert_eq!(sections, kinds.len());
}

/// Returns the preset table.
fn presets() -> String {
    let mut text = String::from("| preset | algorithm | source |\n| --- | --- | --- |\n");
    for preset in Preset::ALL {
        let source = preset.source();
        let name = source.trim_start_matches("https://");
        text += &format!("| `{preset}` | {} | [{name}]({source}) |\n", preset.title());
    }
    text
}

#[test]
fn every_section_has_its_table() {
    let path = root().join("docs/configuration.md");
    let text = fs::read_to_string(&path).unwrap();
    let mut updated = text.clone();
    let keys = tables().into_iter().map(|table| {
        let mark = format!("<!-- keys of {} -->\n", table.section);
        (mark, render(&table))
    });
    for (mark, table) in keys.chain([("<!-- presets -->\n".to_owned(), presets())]) {
        let start = updated.find(&mark).unwrap_or_else(|| panic!("no {mark}")) + mark.len();
        let length: usize = updated[start..]
            .split_inclusive('\n')
            .take_while(|line| line.starts_with('|'))
            .map(str::len)
            .sum();
        updated.replace_range(start..start + length, &table);
    }
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &updated).unwrap();
    } else {
        assert!(
            updated == text,
            "docs/configuration.md is not what the comments of the structs say: run this test with UPDATE_DOCS=1"
        );
    }
}

/// Checks that a document is a configuration.
fn accepted(document: &Document, block: &str) {
    let checked = if SftRunConfig::is_of(document) {
        SftRunConfig::new(document).map(drop)
    } else {
        RunConfig::new(document).map(drop)
    };
    checked.unwrap_or_else(|error| panic!("{error}\n{block}"));
}

/// Every example on the page about supervised training is accepted.
#[test]
fn every_example_of_supervised_training_is_accepted() {
    let text = fs::read_to_string(root().join("docs/sft.md")).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let blocks: Vec<&str> = blocks.filter_map(|x| x.strip_prefix("yaml\n")).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        accepted(
            &Document::from_yaml(Path::new("docs.yaml"), block).unwrap(),
            block,
        );
    }
}

/// Every example on the page is accepted.
#[test]
fn every_example_is_accepted() {
    let text = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let mut examples = 0;
    for (language, block) in text
        .split("```")
        .skip(1)
        .step_by(2)
        .filter_map(|block| block.split_once('\n'))
    {
        let document = match language {
            "yaml" => Document::from_yaml(Path::new("docs.yaml"), block),
            "toml" => Document::from_toml(Path::new("docs.toml"), block),
            _ => continue,
        };
        let document = document.unwrap();
        let document = Import::new(&document).map_or(document, |import| import.document);
        accepted(&document, block);
        examples += 1;
    }
    assert!(examples >= 4, "{examples}");
}
