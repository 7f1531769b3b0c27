//! Line charts as SVG, in the page's colors.

use std::fmt::Write;

use super::axis::Axis;
use super::html::{escape, short};

const WIDTH: f64 = 480.;
const HEIGHT: f64 = 250.;
const LEFT: f64 = 58.;
const RIGHT: f64 = 12.;
const TOP: f64 = 10.;
const BOTTOM: f64 = 34.;

/// A line's stroke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stroke {
    Solid,
    Dashed,
    Dotted,
}

/// A line through `(x, y)`.
pub(super) struct Line {
    pub(super) run: usize,
    pub(super) stroke: Stroke,
    pub(super) label: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// The area between two lines, as `(x, low, high)`.
pub(super) struct Band {
    pub(super) run: usize,
    pub(super) points: Vec<(f64, f64, f64)>,
}

/// The lines and bands in one chart.
#[derive(Default)]
pub(super) struct Chart {
    pub(super) lines: Vec<Line>,
    pub(super) bands: Vec<Band>,
}

impl Chart {
    /// Returns whether the chart has no points.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.iter().all(|line| line.points.is_empty())
            && self.bands.iter().all(|band| band.points.is_empty())
    }

    /// Returns the chart over steps as SVG, with `title` as its accessible label.
    pub(super) fn svg(&self, title: &str) -> String {
        let (lines, bands) = (self.lines.iter(), self.bands.iter());
        let steps = lines.clone().flat_map(|line| line.points.iter());
        let steps = steps.map(|&(x, _)| x);
        let of_bands = bands.clone().flat_map(|band| band.points.iter());
        let steps = steps.chain(of_bands.map(|&(x, _, _)| x));
        let values = lines.map(|line| line.points.iter().map(|&(_, y)| y).collect());
        let values = values.chain(bands.flat_map(|band| {
            let low = band.points.iter().map(|&(_, low, _)| low);
            let high = band.points.iter().map(|&(_, _, high)| high);
            [low.collect(), high.collect()]
        }));
        let (x, y) = (Axis::around(steps, 6), Axis::around_usual(values, 5));
        let place = Place { x, y };

        let mut svg = format!(
            r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">"#,
            escape(title)
        );
        place.grid(&mut svg);
        for band in &self.bands {
            place.band(&mut svg, band);
        }
        for line in &self.lines {
            place.line(&mut svg, line);
        }
        svg.push_str("</svg>");
        svg
    }
}

struct Place {
    x: Axis,
    y: Axis,
}

impl Place {
    /// Returns where a point is drawn. Outliers are at the upper edge.
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (
            LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT),
            TOP + (1. - self.y.share(y).min(1.)) * (HEIGHT - TOP - BOTTOM),
        )
    }

    fn grid(&self, svg: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (&mark, label) in self.y.marks.iter().zip(self.y.labels()) {
            let (_, y) = self.at(self.x.low, mark);
            let _ = write!(
                svg,
                r#"<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1}" y2="{y:.1}"/><text x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#,
                LEFT - 6.,
                y + 4.,
            );
        }
        for &mark in self.x.marks.iter().filter(|mark| mark.fract() == 0.) {
            let (x, _) = self.at(mark, self.y.low);
            let _ = write!(
                svg,
                r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="{bottom}" y2="{:.1}"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{mark}</text>"#,
                bottom + 4.,
                bottom + 16.
            );
        }
        let _ = write!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">step</text>"#,
            (LEFT + right) / 2.,
            HEIGHT - 3.
        );
    }

    fn band(&self, svg: &mut String, band: &Band) {
        let finite = band
            .points
            .iter()
            .filter(|(_, low, high)| low.is_finite() && high.is_finite());
        let upper = finite.clone().map(|&(x, _, high)| (x, high));
        let lower = finite.rev().map(|&(x, low, _)| (x, low));
        let points = self.points(upper.chain(lower));
        if !points.is_empty() {
            let _ = write!(
                svg,
                r#"<polygon class="run{}" points="{points}"/>"#,
                band.run
            );
        }
    }

    fn line(&self, svg: &mut String, line: &Line) {
        let stroke = match line.stroke {
            Stroke::Solid => "",
            Stroke::Dashed => " dashed",
            Stroke::Dotted => " dotted",
        };
        let label = escape(&line.label);
        // A value that is not finite breaks the line. A single step is a dot.
        for part in line.points.split(|(_, y)| !y.is_finite()) {
            match part {
                [] => {}
                &[(x, y)] => {
                    let (x, y) = self.at(x, y);
                    let _ = write!(
                        svg,
                        r#"<circle class="run{}" cx="{x:.1}" cy="{y:.1}" r="2.5"><title>{label}</title></circle>"#,
                        line.run
                    );
                }
                part => {
                    let mut draw = |look: &str, points: &[(f64, f64)], title: &str| {
                        let points = self.points(points.iter().copied());
                        let _ = write!(
                            svg,
                            r#"<polyline class="run{}{look}" points="{points}"><title>{label}{title}</title></polyline>"#,
                            line.run
                        );
                    };
                    match moving_median(part) {
                        Some(median) => {
                            draw(" single", part, "");
                            draw(stroke, &median, ", moving median");
                        }
                        None => draw(stroke, part, ""),
                    }
                    self.outliers(svg, line.run, part, &label);
                }
            }
        }
    }

    /// Marks the points above the axis with triangles, whose tooltips have the values.
    fn outliers(&self, svg: &mut String, run: usize, points: &[(f64, f64)], label: &str) {
        for &(step, value) in points.iter().filter(|(_, y)| *y > self.y.high) {
            let (x, y) = self.at(step, value);
            let _ = write!(
                svg,
                r#"<path class="run{run}" d="M{x:.1},{y:.1}l4,7h-8z"><title>{label}: {} at step {step}</title></path>"#,
                short(value)
            );
        }
    }

    fn points(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let text: Vec<String> = points
            .map(|(x, y)| {
                let (x, y) = self.at(x, y);
                format!("{x:.1},{y:.1}")
            })
            .collect();
        text.join(" ")
    }
}

/// Returns moving medians, each over about a fifteenth of the points; none for fewer than 30
/// points.
///
/// KL estimates have outliers, which would distort a mean.
fn moving_median(points: &[(f64, f64)]) -> Option<Vec<(f64, f64)>> {
    let half = points.len() / 30;
    if half == 0 {
        return None;
    }
    // The values around a point, in order. A run may have 100,000 steps.
    let mut window: Vec<f64> = Vec::new();
    let place =
        |window: &[f64], value: f64| window.partition_point(|x| x.total_cmp(&value).is_lt());
    let (mut first, mut next) = (0, 0);
    let medians = points.iter().enumerate().map(|(i, &(x, _))| {
        while next < points.len().min(i + half + 1) {
            window.insert(place(&window, points[next].1), points[next].1);
            next += 1;
        }
        while first < i.saturating_sub(half) {
            window.remove(place(&window, points[first].1));
            first += 1;
        }
        (x, window[window.len() / 2])
    });
    Some(medians.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_moving_median_is_that_of_the_sorted_neighbors() {
        let value = |i: usize| ((i * 7919) % 100) as f64 - 50.;
        let line: Vec<(f64, f64)> = (0..200).map(|i| (i as f64, value(i))).collect();
        for (i, (x, median)) in moving_median(&line).unwrap().into_iter().enumerate() {
            let neighbors = i.saturating_sub(6)..200.min(i + 7);
            let mut values: Vec<f64> = neighbors.map(value).collect();
            values.sort_by(f64::total_cmp);
            assert_eq!((x, median), (i as f64, values[values.len() / 2]));
        }
    }

    #[test]
    fn the_moving_median_is_centered() {
        let line: Vec<(f64, f64)> = (0..90).map(|i| (f64::from(i), 2. * f64::from(i))).collect();
        let median = moving_median(&line).unwrap();
        assert_eq!(median.len(), 90);
        assert_eq!(median[3..87], line[3..87]);
        assert_eq!(moving_median(&line[..29]), None);
    }

    #[test]
    fn an_outlier_is_a_triangle_at_the_upper_edge() {
        let mut points: Vec<(f64, f64)> =
            (0..100).map(|i| (f64::from(i), f64::from(i % 9))).collect();
        let svg = |points: &[(f64, f64)]| {
            let line = Line {
                run: 0,
                stroke: Stroke::Solid,
                label: "run: kl".to_owned(),
                points: points.to_vec(),
            };
            let chart = Chart {
                lines: vec![line],
                bands: Vec::new(),
            };
            chart.svg("KL")
        };
        assert!(!svg(&points).contains("<path"));
        points[50].1 = 1234.;
        let svg = svg(&points);
        assert_eq!(svg.matches("<path").count(), 1);
        assert!(svg.contains("run: kl: 1234 at step 50"), "{svg}");
        assert!(svg.contains(&format!(",{TOP:.1} ")), "{svg}");
    }
}
