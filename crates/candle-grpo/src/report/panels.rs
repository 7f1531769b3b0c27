//! The page's charts.

use std::collections::{BTreeMap, BTreeSet};

use super::chart::{Band, Chart, Line, Stroke};
use super::run::Run;

/// The number of colors.
pub(super) const COLORS: usize = 8;

/// A chart with its title and a note.
pub(super) struct Panel {
    pub(super) title: &'static str,
    pub(super) note: String,
    pub(super) chart: Chart,
}

/// A chart by its metric names: lines, and bands between two of them.
struct Plan {
    title: &'static str,
    note: &'static str,
    lines: &'static [(&'static str, Stroke)],
    bands: &'static [(&'static str, &'static str)],
}

use Stroke::{Dashed, Dotted, Solid};

const PLANS: &[Plan] = &[
    Plan {
        title: "Loss",
        note: "supervised training: negative log-prob, in nats per token",
        lines: &[("loss", Solid)],
        bands: &[],
    },
    Plan {
        title: "Token accuracy",
        note: "share of training tokens that the model ranks first",
        lines: &[("token_accuracy", Solid)],
        bands: &[],
    },
    Plan {
        title: "Reward over groups",
        note: "median of the group means; bands: all groups, and the middle half",
        lines: &[("group_reward_quantiles.2", Solid)],
        bands: &[
            ("group_reward_quantiles.0", "group_reward_quantiles.4"),
            ("group_reward_quantiles.1", "group_reward_quantiles.3"),
        ],
    },
    Plan {
        title: "KL to the reference",
        note: "in nats per token; dotted: distance from the sampling policy",
        lines: &[("kl", Solid), ("approx_kl_k3", Dotted)],
        bands: &[],
    },
    Plan {
        title: "Divergence from the teacher",
        note: "in nats per token; dotted: absolute log-prob difference of sampled tokens",
        lines: &[("divergence", Solid), ("distillation_gap_abs", Dotted)],
        bands: &[],
    },
    Plan {
        title: "Entropy",
        note: "in nats per token",
        lines: &[("entropy", Solid)],
        bands: &[],
    },
    Plan {
        title: "Clip fractions",
        note: "share of tokens; dashed: below, dotted: above",
        lines: &[
            ("clip_fraction", Solid),
            ("clip_fraction_low", Dashed),
            ("clip_fraction_high", Dotted),
        ],
        bands: &[],
    },
    Plan {
        title: "Ratio",
        note: "policy to sampler: mean; band: smallest to largest",
        lines: &[("ratio_mean", Solid)],
        bands: &[("ratio_min", "ratio_max")],
    },
    Plan {
        title: "Gradient norm",
        note: "before clipping",
        lines: &[("grad_norm", Solid)],
        bands: &[],
    },
    Plan {
        title: "Length",
        note: "mean completion length in tokens",
        lines: &[("response_length", Solid)],
        bands: &[],
    },
    Plan {
        title: "Constant groups and truncated completions",
        note: "share of groups with equal rewards; dashed: share of completions that reach the maximum length; dotted: share of text that repeats",
        lines: &[
            ("constant_groups", Solid),
            ("truncated", Dashed),
            ("repetition", Dotted),
        ],
        bands: &[],
    },
    Plan {
        title: "Turns",
        note: "mean per trajectory; dashed: tool calls; dotted: failed calls",
        lines: &[
            ("environment.turns", Solid),
            ("environment.tool_calls", Dashed),
            ("environment.tool_failures", Dotted),
        ],
        bands: &[],
    },
    Plan {
        title: "Ended trajectories",
        note: "share ended by a limit; dashed: share ended by an environment failure",
        lines: &[
            ("environment.limit_reached", Solid),
            ("environment.failed", Dashed),
        ],
        bands: &[],
    },
    Plan {
        title: "Time",
        note: "seconds: training; dashed: sampling; dotted: scoring",
        lines: &[
            ("seconds.train", Solid),
            ("seconds.sample", Dashed),
            ("seconds.score", Dotted),
        ],
        bands: &[],
    },
    Plan {
        title: "Tokens per second",
        note: "row tokens processed",
        lines: &[("tokens_per_second", Solid)],
        bands: &[],
    },
    Plan {
        title: "Waiting",
        note: "seconds: training, for completions; dashed: the engine, for training",
        lines: &[("seconds.wait", Solid), ("seconds.idle", Dashed)],
        bands: &[],
    },
    Plan {
        title: "Staleness",
        note: "updates between sampling a token and training on it: mean; dashed: maximum",
        lines: &[("staleness_mean", Solid), ("staleness_max", Dashed)],
        bands: &[],
    },
    Plan {
        title: "Curriculum",
        note: "prompts without a score; dashed: in the first pool; dotted: in the second one",
        lines: &[
            ("curriculum_unseen", Solid),
            ("curriculum_pool_0", Dashed),
            ("curriculum_pool_1", Dotted),
        ],
        bands: &[],
    },
    Plan {
        title: "Learning rate",
        note: "",
        lines: &[("learning_rate", Solid)],
        bands: &[],
    },
];

/// Returns the charts for `runs` that are not empty.
pub(super) fn panels(runs: &[Run]) -> Vec<Panel> {
    let mut panels = vec![
        reward(runs),
        evaluation(runs),
        held_out_loss(runs),
        components(runs),
    ];
    for plan in PLANS {
        let mut chart = Chart::default();
        for (run, of_run) in colored(runs) {
            for (low, high) in plan.bands {
                let points = series(&of_run.steps, |metrics| {
                    Some((*metrics.get(*low)?, *metrics.get(*high)?))
                });
                let points = points.into_iter().map(|(x, (low, high))| (x, low, high));
                chart.bands.push(Band {
                    run,
                    points: points.collect(),
                });
            }
            for &(name, stroke) in plan.lines {
                let points = series(&of_run.steps, |metrics| metrics.get(name).copied());
                chart.lines.push(line(run, stroke, of_run, name, points));
            }
        }
        panels.push(Panel {
            title: plan.title,
            note: plan.note.to_owned(),
            chart,
        });
    }
    panels.retain(|panel| !panel.chart.is_empty());
    panels
}

fn line(run: usize, stroke: Stroke, of_run: &Run, name: &str, points: Vec<(f64, f64)>) -> Line {
    Line {
        run,
        stroke,
        label: format!("{}: {name}", of_run.name),
        points,
    }
}

fn reward(runs: &[Run]) -> Panel {
    let mut chart = Chart::default();
    for (run, of_run) in colored(runs) {
        let spread = series(&of_run.steps, |metrics| {
            let (mean, std) = (metrics.get("reward_mean")?, metrics.get("reward_std")?);
            Some((mean - std, mean + std))
        });
        let points = spread.into_iter().map(|(x, (low, high))| (x, low, high));
        chart.bands.push(Band {
            run,
            points: points.collect(),
        });
        let mean = series(&of_run.steps, |metrics| metrics.get("reward_mean").copied());
        chart
            .lines
            .push(line(run, Solid, of_run, "reward_mean", mean));
    }
    Panel {
        title: "Reward",
        note: "mean over all completions; band: one standard deviation on each side".to_owned(),
        chart,
    }
}

fn evaluation(runs: &[Run]) -> Panel {
    let mut chart = Chart::default();
    for (run, of_run) in colored(runs) {
        let names = of_run.evaluations.iter().flat_map(BTreeMap::keys);
        let mut passes: Vec<&String> = names.filter(|name| name.starts_with("pass_at")).collect();
        passes.sort_unstable();
        passes.dedup();
        let strokes = [Dashed, Dotted].into_iter().cycle();
        let passes = passes.into_iter().map(String::as_str).zip(strokes);
        for (name, stroke) in std::iter::once(("reward_mean", Solid)).chain(passes) {
            let points = series(&of_run.evaluations, |metrics| metrics.get(name).copied());
            chart.lines.push(line(run, stroke, of_run, name, points));
        }
    }
    Panel {
        title: "Evaluation",
        note: "mean reward on held-out prompts; dashed and dotted: pass@k".to_owned(),
        chart,
    }
}

fn held_out_loss(runs: &[Run]) -> Panel {
    let mut chart = Chart::default();
    for (run, of_run) in colored(runs) {
        for (name, stroke) in [("loss", Solid), ("token_accuracy", Dashed)] {
            let points = series(&of_run.evaluations, |metrics| metrics.get(name).copied());
            chart.lines.push(line(run, stroke, of_run, name, points));
        }
    }
    Panel {
        title: "Held-out rows",
        note: "loss in nats per token; dashed: token accuracy".to_owned(),
        chart,
    }
}

/// Returns the reward components, if there are several.
fn components(runs: &[Run]) -> Panel {
    const MEAN: &str = ".mean";
    let steps = runs.iter().flat_map(|run| &run.steps);
    let names: BTreeSet<&str> = steps
        .flat_map(BTreeMap::keys)
        .filter_map(|name| name.strip_prefix("rewards.")?.strip_suffix(MEAN))
        .collect();
    let strokes = [(Solid, "solid"), (Dashed, "dashed"), (Dotted, "dotted")];
    let mut chart = Chart::default();
    let mut notes = Vec::new();
    if names.len() > 1 {
        for (name, (stroke, look)) in names.into_iter().zip(strokes.into_iter().cycle()) {
            notes.push(format!("{look}: {name}"));
            for (run, of_run) in colored(runs) {
                let path = format!("rewards.{name}{MEAN}");
                let points = series(&of_run.steps, |metrics| metrics.get(&path).copied());
                chart.lines.push(line(run, stroke, of_run, name, points));
            }
        }
    }
    Panel {
        title: "Reward components",
        note: format!("means; {}", notes.join(", ")),
        chart,
    }
}

/// Returns a metric's values by step.
fn series<T>(
    steps: &[BTreeMap<String, f64>],
    of: impl Fn(&BTreeMap<String, f64>) -> Option<T>,
) -> Vec<(f64, T)> {
    steps
        .iter()
        .filter_map(|metrics| Some((*metrics.get("step")?, of(metrics)?)))
        .collect()
}

/// Returns the runs with their color numbers, which repeat after the last.
fn colored(runs: &[Run]) -> impl Iterator<Item = (usize, &Run)> {
    (0..COLORS).cycle().zip(runs)
}
