//! The plot of a run.

use std::ops::Range;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::StepMetrics;

const SIZE: (u32, u32) = (1100, 760);
const FONT: &str = "sans-serif";
const RAW: RGBColor = RGBColor(150, 170, 200);
const SMOOTH: RGBColor = RGBColor(20, 60, 130);

/// Plots mean reward, KL to the reference, entropy and clip fraction over the steps as SVG.
///
/// Dots are values, lines a moving median. Triangles at the upper edge are outliers. Skipped steps
/// have only a reward. A metric that no step has leaves its panel empty.
pub fn training_plot_svg(metrics: &[StepMetrics]) -> Result<String> {
    let policy = |name: &str| -> Vec<(f64, f64)> {
        metrics
            .iter()
            .filter_map(|m| Some((m.step as f64, *m.policy.get(name)?)))
            .collect()
    };
    let reward = metrics
        .iter()
        .map(|m| (m.step as f64, m.reward_mean))
        .collect();
    let last_step = metrics.iter().map(|m| m.step).max().unwrap_or(0);
    plot_svg(
        [
            ("Mean reward", reward),
            ("KL to the reference (nats per token)", policy("kl")),
            ("Entropy (nats per token)", policy("entropy")),
            ("Clip fraction", policy("clip_fraction")),
        ],
        last_step,
    )
}

/// Plots four metrics over the steps up to `last_step`, each by its title and its values.
pub(crate) fn plot_svg(panels: [(&str, Vec<(f64, f64)>); 4], last_step: usize) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(drawing)?;
        for (area, (title, points)) in root.split_evenly((2, 2)).iter().zip(&panels) {
            panel(area, title, points, last_step as f64)?;
        }
        root.present().map_err(drawing)?;
    }
    Ok(svg)
}

fn panel(
    area: &DrawingArea<SVGBackend, Shift>,
    title: &str,
    points: &[(f64, f64)],
    last_step: f64,
) -> Result<()> {
    let smooth = moving_median(points);
    let range = value_range(points, &smooth);
    let (inside, above): (Vec<_>, Vec<_>) = points.iter().partition(|p| p.1 <= range.end);
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 20))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0f64..last_step.max(1.), range.clone())
        .map_err(drawing)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .x_labels(8)
        .y_labels(7)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| label(*y))
        .label_style((FONT, 15))
        .axis_desc_style((FONT, 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .draw()
        .map_err(drawing)?;
    chart
        .draw_series(inside.into_iter().map(|p| Circle::new(p, 2, RAW.filled())))
        .map_err(drawing)?;
    let edge = above.into_iter().map(|(x, _)| (x, range.end));
    chart
        .draw_series(edge.map(|p| TriangleMarker::new(p, 5, RAW.filled())))
        .map_err(drawing)?;
    chart
        .draw_series(LineSeries::new(smooth, SMOOTH.stroke_width(2)))
        .map_err(drawing)?;
    Ok(())
}

/// Returns the range of the axis: from 0, or the smallest value, to slightly above all but
/// outliers.
fn value_range(points: &[(f64, f64)], smooth: &[(f64, f64)]) -> Range<f64> {
    let finite = |points: &[(f64, f64)]| -> Vec<f64> {
        points
            .iter()
            .map(|p| p.1)
            .filter(|y| y.is_finite())
            .collect()
    };
    let mut values = finite(points);
    values.sort_by(f64::total_cmp);
    let low = values.first().copied().unwrap_or(0.).min(0.);
    let usual = values.len().saturating_sub(1 + values.len() / 50);
    let usual = values.get(usual).copied().unwrap_or(low);
    let high = finite(smooth).into_iter().fold(usual, f64::max).max(low);
    let margin = if high > low { 0.1 * (high - low) } else { 1. };
    let below = if low < 0. { margin } else { 0. };
    low - below..high + margin
}

/// Returns a moving median over about a fifteenth of the values.
///
/// A median, because estimates of the KL have outliers that would distort a mean.
fn moving_median(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let half = points.len() / 30;
    (0..points.len())
        .map(|i| {
            let window = &points[i.saturating_sub(half)..points.len().min(i + half + 1)];
            let mut values: Vec<f64> = window.iter().map(|p| p.1).collect();
            values.sort_by(f64::total_cmp);
            (points[i].0, values[values.len() / 2])
        })
        .collect()
}

/// Formats a tick label with as few digits as distinguish it from its neighbors.
fn label(y: f64) -> String {
    match y.abs() {
        0. => "0".to_owned(),
        size if size < 1e-3 => format!("{y:.1e}"),
        size if size < 0.1 => format!("{y:.3}"),
        size if size < 10. => format!("{y:.2}"),
        _ => format!("{y:.0}"),
    }
}

fn drawing(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing the plot: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_any_length_can_be_drawn() {
        for steps in [0, 1, 2, 100] {
            let metrics: Vec<StepMetrics> = (1..=steps)
                .map(|step| {
                    let mut m = StepMetrics {
                        step,
                        reward_mean: -1. / step as f64,
                        ..StepMetrics::default()
                    };
                    if step % 3 == 0 {
                        m.policy.insert("kl".to_owned(), 1e-5 * step as f64);
                    }
                    m
                })
                .collect();
            let svg = training_plot_svg(&metrics).unwrap();
            assert!(svg.starts_with("<svg") && svg.contains("Mean reward"));
            assert!(svg.trim_end().ends_with("</svg>"));
        }
    }

    #[test]
    fn the_moving_median_is_centered() {
        let line: Vec<(f64, f64)> = (0..90).map(|i| (f64::from(i), 2. * f64::from(i))).collect();
        let smooth = moving_median(&line);
        assert_eq!(smooth.len(), 90);
        assert_eq!(smooth[3..87], line[3..87]);
    }

    #[test]
    fn one_wild_value_does_not_flatten_the_others() {
        let mut points: Vec<(f64, f64)> = (0..100).map(|i| (f64::from(i), 1.)).collect();
        points[50].1 = 1000.;
        let smooth = vec![(0., 1.); 100];
        assert_eq!(value_range(&points, &smooth), 0.0..1.1);
        assert_eq!(value_range(&[], &[]), 0.0..1.0);
    }
}
