//! Time against bytes of state, both axes logarithmic, as SVG. Measures nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ops::Range;

use plotters::prelude::*;

use super::ceilings::IN_PLACE;
use super::published::Published;
use super::record::{OURS, Record, Setting, Size};
use super::report::cells;

/// What is drawn in one colour.
#[derive(Debug, PartialEq)]
struct Series {
    name: String,
    /// Joined by a line, rather than dots.
    is_line: bool,
    /// MB of state, microseconds; by MB.
    points: Vec<(f64, f64)>,
}

fn point(size: Size, us: f64) -> (f64, f64) {
    (size.state_bytes() / 1e6, us)
}

/// The bare pass, each implementation's fastest mode of every size among layers, and public times of
/// the heads and tokens that were measured.
fn series(records: &[Record], published: &Published) -> Vec<Series> {
    let bare = records.iter().filter_map(|record| match record {
        Record::Ceiling(c) if c.ceiling == IN_PLACE => Some(point(c.size?, c.us)),
        _ => None,
    });
    let mut fastest: BTreeMap<(&str, Size), f64> = BTreeMap::new();
    let mut measured = BTreeSet::new();
    for cell in cells(records).filter(|cell| cell.setting == Setting::Layers) {
        let key = (cell.implementation.as_str(), cell.size);
        let us = fastest.entry(key).or_insert(cell.us);
        *us = us.min(cell.us);
        measured.insert((cell.size.heads, cell.size.tokens));
    }
    let mut dots: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    let mut ours = Vec::new();
    for ((implementation, size), us) in fastest {
        match implementation {
            OURS => ours.push(point(size, us)),
            other => dots.entry(other).or_default().push(point(size, us)),
        }
    }
    for (name, size, us) in published.points() {
        if measured.contains(&(size.heads, size.tokens)) {
            dots.entry(name).or_default().push(point(size, us));
        }
    }
    let series = |name: &str, is_line, mut points: Vec<(f64, f64)>| {
        points.sort_by(|a, b| a.partial_cmp(b).expect("times are numbers"));
        Series {
            name: name.into(),
            is_line,
            points,
        }
    };
    let mut all = vec![
        series("bare in-place pass", true, bare.collect()),
        series(OURS, false, ours),
    ];
    all.extend(dots.into_iter().map(|(name, p)| series(name, false, p)));
    all.retain(|series| !series.points.is_empty());
    all
}

/// From the power of ten below every value to the one above; `None` unless all are above 0.
fn decades(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let exponents: Option<Vec<f64>> = values
        .map(|value| (value > 0.0 && value.is_finite()).then(|| value.log10()))
        .collect();
    let exponents = exponents?;
    let low = exponents.iter().copied().min_by(f64::total_cmp)?;
    let high = exponents.iter().copied().max_by(f64::total_cmp)?;
    // The logarithm of a power of ten may lie a hair beside the whole number.
    let low = (low + 1e-9).floor() as i32;
    let high = ((high - 1e-9).ceil() as i32).max(low + 1);
    Some(10f64.powi(low)..10f64.powi(high))
}

const COLOURS: [RGBColor; 6] = [
    RGBColor(90, 90, 90),
    RGBColor(0, 92, 175),
    RGBColor(208, 64, 32),
    RGBColor(40, 140, 70),
    RGBColor(150, 80, 170),
    RGBColor(190, 140, 0),
];

/// The picture.
///
/// # Errors
///
/// There is nothing to draw.
pub fn svg(records: &[Record], published: &Published) -> Result<String, Box<dyn Error>> {
    let all = series(records, published);
    let points = || all.iter().flat_map(|series| series.points.iter());
    let (Some(x), Some(y)) = (
        decades(points().map(|p| p.0)),
        decades(points().map(|p| p.1)),
    ) else {
        return Err(
            "nothing to plot: no step among layers was measured, or one took no time".into(),
        );
    };
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, (860, 560)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x.log_scale(), y.log_scale())?;
    let label = |value: &f64| format!("{value}");
    chart
        .configure_mesh()
        .x_desc("state read and written, MB")
        .y_desc("microseconds a layer")
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .draw()?;
    for (index, series) in all.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let points = series.points.iter().copied();
        let drawn = if series.is_line {
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?
        } else {
            chart.draw_series(points.map(|at| Circle::new(at, 4, colour.filled())))?
        };
        drawn
            .label(&series.name)
            .legend(move |at| Circle::new((at.0 + 8, at.1), 4, colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()?;
    drop(chart);
    drop(area);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::super::record::{Ceiling, Cell};
    use super::super::timing::Times;
    use super::*;

    fn records() -> Vec<Record> {
        let size = |requests| Size {
            heads: 12,
            tokens: 1,
            requests,
            ..Size::default()
        };
        let cell = |requests, median| {
            let (min, p90) = (median, median);
            Record::Cell(Cell::new(size(requests), "m", Times { median, min, p90 }))
        };
        let mut bare = Ceiling::new(IN_PLACE, 1.5, None);
        bare.size = Some(size(1));
        vec![
            cell(2, 3.0),
            cell(1, 2.5),
            cell(1, 2.0),
            Record::Ceiling(bare),
        ]
    }

    #[test]
    fn axes_end_at_powers_of_ten() {
        let decades = |values: &[f64]| decades(values.iter().copied());
        assert_eq!(decades(&[3.0, 400.0]), Some(1.0..1000.0));
        assert_eq!(decades(&[0.01, 100.0]), Some(0.01..100.0));
        assert_eq!(decades(&[10.0]), Some(10.0..100.0));
        assert_eq!(decades(&[]), None);
        assert_eq!(decades(&[1.0, 0.0]), None);
    }

    #[test]
    fn the_fastest_mode_is_drawn_and_peers_of_other_heads_are_not() {
        let series = series(&records(), &Published::load());
        let bytes = 12.0 * 2.0 * 65536.0 / 1e6;
        assert_eq!(series[0].points, [(bytes, 1.5)]);
        assert_eq!(series[1].points, [(bytes, 2.0), (2.0 * bytes, 3.0)]);
        let peers: usize = series[2..].iter().map(|series| series.points.len()).sum();
        assert_eq!(peers, 9 + 4 + 4);
    }

    #[test]
    fn the_picture_names_what_it_shows() {
        let text = svg(&records(), &Published::load()).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
        for name in ["bare in-place pass", OURS, "flash-linear-attention"] {
            assert!(text.contains(name), "{name}");
        }
        assert!(svg(&[], &Published::load()).is_err());
    }
}
