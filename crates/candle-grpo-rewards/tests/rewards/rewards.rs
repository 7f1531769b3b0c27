//! Reward functions as a configuration names them.

use candle_grpo_core::rewards::ScoreEnsemble;
use candle_grpo_rewards::{
    EnsembleReward, FinishReason, RewardConfig, RewardFunction, Sample, Score, Scores,
    WeightedRewards,
};
use candle_grpo_test_support::device;
use rstest::rstest;
use serde_json::{Value, json};

fn sample<'a>(completion: &'a str, columns: &'a Value) -> Sample<'a> {
    Sample {
        prompt: "ask",
        messages: &[],
        completion,
        prompt_tokens: &[1],
        completion_tokens: &[2, 3, 2, 3, 2],
        finish_reason: FinishReason::StopToken,
        columns,
        group: 0,
    }
}

fn build(rewards: Value) -> anyhow::Result<WeightedRewards> {
    RewardConfig::build(
        &serde_json::from_value::<Vec<RewardConfig>>(rewards)?,
        device(),
    )
}

fn score(reward: Value, completion: &str) -> f32 {
    let row = json!({"answer": "... #### 1,200", "person": {"age": 7}});
    let rewards = build(json!([reward])).unwrap();
    rewards.score(&[sample(completion, &row)]).unwrap()[0]
        .value()
        .unwrap()
}

#[rstest]
#[case(json!({"kind": "numeric"}), "makes $1200.00", 1.)]
#[case(json!({"kind": "numeric", "weight": 0.5}), "makes $1200.00", 0.5)]
#[case(json!({"kind": "numeric", "find": "boxed"}), "1200", 0.)]
#[case(json!({"kind": "numeric", "find": {"tag": "a"}}), "<a>1200</a> 7", 1.)]
#[case(json!({"kind": "exact"}), "1,200", 1.)]
#[case(json!({"kind": "exact"}), "1200", 0.)]
#[case(json!({"kind": "regex", "pattern": "^a"}), "ab", 1.)]
#[case(json!({"kind": "regex", "pattern": "a", "whole": true}), "ab", 0.)]
#[case(json!({"kind": "tags", "tags": ["t"]}), "x <t></t>", 1.)]
#[case(json!({"kind": "tags", "tags": ["t"], "nothing_else": true}), "x <t></t>", 0.)]
#[case(json!({"kind": "json"}), "{}", 1.)]
#[case(json!({"kind": "json", "column": "person"}), "{}", 0.)]
#[case(json!({"kind": "json", "column": "person"}), r#"{"age": 7}"#, 1.)]
#[case(json!({"kind": "length", "max_length": 6, "buffer": 2}), "", -0.5)]
#[case(json!({"kind": "repetition", "ngram": 2}), "", -0.5)]
#[case(json!({"kind": "ensemble", "combine": "min", "judges": [{"kind": "json"}, {"kind": "numeric"}]}), "1200", 0.)]
#[case(json!({"kind": "ensemble", "combine": {"weighted": [1, 3]}, "judges": [{"kind": "json"}, {"kind": "numeric"}]}), "1200", 0.75)]
fn each_kind_of_reward_scores_a_completion(
    #[case] reward: Value,
    #[case] completion: &str,
    #[case] expected: f32,
) {
    assert_eq!(score(reward, completion), expected);
}

#[test]
fn a_sum_keeps_its_terms_apart() {
    let rewards = build(json!([
        {"kind": "numeric", "weight": 2},
        {"kind": "regex", "pattern": "therefore", "weight": 0.5, "name": "style"},
    ]))
    .unwrap();
    let row = json!({"answer": 3});
    let samples = [
        sample("3", &row),
        sample("therefore 3", &row),
        sample("therefore", &row),
    ];
    assert_eq!(rewards.score(&samples).unwrap(), [2., 2.5, 0.5]);
    let components = rewards.components(&samples).unwrap();
    let components: Vec<&[f32]> = components.iter().map(|scores| &**scores).collect();
    assert_eq!(components, [[2., 2., 0.], [0., 0.5, 0.5]]);
}

#[rstest]
#[case(json!([]), "rewards: none")]
#[case(json!([{"kind": "numeric", "tolerance": -1}]), "tolerance: -1")]
#[case(json!([{"kind": "numeric", "colum": "x"}]), "unknown field `colum`")]
#[case(json!([{"kind": "numerik"}]), "unknown variant `numerik`")]
#[case(json!([{"kind": "regex", "pattern": "("}]), "pattern: \"(\"")]
#[case(json!([{"kind": "json", "weight": "much"}]), "expected f64")]
#[case(json!([{"kind": "tags", "tags": []}]), "tags: none")]
#[case(json!([{"kind": "length", "max_length": 1, "buffer": 2}]), "buffer: 2")]
#[case(json!([{"kind": "repetition", "ngram": 0}]), "ngram: 0")]
#[case(json!([{"kind": "program", "command": []}]), "command: []")]
#[case(json!([{"kind": "program", "command": ["x"], "time_limit_seconds": 0}]), "time_limit_seconds: 0")]
#[case(json!([{"kind": "json", "weight": 1e300}]), "weight: 1e300")]
#[case(json!([{"kind": "ensemble", "judges": []}]), "judges: none")]
#[case(json!([{"kind": "ensemble", "judges": [{"kind": "numeric", "tolerance": -1}]}]), "judges[0].tolerance: -1")]
#[case(json!([{"kind": "ensemble", "judges": [{"kind": "json"}], "combine": {"weighted": [1, 2]}}]), "combine.weighted: 2 weights, must be one for each of 1 judges")]
fn an_option_that_is_not_valid_is_an_error(#[case] rewards: Value, #[case] words: &str) {
    let error = format!("{:#}", build(rewards).err().expect("an error"));
    assert!(error.contains(words), "{error}");
}

#[test]
fn rows_are_checked_before_anything_is_sampled() {
    let reward: RewardConfig =
        serde_json::from_value(json!({"kind": "numeric", "column": "result"})).unwrap();
    reward.check_row(&json!({"result": 1})).unwrap();
    let error = format!("{:#}", reward.check_row(&json!({"answer": 1})).unwrap_err());
    assert_eq!(
        error,
        "reward \"numeric\": column \"result\": absent, the row has \"answer\""
    );
}

/// Checked by `grpo check`, which starts no program.
#[test]
fn missing_programs_scripts_and_folders_are_found_without_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("reward.py");
    std::fs::write(&script, "").unwrap();
    let check = |options: Value| -> Result<(), String> {
        let mut reward = json!({"kind": "program"});
        for (key, value) in options.as_object().unwrap() {
            reward[key] = value.clone();
        }
        let reward: RewardConfig = serde_json::from_value(reward).unwrap();
        reward.check_files().map_err(|error| format!("{error:#}"))
    };
    check(json!({"command": ["sh", script]})).unwrap();
    check(json!({"command": ["sh", "-u", "reward.py"], "folder": folder.path()})).unwrap();
    check(json!({"command": ["sh", "-c", "no file"]})).unwrap();
    for (options, words) in [
        (
            json!({"command": ["no-such-program"]}),
            "command: \"no-such-program\", must be a program that exists in PATH",
        ),
        (
            json!({"command": ["./no-such-program"]}),
            "command: \"./no-such-program\", must be a program that exists",
        ),
        #[cfg(unix)]
        (json!({"command": [script]}), "must be executable"),
        (
            json!({"command": ["sh", "no-such.sh"]}),
            "command: no-such.sh, must be a file that exists",
        ),
        (
            json!({"command": ["python3.11", "no-such.py"]}),
            "that exists",
        ),
        (
            json!({"command": ["sh"], "folder": "no-such-folder"}),
            "folder: no-such-folder",
        ),
    ] {
        let error = check(options).unwrap_err();
        assert!(error.contains(words), "{words:?} in {error}");
    }
    let nested: RewardConfig = serde_json::from_value(
        json!({"kind": "ensemble", "judges": [{"kind": "program", "command": ["no-such-program"]}]}),
    )
    .unwrap();
    assert_eq!(
        nested.check_files().unwrap_err().to_string(),
        "judges[0].command: \"no-such-program\", must be a program that exists in PATH"
    );
}

#[rstest]
#[case(json!({"kind": "math"}), &["\\boxed{1/2}", "so $0.5$", "#### 0.50", "no idea", "\\boxed{2}", "the answer is 2."], &[0, 0, 0, 3, 4, 4])]
#[case(json!({"kind": "numeric"}), &["it is 1,200", "1200.0", "none", "$1200"], &[0, 0, -1, 0])]
#[case(json!({"kind": "exact"}), &["New  York", "#### New York", "new york"], &[0, 0, 2])]
#[case(json!({"kind": "multiple_choice", "column": "letter"}), &["(B)", "the answer is B", "c", "why not"], &[0, 0, 2, -1])]
#[case(json!({"kind": "cosine", "correct": {"kind": "numeric"}}), &["7", "8", "7.0"], &[0, 1, 0])]
fn equal_answers_have_one_vote(
    #[case] reward: Value,
    #[case] completions: &[&str],
    #[case] expected: &[isize],
) {
    let row = json!({"answer": "1200", "letter": "B"});
    let rewards = build(json!([{"kind": "json", "weight": 0.1}, reward])).unwrap();
    let votes = rewards.votes(completions, &row).unwrap().unwrap();
    let expected: Vec<Option<usize>> = expected
        .iter()
        .map(|place| usize::try_from(*place).ok())
        .collect();
    assert_eq!(votes, expected);
}

#[test]
fn a_reward_that_compares_no_answers_has_no_votes() {
    let rewards = build(json!([{"kind": "regex", "pattern": "a"}])).unwrap();
    assert_eq!(rewards.votes(&["a"], &Value::Null).unwrap(), None);
}

/// A run compares them when it resumes.
#[test]
fn the_files_and_folders_of_parts_are_those_of_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("reward.py");
    std::fs::write(&script, "").unwrap();
    let program = json!({"kind": "program", "command": ["python3", script]});
    let judge = json!({
        "kind": "judge",
        "url": "http://localhost:1",
        "model": "m",
        "prompt": "{completion}",
        "score": {"regex": "(.*)"},
        "cache": "replies",
    });
    let scaled = json!({"kind": "relative_length", "correct": program});
    let whole = json!({"kind": "ensemble", "judges": [scaled, judge]});
    let whole: RewardConfig = serde_json::from_value(whole).unwrap();
    assert_eq!(whole.files(), [script]);
    assert_eq!(whole.caches(), [std::path::Path::new("replies")]);
}

/// Says the same about each completion.
struct Says(&'static str);

impl RewardFunction for Says {
    fn score(&self, samples: &[Sample]) -> anyhow::Result<Vec<Score>> {
        Ok(vec![1f32.into(); samples.len()])
    }

    fn scores(&self, samples: &[Sample]) -> anyhow::Result<Scores> {
        let text = (!self.0.is_empty()).then(|| self.0.to_owned());
        Scores::new(self.score(samples)?, samples)?.with_feedback(vec![text; samples.len()])
    }
}

#[test]
fn wrappers_pass_on_what_rewards_say() {
    let row = json!({});
    let samples = [sample("a", &row), sample("b", &row)];
    let feedback = |reward: &dyn RewardFunction| {
        let mut components = reward.components(&samples).unwrap();
        assert_eq!(components.len(), 1);
        components.remove(0).feedback(1).map(str::to_owned)
    };
    let judges = || EnsembleReward::new(ScoreEnsemble::Min);
    let all = judges().with(Says("one")).with(Says("")).with(Says("two"));
    assert_eq!(feedback(&all).as_deref(), Some("one\n\ntwo"));
    let sum = WeightedRewards::new().with("judges", 0.5, judges().with(Says("one")));
    assert_eq!(feedback(&sum).as_deref(), Some("one"));
    assert_eq!(feedback(&judges().with(Says(""))), None);
    let scores = Says("one").scores(&samples).unwrap();
    let error = scores.with_feedback(vec![None]).unwrap_err().to_string();
    assert_eq!(
        error,
        "feedback: 1 for 2 samples, there must be one for each"
    );
}
