//! Times of public implementations and the goals, of one H200: `bench/published.json`. Measures
//! nothing.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::record::{Cell, Setting, Size};

const TEXT: &str = include_str!("../../../bench/published.json");

/// The tables.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    peers: Vec<Table>,
    goals: Vec<Table>,
}

/// Microseconds a layer for one number of tokens.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    name: String,
    #[serde(default)]
    setting: Setting,
    /// It leaves out a part of the step.
    #[serde(default)]
    partial: bool,
    /// A goal for callers that promise early reads.
    #[serde(default)]
    early: bool,
    tokens: usize,
    requests: Vec<usize>,
    /// A time for each of `requests`, by heads.
    heads: BTreeMap<usize, Vec<f64>>,
}

impl Table {
    fn at(&self, size: Size) -> Option<f64> {
        // Both tables are of f32 states and low-rank lower-bound gates; records have the times of
        // checkpoints to beat.
        if size.bf16_state || size.projected_gate || size.softplus {
            return None;
        }
        let column = self.requests.iter().position(|&r| r == size.requests)?;
        let row = self.heads.get(&size.heads)?;
        (self.tokens == size.tokens).then(|| row[column])
    }
}

impl Published {
    /// The tables of the file.
    pub fn load() -> Published {
        serde_json::from_str(TEXT).expect("a test reads the same file")
    }

    /// The shortest public time of a whole step of this size. With a GEMM between layers, whichever
    /// way that is launched.
    pub fn public(&self, setting: Setting, size: Size) -> Option<f64> {
        let setting = match setting {
            Setting::Layers => Setting::Layers,
            Setting::Gemm | Setting::GemmProgrammatic => Setting::Gemm,
        };
        let tables = self.peers.iter();
        let whole = tables.filter(|table| table.setting == setting && !table.partial);
        whole
            .filter_map(|table| table.at(size))
            .min_by(f64::total_cmp)
    }

    /// The time that a cell should reach; goals are for layers that follow each other.
    pub fn goal(&self, cell: &Cell) -> Option<f64> {
        if cell.setting != Setting::Layers {
            return None;
        }
        let mut tables = self.goals.iter();
        tables.find_map(|table| {
            let time = table.at(cell.size)?;
            (table.early == cell.is_early()).then_some(time)
        })
    }

    /// Every public time of whole steps among layers: name, size, microseconds.
    pub fn points(&self) -> impl Iterator<Item = (&str, Size, f64)> {
        let whole = |table: &&Table| table.setting == Setting::Layers && !table.partial;
        self.peers.iter().filter(whole).flat_map(|table| {
            table.heads.iter().flat_map(move |(&heads, row)| {
                table.requests.iter().zip(row).map(move |(&requests, &us)| {
                    let size = Size {
                        heads,
                        tokens: table.tokens,
                        requests,
                        ..Size::default()
                    };
                    (table.name.as_str(), size, us)
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::timing::Times;
    use super::*;

    fn size(heads: usize, tokens: usize, requests: usize) -> Size {
        Size {
            heads,
            tokens,
            requests,
            ..Size::default()
        }
    }

    #[test]
    fn tables_are_whole() {
        let published = Published::load();
        for table in published.peers.iter().chain(&published.goals) {
            for row in table.heads.values() {
                assert_eq!(row.len(), table.requests.len(), "{}", table.name);
                assert!(row.is_sorted(), "{}", table.name);
            }
        }
        assert!(published.peers.iter().all(|table| !table.name.is_empty()));
        assert_eq!(published.points().count(), 54 + 4 + 4 + 12);
    }

    #[test]
    fn the_shortest_whole_step_counts() {
        let published = Published::load();
        let public = |setting, size| published.public(setting, size);
        assert_eq!(public(Setting::Layers, size(12, 1, 8)), Some(9.6));
        // No public time is of half the work, or of another gate.
        for other in [
            Size {
                bf16_state: true,
                ..size(12, 1, 8)
            },
            Size {
                projected_gate: true,
                ..size(12, 1, 8)
            },
            Size {
                softplus: true,
                ..size(12, 1, 8)
            },
        ] {
            assert_eq!(public(Setting::Layers, other), None);
        }
        assert_eq!(public(Setting::Layers, size(12, 1, 16)), Some(14.96));
        assert_eq!(public(Setting::Layers, size(96, 1, 256)), Some(1067.0));
        assert_eq!(public(Setting::Layers, size(12, 4, 64)), Some(117.0));
        assert_eq!(public(Setting::Layers, size(13, 1, 8)), None);
        assert_eq!(
            public(Setting::GemmProgrammatic, size(12, 1, 8)),
            Some(12.3)
        );
        assert_eq!(public(Setting::Gemm, size(12, 1, 16)), None);
    }

    #[test]
    fn goals_depend_on_the_promise() {
        let (median, min, p90) = (1.0, 1.0, 1.0);
        let goal = |size, mode: &str, setting| {
            let mut cell = Cell::new(size, mode, Times { median, min, p90 });
            cell.setting = setting;
            Published::load().goal(&cell)
        };
        let decode = size(12, 1, 128);
        assert_eq!(goal(decode, "m", Setting::Layers), Some(54.0));
        assert_eq!(goal(decode, "m+early", Setting::Layers), Some(53.4));
        assert_eq!(goal(decode, "m", Setting::Gemm), None);
        assert_eq!(goal(size(12, 8, 16), "m", Setting::Layers), Some(36.0));
        assert_eq!(goal(size(12, 8, 4), "m", Setting::Layers), None);
        assert_eq!(goal(size(6, 1, 1), "m", Setting::Layers), None);
    }
}
