//! Measurements as lines of text. Measures nothing.

use super::ceilings::IN_PLACE;
use super::published::Published;
use super::record::{Ceiling, Cell, Neighbour, OURS, Record, Size};

/// The bare pass of a size among measurements.
pub fn bare_pass(records: &[Record], size: Size) -> Option<f64> {
    records.iter().find_map(|record| match record {
        Record::Ceiling(c) if c.ceiling == IN_PLACE && c.size == Some(size) => Some(c.us),
        _ => None,
    })
}

/// The steps among measurements.
pub fn cells(records: &[Record]) -> impl Iterator<Item = &Cell> {
    records.iter().filter_map(|record| match record {
        Record::Cell(cell) => Some(cell),
        _ => None,
    })
}

/// Names of the columns of [`row`].
pub const HEADER: &str = "heads tokens batch       us      min      p90   TB/s  %bare    goal  \
                          +goal  public  times  setting mode";

/// One step in a line. `bare` is the bare pass over as much state.
pub fn row(cell: &Cell, bare: Option<f64>, published: &Published) -> String {
    let Size {
        heads,
        tokens,
        requests,
        ..
    } = cell.size;
    let number = |value: Option<f64>, width: usize, digits: usize| match value {
        Some(value) => format!("{value:width$.digits$}"),
        None => format!("{:>width$}", "-"),
    };
    let goal = published.goal(cell);
    let above = goal.map(|goal| (cell.us / goal - 1.0) * 100.0);
    let above = above.map_or(format!("{:>6}", "-"), |percent| format!("{percent:+5.1}%"));
    let public = published.public(cell.setting, cell.size);
    format!(
        "{heads:5} {tokens:6} {requests:5} {:8.3} {} {} {:6.3} {} {} {above} {} {}  {} {}{}{}",
        cell.us,
        number(cell.min_us, 8, 3),
        number(cell.p90_us, 8, 3),
        cell.size.state_bytes() / cell.us / 1e6,
        number(bare.map(|bare| bare / cell.us * 100.0), 6, 1),
        number(goal, 7, 2),
        number(public, 7, 2),
        number(public.map(|public| public / cell.us), 6, 2),
        cell.setting,
        cell.mode,
        cell.size.variant(),
        match cell.implementation.as_str() {
            OURS => String::new(),
            other => format!("  ({other})"),
        }
    )
}

/// One bound in a line.
pub fn ceiling(ceiling: &Ceiling) -> String {
    let size = ceiling.size.map_or(String::new(), |size| {
        let Size {
            heads,
            tokens,
            requests,
            ..
        } = size;
        let variant = size.variant();
        format!(" of {heads} heads, {tokens} tokens, {requests} requests{variant}")
    });
    let speed = ceiling.tb_per_s;
    let speed = speed.map_or(String::new(), |speed| format!(", {speed:.3} TB/s"));
    format!("  {}{size}: {:.3} us{speed}", ceiling.ceiling, ceiling.us)
}

/// A neighbour's time in a line.
pub fn neighbour(neighbour: &Neighbour) -> String {
    format!(
        "  a kernel that reads 20 MB: {:.2} us behind {}, {:.2} behind null slots, {:.2} alone: \
         {:+.2} us",
        neighbour.neighbour_us,
        neighbour.mode,
        neighbour.behind_null_us,
        neighbour.alone_us,
        neighbour.neighbour_us - neighbour.behind_null_us
    )
}

/// What to compare a step with: of the same size and setting, that of the same mode, else the fastest.
fn counterpart<'a>(cell: &Cell, others: &'a [Record]) -> Option<&'a Cell> {
    let alike =
        || cells(others).filter(|other| other.size == cell.size && other.setting == cell.setting);
    let same =
        |other: &&Cell| other.mode == cell.mode && other.implementation == cell.implementation;
    let fastest = || alike().min_by(|a, b| a.us.total_cmp(&b.us));
    alike().find(same).or_else(fastest)
}

/// Each step beside its counterpart.
pub fn against(records: &[Record], others: &[Record]) -> String {
    let mut text =
        String::from("heads tokens batch       us    other  ratio  setting mode: other\n");
    for cell in cells(records) {
        let Some(other) = counterpart(cell, others) else {
            continue;
        };
        let Size {
            heads,
            tokens,
            requests,
            ..
        } = cell.size;
        text += &format!(
            "{heads:5} {tokens:6} {requests:5} {:8.3} {:8.3} {:6.3}  {} {}{}: {} {}\n",
            cell.us,
            other.us,
            other.us / cell.us,
            cell.setting,
            cell.mode,
            cell.size.variant(),
            other.implementation,
            other.mode
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::record::Setting;
    use super::super::timing::Times;
    use super::*;

    fn cell(requests: usize, mode: &str, median: f64) -> Cell {
        let size = Size {
            heads: 12,
            tokens: 1,
            requests,
            ..Size::default()
        };
        let (min, p90) = (median - 0.5, median + 0.5);
        Cell::new(size, mode, Times { median, min, p90 })
    }

    #[test]
    fn a_row_has_every_share() {
        let mut bare = Ceiling::new(IN_PLACE, 48.0, None);
        let cell = cell(128, "m", 60.0);
        bare.size = Some(cell.size);
        let records = [Record::Ceiling(bare), Record::Cell(cell.clone())];
        let found = bare_pass(&records, cell.size);
        let row = row(&cell, found, &Published::load());
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(
            words,
            [
                "12", "1", "128", "60.000", "59.500", "60.500", "3.355", "80.0", "54.00", "+11.1%",
                "73.26", "1.22", "layers", "m"
            ]
        );
        assert_eq!(words.len(), HEADER.split_whitespace().count());
    }

    #[test]
    fn unknown_shares_are_left_out() {
        let row = row(&cell(3, "m", 60.0), None, &Published::load());
        assert_eq!(row.matches(" -").count(), 5, "{row}");
    }

    #[test]
    fn counterparts_have_the_same_mode_or_are_fastest() {
        let mut gemm = cell(1, "a", 1.0);
        gemm.setting = Setting::Gemm;
        let others: Vec<Record> = [
            cell(1, "a", 3.0),
            cell(1, "b", 2.0),
            cell(2, "a", 1.0),
            gemm,
        ]
        .map(Record::Cell)
        .into();
        let found = |requests, mode| counterpart(&cell(requests, mode, 4.0), &others).map(|c| c.us);
        assert_eq!(found(1, "a"), Some(3.0));
        assert_eq!(found(1, "c"), Some(2.0));
        assert_eq!(found(4, "a"), None);
        let text = against(&[Record::Cell(cell(1, "a", 1.5))], &others);
        assert!(
            text.lines()
                .nth(1)
                .unwrap()
                .contains(" 2.000  layers a: prepared-kda a"),
            "{text}"
        );
    }
}
