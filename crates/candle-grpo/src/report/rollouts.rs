//! Training completions as HTML.

use std::fmt::Write;
use std::iter::once;

use candle_grpo_train::environment::EpisodeEnd;
use candle_grpo_train::run::{BranchPlace, RolloutRecord, RolloutTurn, TurnRole};

use super::html::{escape, short};
use super::run::Run;

/// The largest number of steps shown per run, groups per step, and completions per group.
const STEPS: usize = 12;
const GROUPS: usize = 4;
const COMPLETIONS: usize = 8;
/// The largest number of characters in a text.
const CHARS: usize = 1500;
/// The same for the prompt in a group title.
const TITLE_CHARS: usize = 120;

/// Returns a section to choose a step and read its groups. `number` distinguishes the runs on a
/// page.
pub(super) fn rollouts(number: usize, run: &Run) -> String {
    let steps: Vec<&[RolloutRecord]> = run.rollouts.chunk_by(|a, b| a.step == b.step).collect();
    if steps.is_empty() {
        return String::new();
    }
    let mut section = format!(
        "<h2>Completions: {}</h2>\n<div class=\"steps\">\n<span>step</span>\n",
        escape(&run.name)
    );
    let shown = spread(steps.len(), STEPS);
    for (i, &at) in shown.iter().enumerate() {
        let (step, id) = (steps[at], format!("step-{number}-{i}"));
        // The last one is chosen at first.
        let checked = if i + 1 == shown.len() { " checked" } else { "" };
        let _ = writeln!(
            section,
            "<input type=\"radio\" name=\"step-{number}\" id=\"{id}\"{checked}><label for=\"{id}\">{}</label>\n<div class=\"step\">{}</div>",
            step[0].step,
            groups(step)
        );
    }
    section.push_str("</div>\n");
    if shown.len() < steps.len() {
        let _ = writeln!(
            section,
            "<p>{} of {} steps; <code>rollouts.jsonl</code> has all.</p>",
            shown.len(),
            steps.len()
        );
    }
    section
}

/// Returns at most `most` numbers below `count`, evenly spaced, including the first and the last.
fn spread(count: usize, most: usize) -> Vec<usize> {
    if count <= most {
        (0..count).collect()
    } else {
        (0..most).map(|i| i * (count - 1) / (most - 1)).collect()
    }
}

/// Returns a step's groups, each of which opens.
fn groups(step: &[RolloutRecord]) -> String {
    let groups: Vec<&[RolloutRecord]> = step.chunk_by(|a, b| a.group == b.group).collect();
    let mut html = String::new();
    for (i, group) in groups.iter().take(GROUPS).enumerate() {
        let rewards: Vec<f64> = group.iter().filter_map(reward).collect();
        let mean = match rewards.len() {
            0 => "–".to_owned(),
            n => short(rewards.iter().sum::<f64>() / n as f64),
        };
        let prompt = prompt(&group[0]);
        let _ = write!(
            html,
            "<details{}><summary><b>{mean}</b> {}</summary>\n<pre class=\"prompt\">{}</pre>\n",
            if i == 0 { " open" } else { "" },
            escape(&title(prompt)),
            text(prompt)
        );
        for record in group.iter().take(COMPLETIONS) {
            html.push_str(&completion(record, prompt));
        }
        html.push_str(&more(group.len(), COMPLETIONS, "completions"));
        html.push_str("</details>\n");
    }
    html.push_str(&more(groups.len(), GROUPS, "groups"));
    html
}

/// Returns the prompt with which a trajectory begins.
fn prompt(record: &RolloutRecord) -> &str {
    let mut branches = record.branches.iter();
    let first = match record.after {
        Some(_) => branches.find(|branch| branch.after.is_none()),
        None => None,
    };
    let first = first.and_then(|branch| branch.turns.first());
    let first = first.filter(|part| part.role == TurnRole::Environment);
    first.map_or(&record.prompt, |part| &part.text)
}

/// Returns a completion. Shows its prompt if it is not `of_group`: the agents in a group may begin
/// in different ways.
fn completion(record: &RolloutRecord, of_group: &str) -> String {
    let number = |value: Option<f64>| value.map_or("–".to_owned(), short);
    let mut html = format!(
        "<div class=\"completion\"><p><b>{}</b> advantage {}, {} tokens, {}",
        number(reward(record)),
        number(record.advantage.map(f64::from)),
        record.response_length,
        escape(&finish_reason(record))
    );
    if let Some(EpisodeEnd::Failed(message)) = &record.end {
        let line = message.lines().next().unwrap_or_default();
        let _ = write!(html, ", failed: {}", text(line));
    }
    for (name, reward) in &record.rewards {
        let _ = write!(html, ", {} {}", escape(name), number(reward.map(f64::from)));
    }
    for (role, reward) in &record.role_rewards {
        let _ = write!(html, ", {} {}", escape(role), short(*reward));
    }
    html.push_str("</p>\n");
    if record.after.is_none() && record.prompt != of_group {
        let own = text(&record.prompt);
        let _ = writeln!(html, "<pre class=\"prompt\">{own}</pre>");
    }
    if record.turns.is_empty() {
        let _ = writeln!(html, "<pre>{}</pre>", text(&record.completion));
    }
    let own = Row {
        role: record.role.as_deref(),
        after: record.after,
        turns: &record.turns,
    };
    let branches = record.branches.iter().map(|branch| Row {
        role: branch.role.as_deref(),
        after: branch.after,
        turns: &branch.turns,
    });
    let rows: Vec<Row<'_>> = once(own).chain(branches).collect();
    branches_after(None, &rows, of_group, &mut html);
    html.push_str("</div>\n");
    html
}

/// A row of a trajectory.
struct Row<'a> {
    role: Option<&'a str>,
    after: Option<BranchPlace>,
    turns: &'a [RolloutTurn],
}

/// Writes the rows that continue the turn at `place`, each with the rows that continue its turns. A
/// row continues one turn, so it is written at most once, even from a file that is not valid.
fn branches_after(place: Option<BranchPlace>, rows: &[Row<'_>], of_group: &str, html: &mut String) {
    let continuing = rows.iter().enumerate();
    for (row, own) in continuing.filter(|(_, row)| row.after == place) {
        let is_branch = row > 0 || place.is_some();
        html.push_str(if is_branch {
            "<div class=\"branch\">\n"
        } else {
            ""
        });
        let mut turns = 0;
        // The group shows its prompt.
        let is_prompt = |part: &&RolloutTurn| {
            place.is_none() && part.role == TurnRole::Environment && part.text == of_group
        };
        for part in own.turns.iter().skip_while(is_prompt) {
            html.push_str(&turn(part, own.role));
            if part.role == TurnRole::Policy {
                turns += 1;
                let place = Some(BranchPlace { row, turns });
                branches_after(place, rows, of_group, html);
            }
        }
        html.push_str(if is_branch { "</div>\n" } else { "" });
    }
}

fn turn(turn: &RolloutTurn, role: Option<&str>) -> String {
    let author = match turn.role {
        TurnRole::Policy => "policy",
        TurnRole::Environment => "environment",
    };
    let reward = turn.reward.map_or(String::new(), |reward| {
        format!(", reward {}", short(reward))
    });
    let name = match (turn.role, role) {
        (TurnRole::Policy, Some(role)) => escape(role),
        _ => author.to_owned(),
    };
    format!(
        "<pre class=\"{author}\"><b>{name}{reward}</b> {}</pre>\n",
        text(&turn.text)
    )
}

fn reward(record: &RolloutRecord) -> Option<f64> {
    record.reward.map(f64::from)
}

/// Returns the finish reason, as in the file.
fn finish_reason(record: &RolloutRecord) -> String {
    let name = serde_json::to_value(record.finish_reason).unwrap_or_default();
    name.as_str().unwrap_or_default().replace('_', " ")
}

/// Returns the end of a prompt on one line: prompts often begin alike.
fn title(prompt: &str) -> String {
    let words: Vec<&str> = prompt.split_whitespace().collect();
    let line = words.join(" ");
    match line.char_indices().rev().nth(TITLE_CHARS) {
        Some((at, c)) => format!("… {}", &line[at + c.len_utf8()..]),
        None => line,
    }
}

/// Returns the beginning of a text, escaped.
fn text(text: &str) -> String {
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => escape(&text[..end]) + " …",
        None => escape(text),
    }
}

fn more(count: usize, shown: usize, of: &str) -> String {
    if count > shown {
        format!("<p>{} more {of}.</p>\n", count - shown)
    } else {
        String::new()
    }
}
