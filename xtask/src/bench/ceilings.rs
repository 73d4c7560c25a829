//! What the machine allows, measured in the same run as the steps. Knows no step's arithmetic.

use std::error::Error;

use super::bare::Edge;
use super::layers::Layers;
use super::record::Ceiling;
use super::timing::{Timer, Times};

/// Name of the bare pass over a step's state.
pub const IN_PLACE: &str = "in-place";

/// Copy and read bandwidth, and the time of an empty node in a graph of `layers`.
///
/// # Errors
///
/// The driver's.
pub fn of_device(timer: &Timer, layers: usize) -> Result<Vec<Ceiling>, Box<dyn Error>> {
    let stream = |name: &str, (times, bytes): (Times, usize)| {
        Ceiling::new(name, times.median, Some(bytes as f64))
    };
    let mut ceilings = vec![
        stream("device copy", timer.copy()?),
        stream("read", timer.read()?),
    ];
    for (name, edge) in [("plain", Edge::Plain), ("programmatic", Edge::Programmatic)] {
        for (blocks, threads) in [(1, 32), (96, 128)] {
            let times = timer.graph(layers, || {
                (0..layers).try_for_each(|_| timer.bare.empty(timer.stream, blocks, threads, edge))
            })?;
            let name = format!("empty {name} {blocks}x{threads}");
            ceilings.push(Ceiling::new(&name, times.median, None));
        }
    }
    Ok(ceilings)
}

/// The bare in-place pass over the state of `layers`, whose contents it destroys.
///
/// # Errors
///
/// The driver's.
pub fn in_place(timer: &Timer, layers: &Layers) -> Result<Ceiling, Box<dyn Error>> {
    let times = timer.graph(layers.count(), || {
        (0..layers.count())
            .try_for_each(|layer| layers.enqueue_in_place(timer.stream, &timer.bare, layer))
    })?;
    let bytes = layers.size.state_bytes();
    let mut ceiling = Ceiling::new(IN_PLACE, times.median, Some(bytes));
    ceiling.size = Some(layers.size);
    Ok(ceiling)
}
