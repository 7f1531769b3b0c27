//! The page as HTML.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::html::{escape, short};
use super::panels::{COLORS, panels};
use super::rollouts::rollouts;
use super::run::{Run, RunSample};

/// The number of answers shown per run.
const SHOWN: usize = 24;

const STYLE: &str = include_str!("style.css");

/// The first line of every page. It distinguishes a page from other files.
pub const REPORT_START: &str = "<!doctype html><!-- grpo report -->";

/// Returns a single-file page about `runs`: metrics, charts over the steps, answers before and
/// after, training completions, settings. It follows the browser's color scheme and the window
/// width.
pub fn report_html(runs: &[Run]) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let mut page = format!(
        "{REPORT_START}\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n",
        escape(&names.join(", "))
    );
    let _ = write!(
        page,
        "<h1>{}</h1>\n{}",
        escape(&names.join(", ")),
        summary(runs)
    );
    page.push_str("<div class=\"charts\">\n");
    for panel in panels(runs) {
        let _ = writeln!(
            page,
            "<figure><figcaption><b>{}</b> <span>{}</span></figcaption>{}</figure>",
            panel.title,
            escape(&panel.note),
            panel.chart.svg(panel.title)
        );
    }
    page.push_str("</div>\n");
    for run in runs {
        page.push_str(&answers(run));
    }
    for (i, run) in runs.iter().enumerate() {
        page.push_str(&rollouts(i, run));
    }
    page.push_str(&settings(runs));
    page.push_str("</body>\n</html>\n");
    page
}

/// Returns a table with a row per run: steps, first and last rewards or losses, time.
fn summary(runs: &[Run]) -> String {
    let shown = [("reward", "reward_mean"), ("loss", "loss")];
    let shown = shown.into_iter().filter(|(_, name)| {
        let mut steps = runs.iter().flat_map(|run| &run.steps);
        *name == "reward_mean" && !runs.iter().all(Run::is_supervised)
            || steps.any(|metrics| metrics.contains_key(*name))
    });
    let shown: Vec<_> = shown.collect();
    let mut table = String::from(
        "<div class=\"wide\"><table class=\"summary\"><thead><tr><th>run</th><th>steps</th><th>skipped</th>",
    );
    for (title, _) in &shown {
        let _ = write!(
            table,
            "<th>{title}, first 5 steps</th><th>last 5 steps</th>"
        );
    }
    table.push_str("<th>time</th></tr></thead><tbody>\n");
    for (i, run) in runs.iter().enumerate() {
        let _ = write!(
            table,
            "<tr><td><i class=\"key run{}\"></i>{}</td><td>{}</td><td>{}</td>",
            i % COLORS,
            escape(&run.name),
            run.steps.len(),
            run.skipped,
        );
        for (_, name) in &shown {
            let values = run.steps.iter();
            let values = values.filter_map(|metrics| metrics.get(*name).copied());
            let values: Vec<f64> = values.collect();
            let n = values.len().min(5);
            let _ = write!(
                table,
                "<td>{}</td><td>{}</td>",
                mean(&values[..n]),
                mean(&values[values.len() - n..]),
            );
        }
        let seconds: f64 = run.step_seconds().iter().sum();
        let _ = writeln!(table, "<td>{}</td></tr>", duration(seconds));
    }
    table.push_str("</tbody></table></div>\n");
    table
}

fn mean(values: &[f64]) -> String {
    if values.is_empty() {
        return "–".to_owned();
    }
    short(values.iter().sum::<f64>() / values.len() as f64)
}

fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

/// Returns the answers before and after, side by side.
fn answers(run: &Run) -> String {
    let pairs = run.before_and_after();
    let Some((before, after)) = pairs.first() else {
        return String::new();
    };
    let mut section = format!(
        "<h2>Answers: {}</h2>\n<div class=\"answers\">\n<div class=\"head\"><span>prompt</span><span>after step {}</span><span>after step {}</span></div>\n",
        escape(&run.name),
        before.step,
        after.step
    );
    for (before, after) in pairs.iter().take(SHOWN) {
        let _ = writeln!(
            section,
            "<div class=\"pair\"><pre>{}</pre>{}{}</div>",
            escape(&before.prompt),
            answer(before),
            answer(after)
        );
    }
    section.push_str("</div>\n");
    if pairs.len() > SHOWN {
        let _ = writeln!(section, "<p>{} more.</p>", pairs.len() - SHOWN);
    }
    section
}

fn answer(sample: &RunSample) -> String {
    format!(
        "<pre><b>{}</b> {}</pre>",
        sample.reward.map_or("–".to_owned(), short),
        escape(&sample.completion)
    )
}

/// Returns the settings: first those in which the runs differ, then the others.
fn settings(runs: &[Run]) -> String {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let (same, different): (Vec<_>, Vec<_>) = keys.into_iter().partition(|key| {
        let first = runs[0].settings.get(*key);
        runs.iter().all(|run| run.settings.get(*key) == first)
    });
    let mut section = String::from("<h2>Settings</h2>\n");
    if !different.is_empty() {
        section.push_str(&table(&different, runs));
    }
    let title = if different.is_empty() {
        "All settings"
    } else {
        "Same in all runs"
    };
    let _ = write!(
        section,
        "<details{}><summary>{title}</summary>\n{}</details>\n",
        if different.is_empty() { " open" } else { "" },
        table(&same, &runs[..runs.len().min(1)])
    );
    section
}

fn table(keys: &[&String], runs: &[Run]) -> String {
    let mut table = String::from("<div class=\"wide\"><table><thead><tr><th>key</th>");
    for run in runs {
        let _ = write!(table, "<th>{}</th>", escape(&run.name));
    }
    table.push_str("</tr></thead><tbody>\n");
    for key in keys {
        let _ = write!(table, "<tr><td>{}</td>", escape(key));
        for run in runs {
            let value = run.settings.get(*key).map_or("–", String::as_str);
            let _ = write!(table, "<td>{}</td>", escape(value));
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</tbody></table></div>\n");
    table
}
